"""How a network counts, letter by letter, and where exactly a norm in its cell ends the count.

Weiss, Goldberg & Yahav (2018) claim that LSTMs and ReLU-RNNs count and GRUs do not, and show it by traces of an LSTM's
cell state over a^n b^n and a^n b^n c^n. Here networks are trained as `counting` trains them, with a norm in the LSTM's
cell and without; of each, the dimension that counts is found, followed beyond the trained n, and checked against what
the network itself does (`cell_traces`). Tasks, models and names of runs are those of `counting`: runs that it has made
need not be trained again if they are copied into the runs of this experiment's folder.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.counting import counting
from ln_probe.analyses.lab.counting.cell_traces import (
    MOVED,
    PHASES,
    READABLE,
    SETTLING,
    SLACK,
    STRAIGHT,
    LetterByLetter,
    before_phase,
    carried,
    counter_of,
    dimension_table,
    holds_to,
    letters_read,
    line_through,
    phases,
)
from ln_probe.analyses.lab.counting.counting_tasks import ACCEPTED, MAX_TESTED_N, TERMS, CountingTask
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.analyses.lab.run_folder import MODEL_FILE, read_metrics, weights_of
from ln_probe.analyses.lab.runs import Run, carry_out, diverged
from ln_probe.analyses.lab.training import load_weights

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
    """Train the grid (or what is left of it) and follow every cell."""
    runs = counting.make_runs(request, grid(request.quick))
    carry_out(runs, request)
    found = [followed(r) for r in runs if (r.folder / MODEL_FILE).exists()]
    tables = {
        name: pd.concat([f[name] for f in found], ignore_index=True) if found else pd.DataFrame(columns=columns)
        for name, columns in COLUMNS.items()
    }
    return findings(tables, tuple(diverged(runs).values()))


def followed(run: Run) -> dict[str, pd.DataFrame]:
    """The rows of a finished run for every table of COLUMNS."""
    task = run.task
    if not isinstance(task, CountingTask):
        raise ValueError(f"traces are of a^n b^n and a^n b^n c^n, got a run on {task.name}")
    model = run.spec.build()
    load_weights(model, weights_of(run.folder))
    reader, trained, tested = LetterByLetter(model, task.letters), task.max_n, MAX_TESTED_N * task.max_n
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
            "traces": pd.concat([_trace(word[..., counter.dimension]) for word in (short, long)]),
            "readings": pd.DataFrame({"n": n, "read": read}),
            "moves": moves,
        }
        for name, table in new.items():
            rows[name].append(table.assign(phase=PHASES[phase]))
    keys = {**dict(run.keys), "seed": run.seed}
    made = {name: pd.concat(rows[name]).assign(**keys) for name in COLUMNS}
    return {name: made[name][[c for c in columns if c not in OF_TRACE]] for name, columns in COLUMNS.items()}


def _trace(word: np.ndarray) -> pd.DataFrame:
    """One dimension of the state over a word, [phase letter]."""
    return pd.DataFrame({"n": word.shape[1], "letter": np.arange(1, word.size + 1), "value": word.reshape(-1)})


def _longest_run(right: np.ndarray) -> int:
    """The end of the longest run of n's (from 1 on) where this is so; 0: it is nowhere."""
    ends = np.flatnonzero(np.diff(np.concatenate([[False], right, [False]]).astype(int)))
    if not len(ends):
        return 0
    first, last = ends[::2], ends[1::2]
    return int(last[np.argmax(last - first)])


def findings(tables: dict[str, pd.DataFrame], lost: Sequence[str] = ()) -> Results:
    """Summary, pictures and sentences from the tables of COLUMNS."""
    from ln_probe.analyses.lab.counting.counting_traces_figures import draw

    networks = in_order(with_verdicts(tables["networks"], tables["traces"]))
    values = networks.melt([*NETWORK], [*MEASURES, *OF_TRACE], "measure", "value")
    values["value"] = values["value"].astype(float)
    return Results(
        summarize(values, [*KEYS, "phase", "measure"]),
        tables={**tables, "networks": networks, "thresholds": thresholds(networks)},
        figures=dict(draw(networks, tables["traces"], tables["readings"])),
        conclusions=(*_overview(networks), *_each(networks)),
        settings={
            "straight": STRAIGHT,
            "readable": READABLE,
            "settling": SETTLING,
            "moved": MOVED,
            "accepted": ACCEPTED,
            "seeds": sorted({int(seed) for seed in networks["seed"]}),
            "published": PUBLISHED,
        },
        diverged=tuple(lost),
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


def _overview(networks: pd.DataFrame) -> Iterator[str]:
    """In how many networks of a kind a dimension counts, and at which n the count, the reading and the answers end."""
    for _, part in networks.groupby([*KEYS, "phase"], sort=False):
        rows = part.to_dict("records")
        counts = sum(r["counts"] for r in rows)
        said = [f"{title(rows[0])}, phase {rows[0]['phase']}: a dimension counts in {counts} of {len(rows)} networks"]
        for name, measure in (
            (f"in the longest word the trace is straight to letter (of the {rows[0]['before']}'s)", "holds_to"),
            (f"(of the {rows[0]['phase']}'s)", "holds_to_in"),
            ("n is read right to", "reads_to"),
            (f"it takes {rows[0]['tested_n']} for", "reads_last_as"),
            ("exact to", "exact_to"),
        ):
            said.append(f"{name} {', '.join(f'{r[measure]:.0f}' for r in rows)}")
        yield f"{'; '.join(said)} (trained to {rows[0]['trained_n']}, tested to {rows[0]['tested_n']})."


def _each(networks: pd.DataFrame) -> Iterator[str]:
    for row in networks.to_dict("records"):
        found = "counts" if row["counts"] else "comes nearest to a counter, and is none"
        yield (
            f"{title(row)}, seed {row['seed']}: dimension {row['dimension']} {found}: {row['slope_before']:+.3f} per "
            f"{row['before']}, {row['slope_in']:+.3f} per {row['phase']} (R² {row['r2_before']:.5f} and "
            f"{row['r2_in']:.5f}; off its lines by {row['off_before']:.2f} and {row['off_in']:.2f} letters; mean steps "
            f"{row['step_before']:+.3f} and {row['step_in']:+.3f}). At n = {row['trained_n'] // 2}, moved by k "
            f"letters' slopes ({MOVED} at most), the network ends its {row['phase']}'s {row['carried']:.2f} k later; "
            f"all dimensions that turn, {row['carried_by_turning']:.2f} k."
        )
