"""The laboratory's norms, its model and its choices, its trainer; and that ln_probe analyzes its models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_models import assert_same_run
from transformer_lens.hook_points import HookPoint

from ln_probe.analyses.lab.language_model.two_by_two import bundle
from ln_probe.analyses.lab.norms import NORM_KINDS, Norm, calibrate
from ln_probe.analyses.lab.points import PlainPoint
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import TrainConfig, checkpoint_steps, load_run, read_metrics, train
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

CONFIG = LabConfig(n_layers=2, d_model=16, n_heads=2, d_vocab=300, n_ctx=16)
SHORT = TrainConfig(steps=12, batch=4, evaluate_every=4, state_every=1, save_at=(0, 6))


@pytest.fixture(scope="module")
def task(prose: Path) -> TextTask:
    return TextTask([prose], d_vocab=300, n_ctx=16)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(NORM_KINDS), radius=st.one_of(st.none(), st.floats(0.1, 10)), seed=st.integers(0, 99))
def test_norms_by_definition(kind: str, radius: float | None, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, 8, generator=generator, dtype=torch.float64) * 2 + 1
    norm = Norm(kind, 8, radius=radius, eps=1e-5).double()
    with calibrate(norm):
        norm(x)
    P = torch.eye(8, dtype=torch.float64) - 1 / 8
    r = math.sqrt(8) if radius is None else radius
    kept = x @ P if kind in ("layernorm", "projection_only") else x
    if kind in ("layernorm", "scaling_only"):
        expected = r * kept / (kept.pow(2).sum(-1, keepdim=True) + 8e-5).sqrt()
    else:
        expected = kept / norm.divisor
        mean_length = kept.norm(dim=-1).mean()  # calibrated: of the others' length on average
        assert float(mean_length / norm.divisor) == pytest.approx(r, rel=1e-9)
    seen: list[torch.Tensor] = []
    norm.hook_scale.add_hook(lambda scale, hook: seen.append(scale))
    torch.testing.assert_close(norm(x), expected, rtol=1e-10, atol=1e-12)
    assert seen[0].shape == (5, 1)
    given = Norm("none", 8, divisor=3.0).double()
    with calibrate(given):
        torch.testing.assert_close(given(x), x / 3.0)


def test_plain_hook_points_are_transformer_lenss() -> None:
    for point in (PlainPoint(), HookPoint()):
        point.add_hook(lambda x, hook: 2 * x)
        point.add_hook(lambda x, hook: x + 1, is_permanent=True)
        point.add_hook(lambda x, hook: x - 3, prepend=True)
        assert float(point(torch.tensor(5.0))) == 5
        point.remove_hooks()
        assert float(point(torch.tensor(5.0))) == 6


def test_layernorm_is_torchs() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    ours, theirs = Norm("layernorm", 8).double(), torch.nn.LayerNorm(8).double()
    for norm in (ours, theirs):
        torch.nn.init.constant_(norm.weight if norm is theirs else norm.w, 2.0)  # type: ignore[arg-type]
        torch.nn.init.constant_(norm.bias if norm is theirs else norm.b, 3.0)  # type: ignore[arg-type]
    seen = []
    ours.hook_scale.add_hook(lambda value, hook: seen.append(value) or None)  # the unfused path
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0][..., 0], (x.var(-1, correction=0) + 1e-5).sqrt())
    ours.hook_scale.remove_hooks()
    assert torch.equal(ours(x), theirs(x))


class StopHereError(Exception):
    pass


@pytest.mark.parametrize(("norm", "stop"), [("layernorm", 1), ("projection_only", 11)])
def test_an_interrupted_run_continues_bit_for_bit(
    norm: str, stop: int, task: TextTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LabConfig(**{**CONFIG.to_dict(), "norm": norm})
    whole = train(task, config, SHORT, tmp_path / "whole", progress=False)
    calls = iter(range(stop))

    def interrupted(self: TextTask, model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(calls, None) is None:
            raise StopHereError
        return loss(self, model, batch)

    loss = TextTask.loss
    monkeypatch.setattr(TextTask, "loss", interrupted)
    with pytest.raises(StopHereError):
        train(task, config, SHORT, tmp_path / "cut", progress=False)
    calls = iter(range(26 - stop))  # of the 25 of a whole run, what came before is not done again
    resumed = train(task, config, SHORT, tmp_path / "cut", progress=False)
    assert_same_run(whole, tmp_path / "whole", resumed, tmp_path / "cut")
    assert checkpoint_steps(tmp_path / "cut") == [0, 6, 12]
    losses = read_metrics(tmp_path / "whole")["valid_loss"]
    assert losses.iloc[-1] < losses.iloc[0]


def test_saved_runs_load(task: TextTask, tmp_path: Path) -> None:
    model = train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    tokens = task.batch(0, 2, 0)
    loaded = load_run(tmp_path / "run")
    assert torch.equal(loaded(tokens), model(tokens))
    assert not torch.equal(load_run(tmp_path / "run", step=0)(tokens), model(tokens))
    assert loaded.tokenizer.decode(loaded.tokenizer("the ships")["input_ids"]) == "the ships"
    bundle(tmp_path / "run", tmp_path / "shipped", task, "the command")
    recipe = json.loads((tmp_path / "shipped" / "recipe.json").read_text())
    last = read_metrics(tmp_path / "run").iloc[-1]
    assert (recipe["command"], recipe["train_loss"]) == ("the command", last["train_loss"])
    assert recipe["valid_loss"] == pytest.approx(task.evaluate(load_run(tmp_path / "shipped"))["valid_loss"])


def test_another_run_is_not_overwritten(task: TextTask, tmp_path: Path) -> None:
    train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    other = TrainConfig(**{**vars(SHORT), "seed": 1})
    with pytest.raises(FileExistsError, match="another"):
        train(task, CONFIG, other, tmp_path / "run", progress=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not empty"):
        train(task, CONFIG, SHORT, tmp_path / "full", progress=False)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_damaged_runs(task: TextTask, tmp_path: Path) -> None:
    train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    weights = tmp_path / "run" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_run(tmp_path / "run")
    weights.write_bytes(content)
    lab = json.loads((tmp_path / "run" / "lab.json").read_text())
    (tmp_path / "run" / "lab.json").write_text(json.dumps(lab | {"model": lab["model"] | {"d_model": 32}}))
    with pytest.raises(ValueError, match="does not fit"):
        load_run(tmp_path / "run")
    (tmp_path / "run" / "lab.json").write_text(json.dumps(lab))
    with pytest.raises(FileNotFoundError, match="0, 6, 12"):
        load_run(tmp_path / "run", step=5)
    with pytest.raises(FileNotFoundError, match=r"lab\.json"):
        load_run(tmp_path)


SHAPE = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_vocab": 30, "n_ctx": 12}
TOKENS = torch.arange(20).reshape(2, 10)


def build(**options: object) -> LabTransformer:
    torch.manual_seed(0)
    model = LabConfig(**{**SHAPE, **options}).build().double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    with calibrate(model):
        model(TOKENS)
    return model


@pytest.mark.parametrize(("options", "causal"), [
    *(({"norm": norm}, True) for norm in NORM_KINDS), ({}, False), ({"positions": "alibi"}, False),
    *(({"positions": positions}, True) for positions in ("none", "sinusoidal", "rotary", "alibi")),
])  # fmt: skip
def test_hooks_see_what_the_fused_path_computes(options: dict[str, str], causal: bool) -> None:
    model = build(**options, causal=causal)
    logits, cache = model.run_with_cache(TOKENS)  # with hooks everywhere: the explicit path
    torch.testing.assert_close(model(TOKENS), logits, rtol=1e-10, atol=1e-10)
    pattern = cache["blocks.1.attn.hook_pattern"]
    assert pattern.shape == (2, 2, 10, 10)
    torch.testing.assert_close(pattern.sum(-1), torch.ones(2, 2, 10).double())
    assert (float(pattern.triu(1).abs().max()) == 0) == causal
    assert "positions" not in model.state_dict(), "a formula is not saved"
