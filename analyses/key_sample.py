"""A sample of keys instead of all: which are drawn, and how far what they say can be from what all would say.

Every key drawn is measured among *all* keys that its query sees, so what is said of it is what the full measure would
say; only fractions and quantiles over keys are estimates. Their intervals need no assumption about how margins are
distributed: a fraction has the exact binomial one (Clopper & Pearson 1934), a quantile the one between two order
statistics (Thompson 1936; David & Nagaraja 2003, section 7.1), 95 % at least each. That the keys are drawn without
putting back makes both wider than they need to be.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from scipy import stats  # type: ignore[import-untyped]

LEVEL = 0.95

# Keys drawn per head where nobody says how many: a fraction is then known to about ± 0.12, a median to between the
# 37th and the 63rd percentile.
DEFAULT = 64

# Seconds of one core from which on keys are drawn by themselves: an hour. GPT-2 small's default report is expected to
# take a sixth of that, one layer of a 7B model's shape at 2048 tokens a third, its 32 layers ten times.
SAMPLE_ABOVE = 3600.0


@dataclass(frozen=True)
class KeySample:
    """Which keys are measured.

    Attributes:
        count: of the longest prompt in each head; of shorter ones in proportion, so that every key is as likely.
        longest: tokens of the longest prompt.
        seed: of the draw.
        seconds: what measuring all keys was expected to take, seconds of one core.
    """

    count: int
    longest: int
    seed: int
    seconds: float

    def size(self, length: int) -> int:
        """How many keys of a prompt are measured in each head."""
        return min(length, max(1, math.ceil(self.count * length / self.longest)))

    def positions(self, prompt: int, layer: int, head: int, length: int) -> Int64[np.ndarray, " drawn"]:
        """The keys of a prompt that are measured in one head (-1: at the norm's output), in their order."""
        rng = np.random.default_rng([self.seed, prompt, layer, head + 1])
        return np.sort(rng.choice(length, self.size(length), replace=False))

    @property
    def note(self) -> str:
        """What a reader has to know."""
        return (
            f"keys were sampled: {self.count} of each head's {self.longest} in the longest prompt, fewer of shorter "
            f"ones in proportion (seed {self.seed}), each measured among all keys. Fractions and quantiles over "
            "keys are estimates: heads has their 95 % intervals (columns ending in _low and _high). All keys "
            f"(keys_sample=0) would take about {_time(self.seconds)} of one core"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.0f} hours" if seconds > 2 * 3600 else f"{max(1.0, seconds / 60):.0f} minutes"


def fraction_interval(found: int, count: int) -> tuple[float, float]:
    """Between which shares of all keys the true one lies, `found` of `count` sampled ones having some property."""
    tail = (1 - LEVEL) / 2
    low = 0.0 if found == 0 else float(stats.beta.ppf(tail, found, count - found + 1))
    high = 1.0 if found == count else float(stats.beta.ppf(1 - tail, found + 1, count - found))
    return low, high


def quantile_interval(values: Float[np.ndarray, " key"], q: float) -> tuple[float, float]:
    """Between which sampled values the q-quantile of all lies; NaN for an end that the sample is too small to give."""
    ordered = np.sort(values[~np.isnan(values)])
    count = len(ordered)
    if not count:
        return math.nan, math.nan
    tail = (1 - LEVEL) / 2
    # X(r) lies above the quantile if fewer than r values lie below it: with probability P(B < r), B binomial(count, q).
    below = stats.binom.cdf(np.arange(count), count, q)  # P(B ≤ r - 1), r = 1 … count
    low = np.flatnonzero(below <= tail)
    high = np.flatnonzero(1 - below <= tail)
    return (
        float(ordered[low[-1]]) if len(low) else math.nan,
        float(ordered[high[0]]) if len(high) else math.nan,
    )
