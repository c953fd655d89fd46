"""Doing work units: what runs in a worker, on whichever machine it is. A worker holds one checkpoint at a time."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from filelock import FileLock
from torch import nn

from ln_probe.analyses import empirical_queries
from ln_probe.analyses.calibration import Calibration
from ln_probe.analyses.key_sample import KeySample
from ln_probe.analyses.machinery.files import write_atomically
from ln_probe.analyses.machinery.parallel import use_processors
from ln_probe.analyses.probes.protocol import Context, Failure, Piece, Probe, ProbeError
from ln_probe.analyses.probes.registry import chosen, entries, find
from ln_probe.batch import store
from ln_probe.batch.pieces import packed, unpacked
from ln_probe.batch.plan import CALIBRATION, PROMPTS, REPORT, WEIGHTS, Run, Unit
from ln_probe.batch.store import DamagedError, Result, StorageError, Stored
from ln_probe.batch.suite import Target
from ln_probe.hooks.model import HookedModel, context_length, evaluating
from ln_probe.loading.provenance import ModelSource, source_of
from ln_probe.measuring.assembly import assemble, provenance
from ln_probe.measuring.passes import Passes
from ln_probe.measuring.recording import SAMPLED_PROMPTS
from ln_probe.prompting.prompts import cut_notes, summary
from ln_probe.prompting.shards import DEFAULT
from ln_probe.prompting.token_shards import TokenShards
from ln_probe.reporting.exhibits import Exhibits

DONE, FAILED, NO_STORAGE, DAMAGED, DIED, RETURNED = "done", "failed", "no storage", "damaged", "died", "returned"


@dataclass(frozen=True)
class Outcome:
    """How a unit ended.

    Attributes:
        state: DONE; FAILED (the checkpoint's own fault); NO_STORAGE (nobody can go on); DAMAGED (`again` names units
            whose results have to be made once more); DIED (the worker was killed); RETURNED (it was not begun).
        error: what went wrong, in a sentence.
        seconds, tokens: spent and measured.
    """

    state: str
    error: str = ""
    seconds: float = 0.0
    tokens: int = 0
    again: tuple[Unit, ...] = ()


class _MissingError(Exception):
    """Results that this unit builds on are damaged or gone."""

    def __init__(self, units: list[Unit], why: str) -> None:
        super().__init__(why)
        self.units = units


class Worker:
    """Does units of one run, one at a time.

    Torch uses one thread whatever the number of workers, so that results do not depend on it; the geometry, whose
    results do not depend on threads, uses `processors`.
    """

    def __init__(self, run: Run, processors: int | None = None) -> None:
        self.run = run
        torch.set_num_threads(1)
        use_processors(processors)
        self._target: Target | None = None
        self._passes: Passes | None = None
        self._tokens: TokenShards | None = None
        self._calibration: Calibration | None = None

    def do(self, target: Target, unit: Unit) -> Outcome:
        """Do a unit, unless its result is there and whole. Never raises: what goes wrong is in the outcome."""
        start = time.perf_counter()
        try:
            tokens = self._do(target, unit)
        except _MissingError as error:
            return Outcome(DAMAGED, str(error), again=tuple(error.units))
        except StorageError as error:
            return Outcome(NO_STORAGE, str(error))
        except Exception as error:
            self._forget()
            return Outcome(FAILED, f"{type(error).__name__}: {error}", time.perf_counter() - start)
        return Outcome(DONE, "", time.perf_counter() - start, tokens)

    def _do(self, target: Target, unit: Unit) -> int:
        if unit.kind == REPORT:
            Joining(self.run, target).make()
            return 0
        doing: dict[str, Callable[[Target, Unit], tuple[Result, int]]] = {
            CALIBRATION: self._calibrate,
            PROMPTS: self._measure,
            WEIGHTS: self._weigh,
        }
        path, key = self.run.path(target, unit), self.run.unit_key(target, unit)
        with ExitStack() as stack:
            if unit.kind == CALIBRATION:  # two slices of a run may want the same one
                with store.storing(self.run.out):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(f"{path}.lock"))
                if _whole(path, key):
                    return 0
            with evaluating(self._load(target).model):
                result, tokens = doing[unit.kind](target, unit)
            with store.storing(self.run.out):
                store.write(path, key, result)
        return tokens

    def _forget(self) -> None:
        self._target = self._passes = self._tokens = self._calibration = None
        gc.collect()

    def _load(self, target: Target) -> Passes:
        from ln_probe.models import load_model

        if self._target != target or self._passes is None:
            self._forget()  # before the next one is read: never two in memory
            model = load_model(
                target.name, device=self.run.device, dtype=self.run.dtype, revision=target.revision,
                allow_pickle=self.run.allow_pickle,
            )  # fmt: skip
            self._passes = Passes(cast(HookedModel, model), self.run.settings)
            self._tokens = TokenShards(self.run, target, model=self._passes.model)
            self._target = target
        return self._passes

    def _calibrate(self, target: Target, unit: Unit) -> tuple[Result, int]:
        passes, tokens = self._load(target), self._tokens
        assert tokens is not None
        shards = range(self.run.corpus.shards)
        found = passes.calibrate(pair for shard in shards for pair in tokens[shard].numbered())
        prompts = summary(tokens[0].source, (row for shard in shards for row in tokens[shard].rows))
        given = [length for shard in shards for length in tokens[shard].given]
        context = context_length(passes.model)
        cut = cut_notes(given, min(self.run.settings.max_tokens, context), context)
        exhibits, index = self._record(passes, tokens, len(given)).plain()
        info = {
            "exhibits": index,
            "constants": dict(found.constants),
            "unsupported": {str(k): v for k, v in found.unsupported.items()},
            "notes": [*tokens[0].notes, *cut, *found.notes],
            "sample": None if found.sample is None else found.sample.to_dict(),
            "prompts": prompts,
            "tokens": tokens.key,
            "model": asdict(source_of(cast(nn.Module, passes.model))),
            "d_model": int(passes.model.cfg.d_model),
        }
        arrays: dict[str, np.ndarray] = {f"radii/{layer}": radii for layer, radii in found.radii.items()}
        arrays |= empirical_queries.arrays(found.empirical)
        arrays |= {f"exhibits/{name}": array for name, array in exhibits.items()}
        return Result(arrays, {"norms": found.norms}, info), prompts["tokens"]

    def _record(self, passes: Passes, tokens: TokenShards, count: int) -> Exhibits:
        """What the report will show of the first prompts; the marks of their keys come when all are joined."""
        rows: list[torch.Tensor] = []
        strings: list[list[str]] = []
        for shard in range(self.run.corpus.shards):
            if len(rows) >= SAMPLED_PROMPTS:
                break
            held = tokens[shard]
            rows += held.rows
            strings += [[held.names[i] for i in row.tolist()] for row in held.rows]
        return passes.record(rows[:SAMPLED_PROMPTS], strings[:SAMPLED_PROMPTS], count=count)

    def _measure(self, target: Target, unit: Unit) -> tuple[Result, int]:
        passes, tokens = self._load(target), self._tokens
        assert tokens is not None
        if self._calibration is None:
            self._calibration = calibration(_opened(self.run, target, Unit(CALIBRATION))[0])
        shard = tokens[unit.shard]
        default = self.run.corpus.given == DEFAULT
        found = passes.measure(shard.numbered(), self._calibration, default=default)
        return packed(found), sum(map(len, shard.rows))

    def _weigh(self, target: Target, unit: Unit) -> tuple[Result, int]:
        passes = self._load(target)
        probe = next(p for p in passes.probes if p.name == unit.probe)
        return packed({probe.name: passes.weigh(probe)}), 0


def calibration(stored: Stored) -> Calibration:
    """What a calibration unit found."""
    return Calibration(
        norms=stored.table("norms"),
        constants=stored.info["constants"],
        radii={int(layer): radii for layer, radii in stored.arrays("radii/").items()},
        unsupported={int(layer): why for layer, why in stored.info["unsupported"].items()},
        notes=tuple(stored.info["notes"]),
        empirical=empirical_queries.of_arrays(stored.arrays("empirical/")),
        sample=None if stored.info["sample"] is None else KeySample(**stored.info["sample"]),
    )


def _whole(path: Path, key: str) -> bool:
    try:
        Stored(path, key)
    except (FileNotFoundError, DamagedError):
        return False
    return True


def _opened(run: Run, target: Target, *units: Unit) -> list[Stored]:
    """Results of units, verified.

    Raises:
        _MissingError: names those that have to be made again.
    """
    found, missing, why = [], [], ""
    for unit in units:
        try:
            found.append(Stored(run.path(target, unit), run.unit_key(target, unit)))
        except (FileNotFoundError, DamagedError) as error:
            missing.append(unit)
            why = str(error)
            run.path(target, unit).unlink(missing_ok=True)
    if missing:
        raise _MissingError(missing, why)
    return found


class Joining:
    """Makes the report of a checkpoint from its units' results; the model is not needed any more."""

    def __init__(self, run: Run, target: Target) -> None:
        self.run, self.target = run, target

    def make(self) -> None:
        """Join, save, and write down that it is done; then the units' results go.

        Where a probe of the run is not installed, the report is made of the others' pieces and says so; all pieces are
        kept, and the report does not count as done.
        """
        run, target = self.run, self.target
        units = list(run.units())
        by_unit = dict(zip(units, _opened(run, target, *units), strict=True))
        base = by_unit[Unit(CALIBRATION)]
        made = calibration(base)
        tokens = TokenShards(run, target, key=base.info["tokens"])
        try:
            token = _strings(tokens, run.corpus.shards)
        except (FileNotFoundError, DamagedError) as error:  # the calibration makes them
            run.path(target, Unit(CALIBRATION)).unlink(missing_ok=True)
            raise _MissingError([Unit(CALIBRATION)], str(error)) from error
        pieces: dict[str, list[Piece | Failure]] = {}
        for unit, stored in by_unit.items():
            for name, piece in unpacked(stored).items() if unit.kind != CALIBRATION else ():
                pieces.setdefault(name, []).append(piece)
        probes, missing = self._installed()
        settings, source = run.settings, ModelSource(**_tuples(base.info["model"]))
        request = {**run.identity, "model": target.name, "revision": target.revision}
        report = assemble(
            probes,
            pieces,
            Context(made, settings.layers, token, settings.keys, settings.seed),
            exhibits=Exhibits.of_plain(base.arrays("exhibits/"), base.info["exhibits"]),
            provenance=provenance(source, base.info["prompts"], settings, made, base.info["d_model"], probes)
            | {"request": request, "command": run.command},
            notes=made.notes,
            failures=missing,
        )
        folder = run.out / target.folder
        with store.storing(run.out):
            report.save(folder)
            mark_done(run, target, missing)
            if not missing:
                shutil.rmtree(run.folder(target), ignore_errors=True)

    def _installed(self) -> tuple[tuple[Probe, ...], list[Failure]]:
        """The probes of the run, and those that are not here."""
        here, missing = [], []
        for asked in self.run.probes:
            try:
                here.append(find(asked.name))
            except ProbeError as error:
                why = f"it is not installed here ({error}); its pieces are kept: install it and run the same command"
                missing.append(Failure(asked.name, asked.package, why))
        return chosen(here), missing


