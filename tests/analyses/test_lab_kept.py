"""Kept results are made of the committed values of every seed; and what would make a wrong table without a word."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from architectures import cases
from lab_models import majority_run
from PIL import Image
from torch import nn

from ln_probe.analyses.lab.counting import qrnn_budget
from ln_probe.analyses.lab.keeping import check_added, joined, rebuilt, with_seeds
from ln_probe.analyses.lab.primary import FILE, primary_contrasts
from ln_probe.analyses.lab.results import SUMMARY_FILE, Results, folder, interval, kept, png, table_at
from ln_probe.analyses.lab.run_folder import DIVERGED_FILE, MODEL_FILE, STATE_FILE, kept_beside
from ln_probe.analyses.lab.train import DivergedError, train

THERE = kept()
PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"


_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
# "93 [90, 95]", with its unit and Holm's p where they follow
FIGURE = re.compile(
    rf"({_NUMBER})\s\[({_NUMBER}),\s({_NUMBER})\]°?(?:\s(?:points|nats))?(?:\s\((?:\d+ seeds,\s)?Holm\s({_NUMBER}))?"
)
OF_ROWS = (("mean", "ci_low", "ci_high"), ("factor", "low", "high"), ("c", "c_low", "c_high"))
PRIMARY = ["estimate", "low", "high", "p_holm"]


def kept_intervals() -> np.ndarray:
    """Center, both ends and Holm's p of every row of a kept table that has an interval."""
    paths = sorted(p for p in folder("depth").parent.glob("*/*") if p.suffix in (".csv", ".parquet"))
    rows = []
    for table in (table_at(path.parent, path.stem) for path in paths):
        for columns in OF_ROWS:
            if {*columns} <= {*table.columns}:
                rows.append(table.reindex(columns=[*columns, "p_holm"]).to_numpy(float))
    networks = table_at(folder("counting_traces"), "networks")
    for _, part in networks.groupby(["task", "model", "norm", "norm_site", "phase"]):
        center, low, high = interval(part["exact_to"].to_numpy(float))
        rows.append(np.array([[center, max(low, 0), min(high, part["tested_n"].iloc[0]), np.nan]]))
    rows.append(pd.read_csv(FILE)[PRIMARY].to_numpy(float))
    return np.concatenate(rows)


def said_by(rows: np.ndarray, figures: tuple[str, ...]) -> bool:
    """Whether a row, as it is or in per cent, rounds to center, ends and (where given) Holm's p."""
    for scale in (1, 100):
        same = np.ones(len(rows), dtype=bool)
        for column, figure in enumerate(figures):
            half = 0.501 * float(Decimal(1).scaleb(int(Decimal(figure).as_tuple().exponent)))
            same &= np.abs(rows[:, column] * (1 if column == 3 else scale) - float(figure)) <= half + 1e-12
        if same.any():
            return True
    return False


def test_figures_in_the_text_of_the_page_are_those_of_the_kept_tables() -> None:
    rows = kept_intervals()
    figures = [tuple(f for f in m.groups() if f is not None) for m in FIGURE.finditer(PAGE.read_text())]
    assert len(figures) > 40
    assert [" ".join(f) for f in figures if not said_by(rows, f)] == []
    changed = [re.sub(r"\d(?=\D*$|e.*$)", lambda m: str((int(m[0]) + 5) % 10), f[0], count=1) for f in figures]
    noticed = [not said_by(rows, (other, *f[1:])) for other, f in zip(changed, figures, strict=True)]
    assert np.mean(noticed) > 0.95


def test_primary_contrasts_are_made_of_the_values_of_every_seed() -> None:
    made, kept_table = primary_contrasts(), pd.read_csv(FILE)
    pd.testing.assert_frame_equal(made, kept_table, check_dtype=False, rtol=1e-5)
    depth = table_at(folder("depth"), "terms").query("norm_order == 'both' and depth == 'all' and outcome == 'reach'")
    for term in ("scaling", "projection"):  # the same contrast by other code
        there = depth.query(f"side == 'beyond' and term == '{term}'").iloc[0]
        here = made.query(f"experiment == 'depth' and contrast == '{term}'").iloc[0]
        assert 100 * there[["mean", "ci_low", "ci_high"]].to_numpy(float) == pytest.approx(
            here[["estimate", "low", "high"]].to_numpy(float), abs=1e-3
        )


