"""Temporal logic with counting, Kₜ[#]: formulas, their values, and translations from C-RASP and to it.

A formula holds or not at every position i of a word (Yang & Chiang 2024, "Counting Like Transformers"; Yang, Cadilhac &
Chiang 2025, "Knee-Deep in C-RASP", where depth is preserved both ways):

    Q_a   true   false   not P   P and Q   P or Q
    2 * #[P] - #[Q] + 3 <= #[R]      a linear inequality of counts; #[P]: at how many positions j <= i P holds

The syntax is C-RASP's without names, choices, `min` and `max`. Equal parts are one object, so a formula of
astronomical size as text can be a graph of some hundred nodes: `program_of` writes a definition for each.

A comparison becomes the question whether a sum of counts `constant + Σ factor · #[P]` is below 0. ADD, SUB, integer
factors and CONST stay inside the sum. CONDITIONAL, MIN and MAX are cases: a count is one sum where a guard holds,
another where another does, and a comparison of counts with cases is a Boolean function of comparisons of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, TypeVar, cast

import numpy as np
from jaxtyping import Bool

from ln_probe.analyses.lab.crasp.crasp import CRaspError, Expression, Program, parse, parse_expression

MOST_CASES = 64  # of one count: each choice, `min` or `max` may double them
MOST_NODES = 100_000  # of one formula
MOST_DEPTH = 256  # nested counts, as many as layers that the compiler makes
MOST_LETTERS = 1_000_000  # of a formula as text
_NEGATION = {"<=": ">", ">=": "<", "==": "!="}

Read = TypeVar("Read")
Holds = Bool[np.ndarray, "pos *word"]
Operation = Literal["symbol", "constant", "not", "and", "or", "below"]


@dataclass(frozen=True, eq=False)
class Formula:
    """One node; made by `Formulas`, which has equal nodes once.

    Attributes:
        operation: "below": the sum of factors times counts of `parts`, and `constant`, is below 0.
        value: of a symbol or constant.
        number: its place among the formulas of its store, after those of its parts.
        depth: deepest nesting of counts.
    """

    operation: Operation
    value: str
    parts: tuple[Formula, ...]
    factors: tuple[int, ...]
    constant: int
    number: int
    depth: int

    def __lt__(self, other: Formula) -> bool:
        return self.number < other.number

    def nodes(self) -> list[Formula]:
        """This and all it is made of, parts first."""
        found, waiting = {self.number: self}, [self]
        while waiting:
            for part in waiting.pop().parts:
                if part.number not in found:
                    found[part.number] = part
                    waiting.append(part)
        return [found[number] for number in sorted(found)]

    def values(self, word: Sequence[str] | np.ndarray) -> Holds:
        """Whether it holds at every position of a word, or of equally long words given as an array [pos, word]."""
        symbols = word if isinstance(word, np.ndarray) else np.asarray(list(word), dtype=object)
        known: dict[Formula, np.ndarray] = {}
        for node in self.nodes():
            of = [known[part] for part in node.parts]
            match node.operation:
                case "symbol":
                    known[node] = np.asarray(symbols == node.value, dtype=bool)
                case "constant":
                    known[node] = np.full(symbols.shape, node.value == "true")
                case "not":
                    known[node] = ~of[0]
                case "and" | "or":
                    known[node] = of[0] & of[1] if node.operation == "and" else of[0] | of[1]
                case "below":
                    total = np.full(symbols.shape, node.constant, dtype=np.int64)
                    for factor, part in zip(node.factors, of, strict=True):
                        total += factor * np.cumsum(part, axis=0, dtype=np.int64)
                    known[node] = total < 0
        return known[self]

    def __str__(self) -> str:
        """The formula as text, in the syntax of this module."""
        known: dict[Formula, str] = {}
        for node in self.nodes():
            known[node] = _written(node, [known[part] for part in node.parts])
            if len(known[node]) > MOST_LETTERS:
                raise ValueError(f"too wide: as text it has more than {MOST_LETTERS} letters; write it by program_of")
        return known[self]


def _written(node: Formula, parts: Sequence[str]) -> str:
    """A node as text whose parts are written so."""
    match node.operation:
        case "symbol":
            return f"Q_{node.value}" if node.value.isalnum() else f'Q_"{node.value}"'
        case "constant":
            return node.value
        case "not":
            return f"not {parts[0]}"
        case "and" | "or":
            return f"({parts[0]} {node.operation} {parts[1]})"
    terms = [(factor, f"#[{part}]") for factor, part in zip(node.factors, parts, strict=True)]
    sides = []
    for sign in (1, -1):
        side = [text if factor == sign else f"{sign * factor} * {text}" for factor, text in terms if sign * factor > 0]
        side += [str(sign * node.constant)] if sign * node.constant > 0 or not side else []
        sides.append(" + ".join(side))
    return f"({sides[0]} < {sides[1]})"


@dataclass(frozen=True)
class Sum:
    """`constant + Σ factor · #[formula]`, formulas ascending."""

    terms: tuple[tuple[Formula, int], ...] = ()
    constant: int = 0

    def plus(self, other: Sum, times: int = 1) -> Sum:
        """This and `times` the other."""
        factors = dict(self.terms)
        for formula, factor in other.terms:
            factors[formula] = factors.get(formula, 0) + times * factor
        terms = tuple(sorted((f, n) for f, n in factors.items() if n))
        return Sum(terms, self.constant + times * other.constant)


class Formulas:
    """A store of formulas, in which equal ones are one object and constants are simplified away.

    Raises (by its methods):
        OverflowError: more than MOST_NODES formulas.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Formula] = {}
        self.true, self.false = (self._node("constant", value) for value in ("true", "false"))

    def _node(
        self,
        operation: str,
        value: str = "",
        parts: Sequence[Formula] = (),
        factors: Sequence[int] = (),
        constant: int = 0,
    ) -> Formula:
        key = (operation, value, *(p.number for p in parts), "factors", *factors, constant)
        if key not in self._known:
            if len(self._known) >= MOST_NODES:
                raise OverflowError(f"more than {MOST_NODES} parts")
            depth = max((p.depth for p in parts), default=0) + (operation == "below")
            number = len(self._known)
            kind = cast("Operation", operation)
            self._known[key] = Formula(kind, value, tuple(parts), tuple(factors), constant, number, depth)
        return self._known[key]

    def symbol(self, symbol: str) -> Formula:
        return self._node("symbol", symbol)

    def negate(self, of: Formula) -> Formula:
        if of.operation == "constant":
            return self.false if of is self.true else self.true
        return of.parts[0] if of.operation == "not" else self._node("not", parts=[of])

    def both(self, left: Formula, right: Formula) -> Formula:
        if self.false in (left, right):
            return self.false
        if left is self.true or left is right:
            return right
        return left if right is self.true else self._node("and", parts=[left, right])

    def either(self, left: Formula, right: Formula) -> Formula:
        if self.true in (left, right):
            return self.true
        if left is self.false or left is right:
            return right
        return left if right is self.false else self._node("or", parts=[left, right])

    def any_of(self, formulas: Sequence[Formula]) -> Formula:
        return reduce(self.either, formulas, self.false)

    def below(self, total: Sum) -> Formula:
        """That a sum of counts is below 0."""
        terms = [(f, n) for f, n in total.terms if f is not self.false]
        if not terms:
            return self.true if total.constant < 0 else self.false
        return self._node("below", "", [f for f, _ in terms], [n for _, n in terms], total.constant)


