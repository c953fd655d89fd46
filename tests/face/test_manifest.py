"""Only files that a manifest lists are checked, repaired or deleted; a refused command leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from faulty import command, ends, interrupt, lab_model, report, tables, without_pages, write_prompts

import ln_probe
from ln_probe.analyses.files import (
    MARKER,
    FileError,
    Undo,
    checksums,
    first_damaged,
    listed,
    mark,
    read_json,
    remove_listed,
    temporary_folder,
    verify,
    with_checksum,
)
from ln_probe.report import Report, files_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)


@pytest.fixture
def line(tmp_path: Path) -> list[object]:
    prompts = write_prompts(tmp_path / "prompts.jsonl")
    return [lab_model(tmp_path / "m"), "--prompts", prompts, "--out", tmp_path / "out"]


def spoil(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1] + b"?")


# ------------------------------------------------------------------------------------------------ a user's own files


def test_b02_a_users_file_in_a_report_folder_is_never_ours(line: list[object], tmp_path: Path) -> None:
    """Adopted by a repair, it was the reason to do the report again, and --fresh deleted it."""
    assert report(*line)[0] == 0
    folder, made = tmp_path / "out" / "m", tables(tmp_path / "out")
    notes, table = folder / "notes.md", folder / "mine.parquet"
    notes.write_text("first thoughts")
    table.write_bytes(b"no table of ours")
    spoil(folder / "heads.parquet")
    code, _, said = report(*line)
    assert (code, "heads.parquet is damaged or missing; doing it again" in said) == (0, True)
    assert made.items() <= tables(tmp_path / "out").items()
    notes.write_text("second thoughts")
    code, _, said = report(*line)
    assert (code, said.count("already done")) == (0, 1), said
    for change in ([], ["--max-tokens", 3]):  # the report is made again; it is removed, for it was made in another way
        assert report(*line, *change, "--fresh")[0] == 0
        assert notes.read_text() == "second thoughts"
        assert table.read_bytes() == b"no table of ours"


@pytest.mark.slow
def test_b02_files_beside_the_results_of_units_stay(line: list[object], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        interrupt(patched, 2)
        assert report(*line)[0] == 130
    work = tmp_path / "out" / ".ln_probe"
    (units,) = (work / "units").iterdir()
    mine = [work / "notes.md", work / "units" / "notes.md", units / "notes.md", units / "my.partial"]
    for file in mine:
        file.write_text("mine")
    (units / ".prompts-00000.safetensors.4711.partial").write_text("half of a result")
    assert report(*line, "--fresh")[0] == 0
    assert [file.read_text() for file in mine] == ["mine"] * 4
    assert sorted(p.name for p in units.iterdir()) == ["my.partial", "notes.md"], "results of units are kept"
    assert report(*line, "--fresh", "--max-tokens", 3)[0] == 0
    assert [file.read_text() for file in mine] == ["mine"] * 4


@pytest.mark.slow
def test_b02_what_a_kill_left_of_a_report_is_replaced(line: list[object], tmp_path: Path) -> None:
    """Files are listed before they are written: --fresh knows them, though no report.json does."""
    folder = tmp_path / "out" / "m"

    def killed(self: Report, *_: object, **__: object) -> None:
        folder.mkdir(parents=True)
        (folder / "heads.parquet").write_bytes(b"half")
        (folder / ".keys.parquet.4711.partial").write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Report, "save", killed)
        assert report(*line)[0] == 130
    (folder / "notes.md").write_text("mine")
    assert report(*line, "--max-tokens", 3, "--fresh")[0] == 0
    left = {p.name for p in folder.iterdir()}
    assert left in ({"notes.md"}, {"notes.md", ".keys.parquet.4711.partial"})
    assert (tmp_path / "out" / "m-2" / "report.json").is_file(), "a folder that holds something else is not taken"


def test_b02_a_report_saved_again_deletes_what_its_manifest_lists(report: Report, tmp_path: Path) -> None:
    """A report.json that anybody wrote lists nothing of ours."""
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    (folder / "report.json").write_text(json.dumps({"files": {"thesis.tex": "0" * 64}}))
    report.save(folder)
    assert (folder / "thesis.tex").read_text() == "mine"
    assert set(listed(folder / "report.json")) == set(files_of(report))
    assert {"report.html", "heads.parquet", "exhibits.npz"} <= set(files_of(report))
    ln_probe.load_report(folder)


def test_manifests(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    files = checksums(tmp_path, ["a", "b"])
    manifest = tmp_path / "manifest.json"
    manifest.write_bytes(with_checksum({"files": files}))
    assert listed(manifest) == files
    assert first_damaged(tmp_path, files) == ""
    (tmp_path / "b").write_text("c")
    assert first_damaged(tmp_path, files) == "b"
    (tmp_path / "b").unlink()
    os.mkfifo(tmp_path / "b")
    assert first_damaged(tmp_path, files) == "b", "a pipe was waited for"
    for name in ("../a", "", "x/../a", "/etc/passwd"):
        with pytest.raises(FileError, match="is no name of a file in its folder"):
            remove_listed(tmp_path, [name])
        manifest.write_bytes(with_checksum({"files": {name: "0"}}))
        assert listed(manifest) == {}
    manifest.write_text(manifest.read_text().replace('"0"', '"1"'))
    with pytest.raises(FileError, match="its content is not what was written"):
        verify(read_json(manifest), str(manifest))
    remove_listed(tmp_path, ["a", "gone"])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "manifest.json"]
    remove_listed(tmp_path, ["b", "manifest.json"])
    assert not tmp_path.exists(), "a folder with nothing else in it"


# ------------------------------------------------------------------------------------------------ temporary folders


def test_b04_temporary_folders_of_killed_processes_are_swept(tmp_path: Path) -> None:
    mine, linked, empty = tmp_path / "ln-probe-mine", tmp_path / "ln-probe-link", tmp_path / "ln-probe-empty"
    for folder in (mine, empty):
        folder.mkdir()
    (mine / "notes.md").write_text("mine")
    stale = tmp_path / "ln-probe-stale"
    stale.mkdir()
    mark(stale)
    (stale / "0").write_text("a worker's words")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(stale, elsewhere)
    linked.symlink_to(elsewhere)
    with temporary_folder(tmp_path) as held:
        assert held.name.startswith("ln-probe-")
        with temporary_folder(tmp_path) as other:
            assert held.is_dir(), "swept while it is held"
            assert other != held
    assert not held.exists()
    left = ["elsewhere", "ln-probe-empty", "ln-probe-link", "ln-probe-mine"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert (mine / "notes.md").read_text() == "mine"
    assert (elsewhere / "0").exists()
    assert (elsewhere / MARKER).exists()


# ------------------------------------------------------------------------------------------------- refused commands


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.name.startswith("driver.")  # whoever looks holds the lock for a moment
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    ["--engine", "ray", "--address", "127.0.0.1:1"],
    ["--prompts", "{empty}"],
    ["--prompts", "{damaged}"],
    ["--unit", "1/2", "--prompts", "{damaged}"],
    ["--max-tokens", "3"],
    ["--prompts", "{other}"],
])  # fmt: skip
def test_b07_a_refused_command_leaves_nothing(options: list[str], line: list[object], tmp_path: Path) -> None:
    """Neither a folder that was not there, nor a file in one that was."""
    write_prompts(tmp_path / "other.jsonl", [[1, 2]])
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "damaged.jsonl").write_text('{"tokens": [1, 2]}\n{')
    names = {name: str(tmp_path / f"{name}.jsonl") for name in ("other", "empty", "damaged")}
    given = [option.format(**names) for option in options]
    deep = tmp_path / "a" / "b"
    fails_anywhere = options[0] != "--max-tokens" and "{other}" not in options
    if fails_anywhere:
        ends(2, report, *line, "--out", deep, *given)
        assert not deep.parent.exists()
    assert report(*line)[0] == 0
    before = everything(tmp_path / "out")
    ends(2, report, *line, *given)
    assert everything(tmp_path / "out") == before
    assert report(*line)[0] == 0


def test_b07_a_slice_that_finds_a_whole_run(line: list[object], tmp_path: Path) -> None:
    from ln_probe.batch.run import locked

    with locked(tmp_path / "out"):
        code, _, said = report(*line, "--unit", "1/2")
    assert code == 2
    assert "is being written by process" in said
    assert sorted(p.name for p in (tmp_path / "out" / ".ln_probe").iterdir()) == ["driver.json", "driver.lock"]


def test_b07_lab_runs_that_are_refused(tmp_path: Path) -> None:
    for arguments in (["majority", "--collect"], ["language_model", "--text", "no-such.txt"]):
        out = tmp_path / "runs" / "one"
        ends(2, command, "lab", "run", *arguments, "--quick", "--out", out, "--quiet")
        assert not out.parent.exists()
        out.mkdir(parents=True)
        assert command("lab", "run", *arguments, "--quick", "--out", out, "--quiet")[0] == 2
        assert list(out.iterdir()) == []
        shutil.rmtree(out.parent)


def test_undo_removes_what_is_new(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    undo = Undo(out, out / "own")
    (out / "own" / "deep").mkdir(parents=True)
    (out / "own" / "deep" / "file").write_text("x")
    undo()
    assert list(tmp_path.iterdir()) == []
    (out / "own").mkdir(parents=True)
    (out / "own" / "kept").write_text("x")
    (out / "mine").write_text("x")
    undo = Undo(out, out / "own")
    (out / "own" / "new").write_text("x")
    undo()
    assert sorted(p.name for p in out.rglob("*")) == ["kept", "mine", "own"]
