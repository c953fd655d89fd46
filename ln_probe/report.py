"""The result of `analyze`: tables, where they came from, and what they say in a few sentences."""

from __future__ import annotations

import json
import os
import platform
import re
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ln_probe import __version__
from ln_probe.analyses.arguments import check_text, path_of, received
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.files import (
    read_json,
    replacing,
    to_be_written,
    write_text,
)
from ln_probe.analyses.probes import columns as declared_here
from ln_probe.analyses.probes.base import Failure, Finding, Probe, ProbeError
from ln_probe.analyses.probes.causal import family, with_today_statistics
from ln_probe.analyses.probes.registry import DEFAULT, chosen, find, package_of
from ln_probe.analyses.schema import Column, Table, TableError
from ln_probe.analyses.text import counted, disarmed, encodable
from ln_probe.exhibits import EXHIBITS_FILE, Exhibits
from ln_probe.hooks.variants import RENAMED, frozen_scaling, present_name

if TYPE_CHECKING:
    from ln_probe.page.attention import AttentionView

REPORT_FILE = "report.json"  # written last: a folder without it holds no whole report
PAGE_FILE = "report.html"
FORMAT = 4
_LONGEST_SLUG = 200  # file systems take 255 bytes, and a training step and a number may follow
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
_STATISTICS_OF_TODAY = (
    "causal: this report is of an earlier ln_probe: its constants come from other text than its prompts, and intervals "
    "do not include their choice; intervals, p-values and families were computed from `causal_prompts` on loading"
)
_AT_THE_LAST_POSITION = (
    "heads, keys: this report is of an earlier ln_probe, whose attainable attention was of queries at the last "
    "position; it is `attainable_last` here. What keys can receive at any position, and whether a head's own queries "
    "reach them, is not known"
)
NO_NORMS = "the model has no normalization"  # beginning of the note on such models
_OPTIONAL = ("numba", "circuitsvis", "gguf", "python-flint", "ray")
PRINTED, _WIDTH = 6, 100  # findings that `print` shows, and characters a line
_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")


