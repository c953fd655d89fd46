"""Doing work units: what runs in a worker, on whichever machine it is. A worker holds one checkpoint at a time."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from filelock import FileLock
from torch import nn

from ln_probe.analyses.constants import Calibration, Constants, KeySample, ellipsoid_arrays, ellipsoids_of_arrays
from ln_probe.analyses.files import remove_listed
from ln_probe.analyses.geometry.compiled import use_processors
from ln_probe.analyses.probes.base import Context, Failure, Piece, Probe, ProbeError
from ln_probe.analyses.probes.edited_runs import SINGLE_NORM_PROMPTS
from ln_probe.analyses.probes.registry import chosen, find
from ln_probe.analyses.processes import one_blas_thread
from ln_probe.batch import results
from ln_probe.batch.exits import why_failed
from ln_probe.batch.results import (
    DAMAGED,
    DONE,
    FAILED,
    NO_STORAGE,
    DamagedError,
    Outcome,
    Result,
    StorageError,
    Stored,
    packed,
    unpacked,
)
from ln_probe.batch.run import CALIBRATION, INDEX_FILE, PROMPTS, REPORT, WEIGHTS, Run, Unit, mark_begun, mark_done
from ln_probe.batch.shards import DEFAULT, prompts_of
from ln_probe.batch.suite import Target, check_same
from ln_probe.exhibits import Exhibits
from ln_probe.hooks.default_tokens import check_contained
from ln_probe.hooks.model import HookedModel
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.optimal_constants import Halves
from ln_probe.hooks.scales import Constant
from ln_probe.loading.hub import FULL, downloads_in
from ln_probe.loading.provenance import ModelSource, source_of
from ln_probe.measure import assemble, provenance
from ln_probe.passes import Passes
from ln_probe.prompts import calibration_prompts, labels_of, skip_note
from ln_probe.recording import record
from ln_probe.report import REPORT_FILE, files_of
from ln_probe.seal import Seal
from ln_probe.settings import check_unchanged, read_groups

_CONSTANTS = ("groups", "sums", "counts")  # the arrays that constants are made of


class _MissingError(Exception):
    """Results that this unit builds on are damaged or gone."""

    def __init__(self, units: list[Unit], why: str) -> None:
        super().__init__(why)
        self.units = units


class MixedError(ValueError):
    """Results of one checkpoint were made of different inputs."""


class Worker:
    """Does units of one run, one at a time.

    Torch uses one thread for any number of workers, so that results do not depend on it; the geometry, whose
    results do not depend on threads, uses `processors`.
    """

    def __init__(self, run: Run, processors: int | None = None) -> None:
        self.run = run
        torch.set_num_threads(1)
        use_processors(processors)
        self._target: Target | None = None
        self._passes: Passes | None = None
        self._calibrated: tuple[Calibration, MeasuredPrompts] | None = None

    def do(self, target: Target, unit: Unit) -> Outcome:
        """Do a unit, unless its result is there and whole.

        What goes wrong is in the outcome, a PanicException of a tokenizer written in Rust (which is no Exception) too.
        Only what ends the process is raised.
        """
        start = time.perf_counter()
        try:
            with one_blas_thread():
                tokens = self._do(target, unit)
        except _MissingError as error:
            return Outcome(DAMAGED, str(error), again=tuple(error.units))
        except StorageError as error:
            return Outcome(NO_STORAGE, str(error))
        except BaseException as error:
            check_contained(error)
            self._forget()
            return Outcome(FAILED, why_failed(error), time.perf_counter() - start)
        return Outcome(DONE, "", time.perf_counter() - start, tokens)

    def _do(self, target: Target, unit: Unit) -> int:
        """Do a unit; the number of its tokens. Hashes of its inputs (model files, prompts) are in its result."""
        if unit.kind == REPORT:
            make_report(self.run, target)
            return 0
        doing = {CALIBRATION: self._calibrate, PROMPTS: self._measure, WEIGHTS: self._weigh}
        path, key = self.run.path(target, unit), self.run.unit_key(target, unit)
        with ExitStack() as stack:
            if unit.kind == CALIBRATION:  # two slices of a run may want the same one
                with results.storing(self.run.out):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(FileLock(f"{path}.lock"))
                with suppress(FileNotFoundError, DamagedError):
                    Stored(path, key)
                    return 0
            passes = self._load(target)
            with cast(Seal, passes.seal):  # reads the weights when it is first entered, and whenever it is left
                result, tokens, inputs = doing[unit.kind](passes, target, unit)
            inputs["model"] = source_of(cast(nn.Module, passes.model)).inputs_sha256
            with results.storing(self.run.out):
                results.write(path, key, replace(result, info={**result.info, "inputs": inputs}))
        return tokens

    def _forget(self) -> None:
        self._target = self._passes = self._calibrated = None
        gc.collect()

    def _load(self, target: Target) -> Passes:
        from ln_probe.models import load_model

        if self._target != target or self._passes is None:
            self._forget()  # before the next one is read: never two in memory
            gc.freeze()  # what is left are modules and caches, which took every later collection 0.3 s
            with _downloading(self.run.downloads):
                model = load_model(
                    target.name,
                    device=self.run.device,
                    dtype=self.run.dtype,
                    revision=target.revision,
                    allow_pickle=self.run.allow_pickle,
                )
            check_same(target, source_of(model))
            self._check_strictly(source_of(model).deviations)
            hooked = cast(HookedModel, model)
            self._passes = Passes(hooked, self.run.settings, seal=Seal(hooked))
            self._target = target
        return self._passes

    def _check_strictly(self, deviations: Sequence[str]) -> None:
        if refused := self.run.refusal(deviations):
            raise ValueError(refused)

    def _calibrate(self, passes: Passes, target: Target, unit: Unit) -> tuple[Result, int, dict[str, str | None]]:
        seal = cast(Seal, passes.seal)
        made = prompts_of(passes.model, self.run.corpus, self.run.corpus_file, self.run.settings)
        if made.tokens:
            seal.compare(made.tokens[0])
        settings, default = self.run.settings, self.run.corpus.given == DEFAULT
        other = labels = None
        if settings.calibration is not None:
            check_unchanged(settings.calibration, settings.calibration_sha256)
            other = calibration_prompts(passes.model, Path(settings.calibration), settings.max_tokens, settings.seed)
        if settings.groups is not None:
            check_unchanged(settings.groups, settings.groups_sha256)
            labels = labels_of(made, read_groups(settings.groups))
        skips = (skip_note(made.skipped, len(made.tokens)),) if made.skipped else ()
        self._check_strictly(skips)
        found = passes.calibrate(list(enumerate(made.tokens)), groups=labels, calibration=other, default=default)
        exhibits, index = record(passes, made.tokens, made.strings, found).plain()
        info: dict[str, Any] = {
            "exhibits": index,
            "calibrated_on": dict(found.calibrated_on),
            "sites": list(found.constants.sites),
            "constants_source": found.constants.source,
            "constants_given": None
            if found.constants.given is None
            else {name: c.plain for name, c in found.constants.given.items()},
            "optimal": {group: halves.to_json() for group, halves in found.optimal.items()},
            "unsupported": {str(k): v for k, v in found.unsupported.items()},
            "notes": [*skips, *made.notes, *found.notes, *seal.notes],
            "sample": None if found.sample is None else asdict(found.sample),
            "prompts": made.summary,
            "names": {i: made.name_of(i) for i in sorted({i for row in made.tokens for i in row.tolist()})},
            "model": asdict(source_of(cast(nn.Module, passes.model))),
            "shape": passes.shape,
        }
        arrays: dict[str, np.ndarray] = {f"radii/{layer}": radii for layer, radii in found.radii.items()}
        arrays |= ellipsoid_arrays(found.empirical)
        arrays |= {f"exhibits/{name}": array for name, array in exhibits.items()}
        arrays |= {f"constants/{part}": getattr(found.constants, part) for part in _CONSTANTS}
        arrays |= {"prompts/ids": torch.cat(made.tokens).numpy(), "prompts/lengths": np.array([*map(len, made.tokens)])}
        return Result(arrays, {"norms": found.norms}, info), info["prompts"]["tokens"], {}

    def _measure(self, passes: Passes, target: Target, unit: Unit) -> tuple[Result, int, dict[str, str | None]]:
        if self._calibrated is None:
            base = _opened(self.run, target, Unit(CALIBRATION))[0]
            prompts = MeasuredPrompts(base)
            self._calibrated = replace(calibration(base), first=prompts.rows[:SINGLE_NORM_PROMPTS]), prompts
        calibrated, prompts = self._calibrated
        numbered = [(i, prompts.rows[i]) for i in self.run.corpus.numbers(unit.shard, len(prompts.rows))]
        found = passes.measure(numbered, calibrated, default=self.run.corpus.given == DEFAULT)
        return packed(found), sum(len(row) for _, row in numbered), {"prompts": prompts.sha256}

    def _weigh(self, passes: Passes, target: Target, unit: Unit) -> tuple[Result, int, dict[str, str | None]]:
        probe = next(p for p in passes.probes if p.name == unit.probe)
        return packed({probe.name: passes.weigh(probe)}), 0, {}


@contextmanager
def _downloading(folder: Path | None) -> Iterator[None]:
    """Load from a cache of the run's own; a full disk becomes a StorageError."""
    try:
        with downloads_in(folder):
            yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        again = "What was finished is kept: make room and run the same command again"
        raise StorageError(f"{error.strerror}. {again}") from error


