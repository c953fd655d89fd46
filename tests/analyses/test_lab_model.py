"""The lab model's choices: positions, order and place of norms, biases, starts; and that ln_probe analyzes them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_models import torchs_layer
from torch import nn

import ln_probe
from ln_probe.analyses.lab.norms import NORM_KINDS, Norm, calibrate
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer, alibi_slopes, sinusoidal_table

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


@pytest.mark.parametrize("options", [
    *({"norm": norm} for norm in NORM_KINDS),
    *({"positions": positions} for positions in ("none", "sinusoidal", "rotary", "alibi")),
])  # fmt: skip
@pytest.mark.parametrize("causal", [True, False])
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


@pytest.mark.parametrize("order", ["pre", "post"])
def test_norm_order_is_torchs(order: str) -> None:
    """Both orders against nn.TransformerEncoderLayer with the same weights."""
    model = build(n_layers=1, norm_order=order, norm_final=None, act_fn="relu", d_mlp=24, positions="none")
    mask = torch.ones(10, 10, dtype=torch.bool).triu(1)
    expected = torchs_layer(model)(F.embedding(TOKENS, model.embed.W_E), src_mask=mask)
    torch.testing.assert_close(model.stream(TOKENS), expected, rtol=1e-9, atol=1e-9)


def test_what_is_left_out_is_not_there() -> None:
    model = build(
        norm=None,
        norm_mlp=None,
        norm_final=None,
        bias_qkv=False,
        bias_out=False,
        bias_mlp=False,
        bias_unembed=False,
    )
    leaves = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
    assert leaves == {"W_E", "W_pos", "W_Q", "W_K", "W_V", "W_O", "W_in", "W_out"}
    assert model.b_U is None
    assert torch.isfinite(model(TOKENS)).all()
    plain = build(affine=False)
    names = {name for name, _ in plain.named_parameters()}
    assert "blocks.0.ln1.w" not in names
    assert "blocks.0.ln2.w" in names
    assert "blocks.0.ln2.w" not in {n for n, _ in build(affine_others=False).named_parameters()}


def test_gain_and_bias_one_by_one() -> None:
    x = torch.randn(5, 8, dtype=torch.float64)
    for kind in ("layernorm", "scaling_only"):
        bare = Norm(kind, 8, gain=False, bias=False).double()(x)
        gained, lifted = Norm(kind, 8, bias=False).double(), Norm(kind, 8, gain=False).double()
        with torch.no_grad():
            gained.w.mul_(2.0)  # type: ignore[union-attr]
            lifted.b.add_(3.0)  # type: ignore[union-attr]
        torch.testing.assert_close(gained(x), 2 * bare)
        torch.testing.assert_close(lifted(x), bare + 3)


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
    {"positions": "rotary", "norm": "scaling_only"},
    pytest.param(
        {"positions": "none", "norm": "projection_only", "divisor": 0.5, "affine": False, "bias_qkv": False},
        marks=pytest.mark.slow,
    ),
    pytest.param({"positions": "alibi"}, marks=pytest.mark.slow),
    pytest.param({"norm_order": "post", "positions": "sinusoidal"}, marks=pytest.mark.slow),
    {"norm": None, "norm_final": None, "bias_unembed": False},
])  # fmt: skip
def test_they_are_analyzed(options: dict[str, object]) -> None:
    model = build(**options)
    report = ln_probe.analyze(model, torch.arange(10)[None], progress=False)
    table = report.layernorms.set_index("site")
    assert table["reconstruction_error"].max() < 1e-10
    if options.get("norm", "layernorm") is not None:
        assert table.loc["blocks.0.ln1", "kind"] == options.get("norm", "layernorm")
    else:
        assert not [site for site in table.index if site.endswith("ln1")]
    if options.get("divisor"):
        assert float(table.loc["blocks.0.ln1", "scale_mean"]) == pytest.approx(1 / 0.5)
    in_heads = set(report.heads[report.heads["space"] == "head"]["layer"])
    if "rotary" in options.values():
        assert in_heads == {0, 1}
    if "alibi" in options.values():  # a bias per key
        assert in_heads == {0, 1}
        assert not any("(ALiBi" in note for note in report.notes)
    assert np.isfinite(table["norm_before_mean"]).all()
