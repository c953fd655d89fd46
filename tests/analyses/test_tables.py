"""Tables: what declarations refuse, how frames are merged, who reads each column, and the column reference."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ln_probe.analyses.probes import BUILT_IN, DEFAULT, tables
from ln_probe.analyses.probes.base import chosen
from ln_probe.analyses.schema import Table, TableError

TOP = Path(__file__).parents[2]
EVERY = (*tables.TABLES, tables.SUMMARY)
PAIRS = Table(
    "pairs",
    "Pairs",
    "A row per pair.",
    ("a", "b"),
    {"a": ("index", "one"), "b": ("text", "other"), "x": ("nats", "first"), "n": ("count", "count")},
)

# Where the value of each column is read: a finding (wording), a picture (figures, attention), a view or comparison, or
# a documented recipe.
WORDING = "analyses/probes/wording.py"
FIGURES, ATTENTION = (f"ln_probe/page/{name}.py" for name in ("figures", "attention"))
REPORT, COMPARE = (f"ln_probe/{name}.py" for name in ("report", "comparison"))
CONCEPTS, HOWTO, HEADS, STATISTICS = (f"docs/{name}.md" for name in ("concepts", "howto", "heads", "statistics"))
READERS = {
    "layernorms": {
        "site": FIGURES, "layer": FIGURES, "reads": FIGURES, "projected_share": FIGURES, "angle_to_ones_deg": FIGURES,
        "input_norm": FIGURES, "sigma_mean": FIGURES, "sigma_cv": FIGURES,
        "reconstruction_error": "examples/your_own_checkpoint.py", "n": CONCEPTS,
    },
    "heads": {
        "layer": FIGURES, "head": WORDING, "variant": WORDING, "unselectable": WORDING,
        "unreachable": HOWTO, "entropy_ratio": WORDING, "margin_median": REPORT, "attainable_median": REPORT,
        "pattern_max_median": REPORT,
        "uniform_angle_deg": "docs/checkpoints.md", "n": WORDING,
    },
    "keys": {
        "layer": HOWTO, "head": HOWTO, "variant": REPORT, "prompt": REPORT, "position": REPORT, "token": HOWTO,
        "verdict": HOWTO, "margin_lower": CONCEPTS, "margin_upper": CONCEPTS, "reachable": HOWTO,
        "attainable": CONCEPTS, "attainable_upper": HOWTO, "pattern_max": CONCEPTS, "n": HOWTO,
    },
    "causal": {
        "sites": WORDING, "variant": WORDING, "family": FIGURES, "loss": WORDING, "delta_loss": WORDING,
        "delta_loss_low": WORDING, "delta_loss_high": WORDING, "p": WORDING, "equivalence_bound": WORDING,
        "delta_loss_uniform": STATISTICS, "delta_loss_optimal": FIGURES, "delta_loss_optimal_low": STATISTICS,
        "delta_loss_optimal_high": STATISTICS, "estimate": STATISTICS, "prompts_worse": STATISTICS, "n": WORDING,
    },
    "causal_prompts": {
        "prompt": COMPARE, "stratum": WORDING, "sites": WORDING, "variant": WORDING, "loss": COMPARE,
        "delta_loss": WORDING, "shift": COMPARE, "n": WORDING,
    },
    "head_effects": {
        "layer": WORDING, "head": WORDING, "variant": WORDING, "delta_loss": WORDING, "delta_loss_low": ATTENTION,
        "delta_loss_high": ATTENTION, "p": WORDING, "prompts_worse": STATISTICS, "estimate": REPORT, "n": WORDING,
    },
    "sinks": {
        "prompt": WORDING, "position": WORDING, "token": WORDING, "kind": WORDING, "site": HEADS,
        "length_ratio": WORDING, "received": HEADS, "uniform": WORDING, "received_no_scaling": HEADS,
        "dimensions": HEADS, "n": WORDING,
    },
    "sink_heads": {
        "layer": REPORT, "head": REPORT, "sink_rate": WORDING, "first_attention": WORDING,
        "first_attention_no_scaling": WORDING, "n": HEADS,
    },
}  # fmt: skip


def test_a_report_has_few_columns_and_somebody_reads_each() -> None:
    """The reader is not proved to read the column of this table; that it names the column is."""
    assert {table.name: table.names for table in tables.TABLES} == {name: list(of) for name, of in READERS.items()}
    assert len(tables.TABLES) <= 8
    assert sum(len(table.columns) for table in tables.TABLES) <= 90
    for name, readers in READERS.items():
        for column, reader in readers.items():
            text = (TOP / reader).read_text()
            assert re.search(rf"\b{column}\b", text), f"{name}.{column} is not read in {reader}"


@pytest.mark.parametrize("table", EVERY, ids=lambda t: t.name)
def test_every_column_has_a_unit_and_a_meaning(table: Table) -> None:
    assert all(unit and len(meaning) > 3 for unit, meaning in table.columns.values())
    assert table.check(table.empty()).empty
    assert Table.of_plain(json.loads(json.dumps(asdict(table)))) == table


def test_the_column_reference_is_made_of_the_declarations() -> None:
    text = (TOP / "docs" / "columns.md").read_text()
    spec = importlib.util.spec_from_file_location("bench_columns", TOP / "bench" / "columns.py")
    columns = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(columns)
    assert text == columns.document(), "run: python bench/columns.py"
    assert len(text.splitlines()) <= 200
    assert "Rows are identified by `a`, `b`." in columns.document([PAIRS])


def test_built_in_probes_fill_the_tables_and_are_what_the_list_says() -> None:
    filled = {table.name for probe in chosen(DEFAULT) for table in probe.tables}
    assert filled == {table.name for table in tables.TABLES}
    assert [(type(p).__name__, p.summary) for p in chosen(DEFAULT)] == list(BUILT_IN.values())


@pytest.mark.parametrize("make", [
    lambda: Table("a/b", "t", "a", (), {}),
    lambda: Table("t", "t", "a", (), {"x": ("nats", "")}),
    lambda: PAIRS.frame([{"a": 1, "z": 2}]),
    lambda: PAIRS.merged([pd.DataFrame({"a": [1], "b": ["x"], "z": [1]})]),
    lambda: PAIRS.check(PAIRS.frame([{"a": 1, "b": "x", "x": 1.0, "n": 1}] * 2)),
    lambda: PAIRS.check(PAIRS.frame([{"a": 1, "b": "x", "x": "y", "n": 1}])),
    lambda: PAIRS.check(pd.DataFrame({"a": [1]})),
])  # fmt: skip
def test_bad_declarations_and_frames(make: Callable[[], object]) -> None:
    with pytest.raises(TableError):
        make()


def test_frames_are_merged_by_their_keys() -> None:
    one = pd.DataFrame({"a": [2, 1, 1], "b": ["x", "x", "y"], "n": [5, 6, 7]})
    two = pd.DataFrame({"a": [1, 2, 3], "b": ["y", "x", "z"], "x": [0.5, 0.25, 0.125], "n": [7, 5, 1]})
    whole = PAIRS.check(PAIRS.merged([one, two]))
    assert whole[["a", "b", "n"]].to_numpy().tolist() == [[2, "x", 5], [1, "x", 6], [1, "y", 7], [3, "z", 1]]
    np.testing.assert_array_equal(whole["x"], [0.25, np.nan, 0.5, 0.125])
    assert PAIRS.merged([]).equals(PAIRS.empty())
    assert PAIRS.merged([two.head(0), one])["n"].tolist() == [5, 6, 7]
