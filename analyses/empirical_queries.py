"""The empirical set of queries: the ellipsoid of mean and covariance of those that occurred, holding 95 % of them.

A head behind a norm that scales can make only so many queries; without one there is no bound, and "what a query can do"
has to be asked of the queries that there are. This set exists for every model, so two models can be compared by it, and
it turns with the basis of a head: mean and covariance do. Queries are taken before rotary positions, over the divisor,
so scores with keys are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64

QUANTILE = 0.95  # of the queries that occurred, which the ellipsoid holds: as of the observed set

# Queries kept to find that quantile, per layer: the 95 % quantile of 1024 distances is known to about ± 1.4 % of the
# queries (binomial, two standard errors). Mean and covariance are of all.
KEPT = 1024

# Directions in which the queries of a head spread less than this share of the widest are not part of the set: float32
# activations differ by 1e-7 where they are equal.
_FLAT = 1e-6

Set = tuple[Float64[np.ndarray, "head d_head"], Float64[np.ndarray, "head d_head axis"]]  # center and axes


@dataclass
class Queries:
    """Queries of one layer, taken in prompt by prompt."""

    count: int = 0
    first: Float64[np.ndarray, "head d_head"] | float = 0.0
    second: Float64[np.ndarray, "head d_head d_head"] | float = 0.0
    origin: Float64[np.ndarray, "head d_head"] | None = None
    kept: list[Float32[np.ndarray, "some head d_head"]] | None = None
    every: int = 1  # one of so many queries is kept

    def add(self, queries: Float64[np.ndarray, "query head d_head"]) -> None:
        """Take in a prompt's queries, before rotary positions and over the divisor."""
        if self.origin is None:  # sums are taken from near the mean, so that nothing cancels
            self.origin, self.kept = queries.mean(axis=0), []
        assert self.kept is not None
        moved = queries - self.origin
        self.first = self.first + moved.sum(axis=0)
        self.second = self.second + np.einsum("qhi,qhj->hij", moved, moved)
        places = np.arange(self.count, self.count + len(queries))
        self.kept.append(moved[places % self.every == 0].astype(np.float32))
        self.count += len(queries)
        while sum(map(len, self.kept)) > KEPT:  # every other one of those kept
            self.every *= 2
            self.kept = [np.concatenate(self.kept)[::2]]

    def ellipsoid(self) -> Set:
        """Center and axes of the set.

        Raises:
            ValueError: no query was taken in.
        """
        if self.origin is None or self.kept is None:
            raise ValueError("no queries were taken in: there is no set of queries that occurred")
        mean = np.asarray(self.first) / self.count
        spread = np.asarray(self.second) / self.count - np.einsum("hi,hj->hij", mean, mean)
        values, vectors = np.linalg.eigh((spread + spread.transpose(0, 2, 1)) / 2)
        size = np.sqrt(np.maximum(values, 0.0))
        size = np.where(size > _FLAT * size[:, -1:], size, 0.0)
        inverse = np.divide(1.0, size, out=np.zeros_like(size), where=size > 0.0)
        kept = np.concatenate(self.kept) - mean
        distance = np.linalg.norm(np.einsum("qhi,hij->qhj", kept, vectors) * inverse, axis=-1)
        radius = np.quantile(distance, QUANTILE, axis=0)
        axes = vectors * (size * radius[:, None])[:, None, :]
        return self.origin + mean, axes


def arrays(sets: Mapping[int, Set]) -> dict[str, np.ndarray]:
    """Sets by layer, as arrays by name."""
    return {f"empirical/{layer}/{part}": found[i] for layer, found in sets.items() for i, part in _PARTS}


def of_arrays(found: Mapping[str, Float[np.ndarray, " ..."]]) -> dict[int, Set]:
    """What `arrays` made (names without "empirical/")."""
    layers = sorted({int(name.partition("/")[0]) for name in found})
    return {layer: (found[f"{layer}/center"], found[f"{layer}/axes"]) for layer in layers}


_PARTS = ((0, "center"), (1, "axes"))
