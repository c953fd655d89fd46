"""Every recurrent cell of the laboratory in the limit of large weights, its state a row of whole numbers.

In that limit (Merrill et al. 2020, "A Formal Hierarchy of RNN Architectures", section 2) a sigmoid is 0 or 1 and a
tanh -1, 0 or 1:

    rnn_tanh    h = sign(W x + U h + b)
    gru         h = z h + (1 - z) sign(W x + U (r h) + b), r and z 0 or 1
    lstm        c = f c + i sign(…), h = o tanh(c): c is no product of weights, so its tanh does not saturate
    qrnn f      c = f c + (1 - f) z, out = c          gates of the last two inputs (Bradbury et al. 2017)
    qrnn fo     the same, out = o c                   the laboratory's
    qrnn ifo    c = f c + i z, out = o c
    qrnn+       qrnn fo under a layer of sigmoids, 0 or 1, which has no state of its own
    rnn_relu    h = max(0, W x + U h + b)

ReLU has no such limit: with weights λ times as large an output is λ times as large, not saturated. A ReLU-RNN is taken
as it is instead, with weights drawn from -1, 0 and 1, so that its state is whole numbers too, of any size.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

LETTERS = 2
CAP = 50_000  # states; more of them take minutes, and have grown beyond doubt
POOLED = ("qrnn f", "qrnn fo", "qrnn ifo")
PLUS = "plus"  # the stateless layer above a QRNN that makes it a QRNN+
_GATES = {"rnn_tanh": 1, "rnn_relu": 1, "gru": 3, "qrnn f": 2, "qrnn fo": 3, "qrnn ifo": 4, PLUS: 1, "lstm": 4}
_STACKS = {"qrnn+": ("qrnn fo", PLUS)}  # cells that are layers of several kinds
KNOWN = (*(cell for cell in _GATES if cell != PLUS), *_STACKS)
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
        """Numbers in its state: h; of an LSTM c, and sign(h); of a QRNN c, and the input before; none above a QRNN."""
        hidden, inputs = int(self.U.shape[1]), int(self.W.shape[1])
        if self.cell == PLUS:
            return 0
        if self.cell == "lstm":
            return 2 * hidden
        return hidden + (inputs // 2 if self.cell in POOLED else 0)

    def step(
        self, state: States, x: Shaped[np.ndarray, "state input"]
    ) -> tuple[States, Shaped[np.ndarray, "state hidden"]]:
        """The next state and what the layer puts out, for every row."""
        H = self.U.shape[1]
        if self.cell == PLUS:
            return state, (x @ self.W.T + self.b > 0).astype(int)
        if self.cell in POOLED:
            return self._pool(state, x)
        h = state[:, -H:]
        if self.cell == "lstm":
            h = np.where(h != 0, np.tanh(state[:, :H].astype(float)), 0.0)
        given, recurrent = x @ self.W.T + self.b, h @ self.U.T
        if self.cell == "rnn_relu":
            out = np.maximum(given + recurrent, 0)
            return out, out
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
    """Layers with normal weights (a ReLU-RNN's: -1, 0 or 1).

    Raises:
        ValueError: an unknown cell, sizes below 1.
    """
    if cell not in KNOWN:
        raise ValueError(f"unknown cell {cell!r}: known are {', '.join(KNOWN)}")
    if layers < 1 or hidden < 1:
        raise ValueError(f"layers and hidden must be at least 1, got {layers} and {hidden}")
    below, *above = _STACKS.get(cell, (cell,))
    made: list[SaturatedLayer] = []
    for kind in (*(below,) * layers, *above):
        gates = _GATES[kind] * hidden
        inputs = (hidden if made else LETTERS) * (2 if kind in POOLED else 1)
        made.append(SaturatedLayer(kind, *(_weights(kind, s, rng) for s in ((gates, inputs), (gates, hidden), gates))))
    return made


def _weights(kind: str, shape: Any, rng: np.random.Generator) -> Any:
    return rng.integers(-1, 2, size=shape) if kind == "rnn_relu" else rng.standard_normal(shape)


def advance(layers: list[SaturatedLayer], states: States, letter: int) -> States:
    """The states after one more letter, 0 or 1, for every row."""
    x = np.tile(np.eye(LETTERS, dtype=int)[letter], (len(states), 1))
    after, at = [], 0
    for layer in layers:
        state, x = layer.step(states[:, at : at + layer.size], x)
        after.append(state)
        at += layer.size
    return np.hstack(after)


def start(layers: list[SaturatedLayer], dtype: Any = int) -> States:
    """The state before any letter."""
    return np.zeros((1, sum(layer.size for layer in layers)), dtype=dtype)


@dataclass(frozen=True)
class Reached:
    """How many states there are after all words of each length.

    Attributes:
        counts: of length 1, 2, …; CAP from where there are more.
        settled: the set of states came back, so that these numbers repeat for ever.
    """

    counts: Float[np.ndarray, " length"]
    settled: bool


def reachable(layers: list[SaturatedLayer], longest: int) -> Reached:
    """Distinct states after all words of length 1 … `longest`.

    The set after n + 1 letters is a function of the set after n: once a set comes back, all lengths are known.
    """
    states, counts, seen = start(layers), list[int](), dict[bytes, int]()
    for length in range(1, longest + 1):
        states = distinct(np.vstack([advance(layers, states, letter) for letter in range(LETTERS)]))
        if len(states) >= CAP:
            return Reached(np.array(counts + [CAP] * (longest - len(counts)), dtype=float), settled=False)
        key = hashlib.sha256(states.tobytes()).digest()
        if key in seen:
            period = counts[seen[key] - 1 :]
            rest = [period[k % len(period)] for k in range(longest - len(counts))]
            return Reached(np.array(counts + rest, dtype=float), settled=True)
        seen[key] = length
        counts.append(len(states))
    return Reached(np.array(counts, dtype=float), settled=False)


def closure(layers: list[SaturatedLayer], most: int) -> int | None:
    """How many states all words of all lengths reach together; None if more than `most`."""
    known = states = start(layers)
    while len(known) <= most:
        states = np.vstack([advance(layers, states, letter) for letter in range(LETTERS)])
        both = distinct(np.vstack([known, states]))
        if len(both) == len(known):
            return len(known)
        known = states = both
    return None


def distinct(states: States) -> Shaped[np.ndarray, "kept number"]:
    """Every row once, in an order that the set alone decides."""
    low = states.min(axis=0)
    spans = states.max(axis=0) - low + 1
    if np.prod(spans.astype(float)) >= 2.0**62:  # their numbering would not fit into 64 bits
        return np.asarray(np.unique(states, axis=0))
    place = np.concatenate([[1], np.cumprod(spans[:-1])])
    _, first = np.unique((states - low) @ place, return_index=True)
    return np.asarray(states[first])


def visited(layers: list[SaturatedLayer], lengths: tuple[int, ...], rng: np.random.Generator) -> dict[int, int]:
    """Distinct states along a random word, after each of some lengths."""
    exact = object if layers[0].cell == "rnn_relu" else int  # a ReLU-RNN may double at each step: 2048 bits
    state, seen, found = start(layers, exact), set(), {}
    for length, letter in enumerate(rng.integers(LETTERS, size=max(lengths)), start=1):
        state = advance(layers, state, int(letter))
        seen.add(tuple(state[0].tolist()))
        if length in lengths:
            found[length] = len(seen)
    return found


def exponent(counts: Float[np.ndarray, " length"], settled: bool) -> float:
    """The power of the length with which the number of states grows: the slope of log count over log length.

    By least squares over the last two doublings below CAP, where what a cell does at first matters least. 0 if the set
    of states comes back.

    Returns:
        NaN if fewer than two lengths lie there (CAP is reached at once).
    """
    if settled:
        return 0.0
    end = int((counts < CAP).sum())
    lengths = np.arange(max(1, end // 4), end + 1)
    if len(lengths) < 2:
        return float("nan")
    return float(np.polyfit(np.log(lengths), np.log(counts[lengths - 1]), 1)[0])
