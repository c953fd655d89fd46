"""How many states can a saturated recurrent cell be in after n letters?

Merrill et al. (2020, "A Formal Hierarchy of RNN Architectures", sections 2 and 3) look at the limit of large weights,
where a sigmoid is 0 or 1 and a tanh -1, 0 or 1: what a cell can then tell apart is its space complexity. Theory: a
saturated Elman RNN, GRU and QRNN with f- or fo-pooling have a number of states that no length changes; an LSTM, and a
QRNN with ifo-pooling, add to their state and have polynomially many. No training: weights are drawn, and every state
that a word over {a, b} reaches is found.

    states    distinct states after all words of a length (breadth first, given up beyond CAP)
    visited   distinct states along one random word of a length
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONSTANT, GROWS = "constant", "grows"
# Cell, layers, and what theory says of the number of its states over length.
CELLS = (
    ("rnn_tanh", 1, CONSTANT), ("gru", 1, CONSTANT), ("qrnn f", 1, CONSTANT), ("qrnn fo", 1, CONSTANT),
    ("qrnn fo", 2, CONSTANT), ("gru", 2, CONSTANT), ("qrnn ifo", 1, GROWS), ("lstm", 1, GROWS), ("lstm", 2, GROWS),
)  # fmt: skip
HIDDEN, LETTERS = 3, 2
DRAWS = 30  # of weights, per seed
LENGTHS, LENGTHS_QUICK = (8, 16, 32), (8, 16)  # of `states`
VISITED, VISITED_QUICK = (64, 128, 256, 512, 1024, 2048), (64, 128)  # of `visited`; the source's longest is 2048
CAP = 50_000  # states; more of them take minutes, and have grown beyond doubt
KEYS = ("cell", "layers", "theory", "measure", "length")
_GATES = {"rnn_tanh": 1, "gru": 3, "qrnn f": 2, "qrnn fo": 3, "qrnn ifo": 4, "lstm": 4}
States = Int[np.ndarray, "state number"]


@dataclass(frozen=True)
class SaturatedLayer:
    """One saturated layer with given weights; its state is a row of whole numbers.

    Attributes:
        cell: one of CELLS. W: of its inputs, those of the step before appended for a QRNN (window 2). U: recurrent.
        b: bias.
    """

    cell: str
    W: Float[np.ndarray, "gate input"]
    U: Float[np.ndarray, "gate hidden"]
    b: Float[np.ndarray, " gate"]

    @property
    def size(self) -> int:
        """Numbers in its state: h; of an LSTM c, and sign(h); of a QRNN c, and the input before."""
        hidden, inputs = int(self.U.shape[1]), int(self.W.shape[1])
        if self.cell == "lstm":
            return 2 * hidden
        return hidden + (inputs // 2 if self.cell.startswith("qrnn") else 0)

    def step(
        self, state: States, x: Shaped[np.ndarray, "state input"]
    ) -> tuple[States, Shaped[np.ndarray, "state hidden"]]:
        """The next state and what the layer puts out, for every row."""
        H = self.U.shape[1]
        if self.cell.startswith("qrnn"):
            c, before = state[:, :H], state[:, H:]
            gates = np.hstack([x, before]) @ self.W.T + self.b
            z, f = np.sign(gates[:, :H]), gates[:, H : 2 * H] > 0
            i = gates[:, 3 * H :] > 0 if self.cell == "qrnn ifo" else ~f
            c = (f * c + i * z).astype(int)
            out = c if self.cell == "qrnn f" else (gates[:, 2 * H : 3 * H] > 0) * c
            return np.hstack([c, x]), out
        h = state[:, -H:]
        if self.cell == "lstm":  # c is no product of weights, so its tanh does not saturate
            h = np.where(h != 0, np.tanh(state[:, :H]), 0.0)
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


def drawn(cell: str, layers: int, rng: np.random.Generator, hidden: int = HIDDEN) -> list[SaturatedLayer]:
    """Layers with normal weights.

    Raises:
        ValueError: an unknown cell, sizes below 1.
    """
    if cell not in _GATES:
        raise ValueError(f"unknown cell {cell!r}: known are {', '.join(_GATES)}")
    if layers < 1 or hidden < 1:
        raise ValueError(f"layers and hidden must be at least 1, got {layers} and {hidden}")
    made = []
    for number in range(layers):
        gates = _GATES[cell] * hidden
        inputs = (LETTERS if number == 0 else hidden) * (2 if cell.startswith("qrnn") else 1)
        W, U, b = (rng.standard_normal(shape) for shape in ((gates, inputs), (gates, hidden), gates))
        made.append(SaturatedLayer(cell, W, U, b))
    return made


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


def reachable(layers: list[SaturatedLayer], lengths: tuple[int, ...]) -> dict[int, int]:
    """Distinct states after all words of each length; CAP from where there are more."""
    states, found = start(layers), {}
    for length in range(1, max(lengths) + 1):
        if len(states) < CAP:
            states = np.unique(np.vstack([advance(layers, states, letter) for letter in range(LETTERS)]), axis=0)
        if length in lengths:
            found[length] = min(len(states), CAP)
    return found


def visited(layers: list[SaturatedLayer], lengths: tuple[int, ...], rng: np.random.Generator) -> dict[int, int]:
    """Distinct states along a random word, after each of some lengths."""
    state, seen, found = start(layers), set(), {}
    for length, letter in enumerate(rng.integers(LETTERS, size=max(lengths)), start=1):
        state = advance(layers, state, int(letter))
        seen.add(state.tobytes())
        if length in lengths:
            found[length] = len(seen)
    return found


def run(request: Request) -> Results:
    """Draw, count, and put theory beside."""
    lengths, walks = (LENGTHS_QUICK, VISITED_QUICK) if request.quick else (LENGTHS, VISITED)
    rows = []
    for seed in request.seeds:
        for number, (cell, layers, theory) in enumerate(CELLS):
            rng = np.random.default_rng([seed, number])
            counts: dict[tuple[str, int], list[int]] = {}
            for _ in range(DRAWS // 5 if request.quick else DRAWS):
                net = drawn(cell, layers, rng)
                found = {("states", n): c for n, c in reachable(net, lengths).items()}
                found |= {("visited", n): c for n, c in visited(net, walks, rng).items()}
                for key, count in found.items():
                    counts.setdefault(key, []).append(count)
            for (kind, length), all_of in counts.items():
                for name, value in (("largest", max(all_of)), ("median", float(np.median(all_of)))):
                    rows.append((cell, layers, theory, f"{kind}, {name}", length, seed, float(value)))
    return findings(pd.DataFrame(rows, columns=[*KEYS, "seed", "value"]))


def findings(values: pd.DataFrame) -> Results:
    """Tables, a figure and sentences from KEYS, `seed`, `value`; centers are geometric means over seeds."""
    summary = summarize(values, list(KEYS), kind="log")
    return Results(
        summary,
        tables={"values": values},
        figures={"states": _draw(summary)},
        conclusions=tuple(_sentences(summary)),
        settings={
            "hidden": HIDDEN,
            "draws": DRAWS,
            "cap": CAP,
            "seeds": sorted({int(s) for s in values["seed"]}),
            "published": "theorems, no figures: O(1) states but for LSTM and ifo-pooling (Merrill et al., section 3)",
        },
    )


def _sentences(summary: pd.DataFrame) -> Iterator[str]:
    for (cell, layers, theory), part in summary.groupby(["cell", "layers", "theory"], sort=False):
        told = []
        for kind in ("states, largest", "visited, largest"):
            line = part[part["measure"] == kind].sort_values("length")
            first, last = line.iloc[0], line.iloc[-1]
            slope = np.log(last["mean"] / first["mean"]) / np.log(last["length"] / first["length"])
            capped = " (capped)" if last["mean"] >= CAP * 0.999 else ""
            told.append(
                f"{kind.split(',')[0]} {first['mean']:.0f} at length {first['length']}, {last['mean']:.0f}{capped} at "
                f"{last['length']} (length to the power {slope:.2f})"
            )
        yield f"{cell}, layers: {layers}; theory: {theory}. Largest over the draws: {'; '.join(told)}."


def _draw(summary: pd.DataFrame) -> Figure:
    """Distinct states over length, the largest draw of every cell."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2)
    for kind, ax in zip(("states", "visited"), axes, strict=True):
        part = summary[summary["measure"] == f"{kind}, largest"]
        for number, ((cell, layers), line) in enumerate(part.groupby(["cell", "layers"], sort=False)):
            style = "-" if line["theory"].iloc[0] == GROWS else ":"
            label = f"{cell}, layers: {layers}"
            ax.plot(line["length"], line["mean"], f"C{number}o{style}", markersize=3, label=label)
        where = "along a random word" if kind == "visited" else "after all words"
        ax.set(xscale="log", yscale="log", xlabel="length", ylabel=f"distinct states {where}")
    axes[-1].legend(fontsize=6)
    return figure
