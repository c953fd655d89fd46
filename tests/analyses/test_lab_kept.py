"""Committed results: tables follow from the values of every seed, experiments are those that were run, figures."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from lab_runs import ran
from scipy import stats

from ln_probe.analyses.lab.approximation import approximation, text_models
from ln_probe.analyses.lab.counting import counters, counting, rational_recurrence, saturated_states, traces
from ln_probe.analyses.lab.crasp import compiler, depth
from ln_probe.analyses.lab.experiments import EXPERIMENTS
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


@cache
def tables_of(experiment: str) -> dict[str, pd.DataFrame]:
    """What an experiment makes of its committed values."""
    analyse, names = EVALUATED[experiment]
    return analyse(*(table_at(folder(experiment), name) for name in names))


@pytest.mark.parametrize("experiment", EVALUATED)
def test_tables_are_made_of_the_values_of_every_seed(experiment: str) -> None:
    where = folder(experiment)
    tables = tables_of(experiment)
    committed = {path.stem for path in where.iterdir() if path.suffix in (".csv", ".parquet")}
    assert {"summary"} <= committed <= {*tables}
    for name, table in tables.items():
        if name in committed or len(table):  # empty: of models that an experiment does not have
            kept, made = table_at(where, name), table.reset_index(drop=True)
            assert list(kept) == list(made)
            # A nonlinear least-squares optimum is searched for anew, and its steps depend on how BLAS rounds.
            searched = [column for column in kept.columns if column == "optimum"]
            pd.testing.assert_frame_equal(kept[searched], made[searched], check_dtype=False, rtol=1e-6, atol=1e-9)
            kept, made = kept.drop(columns=searched), made.drop(columns=searched)
            pd.testing.assert_frame_equal(kept, made, check_dtype=False, rtol=1e-9, atol=1e-9)


def test_all_committed_results_are_checked() -> None:
    assert {*EVALUATED} == {path.parent.name for path in PUBLISHED_FOLDER.glob("*/results.json")}


# What trains nothing: its table of values, and constants that shorten it without changing the values it keeps.
MEASURED_AGAIN: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "counters": ("values", (0,), {"LARGEST": 40, "LARGEST_GRU": 40}),
    "rational_recurrence": ("values", (0,), {"BLOCKS": (2,), "largest_error": lambda *of: of[2]}),
    "saturated_states": ("values", (0,), {"LENGTHS": (8, 16)}),
    "random_keys": ("maps", (0, 1, 2), {"DIMENSIONS": (3,), "COUNTS": (3, 12), "SHOWN": (5,), "HEAD_COUNTS": (128,)}),
    "compiler": ("agreement", (0,), {"WORDS": 16}),
}
FEW = {
    "random_keys": {"HEADS": random_keys.HEADS[:2]},
    "compiler": {"PROGRAMS": {n: compiler.PROGRAMS[n] for n in ("majority", "majority of majorities, depth 2")}},
}


@pytest.mark.parametrize("experiment", MEASURED_AGAIN)
def test_committed_values_are_measured_again(experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seeds, constants = MEASURED_AGAIN[experiment]
    home = importlib.import_module(f"ln_probe.analyses.lab.{EXPERIMENTS[experiment].path.rpartition('.')[0]}")
    for constant, value in (constants | FEW.get(experiment, {})).items():
        monkeypatch.setattr(home, constant, value)
    results = ran(experiment, tmp_path, seeds, quick=False)
    measured, committed = results.tables[name], table_at(folder(experiment), name)
    settings = json.loads((folder(experiment) / "results.json").read_text())["settings"]
    assert {k: v for k, v in settings.items() if k in results.settings} == results.settings
    value = "mean" if experiment == "random_keys" else "value"
    if experiment == "counters":  # tried on fewer n
        committed[value] = committed[value].clip(upper=40)
        assert len(measured) == len(committed)
    if experiment == "compiler":
        random = measured["measure"].str.startswith("random")  # of other words, but what suffices is right on all
        assert (measured[random & measured["suffices"]]["value"] == 1).all()
        measured = measured[~random]
        operations = table_at(folder(experiment), "operations")
        pd.testing.assert_frame_equal(results.tables["operations"], operations, check_dtype=False, rtol=1e-4)
    columns = [c for c in measured if c in committed and c not in ("value", "mean", "words", "published")]
    exact = [c for c in columns if measured[c].dtype.kind != "f"]
    both = measured.merge(committed[[*exact, value]], on=exact, how="left", suffixes=("", "_committed"))
    assert len(both) == len(measured)
    assert len(both) > 15
    np.testing.assert_allclose(both[value], both[f"{value}_committed"].fillna(0), rtol=1e-4)  # 0 undecided: no row


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
