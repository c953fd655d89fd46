"""Does depth decide which L_k a transformer learns, and does the norm move the boundary?

After Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"): transformers of depth d should length-generalize on L_k for
k <= d + 2 and not beyond. Theirs is post-norm LayerNorm at d_model 256 or 512; here a small model (d_model 64, MLP 256,
one head, no positions, words of 51 to 100 letters in training) with the norm as a switch: every norm of the model is of
the same kind, in post- and in pre-norm order. The theory's prediction is the depth of a C-RASP program.
"""

from __future__ import annotations

import pandas as pd

from ln_probe.analyses.lab.depth.depth_findings import findings
from ln_probe.analyses.lab.depth.depth_task import BINS, EVALUATION_WORDS, KEYS, BlockTask, Cell, measure
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import Results
from ln_probe.analyses.lab.runs import Run, carry_out, curves, diverged, planned
from ln_probe.analyses.lab.training import TrainConfig


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
    return findings(table, failed, training=vars(training(request.quick, 0)), lost=tuple(lost.values()))
