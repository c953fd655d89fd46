"""Which vectors that pass through a norm belong to position 0: attention sinks live there, so it is kept apart.

A norm is handed tensors, not positions. While `watching` lasts, hooks on the model and its blocks note where each
forward pass begins: at position 0, or behind a cache of earlier tokens (`generate`), or behind padding on the left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, blocks
from ln_probe.hooks.site import Site

_READ = ("hidden_states", "resid_pre", "input_ids", "inputs_embeds", "input", "x")
_CACHES = ("past_kv_cache_entry", "past_kv_cache", "past_key_values", "past_key_value", "layer_past")


class Positions:
    """Where position 0 is in the forward pass that is running; of a whole prompt, until `watching` says otherwise."""

    def __init__(self) -> None:
        self.offset = 0  # tokens that came in earlier passes
        self.shape: tuple[int, int] | None = None  # batch and positions of the pass
        self.padded: Tensor | None = None  # padding in front of each row of the batch

    def first(self, site: Site, x: Float[Tensor, "*batch d"]) -> Bool[Tensor, "*batch 1"]:
        """Which vectors of a norm's input belong to position 0.

        Inputs are [batch pos d], [batch pos head d], [batch head pos d] (a norm of queries or keys inside a bridge's
        attention) or flattened from those.
        """
        if x.ndim == 3:
            batch, length = x.shape[:2]
        elif self.shape is not None:
            batch, length = self.shape
        else:
            batch, length = (1, x.shape[0]) if x.ndim == 2 else x.shape[:2]
        start = torch.zeros(batch, dtype=torch.long) if self.padded is None else self.padded[:batch].cpu()
        mine = torch.arange(self.offset, self.offset + length)[None] == start[:, None]
        if x.ndim == 4 and is_heads_first(site, x, length):
            found = mine[:, None, :, None]
        elif x.ndim == 4:
            found = mine[:, :, None, None]
        elif x.ndim == 3:
            found = mine[:, :, None]
        else:
            rows = x.shape[0]
            found = mine.flatten().repeat_interleave(max(1, rows // max(1, mine.numel())))[:, None]
        return found.to(x.device).expand(*x.shape[:-1], 1)

    def _began(self, layer: int | None, values: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = (*values, *(named.get(n) for n in _READ))
        read = next((v for v in given if isinstance(v, Tensor) and v.ndim >= 2), None)
        if read is not None:
            self.shape = int(read.shape[0]), int(read.shape[1])
        if layer is None:  # the whole model: whatever an earlier pass left is over
            self.offset, self.padded = 0, None
        caches = [named[n] for n in _CACHES if named.get(n) is not None]
        if caches:
            self.offset = _length(caches[0], layer)
        elif layer is not None and "past_kv_cache_entry" in named:
            self.offset = 0
        mask = named.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.padded = (mask != 0).long().argmax(-1)


def is_heads_first(site: Site, x: Float[Tensor, "a b c d"], length: int) -> bool:
    """Whether a norm of queries or keys sees [batch head pos d_head], as inside a bridge's attention."""
    return site.reads in ("query", "key") and x.shape[2] == length


def _length(cache: Any, layer: int | None) -> int:
    """How many tokens a cache holds: TransformerLens's entry or list of entries, or Hugging Face's."""
    if isinstance(keys := getattr(cache, "past_keys", None), Tensor):
        return int(keys.shape[1])
    if callable(length := getattr(cache, "get_seq_length", None)):
        return int(length() if layer is None else length(layer))
    try:
        return _length(cache[0], layer)
    except (TypeError, IndexError, KeyError):
        return 0


@contextmanager
def watching(model: HookedModel, positions: Positions) -> Iterator[None]:
    """While it lasts, `positions` knows where every forward pass begins."""

    def hook(layer: int | None) -> Any:
        def began(_m: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> None:
            positions._began(layer, values, named)

        return began

    whole = {id(m): m for m in (model, getattr(model, "original_model", None)) if isinstance(m, nn.Module)}
    with ExitStack() as stack:
        for module in whole.values():
            stack.callback(module.register_forward_pre_hook(hook(None), with_kwargs=True).remove)
        for layer, block in enumerate(blocks(model)):
            stack.callback(block.register_forward_pre_hook(hook(layer), with_kwargs=True).remove)
        try:
            yield
        finally:
            positions.__init__()  # type: ignore[misc]  # as if nothing had run
