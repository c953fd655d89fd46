"""How a network counts, letter by letter, and where exactly a norm in its cell ends the count.

Weiss, Goldberg & Yahav (2018) claim that LSTMs and ReLU-RNNs count and GRUs do not, and show it by traces of an LSTM's
cell state over a^n b^n and a^n b^n c^n. Here networks are trained as `counting` trains them, with a norm in the LSTM's
cell and without; of each, the dimension that counts is found, followed beyond the trained n, and checked against what
the network itself does. Tasks, models and names of runs are those of `counting`: runs that it has made
need not be trained again if they are copied into the runs of this experiment's folder.

The dimension is found instead of picked: over each run of one letter (a phase) a line is laid through each dimension
of the state by least squares; a dimension is a candidate for a phase if it goes one way there and the other way in an
earlier phase, straight in both (`STRAIGHT`), and counts if these lines also tell every letter apart (`READABLE`). The
state is an LSTM's c as it is carried on (normed, if a norm stands on it), any other cell's h.

Three looks at the same counter that share nothing with the fit:

    differences     the mean step from letter to letter, compared with the slope
    reading         after how many b's the network first allows what comes after a^n b^n: its own count of n
    moving          that dimension moved by the slope of k letters before the b's: does the network end k letters later?
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab.counting import counting
from ln_probe.analyses.lab.counting.counting_tasks import ACCEPTED, EOS, MAX_TESTED_N, TERMS, CountingTask, bos
from ln_probe.analyses.lab.counting.recurrent import NormedLayer, RecurrentTagger
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, panels, summarize
from ln_probe.analyses.lab.run_folder import read_metrics
from ln_probe.analyses.lab.train import Run, carry_out

# R²; of a state that nears a limit: .9992 if its slope falls by a fifth in the phase, .996 by 40 %. So it is passed by
# what bends by several letters, and is asked for beside READABLE, not in its place.
STRAIGHT = 0.999
SETTLING = 5  # letters at the beginning of a phase that are left out of every fit: gates turn over there
# Of a letter: what a count may be off its line and still be right when it is rounded. A dimension counts only if the
# line through each of its two phases in the longest trained word is off by no more: one that bends further takes some
# numbers of letters for others.
READABLE = 0.5
MOVED = 20  # letters' worth by which a dimension is moved at most, either way
SLACK = 30  # letters beyond the longest run that a network is given to end a phase in
PHASES = "abc"


@dataclass(frozen=True)
class Cell:
    """The states of a layer for some words, [word hidden]."""

    h: Float[Tensor, "word hidden"]
    c: Float[Tensor, "word hidden"]


class LetterByLetter:
    """A trained tagger of one layer that reads a^n b^n (2 letters) or a^n b^n c^n letter by letter, in float64.

    Raises:
        ValueError: more than one layer, or a QRNN, whose gates do not depend on its state.
    """

    def __init__(self, model: nn.Module, letters: int) -> None:
        if not isinstance(model, RecurrentTagger) or model.cfg.n_layers != 1 or model.cfg.cell.startswith("qrnn"):
            what = model.cfg if isinstance(model, RecurrentTagger) else type(model).__name__
            raise ValueError(f"traces are of one LSTM, GRU or Elman layer, got {what}")
        self.model = copy.deepcopy(model).double().eval()
        self.letters, self.layer = letters, cast("NormedLayer", self.model.layers[0])
        with torch.no_grad():
            self._inputs = self.layer.inputs(self.model.embed(torch.arange(bos(letters) + 1))[None])[0]

    def start(self) -> Cell:
        """After the token that begins every word."""
        zero = torch.zeros(1, self.model.cfg.hidden, dtype=torch.float64)
        return self.read(Cell(zero, zero), bos(self.letters))

    @torch.no_grad()
    def read(self, cell: Cell, token: int) -> Cell:
        return Cell(*self.layer.step(self._inputs[token].expand(len(cell.h), -1), cell.h, cell.c))

    @torch.no_grad()
    def allows(self, cell: Cell, token: int) -> Tensor:
        """Whether the network gives a token a probability that counts as accepted, [word]."""
        accepted: Tensor = self.model.out(cell.h).softmax(-1)[:, token] > ACCEPTED
        return accepted

    def state(self, cell: Cell) -> Float[Tensor, "word hidden"]:
        return cell.c if self.model.cfg.cell == "lstm" else cell.h

    def moved(self, cell: Cell, by: Float[Tensor, "word hidden"]) -> Cell:
        """One word's state, a copy for each row of `by` with that added."""
        there = (self.state(cell) + by).contiguous()
        if self.model.cfg.cell == "lstm":
            return Cell(cell.h.expand_as(there), there)
        return Cell(there, cell.c.expand_as(there))