Cases = tuple[tuple[Formula, Sum], ...]  # guards, one of which holds at any position, and the count there


class _Translation:
    """Expressions of C-RASP as formulas and cases of counts, each translated once."""

    def __init__(self, source: str) -> None:
        self.source, self.store = source, Formulas()
        self.booleans: dict[int, Formula] = {}  # by the identity of an expression, which the program keeps alive
        self.counts: dict[int, Cases] = {}

    def _refuse(self, at: Expression, problem: str, expected: str) -> CRaspError:
        return CRaspError(self.source, at.line, at.column, problem, expected)

    def boolean(self, at: Expression) -> Formula:
        """The formula of a Boolean."""
        return self._once(self.booleans, self._boolean, at)

    def count(self, at: Expression) -> Cases:
        """The cases of a count."""
        return self._once(self.counts, lambda here: tuple(self._cases(here)), at)

    def _once(self, known: dict[int, Read], read: Callable[[Expression], Read], at: Expression) -> Read:
        if id(at) not in known:
            try:
                known[id(at)] = read(at)
            except OverflowError as error:
                raise self._refuse(at, f"too wide: {error}", "a formula of fewer parts") from None
        return known[id(at)]

    def _boolean(self, at: Expression) -> Formula:
        store = self.store
        match at.operation:
            case "symbol":
                return store.symbol(at.value)
            case "constant":
                return store.true if at.value == "true" else store.false
            case "name":
                return self.boolean(at.parts[0])
            case "negate":
                return store.negate(self.boolean(at.parts[0]))
            case "logic":
                left, right = (self.boolean(part) for part in at.parts)
                return store.both(left, right) if at.value == "and" else store.either(left, right)
        return store.any_of(
            [
                store.both(guard, self._against_zero(total.plus(other, -1), at.value))
                for guard, total, other in self._pairs(at)
            ]
        )

    def _against_zero(self, total: Sum, operator: str) -> Formula:
        if operator in _NEGATION:
            return self.store.negate(self._against_zero(total, _NEGATION[operator]))
        below, above = self.store.below(total), self.store.below(Sum().plus(total, -1))
        return below if operator == "<" else above if operator == ">" else self.store.either(below, above)

    def _cases(self, at: Expression) -> Iterator[tuple[Formula, Sum]]:
        store = self.store
        match at.operation:
            case "integer":
                yield store.true, Sum((), int(at.value))
            case "name":
                yield from self.count(at.parts[0])
            case "count":
                counted = self.boolean(at.parts[0])
                yield store.true, Sum(((counted, 1),)) if counted is not store.false else Sum()
            case "multiple" | "minus":
                factor = -1 if at.operation == "minus" else int(at.value)
                yield from ((guard, Sum().plus(total, factor)) for guard, total in self.count(at.parts[0]))
            case "arithmetic":
                for guard, total, other in self._pairs(at):
                    yield guard, total.plus(other, 1 if at.value == "+" else -1)
            case "conditional":
                test = self.boolean(at.parts[0])
                for side, part in ((test, at.parts[1]), (store.negate(test), at.parts[2])):
                    yield from self._where(side, self.count(part))
            case _:  # min, max
                for guard, total, other in self._pairs(at):
                    first = self._against_zero(total.plus(other, -1), "<" if at.value == "min" else ">")
                    yield from self._where(guard, ((first, total), (store.negate(first), other)))

    def _where(self, holds: Formula, cases: Cases) -> Iterator[tuple[Formula, Sum]]:
        """The cases that there are where something holds."""
        for guard, total in cases:
            if (here := self.store.both(holds, guard)) is not self.store.false:
                yield here, total

    def _pairs(self, at: Expression) -> Iterator[tuple[Formula, Sum, Sum]]:
        """Every case of the first part with every case of the second, and where both hold."""
        left, right = (self.count(part) for part in at.parts)
        if len(left) * len(right) > MOST_CASES:
            problem = f"too wide: {len(left)} times {len(right)} cases"
            raise self._refuse(at, problem, f"at most {MOST_CASES} (fewer choices)")
        for guard, total in left:
            for other_guard, other in right:
                if (holds := self.store.both(guard, other_guard)) is not self.store.false:
                    yield holds, total, other


