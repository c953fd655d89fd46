"""The laboratory's norms, its model and its trainer."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_models import assert_same_run

from ln_probe.analyses.lab.language_model.bundled_seeds import bundle
from ln_probe.analyses.lab.norms import NORM_KINDS, Norm, calibrate
from ln_probe.analyses.lab.run_folder import checkpoint_steps, load_run
from ln_probe.analyses.lab.text_task import TextTask, train_tokenizer
from ln_probe.analyses.lab.train import DivergedError, TrainConfig, train
from ln_probe.analyses.lab.transformer import LabConfig

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
    torch.testing.assert_close(norm(x), expected, rtol=1e-10, atol=1e-12)


def test_layernorm_is_torchs() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    ours, theirs = Norm("layernorm", 8).double(), torch.nn.LayerNorm(8).double()
    seen = []
    ours.hook_scale.add_hook(lambda value, hook: seen.append(value) or None)  # the unfused path
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0][..., 0], (x.var(-1, correction=0) + 1e-5).sqrt())
    ours.hook_scale.remove_hooks()
    assert torch.equal(ours(x), theirs(x))


def test_uncalibrated_norms_do_not_run() -> None:
    with pytest.raises(ValueError, match="a 'none' norm has no divisor yet: run `with calibrate\\(model\\)"):
        Norm("none", 4)(torch.ones(1, 4))


def test_a_short_run_learns_and_is_reproducible(task: TextTask, tmp_path: Path) -> None:
    config = TrainConfig(steps=60, batch=8, lr=5e-3, warmup=5, evaluate_every=20)
    one = train(task, CONFIG, config, tmp_path / "one", progress=False)
    two = train(task, CONFIG, config, tmp_path / "two", progress=False)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))
    rows = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [20, 40, 60]
    assert rows[-1]["valid_loss"] < rows[0]["valid_loss"] - 0.3


class StopHereError(Exception):
    pass


@pytest.mark.parametrize("norm", ["layernorm", "projection_only"])
@pytest.mark.parametrize("stop", [1, 5, 11])
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
    monkeypatch.undo()
    resumed = train(task, config, SHORT, tmp_path / "cut", progress=False)
    assert_same_run(whole, tmp_path / "whole", resumed, tmp_path / "cut")
    assert checkpoint_steps(tmp_path / "cut") == [0, 6, 12]


def test_saved_runs_load(task: TextTask, tmp_path: Path) -> None:
    model = train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    tokens = task.batch(0, 2, 0)
    loaded = load_run(tmp_path / "run")
    assert torch.equal(loaded(tokens), model(tokens))
    assert not torch.equal(load_run(tmp_path / "run", step=0)(tokens), model(tokens))
    assert loaded.tokenizer.decode(loaded.tokenizer("the ships")["input_ids"]) == "the ships"
    bundle(tmp_path / "run", tmp_path / "shipped", task, "the command")
    recipe = json.loads((tmp_path / "shipped" / "recipe.json").read_text())
    assert recipe["command"] == "the command"
    assert recipe["valid_loss"] == pytest.approx(task.evaluate(load_run(tmp_path / "shipped"))["valid_loss"])


def test_another_run_is_not_overwritten(task: TextTask, tmp_path: Path) -> None:
    train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    other = TrainConfig(**{**vars(SHORT), "seed": 1})
    with pytest.raises(FileExistsError, match="holds another run \\(its training differ\\): choose another folder"):
        train(task, CONFIG, other, tmp_path / "run", progress=False)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty and holds no lab run"):
        train(task, CONFIG, SHORT, tmp_path / "full", progress=False)
    assert (tmp_path / "full" / "thesis.txt").read_text() == "mine"


def test_two_do_not_train_one_run(task: TextTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[str] = []
    evaluate = TextTask.evaluate

    def intruding(self: TextTask, model: torch.nn.Module) -> dict[str, float]:
        with pytest.raises(FileExistsError, match="is being trained by another process: wait for it") as error:
            train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
        met.append(str(error.value))
        return evaluate(self, model)

    monkeypatch.setattr(TextTask, "evaluate", intruding)
    train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert met
    assert len(rows) == len(met)


def test_a_file_of_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("die Fläche ".encode("latin-1") * 5000)
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8 text \(.* position 6.*\): convert it first"):
        TextTask([tmp_path / "latin.txt"], 300, 16)


def test_a_loss_that_is_not_a_number_stops_and_keeps_what_was(task: TextTask, tmp_path: Path) -> None:
    wild = TrainConfig(**{**vars(SHORT), "lr": 1e18, "warmup": 1, "clip": 0.0})
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) at step \d+ \(seed 0\)"):
        train(task, CONFIG, wild, tmp_path / "wild", progress=False)
    assert (tmp_path / "wild" / "lab.json").exists()


def test_damaged_runs(task: TextTask, tmp_path: Path) -> None:
    train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    weights = tmp_path / "run" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read .*truncated or corrupt"):
        load_run(tmp_path / "run")
    weights.write_bytes(content)
    lab = json.loads((tmp_path / "run" / "lab.json").read_text())
    (tmp_path / "run" / "lab.json").write_text(json.dumps(lab | {"model": lab["model"] | {"d_model": 32}}))
    with pytest.raises(ValueError, match=r"lab\.json is not what it was when .*model\.safetensors was written"):
        load_run(tmp_path / "run")
    (tmp_path / "run" / "lab.json").write_text(json.dumps(lab))
    with pytest.raises(FileNotFoundError, match="holds no checkpoint of step 5; steps it has: 0, 6, 12"):
        load_run(tmp_path / "run", step=5)
    with pytest.raises(FileNotFoundError, match=r"holds no lab\.json"):
        load_run(tmp_path)


def test_bad_text(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ValueError, match=r"the text is too short: .* a window needs 16"):
        TextTask([tmp_path / "short.txt"], d_vocab=300, n_ctx=16)
    with pytest.raises(FileNotFoundError, match="no text file"):
        TextTask([tmp_path / "none.txt"], d_vocab=300, n_ctx=16)


def test_tokenizer_is_deterministic() -> None:
    texts = ["one two three two one", "three two one"]
    assert train_tokenizer(texts, 270).to_str() == train_tokenizer(texts, 270).to_str()
