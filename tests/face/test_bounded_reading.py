"""Whatever stands where a file of the user's is expected is refused within seconds and a few megabytes, by name."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faulty
import numpy as np
import pytest
from faulty import command, ends, lab_model, without_pages, write_prompts

import ln_probe
from ln_probe.analyses import files
from ln_probe.analyses.files import FileError, parse_json, read_bytes, read_json, read_lines, read_text
from ln_probe.prompt_sources import entries
from ln_probe.prompts import read_vocabulary
from ln_probe.report import Report

soon = partial(faulty.soon, 64)  # megabytes that a refusal may take


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def zeros(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


STRANGE: list[tuple[Callable[[Path], Path], str]] = [
    (fifo, "a named pipe, not a file"),
    (zeros, "a device, not a file"),
    (folder, "a folder, not a file"),
]


# ------------------------------------------------------------------------------------------------------ the reader


@pytest.mark.parametrize(("make", "said"), STRANGE)
@pytest.mark.parametrize(
    "read", [read_bytes, read_text, read_json, files.sha256_of_file, lambda p: list(read_lines(p))]
)
def test_b05_only_regular_files_are_read(
    read: Callable[[Path], object], make: Callable[[Path], Path], said: str, tmp_path: Path
) -> None:
    path = make(tmp_path / "x")
    with soon(), pytest.raises(FileError, match=f"^{path}: {said}$"):
        read(path)


def test_b05_bytes_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc has regular files of size 0 with content; a file may grow while it is read."""
    file = tmp_path / "x"
    file.write_bytes(b"12345")
    assert read_bytes(file, 5) == b"12345"
    with pytest.raises(FileError, match=r"x: a file of 5 bytes \(at most 4 are read\)"):
        read_bytes(file, 4)
    assert Path("/proc/self/status").stat().st_size == 0
    assert b"Pid:" in read_bytes(Path("/proc/self/status"))
    with pytest.raises(FileError, match=r"status: a file of more than 4 bytes \(at most 4 are read\)"):
        read_bytes(Path("/proc/self/status"), 4)
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as stream:
        stream.truncate(2**40)
    with soon(), pytest.raises(FileError, match=r"sparse: a file of 1099511627776 bytes"):
        read_text(sparse)
    monkeypatch.setattr(files, "SECONDS", -1.0)
    assert read_bytes(file) == b"12345", "a process that was stopped meanwhile has the whole file"
    monkeypatch.setattr(files, "_BLOCK", 2)
    with pytest.raises(FileError, match="x: 2 bytes came in -1 seconds, and more are to come"):
        read_bytes(file)


def test_b05_lines_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 5)
    file = tmp_path / "x"
    file.write_text("1234\n12345")
    assert list(read_lines(file)) == ["1234\n", "12345"]
    file.write_text("1\n123456\n")
    with pytest.raises(FileError, match=r"x, line 2: longer than 5 characters"):
        list(read_lines(file))


def test_b05_json_is_bounded(tmp_path: Path) -> None:
    with soon(), pytest.raises(FileError, match=r"j: JSON of 4000002 lists and objects \(at most 2097152 are read\)"):
        parse_json("[" + "[]," * 4_000_000 + "[]]", "j")
    with soon(), pytest.raises(FileError, match="j: JSON nested deeper than 64 levels"):
        parse_json('["]]]]", ' * 65, "j")
    deep = "[" * 64 + "]" * 64
    assert parse_json(deep, "j") is not None
    assert parse_json('["' + "[" * 100 + '\\"' + "[" * 100 + '"]', "j") == ["[" * 100 + '"' + "[" * 100]


# ------------------------------------------------------------------------------------------- every input of a user


@pytest.mark.parametrize(("make", "said"), STRANGE)
def test_b05_options_that_name_no_file(make: Callable[[Path], Path], said: str, tmp_path: Path) -> None:
    model, path = lab_model(tmp_path / "m"), make(tmp_path / "x.jsonl")
    out = tmp_path / "out"
    for option in ("--config", "--vocab", *([] if make is folder else ["--prompts"])):
        with soon():
            code, _, heard = command("report", model, option, path, "--out", out, "--quiet")
        assert code == 2
        assert said in heard
        assert str(path) in heard
        assert not out.exists()
    with soon(), pytest.raises((ValueError, FileNotFoundError)):
        list(entries(path))
    with soon(), pytest.raises(ValueError, match=said):
        read_vocabulary(path)