def phases(reader: LetterByLetter, n: int) -> Float[np.ndarray, "phase letter hidden"]:
    """The state after every letter of a^n b^n (c^n)."""
    cell, found = reader.start(), []
    for phase in range(reader.letters):
        for _ in range(n):
            cell = reader.read(cell, 1 + phase)
            found.append(reader.state(cell)[0].numpy())
    return np.stack(found).reshape(reader.letters, n, -1)


@dataclass(frozen=True)
class Line:
    """A line through some letters of a trace (counted from 1), by its slope per letter.

    Attributes:
        r2: the share of variance it explains; NaN where nothing moves.
        off: the largest distance of the trace from it, in letters (of its slope); infinite where the slope is 0.
    """

    slope: float
    r2: float
    off: float


def line_through(trace: Float[np.ndarray, " letter"]) -> Line:
    """The least-squares line through all letters but the first SETTLING.

    Raises:
        ValueError: fewer than three letters are left.
    """
    if len(trace) < SETTLING + 3:
        raise ValueError(f"a line takes {SETTLING + 3} letters or more, got {len(trace)}")
    letter = np.arange(1, len(trace) + 1)[SETTLING:]
    kept = trace[SETTLING:]
    slope, start = (float(x) for x in np.polyfit(letter, kept, 1))
    rest = kept - start - slope * letter
    spread = float(((kept - kept.mean()) ** 2).sum())
    still = spread <= 1e-20 * max(1.0, float(np.abs(kept).max())) ** 2 * len(kept)  # nothing but rounding moves
    r2 = float("nan") if still else 1 - float((rest**2).sum()) / spread
    return Line(slope, r2, float(np.abs(rest).max()) / abs(slope) if slope and not still else float("inf"))


def holds_to(trace: Float[np.ndarray, " letter"]) -> int:
    """Up to which letter of a phase a trace is a straight count: the last of those in a row within READABLE of a line.

    The line is laid anew through the letters up to each; where it first leaves one of them by more, a count can no
    longer be read off any line by rounding. 0 if that is so from the beginning.
    """
    for last in range(SETTLING + 3, len(trace) + 1):
        if line_through(trace[:last]).off > READABLE:
            return last - 1 if last > SETTLING + 3 else 0
    return len(trace)


def dimension_table(trace: Float[np.ndarray, "phase letter hidden"]) -> pd.DataFrame:
    """A row per dimension and phase: `dimension`, `phase`, `slope`, `r2`, `difference` (the mean step)."""
    rows = []
    for dimension in range(trace.shape[2]):
        for phase in range(len(trace)):
            line = line_through(trace[phase, :, dimension])
            kept = trace[phase, SETTLING:, dimension]
            step = float(kept[-1] - kept[0]) / (len(kept) - 1)
            rows.append((dimension, PHASES[phase], line.slope, line.r2, step))
    return pd.DataFrame(rows, columns=["dimension", "phase", "slope", "r2", "difference"])


@dataclass(frozen=True)
class Counter:
    """The dimension that counts for a phase; if none does, the straightest of those that turn (opposite slopes).

    Attributes:
        dimension: its number; 0 if no dimension turns at all.
        earlier: the phase (its number) in which it goes the other way.
        counting: every dimension that counts for the phase, from the same earlier phase or another.
        turning: every dimension that goes the other way than in that earlier phase, straight or not.
    """

    dimension: int
    earlier: int
    counting: tuple[int, ...]
    turning: tuple[int, ...]


