"""Which recurrent networks count, and what a LayerNorm term inside the cell does to the counter.

`counting`: tagging of prefixes, trained at 64 letters (Merrill et al. 2020, section 5); next-token prediction of a^n
b^n and a^n b^n c^n (Weiss et al. 2018, section 5). QRNN and QRNN+ also get ten times the updates (`LONG`).
`anbk`: an LSTM that tags a^n b^2n by an absolute value of its count, or by a threshold (released code of Merrill et
al.).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab import results
from ln_probe.analyses.lab.counting import tasks
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.runs import Run, carry_out, curves, planned
from ln_probe.analyses.lab.train import ADAM, ModelSpec, Task, TrainConfig
from ln_probe.analyses.lab.transformer import LabConfig

KEYS = ("task", "model", "norm", "norm_site")

# Accuracy in % at PUBLISHED_LENGTHS (Merrill et al. 2020, section 5, table of the two languages).
PUBLISHED = {
    ("L5", "lstm"): (100, 100, 99.6, 97.9, 94.1, 89.5), ("L5", "qrnn"): (90.2, 78.3, 67.0, 61.3, 58.6, 57.7),
    ("L5", "qrnn+"): (99.6, 87.3, 81.5, 82.1, 84.1, 87.0), ("L5", "qrnn x2"): (100, 99.3, 90.7, 65.8, 58.1, 59.2),
    ("anbnaS", "lstm"): (100, 100, 99, 95.5, 92.7, 88.6), ("anbnaS", "qrnn"): (80.0, 82, 79, 80.4, 79.5, 76.5),
    ("anbnaS", "qrnn+"): (82.0, 82.7, 78.8, 80.2, 77.8, 76.3),
    ("anbnaS", "qrnn x2"): (100, 98.1, 91.6, 89.6, 84.9, 78.7),
}  # fmt: skip
PUBLISHED_BUDGET = "up to 100 epochs of 100,000 words, until 10 epochs bring nothing (Merrill et al.)"
CHOSEN_SEEDS = 3  # that every cell has; L5's LSTM and transformer got seven more after these had been seen
# Cells of `recurrent`, of one layer but for the last.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "qrnn", "qrnn f", "qrnn ifo", "qrnn+", "qrnn x2")
TRANSFORMER = "transformer"
LONG = ", 10 x the updates"  # of a QRNN: fewer do not reach its published accuracy at the training length


class TransformerTagger(nn.Module):
    """A causal transformer of the laboratory without positions, behind the same output as the recurrent taggers."""

    def __init__(self, cfg: LabConfig, d_out: int) -> None:
        super().__init__()
        self.body, self.d_out = cfg.build(), d_out

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_out"]:
        start = torch.full_like(tokens[:, :1], self.body.cfg.d_vocab - 1)  # BOS, so that counts differ from shares
        logits: Tensor = self.body(torch.cat([start, tokens], dim=1))[:, 1:, : self.d_out]
        return logits


@dataclass(frozen=True)
class TransformerSpec:
    """One layer, one head, hidden size near the recurrent networks'; every norm is of the same kind."""

    d_vocab: int
    d_out: int
    norm: str
    n_ctx: int = tasks.TEST_LENGTHS[-1] + 1

    def build(self) -> TransformerTagger:
        cfg = LabConfig(
            n_layers=1, d_model=16, n_heads=1, d_vocab=max(self.d_vocab, self.d_out) + 1, n_ctx=self.n_ctx,
            norm=self.norm, norm_mlp=self.norm, norm_final=self.norm, positions="none", tied=False, init="torch",
        )  # fmt: skip
        return TransformerTagger(cfg, self.d_out)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": TRANSFORMER, **vars(self)}


@dataclass(frozen=True)
class Cell:
    task: str
    model: str
    norm: str = "none"
    norm_site: str = "none"

    def spec(self) -> ModelSpec:
        tagging = self.task not in tasks.LETTERS
        d_vocab = tasks.PREFIX_VOCABULARY if tagging else tasks.bos(tasks.LETTERS[self.task]) + 1
        d_out = 2 if tagging else d_vocab - 1
        if self.model == TRANSFORMER:
            return TransformerSpec(d_vocab, d_out, self.norm)
        cell = self.model.removesuffix(LONG).removesuffix(" x2")
        layers = 2 if self.model.endswith(" x2") else 1
        plain = RecurrentConfig(cell, d_vocab, d_out, d_embed=4 if tagging else 3, n_layers=layers)
        return plain if self.norm == "none" else replace(plain, norm=self.norm, norm_site=self.norm_site)


