"""Uniform attention: the planted query, what un-projecting its keys does to it, and random directions."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge
from small_models import norm_of

import ln_probe
from ln_probe.analyses.geometry import queries
from ln_probe.analyses.probes import uniformity
from ln_probe.analyses.probes.uniformity import received
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.norm import Norm

D, D_HEAD, N = 12, 12, 40


def layer(seed: int = 0) -> tuple[Heads, Norm, torch.Tensor]:
    """A head whose W_K is invertible, so that a query with gain * (W_K q) = 1 exists; inputs with a mean."""
    site = norm_of(d_model=D, n_heads=1, n_ctx=64)
    torch.manual_seed(seed)
    W = torch.randn(2, 1, D, D_HEAD, dtype=torch.float64)
    b = torch.randn(2, 1, D_HEAD, dtype=torch.float64)
    heads = Heads(0, W[0], b[0], W[1], b[1], math.sqrt(D_HEAD), None, None, None)
    return heads, site, torch.randn(N, D, dtype=torch.float64) * 2 + 1


def planted(heads: Heads, site: Norm) -> torch.Tensor:
    """q with gain * (W_K q) = 1, [1 head d_head]."""
    return torch.linalg.solve(site.gain[:, None] * heads.W_K[0], torch.ones(D, dtype=torch.float64))[None, None]


def test_planted_query_attends_uniformly() -> None:
    heads, site, x = layer()
    q = planted(heads, site)
    k = heads.keys(site.affine(site.project(x) / site.sigma(x)))
    ratio = uniformity.entropy_ratio(heads.pattern(q, k))
    assert float(ratio[0, 0]) == pytest.approx(1.0, abs=1e-12)
    # arccos resolves an angle of 0 to the square root of float64
    assert float(queries.angle_to_uniform(heads, site, q)[0, 0]) < 1e-5


def test_unprojecting_changes_scores_by_exactly_the_predicted_amount() -> None:
    """q·W_Kᵀ(gain·mu·1/sigma) (science, section 3)."""
    heads, site, x = layer()
    outputs = {"intact": site.project(x) / site.sigma(x), "no_projection": x / site.sigma(x)}
    for q in (planted(heads, site), torch.randn(1, 1, D_HEAD, dtype=torch.float64)):
        with_, without = (
            heads.keys(site.affine(outputs[v]))[:, 0] @ q[0, 0] / heads.divisor for v in ("intact", "no_projection")
        )
        added = site.gain * x.mean(-1, keepdim=True) / site.sigma(x)
        predicted = (added @ heads.W_K[0]) @ q[0, 0] / heads.divisor
        torch.testing.assert_close(without - with_, predicted, rtol=1e-10, atol=1e-10)
        assert float(predicted.std()) > 1e-3, "the prediction must say something"
    assert float((without - with_).abs().max()) > 0.01


def test_entropy_sees_only_visible_keys() -> None:
    s = torch.tensor([[[1.0, 99.0, -99.0], [1.0, 3.0, 99.0], [2.0, 2.0, 2.0]]], dtype=torch.float64)
    hidden = torch.ones(3, 3).triu(1).bool()
    ratio = uniformity.entropy_ratio(s.masked_fill(hidden, -math.inf).softmax(-1))[0]
    assert math.isnan(float(ratio[0]))
    p = 1 / (1 + math.exp(2))
    assert float(ratio[1]) == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2))
    assert float(ratio[2]) == pytest.approx(1.0)


def test_sets_of_keys_are_those_that_one_query_sees() -> None:
    for length, window, expected in ((20, 8, [(0, 4), (4, 12), (12, 20)]), (8, 8, [(0, 8)]), (5, None, [(0, 5)])):
        layer: Any = SimpleNamespace(length=length, seen=SimpleNamespace(window=window))
        sets = uniformity.AttentionLayer.key_sets.func(layer)
        assert [(keys.start, keys.stop) for keys in sets] == expected


def test_received_attention() -> None:
    pattern = torch.tensor([[[1.0, 0, 0], [0.25, 0.75, 0], [0.5, 0.2, 0.3]]])
    np.testing.assert_allclose(received(pattern)[0], [0.5, 0.75, 0.3])  # queries t ≥ max(i, 1)
    np.testing.assert_allclose(received(pattern[:, :2, :2])[0], [0.25, 0.75])
    assert math.isnan(float(received(torch.ones(1, 1, 1))[0, 0]))


@pytest.mark.parametrize("degrees", [1e-3, 0.1, 45.0, 89.999])
def test_planted_angles_to_ten_digits(degrees: float) -> None:
    """A key that two queries read: one the ones-vector, the other what is orthogonal to it, a million times weaker."""
    heads, site, _ = layer()
    plane = torch.randn(D, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    plane = torch.linalg.qr(plane - plane.mean(0)).Q
    reads = torch.randn(D, D_HEAD, dtype=torch.float64)
    reads -= reads.mean(0)
    reads[:, 0], reads[:, 1] = 1e-6 / math.sqrt(D), 1e-6 * plane[:, 0]
    heads = replace(heads, W_K=reads[None] / (site.gain[:, None] if site.gain is not None else 1.0))
    q = torch.zeros(1, 1, D_HEAD, dtype=torch.float64)
    q[..., 0], q[..., 1] = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    assert float(queries.angle_to_uniform(heads, site, q)) == pytest.approx(degrees, rel=1e-9)


def test_angle_through_a_qk_norm() -> None:
    """A query planted to read the ones-vector through the gain of the keys' norm is at 0 degrees."""
    heads, site, x = layer()
    with torch.no_grad():
        site.bias.zero_()
        w = torch.randn(D_HEAD, dtype=torch.float64)
        w -= w.mean()  # the norm inside attention takes the mean away
        reads = heads.W_K[0] + torch.outer(1 / site.gain - heads.W_K[0] @ w, w) / (w @ w)
    heads = replace(heads, W_K=reads[None], b_K=torch.zeros(1, D_HEAD, dtype=torch.float64), k_norm=site)
    q = (w / site.gain)[None, None]
    k = heads.keys(site.affine(site.project(x) / site.sigma(x)))
    assert float((k[:, 0] @ q[0, 0]).std()) < 1e-10
    assert float(queries.angle_to_uniform(heads, site, q)[0, 0]) < 1e-4
    assert float(queries.angle_to_uniform(replace(heads, k_norm=None), site, q)[0, 0]) > 10


