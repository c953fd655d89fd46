"""A term taken away from what queries, keys or values see alone: the others keep the intact norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import cases
from compose import distance as difference
from torch import Tensor

from ln_probe.hooks import without
from ln_probe.hooks.capture import stream
from ln_probe.hooks.edits import PARTS, LostEditError, PartEdit, installed
from ln_probe.hooks.scales import Constant
from ln_probe.hooks.sites import find_sites
from ln_probe.hooks.variants import VARIANT_WITHOUT, VariantEdit, changed_output

TOKENS = torch.arange(1, 21).view(2, 10)

pytestmark = pytest.mark.filterwarnings("ignore::ln_probe.hooks.interventions.NoOpWarning")


@pytest.mark.parametrize(
    ("what", "part"),
    cases(
        ("scaling", "keys"),
        ("both", "values"),
        slow=[("projection", "keys"), ("both", "keys"), ("scaling", "queries")],
    ),
)
def test_one_part_changes_and_the_others_stay(
    what: str, part: str, worlds: list[tuple[str, Any]], make_bridge: Callable[..., Any]
) -> None:
    models = [
        *worlds,
        *((a, make_bridge(a)) for a in ("neox", "opt", "neo", "llama", "qwen3")),
    ]
    letter = part[0]
    for name, model in models:
        site = find_sites(model)[0]
        seen: list[Tensor] = []
        stream(model, TOKENS[0], [site], on_norm=lambda s, x, y, seen=seen: seen.extend((x, y)))
        x, y = seen
        changed = changed_output(site, VARIANT_WITHOUT[what], x, y, 2.0)
        attn, places = model.blocks[0].attn, {n: f"blocks.0.attn.hook_{n}" for n in "qkv"}
        W = getattr(attn, f"W_{letter.upper()}")
        b = getattr(attn, f"b_{letter.upper()}", None) if name not in ("llama", "qwen3", "neo") else None
        expected = torch.einsum("pd,hdk->phk", changed, W)
        expected = expected if b is None else expected + b.view(W.shape[0], -1)
        with torch.no_grad():
            intact, before = model.run_with_cache(TOKENS[:1])
            with without(model, what, sites=[site.name], scale=2.0, only=part) as done:
                logits, after = model.run_with_cache(TOKENS[:1])
                assert difference(model(TOKENS[:1]), logits) < 1e-6, name
        assert done.only == part
        for other in set("qkv") - {letter}:
            assert torch.equal(before[places[other]], after[places[other]]), name
        mine = after[places[letter]].reshape(len(x), -1)
        torch.testing.assert_close(mine, expected.detach().reshape(len(x), -1), rtol=1e-4, atol=1e-4, msg=name)
        least = 1e-6 if name == "qwen3" else 1e-4  # its keys are normalized once more, which undoes most of it
        assert (difference(logits, intact) > least) != bool(done.no_ops), name


def test_the_three_parts_together_are_the_whole(make_bridge: Callable[..., Any], make_lab: Callable[..., Any]) -> None:
    for model in (make_bridge("gpt2", torch.float64), make_lab().double()):
        with torch.no_grad():
            with without(model, "scaling", sites="attention", scale=2.0):
                whole = model(TOKENS)
            edits = [
                PartEdit(VariantEdit(s, "no_scaling", Constant.of(2.0)), p)
                for s in find_sites(model)
                if s.reads == "attention"
                for p in PARTS
            ]
            with installed(model, edits):
                parts = model(TOKENS)
        assert difference(parts, whole) < 1e-12


def test_a_shared_norm_can_be_edited_for_its_keys_alone(make_hooked: Callable[..., Any]) -> None:
    """GPT-J: one norm feeds attention and the MLP; the MLP must see the intact one."""
    model = make_hooked(parallel_attn_mlp=True)
    for block in model.blocks:
        block.ln2 = block.ln1
    model.setup()
    assert find_sites(model)[0].reads == "attention+mlp"
    with torch.no_grad():
        _, before = model.run_with_cache(TOKENS)
        with without(model, "scaling", sites="mlp", scale=2.0, only="keys"):
            _, after = model.run_with_cache(TOKENS)
    for place, same in (("mlp.hook_pre", True), ("attn.hook_v", True), ("attn.hook_k", False)):
        assert torch.equal(before[f"blocks.0.{place}"], after[f"blocks.0.{place}"]) == same


def test_split_inputs_of_hooked_transformer(make_hooked: Callable[..., Any]) -> None:
    """With one input per head for queries, keys and values, the keys' is still found, also where a hook changes it."""
    model = make_hooked()
    model.set_use_split_qkv_input(True)
    hooks = [("blocks.0.hook_k_input", lambda x, hook: 2 * x + 1)]
    with torch.no_grad():
        _, before = model.run_with_cache(TOKENS)
        with model.hooks(fwd_hooks=hooks), without(model, "scaling", sites=["blocks.0.ln1"], scale=2.0, only="keys"):
            _, after = model.run_with_cache(TOKENS)
        site = find_sites(model)[0]
        x = 2 * before["blocks.0.hook_resid_pre"] + 1
        keys = torch.einsum("bpd,hdk->bphk", changed_output(site, "no_scaling", x, x, 2.0), model.W_K[0]) + model.b_K[0]
    torch.testing.assert_close(after["blocks.0.attn.hook_k"], keys, rtol=1e-4, atol=1e-4)
    assert torch.equal(before["blocks.0.attn.hook_v"], after["blocks.0.attn.hook_v"])


@pytest.mark.parametrize("ran_before", [False, True])
def test_an_edit_for_keys_that_is_lost_later_is_an_error(ran_before: bool, make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")

    def lose() -> None:
        with torch.no_grad(), without(model, "scaling", scale=2.0, only="keys"):
            if ran_before:
                model(TOKENS)
            model.cfg.use_split_qkv_input = True
            model(TOKENS)

    with pytest.raises(LostEditError, match=r"blocks\.0\.ln1: the edit for keys alone was lost"):
        lose()
