"""What a C-RASP program asks of a transformer: Boolean functions of letters and of signs of sums of counts, by level.

Every comparison becomes the question whether a sum of counts `constant + Σ factor · #[P]` is below 0. ADD, SUB, integer
factors and CONST stay inside the sum. CONDITIONAL, MIN and MAX are cases: a count is one sum where a guard holds,
another where another does, and a comparison of counts with cases is a Boolean function of comparisons of sums. A
comparison's level is its nesting of `#[…]`: all of a level's comparisons can be asked at once, of what the level below
has answered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ln_probe.analyses.lab.compiler.decisions import FALSE, TRUE, Decisions, TooManyNodesError
from ln_probe.analyses.lab.depth.crasp import CRaspError, Expression, Program

MOST_CASES = 256  # sums that one count may stand for; a comparison of two such counts asks 65536 questions

Place = tuple[int, int]  # line and column, from 1


@dataclass(frozen=True)
class Letter:
    """A variable: the symbol at this position is `symbol`; None: it is BOS."""

    symbol: str | None


@dataclass(frozen=True)
class Sum:
    """`constant + Σ factor · #[function]`, functions by their numbers, ascending."""

    terms: tuple[tuple[int, int], ...] = ()
    constant: int = 0

    def plus(self, other: Sum, times: int = 1) -> Sum:
        """This and `times` the other."""
        factors = dict(self.terms)
        for function, factor in other.terms:
            factors[function] = factors.get(function, 0) + times * factor
        terms = tuple(sorted((f, n) for f, n in factors.items() if n))
        return Sum(terms, self.constant + times * other.constant)


@dataclass(frozen=True)
class Negative:
    """A variable: the sum is below 0. Its factors are even and its constant odd, so it is never 0."""

    sum: Sum


Variable = Letter | Negative
Cases = tuple[tuple[int, Sum], ...]  # guards, exactly one of which holds at any position, and what the count is there


@dataclass
class Lowered:
    """A program's questions.

    Attributes:
        decisions: the store of its functions; `variables[n]` is what its variable n stands for.
        levels, places: of each variable: how deep its counts are nested, and where in the program it was asked.
        output: the output's function, or the cases of a count.
    """

    program: Program
    decisions: Decisions
    variables: list[Variable]
    levels: list[int]
    places: list[Place]
    output: int | Cases

    def level(self, function: int) -> int:
        """How deeply nested the counts are that a function depends on; 0 for one of the letters alone."""
        return max((self.levels[v] for v in self.decisions.variables(function)), default=0)

    def sum_level(self, total: Sum) -> int:
        """The attention layer that can first give a sum; 0 for a constant."""
        return 1 + max(self.level(f) for f, _ in total.terms) if total.terms else 0

    @property
    def bos(self) -> int:
        """The function that holds at BOS alone."""
        return self.decisions.variable(0)

    @property
    def depth(self) -> int:
        """Levels that the output needs: the program's depth, or less where a formula is simpler than it looks."""
        if isinstance(self.output, int):
            return self.level(self.output)
        return max(max(self.level(guard), self.sum_level(total)) for guard, total in self.output)

    def asked(self, functions: Iterable[int], level: int) -> list[int]:
        """The variables of a level that functions depend on, ascending."""
        used = {v for f in functions for v in self.decisions.variables(f)}
        return sorted(v for v in used if self.levels[v] == level)

    def sum_of(self, variable: int) -> Sum:
        """The sum whose sign a variable is."""
        asked = self.variables[variable]
        assert isinstance(asked, Negative)
        return asked.sum

    def at_bos(self, function: int) -> bool:
        """A function's value at BOS, where nothing has been counted yet."""

        def holds(variable: int) -> bool:
            asked = self.variables[variable]
            return asked.sum.constant < 0 if isinstance(asked, Negative) else asked.symbol is None

        return self.decisions.evaluate(function, holds)

    def weights(self, total: Sum) -> tuple[tuple[tuple[int, int], ...], int]:
        """A sum's terms, and what BOS adds: its constant less what BOS would wrongly add to the counts."""
        return total.terms, total.constant - sum(n for f, n in total.terms if self.at_bos(f))

    def size(self, total: Sum) -> int:
        """The most that one position can add to a sum, up or down."""
        terms, at_bos = self.weights(total)
        return max(sum(abs(n) for _, n in terms), abs(at_bos))

    def of_letter(self, function: int, symbol: str | None) -> bool:
        """The value of a function of level 0 where the symbol is `symbol` (None: BOS)."""
        return self.decisions.evaluate(function, lambda v: self.variables[v] == Letter(symbol))


