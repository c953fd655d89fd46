"""A Hugging Face model that a user holds, as a TransformerBridge, while the user's own stays as it is."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_hugging_face(model: object) -> bool:
    """Whether this is a plain Hugging Face model; imports nothing."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def bridged(model: Any, tokenizer: Any = None) -> nn.Module:
    """A TransformerBridge with the weights of a Hugging Face model, compared once with its own logits; a
    HookedTransformer where the bridge is not the model and TransformerLens has that class.

    Args:
        model: a `PreTrainedModel` with a language-model head; neither it nor its modules are changed.
        tokenizer: its tokenizer, for prompts that are texts.

    Raises:
        ValueError: quantized weights or none (meta device), no language-model head, an architecture that
            TransformerLens has no bridge for, or a bridge whose logits are not the model's.
    """
    import torch

    from ln_probe.hooks.model import check_weights, evaluating
    from ln_probe.loading import same_logits
    from ln_probe.loading.faithful import into_world
    from ln_probe.loading.pretrained import (
        Pretrained,
        complete_biases,
        complete_token_ids,
        supported_architectures,
    )
    from ln_probe.loading.provenance import UNKNOWN_HEAD, ModelSource, sha256_of_state, transformer_lens_version
    from ln_probe.loading.quiet import offline, own_random_numbers, quiet
    from ln_probe.loading.worlds import Processing, hooked_obstacle

    check_weights(model)
    architecture, first = type(model).__name__, next(model.parameters())
    if architecture not in supported_architectures():
        raise ValueError(_unsupported(architecture))
    dtype = str(first.dtype).removeprefix("torch.")

    notes: list[str] = []

    def prepared() -> Any:
        notes.clear()
        copied = same_logits.same_weights(model)
        complete_token_ids(copied.config)
        copied.config.architectures = [architecture]
        notes.extend(complete_biases(copied))
        copied.eval()
        copied.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
        return copied

    with quiet(), offline(), own_random_numbers():
        own = prepared()
        with evaluating(model):
            tokens = same_logits.probe_tokens(own.config, first.device)
            with torch.no_grad():
                reference = same_logits.logits_of(lambda ids: model(ids).logits, tokens)
        source = ModelSource(
            name=str(getattr(model.config, "_name_or_path", "") or architecture),
            kind="memory",
            revision=None,
            commit=None,
            weights_sha256=sha256_of_state(model),
            architecture=architecture,
            world="",
            dtype=dtype,
            transformer_lens_version=transformer_lens_version(),
            notes=(f"a Hugging Face model in memory, wrapped in a bridge for the measurement; {UNKNOWN_HEAD}", *notes),
        )
        how: dict[str, Any] = {
            "device": first.device,
            "dtype": first.dtype,
            "processing": Processing(),
            "reference": reference,
        }
        try:
            return into_world(Pretrained(own, architecture, tokenizer, ()), source, world="bridge", **how)
        except ValueError as error:
            again = Pretrained(prepared(), architecture, tokenizer, ())
            if hooked_obstacle(again) is not None:
                raise
            first_note = source.notes[0].replace("wrapped in a bridge", "converted to HookedTransformer")
            source = replace(source, notes=(first_note, *source.notes[1:], f"not a TransformerBridge: {error}"))
            try:
                return into_world(again, source, world="hooked", **how)
            except ValueError:
                raise error from error.__cause__


def _unsupported(architecture: str) -> str:
    from ln_probe.loading.pretrained import supported_architectures

    stem = architecture.removesuffix("Model")
    headed = [name for name in supported_architectures() if name.startswith(stem) and stem != architecture]
    if headed:
        return (
            f"{architecture} has no language-model head, which TransformerLens asks for: pass the "
            f"{' or '.join(headed)} around it"
        )
    return (
        f"TransformerLens has no bridge for {architecture}: ln_probe.loading.pretrained.supported_architectures() "
        "lists those it has"
    )
