"""The weights of a compiled program's blocks: attention that brings sums, MLPs that make truth values of them.

See `crasp_compiler` for the three constructions. No MLP has a bias: where a 1 is needed the truth value TRUE is read,
so a block does not mind by which factor a norm scaled its input.

How a compiled program's values lie in the residual stream, and an MLP that rewrites them.

A truth value p takes four entries, -p, p, -q, q with q = 1 - p, so exactly two of them are not 0; fillers, whose
number varies, keep the number of entries that are not 0 the same at every norm. All these entries are equally long and
their sum is 0: a norm that projects has nothing to do, and one that scales divides by a number known beforehand,
for every word (with `live` entries of d_model = 4 live, by half an entry's length).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from ln_probe.analyses.lab.arithmetic import Precision
from ln_probe.analyses.lab.crasp.cases import Sum
from ln_probe.analyses.lab.crasp.lowering import FALSE, TRUE, Construction, Lowered, Step
from ln_probe.analyses.lab.transformer import LabTransformer

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

    def pair(self, place: int) -> Vector:
        """The entries (-1, 1) that begin at a place."""
        return np.asarray(self.entry(place + 1) - self.entry(place))

    def entry(self, place: int, weight: float = 1.0) -> Vector:
        """What reads one entry."""
        read = np.zeros(self.d_model)
        read[place] = weight
        return read


def stream_for(steps: Sequence[Step], rounded: bool) -> Stream:
    """The smallest stream in which all steps of a program have room."""
    features = max(len(held) for step in steps for held in (step.before, step.after))
    fewest = min(len(held) for step in steps for held in (step.before, step.after))
    # Without rounding, and after the answers: the number of positions and, for an output that is a count, that count.
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
        self.add(self.stream.pair(place), value)

    def __len__(self) -> int:
        return len(self.writes)

    def matrices(self) -> tuple[Float[np.ndarray, "d_model unit"], Float[np.ndarray, "unit d_model"]]:
        """W_in and W_out."""
        reads = [np.frombuffer(key) for key in self.writes]
        empty = np.zeros((0, self.stream.d_model))
        return (np.stack(reads) if reads else empty).T, np.stack(list(self.writes.values())) if reads else empty


def combined(*parts: tuple[float, Value]) -> dict[bytes, float]:
    total: dict[bytes, float] = {}
    for factor, value in parts:
        for key, weight in value.items():
            total[key] = total.get(key, 0.0) + factor * weight
    return total


@dataclass(frozen=True)
class BlockWeights:
    """Weights of one block: of the head (a column of W_V, row of W_O per answer), of what it adds, and of the MLP."""

    W_V: Float[np.ndarray, "d_model answer"]
    W_O: Float[np.ndarray, "answer d_model"]
    b_O: Vector
    W_in: Float[np.ndarray, "d_model unit"]
    W_out: Float[np.ndarray, "unit d_model"]


class BlockWriter:
    def __init__(
        self, lowered: Lowered, construction: Construction, stream: Stream, clip_to: int, max_width: int
    ) -> None:
        self.lowered, self.decisions, self.stream = lowered, lowered.decisions, stream
        self.construction, self.clip_to, self.max_width = construction, clip_to, max_width
        self.rounded = construction == "rounding"
        asked = [v for v, level in enumerate(lowered.levels) if level]
        largest = max((lowered.size(lowered.sum_of(v)) for v in asked), default=1)
        # A mean of numbers up to `largest` steps, halved so often, is less than a step.
        self.halvings = largest.bit_length()
        self.step = 2.0 ** -max(1, self.halvings) if self.rounded else 0.5
        self.size = 2 * self.step  # of a truth value where attention reads it

    # ----------------------------------------------------------------------------------------------- what is where

    def _places(self, held: Sequence[int]) -> dict[int, int]:
        """The entry that holds a function's value, for all that are held and their negations."""
        places: dict[int, int] = {}
        for number, function in enumerate(held):
            places[function] = self.stream.feature(number) + P
            places[self.decisions.negate(function)] = self.stream.feature(number) + Q
        return places

    @property
    def _unit(self) -> int:
        """The entry of 1/(t + 1)."""
        return self.stream.arrival(self.stream.arrivals - 1)[0] + 1

    @property
    def result(self) -> int:
        """The entry of an output that is a count, over (t + 1)."""
        return self.stream.arrival(self.stream.arrivals - 2)[0] + 1

    # -------------------------------------------------------------------------------------------------- attention

    def block(self, step: Step) -> BlockWeights:
        """One block's weights.

        Raises:
            CRaspError: the stream, the head or the MLP would be wider than allowed.
        """
        d = self.stream.d_model
        self._check_width(max(d, 2 * len(step.asked) + len(step.sums) + 1), step.after)
        W_V, W_O, b_O = self._attention(step) if step.attends else (np.zeros((d, 0)), np.zeros((0, d)), np.zeros(d))
        units = Units(self.stream)
        {"combine": self._combine, "sharpen": self._sharpen, "choose": self._choose}[step.task](units, step)
        self._check_width(len(units), step.after)
        return BlockWeights(W_V, W_O, b_O, *units.matrices())

    def _check_width(self, width: int, functions: Sequence[int]) -> None:
        """Raise CRaspError if this is too wide, at the last question that the functions depend on."""
        if width > self.max_width:
            place = self.lowered.places[max(v for f in functions for v in self.decisions.variables(f))]
            problem = f"too wide: this takes {width} units or entries"
            raise self.lowered.program.error(place, problem, f"at most {self.max_width} (max_width)")

    def _attention(self, step: Step) -> tuple[np.ndarray, np.ndarray, Vector]:
        places = self._places(step.before)
        sums = [*step.sums, *(self.lowered.sum_of(v) for v in step.asked)]
        columns: list[Vector] = []
        rows: list[Vector] = []
        b_O = np.zeros(self.stream.d_model)
        for number, total in enumerate(sums):
            read = self._read_sum(places, total)
            if self.rounded:
                columns += [read, -read]
                rows += [np.zeros(self.stream.d_model), np.zeros(self.stream.d_model)]
                shrink = 2.0**-self.halvings
                for first in self.stream.arrival(number):  # rounded down: -step where negative, else 0
                    rows[-2][[first, first + 3]] = shrink  # -p and, with a step added, 1 - (1 - q)
                    rows[-1][[first + 1, first + 2]] = shrink
                    b_O[[first + P, first + Q]] = self.step
            else:
                columns.append(read)
                rows.append(self.stream.pair(self.stream.arrival(number)[0]))
        if self.rounded:  # fillers make room for what arrived
            held, arrived = len(step.before), len(step.asked)
            b_O += self.size * (self.stream.filled(held, arrived) - self.stream.filled(held))
        else:
            columns.append(self.stream.entry(places[self.lowered.bos]))
            rows.append(self.stream.pair(self._unit - 1))
        return np.stack(columns, axis=1), np.stack(rows), b_O

    def _read_sum(self, places: dict[int, int], total: Sum[int]) -> Vector:
        """What a position adds to a sum, in steps of the grid if there is one."""
        terms, at_bos = self.lowered.weights(total)
        read = np.zeros(self.stream.d_model)
        for function, factor in (*terms, (self.lowered.bos, at_bos)):
            read[places[function]] += factor * (self.step / self.size if self.rounded else 1.0)
        return read

    # -------------------------------------------------------------------------------------------------------- MLPs

    def _reads(self, step: Step) -> dict[int, Vector]:
        """What reads the value (0 or 1) of every function that the MLP can see."""
        size = 2.0 if self.rounded else 1.0  # the norm before it divided by `step`
        reads = {f: self.stream.entry(place, 1 / size) for f, place in self._places(step.before).items()}
        if self.rounded:
            for number, variable in enumerate(step.asked, len(step.sums)):  # counts arrive before them
                first = self.stream.arrival(number)[0]
                function = self.decisions.variable(variable)
                reads[function] = self.stream.entry(first + P)
                reads[self.decisions.negate(function)] = self.stream.entry(first + Q)
        return reads

    def _clear(self, units: Units, step: Step, reads: dict[int, Vector], fillers: bool = True) -> None:
        """Take the truth values and fillers away that the block began with, and sharp answers."""
        size = 2.0 if self.rounded else 1.0
        for number, function in enumerate(step.before):
            for place, value in ((P, function), (Q, self.decisions.negate(function))):
                units.put(self.stream.feature(number) + place - 1, {units.relu(reads[value]): -size})
        if fillers:
            arrived = len(step.asked) if self.rounded else 0
            units.add(self.stream.filled(len(step.before), arrived), {units.relu(reads[TRUE]): -size})
        if self.rounded:
            for number, variable in enumerate(step.asked, len(step.sums)):
                function = self.decisions.variable(variable)
                for place, value in ((P, function), (Q, self.decisions.negate(function))):
                    for first in self.stream.arrival(number):
                        units.put(first + place - 1, {units.relu(reads[value]): -1.0})

    def _write(self, units: Units, held: Sequence[int], values: dict[int, tuple[Value, Value]]) -> None:
        """Write truth values, each given as (it, its negation)."""
        for number, function in enumerate(held):
            for place, value in zip((P, Q), values[function], strict=True):
                units.put(self.stream.feature(number) + place - 1, value)

    def _combine(self, units: Units, step: Step) -> None:
        reads = self._reads(step)
        self._clear(units, step, reads)
        self._write(units, step.after, {f: self._combined(units, reads, f) for f in step.after})
        units.add(self.stream.filled(len(step.after)), {units.relu(reads[TRUE]): 1.0})

    def _combined(self, units: Units, reads: dict[int, Vector], function: int) -> tuple[Value, Value]:
        """A function and its negation out of what can be read, with one layer of ReLUs."""
        one = {units.relu(reads[TRUE]): 1.0}
        if function in reads:
            return {units.relu(reads[function]): 1.0}, {units.relu(reads[self.decisions.negate(function)]): 1.0}
        end = min((TRUE, FALSE), key=lambda e: self.decisions.count_ways(function, e))
        self._check_width(self.decisions.count_ways(function, end), [function])
        found = {units.relu(self._way(reads, way)): 1.0 for way in self.decisions.ways(function, end)}
        other = combined((1.0, one), (-1.0, found))
        return (found, other) if end == TRUE else (other, found)

    def _way(self, reads: dict[int, Vector], way: dict[int, bool]) -> Vector:
        """What a unit reads that is 1 where all of some variables have these values, else 0."""
        variables = [(self.decisions.variable(v), value) for v, value in way.items()]
        literals = [reads[f if value else self.decisions.negate(f)] for f, value in variables]
        return np.asarray(np.sum(literals, axis=0) - (len(literals) - 1) * reads[TRUE])

    def _sharpen(self, units: Units, step: Step) -> None:
        """Answers of attention become truth values, as long as 1/(t + 1) or, with a clip, as 1."""
        reads = self._reads(step)
        self._clear(units, step, reads)
        unit = self.stream.entry(self._unit)
        shrinks = self.construction == "scaling" or bool(step.sums)  # beside counts everything has to be as small
        steep = 1.0 if shrinks else 2.0 ** (self.clip_to - 1).bit_length()
        one = unit if shrinks else reads[TRUE]
        values: dict[int, tuple[Value, Value]] = {}
        for function in step.after:
            if function in reads:
                pair = []
                for f in (function, self.decisions.negate(function)):
                    value: Value = {units.relu(reads[f]): 1.0}
                    pair.append(combined((1.0, value), (-1.0, {units.relu(reads[f] - one): 1.0})) if shrinks else value)
                values[function] = (pair[0], pair[1])
        for number, variable in enumerate(step.asked, len(step.sums)):
            mean = steep * self.stream.entry(self.stream.arrival(number)[0] + 1)
            sides: list[Value] = [
                {units.relu(sign * mean + one): 0.5, units.relu(sign * mean - one): -0.5} for sign in (-1, 1)
            ]
            function = self.decisions.variable(variable)
            values[function] = (sides[0], sides[1])
            values[self.decisions.negate(function)] = (sides[1], sides[0])
        self._write(units, step.after, values)
        if not step.sums:
            units.add(self.stream.filled(len(step.after)), {units.relu(one): 1.0})
        elif len(step.sums) == 1:
            self._move(units, self.stream.arrival(0)[0], self.result - 1)
        for number in range(len(step.sums), len(step.sums) + len(step.asked)):
            self._move(units, self.stream.arrival(number)[0], None)
        self._move(units, self._unit - 1, None)

    def _move(self, units: Units, first: int, to: int | None) -> None:
        """Take a pair (-x, x) away, and put it elsewhere."""
        x = {units.relu(self.stream.entry(first + 1)): 1.0, units.relu(self.stream.entry(first + 1, -1.0)): -1.0}
        units.put(first, combined((-1.0, x)))
        if to is not None:
            units.put(to, x)

    def _choose(self, units: Units, step: Step) -> None:
        """The count whose guard holds. Truth values are as long as 1/(t + 1) here, so a clip tells up to its length."""
        cases = self.lowered.output
        assert not isinstance(cases, int)
        reads = self._reads(step)
        self._clear(units, step, reads, fillers=False)
        units.put(self.stream.feature(0), {units.relu(reads[TRUE]): 1.0})  # 1/(t + 1), which counts are read by
        most = max(self.lowered.size(total) for _, total in cases)
        bound = 2.0 ** (self.clip_to * max(1, most)).bit_length()
        for number, (guard, _) in enumerate(cases):
            first = self.stream.arrival(number)[0]
            count = self.stream.entry(first + 1)
            self._move(units, first, None)
            self._check_width(self.decisions.count_ways(guard, TRUE), [guard])
            for way in self.decisions.ways(guard, TRUE):
                here = self._way(reads, way)  # at most 1; at most 0 elsewhere
                chosen = units.relu(count + 2 * bound * here - bound * reads[TRUE])
                units.put(self.result - 1, {chosen: 1.0, units.relu(here): -bound})

    # ------------------------------------------------------------------------------------------------------ around

    def embedding(self, held: Sequence[int], letters: Sequence[str]) -> Float[np.ndarray, "token d_model"]:
        """What BOS and the letters are where these functions are held."""
        rows = []
        for symbol in (None, *letters):
            row = self.stream.filled(len(held))
            for number, function in enumerate(held):
                side = P if self.lowered.at_first(function, symbol) else Q
                row += self.stream.pair(self.stream.feature(number) + side - 1)
            rows.append(row * self.size)
        return np.stack(rows)

    def unembedding(self, held: Sequence[int]) -> tuple[int, int]:
        """The entries that logits 0 and 1 are."""
        if not isinstance(self.lowered.output, int):
            return self.stream.feature(0) + P, self.result
        places = self._places(held)
        return places[self.decisions.negate(self.lowered.output)], places[self.lowered.output]

    def precision(self, model: LabTransformer) -> Precision | None:
        """The least grid on which nothing overflows; None without rounding."""
        if not self.rounded:
            return None
        largest = max(float(p.detach().abs().max()) for p in model.parameters())
        for block in model.blocks:
            hidden = float(2 * block.mlp.W_in.detach().abs().sum(0).max())  # the norm before it leaves at most 2
            largest = max(largest, hidden)
        fraction = max(1, self.halvings)
        return Precision(fraction + int(np.ceil(np.log2(largest))) + 2, fraction)
