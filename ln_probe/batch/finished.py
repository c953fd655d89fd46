"""Reports that are finished: whose each is, and that its files are what was written.

`OUT/.ln_probe/done/<folder>.json` lists the files of the report in `OUT/<folder>/` before the first of them is written,
and holds the checksum of report.json, which has those of all others, once the last one is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ln_probe.analyses.machinery.files import (
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
from ln_probe.analyses.probes.base import Failure
from ln_probe.analyses.probes.registry import entries
from ln_probe.batch.plan import Run
from ln_probe.batch.suite import Target
from ln_probe.report import REPORT_FILE


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
    """What was written down of a report; empty if nothing was, or it is damaged: then the report is made again."""
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
    """The checkpoints whose reports are in the folder, and the key of each, from what was left beside the reports."""
    held = map(what_is_done, sorted((run.work / "done").glob("*.json")))
    return [(Target.of_plain(h["target"]), h["key"]) for h in held if h.get("report")]


def remove(run: Run, target: Target) -> None:
    """Delete a report, finished or not; its folder if nothing else is in it."""
    remove_listed(run.out / target.folder, _ours(run, target))
    done_file(run, target).unlink(missing_ok=True)


def remove_partial(run: Run, targets: Sequence[Target]) -> None:
    """Delete half-written files that killed processes left behind. (Nobody else may be at work in the folder.)"""
    for path in run.work.rglob(f".*{PARTIAL}"):
        if re.fullmatch(rf"\..+\.\d+{PARTIAL}", path.name) and path.is_file():
            path.unlink()
    for target in targets:
        for name in _ours(run, target):
            for path in (run.out / target.folder).glob(f".{name}.*{PARTIAL}"):
                path.unlink(missing_ok=True)
