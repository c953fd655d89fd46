"""Norms taken out of a trained model, at each stage and end to end; the registered 2 x 2 on fresh seeds, end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import fresh_seeds, remove_norm
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.run_folder import load_run
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import TrainConfig, train, train_all
from ln_probe.analyses.lab.transformer import LabConfig

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
SIZE = remove_norm.Size(
    steps=14, batch=2, schedule=remove_norm.Schedule(2, 1, 1), valid_windows=2, contexts=2
)  # 5 norms: over at step 12


@pytest.fixture(scope="module")
def start(prose: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained model of two layers."""
    out = tmp_path_factory.mktemp("start") / "lm-tiny"
    config = LabConfig(n_layers=2, d_model=16, n_heads=4, d_vocab=280, n_ctx=24)
    train(TextTask([prose], 280, 24), config, TrainConfig(steps=30, batch=4), out, progress=False)
    return out


def test_each_stage_by_its_formula() -> None:
    torch.manual_seed(0)
    norm = Norm("layernorm", 8)
    assert norm.w is not None
    assert norm.b is not None
    torch.nn.init.normal_(norm.w)
    torch.nn.init.normal_(norm.b)
    made = remove_norm.ReplaceableNorm(norm)
    batches = [torch.randn(3, 5, 8) * torch.tensor([9.0, 1, 1, 1, 1])[:, None] for _ in range(3)]
    for x in batches:
        torch.testing.assert_close(made(x), norm(x))
    # The running means, by hand: the first three batches count alike, for their weights 1, 1/2, 1/3 are over MEMORY.
    sigma = torch.stack([(x.var(-1, correction=0) + 1e-5).sqrt() for x in batches])
    torch.testing.assert_close(made.first, sigma[..., 0].mean())
    torch.testing.assert_close(made.rest, sigma[..., 1:].mean())
    x = batches[0]
    projected = x - x.mean(-1, keepdim=True)
    made.stage.fill_(remove_norm.ONE_CONSTANT)
    torch.testing.assert_close(made(x), projected / made.rest * norm.w + norm.b)
    made.stage.fill_(remove_norm.TWO_CONSTANTS)
    divisor = torch.stack([made.first, *[made.rest] * 4])[:, None]
    torch.testing.assert_close(made(x), projected / divisor * norm.w + norm.b)
    seen = int(made.seen)
    made(x)
    assert int(made.seen) == seen, "a constant is no longer followed"


def test_only_layernorms_are_replaced() -> None:
    with pytest.raises(ValueError, match="only a LayerNorm with gain and bias can be replaced here, not scaling_only"):
        remove_norm.ReplaceableNorm(Norm("scaling_only", 8))