def counter_of(dimensions: pd.DataFrame, phase: int) -> Counter:
    """What counts for a phase: slopes of opposite sign there and in an earlier phase, R² of STRAIGHT or more in both.

    Of several the straightest is named.
    """
    slope, r2 = (
        dimensions.pivot(index="dimension", columns="phase", values=name).to_numpy(float) for name in ("slope", "r2")
    )
    best, counting = (float("nan"), 0, 0), list[int]()
    for earlier in range(phase):
        turns = slope[:, earlier] * slope[:, phase] < 0
        least = np.minimum(r2[:, earlier], r2[:, phase])  # NaN, if it does not move in either
        for dimension in np.flatnonzero(turns & ~np.isnan(least)).tolist():
            if np.isnan(best[0]) or least[dimension] > best[0]:
                best = (float(least[dimension]), dimension, earlier)
            if least[dimension] >= STRAIGHT:
                counting.append(dimension)
    turning = tuple(np.flatnonzero(slope[:, best[2]] * slope[:, phase] < 0).tolist())
    return Counter(best[1], best[2], tuple(dict.fromkeys(counting)), turning)


def letters_read(reader: LetterByLetter, cell: Cell, phase: int, most: int) -> Float[np.ndarray, " word"]:
    """After how many letters of a phase each word's network first allows what follows the phase; NaN: not by `most`."""
    after = EOS if phase == reader.letters - 1 else 2 + phase
    found = np.full(len(cell.h), np.nan)
    for count in range(most + 1):
        new = reader.allows(cell, after).numpy() & np.isnan(found)
        found[new] = count
        if not np.isnan(found).any():
            break
        cell = reader.read(cell, 1 + phase)
    return found


def before_phase(reader: LetterByLetter, phase: int, n: Int[np.ndarray, " word"]) -> Cell:
    """The state after a^n … up to a phase, for each n (ascending)."""
    found = []
    cell = reader.start()
    for count in range(1, int(n.max()) + 1):
        cell = reader.read(cell, 1)
        if count in n:
            there = cell
            for earlier in range(1, phase):
                for _ in range(count):
                    there = reader.read(there, 1 + earlier)
            found.append(there)
    return Cell(torch.cat([s.h for s in found]), torch.cat([s.c for s in found]))


def carried(
    reader: LetterByLetter, phase: int, n: int, slopes: Float[np.ndarray, " hidden"]
) -> tuple[float, pd.DataFrame]:
    """How many letters later the network ends a phase per letter's worth that its state was moved by before it.

    Args:
        phase: that ends. n: letters of the phases before. slopes: of the state, per letter; 0 where it is not moved.

    Returns:
        The least-squares slope of letters read over letters moved (NaN if fewer than half the words end), and the
        table `moved`, `read`.
    """
    by = np.arange(-MOVED, MOVED + 1)
    cell = before_phase(reader, phase, np.array([n]))
    shifted = reader.moved(cell, torch.from_numpy(by[:, None] * slopes[None]))
    read = letters_read(reader, shifted, phase, n + MOVED + SLACK)
    ends = ~np.isnan(read)
    slope = float(np.polyfit(by[ends], read[ends], 1)[0]) if ends.sum() * 2 >= len(by) else float("nan")
    return slope, pd.DataFrame({"moved": by, "read": read})


DRAWN_NETWORK = ("task", "model", "norm", "norm_site", "phase")
FIGURE_COLUMNS = 4  # panels side by side
TRAINED, BEYOND = "C0", "C1"


def draw(networks: pd.DataFrame, traces: pd.DataFrame, readings: pd.DataFrame) -> Iterator[tuple[str, Figure]]:
    """Every picture by name, of what there is."""
    if len(networks):
        yield "traces", _traces(networks, traces)
        yield "readings", _readings(networks, readings)


def _panels(networks: pd.DataFrame, height: float) -> tuple[Figure, list[tuple[tuple[Any, ...], pd.DataFrame, Any]]]:
    """A panel per network and phase, with its title."""
    groups: list[tuple[Any, pd.DataFrame]] = list(networks.groupby(list(DRAWN_NETWORK), sort=False))
    figure, axes = panels(len(groups), 3.3, height, columns=FIGURE_COLUMNS)
    for ((task, model, norm, site, phase), _), ax in zip(groups, axes, strict=True):
        name = f"{task} ({phase}): {model}" + ("" if norm == "none" else f"\n{norm} on its {site}")
        ax.set_title(name, fontsize=8)
        ax.tick_params(labelsize=7)
    return figure, [(key, part, ax) for (key, part), ax in zip(groups, axes, strict=True)]


