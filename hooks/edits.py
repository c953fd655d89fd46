"""The mechanism of an intervention: a torch forward hook on the norm's module that returns another output.

Of the ways to edit a norm it is the one that works in every TransformerLens world: in-place edits of `hook_scale` and
`hook_normalized` are silently lost on a bridge whose norms call the original module. For queries, keys or values alone,
what that projection of attention reads is replaced instead, and the norm's output is left as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, blocks
from ln_probe.hooks.positions import Positions, watching
from ln_probe.hooks.site import Site

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


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))


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
        return self.change(_input(args, kwargs), output)

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        """Put the hooks on; `stack` takes them off."""
        stack.callback(self.site.module.register_forward_hook(self, with_kwargs=True).remove)


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
            self.waiting.append((output, self.change(_input(args, kwargs), output)))

    def replacement(self, attn: nn.Module, read: Tensor) -> Tensor | None:
        """What the projection in `attn` should read instead of `read`, if that is this norm's output."""
        # HookedTransformer calls the norm for queries, keys and values in this order.
        own = self.waiting[-3:][PARTS.index(self.part) :][:1] if len(self.waiting) >= len(PARTS) else []
        for output, changed in (*own, *reversed(self.waiting)):
            if output.shape == read.shape and torch.equal(output, read):
                self.waiting.clear()
                self.reader = attn
                return changed
        return None


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
        LostEditError: on leaving, if an edit of a part was computed and nobody read it.
    """
    part_edits = [e for e in edits if isinstance(e, PartEdit)]
    with ExitStack() as stack:
        for positions in {id(e.positions): e.positions for e in edits if e.positions is not None}.values():
            stack.enter_context(watching(model, positions))
        for edit in edits:
            edit.install(model, stack)
        attentions = [a for b in blocks(model) if isinstance(a := getattr(b, "attn", None), nn.Module)]
        for attn in attentions:
            for part in PARTS:
                if mine := [e for e in part_edits if e.part == part]:
                    for remove in _watch_part(attn, part, mine):
                        stack.callback(remove)
        yield
        if unread := next((e for e in part_edits if e.waiting and e.reader is None), None):
            raise LostEditError(_unread(unread))


def _unread(edit: PartEdit) -> str:
    return (
        f"{edit.site.name}: the edit for {edit.part} alone was lost, because no projection of {edit.part} read this "
        "norm's output as it is (split or repeated per head on the way?): switch use_split_qkv_input and use_attn_in "
        "off, or edit the whole norm with only=None"
    )


def _watch_part(attn: nn.Module, part: str, edits: Sequence[PartEdit]) -> Iterator[Callable[[], None]]:
    """Put hooks where this attention layer projects a part; the functions that remove them."""
    name = INPUTS[part]

    def replaced(read: object) -> Tensor | None:
        if not isinstance(read, Tensor):
            return None
        return next((new for e in edits if (new := e.replacement(attn, read)) is not None), None)

    def on_attention(_m: nn.Module, args: Any, kwargs: Any) -> Any:
        new = replaced(kwargs.get(name, args[0] if args else None))
        return None if new is None else (args, {**kwargs, name: new})

    def on_projection(_m: nn.Module, args: Any) -> Any:
        new = replaced(args[0] if args else None)
        return None if new is None else (new, *args[1:])

    def afterwards(_m: nn.Module, _args: Any, _output: Any) -> None:
        if lost := next((e for e in edits if e.reader is attn and e.waiting), None):
            raise LostEditError(_unread(lost))

    projection = dict(attn.named_children()).get(_PROJECTION[part])
    if name in inspect.signature(attn.forward).parameters:  # HookedTransformer and lab models
        yield attn.register_forward_pre_hook(on_attention, with_kwargs=True).remove
    elif projection is not None:  # a bridge, whether its original projects them one by one or at once
        yield projection.register_forward_pre_hook(on_projection).remove
    else:
        raise InterventionError(
            f"{type(attn).__name__} has no projection of {part} of its own, so only={part!r} cannot be had for this "
            "architecture: edit the whole norm with only=None"
        )
    yield attn.register_forward_hook(afterwards).remove
