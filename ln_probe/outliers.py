"""Which tokens of a text are outliers: their vectors are much longer than the others' at some norm."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ln_probe.analyses.probes.sinks import TokenSizes
from ln_probe.hooks.model import OneLine, check_model, evaluating, facts_of
from ln_probe.hooks.norms import find_norms
from ln_probe.hooks.stream import stream
from ln_probe.hooks.task import check_tokens, unpadded_rows


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
            outliers. At padding, which is left out, and after the end of a shorter row masks are False and ratios NaN.

    Raises:
        TypeError: not a TransformerLens model, or tokens that are neither a tensor nor a list of rows.
        ValueError: tokens that are not whole numbers, empty, longer than the context or outside the vocabulary; a model
            without norms.
        ActivationError: a norm's input or output is not finite.

    Example:
        >>> ln_probe.outlier_tokens(model, tokens)
    """
    hooked = check_model(model)
    rows = check_tokens(facts_of(hooked), tokens)
    prompts = unpadded_rows(facts_of(hooked), tokens)
    sites = [s for s in find_norms(hooked) if s.reads not in ("query", "key")]
    if not sites:
        raise ValueError("the model has no normalization: no norm says which tokens are long")
    sizes = [TokenSizes() for _ in prompts]
    with evaluating(hooked):
        for prompt, of_prompt in zip(prompts, sizes, strict=True):
            stream(hooked, prompt, sites, on_norm=of_prompt.add)
    pairs = zip(rows, prompts, strict=True)
    begins = [next(at for at in range(len(row)) if row[at : at + len(p)].equal(p)) for row, p in pairs]

    def placed(values: list[Tensor], fill: float) -> Tensor:
        """Return the values of every prompt at its places in its row."""
        parts = zip(rows, begins, values, strict=True)
        whole = [F.pad(v.cpu(), (begin, len(row) - begin - len(v)), value=fill) for row, begin, v in parts]
        return pad_sequence(whole, batch_first=True, padding_value=fill)

    return OutlierTokens(
        placed([one.outlier for one in sizes], False),
        placed([one.massive for one in sizes], False),
        {name: placed([one.ratios[name] for one in sizes], math.nan) for name in sizes[0].ratios},
    )
