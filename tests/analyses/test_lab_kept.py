"""Committed results: tables follow from the values of every seed, experiments are those that were run, figures."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from lab_models import ran, write_words
from scipy import stats

from ln_probe.analyses.lab.approximation import approximation, relative, text_models
from ln_probe.analyses.lab.counting import counters, counting, rational_recurrence, saturated_states, tasks, traces
from ln_probe.analyses.lab.crasp import compiler, depth
from ln_probe.analyses.lab.experiments import EXPERIMENTS, Request
from ln_probe.analyses.lab.experiments import run as run_experiment
from ln_probe.analyses.lab.language_model import encoder, published, remove_norm, two_by_two
from ln_probe.analyses.lab.majority import majority, random_keys
from ln_probe.analyses.lab.results import interval
from ln_probe.analyses.lab.runs import Run
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import read_metrics, train

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
            # A nonlinear optimum is searched for anew: from starts moved by 1e-12 the results spread over 4.4e-6 of it.
            searched = [column for column in kept.columns if column == "optimum"]
            pd.testing.assert_frame_equal(kept[searched], made[searched], check_dtype=False, rtol=1e-5, atol=1e-9)
            kept, made = kept.drop(columns=searched), made.drop(columns=searched)
            pd.testing.assert_frame_equal(kept, made, check_dtype=False, rtol=1e-9, atol=1e-9)


def test_all_committed_results_are_checked() -> None:
    assert {*EVALUATED} == {path.parent.name for path in PUBLISHED_FOLDER.glob("*/results.json")}
    assert {name: about.quick_seeds for name, about in EXPERIMENTS.items()} == QUICK["seeds"]
    assert [*rational_recurrence.BLOCKS_QUICK] == QUICK["blocks"]


CROSSES = ("majority", "language_model", "language_model_full", "depth", "depth_deep", "approximation", "counting")


@pytest.mark.parametrize("experiment", [name for name in EVALUATED if name != "adaptive_memory"])  # draws none
def test_figures_show_the_committed_tables(experiment: str) -> None:
    evaluated = getattr(EVALUATED[experiment][0], "func", EVALUATED[experiment][0])
    home, name = sys.modules[evaluated.__module__], evaluated.__name__.removesuffix("_registered")
    plot = getattr(home, name.replace("analyse", "plot"), lambda *_: {})
    options = (remove_norm.FULL.schedule, 9) if home is remove_norm else ()
    figures = plot(tables_of(experiment), *options)
    assert {path.stem for path in folder(experiment).glob("*.png")} <= {*figures}
    assert all(axes.has_data() or not axes.axison for figure in figures.values() for axes in figure.axes)
    labelled = [f for f in figures.values() if any(axes.get_legend_handles_labels()[1] for axes in f.axes)]
    assert all(f.legends or any(axes.get_legend() for axes in f.axes) for f in labelled)
    titles = {axes.get_title() for figure in figures.values() for axes in figure.axes}
    assert not any(random_keys.WHOLE_HEAD in title for title in titles)
    markers = {line.get_marker() for figure in figures.values() for axes in figure.axes for line in axes.lines}
    assert ("x" in markers) == (experiment in CROSSES), "published figures are crosses"
    plt.close("all")


def test_traces_are_drawn_of_the_first_seed() -> None:
    tables = tables_of("counting_traces")
    (figure,) = traces.plot(tables).values()
    drawn = sum(len(line.get_ydata()) for axes in figure.axes for line in axes.lines)  # type: ignore[arg-type]
    assert drawn == (tables["traces"]["seed"] == 0).sum()
    plt.close("all")


# What trains: the committed table with its steps, and how many cells were added after that was made.
TRAINED: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("majority", "language_model", "language_model_full", "remove_norm"), ("curves", 0)),
    "encoder": ("curves", 2),
    **dict.fromkeys(("language_model_bundled", "fresh_seeds", "fresh_seeds_long"), ("seeds", 0)),
    **dict.fromkeys(("approximation", "longer_inputs", "adaptive_memory"), ("errors", 0)),
    "depth": ("exact_match", 0), "depth_deep": ("exact_match", 1), "approximation_text": ("losses", 0),
    "counting": ("values", 4), "anbk": ("values", 0), "counting_traces": ("networks", 0),
}  # fmt: skip
MORE_SEEDS = ("depth", "counting")  # committed with more than an experiment has by default
# Not of the experiment: the text, and when state was saved.
OTHERS = ("files", "train_tokens", "valid_tokens", "tokenizer_sha256", "seed", "state_every")
CONSTANTS: dict[str, dict[str, Any]] = {
    "depth": {"bins": depth.BINS, "hit": depth.HIT, "train_lengths": depth.TRAIN_LENGTHS},
    "longer_inputs": {"lengths": approximation.LENGTHS},
    "approximation": {"variance": {target: relative.variance(target) for target in ("1b", "2a", "2b", "4a", "4b")}},
    "counting": {
        "train_length": tasks.TRAIN_LENGTH, "accepted": tasks.ACCEPTED, "max_trained_n": tasks.MAX_TRAINED_N,
    },
    "counting_traces": {"straight": traces.STRAIGHT, "readable": traces.READABLE, "settling": traces.SETTLING},
    "encoder": {"contexts": encoder.SMALL.contexts},
    "language_model": {"contexts": published.CONTEXTS},
    "fresh_seeds": {"windows": two_by_two.SHORT.contexts},
    "fresh_seeds_long": {"windows": two_by_two.LONG.contexts},
    "language_model_bundled": {"contexts": two_by_two.BUNDLED.contexts},
    "remove_norm": {"schedule": asdict(remove_norm.FULL.schedule), "contexts": remove_norm.FULL.contexts},
    "anbk": {"constant_answer": {tasks.ABSOLUTE: 2 / 3, tasks.THRESHOLD: 1 / 2}},
    "language_model_full": {"contexts": published.CONTEXTS},
    "compiler": {
        "every_word_to": compiler.EVERY_WORD_TO, "letters": compiler.LETTERS, "words": compiler.WORDS,
        "few_words": compiler.FEW_WORDS,
    },
    "random_keys": {"draws": random_keys.DRAWS},
    "rational_recurrence": {"draws": rational_recurrence.DRAWS, "networks": rational_recurrence.NETWORKS},
    "saturated_states": {"draws": saturated_states.DRAWS, "cap": saturated_states.CAP},
}  # fmt: skip
QUICK: dict[str, Any] = json.loads((Path(__file__).parent / "quick_forms.json").read_text())


class PlannedError(Exception):
    """Raised with the runs of an experiment in place of training them."""


def test_the_bundled_models_have_a_text_of_their_own(tmp_path: Path) -> None:
    texts = (write_words(tmp_path / "other.txt", ("the lamp", "was lit", "and the ships"), 20_000),)
    request = Request(tmp_path, (1,), quick=True, texts=texts)
    assert two_by_two.text(request).identity == TextTask(texts, two_by_two.D_VOCAB, two_by_two.N_CTX).identity
    with pytest.raises(ValueError, match="bundled"):
        two_by_two.text(replace(request, quick=False))


def planned_runs(
    experiment: str, out: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Path | None, quick: bool = False
) -> list[Run]:
    """The runs of an experiment with its default seeds."""
    about = EXPERIMENTS[experiment]
    home = importlib.import_module(f"ln_probe.analyses.lab.{about.path.rpartition('.')[0]}")

    def stop(runs: list[Run], request: Request) -> None:
        raise PlannedError(runs)

    monkeypatch.setattr(home, "carry_out", stop)
    monkeypatch.setattr(two_by_two, "text", lambda request: TextTask(request.texts, two_by_two.D_VOCAB, 256))
    text = write_words(out / "long.txt", ("the lamp", "was lit", "and the ships", "came home"), 20_000)
    texts = (text,) * about.needs_text
    request = Request(out / f"quick {quick}", tuple(range(about.seeds)), quick=quick, texts=texts, tokenizer=tokenizer)
    with pytest.raises(PlannedError) as caught:
        run_experiment(experiment, request, command="", ln_probe_version="0")
    return list(caught.value.args[0])


def differing(committed: dict[str, Any], ours: dict[str, Any], run: Run) -> set[str]:
    """The settings of a run that are not the committed ones, which may be by task and model, rate, or shape."""
    for name in (f"{run.keys.get('task')}, {run.keys.get('model')}", f"lr {run.keys.get('lr')}"):
        committed = committed.get(name, committed)
    shape, ours = run.keys.get("shape"), json.loads(json.dumps(ours))
    committed = {k: v.get(shape, ours.get(k)) if isinstance(v, dict) else v for k, v in committed.items()}
    return {k for k, v in committed.items() if k not in OTHERS and ours.get(k) != v and v != []}  # no models


def choices(runs: list[Run]) -> dict[str, Any]:
    """How many runs, and the values of every setting of their training, data and models."""
    found: dict[str, Any] = {}
    for run in runs:
        for part, settings in (
            ("training", vars(run.training)), ("data", run.task.identity), ("model", run.spec.to_dict()),
        ):  # fmt: skip
            for name, value in settings.items():
                values = found.setdefault(part, {}).setdefault(name, [])
                if name not in OTHERS and value not in values:
                    values.append(value)
    return {"runs": len(runs), **json.loads(json.dumps(found))}


@pytest.mark.parametrize("experiment", TRAINED)
def test_an_experiment_is_the_one_whose_results_are_committed(
    experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Cells, seeds, steps, training, models and data at full size are those of the committed tables and settings."""
    of_gpt2 = experiment == "language_model_full"
    gpt2 = request.getfixturevalue("shared") / "tokenizers" / "gpt2" if of_gpt2 else None
    runs = planned_runs(experiment, tmp_path, monkeypatch, gpt2)
    name, added = TRAINED[experiment]
    table = table_at(folder(experiment), name)
    keys = list(runs[0].keys)
    rows = {key: part for key, part in table.groupby([table[k].astype(str) for k in keys]) if key != ("before",)}
    cells = [tuple(str(value) for value in run.keys.values()) for run in runs]
    assert {*rows} <= {*cells}
    assert len({*cells}) == len(rows) + added
    seeds, default = sorted(set(table["seed"])), EXPERIMENTS[experiment].seeds
    assert len(seeds) == default or experiment in MORE_SEEDS
    shipped = {0} if experiment == "language_model_bundled" else set()
    assert {run.seed for run in runs} | shipped == {*seeds[:default]}
    about = json.loads((folder(experiment) / "results.json").read_text())
    assert EXPERIMENTS[experiment].needs_text == ("--text" in about["command"])
    for run, cell in zip(runs, cells, strict=True):
        if "step" in table and cell in rows:
            evaluated = {s for s in range(1, run.training.steps + 1) if run.training.evaluates_at(s)}
            committed = {*rows[cell]["step"]} - {0}
            assert max(committed) == run.training.steps or run.keys.get("d") == 8  # to the end only some were trained
            assert committed == {s for s in evaluated if s <= max(committed)} or run.keys.get("d") == 3
        if run.keys.get("d") != 3:
            rate = {"lr"} if "heads" in run.keys else set()
            assert differing(about["settings"].get("training", {}), vars(run.training), run) <= rate, run.name
            assert differing(about["settings"].get("data", {}), run.task.identity, run) == set()
        assert run.task.identity, "two tasks would share a folder"
    assert differing(about["settings"].get("model", {}), runs[0].spec.to_dict(), runs[0]) == set()
    assert choices(planned_runs(experiment, tmp_path, monkeypatch, gpt2, quick=True)) == QUICK[experiment]


