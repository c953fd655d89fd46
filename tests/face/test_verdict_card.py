"""The card that a page begins with shows the table's numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from made_up import HOSTILE, Page

from ln_probe.analyses.probes.causal_findings import LEAST_CHANGE, is_effect
from ln_probe.page.index import IndexEntry, index_page
from ln_probe.page.page import report_page
from ln_probe.page.verdict import Verdict, in_one_line, verdict
from ln_probe.report import Report


@pytest.fixture(scope="module")
def effects(causal: pd.DataFrame) -> pd.DataFrame:
    """Scaling: +0.33 [0.28, 0.37] of 4.3 everywhere, not significant at attention. Projection: equivalent to zero,
    significant and below the threshold."""
    made = causal[causal["sites"].isin(["all", "attention"])].copy()
    numbers = {
        ("all", "no_scaling"): (0.327, 0.278, 0.371, 0.36),
        ("attention", "no_scaling"): (0.004, -0.03, 0.04, 0.034),
        ("all", "no_projection"): (-0.001, -0.002, 0.001, 0.0017),
        ("attention", "no_projection"): (0.003, 0.001, 0.005, 0.0046),
    }
    for (sites, variant), (change, low, high, bound) in numbers.items():
        place = (made["sites"] == sites) & (made["variant"] == variant)
        made.loc[place, ["delta_loss", "delta_loss_low", "delta_loss_high", "loss"]] = change, low, high, 4.3 + change
        made.loc[place, "p_mean"] = 0.001 if low > 0 else 0.5
        made.loc[place, "equivalence_bound"] = bound
    return made


@pytest.fixture(scope="module")
def report(report: Report) -> Report:
    """Without what is below the card."""
    return Report({"layernorms": report.layernorms}, report.provenance)


def made_of(report: Report, effects: pd.DataFrame) -> Verdict:
    found = verdict(report.with_tables(causal=effects))
    assert found is not None
    return found


def test_the_card_stands_before_the_findings(report: Report, effects: pd.DataFrame) -> None:
    html = report_page(report.with_tables(causal=effects))
    assert html.index('id="verdict"') < html.index('id="findings"') < html.index('id="tables"')
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
        end = bar.left if row["delta_loss"] < 0 else bar.left + bar.width
        assert nats(end) == pytest.approx(row["delta_loss"], abs=1e-4)
        assert nats(bar.low) == pytest.approx(row["delta_loss_low"], abs=1e-4)
        assert nats(bar.low + bar.span) == pytest.approx(row["delta_loss_high"], abs=1e-4)
        assert bar.effect == is_effect(row)


def test_without_intervals_nothing_is_called_an_effect(report: Report, effects: pd.DataFrame) -> None:
    few = effects.assign(delta_loss_low=np.nan, delta_loss_high=np.nan, prompts=5, prompts_worse=3, p_sign=1.0)
    assert not any(b.effect or b.span is not None for b in made_of(report, few).bars)
    none = effects.assign(delta_loss_low=np.nan, delta_loss_high=np.nan, p_mean=np.nan, prompts=64, groups=64)
    assert not any(b.effect for b in made_of(report, none.assign(p_sign=1.0)).bars)


def test_what_holm_does_not_leave_is_no_effect(report: Report, effects: pd.DataFrame) -> None:
    """Attention +0.0436 [0.013, 0.087] of lm-layernorm was called an effect with an adjusted p of 0.13."""
    place = (effects["sites"] == "attention") & (effects["variant"] == "no_scaling")
    alone = effects.copy()
    alone.loc[place, ["delta_loss", "delta_loss_low", "delta_loss_high", "p_mean"]] = 0.0436, 0.013, 0.087, 0.13
    assert [b.effect for b in made_of(report, alone).bars] == [True, False, False, False]


def test_loss_optimal_constants_have_bars_of_their_own(report: Report, effects: pd.DataFrame) -> None:
    fitted = effects.copy()
    everywhere = (effects["sites"] == "all") & (effects["variant"] == "no_scaling")
    columns = ["delta_loss_optimal", "delta_loss_optimal_low", "delta_loss_optimal_high"]
    fitted.loc[everywhere, columns] = 0.274, 0.25, 0.3
    card = made_of(report, fitted)
    assert [b.what for b in card.bars][:3] == [
        "Scaling frozen at every norm, mean constants",
        "Scaling frozen at every norm, loss-optimal constants",
        "Scaling frozen at attention alone",
    ]
    best = card.bars[1]
    assert (best.value, best.interval, best.effect) == ("+0.274 nats", "95 % CI +0.250 to +0.300", True)
    assert "+0.274 nats (+6.4 %)" in Page(report_page(report.with_tables(causal=fitted))).text


def test_large_changes_are_legible(report: Report, effects: pd.DataFrame) -> None:
    """A card said (+1.9e+02 %)."""
    large = effects.copy()
    large.loc[large["variant"] == "no_scaling", ["delta_loss", "delta_loss_low", "delta_loss_high", "loss"]] = (
        246.4, 200.0, 300.0, 2.0 + 246.4,
    )  # fmt: skip
    bar = made_of(report, large).bars[0]
    assert (bar.value, bar.share, bar.interval) == ("+246 nats", "+12320 %", "95 % CI +200 to +300")


def test_d3_what_is_not_there_is_said_once(report: Report, effects: pd.DataFrame) -> None:
    why = "none: it does not scale"
    idle = effects.assign(no_op=np.where(effects["variant"] == "no_scaling", why, effects["no_op"]))
    card = made_of(report, idle)
    assert [b.value for b in card.bars][:2] == [f"not applicable ({why})"] * 2
    assert [b.left is None for b in card.bars] == [True, True, False, False]


def test_no_loss_no_card(report: Report, effects: pd.DataFrame) -> None:
    for table in (effects.head(0), effects.assign(delta_loss=np.nan, loss=np.nan)):
        without = report.with_tables(causal=table)
        assert verdict(without) is None
        html = report_page(without)
        assert "unknown" in Page(html).text
        assert 'class="verdict"' not in html


def test_a_loss_that_is_not_applicable_says_why(report: Report, effects: pd.DataFrame) -> None:
    note = "causal: the loss is not applicable: attention is bidirectional"
    unknown = report.with_tables(causal=effects.assign(delta_loss=np.nan, loss=np.nan))
    card = verdict(replace(unknown, notes=(note,)))
    assert card is not None
    assert "bidirectional" in card.reason
    assert card.bars == ()
    page = report_page(replace(unknown, notes=(note,)))
    text = Page(page[page.index('id="verdict"') : page.index('id="findings"')]).text
    assert "bidirectional" in text
    assert "nats" not in text


@pytest.mark.slow
def test_hostile_text_in_the_card(report: Report, effects: pd.DataFrame) -> None:
    """The reason why nothing changes is the only text of the card that is not ours."""
    html = ""
    for text in HOSTILE:
        if text:
            card = report_page(Report({"causal": effects.assign(no_op=text)}))
            html += card[card.index('<section class="verdict"') : card.index('id="findings"')]
    page = Page(html)
    assert not {t for t, _ in page.tags} & {"script", "style", "img", "iframe"}
    assert not page.acts()
    assert not [n for _, a in page.tags for n in a if n.startswith("on")]
    assert set(re.findall(r'href="([^"]*)"', html)) <= {"#causal"}


def test_models_of_an_index_are_described_alike(report: Report, effects: pd.DataFrame) -> None:
    """The same contrasts in the same order for every model, whatever its first finding is."""
    idle = effects["variant"] == "no_scaling"
    off = effects.assign(no_op=effects["no_op"].mask(idle, "its norms do not scale"))
    bare = effects.assign(delta_loss_low=np.nan, delta_loss_high=np.nan)
    models = {"a": effects, "b": off, "c": bare, "d": effects.head(0)}
    lines = {
        "a": "intact loss 4.30; scaling frozen +0.327 nats/token (95 % CI +0.278 to +0.371); projection removed "
        "-0.0010 nats/token (95 % CI -0.0020 to +0.0010, not significant)",
        "b": "intact loss 4.30; scaling frozen: not applicable (its norms do not scale); projection removed -0.0010 "
        "nats/token (95 % CI -0.0020 to +0.0010, not significant)",
        "c": "intact loss 4.30; scaling frozen +0.33 nats/token (not significant); projection removed -0.001 "
        "nats/token (not significant)",
        "d": "loss not measured",
    }
    entries = [IndexEntry(n, f"{n}.html", report.with_tables(causal=table)) for n, table in models.items()]
    page = Page(index_page(entries)).text
    for entry in entries:
        assert entry.report is not None
        assert in_one_line(entry.report) == lines[entry.name]
        assert f"{entry.name}: {lines[entry.name]}" in page
