"""What the findings say of a `causal` table: primary contrasts always, the others only where significant."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from ln_probe.analyses.probes.base import DESCRIBED, EFFECT, NO_EFFECT
from ln_probe.analyses.probes.causal import family
from ln_probe.analyses.probes.causal_findings import sentences
from ln_probe.analyses.probes.columns import CAUSAL

SAME = {
    "delta_loss_optimal": math.nan, "delta_loss_optimal_low": math.nan, "delta_loss_optimal_high": math.nan,
    "prompts_worse": 30, "p_sign": 0.001, "kl": 0.1, "top1_agreement": 0.9, "entropy_change": 0.0, "prompts": 32,
    "groups": 32, "no_op": "",
}  # fmt: skip
FEW: dict[str, Any] = {"half": math.nan, "prompts": 20, "groups": 20, "prompts_worse": 19, "p_sign": 1e-4}
ABSENT = "rmsnorm: it has no projection"
EVERY, HEEDED = "Freezing scaling at every norm", "At the norms that attention reads alone it"


def row(sites: str, variant: str, change: float = 0.0, half: float = 0.01, **values: Any) -> dict[str, Any]:
    return SAME | {
        "sites": sites,
        "variant": variant,
        "family": family(sites, variant),
        "loss": 4.0 + change,
        "delta_loss": change,
        "delta_loss_low": change - half,
        "delta_loss_high": change + half,
        "p_mean": 0.002 if abs(change) > half else math.nan if math.isnan(half) else 0.5,
        "equivalence_bound": abs(change) + 0.8 * half,
        "delta_loss_median": 0.8 * change,
        "delta_loss_uniform": change,
    } | values  # fmt: skip


def found(*rows: dict[str, Any], **options: Any) -> list[Any]:
    whole = [*rows, *(row(r["sites"], "intact") for r in rows)]
    table = pd.DataFrame(whole, columns=CAUSAL.names).drop_duplicates(["sites", "variant"])
    return list(sentences(table, **options))


def test_both_terms_are_reported_whatever_came_of_them() -> None:
    told = found(
        row("attention", "no_scaling", 0.02, 0.03, p_mean=0.44),
        row("all", "no_scaling", 0.327, 0.05),
        row("attention", "no_projection", 0.001, 0.003),
        row("all", "no_projection", -0.007, 0.02, p_mean=0.9),
        row("all", "both_removed", 0.33, 0.05),
    )
    assert [f.text for f in told] == [
        f"{EVERY} raises the loss by 0.33 nats/token, 8.2 % of the intact loss of 4 (95 % CI +0.28 to +0.38; "
        f"Holm-adjusted p = 0.002). {HEEDED} does not significantly change the loss (+0.020 nats/token, 95 % CI "
        "-0.010 to +0.050; Holm-adjusted p = 0.44).",
        "Removing projection at every norm does not significantly change the loss (-0.007 nats/token, 95 % CI -0.027 "
        f"to +0.013; Holm-adjusted p = 0.9). {HEEDED} does not change the loss by more than 0.01 nats/token (+0.0010; "
        "90 % CI within ±0.0034, the equivalence bound).",
    ]
    assert [f.rank for f in told] == [EFFECT, NO_EFFECT]


def test_exploratory_groups_are_labelled_and_never_mixed_with_primary_ones() -> None:
    told = found(
        row("all", "no_scaling", 0.6),
        row("mlp", "no_scaling", 0.14),
        row("final", "no_scaling", 0.4),
        row("mlp", "no_projection", 0.001),
        row("all", "both_removed", 0.62),
    )
    assert [f.text.split(" the loss")[0] for f in told] == [
        f"{EVERY} raises",
        "Exploratory: freezing scaling at the final norm raises",
    ]
    assert "; freezing scaling at the norms that MLPs read raises the loss by 0.140 nats/token" in told[1].text
    assert told[0].size > told[1].size


@pytest.mark.parametrize(("values", "rank", "ends"), [
    ({"variant": "no_projection", "change": 0.004, "half": 0.001}, NO_EFFECT,
     "raises the loss by 0.0040 nats/token, 0.1 % of the intact loss of 4 (95 % CI +0.0030 to +0.0050; Holm-adjusted p "
     "= 0.002): significant, but too small to be called an effect (below 0.01 nats/token)."),
    ({"change": 0.408, "half": 0.04, "delta_loss_optimal": 0.274, "delta_loss_optimal_low": 0.25,
      "delta_loss_optimal_high": 0.3}, EFFECT, "; with loss-optimal constants +0.274 (95 % CI +0.250 to +0.300)."),
    ({"change": 0.5, **FEW, "p_sign": 0.6}, NO_EFFECT,
     " changes the loss by +0.5 nats/token on average, 12 % of the intact loss of 4 (median prompt +0.4) on 20 "
     "prompts: no CI with fewer than 32 prompts."),
    ({"change": 0.5, **FEW, "prompts_worse": 12}, DESCRIBED,
     "on 20 prompts: it rises on 12 of 20, Holm-adjusted sign test p = 0.0001 (no CI with fewer than 32 prompts)."),
    ({"change": 0.5, **FEW, "prompts": 64}, DESCRIBED,
     "on 64 prompts in 20 groups: it falls on 45 of 64, Holm-adjusted sign test p = 0.0001 (no CI with fewer than 32 "
     "groups)."),
    ({"change": 0.582, **FEW, "prompts": 64, "groups": 64, "p_sign": 0.7}, NO_EFFECT,
     "on 64 prompts: no CI, because a few prompts carry the mean."),
    ({"change": 0.12, "half": 0.02, "delta_loss_uniform": 4.61}, EFFECT,  # as in MGM
     "; with one constant for all positions +4.6, because position 0 then becomes too long."),
    ({"change": -0.5, "half": 0.25, "loss": 3.0, "p_mean": 0.001}, EFFECT,
     " lowers the loss by 0.50 nats/token, 14 % of the intact loss of 3.5 (95 % CI -0.75 to -0.25; Holm-adjusted p = "
     "0.001)."),
    ({"change": -0.0002, "half": 0.02, "p_mean": 0.9}, NO_EFFECT,  # no -0
     " does not significantly change the loss (+0.000 nats/token, 95 % CI -0.020 to +0.020; Holm-adjusted p = 0.9)."),
])  # fmt: skip
def test_how_a_primary_contrast_is_told(values: dict[str, Any], rank: int, ends: str) -> None:
    (finding,) = found(row("all", **{"variant": "no_scaling"} | values))
    assert finding.text.endswith(ends)
    assert finding.rank == rank
    assert finding.size == pytest.approx(
        abs(values["change"]) / (values.get("loss", 4 + values["change"]) - values["change"])
    )


def test_single_norms_are_exploratory_and_the_largest_are_named() -> None:
    norms = [row(f"blocks.{i}.ln1", "no_scaling", 0.1 * i, 0.02) for i in range(5)]
    (finding,) = found(*norms)
    assert finding.rank == EFFECT
    assert finding.text.startswith(
        "Exploratory: of 5 norms frozen one at a time, 4 change the loss by 0.01 or more, significantly; the 3 "
        "largest of them: blocks.4.ln1 raises the loss by 0.400 nats/token (95 % CI +0.380 to +0.420; "
        "Holm-adjusted p = 0.002); blocks.3.ln1 "
    )
    (finding,) = found(
        row("blocks.0.ln1", "no_scaling", 0.3, **FEW),
        row("blocks.1.ln1", "no_scaling", 9.0, **FEW | {"prompts_worse": 12, "p_sign": 0.4}),
    )
    assert finding.rank == DESCRIBED
    said = "of 2 norms frozen one at a time, 1 changes the loss by 0.01 or more, with a significant sign test over "
    assert f"{said}prompts" in finding.text


def test_single_norms_are_named_by_the_size_of_their_change_in_either_direction() -> None:
    twelve = FEW | {"prompts": 12, "groups": 12, "p_sign": 0.01, "delta_loss_median": math.nan, "prompts_worse": 0}
    falls = [row(f"blocks.{i}.ln1", "no_scaling", -0.02 * (i + 1), **twelve) for i in range(3)]
    (finding,) = found(*falls)
    assert "blocks.2.ln1 changes the loss by -0.06 nats/token on average on 12 prompts: it falls on 12 of 12, " in (
        finding.text
    )
    (finding,) = found(*falls, row("blocks.3.ln1", "no_scaling", 0.03, **twelve | {"prompts_worse": 12}))
    assert finding.text.index("blocks.2.ln1") < finding.text.index("blocks.1.ln1") < finding.text.index("blocks.3.ln1")
    assert "blocks.0.ln1" not in finding.text
    assert "blocks.3.ln1 changes the loss by +0.03 nats/token on average on 12 prompts: it rises on 12 of 12" in (
        finding.text
    )


@pytest.mark.parametrize(("rows", "options", "ends"), [
    ([row(s, "no_projection", 0.0, 0.0, no_op=ABSENT) for s in ("attention", "all")], {},
     f"Removing projection at every norm is not applicable ({ABSENT})."),
    ([row("all", "no_scaling", 0.5), row("attention", "no_scaling", 0.0, 0.0, no_op="it does not scale")], {},
     f"{HEEDED} is not applicable (it does not scale)."),
    ([row("all", "no_scaling", 0.5)], {"unit": "units of task:error"},
     "raises the loss by 0.500 units of task:error, 12 % of the intact loss of 4 (95 % CI +0.490 to +0.510; "
     "Holm-adjusted p = 0.002)."),
])  # fmt: skip
def test_what_else_is_said(rows: list[dict[str, Any]], options: dict[str, Any], ends: str) -> None:
    assert found(*rows, **options)[-1].text.endswith(ends)


def test_nothing_is_said_of_a_contrast_without_a_number() -> None:
    """Logits can overflow where scaling is frozen at every norm; the note says so, and the finding is left out."""
    every, attention = (row(sites, "no_scaling", 0.5, 0.25) for sites in ("all", "attention"))
    numbers = [name for name in every if name.startswith(("delta_loss", "loss", "p_mean", "equivalence"))]
    blank = dict.fromkeys(numbers, math.nan)
    (finding,) = found(attention, every | blank)
    assert finding.text.startswith("Freezing scaling at the norms that attention reads raises the loss by 0.50 nats")
    (finding,) = found(attention | blank, every)
    assert finding.text.startswith(f"{EVERY} raises the loss by 0.50 nats/token")
    assert "attention" not in finding.text
    assert found(attention | blank, every | blank) == []
