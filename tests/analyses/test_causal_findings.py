"""What is said of a `causal` table: the largest effect first, and only what intervals and sizes allow."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from ln_probe.analyses.probes.causal_findings import said
from ln_probe.analyses.probes.protocol import EFFECT, NO_EFFECT
from ln_probe.analyses.tables import CAUSAL


def row(sites: str, variant: str, change: float = 0.0, half: float = 0.01, **values: Any) -> dict[str, Any]:
    return {
        "sites": sites,
        "variant": variant,
        "loss": 4.0 + change,
        "delta_loss": change,
        "delta_loss_low": change - half,
        "delta_loss_high": change + half,
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
    others = [f.text for f in found if f.rank == NO_EFFECT]
    assert others == [
        "Without projection at every norm no effect on the loss was seen; one of 0.0368 nats per token would have "
        "been.",
        "Without scaling at every norm that attention reads no effect on the loss was seen; one of 0.0552 nats per "
        "token would have been.",
    ]


def test_a_sure_effect_that_is_too_small_is_none() -> None:
    (finding,) = said(table(row("all", "no_projection", 0.004, 0.001)))
    assert finding.rank == NO_EFFECT
    assert finding.text.endswith("the loss changes by +0.004 nats per token (95 % interval +0.003 to +0.005): hardly.")


def test_too_few_prompts_are_said_to_be() -> None:
    found = said(table(row("all", "no_projection", 0.5, math.nan, prompts=4)))
    assert [f.rank for f in found] == [NO_EFFECT]
    assert "changes by +0.5 nats per token on these 4 prompts, too few to say how far that holds" in found[0].text


def test_the_sink_is_not_called_scaling() -> None:
    """One constant everywhere costs 4.61 nats in MGM, two constants 0.12."""
    (first, *_) = said(table(row("attention", "no_scaling", 0.12, 0.02, delta_loss_uniform=4.61)))
    assert "rises by 0.12 nats" in first.text
    assert "giving position 0 the others' constant as well makes it +4.6, which is what the length of" in first.text


def test_single_norms_need_prompts_that_agree() -> None:
    norms = [
        row("blocks.0.ln1", "no_scaling", 0.3, math.nan, prompts=12, prompts_worse=12, p_adjusted=0.004),
        row("blocks.1.ln1", "no_scaling", 9.0, math.nan, prompts=12, prompts_worse=8, p_adjusted=0.4),
    ]
    found = said(table(row("all", "no_scaling", 0.5), *norms))
    assert (
        "scaling is needed most at blocks.0.ln1: +0.3 nats per token without its scaling (12 of 12 prompts are worse)"
        in (found[-1].text)
    )


def test_sampled_prompts_estimate_a_divergence_and_constructions_are_said_once() -> None:
    rows = [row("all", "no_scaling", 0.5)] + [
        row(s, "no_projection", 0.0, 0.0, no_op="rmsnorm: it has no projection") for s in ("attention", "mlp", "all")
    ]
    found = said(table(*rows), "sampled")
    assert "estimates a KL divergence, which cannot be negative but for chance" in found[0].text
    texts = [f.text for f in found if "by construction" in f.text]
    assert texts == ["Taking away projection changes nothing by construction (rmsnorm: it has no projection)."]
