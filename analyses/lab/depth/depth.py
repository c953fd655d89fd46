"""Does depth decide which L_k a transformer learns, and does the norm move the boundary?

After Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"): transformers of depth d should length-generalize on L_k for
k <= d + 2 and not beyond. Theirs is post-norm LayerNorm at d_model 256 or 512; here a small model (d_model 64, MLP 256,
one head, no positions, words of 51 to 100 letters in training) with the norm as a switch: every norm of the model is of
the same kind, in post- and in pre-norm order. The theory's prediction is the depth of a C-RASP program.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.analyses.lab.depth.block_languages import (
    D_VOCAB,
    BlockWords,
    exact_match,
    predicted_depth,
    sample_block_words,
)
from ln_probe.analyses.lab.depth.crasp_transformer import compare_table
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.intervals import binomial_interval
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import Results, effects, summarize
from ln_probe.analyses.lab.runs import Run, carry_out, curves, diverged, planned
from ln_probe.analyses.lab.training import TrainConfig, step_generator
from ln_probe.analyses.lab.transformer import LabConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAIN_LENGTHS = (51, 100)
BINS = (TRAIN_LENGTHS, (101, 150), (151, 200), (201, 250))  # up to 2.5 times the training length
EVALUATION_WORDS = 500  # per bin: a standard error of at most 2.3 points
EVALUATION_SEED = 10_000  # apart from every training seed
HIT = 0.99  # of a bin's words exactly right counts as "generalizes to it"
KEYS = ("depth", "k", "norm", "norm_order", "positions")

# Exact match in per cent at lengths 351-400 after training on 201-250 (1.6 times the longest training word), by depth
# 1, 2, 3, …; read off the published tables.
PUBLISHED = {
    3: (100, 100, 100, 100),
    4: (22, 100, 100, 100),
    5: (11, 51, 100, 100),
    6: (10, 8, 37, 100),
    7: (8, 8, 20, 49),
    8: (5, 6, 19, 52),
}
PUBLISHED_BIN = (151, 200)  # ours that lies farthest out while still at or beyond theirs


class BlockTask:
    """Label the last block of words of L_k; loss per letter, measured as exact match per length bin.

    Raises:
        ValueError: k below 1, or too large for the shortest training words.
    """

    name = "depth"

    def __init__(self, k: int, words: int = EVALUATION_WORDS) -> None:
        self.k, self.words = k, words
        sample_block_words(k, TRAIN_LENGTHS, 1, torch.Generator())  # raises what is wrong with k now, not in a run

    @property
    def identity(self) -> dict[str, Any]:
        return {"k": self.k, "lengths": TRAIN_LENGTHS, "bins": BINS, "words": self.words}

    def batch(self, step: int, size: int, seed: int) -> BlockWords:
        return sample_block_words(self.k, TRAIN_LENGTHS, size, step_generator(seed, step))

    def loss(self, model: nn.Module, batch: BlockWords) -> Float[Tensor, ""]:
        return F.cross_entropy(_label_logits(model, batch).flatten(0, 1), batch.labels.flatten())

    @cached_property
    def _evaluation(self) -> dict[tuple[int, int], BlockWords]:
        return {b: sample_block_words(self.k, b, self.words, step_generator(EVALUATION_SEED, b[0])) for b in BINS}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            measure(lengths): float(exact_match(_label_logits(model, words).argmax(-1), words.labels).float().mean())
            for lengths, words in self._evaluation.items()
        }

    def write_files(self, out: Path) -> None:
        pass


def _label_logits(model: nn.Module, words: BlockWords) -> Float[Tensor, "word pos label"]:
    logits: Tensor = model(words.tokens)
    return logits[..., :2]


def measure(lengths: tuple[int, int]) -> str:
    """The name under which a bin's exact match stands in the tables."""
    return f"exact_match_{lengths[0]}_{lengths[1]}"


@dataclass(frozen=True)
class Cell:
    """One square of the grid.

    Raises (on construction):
        ValueError: depth below 1.
    """

    depth: int
    k: int
    norm: str = "layernorm"
    norm_order: Literal["pre", "post"] = "post"
    positions: Literal["learned", "none", "sinusoidal", "rotary", "alibi"] = "none"

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1 layer, got {self.depth}")

    def spec(self) -> LabConfig:
        """The published shape, smaller: one head, ReLU, torch's initialization; the final norm only in pre-norm."""
        return LabConfig(
            n_layers=self.depth,
            d_model=64,
            n_heads=1,
            d_mlp=256,
            d_vocab=D_VOCAB,
            n_ctx=BINS[-1][1] + 1,
            norm=self.norm,
            norm_mlp=self.norm,
            norm_final=self.norm if self.norm_order == "pre" else None,
            norm_order=self.norm_order,
            positions=self.positions,
            tied=False,
            act_fn="relu",
            init="torch",
        )


