"""QRNNs as weighted automata, and lower bounds of the states that one needs: known answers, and the experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab_runs import ran

from ln_probe.analyses.lab.counting import rational_recurrence
from ln_probe.analyses.lab.counting.rational_recurrence import (
    ENOUGH,
    EXACT,
    POOLINGS,
    hankel_ranks,
    largest_error,
    of_pooling,
    rank_at_least,
    states_enough,
)
from ln_probe.analyses.lab.counting.saturated_states import SaturatedLayer, advance, drawn, start


def test_a_counter_is_an_automaton() -> None:
    ones = np.ones((3, 2))
    counter = of_pooling(ones, ones * [1.0, -1.0], ones)
    word = np.random.default_rng(0).integers(2, size=300)
    np.testing.assert_array_equal(counter.weights(word), np.cumsum(1 - 2 * word))
    assert len(counter.start) == ENOUGH
    with pytest.raises(ValueError, match=r"must all be \[letters \+ 1, letters\], got \(3, 2\), \(2, 2\), \(3, 2\)"):
        of_pooling(ones, ones[:2], ones)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_qrnn_layer_is_its_automaton(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rational_recurrence, "WORDS", 2)
    assert largest_error(pooling, seed=7, networks=2) <= EXACT
    true = rational_recurrence.by_context

    def wrong(*layer: Any) -> object:  # one gate of one context a millionth off is seen
        keep, added, out = true(*layer)
        added[0, 1, 3] += 1e-6
        return keep, added, out

    monkeypatch.setattr(rational_recurrence, "by_context", wrong)
    assert largest_error(pooling, seed=7, networks=2) > 100 * EXACT


def test_a_saturated_qrnn_is_its_automaton_to_the_last_digit() -> None:
    rng = np.random.default_rng(2)
    for _ in range(5):
        (layer,) = drawn("qrnn ifo", 1, rng, 3)
        befores = np.vstack([np.eye(2), np.zeros((1, 2))])
        gates = np.array([[np.hstack([x, before]) @ layer.W.T + layer.b for x in np.eye(2)] for before in befores])
        z, f, o, i = np.split(gates, 4, axis=-1)
        word, state = rng.integers(2, size=200), start([layer])
        states = []
        for letter in word:
            state = advance([layer], state, int(letter))
            states.append(state[0, :3])
        for unit in range(3):
            keep, added = (f[..., unit] > 0).astype(float), ((i > 0) * np.sign(z))[..., unit]
            automaton = of_pooling(keep, added, np.ones_like(keep))
            np.testing.assert_array_equal(automaton.weights(word), np.array(states)[:, unit])
        assert o.shape == z.shape


def test_ranks_of_known_matrices() -> None:
    rng = np.random.default_rng(3)
    for rank in (1, 4, 9):
        matrix = rng.integers(-9, 10, size=(20, rank)) @ rng.integers(-9, 10, size=(rank, 15))
        assert rank_at_least(matrix) == np.linalg.matrix_rank(matrix.astype(float)) == rank
    place = np.arange(-6, 7)
    assert rank_at_least(np.abs(place[:, None] + place)) == 13, "|#a - #b| needs as many states as counts it may meet"
    assert rank_at_least(place[:, None] + place) == 2
    assert rank_at_least(np.zeros((3, 3), dtype=int)) == 0


def test_states_that_an_automaton_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rational_recurrence, "FINITE", 200)
    W = np.zeros((4, 2))
    W[2] = 1, -1
    counter = [SaturatedLayer("lstm", W, np.zeros((4, 1)), np.array([1.0, 1.0, 0.0, 1.0]))]  # c = #a - #b
    assert hankel_ranks(counter, (1, 2, 4)) == {1: 2, 2: 2, 4: 2}
    assert np.isinf(states_enough(counter))
    rng = np.random.default_rng(4)
    for cell, layers in (("gru", 1), ("qrnn f", 1), ("qrnn fo", 2), ("qrnn ifo", 1)):
        net = drawn(cell, layers, rng, 3)
        ranks = hankel_ranks(net, (1, 3))
        assert ranks[1] <= ranks[3] <= states_enough(net) < np.inf


def test_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"WORDS": 1, "LENGTH": 40, "NETWORKS": 5, "DRAWS_QUICK": 2, "BLOCKS_QUICK": (1, 2), "FINITE": 100}
    for name, value in small.items():
        monkeypatch.setattr(rational_recurrence, name, value)
    cells = (("qrnn ifo", 1, 3), ("lstm", 1, 3), ("gru", 1, 3))
    monkeypatch.setattr(rational_recurrence, "CELLS", cells)
    results = ran("rational_recurrence", tmp_path / "r", (0,))
    assert results.tables["errors"]["value"].max() <= EXACT
    told = "\n".join(results.conclusions)
    assert "A QRNN layer with fo-pooling is its automaton: largest difference" in told
    assert "qrnn ifo, layers: 1, hidden units: 3: Hankel rank of the worst draw" in told
    assert "automaton of 14 states is enough for every draw" in told
    with pytest.raises(ValueError, match="unknown pooling 'max': known are f, fo, ifo"):
        rational_recurrence.drawn_layer("max")
