"""Edit norms with torch forward hooks that replace a norm's output.

In-place edits of `hook_scale` and `hook_normalized` are lost on a bridge whose norms call the original module; a
forward hook on the norm's module works in every model class. `PartEdit` replaces what one projection of attention
(queries, keys or values) reads. `HeadEdit` changes what single heads read: attention runs once on the changed output,
of which only these heads' outputs (z) are kept, and once on the norm's own output, where the kept z is put in.
`LinearEdit` holds sigma, so that the norm is linear in its input and gradients are Jᵀg = P(gain·g) / sigma.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, at_least_float32, attentions, blocks, hooks_on, tensors_in
from ln_probe.hooks.norm import Site, is_heads_first

_READ = ("hidden_states", "resid_pre", "input_ids", "inputs_embeds", "input", "x")
# What attention is handed to keep keys and values in, by the name of its argument: HookedTransformer's, Hugging Face's.
_CACHES = ("past_kv_cache_entry", "past_kv_cache", "past_key_values", "past_key_value", "layer_past")


class Positions:
    """Which vectors that pass through a norm belong to position 0: attention sinks live there, so it is kept apart.

    A norm is handed tensors, not positions. While `watch` lasts, hooks on the model and its blocks note where each
    forward pass begins: at position 0, behind a cache of earlier tokens (`generate`), or behind padding on the left.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
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
        first = torch.arange(self.offset, self.offset + length)[None] == start[:, None]
        if x.ndim == 4:
            first = first[:, None, :, None] if is_heads_first(site, x, length) else first[:, :, None, None]
        elif x.ndim == 3:
            first = first[:, :, None]
        else:
            first = first.flatten().repeat_interleave(max(1, x.shape[0] // max(1, first.numel())))[:, None]
        return first.to(x.device).expand(*x.shape[:-1], 1)

    @contextmanager
    def watch(self, model: HookedModel) -> Iterator[None]:
        """While it lasts, note where every forward pass begins."""
        whole = {id(m): m for m in (model, getattr(model, "original_model", None)) if isinstance(m, nn.Module)}
        at = [(module, None) for module in whole.values()] + [(b, layer) for layer, b in enumerate(blocks(model))]
        with hooks_on(before=[(module, partial(self._begin, layer)) for module, layer in at]):
            try:
                yield
            finally:
                self._reset()

    def _begin(self, layer: int | None, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *(kwargs.get(n) for n in _READ))
        read = next((v for v in given if isinstance(v, Tensor) and v.ndim >= 2), None)
        if read is not None:
            self.shape = int(read.shape[0]), int(read.shape[1])
        if layer is None:  # the whole model: a new pass
            self.offset, self.padded = 0, None
        caches = [kwargs[n] for n in _CACHES if kwargs.get(n) is not None]
        if caches:
            self.offset = _cached_tokens(caches[0], layer)
        elif layer is not None and "past_kv_cache_entry" in kwargs:
            self.offset = 0
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.padded = (mask != 0).long().argmax(-1)


def _cached_tokens(cache: Any, layer: int | None) -> int:
    """How many tokens a cache holds: TransformerLens's entry or list of entries, or Hugging Face's."""
    if isinstance(keys := getattr(cache, "past_keys", None), Tensor):
        return int(keys.shape[1])
    if callable(length := getattr(cache, "get_seq_length", None)):
        return int(length() if layer is None else length(layer))
    try:
        return _cached_tokens(cache[0], layer)
    except (TypeError, IndexError, KeyError):
        return 0


# From a norm's input and output to another output.
Change = Callable[[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]], Float[Tensor, "*batch d"]]

# What reads a norm in attention, in the order in which HookedTransformer calls the norm for them; and how the inputs of
# an attention module and the projections of a bridge's are called.
PARTS = ("queries", "keys", "values")
INPUTS = {"queries": "query_input", "keys": "key_input", "values": "value_input"}
_PROJECTION = {"queries": "q", "keys": "k", "values": "v"}


class InterventionError(ValueError):
    """An intervention that cannot be made, or that would be made twice."""


class LostEditError(InterventionError):
    """An edit that does not reach what the model computes (names the site)."""


class Edit:
    """A forward hook that changes what one norm returns.

    Attributes:
        site: the norm.
        label: what it does, for messages.
        suspended: while True the norm is left alone.
        calls: how often the norm ran under it.
        positions: what `change` asks where position 0 is; None if it does not ask.
    """

    def __init__(self, site: Site, change: Change, label: str, positions: Positions | None = None) -> None:
        self.site, self.change, self.label, self.positions = site, change, label, positions
        self.suspended = False
        self.calls = 0

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        if self.suspended:
            return None
        self.calls += 1
        return self.change(tensors_in(args, kwargs)[0], output)

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        """Put the hooks on; `stack` takes them off."""
        stack.callback(self.site.module.register_forward_hook(self, with_kwargs=True).remove)

    def finish(self) -> None:
        """Raise LostEditError if what was computed was not read; called when the `with` block ends without an error."""


class PartEdit(Edit):
    """A forward hook that keeps the changed output for one projection of attention that reads this norm.

    Attributes:
        part: one of PARTS.
        waiting: outputs of the norm, and what the projection should read instead of each.
        reader: the attention module whose projection did; None until then.
    """

    def __init__(
        self, site: Site, change: Change, label: str, positions: Positions | None = None, *, part: str = "keys"
    ) -> None:
        super().__init__(site, change, label, positions)
        self.part = part
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.reader: nn.Module | None = None

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if not self.suspended:
            self.calls += 1
            self.waiting.append((output, self.change(tensors_in(args, kwargs)[0], output)))

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        super().install(model, stack)
        for attn in attentions(model).values():
            module, hook = self._reader(attn)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.callback(attn.register_forward_hook(self._check_read).remove)

    def _reader(self, attn: nn.Module) -> tuple[nn.Module, Callable[..., Any]]:
        """The module that projects this part in an attention layer, and the pre-hook that replaces what it reads.

        Raises:
            InterventionError: no module projects this part alone.
        """
        name, projection = INPUTS[self.part], dict(attn.named_children()).get(_PROJECTION[self.part])
        if name in inspect.signature(attn.forward).parameters:  # HookedTransformer and lab models

            def replace_input(_m: nn.Module, args: Any, kwargs: Any) -> Any:
                new = self._instead(attn, kwargs.get(name, args[0] if args else None))
                return None if new is None else (args, {**kwargs, name: new})

            return attn, replace_input
        if projection is not None:  # a bridge, whether its original projects them one by one or at once

            def replace_first(_m: nn.Module, args: Any, kwargs: Any) -> Any:
                new = self._instead(attn, args[0] if args else None)
                return None if new is None else ((new, *args[1:]), kwargs)

            return projection, replace_first
        raise InterventionError(
            f"{type(attn).__name__} has no projection of {self.part} of its own, so only={self.part!r} cannot be had "
            "for this architecture: edit the whole norm with only=None"
        )

    def _instead(self, attn: nn.Module, read: object) -> Tensor | None:
        """What the projection in `attn` should read instead of `read`, if that is this norm's output."""
        if not isinstance(read, Tensor):
            return None
        # HookedTransformer calls the norm for queries, keys and values in this order.
        own = self.waiting[-3:][PARTS.index(self.part) :][:1] if len(self.waiting) >= len(PARTS) else []
        for output, changed in (*own, *reversed(self.waiting)):
            if output.shape == read.shape and torch.equal(output, read):
                self.waiting.clear()
                self.reader = attn
                return changed
        return None

    def _check_read(self, attn: nn.Module | None = None, *_: object) -> None:
        """Raise LostEditError if a changed output was not read, by this attention layer or (None) by any."""
        if self.waiting and self.reader is attn:
            raise LostEditError(
                f"{self.site.name}: the edit for {self.part} alone was lost, because no projection of {self.part} read "
                "this norm's output as it is (split or repeated per head on the way?): switch use_split_qkv_input and "
                "use_attn_in off, or edit the whole norm with only=None"
            )

    def finish(self) -> None:
        self._check_read()


def edits_on(module: nn.Module) -> list[Edit]:
    """The edits that a norm's module is under."""
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, Edit)]


