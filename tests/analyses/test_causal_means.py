"""How far changes of the loss hold beyond their prompts: intervals, p of means adjusted for what is shown together."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from small_models import lab

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import causal as causal_table
from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.columns import CAUSAL
from ln_probe.analyses.probes.edited_runs import EditedRuns
from ln_probe.hooks.interventions import GROUPS
from ln_probe.hooks.scales import mean_sigmas
from ln_probe.hooks.sites import find_sites


def many(prompts: int) -> list[pd.DataFrame]:
    """One prompt's numbers, as if of many: every edit changes the loss by as much as it does, and noise."""
    model = lab()
    sites, generator, tokens = find_sites(model), np.random.default_rng(0), torch.arange(1, 13)
    one = EditedRuns(model, sites, mean_sigmas(model, sites, [tokens])).measure(0, tokens)
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
    assert (two.loc[edited & (two["no_op"] == ""), "p_adjusted"] >= 0.5).all()
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


def test_tables_of_earlier_versions_get_the_statistics_of_this_one() -> None:
    """Committed tables and reports of earlier versions have no families; their prompts' values give them."""
    table, kept = causal_table.table(frames := many(40), EACH), causal_table.by_prompt(frames, EACH)
    columns = ["p_mean", "delta_loss_median", "family", "equivalence_bound", "groups"]
    again = causal_table.with_today_statistics(table.drop(columns=columns), kept)
    pd.testing.assert_frame_equal(again, table, rtol=1e-9, atol=1e-9)
    assert list(causal_table.with_today_statistics(table.assign(extra=1), kept).columns) == [*CAUSAL.names, "extra"]
    few = causal_table.with_today_statistics(table, kept[kept["prompt"] < 20])
    edited = few["variant"] != "intact"
    assert few.loc[edited, ["p_mean", "delta_loss_low"]].isna().all(axis=None)
    assert few["delta_loss_median"].notna().all()


def test_a_row_without_an_interval_counts_among_the_tests() -> None:
    rows = [{"sites": s, "variant": "no_scaling", "no_op": "", "delta_loss": 0.1, "p_mean": p, "family": "primary"}
            for s, p in (("attention", 0.01), ("mlp", math.nan), ("all", 0.03))]  # fmt: skip
    rows.append(rows[0] | {"sites": "final", "no_op": "nothing", "delta_loss": 0.0, "p_mean": 1.0})
    assert causal_table.holm_by_family(pd.DataFrame(rows), "p_mean").tolist() == pytest.approx(
        [0.03, math.nan, 0.06, math.nan], nan_ok=True
    )


def test_an_exploratory_row_changes_no_primary_p() -> None:
    cases = [(s, v) for s in ("attention", "all") for v in ("no_scaling", "no_projection")]
    some = {"no_op": "", "delta_loss": 0.1, "p_mean": 0.01}
    rows = [some | {"sites": s, "variant": v, "family": causal_table.family(s, v)} for s, v in cases]
    before = causal_table.holm_by_family(pd.DataFrame(rows), "p_mean")
    more = [r | {"sites": "mlp", "family": causal_table.family("mlp", str(r["variant"]))} for r in rows] * 5
    after = causal_table.holm_by_family(pd.DataFrame([*rows, *more]), "p_mean")
    assert before.tolist() == after[:4].tolist() == pytest.approx([0.04] * 4)
