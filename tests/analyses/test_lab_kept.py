"""Tables that are committed are what experiments make of the committed values of every seed; figures in the text."""

from __future__ import annotations

import importlib
import json
import re
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ln_probe.analyses.lab.results import PUBLISHED_FOLDER, SUMMARY_FILE, folder, interval, kept, table_at

PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"
PRIMARY = PUBLISHED_FOLDER / "primary_contrasts.csv"

# Of an experiment: the module and function that evaluate it, its committed values, whether it takes the settings.
EVALUATED = {
    "majority_in_space": ("majority.majority_in_space.findings", ("coordinates", "scores"), True),
    "random_keys": ("majority.random_keys.findings", ("maps",), False),
    "language_model": ("language_model.published_language_model.findings", ("seeds", "curves"), True),
    "language_model_full": ("language_model.published_language_model.findings", ("seeds", "curves"), True),
    "encoder": ("language_model.encoder.findings", ("seeds", "curves"), True),
    "encoder_passages": ("language_model.encoder_passages.findings", ("values",), True),
    "language_model_bundled": ("language_model.bundled_seeds.findings", ("seeds",), False),
    "fresh_seeds": ("language_model.fresh_seeds.findings", ("seeds",), True),
    "fresh_seeds_long": ("language_model.fresh_seeds.findings", ("seeds",), True),
    "depth": ("crasp.depth.findings", ("exact_match",), False),
    "depth_deep": ("crasp.depth.deep_findings", ("exact_match",), False),
    "approximation": ("approximation.approximation.findings", ("errors",), False),
    "approximation_text": ("approximation.approximation_text.findings", ("losses",), True),
    "longer_inputs": ("approximation.longer_inputs.findings", ("errors", "solved"), False),
    "adaptive_memory": ("approximation.adaptive_memory.findings", ("errors",), False),
    "compiler": ("crasp.compiler.findings", ("agreement", "operations", "lengths"), False),
    "counting": ("counting.counting.findings", ("values",), False),
    "counting_traces": (
        "counting.counting_traces.findings",
        ("networks", "dimensions", "traces", "readings", "moves"),
        False,
    ),
    "counters": ("counting.counters.findings", ("values",), False),
    "remove_norm": ("language_model.remove_norm.findings", ("seeds", "curves"), True),
    "saturated_states": ("counting.saturated_states.findings", ("values", "growth"), False),
    "rational_recurrence": ("counting.rational_recurrence.findings", ("values", "errors"), False),
    "sentences": ("language_model.sentences.findings", ("seeds",), True),
    "anbk": ("counting.anbk.findings", ("values",), False),
}


def test_all_committed_results_are_checked() -> None:
    assert {*EVALUATED, "majority"} == {*kept()}


@pytest.mark.parametrize("experiment", EVALUATED)
def test_tables_are_made_of_the_values_of_every_seed(experiment: str) -> None:
    path, values, takes_settings = EVALUATED[experiment]
    module, function = path.rsplit(".", 1)
    where = folder(experiment)
    settings = [json.loads((where / "results.json").read_text())["settings"]] if takes_settings else []
    evaluate = getattr(importlib.import_module(f"ln_probe.analyses.lab.{module}"), function)
    results = evaluate(*(table_at(where, name) for name in values), *settings)
    for name, table in {"summary": results.summary, **results.tables}.items():
        pd.testing.assert_frame_equal(
            table_at(where, name), table.reset_index(drop=True), check_dtype=False, rtol=1e-5, atol=1e-9
        )
    assert json.loads((where / "results.json").read_text())["tables"][0] == SUMMARY_FILE


_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
# "93 [90, 95]", with its unit and Holm's p where they follow
FIGURE = re.compile(
    rf"({_NUMBER})\s\[({_NUMBER}),\s({_NUMBER})\]°?(?:\s(?:points|nats))?(?:\s\((?:\d+ seeds,\s)?Holm\s({_NUMBER}))?"
)
OF_ROWS = (("mean", "ci_low", "ci_high"), ("factor", "low", "high"), ("c", "c_low", "c_high"))


def committed_intervals() -> np.ndarray:
    """Center, both ends and Holm's p of every row of a committed table that has an interval."""
    paths = sorted(p for p in PUBLISHED_FOLDER.glob("*/*") if p.suffix in (".csv", ".parquet"))
    rows = []
    for table in (table_at(path.parent, path.stem) for path in paths):
        for columns in OF_ROWS:
            if {*columns} <= {*table.columns}:
                rows.append(table.reindex(columns=[*columns, "p_holm"]).to_numpy(float))
    networks = table_at(folder("counting_traces"), "networks")
    for _, part in networks.groupby(["task", "model", "norm", "norm_site", "phase"]):
        center, low, high = interval(part["exact_to"].to_numpy(float))
        rows.append(np.array([[center, max(low, 0), min(high, part["tested_n"].iloc[0]), np.nan]]))
    rows.append(pd.read_csv(PRIMARY)[["estimate", "low", "high", "p_holm"]].to_numpy(float))
    return np.concatenate(rows)


def is_of_a_row(rows: np.ndarray, figures: tuple[str, ...]) -> bool:
    """Whether a row, as it is or in per cent, rounds to center, ends and (where given) Holm's p."""
    for scale in (1, 100):
        same = np.ones(len(rows), dtype=bool)
        for column, figure in enumerate(figures):
            half = 0.501 * float(Decimal(1).scaleb(int(Decimal(figure).as_tuple().exponent)))
            same &= np.abs(rows[:, column] * (1 if column == 3 else scale) - float(figure)) <= half + 1e-12
        if same.any():
            return True
    return False


def test_figures_in_the_text_of_the_page_are_those_of_committed_tables() -> None:
    rows = committed_intervals()
    figures = [tuple(f for f in m.groups() if f is not None) for m in FIGURE.finditer(PAGE.read_text())]
    assert len(figures) > 40
    assert [" ".join(f) for f in figures if not is_of_a_row(rows, f)] == []
