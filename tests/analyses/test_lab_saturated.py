"""Saturated cells by their limits and brute force; QRNNs as weighted automata, and ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab_models import ran

from ln_probe.analyses.lab.counting import rational_recurrence, saturated_states

LARGE = 1e4  # weights this many times larger are saturated to float64's rounding
HIDDEN = 3
DRAWN = [(cell, layers) for cell in saturated_states._GATES for layers in (1, 2)]


def words(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product((0, 1), repeat=length)


def final(net: list[saturated_states.SaturatedLayer], word: tuple[int, ...]) -> np.ndarray:
    state = saturated_states.start(net)
    for letter in word:
        state = saturated_states.advance(net, state, letter)
    return state[0]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_large_weights_saturate_torchs_cells(cell: str) -> None:
    makers = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}
    (layer,) = saturated_states.drawn(cell, 1, np.random.default_rng(3), HIDDEN)
    theirs = makers[cell](2, HIDDEN, batch_first=True).double()
    with torch.no_grad():
        for parameter, ours in zip(theirs.parameters(), (layer.W, layer.U, layer.b, 0 * layer.b), strict=True):
            parameter.copy_(torch.from_numpy(LARGE * ours))
        for word in words(6):
            out, last = theirs(torch.eye(2, dtype=torch.float64)[list(word)][None])
            state = final([layer], word)
            np.testing.assert_allclose(out[0, -1], _seen(cell, state), atol=1e-6)
            if cell == "lstm":
                np.testing.assert_allclose(last[1][0, 0], state[:HIDDEN], atol=1e-6)


def _seen(cell: str, state: np.ndarray) -> np.ndarray:
    """What torch's cell puts out in that state: an LSTM's tanh of c is not of weights, so it is not saturated there."""
    if cell != "lstm":
        return state
    c, h = state[:HIDDEN], state[HIDDEN:]
    return np.where(h != 0, np.tanh(c), 0.0)


@pytest.mark.parametrize(("cell", "layers"), DRAWN)
def test_states_by_brute_force(cell: str, layers: int) -> None:
    net = saturated_states.drawn(cell, layers, np.random.default_rng(5), HIDDEN)
    counts, _ = saturated_states.reachable(net, 7)
    for n in range(1, 8):
        assert counts[n - 1] == len({tuple(final(net, word)) for word in words(n)}), n


@pytest.mark.parametrize("cell", ["lstm", "qrnn ifo"])
def test_a_counter_by_hand(cell: str) -> None:
    """c = #a - #b has n + 1 values after n letters, and every word of a's only has new ones."""
    pooled = cell == "qrnn ifo"
    W = np.zeros((4, 4 if pooled else 2))
    new = 0 if pooled else 2  # z, f, o, i of a QRNN; i, f, g, o of an LSTM
    W[new, :2] = 1, -1
    b = np.where(np.arange(4) == new, 0.0, 1.0)
    net = [saturated_states.SaturatedLayer(cell, W, np.zeros((4, 1)), b)]
    counts, settled = saturated_states.reachable(net, 64)
    extra = 2 if pooled else 1  # a QRNN also keeps its last input: each count but the outermost with both
    np.testing.assert_array_equal(counts, [n + 1 if extra == 1 else 2 * n for n in range(1, 65)])
    assert not settled
    assert saturated_states.exponent(counts, settled) == pytest.approx(1.0, abs=0.05)
    assert np.isnan(saturated_states.exponent(np.full(2, float(saturated_states.CAP)), settled=False)), "capped at once"


def test_a_counter_is_an_automaton() -> None:
    ones = np.ones((3, 2))
    counter = rational_recurrence.of_pooling(ones, ones * [1.0, -1.0], ones)
    word = np.random.default_rng(0).integers(2, size=300)
    np.testing.assert_array_equal(counter.weights(word), np.cumsum(1 - 2 * word))


@pytest.mark.parametrize("pooling", rational_recurrence.POOLINGS)
def test_a_qrnn_layer_is_its_automaton(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rational_recurrence, "WORDS", 2)
    assert rational_recurrence.largest_error(pooling, seed=7, networks=2) <= 1e-12
    true = rational_recurrence.by_context

    def wrong(*layer: Any) -> object:  # one gate of one context a millionth off is seen
        keep, added, out = true(*layer)
        added[0, 1, 3] += 1e-6
        return keep, added, out

    monkeypatch.setattr(rational_recurrence, "by_context", wrong)
    assert rational_recurrence.largest_error(pooling, seed=7, networks=2) > 100 * 1e-12


def test_ranks_of_known_matrices() -> None:
    rng = np.random.default_rng(3)
    for rank in (1, 4, 9):
        matrix = rng.integers(-9, 10, size=(20, rank)) @ rng.integers(-9, 10, size=(rank, 15))
        assert rational_recurrence.rank_at_least(matrix) == np.linalg.matrix_rank(matrix.astype(float)) == rank
    place = np.arange(-6, 7)
    assert rational_recurrence.rank_at_least(np.abs(place[:, None] + place)) == 13, (
        "|#a - #b| needs as many states as counts it may meet"
    )
    assert rational_recurrence.rank_at_least(place[:, None] + place) == 2
    assert rational_recurrence.rank_at_least(np.zeros((3, 3), dtype=int)) == 0


def test_states_beyond_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter has n + 1 states after n letters: growth is measured below the cap alone."""
    monkeypatch.setattr(saturated_states, "CAP", 10)
    W = np.zeros((4, 2))
    W[2] = 1, -1
    layer = saturated_states.SaturatedLayer("lstm", W, np.zeros((4, 1)), np.array([1.0, 1, 0, 1]))
    counts, settled = saturated_states.reachable([layer], 20)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(2, 22), 10))
    assert not settled
    lengths = np.arange(2, 9)
    slope = np.polyfit(np.log(lengths), np.log(lengths + 1), 1)[0]
    assert saturated_states.exponent(counts, settled) == pytest.approx(slope)
    far = np.array([[0, 2**40], [2**40, -(2**40)], [0, 2**40], [1, 0]])
    assert sorted(map(tuple, saturated_states.distinct(far).tolist())) == sorted({*map(tuple, far.tolist())})


def test_growth_is_that_of_the_largest_and_the_median_draw(tmp_path: Path) -> None:
    tables = ran("saturated_states", tmp_path, (0,)).tables
    assert sorted({*tables["values"]["length"]}) == [8, 16, 32]
    cell = ["theory", "cell", "layers", "hidden"]
    growth = tables["growth"].pivot_table(index=cell, columns="measure", values="value")
    assert len(growth) == len(saturated_states.CELLS)
    assert (growth.loc[saturated_states.CONSTANT] == [0, 0, 0, 1]).all(axis=None), "exponents, growing, settled draws"
    grows = growth.loc[saturated_states.GROWS]
    assert (grows["exponent, median"] <= grows["exponent, largest"]).all()
    assert ((grows["exponent, largest"] > 0.5) == (grows["growing draws"] > 0)).all()
    assert (grows["growing draws"] + grows["settled draws"] <= 1).all()
