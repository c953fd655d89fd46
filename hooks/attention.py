"""Keys, queries and scores of an attention layer as functions of the output of the norm it reads.

    k_j = R_j (W_Kᵀ y_j + b_K)        q_t = R_t (W_Qᵀ y_t + b_Q)        score = q·k / divisor + slope·j

with y the norm's output, R the rotary map of a position (the identity without) and a slope per head with ALiBi. All of
it is read from the model and checked: a layer whose own pattern is not the softmax of these scores over the keys that
the query sees is reported as unsupported, with the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.model import weight_of, with_float64
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.stream import AttentionInput, configs_of, visible_keys

# Largest difference between our pattern and the model's that rounding explains: float32 scores of size 100 carry 1e-5,
# a pattern entry a quarter of its score's error, 16-bit formats 1e-2. Parts of float64 models compute in float32.
PATTERN_TOLERANCE, PATTERN_TOLERANCE_HALF = 2e-4, 5e-2
# Below this no other form is tried. (Where scores are tiny, wrong divisors too come near: then the nearest counts.)
CLEARLY = {torch.float64: 1e-6, torch.float32: 1e-5}
_PAIRS = 1_000_000  # query-key pairs whose scores are in memory at once: 8 MB an array in float64


Form = tuple[float, Float[Tensor, " head"] | None]  # what q·k is divided by, and ALiBi's slopes


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
        turning, rest = x[..., : self.cos.shape[-1]], x[..., self.cos.shape[-1] :]
        cos, sin = (t[positions].to(x)[:, None, :] for t in (self.cos, self.sin))
        if self.adjacent:
            turned = torch.stack([-turning[..., 1::2], turning[..., ::2]], dim=-1).flatten(-2)
        else:
            first, second = turning.chunk(2, dim=-1)
            turned = torch.cat([-second, first], dim=-1)
        return torch.cat([turning * cos + turned * sin, rest], dim=-1)

    def cpu(self) -> Rotary:
        """Return the same table on the CPU."""
        return Rotary(self.cos.cpu(), self.sin.cpu(), self.adjacent)

    def inverse(self, x: Float[Tensor, "pos head d_head"], positions: Tensor) -> Float[Tensor, "pos head d_head"]:
        """Apply the transpose of the rotation, R_pᵀ, to row p."""
        return Rotary(self.cos, -self.sin, self.adjacent)(x, positions)


@dataclass(frozen=True, eq=False)
class Heads:
    """One attention layer as linear maps; keys of grouped-query layers are repeated for each of their heads.

    Attributes:
        layer: block index.
        W_Q, W_K, b_Q, b_K: in float64; biases are zeros where the model has none.
        divisor: what q·k is divided by.
        rotary: None without rotary positions.
        q_norm, k_norm: norms of queries and keys inside attention, where there are any.
        causal: whether a query sees only the keys at or before it.
        window: how many keys a query sees at most, its own included; None: all (of those that `causal` leaves).
        slopes: ALiBi's, in nats a position: slope·(key's position) is added to a score. None without ALiBi.
        soft_cap: what scores are squashed to before the softmax, cap·tanh(score / cap); 0: they are not.
        sinks: a score of each head that takes its share of the softmax and is of no key; None without.
        known: what was computed of these weights, by name, for prompts to share.
    """

    layer: int
    W_Q: Float[Tensor, "head d_model d_head"]
    b_Q: Float[Tensor, "head d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    b_K: Float[Tensor, "head d_head"]
    divisor: float
    rotary: Rotary | None
    q_norm: Norm | None
    k_norm: Norm | None
    causal: bool = True
    window: int | None = None
    slopes: Float[Tensor, " head"] | None = None
    soft_cap: float = 0.0
    sinks: Float[Tensor, " head"] | None = None
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def n_heads(self) -> int:
        return int(self.W_Q.shape[0])

    def bias(self, keys: int) -> Float[Tensor, "head key"] | None:
        """Return what is added to the scores of each key, in nats, but for what all keys share; None: nothing."""
        if self.slopes is None:
            return None
        return self.slopes[:, None] * torch.arange(keys, dtype=torch.float64, device=self.slopes.device)

    def pattern(
        self, q: Float[Tensor, "query head d_head"], k: Float[Tensor, "key head d_head"], some: slice = slice(None)
    ) -> Float[Tensor, "some query key"]:
        """Return the attention of queries to keys in some of the heads: q·k over `divisor`, plus ALiBi, then the soft
        cap, then the softmax over the keys that are seen and the sinks."""
        scores = torch.einsum("qhd,khd->hqk", q[:, some], k[:, some]) / self.divisor
        if (bias := self.bias(len(k))) is not None:
            scores = scores + bias[some, None]
        if self.soft_cap:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        visible = visible_keys(*scores.shape[1:], causal=self.causal, window=self.window, device=scores.device)
        scores = scores.masked_fill(~visible, -math.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        of_sinks = self.sinks[some, None, None].to(scores).expand(-1, len(q), 1)
        return torch.cat([scores, of_sinks], -1).softmax(-1)[..., :-1]

    def keys(self, y: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos head d_head"]:
        """Return keys as attention sees them (after any QK-norm and rotary), from norm outputs; float64."""
        return _projected(y, self.W_K, self.b_K, self.k_norm, self.rotary)

    def queries(self, y: Float[Tensor, "pos d_model"], *, rotate: bool = True) -> Float[Tensor, "pos head d_head"]:
        """Return queries before the division by `divisor`, likewise; without rotary positions if not `rotate`."""
        return _projected(y, self.W_Q, self.b_Q, self.q_norm, self.rotary if rotate else None)


def _projected(y: Tensor, W: Tensor, b: Tensor, norm: Norm | None, rotary: Rotary | None) -> Tensor:
    values = torch.einsum("pd,hdk->phk", y.double(), W) + b
    if norm is not None:
        values = _normed(norm, values)
    return values if rotary is None else rotary(values, torch.arange(len(y), device=y.device))


def _normed(norm: Norm, values: Float[Tensor, "pos head d_head"]) -> Float[Tensor, "pos head d_head"]:
    """Return queries or keys behind their norm: of each head, or (OLMo 2) of all heads together, repeated ones once."""
    heads, d_head = values.shape[1:]
    if norm.d == d_head:
        return norm.affine(norm.normalize(values))
    own = norm.d // d_head
    if norm.projects or own * d_head != norm.d or own == 0 or heads % own:
        raise UnsupportedAttentionError(
            f"{norm.name} normalizes vectors of length {norm.d}, neither one head's nor all heads' ({heads} × {d_head})"
        )
    once = values[:, :: heads // own].reshape(len(values), -1)
    normed = norm.affine(norm.normalize(once)).view(len(values), own, d_head)
    return normed.repeat_interleave(heads // own, dim=1)


def _per_query_head(weight: Tensor, n_heads: int) -> Tensor:
    """Return a weight in float64, that of a shared key head once for each of its query heads."""
    weight = with_float64(weight).double()
    return weight if len(weight) == n_heads else weight.repeat_interleave(n_heads // len(weight), dim=0)


def _divisors(attn: Any, d_head: int) -> list[float]:
    """Return what q·k may be divided by: as the layer says, or its original, or as usual."""
    own = getattr(attn, "attn_scale", None)
    scaling = getattr(getattr(attn, "original_component", None), "scaling", None)
    declared = [float(own)] if isinstance(own, int | float) and own > 0 else []
    declared += [1.0 / float(scaling)] if isinstance(scaling, int | float) and scaling > 0 else []
    return [*declared, math.sqrt(d_head), 1.0]


def _has_alibi(attn: Any) -> bool:
    return any(getattr(config, "positional_embedding_type", None) == "alibi" for config in configs_of(attn))


def _soft_cap(attn: Any) -> float:
    caps = (getattr(config, "attn_scores_soft_cap", None) for config in configs_of(attn))
    return next((float(cap) for cap in caps if isinstance(cap, int | float) and cap > 0), 0.0)


def _sinks(attn: Any) -> Float[Tensor, " head"] | None:
    """Return the sinks of a layer (GPT-OSS): a score for each head that is of no key."""
    sinks = getattr(getattr(attn, "original_component", None), "sinks", None)
    return with_float64(sinks.detach()).double() if isinstance(sinks, Tensor) and sinks.ndim == 1 else None


def _slopes(attn: Any, n_heads: int, divisor: float) -> Iterator[Tensor | None]:
    """Yield the slopes that a layer with ALiBi may have; None alone without."""
    lower = 2 ** math.floor(math.log2(n_heads))
    forms = [_geometric(n_heads)]
    if n_heads > lower:  # BLOOM's are those of the power of two below and some of the next one's; MPT's all of the next
        some, others = _geometric(2 * lower)[::2], _geometric(2 * lower)[1::2]
        forms += [torch.cat([_geometric(lower), some])[:n_heads], torch.cat([others, some])[:n_heads]]
    for form in forms if _has_alibi(attn) else ():
        # Falcon divides the bias with the scores; its eager attention in transformers 5 adds it twice.
        yield from (form, form / divisor, 2 * form / divisor)
    yield None  # without ALiBi, or where only the config has it and not the model


def _geometric(n_heads: int) -> Float[Tensor, " head"]:
    """Return 2^(-8h/n), h = 1 … n (Press, Smith & Lewis 2022; theirs for powers of two)."""
    return 2.0 ** (-8.0 * torch.arange(1, n_heads + 1, dtype=torch.float64) / n_heads)


def _rotary(attn: Any, cos_sin: tuple[Tensor, Tensor] | None) -> Rotary | None:
    """Return rotary positions as the pass showed them, or as the layer has them."""
    adjacent = bool(getattr(getattr(attn, "cfg", None), "rotary_adjacent_pairs", False))
    if cos_sin is not None:
        if _sinks(attn) is not None:  # GPT-OSS keeps a table for one half of the coordinates
            cos_sin = (torch.cat([cos_sin[0]] * 2, -1), torch.cat([cos_sin[1]] * 2, -1))
        return Rotary(cos_sin[0], cos_sin[1], adjacent)
    if isinstance(getattr(attn, "rotary_cos", None), Tensor):
        cos, sin = (with_float64(table.detach()) for table in (attn.rotary_cos, attn.rotary_sin))
        return Rotary(cos, sin, adjacent)
    table = getattr(getattr(attn, "original_component", None), "embed_positions", None)
    if isinstance(table, Tensor) and table.ndim == 2 and table.shape[-1] % 2 == 0:  # sines, then cosines
        sin, cos = (half.repeat_interleave(2, dim=-1) for half in with_float64(table.detach()).chunk(2, dim=-1))
        return Rotary(cos, sin, adjacent=True)
    return None


def read_heads(seen: AttentionInput, norms: Sequence[Norm], known: Form | None = None, *, bent: bool = False) -> Heads:
    """Return the key and query maps of one layer, checked on one prompt against the model's own attention.

    Args:
        seen: the layer during the prompt.
        norms: the model's norms, for those inside attention.
        known: the form of the layer's scores, where it was checked on this prompt before: it is not checked again.
        bent: whether scores may be squashed (a soft cap), or the softmax have a sink: q·k / divisor is then not what
            the softmax sees, or not all of it.

    Raises:
        UnsupportedAttentionError: the layer declares scores of a form that is not supported (a soft cap, a sink, ALiBi
            in both directions: by name), or no known form gives that pattern.
    """
    layer, module = seen.layer, cast(Any, seen.attn)
    cap, sinks = _soft_cap(module), _sinks(module)
    forms = {
        f"a soft cap of {cap:g}": bool(cap) and not bent,
        "a sink, a score of no key": sinks is not None and not bent,
        "ALiBi without a causal mask": _has_alibi(module) and not seen.causal,
    }
    if form := next((form for form, present in forms.items() if present), ""):
        raise UnsupportedAttentionError(f"layer {layer}: its scores have {form}, which head-space measures do not know")
    shown = {name: weight_of(module, name) for name in ("W_Q", "b_Q", "W_K", "b_K")}
    W_Q, W_K = shown["W_Q"], shown["W_K"]
    if W_Q is None or W_K is None:
        raise UnsupportedAttentionError(f"layer {layer}: {type(module).__name__} shows no W_Q and W_K")
    n_heads, d_head = len(W_Q), int(W_Q.shape[-1])
    no_bias = W_Q.new_zeros(n_heads, d_head)
    weights: dict[str, Any] = {name: _per_query_head(no_bias if w is None else w, n_heads) for name, w in shown.items()}
    inside = {norm.reads: norm for norm in norms if norm.layer == layer}
    plain = Heads(
        layer,
        **weights,
        divisor=1.0,
        rotary=_rotary(module, seen.cos_sin),
        q_norm=inside.get("query"),
        k_norm=inside.get("key"),
        causal=seen.causal,
        window=seen.window,
        soft_cap=cap,
        sinks=sinks,
    )
    if known is not None:
        return replace(plain, divisor=known[0], slopes=known[1])
    nearest, worst = plain, math.inf
    for divisor in dict.fromkeys(_divisors(module, d_head)):
        for slopes in _slopes(module, n_heads, divisor):
            heads = replace(plain, divisor=divisor, slopes=None if slopes is None else slopes.to(plain.W_Q.device))
            difference = _disagreement(heads, seen)
            if difference < worst:
                nearest, worst = heads, difference
        if worst <= CLEARLY.get(seen.pattern.dtype, 0.0):
            break
    if worst <= (PATTERN_TOLERANCE if seen.pattern.dtype in CLEARLY else PATTERN_TOLERANCE_HALF):
        return nearest
    raise UnsupportedAttentionError(
        f"layer {layer}: the attention pattern of {type(module).__name__} differs by {worst:.2g} from "
        "softmax(q·k / divisor): its scores have a form that head-space measures do not know"
    )


def _disagreement(heads: Heads, seen: AttentionInput) -> float:
    """Return the largest difference between the attention that `heads` computes and the one paid."""
    q, k, pattern = heads.queries(seen.y), heads.keys(seen.y), seen.pattern
    worst = [heads.pattern(q, k, some).sub_(pattern[some]).abs_().max() for some in heads_at_once(pattern.shape)]
    return float(torch.stack(worst).max())  # (of tensors: a NaN must not get lost)


def heads_at_once(shape: Sequence[int]) -> Iterator[slice]:
    """Yield slices of the heads of a pattern [head query key] whose scores are few enough for float64."""
    n_heads, queries, keys = shape
    step = max(1, _PAIRS // max(1, queries * keys))
    for first in range(0, n_heads, step):
        yield slice(first, min(first + step, n_heads))
