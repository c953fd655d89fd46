"""Check the model that `analyze` and its likes are given, and lists of its layers and heads.

A hook not put on the model by TransformerLens, ln_probe or the loader is a user's: it is refused, or
measured with (`hooks="keep"`), which the report says.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ln_probe.hooks.model import (
    HookedModel,
    check_model,
    device_of,
    edits_on,
    evaluating,
    hugging_face_classes,
    plain_path,
    whole_number,
)

REFUSE, KEEP = "refuse", "keep"
# Where torch keeps the hooks of a module.
_STORES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Packages whose hooks belong to the model: they run it, load it or place it.
_OWN = ("ln_probe", "transformer_lens", "transformers", "accelerate", "torch")
_WRAPPERS = ("peft", "sae_lens")  # packages whose modules change what the model around them computes
_NAMED = 5  # hooks that a message names
ON_MPS = "the model is on Apple's MPS, which has no float64: a copy of it was measured on the CPU"
LARGEST_SEED = 10**18  # torch takes 63 bits


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
        if path and (edits := edits_on(module)):  # (the model itself is no norm)
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
    is_original = isinstance(given, hugging_face_classes())
    if tokenizer is not None and not is_original:
        raise ValueError(f"tokenizer= is for a Hugging Face model in memory: a {type(given).__name__} has its own")
    if isinstance(given, nn.Module) and device_of(given.parameters()).type == "mps":
        notes += (ON_MPS,)
        warnings.warn(ON_MPS, stacklevel=3)
        given = copy.deepcopy(given).to("cpu")
    model = check_model(given)
    if is_original:
        model.__dict__["_tokenizer"] = tokenizer  # as the bridge's property reads it
    return model, notes


@contextmanager
def unchanged(model: HookedModel) -> Iterator[None]:
    """Measure a model in evaluation mode; raise ModelStateError at the end if a parameter has changed."""
    with torch.inference_mode(False), evaluating(model):
        before = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
        # Kept, so that no other tensor comes to stand where one stood.
        storage = [p.detach() for _, p in model.named_parameters()]
        yield
        del storage
        after = {name: (p.data_ptr(), p._version) for name, p in model.named_parameters()}
        if name := next((n for n in (*before, *after) if before.get(n) != after.get(n)), ""):
            raise ModelStateError(f"{plain_path(name)} changed while the model was measured: measure it again")


def indices(values: Any, what: str, count: int) -> list[int]:
    """Return a list of layers or heads; negative layers count from the end.

    Raises:
        TypeError, ValueError: no list of whole numbers, an empty one, or one that the model lacks.
    """
    try:
        numbers = [whole_number(value, what) for value in values]
    except (TypeError, ValueError):
        raise TypeError(f"{what}s must be a list of whole numbers, such as [0, 1], got {values!r}") from None
    if what == "layer":
        numbers = [i + count if -count <= i < 0 else i for i in numbers]
    if wrong := [i for i in numbers if not 0 <= i < count]:
        raise ValueError(f"no {what} {wrong[0]}: the model has {what}s 0 … {count - 1}")
    if not numbers:
        raise ValueError(f"an empty list of {what}s leaves nothing to analyze: None means all")
    return numbers


def seed_of(value: Any) -> int:
    """Return a seed; ValueError unless it is a whole number, 0 or more and at most 10^18."""
    seed = whole_number(value, "seed", 0)
    if seed > LARGEST_SEED:
        raise ValueError("seed must be at most 10^18")
    return seed
