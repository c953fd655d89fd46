"""Protect a model while it is measured: foreign hooks, other threads, and changes of its weights.

A hook is foreign if neither TransformerLens nor ln_probe nor the loader installed it; accelerate's belong to the model.
`Cover` moves every module's hooks into dictionaries of ours, to which only the covering thread may add; the originals
come back at the end, so handles that a user holds stay valid, and hooks that were added in between are removed.
`Fingerprint` compares the bits of parameters and buffers: PyTorch counts in-place edits (`_version`), but not those
through `.data`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import chain
from typing import Any, cast

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from ln_probe.hooks.edits import (
    HANDLES,
    Edit,
    LinearEdit,
    edits_on,
    home_of,
    refill,
    set_forward,
    unwrapped,
    user_hooks,
)
from ln_probe.hooks.model import HookedModel, blocks, plain_path, stretches_positions

_ROW = 4096  # words summed at a time: GPT-2's weights take a tenth of a second on one core


def checksum(values: Shaped[Tensor, "*_"]) -> Int64[Tensor, ""]:
    """A number that depends on every bit of a tensor and on where it stands.

    The bits are read as 64-bit words in rows; row sums and column sums are weighted with odd numbers that depend on the
    row and the column, modulo 2^64. So a change of one word always shows, and so do two words that change places,
    unless weights happen to agree (once in 2^60).

    Args:
        values: a tensor of any format on any device.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> bool(checksum(x) == checksum(x.flip(0)))
        False
    """
    found = values.detach()
    found = (torch.view_as_real(found) if found.is_complex() else found).contiguous().flatten().view(torch.uint8)
    found = torch.nn.functional.pad(found, (0, -len(found) % 8)) if len(found) % 8 else found
    if found.storage_offset() % 8:
        found = found.clone()
    words = found.view(torch.int64)
    whole = len(words) // _ROW * _ROW
    body, rest = words[:whole].view(-1, _ROW), words[whole:]
    weights = _weights(1 << max(_ROW, len(body)).bit_length()).to(words.device)
    rows = (body.sum(1) * weights[: len(body)]).sum()
    columns = (body.sum(0) * weights[:_ROW]).sum()
    return 3 * rows + columns + 5 * (rest * weights[: len(rest)]).sum() + len(words)


@lru_cache(maxsize=4)
def _weights(count: int) -> Int64[Tensor, " count"]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64) * 2 + 1


class Fingerprint:
    """What a model's parameters and buffers hold, to be compared with what they hold later.

    Buffers that a model itself writes in a forward pass are left out: rotary frequencies that depend on the length of
    the prompt (`longrope`, `dynamic`).
    """

    def __init__(self, model: HookedModel | nn.Module) -> None:
        self.model = cast(nn.Module, model)
        self._own = "inv_freq" if stretches_positions(model) else None
        self._sums = self._checksums()
        self.renew()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        for path, tensor in chain(self.model.named_parameters(), self.model.named_buffers()):
            if tensor.device.type != "meta" and (self._own is None or self._own not in path):
                yield plain_path(path), tensor

    def _checksums(self) -> dict[str, tuple[int, torch.dtype, torch.Size]]:
        return {name: (int(checksum(tensor)), tensor.dtype, tensor.shape) for name, tensor in self._named()}

    def touched(self) -> str:
        """The first tensor that was written to in place or given other memory since; empty if none was.

        Neither edits through `.data` nor tensors that were replaced show here.
        """
        return next((name for name, (tensor, state) in self._states.items() if _state(tensor) != state), "")

    def changed(self) -> str:
        """The first tensor that does not hold what it held, bit for bit, or is there no more, or is new."""
        now = self._checksums()
        return next((name for name in (*self._sums, *now) if self._sums.get(name) != now.get(name)), "")

    def renew(self) -> None:
        """Take the present versions for known: what was written since was written back."""
        self._states = {name: (tensor, _state(tensor)) for name, tensor in self._named()}


def version_of(tensor: Tensor) -> int:
    """How many in-place edits of a tensor PyTorch has counted; -1 for a tensor of inference mode: it counts none."""
    return -1 if tensor.is_inference() else tensor._version


def _state(tensor: Tensor) -> tuple[int, int, torch.dtype, torch.Size]:
    return version_of(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape


# Where torch keeps the hooks of a module, and what they are called; and those of all modules of the process.
KINDS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
FORWARD = "forward"  # an instance's own forward
# Packages whose hooks belong to the model: they run it, load it or place it.
_OWN = ("ln_probe", "transformers", "accelerate", "torch.nn.utils")
_BRIDGES = "transformer_lens.model_bridge"
# Packages whose modules change what the model around them computes, and that cannot be taken out for a pass.
_WRAPPERS = ("peft", "sae_lens")


@dataclass(frozen=True, eq=False)
class Foreign:
    """A hook or a wrapper on a model that is not its own.

    Attributes:
        point: the hook point or module it is on; "every module" for torch's global hooks.
        kind: what it is.
        function: what it calls.
        module: that it is on; None: all modules.
        store: where torch keeps it: one of KINDS, "forward", or empty for a wrapped module.
        key: its number there.
    """

    point: str
    kind: str
    function: str
    module: nn.Module | None
    store: str
    key: int = 0

    def __str__(self) -> str:
        return f"{self.point} ({self.kind} {self.function})"

    @property
    def backward(self) -> bool:
        """Whether it only sees gradients."""
        return self.store in _BACKWARD

    @property
    def removable(self) -> bool:
        return bool(self.store)


def foreign_hooks(model: HookedModel | nn.Module) -> list[Foreign]:
    """Everything on a model, and among torch's global hooks, that is foreign.

    Raises:
        RuntimeError: this version of TransformerLens keeps the hooks that users add where they cannot be seen.
    """
    _check_hooks_are_seen()
    found = []
    for path, module in cast(nn.Module, model).named_modules():
        point = _name(path, module)
        # (The model itself may be of such a class: SAELens's HookedSAETransformer without an SAE is the plain model.)
        if path and _in(type(module).__module__, _WRAPPERS):
            found.append(Foreign(point, "module", f"{type(module).__module__}.{type(module).__name__}", module, ""))
        users = user_hooks(module)
        for store, kind in KINDS.items():
            for key, hook in getattr(module, store).items():
                if not _own(hook, users.get(key)):
                    found.append(Foreign(point, kind, name_of(users.get(key, hook)), module, store, key))
        replaced = module.__dict__.get(FORWARD)
        if replaced is not None and not _own(replaced, None) and not hasattr(module, "_hf_hook"):
            found.append(Foreign(point, "replaced forward", name_of(replaced), module, FORWARD))
    for store, kind in KINDS.items():
        for key, hook in global_hooks(store).items():
            if not _own(hook, None):
                found.append(Foreign("every module", f"global {kind}", name_of(hook), None, store, key))
    return found


def _check_hooks_are_seen() -> None:
    """Add a hook to a new hook point, and look for it there."""
    from transformer_lens.hook_points import HookPoint

    def reading(tensor: Tensor, *, hook: HookPoint) -> None: ...

    point = HookPoint()
    point.add_hook(reading)
    if reading not in user_hooks(point).values():
        raise RuntimeError(
            f"ln_probe cannot see the hooks that users add with TransformerLens {version('transformer-lens')}, so a "
            "model could be measured with them and nothing would say so: install a version that ln_probe was tested "
            "with (3.9.0 or 4.3.0)"
        )


def global_hooks(store: str) -> dict[int, Any]:
    """Torch's hooks on all modules, of one of KINDS."""
    found: dict[int, Any] = getattr(torch_modules, f"_global{store}")
    return found


