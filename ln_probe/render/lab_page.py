"""The page of a lab experiment: what was found, its plots, its table, the command; one file that opens offline."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from ln_probe.analyses.files import write_atomically

PAGE_FILE = "page.html"
TABLE_ROWS = 400  # a longer table is cut, and the page says so; summary.csv has all of it


def write_lab_page(folder: Path) -> Path:
    """Make `page.html` from an experiment's folder (results.json, summary.csv and the plots beside them).

    Raises:
        FileNotFoundError: the folder holds no results yet.
    """
    if not (folder / "results.json").exists():
        raise FileNotFoundError(f"{folder} holds no results.json: run the experiment first")
    about = json.loads((folder / "results.json").read_text())
    summary = pd.read_csv(folder / "summary.csv")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ln_probe.render", "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    page = environment.get_template("lab.html").render(
        about=about,
        pictures=[(name, base64.b64encode((folder / name).read_bytes()).decode()) for name in about["figures"]],
        columns=list(summary.columns),
        rows=[[_cell(value) for value in row] for row in summary.head(TABLE_ROWS).itertuples(index=False)],
        cut=max(0, len(summary) - TABLE_ROWS),
        settings=json.dumps(about["settings"], indent=1),
    )
    write_atomically(folder / PAGE_FILE, page.encode())
    return folder / PAGE_FILE


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.4g}"
    return str(value)
