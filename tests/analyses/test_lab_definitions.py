"""Training, weights and small functions by their definitions; what the laboratory refuses, by type and a word."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

from ln_probe.analyses.lab.approximation import relative
from ln_probe.analyses.lab.counting import counting, saturated_states
from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse
from ln_probe.analyses.lab.crasp.read_back import read_back
from ln_probe.analyses.lab.crasp.weights import CompiledProgram, compile_program
from ln_probe.analyses.lab.experiments import Request, run
from ln_probe.analyses.lab.language_model import remove_norm
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.text_task import TextTask, read_tokenizer
from ln_probe.analyses.lab.train import TrainConfig, load_run, train
from ln_probe.analyses.lab.transformer import LabConfig, alibi_slopes, sinusoidal_table

SHAPE = LabConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=280, n_ctx=8)
SHORT = TrainConfig(steps=2, batch=2, save_at=(0,))


def compiled(source: str, **options: Any) -> CompiledProgram:
    return compile_program(parse(source), **options)


def refused_run(out: Path, name: str = "majority", **options: Any) -> Any:
    return run(name, Request(out, **{"seeds": (0,)} | options), command="", ln_probe_version="0")


REFUSED: list[tuple[Callable[[Path, Path], Any], type[Exception], str]] = [
    (lambda out, _: refused_run(out, seeds=()), ValueError, "seeds"),
    (lambda out, _: refused_run(out, "language_model"), ValueError, "text"),
    (lambda out, text: refused_run(out, texts=(text,)), ValueError, "no text"),
    (lambda out, text: refused_run(text), FileExistsError, "file"),
    (lambda out, text: refused_run(out, "fresh_seeds", texts=(text,)), ValueError, "trained on"),
    (lambda out, _: replace(SHAPE, positions="rotary", d_head=5), ValueError, "odd"),  # type: ignore[arg-type]
    (lambda out, _: replace(SHAPE, d_head=None, n_heads=3), ValueError, "divisible"),
    (lambda out, _: replace(SHAPE, norm="batchnorm"), ValueError, "unknown"),
    (lambda out, _: Norm("none", 4, divisor=2.0, radius=1.0), ValueError, "not both"),
    (lambda out, _: Norm("none", 4, divisor=-1.0), ValueError, "positive"),
    (lambda out, _: SHAPE.build()(torch.zeros(1, 9, dtype=torch.long)), ValueError, "context"),
    (lambda out, text: TextTask([text], 280, 100_000), ValueError, "short"),
    (lambda out, _: read_tokenizer(remove_norm.start_folder(), 1023), ValueError, "1024"),
    (lambda out, _: compiled("x := Q_a").tokens(["a", "aa"]), ValueError, "lengths"),
    (lambda out, _: compiled("x := 2000000000 * #[Q_a] > #[Q_b]", n_ctx=10**6), CRaspError, "factors"),
    (lambda out, _: read_back(compiled("x := Q_a", norm="none")), ValueError, "norm"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_refused(number: int, tmp_path: Path, prose: Path) -> None:
    call, error, word = REFUSED[number]
    with pytest.raises(error, match=word):
        call(tmp_path, prose)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_training_is_torchs(schedule: str, optimizer: str, tmp_path: Path, prose: Path) -> None:
    """The same weights by torch's optimizer, a rate by formula, clipping by hand and decay of matrices alone."""
    task = TextTask([prose], 280, 8)
    config: Any = replace(
        SHORT, steps=6, seed=3, lr=0.02, lr_end=0.004, warmup=2, weight_decay=0.3, clip=0.4, optimizer=optimizer,
        schedule=schedule, decay_steps=None if schedule == "cosine" else 8,
    )  # fmt: skip
    trained = train(task, SHAPE, config, tmp_path / "run", progress=False)
    torch.manual_seed(3)
    model = SHAPE.build()
    parameters = list(model.parameters())
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer]
    decayed = [{"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in parameters]
    steps = kind(decayed, betas=(0.9, 0.98))
    losses = []
    for step in range(6):
        part = (step - 2) / ((config.decay_steps or 6) - 2)
        falling = {"cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "constant": 1.0}[schedule]
        for group in steps.param_groups:
            group["lr"] = 0.02 * (step + 1) / 2 if step < 2 else 0.004 + 0.016 * falling
        loss = model(task.batch(step, 2, 3), return_type="loss")
        losses.append(loss.item())
        steps.zero_grad()
        loss.backward()
        norm = float(torch.cat([p.grad.flatten() for p in parameters]).norm())
        for parameter in parameters:
            parameter.grad *= min(1.0, 0.4 / (norm + 1e-6))
        steps.step()
    for (name, ours), theirs in zip(trained.named_parameters(), parameters, strict=True):
        if not name.endswith("b_K"):  # whose gradient is rounding alone: softmax does not see it
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["train_loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert last["step"] == 6


def test_weights_start_as_torchs_or_gpt2s() -> None:
    torch.manual_seed(0)
    shape: Any = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_vocab": 500, "n_ctx": 300, "tied": False}
    model = LabConfig(**shape, embed_std=0.3).build()
    block = model.blocks[1]
    wide = {model.embed.W_E: 0.3, model.pos_embed.W_pos: 0.02, block.attn.W_Q: 0.02, model.W_U: 0.02}
    for weight, std in (wide | {block.attn.W_O: 0.01, block.mlp.W_out: 0.01, block.mlp.W_in: 0.02}).items():
        assert float(weight.std()) == pytest.approx(std, rel=0.05)
    assert not any(parameter.any() for name, parameter in model.named_parameters() if ".b_" in name)
    model = LabConfig(**shape, init="torch").build()
    attention, linear = torch.nn.MultiheadAttention(64, 4), torch.nn.Linear
    block = model.blocks[0]
    bounds = {
        block.attn.W_Q: attention.in_proj_weight, block.attn.W_V: attention.in_proj_weight,
        block.attn.W_O: attention.out_proj.weight, block.mlp.W_in: linear(64, 256).weight,
        block.mlp.b_in: linear(64, 256).bias, block.mlp.W_out: linear(256, 64).weight,
        block.mlp.b_out: linear(256, 64).bias, model.W_U: linear(64, 500).weight, model.b_U: linear(64, 500).bias,
    }  # fmt: skip
    for ours, theirs in bounds.items():
        assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.08)
        assert float(ours.mean()) == pytest.approx(0, abs=0.2 * float(ours.abs().max()))
    for table in (model.embed.W_E, model.pos_embed.W_pos):
        assert float(table.std()) == pytest.approx(1, rel=0.05)


def test_positions_by_formula() -> None:
    table = sinusoidal_table(20, 7)
    expected = [[(math.sin, math.cos)[i % 2](t / 10_000 ** (i // 2 * 2 / 7)) for i in range(7)] for t in range(20)]
    torch.testing.assert_close(table, torch.tensor(expected), atol=1e-5, rtol=0)
    assert alibi_slopes(4).tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    names = {p: replace(SHAPE, positions=p).positional_embedding_type for p in ("learned", "none", "rotary", "alibi")}
    assert names == {"learned": "standard", "none": "standard", "rotary": "rotary", "alibi": "alibi"}


def test_taggers_by_definition() -> None:
    model = counting.TransformerSpec(2, 2, "layernorm", 12).build()
    words = torch.randint(2, (3, 9), generator=torch.Generator().manual_seed(0))
    for t in range(9):
        alone = model.body(torch.cat([torch.full((3, 1), 2), words[:, : t + 1]], dim=1))[:, -1, :2]
        torch.testing.assert_close(model(words)[:, t], alone, rtol=1e-4, atol=1e-5)
    specs = {cell: counting.Cell("L5", cell).spec() for cell in ("qrnn+", "qrnn x2", counting.TRANSFORMER)}
    assert specs[counting.TRANSFORMER].to_dict()["n_ctx"] == 1025
    plus, twice = specs["qrnn+"].build(), specs["qrnn x2"].build()
    x = plus.layers[0](plus.embed(words))
    torch.testing.assert_close(plus(words), plus.out(1 / (1 + (-plus.plus(x)).exp())))
    assert [layer.window for layer in twice.layers] == [2, 1]
    torch.testing.assert_close(twice(words), twice.out(twice.layers[1](twice.layers[0](twice.embed(words)))))


def test_states_beyond_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter has n + 1 states after n letters: growth is measured below the cap alone."""
    monkeypatch.setattr(saturated_states, "CAP", 10)
    W = np.zeros((4, 2))
    W[2] = 1, -1
    layer = saturated_states.SaturatedLayer("lstm", W, np.zeros((4, 1)), np.array([1.0, 1, 0, 1]))
    counts, settled = saturated_states.reachable([layer], 20)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(2, 22), 10))
    assert not settled
    lengths = np.arange(2, 9)
    slope = np.polyfit(np.log(lengths), np.log(lengths + 1), 1)[0]
    assert saturated_states.exponent(counts, settled) == pytest.approx(slope)
    far = np.array([[0, 2**40], [2**40, -(2**40)], [0, 2**40], [1, 0]])
    assert sorted(map(tuple, saturated_states.distinct(far).tolist())) == sorted({*map(tuple, far.tolist())})


@pytest.mark.parametrize("kernel", ["log", "linear", "t5"])
def test_lags_by_formula(kernel: str) -> None:
    features = relative.lag_features(kernel, 300).tolist()
    for z in range(300):
        beyond = 16 * math.log(min(max(z, 16), 128) / 16) / math.log(8)
        phi = {"log": -math.log(z) if z else -math.inf, "linear": -z, "t5": -min(z, 16) - beyond}[kernel]
        assert features[z] == pytest.approx(phi), z


def test_runs_that_cannot_go_on(tmp_path: Path, prose: Path) -> None:
    task, out = TextTask([prose], 280, 8), tmp_path / "run"
    train(task, SHAPE, SHORT, out, progress=False)
    weights = bytearray((out / "model.safetensors").read_bytes())
    weights[-4:] = np.array([math.nan], np.float32).tobytes()
    (out / "model.safetensors").write_bytes(bytes(weights))
    with pytest.raises(ValueError, match="NaN"):
        load_run(out)
    (out / "model.safetensors").unlink()
    with FileLock(out / ".lock"), pytest.raises(FileExistsError, match="another process"):
        train(task, SHAPE, SHORT, out, progress=False)
    (out / "state.pt").write_bytes(b"not a state")
    with pytest.raises(ValueError, match="damaged"):
        train(task, SHAPE, SHORT, out, progress=False)
