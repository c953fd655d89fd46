"""Which keys a query sees: those at or before it, all of them, or only the last few (a local or sliding window).

A window is what the layer itself declares, and counts only where its own pattern bears it out: all weight further back
is exactly zero. (A weight of zero alone shows no mask: in float32 a key 104 nats below another gets none either.)
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

# How attention layers call themselves when they see every key before a query (HookedTransformer and GPT-Neo; the layer
# types of newer Hugging Face configs).
_GLOBAL = ("global", "full_attention")


def visible_keys(
    queries: int, keys: int, *, causal: bool = True, window: int | None = None, device: torch.device | None = None
) -> Bool[Tensor, "query key"]:
    """What each of the last `queries` of `keys` positions sees.

    Args:
        queries, keys: how many.
        causal: only keys at or before the query.
        window: of these only the last `window`, the query's own among them; None: all.
        device: where the mask goes.
    """
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        every = every.tril(keys - queries)
    return every if window is None else every.triu(keys - queries - window + 1)


_ROWS = 64  # queries looked at together


def is_causal(pattern: Float[Tensor, "head query key"]) -> bool:
    """Whether no query pays attention to a later key (as many queries as keys).

    The largest weight above the diagonal, a band of queries at a time: a tenth of the time of `triu(1).any()`.
    """
    length = pattern.shape[-1]
    for first in range(0, length, _ROWS):
        last = min(first + _ROWS, length)
        band = pattern[:, first:last]
        above = [band[..., first:last].triu(1), band[..., last:]]
        if not all(float(part.amax()) <= 0.0 for part in above if part.numel()):  # (NaN is paid, too)
            return False
    return True


def window_of(attn: nn.Module, pattern: Float[Tensor, "head query key"]) -> int | None:
    """How many keys a query of this layer sees at most, itself included; None if every key before it.

    Args:
        attn: the attention module.
        pattern: attention paid on some prompt. On prompts that fit into a window there is none to speak of.
    """
    length = pattern.shape[-1]
    for window in _declared(attn):
        if window >= length:
            return None
        if not bool(pattern.tril(-window).any()):
            return window
    return None


def _declared(attn: Any) -> list[int]:
    """Windows that a layer may have, by its own word first."""
    owners = [o for o in (getattr(attn, "original_component", None), attn) if o is not None]
    for owner in owners:
        kinds = (getattr(owner, name, None) for name in ("attn_type", "attention_type", "layer_type"))
        if any(kind in _GLOBAL for kind in kinds if isinstance(kind, str)):
            return []
        if getattr(owner, "is_sliding", None) is False:
            return []
    configs = [c for o in owners for c in (getattr(o, "cfg", None), getattr(o, "config", None)) if c is not None]
    found = [getattr(o, name, None) for o in (*owners, *configs) for name in ("sliding_window", "window_size")]
    return sorted({w for w in found if isinstance(w, int) and not isinstance(w, bool) and w > 0})
