"""Constants that replace sigma, from the first pass over the prompts.

The first pass stores the sum and count of sigma of every norm on every prompt, at position 0 and elsewhere. The
constants of a prompt are the means over all prompts outside its group (leave one group out), so no prompt is measured
with constants that it shaped, and no further pass is needed. Equal prompts form one group.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from ln_probe.hooks.constants import Constant
from ln_probe.hooks.model import OneLine

# Where constants come from, as provenance and pages name it.
LEAVE_ONE_OUT = "leave-one-out means over the other prompts"
CALIBRATION = "means over the calibration prompts"
OWN_MEANS = "the prompt's own means"

# A constant farther than this from the mean sigma of the measured prompts also changes the size of the vectors.
FAR = 0.05

Halves = tuple[Mapping[str, Constant], Mapping[str, Constant]]  # constants fitted on each half of the prompts


@dataclass(frozen=True, eq=False, repr=False)
class Constants(OneLine):
    """The constants of every prompt: `constants.of(i)`, or `constants.pooled` for all prompts together.

    Attributes:
        sites: names of the norms, in the order of the forward pass.
        groups: group of each prompt, numbered in the order of their first prompts.
        sums: sum of sigma of each prompt and norm, at position 0 and elsewhere.
        counts: how many sigmas each is a sum of.
        source: where the constants come from, as text.
        given: constants of other text (`calibration=`), for every prompt alike; None: leave-one-out means, or, of one
            group alone, the means over its prompts.
        optimal: loss-optimal constants by group of norms ("attention", "all"), fitted on each half of the prompt groups
            (`halves_of`); empty: they were not fitted.
    """

    sites: tuple[str, ...]
    groups: Int64[np.ndarray, " prompt"]
    sums: Float64[np.ndarray, "prompt site 2"]
    counts: Float64[np.ndarray, "prompt site 2"]
    source: str = LEAVE_ONE_OUT
    given: Mapping[str, Constant] | None = None
    optimal: Mapping[str, Halves] = field(default_factory=dict)

    @property
    def group_count(self) -> int:
        """How many groups of prompts there are."""
        return int(self.groups.max()) + 1 if len(self.groups) else 0

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

    def optimal_of(self, group: str, prompt: int) -> Mapping[str, Constant]:
        """Return the loss-optimal constants of a group of norms for a prompt, fitted on the half that it is not in."""
        if group not in self.optimal:
            return {}
        return self.optimal[group][1 - halves_of(self.groups.tolist())[prompt]]

    @cached_property
    def observed(self) -> pd.DataFrame:
        """Mean sigma over the measured prompts, a row per norm: `first` (position 0) and `rest` (the others)."""
        means = self._means(self._group_sums.sum(1))
        rows = [(name, means[name].first, means[name].rest) for name in self.sites]
        return pd.DataFrame(rows, columns=["site", "first", "rest"]).set_index("site")

    def notes(self) -> tuple[str, ...]:
        """A note where constants are farther than FAR from the mean sigma of the measured prompts."""
        pooled = np.array([self.pooled[name].pair.tolist() for name in self.sites]).reshape(-1, 2)
        off = np.abs(pooled / self.observed.to_numpy() - 1)
        far = (off > FAR).any(axis=1)
        if not far.any():
            return ()
        most = self.sites[int(np.nanargmax(np.nanmax(off, axis=1)))]
        return (
            f"the constants of {int(far.sum())} of {len(far)} norms differ by more than {FAR:.0%} from the mean sigma "
            f"of these prompts (most at {most}, by {np.nanmax(off):.0%}), so freezing scaling also changes the size of "
            "vectors there",
        )

    def centered(self, site: str) -> tuple[Float64[np.ndarray, "prompt 2"], Float64[np.ndarray, " 2"]]:
        """Return S − c m of each prompt at one norm (its sum of sigma minus the pooled constant times its count), at
        position 0 and elsewhere, and the total counts: their ratio is, to first order, what a prompt adds."""
        place = self.sites.index(site)
        sums, counts = self.sums[:, place], self.counts[:, place]
        total = counts.sum(0)
        pooled = sums.sum(0) / np.maximum(total, 1.0)
        return sums - pooled * counts, total

    @cached_property
    def standard_errors(self) -> dict[str, tuple[float, float]]:
        """Standard error of each norm's pooled constants over the prompts, at position 0 and elsewhere."""
        each = ((site, *self.centered(site)) for site in self.sites)
        errors = (
            (site, np.sqrt(np.square(centered).sum(0)) / np.maximum(total, 1.0)) for site, centered, total in each
        )
        return {site: (float(first), float(rest)) for site, (first, rest) in errors}

    @cached_property
    def _group_sums(self) -> Float64[np.ndarray, "2 group site 2"]:
        """Sums and counts of each group, added in the order of the prompts."""
        totals = np.zeros((2, self.group_count, len(self.sites), 2))
        np.add.at(totals[0], self.groups, self.sums)
        np.add.at(totals[1], self.groups, self.counts)
        return totals

    @cached_property
    def _others(self) -> Float64[np.ndarray, "2 group site 2"]:
        """Sums and counts over the groups before and after each one: no large sum is subtracted from a larger one."""
        sums, nothing = self._group_sums, np.zeros_like(self._group_sums[:, :1])
        before = np.cumsum(np.concatenate([nothing, sums[:, :-1]], axis=1), axis=1)
        after = np.cumsum(np.concatenate([nothing, sums[:, :0:-1]], axis=1), axis=1)[:, ::-1]
        total: np.ndarray = before + after
        return total

    def _means(self, totals: Float64[np.ndarray, "2 site 2"]) -> dict[str, Constant]:
        sums, counts = totals
        with np.errstate(invalid="ignore"):
            means = sums / counts
        means = np.where(np.isnan(means), means[:, ::-1], means)  # (prompts of one token)
        return {name: Constant(*map(float, pair)) for name, pair in zip(self.sites, means, strict=True)}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what a saved report keeps: everything but `given`, `optimal` and `source`."""
        return {"sites": np.array(self.sites), "groups": self.groups, "sums": self.sums, "counts": self.counts}

    @classmethod
    def of_arrays(
        cls, arrays: Mapping[str, np.ndarray], source: str, given: Mapping[str, object] | None = None
    ) -> Constants:
        """Return the constants from the result of `arrays`; `given`: by norm, in any form that `Constant.of` takes."""
        known = None if given is None else {name: Constant.of(value) for name, value in given.items()}
        sites = tuple(arrays["sites"].tolist())
        return cls(sites, arrays["groups"], arrays["sums"], arrays["counts"], source, known)


def grouped(labels: Sequence[Hashable]) -> Int64[np.ndarray, " prompt"]:
    """Number the groups of prompts with equal labels, in the order in which they first occur."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(label, len(numbers)) for label in labels], np.int64)


