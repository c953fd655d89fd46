"""Which keys of a set can a query select, by how much, and how much attention can they get?

A key is *selectable* if some query gives it strictly the highest score, which is to say that it is a vertex
of the convex hull of the keys; *unselectable* if it lies in the convex hull of the others (Demeter, Kimmel &
Downey 2020; Brody, Alon & Yahav 2023, theorem 1). Verdicts are given in float64 with one tolerance, TAU, relative to
the RMS norm R of the centred keys:

* keys within TAU·R of each other count as one: neither competes with the other;
* a key is selectable if a query has a relative score gap above TAU to all keys that differ from it so (and a
  *duplicate* if there are others that do not differ);
* unselectable if convex weights of keys that differ reproduce it within TAU·R;
* undecided if neither was found.

Both cannot hold, since gap <= distance to the hull <= residual of the weights. "Differs" is a relation between two
keys, not between groups, so no verdict depends on the order of the keys: in a row of keys 0.7 TAU·R apart each has two
that do not differ from it, and competes with all the rest. `strict=True` decides in exact rational arithmetic instead,
where only equal keys are copies.

With a set of queries `c + A u`, |u| ≤ 1, all of this is said of `Aᵀk`, what the queries see of a key: the same in every
basis of a head. Nothing is given out that the checker (`certificates`) did not prove of the given float64 numbers.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Float64, Int64, Shaped

from ln_probe.analyses.geometry.attainable import WEIGHT_GAP, Attainable, attainable
from ln_probe.analyses.geometry.certificates import SLACK, CertificateError, Checker
from ln_probe.analyses.geometry.certify import certify
from ln_probe.analyses.geometry.conditioning import Conditioning, conditioning
from ln_probe.analyses.geometry.exact import proves
from ln_probe.analyses.geometry.first_unselectable import FirstUnselectable, first_unselectable
from ln_probe.analyses.geometry.judged import Judged, judged
from ln_probe.analyses.geometry.key_coordinates import TAU, KeyCoordinates, coordinates, first_within
from ln_probe.analyses.geometry.key_sets import Array, key_sets
from ln_probe.analyses.geometry.margins import EXACT_GAP, RELATIVE_GAP
from ln_probe.analyses.geometry.min_norm import BUDGET as PER_SECOND
from ln_probe.analyses.geometry.proofs import (
    Margins,
    Proved,
    prove_attention,
    prove_margins,
    prove_positions,
    prove_verdicts,
)
from ln_probe.analyses.geometry.query_sets import QuerySet, query_sets
from ln_probe.analyses.geometry.strict import decide_strictly
from ln_probe.analyses.geometry.verdicts import NAMES, UNDECIDED, decide
from ln_probe.analyses.machinery.parallel import in_threads

# Seconds that a key may take before it is given up, on a processor of PER_SECOND multiply-adds per second. They are
# counted in these and not by a clock, so that no result depends on how busy the machine is.
SECONDS = 1.0
# What exact arithmetic may take for one key, by the clock: it can't be counted in float64 operations, and where
# hundreds of keys of 64 dimensions lie within an ulp of a common plane it needs half a minute.
STRICT_SECONDS = 120.0


@dataclass(frozen=True)
class SetGeometry:
    """All that was found out about one set of keys; `KeyGeometry` is its readable face."""

    where: Judged
    sets: KeyCoordinates
    proved: Proved
    margins: Margins | None
    first: FirstUnselectable | None
    open_positions: int
    attainable: Attainable | None
    representative: Int64[np.ndarray, " key"]

    @property
    def conditioning(self) -> Conditioning:
        return conditioning(self.sets, self.where, self.proved.verdicts, self.proved.clear)


@dataclass(frozen=True, repr=False, eq=False)
class KeyGeometry:
    """Verdicts, margins and certificates of a set of keys, or of a batch of sets (arrays lead with "batch").

    Attributes:
        verdict: "selectable", "unselectable", "duplicate" (selectable, but for keys that do not differ from it) or
            "undecided".
        margin_lower, margin_upper: proven bounds of the margin, in `margin_unit`. With a set of queries: the best score
            gap to *all* other keys that a query of the set gives, center and bias included; negative if none puts the
            key on top. Without one: the distance to the hull of all other keys, which is the best gap of a query of
            unit length (a bias is one more coordinate, in units of its own RMS, in which the hull reaches down without
            end). Near-copies compete with their true position; a key with an exact copy has no positive margin. NaN for
            a single key and where margins were not asked for. The bracket is 1 % of the margin wide, and wider only
            where a margin is lost in rounding or the budget ends.
        attainable, attainable_upper: the largest softmax weight that a query of the set was found to give each key, and
            what no query of the set exceeds: at most 0.01 of attention more (absolute: a small weight is known less
            well relative to itself), except for a few keys where scores differ by many hundreds of nats. NaN without a
            query set.
        attainable_at: u of the query `center + axes @ u`, |u| ≤ 1, that gives that weight; None without a query set.
        first_unselectable_at: the smallest t at which a key is inside the hull of the others among keys 0..t, -1 if
            never; None unless asked for with `causal`.
        representative: index of the first key that does not differ from each key.
        margin_unit: "nats" with a query set, else "rms" (the RMS norm of the centred keys).
        tau: the tolerance of all verdicts, relative to the RMS norm of the centred keys (as the query set sees them).
        repaired: how many keys had a proposed verdict or bound that the checker refused, or found too wide, and another
            solver could prove.
        undecided: how many keys have no verdict.
        open_positions: how many of `first_unselectable_at` are proved from above only.
        strict: whether verdicts are those of exact arithmetic.
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
    repaired: int
    undecided: int
    open_positions: int
    strict: bool
    _keys: Float64[np.ndarray, "set key d"] = field(repr=False)
    _bias: Float64[np.ndarray, "set key"] | None = field(repr=False)
    _queries: list[QuerySet] | None = field(repr=False)
    _found: list[SetGeometry] = field(repr=False)

    @property
    def conditioning(self) -> Conditioning | list[Conditioning]:
        """What endangers the verdicts, as figures; a list of them for a batch."""
        found = [one.conditioning for one in self._found]
        return found if self.verdict.ndim > 1 else found[0]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What endangers the verdicts, in sentences; empty if nothing does."""
        number = self._keys.shape[1]
        return tuple(dict.fromkeys(text for one in self._found for text in one.conditioning.warnings(number)))

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
        return self._original(b, self._found[b].proved.verdicts.query[i])

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
            CertificateError: a certificate does not prove its verdict, position or bound, whatever the rounding.
        """
        for b, found in enumerate(self._found):
            bias = None if self._bias is None else self._bias[b]
            name = f" of set {b}" if self.verdict.ndim > 1 else ""
            queries = None if self._queries is None else self._queries[b]
            certify(
                Checker(self._keys[b], bias, queries, self.tau, name),
                found.proved,
                found.margins,
                found.first,
                found.attainable,
                found.representative,
            )
            for i, verdict in found.proved.exact.items():
                axes, center = (None, None) if queries is None else (queries.axes, queries.center)
                axes = axes if queries is None or queries.given is None else queries.given
                if not proves(verdict, self._keys[b], bias, i, axes=axes, center=center):
                    raise CertificateError(f"key {i}{name}: its exact proof does not prove that it is {verdict.code}")

    def _place(self, index: tuple[Any, ...]) -> tuple[int, int]:
        if len(index) == 1 and isinstance(index[0], tuple):
            index = index[0]
        if len(index) != self.verdict.ndim:
            wanted = "(i)" if self.verdict.ndim == 1 else "(b, i)"
            raise IndexError(f"a key of this geometry has the index {wanted}, got {index}")
        try:
            place = [operator.index(k) for k in index]
        except TypeError:
            raise TypeError(f"the index of a key must be made of whole numbers, got {index}") from None
        for k, (value, size) in enumerate(zip(place, self.verdict.shape, strict=True)):
            if not -size <= value < size:
                raise IndexError(f"index {tuple(index)} is out of range: there are {size} along axis {k}")
            place[k] = value % size
        return (0, place[0]) if len(place) == 1 else (place[0], place[1])

    def _name(self, b: int, i: int) -> str:
        return str(NAMES[self._found[b].proved.verdicts.code[i]])

    def _weights(self, b: int, i: int) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        found = self._found[b]
        if found.first is not None:
            return found.first.weights.row(int(found.first.source[i]))
        return found.proved.verdicts.row(i)

    def _copies(self, b: int, i: int) -> Int64[np.ndarray, " copy"]:
        """Keys that do not differ from key i, the nearest first; itself left out."""
        rows = self._found[b].sets.normalized
        apart = np.linalg.norm(rows - rows[i], axis=1)
        apart[i] = np.inf
        near = np.flatnonzero(apart <= self.tau * (1 + SLACK))
        return near[np.argsort(apart[near], kind="stable")]

    def _original(self, b: int, query: Float64[np.ndarray, " dim"]) -> Float64[np.ndarray, " d"]:
        """A query over normalized points as one over the keys as they were given."""
        sets, where = self._found[b].sets, self._found[b].where
        queries = None if self._queries is None else self._queries[b]
        if not sets.biased:
            plain = query if queries is None else queries.axes @ query
            length = float(np.linalg.norm(plain))
            return plain / length if length > 0.0 else plain.copy()
        plain, lift = query[:-1], float(query[-1])
        if lift > 0.0 and sets.scale > 0.0:
            plain = plain / lift * (sets.bias_scale / sets.scale if sets.bias_scale > 0.0 else 1.0 / sets.scale)
        return plain.copy() if queries is None else queries.axes @ plain + where.outside


