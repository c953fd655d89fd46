"""Which keys of a set can a query select, by how much, and how much attention can they get?

docs/geometry.md defines verdicts, margins and attention, and says how each is proved. A key is *selectable*
iff it is a vertex of the convex hull of the keys (Demeter, Kimmel & Downey 2020; Brody, Alon & Yahav 2023, theorem 1).
A verdict cannot be both selectable and unselectable, since gap <= distance to the hull <= residual of the weights.
Nothing is given out that the checker (`checker`) did not prove of the given float64 numbers.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, Shaped

from ln_probe.analyses.geometry.checker import Checker
from ln_probe.analyses.geometry.compiled import in_threads
from ln_probe.analyses.geometry.coordinates import TAU, coordinates
from ln_probe.analyses.geometry.decide import NAMES, UNDECIDED, decide
from ln_probe.analyses.geometry.inputs import Array, GivenSet, QuerySet, key_sets, query_sets
from ln_probe.analyses.geometry.margins import EXACT_GAP, RELATIVE_GAP
from ln_probe.analyses.geometry.newton import WEIGHT_GAP, Attainable, attainable
from ln_probe.analyses.geometry.prove import prove_attention, prove_margins, prove_verdicts, reached
from ln_probe.analyses.geometry.witnesses import SetGeometry
from ln_probe.analyses.geometry.wolfe import BUDGET as PER_SECOND

# Seconds that a key may take before it is given up, on a processor of PER_SECOND multiply-adds per second. They are
# counted in these and not by a clock, so that no result depends on how busy the machine is.
SECONDS = 1.0


@dataclass(frozen=True, repr=False, eq=False)
class KeyGeometry:
    """Verdicts, margins and certificates of a set of keys, or of a batch of sets (arrays lead with "batch").

    Attributes:
        verdict: "selectable", "unselectable", "duplicate" (selectable, but for keys that do not differ from it) or
            "undecided".
        margin_lower, margin_upper: proven bounds of the margin, in `margin_unit`. With a set of queries: the best score
            gap to *all* other keys that a query of the set gives, center and bias included; negative if none puts the
            key on top. Without one: the distance to the hull of all other keys, which is the best gap of a query of
            unit length (a bias is one more coordinate, in units of its RMS, in which the hull reaches down without
            end). Near-copies compete with their true position; a key with an exact copy has no positive margin. NaN for
            a single key and where margins were not asked for. The bracket is 1 % of the margin wide, and wider only
            where a margin is lost in rounding or the budget ends.
        attainable, attainable_upper: the largest softmax weight that a query of the set was found to give each key, and
            what no query of the set exceeds: at most 0.01 of attention more (absolute: a small weight is known less
            well relative to itself), except for a few keys where scores differ by many hundreds of nats. NaN without a
            query set.
        attainable_at: u of the query `center + axes @ u`, |u| ≤ 1, that gives that weight (with more axes than
            dimensions: over as many axes as dimensions that reach the same queries); None without a query set.
        reachable: whether a query of the set gives the key strictly the highest score: `margin_lower` is above tau
            times the RMS norm, in nats, of the keys as the set sees them. A single key is reachable, a key with an
            exact copy never. None without a set of queries, and where margins were not asked for.
        representative: index of the first key that does not differ from each key.
        margin_unit: "nats" with a query set, else "rms" (the RMS norm of the centred keys).
        tau: the tolerance of all verdicts, relative to the RMS norm of the centred keys (less the directions that the
            query set lacks).
        repaired: how many keys had a proposed verdict or bound that the checker refused, or found too wide, and another
            solver could prove.
        undecided: how many keys have no verdict.
    """

    verdict: Shaped[np.ndarray, "*batch key"]
    margin_lower: Float64[np.ndarray, "*batch key"]
    margin_upper: Float64[np.ndarray, "*batch key"]
    attainable: Float64[np.ndarray, "*batch key"]
    attainable_upper: Float64[np.ndarray, "*batch key"]
    attainable_at: Float64[np.ndarray, "*batch key r"] | None
    reachable: Bool[np.ndarray, "*batch key"] | None
    representative: Int64[np.ndarray, "*batch key"]
    margin_unit: Literal["nats", "rms"]
    tau: float
    repaired: int
    undecided: int
    _found: list[SetGeometry] = field(repr=False)

    def __repr__(self) -> str:
        names, counts = np.unique(self.verdict, return_counts=True)
        what = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True))
        shape = " × ".join(str(size) for size in self.verdict.shape)
        return f"KeyGeometry({shape} keys of dimension {self._found[0].given.keys.shape[1]}: {what}; tau {self.tau:g})"

    def witness(self, *index: Any) -> Float64[np.ndarray, " d"]:
        """A query that selects key `i` (of a batch: `witness(b, i)`): it scores every other key lower.

        That is proved of the numbers returned. Of a duplicate: every key that is not its copy. Unit length without a
        bias; with one, to be used with the bias as it was given. The zero query if there is nothing to compete with.

        Args:
            index: of the key.

        Raises:
            ValueError: the key is unselectable or undecided; no float64 query is known to select it (where a key wins
                by less than rounding).
            IndexError: no such key.
        """
        found, i, name = self._key(index)
        if name not in ("selectable", "duplicate"):
            raise ValueError(
                f"key {i} is {name}: it has no witness query"
                + (f", weights({i}) gives the convex weights that reproduce it" if name == "unselectable" else "")
            )
        query = found.witness(i)
        if query is None:
            raise ValueError(f"key {i} is {name}, but no query in float64 is known to select it")
        return query

    def weights(self, *index: Any) -> Float64[np.ndarray, " key"]:
        """Convex weights of the other keys that reproduce key `i` (of a batch: `weights(b, i)`), zero at `i`.

        Of a duplicate: all weight on one of its copies.

        Args:
            index: of the key.

        Raises:
            ValueError: the key is selectable or undecided.
            IndexError: no such key.
        """
        found, i, name = self._key(index)
        if name not in ("duplicate", "unselectable"):
            raise ValueError(
                f"key {i} is {name}: no convex weights of the other keys reproduce it"
                + (f", witness({i}) gives the query that selects it" if name == "selectable" else " as far as is known")
            )
        where, value = found.weights(i)
        weights = np.zeros(self.verdict.shape[-1])
        weights[where] = value
        return weights

    def certify(self) -> None:
        """Check every certificate again, with code that shares nothing with the solvers: verdicts, witnesses and
        weights as they are given out, and bounds.

        Raises:
            CertificateError: a certificate does not prove its verdict or bound; rounding is allowed for.
        """
        for b, found in enumerate(self._found):
            name = f" of set {b}" if self.verdict.ndim > 1 else ""
            found.certify(self.tau, name)

    def _key(self, index: tuple[Any, ...]) -> tuple[SetGeometry, int, str]:
        """The set that a key belongs to, the key's place there, and its verdict."""
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
        found, i = self._found[place[0] if len(place) == 2 else 0], place[-1]
        return found, i, str(NAMES[found.proved.verdicts.code[i]])


