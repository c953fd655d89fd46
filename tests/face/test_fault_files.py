"""Files that rot and files that lie: each is named, none is believed, none takes long, none runs anything."""

from __future__ import annotations

import random
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faulty import lab_model, soon
from faulty import report as report_command
from torch import Tensor, nn

import ln_probe
from ln_probe.analyses.lab.crasp.crasp import DEEPEST, CRaspError, parse
from ln_probe.analyses.lab.run_folder import load_run, metric_rows
from ln_probe.analyses.lab.train import TrainConfig, train
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.prompt_sources import entries
from ln_probe.report import Report

OLD = Path(__file__).parent / "report_0_1_0"  # without hashes: what is in its files is judged by what it says
NESTED = "[" * 100_000


def flipped(file: Path, place: int, bit: int) -> bytes:
    """A file with one bit turned; what it held before."""
    whole = file.read_bytes()
    content = bytearray(whole)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return whole


def places(file: Path, count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Bits all over a file, most of them near its beginning, where headers are."""
    generator = random.Random(seed)
    size = file.stat().st_size
    return [(generator.randrange(min(size, 700) if i % 3 else size), generator.randrange(8)) for i in range(count)]


# ------------------------------------------------------------------------------------------------------- lab runs


class Noise:
    """A task of random tokens."""

    name = "noise"

    @property
    def identity(self) -> dict[str, Any]:
        return {}

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        return torch.randint(20, (size, 6), generator=torch.Generator().manual_seed(step))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        made: Tensor = model(batch, return_type="loss")
        return made

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"loss": float(self.loss(model, self.batch(99, 4, 0)))}

    def write_files(self, out: Path) -> None:
        pass


CONFIG = LabConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=20, n_ctx=12)
SCHEDULE = TrainConfig(steps=4, batch=2, evaluate_every=1, state_every=2)


def state_of(folder: Path, until: int | None) -> dict[str, Tensor]:
    return train(Noise(), CONFIG, SCHEDULE, folder, until=until, progress=False).state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[k].equal(other[k]) for k in one)


def test_c05_a_flipped_bit_in_a_lab_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    half = state_of(run, 2)
    refused = 0
    for file in (run / "state.safetensors", run / "metrics.jsonl"):
        for place, bit in places(file, 12):
            whole = flipped(file, place, bit)
            said = ""
            try:
                made = state_of(run, 2)
            except ValueError as error:
                said = str(error)
            assert ("delete" in said and str(file) in said) if said else same(made, half), f"bit {bit} of byte {place}"
            refused += bool(said)
            file.write_bytes(whole)
    assert refused >= 20
    whole_run = state_of(run, None)
    model = run / "model.safetensors"
    for file in (model, run / "lab.json"):
        for place, bit in places(file, 12, 1):
            whole = flipped(file, place, bit)
            with pytest.raises(ValueError, match=str(run)):
                load_run(run)
            file.write_bytes(whole)
    assert same(load_run(run).state_dict(), whole_run)
    rows = metric_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


def test_c05_lines_that_are_missing(tmp_path: Path) -> None:
    state_of(tmp_path, 2)
    file = tmp_path / "metrics.jsonl"
    first, second = file.read_text().splitlines(keepends=True)
    file.write_text(first)
    with pytest.raises(ValueError, match=r"metrics\.jsonl holds 1 of 2 evaluations: delete .* to train the run again"):
        state_of(tmp_path, None)
    file.write_text(first + second + second[: len(second) // 2])  # a kill leaves half a line
    state_of(tmp_path, None)
    assert len(metric_rows(file)) == 4


# -------------------------------------------------------------------------------------------------------- reports


@pytest.mark.slow
def test_c06_a_flipped_bit_in_a_saved_report(report: Report, tmp_path: Path) -> None:
    folder = report.save(tmp_path / "r")
    files = [folder / name for name in ("report.json", "heads.parquet", "keys.parquet", "exhibits.npz")]
    for file in files:
        for place, bit in places(file, 12):
            whole = flipped(file, place, bit)
            with pytest.raises(ValueError, match=rf"{file.name} (is damaged|has format)"):
                ln_probe.load_report(folder)
            file.write_bytes(whole)
    shutil.copy(folder / "keys.parquet", folder / "stray.parquet")
    loaded = ln_probe.load_report(folder)
    assert "stray.parquet is not part of this report and was left out" in loaded.notes
    assert all(loaded.tables[n].equals(ln_probe.load_report(folder).tables[n]) for n in report.tables)
    (folder / "stray.parquet").unlink()
    (folder / "heads.parquet").unlink()
    (folder / "heads.parquet").mkdir()
    with pytest.raises(ValueError, match=r"heads\.parquet is damaged \(a folder, not a file\)"):
        ln_probe.load_report(folder)


@pytest.mark.slow
def test_c06_a_table_of_an_earlier_save_does_not_stay(report: Report, tmp_path: Path) -> None:
    mine = pd.DataFrame({"word": ["a"], "count": [1]})
    folder = replace(report, tables={**report.tables, "mine": mine}).save(tmp_path / "r")
    assert ln_probe.load_report(folder).tables["mine"].equals(mine)
    report.save(folder)
    assert "mine" not in ln_probe.load_report(folder).tables
    assert not (folder / "mine.parquet").exists()


def test_c07_archives_that_unpack_to_more_than_a_report(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD, tmp_path / "r"))
    archive = folder / "exhibits.npz"
    whole = archive.read_bytes()
    content = bytearray(whole)
    entry = content.index(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = struct.pack("<I", 2**31)  # the size of the first, in the directory
    archive.write_bytes(content)
    with soon(), pytest.raises(ValueError, match=r"exhibits\.npz unpacks to \d{10} bytes \(at most 536870912 are read"):
        ln_probe.load_report(folder)
    archive.write_bytes(whole)
    pd.DataFrame({"layer": np.zeros(20_000_000, np.int8)}).to_parquet(folder / "heads.parquet")
    with soon(), pytest.raises(ValueError, match=r"heads\.parquet is damaged \(it says 20000000 rows, in \d+ bytes"):
        ln_probe.load_report(folder)


# -------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(("line", "said"), [
    (NESTED, "p.jsonl, line 2: JSON nested deeper than 64 levels"),
    ('{"tokens": [' + "9" * 5000 + "]}", "p.jsonl, line 2: a whole number has too many digits"),
    ('{"tokens": [1, ' + "9" * 50 + "]}", "p.jsonl, line 2: a number of 167 bits is no token id"),
    ('{"tokens": [4000000000]}', "p.jsonl, line 2: 4000000000 is no token id"),
    ('{"tokens": [-1]}', "p.jsonl, line 2: -1 is no token id"),
    ('{"tokens": ["a", {}]}', "p.jsonl, line 2: token ids must be whole numbers, one list a prompt, got 'a'"),
    ('{"tokens": [[1], 2]}', "p.jsonl, line 2: token ids must be a list of whole numbers"),
    ("{", "p.jsonl, line 2: not JSON"),
])  # fmt: skip
def test_c08_c10_prompts_that_are_none(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"tokens": [1, 2]}\n' + line + "\n")
    with soon(), pytest.raises(ValueError, match=r"p\.jsonl, line 2: ") as caught:
        list(entries(path))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400
    out = tmp_path / "out"
    code, _, heard = report_command(lab_model(tmp_path / "m"), "--prompts", path, "--out", out)
    assert code == 2
    assert heard.count(said) == 1
    assert not out.exists()


def test_c08_a_data_set_that_brings_a_script(tmp_path: Path) -> None:
    home = tmp_path / "data"
    home.mkdir()
    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w')\nimport datasets\nclass D(datasets.GeneratorBasedBuilder): pass\n"
    (home / "data.py").write_text(code)
    with pytest.raises((ValueError, ConnectionError), match=r"data set .* (cannot be read|is not on this machine)"):
        list(entries(home))
    assert not marker.exists()


# -------------------------------------------------------------------------------------------------------- C-RASP


@pytest.mark.parametrize("program", [
    "y := " + "(" * 100_000 + "1" + ")" * 100_000,
    "y := " + "(" * 100_000,
    "y := " + "#[" * 5000 + "Q_a" + "]" * 5000 + " > 0",
    "y := " + "not " * 500 + "Q_a",
    "y := " + " + ".join(["1"] * 3000),
    "y := " + "-" * 3000 + "1",
    "y := " + "Q_a ? 1 : " * 500 + "2",
])  # fmt: skip
def test_c07_c08_programs_that_nest_too_deep(program: str) -> None:
    with (
        soon(),
        pytest.raises(
            CRaspError, match=f"this is nested too deep; expected at most {DEEPEST} brackets or operators"
        ) as caught,
    ):
        parse(program)
    assert len(str(caught.value)) < 700


def test_programs_may_nest() -> None:
    deep = "y := " + "not " * (DEEPEST - 10) + "Q_a"
    assert parse(deep).accepts("aa") == (DEEPEST % 2 == 0)
    inside = "(" * (DEEPEST - 1) + "#[Q_a] > 0" + ")" * (DEEPEST - 1)
    assert parse("// ((((( in a comment count for nothing (\ny := " + inside).accepts("ba")


# ------------------------------------------------------------------------------------------------- text and names


@pytest.mark.slow
def test_c09_half_a_surrogate_pair(report: Report, tmp_path: Path) -> None:
    shown, sample = report.exhibits.attention[0], report.exhibits.samples[0]
    tokens = ("\ud800", *shown.tokens[1:])
    exhibits = replace(
        report.exhibits,
        attention=(replace(shown, tokens=tokens),),
        samples=(replace(sample, tokens=("x\udfff",) * len(sample.tokens)),),
    )
    said = {**report.provenance, "command": "\udc80"}
    dirty = replace(report, exhibits=exhibits, notes=("half \ud800",), provenance=said)
    folder = dirty.save(tmp_path / "r")
    assert "\\ud800" in (folder / "report.html").read_text(encoding="utf-8")
    loaded = ln_probe.load_report(folder)
    assert loaded.exhibits.attention[0].tokens[0] == "\ud800"
    loaded.attention().to_html(tmp_path / "a.html").read_text(encoding="utf-8")


def test_c09_token_strings_can_be_written(long_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from ln_probe import prompts

    class Broken:
        def decode(self, ids: list[int]) -> str:
            return "a\ud800"

    monkeypatch.setattr(prompts, "tokenizer_of", lambda model: Broken())
    assert prompts.namer(long_model)(3) == "a\\ud800"
