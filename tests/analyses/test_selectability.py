"""The tables of keys and heads: every key has a row, bases do not matter, and what random keys give."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge, make_hooked

import ln_probe
from ln_probe.analyses.geometry import compiled
from ln_probe.analyses.geometry.key_geometry import random_unselectable
from ln_probe.analyses.geometry.queries import query_radius
from ln_probe.analyses.probes import selectability
from ln_probe.analyses.probes.uniformity import LayerMaps
from ln_probe.hooks.attention import read_heads
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import AttentionInput, stream

TOKENS = torch.arange(2, 26)
GEOMETRY: dict[str, Any] = {"probes": ("selectability", "uniformity"), "progress": False}


def test_tables_depend_neither_on_threads_nor_on_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [TOKENS.tolist(), TOKENS[:9].tolist()]
    tables = []
    for threads, waiting in ((1, 100), (3, 0)):
        monkeypatch.setattr(compiled, "_share", threads)
        monkeypatch.setattr(selectability, "MOST_WAITING", waiting)
        tables.append(ln_probe.analyze(make_bridge("gpt2"), prompts, **GEOMETRY).tables)
    for name in ("heads", "keys"):
        pd.testing.assert_frame_equal(tables[0][name], tables[1][name])


def test_every_key_has_a_row_and_heads_are_summed_up_from_them() -> None:
    report = ln_probe.analyze(make_bridge("gpt2"), [TOKENS.tolist(), TOKENS[:9].tolist()], **GEOMETRY)
    keys, heads = report.keys, report.heads
    assert set(keys["variant"]) == {"intact", "no_scaling"}
    assert len(keys) == 2 * 4 * 2 * (24 + 9)
    assert (keys["n"] == keys["prompt"].map({0: 24, 1: 9})).all()
    assert (keys["margin_lower"] <= keys["margin_upper"]).all()
    for place, rows in keys.groupby(["layer", "head", "variant"]):
        head = heads.set_index(["layer", "head", "variant"]).loc[place]
        assert head["unselectable"] == (rows["verdict"] == "unselectable").mean()
        assert head["attainable_median"] == rows["attainable"].median()
        assert head["margin_median"] == rows[["margin_lower", "margin_upper"]].mean(axis=1).median()
        assert head["pattern_max_median"] == rows["pattern_max"].median()
        assert head["unreachable"] == 1 - rows["reachable"].astype(float).mean()
        assert rows["prompt"].tolist() == [0] * 24 + [1] * 9
        assert rows["position"].tolist() == [*range(24), *range(9)]
        assert rows["token"].tolist() == [str(int(i)) for i in (*TOKENS, *TOKENS[:9])]
        assert head["n"] == len(rows) == 33
    assert len(heads) == 2 * 4 * 4
    assert heads.query("variant == 'no_projection'")[["margin_median", "attainable_median"]].isna().all(axis=None)
    about = report.provenance["selectability"]
    assert (about["prompts"], about["keys_per_prompt"], about["d_head"], about["undecided"]) == (
        2,
        20,
        8,
        0,
    )  # a key competes with 20 on average
    assert about["random_unselectable"] == random_unselectable(20, 8)


def test_a_variant_that_changes_nothing_has_no_row() -> None:
    report = ln_probe.analyze(make_bridge("llama"), TOKENS[None], **GEOMETRY)
    assert set(report.heads["variant"]) == {"intact", "no_scaling", "both_removed"}


def test_random_keys() -> None:
    """Nearly all of many keys in few dimensions; none of d + 1; in the plane the figure of Rényi & Sulanke (1963)."""
    assert random_unselectable(9, 8) == 0.0
    assert random_unselectable(256, 2) == pytest.approx(1 - 2 * math.sqrt(2 * math.pi * math.log(256)) / 256)
    assert 0.1 < random_unselectable(128, 8) < 0.13
    keys = np.random.default_rng(3).standard_normal((40, 60, 3))
    alone = [(ln_probe.key_geometry(one, margins=False).verdict == "unselectable").mean() for one in keys]
    assert random_unselectable(60, 3) == pytest.approx(np.mean(alone), abs=0.03)


def test_margins_do_not_depend_on_the_basis_of_the_head() -> None:
    """W_Q M, W_K M⁻ᵀ is the same model: margins in nats and entropy stay, raw keys do not."""
    model = make_hooked()
    first = ln_probe.analyze(model, TOKENS[None], **GEOMETRY)
    M = torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 2 * torch.eye(8)
    inverse = torch.linalg.inv(M).transpose(1, 2)
    with torch.no_grad():
        for block in model.blocks:
            attn = block.attn
            attn.W_Q.copy_(attn.W_Q.double() @ M)
            attn.b_Q.copy_((attn.b_Q.double()[:, None] @ M)[:, 0])
            attn.W_K.copy_(attn.W_K.double() @ inverse)
            attn.b_K.copy_((attn.b_K.double()[:, None] @ inverse)[:, 0])
    second = ln_probe.analyze(model, TOKENS[None], **GEOMETRY)
    for column in ("margin_lower", "margin_upper", "pattern_max"):
        np.testing.assert_allclose(first.keys[column], second.keys[column], rtol=0.02, atol=1e-4)  # brackets: 1 % wide
    for column in ("entropy_ratio", "uniform_angle_deg"):
        np.testing.assert_allclose(first.heads[column], second.heads[column], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("arch", ["gpt2", "neox", "qwen3"])
def test_observed_queries_are_within_reach(arch: str) -> None:
    model, seen = make_bridge(arch), list[AttentionInput]()
    with torch.no_grad():  # gains that are not 1, and biases that move the center away from 0
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.5, 1.0, len(parameter)))
    sites = find_norms(model)
    stream(model, TOKENS, sites, on_attention=seen.append)
    maps = LayerMaps(sites)
    for attended in seen:
        radius = query_radius(read_heads(attended, sites), attended.norm, attended.y)
        assert radius.shape == (24, 4)
        assert 0 < float(radius.max()) <= 1 + 1e-4  # float32 rounding of the norm's output
        maps.observe(attended)
        assert maps.radii()[attended.layer] == pytest.approx(np.quantile(radius.numpy(), 0.95, axis=0))


def test_without_a_bound_on_queries_there_are_no_margins() -> None:
    report = ln_probe.analyze(make_hooked(normalization_type=None), TOKENS[None], probes=["selectability"])
    unknown = ["margin_lower", "margin_upper", "attainable", "attainable_upper", "reachable"]
    assert report.keys[unknown].isna().all(axis=None)
    assert {"unselectable", "selectable"} <= set(report.keys["verdict"])
    assert report.keys["pattern_max"].notna().all()
    assert any("nothing bounds the queries" in note for note in report.notes)


def test_unselectable_keys_are_not_explained_away() -> None:
    """Few keys are selectable in general position; a W_K of rank 1 sends them to a line."""
    model = make_hooked(normalization_type="LN")
    tokens = [list(range(1, 1 + model.cfg.d_head))]
    assert ln_probe.analyze(model, tokens, **GEOMETRY).provenance["selectability"]["by_theorem"]
    with torch.no_grad():
        for block in model.blocks:
            W = block.attn.W_K
            W.copy_(torch.einsum("hd,k->hdk", W[..., 0], torch.ones(W.shape[-1])))
    report = ln_probe.analyze(model, tokens, **GEOMETRY)
    assert (report.heads["unselectable"] > 0).all()
    assert not report.provenance["selectability"]["by_theorem"]
