"""Tables that are committed are what experiments make of the committed values of every seed; figures in the text."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from ln_probe.analyses.lab.approximation import approximation, text_models
from ln_probe.analyses.lab.counting import counters, counting, rational_recurrence, saturated_states, traces
from ln_probe.analyses.lab.crasp import compiler, depth
from ln_probe.analyses.lab.language_model import encoder, published, remove_norm, two_by_two
from ln_probe.analyses.lab.majority import majority, random_keys
from ln_probe.analyses.lab.results import interval

PUBLISHED_FOLDER = Path(__file__).parents[2] / "analyses" / "lab" / "published"
PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"

# What evaluates an experiment, and its committed values; steps and sizes where they are asked for.
EVALUATED: dict[str, tuple[Callable[..., dict[str, pd.DataFrame]], tuple[str, ...]]] = {
    "majority": (majority.analyse, ("curves",)),
    "random_keys": (random_keys.analyse, ("maps",)),
    "language_model": (partial(published.analyse, steps=1500, d_vocab=1024), ("seeds", "curves")),
    "language_model_full": (partial(published.analyse, steps=3000, d_vocab=50257), ("seeds", "curves")),
    "encoder": (encoder.analyse, ("seeds", "curves")),
    "language_model_bundled": (two_by_two.analyse, ("seeds",)),
    "fresh_seeds": (two_by_two.analyse_registered, ("seeds",)),
    "fresh_seeds_long": (two_by_two.analyse_registered, ("seeds",)),
    "remove_norm": (remove_norm.analyse, ("seeds", "curves")),
    "depth": (depth.analyse, ("exact_match",)),
    "depth_deep": (depth.analyse_deep, ("exact_match",)),
    "compiler": (compiler.analyse, ("agreement", "operations")),
    "approximation": (approximation.analyse, ("errors",)),
    "approximation_text": (text_models.analyse, ("losses",)),
    "longer_inputs": (approximation.analyse_longer, ("errors", "solved")),
    "adaptive_memory": (approximation.analyse, ("errors",)),
    "counting": (counting.analyse, ("values",)),
    "anbk": (counting.analyse_anbk, ("values",)),
    "counting_traces": (traces.analyse, ("networks", "traces")),
    "counters": (counters.analyse, ("values",)),
    "saturated_states": (saturated_states.analyse, ("values", "growth")),
    "rational_recurrence": (rational_recurrence.analyse, ("values", "errors")),
}


def table_at(where: Path, name: str) -> pd.DataFrame:
    """A committed table, whichever way it was written."""
    file = where / f"{name}.parquet"
    return pd.read_parquet(file) if file.exists() else pd.read_csv(file.with_suffix(".csv"), dtype={"divisor": str})


@pytest.mark.parametrize("experiment", EVALUATED)
def test_tables_are_made_of_the_values_of_every_seed(experiment: str) -> None:
    where = folder(experiment)
    analyse, names = EVALUATED[experiment]
    tables = analyse(*(table_at(where, name) for name in names))
    committed = {path.stem for path in where.iterdir() if path.suffix in (".csv", ".parquet")}
    assert {"summary"} <= committed <= {*tables}
    for name, table in tables.items():
        if name in committed or len(table):  # empty: of models that an experiment does not have
            kept, made = table_at(where, name), table.reset_index(drop=True)
            # A nonlinear least-squares optimum is searched for anew, and its steps depend on how BLAS rounds.
            searched = [column for column in kept.columns if column == "optimum"]
            pd.testing.assert_frame_equal(kept[searched], made[searched], check_dtype=False, rtol=1e-6, atol=1e-9)
            kept, made = kept.drop(columns=searched), made.drop(columns=searched)
            pd.testing.assert_frame_equal(kept, made, check_dtype=False, rtol=1e-9, atol=1e-9)


def test_all_committed_results_are_checked() -> None:
    assert {*EVALUATED} == {path.parent.name for path in PUBLISHED_FOLDER.glob("*/results.json")}


def test_contrasts_of_registered_runs_follow_from_the_values() -> None:
    contrasts = table_at(folder("registered"), "contrasts").set_index(["item", "contrast"])
    values = table_at(folder("registered"), "values").set_index(["item", "contrast"])
    assert {*contrasts.index} == {*values.index}
    for place, row in contrasts.iterrows():
        units = values.loc[[place]]
        ratio = (units["kind"] == "ratio").all()
        change = np.log(units["value"] / units["reference"]) if ratio else units["value"] - units["reference"]
        test = stats.ttest_1samp(change, 0.0)
        expected = np.array([change.mean(), *test.confidence_interval(0.95)])
        if ratio:
            expected = np.exp(expected)
        np.testing.assert_allclose(row[["estimate", "low", "high"]].to_numpy(float), expected, rtol=1e-4, atol=1e-6)
        assert row["units"] == len(units)
        assert row["p"] == pytest.approx(test.pvalue, rel=1e-3)
        margin = np.log(row["margin"]) if ratio else row["margin"]
        one_sided = [
            stats.ttest_1samp(change, m, alternative=a).pvalue for m, a in ((-margin, "greater"), (margin, "less"))
        ]
        assert bool(row["equivalent"]) == (max(one_sided) < 0.05)


_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
# "93 [90, 95]", with its unit and Holm's p where they follow
FIGURE = re.compile(
    rf"({_NUMBER})\s\[({_NUMBER}),\s({_NUMBER})\]°?(?:\s(?:points|nats))?(?:\s\((?:\d+ seeds,\s)?Holm\s({_NUMBER}))?"
)
OF_ROWS = (("mean", "ci_low", "ci_high"), ("factor", "low", "high"), ("estimate", "low", "high"))


def folder(experiment: str) -> Path:
    return PUBLISHED_FOLDER / experiment


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
