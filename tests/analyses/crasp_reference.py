"""Random C-RASP programs beside what they mean: each expression also as Python over a word w and a position i."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

ALPHABET = "ab"


def words_up_to(length: int, alphabet: str = ALPHABET) -> list[str]:
    return ["".join(w) for n in range(1, length + 1) for w in itertools.product(alphabet, repeat=n)]


@dataclass(frozen=True)
class Expression:
    """`multiplied`: how often it multiplies, each time by 5 at most; 64 bits end where that is done too often."""

    text: str
    python: str
    nesting: int = 0
    multiplied: int = 0
    has_choice: bool = False

    def at(self, word: str) -> list[bool | int]:
        """Its value at every position, by definition."""
        return [eval(self.python, {"w": word, "i": i}) for i in range(len(word))]


def made(text: str, python: str, *parts: Expression, counts: bool = False, times: bool = False) -> Expression:
    """Of a pattern in which {0}, {1}, … stand for the parts."""
    return Expression(
        text.format(*(p.text for p in parts)),
        python.format(*(p.python for p in parts)),
        max((p.nesting for p in parts), default=0) + counts,
        sum(p.multiplied for p in parts) + times,
        text.startswith(("m", "({0} ?")) or any(p.has_choice for p in parts),
    )


def of(pattern: str, python: str, *parts: st.SearchStrategy[Expression], **more: bool) -> st.SearchStrategy[Expression]:
    return st.tuples(*parts).map(lambda drawn: made(pattern, python, *drawn, **more))


def numbers(largest: int) -> st.SearchStrategy[Expression]:
    return st.integers(0, largest).map(lambda n: Expression(str(n), str(n)))


BOOLEANS: st.SearchStrategy[Expression] = st.deferred(
    lambda: st.one_of(
        *(of(f"Q_{letter}", f"(w[i] == '{letter}')") for letter in ALPHABET),
        *(of(name, name.title()) for name in ("true", "false")),
        of("(not {0})", "(not {0})", BOOLEANS),
        *(of(f"({{0}} {word} {{1}})", f"({{0}} {word} {{1}})", BOOLEANS, BOOLEANS) for word in ("and", "or")),
        *(of(f"({{0}} {sign} {{1}})", f"({{0}} {sign} {{1}})", COUNTS, COUNTS)
          for sign in ("<", "<=", "==", "!=", ">=", ">")),
    )
)  # fmt: skip
COUNTS: st.SearchStrategy[Expression] = st.deferred(
    lambda: st.one_of(
        numbers(9),
        of("#[{0}]", "sum({0} for i in range(i + 1))", BOOLEANS, counts=True),
        *(of(f"({{0}} {sign} {{1}})", f"({{0}} {sign} {{1}})", COUNTS, COUNTS) for sign in "+-"),
        *(of(f"{name}({{0}}, {{1}})", f"{name}({{0}}, {{1}})", COUNTS, COUNTS) for name in ("min", "max")),
        of("({0} ? {1} : {2})", "({1} if {0} else {2})", BOOLEANS, COUNTS, COUNTS),
        of("({0} * {1})", "({0} * {1})", numbers(5), COUNTS, times=True),
        of("(-{0})", "(-{0})", COUNTS),
    )
)  # fmt: skip
