"""A transformer with weights set by hand that runs C-RASP's COMPARE: LayerNorm's scaling is the comparison.

`gate_program(depth)` asks for a majority (depth 1), for the majority of the prefixes' majorities (depth 2), and so on.
Compiled as in Yang & Chiang (2024, "Counting Like Transformers"), one post-norm layer per level:

    attention, uniform over the prefix, averages a value v of +1 or -1 per position: (#yes - #no) / (t + 1)
    the value is stored as a pair (v, -v), so the stream's mean is zero and projection has nothing to do
    the MLP takes away what the level below left, so that the pair is all there is
    the norm divides by the pair's own size: v becomes the sign of v, a truth value the next level can count

Without scaling the next level averages raw differences, which is another function. Position 0 holds BOS, which votes
"no" with half a vote at every level, so no comparison is ever tied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.lab.depth.block_languages import BOS, D_VOCAB, A, B
from ln_probe.analyses.lab.depth.crasp import parse
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, Norm
from ln_probe.analyses.lab.transformer import Block, LabConfig, LabTransformer

# Stream of BOS beside its vote: with it the norm leaves BOS 1/sqrt(1 + 3) of a full vote, at every level.
HALF_A_VOTE = math.sqrt(3)


def gate_program(depth: int) -> str:
    """The C-RASP program that `gate_transformer(depth)` runs.

    Raises:
        ValueError: depth below 1.
    """
    _check_depth(depth)
    lines = ["level_1 := #[Q_a] > #[Q_b]"]
    lines += [f"level_{i} := 2 * #[level_{i - 1}] > #[true]" for i in range(2, depth + 1)]
    return "\n".join(lines)


def gate_transformer(depth: int, norm: str = "layernorm", eps: float = 0.0, n_ctx: int = 512) -> LabTransformer:
    """The hand-built transformer: logit 1 above logit 0 exactly where `gate_program(depth)` holds.

    Args:
        depth: layers, one COMPARE each.
        norm: kind of every norm; those that do not scale divide by 1.
        eps: of the norms. Counts differ by 1/t, so LayerNorm's usual 1e-5 blunts the comparison from t of about 150 on.
        n_ctx: longest input, BOS included.

    Raises:
        ValueError: depth below 1.
    """
    _check_depth(depth)
    pairs = depth + 2  # BOS, the letters' votes, one per level
    cfg = LabConfig(
        n_layers=depth,
        d_model=2 * pairs,
        n_heads=1,
        d_head=1,
        d_mlp=2,
        d_vocab=D_VOCAB,
        n_ctx=n_ctx,
        norm=norm,
        norm_mlp=norm,
        norm_final=None,
        norm_order="post",
        positions="none",
        tied=False,
        act_fn="relu",
        eps=eps,
        affine=False,
        affine_others=False,
        bias_qkv=False,
        bias_out=False,
        bias_mlp=False,
        bias_unembed=False,
    )
    model = LabTransformer(cfg).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for module in model.modules():
            if isinstance(module, Norm) and module.divisor is not None:
                module.divisor.fill_(1.0)
        model.embed.W_E[BOS] = HALF_A_VOTE * _pair(0, pairs) - _pair(1, pairs)
        # Two votes against BOS's one: only here, where no norm has made BOS's vote a half yet.
        model.embed.W_E[A] = 2 * _pair(1, pairs)
        model.embed.W_E[B] = -2 * _pair(1, pairs)
        for level in range(depth):
            below, here = _pair(level + 1, pairs), _pair(level + 2, pairs)
            block = cast("Block", model.blocks[level])
            block.attn.W_V[0, :, 0] = below / 2  # reads v out of (v, -v); queries and keys are 0: uniform attention
            block.attn.W_O[0, 0] = here
            block.mlp.W_in[:, 0], block.mlp.W_in[:, 1] = below / 2, -below / 2  # relu(v) - relu(-v) = v …
            block.mlp.W_out[0], block.mlp.W_out[1] = -below, below  # … taken away
        assert model.unembed.untied is not None
        model.unembed.untied[:, 1] = _pair(depth + 1, pairs)
    return model


def answers(model: LabTransformer, words: Int[Tensor, "word pos"]) -> tuple[Tensor, Tensor]:
    """What the model says at every letter (bool, [word letter]) and by what difference of logits."""
    tokens = torch.cat([torch.full_like(words[:, :1], BOS), words], dim=1)
    with torch.no_grad():
        logits = model(tokens)[:, 1:]
    margin = logits[..., 1] - logits[..., 0]
    return margin > 0, margin.abs()


def _pair(number: int, pairs: int) -> Tensor:
    stream = torch.zeros(2 * pairs, dtype=torch.float64)
    stream[2 * number], stream[2 * number + 1] = 1.0, -1.0
    return stream


def _check_depth(depth: int) -> None:
    if depth < 1:
        raise ValueError(f"depth must be at least 1 level, got {depth}")


def compare_table(depths: Sequence[int] = (1, 2, 3), words: int = 200, letters: int = 300) -> pd.DataFrame:
    """The hand-built transformers on random words beside the interpreter, under every norm.

    Columns: `depth, norm, eps, accuracy` (of answers), `words_right` (share of words with every answer right),
    `smallest_gap` (least difference of logits at the last letter).
    """
    drawn = torch.randint(A, B + 1, (words, letters), generator=torch.Generator().manual_seed(0))
    rows = []
    for depth in depths:
        program = parse(gate_program(depth))
        truth = torch.tensor(np.stack([program.run(["a" if i == A else "b" for i in word]) for word in drawn.tolist()]))
        for norm, eps in ((kind, eps) for kind in NORM_KINDS for eps in ((0.0, 1e-5) if kind in SCALES else (0.0,))):
            said, gap = answers(gate_transformer(depth, norm, eps, letters + 1), drawn)
            right = said == truth
            rows.append(
                (
                    depth,
                    norm,
                    eps,
                    float(right.double().mean()),
                    float(right.all(1).double().mean()),
                    float(gap[:, -1].min()),
                )
            )
    return pd.DataFrame(rows, columns=["depth", "norm", "eps", "accuracy", "words_right", "smallest_gap"])
