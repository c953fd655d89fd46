"""One head alone without a term of its norm, by hand; all together they are the whole norm (see `compose.py`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compose import distance as difference
from torch import Tensor

import ln_probe
from ln_probe.hooks import without
from ln_probe.hooks.edits import InterventionError, LostEditError

TOKENS = torch.arange(1, 21).view(2, 10)
C = 0.7  # what is divided by where scaling goes

pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.interventions.NoOpWarning")


def heads_by_hand(attn: Any, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """z [batch head pos d_head] of Llama's attention reading y, with loops where it would be a broadcast."""

    def turned(x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-right, left], dim=-1) * sin[:, None]

    maps = (attn.q_proj, attn.k_proj, attn.v_proj)
    q, k, v = ((y @ m.weight.T).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2) for m in maps)
    q, k = turned(q), turned(k)
    made = []
    for head in range(q.shape[1]):
        shared = head // attn.num_key_value_groups
        scores = q[:, head] @ k[:, shared].transpose(-1, -2) / math.sqrt(attn.head_dim)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        made.append(scores.softmax(-1) @ v[:, shared])
    return torch.stack(made, dim=1)


def edit_by_hand(block: Any, chosen: list[int]) -> None:
    """Replace the attention of a Llama block by a hand-written one, in which some heads read x / C for the norm."""
    attn, norm = block.self_attn, block.input_layernorm
    seen: list[Tensor] = []
    norm.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))

    def forward(hidden_states: Tensor, *_: Any, **options: Any) -> tuple[Tensor, None]:
        z = heads_by_hand(attn, hidden_states, *options["position_embeddings"])
        edited = heads_by_hand(attn, norm.weight * seen[-1] / C, *options["position_embeddings"])
        z[:, chosen] = edited[:, chosen]
        return z.transpose(1, 2).flatten(-2) @ attn.o_proj.weight.T, None

    attn.forward = forward


@pytest.mark.parametrize("heads", [[(0, 1)], [(1, 3), (0, 0), (1, 2)]])
def test_heads_edited_in_hugging_face_by_hand(heads: list[tuple[int, int]], make_twins: Callable[..., Any]) -> None:
    """Of two heads that share their keys one alone, or both."""
    original, model, _ = make_twins("llama", torch.float64)
    with torch.no_grad():
        intact = original(TOKENS).logits
        for block in original.model.layers:
            edit_by_hand(block, [])
        assert difference(original(TOKENS).logits, intact) < 1e-6  # rotary tables are float32
        for layer, block in enumerate(original.model.layers):
            edit_by_hand(block, [head for of, head in heads if of == layer])
        with without(model, "scaling", heads=heads, scale=C) as done:
            found = model(TOKENS)
        assert done.heads == tuple(heads)
        assert difference(found, original(TOKENS).logits) < 1e-6
        assert difference(found, intact) > 1e-3


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
