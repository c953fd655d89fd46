"""C-RASP, the counting language of transformers: parse a program, run it on a word, compute its depth.

A program is a list of definitions `name := expression`, evaluated at every position i of a word; the last one is its
output. Line ends do not matter, `//` begins a comment. An expression is a Boolean or a count:

    Q_a  Q_"("                     the symbol at i is a, is (
    not P   P and Q   P or Q       true   false
    C < D   C <= D   C == D   C != D   C >= D   C > D                 COMPARE
    #[P]                           at how many positions j <= i P holds   COUNTING
    C + D   C - D   -C   2 * C     ADD, SUB (an integer factor is repeated addition)
    P ? C : D                      C where P holds, else D                CONDITIONAL
    min(C, D)   max(C, D)   7      MIN, MAX, CONST

The depth of a program is the deepest nesting of `#[…]`, through names. Programs of depth k do what transformers of
depth k with fixed precision outside attention do (Yang, Cadilhac & Chiang 2025, "Knee-Deep in C-RASP"; operations from
Yang & Chiang 2024, "Counting Like Transformers", section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Int

try:
    from lark import Lark, Token, Transformer, UnexpectedCharacters, UnexpectedInput, UnexpectedToken
    from lark.exceptions import VisitError
    from lark.lexer import PatternStr
except ImportError as error:
    raise ImportError("Reading C-RASP needs the package lark: pip install lark.") from error

Kind = Literal["Boolean", "count"]
Values = Bool[np.ndarray, "pos *word"] | Int[np.ndarray, "pos *word"]

GRAMMAR = r"""
program: statement+
statement: NAME ASSIGN expression
only: expression

?expression: disjunction
    | disjunction "?" expression ":" expression -> conditional
?disjunction: conjunction | disjunction OR conjunction -> logic
?conjunction: negation | conjunction AND negation -> logic
?negation: comparison | NOT negation -> negate
?comparison: sum | sum COMPARE sum -> compare
?sum: product | sum PLUS product -> arithmetic | sum MINUS product -> arithmetic
?product: unary | INT TIMES unary -> multiple
?unary: atom | MINUS unary -> minus
?atom: "(" expression ")"
    | COUNT expression "]" -> count
    | EXTREME "(" expression "," expression ")" -> extreme
    | CONSTANT -> constant
    | SYMBOL -> symbol
    | INT -> integer
    | NAME -> name

