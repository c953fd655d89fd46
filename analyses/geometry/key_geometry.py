"""Which keys of a set can a query select, by how much, and how much attention can they get?

docs/geometry.md defines verdicts, margins and attention, and says how each is proved.
A key is *selectable* iff it is a vertex of the convex hull of the keys (Demeter, Kimmel & Downey 2020;
Brody, Alon & Yahav 2023, theorem 1). No key can be both selectable and unselectable, since
gap <= distance to the hull <= residual of the weights.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, Shaped

from ln_probe.analyses.geometry.check import (
    AMPLE,
    DUPLICATE,
    EPS,
    NAMES,
    SELECTABLE,
    SLACK,
    TAU,
    UNDECIDED,
    UNDERFLOW,
    UNSELECTABLE,
    CertificateError,
    Proofs,
    find_copies,
    make_scratch,
    make_space,
    prove_again,
)
from ln_probe.analyses.geometry.decide import BUDGET, EXACT_GAP, RELATIVE_GAP, Request, Solved, solve_sets
from ln_probe.analyses.geometry.keys import Array, QuerySet, key_sets, query_sets


@dataclass(frozen=True)
class SetGeometry:
    """One set of keys as it was given, and what was proved of it, behind `KeyGeometry`."""

    keys: Float64[np.ndarray, "key d"]
    bias: Float64[np.ndarray, " key"] | None
    queries: QuerySet | None
    solved: Solved

    def witness(self, i: int) -> Float64[np.ndarray, " d"] | None:
        """Return a float64 query that is proved to select key i; None if none is known."""
        judged, query, wide = self.solved.judged, self.solved.answers.verdicts.query[i], self.keys.shape[1]
        plain = query[:wide]
        if self.queries is not None:
            plain = self.queries.in_span(plain[None])[0]
        if not judged.biased:
            length = float(np.linalg.norm(plain))
            plain = plain / length if length > 0.0 else plain
        else:
            lift, size = query[-1], (judged.lift_size or 1.0) / (judged.size or 1.0)
            plain = plain * (size / lift if lift > 0.0 else size)
            if self.queries is not None:
                plain = plain + self.queries.outside
        return plain if self._selects(i, plain) else None

    def weights(self, i: int) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
        """Return convex weights of other keys that reproduce key i (all on a copy of a duplicate)."""
        verdicts = self.solved.answers.verdicts
        if verdicts.code[i] == DUPLICATE:
            rows = self.solved.judged.rows
            apart = np.linalg.norm(rows - rows[i], axis=1)
            apart[i] = np.inf
            return np.array([apart.argmin()]), np.ones(1)
        used = verdicts.used[i]
        value = verdicts.value[i, :used]
        return verdicts.member[i, :used], value / math.fsum(value)

    def _selects(self, i: int, query: Float64[np.ndarray, " d"]) -> bool:
        """Whether float64 proves that a query scores key i above all that are not its copies."""
        rows = self.solved.judged.rows
        rivals = np.arange(len(self.keys)) != i
        if self.solved.answers.verdicts.code[i] == DUPLICATE:
            rivals &= np.linalg.norm(rows - rows[i], axis=1) > TAU * (1 + SLACK)
        if not rivals.any():
            return True
        keys = self.keys - self.keys.mean(axis=0)
        scores, size = keys @ query, np.linalg.norm(keys, axis=1)
        error = AMPLE * (keys.shape[1] + 8) * EPS * size * np.linalg.norm(query) + UNDERFLOW * float(size.max())
        if self.bias is not None:
            bias = self.bias - self.bias.mean()
            scores, error = scores + bias, error + AMPLE * 8 * EPS * np.abs(bias)
        return bool(scores[i] - error[i] > (scores + error)[rivals].max())

    def certify(self, name: str = "") -> None:
        """Prove every claim about the set again.

        Raises:
            CertificateError: one is not proved; says of which key.
        """
        judged, seen, (verdicts, margins, attention) = self.solved.judged, self.solved.seen, self.solved.answers
        number, nothing = len(self.keys), np.zeros(len(self.keys))
        space = make_space(judged.rows, nothing, judged.noise)
        seen_space = space if seen is None else make_space(*seen)
        doubt = AMPLE * EPS * sum(judged.rows.shape) if seen is None else 0.0
        first, copies, value = np.empty(number, np.int64), np.empty(number, np.int64), verdicts.value.copy()
        find_copies(judged.rows[None], first[None], copies[None])
        for place in map(int, np.flatnonzero(verdicts.code == UNSELECTABLE)):
            value[place, : verdicts.used[place]] = self.weights(place)[1]
        given = verdicts._replace(copies=copies, value=value)
        proofs = Proofs(*(np.empty(number) for _ in Proofs._fields))
        scratch = make_scratch(number, max(judged.rows.shape[1], seen_space.rows.shape[1]))
        prove_again(space, seen_space, judged.biased, given, margins, attention, scratch, proofs)
        least = proofs.least if seen_space.offset.any() else np.maximum(proofs.least, 0.0)
        within = (proofs.miss <= TAU * (1 + 2 * SLACK)) & (proofs.nearest > TAU * (1 - SLACK))
        weight, upper = proofs.weight, proofs.none_above
        for i, code in enumerate(verdicts.code):

            def require(proved: Any, text: str, *values: Any, key: int = i) -> None:
                if not proved:
                    raise CertificateError(f"key {key}{name}: {text.format(*values)}")

            require(verdicts.first[i] == first[i], "the first key that does not differ from it is {}", first[i])
            if code in (SELECTABLE, DUPLICATE):
                require((copies[i] > 0) == (code == DUPLICATE), "it is {} with {} copies", NAMES[code], copies[i])
                lead = proofs.lead[i]
                leads = lead > TAU * (1 - SLACK) or copies[i] == number - 1
                require(leads, "its query leads by {:.3g} (tau {:g})", lead, TAU)
            if code == UNSELECTABLE:
                require(within[i], "its weights miss it by {:.3g} (tau {:g})", proofs.miss[i], TAU)
            if number > 1 and not np.isnan(margins.lower[i]):
                low, high, most = margins.lower[i], margins.upper[i], proofs.most[i]
                holds = low <= least[i] + abs(least[i]) * doubt
                require(holds, "margin_lower is {:.6g}, not {:.6g}", low, least[i])
                require(high >= most, "margin_upper is {:.6g}, not {:.6g}", high, most)
            if not np.isnan(attention.lower[i]):
                holds = attention.lower[i] <= weight[i] and attention.upper[i] >= upper[i]
                require(holds, "its attainable attention is between {:.6g} and {:.6g}", weight[i], upper[i])


@dataclass(frozen=True, repr=False, eq=False)
class KeyGeometry:
    """Verdicts, margins and certificates of a set of keys, or of a batch (arrays lead with "batch").

    Attributes:
        verdict: "selectable", "unselectable", "duplicate" (selectable, but for keys that do not
            differ from it) or "undecided".
        margin_lower, margin_upper: proven bounds of the margin, in `margin_unit`. With a set of
            queries: the best score gap to *all* other keys that a query of the set gives, center
            and bias included (negative if none puts the key on top). Without one: the distance to
            the hull of all other keys. NaN for a single key, without margins, and with a bias but
            no set of queries.
        attainable, attainable_upper: the largest softmax weight that a query of the set was found
            to give each key, and what none exceeds. NaN without a query set.
        attainable_at: u of the query `center + axes @ u`, |u| ≤ 1, that gives that weight;
            with more axes than dimensions, over fewer axes that reach the same queries.
        reachable: whether a query of the set gives the key strictly the highest score:
            `margin_lower` is above tau times the RMS norm of the keys as the set sees them.
            None without a set of queries or margins.
        representative: index of the first key that does not differ from each key.
        margin_unit: "nats" with a query set, else "rms" (the RMS norm of the centred keys).
        tau: the tolerance of all verdicts, relative to the RMS norm of the centred keys
            (less the directions that the query set lacks).
        repaired: how many keys were decided only when the search went on in more digits.
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
    _sets: list[SetGeometry] = field(repr=False)

    def __repr__(self) -> str:
        names, counts = np.unique(self.verdict, return_counts=True)
        what = ", ".join(f"{count} {name}" for name, count in zip(names, counts, strict=True))
        shape = " x ".join(str(size) for size in self.verdict.shape)
        return f"KeyGeometry({shape} keys of dimension {self._sets[0].keys.shape[1]}: {what}; tau {self.tau:g})"

    def witness(self, *index: Any) -> Float64[np.ndarray, " d"]:
        """Return a query that selects key `i` (of a batch: `witness(b, i)`): it scores every other key lower.

        That is proved of the numbers returned. Of a duplicate: every key that is not its copy. It has
        unit length without a bias; with one, it is to be used with the bias as it was given.

        Args:
            index: of the key.

        Raises:
            ValueError: the key is unselectable or undecided, or wins by less than rounding: no float64
                query is known to select it.
            IndexError: no such key.
        """
        one, i, name = self._key(index)
        if name not in ("selectable", "duplicate"):
            more = f", weights({i}) gives the convex weights that reproduce it" if name == "unselectable" else ""
            raise ValueError(f"key {i} is {name}: it has no witness query{more}")
        query = one.witness(i)
        if query is None:
            raise ValueError(f"key {i} is {name}, but no query in float64 is known to select it")
        return query

    def weights(self, *index: Any) -> Float64[np.ndarray, " key"]:
        """Return convex weights of the other keys that reproduce key `i` (of a batch: `weights(b, i)`), zero at `i`.

        Of a duplicate: all weight on one of its copies.

        Args:
            index: of the key.

        Raises:
            ValueError: the key is selectable or undecided.
            IndexError: no such key.
        """
        one, i, name = self._key(index)
        if name not in ("duplicate", "unselectable"):
            more = f", witness({i}) gives the query that selects it" if name == "selectable" else " as far as is known"
            raise ValueError(f"key {i} is {name}: no convex weights of the other keys reproduce it{more}")
        where, value = one.weights(i)
        weights = np.zeros(self.verdict.shape[-1])
        weights[where] = value
        return weights

    def certify(self) -> None:
        """Prove every verdict and bound again from its query or its weights.

        Raises:
            CertificateError: a certificate does not prove its verdict or bound.
        """
        for b, one in enumerate(self._sets):
            one.certify(f" of set {b}" if self.verdict.ndim > 1 else "")

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
        one, i = self._sets[place[0] if len(place) == 2 else 0], place[-1]
        return one, i, str(NAMES[one.solved.answers.verdicts.code[i]])


