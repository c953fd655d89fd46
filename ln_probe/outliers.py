"""Which tokens of a text are outliers: their vectors are much longer than the others' at some norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ln_probe.analyses.probes.sinks import TokenSizes
from ln_probe.hooks.model import OneLine, check_model, evaluating, facts_of
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream
from ln_probe.hooks.task import check_tokens


@dataclass(frozen=True, eq=False, repr=False)
class OutlierTokens(OneLine):
    """Which tokens are outliers.

    Attributes:
        mask: True where a token is an outlier at some norm.
        massive: True where it has massive activations.
        ratio: |Px| over the median of the prompt's vectors that are not zero, [batch pos] by the norm's name.
    """

    mask: Bool[Tensor, "batch pos"]
    massive: Bool[Tensor, "batch pos"]
    ratio: Mapping[str, Float[Tensor, "batch pos"]]


def outlier_tokens(
    model: object, tokens: Int[Tensor, "batch pos"] | Sequence[Sequence[int] | Int[Tensor, " _"]]
) -> OutlierTokens:
    """Find the tokens that are outliers at some norm of the model: a mask for other tools, with their lengths.

    Args:
        model: HookedTransformer, TransformerBridge or lab model.
        tokens: [pos], [batch pos], or a list of rows of several lengths. Rows of fewer than LEAST_TOKENS tokens have no
            outliers. After the end of a shorter row masks are False and ratios NaN.

    Raises:
        TypeError: not a TransformerLens model, or tokens that are neither a tensor nor a list of rows.
        ValueError: tokens that are not whole numbers, empty, longer than the context or outside the vocabulary; a model
            without norms.
        ActivationError: a norm's input or output is not finite.

    Example:
        >>> ln_probe.outlier_tokens(model, tokens)
    """
    hooked = check_model(model)
    prompts = check_tokens(facts_of(hooked), tokens)
    sites = [s for s in find_norms(hooked) if s.reads not in ("query", "key")]
    if not sites:
        raise ValueError("the model has no normalization: no norm says which tokens are long")
    sizes = [TokenSizes() for _ in prompts]
    with evaluating(hooked):
        for row, of_row in zip(prompts, sizes, strict=True):
            stream(hooked, row, sites, on_norm=of_row.add)
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return OutlierTokens(
        pad([one.outlier.cpu() for one in sizes]),
        pad([one.massive.cpu() for one in sizes]),
        {name: pad([one.ratios[name].cpu() for one in sizes], padding_value=math.nan) for name in sizes[0].ratios},
    )
