"""Sets of keys to try the geometry on: those of `bench/families.py`, and others made to mislead float64.

A family takes a generator, a number of keys and a dimension, and gives a `Case`. Distances are relative to the RMS norm
of the centred keys, as the tolerance tau is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_spec = importlib.util.spec_from_file_location("bench_families", Path(__file__).parents[2] / "bench" / "families.py")
bench = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(bench)

TAU = 1e-7
Keys = np.ndarray
Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """Arguments of `key_geometry`."""

    keys: Keys
    bias: np.ndarray | None = None
    query_set: tuple[np.ndarray, np.ndarray] | None = None

    def arguments(self) -> dict[str, object]:
        return {"keys": self.keys, "bias": self.bias, "query_set": self.query_set}


Family = Callable[[Rng, int, int], Case]


def pairs(rng: Rng, n: int, d: int, apart: float) -> Keys:
    """Normal keys and a copy of each, moved in any direction."""
    keys = rng.standard_normal((n, d))
    rms = np.sqrt((keys**2).sum(1).mean())
    return np.concatenate([keys, keys + apart * rms / np.sqrt(d) * rng.standard_normal((n, d))])


def rms(keys: Keys) -> float:
    return float(np.sqrt(((keys - keys.mean(0)) ** 2).sum(1).mean()))


def unit(rng: Rng, n: int, d: int) -> Keys:
    x = rng.standard_normal((n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def layernormed32(rng: Rng, n: int, d: int) -> Keys:
    """As a float32 model computes it: on a sphere and in a plane, both up to rounding."""
    x = rng.standard_normal((n, max(d, 2))).astype(np.float32)
    x -= x.mean(1, keepdims=True)
    return x / np.sqrt((x * x).mean(1, keepdims=True))


def far_clusters(rng: Rng, n: int, d: int) -> Keys:
    """Two clusters so far apart that each is about as wide as tau."""
    keys = rng.standard_normal((n, d))
    keys[n // 2 :] += 10.0 ** rng.uniform(6, 8) * unit(rng, 1, d)
    return rng.permutation(keys)


def attention_like(rng: Rng, n: int, d: int) -> Keys:
    """A sink of a norm hundreds of times the rest, a few clusters, heavy tails."""
    centres = 3 * rng.standard_normal((4, d))
    keys = centres[rng.integers(0, 4, n)] + rng.standard_t(3, (n, d)) * rng.lognormal(0, 0.5, (n, 1))
    keys[0] = 300 * unit(rng, 1, d)
    return keys


def near_copies(rng: Rng, n: int, d: int) -> Keys:
    """Keys and copies 0.3 to 3 tau away."""
    keys = rng.standard_normal((n // 2, d))
    away = TAU * rms(keys) * rng.uniform(0.3, 3, (n // 2, 1)) * unit(rng, n // 2, d)
    return rng.permutation(np.concatenate([keys, keys + away]))


def chains(rng: Rng, n: int, d: int) -> Keys:
    """Chains of keys, each within tau of the next, none of them of the one after that."""
    keys = rng.standard_normal((max(n // 5, 1), d))
    along = TAU * rms(np.vstack([keys, -keys])) * unit(rng, len(keys), d)
    links = [keys + t * along + 0.05 * t * t * TAU * unit(rng, len(keys), d) for t in np.arange(5) * 0.7]
    return rng.permutation(np.concatenate(links))


def lattice(rng: Rng, n: int, d: int) -> Keys:
    """Many exact copies, lines and planes."""
    return rng.integers(-2, 3, (n, d)).astype(float)


def rank_deficient(rng: Rng, n: int, d: int) -> Keys:
    """In a subspace up to rounding."""
    rank = max(d // 2, 1)
    return rng.standard_normal((n, rank)) @ rng.standard_normal((rank, d))


def facet_points(rng: Rng, n: int, d: int) -> Keys:
    """Half the keys in the plane of d of the others up to rounding, some a few tau beside it."""
    corners = rng.standard_normal((n - n // 2, d))
    inside = rng.dirichlet(np.ones(min(d, len(corners))), n // 2) @ corners[:d]
    shift = rng.choice([0.0, 0.3, 1.5, 5.0], (n // 2, 1)) * TAU * rms(corners)
    return np.concatenate([corners, inside + shift * unit(rng, n // 2, d)])


def conditioned(rng: Rng, d: int, condition: float) -> np.ndarray:
    """A square matrix of that condition number."""
    left, right = (np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(2))
    return left * np.geomspace(1.0, condition, d) @ right


def plain(family: Callable[[Rng, int, int], Keys]) -> Family:
    return lambda rng, n, d: Case(np.asarray(family(rng, n, d), np.float64))


def linear_bias(rng: Rng, n: int, d: int) -> Case:
    """A bias whose linear part, which changes nothing, is up to 10⁶ times the rest."""
    keys = rng.standard_normal((n, d))
    return Case(keys, keys @ rng.standard_normal(d) * 10.0 ** rng.uniform(1, 6) + rng.standard_normal(n))


def through_queries(rng: Rng, n: int, d: int) -> Case:
    """Measured through an ellipsoid that is off its centre."""
    keys = rng.standard_normal((n, d)) * rng.lognormal(0, 1, (n, 1))
    return Case(keys, None, (3 * rng.standard_normal(d), rng.standard_normal((d, d)) * 10.0 ** rng.uniform(-3, 3)))


def through_fewer_axes(rng: Rng, n: int, d: int) -> Case:
    """The queries differ in all dimensions but the last, along which the center reaches: a bias per key."""
    d = max(d, 2)
    axes = np.eye(d)[:, :-1] * 10.0 ** rng.uniform(-2, 2)
    return Case(rng.standard_normal((n, d)), None, (3 * np.eye(d)[-1], axes))


def basis_changed(rng: Rng, n: int, d: int) -> Case:
    """A head in another basis, of a condition number of 10⁴ to 10⁷: its axes lack no direction (10⁻⁹)."""
    keys, center, axes = rng.standard_normal((n, d)), rng.standard_normal(d), rng.standard_normal((d, d))
    change = conditioned(rng, d, 10.0 ** rng.uniform(4, 7))
    back = np.linalg.inv(change).T
    return Case(keys @ change.T, None, (back @ center, back @ axes))


FAMILIES: dict[str, Family] = {
    **{name: plain(family) for name, family in bench.RANDOM.items() if name != "LayerNorm'd normal"},
    "LayerNorm'd normal": plain(lambda rng, n, d: bench.layernormed(rng, n, max(d, 2))),  # in one dimension all are 0
    **{
        f"pairs about 1e-{k} apart": plain(lambda rng, n, d, k=k: pairs(rng, n // 2, d, 10.0**-k)) for k in (3, 6, 7, 8)
    },
    "everything twice": plain(lambda rng, n, d: np.tile(rng.standard_normal((n // 2, d)), (2, 1))),
    "low rank, t(2)": plain(lambda rng, n, d: rng.standard_t(2, (n, d)) * np.exp(-np.arange(d) / 3)),
    "normal, with a bias": lambda rng, n, d: Case(bench.normal(rng, n, d), rng.standard_normal(n)),
    "float32 LayerNorm'd": plain(layernormed32),
    "norms log-uniform over 8 decades": plain(lambda rng, n, d: unit(rng, n, d) * 10.0 ** rng.uniform(-4, 4, (n, 1))),
    "norms × lognormal(4)": plain(lambda rng, n, d: rng.standard_normal((n, d)) * rng.lognormal(0, 4, (n, 1))),
    "clusters up to 1e8 apart": plain(far_clusters),
    "sink, clusters, heavy tails": plain(attention_like),
    "copies 0.3 to 3 tau apart": plain(near_copies),
    "chains of near-equal keys": plain(chains),
    "lattice": plain(lattice),
    "rank-deficient": plain(rank_deficient),
    "offset 1e8 to 1e10": plain(
        lambda rng, n, d: rng.standard_normal((n, d)) + 10.0 ** rng.uniform(8, 10) * unit(rng, 1, d)
    ),
    "on a facet, and a few tau beside it": plain(facet_points),
    "bias with a large linear part": linear_bias,
    "lattice, with a bias": lambda rng, n, d: Case(lattice(rng, n, d), rng.integers(-1, 2, n).astype(float)),
    "through an off-centre query set": through_queries,
    "through queries along fewer axes": through_fewer_axes,
    "through queries, basis changed by 1e4 to 1e7": basis_changed,
}


def adversarial(rng: Rng) -> Iterator[tuple[str, Keys, list[str]]]:
    """Name, keys, and the verdicts that follow from the construction and tau = 1e-7."""
    for d in (3, 8, 32):
        cross = np.concatenate([np.eye(d), -np.eye(d)])  # the vertices of the cross-polytope
        for exponent in (3, 4, 5, 6, 8, 9):
            # A vertex of the cross-polytope and a copy, moved along the plane that touches it there: both are
            # vertices, a third of the step apart from the hull, unless the step is below tau.
            step = rng.standard_normal(d)
            step[0] = 0.0
            copy = cross[0] + 10.0**-exponent * step / np.linalg.norm(step)
            twin = "duplicate" if exponent >= 8 else "selectable"
            expected = [twin] + ["selectable"] * (2 * d - 1) + [twin]
            yield f"near-duplicates at 1e-{exponent}", np.concatenate([cross, copy[None]]), expected
        # A point on a facet of the cross-polytope, a little outside or inside.
        for sign, verdict in ((1, "selectable"), (-1, "unselectable"), (0, "unselectable")):
            facet = rng.dirichlet(np.full(d, 10.0)) @ np.eye(d)
            point = facet + sign * 1e-6 * np.ones(d) / np.sqrt(d)
            name = f"1e-6 {'outside' if sign > 0 else 'inside' if sign < 0 else 'times 0 off'} a facet"
            yield name, np.concatenate([cross, point[None]]), ["selectable"] * (2 * d) + [verdict]
        place = rng.permutation(np.arange(50.0))
        ends = ["selectable" if p in (0.0, 49.0) else "unselectable" for p in place]
        yield "a line", place[:, None] * rng.standard_normal(d) + 3, ends
        # A cluster so far away that its own extent, and that of the rest, is below tau.
        far = np.concatenate([rng.standard_normal((20, d)), rng.standard_normal((20, d)) + 1e10])
        yield "two clusters 1e10 apart", far, ["duplicate"] * 40
        # Nearer, clusters keep their vertices: a cross-polytope each, one key in the middle of each.
        one = np.concatenate([cross, np.zeros((1, d))])
        both = np.concatenate([one, one + 1e3 * np.eye(d)[0]])
        expected = ["selectable"] * (2 * d) + ["unselectable"]
        inner = expected.copy(), expected.copy()
        inner[0][0] = "unselectable"  # the corners that face the other cluster lie between the two
        inner[1][d] = "unselectable"
        yield "two clusters 1e3 apart", both, inner[0] + inner[1]
        seeds = bench.layernormed(rng, 3 * d, d + 1)
        mixed = rng.dirichlet(np.ones(3 * d), 3 * d) @ seeds
        keys = np.concatenate([seeds, mixed]).astype(np.float32)
        yield "float32, on a sphere and inside", keys, ["selectable"] * (3 * d) + ["unselectable"] * (3 * d)
        yield "all equal", np.tile(rng.standard_normal(d), (30, 1)), ["duplicate"] * 30
        keys = bench.layernormed(rng, 20, d + 1)
        inside = keys.mean(axis=0, keepdims=True)
        twice = np.concatenate([keys, keys, inside, inside])
        yield "everything twice", twice, ["duplicate"] * 40 + ["unselectable"] * 2
    grid = np.stack(np.meshgrid(*[np.arange(-1.0, 2.0)] * 3), axis=-1).reshape(-1, 3)
    corner = (np.abs(grid) == 1).all(axis=1)
    yield "a grid", grid, ["selectable" if c else "unselectable" for c in corner]
    t = np.linspace(-1, 1, 40)
    yield "points of a cyclic polytope", np.stack([t, t**2, t**3, t**4], axis=1), ["selectable"] * 40
