"""Kept results: tables, sentences and the page of the laboratory are what the committed values of every seed give."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from ln_probe.analyses.lab.keeping import KEPT, joined, rebuilt, table_at, with_seeds
from ln_probe.analyses.lab.laboratory.laboratory_page import page
from ln_probe.analyses.lab.published import folder
from ln_probe.analyses.lab.results import SUMMARY_FILE, Results, png

THERE = [name for name in KEPT if (Path(folder("depth")).parent / name / "results.json").exists()]
PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"


@cache
def made_again(experiment: str) -> Results:
    return rebuilt(experiment)


def test_the_page_is_made_of_the_kept_tables() -> None:
    assert PAGE.read_text() == page(), "python -m ln_probe.analyses.lab.laboratory.laboratory_page > docs/laboratory.md"


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
    with pytest.raises(KeyError, match="nothing is kept of 'weather': known are depth"):
        rebuilt("weather")
    with pytest.raises(FileNotFoundError, match="no kept results of 'weather': there are"):
        folder("weather")
    with pytest.raises(ValueError, match="to random_keys nothing can be added"):
        rebuilt("random_keys", folder("random_keys"))
