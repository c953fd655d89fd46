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
from ln_probe.analyses.lab.results import SIGNIFICANT, SUMMARY_FILE, Results, folder, interval, kept, png, table_at

THERE = kept()
PAGE = Path(__file__).parents[2] / "docs" / "laboratory.md"
QUOTED = 111  # conclusions that the page repeats word by word


@cache
def made_again(experiment: str) -> Results:
    return rebuilt(experiment)


_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?"
# "93 [90, 95]", with its unit and Holm's p where they follow
FIGURE = re.compile(
    rf"(?P<bold>\*\*)?({_NUMBER}) \[({_NUMBER}), ({_NUMBER})\]°?(?: (?:points|nats))?\)?\**"
    rf"(?: \((?:\d+ seeds, )?Holm ({_NUMBER}))?"
)
OF_ROWS = (("mean", "ci_low", "ci_high"), ("factor", "low", "high"), ("c", "c_low", "c_high"))


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


def test_figures_of_the_page_are_those_of_the_kept_tables() -> None:
    abouts = [json.loads((folder(name) / "results.json").read_text()) for name in THERE]
    conclusions = {sentence for about in abouts for sentence in about["conclusions"]}
    lines = PAGE.read_text().splitlines()
    own = [line for line in lines if line.removeprefix("- ") not in conclusions]
    assert len(lines) - len(own) == QUOTED, "conclusions in results.json that the page repeats word by word"
    rows, text = kept_intervals(), "\n".join(own)
    figures = [(tuple(f for f in m.groups()[1:] if f is not None), m) for m in FIGURE.finditer(text)]
    assert len(figures) > 750
    assert [m[0] for figure, m in figures if not said_by(rows, figure)] == []
    bold = [(f, m) for f, m in figures if m["bold"] and len(f) == 4]
    assert [m[0] for f, m in bold if float(f[3]) >= SIGNIFICANT] == [], "bold is what Holm's p lets be told"
    changed = [re.sub(r"\d(?=\D*$|e.*$)", lambda m: str((int(m[0]) + 5) % 10), f[0], count=1) for f, _ in figures]
    noticed = [not said_by(rows, (other, *f[1:])) for other, (f, _) in zip(changed, figures, strict=True)]
    assert np.mean(noticed) > 0.95


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
    with pytest.raises(KeyError, match="nothing is kept of 'weather': known are majority, "):
        rebuilt("weather")
    with pytest.raises(FileNotFoundError, match="no kept results of 'weather': there are"):
        folder("weather")
    with pytest.raises(ValueError, match="to random_keys nothing can be added"):
        rebuilt("random_keys", folder("random_keys"))