class TableNamed(property):
    """The table of this name, of a report or of several side by side."""

    def __init__(self, name: str, about: str = "") -> None:
        super().__init__(lambda owner: owner.tables[name])
        self.__doc__ = about or f"The table `{name}`."

    def __get__(self, owner: Any, kind: type | None = None, /) -> pd.DataFrame:  # type: ignore[override]
        found: pd.DataFrame = super().__get__(owner, kind)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """What LayerNorm does in one model on some prompts.

    Attributes:
        tables: every table by name: those of the built-in probes (empty where one did not run), then those of other
            packages' probes. `describe` says what their columns mean.
        provenance: model, prompts, arguments, constants, thresholds, versions, durations; plain JSON.
        notes: caveats on the model, the prompts and the tables.
        exhibits: data for pictures: attention patterns, marks of keys, vectors around the norms.
        declared: descriptions of the tables, by name.
        probes: probes of other packages that ran and are installed here.
        failures: probes that failed, and why.

    Example:
        >>> print(report)  # model, prompts and the first findings
        >>> report.findings()
        >>> report.by_head(sort="delta_loss").head(3)
        >>> report.describe("heads")
    """

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    exhibits: Exhibits = field(default_factory=Exhibits)
    declared: Mapping[str, Table] = field(default_factory=dict)
    probes: tuple[Probe, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        own = {t.name: t for t in declared_here.BUILT_IN}
        declared = own | {n: Table.of_frame(n, f) for n, f in self.tables.items() if n not in own} | dict(self.declared)
        tables = {n: t.empty() for n, t in declared.items()} | dict(self.tables)
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "tables", tables)

    layernorms = TableNamed("layernorms", "A row per norm.")
    heads = TableNamed("heads", "A row per (layer, head, space, variant).")
    keys = TableNamed("keys", "A row per chosen key and variant.")
    causal = TableNamed("causal", "A row per (sites, variant).")
    causal_prompts = TableNamed(
        "causal_prompts", "A row per (prompt, sites, variant); what the intervals of `causal` come from."
    )
    head_effects = TableNamed("head_effects")
    sinks = TableNamed("sinks")
    sink_heads = TableNamed("sink_heads")
    token_sizes = TableNamed("token_sizes")
    outlier_dimensions = TableNamed("outlier_dimensions")
    unembedding = TableNamed("unembedding", "A row per token that is hard to predict.")

    @property
    def constants(self) -> Constants:
        """The constants that replaced each norm's sigma: `.of(i)` on prompt i, `.pooled`, `.observed`.

        Raises:
            ValueError: the report is of a version that did not keep them.
        """
        table, about = self.tables["scale_sums"], self.provenance.get("calibration", {})
        if "constants" not in about:
            raise ValueError("this report is of an ln_probe that did not keep the sums of sigma: make it again")
        given = self.provenance["constants"] if about["given"] else None
        return Constants.of_table(table, str(about["constants"]), given)

    @property
    def name(self) -> str:
        return str(self.provenance.get("model", {}).get("name", "model"))

    @property
    def deviations(self) -> tuple[str, ...]:
        """Sentences on parts of the model or of the prompts that were requested but could not be used."""
        model, prompts = (self.provenance.get(part, {}) for part in ("model", "prompts"))
        return (*model.get("deviations", ()), *([prompts["skipped"]] if prompts.get("skipped") else []))

    def describe(self, table: str) -> pd.DataFrame:
        """Describe a table, or "by_head": a row per column with `column`, `dtype`, `unit`, `meaning`.

        Raises:
            ValueError: the report has no such table (says which there are).
        """
        known = {**self.declared, declared_here.BY_HEAD.name: declared_here.BY_HEAD}
        if not isinstance(table, str) or table not in known:
            raise ValueError(f"this report has no table {table!r}: there are {', '.join(known)}")
        return known[table].describe()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n} {len(t)}" for n, t in self.tables.items() if len(t))
        return f"Report({self.name!r}: {sizes or 'empty'})"

    def __str__(self) -> str:
        """Return what `print` shows: model, prompts and the first findings; `findings` has all."""
        found, prompts = self.findings(), self.provenance.get("prompts", {})
        about = f" on {counted(prompts['count'], 'prompt')} ({prompts.get('source', '')})" if "count" in prompts else ""
        more = [f"… and {len(found) - PRINTED} more: report.findings()"] * (len(found) > PRINTED)
        bullets = [textwrap.fill(f"- {text}", _WIDTH, subsequent_indent="  ") for text in found[:PRINTED]]
        return encodable(disarmed("\n".join([f"{self.name}{about}", *bullets, *more])))

    def _repr_html_(self) -> str:
        from ln_probe.page.page import notebook_cell

        return notebook_cell(self)

    def findings(self) -> list[str]:
        """Return the findings: plain sentences computed from the tables."""
        return [f.text for f in ranked_findings(self)]

    def with_tables(self, **tables: pd.DataFrame) -> Report:
        """The same report with some tables replaced.

        Raises:
            TypeError: something that is no data frame.
            ValueError: no such table, or other columns than it has (`describe` lists them).
        """
        for name, table in tables.items():
            if not isinstance(table, pd.DataFrame):
                raise TypeError(f"with_tables takes data frames, got {type(table).__name__} as {name}")
            if name not in self.declared:
                raise ValueError(f"this report has no table {name!r} to replace: there are {', '.join(self.declared)}")
            self.declared[name].check(table)
        return replace(self, tables={**self.tables, **tables})

    def with_notes(self, *notes: str) -> Report:
        """The same report with more notes.

        Raises:
            TypeError: something that is no text.
        """
        for note in notes:
            check_text("a note", note)
        return replace(self, notes=(*self.notes, *notes))

    def attention(
        self,
        layer: int | None = None,
        prompt: int = 0,
        head: int | None = None,
        *,
        text: str | None = None,
        model: object = None,
    ) -> AttentionView:
        """Return an interactive map of heads and the attention of one, intact and with scaling frozen for its keys.

        circuitsvis draws the patterns, offline; keys are marked by how hard they are to select.

        Args:
            layer, head: shown first; the others can be chosen in the picture. None: the most affected head, by the
                first measure of the map.
            prompt: the prompt shown first.
            text: show this text instead of the report's prompts. The model is loaded again by its name, and its
                weights are compared with those of the report.
            model: the report's model, for `text`; needed where it was in memory.

        Raises:
            ValueError: no attention was kept for that layer, head or prompt (the message lists those that were); a
                text on which the model cannot be run, or a model that cannot be loaded again.

        Example:
            >>> report.attention(layer=2, head=5, text="In the beginning")
        """
        if text is not None:
            from ln_probe.measure import on_text

            shape = self.provenance.get("shape", {})
            if prompt != 0:
                raise ValueError(f"no prompt {received(prompt)}: text is prompt 0, and there is no other")
            for what, given in (("layer", layer), ("head", head)):
                count = shape.get(f"{what}s")
                if given is not None and count is not None and given not in range(count):
                    raise ValueError(f"no {what} {received(given)}: the model has {what}s 0 … {count - 1}")
            return on_text(self, text, model).attention(layer, prompt, head)
        if model is not None:
            raise ValueError("model is what text is run on: give text as well")
        from ln_probe.page.attention import AttentionView
        from ln_probe.page.heads import HeadMap

        return AttentionView(self.exhibits, layer, prompt, head, HeadMap.of(self))

    def by_head(self, sort: str | None = None) -> pd.DataFrame:
        """Return a table of heads: effect on the loss, entropy, attainable and received attention, margins.

        Args:
            sort: a column to sort by, largest first (effects and changes: largest in size); None: by layer and head.

        Returns:
            A row per (layer, head); `ln_probe.analyses.probes.columns.BY_HEAD` says what the columns mean.
            `ln_probe.page.heads.heads_map` draws it.

        Raises:
            ValueError: no such column.
        """
        from ln_probe.page.heads import by_head

        return by_head(self, sort)

    def to_html(self, path: str | Path, *, index: str = "") -> Path:
        """Write one self-contained page that opens offline; the path written. `index`: see `save`."""
        from ln_probe.page.page import report_page

        check_text("index", index)
        path = to_be_written(path)
        write_text(path, report_page(self, index))
        return path

    def save(self, folder: str | Path, *, index: str = "") -> Path:
        """Write report.json, a parquet file per table, exhibits.npz and report.html into `folder` (made if missing).

        `index`: where the page that lists this report stands, relative to the folder; report.html then links to it.

        Files are written aside and renamed; report.json comes last, so a folder that has it is complete. Other files of
        the folder are left alone.

        Raises:
            TypeError, ValueError: `folder` is no path or empty, `index` no text, or a table holds what parquet cannot.
            OSError: the folder cannot be written.
        """
        from ln_probe.page.page import report_page

        folder = path_of(folder, "folder")
        if folder.is_file():
            raise FileExistsError(f"{folder} is a file: give a folder, or call to_html for the page alone")
        check_text("index", index)
        content = {
            "format": FORMAT,
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
            "tables": {name: self.declared[name].plain() for name in self.tables},
            "probes": {p.name: package_of(p) for p in self.probes},
            "failures": [asdict(f) for f in self.failures],
        }
        manifest = json.dumps(content, indent=1, allow_nan=False)
        to_be_written(folder / PAGE_FILE)
        with ExitStack() as written:  # a report saved here before stays whole until all of this one is written
            page = written.enter_context(replacing(folder / PAGE_FILE))
            page.write_bytes(encodable(report_page(self, index)).encode())
            for name, table in self.tables.items():
                aside = written.enter_context(replacing(folder / f"{name}.parquet"))
                with aside.open("wb") as file:  # pyarrow wants UTF-8 paths
                    table.to_parquet(file, index=False)
            self.exhibits.save(written.enter_context(replacing(folder / EXHIBITS_FILE)))
            (folder / REPORT_FILE).unlink(missing_ok=True)
        write_text(folder / REPORT_FILE, manifest)
        return folder


