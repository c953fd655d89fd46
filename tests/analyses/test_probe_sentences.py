"""What probes say of their tables, what their tables are made of, and what they tell of their cost beforehand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import causal, columns, sinks
from ln_probe.analyses.probes.base import DESCRIBED, EFFECT, NO_EFFECT, Shape
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.decomposition import Decomposition
from ln_probe.analyses.probes.head_effects import HeadEffects
from ln_probe.analyses.probes.leading import agreement
from ln_probe.analyses.probes.registry import chosen
from ln_probe.analyses.probes.sinks import Sinks
from ln_probe.hooks.sites import layers_in_words

SMALL = Shape(layers=3, heads=4, lengths=(10.0, 20.0), vocabulary=1000.0, width=64.0)


@pytest.mark.parametrize(("probe", "change", "passes", "seconds", "disk", "memory"), [
    ("selectability", {}, 0, 0.396, 140_400, 0),
    ("selectability", {"width": math.nan}, 0, 0.0049396595, 140_400, 0),
    ("selectability", {"width": 512.0, "lengths": (512.0,)}, 0, 34.455962, 2_396_160, 0),
    ("uniformity", {}, 0, 8.4e-4, 3072, 0),  # four float64 of every head, prompt and variant
    ("causal", {}, 36.5, 0, 0, 0),
    ("causal", {"layers": 0, "lengths": ()}, 27.5, 0, 0, 0),
    ("causal", {"layers": 20, "width": 4096.0}, 23 + 2 * 3 + 12 * 3 / 2, 0, 0, 0),
    ("causal", {"layers": 20, "width": math.nan}, 23 + 2 * 3 + 12 * 3 / 2, 0, 0, 0),
    ("causal", {"layers": 12, "width": math.nan}, 23 + 3 + 25 * 3 / 2, 0, 0, 0),
    ("head_effects", {}, 5 + 3 * 12 / 2, 0, 0, 0),
    ("head_effects", {"width": math.nan, "heads": 24}, 5 + 3 * 72 / 2, 0, 0, 0),
    ("head_effects", {"width": 4096.0}, 53.6666667, 0, 0, 0),
    ("head_effects", {"width": 4096.0, "sampled": True}, 326.733333, 0, 0, 0),
    ("unembedding", {}, 0, 0.032373267, 0, 28 * 64_000 + 54 * 64**2),
    ("unembedding", {"vocabulary": math.nan}, 0, 7, 0, 0),
    ("sinks", {}, 1.3, 0, 0, 0),
])  # fmt: skip
def test_what_probes_tell_of_their_cost(
    probe: str, change: dict[str, Any], passes: float, seconds: float, disk: float, memory: float
) -> None:
    (made,) = chosen((probe,))
    cost = made.cost(replace(SMALL, **change))
    found = (cost.passes, cost.seconds, cost.disk_bytes, cost.memory_bytes)
    assert found == pytest.approx((passes, seconds, disk, memory), rel=1e-6)


def test_single_norms_are_run_on_some_prompts_only() -> None:
    few, some = Causal(), Causal()
    few.single_norm_prompts, some.single_norm_prompts = 5, 1
    assert few.cost(SMALL).passes - some.cost(SMALL).passes == pytest.approx(0.5 * (3 + 1.5 * (2 * 3 + 1)))
    large = replace(SMALL, layers=20, width=4096.0)
    assert Causal(every_norm=True).cost(large).passes == pytest.approx(23 + 3 + 1.5 * 41)


# Sentences


def heads(names: str, *values: tuple[Any, ...], **same: Any) -> pd.DataFrame:
    """A `heads` table of which only these columns are known."""
    frame = pd.DataFrame(list(values), columns=names.split()).reindex(columns=columns.HEADS.names)
    of_all = {"head": 0, "space": "head", "no_op": "", "by_theorem": "", "queries": "reachable"}
    return frame.assign(**{name: value for name, value in of_all.items() if name not in names.split()} | same)


HARD = heads("layer variant attainable_median attainable_p05", (0, "intact", 0.2, 0.10),
             (0, "no_scaling", 0.24, 0.12), (1, "intact", 0.6, 0.30), (1, "no_scaling", 0.4, 0.20))  # fmt: skip
LEADS = heads("layer variant margin_median margin_p05", (0, "intact", 2.0, 0.5), (0, "no_scaling", -1.5, -0.25))
COUNTED = heads(
    "layer variant keys unselectable_fraction unreachable_fraction",
    *((i, v, 8000, u, (1 + u) / 2) for i in range(2)
      for v, u in (("intact", 0.25), ("no_scaling", 0.75), ("both_removed", 0.0))),
)  # fmt: skip
UNKNOWN = COUNTED.assign(unreachable_fraction=math.nan)  # of an earlier report
WIDTHS = heads("layer variant entropy_ratio", (0, "intact", 0.5), (0, "no_scaling", 0.52), (1, "intact", 0.6),
               (1, "no_scaling", 0.4))  # fmt: skip
UNIFORM = heads("layer head variant entropy_ratio uniform_angle_deg", (1, 2, "intact", 0.9, 80.0),
                (3, 4, "intact", 0.5, 70.0), (3, 4, "both_removed", 0.9, 10.0))  # fmt: skip


@pytest.mark.parametrize(("probe", "table", "text", "size"), [
    ("selectability", HARD,
     "With queries as large as those observed, the median key can receive up to 40 % of the last position's attention "
     "(32 % with scaling frozen), the 5th-percentile key 20 % (16 %). The change is largest in layer 1: 30 % for its "
     "5th-percentile key, 20 % with scaling frozen.", 0.1),
    ("selectability", HARD.assign(attainable_p05=[0.5, 0.4, 0.1, 0.3]),
     "largest in layer 1: 10 % for its 5th-percentile key, 30 % with scaling frozen.", 0.2),
    ("selectability", HARD[HARD["variant"] == "intact"].assign(prompts=4, keys_all=16),
     "With queries as large as those observed, the median key can receive up to 40 % of the last position's "
     "attention, the 5th-percentile key 20 %. Uniform attention would give 25 %.", 0.0),
    ("selectability", HARD.assign(attainable_median=math.nan), None, 0),
    ("selectability", LEADS,
     "For the median key, the best query the head can produce scores it 2 nats above all others; with scaling frozen, "
     "1.5 nats below the best other key. For the 5th-percentile key: 0.5 nats (-0.25 with scaling frozen).", None),
    ("selectability", LEADS.assign(queries="empirical", margin_p05=-1.0),
     "For the median key, the best query of the size that occurs (nothing bounds this head's queries) scores it 2 nats "
     "above all others; with scaling frozen, 1.5 nats below the best other key.", None),
    ("selectability", COUNTED,
     "25.0 % of keys cannot be selected by any query (75.0 % with scaling frozen, 0.0 % with both removed; 16,000 keys "
     "of every head, as the last token of each prompt sees them). 62.5 % of keys cannot be selected by any query the "
     "head can produce (87.5 % with scaling frozen, 50.0 % with both removed).", 0.5),
    ("selectability", UNKNOWN, "keys of every head, as the last token of each prompt sees them).", 0.5),
    ("selectability", UNKNOWN.assign(by_theorem=["sphere" if v == "intact" else "" for v in UNKNOWN["variant"]]),
     "prompt sees them). The intact figure follows from theory (sphere).", 0.0),
    ("selectability", UNKNOWN.assign(no_op=["" if v == "intact" else "no norm" for v in UNKNOWN["variant"]]),
     "25.0 % of keys cannot be selected by any query (16,000 keys of every head, as the last token of each prompt sees "
     "them).", None),  # nothing to take away, and no figure for it
    ("selectability", UNKNOWN.assign(by_theorem="flat"),
     "This follows from theory (flat), so it is not a finding.", None),
    ("selectability", UNKNOWN[UNKNOWN["variant"] == "intact"].assign(space="normalized"),
     "25.0 % of keys cannot be selected by any query (16,000 keys at the norms' output).", None),
    ("selectability", COUNTED.assign(keys=math.nan), None, 0),
    ("uniformity", WIDTHS,  # the mean over layers, not the layer in which it happens to change most
     "With scaling frozen for its keys (queries unchanged), attention is sharper: the median head's normalized entropy "
     "goes from 55 % to 46 % (mean over 2 layers; by layer -20 to +2 points).", 0.09),
    ("uniformity", WIDTHS[WIDTHS["layer"] == 0],
     "attention is flatter: the median head's normalized entropy goes from 50 % to 52 %.", 0.02),
    ("uniformity", WIDTHS.assign(entropy_ratio=[0.5, 0.52, 0.5, 0.497]), "by layer +0 to +2 points).", None),  # no -0
    ("uniformity", WIDTHS.assign(entropy_ratio=[0.5, 0.6, 0.5, 0.4]), "as sharp on average", None),
    ("uniformity", UNIFORM,
     "The most uniform head is L1H2: its attention has 90 % of the entropy of uniform attention; the queries closest "
     "to the uniform direction are those of L3H4, at 70° (a random direction: 85°).", None),
    ("uniformity", UNIFORM.assign(uniform_angle_deg=math.nan),
     "The most uniform head is L1H2: its attention has 90 % of the entropy of uniform attention.", None),
    ("uniformity", UNIFORM.assign(entropy_ratio=math.nan), None, 0),
])  # fmt: skip
def test_what_is_said_of_heads(probe: str, table: pd.DataFrame, text: str | None, size: float | None) -> None:
    (made,) = chosen((probe,))
    found = made.findings({"heads": table}, {"random_angle_deg": 84.6})
    if text is None:
        assert not found
        return
    told = [finding for finding in found if text in finding.text]
    assert len(told) == 1, [finding.text for finding in found]
    assert size is None or told[0].size == pytest.approx(size)
    assert told[0].rank == (NO_EFFECT if "so it is not a finding" in text else DESCRIBED)


def test_attention_that_stays_as_it_was_is_not_told() -> None:
    (made,) = chosen(("uniformity",))
    (finding,) = made.findings({"heads": WIDTHS.assign(entropy_ratio=0.5)}, {})
    assert finding.text.startswith("The most uniform head is L0H0")


def head_row(head: int, change: float, low: float, p: float = 1.0, **more: Any) -> dict[str, Any]:
    row = {"layer": 1, "head": head, "variant": "no_scaling", "no_op": "", "delta_loss": change, "p_sign": p}
    return row | {"delta_loss_low": low, "delta_loss_high": 0.3, "loss": 2.0, "prompts_worse": 7, "prompts": 9} | more


@pytest.mark.parametrize(("rows", "text", "rank"), [
    ([head_row(0, 0.2, 0.1, p=0.01), head_row(1, 0.25, 0.1), head_row(2, 0.0005, 0.0001, p=0.01),
      head_row(3, 0.4, 0.1, p=0.01, prompts_worse=1)],  # most prompts speak against it
     "With scaling frozen for one head at a time, L1H0 raises the loss most of those with a significant effect (the "
     "largest mean change is that of L1H3, +0.4, not a significant rise): by 0.20 nats/token from 2 (95 % CI +0.10 "
     "to +0.30). Of 4 heads, 1 has an effect of at least 0.001 that is significant (Holm-adjusted sign test).", EFFECT),
    ([head_row(0, 0.1, -0.1), head_row(3, 0.2, -0.1)],
     "With scaling frozen for one head at a time, no head significantly raises the loss (Holm-adjusted sign test over "
     "2 heads, 9 prompts); the largest change is that of L1H3, +0.2 nats/token from 2.", NO_EFFECT),
    ([head_row(0, 0.2, 0.1, no_op="nothing")], None, 0),
])  # fmt: skip
def test_the_head_that_needs_scaling_most_is_named(rows: list[dict[str, Any]], text: str | None, rank: int) -> None:
    found = HeadEffects().findings({"head_effects": pd.DataFrame(rows)}, {})
    assert [(f.text, f.rank) for f in found] == ([] if text is None else [(text, rank)])


def test_how_well_estimates_order_heads() -> None:
    table = pd.DataFrame([head_row(i, 0.1 * i, 0.0, estimate=-1.0 * i) for i in range(3)])
    not_run = pd.DataFrame([head_row(3, math.nan, math.nan, estimate=9.0)])
    one_not_run = pd.concat([table, not_run])
    assert agreement(one_not_run, "heads") == ["no_scaling over 3 heads: rank correlation -1.00"]
    assert not agreement(table, "heads"), "where all were run, nobody needs estimates"
    assert not agreement(one_not_run.iloc[1:], "heads")
    assert not agreement(one_not_run.assign(estimate=1.0), "heads")
    assert not agreement(one_not_run.assign(no_op="nothing"), "heads")


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

    def said(table: pd.DataFrame, dimensions: pd.DataFrame, longest: int = 64, seen_by: int = 64) -> list[str]:
        tables = {"sinks": table, "outlier_dimensions": dimensions, "token_sizes": pd.DataFrame({"site": ["a"]})}
        heads = pd.DataFrame({"seen_by": [seen_by]})
        found = Sinks().findings(tables | {"sink_heads": heads}, {"prompts": {"longest": longest}})
        return [finding.text for finding in found]

    assert said(pd.DataFrame(), dimensions) == [
        "Attention has no sink here, and no token is an outlier at any norm.",
        f"2 dimensions are over {sinks.OUTLIER_RATIO:g} times the median dimension for the median token at some norm; "
        "most, dimension 7, 50 times at b.",
    ]
    assert said(pd.DataFrame(), dimensions, seen_by=9)[0] == (
        "Whether attention has a sink cannot be decided where no token is seen by 10 others, and no token is an "
        "outlier at any norm."
    )
    assert said(pd.DataFrame(), dimensions, 7, 6)[0].endswith("were not looked for: the prompts are too short.")
    table = pd.DataFrame([
        sink(0), sink(0, prompt=1, received=0.2),
        sink(3, token=".", sink=False, outlier=True, length_ratio=12.0, received_no_scaling=0.1, received_there=0.3),
    ])  # fmt: skip
    assert said(table, dimensions.iloc[:0]) == [
        "Position 0: in 2 prompts an attention sink (in layer 2 50 % of heads and queries give it over 0.3; over all "
        "layers it gets 30 %, uniform attention would give 10 %); not an outlier: at most 1.2 times longer than the "
        "median token.",
        "Tokens behind position 0 ('.'): in 1 prompt up to 12 times longer than the median token (from blocks.1 on, "
        "written by mlp0, 75 % of its squared length; largest dimensions 3, 1); with its own key unscaled it would get "
        "10 % instead of 30 % in those layers.",
    ]
    many = pd.DataFrame([sink(i, token=t) for i, t in enumerate("xabcd")])
    assert "Tokens behind position 0 ('a', 'b', 'c', …)" in said(many, dimensions.iloc[:0])[1]


def test_sinks_are_those_of_the_layers_and_heads_asked_for() -> None:
    table = pd.DataFrame([sink(0, sink_rate=0.35, received=0.28, uniform=0.05)])

    def said(sinks: pd.DataFrame, **arguments: list[int]) -> list[str]:
        tables = {"sinks": sinks, "token_sizes": table, "outlier_dimensions": pd.DataFrame()}
        return [f.text for f in Sinks().findings(tables, {"arguments": arguments})]

    assert said(table, layers=[1, 2], heads=[0, 1])[0].startswith(
        "Position 0: in 1 prompt an attention sink (in layer 2 35 % of heads and queries (heads 0, 1 alone) give it "
        "over 0.3; over layers 1, 2 it gets 28 %, uniform attention would give 5 %)"
    )
    assert "over all layers it gets 28 %" in said(table)[0]
    none = "Attention has no sink here in layer 2, and no token is an outlier at any norm."
    assert said(table.head(0), layers=[2]) == [none]


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

    def said(norms: pd.DataFrame) -> list[str]:
        return [finding.text for finding in Decomposition().findings({"layernorms": norms}, {})]

    assert said(norms) == [
        "Projection removes 25 % of a vector's squared length at the median norm and at most 75 % (b); residual "
        "vectors are at 60.0° to the all-ones direction (at 90° projection would do nothing).",
        "Scaling does most at c, where the norms of the input vectors vary by 50 % of their mean; position 0 alone "
        "multiplies the mean divisor by 3.0 at b, so it has its own constant.",
    ]
    assert "at most 25 % (a)" in said(norms.iloc[[0, 2]])[0]
    assert said(norms.assign(state="centred"))[0].startswith("Projection removes nothing")
    (rms,) = said(norms.assign(kind="rmsnorm", sigma_mean=norms["sigma_mean_tail"] * 1.5))
    assert rms.endswith("vary by 50 % of their mean.")
    assert said(norms.assign(kind=["projection_only", "none", "none"]))[1].startswith(
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
