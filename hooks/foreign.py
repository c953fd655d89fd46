"""What somebody else put on a model: hooks, replaced forwards, wrapped modules.

A hook is foreign if neither TransformerLens nor ln_probe nor the loader installed it. accelerate's hooks belong to the
model: they move weights and inputs to where the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import nn
from torch.nn.modules import module as torch_modules

from ln_probe.hooks.edits import Edit
from ln_probe.hooks.held_sigma import LinearEdit
from ln_probe.hooks.model import HookedModel

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
    """A hook or a wrapper that somebody else put on a model.

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
    """Everything on a model, and among torch's global hooks, that is foreign."""
    found = []
    for path, module in cast(nn.Module, model).named_modules():
        point = _name(path, module)
        if _in(type(module).__module__, _WRAPPERS):
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


def global_hooks(store: str) -> dict[int, Any]:
    """Torch's hooks on all modules, of one of KINDS."""
    found: dict[int, Any] = getattr(torch_modules, f"_global{store}")
    return found


def edits_under_way(model: HookedModel | nn.Module) -> tuple[list[Edit], list[LinearEdit]]:
    """The edits of `without` that a model is under, and those of `linearized`."""
    found = [e for _, m in model.named_modules() for e in m._forward_hooks.values() if isinstance(e, Edit)]
    linear = [e for e in found if isinstance(e, LinearEdit)]
    return [e for e in found if not isinstance(e, LinearEdit)], linear


def described(module: nn.Module, path: str, store: str, key: int) -> str:
    """A hook in words: its kind, its function and where it is."""
    hook = getattr(module, store)[key]
    return f"a {KINDS[store]} {name_of(user_hooks(module).get(key, hook))} at {_name(path, module)}"


def user_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The functions that TransformerLens wrapped at a hook point, by torch's number of the wrapper."""
    handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
    return {h.hook.id: h.user_hook for h in handles if getattr(h, "user_hook", None) is not None}


def name_of(function: Any) -> str:
    """What a function is called, with its module; of an object that is called, its class."""
    function = _plain(function)
    name = getattr(function, "__qualname__", "") or type(function).__qualname__
    return f"{home_of(function)}.{name}".removeprefix("__main__.")


def home_of(function: Any) -> str:
    """The module that a function comes from."""
    function = _plain(function)
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _plain(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__func__", function)


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
    return str(own) if own else path.replace("_original_component.", "") or "the model"
