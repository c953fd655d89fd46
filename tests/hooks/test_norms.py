"""Every norm of a model: what it computes and can put out, and who reads it; models that are refused."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from architectures import bridge_of, hugging_face, make_bridge, make_hooked
from small_models import lab, norm_of
from torch import nn
from transformer_lens.hook_points import HookPoint

import ln_probe
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.hooks import find_norms, without
from ln_probe.hooks.model import check_model, logit_factor, ordinary_tokens
from ln_probe.hooks.norm import Norm, NormError, UnknownNormError

PRE_NORM = [("blocks.0.ln1", "attention"), ("blocks.0.ln2", "mlp"), ("blocks.1.ln1", "attention"),
            ("blocks.1.ln2", "mlp"), ("ln_final", "unembed")]  # fmt: skip
RMS = ("llama", "gemma", "qwen3", "olmo2")  # Hugging Face computes these norms in float32, whatever the model's format
IN_FLOAT32 = 1e-5  # of the output's RMS: how a norm that computes in float32 rounds


def check_sum(norm: Norm, bound: float, dtype: torch.dtype) -> None:
    """The terms add up to what the norm itself says, on streams of any shape."""
    x = 3 * torch.randn(2, 5, norm.d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.7
    x = x.to(dtype)
    terms = norm.decompose(x)
    with torch.no_grad():
        truth = norm.module(x).double()
    size = float(truth.pow(2).mean().sqrt())
    assert float((terms.total() - truth).abs().max()) <= bound * size
    for values in (terms.x, terms.mean_component, terms.projected, terms.normalized):
        assert values.shape == x.shape
        assert values.dtype == torch.float64
    assert terms.sigma.shape == (2, 5, 1)


@pytest.mark.parametrize("arch", ["gpt2", "neox", "opt", *RMS, "bloom", "bert"])
def test_norms_of_a_bridge(arch: str) -> None:
    """Name, reader and kind; gain, bias and eps as they act, whatever the module stores (Gemma: gain - 1)."""
    for dtype in (torch.float64, torch.float32):
        model = make_bridge(arch, dtype)
        every = find_norms(model)
        norms = [s for s in every if s.reads not in ("query", "key")]  # those take a head's vectors
        for norm in norms:
            check_sum(norm, 1e-12 if dtype == torch.float64 and arch not in RMS else IN_FLOAT32, dtype)
    for norm in every:
        assert (norm.bias is None) == (norm.kind == "rmsnorm") == (arch in RMS)
        assert norm.eps == pytest.approx(1e-6 if arch in RMS and arch != "olmo2" else norm.eps, rel=1e-6)
    if arch not in ("olmo2", "bloom", "bert"):
        assert [(s.name, s.reads) for s in norms] == PRE_NORM
        assert [s.layer for s in norms] == [0, 0, 1, 1, 2]
    if arch == "qwen3":
        assert [(s.name, s.reads, s.d) for s in every if s not in norms and s.layer == 0] == [
            ("blocks.0.attn.q_norm", "query", 8), ("blocks.0.attn.k_norm", "key", 8),
        ]  # fmt: skip
    if arch == "bloom":  # it hands the stream to attention for the sum: at first, the output of the embedding's norm
        assert [(s.name, s.layer) for s in norms if s.reads == "other"] == [("embed_ln", 0)]
        assert [s.attention_layers for s in norms if s.reads == "attention"] == [(0,), (1,)]
    if arch == "bert":  # attention reads the last norm of the block before, the first one that of the embedding
        assert [(s.name, s.layer, s.reads, s.attention_layers) for s in norms] == [
            ("embed_ln", 0, "attention", (0,)), ("blocks.0.ln1", 0, "mlp", ()), ("blocks.0.ln2", 0, "attention", (1,)),
            ("blocks.1.ln1", 1, "mlp", ()), ("blocks.1.ln2", 1, "other", ()), ("ln_final", 2, "unembed", ()),
        ]  # fmt: skip


def test_settings_that_change_after_the_norms_were_found() -> None:
    model = lab()
    for kind in ("layernorm", "scaling_only"):
        model.blocks[0].ln1.kind = kind
        assert find_norms(model)[0].projects == (kind == "layernorm")


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, IN_FLOAT32), (torch.bfloat16, 2**-8)])
def test_a_gain_stored_as_an_offset_is_told_beside_a_large_one(dtype: torch.dtype, bound: float) -> None:
    """Gemma's checkpoints have single gains of 50 and more: next to them 1 is little, and not for the others."""
    model = hugging_face("gemma3", dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight[3] = 300.0
    bridge = bridge_of(model)
    for norm in (s for s in find_norms(bridge) if s.d == 32):
        x = torch.randn(2, 5, norm.d, generator=torch.Generator().manual_seed(1)).to(dtype)
        truth = norm.module(x).double()
        assert bool(((norm.decompose(x).total() - truth).abs() <= bound * truth.abs() + 1e-6).all()), norm.name


@pytest.mark.parametrize("kind", ["LN", "LNPre", "RMS", "RMSPre"])
def test_norms_of_a_hooked_transformer(kind: str) -> None:
    for dtype, bound, parallel in ((torch.float64, 1e-12, False), (torch.float32, IN_FLOAT32, True)):
        model = make_hooked(normalization_type=kind, dtype=dtype, parallel_attn_mlp=parallel)
        norms = find_norms(model)
        assert [(s.name, s.reads) for s in norms] == PRE_NORM
        for norm in norms:
            check_sum(norm, bound, dtype)
    assert find_norms(make_hooked(normalization_type=None)) == []


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("radius", [None, 0.5])
def test_norms_of_the_laboratory(kind: str, radius: float | None) -> None:
    norms = find_norms(lab(norm=kind, radius=radius).double())
    for norm in norms:
        check_sum(norm, 1e-12, torch.float64)
    norm = norms[0]
    assert (norm.name, norm.reads, norm.kind) == ("blocks.0.ln1", "attention", kind)
    assert norm.scales == (kind in ("layernorm", "scaling_only"))
    assert norm.projects == (kind in ("layernorm", "projection_only"))
    if norm.scales:
        assert norm.radius == pytest.approx(radius or math.sqrt(32))
    else:
        assert math.isnan(norm.radius)
        assert norm.constant_scale == pytest.approx(float(norm.module.divisor))  # type: ignore[arg-type]


class Twisted(nn.Module):
    """A LayerNorm whose output is no affine map of the normalized vector."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.hook_scale, self.hook_normalized = HookPoint(), HookPoint()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        normalized = self.hook_normalized(x / self.hook_scale((x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()))
        return self.weight * normalized.roll(1, dims=-1)


def test_what_has_no_norms_that_can_be_told_is_refused() -> None:
    damaged, twisted = make_hooked(), lab()
    with torch.no_grad():
        damaged.blocks[1].ln2.w[3] = float("nan")
    twisted.blocks[0].ln1 = Twisted()
    twisted.setup()
    cases: list[tuple[Callable[[Any], object], Any, type[Exception], str]] = [
        (find_norms, damaged, NormError, r"blocks\.1\.ln2: .*NaN"),
        (find_norms, twisted, UnknownNormError, r"blocks\.0\.ln1 \(Twisted\)"),
        (find_norms, "gpt2", TypeError, r"load it first, ln_probe.load_model\('gpt2'\)"),
        (find_norms, torch.nn.Linear(2, 2), TypeError, "Linear is not a TransformerLens model: pass a HookedTransform"),
    ]
    for call, what, error, said in cases:
        with pytest.raises(error, match=said):
            call(what)


def test_eps_gain_and_modules_are_those_of_now() -> None:
    """What is known of a model is kept beside it; what it depends on is looked at each time."""
    model = make_hooked()
    norm = find_norms(model)[0]
    model.blocks[0].ln1.w.data.mul_(2)
    assert torch.equal(find_norms(model)[0].gain, model.blocks[0].ln1.w)
    assert torch.equal(norm.gain, model.blocks[0].ln1.w)
    model.blocks[0].ln1.eps = 0.5
    assert find_norms(model)[0].eps == norm.eps == 0.5
    other = make_hooked(normalization_type="RMS")
    model.blocks[0].ln1 = other.blocks[0].ln1
    model.setup()
    assert find_norms(model)[0].kind == "rmsnorm"
    assert not [name for name in vars(model) if "ln_probe" in name]


def test_nothing_keeps_a_model_alive() -> None:
    for make in (make_hooked, partial(make_bridge, "gpt2")):
        model = make()
        gone = weakref.ref(model)
        with without(model, "scaling", scale=2.0), torch.no_grad():
            model(torch.arange(5)[None])
        del model
        gc.collect()
        assert gone() is None


# Terms, and what a norm can put out.


def test_terms_are_what_they_are_called() -> None:
    norm = norm_of()
    x = torch.randn(6, 16, dtype=torch.float64) + 2
    terms = norm.decompose(x)
    assert repr(terms).startswith("Terms(x=<6 x 16>")
    torch.testing.assert_close(terms.mean_component + terms.projected, x)
    assert float(terms.projected.sum(-1).abs().max()) < 1e-12
    assert float((terms.mean_component * terms.projected).sum(-1).abs().max()) < 1e-12
    variance = x.numpy().var(axis=-1)
    np.testing.assert_allclose(terms.sigma[:, 0], np.sqrt(variance + 1e-5), rtol=1e-12)
    # on the sphere of radius sqrt(d)·sqrt(s²/(s²+eps)) (science: exactly sqrt(d) only when eps = 0)
    np.testing.assert_allclose(terms.normalized.norm(dim=-1), 4 * np.sqrt(variance / (variance + 1e-5)), rtol=1e-12)


@pytest.mark.parametrize("norm", ["layernorm", "scaling_only"])
def test_the_reachable_set_holds_every_output_and_its_edge_is_reached(norm: str) -> None:
    """Outputs are c + A u with |u| ≤ 1, near 1 for long vectors; read through a map W they are Wᵀ of that."""
    norm = norm_of(norm=norm)
    found = norm.reachable()
    center, axes = found
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(200, norm.d, generator=generator, dtype=torch.float64) * torch.logspace(-3, 3, 200)[:, None]
    y = norm.affine(norm.normalize(x))
    u = (y - center) @ torch.linalg.pinv(axes).T
    torch.testing.assert_close(u @ axes.T + center, y, rtol=1e-9, atol=1e-9)
    lengths = u.norm(dim=-1)
    assert float(lengths.max()) <= 1 + 1e-9
    assert float(lengths[-1]) == pytest.approx(1, abs=1e-6)
    W = torch.randn(3, norm.d, 4, generator=generator, dtype=torch.float64)
    read = norm.reachable(W)
    torch.testing.assert_close(read[0], torch.stack([w.T @ center for w in W]))
    torch.testing.assert_close(read[1], torch.stack([w.T @ axes for w in W]))
    unbounded = replace(norm, kind="projection_only")
    assert unbounded.reachable() is None
    assert unbounded.reachable(W) is None


def test_vectors_that_are_not_the_norms_are_refused() -> None:
    norm, x = norm_of(), torch.ones(2, 16)
    for name in ("project", "sigma", "normalize", "affine", "decompose", "directions", "reachable"):
        for vectors in (torch.ones(3), torch.ones(()), x.long()):
            with pytest.raises(ValueError, match="vectors"):
                getattr(norm, name)(vectors)


def refusals(model: Any) -> str:
    """Return what both `check_model` and `analyze` say of a model that they refuse."""
    messages = []
    for use in (check_model, lambda m: ln_probe.analyze(m, torch.arange(5)[None], progress=False)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  (the caller looks for a word)
            use(model)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_models_without_all_their_weights() -> None:
    half = make_bridge("llama")
    half.blocks[1].mlp.to("meta")
    assert "meta" in refusals(half)
    assert "transformer.wte.weight" in refusals(make_bridge("gpt2").to("meta"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantized_models(dtype: torch.dtype) -> None:
    model = make_hooked()
    model.blocks[0].attn.W_Q = torch.nn.Parameter(torch.zeros(8, 4).to(dtype), requires_grad=False)
    assert "blocks.0.attn.W_Q is quantized" in refusals(model)


@pytest.mark.parametrize(("arch", "factor"), [("gpt2", 1.0), ("cohere", 0.0625), ("granite", 0.5)])
def test_what_the_unembeddings_logits_are_multiplied_by(arch: str, factor: float) -> None:
    assert logit_factor(make_bridge(arch)) == factor


def test_tokens_that_logits_are_compared_on_are_not_special() -> None:
    config = hugging_face("llama", pad_token_id=0, bos_token_id=1, eos_token_id=[2, 9]).config
    drawn = set(ordinary_tokens(config, torch.device("cpu"))[0].tolist())
    assert len(drawn) > 10
    assert not drawn & {0, 1, 2, 9}
