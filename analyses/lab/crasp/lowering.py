"""What a C-RASP program asks of a transformer: Boolean functions of letters and of signs of sums of counts, by level.

A comparison's level is its nesting of `#[…]`: all of a level's comparisons can be asked at once, of what the level
below has answered (`cases`).

Boolean functions of numbered variables as reduced ordered decision diagrams: equal functions have equal numbers.

After Bryant 1986. The compiler needs them for two things: to see that two formulas are the same, and to write a formula
as a sum of conjunctions of which at most one holds (the ways from the root to "true"), which a layer of ReLUs computes.

Which truth values the stream holds after every block of a compiled program, and what each block does.

One attention layer per level of counting. With rounding, a comparison leaves attention as a truth value, and the
block's MLP combines: one block per level. Without, the MLP has to sharpen the comparison first, so a level whose
formulas combine comparisons takes a second block whose attention is off. (The kinks of one layer of ReLUs are whole
hyperplanes; "both sums are positive" changes along half of one.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ln_probe.analyses.lab.crasp.cases import Cases, Reading, Sum
from ln_probe.analyses.lab.crasp.crasp import Expression, Program

FALSE, TRUE = 0, 1  # the two constant functions
# A diagram of so many nodes is far beyond what fits into one layer; without a limit a program of a few lines could fill
# the memory.
MOST_NODES = 100_000


class Decisions:
    """A store of Boolean functions; a function is a number that this store gave out.

    Variables are numbered by the caller, from 0; a function asks for the smaller number first.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[int, int, int]] = [(-1, FALSE, FALSE), (-1, TRUE, TRUE)]  # variable, if false, if true
        self._numbers: dict[tuple[int, int, int], int] = {}
        self._chosen: dict[tuple[int, int, int], int] = {}
        self._variables: dict[int, frozenset[int]] = {FALSE: frozenset(), TRUE: frozenset()}
        self._ways: dict[tuple[int, int], int] = {}

    def _node(self, variable: int, if_false: int, if_true: int) -> int:
        if if_false == if_true:
            return if_false
        key = (variable, if_false, if_true)
        if key not in self._numbers:
            if len(self._nodes) >= MOST_NODES:
                raise OverflowError(f"more than {MOST_NODES} nodes")
            self._numbers[key] = len(self._nodes)
            self._nodes.append(key)
        return self._numbers[key]

    def variable(self, number: int) -> int:
        """The function that holds where the variable does."""
        return self._node(number, FALSE, TRUE)

    def choose(self, test: int, yes: int, no: int) -> int:
        """`yes` where `test` holds, else `no`.

        Raises:
            OverflowError: it does not fit into MOST_NODES nodes.
        """
        if test in (FALSE, TRUE):
            return yes if test == TRUE else no
        if yes == no:
            return yes
        if (yes, no) == (TRUE, FALSE):
            return test
        key = (test, yes, no)
        if key not in self._chosen:
            first = min(self._nodes[f][0] for f in key if f > TRUE)
            split = [self._cofactors(f, first) for f in key]
            self._chosen[key] = self._node(first, *(self.choose(*(part[i] for part in split)) for i in (0, 1)))
        return self._chosen[key]

    def _cofactors(self, function: int, variable: int) -> tuple[int, int]:
        first, if_false, if_true = self._nodes[function]
        return (if_false, if_true) if function > TRUE and first == variable else (function, function)

    def negate(self, function: int) -> int:
        return self.choose(function, FALSE, TRUE)

    def both(self, left: int, right: int) -> int:
        return self.choose(left, right, FALSE)

    def either(self, left: int, right: int) -> int:
        return self.choose(left, TRUE, right)

    def variables(self, function: int) -> frozenset[int]:
        """The variables that a function depends on."""
        if function not in self._variables:
            first, if_false, if_true = self._nodes[function]
            self._variables[function] = self.variables(if_false) | self.variables(if_true) | {first}
        return self._variables[function]

    def evaluate(self, function: int, holds: Callable[[int], bool]) -> bool:
        """A function's value where `holds` says which variables do."""
        while function > TRUE:
            first, if_false, if_true = self._nodes[function]
            function = if_true if holds(first) else if_false
        return function == TRUE

    def count_ways(self, function: int, end: int) -> int:
        """How many ways lead from a function's root to `end` (TRUE or FALSE)."""
        if function <= TRUE:
            return int(function == end)
        if (function, end) not in self._ways:
            _, if_false, if_true = self._nodes[function]
            self._ways[function, end] = self.count_ways(if_false, end) + self.count_ways(if_true, end)
        return self._ways[function, end]

    def ways(self, function: int, end: int) -> Iterator[dict[int, bool]]:
        """The ways to `end`, each as the variables it asks for and their values; an assignment goes exactly one way."""
        if function == end:
            yield {}
        elif function > TRUE:
            first, if_false, if_true = self._nodes[function]
            for value, then in ((False, if_false), (True, if_true)):
                for way in self.ways(then, end):
                    yield {first: value} | way


