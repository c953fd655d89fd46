"""Every kind of file × every fault × every moment: identical tables, or a refusal.

A case disturbs one run of a tiny model and lets the command (once more, if it was stopped) have the last word:

    identical   it ends with 0, and the tables are those of the inputs that there were: before or after the fault, of
                one of them alone, and the report names that one by its hash
    refused     it does not end with 0, and there is no table of that model that is not identical; the message names a
                file, and is no traceback. What the command makes of it when the fault is undone is looked at too.
    wrong       anything else

`LN_PROBE_FAULTS=all` runs every combination (about 20 minutes of one core); without it, a part that is the same each
time: all kinds, all faults and all moments occur, but not each with each.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from faulty import disturb, hash_in, interrupt, lab_model, plain_model, report, tables, without_pages, write_prompts

FAULTS = ("deleted", "truncated", "zeroed", "bit flipped", "swapped")
MOMENTS = ("before", "during", "between")
ALL = os.environ.get("LN_PROBE_FAULTS") == "all"
PART = 3  # of the combinations, one in so many is run without LN_PROBE_FAULTS=all


@dataclass(frozen=True)
class Kind:
    """A kind of file: where it is, relative to the case's folder (a pattern), and from when on it is there."""

    name: str
    pattern: str
    since: str = "before"
    sealed: bool = True  # a plain model's weights hold no hash: changed, they are another model


KINDS = (
    Kind("weights", "m/model.safetensors"),
    Kind("weights without a hash", "plain/model.safetensors", sealed=False),
    Kind("lab.json", "m/lab.json"),
    Kind("prompts", "prompts.jsonl"),
    Kind("corpus", "out/.ln_probe/corpus/*.jsonl", "during"),
    Kind("what it is", "out/.ln_probe/corpus/*.json", "during"),
    Kind("calibration", "out/.ln_probe/units/*/calibration-*.safetensors", "during"),
    Kind("piece", "out/.ln_probe/units/*/prompts-00000.safetensors", "during"),
    Kind("run.json", "out/.ln_probe/run.json", "during"),
    Kind("done", "out/.ln_probe/done/*.json", "between"),
    Kind("table", "out/*/heads.parquet", "between"),
    Kind("exhibits", "out/*/exhibits.npz", "between"),
    Kind("report.json", "out/*/report.json", "between"),
    Kind("report.html", "out/*/report.html", "between"),
    Kind("index.html", "out/index.html", "between"),
)


