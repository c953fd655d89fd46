"""LN(x) = the sum of its named terms, exactly; statistics against plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge
from small_models import norm_of

from ln_probe.analyses.probes.decomposition import NormStatistics
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream

TOKENS = torch.arange(2, 26)


def statistics_of(model: Any) -> list[NormStatistics]:
    """The statistics of every norm on one prompt."""
    by_name = {s.name: NormStatistics(s) for s in find_norms(model)}
    sites = [s.site for s in by_name.values()]
    stream(model, TOKENS, sites, on_norm=lambda s, x, y: by_name[s.name].add(x, y, heads=len(x) // len(TOKENS)))
    return list(by_name.values())


@pytest.mark.parametrize(
    ("arch", "dtype"), [("gpt2", torch.float16), ("gemma", torch.bfloat16), ("olmo2", torch.bfloat16)]
)
def test_half_precision_is_bounded_by_its_rounding(arch: str, dtype: torch.dtype) -> None:
    """Recomputed exactly, a norm differs from its own output by the roundings of the format alone."""
    for norm in statistics_of(make_bridge(arch, dtype)):
        # It is the rounded output that is compared; largest entries are about 5 times the RMS.
        assert torch.finfo(dtype).eps / 2 < norm.reconstruction_error < 8 * torch.finfo(dtype).eps


def test_a_norm_that_is_off_shows() -> None:
    site = norm_of()
    x = torch.randn(300, 16, dtype=torch.float64)
    for bend in (0.0, 1e-11):
        gathered = NormStatistics(site)
        gathered.add(x, site.module(x).detach() + bend)
        assert (gathered.reconstruction_error > 1e-12) == (bend > 0)


@pytest.mark.parametrize("radius", [None, 8.0])  # twice the usual length
def test_statistics_are_those_of_numpy(radius: float | None) -> None:
    site = norm_of(radius=radius)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randn(n, 16, generator=generator, dtype=torch.float64) * 3 + 1 for n in (5, 900)]
    prompts[0][0] *= 100  # a sink at position 0
    gathered = NormStatistics(site)
    sums = [gathered.add(x, site.module(x).detach()) for x in prompts]
    for prompt, (of_sigma, counts) in zip(prompts, sums, strict=True):
        sigma = np.sqrt(prompt.numpy().var(-1) + 1e-5) * 4 / (radius or 4)
        assert of_sigma == pytest.approx((sigma[0], sigma[1:].sum()))
        assert counts == (1, len(prompt) - 1)
    x = np.concatenate(prompts)
    mu, length, sigma = x.mean(-1), np.linalg.norm(x, axis=-1), np.sqrt(x.var(-1) + 1e-5) * 4 / (radius or 4)
    share = 16 * mu**2 / length**2
    row, y = gathered.row(), np.concatenate([site.module(prompt).detach() for prompt in prompts])
    expected = {
        "projected_share": share.mean(),
        "angle_to_ones_deg": np.degrees(np.arccos(np.sqrt(share))).mean(),
        "input_norm": length.mean(),
        "sigma_mean": sigma.mean(),
        "sigma_cv": sigma.std() / sigma.mean(),
        "n": 905,
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-9), name
    assert row["reconstruction_error"] == pytest.approx(gathered.error / np.sqrt((y**2).mean()), rel=1e-9, abs=0.0)
    total = site.decompose(prompts[1]).total()
    assert gathered.error == pytest.approx(float((site.module(prompts[1]) - total).abs().max()), abs=1e-14)


def test_one_position_has_sigma_at_position_0_alone() -> None:
    site, x = norm_of(), torch.randn(1, 16, dtype=torch.float64)
    gathered = NormStatistics(site)
    of_sigma, counts = gathered.add(x, site.module(x).detach())
    assert of_sigma == pytest.approx((gathered.row()["sigma_mean"], 0.0))
    assert counts == (1, 0)
    nothing = NormStatistics(site).row()  # of a norm that no pass runs
    unknown = ("projected_share", "angle_to_ones_deg", "input_norm", "sigma_mean", "sigma_cv", "reconstruction_error")
    assert nothing["n"] == 0
    assert all(isinstance(nothing[name], float) and np.isnan(nothing[name]) for name in unknown)
