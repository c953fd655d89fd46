"""Uniform attention: the planted query, what un-projecting its keys does to it, and random directions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from architectures import make_bridge
from small_models import norm_of

from ln_probe.analyses.probes import uniformity as uniformity
from ln_probe.analyses.probes.attention_layer import variant_outputs
from ln_probe.hooks.attention import Heads, Rotary
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
    outputs = variant_outputs(site, x, 1.0)
    k = heads.keys(site.affine(outputs["intact"]))
    s = uniformity.scores(q, k, heads.divisor)
    assert float(uniformity.score_spread(s)[0, 0]) < 1e-10
    ratio = uniformity.entropy_ratio(heads.pattern(q, k))
    assert float(ratio[0, 0]) == pytest.approx(1.0, abs=1e-12)
    # arccos resolves an angle of 0 to the square root of float64
    assert float(uniformity.angle_to_uniform(heads, site.gain, q)[0, 0]) < 1e-5


def test_unprojecting_changes_scores_by_exactly_the_predicted_amount() -> None:
    """q·W_Kᵀ(gain·mu·1/sigma) (science, section 3)."""
    heads, site, x = layer()
    outputs = variant_outputs(site, x, 1.0)
    for q in (planted(heads, site), torch.randn(1, 1, D_HEAD, dtype=torch.float64)):
        with_, without = (
            uniformity.scores(q, heads.keys(site.affine(outputs[v])), heads.divisor)[0, 0]
            for v in ("intact", "no_projection")
        )
        added = site.gain * x.mean(-1, keepdim=True) / site.sigma(x)
        predicted = (added @ heads.W_K[0]) @ q[0, 0] / heads.divisor
        torch.testing.assert_close(without - with_, predicted, rtol=1e-10, atol=1e-10)
        assert float(predicted.std()) > 1e-3, "the prediction must say something"
    assert float((without - with_).abs().max()) > 0.01


def test_random_directions_are_near_ninety_degrees() -> None:
    """Mean folded angle of a random direction: 90° - (180/π)·sqrt(2/(π d)) to first order."""
    for d in (64, 768):
        expected = 90 - math.degrees(math.sqrt(2 / (math.pi * d)))
        assert uniformity.random_angle(d) == pytest.approx(expected, abs=0.3)


def test_rotary_angle_is_the_mean_over_visible_keys() -> None:
    heads, site, _ = layer()
    angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.3, 0.05]))
    table = torch.cat([angles, angles], dim=-1).double()
    heads = replace(heads, rotary=Rotary(table.cos(), table.sin(), False))
    q = torch.randn(9, 1, D_HEAD, dtype=torch.float64)
    found = uniformity.angle_to_uniform(heads, site.gain, q)[:, 0]
    turned = heads.rotary(q, torch.arange(9))
    for t in (0, 3, 8):
        by_key = []
        for j in range(t + 1):
            matrix = heads.rotary(torch.eye(D_HEAD, dtype=torch.float64)[:, None], torch.full((D_HEAD,), j))[:, 0]
            v = site.gain * (heads.W_K[0] @ (matrix @ turned[t, 0]))  # rows of `matrix` are R e_i, so it is Rᵀ
            by_key.append(math.degrees(math.acos(float(v.sum().abs() / (v.norm() * math.sqrt(D))))))
        assert float(found[t]) == pytest.approx(np.mean(by_key), rel=1e-9)


def test_spread_and_entropy_see_only_visible_keys() -> None:
    s = torch.tensor([[[1.0, 99.0, -99.0], [1.0, 3.0, 99.0], [2.0, 2.0, 2.0]]], dtype=torch.float64)
    np.testing.assert_allclose(uniformity.score_spread(s)[0], [0.0, 1.0, 0.0], atol=1e-12)
    hidden = torch.ones(3, 3).triu(1).bool()
    ratio = uniformity.entropy_ratio(s.masked_fill(hidden, -math.inf).softmax(-1))[0]
    assert math.isnan(float(ratio[0]))
    p = 1 / (1 + math.exp(2))
    assert float(ratio[1]) == pytest.approx(-(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2))
    assert float(ratio[2]) == pytest.approx(1.0)


def test_spread_floor_of_fewer_keys_than_directions() -> None:
    """Some direction sees no difference: the floor is 0 if the rest of the query can undo the center."""
    k = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]], dtype=torch.float64)
    axes = torch.eye(2, dtype=torch.float64)[None]
    for x, floor in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.75, 0.75)):
        center = torch.tensor([[x, 5.0]], dtype=torch.float64)
        assert float(uniformity.spread_floor(k, (center, axes))[0]) == pytest.approx(floor, abs=1e-15)
    assert math.isnan(float(uniformity.spread_floor(k, None)[0]))


@pytest.mark.parametrize(("hard", "nearly"), [(0.0, 0.0), (0.1, 1e-13), (0.6, 1e-16), (0.95, 0.0)])
def test_spread_floor_by_a_quadratic_eigenproblem(hard: float, nearly: float) -> None:
    """The same least from another formula (Gander, Golub & von Matt 1989: the multiplier is the largest real eigenvalue
    of a matrix of twice the size), and as little changed by rounding as a singular value is."""
    generator = torch.Generator().manual_seed(3)
    for keys, d in ((30, 3), (200, 16), (65, 64)):
        k = torch.randn(keys, 1, d, dtype=torch.float64, generator=generator)
        center, axes = (torch.randn(1, d, *more, dtype=torch.float64, generator=generator) for more in ((), (d,)))
        centred = (k - k.mean(0))[:, 0] / math.sqrt(keys)
        reads = centred @ axes[0]
        if hard:  # next to none of the center where spread is least, and `hard` of u's square for the rest
            left, values, right = torch.linalg.svd(reads, full_matrices=False)
            u = torch.full((d - 1,), math.sqrt(hard / (d - 1)), dtype=torch.float64)
            reach = left[:, :-1] @ (u * (values[:-1] ** 2 - values[-1] ** 2) / values[:-1]) + nearly * left[:, -1]
            center = torch.linalg.lstsq(centred, reach[:, None]).solution.T
            assert float((left[:, -1] @ (centred @ center[0])).abs()) < 2e-13
        b = centred @ center[0]
        gram, pull = reads.T @ reads, reads.T @ b
        if hard:
            u = -right[:-1].T @ u - right[-1] * math.sqrt(1 - hard)
        else:
            unit = torch.eye(d, dtype=torch.float64)
            both = torch.cat([torch.cat([-gram, torch.outer(pull, pull)], 1), torch.cat([unit, -gram], 1)])
            found = torch.linalg.eigvals(both)
            multiplier = found.real[found.imag.abs() < 1e-6 * (1 + found.abs())].max()
            u = torch.linalg.solve(gram + multiplier * unit, -pull)
        assert float(u.norm()) == pytest.approx(1.0, abs=1e-6)
        floor = uniformity.spread_floor(k, (center, axes))[0]
        assert float(floor) == pytest.approx(float((reads @ u + b).norm()), rel=1e-7)
        noise = 1 + 1e-14 * torch.randn(3, generator=generator, dtype=torch.float64)
        beside = uniformity.spread_floor(k * noise[0], (center * noise[1], axes * noise[2]))[0]
        assert float(beside) == pytest.approx(float(floor), rel=1e-10)


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
    assert float(uniformity.angle_to_uniform(heads, site.gain, q)) == pytest.approx(degrees, rel=1e-9)


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
    k = heads.keys(site.affine(variant_outputs(site, x, 1.0)["intact"]))
    assert float(uniformity.score_spread(uniformity.scores(q, k, heads.divisor))[0, 0]) < 1e-10
    assert float(uniformity.angle_to_uniform(heads, site.gain, q)[0, 0]) < 1e-4
    assert float(uniformity.angle_to_uniform(replace(heads, k_norm=None), site.gain, q)[0, 0]) > 10


def test_bridge_and_hooked_options_do_not_matter_for_rmsnorm() -> None:
    """RMSNorm has no uniform direction: NaN, not 0."""
    import ln_probe

    report = ln_probe.analyze(make_bridge("llama"), torch.arange(20)[None], probes=("uniformity",), progress=False)
    head = report.heads[report.heads["space"] == "head"]
    assert head["uniform_angle_deg"].isna().all()
    assert head["entropy_ratio"].between(0, 1).all()


def test_the_table_holds_spread_and_entropy_of_the_models_own_attention() -> None:
    import ln_probe

    model, tokens = make_bridge("gpt2"), torch.arange(20)[None]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    report = ln_probe.analyze(model, tokens, probes=("uniformity",), progress=False)
    rows = report.heads.query("space == 'head' and variant == 'intact'").set_index(["layer", "head"])
    for layer, head in ((0, 0), (1, 3)):
        scores, pattern = (cache[f"blocks.{layer}.attn.hook_{n}"][0, head].double() for n in ("attn_scores", "pattern"))
        spread = [float(scores[t, : t + 1].std(correction=0)) for t in range(1, 20)]
        entropy = [float(-(p * p.log()).sum()) / math.log(len(p)) for t in range(1, 20) for p in [pattern[t, : t + 1]]]
        assert rows.loc[(layer, head), "score_spread"] == pytest.approx(np.mean(spread), rel=1e-4)
        assert rows.loc[(layer, head), "entropy_ratio"] == pytest.approx(np.mean(entropy), rel=1e-4)