def edits_under_way(model: HookedModel | nn.Module) -> tuple[list[Edit], list[LinearEdit]]:
    """The edits of `without` that a model is under, and those of `linearized`."""
    edits = [edit for _, module in model.named_modules() for edit in edits_on(module)]
    linear = [edit for edit in edits if isinstance(edit, LinearEdit)]
    return [edit for edit in edits if not isinstance(edit, LinearEdit)], linear


def name_of(function: Any) -> str:
    """What a function is called, with its module; of an object that is called, its class."""
    function = unwrapped(function)
    name = getattr(function, "__qualname__", "") or type(function).__qualname__
    return f"{home_of(function)}.{name}".removeprefix("__main__.")


def of_transformer_lens(hook: Any, user: Any = None) -> bool:
    """Whether TransformerLens installed a hook for itself, as bridges do at their first pass.

    Args:
        hook: what torch calls.
        user: the function behind TransformerLens's wrapper, if this is one.
    """
    return _in(home_of(hook if user is None else user), ("transformer_lens" if user is None else _BRIDGES,))


def _own(hook: Any, user: Any) -> bool:
    if user is not None and _in(home_of(user), ("ln_probe",)):  # what rounds a compiled program
        return True
    return of_transformer_lens(hook, user) or (user is None and _in(home_of(hook), _OWN))