def _tuples(plain: Any) -> Any:
    """JSON's lists as the tuples they were."""
    if isinstance(plain, dict):
        return {k: _tuples(v) for k, v in plain.items()}
    return tuple(map(_tuples, plain)) if isinstance(plain, list) else plain


def _strings(tokens: TokenShards, shards: int) -> Callable[[int, int], str]:
    ids, names = [], dict[int, str]()
    for shard in range(shards):
        held = tokens[shard]
        ids += [row.numpy().astype(np.int32) for row in held.rows]
        names |= held.names
    return lambda prompt, position: names[int(ids[prompt][position])]


def mark_done(run: Run, target: Target, missing: Sequence[Failure] = ()) -> None:
    """Write down whose report a folder holds, and what its files are; `missing` probes are still to be joined."""
    content = {
        "key": run.key(target), "files": _hashes(run.out / target.folder), "missing": [f.probe for f in missing],
    }  # fmt: skip
    write_atomically(done_file(run, target), json.dumps(content, indent=1).encode())


def done_file(run: Run, target: Target) -> Path:
    return run.work / "done" / f"{target.folder}.json"


def is_done(run: Run, target: Target) -> tuple[bool, str]:
    """Whether a checkpoint's report is there and whole, and what was wrong if it is there and is not."""
    try:
        held = json.loads(done_file(run, target).read_text(encoding="utf-8"))
        key, files = held["key"], held["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return False, ""
    if key != run.key(target):
        return False, ""
    folder = run.out / target.folder
    now = _hashes(folder)
    wrong = [name for name, digest in files.items() if now.get(name) != digest]
    return not wrong, f"{folder / wrong[0]} is damaged or missing" if wrong else ""


def awaited(run: Run, target: Target) -> bool:
    """Whether a report that is done lacks results of a probe that can be joined now."""
    try:
        missing = json.loads(done_file(run, target).read_text(encoding="utf-8"))["missing"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    known = entries()
    return any(name in known for name in missing)


def _hashes(folder: Path) -> dict[str, str]:
    from ln_probe.loading.provenance import sha256_of_file

    files = sorted(p for p in folder.glob("*") if p.is_file() and not p.name.startswith("."))
    return {path.name: sha256_of_file(path) for path in files}
