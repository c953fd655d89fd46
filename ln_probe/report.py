"""The result of `analyze`: tables, where they came from, and what they say in a few sentences."""

from __future__ import annotations

import json
import os
import platform
import sys
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from ln_probe import __version__
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes.base import Failure, Finding, Probe
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.analyses.probes.wording import findings as answers_of
from ln_probe.analyses.schema import Table
from ln_probe.analyses.text import counted, disarmed, encodable, replacing, write_text
from ln_probe.exhibits import EXHIBITS_FILE, Exhibits, load_arrays, save_arrays
from ln_probe.hooks.norm import INTACT, SCALING_FROZEN

if TYPE_CHECKING:
    from ln_probe.page.attention import AttentionView

REPORT_FILE = "report.json"  # written last: a folder without it holds no whole report
PAGE_FILE = "report.html"
FORMAT = 6
_OPTIONAL = ("numba", "circuitsvis", "gguf", "ray")
WIDTH = 100  # characters of a printed line
_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "pandas")


def table_named(name: str) -> Any:
    """Return a property that is the table of this name, of a report or of several side by side."""
    return property(lambda owner: owner.tables[name], doc=f"The table `{name}`.")


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """What LayerNorm does in one model on some prompts.

    Attributes:
        tables: every table by name: those of the built-in probes (empty where one did not run), then those of the
            user's probes.
        provenance: model, prompts, arguments, constants, versions, durations; plain JSON.
        notes: caveats on the model, the prompts and the tables.
        exhibits: attention patterns of one prompt, for pictures.
        constants: what replaced each norm's sigma: `.of(i)` on prompt i, `.pooled`, `.observed`.
        declared: what each table's columns mean, by the table's name.
        probes: the user's probes that ran; a loaded report has their tables alone.
        failures: probes that failed, and why.

    Example:
        >>> print(report)  # model, prompts and findings
        >>> report.findings()
        >>> report.by_head(sort="delta_loss").head(3)
        >>> report.declared["heads"].columns["margin_median"]  # unit and meaning
    """

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    exhibits: Exhibits = field(default_factory=Exhibits)
    constants: Constants | None = None
    declared: Mapping[str, Table] = field(default_factory=dict)
    probes: tuple[Probe, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        declared = {table.name: table for table in TABLES} | dict(self.declared)
        tables = {name: table.empty() for name, table in declared.items()} | dict(self.tables)
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "tables", tables)

    layernorms = table_named("layernorms")
    heads = table_named("heads")
    keys = table_named("keys")
    causal = table_named("causal")
    causal_prompts = table_named("causal_prompts")
    head_effects = table_named("head_effects")
    sinks = table_named("sinks")
    sink_heads = table_named("sink_heads")

    @property
    def name(self) -> str:
        return str(self.provenance.get("model", {}).get("name", "model"))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n} {len(t)}" for n, t in self.tables.items() if len(t))
        return f"Report({self.name!a}: {sizes or 'empty'})"

    def __str__(self) -> str:
        """Return what `print` shows: model, prompts and findings."""
        prompts = self.provenance.get("prompts", {})
        about = ""
        if "count" in prompts:
            about = f" on {counted(prompts['count'], 'prompt')} ({prompts.get('source', '')})"
        bullets = [textwrap.fill(f"- {text}", WIDTH, subsequent_indent="  ") for text in self.findings()]
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        text = disarmed("\n".join([f"{self.name}{about}", *bullets]))
        return text.encode(encoding, "backslashreplace").decode(encoding)

    def _repr_html_(self) -> str:
        from ln_probe.page.page import notebook_cell

        return notebook_cell(self)

    def findings(self) -> list[str]:
        """Return the findings: plain sentences computed from the tables, a question after the other."""
        return [finding.text for finding in answers(self)]

    def attention(self, layer: int | None = None, head: int | None = None) -> AttentionView:
        """Return an interactive map of heads and the attention of one, intact and with scaling frozen for its keys.

        circuitsvis draws the patterns of the first prompt, offline.

        Args:
            layer, head: shown first; the others can be chosen in the picture. None: the most affected head, by the
                first measure of the map.

        Raises:
            ValueError: the report holds no attention for that layer or head.

        Example:
            >>> report.attention(layer=2, head=5)
        """
        from ln_probe.page.attention import AttentionView

        return AttentionView(self, layer, head)

    def tokens(self, n: int | None = 20) -> pd.DataFrame:
        """Return a table of tokens: the loss of each, and how it changes without a term of all norms.

        Args:
            n: the tokens with so many largest changes with scaling frozen, either way; None: all, in order.

        Returns:
            A row per predicted token: `prompt`, `position`, `token`, its intact `loss` in nats, and the changes
            `no_scaling` (scaling frozen) and `no_projection` (projection removed). Over all tokens they sum to those of
            the table `causal`.

        Raises:
            ValueError: the report has no losses of tokens.
        """
        losses = self.exhibits.token_losses
        if losses is None:
            raise ValueError(
                "this report has no losses of tokens: analyze with the probe 'causal' and no loss= of yours"
            )
        if n is None:
            return losses
        size = losses["no_scaling"].abs().fillna(losses["no_projection"].abs())
        return losses.loc[size.sort_values(ascending=False, kind="stable").index[:n]].reset_index(drop=True)

    def by_head(self, sort: str | None = None) -> pd.DataFrame:
        """Return a table of heads: effect on the loss, entropy, attainable and received attention, margins.

        Args:
            sort: a column to sort by, largest first (in size; p: smallest first); None: by layer and head.

        Returns:
            One row per layer and head, with the loss change with scaling frozen for it alone (the estimate where
            `estimated`) and its p; then columns of `heads` and `sink_heads`, intact, and their changes with scaling
            frozen for the keys. What was not measured is NaN.

        Raises:
            ValueError: no such column.
        """
        table = _by_head(self.heads, self.head_effects, self.sink_heads)
        if sort is not None and sort not in table:
            raise ValueError(f"by_head has no column {sort!r}: there are {', '.join(table.columns)}")
        if sort is None:
            return table
        return table.sort_values(sort, key=abs, ascending=sort == "p", kind="stable").reset_index(drop=True)

    def to_html(self, path: str | Path, *, index: str = "") -> Path:
        """Write one self-contained page that opens offline; the path written. `index`: see `save`."""
        from ln_probe.page.page import report_page

        write_text(Path(path), report_page(self, index))
        return Path(path)

    def save(self, folder: str | Path, *, index: str = "") -> Path:
        """Write report.json, a parquet file per table, exhibits.npz and report.html into `folder` (made if missing).

        Files are written aside and renamed: the tables, the page, then report.json. A folder with report.json holds all
        numbers. Other files of the folder are left alone.

        Args:
            folder: where to write.
            index: address of the page that lists this report, relative to the folder; report.html then links to it.

        Raises:
            TypeError, ValueError: `folder` is no path, or a table holds what parquet cannot.
            OSError: the folder cannot be written.
        """
        from ln_probe.page.page import report_page

        folder = Path(folder)
        content = {
            "format": FORMAT,
            "provenance": dict(self.provenance),
            "notes": list(self.notes),
            "tables": {name: asdict(self.declared[name]) for name in self.tables},
            "failures": [asdict(f) for f in self.failures],
        }
        manifest = json.dumps(content, indent=1, allow_nan=False)
        with ExitStack() as stack:  # an earlier report stays whole until all files of this one are written
            for name, table in self.tables.items():
                table.to_parquet(stack.enter_context(replacing(folder / f"{name}.parquet")), index=False)
            save_arrays(stack.enter_context(replacing(folder / EXHIBITS_FILE)), self.exhibits, self.constants)
            (folder / REPORT_FILE).unlink(missing_ok=True)
            (folder / PAGE_FILE).unlink(missing_ok=True)
        try:
            with replacing(folder / PAGE_FILE) as page:
                page.write_bytes(encodable(report_page(self, index)).encode())
        except Exception:  # of a probe's own picture: the numbers are whole
            write_text(folder / REPORT_FILE, manifest)
            raise
        write_text(folder / REPORT_FILE, manifest)  # without it a report is not finished
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
    folder = Path(folder)
    path = folder / REPORT_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no {REPORT_FILE}: give the folder that Report.save wrote")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, this ln_probe reads {FORMAT}")
        provenance, notes = dict(content["provenance"]), tuple(content["notes"])
        failures = tuple(Failure(**f) for f in content["failures"])
        declared = {name: Table.of_plain(plain) for name, plain in content["tables"].items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): analyze the model again") from error
    files = {name: folder / f"{name}.parquet" for name in declared}
    if missing := [file for file in (*files.values(), folder / EXHIBITS_FILE) if not file.is_file()]:
        raise FileNotFoundError(f"{missing[0]} is missing: analyze the model again")
    tables = {name: _read(files[name], table) for name, table in declared.items()}
    exhibits, arrays = load_arrays(folder / EXHIBITS_FILE)
    constants = None
    if arrays:
        about = provenance["calibration"]
        given = provenance["constants"] if about["given"] else None
        constants = Constants.of_arrays(arrays, str(about["constants"]), given)
    return Report(tables, provenance, notes, exhibits, constants, declared, failures=failures)


