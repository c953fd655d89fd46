"""The page of a lab experiment: plots, points in three dimensions, table and command; opens offline."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float32
from markupsafe import Markup

from ln_probe.analyses.files import write_text
from ln_probe.analyses.lab.majority.majority_in_space import COORDINATES, ROLES, STAGES, D
from ln_probe.analyses.lab.results import table_at
from ln_probe.analyses.schema import Table
from ln_probe.page import own_script, packed, policy, render
from ln_probe.page.tables import table

PAGE_FILE = "page.html"
_ABOUT = (
    "Means over seeds with 95 % CIs (empty with one seed), and the published value if there is one. "
    "Click a column's name to sort; summary.csv next to this page has six digits."
)


def write_lab_page(folder: Path) -> Path:
    """Make `page.html` from an experiment's folder (results.json, summary.csv and the plots next to them).

    Raises:
        FileNotFoundError: the folder holds no results yet.
    """
    if not (folder / "results.json").exists():
        raise FileNotFoundError(f"{folder} holds no results.json: run the experiment first")
    about = json.loads((folder / "results.json").read_text())
    summary = pd.read_csv(folder / "summary.csv", keep_default_na=False, na_values=[""])
    points = next((name for name in about["tables"] if Path(name).stem == TABLE), None)
    script = own_script("unpack.js", "page.js", *(["space.js"] if points else []))
    page = render(
        "lab.html",
        about=about,
        facts=[
            ("Command", about["command"]),
            ("Versions", ", ".join(f"{name} {version}" for name, version in about["versions"].items())),
            ("Time of this call", f"{about['seconds']} s"),
        ],
        space=space_part(table_at(folder, TABLE)) if points else "",
        pictures=[_picture(folder / name) for name in about["figures"]],
        table=table(Table("summary", "Means and 95 % CIs over seeds", _ABOUT, (), ()), summary),
        settings=json.dumps(about["settings"], indent=1),
        policy=policy(script),
        script=Markup(script),
    )
    write_text(folder / PAGE_FILE, page)
    return folder / PAGE_FILE


def _picture(file: Path) -> dict[str, str]:
    return {
        "id": file.stem.replace("_", "-"),
        "title": file.stem.replace("_", " ").capitalize(),
        "content": base64.b64encode(file.read_bytes()).decode(),
    }


SCRIPTS = ("unpack.js", "space.js")
TABLE = "coordinates"  # of an experiment's results
STAGE_NAMES = {"stream": "stream", "projected": "projection", "scaled": "scaling", "both": "both terms"}


def space_data(coordinates: pd.DataFrame) -> str:
    """Pack coordinates for the script: the available choices, and one array over them (NaN: no data).

    Raises:
        ValueError: other columns than COORDINATES, nothing in it, or two rows for one point.
    """
    if list(coordinates.columns) != COORDINATES or coordinates.empty:
        found = ", ".join(map(str, coordinates.columns))
        raise ValueError(
            f"points to draw have the columns {', '.join(COORDINATES)}; found {len(coordinates)} of {found}"
        )
    models = list(dict.fromkeys(zip(coordinates["norm"], coordinates["radius"], strict=True)))
    seeds, steps, tokens = (sorted(set(coordinates[c].tolist())) for c in ("seed", "step", "token"))
    at = [
        [models.index(pair) for pair in zip(coordinates["norm"], coordinates["radius"], strict=True)],
        *([values.index(v) for v in coordinates[c]] for c, values in (("seed", seeds), ("step", steps))),
        [STAGES.index(s) for s in coordinates["stage"]],
        [ROLES.index(r) for r in coordinates["role"]],
        [tokens.index(t) for t in coordinates["token"]],
    ]
    if len(set(zip(*at, strict=True))) != len(coordinates):
        raise ValueError("two rows of coordinates for one point")
    shape = (len(models), len(seeds), len(steps), len(STAGES), len(ROLES), len(tokens), D)
    points: Float32[np.ndarray, "model seed step stage role token axis"] = np.full(shape, np.nan, np.float32)
    points[tuple(np.array(index) for index in at)] = coordinates[["x", "y", "z"]].to_numpy(np.float32)
    return packed({
        "models": [f"{norm}, radius {radius}" for norm, radius in models],
        "seeds": seeds,
        "steps": steps,
        "stages": [STAGE_NAMES[s] for s in STAGES],
        "tokens": tokens,
        "points": points,
    })  # fmt: skip


def space_part(coordinates: pd.DataFrame) -> Markup:
    """Return the picture with its controls, for a page with the scripts in SCRIPTS and the styles in `space.css`."""
    return Markup(render("space_part.html", data=space_data(coordinates)))


def space_page(coordinates: pd.DataFrame) -> str:
    """Return a separate page, which opens offline and can be shown in a frame (the site has one of kept results)."""
    script = own_script(*SCRIPTS)
    return render("space.html", space=space_part(coordinates), policy=policy(script), script=Markup(script))
