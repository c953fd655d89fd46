"""Which heads and norms are run one by one: all in a small model, in a large one those with the largest estimates.

One more pass for each head and norm costs as much as all others together in a large model, so that estimates of all of
them, from a few passes, choose those that are run. Heads are chosen on other prompts than the measured ones, and the
chosen are the tests that Holm's correction counts. Norms are chosen on the measured prompts, to find those that matter
there, and every norm counts as a test, whether it is run or not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from ln_probe.hooks.model import HookedModel, blocks
from ln_probe.hooks.task import CALIBRATION, bundled_prompts, default_tokens, tokenizer_of

# Up to this many (weights of the blocks × heads, or × norms) every one is run; beyond, the leading ones. A unit of it
# costs some 40 multiplications a token (half a pass for each of three terms, and what lies around it): 64 heads of
# lm-layernorm are 5e7 and take 1.3 s of one core for a prompt of 128 tokens, MGM's 64 are 4e8, GPT-2 small's 144 are
# 1.2e10, its 25 norms 2.1e9.
EXACT_WORK = 1e9

_Part = TypeVar("_Part", bound=Hashable)


def every_one_is_run(model: HookedModel, parts: int) -> bool:
    """Whether so many heads or norms of a model are few enough to be run one by one."""
    return parts * sum(p.numel() for block in blocks(model) for p in block.parameters()) <= EXACT_WORK


def other_prompts(model: HookedModel, count: int) -> list[Int[Tensor, " _"]]:
    """Some calibration prompts; none if the model has no prompts but the measured ones."""
    if bundled_prompts(model) is None and tokenizer_of(model) is None:
        return []
    return default_tokens(model, CALIBRATION)[:count]


def with_largest(estimates: Iterable[Mapping[tuple[_Part, str], Sequence[float]]], count: int) -> list[_Part]:
    """The heads or norms with the largest estimates under any variant, the largest first.

    Args:
        estimates: of each prompt that chooses, the terms of the estimate by (head or norm, variant). The size is the
            sum of the terms' sizes over these prompts, because terms that cancel are no sign of a small effect.
        count: how many are chosen.
    """
    sums: dict[tuple[_Part, str], Any] = {}
    for found in estimates:
        for key, terms in found.items():
            sums[key] = sums.get(key, 0.0) + np.asarray(terms)
    sizes: dict[_Part, float] = {}
    for (part, _), summed in sums.items():
        sizes[part] = max(sizes.get(part, 0.0), float(np.abs(summed).sum()))
    return sorted(sizes, key=lambda part: -sizes[part])[:count]


def agreement(effects: pd.DataFrame, what: str) -> list[str]:
    """How well estimates order what was run: a sentence a variant, where there are enough and something was not run.

    Args:
        effects: columns variant, delta_loss and estimate.
        what: a row is: "heads", "norms".
    """
    said = list[str]()
    if not (effects["delta_loss"].isna() & effects["estimate"].notna()).any():
        return said
    for variant, rows in effects.groupby("variant", sort=False):
        both = rows[rows["delta_loss"].notna() & rows["estimate"].notna()]
        if len(both) >= 3 and both["delta_loss"].nunique() > 1 and both["estimate"].nunique() > 1:
            rho = float(stats.spearmanr(both["delta_loss"], both["estimate"]).statistic)
            said.append(f"{variant} over {len(both)} {what}: rank correlation {rho:.2f}")
    return said
