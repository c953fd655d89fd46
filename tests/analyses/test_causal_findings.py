"""What is said of a `causal` table: the largest effect first, and only what intervals and sizes allow."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ln_probe.analyses.probes.causal_findings import said
from ln_probe.analyses.probes.protocol import DESCRIBED, EFFECT, NO_EFFECT
from ln_probe.analyses.tables import CAUSAL


def row(sites: str, variant: str, change: float = 0.0, half: float = 0.01, **values: Any) -> dict[str, Any]:
    return {
        "sites": sites,
        "variant": variant,
        "loss": 4.0 + change,
        "delta_loss": change,
        "delta_loss_low": change - half,
        "delta_loss_high": change + half,
        "p_mean": 0.001 if abs(change) > half else math.nan if math.isnan(half) else 0.5,
        "delta_loss_median": 0.8 * change,
        "delta_loss_uniform": change,
        "delta_loss_resampled": change,
        "prompts_worse": 30,
        "p_adjusted": 0.001,
        "kl": 0.1,
        "top1_agreement": 0.9,
        "entropy_change": 0.0,
        "prompts": 32,
        "divisor": math.nan,
        "divisor_first": math.nan,
        "matched": True,
        "no_op": "",
    } | values


def table(*rows: dict[str, Any]) -> pd.DataFrame:
    whole = [*rows, *(row(r["sites"], "intact") for r in rows)]
    return pd.DataFrame(whole, columns=CAUSAL.names).drop_duplicates(["sites", "variant"])


def test_the_largest_effect_is_first_whatever_the_order_of_the_table() -> None:
    """D3: lm-layernorm's largest effect (all norms, +0.327 [0.278, 0.371]) was in none of the findings."""
    found = said(
        table(
            row("attention", "no_scaling", 0.02, 0.03),
            row("mlp", "no_scaling", 0.14),
            row("all", "no_scaling", 0.327, 0.05),
            row("all", "no_projection", -0.007, 0.02),
            row("all", "neither", 0.33, 0.05),
        )
    )
    first = max(found, key=lambda f: (-f.rank, f.size))
    assert first.text == (
        "Without scaling at every norm the loss rises by 0.327 nats per token (95 % interval 0.277 to 0.377), from 4 "
        "nats (8.2 % of it)."
    )
    assert first.rank == EFFECT
    assert [f.text for f in found if f.rank == EFFECT][1:] == [
        "Without scaling at every norm that MLPs read the loss rises by 0.14 nats per token (95 % interval 0.13 to "
        "0.15)."
    ]
    others = [f.text for f in found if f.rank == NO_EFFECT]
    assert others == [
        "Without projection at every norm no effect on the loss was seen; one of 0.0431 nats per token would have "
        "been.",
        "Without scaling at every norm that attention reads no effect on the loss was seen; one of 0.0646 nats per "
        "token would have been.",
    ]


def test_every_group_that_passes_is_told_by_size() -> None:
    """The final norm and those that MLPs read were never spoken of unless they were the largest."""
    found = said(
        table(
            row("attention", "no_scaling", 0.05),
            row("mlp", "no_scaling", 0.14),
            row("final", "no_scaling", 0.4),
            row("all", "no_scaling", 0.6),
            row("mlp", "no_projection", 0.03),
            row("all", "no_projection", 0.04),
            row("all", "neither", 0.62),
        )
    )
    first, *others = [f for f in found if f.rank == EFFECT]
    assert first.text.startswith("Without scaling at every norm the loss rises by 0.6 nats per token")
    assert [f.text for f in others] == [
        "Without scaling at the final norm the loss rises by 0.4 nats per token (95 % interval 0.39 to 0.41); at every "
        "norm that MLPs read it rises by 0.14 nats per token (95 % interval 0.13 to 0.15); at every norm that "
        "attention "
        "reads it rises by 0.05 nats per token (95 % interval 0.04 to 0.06).",
        "Without projection at every norm the loss rises by 0.04 nats per token (95 % interval 0.03 to 0.05); at every "
        "norm that MLPs read it rises by 0.03 nats per token (95 % interval 0.02 to 0.04).",
    ]
    assert [round(f.size, 6) for f in others] == [0.1, 0.01]
    assert [f for f in found if f.rank != EFFECT] == []


def test_both_terms_are_told_where_they_are_more_than_each() -> None:
    found = said(table(row("mlp", "no_scaling", 0.1), row("mlp", "no_projection", 0.1), row("mlp", "neither", 0.3)))
    assert [f.text.split(" the loss")[0] for f in found] == [
        f"Without {term} at every norm that MLPs read" for term in ("projection and scaling", "scaling", "projection")
    ]


def test_holm_decides_which_effects_are_spoken_of() -> None:
    """lm-layernorm on 24-token prompts: attention +0.0436 [0.013, 0.087] was spoken of."""
    alone = {"delta_loss_low": 0.013, "delta_loss_high": 0.087}
    groups = [row("all", "no_scaling", 0.3), row("attention", "no_scaling", 0.0436, p_mean=0.06, **alone)]
    found = said(table(*groups))
    assert [f.rank for f in found] == [EFFECT, NO_EFFECT]
    assert found[1].text == (
        "Without scaling at every norm that attention reads the loss changes by +0.044 nats per token (95 % interval "
        "+0.013 to +0.087 taken alone), not told from chance among the 2 changes tested (p = 0.06)."
    )
    (_, told) = said(table(groups[0], groups[1] | {"p_mean": 0.04}))
    assert told.rank == EFFECT


