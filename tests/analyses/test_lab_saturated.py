"""Saturated cells: the limit of torch's own cells, counted by brute force, and what theory says of the counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ln_probe.analyses.lab.counting import saturated_states
from ln_probe.analyses.lab.counting.saturated_states import (
    CELLS,
    CONSTANT,
    GROWS,
    HIDDEN,
    SaturatedLayer,
    advance,
    drawn,
    reachable,
    start,
)
from ln_probe.analyses.lab.experiments import Request, run

LARGE = 1e4  # weights this many times larger are saturated to float64's rounding


def words(length: int) -> Iterator[tuple[int, ...]]:
    return itertools.product((0, 1), repeat=length)


def final(net: list[SaturatedLayer], word: tuple[int, ...]) -> np.ndarray:
    state = start(net)
    for letter in word:
        state = advance(net, state, letter)
    return state[0]


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_large_weights_saturate_torchs_cells(cell: str) -> None:
    made = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "rnn_tanh": torch.nn.RNN}[cell]
    (layer,) = drawn(cell, 1, np.random.default_rng(3))
    theirs = made(2, HIDDEN, batch_first=True).double()
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


@pytest.mark.parametrize(("cell", "layers"), [(cell, layers) for cell, layers, _ in CELLS])
def test_states_by_brute_force(cell: str, layers: int) -> None:
    net = drawn(cell, layers, np.random.default_rng(5))
    assert reachable(net, (3, 6)) == {n: len({tuple(final(net, word)) for word in words(n)}) for n in (3, 6)}


def test_theory(tmp_path: Path) -> None:
    results = run("saturated_states", Request(tmp_path / "s", (0,), quick=True), command="", ln_probe_version="0")
    table = results.summary[results.summary["measure"] == "visited, largest"]
    table = table.set_index(["cell", "layers", "length"])["mean"]
    bound = 3**HIDDEN
    for cell, layers, theory in CELLS:
        if theory == GROWS:
            assert table[cell, layers, 128] > 1.2 * table[cell, layers, 64]
        else:
            assert theory == CONSTANT
            assert table[cell, layers, 128] <= (bound * (2 if cell.startswith("qrnn") else 1)) ** layers
    assert len(results.conclusions) == len(CELLS)
    with pytest.raises(ValueError, match="unknown cell 'elman': known are rnn_tanh, gru"):
        drawn("elman", 1, np.random.default_rng(0))
    with pytest.raises(ValueError, match="layers and hidden must be at least 1, got 0 and 3"):
        drawn("gru", 0, np.random.default_rng(0))
    assert saturated_states.DRAWS % 5 == 0
