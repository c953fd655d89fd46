"""Transformers on text with logarithmic relative positions, with the dot product or without.

The laboratory's transformer with its attention replaced: scores are <q, k> / sqrt(d_head) - p_h log(1 + t - s), with a
trained slope p_h per head; without the dot product the first term is gone. One more lag than in `relative_transformer`
(1 + t - s), because the first token of a text has nobody to look at but itself.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from ln_probe.analyses.lab.transformer import Attention, Block, LabConfig, LabTransformer


@dataclass(frozen=True)
class RelativeTextConfig:
    """Shape of the model; pre-norm, `norm` at every place ("none": divided by a constant measured at initialization).

    Raises (on building):
        ValueError: what `LabConfig` refuses.
    """

    layers: int
    heads: int
    d_vocab: int
    n_ctx: int
    d_model: int = 64
    dot_product: bool = True
    norm: str = "layernorm"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "relative_text", **asdict(self)}

    def build(self) -> LabTransformer:
        """A model of this shape, initialized from torch's global generator."""
        cfg = LabConfig(
            n_layers=self.layers,
            d_model=self.d_model,
            n_heads=self.heads,
            d_vocab=self.d_vocab,
            n_ctx=self.n_ctx,
            norm=self.norm,
            norm_mlp=self.norm,
            norm_final=self.norm,
            positions="alibi",
        )
        model = LabTransformer(cfg)
        for block in model.blocks:
            attention = RelativeAttention(cfg, self.dot_product)
            attention.load_state_dict(cast("Block", block).attn.state_dict(), strict=False)
            cast("Block", block).attn = attention
        model.setup()  # type: ignore[no-untyped-call]
        return model


class RelativeAttention(Attention):
    """Attention with a trained slope over the logarithm of the lag in the place of ALiBi's fixed slope over the lag."""

    def __init__(self, cfg: LabConfig, dot_product: bool) -> None:
        super().__init__(cfg)
        self.log_slope = nn.Parameter(torch.zeros(cfg.n_heads))
        if not dot_product:  # buffers, so that nothing trains them
            for name in ("W_Q", "W_K", "b_Q", "b_K"):
                shape = cast("Tensor", getattr(self, name)).shape
                delattr(self, name)
                self.register_buffer(name, torch.zeros(shape), persistent=False)

    def _bias(self, length: int, like: Tensor) -> Tensor:
        place = torch.arange(length, device=like.device)
        lag = place[:, None] - place
        bias = -self.log_slope.exp()[:, None, None] * torch.log1p(lag.clamp(min=0).to(like))
        return bias.masked_fill(lag < 0, -math.inf)
