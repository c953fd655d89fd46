"""Every experiment's quick form, killed once after its first finished run and resumed, is what it is undisturbed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from lab_models import write_words
from lab_runs import ran

from ln_probe.analyses.lab.experiments import EXPERIMENT_FILE, EXPERIMENTS
from ln_probe.analyses.lab.results import RESULTS_FILE, Results

# What a finished run leaves; those that train nothing are killed once their folder is theirs.
FINISHED = "runs/*/model.safetensors"
TRAIN_NOTHING = ("random_keys", "compiler", "counters", "saturated_states", "rational_recurrence")
WORDS = ("the lamp", "was lit", "and the ships", "came home", "before the ice.", "Again", "no one", "spoke;", "it was")


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two texts of other words, long enough for a held-out window of 1024 tokens."""
    folder = tmp_path_factory.mktemp("books")
    one = write_words(folder / "one.txt", WORDS, 40_000)
    other = write_words(folder / "other.txt", [*WORDS[:5], "the sea.", "a whale", "sank", "under it"], 40_000)
    return one, other


def killed_after_one(experiment: str, out: Path, options: list[str]) -> None:
    """Run the command until a first run is finished, and kill it there."""
    mark = EXPERIMENT_FILE if experiment in TRAIN_NOTHING else FINISHED
    command = [sys.executable, "-m", "ln_probe", "lab", "run", experiment, "--quick", "--seeds", "1", "--quiet"]
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # sums are split among them
    process = subprocess.Popen([*command, "--out", str(out), *options], env=os.environ | threads)
    while process.poll() is None and not any(out.glob(mark)):
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not (out / RESULTS_FILE).exists(), "it was over before it could be killed"


def assert_same(one: Results, other: Results) -> None:
    """Two results are the same to the bit, but for the seconds that evaluations took."""
    assert list(one.tables) == list(other.tables)
    for a, b in zip(one.tables.values(), other.tables.values(), strict=True):
        kept = [t[t["measure"] != "seconds"] if "measure" in t else t for t in (a, b)]
        pd.testing.assert_frame_equal(*kept, check_exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_killed_after_its_first_run_and_resumed(
    experiment: str, books: tuple[Path, Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    given: dict[str, object] = {"texts": books} if EXPERIMENTS[experiment].needs_text else {}
    options = [part for text in (books if given else ()) for part in ("--text", str(text))]
    if experiment == "language_model_full":
        given["tokenizer"] = request.getfixturevalue("shared") / "tokenizers" / "gpt2"
        options += ["--tokenizer", str(given["tokenizer"])]
    killed_after_one(experiment, tmp_path / "killed", options)
    resumed = ran(experiment, tmp_path / "killed", (0,), **given)
    whole = ran(experiment, tmp_path / "whole", (0,), **given)
    assert_same(resumed, whole)
    weights = sorted(path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("model.safetensors"))
    assert bool(weights) == (experiment not in TRAIN_NOTHING)
    for path in weights:
        assert (tmp_path / "killed" / path).read_bytes() == (tmp_path / "whole" / path).read_bytes(), path