def lower(program: Program, alphabet: Iterable[str], most_layers: int) -> Lowered:
    """Take a program apart.

    Args:
        program: parsed.
        alphabet: the symbols that words can have; `Q_x` of another symbol holds nowhere.
        most_layers: the deepest nesting of counts that is let through.

    Raises:
        CRaspError: it is too deep (counts nested too far) or too wide (too many cases, or a formula of
            too many parts); says the line and the column.
    """
    return _Lowering(program, frozenset(alphabet), most_layers).all()


class _Lowering:
    def __init__(self, program: Program, alphabet: frozenset[str], most_layers: int) -> None:
        self.program, self.alphabet, self.most_layers = program, alphabet, most_layers
        self.decisions = Decisions()
        self.numbers: dict[Variable, int] = {}
        self.lowered = Lowered(program, self.decisions, [], [], [], FALSE)
        self._variable(Letter(None), 0, program.output.expression)  # BOS: no program asks for it, every count does
        self.functions: dict[int, int] = {}  # by the identity of an expression, which the program keeps alive
        self.cases: dict[int, Cases] = {}

    def all(self) -> Lowered:
        needed = {self.program.output.name}
        for definition in reversed(self.program.definitions):
            if definition.name in needed:
                needed |= {e.value for e in _inside(definition.expression) if e.operation == "name"}
        for definition in self.program.definitions:  # in their order: a name is then known when it is used
            if definition.name in needed:
                of = self.boolean if definition.expression.kind == "Boolean" else self.count
                self.lowered.output = of(definition.expression)
        return self.lowered

    def _refuse(self, at: Expression, problem: str, expected: str) -> CRaspError:
        return CRaspError(self.program.source, at.line, at.column, problem, expected)

    def _check(self, expression: Expression) -> None:
        if expression.operation == "count" and expression.depth > self.most_layers:
            raise self._refuse(
                expression,
                f"too deep: this count needs {expression.depth} layers",
                f"at most {self.most_layers} (max_layers)",
            )

    def _variable(self, asked: Variable, level: int, at: Expression) -> int:
        if asked not in self.numbers:
            self.numbers[asked] = len(self.lowered.variables)
            self.lowered.variables.append(asked)
            self.lowered.levels.append(level)
            self.lowered.places.append((at.line, at.column))
        return self.decisions.variable(self.numbers[asked])

    # ---------------------------------------------------------------------------------------------------- Booleans

    def boolean(self, expression: Expression) -> int:
        if id(expression) not in self.functions:
            self._check(expression)
            try:
                self.functions[id(expression)] = self._boolean(expression)
            except TooManyNodesError as error:
                raise self._refuse(expression, f"too wide: {error}", "a formula of fewer parts") from None
        return self.functions[id(expression)]

    def _boolean(self, expression: Expression) -> int:
        match expression.operation:
            case "symbol":
                known = expression.value in self.alphabet
                return self._variable(Letter(expression.value), 0, expression) if known else FALSE
            case "constant":
                return TRUE if expression.value == "true" else FALSE
            case "name":
                return self.boolean(expression.parts[0])
            case "negate":
                return self.decisions.negate(self.boolean(expression.parts[0]))
            case "logic":
                left, right = (self.boolean(part) for part in expression.parts)
                return (
                    self.decisions.both(left, right)
                    if expression.value == "and"
                    else self.decisions.either(left, right)
                )
            case "compare":
                return self._compare(expression)
        raise AssertionError(expression.operation)

    def _compare(self, expression: Expression) -> int:
        left, right = (self.count(part) for part in expression.parts)
        holds = FALSE
        for guard, difference in self._pairs(left, right, expression, -1):
            holds = self.decisions.either(
                holds, self.decisions.both(guard, self._against_zero(difference, expression.value, expression))
            )
        return holds

    def _against_zero(self, total: Sum, operator: str, at: Expression) -> int:
        if operator in ("==", "!="):
            both = self.decisions.both(self._against_zero(total, "<=", at), self._against_zero(total, ">=", at))
            return both if operator == "==" else self.decisions.negate(both)
        below = self._negative(total if operator in ("<", ">=") else total.plus(Sum(constant=-1)), at)
        return below if operator in ("<", "<=") else self.decisions.negate(below)

    def _negative(self, total: Sum, at: Expression) -> int:
        """Whether a sum of whole numbers is below 0, in one form for all sums with that sign."""
        if not total.terms:
            return TRUE if total.constant < 0 else FALSE
        common = math.gcd(*(n for _, n in total.terms))
        # n·x + c < 0 just where x + floor(c/n) < 0, and x < 0 just where 2x + 1 < 0, which is never 0.
        odd = Sum(tuple((f, 2 * n // common) for f, n in total.terms), 2 * (total.constant // common) + 1)
        turned = odd.terms[0][1] < 0
        variable = self._variable(Negative(Sum().plus(odd, -1) if turned else odd), self.lowered.sum_level(odd), at)
        return self.decisions.negate(variable) if turned else variable

    # ------------------------------------------------------------------------------------------------------ counts

    def count(self, expression: Expression) -> Cases:
        if id(expression) not in self.cases:
            self._check(expression)
            made: dict[Sum, int] = {}
            try:
                for guard, total in self._count(expression):
                    made[total] = self.decisions.either(made.get(total, FALSE), guard)
                    if len(made) > MOST_CASES:
                        raise self._refuse(
                            expression, f"too wide: this count has more than {MOST_CASES} cases", "fewer choices"
                        )
            except TooManyNodesError as error:
                raise self._refuse(expression, f"too wide: {error}", "a formula of fewer parts") from None
            self.cases[id(expression)] = tuple((guard, total) for total, guard in made.items())
        return self.cases[id(expression)]

    def _count(self, expression: Expression) -> Iterator[tuple[int, Sum]]:
        parts = expression.parts
        match expression.operation:
            case "integer":
                yield TRUE, Sum(constant=int(expression.value))
            case "name":
                yield from self.count(parts[0])
            case "count":
                counted = self.boolean(parts[0])
                yield TRUE, Sum(((counted, 1),)) if counted != FALSE else Sum()
            case "multiple" | "minus":
                factor = -1 if expression.operation == "minus" else int(expression.value)
                for guard, total in self.count(parts[0]):
                    yield guard, Sum().plus(total, factor)
            case "arithmetic":
                left, right = (self.count(part) for part in parts)
                yield from self._pairs(left, right, expression, 1 if expression.value == "+" else -1)
            case "conditional":
                test = self.boolean(parts[0])
                for side, part in ((test, parts[1]), (self.decisions.negate(test), parts[2])):
                    for guard, total in self.count(part):
                        if (holds := self.decisions.both(side, guard)) != FALSE:
                            yield holds, total
            case "extreme":
                yield from self._extreme(expression, *(self.count(part) for part in parts))
            case operation:
                raise AssertionError(operation)

    def _pairs(self, left: Cases, right: Cases, at: Expression, sign: int) -> Iterator[tuple[int, Sum]]:
        """Every sum of a case of the left and `sign` times one of the right, with where it holds."""
        if len(left) * len(right) > MOST_CASES**2:
            raise self._refuse(
                at, f"too wide: {len(left)} times {len(right)} cases", f"at most {MOST_CASES**2} (fewer choices)"
            )
        for guard, total in left:
            for other_guard, other in right:
                if (holds := self.decisions.both(guard, other_guard)) != FALSE:
                    yield holds, total.plus(other, sign)

    def _extreme(self, expression: Expression, left: Cases, right: Cases) -> Iterator[tuple[int, Sum]]:
        operator = "<" if expression.value == "min" else ">"
        for guard, total in left:
            for other_guard, other in right:
                holds = self.decisions.both(guard, other_guard)
                first = self._against_zero(total.plus(other, -1), operator, expression)
                for side, chosen in ((first, total), (self.decisions.negate(first), other)):
                    if (here := self.decisions.both(holds, side)) != FALSE:
                        yield here, chosen


def _inside(expression: Expression) -> Iterator[Expression]:
    """An expression and its parts, not through names."""
    waiting = [expression]
    while waiting:
        yield (part := waiting.pop())
        if part.operation != "name":
            waiting += part.parts
