"""Sets of keys to measure and to check on.

Distances are relative to the RMS norm of the centred keys, as the tolerance tau is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Keys = np.ndarray
Rng = np.random.Generator


def normal(rng: Rng, n: int, d: int) -> Keys:
    return rng.standard_normal((n, d))


def layernormed(rng: Rng, n: int, d: int) -> Keys:
    x = rng.standard_normal((n, d))
    x -= x.mean(1, keepdims=True)
    return x / x.std(1, keepdims=True)


def lognormal_norms(rng: Rng, n: int, d: int) -> Keys:
    return rng.standard_normal((n, d)) * rng.lognormal(0, 1, (n, 1))


def planted(rng: Rng, n: int, d: int) -> Keys:
    """Half vertices (as normal keys at n << 2^d are), half Dirichlet mixtures of them, shuffled."""
    seeds = rng.standard_normal((n // 2, d))
    mixed = rng.dirichlet(np.ones(n // 2), n - n // 2) @ seeds
    return rng.permutation(np.concatenate([seeds, mixed]))


def low_rank(rng: Rng, n: int, d: int) -> Keys:
    return rng.standard_normal((n, d)) * np.exp(-np.arange(d) / 6) * rng.lognormal(0, 1, (n, 1))


def eight_decades(rng: Rng, n: int, d: int) -> Keys:
    """Directions at random, norms log-uniform between 1e-4 and 1e4."""
    return rng.standard_normal((n, d)) * 10.0 ** rng.uniform(-4.0, 4.0, (n, 1))


def very_heavy_norms(rng: Rng, n: int, d: int) -> Keys:
    return rng.standard_normal((n, d)) * rng.lognormal(0, 4, (n, 1))


def attention_like(rng: Rng, n: int, d: int) -> Keys:
    """32 clusters with heavy tails and a falling spectrum, and a first key (a sink) 300 times as long as the rest."""
    centres = 2.0 * rng.standard_normal((32, d))
    keys = centres[rng.integers(0, 32, n)] + rng.standard_normal((n, d)) * rng.lognormal(0, 0.5, (n, 1))
    keys = keys * np.exp(-4.0 * np.arange(d) / d) @ np.linalg.qr(rng.standard_normal((d, d)))[0]
    keys[0] *= 300.0 * np.sqrt((keys**2).sum(1).mean()) / np.linalg.norm(keys[0])
    return keys


def far_clusters(rng: Rng, n: int, d: int, apart: float = 1e7) -> Keys:
    """Two clusters, so far apart along one axis that the extent of each is a few tau."""
    keys = rng.standard_normal((n, d))
    keys[n // 2 :, 0] += apart
    return keys


def of_a_head(rng: Rng, n: int, d: int) -> Keys:
    """LayerNorm's outputs, with a gain, times a matrix of falling spectrum."""
    outputs = layernormed(rng, n, 4 * d) * rng.lognormal(0, 0.5, 4 * d)
    return outputs @ rng.standard_normal((4 * d, d)) * np.exp(-4.0 * np.arange(d) / d)


def near_ties(rng: Rng, n: int, d: int) -> Keys:
    """Corners of a cross-polytope, then keys on its facets and lower faces: exactly, or 1e-13 away from them."""
    corners = np.concatenate([np.eye(d), -np.eye(d)])
    parts = rng.multinomial(64, np.ones(min(d, 8)) / min(d, 8), n - 2 * d) / 64.0  # sums of binary fractions are exact
    ties = np.zeros((n - 2 * d, d))
    for row, part in zip(ties, parts, strict=True):
        row[rng.permutation(d)[: len(part)]] = part
    ties *= rng.choice([-1.0, 1.0], d)
    ties[::2] += rng.uniform(-1e-13, 1e-13, ties[::2].shape)
    return np.concatenate([corners, ties])


RANDOM: dict[str, Callable[[Rng, int, int], Keys]] = {
    "normal": normal,
    "LayerNorm'd normal": layernormed,
    "norms × lognormal(1)": lognormal_norms,
    "half planted interior": planted,
    "low-rank heavy-tailed": low_rank,
    "keys of a head": of_a_head,
}

# Families that took 10 to 150 ms per key, or were left undecided, before lengths were taken out of the hull test.
HARD: dict[str, Callable[[Rng, int, int], Keys]] = {
    "norms over 8 decades": eight_decades,
    "norms × lognormal(4)": very_heavy_norms,
    "attention-like": attention_like,
    "clusters 1e7 apart": far_clusters,
}
