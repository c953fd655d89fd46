"""Majority in three dimensions: keys and queries that can be drawn, before and after each LayerNorm term.

After Brody, Alon & Yahav 2023, figures 1a and 1b: the majority model with d 3, 10 classes and sequences of 30. A class
is one point: its key is what attention reads of its embedding, its query is W_K q, the direction in which a query q
looks among those points (k·q = y·W_K q). Both are taken of the stream as it is, of the stream after one term, and after
both, whichever the model trained with. Scaling alone turns no query; projection does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.majority.majority_task import MajoritySize, majority_model, majority_runs, published_training
from ln_probe.analyses.lab.results import (
    Results,
    contrasted,
    minus_reference,
    select,
    summarize_kinds,
)
from ln_probe.analyses.lab.run_folder import checkpoint_steps
from ln_probe.analyses.lab.train import Run, TrainConfig, carry_out, curves, finished, shared_settings
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

D, CLASSES, LENGTH = 3, 10, 30  # published
SIZE = MajoritySize(CLASSES, LENGTH)
# Of 9,600 examples (the partitions of 30 are few), 7 seconds of a core: with the published batch (6000) and rate (1e-3)
# 300 steps, which take as long, leave accuracy at a third.
STEPS, STEPS_QUICK, BATCH, RATE = 3000, 600, 500, 1e-2
# Norm before attention, its radius (√d, and the 1/√d of the published layer without projection).
CELLS = (
    ("layernorm", "sqrt(d)"), ("scaling_only", "sqrt(d)"), ("scaling_only", "1/sqrt(d)"),
    ("projection_only", "sqrt(d)"), ("none", "sqrt(d)"),
)  # fmt: skip
RADII = {"sqrt(d)": None, "1/sqrt(d)": 1 / math.sqrt(D)}
STAGES = ("stream", "projected", "scaled", "both")  # what keys and queries are made of
STAGE_OF = {"layernorm": "both", "scaling_only": "scaled", "projection_only": "projected", "none": "stream"}
ROLES = ("key", "query")
KEYS = ["norm", "radius", "step", "measure"]
COORDINATES = ["norm", "radius", "seed", "step", "stage", "role", "token", "x", "y", "z"]
ANGLE, ACCURACY = "angle_deg", "test_accuracy"
WHOLE = ("layernorm", "sqrt(d)")


def space_model(norm: str, radius: str) -> LabConfig:
    """The published model of the majority task, with d 3; its MLP keeps the eight hidden units."""
    return replace(majority_model(norm, RADII[radius], SIZE), d_model=D, d_head=D)


def training(quick: bool, seed: int) -> TrainConfig:
    """The published optimizer with a larger rate and smaller batches."""
    steps = STEPS_QUICK if quick else STEPS
    return published_training(steps, seed, lr=RATE, batch=BATCH, evaluate_every=max(1, steps // 10), save_at=(0,))


def stages_of(x: Float[torch.Tensor, "token d"]) -> dict[str, Float[torch.Tensor, "token d"]]:
    """The stream, and what projection, scaling (to √d, eps 0) and both make of it.

    Raises:
        ValueError: a vector that is zero, or along the all-ones direction: it has no direction to scale.
    """
    projected = x - x.mean(-1, keepdim=True)
    made = {}
    for name, vectors in (("scaled", x), ("both", projected)):
        length = vectors.norm(dim=-1, keepdim=True)
        if not bool((length > 0).all()):
            raise ValueError(f"vector {int((length == 0).flatten().nonzero()[0])} is zero: it cannot be scaled")
        made[name] = vectors / length * math.sqrt(x.shape[-1])
    return {"stream": x, "projected": projected, **made}


def points(model: LabTransformer) -> Iterator[tuple[str, str, Float[np.ndarray, "token d"]]]:
    """Stage, role, and a point for each token: keys as they are read, queries W_K q made of the same stage."""
    attention = model.blocks[0].attn
    looks = (attention.W_Q[0] @ attention.W_K[0].T).detach().double()
    for stage, y in stages_of(model.embed.W_E.detach().double()).items():
        yield stage, "key", y.numpy()
        yield stage, "query", (y @ looks).numpy()


def angle_to_ones(vectors: Float[np.ndarray, "token d"]) -> Float[np.ndarray, " token"]:
    """Angle of each vector to the line of the all-ones direction, 0 to 90 degrees."""
    cosine = np.abs(vectors.sum(-1)) / (np.linalg.norm(vectors, axis=-1) * math.sqrt(vectors.shape[-1]))
    found: Float[np.ndarray, " token"] = np.degrees(np.arccos(np.clip(cosine, 0.0, 1.0)))
    return found


def drawn(run: Run) -> pd.DataFrame:
    """COORDINATES of a run's models: a row per kept step, stage, role and token."""
    rows = []
    for step in checkpoint_steps(run.folder):
        for stage, role, vectors in points(cast("LabTransformer", run.model(step))):
            for token, (x, y, z) in enumerate(vectors.tolist()):
                rows.append((run.keys["norm"], run.keys["radius"], run.seed, step, stage, role, token, x, y, z))
    return pd.DataFrame(rows, columns=COORDINATES)