def grid(quick: bool) -> tuple[Cell, ...]:
    """What is trained: either side of the theory's boundary (k = depth + 2, depth + 3), cheapest first.

    "none" divides by a constant in the norm's place, so that it has an order too.
    """
    if quick:
        return tuple(Cell(1, k, norm) for norm in NORM_KINDS for k in (3, 4))
    squares = [
        Cell(depth, depth + beyond, norm, order)
        for order in ("post", "pre")
        for depth in (1, 2, 3)
        for beyond in (2, 3)
        for norm in NORM_KINDS
    ]
    positions = [Cell(2, k, positions=p) for p in ("rotary", "alibi") for k in (4, 5)]
    return (*squares, *positions)


def training(quick: bool, seed: int) -> TrainConfig:
    steps = 300 if quick else 2000
    return TrainConfig(
        steps=steps,
        batch=32,
        lr=1e-3,
        lr_end=1e-5,
        warmup=100,
        clip=1.0,
        seed=seed,
        evaluate_every=steps,
    )


def make_runs(request: Request) -> list[Run]:
    """Every run."""
    words = 200 if request.quick else EVALUATION_WORDS
    return planned(
        grid(request.quick),
        request,
        keys=lambda cell: {key: getattr(cell, key) for key in KEYS},
        name=lambda cell: f"{cell.norm_order}-{cell.positions}-L{cell.k}-depth{cell.depth}-{cell.norm}",
        task=lambda cell, _: BlockTask(cell.k, words),
        spec=Cell.spec,
        training=lambda _, seed: training(request.quick, seed),
    )


def run(request: Request) -> Results:
    """Train the grid (or what is left of it) and say where the boundary lies under each norm."""
    runs = make_runs(request)
    carry_out(runs, request)
    table = curves(runs)
    table = table[table["measure"].isin([measure(b) for b in BINS])]
    lost = diverged(runs)
    failed = pd.DataFrame([{**run.keys, "seed": run.seed} for run in runs if run.name in lost])
    hits, hand_built = hit_rates(table, failed), compare_table()
    summary = summarize(table.drop(columns="step"), [*KEYS, "measure"], published_table())
    summary.insert(len(KEYS), "predicted_depth", summary["k"].map(predicted_depth))
    return Results(
        summary,
        tables={
            "exact_match": table,
            "hits": hits,
            "effects": effects(table, [*KEYS, "measure"], ["norm"]),
            "hand_built": hand_built,
        },
        figures={} if table.empty else {"boundary": _heat_maps(summary), "lengths": _length_curves(summary)},
        conclusions=(*_conclusions(hits), *_compare_conclusions(hand_built)),
        settings={
            "train_lengths": TRAIN_LENGTHS,
            "bins": BINS,
            "hit": HIT,
            "model": Cell(1, 3).spec().to_dict(),
            "training": vars(training(request.quick, 0)),
            "seeds": len(request.seeds),
            "published": "exact match at 351-400 letters after training on 201-250; post-norm, d_model 256 or 512",
        },
        diverged=tuple(lost.values()),
    )


def published_table() -> pd.DataFrame:
    """The published exact match (0-1), beside our bin 151-200 of the same shape of model."""
    rows = [
        (depth, k, "layernorm", "post", "none", measure(PUBLISHED_BIN), percent / 100)
        for k, percents in PUBLISHED.items()
        for depth, percent in enumerate(percents, start=1)
    ]
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "published"])


def hit_rates(table: pd.DataFrame, failed: pd.DataFrame | None = None) -> pd.DataFrame:
    """How many seeds generalize to every bin of a cell, with an exact 95 % interval (Clopper-Pearson).

    Args:
        table: exact match: KEYS, `seed`, `value`.
        failed: KEYS and `seed` of runs that diverged: they did not generalize.

    Returns:
        KEYS, `predicted` (the theory says this depth suffices), `hits`, `seeds`, `rate`, `low`, `high`.
    """
    rows = []
    told = table.assign(hit=table["value"] >= HIT)
    if failed is not None and len(failed):
        told = pd.concat([told, failed.assign(hit=False)], ignore_index=True)
    per_seed = told.groupby([*KEYS, "seed"], sort=False)["hit"].all()
    for key, hit in per_seed.groupby(list(KEYS), sort=False):
        low, high = binomial_interval(int(hit.sum()), len(hit))
        cell = cast("tuple[Any, ...]", key)
        predicted = predicted_depth(cell[1]) <= cell[0]
        rows.append((*cell, predicted, int(hit.sum()), len(hit), hit.mean(), low, high))
    return pd.DataFrame(rows, columns=[*KEYS, "predicted", "hits", "seeds", "rate", "low", "high"])