def _of(table: pd.DataFrame, key: tuple[Any, ...]) -> pd.DataFrame:
    return table[(table[list(DRAWN_NETWORK)] == list(key)).all(axis=1)]


def _traces(networks: pd.DataFrame, traces: pd.DataFrame) -> Figure:
    """The dimension that counts, or comes nearest, over the letters of the longest trained word and of one beyond."""
    figure, panels = _panels(networks, 2.3)
    for key, part, ax in panels:
        mine = _of(traces, key)
        for style, row in zip(("-", "--", ":", "-."), part.to_dict("records"), strict=False):
            one = mine[mine["seed"] == row["seed"]]
            for n, color in ((row["tested_n"], BEYOND), (row["trained_n"], TRAINED)):
                word = one[one["n"] == n]
                ax.plot(word["letter"], word["value"], color=color, linestyle=style, linewidth=1)
        word_phases = PHASES[: 2 if key[0] == "anbn" else 3]
        for number in range(1, len(word_phases)):
            for n, color in ((row["trained_n"], TRAINED), (row["tested_n"], BEYOND)):
                ax.axvline(number * n, color=color, linewidth=0.5, linestyle=":")
        counts = [f"{r['dimension']}{'' if r['counts'] else ' (no counter)'}" for r in part.to_dict("records")]
        ax.set_ylabel(f"dimension {', '.join(counts)}", fontsize=6)
    figure.supxlabel(
        "letters of the word; blue: the longest trained n, orange: three times as long; dotted: where the letter "
        "changes; a line style per seed",
        fontsize=8,
    )
    return figure


def _readings(networks: pd.DataFrame, readings: pd.DataFrame) -> Figure:
    """After how many letters of a phase each network takes the word to be complete, over n."""
    figure, panels = _panels(networks, 2.3)
    for key, part, ax in panels:
        mine = _of(readings, key)
        top = int(part["tested_n"].iloc[0])
        ax.plot([0, top], [0, top], "k", linewidth=0.6, linestyle=":")
        for style, (_, line) in zip(("-", "--", ":", "-."), mine.groupby("seed"), strict=False):
            ax.plot(line["n"], line["read"], "C0", linestyle=style, linewidth=1)
        ax.axvline(part["trained_n"].iloc[0], color="C0", linewidth=0.5, linestyle=":")
        ax.set_ylim(0, 1.15 * top)
    figure.supxlabel("n of the word", fontsize=8)
    figure.supylabel("letters after which the network lets it end", fontsize=8)
    return figure


KEYS = counting.KEYS
SITES = ("state", "readout", "gates")
NETWORK = (*KEYS, "seed", "phase")
# Of a network and the phase in which it counts down; exact_* and accepted_to are the run's own evaluation. holds_to is
# of the phase before, in the longest tested word, carried of the word of half the longest trained n.
MEASURES = (
    "dimensions_counting", "slope_before", "slope_in", "r2_before", "r2_in", "step_before", "step_in", "holds_to",
    "carried", "carried_by_turning", "reads_to", "reads_last_as", "exact_from", "exact_to", "accepted_to",
)  # fmt: skip
# Of its trace: in the phase itself how far it is straight in the longest tested word; by how many letters each phase of
# the longest trained word is off its line; whether the dimension counts (`counting`).
OF_TRACE = ("holds_to_in", "off_before", "off_in", "counts")
SWEPT = {"r2": (0.99, 0.995, 0.999, 0.9995, 0.9999), "off": (0.25, 0.5, 1.0, 2.0)}  # about STRAIGHT and READABLE
COLUMNS = {
    "networks": (*NETWORK, "dimension", "before", "trained_n", "tested_n", *MEASURES, *OF_TRACE),
    "dimensions": (*KEYS, "seed", "dimension", "phase", "slope", "r2", "difference"),
    "traces": (*NETWORK, "n", "letter", "value"),
    "readings": (*NETWORK, "n", "read"),
    "moves": (*NETWORK, "moved", "read"),
}
PUBLISHED = (
    "claimed of LSTM and ReLU-RNN, shown of an LSTM: a dimension of its cell that counts up and down (Weiss et al. "
    "2018; their figures could not be read here)"
)


