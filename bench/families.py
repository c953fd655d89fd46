"""Sets of keys to measure and to check on: random families, and adversarial ones whose verdicts are known.

Distances are relative to the RMS norm of the centred keys, as the tolerance tau is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


def pairs(rng: Rng, n: int, d: int, apart: float) -> Keys:
    """Normal keys and a copy of each, moved in any direction."""
    keys = rng.standard_normal((n, d))
    rms = np.sqrt((keys**2).sum(1).mean())
    return np.concatenate([keys, keys + apart * rms / np.sqrt(d) * rng.standard_normal((n, d))])


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


RANDOM: dict[str, Callable[[Rng, int, int], Keys]] = {
    "normal": normal,
    "LayerNorm'd normal": layernormed,
    "norms × lognormal(1)": lognormal_norms,
    "half planted interior": planted,
    "low-rank heavy-tailed": low_rank,
}

# Families that took 10 to 150 ms per key, or were left undecided, before lengths were taken out of the hull test.
HARD: dict[str, Callable[[Rng, int, int], Keys]] = {
    "norms over 8 decades": eight_decades,
    "norms × lognormal(4)": very_heavy_norms,
    "attention-like": attention_like,
    "clusters 1e7 apart": far_clusters,
}


def adversarial(rng: Rng) -> Iterator[tuple[str, Keys, list[str]]]:
    """Name, keys, and the verdicts that follow from the construction and tau = 1e-7."""
    for d in (3, 8, 32):
        for exponent in (3, 4, 5, 6, 8, 9):
            # A vertex of the cross-polytope and a copy, moved along the plane that touches it there: both are
            # vertices, a third of the step apart from the hull, unless the step is below tau.
            corners = np.concatenate([np.eye(d), -np.eye(d)])
            step = rng.standard_normal(d)
            step[0] = 0.0
            copy = corners[0] + 10.0**-exponent * step / np.linalg.norm(step)
            twin = "duplicate" if exponent >= 8 else "selectable"
            expected = [twin] + ["selectable"] * (2 * d - 1) + [twin]
            yield f"near-duplicates at 1e-{exponent}", np.concatenate([corners, copy[None]]), expected
        # A point on a facet of the cross-polytope, a little outside or inside.
        for sign, verdict in ((1, "selectable"), (-1, "unselectable"), (0, "unselectable")):
            corners = np.concatenate([np.eye(d), -np.eye(d)])
            facet = rng.dirichlet(np.full(d, 10.0)) @ np.eye(d)
            point = facet + sign * 1e-6 * np.ones(d) / np.sqrt(d)
            keys = np.concatenate([corners, point[None]])
            name = f"1e-6 {'outside' if sign > 0 else 'inside' if sign < 0 else 'times 0 off'} a facet"
            yield name, keys, ["selectable"] * (2 * d) + [verdict]
        place = rng.permutation(np.arange(50.0))
        ends = ["selectable" if p in (0.0, 49.0) else "unselectable" for p in place]
        yield "a line", place[:, None] * rng.standard_normal(d) + 3, ends
        # A cluster so far away that its own extent, and that of the rest, is below tau.
        far = np.concatenate([rng.standard_normal((20, d)), rng.standard_normal((20, d)) + 1e10])
        yield "two clusters 1e10 apart", far, ["duplicate"] * 40
        # Nearer, clusters keep their vertices: a cross-polytope each, one key in the middle of each.
        one = np.concatenate([np.eye(d), -np.eye(d), np.zeros((1, d))])
        shift = np.zeros(d)
        shift[0] = 1e3
        both = np.concatenate([one, one + shift])
        expected = ["selectable"] * (2 * d) + ["unselectable"]
        inner = expected.copy(), expected.copy()
        inner[0][0] = "unselectable"  # the corners that face the other cluster lie between the two
        inner[1][d] = "unselectable"
        yield "two clusters 1e3 apart", both, inner[0] + inner[1]
        seeds = layernormed(rng, 3 * d, d + 1)
        mixed = rng.dirichlet(np.ones(3 * d), 3 * d) @ seeds
        keys = np.concatenate([seeds, mixed]).astype(np.float32)
        yield "float32, on a sphere and inside", keys, ["selectable"] * (3 * d) + ["unselectable"] * (3 * d)
        yield "all equal", np.tile(rng.standard_normal(d), (30, 1)), ["duplicate"] * 30
        keys = layernormed(rng, 20, d + 1)
        inside = keys.mean(axis=0, keepdims=True)
        twice = np.concatenate([keys, keys, inside, inside])
        yield "everything twice", twice, ["duplicate"] * 40 + ["unselectable"] * 2
    grid = np.stack(np.meshgrid(*[np.arange(-1.0, 2.0)] * 3), axis=-1).reshape(-1, 3)
    corner = (np.abs(grid) == 1).all(axis=1)
    yield "a grid", grid, ["selectable" if c else "unselectable" for c in corner]
    t = np.linspace(-1, 1, 40)
    yield "points of a cyclic polytope", np.stack([t, t**2, t**3, t**4], axis=1), ["selectable"] * 40
