"""What a model computes without a term of a norm: against the formulas written out once more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compose import distance as difference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import ln_probe
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.hooks import without
from ln_probe.hooks.default_tokens import default_tokens
from ln_probe.hooks.interventions import NoOpWarning
from ln_probe.hooks.model import evaluating
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import Constant, mean_sigmas
from ln_probe.hooks.sites import find_sites
from ln_probe.hooks.variants import VARIANTS, changed_output, edits_of_norms, normalized

TOKENS = torch.arange(1, 21).view(2, 10)
TERMS = tuple(variant.without for variant in edits_of_norms(standard=True))
GAIN, BIAS = torch.randn(2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BOTH_PRECISIONS = [(torch.float32, 1e-5), (torch.float64, 1e-12)]
Norm = Callable[[Tensor, nn.Module], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.interventions.NoOpWarning")


def by_hand(what: str, scale: float | Tensor) -> Norm:
    """A LayerNorm module's output without a term, written out once more."""

    def norm(x: Tensor, module: nn.Module) -> Tensor:
        weight, bias, eps = module.weight, module.bias, module.eps
        mean = x.sum(-1, keepdim=True) / x.shape[-1]
        centred = x - mean
        sigma = torch.sqrt((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + eps)
        top = centred if what == "scaling" else x
        bottom = sigma if what == "projection" else scale
        return weight * (top / bottom) + bias  # type: ignore[operator, no-any-return]

    return norm


def gpt2_by_hand(hf: Any, tokens: Tensor, norms: dict[str, Norm]) -> Tensor:
    """GPT-2 in plain torch; `norms` says which norms are computed by something else than layer_norm."""

    def norm(name: str, x: Tensor, module: Any) -> Tensor:
        if name in norms:
            return norms[name](x, module)
        return F.layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)

    body, heads = hf.transformer, hf.config.n_head
    x = body.wte.weight[tokens] + body.wpe.weight[: tokens.shape[1]]
    hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    for layer, block in enumerate(body.h):
        y = norm(f"blocks.{layer}.ln1", x, block.ln_1)
        q, k, v = (y @ block.attn.c_attn.weight + block.attn.c_attn.bias).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        z = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
        x = x + z.transpose(1, 2).flatten(-2) @ block.attn.c_proj.weight + block.attn.c_proj.bias
        y = norm(f"blocks.{layer}.ln2", x, block.ln_2)
        y = F.gelu(y @ block.mlp.c_fc.weight + block.mlp.c_fc.bias, approximate="tanh")
        x = x + y @ block.mlp.c_proj.weight + block.mlp.c_proj.bias
    return norm("ln_final", x, body.ln_f) @ hf.lm_head.weight.T  # type: ignore[no-any-return]


@pytest.mark.parametrize(("dtype", "tolerance"), BOTH_PRECISIONS)
@pytest.mark.parametrize("what", TERMS)
@pytest.mark.parametrize(("sites", "names"), [
    (["blocks.0.ln1"], ["blocks.0.ln1"]),
    ("attention", ["blocks.0.ln1", "blocks.1.ln1"]),
    ("mlp", ["blocks.0.ln2", "blocks.1.ln2"]),
    ("final", ["ln_final"]),
    ("all", ["blocks.0.ln1", "blocks.0.ln2", "blocks.1.ln1", "blocks.1.ln2", "ln_final"]),
])  # fmt: skip
def test_gpt2_is_the_block_recomputed_in_plain_torch(
    dtype: torch.dtype, tolerance: float, what: str, sites: Any, names: list[str], make_twins: Callable[..., Any]
) -> None:
    hf, model, _ = make_twins("gpt2", dtype)
    with torch.no_grad():
        assert difference(model(TOKENS), gpt2_by_hand(hf, TOKENS, {})) < tolerance
        expected = gpt2_by_hand(hf, TOKENS, dict.fromkeys(names, by_hand(what, 1.0)))
        with without(model, what, sites=sites, scale=1.0) as done:
            found = model(TOKENS)
    assert list(done.sites) == names
    assert difference(found, expected) < tolerance
    assert done.matched == (what == "projection")  # a number is not the sites' own size
    assert dict(done.divisors) == ({} if what == "projection" else dict.fromkeys(names, Constant(1.0, 1.0)))


