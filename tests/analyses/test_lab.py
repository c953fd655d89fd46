"""The laboratory's norms, its model and its choices, its trainer; and that ln_probe analyzes its models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_models import assert_same_run
from torch import nn

import ln_probe
from ln_probe.analyses.lab.language_model.bundled_seeds import bundle
from ln_probe.analyses.lab.norms import NORM_KINDS, Norm, calibrate
from ln_probe.analyses.lab.run_folder import checkpoint_steps, load_run, read_metrics
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import DivergedError, TrainConfig, train
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer, alibi_slopes, sinusoidal_table

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
    for norm in (ours, theirs):
        torch.nn.init.constant_(norm.weight if norm is theirs else norm.w, 2.0)  # type: ignore[arg-type]
        torch.nn.init.constant_(norm.bias if norm is theirs else norm.b, 3.0)  # type: ignore[arg-type]
    seen = []
    ours.hook_scale.add_hook(lambda value, hook: seen.append(value) or None)  # the unfused path
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen[0][..., 0], (x.var(-1, correction=0) + 1e-5).sqrt())
    ours.hook_scale.remove_hooks()
    assert torch.equal(ours(x), theirs(x))


def test_uncalibrated_norms_do_not_run() -> None:
    with pytest.raises(ValueError, match="a 'none' norm has no divisor yet: run `with calibrate\\(model\\)"):
        Norm("none", 4)(torch.ones(1, 4))


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
    monkeypatch.undo()
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
    assert recipe["command"] == "the command"
    assert recipe["valid_loss"] == pytest.approx(task.evaluate(load_run(tmp_path / "shipped"))["valid_loss"])


def test_another_run_is_not_overwritten(task: TextTask, tmp_path: Path) -> None:
    train(task, CONFIG, SHORT, tmp_path / "run", progress=False)
    other = TrainConfig(**{**vars(SHORT), "seed": 1})
    with pytest.raises(FileExistsError, match="holds another run \\(not the same: training\\): choose another folder"):
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
    with pytest.raises(ValueError, match="does not fit"):
        load_run(tmp_path / "run")
    (tmp_path / "run" / "lab.json").write_text(json.dumps(lab))
    with pytest.raises(FileNotFoundError, match="holds no checkpoint of step 5; steps it has: 0, 6, 12"):
        load_run(tmp_path / "run", step=5)
    with pytest.raises(FileNotFoundError, match=r"holds no lab\.json"):
        load_run(tmp_path)


@pytest.mark.parametrize(("content", "error", "said"), [
    ("die Fläche ".encode("latin-1") * 5000, ValueError,
     r"some\.txt is not UTF-8 text \(.* position 6.*\): convert it first"),
    (b"too short", ValueError, r"the text is too short: .* a window needs 16: give more text$"),
    (None, FileNotFoundError, "no text file"),
])  # fmt: skip
def test_bad_text(content: bytes | None, error: type[Exception], said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "some.txt").write_bytes(content)
    with pytest.raises(error, match=said):
        TextTask([tmp_path / "some.txt"], 300, 16)


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


def test_alibi_by_definition() -> None:
    model = build(positions="alibi")
    _, cache = model.run_with_cache(TOKENS)
    q, k = cache["blocks.0.attn.hook_q"], cache["blocks.0.attn.hook_k"]
    scores = cache["blocks.0.attn.hook_attn_scores"]
    slopes = [2.0**-4, 2.0**-8]
    for h in range(2):
        expected = float(q[1, 7, h] @ k[1, 3, h]) / math.sqrt(8) - slopes[h] * (7 - 3)
        assert float(scores[1, h, 7, 3]) == pytest.approx(expected, rel=1e-9)
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


def test_rotary_scores_depend_on_the_distance() -> None:
    model = build(positions="rotary", norm="none", divisor=1.0)
    repeated = torch.full((1, 10), 3)
    _, cache = model.run_with_cache(repeated)
    scores = cache["blocks.0.attn.hook_attn_scores"][0]
    for offset in (1, 4):
        along = scores.diagonal(-offset, -2, -1)
        torch.testing.assert_close(along, along[:, :1].expand_as(along), rtol=1e-5, atol=1e-6)
    turned, plain = cache["blocks.0.attn.hook_rot_k"], cache["blocks.0.attn.hook_k"]
    torch.testing.assert_close(turned.norm(dim=-1), plain.norm(dim=-1), rtol=1e-6, atol=1e-6)
    angle = torch.tensor(5.0)  # the first pair turns by one radian a position
    first, paired = plain[0, 5, 0, 0], plain[0, 5, 0, 4]
    assert float(turned[0, 5, 0, 0]) == pytest.approx(float(first * angle.cos() - paired * angle.sin()), rel=1e-5)


def test_sinusoidal_by_definition() -> None:
    table = sinusoidal_table(12, 16)
    assert float(table[5, 6]) == pytest.approx(math.sin(5 / 10000 ** (6 / 16)), rel=1e-5)
    assert float(table[5, 7]) == pytest.approx(math.cos(5 / 10000 ** (6 / 16)), rel=1e-5)
    assert sinusoidal_table(4, 5).shape == (4, 5)
    model = build(positions="sinusoidal")
    _, cache = model.run_with_cache(TOKENS)
    torch.testing.assert_close(cache["hook_pos_embed"][1], table[:10].double())
    assert "positions" not in model.state_dict()


def torchs_layer(model: Any) -> nn.TransformerEncoderLayer:
    """Torch's own layer with the weights of a model of one layer, in float64."""
    cfg, block = model.cfg, model.blocks[0]
    attention, mlp = block.attn, block.mlp
    layer = nn.TransformerEncoderLayer(
        cfg.d_model, cfg.n_heads, cfg.d_mlp, dropout=0.0, layer_norm_eps=cfg.eps, batch_first=True,
        norm_first=cfg.norm_order == "pre",
    ).double()  # fmt: skip
    stacked = [W.transpose(1, 2).flatten(0, 1) for W in (attention.W_Q, attention.W_K, attention.W_V)]
    pairs = [
        (layer.self_attn.in_proj_weight, torch.cat(stacked)),
        (layer.self_attn.out_proj.weight, attention.W_O.flatten(0, 1).T),
        (layer.self_attn.out_proj.bias, attention.b_O),
        (layer.linear1.weight, mlp.W_in.T), (layer.linear1.bias, mlp.b_in),
        (layer.linear2.weight, mlp.W_out.T), (layer.linear2.bias, mlp.b_out),
        (layer.norm2.weight, block.ln2.w), (layer.norm2.bias, block.ln2.b),
    ]  # fmt: skip
    if attention.b_Q is None:
        layer.self_attn.in_proj_bias = None
    else:
        pairs.append((layer.self_attn.in_proj_bias, torch.cat([attention.b_Q, attention.b_K, attention.b_V]).flatten()))
    if block.ln1.w is None:
        layer.norm1 = nn.LayerNorm(cfg.d_model, eps=cfg.eps, elementwise_affine=False)
    else:
        pairs += [(layer.norm1.weight, block.ln1.w), (layer.norm1.bias, block.ln1.b)]
    with torch.no_grad():
        for theirs, ours in pairs:
            theirs.copy_(ours)
    return layer