class MeasuredPrompts:
    """The prompts that a calibration unit kept: token ids, the hash of all, and the string at (prompt, position)."""

    def __init__(self, stored: Stored) -> None:
        kept = stored.arrays("prompts/")
        self.rows = torch.from_numpy(kept["ids"]).split(kept["lengths"].tolist())
        self.sha256 = str(stored.info["prompts"]["sha256"])
        self._names = stored.info["names"]

    def string(self, prompt: int, position: int) -> str:
        return str(self._names[str(int(self.rows[prompt][position]))])


def calibration(stored: Stored) -> Calibration:
    """What a calibration unit found."""
    info, kept = stored.info, stored.arrays("constants/")
    given = info["constants_given"]
    constants = Constants(
        sites=tuple(info["sites"]),
        source=info["constants_source"],
        given=None if given is None else {name: Constant.of(pair) for name, pair in given.items()},
        **{part: kept[part] for part in _CONSTANTS},
    )
    return Calibration(
        norms=stored.table("norms"),
        constants=constants,
        optimal={group: Halves.of_json(halves) for group, halves in info["optimal"].items()},
        calibrated_on=stored.info["calibrated_on"],
        radii={int(layer): radii for layer, radii in stored.arrays("radii/").items()},
        unsupported={int(layer): why for layer, why in stored.info["unsupported"].items()},
        notes=tuple(stored.info["notes"]),
        empirical=ellipsoids_of_arrays(stored.arrays("empirical/")),
        sample=None if stored.info["sample"] is None else KeySample(**stored.info["sample"]),
    )


