"""A run: what is asked for, the work units that make it up, and where their results lie.

    OUT/index.html, OUT/<model>/              the reports
    OUT/.ln_probe/run.json                    what the folder is about
                  corpus/<key>/00000.jsonl …  the prompts, in shards
                  tokens/<key>/00000 …        the same as token ids, once per tokenizer
                  units/<key>/prompts-00000 …    results, until the report is made
                  done/<model>.json           whose report OUT/<model>/ is, and what its files are

The units of a checkpoint: one *calibration* (all prompts; constants and query radii), then *prompts* for each shard of
them, one of *weights* for every probe that needs no prompts, then the *report*. What a unit computes depends on its key
alone: not on which worker does it, nor on what was done before, nor on how many shards there are (rows are joined in
order before anything is summed).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ln_probe import __version__
from ln_probe.analyses.probes.base import Probe
from ln_probe.analyses.probes.registry import OWN, chosen, package_of
from ln_probe.batch.shards import ShardedCorpus
from ln_probe.batch.suite import Target
from ln_probe.settings import Settings

WORK_FOLDER = ".ln_probe"
INDEX_FILE = "index.html"
FORMAT = 4
CALIBRATION, PROMPTS, WEIGHTS, REPORT = "calibration", "prompts", "weights", "report"

# Results of different versions of these are not mixed in one report.
_LIBRARIES = ("torch", "transformer-lens", "transformers", "numpy", "scipy", "numba")


@cache  # keys are made by the thousand, and each version is read from a file
def _installed() -> tuple[tuple[str, str], ...]:
    return tuple((name, version(name)) for name in _LIBRARIES)


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
class Asked:
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
    def of(cls, probe: Probe) -> Asked:
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
    probes: tuple[Asked, ...] = ()  # those of the settings; looked up where they are not given

    def __post_init__(self) -> None:
        if not self.probes:
            object.__setattr__(self, "probes", tuple(map(Asked.of, chosen(self.settings.probes))))

    @property
    def work(self) -> Path:
        return self.out / WORK_FOLDER

    @property
    def corpus_folder(self) -> Path:
        """Where the shards of the prompts lie."""
        return self.work / "corpus" / self.corpus.folder

    @property
    def identity(self) -> dict[str, Any]:
        """What two runs in one folder must agree on, as plain JSON.

        Not how many prompts go through a model together: whoever ran out of memory goes on with fewer.
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
        versions = dict(_installed())
        versions |= {p.name: p.package for p in self.probes if p.package != OWN}
        content = {
            "checkpoint": target.identity,
            "name": target.name,
            "revision": target.revision,
            **self.identity,
            "ln_probe": __version__,
            "versions": versions,
            "format": FORMAT,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def unit_key(self, target: Target, unit: Unit) -> str:
        """The same for one unit: with the prompts of its shard."""
        size = self.corpus.per_shard if unit.kind == PROMPTS else 0
        return hashlib.sha256(f"{self.key(target)} {unit} of {size}".encode()).hexdigest()

    def folder(self, target: Target) -> Path:
        """Where results about a checkpoint lie until its report is made."""
        return self.work / "units" / self.key(target)[:20]

    def path(self, target: Target, unit: Unit) -> Path:
        return self.folder(target) / unit.file


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
