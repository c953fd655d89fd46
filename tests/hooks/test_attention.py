"""Keys, queries and the queries a head can make, rebuilt from weights; a streamed pass sees what a cache does."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked
from small_models import lab
from torch import nn
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from ln_probe.analyses.geometry.queries import query_ellipsoid
from ln_probe.analyses.lab.transformer import alibi_slopes
from ln_probe.hooks import find_norms
from ln_probe.hooks.attention import Heads, UnsupportedAttentionError, _slopes, read_heads
from ln_probe.hooks.stream import ActivationError, AttentionInput, stream

TOKENS = torch.arange(3, 27) % 50


def layers_of(model: Any, tokens: torch.Tensor = TOKENS) -> list[tuple[AttentionInput, Heads]]:
    sites = find_norms(model)
    found: list[tuple[AttentionInput, Heads]] = []
    stream(model, tokens, sites, on_attention=lambda seen: found.append((seen, read_heads(seen, sites))))
    return found


def test_what_is_not_rebuilt_is_refused_by_name() -> None:
    """Without a causal mask ALiBi depends on the query as well: it is no bias per key."""
    for model, said in (
        (make_hooked(attn_scores_soft_cap=2.0), "soft cap of 2,"),
        (make_bridge("gemma2"), "soft cap of 50,"),
        (lab(positions="alibi", causal=False), "ALiBi"),
    ):
        with pytest.raises(UnsupportedAttentionError, match=said):
            layers_of(model)


def test_alibi_is_a_bias_per_key() -> None:
    """The model's own scores but for what all keys of a query share: −slope·distance is slope·position to a softmax."""
    for model in (lab(positions="alibi", n_heads=4), lab(positions="alibi", d_head=8, n_heads=3)):
        for seen, heads in layers_of(model):
            assert heads.slopes is not None
            torch.testing.assert_close(heads.slopes, alibi_slopes(heads.n_heads).double())
            paid = heads.pattern(heads.queries(seen.y), heads.keys(seen.y))
            torch.testing.assert_close(paid, seen.pattern.double(), rtol=1e-3, atol=1e-6)
    for seen, heads in layers_of(make_bridge("bloom", torch.float64)):
        paid = heads.pattern(heads.queries(seen.y), heads.keys(seen.y))
        torch.testing.assert_close(paid, seen.pattern, rtol=1e-5, atol=1e-7)  # its ALiBi and softmax are in float32


@pytest.mark.parametrize("n_heads", [1, 4, 6, 12, 13])
def test_slopes_are_those_of_bloom_and_mpt(n_heads: int) -> None:
    attn = nn.Module()
    attn.cfg = SimpleNamespace(positional_embedding_type="alibi")  # type: ignore[assignment]
    known = [*_slopes(attn, n_heads, divisor=4.0)][:-1]
    bloom = build_alibi_tensor(torch.ones(1, 2), n_heads, torch.float64)[:, 0, 1]
    mpt = -build_mpt_alibi_tensor(n_heads, 2)[:, 0, 0].double()
    for slopes in (bloom, mpt, bloom / 4, bloom / 2):
        assert any(torch.allclose(slopes, form, rtol=1e-6) for form in known)


@pytest.mark.parametrize("changed", [lambda pattern: pattern.triu(-7), lambda pattern: pattern**2])
def test_scores_of_an_unknown_form_are_refused_with_the_difference(
    changed: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """A window is told by the layer and borne out by its pattern, never guessed from zeros; nor is another form."""
    model = make_bridge("gpt2")
    hook = model.blocks[0].attn.hook_pattern
    hook.add_hook(lambda pattern, hook: changed(pattern) / changed(pattern).sum(-1, keepdim=True))
    said = r"layer 0: the attention pattern of \w+ differs by 0\.\d+ from softmax"
    with pytest.raises(UnsupportedAttentionError, match=said):
        layers_of(model)


@pytest.mark.parametrize(("arch", "windows"), [("neo", [None, 8]), ("mistral", [8, 8]), ("gemma3", [8, None])])
def test_windows_are_those_of_the_layers(arch: str, windows: list[int | None]) -> None:
    model = make_bridge(arch, torch.float64, **({"window_size": 8} if arch == "neo" else {}))
    for (seen, heads), window in zip(layers_of(model), windows, strict=True):
        assert heads.window == seen.window == window
        paid = heads.pattern(heads.queries(seen.y), heads.keys(seen.y))
        torch.testing.assert_close(paid, seen.pattern.double(), rtol=1e-4, atol=1e-6)
    short = layers_of(model, TOKENS[:8])  # that fits into every window
    assert [heads.window for _, heads in short] == [None, None]


def test_unbounded_queries_have_no_ellipsoid() -> None:
    seen, heads = layers_of(make_bridge("gpt2"))[0]
    assert query_ellipsoid(heads, replace(seen.norm, kind="projection_only"), 0) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_among_tiny_scores_the_nearest_divisor_counts(dtype: torch.dtype) -> None:
    """Attention is nearly even whatever the divisor: a wrong one comes near, too."""
    model = make_bridge("gpt2", dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "attn" in name and weight.ndim > 1:
                weight.mul_(0.02)
    right = [heads.divisor for _, heads in layers_of(model)]
    assert right == pytest.approx([math.sqrt(8)] * 2)
    assert [heads.divisor for _, heads in layers_of(make_bridge("neo", torch.bfloat16))] == [1.0] * 2
    assert [heads.divisor for _, heads in layers_of(make_hooked(attn_scale=3.0))] == [3.0] * 2


ROW = torch.arange(1, 21)


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

    stream(model, ROW, sites, on_attention=keep, layers=[1])
    assert layers == [1]
    stream(model, ROW, sites, on_attention=keep)
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
        stream(hooked, ROW, find_norms(hooked))
    inside = [s for s in find_norms(qwen) if s.reads in ("query", "key")]
    with pytest.raises(ActivationError, match=r"first at position 5\)"):
        stream(qwen, torch.tensor([1, 2, 3, 4, 5, 7]), inside)