def _opened(run: Run, target: Target, *units: Unit) -> list[Stored]:
    """Results of units, verified.

    Raises:
        _MissingError: names those that have to be recomputed.
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


def make_report(run: Run, target: Target) -> None:
    """Join the units' results into the report of a checkpoint, save it, and delete the results. No model is loaded.

    If a probe of the run is not installed, the report contains the other probes' results and names the missing one; all
    results are kept, and the report does not count as done.
    """
    units = list(run.units())
    by_unit = dict(zip(units, _opened(run, target, *units), strict=True))
    base = by_unit[Unit(CALIBRATION)]
    made = calibration(base)
    prompts = MeasuredPrompts(base)
    _check_inputs(by_unit, prompts.sha256)
    pieces: dict[str, list[Piece | Failure]] = {}
    for unit, stored in by_unit.items():
        for name, piece in unpacked(stored).items() if unit.kind != CALIBRATION else ():
            pieces.setdefault(name, []).append(piece)
    probes, missing = _installed(run)
    settings, source = run.settings, ModelSource(**_tuples(base.info["model"]))
    request = {**run.identity, "model": target.name, "revision": target.revision}
    report = assemble(
        probes,
        pieces,
        Context(made, settings.layers, prompts.string, settings.keys, settings.seed),
        exhibits=Exhibits.of_plain(base.arrays("exhibits/"), base.info["exhibits"]),
        provenance=provenance(
            source, base.info["prompts"], settings, made, base.info["shape"], probes, Objective.of(settings.loss)
        )
        | {"request": request, "command": run.command},
        notes=made.notes,
        failures=missing,
    )
    if refused := run.refusal(report.deviations):
        raise ValueError(refused)
    folder = run.out / target.folder
    with results.storing(run.out):
        mark_begun(run, target, [*files_of(report), REPORT_FILE])
        report.save(folder, index=Path(os.path.relpath(run.out / INDEX_FILE, folder)).as_posix())
        mark_done(run, target, missing)
        if not missing:
            remove_listed(run.folder(target), run.unit_files())


def _check_inputs(by_unit: Mapping[Unit, Stored], prompts: str) -> None:
    """Raise MixedError if results were not all made of one model's files and of the prompts that there are."""
    base = by_unit[Unit(CALIBRATION)]
    expected = {"model": base.info["inputs"]["model"], "prompts": prompts}
    for stored in by_unit.values():
        found = stored.info["inputs"]
        wrong = next((what for what in found if found[what] != expected[what]), None)
        if wrong is not None:
            raise MixedError(
                f"{stored.path} was made of another {'model' if wrong == 'model' else 'set of prompts'} than "
                f"{base.path.name} ({wrong} {found[wrong][:16]}…, not {expected[wrong][:16]}…): delete the folder "
                f"{base.path.parent} and run the same command (or its slices) again"
            )


def _installed(run: Run) -> tuple[tuple[Probe, ...], list[Failure]]:
    """The probes of the run, and those that are not here."""
    here, missing = [], []
    for asked in run.probes:
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
