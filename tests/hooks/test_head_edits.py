"""One head alone without a term of its norm: against Hugging Face attention edited by hand."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ln_probe
from ln_probe.hooks import without
from ln_probe.hooks.edits import InterventionError, LostEditError
from ln_probe.hooks.sites import find_sites

TOKENS = torch.arange(1, 21).view(2, 10)
TERMS = ("projection", "scaling", "both")
C = 0.7  # what is divided by where scaling goes

pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.interventions.NoOpWarning")


def difference(a: Tensor, b: Tensor) -> float:
    """Relative to the larger of 1 and the size of b."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1.0))


def without_term(norm: Any, x: Tensor, what: str) -> Tensor:
    """A Hugging Face norm's output without a term, written out."""
    if hasattr(norm, "variance_epsilon"):  # Llama's
        sigma = (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        return norm.weight * x / (sigma if what == "projection" else C)  # type: ignore[no-any-return]
    mean = x.mean(-1, keepdim=True)
    sigma = ((x - mean).pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()
    top = x - mean if what == "scaling" else x
    return norm.weight * (top / (sigma if what == "projection" else C)) + norm.bias  # type: ignore[no-any-return]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]


def heads_by_hand(attn: Any, y: Tensor, rotary: Any) -> Tensor:
    """z [batch head pos d_head] of GPT-2's or Llama's attention reading y, with loops where it would be a broadcast."""
    if hasattr(attn, "c_attn"):
        q, k, v = (y @ attn.c_attn.weight + attn.c_attn.bias).split(y.shape[-1], dim=-1)
        d_head, groups = attn.head_dim, 1
    else:
        q, k, v = (y @ m.weight.T for m in (attn.q_proj, attn.k_proj, attn.v_proj))
        d_head, groups = attn.head_dim, attn.num_key_value_groups
    q, k, v = (t.unflatten(-1, (-1, d_head)).transpose(1, 2) for t in (q, k, v))
    if rotary is not None:
        q, k = turned(q, *rotary), turned(k, *rotary)
    made = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // groups].transpose(-1, -2) / math.sqrt(d_head)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        made.append(scores.softmax(-1) @ v[:, head // groups])
    return torch.stack(made, dim=1)


def edit_by_hand(hf: Any, what: str, heads: dict[int, list[int]]) -> None:
    """Replace the attention of those layers in a Hugging Face model by a hand-written one."""
    gpt2 = hasattr(hf, "transformer")
    layers = hf.transformer.h if gpt2 else hf.model.layers
    for layer, chosen in heads.items():
        block = layers[layer]
        attn, norm = (block.attn, block.ln_1) if gpt2 else (block.self_attn, block.input_layernorm)
        seen: list[Tensor] = []
        norm.register_forward_pre_hook(lambda _m, args, seen=seen: seen.append(args[0]))

        def forward(
            hidden_states: Tensor,
            *_: Any,
            attn: Any = attn,
            norm: Any = norm,
            seen: Any = seen,
            chosen: Any = chosen,
            **options: Any,
        ) -> tuple[Tensor, None]:
            rotary = options.get("position_embeddings")
            z = heads_by_hand(attn, hidden_states, rotary)
            edited = heads_by_hand(attn, without_term(norm, seen[-1], what), rotary)
            z[:, chosen] = edited[:, chosen]
            flat = z.transpose(1, 2).flatten(-2)
            out = flat @ attn.c_proj.weight + attn.c_proj.bias if gpt2 else flat @ attn.o_proj.weight.T
            return out, None

        attn.forward = forward


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
@pytest.mark.parametrize("arch", ["gpt2", "llama"])  # llama: rotary, two heads to a key
@pytest.mark.parametrize("heads", [[(0, 1)], [(1, 3), (0, 0), (1, 2)]])
def test_heads_edited_in_hugging_face_by_hand(
    arch: str, heads: list[tuple[int, int]], dtype: torch.dtype, make_twins: Callable[..., Any]
) -> None:
    for what in TERMS:
        original, model, _ = make_twins(arch, dtype)
        with torch.no_grad():
            intact = original(TOKENS).logits
            edit_by_hand(original, "scaling", {0: [], 1: []})  # the hand-written attention is the model's own
            assert difference(original(TOKENS).logits, intact) < 1e-5
            original, _, _ = make_twins(arch, dtype)
            by_layer: dict[int, list[int]] = {}
            for layer, head in heads:
                by_layer.setdefault(layer, []).append(head)
            edit_by_hand(original, what, by_layer)
            expected = original(TOKENS).logits
            with without(model, what, heads=heads, scale=C) as done:
                found = model(TOKENS)
            assert done.heads == tuple(heads)
            assert difference(found, expected) < (1e-5 if dtype == torch.float32 else 1e-6)  # rotary tables: float32
            if arch == "gpt2" or what != "projection":
                assert difference(found, intact) > 1e-3
            torch.testing.assert_close(model(TOKENS), intact, rtol=0, atol=1e-4)


ALONE = ["gpt2", "neox", "opt", "neo", "llama", "gemma", "qwen3", "gemma2", "olmo2", "bloom"]


@pytest.mark.parametrize("arch", ALONE)
def test_all_heads_together_are_the_whole_norm(arch: str, make_bridge: Callable[..., Any]) -> None:
    """Where attention is all that reads the norm, and its output is all that z makes."""
    model = make_bridge(arch, torch.float64)
    sites = find_sites(model)
    layers = [1] if arch == "olmo2" else [0, 1]  # post-norm: the first attention reads no norm
    if arch == "olmo2" and not any(1 in s.attention_layers for s in sites):
        pytest.skip("no norm of this model is read by attention")
    alone = all(s.reads == "attention" for s in sites if set(s.attention_layers) & set(layers))
    heads = [(layer, head) for layer in layers for head in range(4)]
    with torch.no_grad():
        intact = model(TOKENS)
        with without(model, "scaling", heads=heads, scale=C) as done:
            found = model(TOKENS)
        assert difference(found, intact) > 1e-3
        if alone and arch != "olmo2":
            with without(model, "scaling", sites=list(done.sites), scale=C):
                # GPT-Neo makes its scores in float32, whatever the model's format.
                assert difference(model(TOKENS), found) < (1e-5 if arch == "neo" else 1e-9)


def test_every_world(worlds: list[tuple[str, Any]]) -> None:
    for name, model in worlds:
        with torch.no_grad():
            intact = model(TOKENS)
            with without(model, "scaling", scale=C):
                whole = model(TOKENS)
            with without(model, "scaling", heads=[(i, h) for i in range(2) for h in range(4)], scale=C):
                assert difference(model(TOKENS), whole) < 1e-5, name
            z: list[Tensor] = []
            hook = ("blocks.1.attn.hook_z", lambda t, hook, z=z: z.append(t.flatten(2).clone()))
            model.run_with_hooks(TOKENS, fwd_hooks=[hook])
            with without(model, "scaling", heads=[(1, 2)], scale=C):
                model.run_with_hooks(TOKENS, fwd_hooks=[hook])
            changed = (z[-1] - z[0]).unflatten(-1, (4, -1)).abs().amax((0, 1, 3))
            assert changed[2] > 1e-3, "users' hooks see the edited z"
            assert float(changed[[0, 1, 3]].max()) == 0.0, name
            assert torch.equal(model(TOKENS), intact)


def test_gradients_pass(worlds: list[tuple[str, Any]]) -> None:
    """The gradient along a direction of the embedding, by differences in float64."""
    for name, model in worlds:
        model = model.double()
        weight = model.blocks[0].attn.W_V if name == "bridge" else model.W_U if name != "lab" else model.embed.W_E
        weight = next(p for n, p in model.named_parameters() if p.ndim > 1) if not weight.is_leaf else weight
        along = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        with without(model, "scaling", heads=[(0, 1), (1, 3)], scale=C):
            loss = model(TOKENS, return_type="loss")
            slope = float((torch.autograd.grad(loss, weight)[0] * along).sum())
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    weight.add_(sign * 1e-5 * along)
                    ends.append(float(model(TOKENS, return_type="loss")))
                    weight.sub_(sign * 1e-5 * along)
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5), name


@pytest.mark.parametrize(("heads", "said"), [
    ([], "an empty list of heads leaves nothing to edit"),
    ([(2, 0)], "there is no layer 2; this model has layers 0 to 1"),
    ([(-1, 0)], "there is no layer -1"),
    ([(0, 4)], "layer 0 has no head 4; it has heads 0 to 3"),
    ([(1, -1)], "layer 1 has no head -1; it has heads 0 to 3"),
    ([(0, 1), (0, 1)], r"\(0, 1\) is given twice"),
    ([3], r"must be \(layer, head\) pairs of whole numbers, got 3"),
    ([(0, 1.5)], r"must be \(layer, head\) pairs of whole numbers, got \(0, 1\.5\)"),
])  # fmt: skip
def test_heads_that_are_not_there(heads: Any, said: str, make_bridge: Callable[..., Any]) -> None:
    with pytest.raises(InterventionError, match=said), without(make_bridge("gpt2"), "scaling", heads=heads, scale=C):
        pass


def test_what_does_not_go_with_heads(make_bridge: Callable[..., Any], make_lab: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    with (
        pytest.raises(InterventionError, match=r"leave out sites='all'"),
        without(model, "scaling", heads=[(0, 1)], sites="all", scale=C),
    ):
        pass
    with (
        pytest.raises(InterventionError, match="leave out only='keys'"),
        without(model, "scaling", heads=[(0, 1)], only="keys", scale=C),
    ):
        pass
    with (
        pytest.raises(InterventionError, match="the attention of layer 0 reads no norm"),
        without(make_lab(norm=None), "scaling", heads=[(0, 1)], scale=C),
    ):
        pass


def test_a_cache_of_keys(make_hooked: Callable[..., Any]) -> None:
    model = make_hooked()
    options = {"max_new_tokens": 3, "do_sample": False, "stop_at_eos": False, "verbose": False}
    with torch.no_grad(), without(model, "scaling", heads=[(0, 1)], scale=C):
        with pytest.raises(InterventionError, match="single heads cannot be edited while attention goes on from keys"):
            model.generate(TOKENS[:1, :4], use_past_kv_cache=True, return_type="tokens", **options)
        made = model.generate(TOKENS[:1, :4], use_past_kv_cache=False, return_type="tokens", **options)
        assert int(made[0, 4]) == int(model(TOKENS[:1, :4])[0, -1].argmax())


def test_split_inputs_of_hooked_transformer(make_hooked: Callable[..., Any]) -> None:
    """Each of queries, keys and values has its own input there, which a hook can change."""
    model = make_hooked()
    hooks = [("blocks.0.hook_k_input", lambda x, hook: 2 * x + 1)]
    every = [(0, h) for h in range(4)]
    with torch.no_grad():
        with without(model, "scaling", heads=[(0, 1)], scale=C):
            joint = model(TOKENS)
        model.set_use_split_qkv_input(True)
        with without(model, "scaling", heads=[(0, 1)], scale=C):
            assert difference(model(TOKENS), joint) < 1e-5
        with model.hooks(fwd_hooks=hooks):
            with without(model, "scaling", heads=every, scale=C):
                found = model(TOKENS)
            with without(model, "scaling", sites=["blocks.0.ln1"], scale=C):
                assert difference(model(TOKENS), found) < 1e-5


def test_attention_that_does_not_read_the_norm(make_bridge: Callable[..., Any]) -> None:
    """Found on entering where a bridge's attention normalizes by itself, or when it happens."""
    model = make_bridge("gpt2")
    with torch.no_grad(), without(model, "scaling", heads=[(0, 1)], scale=C):
        handle = model.blocks[0].ln1.register_forward_hook(lambda _m, _a, y: 2 * y)
        said = r"blocks\.0\.ln1: the edit of single heads was lost, because the attention of block 0 did not read"
        with pytest.raises(LostEditError, match=said):
            model(TOKENS)
    handle.remove()
    model.cfg.use_split_qkv_input = True
    with (
        pytest.raises(LostEditError, match=r"blocks\.0\.ln1: the edit was lost(.|\n)*moves no logit"),
        without(model, "scaling", heads=[(0, 1)], scale=C),
    ):
        pass


def test_heads_that_read_more_than_the_norm(make_hooked: Callable[..., Any]) -> None:
    """Shortformer's queries and keys read the norm's output plus position embeddings, its values the output alone."""
    model = make_hooked(positional_embedding_type="shortformer")
    said = (
        r"single heads of block 0 cannot be edited: the norm's output is not what its queries and keys are made of "
        r"\(positional_embedding_type='shortformer' adds position embeddings to it\)\. Edit the whole norm with "
        "heads=None"
    )
    every = [(layer, head) for layer in range(2) for head in range(4)]
    with pytest.raises(LostEditError, match=said), without(model, "scaling", heads=every, scale=C):
        pass
    with torch.no_grad(), without(model, "scaling", scale=C):
        model(TOKENS)
    report = ln_probe.analyze(model, TOKENS, probes=("head_effects",), progress=False)
    assert not len(report.tables["head_effects"])
    assert any(re.search(f"head_effects: nothing was measured: {said}", note) for note in report.notes)
