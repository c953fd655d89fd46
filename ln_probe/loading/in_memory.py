"""A Hugging Face model that a user holds, as a TransformerBridge, while the user's own stays as it is."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


def is_hugging_face(model: object) -> bool:
    """Whether this is a plain Hugging Face model; imports nothing."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def bridged(model: Any, tokenizer: Any = None) -> nn.Module:
    """A TransformerBridge with the weights of a Hugging Face model, compared once with its own logits.

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
    from ln_probe.loading.pretrained import Pretrained, complete_token_ids, supported_architectures
    from ln_probe.loading.provenance import ModelSource, sha256_of_state, transformer_lens_version
    from ln_probe.loading.quiet import offline, own_random_numbers, quiet
    from ln_probe.loading.worlds import Processing

    check_weights(model)
    architecture, first = type(model).__name__, next(model.parameters())
    if architecture not in supported_architectures():
        raise ValueError(_unsupported(architecture))
    dtype = str(first.dtype).removeprefix("torch.")
    with quiet(), offline(), own_random_numbers():
        own = same_logits.same_weights(model)
        complete_token_ids(own.config)
        own.config.architectures = [architecture]
        with evaluating(model):
            tokens = same_logits.probe_tokens(own.config, first.device)
            with torch.no_grad():
                reference = same_logits.logits_of(lambda ids: model(ids).logits, tokens)
        own.eval()
        own.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
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
            notes=("a Hugging Face model in memory, wrapped in a bridge for the measurement",),
        )
        pretrained = Pretrained(own, architecture, tokenizer, ())
        return into_world(pretrained, source, first.device, first.dtype, "bridge", Processing(), reference=reference)


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
