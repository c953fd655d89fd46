"""Refuse a model that would not be measured as it is given, and one that changes while it is measured.

A hook that neither TransformerLens nor ln_probe nor the loader has put on the model is a user's: it is refused, or
measured with (`hooks="keep"`), which the report says.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ln_probe.hooks.model import (
    HookedModel,
    check_model,
    check_weights,
    edits_on,
    evaluating,
    is_hugging_face,
    plain_path,
)
from ln_probe.loading.verify import bridged

REFUSE, KEEP = "refuse", "keep"
# Where torch keeps the hooks of a module.
_STORES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Packages whose hooks belong to the model: they run it, load it or place it.
_OWN = ("ln_probe", "transformer_lens", "transformers", "accelerate", "torch")
_WRAPPERS = ("peft", "sae_lens")  # packages whose modules change what the model around them computes
_NAMED = 5  # hooks that a message names


class ModelStateError(RuntimeError):
    """The model cannot be measured as it is given, or it changed while it was measured."""


def user_hooks(model: nn.Module) -> list[str]:
    """Return the hooks, replaced forwards and wrapped modules on a model that are not its own: place (function)."""
    names = []
    for path, module in model.named_modules():
        place = getattr(module, "name", None) if hasattr(module, "fwd_hooks") else plain_path(path)
        handles = [*getattr(module, "fwd_hooks", ()), *getattr(module, "bwd_hooks", ())]
        given = {h.hook.id: h.user_hook for h in handles if getattr(h, "user_hook", None) is not None}
        functions = [given.get(key, hook) for store in _STORES for key, hook in getattr(module, store).items()]
        if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):
            functions.append(module.__dict__["forward"])
        whole_names = [_name_of(function) for function in functions]
        whole_names = [name for name in whole_names if name.split(".")[0] not in _OWN]
        if path and type(module).__module__.split(".")[0] in _WRAPPERS:
            whole_names.append(f"{type(module).__module__}.{type(module).__name__}")
        names += [f"{place or 'the model'} ({name.removeprefix('__main__.')})" for name in whole_names]
    return names


def _name_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    owner = function if hasattr(function, "__qualname__") else type(function)
    return f"{getattr(function, '__module__', None) or type(function).__module__}.{owner.__qualname__}"


def check_state(model: nn.Module, hooks: str = REFUSE) -> tuple[str, ...]:
    """Return a note on the hooks of users on a model.

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
            name = plain_path(path) or type(module).__name__
            raise ModelStateError(f"{name} is compiled, which calls no hooks: measure the model itself (._orig_mod)")
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise ModelStateError("torch.autocast is on: leave it, or load the model in that format")
    if not (names := user_hooks(model)):
        return ()
    some = f"{len(names)} hook{'s' * (len(names) > 1)}: {'; '.join([*names[:_NAMED], '…'][: len(names)])}"
    if hooks == REFUSE:
        raise ModelStateError(f"the model has {some}. Remove them (model.reset_hooks()), or give hooks={KEEP!r}")
    return (f"measured with hooks={KEEP!r}, with {some}",)


def hooked_model(given: object, tokenizer: Any = None, hooks: str = REFUSE) -> tuple[HookedModel, tuple[str, ...]]:
    """Return the model to measure (a bridge for a Hugging Face model in memory), and a note on its hooks."""
    notes = check_state(given, hooks) if isinstance(given, nn.Module) else ()
    if is_hugging_face(given):
        check_weights(cast(nn.Module, given))
        return check_model(bridged(cast(Any, given), tokenizer)), notes
    if tokenizer is not None:
        raise ValueError(f"tokenizer= is for a Hugging Face model in memory: a {type(given).__name__} has its own")
    return check_model(given), notes


@contextmanager
def unchanged(model: HookedModel) -> Iterator[None]:
    """Measure a model in evaluation mode; raise ModelStateError at the end if a parameter has changed."""
    with torch.inference_mode(False), evaluating(model):
        if name := next((n for n, p in model.named_parameters() if p.is_inference()), ""):
            raise ModelStateError(f"{plain_path(name)} was made in torch.inference_mode: load the model outside it")
        before = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
        yield
        after = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
        if name := next((n for n in (*before, *after) if before.get(n) != after.get(n)), ""):
            raise ModelStateError(f"{plain_path(name)} changed while the model was measured: measure it again")
