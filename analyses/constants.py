"""What the first pass over the prompts finds: constants that replace sigma, query sets, and which keys are measured.

The first pass stores the sum and count of sigma of every norm on every prompt, at position 0 and elsewhere. The
constants of a prompt are the means over all prompts outside its group (leave one group out), so no prompt is measured
with constants that it shaped, and no further pass is needed. Equal prompts form one group.

The empirical set of queries is the ellipsoid of mean and covariance of the queries that occurred, scaled to hold 95 %
of them. Behind a norm that scales, the head can make only a bounded set of queries; without one there is no bound, and
the empirical set is used instead. Queries are taken before rotary positions and over the divisor, so scores with keys
are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Float32, Float64, Int, Int64
from torch import Tensor

from ln_probe.analyses.text import counted
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.norm import Site
from ln_probe.hooks.optimal_constants import Halves
from ln_probe.hooks.scales import Constant

# Where constants come from, as provenance and pages name it.
LEAVE_ONE_OUT = "leave-one-out means over the other prompts"
CALIBRATION = "means over the calibration prompts"
OWN_MEANS = "the prompt's own means"

# A constant farther than this from the mean sigma of the measured prompts also changes the size of the vectors.
FAR = 0.05

CONSTANT_COLUMNS = ("constant_first", "constant_rest", "constant_ratio_first", "constant_ratio_rest")
COLUMNS = ("prompt", "group", "site", "sum_first", "count_first", "sum_rest", "count_rest")


@dataclass(frozen=True, eq=False)
class Constants:
    """The constants of every prompt: `constants.of(i)`, or `constants.pooled` for all prompts together.

    Attributes:
        sites: names of the norms, in the order of the forward pass.
        groups: group of each prompt, numbered in the order of their first prompts.
        sums: sum of sigma of each prompt and norm, at position 0 and elsewhere.
        counts: how many sigmas each is a sum of.
        source: where the constants come from, as text.
        given: constants that other text gave (`calibration=`), for every prompt alike; None: leave-one-out means, or,
            where there is one group only, the means over all prompts of that group, the same for each of them.
    """

    sites: tuple[str, ...]
    groups: Int64[np.ndarray, " prompt"]
    sums: Float64[np.ndarray, "prompt site 2"]
    counts: Float64[np.ndarray, "prompt site 2"]
    source: str = LEAVE_ONE_OUT
    given: Mapping[str, Constant] | None = None

    def __repr__(self) -> str:
        prompts = f"{counted(len(self.groups), 'prompt')} in {counted(self.group_count, 'group')}"
        return f"Constants({counted(len(self.sites), 'norm')}, {prompts}: {self.source})"

    @property
    def group_count(self) -> int:
        """How many groups of prompts there are."""
        return int(self.groups.max()) + 1 if len(self.groups) else 0

    @property
    def effective_groups(self) -> float:
        """Effective number of groups, (Σ w)² / Σ w² with w the tokens of a group: smaller where a few dominate."""
        if not len(self.groups):
            return 0.0
        tokens = np.array([1.0]) if not self.sites else self.counts[:, 0].sum(-1)
        weights = np.bincount(self.groups, np.broadcast_to(tokens, self.groups.shape), self.group_count)
        return float(weights.sum()) ** 2 / float(np.square(weights).sum())

    @cached_property
    def pooled(self) -> dict[str, Constant]:
        """The constants over all prompts together, by norm."""
        if self.given is not None:
            return dict(self.given)
        return self._means(self._group_sums.sum(1))

    def of(self, prompt: int) -> dict[str, Constant]:
        """The constants of one prompt, by norm.

        Args:
            prompt: its number, from 0.

        Raises:
            IndexError: there is no such prompt.

        Example:
            >>> with ln_probe.hooks.without(model, "scaling", scale=report.constants.of(3)): ...
        """
        if isinstance(prompt, str | float) or not 0 <= prompt < len(self.groups):
            raise IndexError(f"no prompt {prompt!r}: the constants are of prompts 0 … {len(self.groups) - 1}")
        if self.given is not None:
            return dict(self.given)
        sums = self._group_sums if self.group_count == 1 else self._others
        return self._means(sums[:, int(self.groups[prompt])])

    @cached_property
    def observed(self) -> pd.DataFrame:
        """Mean sigma over the measured prompts, a row per norm: `first` (position 0) and `rest` (the others)."""
        means = self._means(self._group_sums.sum(1))
        rows = [(name, means[name].first, means[name].rest) for name in self.sites]
        return pd.DataFrame(rows, columns=["site", "first", "rest"]).set_index("site")

    def ratios(self) -> pd.DataFrame:
        """The pooled constants and what they are of the observed mean sigma, a row per norm (CONSTANT_COLUMNS)."""
        rows = [
            (c.first, c.rest, c.first / first, c.rest / rest)
            for name, (first, rest) in zip(self.sites, self.observed.to_numpy(), strict=True)
            for c in [self.pooled[name]]
        ]
        return pd.DataFrame(rows, columns=list(CONSTANT_COLUMNS), index=list(self.sites), dtype=float)

    def notes(self) -> tuple[str, ...]:
        """A note where constants are farther than FAR from the mean sigma of the measured prompts."""
        ratios = self.ratios()[list(CONSTANT_COLUMNS[2:])]
        off = (ratios - 1).abs()
        far = off.gt(FAR).any(axis=1)
        if not far.any():
            return ()
        row, kind = (int(i) for i in np.unravel_index(np.nanargmax(off.to_numpy()), off.shape))
        site, where = str(ratios.index[row]), ("at position 0", "after position 0")[kind]
        ratio = float(ratios.to_numpy()[row, kind])
        return (
            f"the constants of {int(far.sum())} of {len(far)} norms differ by more than {FAR:.0%} from the mean sigma "
            f"of these prompts (most at {site}, {where}: {ratio:.3g} times it), so freezing scaling "
            "also changes the size of vectors there",
        )

    def centered(self, site: str) -> tuple[Float64[np.ndarray, "prompt 2"], Float64[np.ndarray, " 2"]]:
        """Of one norm: S − c m of each prompt (its sum of sigma minus the pooled constant times its count), at position
        0 and elsewhere, and the total counts. What a prompt adds to the constants, to first order, is their ratio."""
        place = self.sites.index(site)
        sums, counts = self.sums[:, place], self.counts[:, place]
        total = counts.sum(0)
        pooled = sums.sum(0) / np.maximum(total, 1.0)
        return sums - pooled * counts, total

    @cached_property
    def standard_errors(self) -> dict[str, tuple[float, float]]:
        """Standard error of each norm's pooled constants over the prompts, at position 0 and elsewhere."""
        found = {}
        for site in self.sites:
            centered, total = self.centered(site)
            first, rest = np.sqrt(np.square(centered).sum(0)) / np.maximum(total, 1.0)
            found[site] = float(first), float(rest)
        return found

    @cached_property
    def _group_sums(self) -> Float64[np.ndarray, "2 group site 2"]:
        """Sums and counts of each group, added in the order of the prompts."""
        found = np.zeros((2, self.group_count, len(self.sites), 2))
        np.add.at(found[0], self.groups, self.sums)
        np.add.at(found[1], self.groups, self.counts)
        return found

    @cached_property
    def _others(self) -> Float64[np.ndarray, "2 group site 2"]:
        """Of each group, sums and counts over all other groups: those before it and those after it, so that no large
        sum is subtracted from a larger one."""
        mine, nothing = self._group_sums, np.zeros_like(self._group_sums[:, :1])
        before = np.cumsum(np.concatenate([nothing, mine[:, :-1]], axis=1), axis=1)
        after = np.cumsum(np.concatenate([nothing, mine[:, :0:-1]], axis=1), axis=1)[:, ::-1]
        total: np.ndarray = before + after
        return total

    def _means(self, totals: Float64[np.ndarray, "2 site 2"]) -> dict[str, Constant]:
        sums, counts = totals
        with np.errstate(invalid="ignore"):
            means = sums / counts
        means = np.where(np.isnan(means), means[:, ::-1], means)  # prompts of one token: there is position 0 alone
        return {
            name: Constant(float(first), float(rest)) for name, (first, rest) in zip(self.sites, means, strict=True)
        }

    def to_table(self) -> pd.DataFrame:
        """A row per prompt and norm (COLUMNS): everything that `of_table` needs, and `given` and `source` aside."""
        prompts, sites = len(self.groups), len(self.sites)
        made = {
            "prompt": np.repeat(np.arange(prompts), sites),
            "group": np.repeat(self.groups, sites),
            "site": list(self.sites) * prompts,
        }
        for what, values in (("sum", self.sums), ("count", self.counts.astype(np.int64))):
            made |= {f"{what}_first": values[..., 0].ravel(), f"{what}_rest": values[..., 1].ravel()}
        return pd.DataFrame(made, columns=list(COLUMNS))

    @classmethod
    def of_table(
        cls, table: pd.DataFrame, source: str = LEAVE_ONE_OUT, given: Mapping[str, object] | None = None
    ) -> Constants:
        """What `to_table` was made from; `given`: constants by norm, in any form that `Constant.of` takes."""
        sites = tuple(dict.fromkeys(table["site"]))
        shape = (len(table) // max(1, len(sites)), len(sites))
        groups = table["group"].to_numpy(np.int64).reshape(shape)[:, 0] if sites else np.zeros(0, np.int64)
        sums, counts = (
            table[[f"{what}_first", f"{what}_rest"]].to_numpy(np.float64).reshape(*shape, 2)
            for what in ("sum", "count")
        )
        known = None if given is None else {name: Constant.of(value) for name, value in given.items()}
        return cls(sites, groups, sums, counts, source, known)


def grouped(labels: Sequence[Hashable]) -> Int64[np.ndarray, " prompt"]:
    """Number the groups of prompts with equal labels, in the order in which they first occur."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)


# ---------------------------------------------------------------------------------------------------------- key samples

# Keys drawn per head where no number is given: a fraction is then known to about ± 0.12, a median to between the
# 37th and the 63rd percentile.
DEFAULT_SAMPLE = 64

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
        hours, minutes = self.seconds / 3600, max(1.0, self.seconds / 60)
        return (
            f"keys were sampled: {self.count} of each head's {self.longest} in the longest prompt, fewer of shorter "
            f"ones in proportion (seed {self.seed}), each measured among all keys. Fractions and quantiles over "
            "keys are estimates: heads has their 95 % intervals (columns ending in _low and _high). All keys "
            f"(keys_sample=0) would take about {f'{hours:.0f} hours' if hours > 2 else f'{minutes:.0f} minutes'} of "
            "one core"
        )


# ---------------------------------------------------------------------------------------------------- empirical queries

EMPIRICAL_QUANTILE = 0.95  # of the queries that occurred, which the ellipsoid holds: as of the observed set

# Queries kept to find that quantile, per layer: the 95 % quantile of 1024 distances is known to about ± 1.4 % of the
# queries (binomial, two standard errors). Mean and covariance are of all.
KEPT_QUERIES = 1024

# Directions in which the queries of a head spread less than this share of the widest are not part of the set: float32
# activations differ by 1e-7 where they are equal.
_FLAT = 1e-6

QueryEllipsoid = tuple[Float64[np.ndarray, "head d_head"], Float64[np.ndarray, "head d_head axis"]]  # center and axes


@dataclass
class EmpiricalQueries:
    """Mean, covariance and a sample of the queries of one layer, added prompt by prompt."""

    count: int = 0
    first: Float64[np.ndarray, "head d_head"] | float = 0.0
    second: Float64[np.ndarray, "head d_head d_head"] | float = 0.0
    origin: Float64[np.ndarray, "head d_head"] | None = None
    kept: list[Float32[np.ndarray, "some head d_head"]] = field(default_factory=list)
    every: int = 1  # one of so many queries is kept

    def add(self, queries: Float64[np.ndarray, "query head d_head"]) -> None:
        """Take in a prompt's queries, before rotary positions and over the divisor."""
        if self.origin is None:  # sums are taken from near the mean, so that nothing cancels
            self.origin = queries.mean(axis=0)
        moved = queries - self.origin
        self.first = self.first + moved.sum(axis=0)
        self.second = self.second + np.einsum("qhi,qhj->hij", moved, moved)
        places = np.arange(self.count, self.count + len(queries))
        self.kept.append(moved[places % self.every == 0].astype(np.float32))
        self.count += len(queries)
        while sum(map(len, self.kept)) > KEPT_QUERIES:  # every other one of those kept
            self.every *= 2
            self.kept = [np.concatenate(self.kept)[::2]]

    def ellipsoid(self) -> QueryEllipsoid:
        """Center and axes of the set.

        Raises:
            ValueError: no query was taken in.
        """
        if self.origin is None:
            raise ValueError("no queries were taken in: there is no set of queries that occurred")
        mean = np.asarray(self.first) / self.count
        spread = np.asarray(self.second) / self.count - np.einsum("hi,hj->hij", mean, mean)
        values, vectors = np.linalg.eigh((spread + spread.transpose(0, 2, 1)) / 2)
        size = np.sqrt(np.maximum(values, 0.0))
        size = np.where(size > _FLAT * size[:, -1:], size, 0.0)
        inverse = np.divide(1.0, size, out=np.zeros_like(size), where=size > 0.0)
        kept = np.concatenate(self.kept) - mean
        distance = np.linalg.norm(np.einsum("qhi,hij->qhj", kept, vectors) * inverse, axis=-1)
        radius = np.quantile(distance, EMPIRICAL_QUANTILE, axis=0)
        axes = vectors * (size * radius[:, None])[:, None, :]
        return self.origin + mean, axes


def ellipsoid_arrays(sets: Mapping[int, QueryEllipsoid]) -> dict[str, np.ndarray]:
    """Sets by layer, as arrays by name."""
    parts = [(layer, *part) for layer, found in sets.items() for part in zip(("center", "axes"), found, strict=True)]
    return {f"empirical/{layer}/{name}": values for layer, name, values in parts}


def ellipsoids_of_arrays(found: Mapping[str, Float[np.ndarray, " ..."]]) -> dict[int, QueryEllipsoid]:
    """What `ellipsoid_arrays` made (names without "empirical/")."""
    layers = sorted({int(name.partition("/")[0]) for name in found})
    return {layer: (found[f"{layer}/center"], found[f"{layer}/axes"]) for layer in layers}


# ---------------------------------------------------------------------------------------------------------- calibration

QUERY_RADIUS_QUANTILE = 0.95  # of |A⁺(q - c)| over the queries that occurred: rho of the observed set


@dataclass(frozen=True, eq=False)
class Calibration:
    """What the first pass finds out.

    Attributes:
        norms: a row per measured norm (columns of the `layernorms` table).
        constants: of every prompt: what replaces the sigma of each norm.
        radii: rho of each layer whose queries are bounded, by head.
        unsupported: why head space is left out, by layer.
        notes: what a reader has to know about this model, in sentences.
        calibrated_on: source, counts and hash of the calibration prompts, where constants come from some.
        empirical: the queries that occurred, by layer (`empirical_queries`): center and axes by head, before rotary
            positions, over the divisor.
        sample: which keys are measured; None: all.
        optimal: loss-optimal constants, by group of norms ("attention", "all"); empty: they were not fitted.
        first: the first measured prompts, on which what is run of a large model is chosen.
        chosen: the norms or heads that are run one by one, by probe: chosen once, and not again for every part of the
            prompts.
    """

    norms: pd.DataFrame
    constants: Constants
    radii: Mapping[int, Float64[np.ndarray, " head"]]
    unsupported: Mapping[int, str]
    notes: tuple[str, ...]
    calibrated_on: Mapping[str, Any] = field(default_factory=dict)
    empirical: Mapping[int, QueryEllipsoid] = field(default_factory=dict)
    sample: KeySample | None = None
    optimal: Mapping[str, Halves] = field(default_factory=dict)
    first: tuple[Int[Tensor, " _"], ...] = ()
    chosen: dict[str, Any] = field(default_factory=dict)

    @property
    def optimal_of(self) -> Callable[[str, int], Mapping[str, Constant]] | None:
        """Loss-optimal constants of a group of norms for a prompt, fitted on other prompts; None: there are none."""
        if not self.optimal:
            return None
        return lambda group, prompt: self.optimal[group].of(prompt) if group in self.optimal else {}

    def queries(self, layer: int, head: int) -> str:
        """Which set of queries a head's margins are measured over: "reachable", where queries are bounded, else
        "empirical"; empty for head -1, the whole layer."""
        if head < 0:
            return ""
        return "reachable" if layer in self.radii else "empirical" if layer in self.empirical else ""

    def radius(self, layer: int, head: int) -> float:
        """rho of a head; NaN where there is no bound, and for head -1, the whole layer."""
        return float(self.radii[layer][head]) if head >= 0 and layer in self.radii else float("nan")

    @property
    def projection_matters(self) -> bool:
        """Whether any norm that projects has a mean to take away."""
        projects = self.norms["kind"].isin(["layernorm", "projection_only"])
        return bool((projects & (self.norms["mean_share"] > 0)).any())


def plain_queries(heads: Heads, y: Float[Tensor, "pos d_model"]) -> Float64[Tensor, "pos head d_head"]:
    """The queries of one prompt before rotary positions, over the divisor, on the CPU."""
    return heads.queries(y, rotate=False).cpu() / heads.divisor


def observed_radius(
    heads: Heads, site: Site, queries: Float64[Tensor, "pos head d_head"]
) -> Float64[Tensor, "pos head"] | None:
    """|A⁺(q - c)| of the queries of one prompt (`plain_queries`): 1 on the edge of the reachable ellipsoid.

    None if the norm does not scale (the reachable set is unbounded).
    """
    found = heads.reached(site)
    if found is None:
        return None
    offset = queries * heads.divisor - found.center
    distance: Tensor = torch.einsum("had,phd->pha", found.inverse, offset).norm(dim=-1)
    return distance