@pytest.mark.parametrize("what", TERMS)
@pytest.mark.parametrize(
    "options", [{}, {"parallel_attn_mlp": True}, {"normalization_type": "LNPre"}, {"normalization_type": "RMS"}]
)
def test_both_worlds_alike_on_hooked_transformer(
    what: str, options: dict[str, Any], make_hooked: Callable[..., Any]
) -> None:
    """HookedTransformer calls `ln1` three times; replacing the module's whole forward is the second way."""
    model = make_hooked(**options)
    sites = {s.name: s for s in find_sites(model)}
    with torch.no_grad():
        with without(model, what, sites="attention", scale=1.5):
            found = model(TOKENS)
        for block in model.blocks:
            site = sites[block.ln1.hook_scale.name.removesuffix(".hook_scale")]

            def forward(x: Tensor, module: Any = block.ln1, site: Any = site) -> Tensor:
                centred = x - x.mean(-1, keepdim=True) if site.projects else x
                sigma = (centred.square().mean(-1, keepdim=True) + module.eps).sqrt()
                top = centred if what == "scaling" else x
                out = top / (sigma if what == "projection" else 1.5)
                out = out * module.w if hasattr(module, "w") else out
                return out + module.b if hasattr(module, "b") else out  # type: ignore[no-any-return]

            block.ln1.forward = forward
        assert difference(found, model(TOKENS)) < 1e-5


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("what", TERMS)
def test_lab_norms(kind: str, what: str, make_lab: Callable[..., Any]) -> None:
    model = make_lab(norm=kind)
    site = find_sites(model)[0]
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, what, sites=["blocks.0.ln1"], scale=2.0) as done:
            changed = model(TOKENS)
    acts = (what != "scaling" and site.projects) or (what != "projection" and site.scales)
    assert bool(done.no_ops) == (not acts)
    assert (difference(changed, intact) > 1e-3) == acts


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(NORM_KINDS),
    variant=st.sampled_from(tuple(VARIANTS)),
    seed=st.integers(0, 10**6),
    shift=st.floats(-5, 5),
    constant=st.floats(0.01, 100),
)
def test_a_changed_output_is_gain_times_the_variant_plus_bias(
    kind: str, variant: str, seed: int, shift: float, constant: float
) -> None:
    where = ("a site", 0, kind, "attention", "raw", "", nn.Identity(), 32)
    site = Site(*where, GAIN, BIAS, eps=1e-5, radius=math.sqrt(32), constant_scale=1.7)
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    y = site.affine((x - x.mean(-1, keepdim=True) if site.projects else x) / site.sigma(x))
    expected = site.affine(normalized(site, variant, x, constant))
    torch.testing.assert_close(changed_output(site, variant, x, y, constant), expected, rtol=1e-12, atol=1e-12)
    assert changed_output(site, variant, x.bfloat16(), y.bfloat16(), constant).dtype == torch.bfloat16