MOST_CASES = 256  # sums that one count may be; a comparison of two such counts asks 65536 questions


@dataclass(frozen=True)
class Letter:
    """A variable: the symbol at this position is `symbol`; None: it is BOS."""

    symbol: str | None


@dataclass(frozen=True)
class Negative:
    """A variable: the sum is below 0. Its factors are even and its constant odd, so it is never 0."""

    sum: Sum[int]


Variable = Letter | Negative


@dataclass
class Lowered:
    """A program's questions.

    Attributes:
        decisions: the store of its functions; `variables[n]` is the meaning of its variable n.
        levels, places: of each variable: how deep its counts are nested, and the expression that asked it.
        output: the output's function, or the cases of a count.
    """

    program: Program
    decisions: Decisions
    variables: list[Variable]
    levels: list[int]
    places: list[Expression]
    output: int | Cases[int]

    def level(self, function: int) -> int:
        """How deeply nested the counts are that a function depends on; 0 for one of the letters alone."""
        return max((self.levels[v] for v in self.decisions.variables(function)), default=0)

    def sum_level(self, total: Sum[int]) -> int:
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

    def sum_of(self, variable: int) -> Sum[int]:
        """The sum whose sign a variable is."""
        asked = self.variables[variable]
        assert isinstance(asked, Negative)
        return asked.sum

    def at_first(self, function: int, symbol: str | None) -> bool:
        """A function's value where the symbol is `symbol` (None: BOS) and nothing has been counted yet."""

        def holds(variable: int) -> bool:
            asked = self.variables[variable]
            return asked.sum.constant < 0 if isinstance(asked, Negative) else asked.symbol == symbol

        return self.decisions.evaluate(function, holds)

    def weights(self, total: Sum[int]) -> tuple[tuple[tuple[int, int], ...], int]:
        """A sum's terms, and what BOS adds: its constant less what BOS would wrongly add to the counts."""
        return total.terms, total.constant - sum(n for f, n in total.terms if self.at_first(f, None))

    def size(self, total: Sum[int]) -> int:
        """The most that one position can add to a sum, up or down."""
        terms, at_bos = self.weights(total)
        return max(sum(abs(n) for _, n in terms), abs(at_bos))


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


