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
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.files import replacing, to_be_written, write_text
from ln_probe.analyses.probes import columns as declared_here
from ln_probe.analyses.probes.base import Failure, Finding, Probe
from ln_probe.analyses.probes.registry import DEFAULT, chosen
from ln_probe.analyses.schema import Table
from ln_probe.analyses.text import check_text, counted, disarmed, encodable, path_of
from ln_probe.exhibits import EXHIBITS_FILE, Exhibits, by_token

if TYPE_CHECKING:
    from ln_probe.page.attention import AttentionView

REPORT_FILE = "report.json"  # written last: a folder without it holds no whole report
PAGE_FILE = "report.html"
FORMAT = 5
NO_NORMS = "the model has no normalization"  # beginning of the note on such models
_LONGEST_SLUG = 200  # file systems take 255 bytes, and a training step and a number may follow
_OPTIONAL = ("numba", "circuitsvis", "gguf", "ray")
PRINTED, _WIDTH = 6, 100  # findings that `print` shows, and characters a line
_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")


class TableNamed(property):
    """The table of this name, of a report or of several side by side."""

    def __init__(self, name: str, about: str = "") -> None:
        super().__init__(lambda owner: owner.tables[name])
        self.__doc__ = about or f"The table `{name}`."

    def __get__(self, owner: Any, kind: type | None = None, /) -> pd.DataFrame:  # type: ignore[override]
        table: pd.DataFrame = super().__get__(owner, kind)
        return table


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """What LayerNorm does in one model on some prompts.

    Attributes:
        tables: every table by name: those of the built-in probes (empty where one did not run), then those of the
            user's probes.
        provenance: model, prompts, arguments, constants, thresholds, versions, durations; plain JSON.
        notes: caveats on the model, the prompts and the tables.
        exhibits: data for pictures: attention patterns, marks of keys, vectors around the norms.
        declared: what each table's columns mean, by the table's name.
        probes: the user's probes that ran; a loaded report has their tables alone.
        failures: probes that failed, and why.

    Example:
        >>> print(report)  # model, prompts and the first findings
        >>> report.findings()
        >>> report.by_head(sort="delta_loss").head(3)
        >>> report.declared["heads"].column("margin_median").meaning
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
    outlier_dimensions = TableNamed("outlier_dimensions")

    @property
    def constants(self) -> Constants:
        """The constants that replaced each norm's sigma: `.of(i)` on prompt i, `.pooled`, `.observed`."""
        about = self.provenance["calibration"]
        given = self.provenance["constants"] if about["given"] else None
        return Constants.of_table(self.tables["scale_sums"], str(about["constants"]), given)

    @property
    def name(self) -> str:
        return str(self.provenance.get("model", {}).get("name", "model"))

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

    def attention(self, layer: int | None = None, head: int | None = None, prompt: int = 0) -> AttentionView:
        """Return an interactive map of heads and the attention of one, intact and with scaling frozen for its keys.

        circuitsvis draws the patterns, offline; keys are marked by how hard they are to select.

        Args:
            layer, head: shown first; the others can be chosen in the picture. None: the most affected head, by the
                first measure of the map.
            prompt: the prompt shown first.

        Raises:
            ValueError: the report holds no attention for that layer, head or prompt (the message lists those it holds).

        Example:
            >>> report.attention(layer=2, head=5)
        """
        from ln_probe.page.attention import AttentionView
        from ln_probe.page.heads import HeadMap

        return AttentionView(self.exhibits, layer, head, prompt, HeadMap.of(self))

    def tokens(self) -> pd.DataFrame:
        """Return a table of tokens: how hard their keys are to select, and how much attention they receive.

        Returns:
            A row per token and place (position 0, sink, elsewhere); `ln_probe.analyses.probes.columns.TOKENS` says
            what the columns mean. `attainable_change` is the change of the median when scaling is frozen.
        """
        return by_token(self.exhibits, self.sinks)

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

        Files are written aside and renamed, report.json last: a folder that has it holds a whole report. Other files
        of the folder are left alone.

        Args:
            folder: where to write.
            index: address of the page that lists this report, relative to the folder; report.html then links to it.

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
            "failures": [asdict(f) for f in self.failures],
        }
        manifest = json.dumps(content, indent=1, allow_nan=False)
        to_be_written(folder / PAGE_FILE)
        with ExitStack() as stack:  # an earlier report stays whole until all files of this one are written
            page = stack.enter_context(replacing(folder / PAGE_FILE))
            page.write_bytes(encodable(report_page(self, index)).encode())
            for name, table in self.tables.items():
                table.to_parquet(stack.enter_context(replacing(folder / f"{name}.parquet")), index=False)
            self.exhibits.save(stack.enter_context(replacing(folder / EXHIBITS_FILE)))
            (folder / REPORT_FILE).unlink(missing_ok=True)
        write_text(folder / REPORT_FILE, manifest)
        return folder


