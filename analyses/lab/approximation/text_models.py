"""Layers against heads, and attention with the dot product or without, on text.

The two language-model comparisons of Wang & E (2024, section 6: 1a and 3b; there on OpenWebText with a GPU),
scaled down to models that a CPU trains in seconds on text the user gives; with LayerNorm, each of its terms, or none.
The laboratory's transformer has its attention replaced: scores are <q, k> / sqrt(d_head) - p_h log(1 + t - s), with a
trained slope p_h per head (1 + t - s: the first token attends to itself); without the dot product the second only.

Hypotheses, written down before the runs of 1a (those of 3b had been seen): four layers of one head have a lower loss
than one layer of 16 heads, and both have a lower one than one layer of one head (`SIZES`).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import Results, contrasted, differences, minus_reference, select, summarize
from ln_probe.analyses.lab.runs import carry_out, curves, planned
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import TrainConfig
from ln_probe.analyses.lab.transformer import Attention, LabConfig, LabTransformer


@dataclass(frozen=True)
class RelativeTextConfig:
    """Shape of the model; pre-norm, `norm` at every place ("none": divided by a constant measured at the start)."""

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
        """A random model of this shape (torch's global generator)."""
        cfg = LabConfig(
            n_layers=self.layers, d_model=self.d_model, n_heads=self.heads, d_vocab=self.d_vocab, n_ctx=self.n_ctx,
            norm=self.norm, norm_mlp=self.norm, norm_final=self.norm, positions="alibi",
        )  # fmt: skip
        model = LabTransformer(cfg)
        for block in model.blocks:
            attention = RelativeAttention(cfg, self.dot_product)
            attention.load_state_dict(block.attn.state_dict(), strict=False)
            block.attn = attention
        model.setup()
        return model


class RelativeAttention(Attention):
    """Attention with a trained slope over the logarithm of the lag instead of ALiBi's fixed slope over the lag."""

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


D_VOCAB, N_CTX = 1024, 128
LAYERS, HEADS = (1, 2, 4), (1, 4, 16)
STEPS, QUICK_STEPS = 200, 150
KEYS = ("layers", "heads", "dot_product", "norm")
POOLED = 0  # instead of layers and heads: the mean over sizes
# 1a: minuend and subtrahend, as (layers, heads).
SIZES = {
    "4 layers of 1 head minus 1 layer of 16 heads": ((4, 1), (1, 16)),
    "4 layers minus 1, 1 head each": ((4, 1), (1, 1)),
    "16 heads minus 1, 1 layer": ((1, 16), (1, 1)),
}
# Of three sizes of model, with and without the dot product, in nats on OpenWebText: not comparable but in order.
PUBLISHED = "3b: 5.796 < 5.830, 5.374 < 5.486, 4.994 < 5.274 with the dot product and without, by size of model"


@dataclass(frozen=True)
class Cell:
    """One model; 3b varies `dot_product` and 1a layers and heads."""

    layers: int
    heads: int
    dot_product: bool = True
    norm: str = "layernorm"

    def spec(self) -> RelativeTextConfig:
        return RelativeTextConfig(self.layers, self.heads, D_VOCAB, N_CTX, dot_product=self.dot_product, norm=self.norm)


def grid(quick: bool) -> tuple[Cell, ...]:
    if quick:
        return (Cell(1, 1), Cell(4, 1), Cell(1, 16), Cell(1, 4), Cell(1, 4, dot_product=False))
    sizes = [Cell(layers, heads) for layers in LAYERS for heads in HEADS]
    without = [Cell(layers, 4, dot_product=False) for layers in LAYERS]
    normed = [Cell(2, 4, dot, norm) for norm in NORM_KINDS if norm != "layernorm" for dot in (True, False)]
    return (*sizes, *without, *normed)


def training(quick: bool, seed: int) -> TrainConfig:
    steps = QUICK_STEPS if quick else STEPS
    return TrainConfig(
        steps=steps, batch=16, lr=3e-3, lr_end=1e-4, warmup=steps // 4, clip=1.0, seed=seed, evaluate_every=steps
    )


def run(request: Request) -> Results:
    """Train the missing runs of the grid and compare held-out losses."""
    task = TextTask(request.texts, D_VOCAB, N_CTX, tokenizer=request.tokenizer)
    runs = planned(
        grid(request.quick), request,
        task=lambda *_: task, training=lambda _, seed: training(request.quick, seed),
    )  # fmt: skip
    lost = carry_out(runs, request)
    settings = {"training": vars(training(request.quick, 0)), "text": task.identity, "published": PUBLISHED}
    return Results(analyse(select(curves(runs), measure="valid_loss")), {}, settings, lost)


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Held-out losses (KEYS, `seed`, `value`), what the dot product changes (3b), and layers against heads (1a).

    `dot_product` has every size and, in a separate test named after its values had been seen, the mean over those with
    LayerNorm (POOLED).
    """
    values = frame.drop(columns=["step", "measure"], errors="ignore")
    keys, normed = ["layers", "heads", "norm"], values[values["norm"] == "layernorm"]
    having = values["dot_product"].astype(bool)
    products = [contrasted(minus_reference(values, ~having, [*keys, "seed"]), keys)]
    wide = normed.pivot_table(index="seed", columns=["dot_product", "layers", "heads"], values="value")
    if {True, False} <= set(normed["dot_product"]):
        with_product, without = (cast("pd.DataFrame", wide[has]) for has in (True, False))
        gaps = (with_product.reindex(columns=without.columns) - without).dropna()  # seeds that have all sizes
        pooled = gaps.mean(axis=1).rename("value").reset_index()
        products.append(contrasted(pooled.assign(layers=POOLED, heads=POOLED, norm="layernorm"), keys))
    sized = values[having & (values["norm"] == "layernorm")]
    by_size = sized.pivot_table(index="seed", columns=["layers", "heads"], values="value", sort=False)
    return {
        "summary": summarize(frame.drop(columns="step", errors="ignore"), [*KEYS, "measure"]),
        "losses": frame,
        "dot_product": pd.concat([part for part in products if len(part)] or products, ignore_index=True),
        "sizes": contrasted(differences(by_size, SIZES), ["contrast"]),
    }