def test_entropy_is_that_of_the_models_own_attention_and_a_mean_over_queries() -> None:
    """Prompts of other lengths count with the queries that have a choice: all of them, if they see both ways. One token
    tells nothing of what scores are divided by (1 in GPT-Neo)."""
    for arch in ("bert", "gpt2", "llama", "neo"):
        model, prompts = make_bridge(arch), [list(range(1, n)) for n in (2, 6, 20, 13)]
        report = ln_probe.analyze(model, prompts, probes=("uniformity",), progress=False)
        ratios = []
        for tokens in prompts:
            _, cache = model.run_with_cache(torch.tensor([tokens]))
            for query, weights in enumerate(cache["blocks.0.attn.hook_pattern"][0, 1].double()):
                keys = len(tokens) if arch == "bert" else query + 1
                if keys > 1:
                    ratios.append(-float(torch.special.xlogy(weights, weights).sum()) / math.log(keys))
        heads = report.heads.set_index(["layer", "head", "variant"])
        assert heads.loc[(0, 1, "intact"), "entropy_ratio"] == pytest.approx(np.mean(ratios), rel=1e-5)
        assert (heads["n"] == sum(map(len, prompts))).all()
        assert heads["uniform_angle_deg"].isna().all() == (arch == "llama"), "RMSNorm has no uniform direction"
        assert heads["unselectable"].isna().all()
