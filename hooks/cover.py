"""A model under cover: foreign hooks are off, other threads cannot use it, and what is left on it is known and undone.

Every module's hooks move into dictionaries of ours, which only the covering thread may add to; the originals come back
at the end. So handles that a user holds stay valid, hooks that others remove meanwhile are gone afterwards, and hooks
that somebody adds meanwhile are seen.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import nn

from ln_probe.hooks.foreign import (
    FORWARD,
    KINDS,
    Foreign,
    described,
    global_hooks,
    name_of,
    of_transformer_lens,
    user_hooks,
)
from ln_probe.hooks.model import HookedModel, blocks

_LISTS = ("fwd_hooks", "bwd_hooks")  # where a hook point keeps its handles
_COMPILED = "_compiled_call_impl"  # what `module.compile()` leaves
_LOOKS, _BETWEEN_LOOKS = 200, 0.001  # seconds
_DEVICES = ("cpu", "cuda")  # whose autocast is looked at


class OtherThreadError(RuntimeError):
    """A thread used a model that another thread is measuring."""


class _Guarded(OrderedDict[int, Any]):
    """The hooks of one kind on one module: only the thread that covers the model adds to them."""

    cover: Cover | None = None

    def __setitem__(self, key: int, hook: Any) -> None:
        if self.cover is not None:
            self.cover.adding(self, key)
        super().__setitem__(key, hook)

    def put(self, key: int, hook: Any) -> None:
        """Add what belongs there."""
        super().__setitem__(key, hook)

    def __reduce__(self) -> Any:  # a copy of the model is not covered
        return OrderedDict, ([(k, h) for k, h in self.items() if getattr(h, "__self__", None) is not self.cover],)


class _Taken:
    """A module whose hooks are in dictionaries of ours."""

    def __init__(self, path: str, module: nn.Module, cover: Cover, foreign: Sequence[Foreign]) -> None:
        self.path, self.module, self.foreign = path or "the model", module, foreign
        self.before = {store: module.__dict__[store] for store in KINDS}
        self.lists = {name: module.__dict__[name] for name in _LISTS if name in module.__dict__}
        self.forward, self.full = module.__dict__.get(FORWARD), module.__dict__.get("_is_full_backward_hook")
        self.own_forward = self.forward
        self.ours = {store: _Guarded() for store in KINDS}
        for store, hooks in self.ours.items():
            for key, hook in self.before[store].items():
                hooks.put(key, hook)
            hooks.cover = cover
            module.__dict__[store] = hooks
        self.known = {store: dict(hooks) for store, hooks in self.before.items()}

    def show(self, shown: Collection[Foreign]) -> None:
        """Of the foreign hooks those `shown` on, in their old places, and the others off."""
        off = [f for f in self.foreign if f not in shown]
        for store, hooks in self.ours.items():
            gone = {f.key for f in off if f.store == store}
            kept = [(k, h) for k, h in self.known[store].items() if k not in gone]
            added = [(k, h) for k, h in hooks.items() if k not in self.known[store]]
            hooks.clear()
            for key, hook in (*kept, *added):
                hooks.put(key, hook)
        self._keep_handles(self.lists)
        self.module.__dict__["_is_full_backward_hook"] = self.full if self.ours["_backward_hooks"] else None
        self.own_forward = None if any(f.store == FORWARD for f in off) else self.forward
        _set_forward(self.module, self.own_forward)

    def is_own(self, store: str, key: int) -> bool:
        """Whether TransformerLens added a hook for itself."""
        return of_transformer_lens(self.ours[store][key], user_hooks(self.module).get(key))

    def remove(self, key: int) -> None:
        """Take away a hook that was added."""
        for hooks in self.ours.values():
            hooks.pop(key, None)
        self._keep_handles({name: self.module.__dict__[name] for name in self.lists})

    def back(self, level: int) -> None:
        """Give the module its own dictionaries again, with what TransformerLens added to ours.

        `level`: how many `hooks` contexts of TransformerLens the model is in; hooks of contexts that were left go.
        """
        for store, hooks in self.before.items():
            added = {k: h for k, h in self.ours[store].items() if k not in self.known[store] and self.is_own(store, k)}
            if added and not hooks:  # ours stays, because the handles of what was added know it
                self.ours[store].cover = None
                hooks = self.before[store] = self.ours[store]
                for key in [k for k in hooks if k not in added]:
                    del hooks[key]
            hooks.update(added)
            self.module.__dict__[store] = hooks
        for handle in (h for of in self.lists.values() for h in of if (h.context_level or 0) > level):
            handle.hook.remove()
        self._keep_handles(self.lists)
        self.module.__dict__["_is_full_backward_hook"] = self.full
        _set_forward(self.module, self.forward)

    def _keep_handles(self, lists: dict[str, Any]) -> None:
        """Of a hook point's handles those whose hooks are there."""
        there = {key for store in KINDS for key in self.module.__dict__[store]}
        self.module.__dict__.update({name: [h for h in of if h.hook.id in there] for name, of in lists.items()})


