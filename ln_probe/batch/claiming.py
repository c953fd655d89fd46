"""Whose an output folder is: the run it belongs to, the checkpoints it is about, and the folder of each report."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_probe.analyses.machinery.files import read_json, remove_listed, verify, with_checksum, write_atomically
from ln_probe.batch.finished import finished, remove, what_is_done
from ln_probe.batch.plan import FORMAT, INDEX_FILE, WORK_FOLDER, Asked, Run
from ln_probe.batch.shards import ShardedCorpus
from ln_probe.batch.suite import Target
from ln_probe.report import PAGE_FILE, REPORT_FILE
from ln_probe.settings import Settings

if TYPE_CHECKING:
    from ln_probe.batch.drive import Slice

RUN_FILE = "run.json"


class OtherRunError(ValueError):
    """The folder belongs to another run."""


class BlockedError(ValueError):
    """Something that is no file of ours stands where one will be written."""


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
        BlockedError: a folder stands where a file will be written.
        ValueError: its description is damaged or of another version.
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
    """Raise BlockedError if something stands where a file will be written; said now and not after all the work."""
    names = {t.name for t in targets}
    folders = {t.folder for t in holders if t.name in names and not t.error}
    for path in (run.out / INDEX_FILE, *(run.out / folder / PAGE_FILE for folder in sorted(folders))):
        if path.is_dir():
            raise BlockedError(f"{path} is a folder, where a file is to be written: move it, or choose another --out")


def others(out: Path, part: Slice) -> Callable[[Path], bool]:
    """Which files of a run's folder may be another slice's: all, but for this one's locks and prompts of no run."""
    try:
        prompts = str(_read(out / WORK_FOLDER / RUN_FILE)["corpus"]["folder"])
    except (ValueError, KeyError, TypeError):
        prompts = ""
    run = (out / WORK_FOLDER / RUN_FILE).exists()

    def kept(path: Path) -> bool:
        corpus = path.relative_to(out / WORK_FOLDER).parts[:1] == ("corpus",)
        return run and not path.name.startswith(part.lock) and not (corpus and prompts not in path.parts)

    return kept


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
        probes=tuple(Asked(**p) for p in held["probes"]),
    )
    return run, [Target.of_plain(t) for t in held["targets"]]


def _held(run: Run, fresh: bool) -> tuple[list[Target], list[Target]]:
    """The checkpoints that the folder is about so far, and those whose reports do not belong beside this run's."""
    path = run.work / RUN_FILE
    if not os.path.lexists(path):  # a new folder, or the file was lost: the reports say whose they are
        there = finished(run)
        mine = [t for t, key in there if key == run.key(t)]
        others = [t for t, key in there if key != run.key(t)]
        if others and not fresh:
            raise OtherRunError(
                f"{run.out} holds reports made in another way ({others[0].folder} is one), and nothing says how (no "
                f"{path}): choose another --out, or --fresh to replace what is there"
            )
        return mine, others
    try:
        held = _read(path)
    except ValueError:
        if not fresh:
            raise
        known = {t.folder: t for t in _named(run)} | {t.folder: t for t, _ in finished(run)}
        return [], list(known.values())
    targets = [Target.of_plain(t) for t in held["targets"]]
    wrong = [k for k in run.identity if held["identity"].get(k) != run.identity[k]]
    if not wrong:
        return targets, []
    if not fresh:
        what = "; ".join(f"{k}: {held['identity'].get(k)!r} there, {run.identity[k]!r} now" for k in wrong)
        raise OtherRunError(
            f"{run.out} holds another run ({what}): choose another --out, or --fresh to replace what is there"
        )
    return [], [t for t in targets if not t.error]


def _named(run: Run) -> list[Target]:
    """The checkpoints whose reports a file of another version, or a damaged one, names; as far as they are there."""
    try:
        held = read_json(run.work / RUN_FILE)["targets"]
        found = [Target(str(t["name"]), t["revision"], Path(str(t["folder"])).name) for t in held]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [t for t in found if t.folder not in ("", "..") and (run.out / t.folder / REPORT_FILE).is_file()]


def _own_folder(run: Run, target: Target, held: Sequence[Target], taken: Collection[str], fresh: bool) -> str:
    """The first of name, name-2, … that is free, this checkpoint's own, or a place where no report is lost."""
    holders = {t.folder: t for t in held if not t.error}
    base = target.folder
    number, folder = 1, base
    while folder in taken or not _may_take(run, target, folder, holders.get(folder), fresh):
        number += 1
        folder = f"{base}-{number}"
    return folder


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