def combinations() -> list[tuple[Kind, str, str]]:
    every = [(k, f, m) for k in KINDS for f in FAULTS for m in MOMENTS[MOMENTS.index(k.since) :]]
    drawn = random.Random(0).sample(every, len(every))
    chosen = every if ALL else drawn[: len(every) // PART]
    for i, needed in enumerate((KINDS, FAULTS, MOMENTS)):  # each of them occurs, whatever was drawn
        chosen = chosen + [next(c for c in drawn if c[i] == n) for n in needed if n not in {c[i] for c in chosen}]
    return sorted(chosen, key=every.index)


class Home:
    """Inputs of one case, and the run beside it whose files take the place of others."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path, self.kind = path, kind
        self.model = (lab_model if kind.sealed else plain_model)(path / ("m" if kind.sealed else "plain"))
        self.prompts = write_prompts(path / "prompts.jsonl")

    @property
    def line(self) -> list[object]:
        return [self.model, "--prompts", self.prompts, "--shard", 1, "--out", self.path / "out"]

    def inflict(self, fault: str, other: Path) -> Path | None:
        """The file that was spoiled; None if it is not there at this moment."""
        found = sorted(self.path.glob(self.kind.pattern))
        if not found:
            return None
        file = found[0]
        content = bytearray(file.read_bytes())
        if fault == "deleted":
            file.unlink()
        elif fault == "truncated":
            file.write_bytes(content[: len(content) // 2])
        elif fault == "zeroed":
            file.write_bytes(bytes(len(content)))
        elif fault == "bit flipped":
            content[2 * len(content) // 3] ^= 4
            file.write_bytes(content)
        else:
            theirs = sorted(other.glob(self.kind.pattern))[0]
            shutil.copy(theirs, file)
        return file


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Another run's folders, finished and half done: other weights, other prompts, all kinds of files."""
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        without_pages(patched)
        for sealed in (True, False):
            home = Home(tmp_path_factory.mktemp("other"), Kind("", "", sealed=sealed))
            (lab_model if sealed else plain_model)(home.model, 7)
            write_prompts(home.prompts, [[3, 3, 1], [4, 1, 5, 9], [2, 6]])
            with pytest.MonkeyPatch.context() as stopped:
                interrupt(stopped, 3)
                report(*home.line)
            kept = home.path / "kept"
            shutil.copytree(home.path / "out" / ".ln_probe" / "units", kept)
            assert report(*home.line)[0] == 0
            shutil.copytree(kept, home.path / "out" / ".ln_probe" / "units", dirs_exist_ok=True)
            found[sealed] = home.path
    return found


class Oracle:
    """The tables of given inputs, made by an undisturbed run; each made once."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.known: dict[tuple[bytes, ...], tuple[dict[str, bytes], str] | None] = {}

    def tables(self, case: Home) -> tuple[dict[str, bytes], str] | None:
        """What an undisturbed run makes of the inputs as they are now, and the hash it names; None if it refuses."""
        inputs = [case.model / "model.safetensors", case.model / "lab.json", case.prompts]
        key = tuple(f.read_bytes() if f.is_file() else b"" for f in inputs)
        if key not in self.known:
            out = self.home / str(len(self.known))
            code, _, _ = report(case.model, "--prompts", case.prompts, "--out", out)
            self.known[key] = (tables(out), hash_in(out / case.model.name)) if code == 0 else None
        return self.known[key]


def judged(case: Home, code: int, said: str, allowed: list[tuple[dict[str, bytes], str] | None]) -> str:
    """identical, refused or wrong."""
    out = case.path / "out"
    complete = (out / case.model.name / "report.json").is_file()
    right = any(
        a is not None and tables(out) == a[0] and complete and _named(out / case.model.name) == a[1] for a in allowed
    )
    if "Traceback" in said:
        return "wrong: a traceback"
    if code == 0:
        return "identical" if right else f"wrong: exit 0, and the tables are of nothing that was given\n{said}"
    return "refused" if said.strip() else "wrong: refused without a word"


def _named(folder: Path) -> str:
    try:
        return hash_in(folder)
    except (OSError, ValueError, KeyError):
        return ""


def case_of(home: Path, kind: Kind, fault: str, moment: str, other: Path, oracle: Oracle) -> tuple[str, str]:
    """Run one case; how it ended, and how the same command ended once more after that."""
    case = Home(home, kind)
    allowed = [oracle.tables(case)]
    if moment == "before":
        case.inflict(fault, other)
    elif moment == "during":
        with pytest.MonkeyPatch.context() as patched:
            disturb(patched, 3, lambda worker: (case.inflict(fault, other), worker._forget()))
            code, _, said = report(*case.line)
        allowed.append(oracle.tables(case))
        return judged(case, code, said, allowed), _again(case, allowed)
    else:
        if kind.since == "between":  # files of a finished report
            report(*case.line)
        else:
            with pytest.MonkeyPatch.context() as patched:
                interrupt(patched, 3)
                assert report(*case.line)[0] == 130
        case.inflict(fault, other)
    allowed.append(oracle.tables(case))
    code, _, said = report(*case.line)
    return judged(case, code, said, allowed), _again(case, allowed)


def _again(case: Home, allowed: list[tuple[dict[str, bytes], str] | None]) -> str:
    code, _, said = report(*case.line)
    return judged(case, code, said, allowed)


@pytest.mark.slow
def test_files(tmp_path: Path, others: dict[bool, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)
    oracle = Oracle(tmp_path / "oracle")
    (tmp_path / "oracle").mkdir()
    ended: list[tuple[str, str]] = []  # cases, twice each: the disturbed run, and the same command once more
    wrong = []
    for number, (kind, fault, moment) in enumerate(combinations()):
        outcome = case_of(tmp_path / str(number) / "c", kind, fault, moment, others[kind.sealed], oracle)
        shutil.rmtree(tmp_path / str(number))
        for time_, what in zip(("", " (again)"), outcome, strict=True):
            ended.append((kind.name, what.partition(":")[0]))
            if what.startswith("wrong"):
                wrong.append(f"{kind.name} {fault} {moment}{time_}: {what}")
    kinds, outcomes = (np.array(column) for column in zip(*ended, strict=True))
    print(f"\n{pd.crosstab(kinds, outcomes, margins=True)}")
    assert wrong == []
