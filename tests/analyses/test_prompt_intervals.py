"""How far changes hold beyond their prompts: intervals and their coverage, p adjusted for what is shown together."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import cases
from scipy import stats
from small_models import lab

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import causal as causal_table
from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.edited_runs import EditedRuns
from ln_probe.hooks.constants import mean_sigmas
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.norms import find_norms

LEAST = 0.93
ROOT = Path(__file__).parents[2]


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_coverage", ROOT / "bench" / "interval_coverage.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", cases("lognormal", slow=["normal", "outliers"]))
def test_coverage(kind: str) -> None:
    """400 sets here (standard error 0.011); the documentation's tables are of 4000, and are checked below."""
    row = bench().worth(kind, statistics.PROMPTS_NEEDED, sets=400)
    assert row["coverage"] >= LEAST - 0.011
    assert row["given"] >= 0.99
    for few in (4, 8, 16):
        assert math.isnan(bench().worth(kind, few, sets=1)["coverage"])


def test_the_page_shows_what_was_simulated() -> None:
    """And every kind that intervals are given for is covered, but for the rare outliers that the page names."""
    made = bench()
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    table = pd.read_csv(made.TABLE).dropna().set_index(["effects", "prompts"])
    for kind in ("normal", "lognormal", "outliers"):
        assert (table.loc[kind, "coverage"] >= LEAST).all()
        assert (table.loc[kind, "given"] >= 0.999).all()
    for cell in table.loc[["outliers 3 %", "outliers 5 %"], "coverage"]:
        assert f"{cell:.2f}" in text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "lognormal", "outliers", "outliers 5 %", "outliers 3 %"])
@pytest.mark.parametrize("prompts", [4, 8, 16, 32, 64])
def test_what_was_simulated(kind: str, prompts: int) -> None:
    made = bench()
    table = pd.read_csv(made.TABLE).set_index(["effects", "prompts"])
    found = made.worth(kind, prompts)
    assert [found[c] for c in table] == pytest.approx(table.loc[(kind, prompts)].tolist(), abs=1e-5, nan_ok=True)


@pytest.mark.parametrize("kind", ["lognormal", "outliers"])
def test_p_is_below_005_exactly_where_the_interval_excludes_0(kind: str) -> None:
    generator, both = np.random.default_rng(1), set()
    for shift in np.linspace(-1.5, 1.5, 120):
        x, truth = bench().effects(kind, statistics.PROMPTS_NEEDED, generator)
        found = statistics.infer_mean(x - truth + shift, np.ones(statistics.PROMPTS_NEEDED))
        if not math.isnan(found.low):
            assert (found.p < statistics.SIGNIFICANCE) == (found.low > 0 or found.high < 0)
            both.add(found.p < statistics.SIGNIFICANCE)
    assert both == {True, False}


def test_p_at_the_very_ends() -> None:
    """Moved to where an end is 0, and a little to either side."""
    x = np.random.default_rng(0).standard_normal(40)
    found = statistics.infer_mean(x, np.ones(40))
    for end, inwards in ((found.low, 1), (found.high, -1)):
        assert statistics.infer_mean(x - end + inwards * 1e-9, np.ones(40)).p < statistics.SIGNIFICANCE
        assert statistics.infer_mean(x - end - inwards * 1e-9, np.ones(40)).p >= statistics.SIGNIFICANCE


def test_p_is_fine_enough_for_holm() -> None:
    ones = np.ones(64)
    least = statistics.infer_mean(np.random.default_rng(0).normal(5, 1, 64), ones).p
    assert least == pytest.approx(2.5 / (statistics.RESAMPLES + 1))
    assert 12 * least < statistics.SIGNIFICANCE / 30
    assert statistics.infer_mean(ones, ones).p == least
    assert statistics.infer_mean(0 * ones, ones).p == 1.0
    assert math.isnan(statistics.infer_mean(ones[:20], ones[:20]).p)
    assert len(statistics.resamples(64, 0)) == statistics.RESAMPLES
    assert len(statistics.resamples(2000, 0)) == 2500
    assert len(statistics.resamples(100_000, 0, least=10**6)) == 0


