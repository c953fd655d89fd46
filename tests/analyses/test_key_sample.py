"""A sample of keys: what is said of a key is what the full measure says; intervals hold what all keys would give."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases, make_bridge
from scipy import stats  # type: ignore[import-untyped]

import ln_probe
from ln_probe.analyses.constants import KeySample
from ln_probe.analyses.geometry.api import key_geometry, set_geometry
from ln_probe.analyses.geometry.decide import NAMES
from ln_probe.analyses.geometry.inputs import QuerySet
from ln_probe.analyses.probes.statistics import fraction_interval, quantile_interval

TOKENS = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(6))
HOW: dict[str, Any] = {"progress": False, "probes": ("selectability",), "keys": "all"}
PLACE = ["layer", "head", "space", "variant", "prompt", "position"]


def test_a_fractions_interval_is_the_exact_one() -> None:
    for found, count in ((0, 64), (3, 64), (64, 64), (10, 40)):
        low, high = fraction_interval(found, count)
        exact = stats.binomtest(found, count).proportion_ci(0.95, "exact")
        assert (low, high) == pytest.approx((exact.low, exact.high), abs=1e-12)


@pytest.mark.parametrize("q", [0.05, 0.5])
@pytest.mark.parametrize("count", [8, 64])
def test_a_quantiles_interval_covers_what_it_claims(q: float, count: int) -> None:
    """By the binomial law, without drawing: P(X(l) ≤ quantile ≤ X(u)) = P(l ≤ B < u)."""
    low, high = quantile_interval(np.arange(1.0, count + 1), q)  # the values are their own ranks
    first = 0 if math.isnan(low) else int(low)
    last = count + 1 if math.isnan(high) else int(high)
    covered = stats.binom.cdf(last - 1, count, q) - stats.binom.cdf(first - 1, count, q)
    assert covered >= 0.95
    if not math.isnan(low):  # and no narrower pair would do
        assert stats.binom.cdf(last - 1, count, q) - stats.binom.cdf(first, count, q) < 0.975
    assert all(math.isnan(v) for v in quantile_interval(np.full(5, np.nan), q))


def test_every_key_is_as_likely_and_draws_repeat() -> None:
    sample = KeySample(10, 100, 3, 0.0)
    assert [sample.size(n) for n in (100, 50, 11, 1)] == [10, 5, 2, 1]
    drawn = [sample.positions(0, 1, head, 100) for head in range(2000)]
    counts = np.bincount(np.concatenate(drawn), minlength=100)
    assert stats.chisquare(counts).pvalue > 1e-3
    assert (sample.positions(0, 1, 7, 100) == drawn[7]).all()
    assert any((a != b).any() for a, b in pairwise(drawn))


@pytest.mark.parametrize(("number", "d"), [(60, 3), (1100, 3), (1100, 40)])
def test_some_keys_of_a_set_are_what_all_say(number: int, d: int) -> None:
    """Small sets and large ones take other ways; in 3 dimensions nearly all keys are inside, in 40 none."""
    rng = np.random.default_rng(number + d)
    keys, only = rng.standard_normal((number, d)), np.sort(rng.choice(number, 25, replace=False))
    some = set_geometry(keys, None, QuerySet(np.zeros(d), np.eye(d)), only=only)
    full = key_geometry(keys, query_set=1.0)
    assert list(NAMES[some.proved.verdicts.code[only]]) == list(full.verdict[only])
    lower, upper = some.bounds
    assert (np.maximum(lower, full.margin_lower[only]) <= upper + 1e-9).all()
    assert (np.maximum(lower, full.margin_lower[only]) <= full.margin_upper[only] + 1e-9).all()
    assert (np.abs(some.attainable.weight - full.attainable[only]) <= 0.0101).all()


@pytest.mark.parametrize("arch", cases("gpt2", slow=["mistral"]))
def test_a_sampled_key_is_measured_as_among_all(arch: str) -> None:
    model = make_bridge(arch)
    full = ln_probe.analyze(model, TOKENS, heads=[0, 2], layers=[1], **HOW).keys.set_index(PLACE)
    report = ln_probe.analyze(model, TOKENS, heads=[0, 2], layers=[1], keys_sample=9, **HOW)
    some = report.keys.set_index(PLACE)
    assert some.groupby(["layer", "head", "space", "variant", "prompt"]).size().eq(9).all()
    same = full.loc[some.index]
    for column in ("verdict", "reachable", "token", "pattern_max", "judged_at"):
        assert some[column].equals(same[column]), column
    brackets = (
        ("margin_lower", "margin_upper"),
        ("attainable", "attainable_upper"),
    )
    for low, high in brackets:
        apart = np.fmax(some[low], same[low]) - np.fmin(some[high], same[high])
        assert not (apart > 1e-9 * some[high].abs().fillna(0)).any(), "brackets of one number overlap"
        width = (some[high] - some[low]).abs()
        assert (width.fillna(0) <= 0.0101 * np.maximum(1.0, some[high].abs()).fillna(1)).all()
    heads = report.heads
    assert set(heads["keys"]) == {18}
    assert set(heads["keys_all"]) == {60}
    ends = heads.query("space == 'head'")[["margin_median_low", "margin_median_high", "unselectable_fraction_high"]]
    assert ends.notna().all().all()
    (note,) = [n for n in report.notes if n.startswith("keys were sampled: 9 of each head's 30 in the longest prompt")]
    assert "keys_sample=0" in note


def test_keys_are_sampled_where_all_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from ln_probe import passes

    monkeypatch.setattr(passes, "SAMPLE_ABOVE", 0.0)
    monkeypatch.setattr(passes, "DEFAULT_SAMPLE", 5)
    model = make_bridge("gpt2")
    by_itself = ln_probe.analyze(model, TOKENS, heads=[0], layers=[0], **HOW)
    asked = ln_probe.analyze(model, TOKENS, heads=[0], layers=[0], keys_sample=5, **HOW)
    assert by_itself.keys.equals(asked.keys)
    assert set(by_itself.heads["keys"]) == {10}
    assert any(n.startswith("keys were sampled: 5 of each") for n in by_itself.notes)
    with pytest.raises(ValueError, match=r"keys_sample must be a number of keys per head \(0: all of them\), got -1"):
        ln_probe.analyze(model, TOKENS, keys_sample=-1, **HOW)
