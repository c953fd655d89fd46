"""What a report says: five questions in their order, each with the numbers of the tables, in at most 30 words."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd
import pytest

from ln_probe.analyses.probes import tables, wording
from ln_probe.analyses.probes.wording import NATS, QUESTIONS, findings, in_layers, loss_change
from ln_probe.analyses.text import counted, number, percent, shortened, signed, with_interval
from ln_probe.hooks.norm import SCALING_FROZEN
from ln_probe.hooks.norms import layers_in_words

EDIT = "Freezing scaling at every norm"


def row(sites: str, variant: str, change: float = 0.0, half: float = 0.01, **values: Any) -> dict[str, Any]:
    return {
        "sites": sites, "variant": variant, "family": "primary", "loss": 4.0 + change,
        "delta_loss": change, "delta_loss_low": change - half, "delta_loss_high": change + half,
        "p": 0.002 if abs(change) > half else math.nan if math.isnan(half) else 0.5,
        "equivalence_bound": abs(change) + 0.8 * half, "prompts_worse": 30, "n": 64,
    } | values  # fmt: skip


def report_tables(**rows: list[dict[str, Any]]) -> dict[str, pd.DataFrame]:
    return {table.name: table.frame(rows.get(table.name, [])) for table in tables.TABLES}


def by_head(*values: tuple[Any, ...], names: str = "layer head variant unselectable entropy_ratio n") -> Any:
    return [dict(zip(names.split(), each, strict=True)) for each in values]


KEYS = {"prompts": 2, "keys_per_prompt": 128, "d_head": 8, "random_unselectable": 0.114, "by_theorem": False}
WHOLE = report_tables(
    causal=[row("all", "no_scaling", 0.411, 0.04), row("all", "no_projection", 0.002, 0.001),
            row("attention", "no_scaling", 0.1), row("attention", "no_projection", 0.1)],
    causal_prompts=[
        {"prompt": i, "stratum": f"book {i % 2}", "sites": "all", "variant": "no_scaling", "loss": 4.0,
         "delta_loss": 0.1 * i, "shift": 0.0, "n": 1 + i} for i in range(4)
    ],
    head_effects=[
        {"layer": 1, "head": head, "variant": "no_scaling", "delta_loss": change, "delta_loss_low": 0.0,
         "delta_loss_high": 0.1, "p": p, "prompts_worse": 50, "n": 64}
        for head, change, p in ((0, 0.0073, 0.04), (6, 0.0079, 0.0016), (7, 0.02, 0.3), (8, 0.0005, 0.01))
    ],
    heads=by_head((0, 0, "intact", 0.25, 0.9, 100), (1, 1, "intact", 0.5, 0.7, 300),
                  (0, 0, "no_scaling", 0.5, 0.8, 100), (1, 1, "no_scaling", 0.5, 0.6, 300)),
    sinks=[
        {"prompt": 0, "position": 0, "token": "a", "kind": "first+outlier", "length_ratio": 20.0, "uniform": 0.1,
         "n": 9},
        {"prompt": 0, "position": 3, "token": " b", "kind": "longest+outlier", "length_ratio": 12.0, "uniform": 0.2,
         "n": 6},
        {"prompt": 1, "position": 0, "token": "a", "kind": "first", "length_ratio": 1.0, "uniform": 0.2, "n": 3},
    ],
    sink_heads=[
        {"layer": 0, "head": head, "sink_rate": rate, "first_attention": 0.3 + rate / 2,
         "first_attention_no_scaling": 0.2, "n": 2} for head, rate in ((0, 0.5), (1, 1.0))
    ],
)  # fmt: skip


def test_the_five_questions_in_their_order() -> None:
    found = findings(WHOLE, {"selectability": KEYS})
    assert [finding.question for finding in found] == ["loss"] * 3 + ["heads", "keys", "sinks", "uniform"]
    texts = [finding.text for finding in found]
    figures = [
        (EDIT, "raises", "0.411", "10 %", "+0.371 to +0.451", "p = 0.002", "book 0 +0.150", "book 1 +0.233"),
        (EDIT.replace("every norm", "the norms that attention reads"), "0.100 nats/token"),
        ("raises", "0.0020", "significant", "below 0.01"),
        ("3 of 4 heads", "64 prompts", "L1H6 +0.0079, L1H0 +0.0073, L1H8 +0.0005"),
        ("43.8 %", "50.0 %", "random keys: 11.4 %"),
        ("over 30 %", "1 of 2", "68 %", "12 %", "20 %", "80.0 % (L0H1)", "over 10 times", "20 times", "'·b'",
         "12 times"),
        ("80.0 %", "70.0 % with scaling frozen", "90.0 % (L0H0)"),
    ]  # fmt: skip
    for text, words in zip(texts, figures, strict=True):
        places = [text.find(word) for word in words]
        assert -1 not in places, (text, words)
        assert places == sorted(places), (text, words)
    for text in texts:
        sentences = re.split(r"(?<=[a-z)%])\. (?=[A-Z])", text)
        assert len(sentences) <= 2, text
        assert all(len(sentence.split()) <= 30 for sentence in sentences), text


def test_what_was_not_measured_is_named_once_for_each_question() -> None:
    found = findings(report_tables(), {})
    assert [finding.text for finding in found] == [f"Not measured: {what}." for what in QUESTIONS.values()]
    without = findings(report_tables(), {"model": {"norms": {}}})
    assert all("no normalization" in finding.text for finding in without[:2])
    unscaled = findings(report_tables(), {"head_effects": {"no_op": {"no_scaling": "none: it does not scale"}}})
    assert "changes nothing" in unscaled[1].text


def test_a_decrease_of_the_loss_comes_first() -> None:
    rows = [row("all", "no_scaling", 0.2), row("all", "no_projection", -0.4)]
    texts = [finding.text for finding in findings(report_tables(causal=rows), {})[:2]]
    assert texts[0].startswith("Removing projection")
    assert "0.400" in texts[0]
    assert texts[1].startswith(f"{EDIT} raises")
    no_op = {"causal": {"no_op": {"no_scaling": "none: it does not scale"}}}
    texts = [finding.text for finding in findings(report_tables(causal=rows), no_op)[:2]]
    assert [text.split()[0] for text in texts] == ["Removing", "Freezing"]


@pytest.mark.parametrize(("values", "unit", "text"), [
    ({"change": 0.004, "half": 0.001}, NATS,
     "by 0.0040 nats/token (95 % CI +0.0030 to +0.0050; Holm-adjusted p = 0.002), which is significant but "
     "below 0.01 nats/token."),
    ({"change": 0.00996, "half": 0.001}, NATS, "raises the loss by 0.0100 nats/token, 0.25 % of the intact"),
    ({"change": 0.004, "half": 0.001}, "units of my_loss", "p = 0.002)."),
    ({"change": 0.02, "half": 0.03}, NATS, "does not significantly change the loss: +0.020 nats/token (95 % CI -0.010 "
     "to +0.050; Holm-adjusted p = 0.5)."),
    ({"change": 0.001, "half": 0.003}, NATS, "equivalent to 0 within ±0.0034."),
    ({"change": 0.001, "half": 0.003}, "units of my_loss", "p = 0.5)."),
    ({"change": 0.4, "half": math.nan, "n": 6}, NATS, "changes the loss by +0.4 nats/token: not tested (6 prompts)."),
    ({"change": 21.5, "half": 1.0, "loss": 22.7}, NATS, "raises the loss by 21.5 nats/token (95 % CI"),  # above 100 %
    ({"change": -0.0002, "half": 0.02}, NATS, "+0.000 nats/token"),  # no -0
])  # fmt: skip
def test_a_change_of_the_loss_in_words(values: dict[str, Any], unit: str, text: str) -> None:
    assert text in loss_change(row("all", "no_scaling", **values), unit, EDIT)


@pytest.mark.parametrize(("causal", "provenance", "text"), [
    ([row("all", "no_scaling", 0.2)], {"causal": {"no_op": {"no_projection": "rmsnorm has no projection"}}},
     "Removing projection changes nothing in this model: rmsnorm has no projection."),
    ([row("all", "no_scaling", math.nan), row("attention", "no_scaling", 0.2)], {},
     "Freezing scaling at the norms that attention reads raises the loss by 0.200 nats/token"),  # logits overflow
    ([row("all", "no_scaling", 0.2)], {"arguments": {"layers": [2, 0]}}, f"{EDIT} in layers 0, 2 raises"),
    ([row("all", "no_scaling", 0.2)], {"loss": {"unit": "units of f"}}, "by 0.200 units of f"),
])  # fmt: skip
def test_what_else_is_said_of_the_loss(causal: list[dict[str, Any]], provenance: dict[str, Any], text: str) -> None:
    assert any(text in finding.text for finding in findings(report_tables(causal=causal), provenance))


@pytest.mark.parametrize(("change", "p", "unit", "text"), [
    (0.4, math.nan, NATS, "head L0H0 alone, the largest of 1 head, changes the loss by +0.4 nats/token: not tested"),
    *((sign, 0.05, NATS, f"for none of 1 head (6 prompts); largest: L0H0 {sign:+} ") for sign in (1, -1)),
    (0.0005, 0.01, "units of f", "raises the loss for 1 of 1 head (6 prompts); largest: L0H0"),
    (-0.4, 0.01, NATS, "significantly raises the loss for none of 1 head and lowers it for 1 (6 prompts)"),
])  # fmt: skip
def test_heads_in_words(change: float, p: float, unit: str, text: str) -> None:
    def said(*changes: float) -> str:
        same = {"layer": 0, "variant": "no_scaling", "p": p, "n": 6}
        effects = [same | {"head": head, "delta_loss": each} for head, each in enumerate(changes)]
        found = findings(report_tables(head_effects=effects), {"loss": {"unit": unit}})
        return next(finding.text for finding in found if finding.question == "heads")

    assert text in said(change)
    assert "the 1 head run (of 3; " in said(change, math.nan, math.nan) or math.isnan(p)


@pytest.mark.parametrize(("strata", "count"), [("ba", "two"), ("cab", "three"), ("dbca", "4"), ("abcdefg", "")])
def test_means_of_a_few_books(strata: str, count: str) -> None:
    """In the order of the prompts, over their tokens."""
    prompts = [
        {"prompt": i, "stratum": book, "sites": "all", "variant": "no_scaling", "delta_loss": 0.1 * i, "n": 1 + i % 5}
        for i, book in enumerate(2 * strata)
    ]
    elsewhere = [row | {"sites": "mlp"} for row in prompts] + [row | {"variant": "no_projection"} for row in prompts]
    table = report_tables(causal_prompts=prompts + elsewhere)["causal_prompts"]
    means = wording.strata_means(table, "all", SCALING_FROZEN)
    expected = {}
    for book in strata if count else "":
        rows = [row for row in prompts if row["stratum"] == book]
        expected[book] = sum(row["delta_loss"] * row["n"] for row in rows) / sum(row["n"] for row in rows)
    assert list(means.items()) == [(book, pytest.approx(mean)) for book, mean in expected.items()]
    assert (f"these {count} books" in wording.strata_sentence(means)) == bool(count)
    assert wording.strata_means(table[table["prompt"] < len(strata)], "all", SCALING_FROZEN) == {}, "a prompt a book"


def test_layers_in_words() -> None:
    assert in_layers({}) == in_layers({"arguments": {"layers": None}}) == ""
    assert in_layers({"arguments": {"layers": [2]}}) == " in layer 2"
    assert [layers_in_words(range(n)) for n in (1, 2, 9)] == ["layer 0", "layers 0, 1", "layers 0 … 8 (9 of them)"]


@pytest.mark.parametrize(("numbers", "texts"), [
    ((0.28, 0.256, 0.304), ("+0.280", "+0.256 to +0.304")),
    ((-40.0, -90.0, 10.0), ("-40", "-90 to +10")),
    ((1.2e-5, 0.0, 2e-5), ("+0.000012", "+0.000000 to +0.000020")),  # six decimals, and not one more
    ((1.2e-6, 0.0, 2e-6), ("+1.2e-06", "+0 to +2e-06")),
    ((0.5, math.nan, 1.0), ("+0.5", "")), ((5.0, math.nan, 6.0), ("+5", "")), ((12.0, 2.0, 52.0), ("+12", "+2 to +52")),
    ((-0.0001, -0.1, 0.1), ("+0.00", "-0.10 to +0.10")), ((2e-9, 1e-9, 3e-9), ("+2e-09", "+1e-09 to +3e-09")),
    ((0.5, 0.5, 0.5), ("+0.5", "+0.5 to +0.5")),
])  # fmt: skip
def test_a_change_and_its_interval_have_equal_decimals(numbers: tuple[float, ...], texts: tuple[str, str]) -> None:
    assert with_interval(*numbers) == texts


def test_numbers_as_text() -> None:
    assert [percent(v) for v in (0.0, 9e-6, 2e-5, 0.0123, 0.0999, 0.1, 0.456)] == [
        "0 %", "less than 0.001 %", "0.002 %", "1.2 %", "10 %", "10 %", "46 %"
    ]  # fmt: skip
    assert [signed(v) for v in (0.333, -99.4, 99.6, -190.4)] == ["+0.33", "-99", "+100", "-190"]
    assert [counted(n, "head") for n in (0, 1, 4)] == ["0 heads", "1 head", "4 heads"]
    assert [shortened("a" * n)[80:] for n in (80, 81)] == ["", "… (81 characters)"]
    assert number(1234.5) == "1.23e+03"
