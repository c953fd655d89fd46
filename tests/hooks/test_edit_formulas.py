"""What a model computes without a term of a norm: against the formulas written out once more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import hugging_face, make_bridge, make_folded, make_hooked, make_twins, process
from compose import distance as difference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.hooks import find_norms, without
from ln_probe.hooks.constants import Constant, mean_sigmas
from ln_probe.hooks.edits import NoOpWarning
from ln_probe.hooks.norm import VARIANT_WITHOUT, VARIANTS, Norm
from ln_probe.hooks.norm_edits import NormEdit

TOKENS = torch.arange(1, 21).view(2, 10)
TERMS = tuple(VARIANT_WITHOUT)
GAIN, BIAS = torch.randn(2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Formula = Callable[[Tensor, nn.Module], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")


def changed_output(norm: Norm, variant: str, x: Tensor, constant: float) -> Tensor:
    """A norm's output under a variant, with one constant."""
    pair = torch.tensor([constant, constant], dtype=torch.float64)
    return NormEdit.of(norm, variant, pair).output(x)


def by_hand(what: str, scale: float | Tensor) -> Formula:
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


def gpt2_by_hand(hf: Any, tokens: Tensor, norms: dict[str, Formula]) -> Tensor:
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


@pytest.mark.parametrize(("what", "sites", "names"), [
    ("scaling", ["blocks.0.ln1"], ["blocks.0.ln1"]),
    ("projection", "attention", ["blocks.0.ln1", "blocks.1.ln1"]),
    ("both", "mlp", ["blocks.0.ln2", "blocks.1.ln2"]),
    ("scaling", "final", ["ln_final"]),
    ("both", "all", ["blocks.0.ln1", "blocks.0.ln2", "blocks.1.ln1", "blocks.1.ln2", "ln_final"]),
])  # fmt: skip
def test_gpt2_is_the_block_recomputed_in_plain_torch(what: str, sites: Any, names: list[str]) -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        hf, model, _ = make_twins("gpt2", dtype)
        with torch.no_grad():
            assert difference(model(TOKENS), gpt2_by_hand(hf, TOKENS, {})) < tolerance
            expected = gpt2_by_hand(hf, TOKENS, dict.fromkeys(names, by_hand(what, 1.0)))
            with without(model, what, sites=sites, scale=1.0) as done:
                found = model(TOKENS)
        assert list(done.sites) == names
        assert difference(found, expected) < tolerance
        assert dict(done.divisors) == ({} if what == "projection" else dict.fromkeys(names, Constant(1.0, 1.0)))


