"""An encoder of BERT's shape whose attention reads a norm of one's choice.

Bidirectional, post-norm, learned positions, a norm on the embeddings (Devlin et al. 2019). As in Brody, Alon & Yahav's
decoders (2023, section 4.2), the norms that attention reads are varied apart, and have no gain and bias: the one on the
embeddings, and the one that ends every block but the last. MLPs read `norm`, the unembedding `norm_mlp`.
Left out of BERT: segment embeddings (one segment), dropout, and the dense layer before the unembedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from ln_probe.analyses.lab.norms import NORM_KINDS, Norm
from ln_probe.analyses.lab.transformer import Block, LabConfig, LabTransformer


@dataclass(frozen=True)
class EncoderConfig(LabConfig):
    """Shape of an encoder: that of a lab model, and the norm that its attention reads.

    Attributes:
        norm_read: kind of the norm on the embeddings and at the end of every block but the last.

    Raises (on construction):
        ValueError: an unknown norm, a causal or pre-norm shape, a final norm, or what `LabConfig` refuses.
    """

    norm_read: str = "layernorm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_read not in NORM_KINDS:
            raise ValueError(f"unknown norm_read {self.norm_read!r}: known norms are {', '.join(NORM_KINDS)}")
        needs = {"causal": False, "norm_order": "post", "norm_final": None}
        for name, wanted in needs.items():
            if getattr(self, name) != wanted:
                raise ValueError(f"an encoder has {name}={wanted!r}, got {getattr(self, name)!r}")

    def build(self) -> Encoder:
        """A model of this shape, initialized from torch's global generator: the same weights under every norm."""
        return Encoder(self)


class Encoder(LabTransformer):
    """A bidirectional post-norm transformer with a norm on its embeddings."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__(cfg)
        self.ln_embed = _read(cfg)
        self.hook_embedded = HookPoint()
        for block in (cast("Block", b) for b in list(self.blocks)[:-1]):
            block.ln2 = _read(cfg)
        self.setup()  # type: ignore[no-untyped-call]

    def embedded(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """What the first block reads: embeddings and positions, normed."""
        normed: Tensor = self.ln_embed(self.hook_embedded(super().embedded(tokens)))
        return normed


def _read(cfg: EncoderConfig) -> nn.Module:
    return Norm(cfg.norm_read, cfg.d_model, eps=cfg.eps, gain=False, bias=False)


def read_places(layer: int) -> tuple[str, str]:
    """Hook names of what attention in a layer reads, before its norm and after."""
    if layer == 0:
        return "hook_embedded", "ln_embed.hook_normalized"
    return f"blocks.{layer - 1}.hook_resid_post", f"blocks.{layer - 1}.ln2.hook_normalized"