def test_nothing_changes_until_a_norm_goes(start: Path) -> None:
    tokens = torch.randint(280, (2, 24), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(remove_norm.Start(start).build()(tokens), load_run(start)(tokens))


def test_norms_go_one_by_one(start: Path) -> None:
    norms = remove_norm.replaceable_norms(remove_norm.Start(start).build())
    schedule = remove_norm.Schedule(first=2, every=3, joined_every=2)
    seen = []
    for step in range(schedule.over(len(norms)) + 1):
        schedule.set_stages(norms, step)
        seen.append([int(norm.stage) for norm in norms])
    assert seen[1] == [remove_norm.LAYERNORM] * 5
    assert seen[2] == [remove_norm.TWO_CONSTANTS] + [remove_norm.LAYERNORM] * 4
    assert seen[5] == [remove_norm.TWO_CONSTANTS] * 2 + [remove_norm.LAYERNORM] * 3
    assert seen[schedule.replaced(5) - 1] == [remove_norm.TWO_CONSTANTS] * 5
    assert seen[schedule.replaced(5)] == [remove_norm.ONE_CONSTANT] + [remove_norm.TWO_CONSTANTS] * 4
    assert seen[-1] == [remove_norm.ONE_CONSTANT] * 5


def test_a_plain_model_computes_the_same(start: Path) -> None:
    model = remove_norm.Start(start).build()
    tokens = torch.randint(280, (2, 24), generator=torch.Generator().manual_seed(1))
    model(tokens)
    norms = remove_norm.replaceable_norms(model)
    for norm in norms:
        norm.stage.fill_(remove_norm.ONE_CONSTANT)
    made = remove_norm.plain(model.eval())
    torch.testing.assert_close(made(tokens), model(tokens))
    assert {made.cfg.norm, made.cfg.norm_mlp, made.cfg.norm_final} == {"projection_only"}
    norms[0].stage.fill_(remove_norm.TWO_CONSTANTS)
    with pytest.raises(ValueError, match=r"norms at stages \[1, 2\]: only all at 0 or all at 2 is plain"):
        remove_norm.plain(model)


@pytest.mark.slow
def test_the_experiment_end_to_end(prose: Path, start: Path, tmp_path: Path) -> None:
    request = Request(tmp_path, seeds=(0, 1), texts=(prose,), progress=False)
    results = remove_norm.run(request, SIZE, start)
    summary = results.summary.set_index(["model", "measure"])["mean"]
    assert set(results.summary["model"]) == {
        remove_norm.BEFORE,
        remove_norm.AT_ONCE,
        remove_norm.KEPT,
        remove_norm.REMOVED,
    }
    assert np.isfinite(results.summary["mean"]).all()
    assert summary[remove_norm.BEFORE, "unselectable_normalized"] == 0, "on a sphere every key is a vertex"
    # What is written for load_model is the model that was trained, by its own loss.
    made = load_run(tmp_path / "models" / "removed-seed0")
    task = remove_norm.make_runs(request, SIZE, start)[0].task
    assert isinstance(task, remove_norm.Removal)
    seeds = results.tables["seeds"].set_index(["model", "measure", "seed"])["value"]
    assert task.evaluate(made)["valid_loss"] == pytest.approx(seeds[remove_norm.REMOVED, "valid_loss", 0], rel=1e-6)
    curves = results.tables["curves"].set_index(["model", "measure", "seed", "step"])["value"]
    assert curves[remove_norm.REMOVED, "valid_loss", 0, 14] == pytest.approx(
        seeds[remove_norm.REMOVED, "valid_loss", 0], rel=1e-5
    )
    # Replaced at once is the start with constants in its norms' places: nothing is trained.
    model = remove_norm.at_once(start, task, SIZE, 0, remove_norm.ONE_CONSTANT)
    torch.testing.assert_close(model.embed.W_E, load_run(start).embed.W_E)
    assert task.evaluate(model)["valid_loss"] == pytest.approx(seeds[remove_norm.AT_ONCE, "valid_loss", 0], rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_GPU])])
def test_an_interrupted_run_ends_as_the_others(device: str, prose: Path, start: Path, tmp_path: Path) -> None:
    """Constants are followed and norms replaced on either side of the break."""
    ended = []
    for name, stops in (("whole", [None]), ("broken", [1, 5, None])):
        request = Request(tmp_path / name, seeds=(0,), texts=(prose,), progress=False)
        runs = remove_norm.make_runs(request, replace(SIZE), start)[:1]
        for stop in stops:
            train_all(runs, until=stop, progress=False, device=device)
        ended.append(load_run_state(runs[0].folder))
    assert ended[0].keys() == ended[1].keys()
    for name, value in ended[0].items():
        torch.testing.assert_close(ended[1][name], value, rtol=0, atol=0)


def load_run_state(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return found


@pytest.mark.slow
def test_a_run(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"d_vocab": 300, "n_ctx": 24}
    task = TextTask([prose], small["d_vocab"], small["n_ctx"], valid_windows=4)
    monkeypatch.setattr(fresh_seeds, "text", lambda _request: task)
    whole = fresh_seeds.fresh_model
    monkeypatch.setattr(fresh_seeds, "fresh_model", lambda norm: replace(whole(norm), **small))
    request = Request(tmp_path, (0, 1), quick=True, texts=(prose,), progress=False)
    found = fresh_seeds.run(request)
    assert found.settings["seeds"] == [10, 11]
    assert sorted(p.name for p in (tmp_path / "runs").iterdir())[:2] == ["layernorm-seed10", "layernorm-seed11"]
    again = fresh_seeds.run(request)  # from what is there
    pd.testing.assert_frame_equal(again.tables["effects"], found.tables["effects"])
