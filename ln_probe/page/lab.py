"""The page of a lab experiment: plots, table and command; opens offline."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pandas as pd

from ln_probe.analyses.schema import Table
from ln_probe.analyses.text import write_text
from ln_probe.page import own_script, render
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
    about = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    summary = pd.read_csv(folder / "summary.csv", keep_default_na=False, na_values=[""])
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    page = render(
        "lab.html",
        own_script("page.js"),
        about=about,
        facts=[about["command"], versions, f"{about['seconds']} s"],
        pictures=[_picture(folder / name) for name in about["figures"]],
        table=table(Table("summary", "Means and 95 % CIs over seeds", _ABOUT, (), {}), summary),
        settings=json.dumps(about["settings"], indent=1),
    )
    write_text(folder / PAGE_FILE, page)
    return folder / PAGE_FILE


def _picture(file: Path) -> dict[str, str]:
    return {
        "id": file.stem.replace("_", "-"),
        "title": file.stem.replace("_", " ").capitalize(),
        "content": base64.b64encode(file.read_bytes()).decode(),
    }
