"""What a model computes without a term of a norm: against the formulas written out once more."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import hugging_face, make_bridge, make_folded, make_hooked, make_twins, process
from compose import distance as difference
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import lab
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.hooks import find_norms, linearized, without
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


@pytest.mark.parametrize("kind", NORM_KINDS)
@pytest.mark.parametrize("what", TERMS)
def test_lab_norms(kind: str, what: str) -> None:
    model = lab(norm=kind)
    site = find_norms(model)[0]
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, what, sites=["blocks.0.ln1"], scale=2.0) as done:
            changed = model(TOKENS)
    acts = (what != "scaling" and site.projects) or (what != "projection" and site.scales)
    assert bool(done.no_ops) == (not acts)
    assert (difference(changed, intact) > 1e-3) == acts


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


def test_with_a_cache_later_tokens_are_not_position_0() -> None:
    """Token by token, with earlier keys and values kept: the same logits as all at once (in a HookedTransformer)."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache as Cache

    model = make_hooked(dtype=torch.float64)
    scale = {s.name: {"first": 3.0, "rest": 0.7} for s in find_norms(model)}
    with torch.no_grad(), without(model, "scaling", sites="all", scale=scale):
        whole, cache = model(TOKENS), Cache.init_cache(model.cfg, "cpu", 2)
        parts = (TOKENS[:, :4], *TOKENS[:, 4:].split(1, dim=1))
        steps = [model(part, past_kv_cache=cache, attention_mask=torch.ones_like(part)) for part in parts]
        assert difference(torch.cat(steps, dim=1), whole) < 1e-5


@pytest.mark.parametrize("make", [lambda: make_bridge("gpt2", torch.float64), lambda: make_hooked(dtype=torch.float64)])
def test_padding_on_the_left_moves_position_0(make: Callable[[], Any]) -> None:
    model = make()
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), TOKENS[:1]], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 10])
    scale = {s.name: (3.0, 0.7) for s in find_norms(model)}
    with torch.no_grad(), without(model, "scaling", sites="all", scale=scale):
        whole = model(TOKENS[:1])
        shifted = model(padded, attention_mask=mask)[:, 3:]
    torch.testing.assert_close(shifted, whole, rtol=1e-9, atol=1e-9)


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


@pytest.mark.parametrize("given", [0.0, (0.0, 1.0), (1.0, 0.0), (1.0, 2.0, 3.0), {"first": 1.0}, None])
def test_what_is_no_constant(given: object) -> None:
    with pytest.raises(ValueError, match="a constant is"):
        Constant.of(given)


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


@pytest.mark.parametrize("arch", [None, "gpt2", "gemma"])
def test_gradients_of_gains_and_biases(arch: str | None) -> None:
    """As those of a norm that is written by hand, also of a parameter that is put in while the edit lasts."""
    model = make_hooked(dtype=torch.float64) if arch is None else make_bridge(arch, torch.float64)
    site = find_norms(model)[0]
    owner = getattr(site.module, "original_component", None) or site.module
    names = [name for name in ("w", "b", "weight", "bias") if isinstance(getattr(owner, name, None), nn.Parameter)]
    kept = {name: getattr(owner, name) for name in names}

    def replaced() -> None:
        for name in names:
            setattr(owner, name, nn.Parameter(0.5 * kept[name].detach() - 0.1))

    def found(run: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
        parameters = [*(getattr(owner, name) for name in names), next(model.parameters())]
        loss = run()
        return loss.detach(), list(torch.autograd.grad(loss, parameters))

    def written(how: str, _m: Any, args: Any, y: Tensor) -> Tensor:
        x = args[0]
        kept = x - x.mean(-1, keepdim=True) if site.projects else x
        sigma = (kept.pow(2).mean(-1, keepdim=True) + site.eps).sqrt()
        normalized = {"scaling": kept / 2.0, "projection": x / sigma, "linear": kept / sigma.detach()}[how]
        gain, bias = (getattr(owner, names[0]), getattr(owner, names[1]) if len(names) > 1 else 0.0)
        return normalized * (gain + 1 if arch == "gemma" else gain) + bias

    for how, edit in (
        ("scaling", lambda: without(model, "scaling", sites=[site.name], scale=2.0)),
        ("projection", lambda: without(model, "projection", sites=[site.name])),
        ("linear", lambda: linearized(model)),
    ):
        if how == "projection" and not site.projects:
            continue
        for put in (lambda: None, replaced):
            with edit():
                put()
                value, gradients = found(lambda: model(TOKENS, return_type="loss"))
            with linearized(model) if how == "linear" else nullcontext():  # (for the norms that follow)
                handle = site.module.register_forward_hook(partial(written, how))
                expected, by_hand = found(lambda: model(TOKENS, return_type="loss"))
            handle.remove()
            for name, parameter in kept.items():
                setattr(owner, name, parameter)
            torch.testing.assert_close(value, expected, rtol=1e-6 if arch == "gemma" else 1e-12, atol=0.0)
            for one, other in zip(gradients, by_hand, strict=True):
                assert difference(one, other) < (1e-5 if arch == "gemma" else 1e-10), how
