"""Temporal logic with counting, Kₜ[#]: formulas, their values, and translations from C-RASP and to it.

A formula holds or not at every position i of a word (Yang & Chiang 2024, "Counting Like Transformers"; Yang, Cadilhac &
Chiang 2025, "Knee-Deep in C-RASP", where depth is preserved both ways):

    Q_a   true   false   not P   P and Q   P or Q
    2 * #[P] - #[Q] + 3 <= #[R]      a linear inequality of counts; #[P]: at how many positions j <= i P holds

The syntax is C-RASP's without names, choices, `min` and `max`. Equal parts are one object, so a formula that is a tree
of astronomical size as text can be a graph of some hundred nodes: `program_of` writes a definition for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, cast

import numpy as np
from jaxtyping import Bool

from ln_probe.analyses.lab.crasp.crasp import CRaspError, Expression, Program, parse, parse_expression

MOST_CASES = 64  # of one count: each choice, `min` or `max` may double them
MOST_NODES = 100_000  # of one formula
MOST_DEPTH = 256  # nested counts, as many as layers that the compiler makes
MOST_LETTERS = 1_000_000  # of a formula as text
_NEGATION = {"<=": ">", ">=": "<", "==": "!="}

Holds = Bool[np.ndarray, "pos *word"]
Operation = Literal["symbol", "constant", "not", "and", "or", "below"]
Linear = tuple[Mapping["Formula", int], int]  # a sum of factor times #[formula], and a constant
Cases = list[tuple["Formula", Linear]]  # a count: the sum whose guard holds


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
        """The formula as text, in the syntax of this module.

        Raises:
            ValueError: it would be longer than MOST_LETTERS (a graph can be small whose text is not).
        """
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

    def below(self, total: Linear) -> Formula:
        """That a sum of counts is below 0."""
        terms = {f: n for f, n in total[0].items() if n and f is not self.false}
        if not terms:
            return self.true if total[1] < 0 else self.false
        ordered = sorted(terms.items(), key=lambda term: term[0].number)
        return self._node("below", "", [f for f, _ in ordered], [n for _, n in ordered], total[1])


def plus(left: Linear, right: Linear, factor: int = 1) -> Linear:
    """A sum and so many times another."""
    terms = dict(left[0])
    for formula, n in right[0].items():
        terms[formula] = terms.get(formula, 0) + factor * n
    return terms, left[1] + factor * right[1]


class _Translation:
    """Expressions of C-RASP as formulas; the definition of a name is translated once."""

    def __init__(self, source: str) -> None:
        self.source, self.store = source, Formulas()
        self.booleans: dict[int, Formula] = {}
        self.counts: dict[int, Cases] = {}

    def refuse(self, at: Expression, problem: str, expected: str) -> CRaspError:
        return CRaspError(self.source, at.line, at.column, f"too wide: {problem}", expected)

    def boolean(self, at: Expression) -> Formula:
        if id(at) not in self.booleans:
            try:
                self.booleans[id(at)] = self._boolean(at)
            except OverflowError as error:
                raise self.refuse(at, str(error), "a formula of fewer parts") from None
        return self.booleans[id(at)]

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
        compared = [self.count(part) for part in at.parts]
        cases = self.pairs(compared[0], compared[1], at)
        return store.any_of([store.both(guard, self.against_zero(plus(a, b, -1), at.value)) for guard, a, b in cases])

    def against_zero(self, total: Linear, operator: str) -> Formula:
        if operator in _NEGATION:
            return self.store.negate(self.against_zero(total, _NEGATION[operator]))
        below, above = self.store.below(total), self.store.below(plus(({}, 0), total, -1))
        return below if operator == "<" else above if operator == ">" else self.store.either(below, above)

    def pairs(self, left: Cases, right: Cases, at: Expression) -> Iterator[tuple[Formula, Linear, Linear]]:
        """Every case of one with every case of the other, and where both hold."""
        if len(left) * len(right) > MOST_CASES:
            raise self.refuse(at, f"{len(left)} times {len(right)} cases", f"at most {MOST_CASES} (fewer choices)")
        for guard, a in left:
            for other, b in right:
                if (holds := self.store.both(guard, other)) is not self.store.false:
                    yield holds, a, b

    def count(self, at: Expression) -> Cases:
        if id(at) not in self.counts:
            self.counts[id(at)] = list(self._count(at))
        return self.counts[id(at)]

    def _count(self, at: Expression) -> Iterator[tuple[Formula, Linear]]:
        store, parts = self.store, at.parts
        match at.operation:
            case "integer":
                yield store.true, ({}, int(at.value))
            case "name":
                yield from self.count(parts[0])
            case "count":
                yield store.true, ({self.boolean(parts[0]): 1}, 0)
            case "multiple" | "minus":
                factor = -1 if at.operation == "minus" else int(at.value)
                yield from ((guard, plus(({}, 0), total, factor)) for guard, total in self.count(parts[0]))
            case "arithmetic":
                sign = 1 if at.value == "+" else -1
                for guard, a, b in self.pairs(self.count(parts[0]), self.count(parts[1]), at):
                    yield guard, plus(a, b, sign)
            case "conditional":
                test = self.boolean(parts[0])
                for side, part in ((test, parts[1]), (store.negate(test), parts[2])):
                    yield from ((store.both(side, guard), total) for guard, total in self.count(part))
            case _:  # min, max
                operator = "<" if at.value == "min" else ">"
                for guard, a, b in self.pairs(self.count(parts[0]), self.count(parts[1]), at):
                    first = self.against_zero(plus(a, b, -1), operator)
                    yield store.both(guard, first), a
                    yield store.both(guard, store.negate(first)), b


def formula_of(program: Program) -> Formula:
    """The formula that holds where a C-RASP program's output does; as deep as the program, or less deep.

    Raises:
        CRaspError: the output is a count; counts nested deeper than MOST_DEPTH, a count of more than MOST_CASES cases,
            a formula of more than MOST_NODES parts. Says the line and the column.
    """
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
    """A C-RASP program, exactly as deep, whose output holds where a formula does: a definition per part.

    Raises:
        CRaspError: a sum that may leave 64 bits.
    """
    nodes = formula.nodes()
    names = {node: f"p{place}" for place, node in enumerate(nodes)}
    lines = [f"{names[node]} := {_written(node, [names[part] for part in node.parts])}" for node in nodes]
    return parse("\n".join(lines))


def parse_formula(source: str) -> Formula:
    """Parse a formula of Kₜ[#].

    Raises:
        CRaspError: it is malformed, a count, or has what only C-RASP has; too deep or too wide (as `formula_of`). Says
            the line, the column and what was expected.
    """
    parsed = parse_expression(source)
    for part in parsed.walk():
        if part.operation in ("conditional", "extreme"):
            raise CRaspError(source, part.line, part.column, "a choice is C-RASP, not Kₜ[#]", "a sum of counts")
    if parsed.kind == "count":
        raise CRaspError(source, parsed.line, parsed.column, "this is a count", "a comparison, or a Boolean")
    return _Translation(source).boolean(parsed)