def key_geometry(
    keys: Float[Array, "*batch key d"],
    bias: Float[Array, "*batch key"] | None = None,
    query_set: float | tuple[Float[Array, "*batch d"], Float[Array, "*batch d r"]] | None = None,
    causal: bool = False,
    margins: bool | Literal["exact"] = True,
    *,
    strict: bool = False,
    budget: float = SECONDS,
    threads: int | None = None,
) -> KeyGeometry:
    """Decide for every key whether some query can select it, by how much, and how much attention it can get.

    Args:
        keys: the keys of a head (or the rows of an unembedding), or a batch of such sets, decided in
            parallel.
        bias: added to the score of each key; a key is then unselectable iff convex weights of the others
            reproduce it with at least its bias.
        query_set: a radius (queries no longer than that), or the ellipsoid `center + axes @ u`, `|u| <= 1`
            (axes may be fewer than d, or dependent: a lower-dimensional set). Keys are then judged through it, margins
            are in nats, and `attainable` is computed.
        causal: also find the position from which on each key is unselectable, if position t sees keys 0..t.
        margins: whether to bracket margins (to 1 %), or "exact" (to about six digits).
        strict: decide what the tolerance would decide (unselectable keys, copies and undecided ones) in exact rational
            arithmetic on the given numbers; slow (see `geometry.exact`).
        budget: seconds that a key may take before it stays undecided or its bracket wide, on a nominal processor of 1e9
            multiplications and additions per second; counted in these, so no result depends on the clock.
        threads: how many sets to work on at a time, by default as many as there are processors; changes no
            result.

    Returns:
        A `KeyGeometry`; for a batch all its arrays lead with the batch axis.

    Raises:
        TypeError: keys, bias or query set are not of a floating-point type, or sparse, or without values.
        ValueError: no keys, no dimensions, NaN or infinite values, shapes that do not fit, a radius that is not
        positive
            or of unusable size, a budget that is not positive, scores that overflow.
    """
    if margins not in (True, False, "exact"):
        raise ValueError(f'margins must be True, False or "exact", got {margins!r}')
    if not isinstance(budget, (int, float, np.integer, np.floating)) or isinstance(budget, bool):
        raise TypeError(f"budget must be a positive number of seconds per key, got {budget!r}")
    if not budget > 0.0:
        raise ValueError(f"budget must be a positive number of seconds per key, got {budget!r}")
    values, lift, batched = key_sets(keys, bias)
    ellipsoids = None if query_set is None else query_sets(query_set, len(values), values.shape[2])
    gap = EXACT_GAP if margins == "exact" else RELATIVE_GAP if margins else None

    def one(b: int) -> SetGeometry:
        queries = None if ellipsoids is None else ellipsoids[b]
        inner = threads if len(values) == 1 else 1
        return set_geometry(
            values[b], None if lift is None else lift[b], queries, causal, gap, inner, budget * PER_SECOND, strict
        )

    found = in_threads(one, range(len(values)), threads)
    nothing = np.full(values.shape[1], np.nan)

    def shaped(arrays: list[Any]) -> Any:
        return np.stack(arrays) if batched else arrays[0]

    codes = [f.proved.verdicts.code for f in found]
    bounds = [(nothing, nothing) if f.margins is None else (f.margins.lower, f.margins.upper) for f in found]
    shares = [(nothing, nothing) if f.attainable is None else (f.attainable.weight, f.attainable.upper) for f in found]
    return KeyGeometry(
        verdict=shaped([NAMES[code] for code in codes]),
        margin_lower=shaped([lower for lower, _ in bounds]),
        margin_upper=shaped([upper for _, upper in bounds]),
        attainable=shaped([weight for weight, _ in shares]),
        attainable_upper=shaped([upper for _, upper in shares]),
        attainable_at=shaped([f.attainable.point for f in found if f.attainable is not None]) if ellipsoids else None,
        first_unselectable_at=shaped([f.first.at for f in found if f.first is not None]) if causal else None,
        representative=shaped([f.representative for f in found]),
        margin_unit="rms" if ellipsoids is None else "nats",
        tau=TAU,
        repaired=sum(
            int((f.proved.repaired | (False if f.margins is None else f.margins.repaired)).sum()) for f in found
        ),
        undecided=sum(int((code == UNDECIDED).sum()) for code in codes),
        open_positions=sum(f.open_positions for f in found),
        strict=strict,
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
    budget: float = SECONDS * PER_SECOND,
    strict: bool = False,
) -> SetGeometry:
    """The geometry of one set of valid float64 keys; `gap` None leaves margins out.

    It runs in the calling thread, but for the verdicts of more than some hundred keys in `threads`.
    """
    where = judged(keys, bias, queries)
    sets = coordinates(where.rows, where.lift)
    checker = Checker(keys, bias, queries, TAU)
    proved = prove_verdicts(checker, sets, decide(sets, threads, budget=budget, prove=checker.leads), budget=budget)
    if strict:
        proved = decide_strictly(keys, bias, queries, sets, proved, STRICT_SECONDS)
    through = queries is not None
    bracket = None if gap is None else prove_margins(checker, sets, where, proved.verdicts, through, gap, budget=budget)
    reach = None
    if through:  # the query of the best margin is a good one to start from
        starts = None if bracket is None else bracket.point
        reach = prove_attention(checker, attainable(where, starts, WEIGHT_GAP, budget=budget))
    first, open_positions = None, 0
    if causal:
        first, open_positions = prove_positions(checker, proved.verdicts, first_unselectable(sets, proved.verdicts))
    return SetGeometry(where, sets, proved, bracket, first, open_positions, reach, first_within(sets))


