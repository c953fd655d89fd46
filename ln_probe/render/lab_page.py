"""The page of a lab experiment: what was found, its plots, its table, the command; one file that opens offline."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pandas as pd
from markupsafe import Markup

from ln_probe.analyses.lab.keeping import table_at
from ln_probe.analyses.machinery.files import write_text
from ln_probe.analyses.schema import Table
from ln_probe.render.page import environment
from ln_probe.render.payload import own_script, policy
from ln_probe.render.space import TABLE, space_part
from ln_probe.render.table_html import table

PAGE_FILE = "page.html"
FIRST = 12  # findings that stand open
_ABOUT = (
    "Means over seeds with 95 % intervals (empty with one seed) and the published figure where there is one. "
    "Click a column's name to sort; summary.csv, beside this page, holds six digits."
)


def write_lab_page(folder: Path) -> Path:
    """Make `page.html` from an experiment's folder (results.json, summary.csv and the plots beside them).

    Raises:
        FileNotFoundError: the folder holds no results yet.
    """
    if not (folder / "results.json").exists():
        raise FileNotFoundError(f"{folder} holds no results.json: run the experiment first")
    about = json.loads((folder / "results.json").read_text())
    summary = pd.read_csv(folder / "summary.csv", keep_default_na=False, na_values=[""])
    points = next((name for name in about["tables"] if Path(name).stem == TABLE), None)
    script = own_script("unpack.js", "page.js", *(["space.js"] if points else []))
    page = (
        environment()
        .get_template("lab.html")
        .render(
            about=about,
            first=FIRST,
            facts=_facts(about),
            space=space_part(table_at(folder, TABLE)) if points else "",
            pictures=[_picture(folder / name) for name in about["figures"]],
            table=table(Table("summary", "Means and 95 % intervals over seeds", _ABOUT, (), ()), summary),
            settings=json.dumps(about["settings"], indent=1),
            policy=policy(script),
            script=Markup(script),
        )
    )
    write_text(folder / PAGE_FILE, page)
    return folder / PAGE_FILE


def _facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [("Command", about["command"]), ("Versions", versions), ("Time of this call", f"{about['seconds']} s")]


def _picture(file: Path) -> dict[str, str]:
    return {
        "id": file.stem.replace("_", "-"),
        "title": file.stem.replace("_", " ").capitalize(),
        "content": base64.b64encode(file.read_bytes()).decode(),
    }