def test_no_interval_where_a_few_prompts_carry_everything() -> None:
    """A norm was printed as +0.582 [-0.092, 246.128]: one prompt of 32 rises by 18 nats, the others hardly change."""
    ones = np.ones(32)
    x = np.random.default_rng(0).normal(0.01, 0.01, 32)
    x[5] = 18.6
    wide = statistics.infer_mean(x, ones, reach=math.inf)
    assert wide.high > 100
    assert all(
        map(
            math.isnan,
            (statistics.infer_mean(x, ones).low, statistics.infer_mean(x, ones).high, statistics.infer_mean(x, ones).p),
        )
    )
    assert statistics.median(x, ones) < 0.02
    x[5] = 0.5  # an outlier of 50 standard deviations still has one
    assert not math.isnan(statistics.infer_mean(x, ones).low)
    assert math.isnan(statistics.median(np.array([1.0, math.nan]), np.ones(2)))
    assert math.isnan(statistics.median(np.ones(2), np.zeros(2)))
    assert statistics.median(np.array([2.0, 9.0, 3.0]), np.array([1.0, 3.0, 0.0])) == 2.5


def test_a_ratio_of_sums_not_a_mean_of_ratios() -> None:
    generator = np.random.default_rng(0)
    weight = generator.integers(5, 200, 40).astype(float)
    change = weight * (0.3 + generator.normal(0, 0.05, 40))
    low, high = statistics.interval(change, weight)
    estimate = change.sum() / weight.sum()
    assert low < estimate < high
    error = math.sqrt(40 / 39 * ((change - estimate * weight) ** 2).sum()) / weight.sum()
    half = stats.t.ppf(0.98, 39) * error  # normal effects: near Student's, at the same share beyond the ends
    assert (high - low) / 2 == pytest.approx(half, rel=0.15)
    same = statistics.interval(np.append(change, 0.0), np.append(weight, 0.0))  # a prompt that predicts nothing
    assert same == (low, high)


def test_where_there_is_nothing_to_say() -> None:
    ones = np.ones(40)
    assert statistics.interval(0.5 * ones, ones) == (0.5, 0.5)
    assert all(map(math.isnan, statistics.interval(np.where(np.arange(40) == 3, math.nan, 1.0), ones)))
    one = (np.arange(40) == 3) * 1.0  # one prompt alone changes: no upper end can be told
    assert statistics.infer_mean(one, ones, reach=math.inf).high == math.inf
    assert all(map(math.isnan, statistics.interval(one, ones)))


def test_signs_and_holm() -> None:
    assert statistics.sign_test(np.ones(12)) == pytest.approx(2**-11)
    assert statistics.sign_test(np.array([1.0, -1.0, 0.0])) == 1.0
    assert math.isnan(statistics.sign_test(np.array([math.nan])))
    assert math.isnan(statistics.sign_test(np.array([1.0] * 12 + [math.nan]))), (
        "not of the prompts that happen to be finite"
    )
    looked_at = [True, True, True, False]
    assert statistics.holm([0.01, math.nan, 0.03, math.nan], looked_at).tolist() == pytest.approx(
        [0.03, math.nan, 0.06, math.nan], nan_ok=True
    )
    assert statistics.holm([]).tolist() == []
    assert statistics.holm([0.6, 0.7]).tolist() == [1.0, 1.0]
    assert statistics.holm([0.01, math.nan, 0.04, 0.02]).tolist() == pytest.approx(
        [0.03, math.nan, 0.04, 0.04], nan_ok=True
    )


@cache
def measured() -> pd.DataFrame:
    model, tokens = lab(), torch.arange(1, 13)
    sites = find_norms(model)
    return EditedRuns(model, sites, mean_sigmas(model, sites, [tokens])).measure(0, tokens)


def many(prompts: int) -> list[pd.DataFrame]:
    """One prompt's numbers, as if of many: every edit changes the loss by as much as it does, and noise."""
    one, generator = measured(), np.random.default_rng(0)
    edited = one["variant"] != "intact"
    return [
        one.assign(prompt=i, nll=one["nll"] + generator.normal(0.1, 0.4, len(one)) * edited) for i in range(prompts)
    ]


def separate(groups: list[int]) -> Constants:
    nothing = np.zeros((len(groups), 0, 2))
    return Constants((), np.array(groups), nothing, nothing)


EACH = separate(list(range(40)))