def key_geometry(
    keys: Float[Array, "*batch key d"],
    bias: Float[Array, "*batch key"] | None = None,
    query_set: float | tuple[Float[Array, "*batch d"], Float[Array, "*batch d r"]] | None = None,
    margins: bool | Literal["exact"] = True,
    *,
    budget: float = SECONDS,
    threads: int | None = None,
) -> KeyGeometry:
    """Decide for every key whether some query can select it, by what margin, and how much attention it can receive.

    Args:
        keys: the keys of a head, or a batch of such sets, decided in parallel.
        bias: added to the score of each key; a key is then unselectable iff convex weights of the others
            reproduce it with at least its bias.
        query_set: a radius (queries no longer than that), or the ellipsoid `center + axes @ u`, `|u| <= 1`
            (axes may be fewer than d, or dependent: a lower-dimensional set). Margins are then over this set, in nats,
            and `reachable` and `attainable` are computed. Verdicts still ask for a query of any length, without the
            directions that the axes do not span.
        margins: whether to bracket margins (to 1 %), or "exact" (to about six digits).
        budget: seconds that a key may take before it stays undecided or its bracket wide, on a nominal processor of 1e9
            multiplications and additions per second; counted in these, so no result depends on the clock.
        threads: how many sets to work on at a time, by default as many as there are processors; changes no
            result.

    Returns:
        A `KeyGeometry`; for a batch all its arrays lead with the batch axis.

    Raises:
        TypeError: keys, bias or query set are not of a floating-point type, or sparse, or without values.
        ValueError: no keys, no dimensions, NaN or infinite values, numbers outside 1e±60, shapes that do not fit, a
            radius that is not positive, a budget that is not positive and finite.

    Example:
        >>> keys = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0]])
        >>> geometry = ln_probe.key_geometry(keys)
        >>> geometry.verdict.tolist()
        >>> geometry.certify()
    """
    if margins not in (True, False, "exact"):
        raise ValueError(f'margins must be True, False or "exact", got {margins!r}')
    if not isinstance(budget, (int, float, np.integer, np.floating)) or isinstance(budget, bool):
        raise TypeError(f"budget must be a positive number of seconds per key, got {budget!r}")
    if not 0.0 < budget < math.inf:
        raise ValueError(f"budget must be a positive, finite number of seconds per key, got {budget!r}")
    values, lift, batched = key_sets(keys, bias)
    ellipsoids = None if query_set is None else query_sets(query_set, len(values), values.shape[2])
    gap = EXACT_GAP if margins == "exact" else RELATIVE_GAP if margins else None

    def one(b: int) -> SetGeometry:
        queries = None if ellipsoids is None else ellipsoids[b]
        inner = threads if len(values) == 1 else 1
        return set_geometry(values[b], None if lift is None else lift[b], queries, gap, inner, budget * PER_SECOND)

    found = in_threads(one, range(len(values)), threads)
    nothing = np.full(values.shape[1], np.nan)

    def shaped(arrays: list[Any]) -> Any:
        return np.stack(arrays) if batched else arrays[0]

    codes = [f.proved.verdicts.code for f in found]
    bounds = [f.bounds for f in found]
    shares = [(nothing, nothing) if f.attainable is None else (f.attainable.weight, f.attainable.upper) for f in found]
    return KeyGeometry(
        verdict=shaped([NAMES[code] for code in codes]),
        margin_lower=shaped([lower for lower, _ in bounds]),
        margin_upper=shaped([upper for _, upper in bounds]),
        attainable=shaped([weight for weight, _ in shares]),
        attainable_upper=shaped([upper for _, upper in shares]),
        attainable_at=shaped([f.attainable.point for f in found if f.attainable is not None]) if ellipsoids else None,
        reachable=shaped([f.reachable for f in found]) if ellipsoids is not None and gap is not None else None,
        representative=shaped([f.representative for f in found]),
        margin_unit="rms" if ellipsoids is None else "nats",
        tau=TAU,
        repaired=sum(
            int((f.proved.repaired | (False if f.margins is None else f.margins.repaired)).sum()) for f in found
        ),
        undecided=sum(int((code == UNDECIDED).sum()) for code in codes),
        _found=found,
    )


