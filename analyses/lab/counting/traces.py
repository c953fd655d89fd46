"""How a network counts, letter by letter, and where exactly a norm in its cell ends the count.

Weiss, Goldberg & Yahav (2018) claim that LSTMs and ReLU-RNNs count and GRUs do not, and show it by traces of an LSTM's
cell state over a^n b^n and a^n b^n c^n. Here networks are trained as in `counting`, with a norm in the LSTM's
cell and without; in each, the dimension that counts is found, followed beyond the trained n, and compared with
what the network itself does. Tasks, models and names of runs are those of `counting`.

Over each run of one letter (a phase) a line is fitted to each dimension of the state (least squares); a dimension
is a candidate for a phase if it goes one way there and the other way in an earlier phase, straight in both
(`STRAIGHT`), and counts if these lines also tell every letter apart (`READABLE`). The state is an LSTM's c as it is
carried on (normed, if a norm stands on it), any other cell's h.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import nn

from ln_probe.analyses.lab.counting import counting
from ln_probe.analyses.lab.counting.recurrent import NormedLayer, RecurrentTagger
from ln_probe.analyses.lab.counting.tasks import MAX_TESTED_N, TERMS, CountingTask, bos
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, line_panels, summarize
from ln_probe.analyses.lab.runs import Run, carry_out
from ln_probe.analyses.lab.train import read_metrics

# R²; of a state that nears a limit: .9992 if its slope falls by a fifth in the phase, .996 by 40 %. So it is passed by
# what bends by several letters, and READABLE is required as well.
STRAIGHT = 0.999
SETTLING = 5  # letters at the beginning of a phase, left out of every fit: gates turn over there
# Of a letter: what a count may be off its line and still be right when it is rounded, all through the longest trained
# word.
READABLE = 0.5
PHASES = "abc"
SITES = ("state", "readout", "gates")
KEYS = counting.KEYS
NETWORK = (*KEYS, "seed", "phase")
# Of a network and the phase in which it counts down; exact_* and accepted_to are the run's own evaluation.
MEASURES = (
    "dimensions_counting", "slope_before", "slope_in", "r2_before", "r2_in", "exact_from", "exact_to", "accepted_to",
    "off_before", "off_in", "counts",
)  # fmt: skip


@torch.no_grad()
def phases(model: nn.Module, letters: int, n: int) -> Float[np.ndarray, "phase letter hidden"]:
    """The state (an LSTM's c) after every letter of a^n b^n (2 letters) or a^n b^n c^n, in float64.

    Args:
        model: a trained tagger of one LSTM, GRU or Elman layer.
    """
    if not isinstance(model, RecurrentTagger) or model.cfg.n_layers != 1 or model.cfg.cell.startswith("qrnn"):
        what = model.cfg if isinstance(model, RecurrentTagger) else type(model).__name__
        raise ValueError(f"traces are of one LSTM, GRU or Elman layer, got {what}")
    double = copy.deepcopy(model).double().eval()
    layer = cast("NormedLayer", double.layers[0])
    step, inputs = layer.step(), layer.inputs(double.embed(torch.arange(bos(letters) + 1))[None])[0]
    start = layer.start(1)
    h, c = step(inputs[[bos(letters)]], start, start)
    trace = []
    for token in (1 + phase for phase in range(letters) for _ in range(n)):
        h, c = step(inputs[[token]], h, c)
        trace.append((c if model.cfg.cell == "lstm" else h)[0, : model.cfg.hidden].numpy())
    return np.stack(trace).reshape(letters, n, -1)


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
    """Lay the least-squares line through all letters but the first SETTLING."""
    letter, settled = np.arange(1, len(trace) + 1)[SETTLING:], trace[SETTLING:]
    slope, start = (float(x) for x in np.polyfit(letter, settled, 1))
    rest = settled - start - slope * letter
    spread = float(((settled - settled.mean()) ** 2).sum())
    still = spread <= 1e-20 * max(1.0, float(np.abs(settled).max())) ** 2 * len(settled)
    r2 = float("nan") if still else 1 - float((rest**2).sum()) / spread
    return Line(slope, r2, float(np.abs(rest).max()) / abs(slope) if slope and not still else float("inf"))


def counter_of(trace: Float[np.ndarray, "phase letter hidden"], phase: int) -> tuple[int, int, int]:
    """Return the dimension that counts for a phase, the earlier phase in which it goes the other way, and how many do.

    A candidate has slopes of opposite sign and R² of STRAIGHT or more in both. The straightest is named; if none is a
    candidate, the straightest of those that turn (dimension 0 if none turns).
    """
    fits = [[line_through(trace[p, :, d]) for d in range(trace.shape[2])] for p in range(phase + 1)]
    best, candidates = (float("nan"), 0, 0), set[int]()
    for earlier in range(phase):
        for dimension, (there, here) in enumerate(zip(fits[earlier], fits[phase], strict=True)):
            least = min(there.r2, here.r2)
            if there.slope * here.slope < 0 and not np.isnan(there.r2 + here.r2):
                best = (least, dimension, earlier) if not best[0] >= least else best
                if least >= STRAIGHT:
                    candidates.add(dimension)
    return best[1], best[2], len(candidates)


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
    parts = [followed(run) for run in runs if run.finished]
    tables = analyse(*(pd.concat([part[i] for part in parts], ignore_index=True) for i in range(2)))
    return Results(tables, plot(tables), {"straight": STRAIGHT, "readable": READABLE, "settling": SETTLING}, lost)


def followed(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The rows of a finished run: `networks`, and `traces` of the dimension that counts."""
    task = cast("CountingTask", run.task)
    trained, tested = task.max_n, MAX_TESTED_N * task.max_n
    short, long = (phases(run.model(), task.letters, n) for n in (trained, tested))
    evaluated = read_metrics(run.folder).iloc[-1]
    networks, traces = [], []
    for phase in range(1, task.letters):
        dimension, earlier, candidates = counter_of(short, phase)
        there, here = (line_through(short[p, :, dimension]) for p in (earlier, phase))
        keys = {**dict(run.keys), "seed": run.seed, "phase": PHASES[phase]}
        numbers = (
            candidates, there.slope, here.slope, there.r2, here.r2,
            *evaluated[["exact_from", "exact_to", "accepted_to"]].astype(float),
            there.off, here.off, int(candidates > 0 and max(there.off, here.off) <= READABLE),
        )  # fmt: skip
        about = {"dimension": dimension, "before": PHASES[earlier], "trained_n": trained, "tested_n": tested}
        networks.append(pd.DataFrame([{**keys, **about, **dict(zip(MEASURES, numbers, strict=True))}]))
        for word in (short, long):
            values = word[..., dimension].reshape(-1)
            letter = np.arange(1, len(values) + 1)
            traces.append(pd.DataFrame({**keys, "n": word.shape[1], "letter": letter, "value": values}))
    return pd.concat(networks), pd.concat(traces)


def analyse(networks: pd.DataFrame, traces: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary of MEASURES over seeds, beside the tables of `followed`."""
    values = networks.melt([*NETWORK], [*MEASURES], "measure", "value")
    values["value"] = values["value"].astype(float)
    summary = summarize(values, [*KEYS, "phase", "measure"])
    return {"summary": summary, "networks": networks, "traces": traces}


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """The dimension that counts, or comes nearest, over letters; and after how many letters a phase ends, over n."""
    first = tables["traces"][tables["traces"]["seed"] == tables["traces"]["seed"].min()]
    return {"traces": line_panels(first, [*KEYS, "phase"], "letter", "n", "value")}