def grid(quick: bool) -> tuple[Cell, ...]:
    """What is trained, plain cells first."""
    if quick:
        return (
            *(Cell("L5", model) for model in ("lstm", "qrnn")),
            *(Cell("L5", "lstm", norm, "state") for norm in tasks.TERMS),
            *(Cell("anbn", model) for model in ("lstm", "rnn_relu", "gru")),
        )
    taggers = [Cell(task, model) for task in ("L5", "anbnaS", "anbnS") for model in RECURRENT]
    taggers += [Cell(task, model + LONG) for task in ("L5", "anbnaS") for model in ("qrnn", "qrnn+")]
    counters = [Cell(task, model) for task in tasks.LETTERS for model in ("lstm", "rnn_relu", "gru", "rnn_tanh")]
    transformers = [Cell("L5", TRANSFORMER, norm, "blocks") for norm in (*tasks.TERMS, "none")]
    sites = {"lstm": ("state", "readout", "gates"), "rnn_relu": ("state", "gates"), "gru": ("state", "gates")}
    normed = [
        Cell(task, model, norm, site)
        for task, models in (("L5", sites), ("anbn", ("lstm",)))  # a^n b^n: in the network that counts
        for model in models
        for site in sites[model]
        for norm in tasks.TERMS
    ]
    return (*taggers, *counters, *transformers, *normed)


def make_task(cell: Cell, quick: bool) -> Task:
    if cell.task in tasks.LETTERS:
        return tasks.CountingTask(cell.task, tasks.QUICK_TRAINED_N if quick else None)
    if quick:
        return tasks.PrefixTask(cell.task, tasks.TEST_LENGTHS[:4])
    plain = cell.norm == "none" and cell.model != TRANSFORMER
    return tasks.PrefixTask(cell.task, tasks.PUBLISHED_LENGTHS if plain else tasks.TEST_LENGTHS)


def training(cell: Cell, quick: bool, seed: int) -> TrainConfig:
    """Adam on fresh words: 16 words of 64 letters an update for tagging, 10 words for prediction.

    Prediction needs more updates: after 6000 no GRU and no ReLU-RNN is exact on any n. The ReLU-RNN
    gets still more and smaller ones: with those of the others it was exact nowhere (one seed).
    """
    counting = cell.task in tasks.LETTERS
    slow = counting and cell.model == "rnn_relu" and not quick
    many = slow or cell.model.endswith(LONG)
    steps, quick_steps = (100_000 if many else 30_000 if counting else 10_000), 1500 if counting else 1000
    steps = quick_steps if quick else steps
    return TrainConfig(
        steps=steps, batch=10 if counting else 16, lr=3e-3 if slow else 1e-2, lr_end=1e-4, warmup=100, clip=1.0,
        seed=seed, evaluate_every=steps, state_every=1000, **ADAM,
    )  # fmt: skip


def make_runs(request: Request, cells: Sequence[Cell] | None = None) -> list[Run]:
    return planned(
        grid(request.quick) if cells is None else cells,
        request,
        task=lambda cell, _: make_task(cell, request.quick),
        training=lambda cell, seed: training(cell, request.quick, seed),
    )


