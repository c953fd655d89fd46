"""Saturated cells by their limits and brute force; QRNNs as weighted automata, and the states that one needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.counting import rational_recurrence, saturated_states
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig
from ln_probe.analyses.lab.counting.saturated_states import SaturatedLayer, drawn

LARGE = 1e4  # weights this many times larger are saturated to float64's rounding
HIDDEN = 3
DRAWN = [("qrnn+", 1), *((cell, layers) for cell in saturated_states.KNOWN if cell != "qrnn+" for layers in (1, 2))]


def words(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product((0, 1), repeat=length)


def final(net: list[saturated_states.SaturatedLayer], word: tuple[int, ...]) -> np.ndarray:
    state = saturated_states.start(net)
    for letter in word:
        state = saturated_states.advance(net, state, letter)
    return state[0]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_large_weights_saturate_torchs_cells(cell: str) -> None:
    makers = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN, "rnn_relu": torch.nn.RNN}
    options = {"nonlinearity": "relu"} if cell == "rnn_relu" else {}
    (layer,) = saturated_states.drawn(cell, 1, np.random.default_rng(3), HIDDEN)
    theirs = makers[cell](2, HIDDEN, batch_first=True, **options).double()
    scale = 1.0 if cell == "rnn_relu" else LARGE  # ReLU has no limit: it is taken as it is
    with torch.no_grad():
        for parameter, ours in zip(theirs.parameters(), (layer.W, layer.U, layer.b, 0 * layer.b), strict=True):
            parameter.copy_(torch.from_numpy(scale * ours))
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


def test_large_weights_saturate_the_laboratorys_qrnns() -> None:
    net = saturated_states.drawn("qrnn+", 1, np.random.default_rng(4), HIDDEN)
    model = RecurrentConfig("qrnn+", 2, 2, d_embed=2, hidden=HIDDEN).build().double()
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(2))
        for linear, ours in zip((model.layers[0].gates, model.plus), net, strict=True):
            linear.weight.copy_(torch.from_numpy(LARGE * ours.W))
            linear.bias.copy_(torch.from_numpy(LARGE * ours.b))
        model.out = torch.nn.Identity()  # so that it gives what the layer above the QRNN gives
        for word in words(6):
            state, x = saturated_states.start(net), np.zeros((1, 2))
            for letter in word:
                state, x = net[0].step(state, np.eye(2, dtype=int)[[letter]])
            tokens = torch.tensor([word])
            np.testing.assert_allclose(model.layers[0](model.embed(tokens))[0, -1], x[0], atol=1e-6)
            np.testing.assert_allclose(model(tokens)[0, -1], net[1].step(state[:, :0], x)[1][0], atol=1e-6)


@pytest.mark.parametrize(("cell", "layers"), DRAWN)
def test_states_by_brute_force(cell: str, layers: int) -> None:
    net = saturated_states.drawn(cell, layers, np.random.default_rng(5), HIDDEN)
    reached = saturated_states.reachable(net, 7)
    everywhere: set[tuple[int, ...]] = {tuple(saturated_states.start(net)[0])}
    for n in range(1, 8):
        there = {tuple(final(net, word)) for word in words(n)}
        everywhere |= there
        assert reached.counts[n - 1] == len(there), n
    if reached.settled:  # no state comes later
        assert saturated_states.closure(net, 1000) == len(everywhere)


def test_sets_that_come_back_go_on_as_they_were() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        net = saturated_states.drawn("gru", 2, rng, HIDDEN)
        reached, states = saturated_states.reachable(net, 60), saturated_states.start(net)
        assert reached.settled
        for count in reached.counts:  # without the short cut
            states = np.unique(np.vstack([saturated_states.advance(net, states, letter) for letter in (0, 1)]), axis=0)
            assert len(states) == count


@pytest.mark.parametrize("cell", ["lstm", "qrnn ifo"])
def test_a_counter_by_hand(cell: str) -> None:
    """c = #a - #b has n + 1 values after n letters, and every word of a's only has new ones."""
    pooled = cell == "qrnn ifo"
    W = np.zeros((4, 4 if pooled else 2))
    new = 0 if pooled else 2  # z, f, o, i of a QRNN; i, f, g, o of an LSTM
    W[new, :2] = 1, -1
    b = np.where(np.arange(4) == new, 0.0, 1.0)
    net = [saturated_states.SaturatedLayer(cell, W, np.zeros((4, 1)), b)]
    reached = saturated_states.reachable(net, 64)
    extra = 2 if pooled else 1  # a QRNN also keeps its last input: each count but the outermost with both
    np.testing.assert_array_equal(reached.counts, [n + 1 if extra == 1 else 2 * n for n in range(1, 65)])
    assert not reached.settled
    assert saturated_states.exponent(reached.counts, reached.settled) == pytest.approx(1.0, abs=0.05)
    assert saturated_states.closure(net, 100) is None
    assert np.isnan(saturated_states.exponent(np.full(2, float(saturated_states.CAP)), settled=False)), "capped at once"