@settings(max_examples=30, deadline=None)
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
    module = nn.LayerNorm(32, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(GAIN)
        module.bias.copy_(BIAS)
    eps = {"eps_value": 1e-5, "constant_value": 1.7}
    norm = Norm("a norm", 0, kind, "attention", module, 32, has_gain=True, has_bias=True, **eps)
    x = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift
    projected = x - x.mean(-1, keepdim=True) if norm.projects else x
    removes = VARIANTS[variant].removes
    divisor = constant if norm.scales and "scaling" in removes else norm.sigma(x)
    expected = (x if "projection" in removes else projected) / divisor * GAIN + BIAS
    output = changed_output(norm, variant, x, constant)
    torch.testing.assert_close(output.detach(), expected, rtol=1e-12, atol=1e-12)
    assert changed_output(norm, variant, x.bfloat16(), constant).dtype == torch.bfloat16


def test_projection_that_changes_nothing() -> None:
    """Of an RMSNorm, which is said; of a centred stream and of folded weights, which is measured."""
    model = process(make_hooked(), center_writing_weights=True)
    for each, most in ((model, 1e-6), (make_folded("gpt2"), 1e-5)):
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error", NoOpWarning)
            intact = each(TOKENS)
            with without(each, "projection", sites="all") as edit:
                assert difference(each(TOKENS), intact) <= most
        assert not edit.no_ops
    llama = make_bridge("llama")
    with torch.no_grad(), pytest.warns(NoOpWarning, match="no such term"), without(llama, "projection") as edit:
        changed = llama(TOKENS)
    assert torch.equal(changed, llama(TOKENS).detach())
    assert set(edit.no_ops) == set(edit.sites)


@pytest.mark.parametrize("length", [7, 4, 2])  # 4 and 2 are numbers of its heads as well
def test_position_0_of_every_head_is_left_out(length: int) -> None:
    """Norms of queries and keys inside a bridge's attention see heads before positions."""
    model = make_bridge("qwen3", torch.float64)
    sites = {s.name: s for s in find_norms(model)}
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


# What replaces sigma: one constant or two; where position 0 is in every kind of pass.


@pytest.mark.parametrize("scale", ["frozen", "uniform"])
def test_one_constant_and_two(scale: str) -> None:
    hf, model, _ = make_twins("gpt2", torch.float64)
    name = "blocks.1.ln1"
    site = next(s for s in find_norms(model) if s.name == name)
    mean = mean_sigmas(model, [site], list(TOKENS))[name]
    divisor = torch.full((2, 10, 1), mean.rest, dtype=torch.float64)
    if scale == "frozen":
        divisor[:, 0] = mean.first
    with torch.no_grad(), without(model, "scaling", sites=[name], scale=scale, tokens=TOKENS) as done:
        found = model(TOKENS)
    torch.testing.assert_close(
        found, gpt2_by_hand(hf, TOKENS, {name: by_hand("scaling", divisor)}), rtol=1e-12, atol=1e-12
    )
    assert done.divisors[name] == Constant(float(divisor[0, 0]), float(divisor[0, 1]))


def test_position_0_of_a_hugging_face_model_in_memory() -> None:
    """With as many tokens as heads, whose norms see positions before heads (Qwen 3); and behind padding on the left
    that is told without a keyword."""
    scale = (3.0, 0.7)
    for arch, heads in (("qwen3", 4), ("gemma3", 4), ("qwen3", 2)):
        model = hugging_face(arch, torch.float64)
        with torch.no_grad(), without(model, "scaling", sites="all", scale={s.name: scale for s in find_norms(model)}):
            few, more = (model(TOKENS[:1, :n]).logits for n in (heads, 7))
            embedded = model(inputs_embeds=model.get_input_embeddings()(TOKENS[:1, :7])).logits
        torch.testing.assert_close(few, more[:, :heads], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(embedded, more)
    model.set_attn_implementation("sdpa")
    padded, mask = torch.cat([TOKENS[:1, :2], TOKENS[:1]], 1), torch.tensor([[0] * 2 + [1] * 10])
    with torch.no_grad(), without(model, "scaling", sites="all", scale={s.name: scale for s in find_norms(model)}):
        named, bare = model(padded, attention_mask=mask).logits, model(padded, mask).logits
        whole = model(TOKENS[:1], output_hidden_states=True).hidden_states[-1]
        model.generate(TOKENS[:1], max_new_tokens=2, pad_token_id=0)
        alone = model.model(TOKENS[:1]).last_hidden_state  # without the head, after steps that began later
    assert torch.equal(named[:, 2:], bare[:, 2:])
    assert torch.equal(whole, alone)


def test_a_shared_norm_can_be_edited_for_its_keys_alone() -> None:
    """GPT-J: one norm feeds attention and the MLP; the MLP must see the intact one."""
    model = make_hooked(parallel_attn_mlp=True)
    for block in model.blocks:
        block.ln2 = block.ln1
    model.setup()
    assert find_norms(model)[0].reads == "attention+mlp"
    with torch.no_grad():
        _, before = model.run_with_cache(TOKENS)
        with without(model, "scaling", sites="mlp", scale=2.0, only="keys"):
            _, after = model.run_with_cache(TOKENS)
    for place, same in (("mlp.hook_pre", True), ("attn.hook_v", True), ("attn.hook_k", False)):
        assert torch.equal(before[f"blocks.0.{place}"], after[f"blocks.0.{place}"]) == same
