"""How far changes of the loss hold beyond their prompts: intervals, p of means adjusted for what is shown together."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

from ln_probe.analyses import prompt_intervals
from ln_probe.analyses.edited_runs import EditedRuns
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.probes import causal as causal_table
from ln_probe.analyses.tables import CAUSAL
from ln_probe.hooks.frozen_scale import mean_sigmas
from ln_probe.hooks.interventions import GROUPS
from ln_probe.hooks.sites import find_sites


def many(prompts: int) -> list[pd.DataFrame]:
    """One prompt's numbers, as if of many: every edit changes the loss by as much as it does, and noise."""
    torch.manual_seed(0)
    model = LabTransformer(LabConfig(n_layers=2, d_model=32, n_heads=4, d_vocab=50, n_ctx=32))
    sites, generator, tokens = find_sites(model), np.random.default_rng(0), torch.arange(1, 13)
    one = EditedRuns(model, sites, mean_sigmas(model, sites, [tokens])).measure(0, tokens)
    edited = one["variant"] != "intact"
    return [
        one.assign(prompt=i, nll=one["nll"] + generator.normal(0.1, 0.4, len(one)) * edited) for i in range(prompts)
    ]


def test_means_have_a_p_adjusted_for_all_groups_and_variants() -> None:
    table = causal_table.table(frames := many(40))
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
        found = prompt_intervals.judged(change, mine["predicted"].to_numpy(float))
        assert (found.low, found.high) == (row.delta_loss_low, row.delta_loss_high)
        assert np.median(change / mine["predicted"]) == pytest.approx(row.delta_loss_median)
        alone.append(found.p)
    np.testing.assert_array_equal(groups["p_mean"], prompt_intervals.holm(alone))
    assert len(set(groups["variant"])) == 3
    assert table.loc[table["variant"] == "intact", "p_mean"].isna().all()
    single = tested[~tested["sites"].isin(GROUPS) & (tested["variant"] == "no_scaling")]
    assert (single["p_mean"] >= single.index.size * 2.5 / (prompt_intervals.RESAMPLES + 1)).all()
    pd.testing.assert_frame_equal(causal_table.table(frames[::-1]), table)


def test_effects_are_judged_again_from_what_every_prompt_gave() -> None:
    """Committed tables and reports of earlier versions have no p of means; their prompts' values do."""
    table, kept = causal_table.table(frames := many(40)), causal_table.by_prompt(frames)
    again = causal_table.judged_again(table.drop(columns=["p_mean", "delta_loss_median"]), kept)
    pd.testing.assert_frame_equal(again, table, rtol=1e-9, atol=1e-9)
    assert list(causal_table.judged_again(table.assign(extra=1), kept).columns) == [*CAUSAL.names, "extra"]
    few = causal_table.judged_again(table, kept[kept["prompt"] < 20])
    edited = few["variant"] != "intact"
    assert few.loc[edited, ["p_mean", "delta_loss_low"]].isna().all(axis=None)
    assert few["delta_loss_median"].notna().all()


def test_a_row_without_an_interval_counts_among_the_tests() -> None:
    rows = [{"sites": s, "variant": "no_scaling", "no_op": "", "delta_loss": 0.1, "p_mean": p}
            for s, p in (("attention", 0.01), ("mlp", math.nan), ("all", 0.03))]  # fmt: skip
    rows.append({"sites": "final", "variant": "no_scaling", "no_op": "nothing", "delta_loss": 0.0, "p_mean": 1.0})
    assert causal_table.adjusted_means(pd.DataFrame(rows)).tolist() == pytest.approx(
        [0.03, math.nan, 0.06, math.nan], nan_ok=True
    )