def _in(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _name(path: str, module: nn.Module) -> str:
    """What a hook point calls itself, else the path of the module; the model itself has none."""
    own = getattr(module, "name", None) if hasattr(module, "fwd_hooks") else None
    return str(own) if own else plain_path(path) or "the model"


_COMPILED = "_compiled_call_impl"  # what `module.compile()` leaves
_LOOKS, _BETWEEN_LOOKS = 200, 0.001  # seconds
_DEVICES = ("cpu", "cuda")  # whose autocast is compared


class OtherThreadError(RuntimeError):
    """A thread used a model that another thread is measuring."""


class _Guarded(OrderedDict[int, Any]):
    """The hooks of one kind on one module: only the thread that covers the model adds to them."""

    cover: Cover | None = None

    def __setitem__(self, key: int, hook: Any) -> None:
        if self.cover is not None:
            self.cover.adding(self, key)
        super().__setitem__(key, hook)

    def __reduce__(self) -> Any:  # a copy of the model is not covered
        return OrderedDict, ([(k, h) for k, h in self.items() if getattr(h, "__self__", None) is not self.cover],)


class _Taken:
    """A module whose hooks are in dictionaries of ours."""

    def __init__(self, path: str, module: nn.Module, cover: Cover, foreign: Sequence[Foreign]) -> None:
        self.path, self.module, self.foreign = path or "the model", module, foreign
        self.before = {store: module.__dict__[store] for store in KINDS}
        self.lists = {name: module.__dict__[name] for name in HANDLES if name in module.__dict__}
        self.forward, self.full = module.__dict__.get(FORWARD), module.__dict__.get("_is_full_backward_hook")
        self.own_forward = self.forward
        self.ours = {store: _Guarded(hooks) for store, hooks in self.before.items()}
        for hooks in self.ours.values():
            hooks.cover = cover
        module.__dict__.update(self.ours)
        self.known = {store: dict(hooks) for store, hooks in self.before.items()}

    def show(self, shown: Collection[Foreign]) -> None:
        """Of the foreign hooks those `shown` on, in their old places, and the others off."""
        off = [f for f in self.foreign if f not in shown]
        for store, hooks in self.ours.items():
            gone = {f.key for f in off if f.store == store}
            kept = [(k, h) for k, h in self.known[store].items() if k not in gone]
            added = [(k, h) for k, h in hooks.items() if k not in self.known[store]]
            refill(hooks, [*kept, *added])
        self._keep_handles(self.lists)
        self.module.__dict__["_is_full_backward_hook"] = self.full if self.ours["_backward_hooks"] else None
        self.own_forward = None if any(f.store == FORWARD for f in off) else self.forward
        set_forward(self.module, self.own_forward)

    def is_own(self, store: str, key: int) -> bool:
        """Whether TransformerLens added a hook for itself."""
        return of_transformer_lens(self.ours[store][key], user_hooks(self.module).get(key))

    def described(self, store: str, key: int) -> str:
        """A hook's kind, its function and where it is."""
        hook = user_hooks(self.module).get(key, self.ours[store][key])
        return f"a {KINDS[store]} {name_of(hook)} at {_name(self.path, self.module)}"

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
        set_forward(self.module, self.forward)

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
                self._taken.append(_Taken(plain_path(path), module, self, mine))
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

    def adding(self, hooks: _Guarded, key: int) -> None:
        """Note that a hook is added.

        Raises:
            OtherThreadError: by another thread.
        """
        self._check_thread("a hook")
        self._added.append((hooks, key))

    def left(self) -> list[str]:
        """What is on the model, or changed in torch's settings, that was not when it was covered."""
        found = [taken.described(store, key) for taken, store, key in self._left_hooks()]
        found += [f"a global {KINDS[s]} {name_of(global_hooks(s)[key])}" for s, key in self._left_globals()]
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
        for store, key in self._left_globals():
            global_hooks(store).pop(key)
        for taken in self._taken:
            set_forward(taken.module, taken.own_forward)
            taken.module.__dict__.pop(_COMPILED, None)
        if any(taken.module.training for taken in self._taken):
            self.model.eval()
        _restore(self._torch)
        self._added.clear()

    def _left_globals(self) -> list[tuple[str, int]]:
        return [(store, key) for store in KINDS for key in sorted(set(global_hooks(store)) - self._globals[store])]

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
        for taken in (t for t in self._taken if t.foreign):
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
