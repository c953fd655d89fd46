"""Which recurrent networks count, and what a LayerNorm term inside the cell does to the counter.

Three parts:

* tagging of prefixes (L5, a^n b^n S*), trained at length 64 and tested up to 1024 (Merrill et al. 2020, section 5);
* next-token prediction of a^n b^n and a^n b^n c^n: to which n is the network exact? (Weiss et al. 2018, section 5);
* no training at all: attention over a prefix gives (#a, #b) / t, and LayerNorm of that pair is the sign of #a - #b:
  projection takes the difference, scaling removes the 1/t.

The norm is a switch in the LSTM, the GRU and the ReLU-RNN (`recurrent`), and in a one-layer transformer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.counter_languages import (
    PAD,
    PREFIX_VOCABULARY,
    Tagged,
    allowed_next,
    bos,
    counted_words,
    sample_prefixes,
)
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.majority_gate import gate_table
from ln_probe.analyses.lab.model import LabConfig
from ln_probe.analyses.lab.recurrent import RecurrentConfig
from ln_probe.analyses.lab.results import Results, effects, summarize
from ln_probe.analyses.lab.runs import Run, carry_out, curves, diverged
from ln_probe.analyses.lab.training import ModelSpec, Task, TrainConfig, step_generator

TRAIN_LENGTH = 64
TEST_LENGTHS = (64, 128, 256, 512, 1024)
EVALUATION_SEED = 10_000  # apart from every training seed
EVALUATION_LABELS = 100_000  # labels per length, so that short and long words are measured alike well
ACCEPTED = 0.005  # a token is accepted if its probability exceeds this: Weiss et al.
LETTERS = {"anbn": 2, "anbncn": 3}
MAX_TRAINED_N = {"anbn": 99, "anbncn": 49}
MAX_TESTED_N = 3  # times the largest trained n
KEYS = ("task", "model", "norm", "norm_site")

# Accuracy in per cent at lengths 64, 128, 256, 512, 1024 (Merrill et al., tables of section 5).
PUBLISHED = {
    ("L5", "lstm"): (100, 100, 99.6, 97.9, 94.1),
    ("L5", "qrnn"): (90.2, 78.3, 67.0, 61.3, 58.6),
    ("L5", "qrnn+"): (99.6, 87.3, 81.5, 82.1, 84.1),
    ("L5", "qrnn x2"): (100, 99.3, 90.7, 65.8, 58.1),
    ("anbnaS", "lstm"): (100, 100, 99, 95.5, 92.7),
    ("anbnaS", "qrnn"): (80.0, 82, 79, 80.4, 79.5),
    ("anbnaS", "qrnn+"): (82.0, 82.7, 78.8, 80.2, 77.8),
    ("anbnaS", "qrnn x2"): (100, 98.1, 91.6, 89.6, 84.9),
}
PUBLISHED_EXACT = "LSTM and ReLU-RNN go well past the largest trained n, GRU does not (Weiss et al.)"
# (cell, layers) of each recurrent model by the name it has in the tables.
RECURRENT = {
    "lstm": ("lstm", 1), "gru": ("gru", 1), "rnn_tanh": ("rnn_tanh", 1), "rnn_relu": ("rnn_relu", 1),
    "qrnn": ("qrnn", 1), "qrnn+": ("qrnn+", 1), "qrnn x2": ("qrnn", 2),
}  # fmt: skip
TRANSFORMER = "transformer"


class PrefixTask:
    """Label every prefix of words of one length; accuracy over labels at every test length."""

    def __init__(self, language: str, lengths: tuple[int, ...] = TEST_LENGTHS) -> None:
        self.name, self.lengths = language, lengths

    @property
    def identity(self) -> dict[str, Any]:
        return {"train_length": TRAIN_LENGTH, "lengths": self.lengths, "labels": EVALUATION_LABELS}

    def batch(self, step: int, size: int, seed: int) -> Tagged:
        return sample_prefixes(self.name, TRAIN_LENGTH, size, step_generator(seed, step))

    def loss(self, model: nn.Module, batch: Tagged) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())

    @cached_property
    def _evaluation(self) -> dict[int, Tagged]:
        return {
            n: sample_prefixes(self.name, n, -(-EVALUATION_LABELS // n), step_generator(EVALUATION_SEED, n))
            for n in self.lengths
        }

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            f"accuracy_{n}": float((model(words.tokens).argmax(-1) == words.labels).float().mean())
            for n, words in self._evaluation.items()
        }

    def write_files(self, out: Path) -> None:
        pass


class CountingTask:
    """Predict the next token of a^n b^n or a^n b^n c^n, n uniform; how far is the network exact?"""

    def __init__(self, language: str, max_n: int | None = None) -> None:
        self.name, self.letters = language, LETTERS[language]
        self.max_n = max_n or MAX_TRAINED_N[language]

    @property
    def identity(self) -> dict[str, Any]:
        return {"max_n": self.max_n, "tested_n": MAX_TESTED_N * self.max_n, "accepted": ACCEPTED}

    def batch(self, step: int, size: int, seed: int) -> tuple[Int[Tensor, "word pos"], Int[Tensor, "word pos"]]:
        n = torch.randint(1, self.max_n + 1, (size,), generator=step_generator(seed, step))
        return counted_words(self.letters, n)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=PAD)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return counted(model, self.letters, MAX_TESTED_N * self.max_n)

    def write_files(self, out: Path) -> None:
        pass


def counted(model: nn.Module, letters: int, largest: int) -> dict[str, float]:
    """How far a next-token model counts, for n = 1 … `largest`.

    It accepts a word if every token of it, EOS included, has p > 0.005 (Weiss et al.). It is exact on n if along
    a^n b^n (c^n), after each prefix, it accepts the tokens that may come next and no other: so it accepts the word and
    rejects every word that leaves it at any place.

    Returns:
        `exact_from`, `exact_to`: the longest run of n's on which it is exact (0, 0: there is none);
        `accepted_to`: the largest N such that it accepts the words of n = 1 … N.
    """
    exact, accepts = [], []
    for n in range(1, largest + 1):
        inputs, targets = counted_words(letters, torch.tensor([n]))
        p = model(inputs)[0].softmax(-1)
        exact.append(torch.equal(p > ACCEPTED, allowed_next(letters, n)))
        accepts.append(bool((p.gather(1, targets[0][:, None]) > ACCEPTED).all()))
    best = (0, 0)
    for right, run_of in itertools.groupby(enumerate(exact, start=1), key=lambda item: item[1]):
        found = [n for n, _ in run_of]
        if right and (not best[0] or len(found) > best[1] - best[0] + 1):
            best = found[0], found[-1]
    accepted_to = next((n for n, yes in enumerate(accepts) if not yes), largest)
    return {"exact_from": float(best[0]), "exact_to": float(best[1]), "accepted_to": float(accepted_to)}


class TransformerTagger(nn.Module):
    """A causal transformer of the laboratory without positions, behind the same output as the recurrent taggers."""

    def __init__(self, cfg: LabConfig, d_out: int) -> None:
        super().__init__()
        self.body, self.d_out = cfg.build(), d_out

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_out"]:
        start = torch.full_like(tokens[:, :1], self.body.cfg.d_vocab - 1)  # BOS, so that counts can be told from shares
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
            n_layers=1, d_model=16, n_heads=1, d_vocab=max(self.d_vocab, self.d_out) + 1, n_ctx=self.n_ctx,
            norm=self.norm, norm_mlp=self.norm, norm_final=self.norm, positions="none", tied=False, init="torch",
        )  # fmt: skip
        return TransformerTagger(cfg, self.d_out)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": TRANSFORMER, **vars(self)}


@dataclass(frozen=True)
class Cell:
    """One model on one task."""

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
        cell, layers = RECURRENT[self.model]
        plain = RecurrentConfig(cell, d_vocab, d_out, d_embed=4 if tagging else 3, n_layers=layers)
        return plain if self.norm == "none" else replace(plain, norm=self.norm, norm_site=self.norm_site)


TERMS = ("layernorm", "scaling_only", "projection_only")


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
        return CountingTask(cell.task, 30 if quick else None)
    return PrefixTask(cell.task, TEST_LENGTHS[:4] if quick else TEST_LENGTHS)


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
        steps=steps, batch=10 if counting else 16, lr=3e-3 if slow else 1e-2, lr_end=1e-4, warmup=100,
        weight_decay=0.0, clip=1.0, betas=(0.9, 0.999), optimizer="adam", seed=seed, evaluate_every=steps,
        state_every=1000,
    )  # fmt: skip


def planned(request: Request) -> list[Run]:
    """Every run: all cells with the first seed, then all with the next, so that a part of it is already a result."""
    return [
        Run(
            keys={key: getattr(cell, key) for key in KEYS},
            task=make_task(cell, request.quick),
            spec=cell.spec(),
            training=training(cell, request.quick, seed),
            folder=request.out
            / "runs"
            / "-".join([*(str(getattr(cell, key)) for key in KEYS), f"seed{seed}"]).replace(" ", ""),
        )
        for seed in request.seeds
        for cell in grid(request.quick)
    ]


def run(request: Request) -> Results:
    """Train the grid (or what is left of it), show the gate, and say what each norm term does to counting."""
    from ln_probe.analyses.lab.counting_figures import draw

    runs = planned(request)
    carry_out(runs, request)
    table = curves(runs)
    table = table[table["measure"].str.startswith(("accuracy_", "exact_", "accepted_")).astype(bool)]
    summary = summarize(table.drop(columns="step"), [*KEYS, "measure"], published_table())
    changed = effects(table, [*KEYS, "measure"], ["norm", "norm_site"])
    gate = gate_table()
    return Results(
        summary,
        tables={"values": table, "effects": changed, "gate": gate},
        figures=dict(draw(summary, table, changed, gate)),
        conclusions=(*_ordering(summary), *_effects(changed), *_exact(summary), *_gate_conclusions(gate)),
        settings={
            "train_length": TRAIN_LENGTH, "accepted": ACCEPTED, "published_exact": PUBLISHED_EXACT,
            "max_trained_n": MAX_TRAINED_N, "seeds": len(request.seeds),
            "training": {f"{c.task}, {c.model}": vars(training(c, request.quick, 0)) for c in grid(request.quick)},
        },
        diverged=tuple(diverged(runs).values()),
    )  # fmt: skip


def published_table() -> pd.DataFrame:
    """Published accuracy (0-1) of the plain taggers."""
    rows = [
        (task, model, "none", "none", f"accuracy_{n}", percent / 100)
        for (task, model), percents in PUBLISHED.items()
        for n, percent in zip(TEST_LENGTHS, percents, strict=True)
    ]
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "published"])


def _ordering(summary: pd.DataFrame) -> Iterator[str]:
    """Where the order of the published models holds at each length and where it is inverted."""
    shown = summary.dropna(subset="published")
    for (task, measure), part in shown.groupby(["task", "measure"], sort=False):
        rows = part.to_dict("records")
        pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :] if a["published"] != b["published"]]
        ways = [(a["mean"] - b["mean"]) * (a["published"] - b["published"]) for a, b in pairs]
        if pairs:
            said = f"{sum(way > 0 for way in ways)} of {len(pairs)} published orderings hold"
            for word, chosen in (("inverted", [w < 0 for w in ways]), ("equal here", [w == 0 for w in ways])):
                names = [f"{a['model']} against {b['model']}" for (a, b), yes in zip(pairs, chosen, strict=True) if yes]
                said += f"; {word}: {', '.join(names)}" if names else ""
            yield f"{task}, {measure}: {said}."


def farthest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the longest words and of the largest exact n."""
    lengths = [int(m.removeprefix("accuracy_")) for m in table["measure"].unique() if m.startswith("accuracy_")]
    return table[table["measure"].isin([*([f"accuracy_{max(lengths)}"] if lengths else []), "exact_to"])]


