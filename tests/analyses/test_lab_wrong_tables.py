"""What would make a wrong table of the laboratory without a word: other settings, unfinished and diverged runs."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from lab_models import majority_run
from torch import nn

from ln_probe.analyses.lab.counting import counting, qrnn_budget, rational_recurrence, saturated_states
from ln_probe.analyses.lab.crasp.compiler import FEW_WORDS, PROGRAMS, agreement
from ln_probe.analyses.lab.keeping import check_added, rebuilt
from ln_probe.analyses.lab.language_model import bundled_seeds
from ln_probe.analyses.lab.results import folder, table_at
from ln_probe.analyses.lab.run_folder import DIVERGED_FILE, MODEL_FILE, STATE_FILE, kept_beside
from ln_probe.analyses.lab.train import DivergedError, train


@pytest.mark.parametrize(("experiment", "change", "said"), [
    ("depth", {"experiment": "depth_deep"}, "holds results of depth_deep, not of depth"),
    ("depth", {"settings": {"training": {"steps": 5}}}, "made with other settings .* training: "),
    ("depth", {"diverged": ["a run: nan"]}, "diverged, which depth counts as misses: a run: nan"),
    ("majority", {"settings": {"batch": 1, "classes": 3}}, ""),
])  # fmt: skip
def test_only_runs_of_the_same_kind_are_added(
    tmp_path: Path, experiment: str, change: dict[str, Any], said: str
) -> None:
    shutil.copytree(folder(experiment), tmp_path / "r")
    kept = json.loads((tmp_path / "r" / "results.json").read_text())
    about = json.loads(json.dumps(kept))
    about["settings"] |= change.pop("settings", {})
    (tmp_path / "r" / "results.json").write_text(json.dumps(about | change))
    if said:
        with pytest.raises(ValueError, match=said):
            rebuilt(experiment, tmp_path / "r")
    else:
        assert check_added(experiment, tmp_path / "r", kept["settings"]) == ()


def test_quick_runs_are_not_added(tmp_path: Path) -> None:
    shutil.copytree(folder("depth"), tmp_path / "r")
    (tmp_path / "r" / "experiment.json").write_text('{"experiment": "depth", "quick": true}')
    with pytest.raises(ValueError, match="made with --quick"):
        rebuilt("depth", tmp_path / "r")


def test_diverged_runs_of_both_are_named(tmp_path: Path) -> None:
    shutil.copytree(folder("counting"), tmp_path / "r")
    about = json.loads((tmp_path / "r" / "results.json").read_text())
    (tmp_path / "r" / "results.json").write_text(json.dumps(about | {"diverged": ["a run: nan at step 3"]}))
    assert rebuilt("counting", tmp_path / "r").diverged == ("a run: nan at step 3",)


def test_every_short_word_is_every_short_word() -> None:
    """Where a norm does not suffice, too: half the words of two letters begin with the first of them."""
    name = next(n for n in PROGRAMS if n == "majority")
    rows = pd.DataFrame(agreement(name, 0, FEW_WORDS + 5, 4))
    short = rows[rows["measure"] == "every_short_word_answers"].set_index(["construction", "norm"])["value"]
    # without a norm nothing is compared: it is right on the letters where a constant is, of all 16 words of 4 letters
    assert math.isclose(16 * 4 * short["scaling", "none"], round(16 * 4 * short["scaling", "none"]), abs_tol=1e-9)
    whole = rows[rows["measure"] == "every_short_word"].set_index(["construction", "norm"])["value"]
    assert (16 * whole["scaling", "none"]) == pytest.approx(round(16 * whole["scaling", "none"]))
    assert whole["scaling", "layernorm"] == 1


def test_unfinished_runs_are_not_at_the_end() -> None:
    steps = qrnn_budget.training(True, 0, qrnn_budget.RATES[0]).steps
    rows = [
        ("L5", "qrnn", 0.01, seed, step, "accuracy_64", value)
        for seed, last in ((0, steps), (1, steps // 2))
        for step, value in ((steps // 4, 0.5), (last, 0.7 + 0.2 * seed))
    ]
    values = pd.DataFrame(rows, columns=[*qrnn_budget.KEYS, "seed", "step", "measure", "value"])
    found = qrnn_budget.findings(values, quick=True)
    assert "0 of 1 runs reach" in found.conclusions[0]
    assert "70.0 to 70.0 %" in found.conclusions[0]
    (said,) = qrnn_budget.unfinished(values, quick=True)
    assert said.endswith(f"seed 1: stopped after {steps // 2} updates, left out")


def test_what_is_kept_beside_weights_is_of_these_weights(tmp_path: Path) -> None:
    weights, made = tmp_path / "w", []

    def make() -> pd.DataFrame:
        made.append(1)
        return pd.DataFrame({"value": [len(made)]})

    weights.write_bytes(b"one")
    found = [kept_beside(tmp_path, "m", weights, 1, make)["value"].item() for _ in range(2)]
    weights.write_bytes(b"two")
    found.append(kept_beside(tmp_path, "m", weights, 1, make)["value"].item())
    found.append(kept_beside(tmp_path, "m", weights, 2, make)["value"].item())
    assert found == [1, 1, 2, 3]


@pytest.mark.slow
def test_a_last_update_that_breaks_the_weights_is_a_divergence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss before it is a number: what comes after it tells."""
    one = majority_run(tmp_path / "r", steps=3, batch=4, clip=1.0, warmup=200)
    steps = one.training.steps
    train(one.task, one.spec, one.training, one.folder, progress=False, until=1)
    kept = (one.folder / STATE_FILE).read_bytes()
    before = nn.utils.clip_grad_norm_
    seen: list[int] = []

    def broken(parameters: Any, *args: Any) -> Any:
        parameters = list(parameters)
        seen.append(1)
        if len(seen) == breaks_at[0]:
            parameters[0].grad.fill_(math.inf)
            return None
        return before(parameters, *args)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", broken)
    breaks_at = [0]
    for until, breaks_at[0] in ((2, 1), (None, 2)):  # the second update of all, before a state is saved, and the last
        seen.clear()
        (one.folder / DIVERGED_FILE).unlink(missing_ok=True)
        step = until or steps
        with pytest.raises(DivergedError, match=f"is nan at step {step}"):
            train(one.task, one.spec, one.training, one.folder, progress=False, until=until)
        assert (one.folder / STATE_FILE).read_bytes() == kept
    assert not (one.folder / MODEL_FILE).exists()
    assert (one.folder / DIVERGED_FILE).exists()


def test_quick_results_state_quick_sizes() -> None:
    def table(experiment: str, name: str = "values") -> pd.DataFrame:
        return table_at(folder(experiment), name)

    few = saturated_states.findings(table("saturated_states"), table("saturated_states", "growth"), quick=True).settings
    assert few["draws"] == saturated_states.DRAWS_QUICK
    few = rational_recurrence.findings(
        table("rational_recurrence"), table("rational_recurrence", "errors"), quick=True
    ).settings
    assert (few["draws"], few["networks"]) == (rational_recurrence.DRAWS_QUICK, rational_recurrence.NETWORKS_QUICK)
    few = bundled_seeds.findings(table("language_model_bundled", "seeds"), quick=True).settings
    assert few["training"]["steps"] == bundled_seeds.training(True, 0).steps
    found = counting.findings(table("counting"), quick=True)
    assert found.settings["max_trained_n"] == {"anbn": 30, "anbncn": 30}
    said = [c for c in found.conclusions if "exact on n" in c]
    assert said
    assert all("trained to 30, tested to 90" in c for c in said)
