"""One head alone reads its norm differently: its queries, keys and values from the changed output, the others' not.

Attention is run twice: once on the changed output, of which only what each head hands on (z) is kept, and once as it
is, where the chosen heads' z is replaced by the kept one. So every head's own rotary map, mask, grouped keys and
QK-norm are the model's, in every TransformerLens world: a head's z depends on nothing of the other heads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.edits import INPUTS, Change, Edit, InterventionError, LostEditError
from ln_probe.hooks.model import HookedModel, blocks
from ln_probe.hooks.positions import Positions
from ln_probe.hooks.site import Site

# What attention is handed to keep keys and values in, by the name of its argument: HookedTransformer's, Hugging Face's.
_CACHES = ("past_kv_cache_entry", "past_key_values", "past_key_value", "layer_past")


def attention_of(model: HookedModel, layer: int) -> nn.Module:
    """The attention module of a block.

    Raises:
        InterventionError: it has none.
    """
    found = getattr(blocks(model)[layer], "attn", None)
    if not isinstance(found, nn.Module):
        raise InterventionError(f"block {layer} has no attention whose heads could be edited")
    return found


def z_point(model: HookedModel, layer: int) -> nn.Module:
    """The hook point that shows what the heads of a block hand on, [batch pos head d_head] or flat over heads.

    Raises:
        InterventionError: there is none.
    """
    found = model.hook_dict.get(f"blocks.{layer}.attn.hook_z")
    if found is None:
        raise InterventionError(f"block {layer} has no hook_z, so its heads cannot be edited one by one")
    return found  # type: ignore[no-any-return]


def head_count(model: HookedModel, layer: int) -> int:
    """Query heads of a block."""
    weights = getattr(getattr(blocks(model)[layer], "attn", None), "W_Q", None)
    return int(weights.shape[0]) if isinstance(weights, Tensor) else int(model.cfg.n_heads)


def by_head(z: Float[Tensor, "batch pos *heads"], heads: int) -> Float[Tensor, "batch pos head d_head"]:
    """What a hook_z shows with an axis for the heads: bridges show it flat."""
    return z if z.ndim == 4 else z.unflatten(-1, (heads, -1))


def z_instead(
    model: HookedModel,
    layer: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    instead: Callable[[Tensor], Tensor | None],
) -> Tensor | None:
    """What the heads of a block would hand on if its attention, called with these arguments, read something else.

    `instead` gives what to read for a tensor (None: itself). Hook points inside attention see this call too, before
    the model's own. None if there is nothing to change.

    Raises:
        InterventionError: attention goes on from keys and values that it keeps in a cache.
        LostEditError: only some of queries, keys and values are made of something that `instead` knows.
    """
    put = 0

    def changed(value: Any) -> Any:
        nonlocal put
        found = instead(value) if isinstance(value, Tensor) else None
        put += found is not None
        return value if found is None else found

    own = tuple(changed(a) for a in args)
    named = {k: changed(v) for k, v in kwargs.items()}
    if not put:
        return None
    left = [p for p, name in INPUTS.items() if isinstance(kwargs.get(name), Tensor) and named[name] is kwargs[name]]
    if left:
        raise LostEditError(
            f"single heads of block {layer} cannot be edited: the norm's output is not what its {' and '.join(left)} "
            "are made of (positional_embedding_type='shortformer' adds position embeddings to it). Edit the whole norm "
            "with heads=None"
        )
    for name in _CACHES:
        if named.get(name) is not None:
            if _kept(named[name], layer):
                raise InterventionError(
                    "single heads cannot be edited while attention goes on from keys it has kept: switch the cache off "
                    "(use_past_kv_cache=False)"
                )
            named[name] = None  # what this call computes must not be kept
    attn, point, seen = attention_of(model, layer), z_point(model, layer), list[Tensor]()
    handle = point.register_forward_hook(lambda _m, _a, z: seen.append(z), prepend=True)  # before edits of it
    try:
        attn.forward(*own, **named)
    finally:
        handle.remove()
    return seen[0] if seen else None


def _kept(cache: Any, layer: int) -> bool:
    """Whether a cache holds keys for this layer already."""
    keys = getattr(cache, "past_keys", None)
    if isinstance(keys, Tensor):  # HookedTransformer's
        return keys.shape[1] > 0
    layers = getattr(cache, "layers", ())  # Hugging Face's
    held = getattr(layers[layer], "keys", None) if layer < len(layers) else None
    return isinstance(held, Tensor) and held.numel() > 0


class HeadEdit(Edit):
    """Some heads of the attention that reads a norm see a changed output of it.

    Attributes:
        heads: those, by block.
        waiting: (input, output) of the norm, until attention has read it.
    """

    def __init__(
        self,
        site: Site,
        change: Change,
        label: str,
        positions: Positions | None = None,
        *,
        heads: Mapping[int, Collection[int]],
    ) -> None:
        super().__init__(site, change, label, positions)
        self.heads = {layer: sorted(some) for layer, some in heads.items()}
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self._instead: dict[int, Tensor] = {}
        self._inside = False

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if not self.suspended and not self._inside:
            self.calls += 1
            x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
            self.waiting.append((x, output))

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        super().install(model, stack)
        for layer in self.heads:
            attn, point = attention_of(model, layer), z_point(model, layer)
            reading, replacing = self._reading(model, layer), self._replacing(layer, head_count(model, layer))
            stack.callback(attn.register_forward_pre_hook(reading, with_kwargs=True).remove)
            # First of the hooks there: what others see of z is the edited one.
            stack.callback(point.register_forward_hook(replacing, prepend=True).remove)

    def _reading(self, model: HookedModel, layer: int) -> Callable[..., None]:
        def hook(_m: nn.Module, args: Any, kwargs: Any) -> None:
            if self.suspended:
                return
            self._inside = True
            try:
                z = z_instead(model, layer, args, kwargs, self._read_instead())
            finally:
                self._inside = False
            if z is None:
                raise LostEditError(
                    f"{self.site.name}: the edit of single heads was lost, because the attention of block {layer} did "
                    "not read this norm's output as it is (split or repeated per head on the way?): switch "
                    "use_split_qkv_input and use_attn_in off, or edit the whole norm with heads=None"
                )
            self._instead[layer] = z
            if layer == max(self.heads):
                self.waiting.clear()

        return hook

    def _read_instead(self) -> Callable[[Tensor], Tensor | None]:
        made: dict[int, Tensor] = {}  # HookedTransformer calls the norm for queries, keys and values each

        def instead(read: Tensor) -> Tensor | None:
            for i, (x, y) in reversed(list(enumerate(self.waiting))):
                if read.shape == y.shape and torch.equal(read, y):
                    if i not in made:
                        made[i] = self.change(x, y)
                    return made[i]
            return None

        return instead

    def _replacing(self, layer: int, count: int) -> Callable[..., Tensor | None]:
        def hook(_m: nn.Module, _args: Any, z: Tensor) -> Tensor | None:
            if self._inside or layer not in self._instead:
                return None
            out = z.clone(memory_format=torch.contiguous_format)
            instead = by_head(self._instead.pop(layer), count)
            for head in self.heads[layer]:
                by_head(out, count)[:, :, head] = instead[:, :, head]
            return out

        return hook
