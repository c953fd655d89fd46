"""Saturated cells: the limit of torch's and the laboratory's own, counted by brute force, and what theory says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.counting import saturated_states
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig
from ln_probe.analyses.lab.counting.saturated_states import (
    CAP,
    CELLS,
    CONSTANT,
    GROWS,
    KNOWN,
    SaturatedLayer,
    advance,
    closure,
    distinct,
    drawn,
    exponent,
    reachable,
    start,
    visited,
)

LARGE = 1e4  # weights this many times larger are saturated to float64's rounding
HIDDEN = 3
DRAWN = [("qrnn+", 1), *((cell, layers) for cell in KNOWN if cell != "qrnn+" for layers in (1, 2))]


def words(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product((0, 1), repeat=length)


def final(net: list[SaturatedLayer], word: tuple[int, ...]) -> np.ndarray:
    state = start(net)
    for letter in word:
        state = advance(net, state, letter)
    return state[0]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_large_weights_saturate_torchs_cells(cell: str) -> None:
    makers = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN, "rnn_relu": torch.nn.RNN}
    options = {"nonlinearity": "relu"} if cell == "rnn_relu" else {}
    (layer,) = drawn(cell, 1, np.random.default_rng(3), HIDDEN)
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
    net = drawn("qrnn+", 1, np.random.default_rng(4), HIDDEN)
    model = RecurrentConfig("qrnn+", 2, 2, d_embed=2, hidden=HIDDEN).build().double()
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(2))
        for linear, ours in zip((model.layers[0].gates, model.plus), net, strict=True):
            linear.weight.copy_(torch.from_numpy(LARGE * ours.W))
            linear.bias.copy_(torch.from_numpy(LARGE * ours.b))
        model.out = torch.nn.Identity()  # so that it gives what the layer above the QRNN gives
        for word in words(6):
            state, x = start(net), np.zeros((1, 2))
            for letter in word:
                state, x = net[0].step(state, np.eye(2, dtype=int)[[letter]])
            tokens = torch.tensor([word])
            np.testing.assert_allclose(model.layers[0](model.embed(tokens))[0, -1], x[0], atol=1e-6)
            np.testing.assert_allclose(model(tokens)[0, -1], net[1].step(state[:, :0], x)[1][0], atol=1e-6)


@pytest.mark.parametrize(("cell", "layers"), DRAWN)
def test_states_by_brute_force(cell: str, layers: int) -> None:
    net = drawn(cell, layers, np.random.default_rng(5), HIDDEN)
    reached = reachable(net, 7)
    everywhere: set[tuple[int, ...]] = {tuple(start(net)[0])}
    for n in range(1, 8):
        there = {tuple(final(net, word)) for word in words(n)}
        everywhere |= there
        assert reached.counts[n - 1] == len(there), n
    if reached.settled:  # no state comes later
        assert closure(net, 1000) == len(everywhere)


def test_sets_that_come_back_go_on_as_they_were() -> None:
    rng = np.random.default_rng(0)
    for _ in range(5):
        net = drawn("gru", 2, rng, HIDDEN)
        reached, states = reachable(net, 60), start(net)
        assert reached.settled
        for count in reached.counts:  # without the short cut
            states = np.unique(np.vstack([advance(net, states, letter) for letter in (0, 1)]), axis=0)
            assert len(states) == count


@pytest.mark.parametrize("cell", ["lstm", "qrnn ifo"])
def test_a_counter_by_hand(cell: str) -> None:
    """c = #a - #b has n + 1 values after n letters, and every word of a's only has new ones."""
    pooled = cell == "qrnn ifo"
    W = np.zeros((4, 4 if pooled else 2))
    new = 0 if pooled else 2  # z, f, o, i of a QRNN; i, f, g, o of an LSTM
    W[new, :2] = 1, -1
    b = np.where(np.arange(4) == new, 0.0, 1.0)
    net = [SaturatedLayer(cell, W, np.zeros((4, 1)), b)]
    reached = reachable(net, 64)
    extra = 2 if pooled else 1  # a QRNN also keeps its last input: each count but the outermost with both
    np.testing.assert_array_equal(reached.counts, [n + 1 if extra == 1 else 2 * n for n in range(1, 65)])
    assert not reached.settled
    assert exponent(reached.counts, reached.settled) == pytest.approx(1.0, abs=0.05)
    assert closure(net, 100) is None


def test_exponents_of_known_growth() -> None:
    n = np.arange(1, 401)
    assert exponent(2.0 * n**2, settled=False) == pytest.approx(2.0, abs=1e-9)
    assert exponent(np.minimum(n**3.0, CAP), settled=False) == pytest.approx(3.0, abs=1e-9), (
        "what is capped is left out"
    )
    assert exponent(np.full(400, 7.0), settled=True) == 0.0
    assert np.isnan(exponent(np.array([float(CAP), CAP]), settled=False))


def test_every_state_once() -> None:
    rng = np.random.default_rng(1)
    for size in (3, 2**40):  # the second does not fit into one number of 64 bits
        states = rng.integers(-size, size, size=(200, 4))
        states = np.vstack([states, states[::-1]])
        np.testing.assert_array_equal(np.unique(distinct(states), axis=0), np.unique(states, axis=0))
        np.testing.assert_array_equal(distinct(states), distinct(states[rng.permutation(len(states))]))


def test_a_relu_rnn_is_followed_exactly() -> None:
    doubling = [
        SaturatedLayer("rnn_relu", np.array([[1, 2]]), np.array([[2]]), np.array([0]))
    ]  # the word in digits 1, 2
    assert visited(doubling, (100,), np.random.default_rng(0)) == {100: 100}
    assert reachable(doubling, 10).counts.tolist() == [2.0**n for n in range(1, 11)]


def test_theory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DRAWS_QUICK": 3, "VISITED_QUICK": (16, 32), "LENGTHS_QUICK": (8, 16)}.items():
        monkeypatch.setattr(saturated_states, name, value)
    results = ran("saturated_states", tmp_path / "s", (0,))
    table = results.summary.set_index(["cell", "layers", "hidden", "measure", "length"])["mean"]
    growth = results.tables["growth"].set_index(["cell", "layers", "hidden", "measure"])["value"]
    for cell in CELLS:
        key = (cell.cell, cell.layers, cell.hidden)
        if cell.theory == CONSTANT:
            size = 3**cell.hidden  # what a layer can put out; a QRNN's state is that and what it was put in before
            remembered = (2, size) if cell.cell.startswith("qrnn") else (1, 1)
            bound = np.prod([size * remembered[layer] for layer in range(cell.layers)])
            assert table[(*key, "states, largest", 16)] <= bound
            assert table[(*key, "visited, largest", 32)] <= bound
            assert growth[(*key, "settled draws")] == 1.0
        elif cell.theory == GROWS and cell.layers == 1:  # c within ±16; o of each unit, or the last letter
            counts, beside = 33**cell.hidden, 2**cell.hidden if cell.cell == "lstm" else 2
            assert table[(*key, "states, largest", 16)] <= counts * beside
    assert growth["lstm", 1, 3, "exponent, largest"] > 0.9
    assert len(results.conclusions) == len(CELLS)
    with pytest.raises(ValueError, match="unknown cell 'elman': known are rnn_tanh, rnn_relu, gru"):
        drawn("elman", 1, np.random.default_rng(0), HIDDEN)
    with pytest.raises(ValueError, match="layers and hidden must be at least 1, got 0 and 3"):
        drawn("gru", 0, np.random.default_rng(0), HIDDEN)
