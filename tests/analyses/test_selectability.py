"""Variants, verdict tables in both spaces, and how far observed queries go into the reachable set."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge, make_hooked

import ln_probe
from ln_probe.analyses.constants import observed_radius
from ln_probe.analyses.probes.attention_layer import VARIANTS, no_op, variant_outputs
from ln_probe.analyses.probes.keys import HARDEST_PER_VARIANT, SAMPLED, sphere_theorem
from ln_probe.analyses.probes.selectability import Selectability
from ln_probe.analyses.probes.uniformity import received
from ln_probe.hooks.attention import read_heads
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import AttentionInput, stream

TOKENS = torch.arange(2, 26)


def attention_inputs(model: Any) -> list[AttentionInput]:
    found: list[AttentionInput] = []
    stream(model, TOKENS, find_norms(model), on_attention=found.append)
    return found


def test_variants_by_definition() -> None:
    seen = attention_inputs(make_bridge("gpt2"))[0]
    out = variant_outputs(seen.norm, seen.x, 2.5)
    x = seen.x.double().numpy()
    projected = x - x.mean(-1, keepdims=True)
    sigma = np.sqrt(projected.var(-1, keepdims=True) + 1e-5)
    for name, expected in (
        ("intact", projected / sigma),
        ("no_scaling", projected / 2.5),
        ("no_projection", x / sigma),
        ("both_removed", x / 2.5),
    ):
        np.testing.assert_allclose(out[name], expected, rtol=1e-9, atol=1e-9)
    assert list(out) == list(VARIANTS)
    torch.testing.assert_close(seen.norm.affine(out["intact"]), seen.y.double(), rtol=1e-4, atol=1e-5)


def test_constants_must_be_positive() -> None:
    seen = attention_inputs(make_bridge("gpt2"))[0]
    with pytest.raises(ValueError, match=r"blocks\.0\.ln1: the constant that replaces sigma must be positive, got 0"):
        variant_outputs(seen.norm, seen.x, 0.0)


def test_no_ops_are_named() -> None:
    rms = find_norms(make_bridge("llama"))[0]
    assert no_op(rms, "no_projection") == "rmsnorm: it has no projection"
    assert [no_op(rms, v) for v in ("intact", "no_scaling", "both_removed")] == ["", "", ""]
    layernorm = find_norms(make_bridge("gpt2"))[0]
    assert [no_op(layernorm, v) for v in VARIANTS] == [""] * len(VARIANTS)
    assert no_op(replace(layernorm, kind="projection_only"), "no_scaling") == "projection_only: it does not scale"


def test_the_theorem_says_whether_eps_spoils_it() -> None:
    site = find_norms(make_bridge("gpt2"))[0]
    for eps, said in ((0.0, "normalized keys lie on a sphere"), (1e-5, "normalized keys lie on a sphere (up to eps)")):
        assert sphere_theorem(replace(site, eps_owner=None, eps_value=eps), "intact") == said
    assert sphere_theorem(site, "no_scaling") == ""


@pytest.fixture(scope="module")
def report() -> ln_probe.Report:
    return ln_probe.analyze(make_bridge("gpt2"), TOKENS[None], probes=("selectability", "uniformity"), progress=False)


def test_normalized_space_is_one_row_a_layer_and_theorems_are_named(report: ln_probe.Report) -> None:
    normalized = report.heads.query("space == 'normalized'")
    assert list(normalized["head"].unique()) == [-1]
    assert len(normalized) == 2 * len(VARIANTS)
    assert (normalized["by_theorem"] == "at most 24 keys in 31 dimensions").all()
    assert (normalized["unselectable"] == 0).all()
    assert normalized["entropy_ratio"].isna().all()
    head = report.heads.query("space == 'head'")
    assert len(head) == 2 * 4 * len(VARIANTS)
    assert (head["by_theorem"] == "").all()


def test_margins_do_not_depend_on_the_basis_of_the_head() -> None:
    """W_Q M, W_K M⁻ᵀ is the same model: margins in nats, entropy and spread stay, raw keys do not."""
    model = make_hooked()
    how: dict[str, Any] = {"probes": (Selectability(every_key=True), "uniformity"), "progress": False}
    first = ln_probe.analyze(model, TOKENS[None], **how)
    M = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 2 * torch.eye(8)
    inverse = torch.linalg.inv(M).transpose(1, 2)
    with torch.no_grad():
        for block in model.blocks:
            attn = block.attn
            attn.W_Q.copy_(attn.W_Q.double() @ M)
            attn.b_Q.copy_((attn.b_Q.double()[:, None] @ M)[:, 0])
            attn.W_K.copy_(attn.W_K.double() @ inverse)
            attn.b_K.copy_((attn.b_K.double()[:, None] @ inverse)[:, 0])
    second = ln_probe.analyze(model, TOKENS[None], **how)
    for column in ("margin_lower", "margin_upper", "pattern_max"):
        one, two = (r.keys.query("space == 'head'")[column].to_numpy() for r in (first, second))
        np.testing.assert_allclose(one, two, rtol=0.02, atol=1e-4)  # brackets are 1 % wide
    for column in ("query_radius", "entropy_ratio", "score_spread", "score_spread_floor", "uniform_angle_deg"):
        one, two = (r.heads.query("space == 'head'")[column].to_numpy() for r in (first, second))
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("arch", ["neox", "qwen3"])
def test_observed_queries_are_within_reach(arch: str) -> None:
    model = make_bridge(arch)
    sites = find_norms(model)
    for seen in attention_inputs(model):
        heads = read_heads(seen, sites)
        radius = observed_radius(heads, seen.norm, seen.y)
        assert radius.shape == (24, 4)
        assert 0 < float(radius.max()) <= 1 + 1e-5  # float32 rounding of the norm's output


def test_without_a_bound_on_queries_there_are_no_margins() -> None:
    model = make_hooked(normalization_type=None)
    report = ln_probe.analyze(model, TOKENS[None], probes=[Selectability(every_key=True)], progress=False)
    keys = report.keys.query("space == 'head'")
    assert keys[["margin_lower", "margin_upper", "attainable", "attainable_upper", "reachable"]].isna().all(axis=None)
    assert (keys["verdict"] == "unselectable").any()
    assert (keys["verdict"] == "selectable").any()
    assert keys["pattern_max"].notna().all()
    assert any("nothing bounds the queries" in note for note in report.notes)


def test_received_attention() -> None:
    pattern = torch.tensor([[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.2, 0.3]]])
    np.testing.assert_allclose(received(pattern)[0], [0.5, 0.75, 0.3])  # queries t ≥ max(i, 1)
    assert math.isnan(float(received(torch.ones(1, 1, 1))[0, 0]))


def test_chosen_keys_are_shown_under_every_variant(report: ln_probe.Report) -> None:
    head = report.keys.query("space == 'head' and layer == 0 and head == 2")
    positions = {v: sorted(g["position"]) for v, g in head.groupby("variant")}
    assert set(positions) == set(VARIANTS)
    assert len({tuple(p) for p in positions.values()}) == 1
    count = len(positions["intact"])
    assert SAMPLED <= count <= SAMPLED + 4 * HARDEST_PER_VARIANT
