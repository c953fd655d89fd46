"""Declarations of tables: what they refuse, how parts are joined, and that the column reference is theirs."""

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
from ln_probe.analyses.probes.columns import BY_HEAD
from ln_probe.analyses.probes.registry import DEFAULT, chosen, entries
from ln_probe.analyses.schema import Column, Part, Table, TableError, joined, reference

EVERY = (*columns.BUILT_IN, *columns.ON_REQUEST, columns.TOKENS, columns.SUMMARY, BY_HEAD)
PAIRS = Table(
    "pairs",
    "Pairs",
    "A row per pair.",
    ("a", "b"),
    (
        Column("a", "int", "one"),
        Column("b", "text", "other"),
        Column("x", "float", "first"),
        Column("n", "int", "count"),
        Column("why", "text", "reason"),
    ),
)


@pytest.mark.parametrize("table", EVERY, ids=lambda t: t.name)
def test_every_column_is_described(table: Table) -> None:
    said = table.describe()
    assert list(said.columns) == ["column", "dtype", "unit", "meaning"]
    assert (said["meaning"].str.len() > 3).all()
    assert said["column"].is_unique
    assert list(table.empty().columns) == table.names
    assert table.check(table.empty()).empty
    assert Table.of_plain(json.loads(json.dumps(table.plain()))) == table


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
        assert report.describe(table.name).equals(table.describe())
    with pytest.raises(ValueError, match="this report has no table 'head': there are layernorms, heads, keys, causal"):
        report.describe("head")


def test_every_column_is_filled_by_a_probe() -> None:
    """Two probes share `heads`; together they fill all of it. The first pass fills `scale_sums`, whatever was asked."""
    filled: dict[str, set[str]] = {}
    for probe in chosen(DEFAULT):
        for declared in probe.tables:
            if isinstance(declared, Part):
                filled.setdefault(declared.table.name, set()).update(declared.columns)
            else:
                filled.setdefault(declared.name, set()).update(declared.names)
    assert filled == {t.name: set(t.names) for t in columns.BUILT_IN if t is not columns.SCALE_SUMS}


def test_the_registry_says_what_the_probes_say() -> None:
    """It does without loading them."""
    known = entries()
    assert [(p.name, p.summary) for p in chosen(DEFAULT)] == [(n, known[n].summary) for n in DEFAULT]


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Column("x", "number", "it"), "column 'x': kind must be one of int, float, text, bool, got 'number'"),  # type: ignore[arg-type]
    (lambda: Column("x", "int", ""), "column 'x' needs a name and a meaning"),
    (lambda: Table("a/b", "t", "a", (), ()), "a table's name must be letters, digits and _, got 'a/b'"),
    (lambda: Table("t", "t", "a", (), (PAIRS.columns[0],) * 2), "table 't' declares the column 'a' twice"),
    (lambda: Table("t", "t", "a", ("z",), PAIRS.columns), "table 't': 'z' of its row key is not among its columns"),
    (lambda: Part(PAIRS, ("a", "x")), "a part of table 'pairs' cannot have or leave out 'b'"),
    (lambda: Part(PAIRS, ("a", "b", "z")), "a part of table 'pairs' cannot have or leave out 'z'"),
    (lambda: Table.of_plain({"name": "t"}), "this describes no table"),
])  # fmt: skip
def test_bad_declarations(make: Callable[[], object], said: str) -> None:
    with pytest.raises(TableError, match=said):
        make()


def test_parts_are_joined_by_their_rows() -> None:
    one = pd.DataFrame({"a": [2, 1, 1], "b": ["x", "x", "y"], "n": [5, 6, 7]})
    two = pd.DataFrame({"a": [1, 2], "b": ["y", "x"], "x": [0.5, 0.25], "why": ["k", "l"]})
    made = PAIRS.check(joined(PAIRS, [one, two]))
    assert made.to_dict("list") | {"x": 0} == {
        "a": [2, 1, 1], "b": ["x", "x", "y"], "x": 0, "n": [5, 6, 7], "why": ["l", "", "k"],
    }  # fmt: skip
    np.testing.assert_array_equal(made["x"], [0.25, np.nan, 0.5])
    assert made["n"].dtype == np.int64, "whole numbers stay whole where none is missing"
    other = joined(PAIRS, [two, one])
    assert list(zip(other["a"], other["b"], strict=True)) == [(1, "y"), (2, "x"), (1, "x")]
    assert joined(PAIRS, []).equals(PAIRS.empty())
    np.testing.assert_array_equal(joined(PAIRS, [one, two.head(0).astype(object)])["n"], one["n"])
    with pytest.raises(TableError, match=r"two probes fill pairs\.n and do not agree"):
        joined(PAIRS, [one, one.assign(n=[5, 6, 8])])
    with pytest.raises(TableError, match="a part of table 'pairs' has two rows about the same thing"):
        joined(PAIRS, [pd.concat([one, one])])