def _effects(changed: pd.DataFrame) -> Iterator[str]:
    """What a term changes at the farthest length or in the exact n."""
    for row in farthest(changed).to_dict("records"):
        unit = "" if row["measure"] == "exact_to" else " points"
        mean, low, high = (row[c] * (100 if unit else 1) for c in ("mean", "ci_low", "ci_high"))
        interval = "" if math.isnan(low) else f" [{low:+.1f}, {high:+.1f}]"
        yield (
            f"{row['task']}, {row['model']} with {row['norm']} on its {row['norm_site']}: {row['measure']} "
            f"{mean:+.1f}{interval}{unit} against none (seeds: {row['seeds']})."
        )


def _exact(summary: pd.DataFrame) -> Iterator[str]:
    """On which n each plain network is exact."""
    shown = summary[(summary["norm"] == "none") & summary["measure"].isin(["exact_from", "exact_to"])]
    for (task, model), part in shown.groupby(["task", "model"], sort=False):
        ends, trained = part.set_index("measure")["mean"], MAX_TRAINED_N[str(task)]
        yield (
            f"{task}, {model}: exact on n = {ends['exact_from']:.0f} to {ends['exact_to']:.0f} in the mean "
            f"(0 to 0: on none), trained to {trained}, tested to {MAX_TESTED_N * trained}."
        )


def _gate_conclusions(gate: pd.DataFrame) -> Iterator[str]:
    for norm, part in gate.groupby("norm", sort=False):
        ends = part.iloc[[0, -1]].to_dict("records")
        said = ", ".join(f"{row['output']:.3g} at length {row['length']}" for row in ends)
        yield f"Majority gate without training, {norm}: one a more than b's gives {said}."
