"""Make sure that the model measured is the one that the user gave, from the first pass to the last.

A hook that neither TransformerLens nor ln_probe nor the loader has put on the model is a user's: the model is refused,
or measured with it (`hooks="keep"`), which the report says. A model inside `without`, compiled or under autocast is
refused. A parameter that changes during the measurement is an error at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ln_probe.hooks.model import (
    HookedModel,
    check_model,
    check_weights,
    edits_on,
    evaluating,
    is_hugging_face,
    plain_path,
    run,
)
from ln_probe.loading.verify import bridged

REFUSE, KEEP = "refuse", "keep"
# Where torch keeps the hooks of a module.
_STORES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Packages whose hooks belong to the model: they run it, load it or place it.
_OWN = ("ln_probe", "transformer_lens", "transformers", "accelerate", "torch")
# Packages whose modules change what the model around them computes.
_WRAPPERS = ("peft", "sae_lens")
_NAMED = 5  # hooks that a message names


class ModelStateError(RuntimeError):
    """The model cannot be measured as it is given, or it changed while it was measured."""


@dataclass(frozen=True)
class UserHook:
    """A hook or a wrapped module on a model that is not its own.

    Attributes:
        point: the hook point or module it is on.
        function: what it calls.
    """

    point: str
    function: str

    def __str__(self) -> str:
        return f"{self.point} ({self.function})"


def user_hooks(model: nn.Module) -> list[UserHook]:
    """Return the hooks, the replaced forwards and the wrapped modules on a model that are not its own."""
    found: list[UserHook] = []
    for path, module in model.named_modules():
        point = str(getattr(module, "name", "") if hasattr(module, "fwd_hooks") else "") or plain_path(path)
        handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
        of_users = {h.hook.id: h.user_hook for h in handles if getattr(h, "user_hook", None) is not None}
        functions = [of_users.get(key, hook) for store in _STORES for key, hook in getattr(module, store).items()]
        if (replaced := module.__dict__.get("forward")) is not None and not hasattr(module, "_hf_hook"):
            functions.append(replaced)
        found += [UserHook(point or "the model", _name(f)) for f in functions if not _in(_home(f), _OWN)]
        if path and _in(type(module).__module__, _WRAPPERS):
            found.append(UserHook(point, f"{type(module).__module__}.{type(module).__name__}"))
    return found


def _unwrapped(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__func__", function)


def _home(function: Any) -> str:
    function = _unwrapped(function)
    return str(getattr(function, "__module__", None) or type(function).__module__)


def _name(function: Any) -> str:
    own = getattr(_unwrapped(function), "__qualname__", "") or type(function).__qualname__
    return f"{_home(function)}.{own}".removeprefix("__main__.")


def _in(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def check_state(model: nn.Module, hooks: str = REFUSE) -> list[UserHook]:
    """Return the hooks of users on a model.

    Raises:
        ValueError: `hooks` is neither "refuse" nor "keep".
        ModelStateError: the model is edited, compiled or under autocast, or has hooks of users that are refused.
    """
    if hooks not in (REFUSE, KEEP):
        raise ValueError(f"hooks must be {REFUSE!r} or {KEEP!r}, got {hooks!r}")
    for path, module in model.named_modules():
        if edits := edits_on(module):
            raise ModelStateError(f"the model is under {edits[0].label}: leave the `with` block")
        if "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None:
            raise ModelStateError(
                f"{plain_path(path) or type(module).__name__} is compiled, and compiled modules call no hooks: measure "
                "the model itself (model._orig_mod)"
            )
    if active := next((d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)), ""):
        raise ModelStateError(f"torch.autocast is on ({active}): leave it, or load the model in that format")
    found = user_hooks(model)
    if found and hooks != KEEP:
        raise ModelStateError(
            f"{_listed(found)} on the model: remove them (model.reset_hooks(), handle.remove()), or measure the model "
            'with them: hooks="keep"'
        )
    return found


def _listed(hooks: list[UserHook]) -> str:
    more = f", … ({len(hooks)} in all)" if len(hooks) > _NAMED else ""
    return f"{len(hooks)} hook{'s' * (len(hooks) > 1)} ({'; '.join(map(str, hooks[:_NAMED]))}{more})"


def hooked_model(given: object, tokenizer: Any = None, hooks: str = REFUSE) -> tuple[HookedModel, tuple[str, ...]]:
    """Return the model to measure (a bridge for a Hugging Face model in memory), and a note on its hooks.

    Raises:
        ModelStateError: as `check_state`.
        TypeError, ValueError: as `check_model`, or `bridged`.
    """
    if is_hugging_face(given):
        check_weights(cast(nn.Module, given))
        found = check_state(cast(nn.Module, given), hooks)
        model = check_model(bridged(cast(Any, given), tokenizer))
    else:
        if tokenizer is not None:
            raise ValueError(f"tokenizer= is for a Hugging Face model in memory: a {type(given).__name__} has its own")
        found = check_state(given, hooks) if isinstance(given, nn.Module) else []
        model = check_model(given)
    return model, (f'measured with hooks="keep", with {_listed(found)}',) if found else ()


@contextmanager
def unchanged(model: HookedModel) -> Iterator[None]:
    """Measure a model in evaluation mode; an error at the end if a parameter has changed.

    Raises:
        ModelStateError: it has, or was made in inference mode, which counts no edits.
    """
    with torch.inference_mode(False), evaluating(model):
        if name := next((n for n, p in model.named_parameters() if p.is_inference()), ""):
            raise ModelStateError(f"{plain_path(name)} was made in torch.inference_mode: load the model outside it")
        before = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
        yield
        after = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
        if name := next((n for n in (*before, *after) if before.get(n) != after.get(n)), ""):
            raise ModelStateError(f"{plain_path(name)} changed while the model was measured: measure it again")


def check_finite(model: HookedModel, tokens: Int[Tensor, " pos"]) -> None:
    """Raise ValueError if a weight, or a logit of a prompt, is not finite; names the first one with its place."""
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        if not torch.isfinite(value.sum()) and not bool(torch.isfinite(value).all()):
            place = (~torch.isfinite(value)).nonzero()[0].tolist()
            raise ValueError(f"{plain_path(name)}{place} is {float(value[tuple(place)])}: the checkpoint is damaged")
    with evaluating(model):
        logits = run(model, tokens[None], return_type="logits")
    if isinstance(logits, Tensor) and not bool(torch.isfinite(logits).all()):
        place = (~torch.isfinite(logits[0])).nonzero()[0].tolist()
        raise ValueError(f"the logits of the first prompt are not finite from position {place[0]} on: try float32")