def grid(quick: bool) -> tuple[counting.Cell, ...]:
    """Networks without a norm, then LSTMs with one."""
    plain = [counting.Cell("anbn", model) for model in ("lstm", "gru", "rnn_relu")]
    if quick:
        return (*plain[:2], counting.Cell("anbn", "lstm", "layernorm", "state"))
    normed = [counting.Cell("anbn", "lstm", norm, site) for site in SITES for norm in TERMS]
    return (*plain, *(counting.Cell("anbncn", cell.model) for cell in plain), *normed)


def run(request: Request) -> Results:
    """Train the missing runs of the grid and follow every cell."""
    runs = counting.make_runs(request, grid(request.quick))
    lost = carry_out(runs, request)
    found = [followed(r) for r in runs if r.finished]
    tables = [
        pd.concat([f[name] for f in found], ignore_index=True) if found else pd.DataFrame(columns=columns)
        for name, columns in COLUMNS.items()
    ]
    return replace(findings(*tables), diverged=lost)


def followed(run: Run) -> dict[str, pd.DataFrame]:
    """The rows of a finished run for every table of COLUMNS."""
    task = run.task
    if not isinstance(task, CountingTask):
        raise ValueError(f"traces are of a^n b^n and a^n b^n c^n, got a run on {task.name}")
    reader, trained, tested = LetterByLetter(run.model(), task.letters), task.max_n, MAX_TESTED_N * task.max_n
    short, long = phases(reader, trained), phases(reader, tested)
    dimensions = dimension_table(short)
    evaluated = read_metrics(run.folder).iloc[-1]
    rows: dict[str, list[pd.DataFrame]] = {name: [] for name in COLUMNS}
    rows["dimensions"].append(dimensions)
    for phase in range(1, task.letters):
        counter = counter_of(dimensions, phase)
        at = dimensions[dimensions["dimension"] == counter.dimension].set_index("phase")
        there, here = at.loc[PHASES[counter.earlier]], at.loc[PHASES[phase]]
        slopes = dimensions[dimensions["phase"] == PHASES[counter.earlier]].set_index("dimension")["slope"].to_numpy()
        n = np.arange(1, tested + 1)
        read = letters_read(reader, before_phase(reader, phase, n), phase, tested + SLACK)
        alone, moves = carried(reader, phase, trained // 2, slopes * np.isin(np.arange(len(slopes)), counter.dimension))
        turning, _ = carried(reader, phase, trained // 2, slopes * np.isin(np.arange(len(slopes)), counter.turning))
        numbers = (
            len(counter.counting), there["slope"], here["slope"], there["r2"], here["r2"], there["difference"],
            here["difference"], holds_to(long[counter.earlier, :, counter.dimension]), alone, turning,
            _longest_run(read == n), read[-1], *(float(evaluated[m]) for m in MEASURES[-3:]),
        )  # fmt: skip
        named = {"dimension": counter.dimension, "before": PHASES[counter.earlier]}
        new = {
            "networks": pd.DataFrame(
                [{**named, "trained_n": trained, "tested_n": tested, **dict(zip(MEASURES, numbers, strict=True))}]
            ),
            "traces": pd.concat(
                [
                    pd.DataFrame({"n": n, "letter": np.arange(1, trace.size + 1), "value": trace.reshape(-1)})
                    for n, trace in ((word.shape[1], word[..., counter.dimension]) for word in (short, long))
                ]
            ),
            "readings": pd.DataFrame({"n": n, "read": read}),
            "moves": moves,
        }
        for name, table in new.items():
            rows[name].append(table.assign(phase=PHASES[phase]))
    keys = {**dict(run.keys), "seed": run.seed}
    made = {name: pd.concat(rows[name]).assign(**keys) for name in COLUMNS}
    return {name: made[name][[c for c in columns if c not in OF_TRACE]] for name, columns in COLUMNS.items()}


def _longest_run(right: np.ndarray) -> int:
    """The end of the longest run of n's (from 1 on) where this is so; 0: it is nowhere."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], right, [False]]).astype(int)))
    if not len(ends):
        return 0
    first, last = ends[::2], ends[1::2]
    return int(last[np.argmax(last - first)])


def findings(*found: pd.DataFrame) -> Results:
    """Summary and pictures from the tables of COLUMNS, in their order."""
    tables = dict(zip(COLUMNS, found, strict=True))
    networks = in_order(with_verdicts(tables["networks"], tables["traces"]))
    values = networks.melt([*NETWORK], [*MEASURES, *OF_TRACE], "measure", "value")
    values["value"] = values["value"].astype(float)
    return Results(
        summarize(values, [*KEYS, "phase", "measure"]),
        tables={**tables, "networks": networks, "thresholds": thresholds(networks)},
        figures=dict(draw(networks, tables["traces"], tables["readings"])),
        settings={
            "straight": STRAIGHT,
            "readable": READABLE,
            "settling": SETTLING,
            "moved": MOVED,
            "accepted": ACCEPTED,
            "seeds": sorted({int(seed) for seed in networks["seed"]}),
            "published": PUBLISHED,
        },
    )


def with_verdicts(networks: pd.DataFrame, traces: pd.DataFrame) -> pd.DataFrame:
    """`networks` with the columns OF_TRACE, from the kept traces of the longest trained and the longest tested word.

    A dimension counts that goes one way and back with an R² of STRAIGHT or more in both phases (`dimensions_counting`)
    and lies within READABLE of its line all through both, in the longest trained word.
    """
    by = dict(list(traces.groupby([*NETWORK, "n"], sort=False)["value"]))
    rows = []
    for row in networks.to_dict("records"):
        key = tuple(row[k] for k in NETWORK)
        trained, tested = (by[(*key, row[n])].to_numpy(float).reshape(-1, row[n]) for n in ("trained_n", "tested_n"))
        before, phase = (PHASES.index(row[name]) for name in ("before", "phase"))
        off = [line_through(trained[number]).off for number in (before, phase)]
        rows.append((holds_to(tested[phase]), *off, int(row["dimensions_counting"] > 0 and max(off) <= READABLE)))
    return networks.assign(**pd.DataFrame(rows, columns=list(OF_TRACE), index=networks.index))


def thresholds(networks: pd.DataFrame) -> pd.DataFrame:
    """In how many networks the best dimension would pass by one criterion alone, at other thresholds than ours.

    Returns:
        KEYS, `phase`, `criterion` ("r2": the smaller R² of both phases is no less; "off": letters off the line of
        either, no more), `threshold`, `networks`, `of`.
    """
    rows = []
    turns = networks["slope_before"] * networks["slope_in"] < 0
    r2, off = networks[["r2_before", "r2_in"]].min(axis=1), networks[["off_before", "off_in"]].max(axis=1)
    for key, part in networks.groupby([*KEYS, "phase"], sort=False):
        mine = turns[part.index]
        for criterion, tried in SWEPT.items():
            for threshold in tried:
                passes = r2[part.index] >= threshold if criterion == "r2" else off[part.index] <= threshold
                rows.append((*key, criterion, threshold, int((mine & passes).sum()), len(part)))
    return pd.DataFrame(rows, columns=[*KEYS, "phase", "criterion", "threshold", "networks", "of"])


def in_order(networks: pd.DataFrame) -> pd.DataFrame:
    """As in the grid, task by task, whenever they were trained; those outside it last."""
    cells = [tuple(vars(cell).values()) for cell in sorted(grid(quick=False), key=lambda cell: cell.task)]
    place = [cells.index(key) if key in cells else len(cells) for key in networks[list(KEYS)].itertuples(index=False)]
    ordered = networks.assign(place=place).sort_values(["place", "seed", "phase"], kind="stable")
    return ordered.drop(columns="place").reset_index(drop=True)


def title(row: dict[Hashable, Any]) -> str:
    """What a network is, in the words of the tables."""
    norm = "" if row["norm"] == "none" else f", {row['norm']} on its {row['norm_site']}"
    return f"{row['task']}, {row['model']}{norm}"
