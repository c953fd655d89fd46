"""How an attention layer turns a norm's output into keys and queries, and which queries it can make at all.

    k_j = R_j (W_Kᵀ y_j + b_K)        q_t = R_t (W_Qᵀ y_t + b_Q)        score = q·k / divisor

with y the norm's output and R the rotary map of a position (the identity without rotary positions). Everything is read
from the model and checked against what the model did: if `softmax(q·k / divisor)` is not its own pattern, the layer is
reported as unsupported, by name and with the difference, instead of being measured wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.hooks.sites import Site
from ln_probe.hooks.variants import ignored_below

# Largest difference between our pattern and the model's that rounding explains: float32 scores of size 100 carry
# 1e-5, and a pattern entry moves by at most a quarter of its score's error; 16-bit formats carry 1e-2.
PATTERN_TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 2e-4,
}  # float64: rotary tables stay float32 in some models
PATTERN_TOLERANCE_HALF = 5e-2

# Query-key pairs whose scores are held at once: 8 MB an array in float64, so that a few arrays of them stay small
# beside a forward pass (12 heads of 512 tokens have 3.1 million).
_PAIRS = 1_000_000


class UnsupportedAttentionError(ValueError):
    """This layer's scores are not a scaled dot product of the keys and queries that ln_probe rebuilds."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """Rotary positions as a table: x -> x·cos + turn(x)·sin on the first `rotary_dim` coordinates."""

    cos: Float[Tensor, "pos rotary_dim"]
    sin: Float[Tensor, "pos rotary_dim"]
    adjacent: bool  # pairs (0,1),(2,3),… as in GPT-J; otherwise (i, i + rotary_dim/2) as in NeoX and Llama

    def __call__(self, x: Float[Tensor, "pos head d_head"], positions: Tensor) -> Float[Tensor, "pos head d_head"]:
        """Rotate row p of x by the position positions[p]."""
        size = self.cos.shape[-1]
        turning, rest = x[..., :size], x[..., size:]
        turned = torch.empty_like(turning)
        if self.adjacent:
            turned[..., ::2], turned[..., 1::2] = -turning[..., 1::2], turning[..., ::2]
        else:
            half = size // 2
            turned[..., :half], turned[..., half:] = -turning[..., half:], turning[..., :half]
        cos, sin = (t[positions].to(x)[:, None, :] for t in (self.cos, self.sin))
        return torch.cat([turning * cos + turned * sin, rest], dim=-1)

    def inverse(self, x: Float[Tensor, "pos head d_head"], positions: Tensor) -> Float[Tensor, "pos head d_head"]:
        """The transpose of the rotation: R_pᵀ applied to row p."""
        return Rotary(self.cos, -self.sin, self.adjacent)(x, positions)