def load_report(folder: str | Path) -> Report:
    """A report that `Report.save` wrote, of this version or an earlier one.

    Tables of probes that are not installed here are kept, with what the report says their columns mean.

    Raises:
        FileNotFoundError: no such folder, no report.json (unfinished, or not a report), or a table is missing.
        ValueError: a file is damaged, of another format, or a table is not what the report says it is.

    Warns:
        DeprecationWarning: it has names of variants that are others today.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = mkdtemp()
        >>> page = report.save(folder)
        >>> ln_probe.load_report(folder).causal
    """
    folder = path_of(folder, "folder")
    path = folder / REPORT_FILE
    if not folder.is_dir():
        why = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(f"{folder} {why}: give the folder that Report.save wrote")
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {REPORT_FILE}: not a finished report's folder")
    try:
        content = read_json(path)
        form, notes = content["format"], tuple(content["notes"])
        provenance = dict(content["provenance"])
        failures = tuple(Failure(**f) for f in content.get("failures", ()))
        described = {n: Table.of_plain(t) for n, t in content.get("tables", {}).items()}
        makers = dict(content.get("probes", {}))
    except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
        said = f"no {error} in it" if isinstance(error, KeyError) else str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path} is damaged ({said}): make the report again") from error
    if form not in READ:
        known = ", ".join(map(str, READ))
        raise ValueError(f"{path} has format {form!r}, this ln_probe reads {known}: make the report again")
    own = {t.name: t for t in declared_here.BUILT_IN}
    beside = () if described else sorted(p.stem for p in folder.glob("[!.]*.parquet"))
    names = dict.fromkeys((*own, *described, *beside))
    tables, declared = dict[str, pd.DataFrame](), dict[str, Table]()
    expected = set(described) or _OF_0_1_0
    for name in names:
        file = folder / f"{name}.parquet"
        there = name in expected or name not in own or file.exists()
        if not there and name in own:
            tables[name], declared[name] = own[name].empty(), own[name]  # a table that came later
            continue
        if not file.exists():
            raise FileNotFoundError(f"{file} is missing: make the report again")
        tables[name], declared[name] = _read(file, described.get(name), own.get(name))
    if any(t["variant"].isin(RENAMED).any() for t in tables.values() if "variant" in t):
        for name, table in tables.items():
            if "variant" in table:
                tables[name] = table.assign(variant=table["variant"].replace(RENAMED))
        for name in RENAMED:
            present_name(name, f"in {folder}, read under its name of today")
    earlier = [
        name
        for name in ("heads", "keys")
        if len(tables[name]) and not (name in described and any("attainable_last" in c for c in described[name].names))
    ]
    tables |= {name: _at_the_last_position(tables[name]) for name in earlier}
    notes = (*notes, _AT_THE_LAST_POSITION) if earlier else notes
    if form == _FORMAT_OF_0_1_0:
        tables["causal"] = _as_meant_today(tables["causal"])
        notes = (*(note for note in notes if not note.startswith("causal: intervals come from")), _MEANT_0_1_0)
    elif len(tables["causal"]) and "causal" in described and "family" not in described["causal"].names:
        seed = int(provenance.get("arguments", {}).get("seed", 0))
        tables["causal"] = with_today_statistics(tables["causal"], tables["causal_prompts"], seed=seed)
        notes = (*notes, _STATISTICS_OF_TODAY) if len(tables["causal_prompts"]) else notes
    kept = folder / EXHIBITS_FILE
    probes, missing = _installed(makers)
    return Report(
        tables, provenance, tuple(dict.fromkeys((*notes, *missing))), Exhibits.load(kept), declared, probes, failures
    )