def run(request: Request) -> results.Results:
    """Train the missing runs of the grid and compare what they count."""
    runs = make_runs(request)
    lost = carry_out(runs, request)
    frame = curves(runs)
    frame = frame[frame["measure"].str.startswith(("accuracy_", "exact_", "accepted_")).astype(bool)]
    tables = analyse(frame)
    trained = {f"{c.task}, {c.model}": vars(training(c, request.quick, 0)) for c in grid(request.quick)}
    return results.Results(tables, plot(tables), {"training": trained, "published_budget": PUBLISHED_BUDGET}, lost)


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Make the tables of the values of every run: KEYS, `seed`, `step`, `measure`, `value`.

    `effects` are tested at the farthest length and on the largest exact n, Holm over these; `effects_fresh` is over
    the seeds that cells got after the first CHOSEN_SEEDS had been seen.
    """
    values = frame.drop(columns="step", errors="ignore")
    shares = [measure for measure in values["measure"].unique() if measure.startswith("accuracy_")]
    summary = results.summarize(values, [*KEYS, "measure"], published_table(), shares=shares)
    tagged = sorted(set(values["task"]) - set(tasks.LETTERS))
    summary = summary.merge(tasks.constant_answers(tagged), on=["task", "measure"], how="left")
    more = values.groupby(list(KEYS))["seed"].transform("nunique") > CHOSEN_SEEDS
    fresh = _tested(values[more & (values["seed"] >= CHOSEN_SEEDS)])
    return {"summary": summary, "values": frame, "effects": _tested(values), "effects_fresh": fresh}


def _tested(values: pd.DataFrame) -> pd.DataFrame:
    """What a norm changes: each value minus that of the same network and seed without a norm."""
    pairs = results.minus_reference(values, values["norm"] == "none", ["task", "model", "measure", "seed"])
    tested = {"measure": tasks.farthest(pairs["measure"].unique())}
    changed = results.contrasted(pairs, [*KEYS, "measure"], tested=tested)
    most = changed["measure"].str.startswith("accuracy_").map({True: 1.0, False: np.inf})
    changed[["ci_low", "ci_high"]] = changed[["ci_low", "ci_high"]].clip(-most, most, axis=0)
    return changed


def published_table() -> pd.DataFrame:
    """Published accuracy (0-1) of the plain taggers."""
    rows = [
        (task, model + longer, "none", "none", f"accuracy_{n}", percent / 100)
        for (task, model), percents in PUBLISHED.items()
        for longer in ("", LONG)
        for n, percent in zip(tasks.PUBLISHED_LENGTHS, percents, strict=True)
    ]
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "published"])


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Accuracy over length of plain models and of each norm; the n on which each network is exact."""
    summary, figures = tables["summary"], {}
    accuracy = summary[summary["measure"].str.startswith("accuracy_").astype(bool)]
    accuracy = accuracy.assign(length=accuracy["measure"].str.removeprefix("accuracy_").astype(int))
    plain = accuracy[accuracy["norm_site"] == "none"]
    normed = accuracy.assign(place=accuracy["model"] + ", on its " + accuracy["norm_site"])
    for name, part, by, panel in (("lengths", plain, "model", "task"), ("norms_over_lengths", normed, "norm", "place")):
        figures[name] = results.line_panels(part, [panel], "length", by, xscale="log", xlabel="length (trained at 64)")
    ends = results.select(tables["values"], measure=["exact_from", "exact_to"])
    wide = ends.pivot_table(index=[*KEYS, "seed"], columns="measure", values="value", sort=False).reset_index()
    if len(wide):
        figure, (ax,) = results.panels(1, 7, 0.09 * len(wide) + 1)
        ax.hlines(range(len(wide)), wide["exact_from"], wide["exact_to"], linewidth=2)
        ax.set_yticks(range(len(wide)), labels=wide["task"] + ", " + wide["model"] + ", " + wide["norm"], fontsize=4)
        ax.set(xlabel="n with exact answers, a line per seed")
        figures["exact"] = figure
    return figures


ANBK_UPDATES, ANBK_QUICK_UPDATES = 1000, 60
ANBK_KEYS = ["form", "lr"]
ANBK_RATES = (1e-3, 1e-2)  # as released, and what `counting` takes


def run_anbk(request: Request) -> results.Results:
    """Adam at a constant rate, as released."""
    updates = ANBK_QUICK_UPDATES if request.quick else ANBK_UPDATES
    training = TrainConfig(
        steps=updates,
        batch=16,
        schedule="constant",
        warmup=0,
        clip=0.0,
        evaluate_every=updates // 5,
        **ADAM,
    )
    runs = planned(
        [(form, lr) for lr in ANBK_RATES for form in (tasks.ABSOLUTE, tasks.THRESHOLD)],
        request,
        keys=lambda cell: dict(zip(ANBK_KEYS, cell, strict=True)),
        spec=lambda _: RecurrentConfig("lstm", tasks.PREFIX_VOCABULARY, 2),
        task=lambda cell, _: tasks.AnbkTask(cell[0]),
        training=lambda cell, seed: replace(training, lr=cell[1], seed=seed),
    )
    lost = carry_out(runs, request)
    frame = results.select(curves(runs), measure=[tasks.TRAINED_TAGS, tasks.TAGS, tasks.WORDS_RIGHT])
    return results.Results(analyse_anbk(frame), {}, {"updates": updates, "constant_answer": [2 / 3, 1 / 2]}, lost)


def analyse_anbk(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What every run has right at the end (ANBK_KEYS, `seed`, `step`, `measure`, `value`), and the forms compared."""
    last = frame[frame["step"] == frame.groupby([*ANBK_KEYS, "seed"])["step"].transform("max")]
    wide = results.select(last, measure=tasks.TAGS).pivot_table(index=["seed", "lr"], columns="form", values="value")
    pairs = results.differences(wide, {f"{tasks.THRESHOLD} minus {tasks.ABSOLUTE}": (tasks.THRESHOLD, tasks.ABSOLUTE)})
    return {
        "summary": results.summarize(last, [*ANBK_KEYS, "measure"], kind="share"),
        "values": frame,
        "contrasts": results.contrasted(pairs, ["contrast", "lr"], (-1.0, 1.0)),
    }
