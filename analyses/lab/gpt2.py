"""A lab model as Hugging Face's GPT-2: the same weights in another layout."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import Norm


def as_gpt2(model: Any) -> Any:
    """Return a `GPT2LMHeadModel` with the weights and logits of a lab model that lacks nothing (`not_gpt2`).

    The lab's `Norm` stays where it is no LayerNorm, and so do an unembedding bias and matrix of the model's own; a
    model with such parts is a GPT-2 in memory only: `from_pretrained` would not read it back.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    cfg = model.cfg
    ends, first = getattr(model.tokenizer, "eos_token_id", None), next(model.parameters())
    made: Any = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=cfg.d_vocab, n_positions=cfg.n_ctx, n_embd=cfg.d_model, n_layer=cfg.n_layers,
            n_head=cfg.n_heads, n_inner=cfg.d_mlp, activation_function=cfg.act_fn, layer_norm_epsilon=cfg.eps,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=ends, eos_token_id=ends,
            tie_word_embeddings=cfg.tied,
        )
    )  # fmt: skip
    made = made.to(device=first.device, dtype=first.dtype).eval()
    with torch.no_grad():
        _copy_weights(model, made)
    body = made.transformer
    _put_norm(body, "ln_f", model.ln_final)
    for theirs, ours in zip(body.h, model.blocks, strict=True):
        _put_norm(theirs, "ln_1", ours.ln1)
        _put_norm(theirs, "ln_2", ours.ln2)
    if model.b_U is not None:
        made.lm_head.bias = nn.Parameter(model.b_U.detach().clone())
    return made


def not_gpt2(cfg: Any) -> str:
    """What GPT-2 has and a model of this `LabConfig` has not (kinds of norms apart); empty if there is nothing."""
    needed = {
        "a norm at every place": None not in (cfg.norm, cfg.norm_mlp, cfg.norm_final),
        "its norms before attention and MLP": cfg.norm_order == "pre",
        "learned positions and causal attention": cfg.positions == "learned" and cfg.causal,
        "heads as wide as d_model / n_heads": cfg.n_heads * (cfg.d_head or 0) == cfg.d_model,
    }
    return next((text for text, there in needed.items() if not there), "")


def _copy_weights(model: Any, made: Any) -> None:
    """Everything but norms and the unembedding's bias; biases that the lab model does not have are 0."""
    own = {k: v.detach() for k, v in model.state_dict().items()}
    weights: dict[str, Tensor] = {
        "transformer.wte.weight": own["embed.W_E"],
        "transformer.wpe.weight": own["pos_embed.W_pos"],
    }
    if not model.cfg.tied:
        weights["lm_head.weight"] = model.W_U.detach().T
    for layer in range(model.cfg.n_layers):
        here, there = f"blocks.{layer}", f"transformer.h.{layer}"
        read = [own[f"{here}.attn.W_{part}"].transpose(0, 1).flatten(1) for part in "QKV"]
        weights[f"{there}.attn.c_attn.weight"] = torch.cat(read, dim=1)
        weights[f"{there}.attn.c_proj.weight"] = own[f"{here}.attn.W_O"].flatten(0, 1)
        weights |= {f"{there}.mlp.c_{a}.weight": own[f"{here}.mlp.W_{b}"] for a, b in (("fc", "in"), ("proj", "out"))}
        if model.cfg.bias_qkv:
            weights[f"{there}.attn.c_attn.bias"] = torch.cat([own[f"{here}.attn.b_{p}"].flatten() for p in "QKV"])
        biases = ("attn.c_proj", "attn.b_O"), ("mlp.c_fc", "mlp.b_in"), ("mlp.c_proj", "mlp.b_out")
        weights |= {f"{there}.{a}.bias": own[f"{here}.{b}"] for a, b in biases if f"{here}.{b}" in own}
    for name, parameter in made.named_parameters():
        if name in weights:
            parameter.copy_(weights[name])
        elif name.endswith("bias"):
            parameter.zero_()


def _put_norm(parent: nn.Module, name: str, norm: Norm) -> None:
    """Give a LayerNorm the lab norm's gain and bias, or put a copy of the lab norm in its place."""
    if not norm.is_layer_norm:
        setattr(parent, name, copy.deepcopy(norm))
        return
    own = getattr(parent, name)
    with torch.no_grad():
        own.weight.copy_(1.0 if norm.w is None else norm.w)
        own.bias.copy_(0.0 if norm.b is None else norm.b)