@pytest.mark.parametrize("experiment", cases(*(name for name in THERE if name != "depth"), slow=["depth"]))
def test_kept_results_are_made_of_the_values_of_every_seed(experiment: str) -> None:
    """Every table and sentence, so whatever changes in how an experiment is evaluated is seen here."""
    found, where = rebuilt(experiment), folder(experiment)
    pd.testing.assert_frame_equal(
        pd.read_csv(where / SUMMARY_FILE), found.summary, check_dtype=False, rtol=1e-5, atol=1e-9
    )
    about = json.loads((where / "results.json").read_text())
    assert about["conclusions"] == list(found.conclusions)
    assert set(about["tables"]) - {SUMMARY_FILE} == {f"{t}{table_file(where, t)}" for t in found.tables}
    for name, table in found.tables.items():
        kept = table_at(where, name)
        pd.testing.assert_frame_equal(kept, table.reset_index(drop=True), check_dtype=False, rtol=1e-5, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", THERE)
def test_pictures_are_drawn_of_the_values_of_every_seed(experiment: str) -> None:
    figures, where = rebuilt(experiment).figures, folder(experiment)
    assert {path.stem for path in where.glob("*.png")} == set(figures)
    for name, figure in figures.items():
        with Image.open(where / f"{name}.png") as kept, Image.open(io.BytesIO(png(figure))) as drawn:
            if kept.info["Software"] != drawn.info["Software"]:
                pytest.skip(f"drawn by {kept.info['Software']}; another version draws letters elsewhere")
            of_255 = 8  # a last digit moves an edge by a fraction of a pixel
            np.testing.assert_allclose(
                *(np.asarray(image, dtype=int) for image in (drawn, kept)), rtol=0, atol=of_255, err_msg=name
            )


def table_file(where: Path, name: str) -> str:
    return ".parquet" if (where / f"{name}.parquet").exists() else ".csv"


def test_the_command_has_the_seeds_that_were_added() -> None:
    made = Results(pd.DataFrame(), {"values": pd.DataFrame({"seed": [0, 4]}), "rest": pd.DataFrame({"a": [1]})})
    assert with_seeds("ln-probe lab run x --seeds 2 --out x", made) == "ln-probe lab run x --seeds 5 --out x"
    later = Results(pd.DataFrame(), {"values": pd.DataFrame({"seed": [20, 29]})})
    assert with_seeds("ln-probe lab run x --seeds 2 --out x", later) == "ln-probe lab run x --seeds 10 --out x"
    assert with_seeds("ln-probe lab run x --out x", made) == "ln-probe lab run x --out x"


def test_new_runs_join_the_kept_ones() -> None:
    def table(*rows: tuple[str, int, int, float]) -> pd.DataFrame:
        return pd.DataFrame(rows, columns=["norm", "seed", "step", "value"])

    kept = table(("a", 0, 10, 1.0), ("a", 1, 10, 2.0), ("a", 1, 5, 2.5))
    added = table(("a", 0, 10, 9.0), ("a", 1, 20, 3.0), ("b", 0, 10, 4.0))
    both = joined(kept, added, ["norm"])
    assert both.to_numpy().tolist() == [["a", 0, 10, 1.0], ["a", 1, 20, 3.0], ["b", 0, 10, 4.0]]
    with pytest.raises(ValueError, match="columns differ: kept norm, seed, step, value; added norm, seed, step"):
        joined(kept, added.drop(columns="value"), ["norm"])
    with pytest.raises(FileNotFoundError, match="holds no table 'nothing'"):
        table_at(folder("depth"), "nothing")
    with pytest.raises(KeyError, match="nothing is kept of 'weather': known are majority, "):
        rebuilt("weather")
    with pytest.raises(FileNotFoundError, match="no kept results of 'weather': there are"):
        folder("weather")
    with pytest.raises(ValueError, match="to random_keys nothing can be added"):
        rebuilt("random_keys", folder("random_keys"))


@pytest.mark.parametrize(("experiment", "change", "said"), [
    ("depth", {"experiment": "depth_deep"}, "holds results of depth_deep, not of depth"),
    ("depth", {"settings": {"training": {"steps": 5}}}, "made with other settings .* training: "),
    ("depth", {"diverged": ["a run: nan"]}, "diverged, which depth counts as misses: a run: nan"),
    ("majority", {"settings": {"batch": 1, "classes": 3}}, ""),
    ("counting", {"settings": {"training": {"L5, another": {"steps": 5}}}}, ""),
    ("counting", {"settings": {"training": {"L5, lstm": {"steps": 5}}}}, "made with other settings .* training: "),
])  # fmt: skip
def test_only_runs_of_the_same_kind_are_added(
    tmp_path: Path, experiment: str, change: dict[str, Any], said: str
) -> None:
    shutil.copytree(folder(experiment), tmp_path / "r")
    kept = json.loads((tmp_path / "r" / "results.json").read_text())
    about = json.loads(json.dumps(kept))
    about["settings"] |= change.pop("settings", {})
    (tmp_path / "r" / "results.json").write_text(json.dumps(about | change))
    if said:
        with pytest.raises(ValueError, match=said):
            rebuilt(experiment, tmp_path / "r")
    else:
        assert check_added(experiment, tmp_path / "r", kept["settings"]) == ()


def test_quick_runs_are_not_added_and_diverged_ones_are_named(tmp_path: Path) -> None:
    shutil.copytree(folder("approximation_text"), tmp_path / "r")
    about = json.loads((tmp_path / "r" / "results.json").read_text())
    (tmp_path / "r" / "results.json").write_text(json.dumps(about | {"diverged": ["a run: nan at step 3"]}))
    assert rebuilt("approximation_text", tmp_path / "r").diverged == ("a run: nan at step 3",)
    (tmp_path / "r" / "experiment.json").write_text('{"experiment": "approximation_text", "quick": true}')
    with pytest.raises(ValueError, match="made with --quick"):
        rebuilt("approximation_text", tmp_path / "r")


def test_unfinished_runs_are_not_at_the_end() -> None:
    steps = qrnn_budget.training(True, 0, qrnn_budget.RATES[0]).steps
    rows = [
        ("L5", "qrnn", 0.01, seed, step, "accuracy_64", value)
        for seed, last in ((0, steps), (1, steps // 2))
        for step, value in ((steps // 4, 0.5), (last, 0.7 + 0.2 * seed))
    ]
    values = pd.DataFrame(rows, columns=[*qrnn_budget.KEYS, "seed", "step", "measure", "value"])
    found = qrnn_budget.findings(values, quick=True)
    assert "0 of 1 runs reach" in found.conclusions[0]
    assert "70.0 to 70.0 %" in found.conclusions[0]
    (said,) = qrnn_budget.unfinished(values, quick=True)
    assert said.endswith(f"seed 1: stopped after {steps // 2} updates, left out")


def test_what_is_kept_beside_weights_is_of_these_weights(tmp_path: Path) -> None:
    weights, made = tmp_path / "w", []

    def make() -> pd.DataFrame:
        made.append(1)
        return pd.DataFrame({"value": [len(made)]})

    weights.write_bytes(b"one")
    found = [kept_beside(tmp_path, "m", weights, 1, make)["value"].item() for _ in range(2)]
    weights.write_bytes(b"two")
    found.append(kept_beside(tmp_path, "m", weights, 1, make)["value"].item())
    found.append(kept_beside(tmp_path, "m", weights, 2, make)["value"].item())
    assert found == [1, 1, 2, 3]


@pytest.mark.slow
def test_a_last_update_that_breaks_the_weights_is_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss before it is a number: what comes after it tells."""
    one = majority_run(tmp_path / "r", steps=3, batch=4, clip=1.0, warmup=200)
    steps = one.training.steps
    train(one.task, one.spec, one.training, one.folder, progress=False, until=1)
    kept = (one.folder / STATE_FILE).read_bytes()
    before = nn.utils.clip_grad_norm_
    seen: list[int] = []

    def broken(parameters: Any, *args: Any) -> Any:
        parameters = list(parameters)
        seen.append(1)
        if len(seen) == breaks_at[0]:
            parameters[0].grad.fill_(math.inf)
            return None
        return before(parameters, *args)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", broken)
    breaks_at = [0]
    for until, breaks_at[0] in ((2, 1), (None, 2)):  # the second update of all, before a state is saved, and the last
        seen.clear()
        (one.folder / DIVERGED_FILE).unlink(missing_ok=True)
        step = until or steps
        with pytest.raises(DivergedError, match=f"is nan at step {step}"):
            train(one.task, one.spec, one.training, one.folder, progress=False, until=until)
        assert (one.folder / STATE_FILE).read_bytes() == kept
    assert not (one.folder / MODEL_FILE).exists()
    assert (one.folder / DIVERGED_FILE).exists()