def load_report(folder: str | Path) -> Report:
    """Load a report that `Report.save` wrote.

    Tables of the user's probes are loaded with the meanings of their columns, without the probes.

    Raises:
        FileNotFoundError: no such folder, no report.json (unfinished, or not a report), or a table is missing.
        ValueError: a file is damaged or of another format, or a table is not what report.json says it is.

    Example:
        >>> from tempfile import mkdtemp
        >>> folder = report.save(mkdtemp())
        >>> ln_probe.load_report(folder).causal
    """
    folder = path_of(folder, "folder")
    path = folder / REPORT_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {REPORT_FILE}: give the folder that Report.save wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        form = content["format"]
        if form == FORMAT:
            provenance, notes = dict(content["provenance"]), tuple(content["notes"])
            failures = tuple(Failure(**f) for f in content["failures"])
            declared = {name: Table.of_plain(plain) for name, plain in content["tables"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): analyze the model again") from error
    if form != FORMAT:
        raise ValueError(f"{path} has format {form!r}, this ln_probe reads format {FORMAT}: analyze the model again")
    files = {name: folder / f"{name}.parquet" for name in declared}
    if missing := [file for file in (*files.values(), folder / EXHIBITS_FILE) if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing: analyze the model again")
    tables = {name: _read(files[name], table) for name, table in declared.items()}
    return Report(tables, provenance, notes, Exhibits.load(folder / EXHIBITS_FILE), declared, failures=failures)


def _read(file: Path, table: Table) -> pd.DataFrame:
    """Read a table and check that it is what its declaration says."""
    try:
        with file.open("rb") as stream:  # pyarrow takes only paths that are UTF-8
            return table.check(pd.read_parquet(stream))
    except (OSError, ValueError) as error:  # pyarrow raises ArrowInvalid, a ValueError
        raise ValueError(f"{file} is damaged ({error}): analyze the model again") from error


def slug(name: str) -> str:
    """A folder name for a model name or path: letters, digits, '.', '_' and '-'."""
    last = Path(name).name if os.sep in name and os.path.exists(name) else name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-.")[:_LONGEST_SLUG] or "model"


def ranked_findings(report: Report) -> list[Finding]:
    """Return the findings of all probes, the most important ones for attention first."""
    findings = [f for probe in chosen(DEFAULT) for f in probe.findings(report.tables, report.provenance)]
    for probe in report.probes:
        try:
            findings += probe.findings(report.tables, report.provenance)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            findings.append(Finding(f"The findings of the probe {probe.name!r} failed: {failure}"))
    if any(n.startswith(NO_NORMS) for n in report.notes):
        findings.append(Finding("The model has no normalization: there is nothing to take apart.", rank=0))
    elif not any(len(table) for table in report.tables.values()):
        findings.append(Finding("Nothing was measured: no table holds a row.", rank=0))
    return sorted(findings, key=lambda f: (f.rank, -f.size))


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
