"""The result of `analyze`: tables, where they came from, and what they say in a few sentences."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ln_probe.analyses.files import write_atomically
from ln_probe.exhibits import EXHIBITS_FILE, Exhibits

if TYPE_CHECKING:
    from ln_probe.render.attention import AttentionView

TABLES = ("layernorms", "heads", "keys", "causal", "unembedding")
REPORT_FILE = "report.json"
FORMAT = 2
UNEMBEDDING_COLUMNS = ("token_id", "token", "verdict", "margin_lower", "margin_upper", "attainable", "attainable_upper")


def _no_effects() -> pd.DataFrame:
    from ln_probe.analyses.causal_table import COLUMNS

    return pd.DataFrame(columns=list(COLUMNS))


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """What LayerNorm does in one model on some prompts.

    Attributes:
        layernorms: a row per norm; heads: a row per (layer, head, space, variant); keys: a row per chosen key and
            variant; causal: a row per (sites, variant); unembedding: a row per token that is hard to predict. A table
            whose probe did not run is empty. Columns: README, "What is measured".
        provenance: model, prompts, arguments, constants, thresholds, versions, durations; plain JSON.
        notes: what a reader has to know before believing the tables.
        exhibits: what is kept for pictures: attention patterns, marks of keys, vectors around the norms.
    """

    layernorms: pd.DataFrame
    heads: pd.DataFrame
    keys: pd.DataFrame
    causal: pd.DataFrame = field(default_factory=_no_effects)
    unembedding: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=list(UNEMBEDDING_COLUMNS)))
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    exhibits: Exhibits = field(default_factory=Exhibits)

    @property
    def name(self) -> str:
        return str(self.provenance.get("model", {}).get("name", "model"))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{t} {len(getattr(self, t))}" for t in TABLES if len(getattr(self, t)))
        return f"Report({self.name!r}: {sizes or 'empty'})"

    def _repr_html_(self) -> str:
        from ln_probe.render.page import notebook_cell

        return notebook_cell(self)

    def findings(self) -> list[str]:
        """What the tables say, in plain sentences computed from them."""
        from ln_probe.findings import findings

        return [f.text for f in findings(self)]

    def attention(self, layer: int | None = None, prompt: int = 0) -> AttentionView:
        """Attention patterns with circuitsvis, keys marked by how hard they are to select; shows without a network.

        Args:
            layer: the layer shown first (None: the first); the others can be chosen in the picture.
            prompt: the prompt shown first.

        Raises:
            ValueError: nothing was kept of that layer or prompt (says what there is).
        """
        from ln_probe.render.attention import AttentionView

        return AttentionView(self.exhibits, layer, prompt)

    def to_html(self, path: str | Path) -> Path:
        """Write one self-contained page that opens offline; the path written."""
        from ln_probe.render.page import report_page

        path = Path(path)
        write_atomically(path, report_page(self).encode())
        return path

    def save(self, folder: str | Path) -> Path:
        """Write report.json, a parquet file per table, exhibits.npz and report.html into `folder` (made if missing).

        Files are written aside and renamed; report.json comes last, so a folder that has it is complete.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / REPORT_FILE).unlink(missing_ok=True)
        for name in TABLES:
            table: pd.DataFrame = getattr(self, name)
            aside = folder / f".{name}.parquet.partial"
            table.to_parquet(aside, index=False)
            os.replace(aside, folder / f"{name}.parquet")
        self.exhibits.save(folder / EXHIBITS_FILE)
        self.to_html(folder / "report.html")
        content = {"format": FORMAT, "provenance": dict(self.provenance), "notes": list(self.notes)}
        write_atomically(folder / REPORT_FILE, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())
        return folder


def load_report(folder: str | Path) -> Report:
    """A report that `Report.save` wrote.

    Raises:
        FileNotFoundError: no such folder, no report.json (unfinished, or not a report), or a table is missing.
        ValueError: a file is truncated or of another format.
    """
    folder = Path(folder)
    path = folder / REPORT_FILE
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {REPORT_FILE}: not a finished report's folder")
    try:
        content = json.loads(path.read_text())
        provenance, notes, version = content["provenance"], tuple(content["notes"]), content["format"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): make the report again") from error
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, this ln_probe reads {FORMAT}: make the report again")
    tables = {}
    for name in TABLES:
        file = folder / f"{name}.parquet"
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing: make the report again")
        try:
            tables[name] = pd.read_parquet(file)
        except (OSError, ValueError) as error:  # pyarrow raises ArrowInvalid, a ValueError
            raise ValueError(f"{file} is damaged ({error}): make the report again") from error
    kept = folder / EXHIBITS_FILE
    if not kept.exists():
        raise FileNotFoundError(f"{kept} is missing: make the report again")
    return Report(**tables, provenance=provenance, notes=notes, exhibits=Exhibits.load(kept))


def slug(name: str) -> str:
    """A folder name for a model name or path: letters, digits, '.', '_' and '-'."""
    last = Path(name).name if os.sep in name and Path(name).exists() else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "model"
