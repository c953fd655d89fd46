"""Which checkpoints a run is about: models times training steps, and what each of them is, by hash."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ln_probe.analyses.files import FileError, read_text
from ln_probe.analyses.text import quoted, whole_number
from ln_probe.batch.exits import why_failed
from ln_probe.loading.hub import Description
from ln_probe.report import slug

if TYPE_CHECKING:
    from ln_probe.loading.provenance import ModelSource


LARGEST = 2**20  # bytes of a list of checkpoints


@dataclass(frozen=True)
class Target:
    """One checkpoint to report on.

    Attributes:
        name: what `load_model` takes.
        revision: the training step or hub revision; None if there is only one.
        folder: of its report, under the output folder.
        identity: hash of what would be loaded (files, or the hub's commit); empty if it could not be found out.
        parameters: how many numbers the weights are, 0 if unknown.
        error: why it cannot be loaded, as far as can be seen without loading it.
        failed: when that was, if an earlier command found it out; empty if it was this one.
    """

    name: str
    revision: str | None
    folder: str
    identity: str = ""
    parameters: int = 0
    error: str = ""
    failed: str = ""

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Target:
        """What `asdict` made of a target, without fields that this version does not know."""
        return cls(**{field.name: plain[field.name] for field in fields(cls) if field.name in plain})

    @property
    def label(self) -> str:
        return self.name if self.revision is None else f"{self.name} · {self.revision}"


class SuiteError(ValueError):
    """The list of models and checkpoints makes no sense as it stands, or there is no room for it."""


def suite(
    models: Sequence[str], checkpoints: str | None = None, revision: str | None = None, *, allow_pickle: bool = False
) -> list[Target]:
    """The checkpoints that are asked for, in order; one that cannot be found has the reason in its `error`.

    Args:
        models: names and paths; name@revision is a branch, tag or commit of the hub, or a step of a lab run.
        checkpoints: "all", or training steps separated by commas; None means the models as they are.
        revision: branch, tag or commit on the hub.
        allow_pickle: whether weights may come as pickles.

    Raises:
        SuiteError: a name that no model has; a model or step is given twice; steps that are no numbers; both
            checkpoints and a revision; a folder of checkpoints without a word which.
    """
    from ln_probe.models import check_name

    for name in models:
        try:
            check_name(name)
        except ValueError as error:
            raise SuiteError(str(error)) from error
    _refuse_repeated(models)
    steps = _steps(checkpoints)
    if checkpoints is not None and revision is not None:
        raise SuiteError(f"--checkpoints {checkpoints} and --revision {revision} exclude each other: give one")
    chosen: list[tuple[str, str | None, str]] = []
    for given in models:
        name, own = _parts(given)
        if own is not None and (both := checkpoints or revision) is not None:
            option = "--revision" if checkpoints is None else "--checkpoints"
            raise SuiteError(f"{given} names a revision, and so does {option} {both}: give one")
        if own is None and checkpoints is None and (there := list(_step_folders(Path(os.path.expanduser(name))))):
            raise SuiteError(
                f"{name} is no checkpoint, it holds {len(there)} of them (steps {_few(there)}): add --checkpoints all, "
                f"or --checkpoints {there[-1]}"
            )
        if checkpoints is None:
            chosen.append((name, own or revision, ""))
            continue
        try:
            chosen += [(n, r, "") for n, r in _versions(name, steps)]
        except Exception as error:  # one model must not take the others with it
            chosen.append((name, None, why_failed(error)))
    targets = list[Target]()
    for name, version, wrong in chosen:
        target = Target(name, version, _folder(name, version, {t.folder for t in targets}), error=wrong)
        if not wrong:
            try:
                identity, parameters = _identify(name, version, allow_pickle)
                target = replace(target, identity=identity, parameters=parameters)
            except Exception as problem:
                target = replace(target, error=why_failed(problem))
        targets.append(target)
    return targets


def listed(path: Path) -> list[str]:
    """The names in a file, one a line; empty lines and lines that begin with # are passed over.

    Raises:
        SuiteError: the file cannot be read, or names nothing.
    """
    try:
        lines = [line.strip() for line in read_text(path, LARGEST, "utf-8-sig").splitlines()]
    except (OSError, FileError) as error:
        said = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise SuiteError(f"--suite {path} cannot be read ({said}): give a text file with a name a line") from error
    if not (names := [line for line in lines if line and not line.startswith("#")]):
        raise SuiteError(f"--suite {path} names no checkpoint: give one a line, such as pythia-70m@step1000")
    return names


def _parts(given: str) -> tuple[str, str | None]:
    """Name and revision of name@revision; a path that is there is a name as it stands."""
    name, at, revision = given.rpartition("@")
    if not at or os.path.lexists(os.path.expanduser(given)):
        return given, None
    if not name or not revision:
        raise SuiteError(f"{quoted(given)} names no {'revision' if name else 'model'}: write name@revision")
    return name, revision


def _few(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 4 else f"{steps[0]}, {steps[1]}, …, {steps[-1]}"


def _refuse_repeated(models: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in models:
        path = os.path.expanduser(name)
        real = os.path.realpath(path) if os.path.exists(path) else name
        if real in seen:
            same = "" if seen[real] == name else f" (as {seen[real]!r} before)"
            raise SuiteError(f"{name!r} is given twice{same}")
        seen[real] = name


def _steps(checkpoints: str | None) -> list[int] | None:
    if checkpoints in (None, "all"):
        return None
    steps: list[int] = []
    for part in str(checkpoints).split(","):
        step = whole_number(part, 18)
        if step is None:
            said = quoted(str(checkpoints))
            raise SuiteError(f"--checkpoints takes 'all' or training steps such as 0,1000, got {said}")
        if step in steps:
            raise SuiteError(f"--checkpoints {checkpoints}: step {step} is given twice")
        steps.append(step)
    return steps


def _versions(name: str, steps: list[int] | None) -> list[tuple[str, str | None]]:
    """(name, revision) of each training step of a model; all there are if `steps` is None (of a single one, itself)."""
    from ln_probe.loading import hub
    from ln_probe.models import bundled_models, kind_of

    path = Path(os.path.expanduser(name))
    subfolders = _step_folders(path)
    kind = "folder" if subfolders else kind_of(name, path)
    if kind == "lab":
        from ln_probe.analyses.lab.run_folder import checkpoint_steps

        wanted = checkpoint_steps(path) if steps is None else steps
        return [(name, f"step{step}") for step in wanted] or [(name, None)]
    if kind == "hub":
        repository = hub.official_name(name, also=bundled_models())
        if steps is None:
            return [(name, branch) for branch in hub.checkpoints(repository)] or [(name, None)]
        return [(name, hub.hub_revision(repository, str(step))) for step in steps]
    if subfolders:
        missing = [step for step in steps or () if step not in subfolders]
        if missing:
            held = ", ".join(map(str, subfolders))
            raise FileNotFoundError(f"{name} holds no checkpoint of step {missing[0]}; steps it has: {held}")
        return [(str(subfolders[step]), None) for step in (subfolders if steps is None else steps)]
    if steps is None:
        return [(name, None)]
    raise ValueError(f"{name} is one checkpoint, it has no training steps: leave out --checkpoints, or give 'all'")


def _step_folders(path: Path) -> dict[int, Path]:
    """Subfolders checkpoint-N or stepN that hold a model, by step: what Hugging Face's Trainer writes."""
    from ln_probe.analyses.text import step_named

    if not os.path.isdir(path) or (path / "config.json").is_file():
        return {}
    found = {step_named(child.name): child for child in path.iterdir() if (child / "config.json").is_file()}
    return {step: found[step] for step in sorted(s for s in found if s is not None)}


def _folder(name: str, revision: str | None, taken: set[str]) -> str:
    short = slug(name)
    path = Path(name)
    if short.startswith(("checkpoint-", "step")) and path.is_dir():  # of a suite of folders
        short = f"{slug(path.parent.name)}-{short}"
    base = short if revision is None else f"{short}-{slug(revision)}"
    return next(folder for folder in numbered(base) if folder not in taken)


def numbered(base: str) -> Iterator[str]:
    """name, name-2, name-3, …"""
    yield base
    yield from (f"{base}-{number}" for number in count(2))


def _identify(name: str, revision: str | None, allow_pickle: bool) -> tuple[str, int]:
    """Hash of what would be loaded, and how many numbers its weights are (0 if they are not here yet)."""
    from ln_probe.loading import hub
    from ln_probe.loading.folder import check_header, inspect_folder, shapes_of
    from ln_probe.loading.provenance import combined, files_of_checkpoint, files_of_lab_run, hashes
    from ln_probe.models import bundled_folder, bundled_models, kind_of, lab_step

    path = Path(os.path.expanduser(name))
    kind = kind_of(name, path)
    if kind == "hub":
        repository = hub.official_name(name, also=bundled_models())
        return f"{repository}@{hub.commit(repository, revision=revision)}", 0
    if kind in ("lab", "bundled"):
        step = None if revision is None else lab_step(revision)
        files = files_of_lab_run(path if kind == "lab" else bundled_folder(name), step)
        return combined(hashes(files)), sum(map(math.prod, shapes_of(files[0])))
    if revision is not None:
        raise ValueError(f"{name} is a local {kind}: it holds one version, not a revision {revision!r}")
    if kind == "gguf":
        return combined(hashes([path])), check_header(path)
    checkpoint = inspect_folder(path, allow_pickle=allow_pickle)
    return combined(hashes(files_of_checkpoint(checkpoint))), checkpoint.parameters


def check_same(target: Target, source: ModelSource) -> None:
    """Raise ChangedError if what was loaded is not what the target's identity says.

    Of a model on the hub only the commit is known before it is downloaded; that all its units were done with the same
    files is seen when they are joined.
    """
    from ln_probe.loading.provenance import ChangedError

    if source.kind == "hub":
        then, now = target.identity.rpartition("@")[2], str(source.commit)
    else:
        then, now = target.identity, str(source.inputs_sha256)
    if then != now:
        raise ChangedError(
            f"{target.name} is not any more what it was when this run began (then {then[:16]}…, now {now[:16]}…). Run "
            "the same command again: it measures the present files, and mixes nothing of the two"
        )


def is_on_hub(target: Target) -> bool:
    """Whether its name is one on the hub."""
    from ln_probe.models import kind_of

    return kind_of(target.name, Path(os.path.expanduser(target.name))) == "hub"


@cache
def hub_info(target: Target) -> Description:
    """Of a name on the hub; empty for anything else, and where the hub does not tell (loading will say why)."""
    from ln_probe.loading import hub
    from ln_probe.models import bundled_models

    if target.error or not is_on_hub(target):
        return Description({}, 0)
    try:
        return hub.describe(hub.official_name(target.name, also=bundled_models()), revision=target.revision)
    except (ValueError, OSError):
        return Description({}, 0)
