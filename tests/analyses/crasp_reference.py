"""Random C-RASP programs as nested tuples, rendered to text and evaluated by definition, one position at a time."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import strategies as st

ALPHABET = "ab"


def words_up_to(length: int, alphabet: str = ALPHABET) -> list[str]:
    return ["".join(w) for n in range(1, length + 1) for w in itertools.product(alphabet, repeat=n)]


BOOLEANS: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        st.sampled_from([("Q", "a"), ("Q", "b"), ("const", True), ("const", False)]),
        st.tuples(st.just("not"), BOOLEANS),
        st.tuples(st.sampled_from(["and", "or"]), BOOLEANS, BOOLEANS),
        st.tuples(st.sampled_from(["<", "<=", "==", "!=", ">=", ">"]), COUNTS, COUNTS),
    )
)
COUNTS: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        st.integers(0, 9).map(lambda n: ("int", n)),
        st.tuples(st.just("#"), BOOLEANS),
        st.tuples(st.sampled_from(["+", "-", "min", "max"]), COUNTS, COUNTS),
        st.tuples(st.just("?"), BOOLEANS, COUNTS, COUNTS),
        st.tuples(st.just("times"), st.integers(0, 5), COUNTS),
        st.tuples(st.just("minus"), COUNTS),
    )
)


def multiplied(node: Any) -> int:
    """How often a program multiplies: each time by 5 at most, and 64 bits end where that is done too often."""
    return (node[0] == "times") + sum(multiplied(part) for part in node if isinstance(part, tuple))


def render(node: Any) -> str:
    match node:
        case ("Q", letter):
            return f"Q_{letter}"
        case ("const", value):
            return str(value).lower()
        case ("int", number):
            return str(number)
        case ("not", inner):
            return f"(not {render(inner)})"
        case ("#", inner):
            return f"#[{render(inner)}]"
        case ("?", test, yes, no):
            return f"({render(test)} ? {render(yes)} : {render(no)})"
        case ("times", factor, inner):
            return f"({factor} * {render(inner)})"
        case ("minus", inner):
            return f"(-{render(inner)})"
        case ("min" | "max" as name, left, right):
            return f"{name}({render(left)}, {render(right)})"
        case (operator, left, right):
            return f"({render(left)} {operator} {render(right)})"
    raise AssertionError(node)


def by_definition(node: Any, word: str, i: int) -> Any:
    match node:
        case ("Q", letter):
            return word[i] == letter
        case ("const" | "int", value):
            return value
        case ("not", inner):
            return not by_definition(inner, word, i)
        case ("#", inner):
            return sum(by_definition(inner, word, j) for j in range(i + 1))
        case ("?", test, yes, no):
            return by_definition(yes if by_definition(test, word, i) else no, word, i)
        case ("times", factor, inner):
            return factor * by_definition(inner, word, i)
        case ("minus", inner):
            return -by_definition(inner, word, i)
        case (operator, left, right):
            x, y = by_definition(left, word, i), by_definition(right, word, i)
            table = {
                "and": lambda: x and y,
                "or": lambda: x or y,
                "<": lambda: x < y,
                "<=": lambda: x <= y,
                "==": lambda: x == y,
                "!=": lambda: x != y,
                ">=": lambda: x >= y,
                ">": lambda: x > y,
                "+": lambda: x + y,
                "-": lambda: x - y,
                "min": lambda: min(x, y),
                "max": lambda: max(x, y),
            }
            return table[operator]()
    raise AssertionError(node)


def nesting(node: Any) -> int:
    parts = [nesting(part) for part in node[1:] if isinstance(part, tuple)]
    return max(parts, default=0) + (node[0] == "#")
