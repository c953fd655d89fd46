"""Streaming sees what a full cache sees, once, and holds one layer at a time."""

from __future__ import annotations

import weakref

import pytest
import torch
from architectures import make_bridge, make_hooked

from ln_probe.hooks import find_norms
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.stream import ActivationError, AttentionInput, stream

TOKENS = torch.arange(1, 21)


def test_streamed_norms_are_the_cached_ones() -> None:
    model = make_bridge("neox")
    sites = find_norms(model)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def keep(site: Norm, x: torch.Tensor, y: torch.Tensor) -> None:
        assert site.name not in seen, "a norm was seen twice in one pass"
        seen[site.name] = x, y

    stream(model, TOKENS, sites, on_norm=keep)
    _, cache = model.run_with_cache(TOKENS[None])
    assert list(seen) == [s.name for s in sites]
    for name, (x, y) in seen.items():
        torch.testing.assert_close(x, cache[f"{name}.hook_in"][0])
        torch.testing.assert_close(y, cache[f"{name}.hook_out"][0])


def test_hooked_transformer_counts_once() -> None:
    """HookedTransformer calls ln1 three times a pass (query, key, value)."""
    model = make_hooked()
    calls: list[str] = []
    stream(model, TOKENS, find_norms(model), on_norm=lambda site, x, y: calls.append(site.name))
    assert calls == ["blocks.0.ln1", "blocks.0.ln2", "blocks.1.ln1", "blocks.1.ln2", "ln_final"]


def test_only_wanted_layers_and_nothing_left_behind() -> None:
    model = make_bridge("gpt2")
    sites = find_norms(model)
    before = sum(len(m._forward_hooks) for _, m in model.named_modules())
    layers: list[int] = []
    patterns: list[weakref.ref[torch.Tensor]] = []

    def keep(seen: AttentionInput) -> None:
        layers.append(seen.layer)
        assert not [p for p in patterns if p() is not None], "an earlier layer is still in memory"
        patterns.append(weakref.ref(seen.pattern))

    stream(model, TOKENS, sites, on_attention=keep, layers=[1])
    assert layers == [1]
    stream(model, TOKENS, sites, on_attention=keep)
    assert layers == [1, 0, 1]
    assert sum(len(m._forward_hooks) for _, m in model.named_modules()) == before


def test_what_is_not_finite_is_placed() -> None:
    """In norms of queries and keys too, which see a row for every head of a position."""
    hooked, qwen = make_hooked(), make_bridge("qwen3")
    with torch.no_grad():
        hooked.pos_embed.W_pos[4] = float("inf")
        qwen.W_E[7] = float("nan")
    said = r"blocks\.0\.ln1: its input holds NaN or infinite values \(first at position 4\)"
    with pytest.raises(ActivationError, match=said):
        stream(hooked, TOKENS, find_norms(hooked))
    inside = [s for s in find_norms(qwen) if s.reads in ("query", "key")]
    with pytest.raises(ActivationError, match=r"first at position 5\)"):
        stream(qwen, torch.tensor([1, 2, 3, 4, 5, 7]), inside)
