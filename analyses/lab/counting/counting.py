"""Which recurrent networks count, and what a LayerNorm term inside the cell does to the counter.

Three parts:

* tagging of prefixes (L5, a^n b^n S*), trained at length 64 and tested up to 1024, recurrent networks without a norm
  up to 2048 as in the source (Merrill et al. 2020, section 5);
* next-token prediction of a^n b^n and a^n b^n c^n: to which n is the network exact? (Weiss et al. 2018, section 5);
* a majority gate without training: uniform attention over a prefix of length t gives (#a / t, #b / t). Projecting out
  the all-ones direction takes half the difference, (d, -d) / (2t) with d = #a - #b; scaling divides by its size and
  leaves sign(d) (1, -1) for every t.

QRNNs differ in their pooling, too (f, fo as published, ifo). Hypothesis, written down before the runs with f and ifo,
after section 3 of the source: with ifo-pooling, which can count, the accuracy on L5 is higher than with f and with fo.

The norm is a switch in the LSTM, the GRU and the ReLU-RNN (`recurrent`), and in a one-layer transformer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab.counting.counting_tasks import (
    ACCEPTED,
    LETTERS,
    MAX_TESTED_N,
    PREFIX_VOCABULARY,
    PUBLISHED_LENGTHS,
    TERMS,
    TEST_LENGTHS,
    TRAIN_LENGTH,
    CountingTask,
    PrefixTask,
    bos,
    constant_answers,
    farthest,
    trained_to,
)
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, Norm
from ln_probe.analyses.lab.results import Kind, Results, effects, panels, summarize_kinds
from ln_probe.analyses.lab.train import ADAM, ModelSpec, Run, Task, TrainConfig, carry_out, curves, planned
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.analyses.probes.statistics import holm

GATE_LENGTHS = (5, 15, 51, 151, 501, 1501, 5001)  # odd, so that one a more than b's is possible


def gate_table(lengths: Sequence[int] = GATE_LENGTHS, eps: float = 1e-5) -> pd.DataFrame:
    """How far the outputs for #a = #b + 1 and #b = #a + 1 differ at each length.

    Columns: `norm, length, output`: half the difference between the two cases in the first coordinate, so 1 is a full
    gate and what is near 0 is hard to read. `eps` is torch's default.

    Raises:
        ValueError: a length that is not odd and positive.
    """
    rows = []
    for norm in NORM_KINDS:
        gate = Norm(norm, 2, eps=eps, divisor=None if norm in SCALES else 1.0, gain=False, bias=False).double()
        for length in lengths:
            if length < 1 or length % 2 == 0:
                raise ValueError(f"lengths must be odd and positive, got {length}: of an even one no half is one more")
            more, less = (length + 1) / (2 * length), (length - 1) / (2 * length)
            with torch.no_grad():
                out = gate(torch.tensor([[more, less], [less, more]], dtype=torch.float64))
            rows.append((norm, length, float(out[0, 0] - out[1, 0]) / 2))
    return pd.DataFrame(rows, columns=["norm", "length", "output"])


KEYS = ("task", "model", "norm", "norm_site")

# Accuracy in % at PUBLISHED_LENGTHS (Merrill et al. 2020, section 5, table of the two languages).
PUBLISHED = {
    ("L5", "lstm"): (100, 100, 99.6, 97.9, 94.1, 89.5),
    ("L5", "qrnn"): (90.2, 78.3, 67.0, 61.3, 58.6, 57.7),
    ("L5", "qrnn+"): (99.6, 87.3, 81.5, 82.1, 84.1, 87.0),
    ("L5", "qrnn x2"): (100, 99.3, 90.7, 65.8, 58.1, 59.2),
    ("anbnaS", "lstm"): (100, 100, 99, 95.5, 92.7, 88.6),
    ("anbnaS", "qrnn"): (80.0, 82, 79, 80.4, 79.5, 76.5),
    ("anbnaS", "qrnn+"): (82.0, 82.7, 78.8, 80.2, 77.8, 76.3),
    ("anbnaS", "qrnn x2"): (100, 98.1, 91.6, 89.6, 84.9, 78.7),
}
PUBLISHED_BUDGET = "up to 100 epochs of 100,000 words, until 10 epochs bring nothing (Merrill et al.)"
# A model whose accuracy at the training length is this far below the published one is not compared at longer words.
# One whose accuracy is not this far above that of a constant answer counts as equal to it.
TRAINED = 0.01
CHOSEN_SEEDS = 3  # that every cell has; L5's LSTM and transformer got seven more after these had been seen
PUBLISHED_EXACT = "LSTM and ReLU-RNN go well past the largest trained n, GRU does not (Weiss et al.)"
# Cells of `recurrent`, of one layer but for the last.
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu", "qrnn", "qrnn f", "qrnn ifo", "qrnn+", "qrnn x2")
TRANSFORMER = "transformer"


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
    n_ctx: int = TEST_LENGTHS[-1] + 1

    def build(self) -> TransformerTagger:
        cfg = LabConfig(
            n_layers=1,
            d_model=16,
            n_heads=1,
            d_vocab=max(self.d_vocab, self.d_out) + 1,
            n_ctx=self.n_ctx,
            norm=self.norm,
            norm_mlp=self.norm,
            norm_final=self.norm,
            positions="none",
            tied=False,
            init="torch",
        )
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
        tagging = self.task not in LETTERS
        d_vocab = PREFIX_VOCABULARY if tagging else bos(LETTERS[self.task]) + 1
        d_out = 2 if tagging else d_vocab - 1
        if self.model == TRANSFORMER:
            return TransformerSpec(d_vocab, d_out, self.norm)
        cell = self.model.removesuffix(" x2")
        layers = 1 if cell == self.model else 2
        plain = RecurrentConfig(cell, d_vocab, d_out, d_embed=4 if tagging else 3, n_layers=layers)
        return plain if self.norm == "none" else replace(plain, norm=self.norm, norm_site=self.norm_site)


def grid(quick: bool) -> tuple[Cell, ...]:
    """What is trained, plain cells first."""
    if quick:
        return (
            *(Cell("L5", model) for model in ("lstm", "qrnn")),
            *(Cell("L5", "lstm", norm, "state") for norm in TERMS),
            *(Cell("anbn", model) for model in ("lstm", "rnn_relu", "gru")),
        )
    taggers = [Cell(task, model) for task in ("L5", "anbnaS", "anbnS") for model in RECURRENT]
    counters = [Cell(task, model) for task in LETTERS for model in ("lstm", "rnn_relu", "gru", "rnn_tanh")]
    transformers = [Cell("L5", TRANSFORMER, norm, "blocks") for norm in (*TERMS, "none")]
    sites = {"lstm": ("state", "readout", "gates"), "rnn_relu": ("state", "gates"), "gru": ("state", "gates")}
    normed = [
        Cell(task, model, norm, site)
        for task, models in (("L5", sites), ("anbn", ("lstm",)))  # a^n b^n: in the network that counts
        for model in models
        for site in sites[model]
        for norm in TERMS
    ]
    return (*taggers, *counters, *transformers, *normed)


def make_task(cell: Cell, quick: bool) -> Task:
    if cell.task in LETTERS:
        return CountingTask(cell.task, trained_to(cell.task, quick))
    if quick:
        return PrefixTask(cell.task, TEST_LENGTHS[:4])
    plain = cell.norm == "none" and cell.model in RECURRENT
    return PrefixTask(cell.task, PUBLISHED_LENGTHS if plain else TEST_LENGTHS)


def training(cell: Cell, quick: bool, seed: int) -> TrainConfig:
    """Adam on fresh words: 16 words of 64 letters an update for tagging, 10 words for prediction.

    Prediction needs the more updates: after 6000 no GRU and no ReLU-RNN is exact on any n, however small. The ReLU-RNN,
    whose steps are the least stable, gets still more and smaller ones: with those of the others it was exact nowhere
    (one seed).
    """
    counting = cell.task in LETTERS
    slow = counting and cell.model == "rnn_relu" and not quick
    steps, quick_steps = (100_000 if slow else 30_000, 1500) if counting else (10_000, 1000)
    steps = quick_steps if quick else steps
    return TrainConfig(
        steps=steps,
        batch=10 if counting else 16,
        lr=3e-3 if slow else 1e-2,
        lr_end=1e-4,
        warmup=100,
        clip=1.0,
        seed=seed,
        evaluate_every=steps,
        state_every=1000,
        **ADAM,
    )


def make_runs(request: Request, cells: Sequence[Cell] | None = None) -> list[Run]:
    return planned(
        grid(request.quick) if cells is None else cells,
        request,
        name=lambda cell: "-".join(str(getattr(cell, key)) for key in KEYS).replace(" ", ""),
        task=lambda cell, _: make_task(cell, request.quick),
        training=lambda cell, seed: training(cell, request.quick, seed),
    )


def run(request: Request) -> Results:
    """Train the missing runs of the grid, show the gate, and say what each norm term does to counting."""
    runs = make_runs(request)
    lost = carry_out(runs, request)
    table = curves(runs)
    table = table[table["measure"].str.startswith(("accuracy_", "exact_", "accepted_")).astype(bool)]
    return replace(findings(table, request.quick), diverged=lost)


def findings(table: pd.DataFrame, quick: bool = False) -> Results:
    """Tables and figures from the values of every run: KEYS, `seed`, `step`, `measure`, `value`."""
    values = table.drop(columns="step", errors="ignore")
    shares = values["measure"].str.startswith("accuracy_").astype(bool)
    kinds: list[tuple[pd.DataFrame, Kind]] = [(values[shares], "share"), (values[~shares], "mean")]
    summary = summarize_kinds(kinds, [*KEYS, "measure"], published_table())
    places = {key: list(dict.fromkeys(values[key])) for key in KEYS}  # the order of the grid
    summary = summary.sort_values([*KEYS], key=lambda c: c.map(places[str(c.name)].index), kind="stable")
    tagged = sorted(set(values["task"]) - set(LETTERS))
    least = values.groupby([*KEYS, "measure"])["value"].min().rename("least").reset_index()
    summary = summary.merge(least, on=[*KEYS, "measure"], how="left")
    summary = summary.merge(constant_answers(tagged), on=["task", "measure"], how="left")
    more = values.groupby(list(KEYS))["seed"].transform("nunique") > CHOSEN_SEEDS
    changed, fresh = _tested(values), _tested(values[more & (values["seed"] >= CHOSEN_SEEDS)])
    gate = gate_table()
    return Results(
        summary,
        tables={"values": table, "effects": changed, "effects_fresh": fresh, "gate": gate},
        figures=dict(draw(summary, table, quick)),
        settings={
            "train_length": TRAIN_LENGTH,
            "accepted": ACCEPTED,
            "published_exact": PUBLISHED_EXACT,
            "published_budget": PUBLISHED_BUDGET,
            "max_trained_n": {task: trained_to(task, quick) for task in LETTERS},
            "seeds": sorted({int(seed) for seed in table["seed"]}),
            "chosen_seeds": f"cells with more than {CHOSEN_SEEDS} seeds got them after the first {CHOSEN_SEEDS} had "
            "been seen: effects_fresh is over the later ones alone",
            "training": {f"{c.task}, {c.model}": vars(training(c, quick, 0)) for c in grid(quick)},
        },
    )


def _tested(values: pd.DataFrame) -> pd.DataFrame:
    """`effects`, tested at the farthest length and on the largest exact n, Holm over these."""
    shares = values["measure"].str.startswith("accuracy_").astype(bool)
    keys, switch = [*KEYS, "measure"], ["norm", "norm_site"]
    parts = [effects(values[shares], keys, switch, bounds=(-1, 1)), effects(values[~shares], keys, switch)]
    found = pd.concat(parts, ignore_index=True)
    found.loc[~found.index.isin(farthest(found).index), "p"] = float("nan")
    return found.assign(p_holm=holm(found["p"].to_numpy(float)))


def published_table() -> pd.DataFrame:
    """Published accuracy (0-1) of the plain taggers."""
    rows = [
        (task, model, "none", "none", f"accuracy_{n}", percent / 100)
        for (task, model), percents in PUBLISHED.items()
        for n, percent in zip(PUBLISHED_LENGTHS, percents, strict=True)
    ]
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "published"])


def draw(summary: pd.DataFrame, values: pd.DataFrame, quick: bool = False) -> Iterator[tuple[str, Figure]]:
    """Every picture by name, of what there is."""
    accuracy = summary[summary["measure"].str.startswith("accuracy_").astype(bool)]
    if len(plain := accuracy[accuracy["norm_site"] == "none"]):
        yield "lengths", _over_lengths(plain)
    if len(accuracy[accuracy["norm"] != "none"]):
        yield "norms_over_lengths", _terms_over_lengths(accuracy)
    if len(counted := values[values["measure"].isin(["exact_from", "exact_to"])]):
        yield "exact", _exact_ranges(counted, quick)


def _over_lengths(part: pd.DataFrame) -> Figure:
    """Accuracy of the plain models over length, a panel per task; published figures dotted."""
    tasks = list(dict.fromkeys(part["task"]))
    figure, axes = panels(len(tasks), 4.6, 3.8, shared=True)
    for task, ax in zip(tasks, axes, strict=True):
        for number, (model, line) in enumerate(part[part["task"] == task].groupby("model", sort=False)):
            _draw_line(ax, line, f"C{number}", str(model))
            ax.plot(_lengths(line), line["published"], color=f"C{number}", linestyle=":")
        ax.set(title=task, ylabel="accuracy; dotted: published")
        ax.legend(fontsize=7)
    return figure


def _terms_over_lengths(accuracy: pd.DataFrame) -> Figure:
    """Accuracy over length with each term and without, a panel per model and place of the norm."""
    normed = accuracy[accuracy["norm"] != "none"]
    places = list(dict.fromkeys(zip(normed["task"], normed["model"], normed["norm_site"], strict=True)))
    figure, axes = panels(len(places), 3.6, 2.8, columns=4, shared=True)
    for (task, model, site), ax in zip(places, axes, strict=True):
        cell = accuracy[(accuracy["task"] == task) & (accuracy["model"] == model)]
        for number, norm in enumerate(("none", *TERMS)):
            line = cell[(cell["norm"] == norm) & ((cell["norm_site"] == site) | (norm == "none"))]
            _draw_line(ax, line, f"C{number}", norm)
        ax.set_title(f"{task}: {model}, on its {site}", fontsize=9)
    axes[0].legend(fontsize=7)
    return figure


def _lengths(line: pd.DataFrame) -> list[int]:
    return [int(m.removeprefix("accuracy_")) for m in line["measure"]]


def _draw_line(ax: Any, line: pd.DataFrame, color: str, label: str) -> None:
    lengths = _lengths(line)
    ax.plot(lengths, line["mean"], color=color, marker="o", markersize=3, label=label)
    ax.fill_between(lengths, line["ci_low"].clip(0), line["ci_high"].clip(upper=1), color=color, alpha=0.12, lw=0)
    ax.set(xscale="log", xlabel="length (trained at 64)")
    if lengths:
        ax.set_xticks(lengths, labels=lengths)
    ax.minorticks_off()


def _exact_ranges(values: pd.DataFrame, quick: bool) -> Figure:
    """The n's on which each network is exact, a line per seed, a panel per task; dotted: the largest trained n."""
    keys = ["task", "model", "norm", "norm_site"]
    ends = values.pivot(index=[*keys, "seed"], columns="measure", values="value")
    cells = values[keys].drop_duplicates()
    tasks = list(dict.fromkeys(cells["task"]))
    figure, axes = panels(len(tasks), 5.2, 0.28 * cells["task"].value_counts().max() + 1.2)
    for task, ax in zip(tasks, axes, strict=True):
        names, trained = [], trained_to(str(task), quick)
        for place, cell in enumerate(cells[cells["task"] == task].itertuples(index=False, name=None)):
            _, model, norm, site = cell
            names.append(model if norm == "none" else f"{model}, {norm} on {site}")
            seeds = ends.loc[cell]
            for number, (first, last) in enumerate(zip(seeds["exact_from"], seeds["exact_to"], strict=True)):
                at = place + (number - (len(seeds) - 1) / 2) * 0.7 / len(seeds)
                if last:
                    ax.plot([first, last], [at, at], "C0|-", linewidth=2, markersize=4)
                else:
                    ax.plot(0, at, "x", color="C3", markersize=4)  # on none
        ax.axvline(trained, color="k", linewidth=0.8, linestyle=":")
        ax.set_yticks(range(len(names)), labels=names, fontsize=8)
        ax.set(
            title=task,
            xlim=(-3, MAX_TESTED_N * trained),
            xlabel=f"n with exact answers (x: none; dotted: trained to {trained})",
        )
        ax.invert_yaxis()
    return figure