def key_geometry(
    keys: Float[Array, "*batch key d"],
    bias: Float[Array, "*batch key"] | None = None,
    query_set: float | tuple[Float[Array, "*batch d"], Float[Array, "*batch d r"]] | None = None,
    margins: bool | Literal["exact"] = True,
    *,
    budget: float = 1.0,
    threads: int | None = None,
) -> KeyGeometry:
    """Decide for every key whether a query can select it, by what margin, with how much attention.

    Args:
        keys: the keys of a head, or a batch of such sets, decided in parallel.
        bias: added to the score of each key; a key is then unselectable iff convex weights of the others
            reproduce it with at least its bias.
        query_set: a radius (queries no longer than that), or the ellipsoid `center + axes @ u`, `|u| <= 1`
            (axes may be fewer than d, or dependent). Margins are then over this set, in nats, and
            `reachable` and `attainable` are computed. Verdicts still ask for a query of any length, without the
            directions that the axes do not span.
        margins: whether to bracket margins (to 1 %), or "exact" (to about six digits).
        budget: seconds that a key may take before it stays undecided or its bracket wide, counted
            in multiply-adds of a nominal processor (1e9 a second), so no result depends on the clock.
        threads: how many to use, by default one for each processor; changes no result.

    Returns:
        A `KeyGeometry`; for a batch all its arrays lead with the batch axis.

    Raises:
        TypeError: keys, bias or query set are not of a floating-point type, or sparse, or without values.
        ValueError: no keys, no dimensions, NaN or infinite values, numbers outside 1e±60, shapes that do not fit, a
            radius that is not positive, a budget that is not positive and finite.

    Example:
        >>> geometry = ln_probe.key_geometry(torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 4.0], [1.0, 1.0]]))
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
    solved = solve_sets(values, lift, ellipsoids, None, Request(gap, budget=float(budget) * BUDGET), threads)
    none: list[Any] = [None] * len(values)
    given = zip(values, none if lift is None else lift, ellipsoids or none, solved, strict=True)
    sets = [SetGeometry(*parts) for parts in given]

    def shaped(arrays: list[np.ndarray]) -> Any:
        return np.stack(arrays) if batched else arrays[0]

    answers = [one.answers for one in solved]
    return KeyGeometry(
        verdict=shaped([NAMES[a.verdicts.code] for a in answers]),
        margin_lower=shaped([a.margins.lower for a in answers]),
        margin_upper=shaped([a.margins.upper for a in answers]),
        attainable=shaped([a.attention.lower for a in answers]),
        attainable_upper=shaped([a.attention.upper for a in answers]),
        attainable_at=shaped([a.attention.at for a in answers]) if ellipsoids is not None else None,
        reachable=shaped([reachable(one) for one in solved]) if ellipsoids is not None and gap is not None else None,
        representative=shaped([a.verdicts.first for a in answers]),
        margin_unit="rms" if ellipsoids is None else "nats",
        tau=TAU,
        repaired=sum(int(a.verdicts.repaired.sum()) for a in answers),
        undecided=sum(int((a.verdicts.code == UNDECIDED).sum()) for a in answers),
        _sets=sets,
    )


def reachable(solved: Solved) -> Bool[np.ndarray, " key"]:
    """Return whether a query of the set puts each key on top, by more than tau."""
    assert solved.seen is not None
    rows, lower = solved.seen.rows, solved.answers.margins.lower
    if len(lower) == 1:
        return np.ones(1, bool)
    return np.asarray(lower > TAU * float(np.sqrt((rows * rows).sum(axis=1).mean())))


RANDOM_SETS = 32  # sets of random keys that `random_unselectable` is a mean over


@lru_cache(maxsize=64)
def random_unselectable(n: int, d: int) -> float:
    """Return the share of n random keys (normal, in d dimensions) that no query selects.

    In the plane n keys have 2 √(2π ln n) corners on average, to leading order (Rényi & Sulanke 1963). Otherwise the
    same verdicts on RANDOM_SETS seeded sets.

    Example:
        >>> from ln_probe.analyses.geometry.key_geometry import random_unselectable
        >>> random_unselectable(128, 8)
    """
    if n <= d + 1:
        return 0.0
    if d == 2:
        return max(0.0, 1 - 2 * math.sqrt(2 * math.pi * math.log(n)) / n)
    keys = np.random.default_rng(0).standard_normal((RANDOM_SETS, n, d))
    solved = solve_sets(keys, request=Request(gap=None, attention=False))
    return float(np.mean([one.answers.verdicts.code == UNSELECTABLE for one in solved]))