class Cover:
    """`with Cover(model, foreign):` the model without foreign hooks, for this thread alone.

    Args:
        model: in evaluation mode.
        foreign: hooks that can be switched off (`foreign_hooks`).
        on: those of them that stay on.
    """

    def __init__(
        self, model: HookedModel | nn.Module, foreign: Sequence[Foreign], on: Collection[Foreign] = ()
    ) -> None:
        self.model, self.foreign = cast(nn.Module, model), [f for f in foreign if f.removable]
        self.refused: Counter[str] = Counter()  # passes and hooks of other threads, by thread
        self._owner = threading.current_thread()
        self._on = self._usual = on
        self._added: list[tuple[_Guarded, int]] = []
        self._taken: list[_Taken] = []
        self._globals: dict[str, set[int]] = {}
        self._torch: dict[str, Any] = {}
        self._level = 0
        self._stack = ExitStack()

    def __enter__(self) -> Cover:
        modules, self._level = list(self.model.named_modules()), getattr(self.model, "context_level", 0)
        with ExitStack() as stack:
            for path, module in modules:
                mine = [f for f in self.foreign if f.module is module]
                self._taken.append(_Taken(path.replace("_original_component.", ""), module, self, mine))
                stack.callback(lambda taken: taken.back(self._level), self._taken[-1])
            for each in self.foreign:
                if each.module is None:
                    stack.callback(self._silenced(each))
            for module in self._watched():
                stack.callback(module.register_forward_pre_hook(self._one_thread).remove)
            self._show(self._usual)
            self._added.clear()
            self._globals = {store: set(global_hooks(store)) for store in KINDS}
            self._torch = _settings_of_torch()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._level = self._current_level()
        self._stack.close()

    @contextmanager
    def showing(self, shown: Collection[Foreign]) -> Iterator[None]:
        """With these of the foreign hooks on, and the others off."""
        self._show(shown)
        try:
            yield
        finally:
            self._show(self._usual)

    @contextmanager
    def noting(self) -> Iterator[list[str]]:
        """What is left of a stretch of work, known and undone at its end; in another thread nothing is looked at."""
        left: list[str] = []
        if threading.current_thread() is not self._owner:
            yield left
            return
        added, self._added, settings, self._torch = self._added, [], self._torch, _settings_of_torch()
        try:
            yield left
        finally:
            left += self.left()
            if left:
                self.undo()
            self._added, self._torch = added, settings

    def adding(self, hooks: _Guarded, key: int) -> None:
        """Note that a hook is added.

        Raises:
            OtherThreadError: by another thread.
        """
        self._check_thread("a hook")
        self._added.append((hooks, key))

    def left(self) -> list[str]:
        """What is on the model, or changed in torch's settings, that was not when it was covered."""
        found = [described(t.module, t.path, store, key) for t, store, key in self._left_hooks()]
        for store, kind in KINDS.items():
            hooks = global_hooks(store)
            found += [f"a global {kind} {name_of(hooks[k])}" for k in sorted(set(hooks) - self._globals[store])]
        for taken in self._taken:
            if taken.module.__dict__.get(FORWARD) is not taken.own_forward:
                found.append(f"a replaced forward of {taken.path}")
            if taken.module.__dict__.get(_COMPILED) is not None:
                found.append(f"a compiled {taken.path}")
        if any(taken.module.training for taken in self._taken):
            found.append("training mode")
        now = _settings_of_torch()
        return found + [f"{what} {now[what]}" for what, was in self._torch.items() if now[what] != was]

    def undo(self) -> None:
        """Take away what `left` names."""
        for taken, _, key in self._left_hooks():
            taken.remove(key)
        for store in KINDS:
            for key in set(global_hooks(store)) - self._globals[store]:
                global_hooks(store).pop(key)
        for taken in self._taken:
            _set_forward(taken.module, taken.own_forward)
            taken.module.__dict__.pop(_COMPILED, None)
        if any(taken.module.training for taken in self._taken):
            self.model.eval()
        _restore(self._torch)
        self._added.clear()

    def _left_hooks(self) -> list[tuple[_Taken, str, int]]:
        self._added = [(hooks, key) for hooks, key in self._added if key in hooks]
        if not self._added:
            return []
        homes = {id(hooks): (taken, store) for taken in self._taken for store, hooks in taken.ours.items()}
        found = [(*homes[id(hooks)], key) for hooks, key in self._added]
        return [(taken, store, key) for taken, store, key in found if not taken.is_own(store, key)]

    def _current_level(self) -> int:
        """How many `hooks` contexts of TransformerLens the model is in. A thread that is refused enters and leaves one
        at every attempt, so the least of several looks counts while another thread is at it."""
        level = getattr(self.model, "context_level", 0)
        for _ in range(_LOOKS):
            if not level or not running(self.model):
                break
            time.sleep(_BETWEEN_LOOKS)
            level = min(level, getattr(self.model, "context_level", 0))
        return int(level)

    def _show(self, shown: Collection[Foreign]) -> None:
        self._on = shown
        for taken in self._taken:
            if taken.foreign:
                taken.show(shown)

    def _watched(self) -> list[nn.Module]:
        """The modules that a pass goes through, whichever part of the model it begins at: those that hooks of a
        measurement are on, and what contains them."""
        own = self.model
        inside = [child for part in (own, *blocks(self.model)) for child in part.children()]
        found = {id(m): m for m in (own, *blocks(self.model), *inside) if not hasattr(m, "fwd_hooks")}
        return [m for m in found.values() if type(m).forward is not nn.Module.forward]

    def _one_thread(self, _module: nn.Module, _args: Any) -> None:
        self._check_thread("a pass")

    def _check_thread(self, what: str) -> None:
        current = threading.current_thread()
        if current is not self._owner:
            self.refused[current.name] += 1
            raise OtherThreadError(
                f"thread {self._owner.name!r} is measuring this model with ln_probe, and {what} of thread "
                f"{current.name!r} would change what it measures: wait until it has finished, or give this thread a "
                "copy of the model (copy.deepcopy)"
            )

    def _silenced(self, each: Foreign) -> Callable[[], None]:
        """Let a hook of all modules do nothing in this thread; what lets it work again."""
        hooks, before = global_hooks(each.store), global_hooks(each.store)[each.key]

        def unless_covered(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is self._owner and each not in self._on:
                return None
            return before(*args, **kwargs)

        hooks[each.key] = unless_covered

        def back() -> None:
            if hooks.get(each.key) is unless_covered:
                hooks[each.key] = before

        return back


# The functions of a module that run it; others only look at it.
_CALLS = ("_wrapped_call_impl", "_call_impl", "forward")


def running(model: nn.Module) -> str:
    """The name of another thread that is inside a call of the model or of one of its modules; empty if none is."""
    modules = {id(m) for m in model.modules()}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in sys._current_frames().items():
        inside: Any = frame if number != threading.get_ident() else None
        while inside is not None:
            if inside.f_code.co_name in _CALLS and id(inside.f_locals.get("self")) in modules:
                return names.get(number, str(number))
            inside = inside.f_back
    return ""


def _set_forward(module: nn.Module, forward: Any) -> None:
    """An instance's own forward, or that of its class; not by setattr, which a bridge hands on to what it wraps."""
    if forward is None:
        module.__dict__.pop(FORWARD, None)
    else:
        module.__dict__[FORWARD] = forward


def _settings_of_torch() -> dict[str, Any]:
    """What in torch's settings changes what a model computes, by what it is called."""
    return {f"autocast on {device}:": torch.is_autocast_enabled(device) for device in _DEVICES} | {
        "the default dtype": torch.get_default_dtype(),
        "gradients:": torch.is_grad_enabled(),
        "inference mode:": torch.is_inference_mode_enabled(),
    }


def _restore(settings: dict[str, Any]) -> None:
    """Set what can be set (inference mode ends when the object that began it does)."""
    for device in _DEVICES:
        torch.set_autocast_enabled(device, settings[f"autocast on {device}:"])
    torch.set_default_dtype(settings["the default dtype"])
    torch.set_grad_enabled(settings["gradients:"])
