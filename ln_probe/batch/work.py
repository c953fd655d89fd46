"""Doing work units: what runs in a worker, on whichever machine it is. A worker holds one checkpoint at a time."""

from __future__ import annotations

import gc
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from filelock import FileLock
from torch import nn

from ln_probe.analyses import key_tables, unembedding
from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.geometry.parallel import use_processors
from ln_probe.analyses.key_tables import MEASURES, Block, KeyRows
from ln_probe.analyses.variants import VARIANTS
from ln_probe.batch import store
from ln_probe.batch.plan import CALIBRATION, PROMPTS, REPORT, UNEMBEDDING, Run, Unit
from ln_probe.batch.store import DamagedError, Result, StorageError, Stored
from ln_probe.batch.suite import Target
from ln_probe.exhibits import Exhibits
from ln_probe.hooks.model import HookedModel, context_length, evaluating
from ln_probe.loading.provenance import ModelSource
from ln_probe.passes import Calibration, Passes, effects_table
from ln_probe.prompting.prompts import cut_notes, namer, summary
from ln_probe.prompting.token_shards import TokenShards
from ln_probe.recording import SAMPLED_PROMPTS, marked

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
            Report(self.run, target).make()
            return 0
        doing: dict[str, Callable[[Target, Unit], tuple[Result, int]]] = {
            CALIBRATION: self._calibrate, PROMPTS: self._measure, UNEMBEDDING: self._unembedding,
        }  # fmt: skip
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
        from ln_probe.models import source_of

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
            "constants": dict(found.constants), "unsupported": {str(k): v for k, v in found.unsupported.items()},
            "notes": [*tokens[0].notes, *cut, *found.notes], "prompts": prompts, "tokens": tokens.key,
            "model": asdict(source_of(cast(nn.Module, passes.model))), "d_model": int(passes.model.cfg.d_model),
        }  # fmt: skip
        arrays: dict[str, np.ndarray] = {f"radii/{layer}": radii for layer, radii in found.radii.items()}
        arrays |= {f"exhibits/{name}": array for name, array in exhibits.items()}
        return Result(arrays, {"layernorms": found.layernorms}, info), prompts["tokens"]

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
            self._calibration = calibration(_opened(self.run, target, Unit(CALIBRATION)))
        shard = tokens[unit.shard]
        measured = passes.measure(shard.numbered(), self._calibration)
        arrays: dict[str, np.ndarray] = {}
        for r in measured.keys:
            place = f"{r.space}/{r.layer}/{r.variant}"
            arrays |= {f"{place}/{m}": a for m, a in r.measures.items()}
            arrays |= {f"{place}/prompts": r.prompts, f"{place}/lengths": r.lengths}
            if r.uniform is not None:
                arrays[f"{place}/uniform"] = r.uniform
        about = [
            {"layer": r.layer, "space": r.space, "variant": r.variant, "heads": list(r.heads), "dim": r.dim,
             "theorem": r.theorem, "no_op": r.no_op}
            for r in measured.keys
        ]  # fmt: skip
        tables = {} if measured.effects is None else {"effects": measured.effects}
        info = {"rows": about, "notes": list(measured.notes)}
        return Result(arrays, tables, info), sum(map(len, shard.rows))

    def _unembedding(self, target: Target, unit: Unit) -> tuple[Result, int]:
        passes = self._load(target)
        table, notes = passes.unembedding(namer(passes.model))
        return Result({}, {"unembedding": table}, {"notes": list(notes)}), 0


def calibration(stored: Stored) -> Calibration:
    """What a calibration unit found."""
    return Calibration(
        layernorms=stored.table("layernorms"),
        constants=stored.info["constants"],
        radii={int(layer): radii for layer, radii in stored.arrays("radii/").items()},
        unsupported={int(layer): why for layer, why in stored.info["unsupported"].items()},
        notes=tuple(stored.info["notes"]),
    )


def _whole(path: Path, key: str) -> bool:
    try:
        Stored(path, key)
    except (FileNotFoundError, DamagedError):
        return False
    return True


def _opened(run: Run, target: Target, *units: Unit) -> Any:
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
    return found[0] if len(units) == 1 else found