# Columns of ln_probe's own tables in reports of 0.2 and earlier: their names of today.
_COLUMNS_RENAMED = {"p_adjusted": "p_sign"}


def _at_the_last_position(table: pd.DataFrame) -> pd.DataFrame:
    """Rename the columns of a version that measured attainable attention at the last position only."""
    names = [name for name in map(str, table) if re.match(r"attainable(?!_(last|reach))", name)]
    moved = {name.replace("attainable", "attainable_last", 1): table[name] for name in names}
    return table.assign(**moved, **dict.fromkeys(names, float("nan")))


def _as_meant_today(causal: pd.DataFrame) -> pd.DataFrame:
    """Rename the effects of 0.1.0, which used one constant for all positions, and drop its too short intervals."""
    scaled = pd.Series(frozen_scaling(causal["variant"]), index=causal.index, dtype=bool)
    nothing: dict[str, Any] = dict.fromkeys(("delta_loss_low", "delta_loss_high"), float("nan"))
    nothing |= {c: causal[c].where(~scaled) for c in ("loss", "kl", "top1_agreement", "entropy_change") if c in causal}
    return causal.assign(
        delta_loss_uniform=causal["delta_loss"].where(scaled),
        delta_loss=causal["delta_loss"].where(~scaled),
        family=[family(*pair) for pair in zip(causal["sites"], causal["variant"], strict=True)],
        **nothing,
    )


