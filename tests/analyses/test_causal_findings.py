"""What the findings say of a `causal` table: primary contrasts always, the others only where significant."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest

from ln_probe.analyses.probes.base import DESCRIBED, EFFECT, NO_EFFECT
from ln_probe.analyses.probes.causal import family, sentences
from ln_probe.analyses.probes.columns import CAUSAL


def row(sites: str, variant: str, change: float = 0.0, half: float = 0.01, **values: Any) -> dict[str, Any]:
    return {
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
        "delta_loss_optimal": math.nan,
        "delta_loss_optimal_low": math.nan,
        "delta_loss_optimal_high": math.nan,
        "prompts_worse": 30,
        "p_adjusted": 0.001,
        "kl": 0.1,
        "top1_agreement": 0.9,
        "entropy_change": 0.0,
        "prompts": 32,
        "groups": 32,
        "no_op": "",
    } | values


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    whole = [*rows, *(row(r["sites"], "intact") for r in rows)]
    return pd.DataFrame(whole, columns=CAUSAL.names).drop_duplicates(["sites", "variant"])


def texts(*rows: dict[str, Any], **options: Any) -> list[str]:
    return [f.text for f in sentences(table(*rows), **options)]


FEW: dict[str, Any] = {"half": math.nan, "prompts": 20, "groups": 20, "prompts_worse": 19, "p_adjusted": 1e-4}


def test_both_terms_are_reported_whatever_came_of_them() -> None:
    found = sentences(
        table(
            row("attention", "no_scaling", 0.02, 0.03, p_mean=0.44),
            row("all", "no_scaling", 0.327, 0.05),
            row("attention", "no_projection", 0.001, 0.003),
            row("all", "no_projection", -0.007, 0.02, p_mean=0.9),
            row("all", "both_removed", 0.33, 0.05),
        )
    )
    assert [f.text for f in found] == [
        "Freezing scaling at every norm raises the loss by 0.327 nats/token, 8.2 % of the intact loss of 4 (95 % CI "
        "+0.28 to +0.38; Holm-adjusted p = 0.002). At the norms that attention reads alone it does not significantly "
        "change the loss (+0.02 nats/token, 95 % CI -0.01 to +0.05; Holm-adjusted p = 0.44).",
        "Removing projection at every norm does not significantly change the loss (-0.007 nats/token, 95 % CI -0.027 "
        "to +0.013; Holm-adjusted p = 0.9). At the norms that attention reads alone it does not change the loss by "
        "more than 0.01 nats/token (+0.001; 90 % CI within ±0.0034, the equivalence bound).",
    ]
    assert [f.rank for f in found] == [EFFECT, NO_EFFECT]


def test_a_significant_change_below_the_threshold_is_no_effect() -> None:
    (finding,) = sentences(table(row("all", "no_projection", 0.004, 0.001)))
    assert finding.rank == NO_EFFECT
    assert finding.text == (
        "Removing projection at every norm raises the loss by 0.004 nats/token, 0.1 % of the intact loss of 4 (95 % CI "
        "+0.003 to +0.005; Holm-adjusted p = 0.002): significant, but too small to be called an effect (below 0.01 "
        "nats/token)."
    )


def test_holm_decides_which_changes_are_significant() -> None:
    (text,) = texts(row("attention", "no_scaling", 0.0436, 0.03, p_mean=0.06))
    assert text.startswith("Freezing scaling at the norms that attention reads does not significantly change the loss")
    assert "(+0.044 nats/token, 95 % CI +0.014 to +0.074; Holm-adjusted p = 0.06)" in text
    (text,) = texts(row("attention", "no_scaling", 0.0436, 0.03, p_mean=0.04))
    assert " raises the loss by 0.0436 nats/token, 1.1 % of the intact loss of 4 (" in text


def test_exploratory_groups_are_labelled_and_never_mixed_with_primary_ones() -> None:
    found = sentences(
        table(
            row("all", "no_scaling", 0.6),
            row("mlp", "no_scaling", 0.14),
            row("final", "no_scaling", 0.4),
            row("mlp", "no_projection", 0.001),
            row("all", "both_removed", 0.62),
        )
    )
    assert [f.text.split(" the loss")[0] for f in found] == [
        "Freezing scaling at every norm raises",
        "Exploratory: freezing scaling at the final norm raises",
    ]
    assert "; freezing scaling at the norms that MLPs read raises the loss by 0.14 nats/token" in found[1].text
    assert found[0].size > found[1].size


def test_both_estimates_are_given_where_loss_optimal_constants_were_fitted() -> None:
    best = {"delta_loss_optimal": 0.274, "delta_loss_optimal_low": 0.25, "delta_loss_optimal_high": 0.3}
    (text,) = texts(row("all", "no_scaling", 0.408, 0.04, **best))
    assert " raises the loss by 0.408 nats/token, 10 % of the intact loss of " in text
    assert text.endswith("; with loss-optimal constants +0.27 (95 % CI +0.25 to +0.3).")


def test_too_few_prompts_give_a_mean_and_a_direction() -> None:
    (finding,) = sentences(table(row("all", "no_projection", 0.5, **FEW | {"p_adjusted": 0.6})))
    assert finding.rank == NO_EFFECT
    assert finding.text == (
        "Removing projection at every norm changes the loss by +0.5 nats/token on average, 12 % of the intact loss of "
        "4 (median prompt +0.4) on 20 prompts: no CI with fewer than 32 prompts."
    )
    (finding,) = sentences(table(row("all", "no_projection", 0.5, **FEW)))
    assert finding.rank == DESCRIBED
    assert finding.text.endswith(
        "on 20 prompts: it rises on 19 of 20, Holm-adjusted sign test p = 0.0001 (no CI with fewer than 32 prompts)."
    )
    (finding,) = sentences(table(row("all", "no_scaling", 0.5, **FEW | {"prompts": 64, "groups": 20})))
    assert "on 64 prompts in 20 groups: it falls" in finding.text


def test_why_there_is_no_interval_with_enough_prompts() -> None:
    (finding,) = sentences(
        table(row("all", "no_scaling", 0.582, **FEW | {"prompts": 64, "groups": 64, "p_adjusted": 0.7}))
    )
    assert finding.rank == NO_EFFECT
    assert finding.text.endswith("on 64 prompts: no CI, because a few prompts carry the mean.")


def test_one_constant_for_all_positions_is_not_called_scaling() -> None:
    """In MGM one constant costs 4.61 nats, two constants 0.12."""
    (text,) = texts(row("attention", "no_scaling", 0.12, 0.02, delta_loss_uniform=4.61))
    assert "raises the loss by 0.12 nats/token" in text
    assert text.endswith("; with one constant for all positions +4.6, because position 0 then becomes too long.")


def test_single_norms_are_exploratory_and_the_largest_are_named() -> None:
    norms = [row(f"blocks.{i}.ln1", "no_scaling", 0.1 * i, 0.02) for i in range(5)]
    (finding,) = sentences(table(*norms))
    assert finding.rank == EFFECT
    assert finding.text.startswith(
        "Exploratory: of 5 norms frozen one at a time, 4 change the loss by 0.01 or more, significantly; the 3 "
        "largest of them: blocks.4.ln1 raises the loss by 0.4 nats/token (95 % CI +0.38 to +0.42; Holm-adjusted "
        "p = 0.002); "
        "blocks.3.ln1 "
    )
    few = [
        row("blocks.0.ln1", "no_scaling", 0.3, **FEW),
        row("blocks.1.ln1", "no_scaling", 9.0, **FEW | {"prompts_worse": 12, "p_adjusted": 0.4}),
    ]
    (finding,) = sentences(table(*few))
    assert finding.rank == DESCRIBED
    assert (
        "of 2 norms frozen one at a time, 1 changes the loss by 0.01 or more, with a significant sign test over prompts"
        in finding.text
    )


def test_a_term_that_is_not_there_is_not_applicable() -> None:
    rows = [row(s, "no_projection", 0.0, 0.0, no_op="rmsnorm: it has no projection") for s in ("attention", "all")]
    assert texts(row("all", "no_scaling", 0.5), *rows)[1] == (
        "Removing projection at every norm is not applicable (rmsnorm: it has no projection)."
    )
    only = row("attention", "no_scaling", 0.0, 0.0, no_op="projection_only: it does not scale")
    (text,) = texts(row("all", "no_scaling", 0.5), only)
    assert text.endswith(
        "At the norms that attention reads alone it is not applicable (projection_only: it does not scale)."
    )


def test_samples_of_the_model_estimate_a_divergence() -> None:
    (text,) = texts(row("all", "no_scaling", 0.5), source="sampled")
    assert text.endswith("The prompts are the model's own samples: a loss change on them estimates a KL divergence.")
    (text,) = texts(row("all", "no_scaling", 0.001, 0.01, equivalence_bound=0.02), source="sampled")
    assert "samples" not in text


def test_a_loss_of_the_users_has_its_own_unit() -> None:
    (text,) = texts(row("all", "no_scaling", 0.5), unit="units of task:error")
    assert "raises the loss by 0.5 units of task:error, 12 % of the intact loss of 4 (95 % CI" in text


def test_a_finding_about_a_lower_loss() -> None:
    """Its size is the change as a share of the intact loss."""
    (finding,) = sentences(table(row("all", "no_projection", -0.5, 0.25, loss=3.0, p_mean=0.001)))
    assert " lowers the loss by 0.5 nats/token, 14 % of the intact loss of 3.5 (" in finding.text
    assert finding.text.endswith("(95 % CI -0.75 to -0.25; Holm-adjusted p = 0.001).")
    assert finding.size == pytest.approx(0.5 / 3.5)
    assert finding.rank == EFFECT


def test_nothing_is_said_of_a_contrast_without_a_number() -> None:
    """Logits can overflow where scaling is frozen at every norm; the note says so, and the finding is left out."""
    every, attention = (row(sites, "no_scaling", 0.5, 0.25) for sites in ("all", "attention"))
    numbers = [name for name in every if name.startswith(("delta_loss", "loss", "p_mean", "equivalence"))]
    blank = dict.fromkeys(numbers, math.nan)
    (text,) = texts(attention, every | blank)
    assert text.startswith("Freezing scaling at the norms that attention reads raises the loss by 0.5 nats")
    (text,) = texts(attention | blank, every)
    assert text.startswith("Freezing scaling at every norm raises the loss by 0.5 nats/token")
    assert "attention" not in text
    assert texts(attention | blank, every | blank) == []
