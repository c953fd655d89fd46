"""The empirical set of queries, and models whose queries nothing bounds: without norms, or with unknown ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import bridge_of, make_hooked, norm_free
from small_models import DyT
from torch import nn

import ln_probe
from ln_probe.analyses import constants
from ln_probe.analyses.constants import EmpiricalQueries
from ln_probe.hooks.attention import read_heads
from ln_probe.hooks.capture import stream
from ln_probe.hooks.sites import facts_of

NOT_CAUSAL = ("decomposition", "selectability", "uniformity")
TOKENS = torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(4))


def taken(*prompts: np.ndarray) -> EmpiricalQueries:
    found = EmpiricalQueries()
    for prompt in prompts:
        found.add(prompt)
    return found


def test_the_set_is_the_ellipsoid_of_mean_and_covariance_that_holds_the_quantile() -> None:
    rng = np.random.default_rng(0)
    q = np.einsum("qhi,hij->qhj", rng.standard_normal((900, 3, 5)), rng.standard_normal((3, 5, 5))) + 40.0
    center, axes = taken(q[:200], q[200:210], q[210:]).ellipsoid()
    for head in range(3):
        np.testing.assert_allclose(center[head], q[:, head].mean(0), rtol=1e-12)
        covariance = np.cov(q[:, head].T, bias=True)
        ratio = (axes[head] @ axes[head].T) / covariance
        np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-5)
        inside = np.linalg.norm(np.linalg.solve(axes[head], (q[:, head] - center[head]).T), axis=0) <= 1
        assert abs(inside.mean() - constants.EMPIRICAL_QUANTILE) <= 1 / 900


def test_of_many_queries_a_part_decides_the_quantile_and_all_the_rest() -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((40_000, 1, 2))
    found = taken(*np.array_split(q, 37))
    assert found.kept is not None
    assert constants.KEPT_QUERIES / 2 <= sum(map(len, found.kept)) <= constants.KEPT_QUERIES
    center, axes = found.ellipsoid()
    np.testing.assert_allclose(center[0], q[:, 0].mean(0), atol=1e-12)
    inside = np.linalg.norm(np.linalg.solve(axes[0], (q[:, 0] - center[0]).T), axis=0) <= 1
    assert abs(inside.mean() - constants.EMPIRICAL_QUANTILE) < 0.025
    one = taken(*np.array_split(q, 5)).ellipsoid()
    np.testing.assert_allclose(axes @ axes.transpose(0, 2, 1), one[1] @ one[1].transpose(0, 2, 1), rtol=1e-6)


def test_directions_in_which_no_query_differs_are_not_in_the_set() -> None:
    q = np.zeros((50, 1, 3))
    q[:, 0, 1] = np.random.default_rng(3).standard_normal(50)
    q[:, 0, 2] = 7.0
    center, axes = taken(q).ellipsoid()
    assert center[0, 2] == 7.0
    spread = axes[0] @ axes[0].T
    assert spread[1, 1] > 0
    assert np.count_nonzero(spread) == 1
    with pytest.raises(ValueError, match="no queries were taken in"):
        EmpiricalQueries().ellipsoid()


def best_of(keys: np.ndarray, center: np.ndarray, axes: np.ndarray, count: int = 40_000) -> tuple[Any, Any]:
    """The best gap and the largest weight of each key over random queries of the set."""
    u = np.random.default_rng(5).standard_normal((count, axes.shape[1]))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    scores = (center + u @ axes.T) @ keys.T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    top = np.sort(scores, axis=1)
    gaps = np.where(scores == top[:, -1:], scores - top[:, -2:-1], scores - top[:, -1:])
    return gaps.max(0), weights.max(0)


def check_over_the_empirical_set(model: Any, layer: int = 0) -> None:
    """Margins and attainable attention of one head by brute force over the queries that really occurred."""
    report = ln_probe.analyze(
        model, TOKENS, progress=False, keys="all", probes=("selectability",), heads=[0, 3], layers=[layer]
    )
    found = facts_of(model)
    seen: list[Any] = []
    for row in TOKENS:
        stream(model, row, found.read, on_attention=lambda s: seen.append(s), layers=[layer])
    maps = [read_heads(s, ()) for s in seen]
    q = torch.cat([h.queries(s.y) for h, s in zip(maps, seen, strict=True)]) / maps[0].divisor
    k = maps[0].keys(seen[0].y)
    for head in (0, 3):
        own = q[:, head].numpy()
        mean, covariance = own.mean(0), np.cov(own.T, bias=True)
        chol = np.linalg.cholesky(covariance)
        radius = np.quantile(np.linalg.norm(np.linalg.solve(chol, (own - mean).T), axis=0), 0.95)
        gap, weight = best_of(k[:, head].numpy(), mean, radius * chol)
        rows = report.keys.query(
            f"space == 'head' and layer == {layer} and head == {head} and variant == 'intact' and prompt == 0"
        ).sort_values("position")
        assert (rows["attainable"] >= weight - 0.011).all()
        assert (rows["attainable_upper"] >= weight).all()
        assert (rows["attainable"] <= weight + 0.2).all(), "random queries come near the best"
        assert (rows["margin_upper"] >= gap - 1e-6).all()
        assert rows["attainable_reachable"].isna().all()
    heads = report.heads.query(f"space == 'head' and layer == {layer}")
    assert set(heads["queries"]) == {"empirical"}
    assert heads["query_radius"].isna().all()
    assert heads[["margin_median", "attainable_median"]].notna().all().all()


def test_a_hooked_transformer_without_norms() -> None:
    model = make_hooked(normalization_type=None)
    check_over_the_empirical_set(model)
    report = ln_probe.analyze(model, TOKENS[:1], progress=False, keys="all", probes=NOT_CAUSAL)
    assert len(report.layernorms) == 0
    assert (
        report.heads["no_op"][report.heads["variant"] != "intact"] == "no norm: attention reads the stream itself"
    ).all()
    assert any("nothing bounds the queries of layers 0, 1 (no scaling before them)" in n for n in report.notes)
    _, cache = model.run_with_cache(TOKENS[:1])
    pattern = cache["blocks.1.attn.hook_pattern"][0].double()
    most = pattern[:, 1:].amax(1)
    keys = report.keys.query("layer == 1 and space == 'head' and variant == 'intact'").sort_values(["head", "position"])
    np.testing.assert_allclose(keys["pattern_max"].to_numpy().reshape(4, 24), most, atol=1e-6)


def test_norm_free_gpt2_is_measured_over_the_queries_that_occurred() -> None:
    model = bridge_of(norm_free(torch.float64))
    assert {s.kind for s in facts_of(model).sites} == {"projection_only"}
    check_over_the_empirical_set(model)


def test_b02_a_norm_that_is_not_known_is_named_and_measured_as_it_is() -> None:
    """DyT at one norm: the layer stays in `heads`, the module is in the table and in a note, groups leave it out."""
    model = make_hooked()
    model.blocks[1].ln1 = DyT(nn.LayerNorm(32), 0.7)
    model.setup()
    report = ln_probe.analyze(model, TOKENS, progress=False, keys="all", heads=[0, 3])
    assert set(report.heads.query("space == 'head'")["layer"]) == {0, 1}
    row = report.layernorms.set_index("site").loc["blocks.1.ln1"]
    assert (row["kind"], row["reads"], row["tokens"]) == ("unknown", "attention", TOKENS.numel())
    assert row[["sigma_mean", "reconstruction_error", "scale_mean", "eps"]].isna().all()
    assert row[["mean_share", "norm_before_mean", "norm_after_mean"]].notna().all()
    (note,) = [n for n in report.notes if "would and is none that ln_probe knows" in n]
    assert "blocks.1.ln1 (DyT, read by attention)" in note
    assert "blocks.1.ln1" not in set(report.causal["sites"])
    by_layer = report.heads.query("space == 'head' and variant == 'intact'").groupby("layer")["queries"].agg(set)
    assert by_layer.to_dict() == {0: {"reachable"}, 1: {"empirical"}}
    said = report.heads.query("layer == 1 and variant != 'intact'")["no_op"]
    assert (said == "unknown: no norm that ln_probe knows, so no term can be taken away").all()
    _, cache = model.run_with_cache(TOKENS)
    pattern = cache["blocks.1.attn.hook_pattern"].double()
    keys = report.keys.query("layer == 1 and space == 'head' and variant == 'intact'")
    keys = keys.sort_values(["prompt", "head", "position"])["pattern_max"].to_numpy().reshape(2, 2, 24)
    np.testing.assert_allclose(keys, pattern[:, [0, 3], 1:].amax(2), atol=1e-6)
    check_over_the_empirical_set(model, layer=1)
