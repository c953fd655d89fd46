"""Findings of the probes: their number, rank, size and the numbers in them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from ln_probe.analyses.probes import columns
from ln_probe.analyses.probes.base import DESCRIBED, EFFECT, NO_EFFECT, Finding
from ln_probe.analyses.probes.decomposition import Decomposition
from ln_probe.analyses.probes.head_effects import HeadEffects
from ln_probe.analyses.probes.leading import agreement
from ln_probe.analyses.probes.registry import find
from ln_probe.analyses.probes.sinks import Sinks
from ln_probe.hooks.norms import layers_in_words


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?", text)]


def heads(names: str, *values: tuple[Any, ...], **same: Any) -> pd.DataFrame:
    """A `heads` table of which only these columns are known."""
    frame = pd.DataFrame(list(values), columns=names.split()).reindex(columns=columns.HEADS.names)
    of_all = {"head": 0, "space": "head", "no_op": "", "by_theorem": ""}
    return frame.assign(**{name: value for name, value in of_all.items() if name not in names.split()} | same)


HARD = heads("layer variant attainable_median attainable_p05", (0, "intact", 0.2, 0.10),
             (0, "no_scaling", 0.24, 0.12), (1, "intact", 0.6, 0.30), (1, "no_scaling", 0.4, 0.20))  # fmt: skip
LEADS = heads("layer variant margin_median margin_p05", (0, "intact", 2.0, 0.5), (0, "no_scaling", -1.5, -0.25))
COUNTED = heads(
    "layer variant keys unselectable_fraction unreachable_fraction",
    *((i, v, 8000, u, (1 + u) / 2) for i in range(2)
      for v, u in (("intact", 0.25), ("no_scaling", 0.75), ("both_removed", 0.0))),
)  # fmt: skip
THEORY = ["sphere" if v == "intact" else "" for v in COUNTED["variant"]]
WIDTHS = heads("layer variant entropy_ratio", (0, "intact", 0.5), (0, "no_scaling", 0.52), (1, "intact", 0.6),
               (1, "no_scaling", 0.4))  # fmt: skip
UNIFORM = heads("layer head variant entropy_ratio uniform_angle_deg", (1, 2, "intact", 0.9, 80.0),
                (3, 4, "intact", 0.5, 70.0), (3, 4, "both_removed", 0.9, 10.0))  # fmt: skip


@pytest.mark.parametrize(("probe", "table", "picture", "said", "size"), [
    ("selectability", HARD, "attainable", [40, 32, 5, 20, 16, 1, 30, 5, 20], 0.1),
    ("selectability", HARD.assign(attainable_p05=[0.5, 0.4, 0.1, 0.3]), "attainable",
     [40, 32, 5, 30, 35, 1, 10, 5, 30], 0.2),
    ("selectability", HARD[HARD["variant"] == "intact"].assign(prompts=4, keys=16), "attainable", [40, 5, 20, 25], 0.0),
    ("selectability", HARD.assign(attainable_median=math.nan), "attainable", None, 0.0),
    ("selectability", LEADS, "margins", [2, 1.5, 5, 0.5, -0.25], 0.0),
    ("selectability", LEADS.assign(margin_p05=-1.0), "margins", [2, 1.5], 0.0),
    ("selectability", COUNTED, "table-keys", [25, 75, 0, 16000, 62.5, 87.5, 50], 0.5),
    ("selectability", COUNTED.assign(unreachable_fraction=math.nan), "table-keys", [25, 75, 0, 16000], 0.5),
    ("selectability", COUNTED.assign(by_theorem=THEORY), "table-keys", [25, 75, 0, 16000, 62.5, 87.5, 50], 0.0),
    ("selectability", COUNTED[COUNTED["variant"] == "intact"].assign(space="normalized"), "norms",
     [25, 16000, 62.5], 0.0),
    ("selectability", COUNTED.assign(keys=math.nan), "table-keys", None, 0.0),
    ("uniformity", WIDTHS, "entropy", [55, 46, 2, -20, 2], 0.09),  # the mean over layers, not the largest change
    ("uniformity", WIDTHS[WIDTHS["layer"] == 0], "entropy", [50, 52], 0.02),
    ("uniformity", WIDTHS.assign(entropy_ratio=[0.5, 0.52, 0.5, 0.497]), "entropy", [50, 51, 2, 0, 2], 0.0085),
    ("uniformity", WIDTHS.assign(entropy_ratio=0.5), "entropy", None, 0.0),
    ("uniformity", UNIFORM, "angle", [90, 70, 85], 0.0),
    ("uniformity", UNIFORM.assign(uniform_angle_deg=math.nan), "angle", [90], 0.0),
    ("uniformity", UNIFORM.assign(entropy_ratio=math.nan), "angle", None, 0.0),
])  # fmt: skip
def test_findings_on_heads(
    probe: str, table: pd.DataFrame, picture: str, said: Sequence[float] | None, size: float
) -> None:
    findings = find(probe).findings({"heads": table}, {"random_angle_deg": 84.6})
    mine = [finding for finding in findings if finding.picture == picture]
    if said is None:
        assert not mine
        return
    (finding,) = mine
    assert numbers(finding.text) == said, finding.text
    assert finding.size == pytest.approx(size)
    assert finding.rank == DESCRIBED


def test_what_follows_from_theory_has_a_low_rank() -> None:
    findings = find("selectability").findings({"heads": COUNTED.assign(by_theorem="flat")}, {})
    assert [finding.rank for finding in findings] == [NO_EFFECT]


def head_row(head: int, change: float, low: float, p: float = 1.0, **more: Any) -> dict[str, Any]:
    row = {"layer": 1, "head": head, "variant": "no_scaling", "no_op": "", "delta_loss": change, "p_sign": p}
    return row | {"delta_loss_low": low, "delta_loss_high": 0.3, "loss": 2.0, "prompts_worse": 7, "prompts": 9} | more


@pytest.mark.parametrize(("rows", "head", "rank"), [
    ([head_row(0, 0.2, 0.1, p=0.01), head_row(1, 0.25, 0.1), head_row(2, 0.0005, 0.0001, p=0.01),
      head_row(3, 0.4, 0.1, p=0.01, prompts_worse=1)], "L1H0 raises", EFFECT),  # most prompts speak against L1H3
    ([head_row(0, 0.1, -0.1), head_row(3, 0.2, -0.1)], "that of L1H3", NO_EFFECT),
    ([head_row(0, 0.2, 0.1, no_op="nothing")], "", 0),
])  # fmt: skip
def test_the_head_that_needs_scaling_most_is_named(rows: list[dict[str, Any]], head: str, rank: int) -> None:
    findings = HeadEffects().findings({"head_effects": pd.DataFrame(rows)}, {})
    assert [f.rank for f in findings] == [rank] * bool(head)
    assert all(head in f.text for f in findings)


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
    assert layers_in_words([0, 1]) == "layers 0, 1"
    assert layers_in_words(range(12)) == "layers 0 … 11 (12 of them)"


def sink(position: int, **more: Any) -> dict[str, Any]:
    row = {"prompt": 0, "position": position, "token": "a", "sink": True, "outlier": False, "sink_layer": 2.0}
    row |= {"sink_rate": 0.5, "received": 0.4, "uniform": 0.1, "length_ratio": 1.25, "dimensions": "3, 1"}
    row |= {"emerges_at": "blocks.1", "writer": "mlp0", "writer_share": 0.75}
    return row | {"received_no_scaling": math.nan, "received_there": math.nan} | more


def findings_on_sinks(sinks: pd.DataFrame, seen_by: int = 64, **provenance: Any) -> list[Finding]:
    dimensions = pd.DataFrame({"dimension": [4, 7, 7], "ratio": [20.0, 50.0, 30.0], "site": ["a", "b", "c"]})
    tables = {"sinks": sinks, "outlier_dimensions": dimensions, "sink_heads": pd.DataFrame({"seen_by": [seen_by]})}
    return Sinks().findings(tables, {"prompts": {"longest": 64}} | provenance)


def test_findings_on_sinks() -> None:
    texts = [finding.text for finding in findings_on_sinks(pd.DataFrame())]
    assert "no sink" in texts[0]
    assert numbers(texts[-1]) == [2, 10, 7, 50]
    assert "cannot be decided" in findings_on_sinks(pd.DataFrame(), seen_by=9)[0].text
    assert "too short" in findings_on_sinks(pd.DataFrame(), prompts={"longest": 7})[0].text
    table = pd.DataFrame([
        sink(0), sink(0, prompt=1, received=0.2),
        sink(3, token=".", sink=False, outlier=True, length_ratio=12.0, received_no_scaling=0.1, received_there=0.3),
    ])  # fmt: skip
    first, rest, _ = (numbers(finding.text) for finding in findings_on_sinks(table))
    assert first == [0, 2, 2, 50, 0.3, 30, 10, 1.2]
    assert rest == [0, 1, 12, 75, 3, 1, 10, 30]
    asked = findings_on_sinks(table.head(1), arguments={"layers": [1, 2], "heads": [0, 1]})[0].text
    assert "layers 1, 2 it gets" in asked
    assert "(heads 0, 1 alone)" in asked


def norm(site: str, **more: Any) -> dict[str, Any]:
    row = {"site": site, "layer": 0, "kind": "layernorm", "state": "", "mean_share": 0.5, "mean_share_tail": 0.25}
    row |= {"angle_to_ones_deg_tail": 60.0, "sigma_mean": 4.0, "sigma_mean_tail": 2.0, "norm_before_mean": 1.0}
    return row | {"norm_before_cv_tail": 0.125} | more


def test_findings_on_norms() -> None:
    norms = pd.DataFrame([
        norm("a"),
        norm("b", mean_share_tail=math.nan, mean_share=0.75, sigma_mean=9.0, sigma_mean_tail=3.0),
        norm("c", mean_share=0.9, mean_share_tail=0.125, norm_before_cv_tail=0.5, angle_to_ones_deg_tail=80.0),
    ])  # fmt: skip

    def texts(norms: pd.DataFrame) -> list[str]:
        return [finding.text for finding in Decomposition().findings({"layernorms": norms}, {})]

    projection, scaling = texts(norms)
    assert numbers(projection) == [25, 75, 60, 90]
    assert "(b)" in projection
    assert numbers(scaling) == [50, 0, 3]
    assert "at c" in scaling
    assert "nothing" in texts(norms.assign(state="centred"))[0]
    assert len(texts(norms.assign(kind="rmsnorm"))) == 1
    assert numbers(texts(norms.assign(kind=["projection_only", "none", "none"]))[1]) == [3, 1, 2]
