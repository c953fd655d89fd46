"""A lab model as HookedTransformer or TransformerBridge: a GPT-2 whose norms are the lab's own.

The lab's norms take the places of TransformerLens's; they have the same hook points. (In a bridge, a LayerNorm is the
bridge's own component.)
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from transformer_lens.model_bridge.generalized_components import NormalizationBridge
from transformers import GPT2Config

from ln_probe.analyses.lab.gpt2 import as_gpt2, not_gpt2
from ln_probe.loading.convert import CLASS_OF_WORLD, has_hooked_transformer, reloadable_tokenizer, to_bridge
from ln_probe.loading.pretrained import isolated
from ln_probe.loading.provenance import ModelSource, remember
from ln_probe.loading.verify import (
    CONVERSION_BOUND,
    logits_of,
    probe_tokens,
    relative_difference,
    settle_tokenizer,
)

if TYPE_CHECKING:
    from ln_probe.analyses.lab.norms import Norm
    from ln_probe.analyses.lab.transformer import LabTransformer
    from ln_probe.loading.convert import World


def into_transformer_lens(trained: LabTransformer, source: ModelSource, world: World | None) -> nn.Module:
    """Convert a lab model, compare its logits with the lab model's, and record its source.

    Without `world`, that is a TransformerBridge, in every version of TransformerLens the same class (a pass of a
    HookedTransformer takes one and a half times as long); a model that is no GPT-2 but for its norms (post-norm, not
    causal, other positions) stays as it was trained.

    Raises:
        ValueError: such a model and a world, or logits that are not the lab model's.
    """
    if missing := not_gpt2(trained.cfg, own_norms=True):
        if world is not None:
            raise ValueError(
                f"{source.name} can only be used as it was trained: a TransformerLens model here is a GPT-2, which has "
                f"{missing}. Leave out world={world!r}."
            )
        remember(trained, source)
        return trained
    if world == "hooked" and not has_hooked_transformer():
        raise ValueError(
            f"{source.name} cannot be a HookedTransformer: TransformerLens {source.transformer_lens_version} has none. "
            "Use world='bridge'."
        )
    world = world or "bridge"
    with isolated():
        model = _hooked(trained) if world == "hooked" else _bridge(trained)
        if trained.tokenizer is not None:
            settle_tokenizer(model, trained.tokenizer, trained.cfg.d_vocab)
        shape = GPT2Config(vocab_size=trained.cfg.d_vocab, n_positions=trained.cfg.n_ctx)
        tokens = probe_tokens(shape, next(trained.parameters()).device)
        difference = relative_difference(logits_of(model, tokens), logits_of(trained, tokens))
        if not difference <= CONVERSION_BOUND[source.dtype]:
            raise ValueError(
                f"{source.name}: as {CLASS_OF_WORLD[world]} of TransformerLens {source.transformer_lens_version} its "
                f"logits are {difference:.1e} of the largest off those of the model that was trained."
            )
    ends = getattr(trained.tokenizer, "eos_token_id", None)
    model.__dict__["special_token_ids"] = {"eos": ends, "bos": ends, "pad": None}
    remember(model, source, world=CLASS_OF_WORLD[world], logits_max_difference=difference)
    return model


def _norms(trained: LabTransformer) -> list[tuple[str, Norm]]:
    names = [f"blocks.{layer}.{norm}" for layer in range(trained.cfg.n_layers) for norm in ("ln1", "ln2")]
    return [(name, cast("Norm", trained.get_submodule(name))) for name in (*names, "ln_final")]


def _norm_type(trained: LabTransformer) -> str:
    """What TransformerLens's config calls the norms; anything but its own names keeps it from folding them."""
    return "LN" if all(norm.is_layer_norm for _, norm in _norms(trained)) else str(trained.cfg.norm)


def _hooked(trained: LabTransformer) -> nn.Module:
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    own, first = trained.cfg, next(trained.parameters())
    cfg = HookedTransformerConfig(
        n_layers=own.n_layers, d_model=own.d_model, n_heads=own.n_heads, d_head=cast("int", own.d_head),
        d_mlp=own.d_mlp, d_vocab=own.d_vocab, n_ctx=own.n_ctx, act_fn=own.act_fn, eps=own.eps, normalization_type="LN",
        init_weights=False, model_name="local", device=str(first.device), dtype=first.dtype, default_prepend_bos=False,
    )  # fmt: skip
    with reloadable_tokenizer(trained.tokenizer) as tokenizer:
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
    """A norm of the lab in a TransformerBridge, whose own component computes a LayerNorm whatever it wraps."""

    def forward(self, hidden_states: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        norm: Any = self.original_component
        out: torch.Tensor = self.hook_out(norm.inner(self.hook_in(hidden_states), self))
        return out


def _bridge(trained: LabTransformer) -> nn.Module:
    gpt2 = as_gpt2(trained, own_norms=True)
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
    bridge.cfg.default_prepend_bos = False
    return cast("nn.Module", bridge)
