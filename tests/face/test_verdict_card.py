"""The card that a page begins with: the table's numbers, sentences that the findings agree with, no empty card."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE, is_effect
from ln_probe.render.page import report_page
from ln_probe.render.verdict import Verdict, verdict
from ln_probe.reporting.report import Report

Reader = Callable[[str], Any]


@pytest.fixture(scope="module")
def effects(causal: pd.DataFrame) -> pd.DataFrame:
    """Scaling: +0.33 [0.28, 0.37] of 4.3 everywhere, nothing at attention. Projection: nothing, hardly anything."""
    made = causal[causal["sites"].isin(["all", "attention"])].copy()
    numbers = {
        ("all", "no_scaling"): (0.327, 0.278, 0.371),
        ("attention", "no_scaling"): (0.004, -0.03, 0.04),
        ("all", "no_projection"): (-0.001, -0.002, 0.001),
        ("attention", "no_projection"): (0.003, 0.001, 0.005),
    }
    for (sites, variant), (change, low, high) in numbers.items():
        place = (made["sites"] == sites) & (made["variant"] == variant)
        made.loc[place, ["delta_loss", "delta_loss_low", "delta_loss_high", "loss"]] = change, low, high, 4.3 + change
        made.loc[place, "p_mean"] = 0.001 if low > 0 else 0.5
    return made


@pytest.fixture(scope="module")
def report(report: Report) -> Report:
    """Without what is below the card."""
    return Report({"layernorms": report.layernorms}, report.provenance)


def made_of(report: Report, effects: pd.DataFrame) -> Verdict:
    found = verdict(report.with_tables(causal=effects))
    assert found is not None
    return found


def test_d3_the_largest_effect_stands_first(report: Report, effects: pd.DataFrame, parsed: Reader) -> None:
    card = made_of(report, effects)
    assert card.sentences == (
        "Freezing every norm’s scaling costs +0.33 nats per token (+7.6 %); at attention alone no effect was seen "
        "(one of 0.079 nats would have been).",
        "Dropping every norm’s projection: no effect was seen (one of 0.012 nats would have been); at attention alone "
        "hardly anything, +0.003 nats per token (+0.07 %).",
    )
    html = report_page(report.with_tables(causal=effects))
    assert html.index('id="verdict"') < html.index('id="findings"') < html.index("<figure")
    for sentence in card.sentences:
        assert sentence in parsed(html).text
    assert "<script" not in html[html.index('<section class="verdict"') : html.index('id="findings"')]


def test_bars_are_the_tables_numbers(report: Report, effects: pd.DataFrame) -> None:
    """Places on the card, turned back into nats with two of its own ticks."""
    card = made_of(report, effects)
    (at_a, a), (at_b, b) = ((place, float(label)) for place, label in (card.ticks[0], card.ticks[-1]))

    def nats(place: float) -> float:
        return a + (place - at_a) * (b - a) / (at_b - at_a)

    rows = effects.set_index(["variant", "sites"])
    assert nats(card.zero) == pytest.approx(0, abs=1e-4)
    assert nats(card.band[0]) == pytest.approx(-LEAST_CHANGE, abs=1e-4)
    assert [b.what for b in card.bars][:2] == ["Scaling frozen at every norm", "Scaling frozen at attention alone"]
    order = [(v, s) for v in ("no_scaling", "no_projection") for s in ("all", "attention")]
    for key, bar in zip(order, card.bars, strict=True):
        row = rows.loc[key]
        assert bar.left is not None
        assert bar.span is not None
        end = bar.left if row["delta_loss"] < 0 else bar.left + bar.width
        assert nats(end) == pytest.approx(row["delta_loss"], abs=1e-4)
        assert nats(bar.low) == pytest.approx(row["delta_loss_low"], abs=1e-4)
        assert nats(bar.low + bar.span) == pytest.approx(row["delta_loss_high"], abs=1e-4)
        assert bar.told == is_effect(row)


def test_without_intervals_nothing_is_called_an_effect(report: Report, effects: pd.DataFrame) -> None:
    few = effects.assign(delta_loss_low=np.nan, delta_loss_high=np.nan, prompts=5, prompts_worse=3, p_adjusted=1.0)
    card = made_of(report, few)
    assert card.sentences[0].startswith(
        "Freezing every norm’s scaling: +0.33 nats per token (+7.6 %) on these 5 prompts, too few to say more"
    )
    assert not any(b.told or b.span is not None for b in card.bars)
    assert "No intervals" in report_page(
        report.with_tables(causal=effects.assign(delta_loss_low=np.nan, delta_loss_high=np.nan))
    )


def test_what_holm_does_not_leave_is_no_effect(report: Report, effects: pd.DataFrame) -> None:
    """Attention +0.0436 [0.013, 0.087] of lm-layernorm was spoken of with an adjusted p of 0.13."""
    place = (effects["sites"] == "attention") & (effects["variant"] == "no_scaling")
    alone = effects.copy()
    alone.loc[place, ["delta_loss", "delta_loss_low", "delta_loss_high", "p_mean"]] = 0.0436, 0.013, 0.087, 0.13
    card = made_of(report, alone)
    assert card.sentences[0].endswith(
        "at attention alone +0.044 nats per token (+1 %), not told from chance among the 6 changes tested."
    )
    assert [b.told for b in card.bars] == [True, False, False, False]


def test_directions_and_what_a_few_prompts_carry(report: Report, effects: pd.DataFrame) -> None:
    none = effects.assign(delta_loss_low=np.nan, delta_loss_high=np.nan, p_mean=np.nan)
    card = made_of(report, none.assign(prompts=20, prompts_worse=19, p_adjusted=1e-4))
    assert card.sentences[0].startswith(
        "Freezing every norm’s scaling: +0.33 nats per token (+7.6 %) on average, the loss rises on 19 of 20 "
        "prompts, too "
        "few to say how far beyond them; "
    )
    card = made_of(report, none.assign(prompts=64, p_adjusted=1.0))
    assert "(+7.6 %) on these 64 prompts, a few of which carry it; " in card.sentences[0]
    assert not any(b.told for b in card.bars)


def test_large_changes_are_legible(report: Report, effects: pd.DataFrame) -> None:
    """A card said (+1.9e+02 %)."""
    large = effects.copy()
    large.loc[large["variant"] == "no_scaling", ["delta_loss", "delta_loss_low", "delta_loss_high", "loss"]] = (
        246.4, 200.0, 300.0, 2.0 + 246.4,
    )  # fmt: skip
    (bar, *_), said = made_of(report, large).bars, made_of(report, large).sentences[0]
    assert (bar.value, bar.share, bar.interval) == ("+246 nats", "+12320 %", "95 %: +200 to +300")
    assert "e+" not in said


def test_d3_what_is_not_there_is_said_once(report: Report, effects: pd.DataFrame, parsed: Reader) -> None:
    why = "none: it does not scale"
    idle = effects.assign(no_op=np.where(effects["variant"] == "no_scaling", why, effects["no_op"]))
    card = made_of(report, idle)
    assert card.sentences[0] == f"There is no scaling to take away ({why})."
    assert [b.left is None for b in card.bars] == [True, True, False, False]


def test_d5_no_loss_no_card(report: Report, effects: pd.DataFrame, parsed: Reader) -> None:
    for table, said in (
        (effects.head(0), "Not run: what happens to the loss when a term is switched off"),
        (effects.assign(delta_loss=np.nan, loss=np.nan), "What the loss would be without a term is not known"),
    ):
        without = report.with_tables(causal=table)
        assert verdict(without) is None
        html = report_page(without)
        assert said in parsed(html).text
        assert 'class="verdict"' not in html


def test_hostile_text_in_the_card(report: Report, effects: pd.DataFrame, hostile: list[str], parsed: Reader) -> None:
    """The reason why nothing changes is the only text of the card that is not ours."""
    html = ""
    for text in hostile:
        if text:
            card = report_page(Report({"causal": effects.assign(no_op=text)}))
            html += card[card.index('<section class="verdict"') : card.index('id="findings"')]
    page = parsed(html)
    assert {t for t, _ in page.tags} <= {"section", "h2", "ul", "li", "span", "i", "b", "small", "p", "a"}
    assert not [n for _, a in page.tags for n in a if n.startswith("on")]
    assert set(re.findall(r'href="([^"]*)"', html)) == {"#causal"}
