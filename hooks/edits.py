"""The mechanism of an intervention: a torch forward hook on the norm's module that returns another output.

Of the ways to edit a norm it is the one that works in every TransformerLens world: in-place edits of `hook_scale` and
`hook_normalized` are silently lost on a bridge whose norms call the original module. For keys alone, what attention's
key projection reads is replaced instead, and the norm's output is left as it is.
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
from ln_probe.hooks.site import Site

# From a norm's input and output to another output.
Change = Callable[[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]], Float[Tensor, "*batch d"]]


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
    """

    def __init__(self, site: Site, change: Change, label: str) -> None:
        self.site, self.change, self.label = site, change, label
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


class KeyEdit(Edit):
    """A forward hook that keeps the changed output for the key projection that reads this norm.

    Attributes:
        waiting: outputs of the norm, and what the key projection should read instead of each.
        reader: the attention module whose key projection did; None until then.
    """

    def __init__(self, site: Site, change: Change, label: str) -> None:
        super().__init__(site, change, label)
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.reader: nn.Module | None = None

    def __call__(self, _module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if not self.suspended:
            self.calls += 1
            self.waiting.append((output, self.change(_input(args, kwargs), output)))

    def replacement(self, attn: nn.Module, read: Tensor) -> Tensor | None:
        """What the key projection of `attn` should read instead of `read`, if that is this norm's output."""
        # HookedTransformer calls the norm for queries, keys and values in this order: the keys' is the last but one.
        for output, changed in (*self.waiting[-2:-1], *reversed(self.waiting)):
            if output.shape == read.shape and torch.equal(output, read):
                self.waiting.clear()
                self.reader = attn
                return changed
        return None


def edits_on(module: nn.Module) -> list[Edit]:
    """The edits that a norm's module is under."""
    return [hook for hook in module._forward_hooks.values() if isinstance(hook, Edit)]


@contextmanager
def suspended(model: HookedModel) -> Iterator[None]:
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
        InterventionError: keys alone cannot be reached.
        LostEditError: on leaving, if a key edit was computed and nobody read it.
    """
    key_edits = [e for e in edits if isinstance(e, KeyEdit)]
    with ExitStack() as stack:
        for edit in edits:
            edit.install(model, stack)
        attentions = [a for b in blocks(model) if isinstance(a := getattr(b, "attn", None), nn.Module)]
        for attn in attentions if key_edits else ():
            for remove in _watch_keys(attn, key_edits):
                stack.callback(remove)
        yield
        if unread := next((e for e in key_edits if e.waiting and e.reader is None), None):
            raise LostEditError(_unread(unread.site))


def _unread(site: Site) -> str:
    return (
        f"{site.name}: the edit for keys alone was lost, because no key projection read this norm's output as it is "
        "(split or repeated per head on the way?): switch use_split_qkv_input and use_attn_in off, or edit the whole "
        "norm with only_keys=False"
    )


def _watch_keys(attn: nn.Module, edits: Sequence[KeyEdit]) -> Iterator[Callable[[], None]]:
    """Put hooks where this attention layer's keys are projected; the functions that remove them."""

    def replaced(read: object) -> Tensor | None:
        if not isinstance(read, Tensor):
            return None
        return next((new for e in edits if (new := e.replacement(attn, read)) is not None), None)

    def on_attention(_m: nn.Module, args: Any, kwargs: Any) -> Any:
        new = replaced(kwargs.get("key_input", args[0] if args else None))
        return None if new is None else (args, {**kwargs, "key_input": new})

    def on_projection(_m: nn.Module, args: Any) -> Any:
        new = replaced(args[0] if args else None)
        return None if new is None else (new, *args[1:])

    def afterwards(_m: nn.Module, _args: Any, _output: Any) -> None:
        if lost := next((e for e in edits if e.reader is attn and e.waiting), None):
            raise LostEditError(_unread(lost.site))

    projection = dict(attn.named_children()).get("k")
    if "key_input" in inspect.signature(attn.forward).parameters:  # HookedTransformer and lab models
        yield attn.register_forward_pre_hook(on_attention, with_kwargs=True).remove
    elif projection is not None:  # a bridge, whether its original projects keys alone or with queries and values
        yield projection.register_forward_pre_hook(on_projection).remove
    else:
        raise InterventionError(
            f"{type(attn).__name__} has no key projection of its own, so only_keys=True cannot be had for this "
            "architecture: edit the whole norm with only_keys=False"
        )
    yield attn.register_forward_hook(afterwards).remove