def _conclusions(hits: pd.DataFrame) -> Iterator[str]:
    for (order, positions, norm), part in hits.groupby(["norm_order", "positions", "norm"], sort=False):
        counts = []
        for predicted, words in ((True, "k = depth + 2"), (False, "k = depth + 3")):
            side = part[part["predicted"] == predicted]
            if len(side):
                counts.append(f"{side['hits'].sum()} of {side['seeds'].sum()} runs with {words}")
        where = f"{order}-norm {norm}" + ("" if positions == "none" else f" with {positions} positions")
        yield (
            f"{where}: at least {HIT:.0%} of words exactly right in every bin up to {BINS[-1][1]} letters in "
            + ", ".join(counts)
            + "."
        )


def _compare_conclusions(hand_built: pd.DataFrame) -> Iterator[str]:
    """What the hand-built transformers of COMPARE show, of depth 2 (the smallest whose answers need a truth value)."""
    for row in hand_built[hand_built["depth"] == 2].itertuples():
        yield (
            f"Hand-built COMPARE of depth 2 with {row.norm} (eps {row.eps:g}): {row.accuracy:.2%} of answers right, "
            f"{row.words_right:.0%} of words of 300 letters entirely."
        )


def _heat_maps(summary: pd.DataFrame) -> Figure:
    """Exact match in the farthest bin, depth against k, a map per norm and order."""
    from matplotlib.figure import Figure

    far = summary[(summary["measure"] == measure(BINS[-1])) & (summary["positions"] == "none")]
    orders = _in_order(far["norm_order"])
    norms = _in_order(far["norm"])
    figure = Figure(figsize=(2.7 * len(norms) + 0.6, 2.5 * len(orders) + 0.4), layout="constrained")
    for (order, norm), ax in zip(
        [(o, n) for o in orders for n in norms],
        figure.subplots(len(orders), len(norms), squeeze=False).flat,
        strict=True,
    ):
        part = far[(far["norm_order"] == order) & (far["norm"] == norm)].pivot(
            index="depth", columns="k", values="mean"
        )
        if part.empty:
            ax.set_axis_off()
            continue
        image = ax.imshow(part.to_numpy(float), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        for row, depth in enumerate(part.index):
            for column, k in enumerate(part.columns):
                if pd.notna(value := part.loc[depth, k]):
                    ax.text(column, row, f"{value:.0%}", ha="center", va="center", color="w" if value < 0.6 else "k")
        ax.set(
            title=f"{norm}, {order}-norm",
            xticks=range(len(part.columns)),
            xticklabels=[f"L{k}" for k in part.columns],
            yticks=range(len(part.index)),
            yticklabels=part.index,
            ylabel="depth",
        )
    figure.colorbar(image, ax=figure.axes, label=f"exact match, {BINS[-1][0]}-{BINS[-1][1]} letters", shrink=0.8)
    return figure


def _length_curves(summary: pd.DataFrame) -> Figure:
    """Exact match over length, a panel per (depth, k), a line per norm (post-norm, no positions)."""
    from matplotlib.figure import Figure

    part = summary[(summary["norm_order"] == "post") & (summary["positions"] == "none")]
    squares = list(dict.fromkeys(zip(part["depth"], part["k"], strict=True)))
    columns = min(2, len(squares))
    rows = -(-len(squares) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flat
    lengths = [sum(b) / 2 for b in BINS]
    for (depth, k), ax in zip(squares, axes, strict=False):
        cell = part[(part["depth"] == depth) & (part["k"] == k)]
        for norm in _in_order(cell["norm"]):
            line = cell[cell["norm"] == norm].set_index("measure").reindex([measure(b) for b in BINS])
            ax.plot(lengths, line["mean"], marker="o", markersize=3, label=norm)
            ax.fill_between(lengths, line["ci_low"].clip(0), line["ci_high"].clip(upper=1), alpha=0.15)
        said = "within" if predicted_depth(k) <= depth else "beyond"
        ax.set(
            title=f"depth {depth}, L{k}: {said} the theory's reach",
            xlabel="letters",
            ylabel="exact match",
            ylim=(0, 1.05),
        )
    figure.axes[0].legend(fontsize=7)
    for unused in figure.axes[len(squares) :]:
        unused.set_axis_off()
    return figure


def _in_order(column: Sequence[str] | pd.Series[str]) -> list[str]:
    return list(dict.fromkeys(column))
