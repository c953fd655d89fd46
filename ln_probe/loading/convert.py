"""A Hugging Face or lab model as a TransformerLens model, whose logits are compared with the original's.

HookedTransformer exists up to TransformerLens 3, TransformerBridge in 3 and 4. The conversion to HookedTransformer
derives its config from a few fields and is silently wrong where a checkpoint uses others: `hooked_obstacle` names the
known cases, and the logits on a few tokens decide in all others. The norms of a lab model take the places of
TransformerLens's; they have the same hook points.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformer_lens.model_bridge.sources import build_bridge_from_module
from transformers import AutoTokenizer, GPT2Config

from ln_probe.analyses.lab.gpt2 import as_gpt2, not_gpt2
from ln_probe.hooks.model import SAME_LOGITS, context_of_config, ordinary_tokens, relative_difference
from ln_probe.loading.pretrained import Pretrained, isolated, one_line
from ln_probe.loading.source import ModelSource, remember

if TYPE_CHECKING:
    from ln_probe.analyses.lab.norms import Norm
    from ln_probe.analyses.lab.transformer import LabTransformer

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
    """Return whether the installed TransformerLens still has HookedTransformer (`hasattr` raises there too)."""
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return False
    return True


# ---------------------------------------------------------- Hugging Face models


def into_transformer_lens(
    pretrained: Pretrained, source: ModelSource, world: World | None, *, hub_name: str | None = None
) -> nn.Module:
    """Convert or wrap a Hugging Face model, compare its logits with the original's, and record the source.

    Args:
        pretrained: the model; a bridge takes it over.
        source: where it came from.
        world: the class asked for, or None to take the first that reproduces the original.
        hub_name: the repository's name if the model came from the hub.

    Raises:
        ValueError: the class asked for cannot hold the model, or no class reproduces its logits.
    """
    original: Any = pretrained.model
    options: dict[str, Any] = {"dtype": getattr(torch, source.dtype), "device": next(original.parameters()).device}
    tokens, notes = ordinary_tokens(pretrained.config, options["device"]), list(source.notes)
    obstacle = hooked_obstacle(pretrained)
    if world == "hooked" and obstacle is not None:
        raise ValueError(f"{source.name} cannot be a HookedTransformer: {obstacle}. Use world='bridge'.")
    candidates: list[World] = [world] if world is not None else ["bridge"] if obstacle else ["hooked", "bridge"]
    if world is None and obstacle and has_hooked_transformer():  # otherwise there is nothing to explain
        notes.append(f"TransformerBridge, not HookedTransformer: {obstacle}")
    with torch.no_grad():
        reference: Tensor = original(tokens).logits
    if not bool(reference.isfinite().all()):
        raise ValueError(f"{source.name}: its logits are not finite in {source.dtype}: try float32 or bfloat16.")
    for chosen in candidates:
        try:
            if chosen == "bridge":
                model = to_bridge(original, pretrained.architecture, pretrained.tokenizer, hub_name=hub_name, **options)
            else:
                model = to_hooked(pretrained, hub_name=hub_name, **options)
            difference = _difference(model, tokens, reference)
            break
        except Exception as error:  # where TransformerLens fails, its other class may succeed
            if chosen == candidates[-1]:
                raise ValueError(
                    f"{source.name} ({source.architecture}) could not be loaded faithfully as {CLASS_OF_WORLD[chosen]} "
                    f"of TransformerLens {source.transformer_lens_version}: {one_line(error)}."
                ) from error
            notes.append(f"TransformerBridge, not HookedTransformer: {one_line(error)}")
    if pretrained.tokenizer is not None:
        notes += settle_tokenizer(model, pretrained.tokenizer, int(pretrained.config.vocab_size))
    # Conversion to HookedTransformer drops them; a bridge would pass an ordinary assignment on to what it wraps.
    kinds = ("eos", "bos", "pad")
    model.__dict__["special_token_ids"] = {k: getattr(pretrained.config, f"{k}_token_id", None) for k in kinds}
    model.__dict__["missing_head"] = pretrained.missing_head
    remember(model, source, world=CLASS_OF_WORLD[chosen], logits_max_difference=difference, notes=tuple(notes))
    return model


def hooked_obstacle(pretrained: Pretrained) -> str | None:
    """Return why HookedTransformer cannot hold this model faithfully, or None if no reason is known."""
    config, architecture = pretrained.config, pretrained.architecture
    if not has_hooked_transformer():
        return "this version of TransformerLens has no HookedTransformer"
    if architecture not in _CONVERTED:
        return f"its conversion of {architecture} is not known to be faithful"
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
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
        written.setdefault("n_ctx", getattr(config, "n_positions", None))
        (folder / "config.json").write_text(json.dumps(written, default=str), encoding="utf-8")
        cfg = loading.get_pretrained_model_config(str(folder), dtype=dtype, device=str(device))
        cfg.tokenizer_name = None  # else it looks for a tokenizer in the folder that is about to vanish
        cfg.model_name = "local" if hub_name is None else hub_name.rpartition("/")[2]
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
        if theta is not None and pretrained.architecture == "GPTNeoXForCausalLM":
            cfg.rotary_base = theta  # the conversion leaves it at 10000
        state = loading.get_pretrained_state_dict(str(folder), cfg, hf_model=pretrained.model, dtype=dtype)
    with _reloadable(pretrained.tokenizer) as tokenizer:
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
    how |= {"hf_config": model.config, "model_name": hub_name or "local"}
    with _reloadable(tokenizer) as own:
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
    raise OSError(f"set TMPDIR to a folder without {', '.join(_MISREAD_WORDS)} in its path, or use world='bridge'")


@contextmanager
def _reloadable(tokenizer: Any) -> Iterator[Any]:
    """Save a tokenizer to a folder and load it from there: TransformerLens reloads it by name to prepend a BOS."""
    if tokenizer is None:
        yield None
        return
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        yield AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def settle_tokenizer(model: Any, original: Any, d_vocab: int) -> tuple[str, ...]:
    """Undo what TransformerLens does to a tokenizer without begin, end or padding marks; return a note on them.

    It invents ``<|endoftext|>`` for them, which has no id at all, or the first one beyond the embedding, so
    that every text would begin with a token that the model cannot look up.
    """
    tokenizer = model.tokenizer
    tokenizer.name_or_path = original.name_or_path  # not the temporary copy's
    ids = min(d_vocab, len(original))

    def exists(token_id: int | None) -> bool:
        return token_id is not None and token_id < ids

    if not exists(tokenizer.pad_token_id):
        stand_in = tokenizer.unk_token if exists(tokenizer.unk_token_id) else None
        tokenizer.pad_token = stand_in or tokenizer.convert_ids_to_tokens(ids - 1)
    if exists(tokenizer.bos_token_id):
        return ()
    model.cfg.default_prepend_bos = False
    return ("the tokenizer has no begin or end mark: none is put before a text by default",)


# ------------------------------------------------------------------- lab models


def lab_model(trained: LabTransformer, source: ModelSource, world: World | None) -> nn.Module:
    """Convert a lab model, compare its logits with the lab model's, and record its source.

    Without `world`, that is a TransformerBridge in every version of TransformerLens; a model that is
    no GPT-2 but for its norms (post-norm, not causal, other positions) stays as it was trained.

    Raises:
        ValueError: such a model and a world, or logits that are not the lab model's.
    """
    if missing := not_gpt2(trained.cfg):
        if world is not None:
            raise ValueError(
                f"{source.name} can only be used as it was trained: a TransformerLens model here is a GPT-2, which has "
                f"{missing}. Leave out world={world!r}."
            )
        remember(trained, source)
        return trained
    if world == "hooked" and not has_hooked_transformer():
        raise ValueError(
            f"{source.name}: this version of TransformerLens has no HookedTransformer. Use world='bridge'."
        )
    world = world or "bridge"
    with isolated():
        model = _lab_hooked(trained) if world == "hooked" else _lab_bridge(trained)
        if trained.tokenizer is not None:
            settle_tokenizer(model, trained.tokenizer, trained.cfg.d_vocab)
        shape = GPT2Config(vocab_size=trained.cfg.d_vocab, n_positions=trained.cfg.n_ctx)
        tokens = ordinary_tokens(shape, next(trained.parameters()).device)
        with torch.no_grad():
            difference = _difference(model, tokens, trained(tokens))
    ends = getattr(trained.tokenizer, "eos_token_id", None)
    model.__dict__["special_token_ids"] = {"eos": ends, "bos": ends, "pad": None}
    remember(model, source, world=CLASS_OF_WORLD[world], logits_max_difference=difference)
    return model


def _norms(trained: LabTransformer) -> list[tuple[str, Norm]]:
    names = [f"blocks.{layer}.{norm}" for layer in range(trained.cfg.n_layers) for norm in ("ln1", "ln2")]
    return [(name, cast("Norm", trained.get_submodule(name))) for name in (*names, "ln_final")]


def _norm_type(trained: LabTransformer) -> str:
    """Return what TransformerLens's config calls the norms; a name not its own keeps it from folding them."""
    return "LN" if all(norm.is_layer_norm for _, norm in _norms(trained)) else str(trained.cfg.norm)


