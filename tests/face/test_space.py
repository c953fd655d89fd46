"""Points in three dimensions: what a page is given, and that they turn, in a real browser."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from made_up import lab_page, unpacked

from ln_probe.analyses.lab.majority.majority_in_space import COORDINATES, ROLES, STAGES, angle_to_ones
from ln_probe.page.lab import TABLE, space_data, space_page


@pytest.fixture
def points() -> pd.DataFrame:
    """Two norms, two seeds, two steps; every number differs."""
    rng = np.random.default_rng(0)
    norms = (("layernorm", "sqrt(d)"), ("none", "sqrt(d)"))
    rows = [
        (*norm, seed, step, stage, role, token, *rng.standard_normal(3))
        for norm, seed, step, stage, role, token in product(norms, (0, 4), (0, 7), STAGES, ROLES, range(10))
    ]
    return pd.DataFrame(rows, columns=COORDINATES)


def test_what_the_page_is_given(points: pd.DataFrame) -> None:
    shuffled = points.sample(frac=1, random_state=1).drop(index=17)  # any order; a point may be missing
    header = unpacked(space_data(shuffled.sort_values("norm", kind="stable")))
    assert header["models"] == ["layernorm, radius sqrt(d)", "none, radius sqrt(d)"]
    assert (header["seeds"], header["steps"], header["tokens"]) == ([0, 4], [0, 7], list(range(10)))
    expected = points[["x", "y", "z"]].to_numpy(np.float32).copy()  # rows are in the order of the array
    expected[17] = np.nan
    np.testing.assert_array_equal(header["points"].reshape(-1, 3), expected)
    with pytest.raises(ValueError, match=r"points to draw have the columns norm, radius, seed, .* found 0 of norm"):
        space_data(points[:0])
    with pytest.raises(ValueError, match="two rows of coordinates for one point"):
        space_data(pd.concat([points, points[:1]]))


def tips(page: Any) -> list[str]:
    return [p.get_attribute("d") for p in page.locator(".space-drawing .query path").all()]


def test_points_turn_and_are_told_in_words(points: pd.DataFrame, visit: Any) -> None:
    opened = visit(space_page(points), reduced_motion="reduce")
    page = opened.page
    page.locator(".space-drawing svg").wait_for()
    assert page.locator(".space-drawing .key").count() == page.locator(".space-drawing .query").count() == 10

    page.locator(".space-model").select_option("1")
    page.locator(".space-seed").select_option("1")
    page.locator(".space-step").select_option("0")
    page.locator(".space-stages label", has_text="projection").click()
    chosen = points.query("norm == 'none' and seed == 4 and step == 0 and stage == 'projected' and role == 'query'")
    angles = angle_to_ones(chosen[["x", "y", "z"]].to_numpy())
    said = page.locator(".space-said").inner_text()
    assert said.startswith("none, radius sqrt(d); seed 4, step 0; after projection. ")
    assert f"queries are at {angles.mean():.0f}° on average ({angles.min():.0f}° to {angles.max():.0f}°)" in said
    page.locator(".space-table summary").click()
    row = page.locator(".space-table tr").nth(3).locator("td").all_inner_texts()
    assert [float(x.replace("−", "-")) for x in row[4:]] == pytest.approx(chosen.iloc[2][["x", "y", "z"]], rel=1e-3)

    before = tips(page)
    drawing = page.locator(".space-drawing")
    drawing.focus()
    page.keyboard.press("ArrowLeft")
    turned = tips(page)
    assert turned != before
    page.keyboard.press("Home")
    assert tips(page) == before
    box = drawing.bounding_box()
    page.mouse.move(box["x"] + 100, box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 160, box["y"] + 130)
    page.mouse.up()
    dragged = tips(page)
    assert dragged != before
    page.mouse.move(box["x"] + 20, box["y"] + 20)
    assert tips(page) == dragged, "only while a button is held"
    page.locator("button", has_text="Along the all-ones direction").click()
    line = page.locator(".space-drawing .ones")
    assert abs(float(line.get_attribute("y2"))) < 1e-9, "seen along itself the ones-vector is a point"
    opened.quiet()


def test_a_phone_and_no_scripts(points: pd.DataFrame, visit: Any) -> None:
    opened = visit(space_page(points), viewport={"width": 390, "height": 800}, color_scheme="dark")
    opened.page.locator(".space-drawing svg").wait_for()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    opened.quiet()
    silent = visit(space_page(points), java_script_enabled=False)
    assert "This picture needs JavaScript" in silent.page.locator(".space").inner_text()
    assert silent.page.locator(".space-drawing").is_hidden()


def test_a_lab_page_holds_the_picture(points: pd.DataFrame, visit: Any, tmp_path: Path) -> None:
    opened = visit(lab_page(tmp_path, {"none": 0.2, "layernorm": 0.1}, tables={TABLE: points}))
    opened.page.locator(".space-drawing .query").first.wait_for()
    opened.page.locator("#table-summary button", has_text="Download CSV").wait_for()
    opened.quiet()
