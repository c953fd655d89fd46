"""Layers against heads, and attention with the dot product or without, on text.

The two language-model comparisons of Wang & E (2024, section 6: 1a and 3b), which train on OpenWebText for a GPU,
scaled down to models that a CPU trains on text the user gives; with LayerNorm, each of its terms, or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from ln_probe.analyses.lab.approximation.text_relative import RelativeTextConfig
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.analyses.lab.runs import carry_out, curves, diverged, planned
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.training import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

D_VOCAB, N_CTX = 1024, 128
LAYERS, HEADS = (1, 2, 4), (1, 4, 16)
KEYS = ("layers", "heads", "dot_product", "norm")
# Of three sizes of model, with and without the dot product, in nats on OpenWebText: not comparable but in order.
PUBLISHED = "3b: 5.796 < 5.830, 5.374 < 5.486, 4.994 < 5.274 with the dot product and without, by size of model"


@dataclass(frozen=True)
class Cell:
    """One model; 3b varies `dot_product` and 1a layers and heads."""

    layers: int
    heads: int
    dot_product: bool = True
    norm: str = "layernorm"

    def spec(self) -> RelativeTextConfig:
        return RelativeTextConfig(self.layers, self.heads, D_VOCAB, N_CTX, dot_product=self.dot_product, norm=self.norm)


def grid(quick: bool) -> tuple[Cell, ...]:
    """What is trained."""
    if quick:
        return (Cell(1, 1), Cell(1, 4), Cell(2, 1), Cell(1, 4, dot_product=False))
    sizes = [Cell(layers, heads) for layers in LAYERS for heads in HEADS]
    without = [Cell(layers, 4, dot_product=False) for layers in LAYERS]
    normed = [Cell(2, 4, dot, norm) for norm in NORM_KINDS if norm != "layernorm" for dot in (True, False)]
    return (*sizes, *without, *normed)


def training(quick: bool, seed: int) -> TrainConfig:
    steps = 150 if quick else 2000
    return TrainConfig(
        steps=steps,
        batch=16,
        lr=3e-3,
        lr_end=1e-4,
        warmup=min(100, steps // 4),
        clip=1.0,
        seed=seed,
        evaluate_every=steps,
    )


def run(request: Request) -> Results:
    """Train the grid (or what is left of it) and compare held-out losses."""
    task = TextTask(request.texts, D_VOCAB, N_CTX, tokenizer=request.tokenizer)
    runs = planned(
        grid(request.quick),
        request,
        keys=lambda cell: {key: getattr(cell, key) for key in KEYS},
        name=lambda cell: "-".join(f"{key}_{getattr(cell, key)}" for key in KEYS),
        task=lambda *_: task,
        spec=Cell.spec,
        training=lambda _, seed: training(request.quick, seed),
    )
    carry_out(runs, request)
    table = curves(runs)
    table = table[table["measure"] == "valid_loss"]
    summary = summarize(table.drop(columns="step"), [*KEYS, "measure"])
    return Results(
        summary,
        tables={"losses": table},
        figures={} if table.empty else {"losses": _bars(summary)},
        conclusions=tuple(_conclusions(summary)),
        settings={
            "training": vars(training(request.quick, 0)),
            "seeds": len(request.seeds),
            "text": task.identity,
            "published": PUBLISHED,
        },
        diverged=tuple(diverged(runs).values()),
    )


def _conclusions(summary: pd.DataFrame) -> Iterator[str]:
    loss = {tuple(row[key] for key in KEYS): row["mean"] for row in summary.to_dict("records")}
    for layers, heads, dot_product, norm in loss:
        without = loss.get((layers, heads, False, norm))
        if dot_product and without is not None:
            yield (
                f"{layers} layers, {heads} heads, {norm}: held-out loss {loss[layers, heads, True, norm]:.3f} with the "
                f"dot product, {without:.3f} without."
            )
    sized = {(layers, heads): x for (layers, heads, dot, norm), x in loss.items() if dot and norm == "layernorm"}
    if {(1, 1), (2, 1), (1, 4)} <= set(sized):
        yield (
            f"From one layer of one head ({sized[1, 1]:.3f}): a second layer gives {sized[2, 1]:.3f}, three more heads "
            f"{sized[1, 4]:.3f}."
        )


def _bars(summary: pd.DataFrame) -> Figure:
    """Held-out loss of every model."""
    from matplotlib.figure import Figure

    names = [
        f"{r['layers']} layers, {r['heads']} heads, {r['norm']}{'' if r['dot_product'] else ', no dot product'}"
        for r in summary.to_dict("records")
    ]
    figure = Figure(figsize=(6.4, 0.3 * len(names) + 1), layout="constrained")
    ax = figure.subplots()
    ax.errorbar(summary["mean"], names, xerr=(summary["mean"] - summary["ci_low"]).fillna(0), fmt="o")
    ax.set(xlabel="held-out loss, nats per token")
    ax.invert_yaxis()
    return figure