def _lab_hooked(trained: LabTransformer) -> nn.Module:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    own, first = trained.cfg, next(trained.parameters())
    names = ("n_layers", "d_model", "n_heads", "d_head", "d_mlp", "d_vocab", "n_ctx", "act_fn", "eps")
    cfg = HookedTransformerConfig(
        **{name: getattr(own, name) for name in names},
        normalization_type="LN",
        init_weights=False,
        model_name="local",
        device=str(first.device),
        dtype=first.dtype,
    )
    with _reloadable(trained.tokenizer) as tokenizer:
        model = HookedTransformer(cfg, tokenizer, move_to_device=False)
    for name, norm in _norms(trained):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, copy.deepcopy(norm))
    weights = dict(trained.state_dict()) | {"unembed.W_U": trained.W_U}
    weights.pop("unembed.untied", None)
    state = model.state_dict()
    for name, tensor in state.items():  # biases and gains that the lab model does not have
        if name not in weights and name.rpartition(".")[2].startswith(("b", "w")):
            weights[name] = torch.full_like(tensor, float(name.endswith(".w")))
    model.load_state_dict(state | weights)
    model.cfg.normalization_type = _norm_type(trained)
    model.setup()
    return cast("nn.Module", model.to(first.device).eval())


class NormBridge(NormalizationBridge):
    """A lab norm in a TransformerBridge, whose own component computes a LayerNorm whatever it wraps."""

    def forward(self, hidden_states: Tensor, **_kwargs: Any) -> Tensor:
        norm: Any = self.original_component
        out: Tensor = self.hook_out(norm.inner(self.hook_in(hidden_states), self))
        return out


