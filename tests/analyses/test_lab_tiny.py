"""Experiments from end to end at a tiny size: what they report, measured again from the saved weights."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lab_models import is_interior, write_words
from lab_runs import ran
from safetensors.torch import load_file
from scipy import stats

from ln_probe.analyses.lab import runs as laboratory
from ln_probe.analyses.lab.approximation import approximation, relative, text_models
from ln_probe.analyses.lab.counting import counting, tasks
from ln_probe.analyses.lab.crasp import depth
from ln_probe.analyses.lab.experiments import EXPERIMENTS
from ln_probe.analyses.lab.language_model import encoder, published, remove_norm, two_by_two
from ln_probe.analyses.lab.majority import majority
from ln_probe.analyses.lab.results import Results
from ln_probe.analyses.lab.runs import Run
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import read_metrics, step_generator

SEEDS = (0, 1)
SCHEDULE = {"steps": 3, "batch": 4, "warmup": 1, "evaluate_every": 3, "evaluate_at": (), "save_at": (0,)}
WORDS = ("the lamp", "was lit", "and the ships", "came home", "before the ice.", "Again", "no one", "spoke;", "it was")
Tiny = Callable[..., tuple[Results, list[Run]]]


@pytest.fixture(scope="module")
def books(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("books")
    one = write_words(out / "one.txt", WORDS, 3000)
    return one, write_words(out / "other.txt", ("the sea.", "a whale", "sank", "under it"), 3000)


@pytest.fixture
def tiny(tmp_path: Path, books: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Tiny:
    """Run an experiment with another schedule, only the cells to keep, and other constants of its module."""

    def run(
        experiment: str,
        home: Any,
        *,
        keep: Callable[[dict[str, Any]], bool] = lambda keys: True,
        schedule: dict[str, Any] | None = None,
        request: dict[str, Any] | None = None,
        **constants: Any,
    ) -> tuple[Results, list[Run]]:
        runs: list[Run] = []

        def shrunk(*args: Any, **parts: Any) -> list[Run]:
            planned = [run for run in laboratory.planned(*args, **parts) if keep(dict(run.keys))]
            runs.extend(replace(one, training=replace(one.training, **SCHEDULE | (schedule or {}))) for one in planned)
            return list(runs)

        for name, value in {"planned": shrunk, **constants}.items():
            monkeypatch.setattr(home, name, value)
        texts = {"texts": books} if EXPERIMENTS[experiment].needs_text else {}
        return ran(experiment, tmp_path / "out", SEEDS, **texts | (request or {})), runs

    return run


def trained(run: Run, step: int | None = None) -> Any:
    """The model of a run, from its file alone."""
    model = run.spec.build()
    name = "model" if step is None else f"checkpoints/step-{step:07d}"
    model.load_state_dict(load_file(run.folder / f"{name}.safetensors"))
    return model.eval()


def assert_reported(table: pd.DataFrame, runs: Sequence[Run], measured: Callable[[Run], dict[str, float]]) -> None:
    """The last values of every run, and no others, are those measured."""
    last = table[table["step"] == table["step"].max()]
    count = 0
    for run in runs:
        rows = last[last["seed"] == run.seed]
        for key, value in run.keys.items():
            rows = rows[rows[key] == value]
        expected = measured(run)
        reported = rows.set_index("measure")["value"]
        for measure, value in expected.items():
            assert float(reported[measure]) == pytest.approx(value, rel=2e-4, abs=1e-7), (run.name, measure)
        count += len(expected)
    assert len(last[last["measure"].isin(expected)]) == count


def held_out(text: TextTask, count: int) -> torch.Tensor:
    """Windows that begin with the boundary, spread evenly over the held-out tokens."""
    begins = torch.linspace(0, len(text.valid_tokens) - text.n_ctx, count).long().tolist()
    rows = [[text.boundary, *text.valid_tokens[at : at + text.n_ctx - 1].tolist()] for at in begins]
    return torch.tensor(rows)


@torch.no_grad()
def next_token_loss(model: Any, windows: torch.Tensor) -> float:
    chances = model(windows).double().log_softmax(-1)
    lost = [-float(chances[i, t, windows[i, t + 1]]) for i, t in np.ndindex(len(windows), windows.shape[1] - 1)]
    return float(np.mean(lost))


def interior_share(keys: torch.Tensor) -> float:
    """The share of keys [set key d] inside the hull of the others of their set."""
    sets = keys.detach().double().numpy()
    return float(np.mean([is_interior(one, i) for one in sets for i in range(len(one))]))


def squared_error(run: Run) -> dict[str, float]:
    """Over a sample; of an affine model by flipping each input alone."""
    target, length = str(run.keys["target"]), relative.LENGTH
    model = trained(run).double()
    x = 2.0 * torch.randint(2, (approximation.EVALUATION_INPUTS, length), generator=step_generator(10_000, 0)) - 1
    if target == "adaptive":
        x[:, [999, 98, 47]] = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=3)) * (len(x) // 8))
    lag = length - np.arange(1, length + 1.0)
    weights = {
        "4a": np.where(lag > 0, np.maximum(lag, 0.5) ** -0.5, 0), "4b": np.exp(-5 * lag),
        "2b": np.isin(length - lag, (48, 56, 99)).astype(float),
    }  # fmt: skip
    with torch.no_grad():
        if target in ("4a", "4b") and run.keys["norm"] == "none" and not run.keys["width"]:
            base, flipped = -torch.ones(1, length), 2 * torch.eye(length) - 1
            slopes = ((model(flipped.double()) - model(base.double())) / 2).numpy()
            constant = float(model(base.double())) + slopes.sum()
            mse = constant**2 + ((slopes - weights[target]) ** 2).sum()
        else:
            wanted = x.numpy() @ weights[target] if target in weights else relative.evaluate(target, x).numpy()
            mse = float(((model(x.double()).numpy() - wanted) ** 2).mean())
    best = float((weights[target] ** 2).sum()) if target in weights else relative.variance(target)
    return {"mse": mse, "relative_mse": mse / best}


@pytest.mark.parametrize("experiment", ["approximation", "adaptive_memory"])
def test_approximation(experiment: str, tiny: Tiny) -> None:
    results, runs = tiny(experiment, approximation, EVALUATION_INPUTS=64)
    assert_reported(results.tables["errors"], runs, squared_error)
    summary = results.summary
    free = summary[(summary["measure"] == "mse") & (summary["norm"] == "none")]
    assert (free["optimum"].dropna() <= free.loc[free["optimum"].notna(), "mean"] + 0.1).all()


def test_longer_inputs(tiny: Tiny) -> None:
    results, runs = tiny("longer_inputs", approximation, LENGTHS=(1000, 1250))
    errors = results.tables["errors"].set_index(["target", "kernel", "heads", "seed", "length", "measure"])["value"]
    assert len(errors) == len(runs) * 2 * 2
    for run in runs:
        model = replace(run.spec, length=1250).build()  # type: ignore[type-var]
        model.load_state_dict({k: v for k, v in trained(run).state_dict().items() if k != "phi"}, strict=False)
        flipped, base = 2 * torch.eye(1250) - 1, -torch.ones(1, 1250)
        with torch.no_grad():
            slopes = ((model.double()(flipped.double()) - model(base.double())) / 2).numpy()[::-1]
            constant = float(model(base.double())) + slopes.sum()
        weights = relative.lag_weights(str(run.keys["target"]), 1250)
        mse = constant**2 + ((slopes - weights) ** 2).sum()
        place = (*run.keys.values(), run.seed, 1250)
        assert errors[(*place, "mse")] == pytest.approx(mse, rel=1e-3)
        assert errors[(*place, "relative_mse")] == pytest.approx(mse / (weights**2).sum(), rel=1e-3)


def test_approximation_text(tiny: Tiny) -> None:
    results, runs = tiny("approximation_text", text_models, D_VOCAB=280, N_CTX=16)
    windows = held_out(runs[0].task, 64)  # type: ignore[arg-type]
    assert len(runs) == 5 * len(SEEDS)
    assert_reported(results.tables["losses"], runs, lambda run: {"valid_loss": next_token_loss(trained(run), windows)})