def test_b05_a_configuration_of_a_gigabyte(tmp_path: Path) -> None:
    with (tmp_path / "c.toml").open("wb") as stream:
        stream.truncate(2**30)
    with soon():
        code, _, said = command("report", "x", "--config", tmp_path / "c.toml", "--out", tmp_path / "out")
    assert code == 2
    assert "a file of 1073741824 bytes (at most 1048576 are read)" in said


def test_b05_a_report_of_links_and_pipes(report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)
    folder = report.save(tmp_path / "r")
    for name in ("report.json", "heads.parquet", "exhibits.npz"):
        kept = (folder / name).rename(tmp_path / name)
        for make, said in STRANGE:
            made = make(folder / name)
            with soon(), pytest.raises(ValueError, match=rf"{name} is damaged \({said}\): make the report again"):
                ln_probe.load_report(folder)
            made.rmdir() if made.is_dir() else made.unlink()
        kept.rename(folder / name)
    ln_probe.load_report(folder)


@pytest.mark.parametrize(("make", "said"), STRANGE)
def test_b05_a_checkpoint_of_links_and_pipes(make: Callable[[Path], Path], said: str, folder: Path) -> None:
    make(folder / "tokenizer.json")
    with soon():
        notes = ln_probe.source_of(ln_probe.load_model(folder, device="cpu")).notes
    assert any(note.startswith("no tokenizer") for note in notes)
    (folder / "config.json").unlink()
    make(folder / "config.json")
    with soon(), pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        ln_probe.load_model(folder, device="cpu")


def test_b05_prompts_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an array come one by one; a paragraph without an end is none."""
    from ln_probe import prompt_sources as sources

    rows = np.zeros((2000, 20_000), np.int32)
    rows[:, 0] = np.arange(2000)
    np.save(tmp_path / "x.npy", rows)
    del rows
    with soon():
        assert [row[0] for row, _ in zip(entries(tmp_path / "x.npy"), range(3), strict=False)] == [0, 1, 2]
    header = np.lib.format.header_data_from_array_1_0(np.zeros(1, np.int64)) | {"shape": (2**40,)}
    with (tmp_path / "huge.npy").open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, header)
    with soon(), pytest.raises(ValueError, match=r"huge\.npy is not a plain \.npy file of token ids"):
        list(entries(tmp_path / "huge.npy"))
    monkeypatch.setattr(sources, "LONGEST_LINE", 20)
    (tmp_path / "x.txt").write_text("some words\n" * 5)
    with pytest.raises(ValueError, match=r"x\.txt holds a prompt of more than 20 characters: put empty lines between"):
        list(entries(tmp_path / "x.txt"))


def test_b05_the_lock_of_a_driver(tmp_path: Path) -> None:
    """Who holds a folder is read from a file of it."""
    from ln_probe.batch.run import BusyError, locked

    with locked(tmp_path):
        who = tmp_path / ".ln_probe" / "driver.json"
        assert json.loads(who.read_text())["process"] == os.getpid()
        who.unlink()
        fifo(who)
        with soon(), pytest.raises(BusyError, match="is being written by another process"), locked(tmp_path):
            pass
        who.unlink()


def test_the_files_of_the_fixtures_are_read(tmp_path: Path) -> None:
    """What is refused above is not refused because of its name."""
    (tmp_path / "c.toml").write_text("max-tokens = 3\n")
    model: Any = lab_model(tmp_path / "m")
    prompts = write_prompts(tmp_path / "p.jsonl")
    ends(
        0,
        command,
        "plan",
        model,
        "--config",
        tmp_path / "c.toml",
        "--prompts",
        prompts,
        "--out",
        tmp_path / "o",
        "--quiet",
    )
