"""Reports that are finished: whose each is, and that its files are what was written."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ln_probe.analyses.machinery import plain_json
from ln_probe.analyses.machinery.files import write_atomically
from ln_probe.analyses.probes.protocol import Failure
from ln_probe.analyses.probes.registry import entries
from ln_probe.batch.plan import Run
from ln_probe.batch.suite import Target
from ln_probe.reporting.exhibits import EXHIBITS_FILE
from ln_probe.reporting.report import REPORT_FILE


def mark_done(run: Run, target: Target, missing: Sequence[Failure] = ()) -> None:
    """Write down whose report a folder holds, and what its files are; `missing` probes are still to be joined."""
    content = {
        "key": run.key(target),
        "files": _hashes(run.out / target.folder),
        "missing": [f.probe for f in missing],
        "target": asdict(target),
    }
    write_atomically(done_file(run, target), plain_json.sealed(content))


def done_file(run: Run, target: Target) -> Path:
    return run.work / "done" / f"{target.folder}.json"


def what_is_done(path: Path) -> dict[str, Any]:
    """What `mark_done` wrote; empty if it is not there or damaged: then the report is made again."""
    try:
        return plain_json.opened(plain_json.read(path), str(path))
    except (OSError, ValueError):
        return {}


def is_done(run: Run, target: Target) -> tuple[bool, str]:
    """Whether a checkpoint's report is there and whole, and what was wrong if it is there and is not."""
    held = what_is_done(done_file(run, target))
    if held.get("key") != run.key(target):
        return False, ""
    folder = run.out / target.folder
    now = _hashes(folder)
    wrong = [name for name, digest in held["files"].items() if now.get(name) != digest]
    return not wrong, f"{folder / wrong[0]} is damaged or missing" if wrong else ""


def awaited(run: Run, target: Target) -> bool:
    """Whether a report that is done lacks results of a probe that can be joined now."""
    known = entries()
    return any(name in known for name in what_is_done(done_file(run, target)).get("missing", ()))


def finished(run: Run) -> list[tuple[Target, str]]:
    """The checkpoints whose reports are in the folder, and the key of each, from what was left beside the reports."""
    held = map(what_is_done, sorted((run.work / "done").glob("*.json")))
    return [(Target(**h["target"]), h["key"]) for h in held if h]


def remove(run: Run, target: Target) -> None:
    """Delete a report, finished or not, with what was kept to make it; its folder if nothing else is in it."""
    path = done_file(run, target)
    folder = run.out / target.folder
    written = [REPORT_FILE, EXHIBITS_FILE, "report.html", *(p.name for p in folder.glob("*.parquet"))]
    for name in what_is_done(path).get("files", written):
        (folder / Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(run.work / "units", ignore_errors=True)
    path.unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _hashes(folder: Path) -> dict[str, str]:
    from ln_probe.loading.provenance import sha256_of_file

    files = sorted(p for p in folder.glob("*") if p.is_file() and not p.name.startswith("."))
    return {path.name: sha256_of_file(path) for path in files}