class _Lowering(Reading[int]):
    most_pairs = MOST_CASES**2

    def __init__(self, program: Program, alphabet: frozenset[str], most_layers: int) -> None:
        self.decisions = Decisions()
        super().__init__(program.source, self.decisions, TRUE, FALSE)
        self.program, self.alphabet, self.most_layers = program, alphabet, most_layers
        self.numbers: dict[Variable, int] = {}
        self.lowered = Lowered(program, self.decisions, [], [], [], FALSE)
        self._variable(Letter(None), 0, program.output)  # BOS: no program asks for it, every count does

    def all(self) -> Lowered:
        needed = {self.program.name}
        for name, expression in reversed(self.program.definitions.items()):
            if name in needed:
                needed |= {e.value for e in expression.walk() if e.operation == "name"}
        for name, expression in self.program.definitions.items():  # in their order: names are known when they are used
            if name in needed:
                of = self.boolean if expression.kind == "Boolean" else self.count
                self.lowered.output = of(expression)
        return self.lowered

    def check(self, at: Expression) -> None:
        if at.operation == "count" and at.depth > self.most_layers:
            problem = f"too deep: this count needs {at.depth} layers"
            raise self.refuse(at, problem, f"at most {self.most_layers} (max_layers)")

    def _variable(self, asked: Variable, level: int, at: Expression) -> int:
        if asked not in self.numbers:
            self.numbers[asked] = len(self.lowered.variables)
            self.lowered.variables.append(asked)
            self.lowered.levels.append(level)
            self.lowered.places.append(at)
        return self.decisions.variable(self.numbers[asked])

    def symbol(self, at: Expression) -> int:
        return self._variable(Letter(at.value), 0, at) if at.value in self.alphabet else FALSE

    def against_zero(self, total: Sum[int], operator: str, at: Expression) -> int:
        if operator in ("==", "!="):
            both = self.both(self.against_zero(total, "<=", at), self.against_zero(total, ">=", at))
            return both if operator == "==" else self.negate(both)
        below = self._negative(total if operator in ("<", ">=") else total.plus(Sum((), -1)), at)
        return below if operator in ("<", "<=") else self.negate(below)

    def _negative(self, total: Sum[int], at: Expression) -> int:
        """Whether a sum of whole numbers is below 0, in one form for all sums with that sign."""
        if not total.terms:
            return TRUE if total.constant < 0 else FALSE
        common = math.gcd(*(n for _, n in total.terms))
        # n·x + c < 0 just where x + floor(c/n) < 0, and x < 0 just where 2x + 1 < 0, which is never 0.
        odd = Sum(tuple((f, 2 * n // common) for f, n in total.terms), 2 * (total.constant // common) + 1)
        turned = odd.terms[0][1] < 0
        variable = self._variable(
            Negative(Sum[int]().plus(odd, -1) if turned else odd), self.lowered.sum_level(odd), at
        )
        return self.negate(variable) if turned else variable

    def cases(self, at: Expression) -> Cases[int]:
        """Equal sums are one case."""
        made: dict[Sum[int], int] = {}
        for guard, total in self.every_case(at):
            made[total] = self.either(made.get(total, FALSE), guard)
            if len(made) > MOST_CASES:
                raise self.refuse(at, f"too wide: this count has more than {MOST_CASES} cases", "fewer choices")
        return tuple((guard, total) for total, guard in made.items())


Construction = Literal["scaling", "clip", "rounding"]


@dataclass(frozen=True)
class Step:
    """One block.

    Attributes:
        before, after: functions whose truth values the stream holds; the first two are TRUE and BOS.
        asked: variables whose sums this block's attention brings.
        sums: counts it brings, for an output that is a count.
        task: of the MLP. "combine": `after` from `before` and sharp answers; "sharpen": answers become truth values;
            "choose": the sum whose guard holds.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    asked: tuple[int, ...] = ()
    sums: tuple[Sum[int], ...] = ()
    task: Literal["combine", "sharpen", "choose"] = "combine"

    @property
    def attends(self) -> bool:
        return bool(self.asked or self.sums)


def plan(lowered: Lowered, construction: Construction) -> tuple[Step, ...]:
    """The blocks of a program, first to last; at least one."""
    if isinstance(lowered.output, int):
        depth = lowered.depth
        last: Iterable[int] = [lowered.output]
    else:
        depth = max(1, lowered.depth)  # the number of positions has to be seen once
        asked = sorted({v for guard, _ in lowered.output for v in lowered.decisions.variables(guard)})
        last = [lowered.decisions.variable(v) for v in asked]  # the guards' own values are never needed
    needs = {depth: held(lowered, last)}
    for level in range(depth, 0, -1):
        below = _parts(lowered, needs[level], level)
        counted = [f for v in lowered.asked(needs[level], level) for f, _ in lowered.sum_of(v).terms]
        if level == depth and not isinstance(lowered.output, int):
            counted += [f for _, total in lowered.output for f, _ in total.terms]
        needs[level - 1] = held(lowered, [*below, *counted])
    steps: list[Step] = []
    for level in range(1, depth + 1):
        steps += _level(lowered, construction, needs[level - 1], needs[level], level, level == depth)
    return tuple(steps) or (Step(needs[0], needs[0]),)


def _level(
    lowered: Lowered,
    construction: Construction,
    before: tuple[int, ...],
    after: tuple[int, ...],
    level: int,
    last: bool,
) -> list[Step]:
    asked = tuple(lowered.asked(after, level))
    if last and not isinstance(lowered.output, int):
        sums = tuple(total for _, total in lowered.output)
        steps = [Step(before, after, asked, sums, "sharpen")]
        return [*steps, Step(after, held(lowered, ()), task="choose")] if len(sums) > 1 else steps
    if construction == "rounding":
        return [Step(before, after, asked)]
    answers = [lowered.decisions.variable(v) for v in asked]
    known = {*before, *answers}
    known |= {lowered.decisions.negate(f) for f in known}
    if set(after) <= known:
        return [Step(before, after, asked, task="sharpen")]
    sharp = held(lowered, [*_parts(lowered, after, level), *answers])
    return [Step(before, sharp, asked, task="sharpen"), Step(sharp, after)]


def _parts(lowered: Lowered, functions: Iterable[int], level: int) -> list[int]:
    """What has to be known from below a level to tell functions of it: they themselves, or their older variables."""
    parts: list[int] = []
    for function in functions:
        if lowered.level(function) < level:
            parts.append(function)
        else:
            older = sorted(v for v in lowered.decisions.variables(function) if lowered.levels[v] < level)
            parts += [lowered.decisions.variable(v) for v in older]
    return parts


def held(lowered: Lowered, functions: Iterable[int]) -> tuple[int, ...]:
    """TRUE, BOS, then the functions, each once, and not beside its own negation."""
    kept = [TRUE, lowered.bos]
    for function in functions:
        if function not in (*kept, FALSE) and lowered.decisions.negate(function) not in kept:
            kept.append(function)
    return tuple(kept)
