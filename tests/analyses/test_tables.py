"""Declarations of tables: what they refuse, how frames are completed, and that the column reference is theirs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge

import ln_probe
from ln_probe.analyses.probes import columns
from ln_probe.analyses.probes.registry import BUILT_IN, DEFAULT, chosen
from ln_probe.analyses.schema import Column, Table, TableError, declare, reference

EVERY = (*columns.BUILT_IN, columns.TOKENS, columns.SUMMARY, columns.PAIRED, columns.BY_HEAD)
PAIRS = declare(
    "pairs",
    "Pairs",
    "A row per pair.",
    ("a", "b"),
    """
    a (int): one
    b (text): other
    x (float, nats): first,
        on two lines
    n (int): count
    why (text, hidden): reason
    """,
)


@pytest.mark.parametrize("table", EVERY, ids=lambda t: t.name)
def test_every_column_is_described(table: Table) -> None:
    about = table.describe()
    assert list(about.columns) == ["column", "dtype", "unit", "meaning"]
    assert (about["meaning"].str.len() > 3).all()
    assert about["column"].is_unique
    assert list(table.empty().columns) == table.names
    assert table.check(table.empty()).empty
    assert Table.of_plain(json.loads(json.dumps(table.plain()))) == table


def test_columns_declared_as_text() -> None:
    assert PAIRS.column("x") == Column("x", "float", "first, on two lines", "nats")
    assert PAIRS.column("why") == Column("why", "text", "reason", shown=False)


def test_the_column_reference_is_made_of_the_declarations() -> None:
    file = Path(__file__).parents[2] / "docs" / "columns.md"
    assert file.read_text() == columns.document(), "run: python -m ln_probe.analyses.probes.columns > docs/columns.md"
    assert reference([PAIRS]).splitlines()[4] == "Rows are identified by `a`, `b`."


def test_every_table_of_a_real_report_is_as_declared() -> None:
    model = make_bridge("gpt2")
    with torch.no_grad():  # an outlier token and an outlier dimension: otherwise there are none
        model.original_model.transformer.wte.weight[3] *= 1000
        model.original_model.transformer.wte.weight[:, 5] *= 1000
    report = ln_probe.analyze(model, torch.arange(1, 17)[None], progress=False)
    assert not report.failures
    for table in columns.BUILT_IN:
        assert len(report.tables[table.name])
        assert table.check(report.tables[table.name]) is report.tables[table.name]


def test_every_table_has_a_probe() -> None:
    """The first pass fills `scale_sums`, whatever was asked."""
    declared = {table.name for probe in chosen(DEFAULT) for table in probe.tables}
    assert declared == {t.name for t in columns.BUILT_IN if t is not columns.SCALE_SUMS}


def test_the_registry_agrees_with_the_probes() -> None:
    assert [(p.name, p.summary) for p in chosen(DEFAULT)] == [(n, s) for n, (_, _, s) in BUILT_IN.items()]


@pytest.mark.parametrize("make", [
    lambda: Column("x", "number", "it"),  # type: ignore[arg-type]
    lambda: Column("x", "int", ""),
    lambda: columns.columns("x: no kind"),
    lambda: Table("a/b", "t", "a", (), ()),
    lambda: Table("t", "t", "a", (), (PAIRS.columns[0],) * 2),
    lambda: Table("t", "t", "a", ("z",), PAIRS.columns),
    lambda: Table.of_plain({"name": "t"}),
    lambda: PAIRS.frame([{"a": 1, "z": 2}]),
    lambda: PAIRS.complete(pd.DataFrame({"a": [1]})),
    lambda: PAIRS.complete(pd.DataFrame({"a": [1], "b": ["x"], "z": [1]})),
    lambda: PAIRS.check(PAIRS.frame([{"a": 1, "b": "x", "x": 1.0, "n": 1, "why": ""}] * 2)),
    lambda: PAIRS.check(pd.DataFrame({"a": [1]})),
    lambda: PAIRS.check([1]),
])  # fmt: skip
def test_bad_declarations_and_frames(make: Callable[[], object]) -> None:
    with pytest.raises(TableError):
        make()


def test_frames_are_completed_row_by_row() -> None:
    one = pd.DataFrame({"a": [2, 1, 1], "b": ["x", "x", "y"], "n": [5, 6, 7]})
    two = pd.DataFrame({"a": [1, 2], "b": ["y", "x"], "x": [0.5, 0.25], "why": ["k", "l"]})
    whole = PAIRS.check(PAIRS.complete(one, two))
    assert whole.to_dict("list") | {"x": 0} == {
        "a": [2, 1, 1], "b": ["x", "x", "y"], "x": 0, "n": [5, 6, 7], "why": ["l", "", "k"],
    }  # fmt: skip
    np.testing.assert_array_equal(whole["x"], [0.25, np.nan, 0.5])
    assert whole["n"].dtype == np.int64, "whole numbers stay whole where none is missing"
    other = PAIRS.complete(two, one)
    assert list(zip(other["a"], other["b"], strict=True)) == [(1, "y"), (2, "x"), (1, "x")]
    assert PAIRS.complete().equals(PAIRS.empty())
    np.testing.assert_array_equal(PAIRS.complete(one, two.head(0).astype(object))["n"], one["n"])