def test_every_state_once() -> None:
    rng = np.random.default_rng(1)
    for size in (3, 2**40):  # the second does not fit into one number of 64 bits
        states = rng.integers(-size, size, size=(200, 4))
        states = np.vstack([states, states[::-1]])
        np.testing.assert_array_equal(np.unique(saturated_states.distinct(states), axis=0), np.unique(states, axis=0))
        np.testing.assert_array_equal(
            saturated_states.distinct(states), saturated_states.distinct(states[rng.permutation(len(states))])
        )


def test_a_relu_rnn_is_followed_exactly() -> None:
    doubling = [
        saturated_states.SaturatedLayer("rnn_relu", np.array([[1, 2]]), np.array([[2]]), np.array([0]))
    ]  # the word in digits 1, 2
    assert saturated_states.visited(doubling, (100,), np.random.default_rng(0)) == {100: 100}
    assert saturated_states.reachable(doubling, 10).counts.tolist() == [2.0**n for n in range(1, 11)]


def test_theory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DRAWS_QUICK": 3, "VISITED_QUICK": (16, 32), "LENGTHS_QUICK": (8, 16)}.items():
        monkeypatch.setattr(saturated_states, name, value)
    results = ran("saturated_states", tmp_path / "s", (0,))
    table = results.summary.set_index(["cell", "layers", "hidden", "measure", "length"])["mean"]
    growth = results.tables["growth"].set_index(["cell", "layers", "hidden", "measure"])["value"]
    for cell in saturated_states.CELLS:
        key = (cell.cell, cell.layers, cell.hidden)
        if cell.theory == saturated_states.CONSTANT:
            size = 3**cell.hidden  # what a layer can put out; a QRNN's state is that and what it was put in before
            remembered = (2, size) if cell.cell.startswith("qrnn") else (1, 1)
            bound = np.prod([size * remembered[layer] for layer in range(cell.layers)])
            assert table[(*key, "states, largest", 16)] <= bound
            assert table[(*key, "visited, largest", 32)] <= bound
            assert growth[(*key, "settled draws")] == 1.0
        elif (
            cell.theory == saturated_states.GROWS and cell.layers == 1
        ):  # c within ±16; o of each unit, or the last letter
            counts, beside = 33**cell.hidden, 2**cell.hidden if cell.cell == "lstm" else 2
            assert table[(*key, "states, largest", 16)] <= counts * beside
    assert growth["lstm", 1, 3, "exponent, largest"] > 0.9
    assert results.settings["draws"] == saturated_states.DRAWS_QUICK
    with pytest.raises(ValueError, match="unknown cell 'elman': known are rnn_tanh, rnn_relu, gru"):
        saturated_states.drawn("elman", 1, np.random.default_rng(0), HIDDEN)
    with pytest.raises(ValueError, match="layers and hidden must be at least 1, got 0 and 3"):
        saturated_states.drawn("gru", 0, np.random.default_rng(0), HIDDEN)


def test_a_counter_is_an_automaton() -> None:
    ones = np.ones((3, 2))
    counter = rational_recurrence.of_pooling(ones, ones * [1.0, -1.0], ones)
    word = np.random.default_rng(0).integers(2, size=300)
    np.testing.assert_array_equal(counter.weights(word), np.cumsum(1 - 2 * word))
    assert len(counter.start) == rational_recurrence.ENOUGH
    with pytest.raises(ValueError, match=r"must all be \[letters \+ 1, letters\], got \(3, 2\), \(2, 2\), \(3, 2\)"):
        rational_recurrence.of_pooling(ones, ones[:2], ones)


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


def test_states_that_an_automaton_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rational_recurrence, "FINITE", 200)
    W = np.zeros((4, 2))
    W[2] = 1, -1
    counter = [SaturatedLayer("lstm", W, np.zeros((4, 1)), np.array([1.0, 1.0, 0.0, 1.0]))]  # c = #a - #b
    assert rational_recurrence.hankel_ranks(counter, (1, 2, 4)) == {1: 2, 2: 2, 4: 2}
    assert np.isinf(rational_recurrence.states_enough(counter))
    rng = np.random.default_rng(4)
    for cell, layers in (("gru", 1), ("qrnn f", 1), ("qrnn fo", 2), ("qrnn ifo", 1)):
        net = drawn(cell, layers, rng, 3)
        ranks = rational_recurrence.hankel_ranks(net, (1, 3))
        assert ranks[1] <= ranks[3] <= rational_recurrence.states_enough(net) < np.inf


def test_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"WORDS": 1, "LENGTH": 40, "NETWORKS": 5, "DRAWS_QUICK": 2, "BLOCKS_QUICK": (1, 2), "FINITE": 100}
    for name, value in small.items():
        monkeypatch.setattr(rational_recurrence, name, value)
    cells = (("qrnn ifo", 1, 3), ("lstm", 1, 3), ("gru", 1, 3))
    monkeypatch.setattr(rational_recurrence, "CELLS", cells)
    results = ran("rational_recurrence", tmp_path / "r", (0,))
    assert results.tables["errors"]["value"].max() <= 1e-12
    assert results.settings["draws"] == rational_recurrence.DRAWS_QUICK
    with pytest.raises(ValueError, match="unknown pooling 'max': known are f, fo, ifo"):
        rational_recurrence.drawn_layer("max")