def _lab_bridge(trained: LabTransformer) -> nn.Module:
    gpt2 = as_gpt2(trained)
    gpt2.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
    norms = dict(_norms(trained))

    def with_own_norms(adapter: Any) -> None:
        places = adapter.component_mapping
        of_block = places["blocks"].submodules
        for name, parts in (("blocks.0.ln1", of_block), ("blocks.0.ln2", of_block), ("ln_final", places)):
            if not norms[name].is_layer_norm:
                leaf = name.rpartition(".")[2]
                parts[leaf] = NormBridge(name=parts[leaf].name, config=parts[leaf].config)

    bridge: Any = to_bridge(gpt2, "GPT2LMHeadModel", trained.tokenizer, post_adapter_hook=with_own_norms)
    bridge.cfg.normalization_type = _norm_type(trained)
    return cast("nn.Module", bridge)


def _difference(model: Callable[..., Tensor], tokens: Tensor, reference: Tensor) -> float:
    """Return the difference of a model's logits from the original's; ValueError if it is larger than rounding."""
    with torch.no_grad():
        difference, bound = relative_difference(model(tokens), reference), SAME_LOGITS[reference.dtype]
    if not difference <= bound:
        raise ValueError(f"its logits are {difference:.1e} of the largest off the original's (bound {bound:.0e})")
    return difference
