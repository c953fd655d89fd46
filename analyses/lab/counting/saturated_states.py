"""How many states can a saturated recurrent cell be in after n letters?

Merrill et al. (2020, "A Formal Hierarchy of RNN Architectures", sections 2 and 3) look at the limit of large weights,
in which a sigmoid is 0 or 1 and a tanh -1, 0 or 1. A saturated Elman RNN, GRU and QRNN with f- or fo-pooling have a
bounded number of states; an LSTM, and a QRNN with ifo-pooling, have polynomially many, at most as length
to the power of their counters. No training: weights are drawn, and every state that a word over {a, b} reaches is
counted.

    rnn_tanh    h = sign(W x + U h + b)
    gru         h = z h + (1 - z) sign(W x + U (r h) + b), r and z 0 or 1
    lstm        c = f c + i sign(…), h = o tanh(c): c is no product of weights, so its tanh does not saturate
    qrnn f      c = f c + (1 - f) z, out = c          gates of the last two inputs (Bradbury et al. 2017)
    qrnn fo     the same, out = o c
    qrnn ifo    c = f c + i z, out = o c
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped
from matplotlib.figure import Figure

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, line_panels, select, summarize

LETTERS = 2
CAP = 50_000  # states; more of them take minutes, and have grown beyond doubt
POOLED = ("qrnn f", "qrnn fo", "qrnn ifo")
_GATES = {"rnn_tanh": 1, "gru": 3, "qrnn f": 2, "qrnn fo": 3, "qrnn ifo": 4, "lstm": 4}
States = Shaped[np.ndarray, "state number"]


@dataclass(frozen=True)
class SaturatedLayer:
    """One layer with given weights; its state is a row of whole numbers.

    Attributes:
        cell: its kind. W: of its inputs, those of the step before appended for a QRNN (window 2). U: recurrent.
        b: bias.
    """

    cell: str
    W: Shaped[np.ndarray, "gate input"]
    U: Shaped[np.ndarray, "gate hidden"]
    b: Shaped[np.ndarray, " gate"]

    @property
    def size(self) -> int:
        """Numbers in its state: h; of an LSTM c, and sign(h); of a QRNN c, and the input before."""
        hidden, inputs = int(self.U.shape[1]), int(self.W.shape[1])
        if self.cell == "lstm":
            return 2 * hidden
        return hidden + (inputs // 2 if self.cell in POOLED else 0)

    def step(
        self, state: States, x: Shaped[np.ndarray, "state input"]
    ) -> tuple[States, Shaped[np.ndarray, "state hidden"]]:
        """The next state and what the layer puts out, for every row."""
        H = self.U.shape[1]
        if self.cell in POOLED:
            return self._pool(state, x)
        h = state[:, -H:]
        if self.cell == "lstm":
            h = np.where(h != 0, np.tanh(state[:, :H].astype(float)), 0.0)
        given, recurrent = x @ self.W.T + self.b, h @ self.U.T
        if self.cell == "rnn_tanh":
            out = np.sign(given + recurrent).astype(int)
            return out, out
        if self.cell == "gru":
            reset, keep = ((given + recurrent)[:, k * H : (k + 1) * H] > 0 for k in (0, 1))
            new = np.sign(given[:, 2 * H :] + (reset * h) @ self.U[2 * H :].T)
            out = (keep * h + ~keep * new).astype(int)
            return out, out
        i, f, o = ((given + recurrent)[:, k * H : (k + 1) * H] > 0 for k in (0, 1, 3))
        c = (f * state[:, :H] + i * np.sign((given + recurrent)[:, 2 * H : 3 * H])).astype(int)
        return np.hstack([c, (o * np.sign(c)).astype(int)]), o * np.tanh(c)

    def _pool(
        self, state: States, x: Shaped[np.ndarray, "state input"]
    ) -> tuple[States, Shaped[np.ndarray, "state hidden"]]:
        H = self.U.shape[1]
        c, before = state[:, :H], state[:, H:]
        gates = np.hstack([x, before]) @ self.W.T + self.b
        z, f = np.sign(gates[:, :H]), gates[:, H : 2 * H] > 0
        i = gates[:, 3 * H :] > 0 if self.cell == "qrnn ifo" else ~f
        c = (f * c + i * z).astype(int)
        out = c if self.cell == "qrnn f" else (gates[:, 2 * H : 3 * H] > 0) * c
        return np.hstack([c, x]), out


def drawn(cell: str, layers: int, rng: np.random.Generator, hidden: int) -> list[SaturatedLayer]:
    """Layers with normal weights."""
    net: list[SaturatedLayer] = []
    for _ in range(layers):
        gates, inputs = _GATES[cell] * hidden, (hidden if net else LETTERS) * (2 if cell in POOLED else 1)
        W, U, b = (rng.standard_normal(shape) for shape in ((gates, inputs), (gates, hidden), (gates,)))
        net.append(SaturatedLayer(cell, W, U, b))
    return net


def advance(layers: list[SaturatedLayer], states: States, letter: int) -> States:
    """The states after one more letter, 0 or 1, for every row."""
    x = np.tile(np.eye(LETTERS, dtype=int)[letter], (len(states), 1))
    after, at = [], 0
    for layer in layers:
        state, x = layer.step(states[:, at : at + layer.size], x)
        after.append(state)
        at += layer.size
    return np.hstack(after)


def start(layers: list[SaturatedLayer]) -> States:
    """The state before any letter."""
    return np.zeros((1, sum(layer.size for layer in layers)), dtype=int)


def reachable(layers: list[SaturatedLayer], longest: int) -> tuple[Float[np.ndarray, " length"], bool]:
    """Return the number of states after all words of length 1 … `longest`, and whether they repeat for ever.

    The set after n + 1 letters is a function of the set after n: once a set comes back, all lengths are known. Counts
    are CAP from where there are more.
    """
    states, counts, lengths = start(layers), list[int](), dict[bytes, int]()
    for length in range(1, longest + 1):
        states = distinct(np.vstack([advance(layers, states, letter) for letter in range(LETTERS)]))
        if len(states) >= CAP:
            return np.array(counts + [CAP] * (longest - len(counts)), dtype=float), False
        key = hashlib.sha256(states.tobytes()).digest()
        if key in lengths:
            period = counts[lengths[key] - 1 :]
            rest = [period[k % len(period)] for k in range(longest - len(counts))]
            return np.array(counts + rest, dtype=float), True
        lengths[key] = length
        counts.append(len(states))
    return np.array(counts, dtype=float), False


def distinct(states: States) -> Shaped[np.ndarray, "kept number"]:
    """Every row once, in an order that the set alone decides."""
    low = states.min(axis=0)
    spans = states.max(axis=0) - low + 1
    if np.prod(spans.astype(float)) >= 2.0**62:  # their numbering would not fit into 64 bits
        return np.asarray(np.unique(states, axis=0))
    place = np.concatenate([[1], np.cumprod(spans[:-1])])
    _, first = np.unique((states - low) @ place, return_index=True)
    return np.asarray(states[first])


def exponent(counts: Float[np.ndarray, " length"], settled: bool) -> float:
    """The power of the length with which the number of states grows: the slope of log count over log length.

    By least squares over the last two doublings below CAP, where what a cell does at first matters least. 0 if the set
    of states comes back, NaN if fewer than two lengths lie there (CAP is reached at once).
    """
    if settled:
        return 0.0
    end = int((counts < CAP).sum())
    lengths = np.arange(max(1, end // 4), end + 1)
    if len(lengths) < 2:
        return float("nan")
    return float(np.polyfit(np.log(lengths), np.log(counts[lengths - 1]), 1)[0])


CONSTANT, GROWS = "constant", "grows"


@dataclass(frozen=True)
class Cell:
    """What is drawn, what theory says of the number of its states, and the longest words all of which are tried."""

    cell: str
    layers: int
    hidden: int
    theory: str
    longest: int


CELLS = (
    *(Cell(cell, n, 3, CONSTANT, 2048) for cell in ("rnn_tanh", "gru", "qrnn f", "qrnn fo") for n in (1, 2)),
    *(
        Cell(cell, layers, hidden, GROWS, longest)
        for cell in ("qrnn ifo", "lstm")
        for layers, hidden, longest in ((1, 1, 2048), (1, 2, 256), (1, 3, 128), (2, 3, 64))
    ),
)
DRAWS, DRAWS_QUICK = 50, 6  # of weights, per seed; of 50 LSTMs with one unit a few count, of 10 often none
LENGTHS, LENGTHS_QUICK = (8, 16, 32, 64, 128, 256, 512, 1024, 2048), (8, 16, 32)  # of `states`
KEYS = ("cell", "layers", "hidden", "theory", "measure")
EXPONENT, SETTLED, COUNTING = "exponent", "settled draws", "growing draws"
GROWING = 0.5  # an exponent above it counts as growth: exponents come out near whole numbers


def run(request: Request) -> Results:
    """Draw cells, and count the states that words reach."""
    counts, growth = [], []
    draws = DRAWS_QUICK if request.quick else DRAWS
    for seed, (number, cell) in itertools.product(request.seeds, enumerate(CELLS)):
        rng = np.random.default_rng([seed, number])
        named = (cell.cell, cell.layers, cell.hidden, cell.theory)
        lengths = [n for n in (LENGTHS_QUICK if request.quick else LENGTHS) if n <= cell.longest]
        reached = [reachable(drawn(cell.cell, cell.layers, rng, cell.hidden), max(lengths)) for _ in range(draws)]
        for length in lengths:
            all_of = [count[length - 1] for count, _ in reached]
            for name, value in (("largest", max(all_of)), ("median", np.median(all_of))):
                counts.append((*named, f"states, {name}", length, seed, float(value)))
        powers = np.array([exponent(*one) for one in reached])
        known = powers[~np.isnan(powers)]
        growth += [
            (*named, f"{EXPONENT}, largest", seed, known.max() if len(known) else np.nan),
            (*named, f"{EXPONENT}, median", seed, float(np.median(known)) if len(known) else np.nan),
            (*named, SETTLED, seed, float(np.mean([settled for _, settled in reached]))),
            (*named, COUNTING, seed, float((known > GROWING).mean()) if len(known) else np.nan),
        ]
    values = pd.DataFrame(counts, columns=[*KEYS, "length", "seed", "value"])
    tables = analyse(values, pd.DataFrame(growth, columns=[*KEYS, "seed", "value"]))
    return Results(tables, plot(tables), {"draws": draws, "cap": CAP})


def analyse(values: pd.DataFrame, growth: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary of counts (with `length`; geometric means over seeds), and the exponents."""
    exponents = summarize(growth, KEYS, shares=(SETTLED, COUNTING)).drop(columns="published")
    summary = summarize(values, [*KEYS, "length"], kind="log")
    return {"summary": summary, "values": values, "growth": growth, "exponents": exponents}


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Distinct states over length, the largest draw of every cell."""
    largest = select(tables["summary"], measure="states, largest")
    named = largest.assign(line=largest["cell"] + largest["layers"].map(", {} × ".format) + largest["hidden"].map(str))
    axes: dict[str, Any] = {"xscale": "log", "yscale": "log", "ylabel": "distinct states after all words"}
    return {"states": line_panels(named, ["theory"], "length", "line", published=False, **axes)}