def _read(file: Path, table: Table) -> pd.DataFrame:
    """Read a table and check that it is what its declaration says."""
    try:
        with file.open("rb") as stream:  # pyarrow takes only paths that are UTF-8
            return table.check(pd.read_parquet(stream))
    except (OSError, ValueError) as error:  # pyarrow raises ArrowInvalid, a ValueError
        raise ValueError(f"{file} is damaged ({error}): analyze the model again") from error


def answers(report: Report) -> list[Finding]:
    """Return the findings of a report: the five questions in their order, then those of the user's probes."""
    findings = answers_of(report.tables, report.provenance)
    for probe in report.probes:
        try:
            findings += probe.findings(report.tables, report.provenance)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            findings.append(Finding(probe.name, f"The findings of the probe {probe.name!r} failed: {failure}"))
    return findings


_KEY = ["layer", "head"]
# Columns of the table `heads`: what `by_head` calls the intact value, and its change with scaling frozen for the keys.
_OF_HEADS = {
    "entropy_ratio": ("entropy_ratio", "entropy_change"),
    "unselectable": ("unselectable", None),
    "attainable_median": ("attainable", "attainable_change"),
    "pattern_max_median": ("received", None),
    "margin_median": ("margin", "margin_change"),
}


def _by_head(heads: pd.DataFrame, effects: pd.DataFrame, sinks: pd.DataFrame) -> pd.DataFrame:
    """Return the columns of three tables by head side by side."""
    index = pd.MultiIndex.from_frame(pd.concat([t[_KEY] for t in (heads, effects, sinks)]).drop_duplicates())
    table = pd.DataFrame(index=index.sort_values())

    def values(rows: pd.DataFrame, column: str) -> pd.Series:
        return rows.set_index(_KEY)[column].astype(float).reindex(table.index)

    frozen_effects = effects[effects["variant"] == SCALING_FROZEN.name]
    exact = values(frozen_effects, "delta_loss")
    table["delta_loss"] = exact.fillna(values(frozen_effects, "estimate"))
    table["estimated"] = exact.isna() & table["delta_loss"].notna()
    table["p"] = values(frozen_effects, "p")
    intact, frozen = (heads[heads["variant"] == v.name] for v in (INTACT, SCALING_FROZEN))
    for column, (name, change) in _OF_HEADS.items():
        table[name] = values(intact, column)
        if change is not None:
            table[change] = values(frozen, column) - table[name]
    for column in ("sink_rate", "first_attention"):
        table[column] = values(sinks, column)
    table["first_change"] = values(sinks, "first_attention_no_scaling") - table["first_attention"]
    return table.reset_index()


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
