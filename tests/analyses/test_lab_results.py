"""Intervals over seeds by hand and by another formula; tables; quick forms, killed once and resumed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_models import ran, write_words
from scipy import stats

from ln_probe.analyses.lab.experiments import EXPERIMENT_FILE, EXPERIMENTS, Request
from ln_probe.analyses.lab.majority.majority import MajorityTask
from ln_probe.analyses.lab.results import RESULTS_FILE, Results, binomial_interval, paired_p, share_interval, summarize
from ln_probe.analyses.lab.runs import planned
from ln_probe.analyses.lab.train import TrainConfig
from ln_probe.analyses.lab.transformer import LabConfig


def test_seeds_that_agree_count_as_one_trial_each() -> None:
    """Three times 0.1 has a mean of 0.10000000000000002 and a standard deviation of 1.7e-17: no 10^32 trials."""
    assert share_interval(np.full(3, 0.1)) == pytest.approx((0.1, *binomial_interval(0.3, 3)))
    assert share_interval(np.ones(3))[1:] == pytest.approx((0.025 ** (1 / 3), 1))  # 0.2924, by hand
    assert share_interval(np.zeros(10))[1:] == pytest.approx((0, 1 - 0.025**0.1))


def test_paired_tests_of_what_does_not_vary() -> None:
    assert paired_p(np.zeros(3)) == 1
    assert paired_p(np.full(3, 0.5)) == 0.25  # the sign test's: t would say 0 of any two equal numbers
    assert paired_p(np.array([0.99, 0.99 + 1e-16, 0.99])) == 0.25
    assert np.isnan(paired_p(np.ones(1)))
    x = np.array([0.1, 0.5, -0.2, 0.9])
    assert paired_p(x) == pytest.approx(stats.ttest_rel(x, np.zeros(4)).pvalue)


def test_a_seed_counts_once_and_missing_values_do_not() -> None:
    values = pd.DataFrame({"norm": ["a", "a", "b"], "seed": [0, 1, 0], "value": [1.0, np.nan, np.nan]})
    assert summarize(values, ["norm"])[["norm", "mean", "seeds"]].to_numpy().tolist() == [["a", 1.0, 1]]
    values = pd.DataFrame({"norm": ["a", "a"], "seed": [3, 3], "value": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"two values for \{'norm': 'a', 'seed': 3\}"):
        summarize(values, ["norm"])


def test_runs_are_planned_seed_by_seed(tmp_path: Path) -> None:
    """All cells with the first seed come first, each in a folder of its own; two cells may not share one."""
    settings = {
        "keys": lambda d: {"d": d // 10},
        "task": lambda *_: MajorityTask(0),
        "spec": lambda d: LabConfig(1, d, 1, 6, 12),
        "training": lambda d, seed: TrainConfig(steps=d, batch=1, seed=seed),
    }
    runs = planned([10, 20], Request(out=tmp_path, seeds=(0, 3)), **settings)
    assert [(r.training.steps, r.seed, r.folder.name) for r in runs] == [
        (10, 0, "1-seed0"), (20, 0, "2-seed0"), (10, 3, "1-seed3"), (20, 3, "2-seed3"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="two cells"):
        planned([10, 11], Request(out=tmp_path, seeds=(0, 3)), **settings)


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
