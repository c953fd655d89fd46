"""The result of `analyze`: tables, where they came from, and what they say in a few sentences."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ln_probe.analyses import tables as declared_here
from ln_probe.analyses.machinery import plain_json
from ln_probe.analyses.machinery.files import replacing, write_atomically, write_text
from ln_probe.analyses.probes.protocol import Failure, Probe, ProbeError
from ln_probe.analyses.probes.registry import find, package_of
from ln_probe.analyses.schema import Column, Table, TableError
from ln_probe.reporting.contents import Contents
from ln_probe.reporting.exhibits import EXHIBITS_FILE, Exhibits
from ln_probe.reporting.whole_files import check_exhibits, check_file, hashes_of, read_table, unlisted

if TYPE_CHECKING:
    from ln_probe.render.attention_view import AttentionView

REPORT_FILE = "report.json"
FORMAT = 4
# Tables of reports that do not say which they have.
_OF_0_1_0 = {"layernorms", "heads", "keys", "causal", "unembedding"}
# 2, of ln_probe 0.1.0: the built-in tables, without their descriptions. 3: with them, without hashes of the files.
READ = (2, 3, 4)
_FORMAT_OF_0_1_0 = 2
_MEANT_0_1_0 = (
    "made by ln_probe 0.1.0, which put one constant in the place of every sigma (its differences of losses are here "
    "`delta_loss_uniform`, what else `causal` says without scaling is left out; `heads` and `keys` without scaling are "
    "of that constant, too) and gave intervals that covered less than they said (left out): make the report again"
)
_JUDGED_AGAIN = (
    "causal: this report is of an earlier ln_probe, which knew no `p_mean`; intervals, `p_mean` and medians were made "
    "from `causal_prompts` when it was loaded"
)


class Report(Contents):
    """What LayerNorm does in one model on some prompts: see `Contents` for what it holds."""

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n} {len(t)}" for n, t in self.tables.items() if len(t))
        return f"Report({self.name!r}: {sizes or 'empty'})"

    def _repr_html_(self) -> str:
        from ln_probe.render.page import notebook_cell

        return notebook_cell(self)

    def findings(self) -> list[str]:
        """What the tables say, in plain sentences computed from them."""
        from ln_probe.reporting.findings import findings

        return [f.text for f in findings(self)]

    def with_tables(self, **tables: pd.DataFrame) -> Report:
        """The same report with some tables replaced."""
        return replace(self, tables={**self.tables, **tables})

    def with_notes(self, *notes: str) -> Report:
        """The same report with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def attention(self, layer: int | None = None, prompt: int = 0, head: int | None = None) -> AttentionView:
        """A map of heads and the attention of one, intact and without scaling; shows without a network.

        Patterns as circuitsvis draws them, keys marked by how hard they are to select.

        Args:
            layer, head: shown first (None: what is most affected, by the first measure of the map); the others can be
                chosen in the picture.
            prompt: the prompt shown first.
            head: the head enlarged first (None: the first that is kept weight by weight).

        Raises:
            ValueError: nothing was kept of that layer, head or prompt (says what there is).
        """
        from ln_probe.render.attention_view import AttentionView
        from ln_probe.render.explorer import HeadMap

        return AttentionView(self.exhibits, layer, prompt, head, HeadMap.of(self))

    def by_head(self, sort: str | None = None) -> pd.DataFrame:
        """What the tables say of each head: effect on the loss, entropy, attention that keys can get and got, margins.

        Args:
            sort: a column to sort by, largest first (effects and changes: largest in size); None: by layer and head.

        Returns:
            A row per (layer, head); `ln_probe.analyses.head_tables.BY_HEAD` says what the columns mean. The picture of
            it is `ln_probe.render.heads.heads_map`.

        Raises:
            ValueError: no such column.
        """
        from ln_probe.reporting.by_head import by_head

        return by_head(self, sort)

    def to_html(self, path: str | Path, *, index: str = "") -> Path:
        """Write one self-contained page that opens offline; the path written. `index`: see `save`."""
        from ln_probe.render.page import report_page

        path = Path(path)
        write_text(path, report_page(self, index))
        return path

    def save(self, folder: str | Path, *, index: str = "") -> Path:
        """Write report.json, a parquet file per table, exhibits.npz and report.html into `folder` (made if missing).

        `index`: where the page that lists this report stands, relative to the folder; report.html then links to it.

        Files are written aside and renamed; report.json comes last, so a folder that has it is complete.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = _files_of(folder / REPORT_FILE)
        (folder / REPORT_FILE).unlink(missing_ok=True)
        for name, table in self.tables.items():
            with replacing(folder / f"{name}.parquet") as aside, aside.open("wb") as file:  # pyarrow wants UTF-8 paths
                table.to_parquet(file, index=False)
        self.exhibits.save(folder / EXHIBITS_FILE)
        self.to_html(folder / "report.html", index=index)
        files = [*(f"{name}.parquet" for name in self.tables), EXHIBITS_FILE]
        for name in earlier - set(files):
            (folder / name).unlink(missing_ok=True)
        content = {
            "format": FORMAT,
            "files": hashes_of(folder, files),
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
            "tables": {name: self.declared[name].plain() for name in self.tables},
            "probes": {p.name: package_of(p) for p in self.probes},
            "failures": [asdict(f) for f in self.failures],
        }
        write_atomically(folder / REPORT_FILE, plain_json.sealed(content))
        return folder


def load_report(folder: str | Path) -> Report:
    """A report that `Report.save` wrote, of this version or an earlier one.

    Tables of probes that are not installed here are kept, with what the report says their columns mean.

    Raises:
        FileNotFoundError: no such folder, no report.json (unfinished, or not a report), or a table is missing.
        ValueError: a file is damaged, of another format, or a table is not what the report says it is.
    """
    folder = Path(folder)
    path = folder / REPORT_FILE
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {REPORT_FILE}: not a finished report's folder")
    try:
        content = plain_json.read(path)
        if content["format"] == FORMAT or "files" in content:
            content = plain_json.opened(content, str(path))
        files = {str(k): str(v) for k, v in content.get("files", {}).items()}
        version, notes = content["format"], tuple(content["notes"])
        provenance = dict(content["provenance"])
        failures = tuple(Failure(**f) for f in content.get("failures", ()))
        described = {n: Table.of_plain(t) for n, t in content.get("tables", {}).items()}
        makers = dict(content.get("probes", {}))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"no {error} in it" if isinstance(error, KeyError) else str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path} is damaged ({said}): make the report again") from error
    if version not in READ:
        known = ", ".join(map(str, READ))
        raise ValueError(f"{path} has format {version!r}, this ln_probe reads {known}: make the report again")
    own = {t.name: t for t in declared_here.BUILT_IN}
    beside = () if files else sorted(p.stem for p in folder.glob("[!.]*.parquet"))
    names = dict.fromkeys((*own, *described, *beside))
    tables, declared = dict[str, pd.DataFrame](), dict[str, Table]()
    expected = set(described) or _OF_0_1_0
    for name in names:
        file = folder / f"{name}.parquet"
        there = file.name in files if files else name in expected or name not in own or file.exists()
        if not there and name in own:
            tables[name], declared[name] = own[name].empty(), own[name]  # a table that came later
            continue
        check_file(file, files.get(file.name))
        tables[name], declared[name] = _read(file, described.get(name), own.get(name))
    if version == _FORMAT_OF_0_1_0:
        tables["causal"] = _as_meant_today(tables["causal"])
        notes = (*(note for note in notes if not note.startswith("causal: intervals come from")), _MEANT_0_1_0)
    elif len(tables["causal"]) and "causal" in described and "p_mean" not in described["causal"].names:
        tables["causal"] = _judged_again(tables, provenance)
        notes = (*notes, _JUDGED_AGAIN) if len(tables["causal_prompts"]) else notes
    kept = folder / EXHIBITS_FILE
    check_file(kept, files.get(EXHIBITS_FILE))
    check_exhibits(kept)
    probes, missing = _installed(makers)
    missing += [f"{name} is not part of this report and was left out" for name in unlisted(folder, files) if files]
    return Report(
        tables, provenance, tuple(dict.fromkeys((*notes, *missing))), Exhibits.load(kept), declared, probes, failures
    )


def _as_meant_today(causal: pd.DataFrame) -> pd.DataFrame:
    """0.1.0's effects under today's names: one constant for all positions, intervals that covered too little."""
    scaled = causal["variant"].isin(("no_scaling", "neither"))
    nothing: dict[str, Any] = dict.fromkeys(("delta_loss_low", "delta_loss_high"), float("nan"))
    nothing |= {c: causal[c].where(~scaled) for c in ("loss", "kl", "top1_agreement", "entropy_change") if c in causal}
    return causal.assign(
        delta_loss_uniform=causal["delta_loss"].where(scaled),
        delta_loss=causal["delta_loss"].where(~scaled),
        **nothing,
    )


def _judged_again(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> pd.DataFrame:
    """Effects of a version that had no `p_mean`, with what every prompt gave; as they are where that was not kept."""
    from ln_probe.analyses.probes.causal import judged_again

    seed = provenance.get("arguments", {}).get("seed", 0)
    return judged_again(tables["causal"], tables["causal_prompts"], seed=int(seed))


def _read(file: Path, described: Table | None, known: Table | None) -> tuple[pd.DataFrame, Table]:
    """A table and what it is: as the report describes it, and with the columns that this ln_probe knows of."""
    try:
        frame = read_table(file)
        table = described or known or Table.of_frame(file.stem, frame)
        if described is None and known is not None:  # an earlier version may lack columns, a later one have more
            table = _narrowed(known, frame)
        frame = table.check(frame)
        if known is not None:
            _check_key(known, frame)
    except (OSError, ValueError) as error:  # pyarrow raises ArrowInvalid, a ValueError
        raise ValueError(f"{file} is damaged ({error}): make the report again") from error
    if known is None:
        return frame, table
    more = tuple(c for c in table.columns if c.name not in known.names)
    absent = {c.name: "" if c.kind == "text" else float("nan") for c in known.columns if c.name not in frame}
    whole = replace(known, columns=(*known.columns, *more))
    return (frame.assign(**absent)[whole.names] if len(frame) else whole.empty()), whole


def _narrowed(known: Table, frame: pd.DataFrame) -> Table:
    """The table with the columns that the frame has; those of its row key must be there."""
    _check_key(known, frame)
    found = Table.of_frame(known.name, frame)
    columns: list[Column] = [known.column(c.name) or c for c in found.columns]
    return replace(known, columns=tuple(columns))


def _check_key(known: Table, frame: pd.DataFrame) -> None:
    if lost := [k for k in known.key if k not in frame]:
        raise TableError(f"table {known.name!r} lacks the column {lost[0]!r}")


def _files_of(path: Path) -> set[str]:
    """The files that a report in the same place names; empty if there is none, or it cannot be told."""
    try:
        return {Path(str(name)).name for name in plain_json.read(path)["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _installed(makers: Mapping[str, Any]) -> tuple[tuple[Probe, ...], list[str]]:
    """The probes that made a report's tables, and notes on those that are not here."""
    found, missing = [], []
    for name, package in makers.items():
        try:
            found.append(find(name))
        except ProbeError:
            missing.append(
                f"the probe {name!r} of {package} is not installed here: its tables are kept, what it says of them and "
                "draws is left out"
            )
    return tuple(found), missing


def slug(name: str) -> str:
    """A folder name for a model name or path: letters, digits, '.', '_' and '-'."""
    last = Path(name).name if os.sep in name and Path(name).exists() else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.") or "model"