@pytest.mark.parametrize("order", ["pre", "post"])
def test_norm_order_is_torchs(order: str) -> None:
    """Both orders against nn.TransformerEncoderLayer with the same weights."""
    model = build(n_layers=1, norm_order=order, norm_final=None, act_fn="relu", d_mlp=24, positions="none")
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1)
    expected = torchs_layer(model)(F.embedding(TOKENS, model.embed.W_E), src_mask=mask)
    torch.testing.assert_close(model.stream(TOKENS), expected, rtol=1e-9, atol=1e-9)


def test_what_is_left_out_is_not_there() -> None:
    biases = dict.fromkeys(("bias_qkv", "bias_out", "bias_mlp", "bias_unembed"), False)
    model = build(norm=None, norm_mlp=None, norm_final=None, **biases)
    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
    assert leaves == {"W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"}
    assert model.b_U is None
    assert torch.isfinite(model(TOKENS)).all()
    plain = build(affine=False)
    names = {name for name, _ in plain.named_parameters()}
    assert "blocks.0.ln1.w" not in names
    assert "blocks.0.ln2.w" in names
    assert "blocks.0.ln2.w" not in {n for n, _ in build(affine_others=False).named_parameters()}


def test_a_given_divisor_stays() -> None:
    norm = Norm("projection_only", 4, divisor=2.5, gain=False, bias=False)
    x = torch.tensor([[1.0, 2.0, 3.0, 6.0]])
    with calibrate(norm):
        norm(100 * x)
    torch.testing.assert_close(norm(x), torch.tensor([[-2.0, -1.0, 0.0, 3.0]]) / 2.5)