def _read(file: Path, described: Table | None, known: Table | None) -> tuple[pd.DataFrame, Table]:
    """Read a table with its description, and add the columns that only this version of ln_probe has."""
    try:
        frame = pd.read_parquet(file)
        if known is not None and (lost := [k for k in known.key if k not in frame]):
            raise TableError(f"table {known.name!r} lacks the column {lost[0]!r}")
        table = described or Table.of_frame(file.stem, frame)
        if described is None and known is not None:  # an earlier version may lack columns, a later one have more
            table = replace(known, columns=tuple(known.column(c.name) or c for c in table.columns))
        frame = table.check(frame)
    except (OSError, ValueError) as error:  # pyarrow raises ArrowInvalid, a ValueError
        raise ValueError(f"{file} is damaged ({error}): make the report again") from error
    if known is None:
        return frame, table
    frame = frame.rename(columns=_COLUMNS_RENAMED)
    more = tuple(c for c in table.columns if _COLUMNS_RENAMED.get(c.name, c.name) not in known.names)
    absent = {c.name: _unknown(c, len(frame)) for c in known.columns if c.name not in frame}
    whole = replace(known, columns=(*known.columns, *more))
    return (frame.assign(**absent)[whole.names] if len(frame) else whole.empty()), whole


def _unknown(column: Column, rows: int) -> Any:
    """Return missing values for a column that a report lacks."""
    if column.kind == "bool":
        return pd.array([pd.NA] * rows, dtype="boolean")
    return "" if column.kind == "text" else float("nan")


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
    last = Path(name).name if os.sep in name and os.path.exists(name) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")[:_LONGEST_SLUG] or "model"


def ranked_findings(report: Report) -> list[Finding]:
    """Return the findings of all probes, the most important ones for attention first."""
    found: list[Finding] = []
    for probe in (*chosen(DEFAULT), *report.probes):
        try:
            found += probe.findings(report.tables, report.provenance)
        except Exception as error:
            if probe not in report.probes:
                raise
            found.append(Finding(str(Failure.of(probe.name, package_of(probe), error))))
    if any(n.startswith(NO_NORMS) for n in report.notes):
        found.append(Finding("The model has no normalization: there is nothing to take apart.", rank=0))
    elif not any(len(table) for table in report.tables.values()):
        found.append(Finding("Nothing was measured: no table holds a row.", rank=0))
    return sorted(found, key=lambda f: (f.rank, -f.size))


def environment() -> dict[str, str]:
    """Return what a bug report should contain: versions, model classes, devices, threads and system.

    Imports torch and TransformerLens.
    """
    import torch

    from ln_probe.loading.convert import has_hooked_transformer

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    optional = {name: _version(name) for name in _OPTIONAL}
    return (
        {"ln_probe": __version__}
        | versions()
        | {name: found for name, found in optional.items() if found != "unknown"}
        | {
            "worlds": "HookedTransformer, TransformerBridge" if has_hooked_transformer() else "TransformerBridge",
            "devices": ", ".join(devices),
            "threads": f"{torch.get_num_threads()} of {os.cpu_count()}",
            "system": platform.platform(),
        }
    )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that numbers depend on."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _LIBRARIES}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # not installed, or vendored
        return "unknown"
