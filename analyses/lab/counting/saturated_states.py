"""How many states can a saturated recurrent cell be in after n letters?

Merrill et al. (2020, "A Formal Hierarchy of RNN Architectures", sections 2 and 3) look at the limit of large weights
(`saturated_cells`): what a cell can then tell apart is its space complexity. Theory: a saturated Elman RNN, GRU and
QRNN with f- or fo-pooling have a number of states that no length changes; an LSTM, and a QRNN with ifo-pooling, add to
their state and have polynomially many, at most as length to the power of their counters (hidden units times layers):
one counter grows linearly. A ReLU-RNN does not saturate and is drawn with small whole weights; of that no theorem is
quoted. No training: weights are drawn, and every state that a word over {a, b} reaches is found.

    states      distinct states after all words of a length (breadth first, given up beyond CAP)
    visited     distinct states along one random word of a length
    exponent    of a draw: the power of the length with which `states` grows, over the last two doublings below CAP
    settled     draws whose set of states came back, so that their number at every length is known
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.counting.saturated_cells import CAP, drawn, exponent, reachable, visited
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CONSTANT, GROWS, UNSATURATED = "constant", "grows", "does not saturate"


@dataclass(frozen=True)
class Cell:
    """What is drawn, what theory says of the number of its states, and the longest words all of which are tried.

    With more counters fewer letters reach CAP, and what is found to that length costs a second a draw at most.
    """

    cell: str
    layers: int
    hidden: int
    theory: str
    longest: int


CELLS = (
    *(Cell(cell, n, 3, CONSTANT, 2048) for cell in ("rnn_tanh", "gru", "qrnn f", "qrnn fo") for n in (1, 2)),
    Cell("qrnn+", 1, 3, CONSTANT, 2048),
    *(
        Cell(cell, layers, hidden, GROWS, longest)
        for cell in ("qrnn ifo", "lstm")
        for layers, hidden, longest in ((1, 1, 2048), (1, 2, 256), (1, 3, 128), (2, 3, 64))
    ),
    *(Cell("rnn_relu", n, 3, UNSATURATED, 32) for n in (1, 2)),  # 3 to the power 32 still fits into 64 bits
)
DRAWS, DRAWS_QUICK = 50, 6  # of weights, per seed; of 50 LSTMs with one unit a few count, of 10 often none
LENGTHS, LENGTHS_QUICK = (8, 16, 32, 64, 128, 256, 512, 1024, 2048), (8, 16, 32)  # of `states`
VISITED, VISITED_QUICK = (64, 128, 256, 512, 1024, 2048), (64, 128)  # of `visited`; the source's longest is 2048
KEYS = ("cell", "layers", "hidden", "theory", "measure")
EXPONENT, SETTLED, COUNTING = "exponent", "settled draws", "growing draws"
GROWING = 0.5  # an exponent above it counts as growth: exponents come out near whole numbers


def run(request: Request) -> Results:
    """Draw, count, and put theory beside."""
    counts, growth = [], []
    for seed in request.seeds:
        for number, cell in enumerate(CELLS):
            rng = np.random.default_rng([seed, number])
            found, powers, settled = _of_draws(cell, rng, request.quick)
            named = (cell.cell, cell.layers, cell.hidden, cell.theory)
            for (kind, length), all_of in found.items():
                for name, value in (("largest", max(all_of)), ("median", float(np.median(all_of)))):
                    counts.append((*named, f"{kind}, {name}", length, seed, float(value)))
            known = powers[~np.isnan(powers)]
            growth += [
                (*named, f"{EXPONENT}, largest", seed, known.max() if len(known) else np.nan),
                (*named, f"{EXPONENT}, median", seed, float(np.median(known)) if len(known) else np.nan),
                (*named, SETTLED, seed, float(settled.mean())),
                (*named, COUNTING, seed, float((known > GROWING).mean()) if len(known) else np.nan),
            ]
    values = pd.DataFrame(counts, columns=[*KEYS, "length", "seed", "value"])
    return findings(values, pd.DataFrame(growth, columns=[*KEYS, "seed", "value"]), request.quick)


def _of_draws(
    cell: Cell, rng: np.random.Generator, quick: bool
) -> tuple[dict[tuple[str, int], list[float]], np.ndarray, np.ndarray]:
    """Counts by measure and length, and of each draw its exponent and whether its set of states came back."""
    lengths = [n for n in (LENGTHS_QUICK if quick else LENGTHS) if n <= cell.longest]
    found: dict[tuple[str, int], list[float]] = {}
    powers, settled = [], []
    for _ in range(DRAWS_QUICK if quick else DRAWS):
        net = drawn(cell.cell, cell.layers, rng, cell.hidden)
        reached = reachable(net, max(lengths))
        powers.append(exponent(reached.counts, reached.settled))
        settled.append(reached.settled)
        for n in lengths:
            found.setdefault(("states", n), []).append(float(reached.counts[n - 1]))
        for n, count in visited(net, VISITED_QUICK if quick else VISITED, rng).items():
            found.setdefault(("visited", n), []).append(float(count))
    return found, np.array(powers), np.array(settled)


def findings(values: pd.DataFrame, growth: pd.DataFrame, quick: bool = False) -> Results:
    """Tables, a figure and sentences.

    Args:
        values: counts: KEYS, `length`, `seed`, `value`; centers are geometric means over seeds.
        growth: exponents and shares of draws: KEYS, `seed`, `value`.
        quick: whether of the quick size.
    """
    summary = summarize(values, [*KEYS, "length"], kind="log")
    powers = growth["measure"].str.startswith(EXPONENT).astype(bool)
    grown = pd.concat(
        [summarize(growth[powers], list(KEYS)), summarize(growth[~powers], list(KEYS), kind="share")], ignore_index=True
    ).drop(columns="published")
    return Results(
        summary,
        tables={"values": values, "growth": growth, "exponents": grown},
        figures={"states": draw(summary)},
        conclusions=tuple(_sentences(summary, grown)),
        settings={
            "draws": DRAWS_QUICK if quick else DRAWS,
            "cap": CAP,
            "seeds": sorted({int(s) for s in values["seed"]}),
            "published": "theorems, no figures: O(1) states but for LSTM and ifo-pooling (Merrill et al., section 3)",
        },
    )


def _sentences(summary: pd.DataFrame, grown: pd.DataFrame) -> Iterator[str]:
    keys = ["cell", "layers", "hidden", "theory"]
    for key, part in summary.groupby(keys, sort=False):
        cell, layers, hidden, theory = (str(x) for x in key)
        of = {r["measure"]: r for r in grown[(grown[keys] == list(key)).all(axis=1)].to_dict("records")}
        told = [_told(part, kind) for kind in ("states", "visited")]
        said = f"{cell}, layers: {layers}, hidden units: {hidden}; theory: {theory}"
        said += f" (at most to the power {int(layers) * int(hidden)})" if theory == GROWS else ""
        if theory == CONSTANT:
            said += f". The set of states came back in {_share(of[SETTLED])}"
        else:
            power = of[f"{EXPONENT}, largest"]
            interval = "" if np.isnan(power["ci_low"]) else f" [{power['ci_low']:.2f}, {power['ci_high']:.2f}]"
            said += f". Exponent of the fastest draw {power['mean']:.2f}{interval}, growing: "
            said += _share(of[COUNTING])
        yield f"{said}. Largest over the draws: {'; '.join(told)}."


def _told(part: pd.DataFrame, kind: str) -> str:
    """What the largest draw comes to at the first and at the last length, and from where on it is capped."""
    line = part[part["measure"] == f"{kind}, largest"].sort_values("length")
    first, last = line.iloc[0], line.iloc[-1]
    said = f"{kind} {first['mean']:.0f} at length {first['length']}, "
    if last["mean"] < CAP * 0.999:
        return said + f"{last['mean']:.0f} at {last['length']}"
    capped = line[line["mean"] >= CAP * 0.999].iloc[0]
    return said + f"{CAP} or more from {capped['length']} on"


def _share(row: dict[Hashable, Any]) -> str:
    """A share of draws with its interval over seeds; where it is all of them in every seed there is nothing to tell."""
    if row["mean"] == 1:
        return "every draw"
    interval = "" if np.isnan(row["ci_low"]) else f" [{100 * row['ci_low']:.0f}, {100 * row['ci_high']:.0f}]"
    return f"{100 * row['mean']:.0f}{interval} % of the draws"


def draw(summary: pd.DataFrame) -> Figure:
    """Distinct states over length, the largest draw of every cell; dotted: constant in theory."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots(1, 2)
    colors = colormaps["tab20"].colors  # type: ignore[attr-defined]
    styles = {CONSTANT: ":", GROWS: "-", UNSATURATED: "--"}
    for kind, ax in zip(("states", "visited"), axes, strict=True):
        part = summary[summary["measure"] == f"{kind}, largest"]
        for number, (key, line) in enumerate(part.groupby(["cell", "layers", "hidden", "theory"], sort=False)):
            cell, layers, hidden, theory = key
            look = {"color": colors[number % len(colors)], "linestyle": styles[str(theory)]}
            ax.plot(
                line["length"], line["mean"], marker="o", markersize=3, label=f"{cell}, {layers} × {hidden}", **look
            )
        where = "along a random word" if kind == "visited" else "after all words"
        ax.set(xscale="log", yscale="log", xlabel="length", ylabel=f"distinct states {where}")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=7, title="layers × units")
    return figure
