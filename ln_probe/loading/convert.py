"""Convert a Hugging Face model to HookedTransformer, or wrap it in a TransformerBridge.

HookedTransformer exists up to TransformerLens 3, TransformerBridge in 3 and 4. The conversion derives its config from a
few fields and is silently wrong where a checkpoint uses others: `hooked_obstacle` names the known cases, and the caller
compares logits for the rest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from ln_probe.hooks.model import context_of_config
from ln_probe.loading.pretrained import Pretrained

if TYPE_CHECKING:
    import torch
    from torch import nn

World = Literal["hooked", "bridge"]

CLASS_OF_WORLD: dict[World, str] = {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}

# Converted faithfully unless hooked_obstacle says otherwise (measured: logits against Hugging Face).
_CONVERTED = (
    "GPT2LMHeadModel",
    "GPTNeoForCausalLM",
    "GPTNeoXForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "OPTForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)

# The conversion guesses an architecture from these words anywhere in a folder's path.
_MISREAD_WORDS = ("bert", "gemma", "hubert", "llama", "t5", "wav2vec2")


def has_hooked_transformer() -> bool:
    """Whether the installed TransformerLens still has HookedTransformer (`hasattr` raises there too)."""
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return False
    return True


def hooked_obstacle(pretrained: Pretrained) -> str | None:
    """Return why HookedTransformer cannot hold this model faithfully, or None if no reason is known."""
    config, architecture = pretrained.config, pretrained.architecture
    if not has_hooked_transformer():
        return "this version of TransformerLens has no HookedTransformer"
    if architecture not in _CONVERTED:
        return f"its conversion of {architecture} is not known to be faithful"
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    if architecture in ("GPT2LMHeadModel", "GPTNeoForCausalLM"):
        inner = getattr(config, "n_inner", None) or getattr(config, "intermediate_size", None)
        if inner is not None and inner != 4 * hidden:
            return f"it takes an MLP width of 4 x {hidden}, and this model's is {inner}"
    if architecture == "OPTForCausalLM" and (config.word_embed_proj_dim != hidden or not config.do_layer_norm_before):
        return "it takes OPT with embeddings as wide as the residual stream and norms before attention and MLP"
    head_dim = getattr(config, "head_dim", None)
    if architecture != "Qwen3ForCausalLM" and head_dim is not None and head_dim * heads != hidden:
        return f"it takes a head width of {hidden} / {heads}, and this model's is {head_dim}"
    for field, what in (("attention_bias", "attention"), ("mlp_bias", "MLP")):
        if getattr(config, field, False) and architecture == "LlamaForCausalLM":
            return f"its conversion of Llama drops {what} biases, and this model has them"
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        # A scaled rope may differ only beyond the positions that are compared.
        return f"rotary scaling of type {kind!r} cannot be checked on a few tokens"
    return None


def to_hooked(pretrained: Pretrained, *, dtype: torch.dtype, device: torch.device, hub_name: str | None) -> nn.Module:
    """Convert to HookedTransformer, weights unprocessed; `hub_name`: the repository's, of a model from the hub."""
    from transformer_lens import HookedTransformer
    from transformer_lens import loading_from_pretrained as loading

    config = pretrained.config
    with _neutral_folder() as folder:
        written = config.to_dict() | {"architectures": [pretrained.architecture]}
        written.setdefault("n_ctx", getattr(config, "n_positions", None))  # read for GPT-2, no longer written
        (folder / "config.json").write_text(json.dumps(written, default=str), encoding="utf-8")
        cfg = loading.get_pretrained_model_config(str(folder), dtype=dtype, device=str(device))
        cfg.tokenizer_name = None  # else it looks for a tokenizer in the folder that is about to vanish
        cfg.model_name = "local" if hub_name is None else hub_name.rpartition("/")[2]
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
        if theta is not None and pretrained.architecture == "GPTNeoXForCausalLM":
            cfg.rotary_base = theta  # the conversion leaves it at 10000
        state = loading.get_pretrained_state_dict(str(folder), cfg, hf_model=pretrained.model, dtype=dtype)
    with reloadable_tokenizer(pretrained.tokenizer) as tokenizer:
        converted = HookedTransformer(cfg, tokenizer, move_to_device=False)
    converted.load_and_process_state_dict(
        state, fold_ln=False, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    converted.move_model_modules_to_device()
    # TransformerLens caps Mistral's and Qwen's context at 2048, and takes 2048 where the checkpoint has less. Learned
    # positions are left alone: they are as long as their table.
    if cfg.positional_embedding_type == "rotary":
        converted.cfg.n_ctx = context_of_config(config) or converted.cfg.n_ctx
    result: nn.Module = converted.eval()
    return result


def to_bridge(model: Any, architecture: str, tokenizer: Any, *, hub_name: str | None = None, **how: Any) -> nn.Module:
    """Wrap in a TransformerBridge, weights unprocessed. The bridge takes the model over and changes it."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    how |= {"hf_config": model.config, "model_name": hub_name or "local"}
    with reloadable_tokenizer(tokenizer) as own:
        bridge: nn.Module = build_bridge_from_module(model, architecture, tokenizer=own, **how)
    return bridge.eval()


@contextmanager
def _neutral_folder() -> Iterator[Path]:
    """Make a temporary folder whose path has none of the words that the conversion looks for."""
    for base in (None, None, None, "/tmp", "/tmp"):  # their names are random
        with TemporaryDirectory(dir=base) as folder:
            if not any(word in folder.lower() for word in _MISREAD_WORDS):
                yield Path(folder)
                return
    raise OSError(
        f"TransformerLens takes {', '.join(_MISREAD_WORDS)} in the path of temporary files for an architecture: set "
        "TMPDIR to another folder, or use world='bridge'."
    )


@contextmanager
def reloadable_tokenizer(tokenizer: Any) -> Iterator[Any]:
    """Save the tokenizer to a folder and load it from there: TransformerLens reloads it by name to prepend a BOS.

    A tokenizer out of a .gguf file cannot be reloaded by its name.
    """
    if tokenizer is None:
        yield None
        return
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        yield AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
