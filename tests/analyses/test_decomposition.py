"""LN(x) = the sum of its named terms, exactly; statistics against plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge, make_hooked
from small_models import norm_of

from ln_probe.analyses.constants import CONSTANT_COLUMNS, Constants
from ln_probe.analyses.probes.decomposition import layernorms_table
from ln_probe.analyses.probes.norm_statistics import STATISTICS, NormStatistics
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream

TOKENS = torch.arange(2, 26)


def statistics_of(model: Any, tokens: torch.Tensor = TOKENS) -> dict[str, NormStatistics]:
    found = {s.name: NormStatistics(s) for s in find_norms(model)}
    sites = [s.site for s in found.values()]
    stream(model, tokens, sites, on_norm=lambda s, x, y: found[s.name].add(x, y, heads=len(x) // len(tokens)))
    return found


def rows_of(model: Any) -> pd.DataFrame:
    """The `layernorms` layernorms_table of one prompt, with its own constants."""
    found = {s.name: NormStatistics(s) for s in find_norms(model)}
    sums: dict[str, Any] = {}

    def on_norm(site: Norm, x: torch.Tensor, y: torch.Tensor) -> None:
        sums[site.name] = found[site.name].add(x, y, heads=len(x) // len(TOKENS))

    stream(model, TOKENS, [s.site for s in found.values()], on_norm=on_norm)
    of_sites = np.array([[sums[name] for name in found]], float)
    return layernorms_table(
        list(found.values()), Constants(tuple(found), np.array([0]), of_sites[:, :, 0], of_sites[:, :, 1])
    )


@pytest.mark.parametrize(
    ("arch", "dtype"), [("gpt2", torch.float16), ("gemma", torch.bfloat16), ("olmo2", torch.bfloat16)]
)
def test_half_precision_is_bounded_by_its_rounding(arch: str, dtype: torch.dtype) -> None:
    """Recomputed exactly, a norm differs from its own output by the roundings of the format alone."""
    rows = rows_of(make_bridge(arch, dtype))
    # It is the rounded output that is compared.
    assert (rows["reconstruction_error"] > torch.finfo(dtype).eps / 2).all()
    assert (rows["reconstruction_error"] < rows["reconstruction_bound"]).all()
    # Largest entries are about 5 times the RMS: the bound is near the format's own resolution.
    assert rows["reconstruction_bound"].max() < 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["LN", "LNPre", "RMS", "RMSPre"])
def test_half_precision_in_hooked_transformer(kind: str) -> None:
    rows = rows_of(make_hooked(normalization_type=kind, dtype=torch.bfloat16))
    assert (rows["reconstruction_error"] < rows["reconstruction_bound"]).all()


def test_a_norm_that_is_off_is_beyond_the_bound() -> None:
    site = norm_of()
    x = torch.randn(300, 16, dtype=torch.float64)
    for bend, within in ((0.0, True), (1e-11, False)):
        gathered = NormStatistics(site)
        gathered.add(x, site.module(x).detach() + bend)
        assert (gathered.reconstruction_error <= gathered.reconstruction_bound) == within


def test_many_positions_are_measured_like_few() -> None:
    """Positions are taken in parts: the parts must not show."""
    site = norm_of()
    x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 0.3
    y = site.module(x).detach()
    gathered = NormStatistics(site)
    gathered.add(x, y)
    row, terms = gathered.row(), site.decompose(x)
    assert row["tokens"] == 1000
    assert row["scale_mean"] == pytest.approx(float(terms.scale.mean()), rel=1e-12)
    assert row["mean_share"] == pytest.approx(
        float((16 * terms.mean_component[:, 0] ** 2 / x.pow(2).sum(-1)).mean()), rel=1e-12
    )
    assert row["sigma_mean_tail"] == pytest.approx(float((1 / terms.scale[1:]).mean()), rel=1e-12)
    assert gathered.error == pytest.approx(float((y - terms.total()).abs().max()), abs=1e-15)


def test_statistics_are_those_of_numpy() -> None:
    site = norm_of()
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randn(n, 16, generator=generator, dtype=torch.float64) * 3 + 1 for n in (5, 9)]
    prompts[0][0] *= 100  # a sink at position 0
    gathered = NormStatistics(site)
    sums = [gathered.add(x, site.module(x).detach()) for x in prompts]
    row = gathered.row()
    for prompt, (of_sigma, counts) in zip(prompts, sums, strict=True):
        sigma = np.sqrt(prompt.numpy().var(-1) + 1e-5)
        assert of_sigma == pytest.approx((sigma[0], sigma[1:].sum()))
        assert counts == (1, len(prompt) - 1)
    for ending, rows in (("", np.concatenate(prompts)), ("_tail", np.concatenate([p[1:] for p in prompts]))):
        mu, length = rows.mean(-1), np.linalg.norm(rows, axis=-1)
        share = 16 * mu**2 / length**2
        sigma = np.sqrt(rows.var(-1) + 1e-5)
        expected = {
            "mean_share": share.mean(),
            "angle_to_ones_deg": np.degrees(np.arccos(np.sqrt(share))).mean(),
            "norm_before_mean": length.mean(),
            "norm_before_cv": length.std() / length.mean(),
            "scale_mean": (1 / sigma).mean(),
            "scale_cv": (1 / sigma).std() / (1 / sigma).mean(),
            "sigma_mean": sigma.mean(),
            "norm_after_mean": np.linalg.norm(site.module(torch.tensor(rows)).detach().numpy(), axis=-1).mean(),
        }
        assert set(expected) == set(STATISTICS)
        for name, value in expected.items():
            assert row[name + ending] == pytest.approx(value, rel=1e-9), name + ending
    gain = site.gain
    assert row["gain_cv"] == pytest.approx(float(gain.std(correction=0) / gain.mean().abs()))
    assert row["sigma_mean"] > 3 * row["sigma_mean_tail"]  # type: ignore[operator]


def test_rmsnorm_has_no_bias_and_no_projection() -> None:
    rows = rows_of(make_bridge("llama"))
    assert rows["bias_norm"].isna().all()
    assert (rows["mean_share"] > 1e-4).all()  # what it would remove is still described


def test_one_position_has_no_tail() -> None:
    site = norm_of()
    gathered = NormStatistics(site)
    x = torch.randn(1, 16, dtype=torch.float64)
    of_sigma, counts = gathered.add(x, site.module(x).detach())
    row = gathered.row()
    assert math.isnan(float(row["mean_share_tail"]))  # type: ignore[arg-type]
    assert of_sigma == pytest.approx((row["sigma_mean"], 0.0))
    assert counts == (1, 0)
    sums = np.array([[of_sigma]])
    (made,) = Constants((site.name,), np.array([0]), sums, np.array([[counts]], float)).pooled.values()
    assert made.rest == made.first == pytest.approx(row["sigma_mean"])


def test_constants_of_a_norm_stand_in_its_row() -> None:
    """Those of a single prompt are its own mean sigmas; a norm whose sigma nothing replaces has none."""
    model = make_bridge("gpt2")
    rows = rows_of(model).set_index("site")
    np.testing.assert_allclose(rows["constant_rest"], rows["sigma_mean_tail"], rtol=1e-12)
    count = len(TOKENS)
    both = (rows["constant_first"] + (count - 1) * rows["constant_rest"]) / count
    np.testing.assert_allclose(both, rows["sigma_mean"], rtol=1e-12)
    assert (rows[["constant_ratio_first", "constant_ratio_rest"]] == 1).all(axis=None)
    statistics = list(statistics_of(model).values())
    nothing = np.zeros((1, 0, 2))
    unknown = layernorms_table(statistics, Constants((), np.array([0]), nothing, nothing))
    assert unknown[list(CONSTANT_COLUMNS)].isna().all(axis=None)
