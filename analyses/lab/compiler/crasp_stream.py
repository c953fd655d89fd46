"""How a compiled program's values lie in the residual stream, and an MLP that rewrites them.

A truth value p takes four entries, -p, p, -q, q with q = 1 - p, so exactly two of them are not 0; fillers, whose
number varies, keep the number of entries that are not 0 the same at every norm. All these entries are equally long and
their sum is 0: a norm that projects has nothing to do, and one that scales divides by a number known beforehand,
whatever the word (with `live` entries of d_model = 4 live, by half an entry's length).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ln_probe.analyses.lab.compiler.crasp_plan import Step

Vector = Float[np.ndarray, " d_model"]
Value = Mapping[bytes, float]  # a weighted sum of an MLP's hidden units

P, Q = 1, 3  # entries of a truth value that hold it and its negation; the entry before each holds minus that
COPIES = 4  # of an answer that rounding left at half a truth value's size: four such entries are as long as one


@dataclass(frozen=True)
class Stream:
    """Where things lie.

    Attributes:
        features: truth values that there is room for; `arrivals`: answers of attention.
        live: entries that are not 0 at a norm, a power of two, so that means over them are exact.
        rounded: answers arrive as truth values, in COPIES (else as pairs (x, -x)).
    """

    features: int
    arrivals: int
    live: int
    rounded: bool

    @property
    def d_model(self) -> int:
        return 4 * self.live

    def feature(self, number: int) -> int:
        """First entry of a truth value."""
        return 4 * number

    def arrival(self, number: int) -> list[int]:
        """First entries of an answer's copies."""
        size, copies = (4 * COPIES, COPIES) if self.rounded else (2, 1)
        first = 4 * self.features + size * number
        return [first + 4 * copy for copy in range(copies)]

    def filled(self, features: int, arrivals: int = 0) -> Vector:
        """Fillers of length 1 beside so many truth values (and answers of COPIES)."""
        entries = np.zeros(self.d_model)
        first = self.arrival(self.arrivals)[0]
        number = self.live - 2 * (features + (arrivals if self.rounded else 0))
        entries[first : first + number] = [1, -1] * (number // 2)
        return entries

    def entry(self, place: int, weight: float = 1.0) -> Vector:
        """What reads one entry."""
        read = np.zeros(self.d_model)
        read[place] = weight
        return read


def stream_for(steps: Sequence[Step], rounded: bool) -> Stream:
    """The smallest stream in which all steps of a program have room."""
    features = max(len(held) for step in steps for held in (step.before, step.after))
    fewest = min(len(held) for step in steps for held in (step.before, step.after))
    # Without rounding, beside the answers: the number of positions and, for an output that is a count, that count.
    arrivals = max(len(step.asked) + (0 if rounded else len(step.sums) + 2) for step in steps)
    at_a_norm = max(2 * (len(step.before) + (len(step.asked) if rounded else 0)) for step in steps)
    live = 1
    while live < max(2 * features, at_a_norm) or 4 * live < (
        Stream(features, arrivals, live, rounded).arrival(arrivals)[0] + live - 2 * fewest
    ):
        live *= 2
    return Stream(features, arrivals, live, rounded)


class Units:
    """The hidden units of an MLP without biases, `relu(read · x)` each; those that read the same are one."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.writes: dict[bytes, Vector] = {}

    def relu(self, read: Vector) -> bytes:
        """A unit, by what it reads."""
        key = (read + 0.0).tobytes()  # + 0.0: -0 is 0
        self.writes.setdefault(key, np.zeros(self.stream.d_model))
        return key

    def add(self, vector: Vector, value: Value) -> None:
        """Write a value in the direction of a vector."""
        for key, factor in value.items():
            self.writes[key] += factor * vector

    def put(self, place: int, value: Value) -> None:
        """Write a value as the pair of entries (-value, value) that begins at a place."""
        pair = np.zeros(self.stream.d_model)
        pair[place], pair[place + 1] = -1.0, 1.0
        self.add(pair, value)

    def __len__(self) -> int:
        return len(self.writes)

    def matrices(self) -> tuple[Float[np.ndarray, "d_model unit"], Float[np.ndarray, "unit d_model"]]:
        """W_in and W_out."""
        reads = [np.frombuffer(key) for key in self.writes]
        empty = np.zeros((0, self.stream.d_model))
        return (np.stack(reads) if reads else empty).T, np.stack(list(self.writes.values())) if reads else empty


def combined(*parts: tuple[float, Value]) -> dict[bytes, float]:
    """A weighted sum of values."""
    total: dict[bytes, float] = {}
    for factor, value in parts:
        for key, weight in value.items():
            total[key] = total.get(key, 0.0) + factor * weight
    return total
