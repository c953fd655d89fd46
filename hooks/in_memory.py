"""Give a Hugging Face model in memory hook points: a TransformerBridge around a copy that shares its weights."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn


def same_weights(model: nn.Module) -> Any:
    """A copy of a model's structure around the very same parameters and buffers: it costs next to no memory.

    Changes to the copy's modules (wrapping, hooks, attention kernels) leave the model as it is.
    """
    shared = {id(t): t for t in chain(model.parameters(), model.buffers())}
    # What a pass has left on a module with its graph (a bridge's attention pattern) has no copy.
    left = (value for module in model.modules() for value in vars(module).values())
    shared |= {id(t): t.detach() for t in left if isinstance(t, torch.Tensor) and not t.is_leaf}
    return copy.deepcopy(model, dict(shared))


def complete_biases(model: nn.Module) -> tuple[str, ...]:
    """Give a GPT-NeoX without attention biases zero ones: TransformerLens stumbles over none."""
    config: Any = model.config
    if config.model_type != "gpt_neox" or config.attention_bias:
        return ()
    for name, module in model.named_modules():
        if name.endswith((".query_key_value", ".attention.dense")) and isinstance(module, nn.Linear):
            module.bias = nn.Parameter(torch.zeros(module.out_features, dtype=module.weight.dtype))
    config.attention_bias = True
    return ("the model has no attention biases: zeros were put in their place",)


def complete_token_ids(config: Any) -> None:
    """Give a config the ids of special tokens that it lacks, as None.

    TransformerLens and some of transformers' own models read them without a default.
    """
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):
            setattr(config, name, None)


def is_hugging_face(model: object) -> bool:
    """Whether this is a plain Hugging Face model; imports nothing."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


_WRAPPED: WeakKeyDictionary[nn.Module, tuple[list[int], nn.Module]] = WeakKeyDictionary()


def wrapped(model: Any) -> nn.Module:
    """Return a bridge around a copy of a Hugging Face model that shares its parameters; the same one the next time.

    Raises:
        ValueError: TransformerLens has no bridge for the architecture.
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    parameters = [id(p) for p in model.parameters()]
    if model not in _WRAPPED or _WRAPPED[model][0] != parameters:
        copied = same_weights(model)
        complete_token_ids(copied.config)
        complete_biases(copied)
        copied.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
        first = next(model.parameters())
        try:
            bridge: nn.Module = build_bridge_from_module(
                copied, type(model).__name__, hf_config=copied.config, tokenizer=None, dtype=first.dtype,
                device=first.device, model_name="local",
            )  # fmt: skip
        except (ValueError, KeyError, AttributeError, NotImplementedError) as error:
            raise ValueError(f"TransformerLens has no bridge for this {type(model).__name__}: {error}") from error
        _WRAPPED[model] = parameters, bridge.train(model.training)
    return _WRAPPED[model][1]


def in_original(model: nn.Module, copied: nn.Module, module: nn.Module) -> nn.Module:
    """The module of a Hugging Face model of which a bridge's module wraps that of a copy.

    Raises:
        ValueError: there is none.
    """
    path = next((p for p, m in copied.named_modules() if m is getattr(module, "original_component", None)), "")
    if not path:
        raise ValueError(f"a {type(module).__name__} of the bridge wraps no module of {type(model).__name__}")
    return model.get_submodule(path.replace("._original_component", ""))


def original_sites(model: Any, sites: Sequence[Any]) -> list[Any]:
    """The sites of `wrapped(model)` with the norms of the Hugging Face model itself; ValueError if there are none."""
    copied: Any = wrapped(model).original_model
    return [replace(site, module=in_original(model, copied, site.module)) for site in sites]
