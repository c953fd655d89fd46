"""Checkpoints of the hub within a bound of disk space: the next is fetched while one is measured, then deleted.

They lie in a cache of the run's own, OUT/.ln_probe/hub, so that nothing is deleted but what the run has downloaded. A
checkpoint that is whole in the user's cache is read there.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from ln_probe.analyses import progress
from ln_probe.analyses.files import temporary_folder
from ln_probe.analyses.processes import starting_workers
from ln_probe.analyses.text import quoted
from ln_probe.batch.cost import size
from ln_probe.batch.suite import SuiteError, Target, hub_info, is_on_hub
from ln_probe.loading.hub import fetch_ahead

if TYPE_CHECKING:
    from ln_probe.batch.run import Run, Slice, Unit

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def bytes_of(text: str) -> int:
    """Bytes of 500MB, 1.5 GB or 2T (multiples of 1024, as `plan` shows them).

    Raises:
        ValueError: something else.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([kmgt]?)i?b?", text.strip().lower())
    if found is None:
        raise ValueError(f"--disk takes a size such as 500MB or 2GB, got {quoted(text)}")
    return int(float(found[1]) * _UNITS[found[2]])


def within(targets: Sequence[Target], bound: int, out: Path) -> list[Target]:
    """The checkpoints, those whose size the hub does not tell as failed.

    Raises:
        SuiteError: a checkpoint does not fit into the bound, or onto the disk; says how much is needed.
    """
    there = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    fetched = sum(path.lstat().st_size for path in out.glob(".ln_probe/hub*/models--*/blobs/*"))  # by earlier commands
    largest = sorted(targets, key=lambda target: -hub_info(target).download_bytes)[:2]
    most = [hub_info(target).download_bytes for target in largest]
    if most and most[0] > min(bound, free := shutil.disk_usage(there).free + fetched):
        room = f"--disk {size(bound)}" if bound < free else f"the disk of {out} ({size(free)} free)"
        raise SuiteError(
            f"{room} has no room for {largest[0].label}, whose files take {size(most[0])}: at least {size(most[0])} "
            f"are needed, and {size(sum(most))} to fetch the next checkpoint while one is measured"
        )
    unknown = "the hub does not tell its size, so it cannot be kept within --disk: try again, or leave out --disk"
    return [
        replace(t, error=unknown) if not t.error and is_on_hub(t) and not hub_info(t).config else t for t in targets
    ]


def folder_of(run: Run, part: Slice | None) -> Path:
    """Where a run, or a slice of it, keeps what it has downloaded."""
    return run.work / ("hub" if part is None else f"hub-{part.number}-of-{part.count}")


class Downloads:
    """Fetches the checkpoints of `todo` ahead of the workers, in a separate process, into `bound` bytes of a folder."""

    def __init__(
        self, folder: Path, bound: int, todo: Mapping[Target, Sequence[Unit]], *, allow_pickle: bool = False
    ) -> None:
        self.folder, self.bound, self.allow_pickle = folder, bound, allow_pickle
        # In the order in which they will be needed.
        self._waiting = {t: held for t, units in todo.items() if units and (held := hub_info(t).download_bytes)}
        self._held: dict[Target, int] = {}  # being fetched, or here
        self._fetching: tuple[Target, multiprocessing.process.BaseProcess] | None = None
        self._open = ExitStack()
        self._sign = self._open.enter_context(temporary_folder()) / "fetching"
        totals = zip(self._waiting, accumulate(self._waiting.values()), strict=True)
        self._delete_all_but([target for target, total in totals if total <= bound])
        # Files that belong to no revision are of downloads that were interrupted.
        linked = {path.resolve() for path in folder.glob("models--*/snapshots/*/*")}
        for path in folder.glob("models--*/blobs/*"):
            if path.resolve() not in linked:
                path.unlink()

    @property
    def awaited(self) -> Collection[Target]:
        """The checkpoints that are not here yet."""
        fetching = [self._fetching[0]] if self._fetching is not None and self._fetching[1].is_alive() else []
        return {*self._waiting, *fetching}

    @property
    def busy(self) -> bool:
        """Whether one is being fetched."""
        return self._fetching is not None

    def stage(self) -> progress.Progress:
        """What is being fetched, and how much of it is here."""
        return progress.read(self._sign) if self.busy else progress.Progress()

    def advance(self, begun: Collection[Target], over: Collection[Target]) -> None:
        """Delete checkpoints that are over, and fetch the next if all that are here are begun and there is room."""
        if any(t in over for t in self._held):
            self._held = {t: held for t, held in self._held.items() if t not in over}
            self._delete_all_but(self._held)
        if self._fetching is not None and not self._fetching[1].is_alive():
            self._fetching = None
        if self._fetching is None and self._waiting and all(t in begun for t in self._held):
            target, held = next(iter(self._waiting.items()))
            if sum(self._held.values()) + held <= self.bound:
                del self._waiting[target]
                self._held[target] = held
                given = (
                    target.identity.rpartition("@")[0],
                    target.revision,
                    self.allow_pickle,
                    self.folder,
                    self._sign,
                )
                process = multiprocessing.get_context("spawn").Process(target=fetch_ahead, args=given, daemon=True)
                with starting_workers():
                    process.start()
                self._fetching = target, process

    def wait(self, seconds: float) -> None:
        """Until the checkpoint is here that is being fetched."""
        if self._fetching is not None:
            self._fetching[1].join(seconds)

    def close(self) -> None:
        """Stop fetching. Checkpoints that are not done stay for the next command."""
        if self._fetching is not None:
            self._fetching[1].terminate()
            self._fetching[1].join()
        self._open.close()
        if not self._held and not self._waiting:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _delete_all_but(self, targets: Iterable[Target]) -> None:
        from huggingface_hub import scan_cache_dir

        if not self.folder.is_dir():
            return
        kept, found = {t.identity.rpartition("@")[2] for t in targets}, scan_cache_dir(self.folder)
        there = {revision.commit_hash for repository in found.repos for revision in repository.revisions}
        found.delete_revisions(*(there - kept)).execute()