def test_primary_contrasts_and_exploratory_groups_have_families_of_their_own() -> None:
    table = causal_table.table(frames := many(40), EACH)
    tested = table[(table["variant"] != "intact") & (table["no_op"] == "")]
    groups = tested[tested["sites"].isin(GROUPS)]
    sums = pd.concat(frames)
    alone = []
    for row in groups.itertuples():
        mine, base = (
            sums[(sums["sites"] == row.sites) & (sums["variant"] == v)].sort_values("prompt")
            for v in (row.variant, "intact")
        )
        change = mine["nll"].to_numpy(float) - base["nll"].to_numpy(float)
        found = statistics.infer_mean(change, mine["predicted"].to_numpy(float))
        assert (found.low, found.high) == (row.delta_loss_low, row.delta_loss_high)
        assert np.median(change / mine["predicted"]) == pytest.approx(row.delta_loss_median)
        alone.append(found.p)
    primary = (groups["family"] == "primary").to_numpy()
    assert primary.sum() == 4
    for family in (primary, ~primary):
        np.testing.assert_array_equal(groups["p_mean"][family], statistics.holm(np.array(alone)[family].tolist()))
    assert table.loc[table["variant"] == "intact", "p_mean"].isna().all()
    single = tested[~tested["sites"].isin(GROUPS) & (tested["variant"] == "no_scaling")]
    assert (single["p_mean"] >= single.index.size * 2.5 / (statistics.RESAMPLES + 1)).all()
    pd.testing.assert_frame_equal(causal_table.table(frames[::-1], EACH), table)


def test_prompts_of_one_group_count_once() -> None:
    """The same prompt 40 times gave an interval of no width and p = 0.0015 (40 prompts, in 2 groups or 20)."""
    frames = many(40)
    two = causal_table.table(frames, separate([i % 2 for i in range(40)]))
    edited = two["variant"] != "intact"
    assert two.loc[edited, ["delta_loss_low", "p_mean"]].isna().all(axis=None)
    assert (two["groups"] == 2).all()
    assert (two["prompts"] == 40).all()
    assert (two.loc[edited & (two["no_op"] == ""), "p_sign"] >= 0.5).all()
    (note, *_) = causal_table.notes_on(frames, separate([i % 2 for i in range(40)]))
    assert note.startswith("causal: 40 prompts predict something, in 2 groups; confidence intervals need 32 groups")
    pairs = [i // 2 for i in range(80)]
    table = causal_table.table(many(80), separate(pairs)).set_index(["sites", "variant"])
    row, sums = table.loc[("all", "no_scaling")], pd.concat(many(80)).set_index(["sites", "variant", "prompt"])["nll"]
    change = (sums["all", "no_scaling"] - sums["all", "intact"]).to_numpy().reshape(40, 2).sum(1)
    by_pair = statistics.infer_mean(change, np.full(40, 22.0))
    assert (row["delta_loss_low"], row["delta_loss_high"]) == pytest.approx((by_pair.low, by_pair.high), rel=1e-9)


def test_the_equivalence_bound_is_the_farther_end_of_the_90_percent_interval() -> None:
    generator = np.random.default_rng(0)
    change, weight = generator.normal(0.01, 0.05, 64), np.ones(64)
    interval = statistics.infer_mean(change, weight)
    error = change.std(ddof=1) / 8
    ends = change.mean() + error * np.array([-1.67, 1.67])  # t with 63 degrees of freedom, 5 % beyond each end
    assert interval.bound == pytest.approx(np.abs(ends).max(), rel=0.06)
    assert interval.low < change.mean() - interval.bound + 2 * change.mean() < interval.high


def test_a_row_without_an_interval_counts_among_the_tests() -> None:
    rows = [{"sites": s, "variant": "no_scaling", "no_op": "", "delta_loss": 0.1, "p_mean": p, "family": "primary"}
            for s, p in (("attention", 0.01), ("mlp", math.nan), ("all", 0.03))]  # fmt: skip
    rows.append(rows[0] | {"sites": "final", "no_op": "nothing", "delta_loss": 0.0, "p_mean": 1.0})
    assert causal_table.holm_by_family(pd.DataFrame(rows), "p_mean").tolist() == pytest.approx(
        [0.03, math.nan, 0.06, math.nan], nan_ok=True
    )
