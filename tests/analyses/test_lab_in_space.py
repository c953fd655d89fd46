"""Majority in three dimensions: points by the model's own scores, what terms turn, and the experiment end to end."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ln_probe.analyses.lab.experiments import Request, run
from ln_probe.analyses.lab.majority import majority_in_space
from ln_probe.analyses.lab.majority.majority_in_space import (
    ACCURACY,
    ANGLE,
    COORDINATES,
    RANDOM_ANGLE,
    STAGE_OF,
    STAGES,
    against_layernorm,
    angle_to_ones,
    angles,
    points,
    space_model,
    stages_of,
)
from ln_probe.analyses.lab.majority.majority_task import query_angles
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.transformer import LabTransformer


def model_of(norm: str, radius: str = "sqrt(d)") -> LabTransformer:
    torch.manual_seed(3)
    model = space_model(norm, radius).build()
    with calibrate(model):
        model(torch.arange(10)[None], return_type=None)
    return model


@pytest.mark.parametrize("norm", list(STAGE_OF))
def test_dot_products_of_the_points_are_the_models_scores(norm: str) -> None:
    """Of the stage that the model has, up to the constant that a norm which does not scale divides by."""
    model = model_of(norm).double()
    _, cache = model.run_with_cache(torch.arange(10)[None])
    found = {(stage, role): vectors for stage, role, vectors in points(model)}
    stage = STAGE_OF[norm]
    divisor = model.blocks[0].ln1.divisor
    constant = 1.0 if divisor is None else float(divisor) ** 2
    scores = found[stage, "query"] @ found[stage, "key"].T / math.sqrt(3) / constant
    np.testing.assert_allclose(scores, cache["blocks.0.attn.hook_attn_scores"][0, 0].numpy(), rtol=1e-9, atol=1e-12)
    mean = angle_to_ones(found[stage, "query"]).mean()
    assert mean == pytest.approx(float(query_angles(model).mean()), abs=1e-6)


def test_what_each_term_does() -> None:
    """Projection puts keys into a plane, scaling on a sphere; scaling turns no query, projection does."""
    found = {(stage, role): vectors for stage, role, vectors in points(model_of("layernorm"))}
    for stage in ("projected", "both"):
        np.testing.assert_allclose(found[stage, "key"].sum(-1), 0, atol=1e-12)
    for stage in ("scaled", "both"):
        np.testing.assert_allclose(np.linalg.norm(found[stage, "key"], axis=-1), math.sqrt(3), rtol=1e-12)
    turned = {stage: angle_to_ones(found[stage, "query"]) for stage in STAGES}
    np.testing.assert_allclose(turned["scaled"], turned["stream"], atol=1e-6)
    np.testing.assert_allclose(turned["both"], turned["projected"], atol=1e-6)
    assert np.abs(turned["projected"] - turned["stream"]).max() > 1
    with pytest.raises(ValueError, match="vector 1 is zero: it cannot be scaled"):
        stages_of(torch.tensor([[1.0, 2.0, 4.0], [2.0, 2.0, 2.0]]))


def test_angles_that_are_known() -> None:
    known = {(1, 1, 1): 0.0, (-2, -2, -2): 0.0, (1, -1, 0): 90.0, (1, 0, 0): math.degrees(math.acos(1 / math.sqrt(3)))}
    np.testing.assert_allclose(angle_to_ones(np.array(list(known), float)), list(known.values()), atol=1e-6)
    drawn = np.random.default_rng(0).standard_normal((200_000, 3))
    assert angle_to_ones(drawn).mean() == pytest.approx(RANDOM_ANGLE, abs=0.2)  # standard error 0.05


def test_contrasts_are_paired_by_seed() -> None:
    rows = [
        ("layernorm", "sqrt(d)", seed, step, ANGLE, 10.0 * seed) for seed in (1, 2, 3) for step in (0, 5)
    ] + [("none", "sqrt(d)", seed, 5, ANGLE, 10.0 * seed + seed) for seed in (1, 2, 3)]  # fmt: skip
    found = against_layernorm(pd.DataFrame(rows, columns=["norm", "radius", "seed", "step", "measure", "value"]))
    assert found[["norm", "step", "mean", "seeds"]].to_numpy().tolist() == [["none", 5, pytest.approx(2.0), 3]]
    half = 4.302652729911275 / math.sqrt(3)  # Student's t with 2 degrees of freedom; sd 1
    assert found.loc[0, ["ci_low", "ci_high"]].tolist() == pytest.approx([2 - half, 2 + half])


@pytest.mark.slow
def test_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(majority_in_space, "STEPS_QUICK", 2)
    monkeypatch.setattr(majority_in_space, "SIZE", replace(majority_in_space.SIZE, examples=500))
    monkeypatch.setattr(majority_in_space, "CELLS", (("layernorm", "sqrt(d)"), ("scaling_only", "1/sqrt(d)")))
    request = Request(tmp_path / "m", (1,), quick=True, progress=False)
    with pytest.raises(ValueError, match=r"holds none of these [0-9]+ runs: leave out --collect"):
        run("majority_in_space", replace(request, collect=True), command="", ln_probe_version="0")
    found = run("majority_in_space", request, command="", ln_probe_version="0")
    table = found.tables["coordinates"]
    assert list(table.columns) == COORDINATES
    assert len(table) == 2 * 2 * len(STAGES) * 2 * 10  # cells, steps, stages, roles, classes
    told = found.summary.set_index(["norm", "step", "measure"])["seeds"]
    assert told["layernorm", 2, ANGLE] == told["scaling_only", 2, ACCURACY] == 1
    start = angles(table).set_index(["norm", "seed", "step"])["value"]
    torch.manual_seed(1)
    first = query_angles(space_model("scaling_only", "1/sqrt(d)").build())
    assert start["scaling_only", 1, 0] == pytest.approx(float(first.mean()), abs=1e-3)
    assert len(found.conclusions) == 2
    assert "against LayerNorm" in found.conclusions[1]