@pytest.mark.parametrize(("options", "said"), [
    ({"norm": "layernorm", "divisor": 2.0}, "a 'layernorm' norm divides by each vector's own size: leave out div"),
    ({"norm": "none", "divisor": 2.0, "radius": 1.0}, r"give a divisor \(2.0\) or a radius to aim at \(1.0\), not b"),
    ({"norm": "none", "divisor": -1.0}, "divisor must be a positive number, got -1.0"),
    ({"radius": 0.0}, "radius must be positive, got 0.0"),
    ({"positions": "rotary", "n_heads": 1, "d_head": 5}, "rotary positions turn pairs of coordinates: d_head=5 is odd"),
    ({"norm": "batchnorm"}, "unknown norm 'batchnorm': known norms are layernorm, projection_only, scaling_only, none"),
    ({"n_heads": 3}, "d_model=16 is not divisible by n_heads=3"),
    ({"n_layers": 0}, "n_layers must be a whole number between 1 and 10000, got 0"),
    ({"positions": "polar"}, "unknown positions 'polar': known choices are learned, none"),
    ({"norm_order": "middle"}, "unknown norm_order 'middle': known choices are pre, post"),
    ({"init": "zeros"}, "unknown init 'zeros': known choices are gpt2, torch"),
    ({"norm_final": "rms"}, r"unknown norm_final 'rms': known norms are .*\(or None to leave it out\)"),
])  # fmt: skip
def test_bad_choices(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LabConfig(**{**SHAPE, **options})  # type: ignore[arg-type]


def test_longer_than_the_context() -> None:
    with pytest.raises(ValueError, match="17 tokens are more than the context of 12: cut the prompt"):
        build()(torch.zeros(1, 17, dtype=torch.long))


def test_torchs_start() -> None:
    """Standard deviations of a fresh model of torch's own layers."""
    torch.manual_seed(0)
    ours = LabConfig(**{**SHAPE, "d_model": 64, "d_mlp": 128, "n_layers": 1, "tied": False, "init": "torch"}).build()  # type: ignore[arg-type]
    layer = nn.TransformerEncoderLayer(64, 2, 128)
    for mine, theirs in (
        (ours.blocks[0].attn.W_K, layer.self_attn.in_proj_weight),
        (ours.blocks[0].attn.W_O, layer.self_attn.out_proj.weight),
        (ours.blocks[0].mlp.W_in, layer.linear1.weight),
        (ours.blocks[0].mlp.b_in, layer.linear1.bias),
        (ours.blocks[0].mlp.W_out, layer.linear2.weight),
        (ours.embed.W_E, nn.Embedding(30, 64).weight),
        (ours.W_U, nn.Linear(64, 30).weight),
    ):
        tolerance = 5 / math.sqrt(2 * mine.numel())
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=tolerance)


@pytest.mark.parametrize("options", [
    {"positions": "rotary", "norm": "scaling_only"}, {"positions": "alibi", "norm": "projection_only", "divisor": 0.5},
    {"norm": None, "norm_order": "post", "norm_final": None, "bias_unembed": False},
])  # fmt: skip
def test_they_are_analyzed(options: dict[str, object]) -> None:
    probes = ("decomposition", "uniformity")
    report = ln_probe.analyze(build(**options), torch.arange(10)[None], probes=probes, progress=False)
    table = report.layernorms.set_index("site")
    assert table["reconstruction_error"].max() < 1e-10
    kinds = {kind for site, kind in table["kind"].items() if str(site).endswith("ln1")}
    assert kinds == {options["norm"]} - {None}
    if options.get("divisor"):
        assert float(table.loc["blocks.0.ln1", "scale_mean"]) == pytest.approx(1 / 0.5)
    assert set(report.heads[report.heads["space"] == "head"]["layer"]) == {0, 1}
    assert not any("(ALiBi" in note for note in report.notes)
