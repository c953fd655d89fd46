"""The constant that stands for a norm's scaling: its mean sigma over tokens other than position 0.

Position 0 is left out because attention sinks live there: in SmolLM2-135M their sigma is hundreds of times the others'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.hooks.capture import stream
from ln_probe.hooks.model import HookedModel, context_length, evaluating, vocabulary_size
from ln_probe.hooks.sites import Site


def mean_sigmas(model: HookedModel, sites: Sequence[Site], prompts: Iterable[Int[Tensor, " _"]]) -> dict[str, float]:
    """Mean sigma of each site over the prompts' tokens other than position 0 (over all, if there are no others).

    The same constants as a report's `provenance["constants"]`. Costs one forward pass a prompt.

    Raises:
        ValueError: token ids outside the vocabulary, or prompts longer than the context.
        ActivationError: a norm's input or output is not finite.
    """
    tail: dict[str, list[float]] = {s.name: [0.0, 0] for s in sites}
    first: dict[str, list[float]] = {s.name: [0.0, 0] for s in sites}
    length = 0

    def on_norm(site: Site, x: Tensor, _y: Tensor) -> None:
        sigma = site.sigma(x.double())[:, 0]
        heads = max(1, len(x) // length)
        for sums, part in ((first[site.name], sigma[:heads]), (tail[site.name], sigma[heads:])):
            sums[0] += float(part.sum())
            sums[1] += len(part)

    with evaluating(model):
        for row in prompts:
            length = len(row)
            stream(model, row, sites, on_norm=on_norm)
    return {name: _mean(tail[name]) if tail[name][1] else _mean(first[name]) for name in tail}


def _mean(sums: list[float]) -> float:
    return sums[0] / sums[1] if sums[1] else math.nan


def check_tokens(model: HookedModel, tokens: object) -> list[Int[Tensor, " _"]]:
    """The rows of calibration tokens a user gave.

    Raises:
        ValueError: not whole numbers [batch pos], empty, outside the vocabulary, or longer than the context.
        TypeError: not a tensor.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(f"tokens must be a tensor of token ids [batch pos], got {type(tokens).__name__}")
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(
            f"tokens must be whole numbers [batch pos], got {str(tokens.dtype).removeprefix('torch.')} "
            f"{list(tokens.shape)}"
        )
    if tokens.numel() == 0 or tokens.shape[1] < 2:
        raise ValueError(
            f"tokens {list(tokens.shape)} hold no position besides 0: frozen scales are means over the others, so give "
            "at least two positions"
        )
    if tokens.shape[1] > context_length(model):
        raise ValueError(f"{tokens.shape[1]} tokens are more than the context of {context_length(model)}: cut them")
    size = vocabulary_size(model)
    wrong = tokens[(tokens < 0) | (tokens >= size)]
    if len(wrong):
        raise ValueError(f"token id {int(wrong[0])} is outside the vocabulary of {size} (0 … {size - 1})")
    return list(tokens.long())
