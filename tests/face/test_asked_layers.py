"""An analysis of some layers or heads: what is said of it says so, on page, card and index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
import pytest

import ln_probe
from ln_probe.analyses.probes import sinks
from ln_probe.analyses.probes.base import among_heads, in_layers
from ln_probe.page.index import IndexEntry, forest, index_page, losses
from ln_probe.page.page import report_page
from ln_probe.page.verdict import verdict
from ln_probe.report import Report
from ln_probe.settings import whole_numbers


def test_layers_and_heads_in_words() -> None:
    assert in_layers({}) == in_layers({"arguments": {"layers": None}}) == among_heads({}) == ""
    assert in_layers({"arguments": {"layers": [2]}}) == " in layer 2"
    assert in_layers({"arguments": {"layers": [3, 1, 1]}}) == " in layers 1, 3"
    assert among_heads({"arguments": {"heads": [4]}}) == " (head 4 alone)"
    assert among_heads({"arguments": {"heads": [1, 0]}}) == " (heads 0, 1 alone)"


@pytest.fixture(scope="module")
def part(make_bridge: Callable[..., Any], causal: pd.DataFrame) -> Report:
    made = ln_probe.analyze(make_bridge("gpt2"), [list(range(1, 30))] * 2, layers=[1], heads=[0, 2], progress=False)
    return made.with_tables(causal=causal)


@pytest.mark.slow
def test_every_norm_is_every_norm_of_the_layers_asked_for(part: Report, report: Report, causal: pd.DataFrame) -> None:
    whole = report.with_tables(causal=causal)
    for page, found, there in ((report_page(part), part, True), (report_page(whole), whole, False)):
        said = [f for f in found.findings() if "at every norm" in f]
        assert said
        assert all(("in layer 1" in f) == there for f in said)
        card = verdict(found)
        assert card is not None
        assert all(("in layer 1" in text) == there for text in (*card.sentences[:1], *(b.what for b in card.bars)))
        assert card.sentences[0] in page
    assert "Freezing the scaling of every norm in layer 1" in report_page(part)


def test_an_index_says_which_norms_its_marks_are_of(part: Report, report: Report, causal: pd.DataFrame) -> None:
    rows = losses(["a"], [part])
    labels = [t.get_text() for t in forest(["a"], rows, where=" in layer 1").legends[0].get_texts()]
    assert labels == ["at every norm in layer 1", "at attention alone in layer 1"]
    one, both = (
        index_page([IndexEntry("a", report=part), IndexEntry("b", report=other)])
        for other in (part, report.with_tables(causal=causal))
    )
    assert "at every norm in layer 1" in one
    assert "at every norm of the layers that each was asked for" in both


def test_sinks_are_those_of_the_layers_and_heads_asked_for() -> None:
    table = pd.DataFrame(
        {
            "prompt": [0], "position": [0], "token": ["a"], "sink": [True], "outlier": [False], "sink_layer": [2.0],
            "sink_rate": [0.35], "received": [0.28], "uniform": [0.05], "length_ratio": [1.5],
            "received_no_scaling": [float("nan")], "received_there": [float("nan")],
        }
    )  # fmt: skip
    said = sinks._sentences(table, pd.DataFrame(), 64, seen=True, where=(" in layers 1, 2", " (heads 0, 1 alone)"))
    assert said[0].startswith(
        "Position 0: in 1 prompt an attention sink (in layer 2 35 % of heads and queries (heads 0, 1 alone) give it "
        "over 0.3; over layers 1, 2 it gets 28 %, uniform attention would give 5 %)"
    )
    assert "over all layers it gets 28 %" in sinks._sentences(table, pd.DataFrame(), 64, seen=True)[0]
    none = sinks._sentences(pd.DataFrame(), pd.DataFrame(), 64, seen=True, where=(" in layer 2", ""))
    assert none == ["Attention has no sink here in layer 2, and no token is an outlier at any norm."]


@pytest.mark.parametrize(
    ("given", "told"),
    [(1, "1"), ("0", "'0'"), ([0.5], "[0.5]"), (["0"], "['0']")],
)
def test_what_is_no_list_of_layers(given: Any, told: str) -> None:
    with pytest.raises(TypeError) as error:
        whole_numbers(given, "layers")
    assert str(error.value) == f"layers must be a list of whole numbers, such as [0, 1], got {told}"
    assert whole_numbers(range(2), "layers") == (0, 1)
