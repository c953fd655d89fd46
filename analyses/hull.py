"""Which keys of a set can a query select, by how much, and how much attention can they get?

A key is *selectable* if some query gives it strictly the highest score, which is to say that it is a vertex
of the convex hull of the keys; *unselectable* if it lies in the convex hull of the others (Demeter, Kimmel &
Downey 2020; Brody, Alon & Yahav 2023, theorem 1). Everything is decided in float64 with one tolerance, TAU,
relative to the RMS norm of the centred keys: a key is selectable if a query has a relative score gap above
TAU, unselectable if convex weights of the other keys reproduce it within TAU, and undecided if neither was
found. Both cannot hold, since gap <= distance to the hull <= residual of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float64, Int64, Shaped

from ln_probe.analyses.geometry.attainable import WEIGHT_GAP, Attainable, attainable, scores_over
from ln_probe.analyses.geometry.certificates import Checker
from ln_probe.analyses.geometry.first_unselectable import FirstUnselectable, first_unselectable
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates, coordinates
from ln_probe.analyses.geometry.key_sets import Array, key_sets
from ln_probe.analyses.geometry.margins import EXACT_GAP, RELATIVE_GAP, Margins, margins
from ln_probe.analyses.geometry.parallel import in_threads
from ln_probe.analyses.geometry.query_sets import QuerySet, query_sets
from ln_probe.analyses.geometry.verdicts import DUPLICATE, NAMES, SELECTABLE, UNSELECTABLE, Verdicts, decide


@dataclass(frozen=True)
class SetGeometry:
    """All that was found out about one set of keys; `KeyGeometry` is its readable face."""

    sets: KeyCoordinates
    verdicts: Verdicts
    margins: Margins | None
    first: FirstUnselectable | None
    attainable: Attainable | None


@dataclass(frozen=True, repr=False, eq=False)
class KeyGeometry:
    """Verdicts, margins and certificates of a set of keys, or of a batch of sets (arrays lead with "batch").

    Attributes:
        verdict: "selectable", "unselectable", "duplicate" (a vertex that occurs more than once) or
            "undecided".
        margin_lower, margin_upper: certified bounds of the distance to the hull of the other keys, in
            `margin_unit`: the best score gap over queries of unit length (of the ellipsoid, if there is one).
            0 for unselectable and duplicate keys; NaN for a single key and where margins were not asked for.
            A bias is one more coordinate (in nats, or in units of its own RMS) in which the hull reaches down
            without end. The bracket is 1 % wide, and wider only where a margin is lost in rounding.
        attainable: the largest softmax weight that a query of the set was found to give each key;
            `attainable_upper` is what no query of the set exceeds: at most 0.01 more, except for a few keys
            where scores differ by many hundreds of nats. NaN without a query set.
        attainable_at: u of the query `center + axes @ u`, |u| ≤ 1, that gives that weight; None without a query set.
        first_unselectable_at: the smallest t at which a key is inside the hull of the others among keys 0..t
            (equal keys count as one, so a duplicate is not inside), -1 if never; None unless asked for with
            `causal`.
        representative: index of the first key equal to each key within `tau`.
        margin_unit: "nats" with a query set, else "rms" (the RMS norm of the centred keys).
        tau: the tolerance of all verdicts, relative to the RMS norm of the centred keys.
    """

    verdict: Shaped[np.ndarray, "*batch key"]
    margin_lower: Float64[np.ndarray, "*batch key"]
    margin_upper: Float64[np.ndarray, "*batch key"]
    attainable: Float64[np.ndarray, "*batch key"]
    attainable_upper: Float64[np.ndarray, "*batch key"]
    attainable_at: Float64[np.ndarray, "*batch key r"] | None
    first_unselectable_at: Int64[np.ndarray, "*batch key"] | None
    representative: Int64[np.ndarray, "*batch key"]
    margin_unit: Literal["nats", "rms"]
    tau: float
    _keys: Float64[np.ndarray, "set key d"] = field(repr=False)
    _bias: Float64[np.ndarray, "set key"] | None = field(repr=False)
    _queries: list[QuerySet] | None = field(repr=False)
    _found: list[SetGeometry] = field(repr=False)

    def __repr__(self) -> str:
        names, counts = np.unique(self.verdict, return_counts=True)
        what = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True))
        shape = " × ".join(str(size) for size in self.verdict.shape)
        return f"KeyGeometry({shape} keys of dimension {self._keys.shape[2]}: {what}; tau {self.tau:g})"

    def witness(self, *index: Any) -> Float64[np.ndarray, " d"]:
        """A query that selects key `i` (of a batch: `witness(b, i)`): it scores every other key lower.

        Of a duplicate: every key that is not its copy. Unit length without a bias; with one, to be used with
        the bias as it was given. The zero query if there is nothing to compete with.

        Raises:
            ValueError: the key is unselectable or undecided.
            IndexError: no such key.
        """
        b, i = self._place(index)
        name = self._name(b, i)
        if name not in ("selectable", "duplicate"):
            raise ValueError(
                f"key {i} is {name}: it has no witness query"
                + (f", weights({i}) gives the convex weights that reproduce it" if name == "unselectable" else "")
            )
        return self._original(b, self._found[b].verdicts.query[i])

    def weights(self, *index: Any) -> Float64[np.ndarray, " key"]:
        """Convex weights of the other keys that reproduce key `i` (of a batch: `weights(b, i)`), zero at `i`.

        Of a duplicate: all weight on one of its copies. With `causal`, only keys up to
        `first_unselectable_at` are used.

        Raises:
            ValueError: the key is selectable or undecided.
            IndexError: no such key.
        """
        b, i = self._place(index)
        name = self._name(b, i)
        found = np.zeros(self._keys.shape[1])
        if name == "duplicate":
            copies = self._copies(b, i)
            found[copies[0] if copies[0] != i else copies[1]] = 1.0
        elif name == "unselectable":
            where, value = self._weights(b, i)
            found[where] = value
        else:
            raise ValueError(
                f"key {i} is {name}: no convex weights of the other keys reproduce it"
                + (f", witness({i}) gives the query that selects it" if name == "selectable" else " as far as is known")
            )
        return found

    def certify(self) -> None:
        """Check every certificate again, with code that shares nothing with the solvers.

        Raises:
            CertificateError: a certificate does not prove its verdict, position or margin.
        """
        for b, found in enumerate(self._found):
            bias = None if self._bias is None else self._bias[b]
            name = f" of set {b}" if self.verdict.ndim > 1 else ""
            checker = Checker(self._keys[b], bias, found.sets.representative, self.tau, name)
            queries = None if self._queries is None else self._queries[b]
            if queries is not None:
                checker.ask(queries.center, queries.axes)
            for i in range(self._keys.shape[1]):
                self._certify(checker, found, b, i)

    def _certify(self, checker: Checker, found: SetGeometry, b: int, i: int) -> None:
        code, reach = int(found.verdicts.code[i]), found.attainable
        if reach is not None:
            checker.gets(i, float(reach.weight[i]), reach.point[i])
            checker.gets_at_most(i, float(reach.upper[i]), reach.proof[i])
        if found.sets.representative[i] != i:
            checker.equals(i, int(found.sets.representative[i]))
            return  # the rest is proved for the representative
        if code in (SELECTABLE, DUPLICATE):
            checker.selects(i, self._original(b, found.verdicts.query[i]))
        elif code == UNSELECTABLE:
            checker.reproduces(i, *self._weights(b, i))
            if found.first is not None:
                at = int(found.first.at[i])
                checker.reproduces(i, *self._weights(b, i), until=at)
                if at > i and np.isfinite(found.first.query[i]).all():
                    checker.selects(i, self._original(b, found.first.query[i]), until=at - 1)
        if found.margins is not None and code == SELECTABLE and len(found.sets.leaders) > 1:
            checker.is_away(i, float(found.margins.lower[i]), found.margins.query[i])
            checker.is_within(i, float(found.margins.upper[i]), *found.margins.weights.row(i))

    def _place(self, index: tuple[Any, ...]) -> tuple[int, int]:
        if len(index) == 1 and isinstance(index[0], tuple):
            index = index[0]
        if len(index) != self.verdict.ndim:
            wanted = "(i)" if self.verdict.ndim == 1 else "(b, i)"
            raise IndexError(f"a key of this geometry has the index {wanted}, got {index}")
        place = [int(k) for k in index]
        for k, (value, size) in enumerate(zip(place, self.verdict.shape, strict=True)):
            if not -size <= value < size:
                raise IndexError(f"index {tuple(index)} is out of range: there are {size} along axis {k}")
            place[k] = value % size
        return (0, place[0]) if len(place) == 1 else (place[0], place[1])

    def _name(self, b: int, i: int) -> str:
        return str(NAMES[self._found[b].verdicts.code[i]])

    def _copies(self, b: int, i: int) -> Int64[np.ndarray, " copy"]:
        group = self._found[b].sets.representative
        return np.flatnonzero(group == group[i])

    def _weights(self, b: int, i: int) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        found = self._found[b]
        leader = int(found.sets.representative[i])
        return (found.verdicts if found.first is None else found.first).weights.row(leader)

    def _original(self, b: int, query: Float64[np.ndarray, " dim"]) -> Float64[np.ndarray, " d"]:
        """A query over normalized keys as one over the keys as they were given."""
        sets = self._found[b].sets
        if not sets.biased:
            return query.copy()
        plain, lift = query[:-1], float(query[-1])
        if not lift > 0.0 or sets.scale == 0.0:
            return plain.copy()
        return plain / lift * (sets.bias_scale / sets.scale if sets.bias_scale > 0.0 else 1.0 / sets.scale)


def key_geometry(
    keys: Float[Array, "*batch key d"],
    bias: Float[Array, "*batch key"] | None = None,
    query_set: float | tuple[Float[Array, "*batch d"], Float[Array, "*batch d r"]] | None = None,
    causal: bool = False,
    margins: bool | Literal["exact"] = True,
    *,
    threads: int | None = None,
) -> KeyGeometry:
    """Decide for every key whether some query can select it, by how much, and how much attention it can get.

    Args:
        keys: the keys of a head (or the rows of an unembedding), or a batch of such sets, decided in
            parallel.
        bias: added to the score of each key; a key is then unselectable iff convex weights of the others
            reproduce it with at least its bias.
        query_set: a radius (queries no longer than that), or the ellipsoid `center + axes @ u`, `|u| <= 1`
            (axes may be fewer than d, or dependent: a lower-dimensional set). Margins are then in nats, and
            `attainable` is computed.
        causal: also find the position from which on each key is unselectable, if position t sees keys 0..t.
        margins: whether to bracket margins (to 1 %), or "exact" (to about six digits).
        threads: how many sets to work on at a time, by default as many as there are processors; changes no
            result.

    Returns:
        A `KeyGeometry`; for a batch all its arrays lead with the batch axis.

    Raises:
        TypeError: keys, bias or query set are not of a floating-point type.
        ValueError: no keys, no dimensions, NaN or infinite values, shapes that do not fit, a radius that is
        not positive.
    """
    if margins not in (True, False, "exact"):
        raise ValueError(f'margins must be True, False or "exact", got {margins!r}')
    values, lift, batched = key_sets(keys, bias)
    ellipsoids = None if query_set is None else query_sets(query_set, len(values), values.shape[2])
    gap = EXACT_GAP if margins == "exact" else RELATIVE_GAP if margins else None

    def one(b: int) -> SetGeometry:
        queries = None if ellipsoids is None else ellipsoids[b]
        inner = threads if len(values) == 1 else 1
        return set_geometry(values[b], None if lift is None else lift[b], queries, causal, gap, inner)

    found = in_threads(one, range(len(values)), threads)
    nothing = np.full(values.shape[:2], np.nan)

    def shaped(arrays: list[Any]) -> Any:
        return np.stack(arrays) if batched else arrays[0]

    return KeyGeometry(
        verdict=shaped([NAMES[f.verdicts.code] for f in found]),
        margin_lower=shaped([nothing[b] if f.margins is None else f.margins.lower for b, f in enumerate(found)]),
        margin_upper=shaped([nothing[b] if f.margins is None else f.margins.upper for b, f in enumerate(found)]),
        attainable=shaped([nothing[b] if f.attainable is None else f.attainable.weight for b, f in enumerate(found)]),
        attainable_upper=shaped(
            [nothing[b] if f.attainable is None else f.attainable.upper for b, f in enumerate(found)]
        ),
        attainable_at=shaped([f.attainable.point for f in found if f.attainable is not None]) if ellipsoids else None,
        first_unselectable_at=shaped([f.first.at for f in found if f.first is not None]) if causal else None,
        representative=shaped([f.sets.representative for f in found]),
        margin_unit="rms" if ellipsoids is None else "nats",
        tau=TAU,
        _keys=values,
        _bias=lift,
        _queries=ellipsoids,
        _found=found,
    )


def set_geometry(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None = None,
    queries: QuerySet | None = None,
    causal: bool = False,
    gap: float | None = RELATIVE_GAP,
    threads: int | None = 1,
) -> SetGeometry:
    """The geometry of one set of valid float64 keys; `gap` None leaves margins out.

    It runs in the calling thread, but for the verdicts of more than some hundred keys in `threads`.
    """
    if queries is not None:
        scores_over(keys, queries, bias)  # raises if they overflow
    sets = coordinates(keys, bias)
    verdicts = decide(sets, threads)
    axes = None if queries is None else queries.axes
    measures = None if gap is None else margins(sets, verdicts, axes, gap)
    reach = None
    if queries is not None:  # the query of the best margin is a good one to start from
        starts = None if measures is None else measures.query[:, : queries.axes.shape[1]]
        reach = attainable(keys, queries, bias, starts, WEIGHT_GAP)
    return SetGeometry(
        sets=sets,
        verdicts=verdicts,
        margins=measures,
        first=first_unselectable(sets, verdicts) if causal else None,
        attainable=reach,
    )
