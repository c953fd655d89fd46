"""What writes to the residual stream: embeddings, positions, every head, every MLP, and the biases beside them.

A *source* is what one module writes (embeddings, positions, an attention layer, an MLP) or what a norm inside the
stream makes of it (post-norm blocks). A *part* is the finest piece of a source that is told apart: a head, a neuron, a
bias. Heads are read off `z`, the value that attention moved before its output map: head h writes z_h W_O_h.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, blocks

EMBEDDINGS = ("embed", "pos_embed", "token_type_embed")
KINDS_OF_PARTS = ("embedding", "position", "head", "mlp", "neuron", "bias", "norm bias", "unembedding bias")
# What a bridge raises where an architecture has no such weight.
_ABSENT = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Source:
    """What is written at one place.

    Attributes:
        kind: one of EMBEDDINGS, "attn", "mlp", or "norm" (what a norm in the stream puts in its place).
        layer: its block; -1 for embeddings.
        site: name of the norm, for "norm".
    """

    kind: str
    layer: int = -1
    site: str = ""

    def __str__(self) -> str:
        return self.site or (self.kind if self.layer < 0 else f"blocks.{self.layer}.{self.kind}")


@dataclass(frozen=True)
class Part:
    """A piece of the residual stream that has one writer.

    Attributes:
        name: "embed", "L3H5", "L3 mlp", "L3N17" (a neuron), "L3 b_O", "blocks.3.ln1_post bias", …
        kind: one of KINDS_OF_PARTS.
        layer: its block; -1 for embeddings.
        index: head or neuron; -1 for others.
    """

    name: str
    kind: str
    layer: int = -1
    index: int = -1


def weight(owner: object, name: str) -> Tensor | None:
    """A weight by its TransformerLens name; None where the module has none."""
    try:
        value = getattr(owner, name, None)
    except _ABSENT:
        return None
    return value.detach() if isinstance(value, Tensor) else None


def _child(owner: object, *path: str) -> nn.Module | None:
    for name in path:
        try:
            owner = getattr(owner, name, None)
        except _ABSENT:
            return None
    return owner if isinstance(owner, nn.Module) else None


def watched(model: HookedModel) -> Iterator[tuple[Source, nn.Module]]:
    """Every source but norms, with the module whose output shows it (an attention layer's is `z`)."""
    for name in EMBEDDINGS:
        # A bridge's `hook_embed` stands behind a norm of the embeddings (BLOOM), `embed.hook_out` before it; where the
        # embeddings are scaled (Granite), 4.3 calls that for hooks of TransformerLens only: there the module is asked.
        own = _child(model, name)
        scaled = getattr(own, "_output_contribution_scale", 1.0) != 1.0
        module = own if scaled else _child(own, "hook_out") or _child(model, f"hook_{name}")
        if module is not None and (name == "embed" or _child(model, name) is not None or _has_table(model, name)):
            yield Source(name), module
    for layer, block in enumerate(blocks(model)):
        if (z := _child(block, "attn", "hook_z")) is not None:
            yield Source("attn", layer), z
        mlp = _child(block, "mlp")
        # A bridge's MLP can hold the whole block (OPT) or add the stream itself (BLOOM): its output map does not.
        if (out := _child(mlp, "out", "hook_out") or mlp) is not None:
            yield Source("mlp", layer), out


def _has_table(model: HookedModel, name: str) -> bool:
    """Whether positions without a module of their own are added (the laboratory's sinusoidal ones)."""
    return name == "pos_embed" and isinstance(getattr(model, "positions", None), Tensor)


def attention_output(attn: nn.Module) -> nn.Module:
    """The module whose output is what attention writes, bias included (a bridge's BERT adds the stream after it)."""
    return _child(attn, "o", "hook_out") or attn


def neurons_of(model: HookedModel, layer: int) -> tuple[nn.Module, Float[Tensor, "d_mlp d_model"]] | None:
    """Where an MLP's neurons show what they give, and what each writes per unit; None where there is no such place."""
    mlp = _child(blocks(model)[layer], "mlp")
    point, out = _child(mlp, "hook_post"), weight(mlp, "W_out")
    return None if point is None or out is None or out.ndim != 2 else (point, out)


class Writers:
    """The weights with which a model's sources write; read once, each in the precision it is used in."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self.d_model = int(model.cfg.d_model)

    def _owner(self, source: Source) -> Any:
        return _child(blocks(self.model)[source.layer], source.kind)

    def heads(self, layer: int, like: Tensor) -> Float[Tensor, "head d_head d_model"]:
        """W_O of a layer, in the precision of `like`.

        Raises:
            SplitError: the layer shows none.
        """
        found = weight(_child(blocks(self.model)[layer], "attn"), "W_O")
        if found is None or found.ndim != 3:
            raise SplitError(
                f"blocks.{layer}.attn shows no W_O [head d_head d_model], so its heads cannot be told apart"
            )
        return found.to(like)

    def bias(self, source: Source, like: Tensor) -> Float[Tensor, " d_model"] | None:
        """b_O of an attention layer, b_out of an MLP; None where there is none (some worlds show zeros then)."""
        name = {"attn": "b_O", "mlp": "b_out"}.get(source.kind)
        found = None if name is None else weight(self._owner(source), name)
        if found is None or found.numel() != self.d_model or not bool(found.any()):
            return None
        return found.to(like).reshape(-1)

    def split(self, layer: int, z: Float[Tensor, "*row wide"]) -> Float[Tensor, "*row head d_head"]:
        """z by head, whichever way the world keeps it."""
        n_heads = self.heads(layer, z[:0]).shape[0]
        by_head: Tensor = rearrange(z, "... (head d_head) -> ... head d_head", head=n_heads)
        return by_head

    def written(self, source: Source, seen: Float[Tensor, "row wide"]) -> Float[Tensor, "row d_model"]:
        """What a source wrote, from what its module showed."""
        if source.kind != "attn":
            return seen
        out: Tensor = torch.einsum("rhk,hkd->rd", self.split(source.layer, seen), self.heads(source.layer, seen))
        bias = self.bias(source, seen)
        return out if bias is None else out + bias


class SplitError(ValueError):
    """What a norm reads is not the sum of the parts that are known (names the place and how much is missing)."""


def flat(output: Any, length: int) -> Float[Tensor, "row wide"]:
    """A module's output on one prompt, a row per position, whichever way the world lays it out."""
    value: Tensor = output[0] if isinstance(output, tuple) else output
    return value.detach().reshape(length, -1)
