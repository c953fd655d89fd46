"""Edits that single heads of attention see.

Under `HeadEdit` the queries, keys and values of the chosen heads are made of the edited norm, those of the other heads
of the norm's own output. `z_instead` computes the outputs of all heads of a block whose attention reads something else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.edits import (
    CACHES,
    HOOKS,
    INPUTS,
    Edit,
    InterventionError,
    LostEditError,
    cached_tokens,
    silent,
)
from ln_probe.hooks.model import HookedModel, attentions, blocks, child_of


def attention_of(model: HookedModel, layer: int) -> nn.Module:
    """The attention module of a block.

    Raises:
        InterventionError: it has none.
    """
    if layer not in (there := attentions(model)):
        raise InterventionError(f"block {layer} has no attention whose heads could be edited")
    return there[layer]


def z_point(model: HookedModel, layer: int) -> nn.Module:
    """The hook point of the heads' outputs in a block, [batch pos head d_head] or flat over heads.

    Raises:
        InterventionError: there is none.
    """
    point = _points(model, layer, "z").get("z")
    if point is None:
        raise InterventionError(f"block {layer} has no hook_z, so its heads cannot be edited one by one")
    return point


def head_count(model: HookedModel, layer: int) -> int:
    """Query heads of a block."""
    weights = getattr(getattr(blocks(model)[layer], "attn", None), "W_Q", None)
    return int(weights.shape[0]) if isinstance(weights, Tensor) else int(model.cfg.n_heads)


def _points(model: HookedModel, layer: int, letters: str) -> dict[str, nn.Module]:
    """The hook points of queries, keys, values and z of a block, as far as it has them."""
    attn = attentions(model).get(layer)
    named = {letter: child_of(attn, f"hook_{letter}") for letter in letters}
    return {letter: point for letter, point in named.items() if point is not None}


def by_head(z: Float[Tensor, "batch pos *heads"], heads: int) -> Float[Tensor, "batch pos head d_head"]:
    """What a hook point of heads shows with an axis for them: bridges show it flat."""
    return z if z.ndim == 4 else z.unflatten(-1, (heads, -1))


def z_instead(
    model: HookedModel,
    layer: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    instead: Callable[[Tensor], Tensor | None],
    *,
    hooks: bool = True,
) -> dict[str, Tensor] | None:
    """The heads' outputs (z) of a block if its attention, called with these arguments, read something else.

    `instead` gives what to read for a tensor (None: itself). With `hooks`, hook points inside attention see this call
    too, before the model's own. None if there is nothing to change. Beside `z` there are `q`, `k` and `v`, where the
    block has their hook points, all before any hooks.

    Raises:
        InterventionError: attention continues from keys and values in a cache.
        LostEditError: only some of queries, keys and values are made of something that `instead` knows.
    """

    def changed(value: Any) -> Any:
        found = instead(value) if isinstance(value, Tensor) else None
        return value if found is None else found

    own = tuple(changed(a) for a in args)
    named = {k: changed(v) for k, v in kwargs.items()}
    if all(new is old for new, old in zip((*own, *named.values()), (*args, *kwargs.values()), strict=True)):
        return None
    left = [p for p, name in INPUTS.items() if isinstance(kwargs.get(name), Tensor) and named[name] is kwargs[name]]
    if left:
        raise LostEditError(
            f"single heads of block {layer} cannot be edited: the norm's output is not what its {' and '.join(left)} "
            "are made of (positional_embedding_type='shortformer' adds position embeddings to it). Edit the whole norm "
            "with heads=None"
        )
    for name in CACHES:
        if named.get(name) is not None:
            if cached_tokens(named[name], layer):
                raise InterventionError(
                    "single heads cannot be edited while attention goes on from keys it has kept: switch the cache off "
                    "(use_past_kv_cache=False)"
                )
            named[name] = None  # what this call computes must not be kept
    attn, seen = attention_of(model, layer), dict[str, Tensor]()
    z_point(model, layer)
    with ExitStack() as stack:
        if not hooks:
            stack.enter_context(silent(attn))
        for letter, point in _points(model, layer, "qkvz").items():
            keep = partial(_keep, seen, letter)
            stack.callback(point.register_forward_hook(keep, prepend=True).remove)  # before edits of it
        attn.forward(*own, **named)
    return seen if "z" in seen else None


def _keep(seen: dict[str, Tensor], name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
    seen.setdefault(name, output)


class HeadEdit(Edit):
    """An edit that some heads of the attention that reads the norm see alone.

    Args:
        by_site: the heads, by the norm's name and block.
        edit: what they see.

    Attributes:
        heads: those of this norm, by block.
        waiting: (input, output, output without hooks) of the norm, until attention has read it.
    """

    whole = False

    def __init__(self, by_site: Mapping[str, Mapping[int, Collection[int]]], edit: Edit) -> None:
        super().__init__(edit.site, edit.change, edit.label, edit.positions)
        self.heads = {layer: sorted(some) for layer, some in by_site[edit.site.name].items()}
        self.waiting: list[tuple[Tensor, Tensor, Tensor]] = []
        self._inside = False
        self._handles: list[Any] = []

    def keep(self, x: Tensor, shown: Tensor, intact: Tensor) -> None:
        if not self._inside:
            self.waiting.append((x, shown, intact))

    def install(self, model: HookedModel | nn.Module, stack: ExitStack) -> None:
        super().install(model, stack)
        model = cast(HookedModel, model)
        stack.callback(self._release)
        for layer in self.heads:
            z_point(model, layer)  # raises where there is none
            reading = partial(self._reading, model, layer)
            stack.callback(attention_of(model, layer).register_forward_pre_hook(reading, with_kwargs=True).remove)

    def _reading(self, model: HookedModel, layer: int, attn: nn.Module, args: Any, kwargs: Any) -> None:
        """A pre-hook of attention: compute what its edited heads put out, or are made of."""
        if self.suspended:
            return
        self._release()
        points = _points(model, layer, "qkvz")
        before = [p for p in attn.modules() if hasattr(p, "fwd_hooks") and p is not points["z"]]
        hooked = any(getattr(p, store) for p in before for store in HOOKS)
        self._inside = True
        try:
            split = len(points) == 4 and self._separable(model, layer)
            seen = z_instead(model, layer, args, kwargs, partial(self._changed, {}), hooks=hooked and not split)
        finally:
            self._inside = False
        if seen is None:
            raise LostEditError(
                f"{self.site.name}: the edit of single heads was lost, because the attention of block {layer} did "
                "not read this norm's output as it is (split or repeated per head on the way?): switch "
                "use_split_qkv_input and use_attn_in off, or edit the whole norm with heads=None"
            )
        # What hooks see of queries, keys and values, and change, is what z is made of. Ours come first: others see the
        # edited values.
        for letter in "qkv" if hooked and split else "z":
            combining = partial(self._combined, model, layer, letter, seen[letter])
            self._handles.append(points[letter].register_forward_hook(combining, prepend=True))
        self._handles.append(attn.register_forward_hook(self._release))
        if layer == max(self.heads):
            self.waiting.clear()

    def _release(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _separable(self, model: HookedModel, layer: int) -> bool:
        """Whether every key and value belongs to edited heads alone or to others alone (grouped queries share them)."""
        count = head_count(model, layer)
        shared = int(getattr(model.cfg, "n_key_value_heads", None) or count)
        group = max(1, count // max(1, shared))
        return all(sum(head // group == number for head in self.heads[layer]) in (0, group) for number in range(shared))

    def _combined(
        self, model: HookedModel, layer: int, letter: str, instead: Tensor, _m: nn.Module, _args: Any, own: Tensor
    ) -> Tensor:
        """Queries, keys, values or z: those of edited heads from the edited norm, the others the model's own."""
        if instead.shape != own.shape:
            raise LostEditError(
                f"{self.site.name}: the edit of single heads was lost, because block {layer} computes its queries, "
                "keys and values in another shape with hooks than without: edit the whole norm with heads=None"
            )
        out, count = own.clone(memory_format=torch.contiguous_format), head_count(model, layer)
        heads = count if letter == "z" else own[0, 0].numel() // int(model.cfg.d_head)
        mine, other = by_head(out, heads), by_head(instead, heads)
        group = count // heads
        for head in sorted({head // group for head in self.heads[layer]}):
            mine[:, :, head] = other[:, :, head]
        return out

    def _changed(self, made: dict[int, Tensor], read: Tensor) -> Tensor | None:
        """The changed output for one of the norm's; `made`: by its number (HookedTransformer calls it for queries,
        keys and values each)."""
        for i, (x, shown, intact) in reversed(list(enumerate(self.waiting))):
            if read.shape == shown.shape and torch.equal(read, shown):
                if i not in made:
                    made[i] = self.change(x, intact)
                return made[i]
        return None