@contextmanager
def suspended(model: HookedModel | nn.Module) -> Iterator[None]:
    """Without any edit, while it lasts: to look at the unedited model from inside an intervention."""
    asleep = [e for _, module in model.named_modules() for e in edits_on(module) if not e.suspended]
    for edit in asleep:
        edit.suspended = True
    try:
        yield
    finally:
        for edit in asleep:
            edit.suspended = False


@contextmanager
def installed(model: HookedModel, edits: Sequence[Edit]) -> Iterator[None]:
    """The model under these edits; on leaving, as it was, also after an exception.

    Raises:
        InterventionError: a part of attention cannot be reached alone.
        LostEditError: on leaving, if no projection read an edit that was computed.
    """
    with ExitStack() as stack:
        for positions in {id(e.positions): e.positions for e in edits if e.positions is not None}.values():
            stack.enter_context(positions.watch(model))
        for edit in edits:
            edit.install(model, stack)
        yield
        for edit in edits:
            edit.finish()


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
    point: nn.Module | None = model.hook_dict.get(f"blocks.{layer}.attn.hook_z")
    if point is None:
        raise InterventionError(f"block {layer} has no hook_z, so its heads cannot be edited one by one")
    return point


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
    """The heads' outputs (z) of a block if its attention, called with these arguments, read something else.

    `instead` gives what to read for a tensor (None: itself). Hook points inside attention see this call too, before
    the model's own. None if there is nothing to change.

    Raises:
        InterventionError: attention continues from keys and values in a cache.
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
            if _cached_tokens(named[name], layer):
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
            self.waiting.append((tensors_in(args, kwargs)[0], output))

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


# From a norm's input to the sigma that is held, [*batch 1], without a gradient; None: its own.
Held = Callable[[Float[Tensor, "*batch d"]], Float[Tensor, "*batch 1"]]


class LinearEdit(Edit):
    """A forward hook under which a norm is linear. It stands before other edits of the norm, which see its output."""

    def __init__(self, site: Site, given: Tensor | None) -> None:
        self.given = given
        super().__init__(site, self._linear, "linearized")

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """The sigma that is held on these inputs."""
        if self.given is None:
            return self.site.sigma(at_least_float32(x.detach()))
        return fitted(self.site, self.given, x).to(at_least_float32(x))

    def _linear(self, x: Tensor, y: Tensor) -> Tensor:
        wide = at_least_float32(x)
        linear = self.site.affine(self.site.project(wide) / self.sigma(wide)).to(y.dtype)
        if self.given is not None:
            return linear
        # 0 + y is y, bit for bit, and its gradient is that of `linear`
        return (linear - linear.detach()) + y.detach()


def fitted(site: Site, given: Tensor, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
    """A sigma per token of another run, laid out as the norm's input is.

    Raises:
        InterventionError: it is for another number of tokens.
    """
    wanted, laid = x.shape[:-1], given.to(x.device)
    if laid.ndim == 1:
        laid = laid[None]
    if laid.ndim == len(wanted) - 1:  # an input per head: a token's sigma is the same for all
        laid = laid[..., None]
    if laid.ndim != len(wanted) or any(g not in (1, w) for g, w in zip(laid.shape, wanted, strict=True)):
        raise InterventionError(
            f"{site.name}: sigma was given for tokens {list(given.shape)}, and the norm's input is {list(x.shape)}: "
            "record it on as many tokens (ln_probe.hooks.linearized.sigmas)"
        )
    return laid.expand(wanted)[..., None]


def held(module: nn.Module) -> LinearEdit | None:
    """The linearization that a norm's module is under, if any."""
    return next((e for e in edits_on(module) if isinstance(e, LinearEdit) and not e.suspended), None)