class Report:
    """Makes the report of a checkpoint from its units' results; the model is not needed any more."""

    def __init__(self, run: Run, target: Target) -> None:
        self.run, self.target = run, target

    def make(self) -> None:
        """Join, save, and write down that it is done; then the units' results go."""
        from ln_probe import report as reports
        from ln_probe.probing import provenance

        run, target = self.run, self.target
        units = list(run.units())
        found = _opened(run, target, *units) if len(units) > 1 else [_opened(run, target, *units)]
        by_unit = dict(zip(units, found, strict=True))
        base = by_unit[Unit(CALIBRATION)]
        made = calibration(base)
        tokens = TokenShards(run, target, key=base.info["tokens"])
        try:
            token = _strings(tokens, run.corpus.shards)
        except (FileNotFoundError, DamagedError) as error:  # the calibration makes them
            run.path(target, Unit(CALIBRATION)).unlink(missing_ok=True)
            raise _MissingError([Unit(CALIBRATION)], str(error)) from error
        shards = [stored for unit, stored in by_unit.items() if unit.kind == PROMPTS]
        heads, keys = key_tables.tables(
            _blocks(shards), made.radii, token,
            every=run.settings.keys == "all", seed=run.settings.seed,
        )  # fmt: skip
        effects, causal_notes = _effects(shards, run.settings.seed)
        last = by_unit.get(Unit(UNEMBEDDING))
        source = ModelSource(**_tuples(base.info["model"]))
        request = {**run.identity, "model": target.name, "revision": target.revision}
        report = reports.Report(
            layernorms=made.layernorms,
            heads=heads,
            keys=keys,
            causal=effects,
            unembedding=pd.DataFrame(columns=list(unembedding.COLUMNS)) if last is None else last.table("unembedding"),
            exhibits=marked(Exhibits.of_plain(base.arrays("exhibits/"), base.info["exhibits"]), _blocks(shards)),
            provenance=provenance(source, base.info["prompts"], run.settings, made, base.info["d_model"])
            | {"request": request, "command": run.command},
            notes=(*made.notes, *causal_notes, *([] if last is None else last.info["notes"])),
        )
        folder = run.out / target.folder
        with store.storing(run.out):
            report.save(folder)
            mark_done(run, target)
            shutil.rmtree(run.folder(target), ignore_errors=True)


def _effects(shards: list[Stored], seed: int) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The causal table and its notes."""
    measured = [stored.table("effects") for stored in shards if stored.has_table("effects")]
    table, notes = effects_table(measured, seed)
    return table, (*dict.fromkeys(note for stored in shards for note in stored.info["notes"]), *notes)


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


def _blocks(shards: list[Stored]) -> Iterator[Block]:
    """What the shards measured, a (layer, space) at a time, in the order of the tables."""
    about: dict[tuple[int, str, str], dict[str, Any]] = {}
    for stored in shards:
        for row in stored.info["rows"]:
            about.setdefault((row["layer"], row["space"], row["variant"]), row)
    places = sorted({(layer, space) for layer, space, _ in about}, key=lambda p: key_tables.order(*p))
    for layer, space in places:
        block: dict[str, KeyRows] = {}
        for variant in VARIANTS:
            row = about.get((layer, space, variant))
            if row is None:
                continue
            parts = []
            for stored in shards:
                arrays = stored.arrays(f"{space}/{layer}/{variant}/")
                if arrays:
                    parts.append(
                        KeyRows(
                            **{**row, "heads": tuple(row["heads"])},
                            prompts=arrays["prompts"],
                            lengths=arrays["lengths"],
                            measures={m: arrays[m] for m in MEASURES if m in arrays},
                            uniform=arrays.get("uniform"),
                        )
                    )
            block[variant] = key_tables.join(parts)
        yield block


def mark_done(run: Run, target: Target) -> None:
    """Write down whose report a folder holds, and what its files are."""
    content = {"key": run.key(target), "files": _hashes(run.out / target.folder)}
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


def _hashes(folder: Path) -> dict[str, str]:
    from ln_probe.loading.provenance import sha256_of_file

    files = sorted(p for p in folder.glob("*") if p.is_file() and not p.name.startswith("."))
    return {path.name: sha256_of_file(path) for path in files}