def set_geometry(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None = None,
    queries: QuerySet | None = None,
    gap: float | None = RELATIVE_GAP,
    threads: int | None = 1,
    budget: float = SECONDS * PER_SECOND,
    only: Int64[np.ndarray, " some"] | None = None,
) -> SetGeometry:
    """The geometry of one set of valid float64 keys.

    It runs in the calling thread, but for the verdicts of more than some hundred keys in `threads`.

    Args:
        gap: width of a margin's bracket, as a share of the margin; None leaves margins out.
        only: margins and attention of these keys, a row for each; the verdicts of the others stay undecided.
    """
    given = GivenSet(keys, bias, queries)
    where, sets = given.measured, coordinates(given.own.points, given.own.lift)
    checker = Checker(given.keys, given.bias, queries, TAU)
    prove = checker.leads if only is None else None
    verdicts = decide(sets, threads, only, budget, prove)
    proved = prove_verdicts(checker, sets, verdicts, seek=only is None, budget=budget)
    through = queries is not None
    bracket = None
    if gap is not None:
        bracket = prove_margins(checker, sets, where, proved.verdicts, through, gap, only, budget)
    reach, reachable = None, None
    if through:
        reachable = None if bracket is None else reached(checker, bracket.lower)
        # The query of the best margin is a good one to start from.
        starts = None if bracket is None else bracket.point
        reach = prove_attention(checker, attainable(where, starts, WEIGHT_GAP, only, budget), only)
    return SetGeometry(given, sets, proved, bracket, reach, sets.first, reachable)


def set_attention(
    keys: Float64[np.ndarray, "key d"],
    bias: Float64[np.ndarray, " key"] | None,
    queries: QuerySet,
    only: Int64[np.ndarray, " some"] | None = None,
    starts: Float64[np.ndarray, "some r"] | None = None,
    gap: float = WEIGHT_GAP,
) -> Attainable:
    """The largest softmax weights of valid float64 keys, without the rest of `set_geometry`; scores are in nats.

    Args:
        only: of these keys (among all), a row for each; None: of all.
        starts: directions of u in which good queries are expected, as a larger set's `Attainable.point` has them;
            halves the time.
        gap: how far apart weight and upper bound may be (absolute).
    """
    given = GivenSet(keys, bias, queries)
    checker = Checker(given.keys, given.bias, queries, TAU)
    return prove_attention(checker, attainable(given.measured, starts, gap, only), only)