ASSIGN: ":="
COUNT: /#\s*\[/
COMPARE: "<=" | ">=" | "==" | "!=" | "<" | ">"
OR.2: /or\b/
AND.2: /and\b/
NOT.2: /not\b/
EXTREME.2: /(min|max)(?=\s*\()/
CONSTANT.2: /(true|false)\b/
SYMBOL.3: /Q_(\w+|"[^"\n]+")/
NAME: /[A-Za-z]\w*/
INT: /\d+/
PLUS: "+"
MINUS: "-"
TIMES: "*"

%ignore /[ \t\r\n\f]+/
%ignore /\/\/[^\n]*/
"""
DEEPEST = 150  # operators inside each other: walks recurse, three calls a level
TOO_DEEP = "this is nested too deep", f"at most {DEEPEST} operators inside each other: give inner parts names"
LARGEST = 2**31  # what a count may reach per letter of a word: words of 2^31 letters then stay within 64 bits
DIGITS = 10  # of LARGEST; an integer of more is refused unread (Python reads no more than 4300)


class CRaspError(ValueError):
    """A program that is not C-RASP; `line` and `column` (from 1) say where, `expected` what is allowed there."""

    def __init__(self, source: str, line: int, column: int, problem: str, expected: str) -> None:
        self.line, self.column, self.expected = line, column, expected
        lines = source.split("\n")  # the parser's lines; `splitlines` also ends one at a form feed or U+2028
        # A character each for what moves the caret or is not seen: tabs, line separators, a byte order mark.
        shown = "".join(c if c.isprintable() else " " for c in lines[min(line, len(lines)) - 1].rstrip("\r"))
        super().__init__(
            f"line {self.line}, column {self.column}: {problem}; expected {expected}\n  {shown}\n"
            f"  {' ' * (column - 1)}^"
        )


# What each rule of the grammar takes and is.
_KINDS: dict[str, tuple[tuple[Kind, ...], Kind]] = {
    "symbol": ((), "Boolean"), "constant": ((), "Boolean"), "integer": ((), "count"),
    "negate": (("Boolean",), "Boolean"), "logic": (("Boolean", "Boolean"), "Boolean"),
    "compare": (("count", "count"), "Boolean"), "count": (("Boolean",), "count"),
    "arithmetic": (("count", "count"), "count"), "multiple": (("count",), "count"), "minus": (("count",), "count"),
    "extreme": (("count", "count"), "count"), "conditional": (("Boolean", "count", "count"), "count"),
}  # fmt: skip
# What it computes of its parts' values, by its operator or, where it has but one, by its rule.
_COMPUTE: dict[str, Callable[..., Any]] = {
    "negate": np.logical_not, "or": np.logical_or, "and": np.logical_and, "<": np.less, "<=": np.less_equal,
    "==": np.equal, "!=": np.not_equal, ">=": np.greater_equal, ">": np.greater,
    "count": partial(np.cumsum, axis=0, dtype=np.int64), "+": np.add, "-": np.subtract, "minus": np.negative,
    "min": np.minimum, "max": np.maximum, "conditional": np.where,
}  # fmt: skip


@dataclass(frozen=True)
class Expression:
    """One node: its kind, where it stands in the source and how deeply it nests counting.

    `growth` bounds a count: at most so much per letter of the word, up or down. `operation` (a rule of the grammar),
    `value` (its symbol, number or operator) and `parts` say what it is made of, `levels` how many operators are nested.
    """

    kind: Kind
    operation: str
    value: str
    parts: tuple[Expression, ...]
    line: int
    column: int
    depth: int
    growth: int
    levels: int

    def walk(self) -> Iterator[Expression]:
        """This and its parts in the order of the source, not through names."""
        yield self
        for part in self.parts if self.operation != "name" else ():
            yield from part.walk()

    def evaluate(self, symbols: np.ndarray, known: Mapping[str, Values]) -> Values:
        """The values at every position of a word, or of equally long words [pos, word], with those of names above."""
        match self.operation:
            case "name":
                return known[self.value]
            case "symbol":
                return np.asarray(symbols == self.value, dtype=bool)
            case "constant":
                return np.full(symbols.shape, self.value == "true")
            case "integer":
                return np.full(symbols.shape, int(self.value), dtype=np.int64)
        values = [part.evaluate(symbols, known) for part in self.parts]
        if self.operation == "multiple":
            return int(self.value) * values[0]
        computed: Values = _COMPUTE[self.operation if self.operation in _COMPUTE else self.value](*values)
        return computed


@dataclass(frozen=True)
class Program:
    """A parsed program, made by `parse`: its definitions in the order of the source. The last is its output."""

    definitions: dict[str, Expression]
    source: str

    @property
    def name(self) -> str:
        """The output's name."""
        return next(reversed(self.definitions))

    @property
    def output(self) -> Expression:
        return self.definitions[self.name]

    @property
    def depth(self) -> int:
        """Deepest nesting of counting that the output needs."""
        return self.output.depth

    def error(self, at: Expression, problem: str, expected: str) -> CRaspError:
        """What cannot be done with a part of this program."""
        return CRaspError(self.source, at.line, at.column, problem, expected)

    def run(self, word: Sequence[str] | np.ndarray) -> Values:
        """The output at every position of `word` (a string of one-letter symbols, or a list of symbols), [pos].

        Equally long words at once are an array of symbols, [pos, word], as is the output.
        """
        symbols = word if isinstance(word, np.ndarray) else np.asarray(list(word), dtype=object)
        known: dict[str, Values] = {}
        for name, expression in self.definitions.items():
            known[name] = expression.evaluate(symbols, known)
        return known[self.name]


def parse(source: str) -> Program:
    """Parse a C-RASP program.

    Args:
        source: the program's text, in the syntax of this module.

    Raises:
        CRaspError: it is malformed, mixes Booleans and counts, or uses a name that is not defined above; says the
            line, the column and what was expected. In one definition DEEPEST operators may be inside each other.
    """
    definitions: dict[str, Expression] = _parsed(source, "program")
    return Program(definitions, source)


def parse_expression(source: str) -> Expression:
    """Parse one expression without names; CRaspError as `parse`."""
    expression: Expression = _parsed(source, "only")
    return expression


def _parsed(source: str, start: str) -> Any:
    try:
        return _Builder(source).transform(_parser().parse(source, start=start))
    except UnexpectedInput as error:
        raise _syntax_error(source, error, start) from None
    except (VisitError, RecursionError) as error:
        if isinstance(cause := getattr(error, "orig_exc", error), RecursionError):
            raise CRaspError(source, 1, 1, *TOO_DEEP) from None
        raise cause from None


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, start=["program", "only"], parser="lalr", propagate_positions=True)


