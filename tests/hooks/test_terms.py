"""One norm as its terms: they are what they are called and add up to its output in every world; what it can put out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import lab, norm_of

from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.hooks import Site, Terms, find_sites

ARCHITECTURES = ["gpt2", "neox", "opt", "llama", "gemma", "qwen3", "olmo2", "bloom", "bert"]
IN_FLOAT32 = 1e-5  # of the output's RMS: how a norm that computes in float32 rounds


def check_sum(site: Site, bound: float, dtype: torch.dtype) -> None:
    """The terms add up to what the norm itself says, on streams of any shape."""
    x = 3 * torch.randn(2, 5, site.d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.7
    x = x.to(dtype)
    terms = site.decompose(x)
    with torch.no_grad():
        truth = site.module(x).double()
    size = float(truth.pow(2).mean().sqrt())
    assert float((terms.total() - truth).abs().max()) <= bound * size
    summands = terms.summands()
    assert list(summands) == ["input", "projection", "bias"]
    together = torch.stack(list(summands.values())).sum(0)
    torch.testing.assert_close(together, terms.total(), rtol=1e-12, atol=1e-12 * size)
    if not site.projects:
        assert not bool(summands["projection"].any())
    if site.bias is None:
        assert not bool(summands["bias"].any())
    for values in (terms.x, terms.mean_component, terms.projected, terms.normalized, *summands.values()):
        assert values.shape == x.shape
        assert values.dtype == torch.float64
    assert terms.sigma.shape == terms.scale.shape == (2, 5, 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_terms_add_up_in_a_bridge(arch: str, make_bridge: Callable[..., Any]) -> None:
    double, single = make_bridge(arch, torch.float64), make_bridge(arch)
    sites = find_sites(double)
    in_float32 = arch in ("llama", "gemma", "qwen3", "olmo2")  # Hugging Face's RMSNorms, whatever the model's format
    assert len(sites) >= 4
    for site in sites:
        if site.reads not in ("query", "key"):  # those take a head's vectors, in a shape of their own
            check_sum(site, IN_FLOAT32 if in_float32 else 1e-12, torch.float64)
    for site in find_sites(single):
        if site.reads not in ("query", "key"):
            check_sum(site, IN_FLOAT32, torch.float32)


@pytest.mark.parametrize("kind", ["LN", "LNPre", "RMS", "RMSPre"])
def test_terms_add_up_in_hooked_transformer(kind: str, make_hooked: Callable[..., Any]) -> None:
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, IN_FLOAT32)):
        model = make_hooked(normalization_type=kind, dtype=dtype)
        for site in find_sites(model):
            check_sum(site, bound, dtype)


@pytest.mark.parametrize("norm", NORM_KINDS)
def test_terms_add_up_in_the_laboratory(norm: str) -> None:
    model = lab(norm=norm).double()
    for site in find_sites(model):
        check_sum(site, 1e-12, torch.float64)


def test_terms_are_what_they_are_called() -> None:
    site = norm_of()
    x = torch.randn(6, 16, dtype=torch.float64) + 2
    terms = site.decompose(x)
    assert isinstance(terms, Terms)
    torch.testing.assert_close(terms.mean_component + terms.projected, x)
    assert float(terms.projected.sum(-1).abs().max()) < 1e-12
    assert float((terms.mean_component * terms.projected).sum(-1).abs().max()) < 1e-12
    variance = x.numpy().var(axis=-1)
    np.testing.assert_allclose(terms.scale[:, 0], 1 / np.sqrt(variance + 1e-5), rtol=1e-12)
    # on the sphere of radius sqrt(d)·sqrt(s²/(s²+eps)) (science: exactly sqrt(d) only when eps = 0)
    np.testing.assert_allclose(terms.normalized.norm(dim=-1), 4 * np.sqrt(variance / (variance + 1e-5)), rtol=1e-12)
    torch.testing.assert_close(terms.total(), site.module(x), rtol=1e-12, atol=1e-12)
    gain = site.gain
    assert gain is not None
    removed = -terms.mean_component / terms.sigma * gain
    torch.testing.assert_close(terms.summands()["projection"], removed, rtol=1e-9, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(shift=st.floats(-100, 100), factor=st.floats(1e-2, 1e3), seed=st.integers(0, 1000))
def test_projection_forgets_the_mean_and_scaling_the_length(shift: float, factor: float, seed: int) -> None:
    site = norm_of()
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    base = site.decompose(x)
    torch.testing.assert_close(site.decompose(x + shift).normalized, base.normalized, rtol=1e-9, atol=1e-9)
    longer = site.decompose(x * factor)
    spread = base.projected.pow(2).mean(-1, keepdim=True)
    eps_effect = ((spread + site.eps) / (spread + site.eps / factor**2)).sqrt()
    torch.testing.assert_close(longer.normalized, base.normalized * eps_effect, rtol=1e-9, atol=1e-9)


def test_what_cannot_be_decomposed_is_refused() -> None:
    site = norm_of()
    with pytest.raises(ValueError, match=r"blocks\.0\.ln1 normalizes vectors of length 16, got \[2, 7\]"):
        site.decompose(torch.zeros(2, 7))
    with pytest.raises(TypeError, match=r"vectors of real numbers \[… 16\], got torch\.int64"):
        site.decompose(torch.zeros(2, 16, dtype=torch.long))
    with pytest.raises(TypeError, match=r"vectors of real numbers \[… 16\], got list"):
        site.decompose([0.0] * 16)  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["layernorm", "scaling_only"])
def test_the_reachable_set_holds_every_output_and_its_edge_is_reached(norm: str) -> None:
    """Outputs are c + A u with |u| ≤ 1, near 1 for long vectors; read through a map W they are Wᵀ of that."""
    site = find_sites(lab(norm=norm).double())[0]
    found = site.reachable()
    assert found is not None
    center, axes = found
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, site.d, generator=generator, dtype=torch.float64) * torch.logspace(-3, 3, 200)[:, None]
    y = site.affine(site.normalize(x))
    u = (y - center) @ torch.linalg.pinv(axes).T
    torch.testing.assert_close(u @ axes.T + center, y, rtol=1e-9, atol=1e-9)
    lengths = u.norm(dim=-1)
    assert float(lengths.max()) <= 1 + 1e-9
    assert float(lengths[-1]) == pytest.approx(1, abs=1e-6)
    W = torch.randn(3, site.d, 4, generator=generator, dtype=torch.float64)
    read = site.reachable(W)
    assert read is not None
    torch.testing.assert_close(read[0], torch.stack([w.T @ center for w in W]))
    torch.testing.assert_close(read[1], torch.stack([w.T @ axes for w in W]))


def test_a_norm_that_does_not_scale_reaches_everything() -> None:
    unbounded = replace(norm_of(), kind="projection_only", constant_scale=1.0, radius=math.nan)
    assert unbounded.reachable() is None
    assert unbounded.reachable(torch.eye(16)) is None
