"""What a user may give (keys, a bias, a set of queries), and the coordinates in which it is measured.

Verdicts are about the keys themselves (`Judged`): centred, over their RMS norm, a bias over its own RMS
as one more coordinate. If the set of queries lacks directions, so do these points, and the center's part
along them is a bias. Margins and attention are about the keys as the queries see them (`Seen`):
`z = Aᵀk`, in nats, with `c·k` and the bias added to the scores. docs/geometry.md says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray

from ln_probe.analyses.geometry.check import AMPLE, EPS, Bools, Floats
from ln_probe.analyses.geometry.compiled import compiled_in_place, compiled_part

Array = np.ndarray | torch.Tensor

# Products of several squares of numbers between these stay within float64's range.
SMALLEST, LARGEST = 1e-60, 1e60
# A direction along which the axes are shorter than this share of the longest is not part of the
# set's span: queries do not differ along it. In float64 the span is then known to about 1e-7, the
# tolerance of verdicts.
SPAN_TOLERANCE = 1e-9
# Rows span all directions if their Gram matrix's pivots are at least this share of the largest.
CLEARLY = 1e-4
# A direction in which the keys' relative RMS is no more than this is not part of the span.
RANK_TOLERANCE = 1e-9
# Keys with no more than this outside a subspace that others clearly span lie in it.
FLAT = 1e-12
# Pivots of a Cholesky factorization above this share of the diagonal have at least six digits;
# with smaller ones the factor is found from the keys.
CHOLESKY_IS_ENOUGH = 1e-8
# A bias that is an affine function of the keys up to this share of its spread changes no verdict:
# the query can absorb it.
AFFINE_BIAS = 1e-12
# Scores that differ by less than this share of the largest coordinate are alike.
LEVEL = 1e-10
# Biases that differ by less than this much of what they may be off are taken for equal.
UNSEEN = 2.0


def key_sets(
    keys: Any, bias: Any
) -> tuple[Float64[np.ndarray, "set key d"], Float64[np.ndarray, "set key"] | None, bool]:
    """Return copies of keys and bias as a batch in float64, and whether they were given as one.

    Raises:
        TypeError: not of a floating-point type.
        ValueError: no keys, no dimensions, NaN or infinite values, numbers outside 1e±60, shapes that do not fit.
    """
    values = floats("keys", keys)
    if values.ndim not in (2, 3):
        raise ValueError(f'keys must have the shape "keys d" or "batch keys d", got {values.shape}')
    for size, what in zip(values.shape[-2:], ("keys", "dimensions"), strict=True):
        if size == 0:
            raise ValueError(f"there are no {what}: keys have the shape {values.shape}; give at least one")
    if len(values) == 0:
        raise ValueError(f"there are no sets of keys: keys have the shape {values.shape}; give at least one")
    check_finite("key", values)
    lift = None
    if bias is not None:
        lift = floats("bias", bias)
        if lift.shape not in (values.shape[:-1], values.shape[-2:-1]):
            raise ValueError(f"bias must have the shape {values.shape[:-1]}, one value per key, got {lift.shape}")
        lift = np.ascontiguousarray(np.broadcast_to(lift, values.shape[:-1]))
        check_finite("bias", lift[..., None])
    if values.ndim == 3:
        return values, lift, True
    return values[None], None if lift is None else lift[None], False


def floats(name: str, values: Any) -> NDArray[np.float64]:
    """Return a copy of an array or tensor of any floating-point type, in float64.

    Raises:
        TypeError: of another type, sparse, or without values (the "meta" device).
    """
    if isinstance(values, torch.Tensor):
        kind, floating = str(values.dtype), values.is_floating_point()
        if values.layout is not torch.strided:
            raise TypeError(f"{name} must be dense, got a tensor of layout {values.layout}: call .to_dense() first")
        if values.is_meta:
            raise TypeError(f"{name} must have values, got a tensor of shape {tuple(values.shape)} on the meta device")
        if floating:
            return np.array(values.detach().to(device="cpu").to(torch.float64).numpy(), order="C")
    else:
        if hasattr(values, "toarray"):  # scipy's sparse matrices
            raise TypeError(f"{name} must be dense, got {type(values).__name__}: call .toarray() first")
        given = values
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} must be a rectangular array, one row per key: {error}") from error
        kind, floating = str(values.dtype), values.dtype.kind == "f"
        if floating:
            return np.array(values, dtype=np.float64, order="C")
        if values.ndim == 0 and values.dtype.kind in "OUS":  # None, text, a dict: what NumPy makes no array of
            raise TypeError(f"{name} must be an array or tensor of floats, got {type(given).__name__}")
    raise TypeError(f"{name} must be of a floating-point type, got {kind}: convert them first, e.g. to float64")


def check_finite(name: str, values: Float64[np.ndarray, "*batch key d"]) -> None:
    """Check that all values are finite and of a size that can be used.

    Raises:
        ValueError: they are not.
    """
    bad = ~np.isfinite(values).all(axis=-1)
    if bad.any():
        place = np.argwhere(bad)[0]
        what = "NaN" if np.isnan(values[tuple(place)]).any() else "an infinite value"
        where = f"{name} {place[-1]}" + (f" of set {place[0]}" if len(place) > 1 else "")
        raise ValueError(f"{where} contains {what} ({bad.sum()} of {bad.size} do): remove or repair it first")
    check_size(name, values)


def check_size(name: str, values: Float64[np.ndarray, "*shape"]) -> None:
    """Check that the largest number of an array is 0 or within SMALLEST and LARGEST.

    Raises:
        ValueError: it is not.
    """
    largest = float(np.abs(values).max(initial=0.0))
    if largest != 0.0 and not SMALLEST <= largest <= LARGEST:
        raise ValueError(f"the largest {name} is {largest:.3g}: scale it to between {SMALLEST:g} and {LARGEST:g} first")


def clearly_span(rows: Float64[np.ndarray, "set row d"]) -> Bools:
    """Return which sets of rows clearly span all directions."""
    try:
        pivots = np.linalg.cholesky(rows.mT @ rows).diagonal(axis1=1, axis2=2)
    except np.linalg.LinAlgError:
        return np.zeros(1, np.bool_) if len(rows) == 1 else np.concatenate([clearly_span(one[None]) for one in rows])
    return np.asarray(pivots.min(axis=1) > CLEARLY * pivots.max(axis=1))


@dataclass(frozen=True)
class QuerySet:
    """All queries `center + axes @ u` with `|u| <= 1`; scores are plain products with keys, in nats.

    `slack`: how far, relative to the length of each row of the axes, a query of the given set may lie
    from one of this (not 0 only where axes were reduced in number).
    """

    center: Float64[np.ndarray, " d"]
    axes: Float64[np.ndarray, "d r"]
    slack: float = 0.0

    @cached_property
    def missing(self) -> Float64[np.ndarray, "d m"]:
        """Orthonormal directions that the span of the axes lacks."""
        d, r = self.axes.shape
        if r >= d and clearly_span(self.axes.T[None]).all():
            return np.zeros((d, 0))
        left, values, _ = np.linalg.svd(self.axes)
        rank = int(((values >= SPAN_TOLERANCE * values[0]) & (values > 0.0)).sum())
        return np.ascontiguousarray(left[:, rank:])

    @cached_property
    def outside(self) -> Float64[np.ndarray, " d"]:
        """The part of the center along the missing directions: every query of the span has it."""
        along = self.missing.T @ self.center
        if np.linalg.norm(along) <= SPAN_TOLERANCE * np.linalg.norm(self.center):
            return np.zeros_like(self.center)
        return np.asarray(self.missing @ along)

    @cached_property
    def level(self) -> Float64[np.ndarray, " r"] | None:
        """A u of any length whose query is 0, where the axes are as many as they need to be."""
        d, r = self.axes.shape
        if not self.center.any():
            return np.zeros(r)
        return -np.linalg.solve(self.axes, self.center) if r == d and self.missing.shape[1] == 0 else None

    def in_span(self, rows: Float64[np.ndarray, "row d"]) -> Float64[np.ndarray, "row d"]:
        """Return each row without its part along the missing directions."""
        missing = self.missing
        if missing.shape[1] == 0:
            return rows
        left = rows - (rows @ missing) @ missing.T
        return np.asarray(left - (left @ missing) @ missing.T)

    def compact(self) -> QuerySet:
        """Return the same set with at most d axes (only `axes @ axes.T` matters).

        Triangularization by reflections changes each row of the axes by no more than a small multiple
        of r·d·eps of its length (Higham 2002, theorem 19.4; see `check`).
        """
        d, r = self.axes.shape
        if r == 0:
            return QuerySet(self.center, np.zeros((d, 1)))
        if r <= d:
            return self
        fewer = np.ascontiguousarray(np.asarray(np.linalg.qr(self.axes.T, mode="r")).T)
        return QuerySet(self.center, fewer, 4.0 * r * d * EPS)


def query_sets(given: Any, number: int, d: int) -> list[QuerySet]:
    """Return a query set for each of `number` sets of keys of dimension `d`, from what a user may give.

    Raises:
        TypeError: not a number or a pair of floating-point arrays.
        ValueError: a radius that is not positive, shapes that do not fit, NaN, infinite values or numbers outside
            1e±60.
    """
    if isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool):
        radius = float(given)
        if not (radius > 0.0 and np.isfinite(radius)):
            raise ValueError(f"the radius of a query set must be positive and finite, got {radius}")
        check_size("radius of the query set", np.array(radius))
        return [QuerySet(np.zeros(d), radius * np.eye(d))] * number
    if not (isinstance(given, (tuple, list)) and len(given) == 2):
        what = f"{type(given).__name__} of {len(given)}" if isinstance(given, (tuple, list)) else type(given).__name__
        raise TypeError(f"query_set must be a radius or a pair (center, axes), got {what}")
    center, axes = (
        floats(f"the {name} of the query set", part) for name, part in zip(("center", "axes"), given, strict=True)
    )
    for name, values in (("center", center), ("axes", axes)):
        if not np.isfinite(values).all():
            raise ValueError(f"the {name} of the query set contains NaN or infinite values: repair it first")
        check_size(f"entry of the {name} of the query set", values)
    if center.shape not in ((d,), (number, d)):
        wanted = f"({d},) or ({number}, {d}), got {center.shape}"
        raise ValueError(f"the center of the query set must have the shape {wanted}")
    if axes.ndim not in (2, 3) or axes.shape[-2] != d or (axes.ndim == 3 and len(axes) != number):
        wanted = f"({d}, r) or ({number}, {d}, r), got {axes.shape}"
        raise ValueError(f"the axes of the query set must have the shape {wanted}")
    centers = np.broadcast_to(center, (number, d))
    half_axes = np.broadcast_to(axes, (number, *axes.shape[-2:]))
    return [
        QuerySet(np.array(c, order="C"), np.array(a, order="C")).compact()
        for c, a in zip(centers, half_axes, strict=True)
    ]


class Judged(NamedTuple):
    """The keys of some sets, or of one, where verdicts are given."""

    rows: Floats  # "set key D": centred, over their RMS norm; the last coordinate may be a bias
    noise: Floats  # how far each may be off
    biased: bool  # queries look up along the last coordinate
    size: Floats  # the RMS norm of the keys
    lift_size: Floats  # of the bias; 0: it has no spread


class Seen(NamedTuple):
    """The keys of some sets as queries `u` of the unit ball see them, in nats."""

    rows: Floats  # "set key r"
    offset: Floats  # added to `rows @ u`
    noise: Floats


def centre(keys: Floats) -> tuple[Floats, Floats]:
    """Return the centred keys of some sets, and how far each mean may be off."""
    points = keys - keys.mean(axis=1, keepdims=True)
    left = points.mean(axis=1, keepdims=True)  # the mean was rounded
    points -= left
    off, alike = np.sqrt(np.einsum("skd,skd->s", left, left)), (keys == keys[:, :1]).all(axis=(1, 2))
    points[alike], off[alike] = 0.0, 0.0
    return points, off


def over_rms(points: Floats, off: Floats, noise: Floats, width: int) -> tuple[Floats, Floats, Floats]:
    """Return points over their RMS norm, among `width` coordinates, their errors, and that norm.

    Args:
        points: centred.
        off: how far their mean may be off.
        noise: how far they may be off beside rounding.
    """
    length = np.sqrt(np.einsum("skd,skd->sk", points, points))
    size = np.sqrt((length * length).mean(axis=1))
    unit = np.where(size > 0.0, size, 1.0)
    rows = np.zeros((*length.shape, width))
    rows[..., : points.shape[2]] = points / unit[:, None, None]
    return rows, (4.0 * EPS * length + (EPS * off)[:, None] + noise) / unit[:, None], size


def alike(bias: Floats | None, query_sets: Sequence[QuerySet] | None) -> bool:
    """Whether sets of keys can be solved together: no bias, queries that lack no direction."""
    return bias is None and all(queries.missing.shape[1] == 0 for queries in query_sets or ())


def judge(points: Floats, off: Floats, bias: Floats | None, query_sets: Sequence[QuerySet] | None) -> Judged:
    """Return centred keys where verdicts are given: of one set, or of several that are `alike`."""
    nothing, wide = np.zeros(points.shape[:2]), points.shape[2]
    if alike(bias, query_sets):
        rows, noise, size = over_rms(points, off, nothing, wide)
        return Judged(rows, noise, False, size, np.zeros(len(points)))
    lift, doubt, own_noise = nothing, nothing, nothing
    queries = None if query_sets is None else query_sets[0]
    if bias is not None:
        lift = bias - bias.mean()
        doubt = EPS * np.abs(lift)
    if queries is not None and queries.missing.shape[1]:
        if queries.outside.any():  # every query has this part of the center, so it acts as a bias
            outside = queries.outside
            d, columns = queries.missing.shape
            lost = AMPLE * (3 * d + 8) * EPS * columns**0.5 * float(np.linalg.norm(queries.center))
            share = AMPLE * (d + 6) * EPS
            lift = lift + points @ outside
            doubt = doubt + share * (np.abs(points) @ np.abs(outside)) + AMPLE * lost * np.abs(points).sum(axis=2)
            doubt = doubt + EPS * np.abs(lift)
        length = np.linalg.norm(points, axis=2)
        flat = queries.in_span(points)
        rounding = (wide + 16) * EPS
        points = flat if np.linalg.norm(flat) > rounding * np.linalg.norm(length) else np.zeros_like(flat)
        own_noise = AMPLE * (wide + 8) * EPS * length
    biased = bias is not None or (queries is not None and bool(queries.outside.any()))
    rows, noise, size = over_rms(np.ascontiguousarray(points), off, own_noise, wide + biased)
    if not biased:
        return Judged(rows, noise, False, size, np.zeros(1))
    level = bool((lift == lift[0, 0]).all())
    lift = lift - lift.mean()
    rms = float(np.linalg.norm(lift)) / lift.size**0.5
    if level or rms <= UNSEEN * float(doubt.max()):
        return Judged(rows, noise, True, size, np.zeros(1))
    rows[..., -1] = lift / rms
    return Judged(rows, noise + 4 * EPS * np.abs(lift / rms) + AMPLE * doubt / rms, True, size, np.array([rms]))


def see(points: Floats, bias: Floats | None, query_sets: Sequence[QuerySet]) -> Seen:
    """Return centred keys as their queries see them: of one set, or of several without a bias."""
    centers, axes = (np.stack([getattr(each, name) for each in query_sets]) for name in ("center", "axes"))
    sizes, slack = np.abs(points), np.array([[queries.slack] for queries in query_sets])
    rows, offset = points @ axes, np.einsum("skd,sd->sk", points, centers)
    share = AMPLE * (sum(axes.shape[1:]) + 5) * EPS
    far = np.einsum("skd,sd->sk", sizes, np.sqrt(np.einsum("sdr,sdr->sd", axes, axes)))
    noise, own = (share + slack) * far, share * np.einsum("skd,sd->sk", sizes, np.abs(centers))
    if bias is not None:
        lift = bias - bias.mean()
        offset = offset + lift
        own = own + EPS * np.abs(lift) + EPS * np.abs(offset)
    return Seen(rows, offset, noise + own)


def level_queries(seen: Seen, query_sets: Sequence[QuerySet], bias: Floats | None) -> tuple[Floats, Bools]:
    """Return a u under which all keys score alike, and whether one is known in the unit ball."""
    sets, count, dim = seen.rows.shape
    level, known = np.zeros((sets, dim)), [each.level if bias is None else None for each in query_sets]
    outside = np.array([u is None or np.linalg.norm(u) > 1.0 for u in known])
    spans = clearly_span(seen.rows) if count > dim and outside.any() else np.zeros(sets, np.bool_)
    for b, u in enumerate(known):
        if u is None or (outside[b] and not spans[b]):  # a shorter u may do
            u = -np.linalg.lstsq(seen.rows[b], seen.offset[b] - seen.offset[b].mean(), rcond=None)[0]
        level[b] = u
    scores = (seen.rows @ level[..., None])[..., 0] + seen.offset
    off, size = np.ptp(scores, axis=1), np.abs(seen.rows).max(axis=(1, 2))
    return level, (np.linalg.norm(level, axis=1) <= 1.0) & (off <= LEVEL * size)


class White(NamedTuple):
    """Coordinates in which the keys of each set have the same RMS along every direction.

    `rows = judged @ to_query`, so `to_query @ query` is a query there, as one where verdicts are given.
    """

    rows: Floats  # "set key rank"
    to_query: Floats  # "set D rank"
    thinnest: Floats  # the least RMS along a direction, about
    lifted: bool  # the last coordinate is what of the bias is not an affine function of the key


def whiten(rows: Floats, biased: bool) -> White | None:
    """Return white coordinates of the keys where verdicts are given.

    None for several sets that do not all span all directions: their ranks may differ.
    """
    sets, count, dim = rows.shape
    if count > dim:
        upper, inverse, thinnest = rows.mT @ rows, np.zeros((sets, dim, dim)), np.zeros(sets)
        invert_factors(upper, count, inverse, thinnest)
        if thinnest.all():
            return White(rows @ inverse, inverse, thinnest, biased)
    if sets > 1:
        return None
    flat = whiten_flat(rows[0], biased) if count > dim else None
    return flat or whiten_carefully(rows[0], biased)


def whiten_flat(rows: Floats, biased: bool) -> White | None:
    """Return white coordinates of keys that clearly lie in a subspace; None where that is not clear."""
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    spanned = values > CLEARLY * values[-1]
    rest = rows @ vectors[:, ~spanned]
    if biased or not values[-1] > 0.0 or (rest * rest).sum() > FLAT**2 * len(rows):
        return None
    to_query = vectors[:, spanned] / np.sqrt(values[spanned])
    return White((rows @ to_query)[None], to_query[None], np.sqrt(values[spanned].min(keepdims=True)), False)


@compiled_in_place
def invert_factors(uppers: Floats, count: int, inverses: Floats, least: Floats) -> None:
    """Factorize the Gram matrices of some sets with `invert_factor`."""
    for b in range(len(least)):
        least[b] = invert_factor(uppers[b], count, inverses[b])


@compiled_part
def invert_factor(upper: Floats, count: int, inverse: Floats) -> float:
    """Factorize `upper / count = Rᵀ R` in place and set the inverse of R, among zeros.

    Returns:
        R's least diagonal entry, 0 if that is not well determined.
    """
    dim, least = upper.shape[0], np.inf
    for s in range(dim):
        for t in range(s, dim):
            upper[s, t] /= count
    for s in range(dim):
        diagonal = upper[s, s]
        for k in range(s):
            x = upper[k, s]
            diagonal -= x * x
        if not diagonal > CHOLESKY_IS_ENOUGH * upper[s, s] or not diagonal > CHOLESKY_IS_ENOUGH / dim:
            return 0.0
        for k in range(s):
            x = upper[k, s]
            for t in range(s + 1, dim):
                upper[s, t] -= x * upper[k, t]
        root = np.sqrt(diagonal)
        upper[s, s] = root
        for t in range(s + 1, dim):
            upper[s, t] /= root
        least = min(least, root)
    for s in range(dim - 1, -1, -1):
        inverse[s, s] = 1.0
        for k in range(s + 1, dim):
            x = upper[s, k]
            for t in range(k, dim):
                inverse[s, t] -= x * inverse[k, t]
        for t in range(s, dim):
            inverse[s, t] /= upper[s, s]
    return float(least)


def whiten_carefully(rows: Floats, biased: bool) -> White:
    """Whiten keys that may lie in a subspace: orthogonalize coordinates, the longest rest first."""
    count, dim = rows.shape
    most, plain, order = min(dim, count), dim - biased, np.arange(dim)
    rest, basis, upper = rows.T.copy(), np.zeros((most, count)), np.zeros((most, dim))
    rank, lifted, thinnest = 0, False, np.inf
    while rank < most and not lifted:
        left = rest[order[rank:plain]]
        squares = np.einsum("dk,dk->d", left, left)
        if len(squares) and squares.max() > RANK_TOLERANCE**2 * count:
            pivot = rank + int(squares.argmax())
        elif biased and np.sqrt((rest[dim - 1] ** 2).mean()) > AFFINE_BIAS:
            pivot, lifted = dim - 1, True
        else:
            break
        order[[rank, pivot]] = order[[pivot, rank]]
        thinnest = min(thinnest, orthogonalize(rest, basis, upper, order, rank))
        rank += 1
    factor, inverse = upper[:rank][:, order[:rank]], np.zeros((rank, rank))
    for s in range(rank - 1, -1, -1):
        inverse[s] = -factor[s, s + 1 :] @ inverse[s + 1 :]
        inverse[s, s] = 1.0
        inverse[s] /= factor[s, s]
    to_query = np.zeros((dim, rank))
    to_query[order[:rank]] = inverse
    return White(np.ascontiguousarray(basis[:rank].T)[None], to_query[None], np.array([thinnest]), lifted)


def orthogonalize(rest: Floats, basis: Floats, upper: Floats, order: NDArray[np.int64], rank: int) -> float:
    """Make the next column the next row of the basis, of RMS one, and take it out of the columns after it; return the
    RMS that it had."""
    count, column = rest.shape[1], rest[order[rank]]
    along = basis[:rank] @ column / count  # once more: what rounding left along the earlier ones
    column -= along @ basis[:rank]
    upper[:rank, order[rank]] += along
    root = float(np.sqrt((column * column).mean()))
    upper[rank, order[rank]] = root
    basis[rank] = column / root
    others = order[rank + 1 :]
    products = rest[others] @ basis[rank] / count
    upper[rank, others] = products
    rest[others] -= products[:, None] * basis[rank]
    return root
