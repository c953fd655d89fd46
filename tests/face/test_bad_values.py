"""Bad values of options: each is shown, with what is allowed; none is called a fault of ln_probe."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faulty import PROBES, command, lab_model, report, without_pages, write_prompts

import ln_probe
from ln_probe.batch import exits
from ln_probe.batch.suite import SuiteError, suite

LONG, DIGITS, SUPERSCRIPT = "a" * 5000, "9" * 5000, "²"
SHOWN = "a" * 200 + "'… (5000 characters)"


@pytest.mark.parametrize(("options", "said"), [
    (["--checkpoints", SUPERSCRIPT], "--checkpoints takes 'all' or training steps such as 0,1000, got '²'"),
    (["--checkpoints", DIGITS], "training steps such as 0,1000, got '" + "9" * 60 + "'… (5000 characters)"),
    (["--checkpoints", "٣"], "got '٣'"),
    (["--unit", "²/3"], "--unit takes K/N with K from 1 to N, such as 3/16, got '²/3'"),
    (["--unit", f"1/{DIGITS}"], "such as 3/16, got '1/999"),
    (["--layers", "0-²"], "--layers takes numbers and ranges such as 0,3-5, got '0-²'"),
    (["--shard", "9" * 30], f"'{'9' * 30}' is not a whole number from 1 to 1000000000"),
    (["--shard", DIGITS], "(5000 characters) is not a whole number from 1 to 1000000000"),
    (["--shard", SUPERSCRIPT], "'²' is not a whole number from 1 to 1000000000"),
    (["--shard", "0"], "'0' is not a whole number from 1 to 1000000000"),
    (["--max-tokens", "-1"], "'-1' is not a whole number from 1 to 1000000000"),
    (["--seed", "9" * 30], f"'{'9' * 30}' is not a whole number from 0 to 1000000000000000000"),
    (["--workers", "many"], "'many' is not a whole number from 0 to 1000000000"),
    (["--keys-sample", "1.5"], "'1.5' is not a whole number from 0 to 1000000000"),
    (["--prompts", LONG], f"no prompts file '{SHOWN}"),
    (["--prompts", f"x/{'a' * 300}/y.txt"], "no prompts file 'x/aaaa"),
    (["--prompts", "/"], "--prompts '/': no data set. A folder of prompts holds what Dataset.save_to_disk wrote, or"),
    (["--prompts", "\udcff"], r"no prompts file '\udcff'"),
    (["--vocab", LONG], "… (50"),
    (["--vocab", LONG], "is not a readable vocabulary: File name too long"),
    (["--probes", "\udcff"], r"unknown probe '\udcff': choose from decomposition"),
    (["--config", LONG], "cannot be read (File name too long)"),
    (["--gpus", "nan", "--engine", "ray"], "--"),
])  # fmt: skip
def test_b06_options(options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "6000")  # typer wraps its messages
    out = tmp_path / "out"
    code, _, heard = command("report", "lm-layernorm", "--quiet", "--out", out, *options)
    assert code == 2
    assert said in heard
    assert "fault of ln_probe" not in heard
    assert len(heard) < 1500 or "Usage" in heard
    assert not out.exists()


@pytest.mark.parametrize("name", [LONG, f"owner/{LONG}", f"./{'ü' * 128}/model", " "])
def test_b06_names_of_models(name: str, tmp_path: Path) -> None:
    said = "no model's name: give a hub name, a path or a bundled name" if name.strip() else "the model's name is empty"
    with pytest.raises(SuiteError, match=said):
        suite([name])
    with pytest.raises(ValueError, match=said):
        ln_probe.load_model(name)
    code, _, heard = command("report", name, "--quiet", "--out", tmp_path / "out")
    assert code == 2
    assert said in heard
    assert len(heard) < 400
    assert not (tmp_path / "out").exists()


def test_b06_names_that_are_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone surrogate is how Python has bytes that are no UTF-8: files may be called so."""
    without_pages(monkeypatch)
    code, _, said = report("\udcff", "--out", tmp_path / "out")
    assert code == 1
    assert r"No model is called '\udcff'" in said
    home = tmp_path / "\udcff"
    home.mkdir()
    prompts = write_prompts(home / "\udcfe.jsonl")
    code, _, said = report(lab_model(home / "m"), "--prompts", prompts, "--out", home / "out")
    assert code == 0, said
    ln_probe.load_report(home / "out" / "m")
    code, _, said = command("plan", home / "m", "--prompts", prompts, "--out", home / "out", "--quiet")
    assert code == 0, said


def test_b06_a_long_name_that_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)
    model = lab_model(tmp_path / ("m" * 255))
    code, _, said = report(model, "--prompts", write_prompts(tmp_path / "p.jsonl"), "--out", tmp_path / "out")
    assert code == 0, said
    assert (tmp_path / "out" / ("m" * 200) / "report.json").is_file()


@pytest.mark.parametrize(("option", "said"), [
    ("--seeds", "is not a whole number from 1 to 10000"),
    ("--jobs", "is not a whole number from 1 to 10000"),
])  # fmt: skip
def test_b06_lab_runs(option: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    code, _, heard = command("lab", "run", "majority", option, "9" * 20, "--out", tmp_path / "out")
    assert code == 2
    assert f"'{'9' * 20}' {said}" in heard
    assert not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------------------------- memory


def test_b06_what_is_said_of_memory() -> None:
    for error in (
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
    ):
        words = exits.last_words(error)
        assert words.startswith(f"not enough memory ({type(error).__name__}: ")
        assert "ulimit -v" in words
        assert "--workers" in words
        assert "fault of ln_probe" not in words
    caused = ValueError("the file cannot be read")
    caused.__cause__ = MemoryError("Unable to allocate 3 GiB")
    assert exits.last_words(caused).startswith("not enough memory")
    assert "This is a fault of ln_probe" in exits.last_words(ValueError("odd"))


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [0.4, 0.9, 1.6, 2.4])
@pytest.mark.parametrize("workers", [0, 1])
def test_b06_a_limit_on_memory(gigabytes: float, workers: int, tmp_path: Path) -> None:
    """With less and less of it a command fails in more and more places: it says so, and shows no traceback."""
    model, prompts = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    arguments = ["report", model, "--prompts", prompts, "--probes", PROBES, "--out", tmp_path / "out", "--quiet"]
    words = [sys.executable, "-m", "ln_probe", *map(str, arguments), "--workers", str(workers)]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -v {int(gigabytes * 2**20)}; exec "$@"', "-", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        timeout=400,
    )
    assert "Traceback" not in done.stderr
    assert "fault of ln_probe" not in done.stderr
    if done.returncode == 127:  # the C library ends a process without room for a thread's variables: none can catch it
        assert "cannot allocate memory for thread-local data: ABORT" in done.stderr
        assert not ln_probe.load_report(tmp_path / "out" / "m").failures  # it was complete
        return
    assert done.returncode in (0, 1), done.stderr
    assert done.returncode == 0 or "memory" in done.stderr.lower(), done.stderr