@dataclass(frozen=True, eq=False)
class Heads:
    """One attention layer as linear maps; keys of grouped-query layers are repeated for each of their heads.

    Attributes:
        layer: block index.
        W_Q, W_K: [head d_model d_head], float64.
        b_Q, b_K: [head d_head], float64 (zeros where the model has none).
        divisor: what q·k is divided by.
        rotary: None without rotary positions.
        q_norm, k_norm: norms of queries and keys inside attention, where there are any (per head).
        causal: whether a query sees only the keys at or before it (False: all of them, as in BERT).
    """

    layer: int
    W_Q: Float[Tensor, "head d_model d_head"]
    b_Q: Float[Tensor, "head d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    b_K: Float[Tensor, "head d_head"]
    divisor: float
    rotary: Rotary | None
    q_norm: Site | None
    k_norm: Site | None
    causal: bool = True

    @property
    def n_heads(self) -> int:
        return int(self.W_Q.shape[0])

    def _make(self, y: Tensor, W: Tensor, b: Tensor, norm: Site | None, positions: Tensor) -> Tensor:
        made = torch.einsum("pd,hdk->phk", y.double(), W) + b
        if norm is not None:
            made = norm.affine(norm.normalize(made))
        return self.rotary(made, positions) if self.rotary is not None else made

    def keys(self, y: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos head d_head"]:
        """Keys as attention sees them (after any QK-norm and rotary), from norm outputs; float64."""
        return self._make(y, self.W_K, self.b_K, self.k_norm, torch.arange(len(y), device=y.device))

    def keys_at(
        self, y: Float[Tensor, "key d_model"], positions: Int[Tensor, " key"]
    ) -> Float[Tensor, "key head d_head"]:
        """The same for norm outputs that stand at some positions alone."""
        return self._make(y, self.W_K, self.b_K, self.k_norm, positions)

    def queries(self, y: Float[Tensor, "pos d_model"], *, rotate: bool = True) -> Float[Tensor, "pos head d_head"]:
        """Queries before the division by `divisor`; without rotary positions if not `rotate`. float64."""
        plain = self if rotate else replace(self, rotary=None)
        return plain._make(y, self.W_Q, self.b_Q, self.q_norm, torch.arange(len(y), device=y.device))

    def keys_ignore_mean(self, site: Site, dtype: torch.dtype) -> bool:
        """Whether W_K sends gain·1, what the norm `site` without projection adds to a vector, to nothing but rounding.

        Folding a norm centres the weights that read it: then keys are the same with projection and without. `dtype`:
        the model's format, whose rounding is meant.
        """
        gain = torch.ones(site.d, dtype=torch.float64) if site.gain is None else site.gain.double()
        shift = torch.einsum("d,hdk->hk", gain.to(self.W_K), self.W_K).norm()
        return bool(shift <= ignored_below(dtype) * gain.norm() * self.W_K.norm() / math.sqrt(site.d))

    def query_ellipsoid(
        self, site: Site, position: int
    ) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "head d_head axis"]] | None:
        """Center c and axes A of the scaled queries {c + A u, |u| ≤ 1} a head can make at `position`.

        What the norm can put out (`Site.reachable`), read by W_Q and b_Q, rotated to the position, over `divisor`; with
        a QK-norm, what that can put out (an upper bound). None for a norm that does not scale: queries are unbounded.
        """
        if self.q_norm is not None:
            found = self.q_norm.reachable()
            found = found and (found[0].expand(self.n_heads, -1), found[1].expand(self.n_heads, -1, -1))
        else:
            found = site.reachable(self.W_Q)
            found = found and (found[0] + self.b_Q.cpu(), found[1])
        if found is None:
            return None
        center, axes = found
        if self.rotary is not None:
            here = torch.full((axes.shape[-1],), position)
            table = Rotary(self.rotary.cos.cpu(), self.rotary.sin.cpu(), self.rotary.adjacent)
            turned = table(rearrange(axes, "head d_head wide -> wide head d_head"), here)
            axes = rearrange(turned, "wide head d_head -> head d_head wide")
            center = table(center[None], here[:1])[0]
        return center / self.divisor, _compact(axes / self.divisor)


def _compact(axes: Float[Tensor, "head d_head wide"]) -> Float[Tensor, "head d_head axis"]:
    """The same ellipsoids with at most d_head axes: A = U S Vᵀ, and V only turns the ball."""
    if axes.shape[-1] <= axes.shape[-2]:
        return axes
    left, values, _ = torch.linalg.svd(axes, full_matrices=False)
    compact: Tensor = left * values[..., None, :]
    return compact


