"""Kept results: tables, sentences and the page of the laboratory are what the committed values of every seed give."""

from __future__ import annotations

import io
import json
import re
from decimal import Decimal
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from ln_probe.analyses.lab.keeping import joined, rebuilt, with_seeds
from ln_probe.analyses.lab.primary import FILE, main_effects, primary_contrasts
from ln_probe.analyses.lab.results import SUMMARY_FILE, Results, folder, interval, kept, png, table_at

THERE = kept()
PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"


@cache
def made_again(experiment: str) -> Results:
    return rebuilt(experiment)


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


def test_main_effects_of_a_two_by_two_design() -> None:
    norms = ("layernorm", "scaling_only", "projection_only", "none")
    values = pd.DataFrame({"norm": norms * 2, "seed": [0] * 4 + [1] * 4, "value": [7.0, 5, 4, 1, 8, 6, 2, 0]})
    effects = main_effects(values)
    assert effects["scaling"].tolist() == [3.5, 6.0]
    assert effects["projection"].tolist() == [2.5, 2.0]
    pairs = main_effects(values[values["norm"].isin(("layernorm", "projection_only"))])
    assert set(pairs) == {"scaling"}
    assert pairs["scaling"].tolist() == [3.0, 6.0]


@pytest.mark.slow
@pytest.mark.parametrize("experiment", THERE)
def test_kept_results_are_made_of_the_values_of_every_seed(experiment: str) -> None:
    found, where = made_again(experiment), folder(experiment)
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
    figures, where = made_again(experiment).figures, folder(experiment)
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
