"""What probes say of their tables, what their tables are made of, and what they tell of their cost beforehand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import (
    causal,
    decomposition,
    head_effects,
    selectability,
    sinks,
    statistics,
    unembedding,
    uniformity,
)
from ln_probe.analyses.probes.base import DESCRIBED, EFFECT, NO_EFFECT, Shape, largest, medians
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.columns import HEAD_EFFECTS
from ln_probe.analyses.probes.head_effects import CHOOSING, LEADING, HeadEffects
from ln_probe.analyses.probes.selectability import Selectability
from ln_probe.analyses.probes.sinks import Sinks
from ln_probe.analyses.probes.unembedding import Unembedding
from ln_probe.analyses.probes.uniformity import UniformityProbe
from ln_probe.hooks.sites import layers_in_words

SMALL = Shape(layers=3, heads=4, lengths=(10.0, 20.0), vocabulary=1000.0, width=64.0)


# Costs


def test_scores_and_rows_of_uniform_attention_are_counted() -> None:
    cost = UniformityProbe().cost(SMALL)
    assert cost.seconds == pytest.approx((10**2 + 20**2) * 3 * 4 * 4 * uniformity._SECONDS_PER_SCORE)
    assert cost.disk_bytes == 8 * 4 * (2 * 3 * 4 * 4)  # four float64 of every head, prompt and variant


def test_every_key_of_a_head_and_of_the_norm_is_counted() -> None:
    cost = Selectability().cost(SMALL)
    assert cost.disk_bytes == (10 + 20) * 3 * (4 + 1) * 4 * selectability._BYTES_PER_KEY
    unknown = replace(SMALL, width=math.nan)
    one, two = (Selectability().cost(replace(unknown, lengths=(n,))).seconds / n for n in (128.0, 512.0))
    assert one == pytest.approx(3 * 5 * 4 * selectability._OF_ANY_HEAD[128])
    assert two == pytest.approx(3 * 5 * 4 * selectability._OF_ANY_HEAD[512])
    assert selectability._per_key(0.0) == selectability._per_key(1.0)
    widths = (512.0, 256.0, 64.0)
    wider, wide, narrow = (Selectability().cost(replace(SMALL, width=w, lengths=(128.0,))).seconds for w in widths)
    assert wide == narrow == pytest.approx(128 * 3 * 5 * 4 * selectability._SECONDS_PER_KEY)
    assert wider / wide == pytest.approx(2**selectability._OF_D_HEAD)


def test_single_norms_are_run_on_some_prompts_only() -> None:
    groups = Causal().cost(replace(SMALL, layers=0)).passes
    few, some = Causal(), Causal()
    few.single_norm_prompts, some.single_norm_prompts = 5, 1
    assert few.cost(SMALL).passes - some.cost(SMALL).passes == pytest.approx(0.5 * 1.5 * (2 * 3 + 1))
    assert few.cost(SMALL).passes == pytest.approx(23.0 + 1.5 * 7)
    assert groups < few.cost(SMALL).passes
    assert few.cost(replace(SMALL, lengths=())).passes == few.cost(SMALL).passes


def test_every_head_of_a_small_model_is_run() -> None:
    assert HeadEffects().cost(SMALL).passes == 5 + 3 * (3 * 4) / 2
    unknown = replace(SMALL, width=math.nan)
    assert HeadEffects().cost(replace(unknown, heads=24)).passes == 5 + 3 * 72 / 2
    choosing = CHOOSING * 5 * 110 / 30
    assert HeadEffects().cost(replace(unknown, heads=25)).passes == 5 + choosing + 3 * LEADING / 2
    large = replace(SMALL, width=4096.0)
    assert HeadEffects().cost(large).passes == 5 + choosing + 3 * LEADING / 2
    assert HeadEffects().cost(replace(large, sampled=True)).passes == pytest.approx(
        5 + choosing + 4 * 16 * 128 / 30 + 3 * LEADING / 2
    )


def test_the_vocabulary_is_screened_against_itself() -> None:
    per_pair = 64.0 / unembedding._PRODUCTS + unembedding._PER_SCORE
    shown = unembedding._SECONDS * (64 / 768) ** unembedding._OF_WIDTH
    assert Unembedding().cost(SMALL).seconds == pytest.approx(shown + 1e6 * per_pair)
    assert Unembedding().cost(SMALL).memory_bytes == 28 * 64_000 + 54 * 64**2
    assert Unembedding().cost(replace(SMALL, vocabulary=math.nan)).seconds == unembedding._SECONDS
    assert Sinks().cost(SMALL).passes == 1.3


# Sentences


def heads(*rows: dict[str, Any]) -> pd.DataFrame:
    same = {"head": 0, "space": "head", "no_op": "", "by_theorem": "", "queries": "reachable"}
    return pd.DataFrame([same | row for row in rows])


def test_rows_and_medians() -> None:
    table = heads(
        *({"layer": i, "variant": v, "x": x + i} for i in range(3) for v, x in (("intact", 1.0), ("no_scaling", 5.0)))
    )
    assert medians(table, "x") == (2.0, 6.0)
    assert math.isnan(medians(table.assign(no_op="nothing"), "x")[1])
    assert all(map(math.isnan, medians(table.iloc[:0], "x")))
    assert largest(table, table["x"])["layer"] == 2


def test_where_hard_keys_change_most_is_named() -> None:
    values = {(0, "intact"): 0.10, (0, "no_scaling"): 0.12, (1, "intact"): 0.30, (1, "no_scaling"): 0.20}
    table = heads(
        *(
            {"layer": layer, "variant": v, "attainable_last_median": 2 * x, "attainable_last_p05": x}
            for (layer, v), x in values.items()
        )
    )
    (finding,) = selectability._attainable(table, math.nan)
    assert finding.text == (
        "With queries as large as those observed, the median key can receive up to 40 % of the last position's "
        "attention (32 % with scaling frozen), the 5th-percentile key 20 % (16 %). The change is largest in layer 1: "
        "30 % for its 5th-percentile key, 20 % with scaling frozen."
    )
    assert finding.size == pytest.approx(0.1)
    up_and_down = table.assign(attainable_last_p05=[0.5, 0.4, 0.1, 0.3])
    (finding,) = selectability._attainable(up_and_down, math.nan)
    assert "largest in layer 1: 10 % for its 5th-percentile key, 30 % with scaling frozen" in finding.text
    (finding,) = selectability._attainable(table[table["variant"] == "intact"], 0.25)
    assert finding.text == (
        "With queries as large as those observed, the median key can receive up to 40 % of the last position's "
        "attention, the 5th-percentile key 20 %. Uniform attention would give 25 %."
    )
    assert not selectability._attainable(table.assign(attainable_last_median=math.nan), 0.25)


def test_an_even_share_is_one_of_the_tokens_of_an_average_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    even: list[float] = []
    monkeypatch.setattr(selectability, "_attainable", lambda _heads, share: even.append(share) or [])
    monkeypatch.setattr(selectability, "_margins", lambda _heads: [])
    monkeypatch.setattr(selectability, "_selectable", lambda *_: [])
    for about in ({"prompts": 4, "keys_all": 64}, {"prompts": 4, "keys_all": 0}, {"prompts": math.nan}):
        table = pd.DataFrame([about, about])
        Selectability().findings({"heads": table}, {"prompts": {"count": 96, "tokens": 192}})
    assert even[0] == 0.0625
    assert all(map(math.isnan, even[1:]))


@pytest.mark.parametrize(("queries", "who"), [
    ("reachable", "the head can produce"),
    ("empirical", "of the size that occurs (nothing bounds this head's queries)"),
])  # fmt: skip
def test_margins_are_leads_or_none(queries: str, who: str) -> None:
    rows = (
        {"layer": 0, "variant": v, "margin_median": m, "margin_p05": p, "queries": queries}
        for v, m, p in (("intact", 2.0, 0.5), ("no_scaling", -1.5, -0.25))
    )
    (finding,) = selectability._margins(table := heads(*rows))
    assert finding.text == (
        f"For the median key, the best query {who} scores it 2 nats above all others; with scaling frozen, 1.5 nats "
        "below the best other key. For the 5th-percentile key: 0.5 nats (-0.25 with scaling frozen)."
    )
    (finding,) = selectability._margins(table.assign(margin_p05=-1.0))
    assert finding.text.endswith("with scaling frozen, 1.5 nats below the best other key.")
    assert selectability._lead(0.0) == "0 nats above all others"


def test_keys_that_cannot_be_selected_are_counted() -> None:
    counts = {"intact": (8000, 0.25), "no_scaling": (8000, 0.75), "both_removed": (8000, 0.0)}
    table = heads(
        *(
            {"layer": i, "variant": v, "keys": n, "unselectable_fraction": u, "unreachable_fraction": (1 + u) / 2}
            for i in range(2)
            for v, (n, u) in counts.items()
        )
    )
    (finding,) = selectability._selectable(table, "head", "unselectable")
    assert finding.text == (
        "25.0 % of keys cannot be selected by any query (75.0 % with scaling frozen, 0.0 % with both removed; 16,000 "
        "keys of every head, as the last token of each prompt sees them). 62.5 % of keys cannot be selected by "
        "any query the head can produce (87.5 % with scaling frozen, 50.0 % with both removed)."
    )
    assert (finding.size, finding.rank) == (0.5, DESCRIBED)
    unknown = table.assign(unreachable_fraction=math.nan)  # an earlier report
    (finding,) = selectability._selectable(unknown, "head", "unselectable")
    assert finding.text.endswith("keys of every head, as the last token of each prompt sees them).")
    sphere = unknown.assign(by_theorem=["sphere" if v == "intact" else "" for v in table["variant"]])
    (finding,) = selectability._selectable(sphere, "head", "unselectable")
    assert finding.text.endswith("prompt sees them). The intact figure follows from theory (sphere).")
    assert finding.size == 0.0
    (finding,) = selectability._selectable(unknown.assign(by_theorem="flat"), "head", "unselectable")
    assert finding.text.endswith("This follows from theory (flat), so it is not a finding.")
    assert finding.rank == NO_EFFECT
    outside = unknown.assign(space="normalized", no_op=["" if v == "intact" else "none" for v in table["variant"]])
    (finding,) = selectability._selectable(outside, "normalized", "geometry")
    assert finding.text == "25.0 % of keys cannot be selected by any query (16,000 keys at the norms' output)."
    assert not selectability._selectable(table, "normalized", "geometry")
    assert not selectability._selectable(table.assign(keys=math.nan), "head", "unselectable")


def test_attention_widens_or_narrows_on_these_prompts() -> None:
    """The mean over layers, not the layer in which it happens to change most."""
    values = {(0, "intact"): 0.5, (0, "no_scaling"): 0.52, (1, "intact"): 0.6, (1, "no_scaling"): 0.4}
    rows = ({"layer": i, "variant": v, "entropy_ratio": x} for (i, v), x in values.items())
    (finding,) = uniformity._entropy_finding(table := heads(*rows))
    assert finding.text == (
        "With scaling frozen for its keys (queries unchanged), attention is sharper: the median head's normalized "
        "entropy goes from 55 % to 46 % (mean over 2 layers; by layer -20 to +2 points)."
    )
    assert finding.size == pytest.approx(0.09)
    (finding,) = uniformity._entropy_finding(table[table["layer"] == 0])
    assert finding.text.endswith("attention is flatter: the median head's normalized entropy goes from 50 % to 52 %.")
    opposite = table.assign(entropy_ratio=[0.5, 0.6, 0.5, 0.4])
    small = table.assign(entropy_ratio=table["entropy_ratio"].where(table["layer"] != 1, 0.5))
    nearly = small.assign(
        entropy_ratio=small["entropy_ratio"] - 0.003 * ((small["layer"] == 1) & (small["variant"] == "no_scaling"))
    )
    assert "by layer +0 to +2 points" in uniformity._entropy_finding(nearly)[0].text, "no -0"
    assert "attention is as sharp on average" in uniformity._entropy_finding(opposite)[0].text
    assert not uniformity._entropy_finding(table.assign(entropy_ratio=0.5))
    assert not uniformity._entropy_finding(table.iloc[:0])


def test_the_most_uniform_head_is_named() -> None:
    table = heads(
        {"layer": 1, "head": 2, "variant": "intact", "entropy_ratio": 0.9, "uniform_angle_deg": 80.0},
        {"layer": 3, "head": 4, "variant": "intact", "entropy_ratio": 0.5, "uniform_angle_deg": 70.0},
        {"layer": 3, "head": 4, "variant": "both_removed", "entropy_ratio": 1.0, "uniform_angle_deg": 10.0},
    )
    assert uniformity._most_uniform(table, 84.6) == [
        "The most uniform head is L1H2: its attention has 90 % of the entropy of uniform attention; the queries "
        "closest to the uniform direction are those of L3H4, at 70° (a random direction: 85°)."
    ]
    assert uniformity._most_uniform(table.assign(uniform_angle_deg=math.nan), 84.6) == [
        "The most uniform head is L1H2: its attention has 90 % of the entropy of uniform attention."
    ]
    assert not uniformity._most_uniform(table.assign(entropy_ratio=math.nan), 84.6)


def head_row(head: int, change: float, low: float, p: float = 1.0, **more: Any) -> dict[str, Any]:
    row = {"layer": 1, "head": head, "variant": "no_scaling", "no_op": "", "delta_loss": change, "p_adjusted": p}
    return row | {"delta_loss_low": low, "delta_loss_high": 0.3, "loss": 2.0, "prompts_worse": 7, "prompts": 9} | more


def test_the_head_that_needs_scaling_most_is_named() -> None:
    better = head_row(3, 0.4, 0.1, p=0.01, prompts_worse=1)  # most prompts speak against it
    rows = [head_row(0, 0.2, 0.1, p=0.01), head_row(1, 0.25, 0.1), head_row(2, 0.0005, 0.0001, p=0.01), better]
    table = pd.DataFrame(rows)
    (finding,) = head_effects._leading(table)
    assert finding.text == (
        "With scaling frozen for one head at a time, L1H0 raises the loss most: by 0.2 nats/token from 2 (95 % CI +0.1 "
        "to +0.3). Of 4 heads, 1 has an effect of at least 0.001 that is significant (Holm-adjusted sign test)."
    )
    assert (finding.size, finding.rank) == (pytest.approx(0.1), EFFECT)
    (finding,) = head_effects._leading(pd.DataFrame([head_row(0, 0.2, math.nan, p=0.01)]))
    assert "(it rises on 7 of 9 prompts)" in finding.text
    (finding,) = head_effects._leading(pd.DataFrame([head_row(0, 0.1, -0.1), head_row(3, 0.2, -0.1)]))
    assert finding.text == (
        "With scaling frozen for one head at a time, no head significantly raises the loss (Holm-adjusted "
        "sign test over 2 heads, 9 prompts); the largest change is that of L1H3, +0.2 nats/token from 2."
    )
    assert finding.rank == NO_EFFECT
    assert not head_effects._leading(None)
    assert not head_effects._leading(HEAD_EFFECTS.empty())
    assert not head_effects._leading(pd.DataFrame([head_row(0, 0.2, 0.1, no_op="nothing")]))


def test_how_well_estimates_order_heads() -> None:
    table = pd.DataFrame([head_row(i, 0.1 * i, 0.0, estimate=-1.0 * i) for i in range(3)])
    assert head_effects.agreement(table) == [
        "first-order estimates and exact effects of no_scaling over 3 heads: rank correlation -1.00"
    ]
    one_not_run = pd.concat([table, pd.DataFrame([head_row(3, math.nan, math.nan, estimate=9.0)])])
    assert head_effects.agreement(one_not_run) == head_effects.agreement(table)
    assert not head_effects.agreement(table.iloc[:2])
    assert not head_effects.agreement(table.assign(estimate=1.0))
    assert not head_effects.agreement(table.assign(no_op="nothing"))


@pytest.mark.parametrize(
    ("kind", "scale", "most"), [("normal", 1, 0.05), ("outliers", 3, 0.05), ("lognormal", 4, 0.11)]
)
def test_a_change_that_counts_as_an_effect_is_seldom_called_equivalent_to_zero(
    kind: str, scale: float, most: float
) -> None:
    """The true mean change is LEAST_CHANGE: the bound of 40 prompts is below it in 5 of 100 draws at most, where a few
    prompts change far more than the others (lognormal) in 11 (and two standard errors of 300 draws). Of a true change
    of 0 it is below in most draws."""
    weight, draws = np.full(40, 10.0), 300

    def share(truth: float) -> float:
        generator, called = np.random.default_rng(0), []
        for _ in range(draws):
            values, mean = statistics.effects(kind, 40, generator)
            change = truth + 0.01 * (values - mean) / scale
            row = causal.over_groups(weight * change, weight, np.arange(40), 0)
            text = causal.change(row | {"delta_loss": change.mean()})
            called.append(text.startswith("does not change the loss by more than 0.01 nats/token"))
        return float(np.mean(called))

    assert share(causal.LEAST_CHANGE) <= most + 2 * math.sqrt(most * (1 - most) / draws)
    assert share(0.0) > 0.9


def test_layers_are_listed_or_counted() -> None:
    assert layers_in_words([3]) == "layer 3"
    assert layers_in_words([0, 1]) == "layers 0, 1"
    assert layers_in_words(range(6)) == "layers 0, 1, 2, 3, 4, 5"
    assert layers_in_words(range(12)) == "layers 0 … 11 (12 of them)"


# Tables of sinks


def sink(position: int, **more: Any) -> dict[str, Any]:
    row = {"prompt": 0, "position": position, "token": "a", "sink": True, "outlier": False, "sink_layer": 2.0}
    row |= {"sink_rate": 0.5, "received": 0.4, "uniform": 0.1, "length_ratio": 1.25, "dimensions": "3, 1"}
    row |= {"emerges_at": "blocks.1", "writer": "mlp0", "writer_share": 0.75}
    return row | {"received_no_scaling": math.nan, "received_there": math.nan} | more


def test_sinks_are_described() -> None:
    dimensions = pd.DataFrame({"dimension": [4, 7, 7], "ratio": [20.0, 50.0, 30.0], "site": ["a", "b", "c"]})
    none = sinks._sentences(pd.DataFrame(), dimensions, 64, seen=True)
    assert none == [
        "Attention has no sink here, and no token is an outlier at any norm.",
        f"2 dimensions are over {sinks.OUTLIER_RATIO:g} times the median dimension for the median token at some norm; "
        "most, dimension 7, 50 times at b.",
    ]
    short = (
        "Whether attention has a sink cannot be decided where no token is seen by 10 others, and no token is an "
        "outlier at any norm."
    )
    assert sinks._sentences(pd.DataFrame(), dimensions, 64, seen=False)[0] == short
    assert sinks._sentences(pd.DataFrame(), dimensions, 7, seen=False)[0].endswith(
        "were not looked for: the prompts are too short."
    )
    table = pd.DataFrame([
        sink(0), sink(0, prompt=1, received=0.2),
        sink(3, token=".", sink=False, outlier=True, length_ratio=12.0, received_no_scaling=0.1, received_there=0.3),
    ])  # fmt: skip
    assert sinks._sentences(table, dimensions.iloc[:0], 64, seen=True) == [
        "Position 0: in 2 prompts an attention sink (in layer 2 50 % of heads and queries give it over 0.3; over all "
        "layers it gets 30 %, uniform attention would give 10 %); not an outlier: at most 1.2 times longer than the "
        "median token.",
        "Tokens behind position 0 ('.'): in 1 prompt up to 12 times longer than the median token (from blocks.1 on, "
        "written by mlp0, 75 % of its squared length; largest dimensions 3, 1); with its own key unscaled it would get "
        "10 % instead of 30 % in those layers.",
    ]
    many = pd.DataFrame([sink(i, token=t) for i, t in enumerate("xabcd")])
    assert (
        "Tokens behind position 0 ('a', 'b', 'c', …)" in sinks._sentences(many, dimensions.iloc[:0], 64, seen=True)[1]
    )


def test_sums_over_prompts_become_rates_of_heads() -> None:
    one = {"prompt": 0, "layer": 1, "head": 2, "queries": 10, "much": 4, "attention": 3.0, "uniform": 1.0, "later": 5}
    one |= {"first_much": 1, "first_attention": 0.5, "first_uniform": 0.25, "seen_by": 5}
    (row,) = sinks._by_head(pd.DataFrame([one, one | {"prompt": 1, "much": 5, "later": 0, "seen_by": 7}])).to_dict(
        "records"
    )
    assert row == {
        "layer": 1, "head": 2, "queries": 20, "sink_rate": 9 / 20, "attention": 6 / 20, "uniform": 2 / 20,
        "first_rate": 2 / 5, "first_attention": 1 / 5, "first_uniform": 0.5 / 5, "seen_by": 7,
    }  # fmt: skip
    (row,) = sinks._by_head(pd.DataFrame([one | {"queries": 0, "later": 0}])).to_dict("records")
    assert math.isnan(row["sink_rate"])
    assert math.isnan(row["first_rate"])


def test_sizes_are_means_over_positions_that_double() -> None:
    same = {"prompt": 0, "layer": 0, "tokens": 4, "outliers": 1, "sigma": 2.0, "before": 8.0, "after": 4.0}
    rows = [same | {"site": s, "first": f} for s in ("late", "early") for f in (4, 0, 1, 2)]
    made = sinks._by_position(pd.DataFrame(rows))
    assert made["site"].tolist() == ["late"] * 4 + ["early"] * 4
    assert made["first"].tolist() == [0, 1, 2, 4] * 2
    assert made["last"].tolist() == [0, 1, 3, 7] * 2
    assert (made["sigma_mean"].iloc[0], made["length_before_mean"].iloc[0], made["length_after_mean"].iloc[0]) == (
        0.5,
        2.0,
        1.0,
    )
    assert made["outliers"].tolist() == [1] * 8


# Norms and losses


def norm(site: str, **more: Any) -> dict[str, Any]:
    row = {"site": site, "layer": 0, "kind": "layernorm", "state": "", "mean_share": 0.5, "mean_share_tail": 0.25}
    row |= {"angle_to_ones_deg_tail": 60.0, "sigma_mean": 4.0, "sigma_mean_tail": 2.0, "norm_before_mean": 1.0}
    return row | {"norm_before_cv_tail": 0.125} | more


def test_what_projection_and_scaling_remove_is_said_where_it_is_most() -> None:
    norms = pd.DataFrame([
        norm("a"),
        norm("b", mean_share_tail=math.nan, mean_share=0.75, sigma_mean=9.0, sigma_mean_tail=3.0),
        norm("c", mean_share=0.9, mean_share_tail=0.125, norm_before_cv_tail=0.5, angle_to_ones_deg_tail=80.0),
    ])  # fmt: skip
    assert decomposition._projection(norms) == [
        "Projection removes 25 % of a vector's squared length at the median norm and at most 75 % (b); residual "
        "vectors are at 60.0° to the all-ones direction (at 90° projection would do nothing)."
    ]
    assert "at most 25 % (a)" in decomposition._projection(norms.iloc[[0, 2]])[0]
    (centred,) = decomposition._projection(norms.assign(state="centred"))
    assert centred.startswith("Projection removes nothing")
    assert not decomposition._projection(norms.assign(kind="rmsnorm"))
    assert decomposition._scaling(norms) == [
        "Scaling does most at c, where the norms of the input vectors vary by 50 % of their mean; position 0 alone "
        "multiplies the mean divisor by 3.0 at b, so it has its own constant."
    ]
    (even,) = decomposition._scaling(norms.assign(sigma_mean=norms["sigma_mean_tail"] * 1.5))
    assert even.endswith("vary by 50 % of their mean.")
    free = norms.assign(kind=["projection_only", "none", "none"])
    assert decomposition._scaling(free)[0].startswith(
        "A norm-free model: none of its 3 norms scales (1 subtract the mean and divide by a constant; 2 only divide by "
        "a constant)"
    )


def test_sums_of_prompts_become_rates_per_token() -> None:
    def sums(variant: str, **more: float) -> dict[str, Any]:
        row: dict[str, Any] = {"prompt": 3, "sites": "all", "variant": variant, "predicted": 8, "positions": 4}
        row |= {"queries": 2, "nll": 16.0, "nll_uniform": 18.0, "nll_optimal": 20.0, "kl": 0.0, "agree": 4.0}
        return row | {"entropy": 3.0} | more

    nothing = np.zeros((4, 0, 2))
    constants = Constants((), np.array([0, 1, 0, 2]), nothing, nothing)
    (row,) = causal.by_prompt([
        pd.DataFrame([sums("intact"), sums("both_removed", nll=24.0, kl=6.0, agree=3.0, entropy=4.0)])
    ], constants).to_dict("records")  # fmt: skip
    assert row == {
        "prompt": 3, "group": 2, "sites": "all", "variant": "both_removed", "predicted": 8, "loss": 2.0,
        "delta_loss": 1.0, "shift": 0.0, "delta_loss_uniform": 0.25, "delta_loss_optimal": 0.5,
        "kl": 1.5, "top1_agreement": 0.75, "entropy_change": 0.5,
    }  # fmt: skip
    one = causal.by_prompt([pd.DataFrame([sums("intact"), sums("no_projection", predicted=0)])], constants)
    assert one[["loss", "delta_loss_uniform", "delta_loss_optimal"]].isna().all(axis=None)