def _syntax_error(source: str, error: UnexpectedInput, start: str) -> CRaspError:
    line, column = error.line, error.column
    if isinstance(error, UnexpectedCharacters):
        problem, terminals = f"unexpected {error.char!r}", error.allowed or set()
    else:
        assert isinstance(error, UnexpectedToken)
        problem, terminals = f"unexpected {str(error.token)!r}", error.expected
        if error.token.type == "$END":
            problem = f"the {'program' if start == 'program' else 'formula'} ends too early"
            lines = source.rstrip().split("\n")
            line, column = len(lines), len(lines[-1]) + 1
    if {"COUNT", "INT", "NAME"} <= {*terminals}:
        return CRaspError(source, line, column, problem, "an expression")
    return CRaspError(source, line, column, problem, " or ".join(sorted(map(_in_words, terminals))))


def _in_words(terminal: str) -> str:
    """A terminal as text, or by its name."""
    patterns = {t.name: t.pattern for t in _parser().terminals}
    pattern = patterns.get(terminal)
    return f"`{pattern.value}`" if isinstance(pattern, PatternStr) else "the end" if terminal == "$END" else terminal


_RESERVED = frozenset({"and", "or", "not", "true", "false", "min", "max"})


class _Builder(Transformer[Token, Any]):
    """Expressions out of the parse tree, with the kinds checked on the way up."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.defined: dict[str, Expression] = {}

    def _refuse(self, at: Token | Expression, problem: str, expected: str) -> CRaspError:
        return CRaspError(self.source, at.line or 0, at.column or 0, problem, expected)

    def program(self, parts: list[None]) -> dict[str, Expression]:
        return self.defined

    def only(self, parts: list[Expression]) -> Expression:
        return parts[0]

    def statement(self, parts: list[Any]) -> None:
        name, _, expression = parts
        if name in self.defined:
            raise self._refuse(name, f"{str(name)!r} is already defined", "a new name")
        if name in _RESERVED:
            raise self._refuse(name, f"{str(name)!r} is a word of the language", "another name")
        if name.startswith("Q_"):
            raise self._refuse(name, f"{str(name)!r} stands for a symbol", "a name that does not begin with Q_")
        self.defined[str(name)] = expression

    def name(self, parts: list[Token]) -> Expression:
        (token,) = parts
        if token not in self.defined:
            known = ", ".join(self.defined) or "none yet"
            raise self._refuse(token, f"{str(token)!r} is not defined", f"a name defined above ({known}) or Q_{token}")
        inner = self.defined[token]  # as deep and as large as its definition
        return replace(
            inner,
            operation="name",
            value=str(token),
            parts=(inner,),
            line=token.line or 0,
            column=token.column or 0,
            levels=1,
        )

    def __default__(self, rule: Any, children: list[Any], meta: Any) -> Expression:
        operation = str(rule)
        takes, kind = _KINDS[operation]
        parts = tuple(child for child in children if isinstance(child, Expression))
        for part, wanted in zip(parts, takes, strict=True):
            if part.kind != wanted:
                raise self._refuse(part, f"this is a {part.kind}", f"a {wanted}")
        token = next((child for child in children if isinstance(child, Token)), None)
        value = "" if token is None else str(token)
        if operation == "symbol":
            value = value[2:].strip('"')
        if operation in ("integer", "multiple"):
            assert token is not None
            value = str(self._number(token))
        at = parts[0] if operation == "extreme" else children[0]
        growth = _growth(operation, value, [part.growth for part in parts if part.kind == "count"])
        if kind == "count" and growth >= LARGEST:
            problem = f"this may reach {growth} per letter of a word"
            raise self._refuse(at, problem, f"less than {LARGEST}, to stay in 64 bits")
        depth = max((part.depth for part in parts), default=0) + (operation == "count")
        levels = 1 + max((part.levels for part in parts), default=0)
        if levels > DEEPEST:
            raise self._refuse(at, *TOO_DEEP)
        return Expression(kind, operation, value, parts, at.line or 0, at.column or 0, depth, growth, levels)

    def _number(self, token: Token) -> int:
        """An integer's value; CRaspError if it is too long to be one that a count may reach."""
        digits = token.lstrip("0")
        if len(digits) > DIGITS:
            problem = f"this integer has {len(digits)} digits"
            raise self._refuse(token, problem, f"less than {LARGEST}, to stay in 64 bits")
        return int(digits or "0")


def _growth(operation: str, value: str, of_parts: Sequence[int]) -> int:
    """What a count may reach per letter of a word."""
    match operation:
        case "integer":
            return int(value)
        case "count":
            return 1
        case "multiple":
            return int(value) * of_parts[0]
        case "arithmetic":
            return sum(of_parts)
    return max(of_parts, default=0)
