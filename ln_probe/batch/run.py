"""A run: what is asked for, the work units that make it up, and where their results lie.

    OUT/index.html, OUT/<model>/              the reports
    OUT/.ln_probe/run.json                    what the folder is about
                  corpus/<key>.jsonl          the prompts, one a line
                  units/<key>/prompts-00000 …    results, until the report is made
                  done/<model>.json           whose report OUT/<model>/ is, and what its files are

The units of a checkpoint: one *calibration* (all prompts as token ids; constants and query radii), then *prompts* for
each shard of them, one of *weights* for every probe that needs no prompts, then the *report*. What a unit computes
depends on its key alone: not on which worker does it, nor on what was done before, nor on how many shards there are
(rows are joined in order before anything is summed).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ln_probe import __version__
from ln_probe.analyses.files import (
    PARTIAL,
    FileError,
    first_damaged,
    listed,
    read_json,
    remove_listed,
    sha256_of_file,
    verify,
    with_checksum,
    write_atomically,
)
from ln_probe.analyses.probes.base import Failure, Probe
from ln_probe.analyses.probes.registry import OWN, chosen, entries, package_of
from ln_probe.analyses.text import quoted, whole_number
from ln_probe.batch.shards import ShardedCorpus
from ln_probe.batch.suite import Target, numbered
from ln_probe.report import PAGE_FILE, REPORT_FILE
from ln_probe.settings import Settings

WORK_FOLDER = ".ln_probe"
INDEX_FILE = "index.html"
FORMAT = 5
CALIBRATION, PROMPTS, WEIGHTS, REPORT = "calibration", "prompts", "weights", "report"

_UNITS = 2  # what results of units hold; since 2 the calibration keeps the prompts as token ids
# Results of different versions of these are not mixed in one report.
_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "numba")


@cache  # keys are made by the thousand, and each version is read from a file
def _versions() -> dict[str, str]:
    return {name: version(name) for name in _LIBRARIES}


@dataclass(frozen=True)
class Unit:
    """A piece of work on one checkpoint.

    Attributes:
        kind: one of the four above.
        shard: of the prompts; 0 where there is only one unit.
        probe: whose weights are measured; empty otherwise.
    """

    kind: str
    shard: int = 0
    probe: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.probe or self.shard}"

    @property
    def file(self) -> str:
        return f"{self.kind}-{self.probe or f'{self.shard:05d}'}.safetensors"


@dataclass(frozen=True)
class ProbeSpec:
    """A probe of the run, as it is known where it may not be installed.

    Attributes:
        name, package: of the probe.
        watches: whether it sees prompts; weighs: whether the model's weights are enough.
    """

    name: str
    package: str
    watches: bool
    weighs: bool

    @classmethod
    def of(cls, probe: Probe) -> ProbeSpec:
        return cls(probe.name, package_of(probe), probe.needs.prompts, probe.needs.nothing)


@dataclass(frozen=True)
class Run:
    """What is asked for, apart from the models: everything that decides what a report says."""

    out: Path
    settings: Settings
    corpus: ShardedCorpus
    dtype: str | None = None
    device: str | None = None
    allow_pickle: bool = False
    strict: bool = False  # fail where something else than asked would be measured
    command: str = ""
    probes: tuple[ProbeSpec, ...] = ()  # those of the settings; looked up where they are not given
    downloads: Path | None = None  # a cache of the run's own (`downloads.folder_of`); None: the user's

    def __post_init__(self) -> None:
        if not self.probes:
            object.__setattr__(self, "probes", tuple(map(ProbeSpec.of, chosen(self.settings.probes))))

    @property
    def work(self) -> Path:
        return self.out / WORK_FOLDER

    @property
    def corpus_file(self) -> Path:
        """Where the prompts are, one a line."""
        return self.work / "corpus" / self.corpus.name

    @property
    def identity(self) -> dict[str, Any]:
        """What two runs in one folder must agree on, as plain JSON.

        Not how many prompts go through a model together: a run that ran out of memory goes on with fewer.
        """
        return {
            **{k: v for k, v in self.settings.plain.items() if k != "batch_size"},
            "dtype": self.dtype,
            "device": self.device,
            "prompts": self.corpus.given,
            "prompts_sha256": self.corpus.sha256,
            **({} if self.corpus.most is None else {"prompts_most": self.corpus.most}),
        }

    def refusal(self, deviations: Sequence[str]) -> str:
        """Why a model fails that was not, or could not be, measured as asked; empty unless the run is strict."""
        return f"{deviations[0]} (--strict: nothing else than asked is measured)" if self.strict and deviations else ""

    def units(self) -> Iterator[Unit]:
        """The units of one checkpoint, its report left out, calibration first."""
        yield Unit(CALIBRATION)
        if any(p.watches for p in self.probes):
            for shard in range(self.corpus.shards):
                yield Unit(PROMPTS, shard)
        for probe in self.probes:
            if probe.weighs:
                yield Unit(WEIGHTS, probe=probe.name)

    def unit_files(self) -> list[str]:
        """The files that may lie in a checkpoint's folder of results: one for each unit, and a lock."""
        return [*(unit.file for unit in self.units()), f"{Unit(CALIBRATION).file}.lock"]

    def key(self, target: Target) -> str:
        """Hash of everything that decides what is found out about a checkpoint."""
        content = {
            "checkpoint": target.identity,
            "name": target.name,
            "revision": target.revision,
            **self.identity,
            "ln_probe": __version__,
            "versions": _versions() | {p.name: p.package for p in self.probes if p.package != OWN},
            "format": FORMAT,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def unit_key(self, target: Target, unit: Unit) -> str:
        """The same for one unit: with the prompts of its shard."""
        size = self.corpus.per_shard if unit.kind == PROMPTS else 0
        return hashlib.sha256(f"{self.key(target)} {unit} of {size}, {_UNITS}".encode()).hexdigest()

    def folder(self, target: Target) -> Path:
        """Where results about a checkpoint lie until its report is made."""
        return self.work / "units" / self.key(target)[:20]

    def path(self, target: Target, unit: Unit) -> Path:
        return self.folder(target) / unit.file


class BusyError(RuntimeError):
    """Another process is writing this folder."""


@dataclass(frozen=True)
class Slice:
    """Part `number` (from 1) of `count`, for job arrays."""

    number: int
    count: int

    @property
    def lock(self) -> str:
        """How the names of the files begin that it holds while it is at work."""
        return f"slice-{self.number}-of-{self.count}."

    @classmethod
    def parse(cls, text: str) -> Slice:
        """K/N; ValueError otherwise."""
        number, count = (whole_number(part) for part in text.partition("/")[::2])
        if number is None or count is None or not 1 <= number <= count:
            raise ValueError(f"--unit takes K/N with K from 1 to N, such as 3/16, got {quoted(text)}")
        return cls(number, count)

    def units(self, run: Run, targets: Sequence[Target]) -> dict[Target, list[Unit]]:
        """Its units: neighbours in the list, so that few checkpoints are in two slices.

        A slice calibrates the checkpoints it works on if no other has yet; reports are made by joining.
        """
        first = Unit(CALIBRATION)
        rest = [unit for unit in run.units() if unit != first] or [first]  # calibration may be all there is
        pairs = [(target, unit) for target in targets if not target.error for unit in rest]
        found: dict[Target, list[Unit]] = {}
        for target, unit in pairs[
            len(pairs) * (self.number - 1) // self.count : len(pairs) * self.number // self.count
        ]:
            found.setdefault(target, [first]).append(unit)
        return found


@contextmanager
def locked(out: Path, part: Slice | None = None) -> Iterator[None]:
    """Keep other drivers out of the folder; slices of one run may be there together.

    The operating system lets go of the lock when the process ends, however it ends.

    Raises:
        BusyError: another driver (or the same slice) is at work.
    """
    work = out / WORK_FOLDER
    work.mkdir(parents=True, exist_ok=True)
    whole = work / "driver.lock"
    with _holding(whole if part is None else work / f"{part.lock}lock", out):
        for other in sorted(work.glob("slice-*.lock")) if part is None else [whole]:
            with _holding(other, out, 0.0 if part is None else _AT_ONCE_S):
                pass
        yield


# For slices that start together: each holds the folder's own lock for a moment, to see that no whole run does.
_AT_ONCE_S = 5.0


@contextmanager
def _holding(path: Path, out: Path, seconds: float = 0.0) -> Iterator[None]:
    who = path.with_suffix(".json")
    try:
        lock = FileLock(path, timeout=seconds).acquire()
    except Timeout:
        try:
            held = read_json(who)
            by = f"process {held['process']} on {held['machine']}"
        except (OSError, FileError, KeyError, TypeError):
            by = "another process"
        raise BusyError(f"{out} is being written by {by}: wait for it, or choose another --out") from None
    with lock:
        write_atomically(who, json.dumps({"process": os.getpid(), "machine": socket.gethostname()}).encode())
        yield


RUN_FILE = "run.json"


class OtherRunError(ValueError):
    """The folder belongs to another run."""


@dataclass(frozen=True)
class Claimed:
    """What a folder is about: the checkpoints of this command, those of earlier ones, and those that it replaces."""

    targets: list[Target]
    earlier: list[Target]
    removed: list[Target]


def claim(run: Run, targets: Sequence[Target], *, fresh: bool = False) -> Claimed:
    """Write down whose folder this is, and give every checkpoint a folder in which no other one's report is.

    With `fresh`, reports that were made in another way are removed, and failures of earlier commands forgotten;
    reports of other checkpoints that were made in the same way stay.

    Raises:
        OtherRunError: the folder holds reports made in another way (says what differs).
        ValueError: its description is damaged or of another version, or a folder stands where a file will be written.
    """
    held, removed = _held(run, fresh)
    _check_places(run, targets, [*held, *removed])
    for target in removed:
        remove(run, target)
    units = _units(run, fresh=bool(removed))
    placed: list[Target] = []
    for target in targets:
        taken = {t.folder for t in placed}
        placed.append(target if target.error else replace(target, folder=_own_folder(run, target, held, taken, fresh)))
    mine = {t.folder for t in placed if not t.error}
    again = {(t.name, t.revision) for t in placed}
    earlier = [t for t in held if (not (fresh or (t.name, t.revision) in again) if t.error else t.folder not in mine)]
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    everything = [*earlier, *(replace(t, failed=now) if t.error else t for t in placed)]
    content = {
        "format": FORMAT,
        "identity": run.identity,
        "batch_size": run.settings.batch_size,
        "command": run.command,
        "allow_pickle": run.allow_pickle,
        "strict": run.strict,
        "corpus": asdict(run.corpus),
        "targets": [asdict(t) for t in everything],
        "units": {
            "folders": sorted({*units["folders"], *(run.folder(t).name for t in placed if not t.error)}),
            "files": sorted({*units["files"], *run.unit_files()}),
        },
        "probes": [asdict(p) for p in run.probes],
    }
    write_atomically(run.work / RUN_FILE, with_checksum(content))
    return Claimed(placed, earlier, removed)


def _units(run: Run, *, fresh: bool) -> dict[str, list[str]]:
    """Folders and files of results of units, as the description lists them; with `fresh`, they are deleted."""
    try:
        listed = dict[str, list[str]](_read(run.work / RUN_FILE)["units"])
    except (ValueError, KeyError):
        return {"folders": [], "files": []}
    if not fresh:
        return listed
    for name in listed["folders"]:
        remove_listed(run.work / "units" / Path(name).name, listed["files"])
    return {"folders": [], "files": []}


def _check_places(run: Run, targets: Sequence[Target], holders: Sequence[Target]) -> None:
    """Raise ValueError if something stands where a file will be written; said now and not after all the work."""
    names = {t.name for t in targets}
    folders = {t.folder for t in holders if t.name in names and not t.error}
    for path in (run.out / INDEX_FILE, *(run.out / folder / PAGE_FILE for folder in sorted(folders))):
        if path.is_dir():
            raise ValueError(f"{path} is a folder, where a file is to be written: move it, or choose another --out")


def kept(out: Path, part: Slice | None) -> Callable[[Path], bool]:
    """Which files of a run's folder a refused command leaves: all, but for its own locks and prompts of no run."""
    run = out / WORK_FOLDER / RUN_FILE
    try:
        prompts = str(_read(run)["corpus"]["name"])
    except (ValueError, KeyError, TypeError):
        prompts = ""
    locks = "driver." if part is None else part.lock

    def is_kept(path: Path) -> bool:
        corpus = path.relative_to(run.parent).parts[:1] == ("corpus",)
        return run.exists() and not path.name.startswith(locks) and not (corpus and path.stem != Path(prompts).stem)

    return is_kept


def reopen(out: Path) -> tuple[Run, list[Target]]:
    """The run that a folder holds.

    Raises:
        FileNotFoundError: it holds none.
        ValueError: its description is damaged or of another version.
    """
    path = out / WORK_FOLDER / RUN_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{out} holds no run of ln-probe report (no {path})")
    held = _read(path)
    run = Run(
        out,
        Settings.of_plain({**held["identity"], "batch_size": held.get("batch_size")}),
        ShardedCorpus(**held["corpus"]),
        command=held["command"],
        allow_pickle=held["allow_pickle"],
        strict=held.get("strict", False),
        dtype=held["identity"]["dtype"],
        device=held["identity"]["device"],
        probes=tuple(ProbeSpec(**p) for p in held["probes"]),
    )
    return run, [Target.of_plain(t) for t in held["targets"]]


def _held(run: Run, fresh: bool) -> tuple[list[Target], list[Target]]:
    """The checkpoints that the folder is about so far, and those whose reports do not belong with this run's."""
    path = run.work / RUN_FILE
    if not os.path.lexists(path):  # a new folder, or the file was lost: the reports say whose they are
        there = finished(run)
        mine = [t for t, key in there if key == run.key(t)]
        others = [t for t, key in there if key != run.key(t)]
        if others and not fresh:
            raise OtherRunError(
                f"{run.out} holds reports made in another way ({others[0].folder} is one), and nothing says how (no "
                f"{path}): choose another --out, or --fresh to replace it"
            )
        return mine, others
    try:
        held = _read(path)
    except ValueError:
        if not fresh:
            raise
        return [], [t for t, _ in finished(run)]
    targets = [Target.of_plain(t) for t in held["targets"]]
    wrong = [k for k in run.identity if held["identity"].get(k) != run.identity[k]]
    if not wrong:
        return targets, []
    if not fresh:
        what = "; ".join(f"{k}: {held['identity'].get(k)!r} there, {run.identity[k]!r} now" for k in wrong)
        raise OtherRunError(f"{run.out} holds another run ({what}): choose another --out, or --fresh to replace it")
    return [], [t for t in targets if not t.error]


def _own_folder(run: Run, target: Target, held: Sequence[Target], taken: Collection[str], fresh: bool) -> str:
    """The first of name, name-2, … that is free, this checkpoint's own, or a place where no report is lost."""
    holders = {t.folder: t for t in held if not t.error}
    free = (folder for folder in numbered(target.folder) if folder not in taken)
    return next(folder for folder in free if _may_take(run, target, folder, holders.get(folder), fresh))


def _may_take(run: Run, target: Target, folder: str, holder: Target | None, fresh: bool) -> bool:
    path = run.out / folder
    if holder is not None:
        again = (_place(holder.name), holder.revision) == (_place(target.name), target.revision)
        same = holder.identity == target.identity
        return again and (same or fresh or not (path / REPORT_FILE).exists())
    if what_is_done(run.work / "done" / f"{folder}.json").get("key") == run.key(target):
        return True
    return not os.path.lexists(path) or (path.is_dir() and not any(path.iterdir()))


def _place(name: str) -> str:
    """A path by which two ways of writing it are one; names of other kinds stay apart."""
    return os.path.realpath(os.path.expanduser(name))


def _read(path: Path) -> dict[str, Any]:
    try:
        held: dict[str, Any] = read_json(path)
        found = held["format"]
        if found == FORMAT:
            held = verify(held, str(path))
    except (ValueError, KeyError, TypeError, OSError) as error:
        why = f"no {error} in it" if isinstance(error, KeyError) else str(error).removeprefix(f"{path}: ")
        raise ValueError(
            f"{path} is damaged ({why}): delete it and run the same command again (finished reports are kept)"
        ) from error
    if found != FORMAT:
        raise ValueError(f"{path} has format {found!r}, this ln_probe writes {FORMAT}: start anew with --fresh")
    return held


def mark_begun(run: Run, target: Target, files: Collection[str]) -> None:
    """List files that are about to be written to a report's folder: they are ours from now on."""
    _write(run, target, {*files, *_ours(run, target)}, "")


def mark_done(run: Run, target: Target, missing: Sequence[Failure] = ()) -> None:
    """Write down whose report a folder holds; `missing` probes are still to be joined."""
    folder = run.out / target.folder
    files = {REPORT_FILE, *listed(folder / REPORT_FILE)}
    remove_listed(folder, _ours(run, target) - files)  # of a report that was interrupted while it was written
    _write(run, target, files, sha256_of_file(folder / REPORT_FILE), [f.probe for f in missing])


def _write(run: Run, target: Target, files: Collection[str], report: str, missing: Sequence[str] = ()) -> None:
    content = {
        "key": run.key(target),
        "target": asdict(target),
        "files": sorted(files),
        "report": report,
        "missing": list(missing),
    }
    write_atomically(done_file(run, target), with_checksum(content))


def done_file(run: Run, target: Target) -> Path:
    return run.work / "done" / f"{target.folder}.json"


def what_is_done(path: Path) -> dict[str, Any]:
    """What was written down of a report; empty if nothing was, or it is damaged: then the report is recomputed."""
    try:
        return verify(read_json(path), str(path))
    except (OSError, FileError):
        return {}


def _ours(run: Run, target: Target) -> set[str]:
    """The files of a report's folder that we wrote, or were about to write."""
    manifest = run.out / target.folder / REPORT_FILE
    files = listed(manifest)
    return {*what_is_done(done_file(run, target)).get("files", ()), *files, *([REPORT_FILE] if files else [])}


def is_done(run: Run, target: Target) -> tuple[bool, str]:
    """Whether a checkpoint's report is there and whole, and what was wrong if it is there and is not."""
    held = what_is_done(done_file(run, target))
    if held.get("key") != run.key(target) or not held.get("report"):
        return False, ""
    folder = run.out / target.folder
    wrong = first_damaged(folder, {REPORT_FILE: held["report"]}) or first_damaged(folder, listed(folder / REPORT_FILE))
    return not wrong, f"{folder / wrong} is damaged or missing" if wrong else ""


def awaited(run: Run, target: Target) -> bool:
    """Whether a report that is done lacks results of a probe that can be joined now."""
    known = entries()
    return any(name in known for name in what_is_done(done_file(run, target)).get("missing", ()))


def finished(run: Run) -> list[tuple[Target, str]]:
    """The checkpoints whose reports are in the folder, and the key of each, from the files next to the reports."""
    held = map(what_is_done, sorted((run.work / "done").glob("*.json")))
    return [(Target.of_plain(h["target"]), h["key"]) for h in held if h.get("report")]


def remove(run: Run, target: Target) -> None:
    """Delete a report, finished or not; its folder if nothing else is in it."""
    remove_listed(run.out / target.folder, _ours(run, target))
    done_file(run, target).unlink(missing_ok=True)


def remove_partial(run: Run, targets: Sequence[Target]) -> None:
    """Delete half-written files that killed processes left behind. (No other process may be at work in the folder.)"""
    for path in run.work.rglob(f".*{PARTIAL}"):
        if re.fullmatch(rf"\..+\.\d+(-\d+)?{PARTIAL}", path.name) and path.is_file():
            path.unlink()
    for target in targets:
        for name in _ours(run, target):
            for path in (run.out / target.folder).glob(f".{name}.*{PARTIAL}"):
                path.unlink(missing_ok=True)