def _weight(attn: Any, name: str, n_heads: int) -> Tensor:
    value = getattr(attn, name).detach().double()
    if value.shape[0] != n_heads:  # grouped queries on the bridge: one key head for several queries
        value = value.repeat_interleave(n_heads // value.shape[0], dim=0)
    return cast(Tensor, value)


def _bias(attn: Any, name: str, like: Tensor) -> Tensor:
    try:
        value = getattr(attn, name, None)
    except AttributeError:  # the bridge raises where the projection has no bias
        value = None
    if value is None:
        return torch.zeros(like.shape[0], like.shape[-1], dtype=torch.float64, device=like.device)
    value = value.detach().double()
    if value.shape[0] != like.shape[0]:
        value = value.repeat_interleave(like.shape[0] // value.shape[0], dim=0)
    return cast(Tensor, value)


def _divisors(attn: Any, d_head: int) -> Iterator[float]:
    own = getattr(attn, "attn_scale", None)
    if isinstance(own, int | float) and own > 0:
        yield float(own)
    scaling = getattr(getattr(attn, "original_component", None), "scaling", None)
    if isinstance(scaling, int | float) and scaling > 0:
        yield 1.0 / float(scaling)
    yield math.sqrt(d_head)
    yield 1.0


def _obstacle(attn: Any) -> str:
    """Which known form of scores, other than a scaled dot product, this layer declares; empty if none."""
    for cfg in (getattr(attn, "cfg", None), getattr(attn, "config", None)):
        cap = getattr(cfg, "attn_scores_soft_cap", None)
        if isinstance(cap, int | float) and cap > 0:
            return f"its scores have a soft cap of {cap:g}"
        if getattr(cfg, "positional_embedding_type", None) == "alibi":
            return "its scores have a bias that grows with distance (ALiBi)"
    return ""


def read_heads(
    layer: int,
    attn: nn.Module,
    qk_norms: dict[str, Site],
    norm_output: Float[Tensor, "pos d_model"],
    pattern: Float[Tensor, "head query key"],
    cos_sin: tuple[Tensor, Tensor] | None,
) -> Heads:
    """The key and query maps of one layer, checked on one prompt against the attention the model really paid.

    Args:
        layer: block index.
        attn: the attention module (W_Q, W_K [head d_model d_head]).
        qk_norms: the layer's norms inside attention, by what they read ("query", "key").
        norm_output: what attention read for the prompt.
        pattern: its attention pattern for the prompt.
        cos_sin: rotary tables seen in the pass (bridge), or None.

    Raises:
        UnsupportedAttentionError: the layer declares scores of another form (a soft cap, ALiBi: by name), or no known
            form gives that pattern.
    """
    module = cast(Any, attn)
    if obstacle := _obstacle(module):
        raise UnsupportedAttentionError(f"layer {layer}: {obstacle}, which head-space measures do not support")
    causal = not bool(pattern.triu(1).any())
    try:
        n_heads = int(module.W_Q.shape[0])
        W_Q, W_K = _weight(module, "W_Q", n_heads), _weight(module, "W_K", n_heads)
    except (AttributeError, TypeError) as error:
        raise UnsupportedAttentionError(f"layer {layer}: {type(attn).__name__} shows no W_Q and W_K") from error
    d_head = int(W_Q.shape[-1])
    adjacent = bool(getattr(getattr(module, "cfg", None), "rotary_adjacent_pairs", False))
    rotary = None
    if cos_sin is not None:
        rotary = Rotary(cos_sin[0], cos_sin[1], adjacent)
    elif isinstance(getattr(module, "rotary_cos", None), Tensor):
        rotary = Rotary(module.rotary_cos.detach(), module.rotary_sin.detach(), adjacent)
    worst = math.inf
    for divisor in dict.fromkeys(_divisors(module, d_head)):
        heads = Heads(
            layer,
            W_Q,
            _bias(module, "b_Q", W_Q),
            W_K,
            _bias(module, "b_K", W_K),
            divisor,
            rotary,
            qk_norms.get("query"),
            qk_norms.get("key"),
            causal,
        )
        difference = _disagreement(heads, norm_output, pattern)
        worst = min(worst, difference)
        if difference <= PATTERN_TOLERANCE.get(pattern.dtype, PATTERN_TOLERANCE_HALF):
            return heads
    raise UnsupportedAttentionError(
        f"layer {layer}: the attention pattern of {type(attn).__name__} differs by {worst:.2g} from "
        "softmax(q·k / divisor): its scores have a form that head-space measures do not know"
    )


def _disagreement(
    heads: Heads, norm_output: Float[Tensor, "pos d_model"], pattern: Float[Tensor, "head query key"]
) -> float:
    """The largest difference between the attention that `heads` computes and the one paid, where both see."""
    q, k = heads.queries(norm_output), heads.keys(norm_output)
    worst = []  # (of tensors: a NaN must not get lost)
    for some in heads_at_once(pattern.shape):
        ours = attention_pattern(q[:, some], k[:, some], heads.divisor, causal=heads.causal)
        ours.mul_(pattern[some] > 0)  # a local window hides far keys
        ours.div_(ours.sum(-1, keepdim=True).clamp_min(1e-300))
        worst.append(ours.sub_(pattern[some]).abs_().max())
    return float(torch.stack(worst).max())


def heads_at_once(shape: Sequence[int]) -> Iterator[slice]:
    """Slices of the heads of a pattern [head query key] whose scores are few enough to be held in float64."""
    n_heads, queries, keys = shape
    step = max(1, _PAIRS // max(1, queries * keys))
    for first in range(0, n_heads, step):
        yield slice(first, min(first + step, n_heads))


def attention_pattern(
    q: Float[Tensor, "query head d_head"], k: Float[Tensor, "key head d_head"], divisor: float, *, causal: bool = True
) -> Float[Tensor, "head query key"]:
    """Softmax of q·k / divisor over the keys at or before each query, or over all keys."""
    return visible_softmax(torch.einsum("qhd,khd->hqk", q, k) / divisor, causal=causal)


def visible_softmax(scores: Float[Tensor, "head query key"], *, causal: bool = True) -> Float[Tensor, "head query key"]:
    """Softmax over the keys at or before each query (the last queries, where there are fewer), or over all keys."""
    if causal:
        queries, keys = scores.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - queries)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1)
