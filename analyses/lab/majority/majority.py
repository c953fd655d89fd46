"""The majority experiment: the cells, how they are trained, and what is made of them.

Brody, Alon & Yahav 2023, section 4.1; the task and the published model are in `majority_task`.
"""

from __future__ import annotations

import math
from typing import Any

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.majority.majority_data import MajoritySize
from ln_probe.analyses.lab.majority.majority_findings import findings, start_angles
from ln_probe.analyses.lab.majority.majority_task import (
    BATCH,
    EPOCH,
    PARTS,
    STEPS,
    STEPS_SHOWN,
    MajorityTask,
    PartShrunk,
    majority_model,
)
from ln_probe.analyses.lab.results import Results
from ln_probe.analyses.lab.runs import Run, carry_out, curves, diverged, planned, train_all
from ln_probe.analyses.lab.training import ModelSpec, TrainConfig

MILESTONE = 5_000  # steps that every run gets to before any goes on
EPOCHS_OF_DECAY = 10_000  # the published schedule: linear to 0 over ten times the published 1000 epochs
QUICK = MajoritySize(examples=20_000)
RADII = {"sqrt(d)": None, "1/sqrt(d)": 1 / math.sqrt(8)}
CELLS = (
    *((norm, radius) for radius in RADII for norm in ("layernorm", "scaling_only")),
    *((norm, "sqrt(d)") for norm in ("projection_only", "none")),
    *(("scaling_only", f"1/sqrt(d) for {part}") for part in PARTS),
)


def model_of(norm: str, radius: str, size: MajoritySize) -> ModelSpec:
    """The model of a cell."""
    for part in PARTS:
        if radius.endswith(part):
            return PartShrunk(majority_model(norm, None, size), part)
    return majority_model(norm, RADII[radius], size)


def make_runs(request: Request) -> list[Run]:
    """A run per seed and cell, all cells of a seed on the same data in the same order."""
    size = QUICK if request.quick else MajoritySize()
    steps, every = (1000, 50) if request.quick else (STEPS, 100)
    tasks = {seed: MajorityTask(seed, size) for seed in request.seeds}
    return planned(
        CELLS,
        request,
        keys=lambda cell: {"norm": cell[0], "radius": cell[1]},
        name=lambda cell: f"{cell[0]}-{cell[1].replace('/', '_over_').replace(' ', '_')}",
        task=lambda _, seed: tasks[seed],
        spec=lambda cell: model_of(*cell, size),
        training=lambda _, seed: TrainConfig(
            steps=steps,
            batch=BATCH,
            lr=1e-3,
            lr_end=0.0,
            warmup=0,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            clip=0.0,
            seed=seed,
            evaluate_every=every,
            evaluate_at=tuple(s - EPOCH for s in STEPS_SHOWN if s <= steps),
            save_at=tuple(s for s in (0, *STEPS_SHOWN) if s < steps),
            state_every=500,
            optimizer="adam",
            schedule="linear",
            decay_steps=EPOCH * EPOCHS_OF_DECAY,
        ),
    )


def run(request: Request) -> Results:
    """Train all cells (to 5K steps first, then to the end) and compare them."""
    runs = make_runs(request)
    if not request.collect:
        train_all(runs, jobs=request.jobs, until=MILESTONE, progress=request.progress)
    carry_out(runs, request)
    return findings(curves(runs), start_angles(runs), settings(runs[0]), tuple(diverged(runs).values()))


def settings(run: Run) -> dict[str, Any]:
    """What all runs share, for the record."""
    return {
        "training": {k: v for k, v in vars(run.training).items() if k != "seed"},
        "model": {k: v for k, v in run.spec.to_dict().items() if k not in ("norm", "radius")},
        "data": {k: v for k, v in run.task.identity.items() if k != "seed"},
    }