def angles(coordinates: pd.DataFrame) -> pd.DataFrame:
    """Mean angle of queries to the all-ones direction at each model's own stage: KEYS, `seed`, `value`."""
    own = coordinates[(coordinates["role"] == "query") & (coordinates["stage"] == coordinates["norm"].map(STAGE_OF))]
    found = own.assign(value=angle_to_ones(own[["x", "y", "z"]].to_numpy(float)), measure=ANGLE)
    return found.groupby([*KEYS, "seed"], sort=False)["value"].mean().reset_index()


def run(request: Request) -> Results:
    """Train (or resume), and take coordinates of every seed."""
    runs = majority_runs(request, CELLS, SIZE, space_model, lambda seed: training(request.quick, seed))
    lost = carry_out(runs, request)
    done = finished(runs)
    last = select(curves(done), step=done[0].training.steps, measure=[ACCURACY, "test_loss"])
    coordinates = pd.concat([drawn(each) for each in done], ignore_index=True)
    about = {
        **shared_settings(done[0], KEYS),
        "published": "figures 1a and 1b, drawings; no figures to compare with were at hand",
    }
    return replace(findings(coordinates, last[[*KEYS, "seed", "value"]], about), diverged=lost)


def findings(coordinates: pd.DataFrame, scores: pd.DataFrame, about: Mapping[str, Any]) -> Results:
    """Tables from COORDINATES, and from test loss and accuracy at the end (KEYS, `seed`, `value`)."""
    values = pd.concat([angles(coordinates), scores], ignore_index=True)[[*KEYS, "seed", "value"]]
    share = values["measure"] == ACCURACY
    summary = summarize_kinds([(values[~share], "mean"), (values[share], "share")], KEYS)
    summary[["ci_low", "ci_high"]] = summary[["ci_low", "ci_high"]].clip(*_bounds(summary["measure"]), axis=0)
    contrasts = against_layernorm(values)
    return Results(
        summary=summary,
        tables={"coordinates": coordinates, "scores": scores, "contrasts": contrasts},
        settings={**about, "seeds": sorted({int(s) for s in coordinates["seed"]})},
    )


def against_layernorm(values: pd.DataFrame) -> pd.DataFrame:
    """Angles and accuracies after training minus LayerNorm's of the same seed, with intervals and Holm's p over all."""
    told = select(values[values["step"] > 0], measure=[ANGLE, ACCURACY])
    whole = (told["norm"] == WHOLE[0]) & (told["radius"] == WHOLE[1])
    found = contrasted(minus_reference(told, whole, ["seed", "step", "measure"]), KEYS)
    most = _bounds(found["measure"])[1]
    found[["ci_low", "ci_high"]] = found[["ci_low", "ci_high"]].clip(-most, most, axis=0)
    return found


def _bounds(measures: pd.Series) -> tuple[pd.Series, pd.Series]:
    """Between what a measure lies: intervals end there."""
    most = measures.map({ANGLE: 90.0, ACCURACY: 1.0}).fillna(np.inf)
    return 0.0 * measures.map(len), most