@pytest.mark.parametrize("experiment", CONSTANTS)
def test_committed_results_were_measured_with_these_numbers(experiment: str) -> None:
    about = json.loads((folder(experiment) / "results.json").read_text())
    for constant, value in CONSTANTS[experiment].items():
        settings, ours = about["settings"][constant], json.loads(json.dumps(value))
        assert ours == (pytest.approx(settings) if isinstance(value, dict) else settings), constant


@pytest.mark.parametrize(("experiment", "last", "cells"), [("majority", 100, (0, 4, 6, 7)), ("anbk", 200, (0, 1))])
def test_committed_runs_begin_the_same(
    experiment: str, last: int, cells: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained again at full size up to their first evaluation."""
    runs = planned_runs(experiment, tmp_path, monkeypatch, None)
    committed = table_at(folder(experiment), TRAINED[experiment][0]).query("step == @last")
    for run in (runs[cell] for cell in cells):
        batch: Any = run.task.batch

        def stopping(step: int, *how: Any, batch: Any = batch) -> Any:
            if step == last:
                raise PlannedError
            return batch(step, *how)

        monkeypatch.setattr(run.task, "batch", stopping)
        with pytest.raises(PlannedError):
            train(run.task, run.spec, run.training, run.folder, progress=False)
        found = read_metrics(run.folder).set_index("step").loc[last]
        rows = committed[(committed[list(run.keys)] == list(run.keys.values())).all(axis=1) & (committed["seed"] == 0)]
        assert len(rows) >= 3
        for row in rows.to_dict("records"):
            assert found[row["measure"]] == pytest.approx(row["value"], rel=1e-3), (run.name, row["measure"])


def test_angles_before_training_are_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = planned_runs("majority", tmp_path, monkeypatch, None)
    angles = majority.start_angles([run for run in runs if run.seed < 3])
    committed = table_at(folder("majority"), "curves").query("step == 0 and measure == 'angle_deg'")
    both = angles.merge(committed, on=["d", "norm", "radius", "seed", "step", "measure"], validate="1:1")
    assert len(both) == len(angles) == 39
    np.testing.assert_allclose(both["value_x"], both["value_y"], rtol=1e-4)


def test_least_squares_solutions_are_solved_again() -> None:
    committed = table_at(folder("longer_inputs"), "solved")
    cells = committed[["target", "kernel", "heads"]].drop_duplicates().to_dict("records")
    solved = approximation.solved_errors([approximation.Cell(**cell) for cell in cells])
    assert (solved["value"] < 1e-8).tolist() == (committed["value"] < 1e-8).tolist()
    pd.testing.assert_frame_equal(solved, committed, rtol=0.01, atol=1e-8)


def test_contrasts_are_over_the_seeds_that_have_come_that_far() -> None:
    curves = table_at(folder("majority"), "curves")
    one_cell = "d == 8 and norm == 'scaling_only' and radius == 'sqrt(d)'"
    lost = curves.query(f"{one_cell} and seed == 3 and step == 5000").index
    contrasts = majority.analyse(curves.drop(lost))["contrasts"].query("d == 8 and measure == 'train_loss'")
    assert {*contrasts.query("step == 5000")["seeds"]} == {9}
    assert {*contrasts.query("step == 2000")["seeds"]} == {10}


def test_words_of_a_bin_and_heads_of_a_line() -> None:
    for experiment in ("depth", "depth_deep"):
        matched = table_at(folder(experiment), "exact_match")["value"] * depth.EVALUATION_WORDS
        np.testing.assert_allclose(matched, matched.round(), atol=1e-6)
    matched = table_at(folder("depth"), "exact_match")
    with_failed = depth.hit_rates(matched, matched[[*depth.KEYS, "seed"]].head(1).assign(seed=99))
    more = with_failed[["seeds", "hits"]] - table_at(folder("depth"), "hits")[["seeds", "hits"]]
    assert more.sum().tolist() == [1, 0], "a run that failed is no hit"
    errors = table_at(folder("approximation"), "errors")
    lines = [approximation.trained_exponents(errors[errors["heads"].isin(heads)]) for heads in ((1, 4), (1, 4, 16))]
    assert [line.empty for line in lines] == [True, False]


def test_an_interval_of_shares_ends_at_all() -> None:
    values = pd.DataFrame(
        {"form": [tasks.THRESHOLD, tasks.ABSOLUTE] * 2, "seed": [0, 0, 1, 1], "value": [1, 0, 0.6, 0.5]}
    )
    found = counting.analyse_anbk(values.assign(lr=0.1, step=9, measure=tasks.TAGS))["contrasts"]
    assert found[["mean", "ci_low", "ci_high"]].to_numpy().tolist() == [[pytest.approx(0.55), -1, 1]]


def test_tables_and_figures_without_a_finished_seed() -> None:
    nothing = pd.DataFrame(columns=[*text_models.KEYS, "seed", "step", "measure", "value"])
    assert text_models.analyse(nothing)["dot_product"].empty
    for analyse in (two_by_two.analyse, two_by_two.analyse_registered):
        (figure,) = two_by_two.plot(analyse(pd.DataFrame(columns=[*two_by_two.KEYS, "seed", "value"]))).values()
        assert len(figure.axes) == 1
        assert not figure.axes[0].has_data()


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


def assert_complete(experiment: str, committed: pd.DataFrame) -> None:
    """What is measured at full size are the squares, programs, lengths, blocks and numbers of the committed table."""
    if experiment == "random_keys":
        squares = [(cell.space, cell.d_model, cell.d, cell.n) for cell in random_keys.cells(quick=False)]
        rows = committed[["space", "d_model", "d", "n"]].drop_duplicates()
        assert sorted(squares) == sorted(map(tuple, rows.to_numpy().tolist()))
        assert len([*random_keys.cells(quick=True)]) == 172
    elif experiment == "compiler":
        assert (committed["words"].max(), committed["every_word_to"].max()) == (3**8, compiler.EVERY_WORD_TO)
        assert compiler.WORDS in set(committed["words"])
        assert [*compiler.PROGRAMS] == [*committed["program"].unique()]
    elif experiment == "saturated_states":
        lengths = committed.groupby(["cell", "layers", "hidden", "theory"])["length"].unique()
        assert len(lengths) == len(saturated_states.CELLS)
        for cell in saturated_states.CELLS:
            of_cell = lengths[cell.cell, cell.layers, cell.hidden, cell.theory].tolist()
            assert of_cell == [n for n in saturated_states.LENGTHS if n <= cell.longest]
            assert cell.longest in of_cell
    elif experiment == "rational_recurrence":
        assert {*rational_recurrence.BLOCKS} == {*committed["block"]}
    else:
        counted = committed.groupby("model")["value"].max()
        assert counters.LARGEST == counted["lstm"] == counted["rnn_relu"]
        assert counted["gru"] <= counters.LARGEST_GRU


@pytest.mark.parametrize("experiment", MEASURED_AGAIN)
def test_committed_values_are_measured_again(experiment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, seeds, constants = MEASURED_AGAIN[experiment]
    home = importlib.import_module(f"ln_probe.analyses.lab.{EXPERIMENTS[experiment].path.rpartition('.')[0]}")
    assert_complete(experiment, table_at(folder(experiment), name))
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
    if experiment == "rational_recurrence":
        assert (results.tables["errors"]["value"] == settings["networks"]).all()
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
