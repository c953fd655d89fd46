"""A run: what is asked for, the work units that make it up, and where their results lie.

    OUT/index.html, OUT/<model>/              the reports
    OUT/.ln_probe/run.json                    what the folder is about
                  corpus/<key>/00000.jsonl …  the prompts, in shards
                  tokens/<key>/00000 …        the same as token ids, once per tokenizer
                  units/<key>/prompts-00000 …    results, until the report is made
                  done/<model>.json           whose report OUT/<model>/ is, and the hashes of its files

The units of a checkpoint: one *calibration* (all prompts; constants and query radii), then *prompts* for each shard of
them and one *unembedding*, then the *report*. What a unit computes depends on its key alone: not on which worker
does it, nor on what was done before, nor on how many shards there are (rows are joined in order before anything is
summed).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ln_probe
from ln_probe.analyses.files import write_atomically
from ln_probe.batch.suite import Target
from ln_probe.passes import Settings
from ln_probe.prompting.shards import ShardedCorpus

WORK_FOLDER = ".ln_probe"
FORMAT = 2
CALIBRATION, PROMPTS, UNEMBEDDING, REPORT = "calibration", "prompts", "unembedding", "report"

# Results of different versions of these are not mixed in one report.
_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "numba")


@dataclass(frozen=True)
class Unit:
    """A piece of work on one checkpoint; `shard` counts the shards of the prompts, 0 where there is only one unit."""

    kind: str
    shard: int = 0

    @property
    def file(self) -> str:
        return f"{self.kind}-{self.shard:05d}.safetensors"


@dataclass(frozen=True)
class Run:
    """What is asked for, apart from the models: everything that decides what a report says."""

    out: Path
    settings: Settings
    corpus: ShardedCorpus
    dtype: str = "float32"
    device: str | None = None
    allow_pickle: bool = False
    command: str = ""

    @property
    def work(self) -> Path:
        return self.out / WORK_FOLDER

    @property
    def corpus_folder(self) -> Path:
        """Where the shards of the prompts lie."""
        return self.work / "corpus" / self.corpus.folder

    @property
    def identity(self) -> dict[str, Any]:
        """What two runs in one folder must agree on, as plain JSON."""
        return {
            **self.settings.plain,
            "dtype": self.dtype,
            "device": self.device,
            "prompts": self.corpus.given,
            "prompts_sha256": self.corpus.sha256,
        }

    def units(self) -> Iterator[Unit]:
        """The units of one checkpoint, its report left out, calibration first."""
        yield Unit(CALIBRATION)
        if {"selectability", "uniformity", "causal"} & set(self.settings.probes):
            for shard in range(self.corpus.shards):
                yield Unit(PROMPTS, shard)
        if "unembedding" in self.settings.probes:
            yield Unit(UNEMBEDDING)

    def key(self, target: Target) -> str:
        """Hash of everything that decides what is found out about a checkpoint."""
        versions = {name: version(name) for name in _LIBRARIES}
        content = {
            "checkpoint": target.identity, "name": target.name, "revision": target.revision, **self.identity,
            "ln_probe": ln_probe.__version__, "versions": versions, "format": FORMAT,
        }  # fmt: skip
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def unit_key(self, target: Target, unit: Unit) -> str:
        """The same for one unit: with the prompts of its shard."""
        size = self.corpus.per_shard if unit.kind == PROMPTS else 0
        return hashlib.sha256(f"{self.key(target)} {unit.kind} {unit.shard} of {size}".encode()).hexdigest()

    def folder(self, target: Target) -> Path:
        """Where results about a checkpoint lie until its report is made."""
        return self.work / "units" / self.key(target)[:20]

    def path(self, target: Target, unit: Unit) -> Path:
        return self.folder(target) / unit.file


class OtherRunError(ValueError):
    """The folder belongs to another run."""


def claim(run: Run, targets: Sequence[Target], *, fresh: bool = False) -> list[Target]:
    """Write down whose folder this is; the checkpoints it is about now, those of earlier commands included.

    Raises:
        OtherRunError: the folder holds reports made in another way (says what differs).
    """
    path = run.work / "run.json"
    known: list[Target] = []
    if path.exists() and not fresh:
        held = _read(path)
        wrong = [k for k in run.identity if held["identity"].get(k) != run.identity[k]]
        if wrong:
            what = "; ".join(f"{k}: {held['identity'].get(k)!r} there, {run.identity[k]!r} now" for k in wrong)
            raise OtherRunError(
                f"{run.out} holds another run ({what}): choose another --out, or --fresh to replace what is there"
            )
        mine = {t.folder for t in targets}
        known = [Target(**t) for t in held["targets"] if t["folder"] not in mine]
    everything = [*known, *targets]
    content = {
        "format": FORMAT, "identity": run.identity, "command": run.command, "allow_pickle": run.allow_pickle,
        "corpus": asdict(run.corpus), "targets": [asdict(t) for t in everything],
    }  # fmt: skip
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return everything


def reopen(out: Path) -> tuple[Run, list[Target]]:
    """The run that a folder holds.

    Raises:
        FileNotFoundError: it holds none.
        ValueError: its description is damaged or of another version.
    """
    path = out / WORK_FOLDER / "run.json"
    if not path.exists():
        raise FileNotFoundError(f"{out} holds no run of ln-probe report (no {path})")
    held = _read(path)
    run = Run(
        out, Settings.of_plain(held["identity"]), ShardedCorpus(**held["corpus"]), command=held["command"],
        allow_pickle=held["allow_pickle"], dtype=held["identity"]["dtype"], device=held["identity"]["device"],
    )  # fmt: skip
    return run, [Target(**t) for t in held["targets"]]


def _read(path: Path) -> dict[str, Any]:
    try:
        held: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = held["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}): delete it, or start anew with --fresh") from error
    if found != FORMAT:
        raise ValueError(f"{path} has format {found}, this ln_probe writes {FORMAT}: start anew with --fresh")
    return held


def slice_of(run: Run, targets: Sequence[Target], part: int, parts: int) -> dict[Target, set[Unit]]:
    """The units of slice `part` (1 … parts): neighbours in the list, so that few checkpoints are in two slices.

    A slice calibrates the checkpoints it works on if nobody has yet; reports are made by joining.
    """
    pairs = [(t, u) for t in targets if not t.error for u in run.units() if u.kind != CALIBRATION]
    if not pairs:  # calibration is all there is
        pairs = [(t, Unit(CALIBRATION)) for t in targets if not t.error]
    chosen = pairs[len(pairs) * (part - 1) // parts : len(pairs) * part // parts]
    found: dict[Target, set[Unit]] = {}
    for target, unit in chosen:
        found.setdefault(target, {Unit(CALIBRATION)}).add(unit)
    return found