def formula_of(program: Program) -> Formula:
    """The formula that holds where a C-RASP program's output does; as deep as the program, or less deep."""
    output = program.output
    if output.kind == "count":
        raise program.error(output, "the output is a count, and a formula is true or false", "a Boolean")
    if output.depth > MOST_DEPTH:
        raise program.error(output, f"too deep: {output.depth} nested counts", f"at most {MOST_DEPTH}")
    translation = _Translation(program.source)
    for expression in program.definitions.values():  # in their order, so that names do not nest
        translation.boolean(expression) if expression.kind == "Boolean" else translation.count(expression)
    return translation.boolean(output)


def program_of(formula: Formula) -> Program:
    """A C-RASP program, exactly as deep, whose output holds where a formula does: a definition per part."""
    nodes = formula.nodes()
    names = {node: f"p{place}" for place, node in enumerate(nodes)}
    lines = [f"{names[node]} := {_written(node, [names[part] for part in node.parts])}" for node in nodes]
    return parse("\n".join(lines))


def parse_formula(source: str) -> Formula:
    """Parse a formula of Kₜ[#]."""
    parsed = parse_expression(source)
    for part in parsed.walk():
        if part.operation in ("conditional", "extreme"):
            raise CRaspError(source, part.line, part.column, "a choice is C-RASP, not Kₜ[#]", "a sum of counts")
    if parsed.kind == "count":
        raise CRaspError(source, parsed.line, parsed.column, "this is a count", "a comparison, or a Boolean")
    return _Translation(source).boolean(parsed)