def test_projection_of_a_centred_stream_changes_nothing_and_says_why(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked()
    model.load_and_process_state_dict(
        model.state_dict(), fold_ln=False, center_writing_weights=True, center_unembed=False, fold_value_biases=False
    )
    with torch.no_grad():
        intact, loss = model(TOKENS), model(TOKENS, return_type="loss")
        said = r"changes nothing at every site, by construction \(layernorm: its input is already centred\)"
        with pytest.warns(NoOpWarning, match=rf"without 'projection' {said}"), without(model, "projection") as done:
            pass
        with without(model, "projection", sites="all") as done:
            assert difference(model(TOKENS), intact) < 1e-6
            assert abs(float(model(TOKENS, return_type="loss") - loss)) < 1e-6
        assert set(done.no_ops) == set(done.sites)
        with warnings.catch_warnings():
            warnings.simplefilter("error", NoOpWarning)  # scaling goes: that is no no-op
            with without(model, "both", sites="all", scale=1.0):
                assert difference(model(TOKENS), intact) > 1e-2


def test_projection_of_a_folded_model_or_an_rms_norm_changes_nothing_and_says_why(
    make_folded: Callable[..., Any], make_bridge: Callable[..., Any]
) -> None:
    """`fold_ln` centres the weights that read a norm, so that they do not see the mean."""
    for model, sites, most, why in (
        (make_folded("gpt2"), "all", 1e-5, r"layernorm: what reads it ignores the mean \(its weights are centred"),
        (make_bridge("llama"), "attention", 0.0, r"by construction \(rmsnorm: it has no projection\)"),
    ):
        with torch.no_grad():
            intact = model(TOKENS)
            with pytest.warns(NoOpWarning, match=why), without(model, "projection", sites=sites):
                assert difference(model(TOKENS), intact) <= most


def test_default_constants_are_the_pooled_ones_of_analyze(make_bridge: Callable[..., Any]) -> None:
    """The same default prompts; `analyze` adds sigmas prompt by prompt, so the last digits can differ."""
    for model in (make_bridge("gpt2"), ln_probe.load_model("lm-layernorm")):
        constants = ln_probe.analyze(model, progress=False, probes=("decomposition",)).provenance["constants"]
        with without(model, "scaling", sites="all") as done:
            pass
        assert list(done.divisors) == list(constants)
        for name, constant in done.divisors.items():
            assert constant.plain == pytest.approx(constants[name], rel=1e-13)
        with without(model, "both", sites="attention", scale=constants) as again:
            assert again.matched
            assert again.divisors["blocks.0.ln1"].plain == constants["blocks.0.ln1"]


@pytest.mark.parametrize("length", [7, 4, 2])  # 4 and 2 are numbers of its heads as well
def test_position_0_of_every_head_is_left_out(length: int, make_bridge: Callable[..., Any]) -> None:
    """Norms of queries and keys inside a bridge's attention see heads before positions."""
    model = make_bridge("qwen3", torch.float64)
    sites = {s.name: s for s in find_sites(model)}
    seen: dict[str, Tensor] = {}
    names = ("blocks.0.attn.q_norm", "blocks.0.attn.k_norm")
    for name in names:
        sites[name].module.register_forward_hook(lambda _m, args, _y, name=name: seen.update({name: args[0]}))
    found = mean_sigmas(model, [*sites.values()], [TOKENS[0, :length]])
    for name in names:
        assert seen[name].shape[1:] == ((4 if "q_norm" in name else 2), length, 8)
        sigma = (seen[name].square().mean(-1) + 1e-6).sqrt()
        assert found[name].rest == pytest.approx(float(sigma[:, :, 1:].mean()), rel=1e-6)
        assert found[name].first == pytest.approx(float(sigma[:, :, 0].mean()), rel=1e-6)


def test_a_single_position_is_better_than_none(make_lab: Callable[..., Any]) -> None:
    model = make_lab()
    sites = find_sites(model)
    with evaluating(model):
        assert mean_sigmas(model, sites, [torch.tensor([3])])["ln_final"].rest > 0
    assert all(len(row) == 32 for row in default_tokens(model))  # its context


def test_bfloat16(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2", torch.bfloat16)
    exact = make_bridge("gpt2", torch.float64)
    with torch.no_grad():
        with without(model, "scaling", sites="all", tokens=TOKENS):
            found = model(TOKENS)
        with without(exact, "scaling", sites="all", tokens=TOKENS):
            expected = exact(TOKENS)
    assert found.dtype == torch.bfloat16
    assert difference(found.double(), expected) < 0.1  # weights were rounded too