def attainable_attention(
    keys: Float[Array, "*batch key d"],
    query_set: float | tuple[Float[Array, "*batch d"], Float[Array, "*batch d r"]],
    bias: Float[Array, "*batch key"] | None = None,
    *,
    starts: Float64[np.ndarray, "*batch key r"] | None = None,
    gap: float = WEIGHT_GAP,
    threads: int | None = None,
) -> tuple[Float64[np.ndarray, "*batch key"], Float64[np.ndarray, "*batch key"]]:
    """The largest softmax weight every key can get from a query of a set, without the rest of `key_geometry`.

    Args:
        keys, query_set, bias: as for `key_geometry`; scores are plain products in nats.
        starts: directions of u in which good queries are expected, as `KeyGeometry.attainable_at` of a larger set
            gives them; halves the time.
        gap: how far apart weight and upper bound may be (absolute).
        threads: how many sets to work on at a time, by default as many as there are processors.

    Returns:
        the weight that some query of the set gives, and an upper bound for all of them, both proved.

    Raises:
        TypeError, ValueError: as for `key_geometry`; scores that overflow.
    """
    values, lift, batched = key_sets(keys, bias)
    queries = query_sets(query_set, len(values), values.shape[2])
    first = starts if starts is None or batched else starts[None]

    def one(b: int) -> Attainable:
        lifted = None if lift is None else lift[b]
        found = attainable(judged(values[b], lifted, queries[b]), None if first is None else first[b], gap)
        return prove_attention(Checker(values[b], lifted, queries[b], TAU), found)

    found = in_threads(one, range(len(values)), threads)
    weight, upper = np.stack([f.weight for f in found]), np.stack([f.upper for f in found])
    return (weight, upper) if batched else (weight[0], upper[0])
