"""Boolean functions of numbered variables as reduced ordered decision diagrams: equal functions have equal numbers.

After Bryant 1986. The compiler needs them for two things: to see that two formulas are the same, and to write a formula
as a sum of conjunctions of which at most one holds (the ways from the root to "true"), which a layer of ReLUs computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

FALSE, TRUE = 0, 1  # the two constant functions
# A diagram of so many nodes is far beyond what fits into one layer; without a limit a program of a few lines could fill
# the memory.
MOST_NODES = 100_000


class TooManyNodesError(OverflowError):
    """The functions asked for do not fit into MOST_NODES nodes."""


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
                raise TooManyNodesError(f"more than {MOST_NODES} nodes")
            self._numbers[key] = len(self._nodes)
            self._nodes.append(key)
        return self._numbers[key]

    def variable(self, number: int) -> int:
        """The function that holds where the variable does."""
        return self._node(number, FALSE, TRUE)

    def choose(self, test: int, yes: int, no: int) -> int:
        """`yes` where `test` holds, else `no`.

        Raises:
            TooManyNodesError: it does not fit.
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