def group_numbers(prompts: Sequence[Int[Tensor, " _"]], labels: Any) -> Int64[np.ndarray, " prompt"]:
    """Return the group of each prompt, numbered in the order of their first prompts.

    Args:
        labels: prompts with equal labels form one group; None: equal prompts do.

    Raises:
        TypeError, ValueError: labels that are not a list of one hashable value for each prompt.
    """
    if labels is None:
        return grouped([tuple(row.tolist()) for row in prompts])
    if isinstance(labels, Tensor):
        labels = labels.tolist()
    if isinstance(labels, str | Set | Mapping) or not isinstance(labels, Collection):  # a set has no order
        raise TypeError(f"groups must be a list of labels, one for each prompt, got {labels!r}")
    if len(labels) != len(prompts):
        raise ValueError(f"groups: got {len(labels)} labels for {len(prompts)} prompts")
    for label in labels:
        if not isinstance(label, Hashable) or isinstance(label, Tensor):
            raise TypeError(f"groups: a label must be a text, a number or a tuple (hashable), got {label!r}")
        if label != label:
            raise ValueError("groups: a label is nan, which equals no label, itself included: give it a name")
    return grouped(list(labels))


def halves_of(groups: Sequence[Hashable]) -> list[int]:
    """Return the half, 0 or 1, of each prompt: groups alternate, in the order in which they first occur."""
    order = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    return [order[group] % 2 for group in groups]