def test_a_sure_effect_that_is_too_small_is_none() -> None:
    (finding,) = said(table(row("all", "no_projection", 0.004, 0.001)))
    assert finding.rank == NO_EFFECT
    assert finding.text.endswith("the loss changes by +0.004 nats per token (95 % interval +0.003 to +0.005): hardly.")


def test_too_few_prompts_are_said_to_be() -> None:
    found = said(table(row("all", "no_projection", 0.5, math.nan, prompts=4, p_adjusted=0.6)))
    assert [f.rank for f in found] == [NO_EFFECT]
    assert "changes by +0.5 nats per token on average (median prompt +0.4) on these 4 prompts, too few" in found[0].text


def test_the_sink_is_not_called_scaling() -> None:
    """One constant everywhere costs 4.61 nats in MGM, two constants 0.12."""
    (first, *_) = said(table(row("attention", "no_scaling", 0.12, 0.02, delta_loss_uniform=4.61)))
    assert "rises by 0.12 nats" in first.text
    assert "giving position 0 the others' constant as well makes it +4.6, which is what the length of" in first.text
    few: dict[str, Any] = {"half": math.nan, "prompts": 20, "prompts_worse": 19, "p_adjusted": 1e-4}
    (found,) = said(table(row("attention", "no_scaling", 0.12, delta_loss_uniform=4.61, **few)))
    assert "giving position 0 the others' constant as well makes it +4.6" in found.text


def test_single_norms_need_prompts_that_agree() -> None:
    """Signs tell a direction, not a size: how many prompts, and how far on these, the largest first."""
    norms = [
        row("blocks.0.ln1", "no_scaling", 0.3, math.nan, prompts=12, prompts_worse=12, p_adjusted=0.004),
        row("blocks.1.ln1", "no_scaling", 9.0, math.nan, prompts=12, prompts_worse=8, p_adjusted=0.4),
        row("blocks.2.ln1", "no_scaling", -0.5, math.nan, prompts=12, prompts_worse=11, p_adjusted=0.006),
    ]
    found = said(table(row("all", "no_scaling", 0.5), *norms))
    assert [f.rank for f in found] == [EFFECT, DESCRIBED]
    assert found[-1].text == (
        "Of 3 norms taken one by one without scaling, 2 change the loss one way on more prompts than chance allows: at "
        "blocks.2.ln1 it rises on 11 of 12 prompts, though it falls by 0.5 nats per token on average (median prompt "
        "-0.4); at blocks.0.ln1 it rises on 12 of 12 prompts, by 0.3 nats per token on average (median prompt +0.24) "
        "(a "
        "direction alone: how far it goes beyond these prompts takes 32 to say)."
    )


def test_single_norms_with_intervals_are_effects() -> None:
    norms = [row(f"blocks.{i}.ln1", "no_scaling", 0.1 * i, 0.02) for i in range(5)]
    (found,) = said(table(*norms))
    assert found.rank == EFFECT
    assert found.text == (
        "Of 5 norms taken one by one without scaling, 4 change the loss by 0.01 nats or more, told from chance, the 3 "
        "largest: at blocks.4.ln1 it rises by 0.4 nats per token (95 % interval 0.38 to 0.42); at blocks.3.ln1 it "
        "rises "
        "by 0.3 nats per token (95 % interval 0.28 to 0.32); at blocks.2.ln1 it rises by 0.2 nats per token (95 % "
        "interval 0.18 to 0.22)."
    )


def test_groups_below_32_prompts_are_told_as_single_norms_are() -> None:
    """19 of 20 prompts that rise were "too few to say" while 11 of 12 at a single norm were told."""
    few: dict[str, Any] = {"half": math.nan, "prompts": 20, "prompts_worse": 19, "p_adjusted": 1e-4}
    found = said(table(row("mlp", "no_scaling", 0.1, **few), row("all", "no_scaling", 0.5, **few)))
    assert [(f.rank, f.text) for f in found] == [
        (
            DESCRIBED,
            "Without scaling at every norm the loss rises on 19 of 20 prompts, by 0.5 nats per token on average "
            "(median "
            "prompt +0.4); at every norm that MLPs read it rises on 19 of 20 prompts, by 0.1 nats per token on average "
            "(median prompt +0.08) (from a loss of 4; a direction alone: how far it goes beyond these prompts takes "
            "32 to "
            "say).",
        )
    ]


def test_why_there_is_no_interval_is_said() -> None:
    carried: dict[str, Any] = {"half": math.nan, "prompts": 64, "delta_loss_median": 0.002, "p_adjusted": 0.7}
    (found,) = said(table(row("all", "no_scaling", 0.582, **carried)))
    assert found.rank == NO_EFFECT
    assert found.text == (
        "Without scaling at every norm the loss changes by +0.58 nats per token on average (median prompt +0.002) on "
        "these 64 prompts, a few of which carry the average: no interval."
    )
    (found,) = said(table(row("all", "no_scaling", 0.582, **carried | {"p_adjusted": 0.001, "prompts_worse": 60})))
    assert found.rank == DESCRIBED
    assert found.text.endswith("; a direction alone: a few prompts carry the average, and no interval is given).")


def test_sampled_prompts_estimate_a_divergence_and_constructions_are_said_once() -> None:
    rows = [row("all", "no_scaling", 0.5)] + [
        row(s, "no_projection", 0.0, 0.0, no_op="rmsnorm: it has no projection") for s in ("attention", "mlp", "all")
    ]
    found = said(table(*rows), "sampled")
    assert "estimates a KL divergence, which cannot be negative but for chance" in found[0].text
    texts = [f.text for f in found if "by construction" in f.text]
    assert texts == ["Taking away projection changes nothing by construction (rmsnorm: it has no projection)."]
