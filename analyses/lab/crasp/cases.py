"""C-RASP expressions read over some store of Boolean functions, whose counts are cases.

Every comparison becomes the question whether a sum of counts `constant + Σ factor · #[P]` is below 0. ADD, SUB, integer
factors and CONST stay inside the sum. CONDITIONAL, MIN and MAX are cases: a count is one sum where a guard holds,
another where another does, and a comparison of counts with cases is a Boolean function of comparisons of sums.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from ln_probe.analyses.lab.crasp.crasp import CRaspError, Expression

Function = TypeVar("Function")  # a Boolean function of the store; of a store they have an order
Read = TypeVar("Read")


@dataclass(frozen=True)
class Sum(Generic[Function]):
    """`constant + Σ factor · #[function]`, functions ascending."""

    terms: tuple[tuple[Function, int], ...] = ()
    constant: int = 0

    def plus(self, other: Sum[Function], times: int = 1) -> Sum[Function]:
        """This and `times` the other."""
        factors: dict[Any, int] = dict(self.terms)
        for function, factor in other.terms:
            factors[function] = factors.get(function, 0) + times * factor
        terms = tuple(sorted((f, n) for f, n in factors.items() if n))
        return Sum(terms, self.constant + times * other.constant)


Cases = tuple[tuple[Function, Sum[Function]], ...]  # guards, one of which holds at any position, and the count there


@runtime_checkable
class Store(Protocol[Function]):
    def negate(self, function: Function, /) -> Function: ...
    def both(self, left: Function, right: Function, /) -> Function: ...
    def either(self, left: Function, right: Function, /) -> Function: ...


class Reading(ABC, Generic[Function]):
    """Reads expressions, each once.

    Attributes:
        most_pairs: cases of two counts that are put together.
    """

    most_pairs: int

    def __init__(self, source: str, store: Store[Function], true: Function, false: Function) -> None:
        self.source, self.true, self.false = source, true, false
        self.negate, self.both, self.either = store.negate, store.both, store.either
        self.booleans: dict[int, Function] = {}  # by the identity of an expression, which the program keeps alive
        self.counts: dict[int, Cases[Function]] = {}

    @abstractmethod
    def symbol(self, at: Expression) -> Function: ...
    @abstractmethod
    def against_zero(self, total: Sum[Function], operator: str, at: Expression) -> Function:
        """Whether a sum of counts stands to 0 as a comparison's operator says."""

    def refuse(self, at: Expression, problem: str, expected: str) -> CRaspError:
        return CRaspError(self.source, at.line, at.column, problem, expected)

    def check(self, at: Expression) -> None:
        """Raise CRaspError at an expression that is too deep; nothing is by default."""

    def boolean(self, at: Expression) -> Function:
        return self._once(self.booleans, self._boolean, at)

    def count(self, at: Expression) -> Cases[Function]:
        return self._once(self.counts, self.cases, at)

    def _once(self, known: dict[int, Read], read: Callable[[Expression], Read], at: Expression) -> Read:
        if id(at) not in known:
            self.check(at)
            try:
                known[id(at)] = read(at)
            except OverflowError as error:
                raise self.refuse(at, f"too wide: {error}", "a formula of fewer parts") from None
        return known[id(at)]

    def _boolean(self, at: Expression) -> Function:
        match at.operation:
            case "symbol":
                return self.symbol(at)
            case "constant":
                return self.true if at.value == "true" else self.false
            case "name":
                return self.boolean(at.parts[0])
            case "negate":
                return self.negate(self.boolean(at.parts[0]))
            case "logic":
                left, right = (self.boolean(part) for part in at.parts)
                return self.both(left, right) if at.value == "and" else self.either(left, right)
        cases = [  # of a comparison
            self.both(guard, self.against_zero(total.plus(other, -1), at.value, at))
            for guard, total, other in self.pairs(at)
        ]
        return reduce(self.either, cases, self.false)

    def cases(self, at: Expression) -> Cases[Function]:
        return tuple(self.every_case(at))

    def every_case(self, at: Expression) -> Iterator[tuple[Function, Sum[Function]]]:
        match at.operation:
            case "integer":
                yield self.true, Sum((), int(at.value))
            case "name":
                yield from self.count(at.parts[0])
            case "count":
                counted = self.boolean(at.parts[0])
                yield self.true, Sum(((counted, 1),)) if counted != self.false else Sum()
            case "multiple" | "minus":
                factor = -1 if at.operation == "minus" else int(at.value)
                yield from ((guard, Sum[Function]().plus(total, factor)) for guard, total in self.count(at.parts[0]))
            case "arithmetic":
                for guard, total, other in self.pairs(at):
                    yield guard, total.plus(other, 1 if at.value == "+" else -1)
            case "conditional":
                test = self.boolean(at.parts[0])
                for side, part in ((test, at.parts[1]), (self.negate(test), at.parts[2])):
                    yield from self._where(side, self.count(part))
            case _:  # min, max
                for guard, total, other in self.pairs(at):
                    first = self.against_zero(total.plus(other, -1), "<" if at.value == "min" else ">", at)
                    yield from self._where(guard, ((first, total),))
                    yield from self._where(guard, ((self.negate(first), other),))

    def _where(self, holds: Function, cases: Cases[Function]) -> Iterator[tuple[Function, Sum[Function]]]:
        """The cases that there are where something holds."""
        for guard, total in cases:
            if (here := self.both(holds, guard)) != self.false:
                yield here, total

    def pairs(self, at: Expression) -> Iterator[tuple[Function, Sum[Function], Sum[Function]]]:
        """Every case of the first part with every case of the second, and where both hold."""
        left, right = (self.count(part) for part in at.parts)
        if len(left) * len(right) > self.most_pairs:
            problem = f"too wide: {len(left)} times {len(right)} cases"
            raise self.refuse(at, problem, f"at most {self.most_pairs} (fewer choices)")
        for guard, total in left:
            for other_guard, other in right:
                if (holds := self.both(guard, other_guard)) != self.false:
                    yield holds, total, other
