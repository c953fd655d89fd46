"""C-RASP: the parser's errors, the interpreter against brute force, programs against the languages they are for."""

from __future__ import annotations

import re

import pytest
from crasp_reference import ALPHABET, BOOLEANS, COUNTS, Expression, words_up_to
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ln_probe.analyses.lab.crasp import compiler as programs
from ln_probe.analyses.lab.crasp.compiler import gate_program
from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse


@settings(max_examples=80, deadline=None)
@given(drawn=st.one_of(BOOLEANS, COUNTS), word=st.text(ALPHABET, min_size=1, max_size=7))
def test_interpreter_by_definition(drawn: Expression, word: str) -> None:
    assume(drawn.multiplied <= 8)
    program = parse(f"x := {drawn.text}")
    assert program.run(word).tolist() == drawn.at(word)
    assert program.depth == drawn.nesting


def test_names_precedence_comments_and_line_ends() -> None:
    program = parse("""
        // a definition may go over lines,
        A := #[Q_a]
             - #[Q_b]      B := A + 1 < 2 * A    // and two may share one
        out := not B or Q_a and B ? 1 : B and Q_b ? 2 : 3
    """)
    trace = program.trace("aab")
    assert list(trace.columns) == ["A", "B", "out"]
    assert list(trace.index) == ["a", "a", "b"]
    assert trace["A"].tolist() == [1, 2, 1]
    assert trace["B"].tolist() == [False, True, False]
    # (not B) or (Q_a and B) ? 1 : ((B and Q_b) ? 2 : 3)
    assert trace["out"].tolist() == [1, 1, 1]
    assert program.depth == 1
    assert program.name == "out"


def test_depth_goes_through_names_and_counts_only_what_the_output_needs() -> None:
    assert parse("x := #[Q_a] > 0   y := #[x] > 1   z := y and x").depth == 2
    assert parse("x := #[#[Q_a] > 0] > 0   y := Q_b").depth == 0


def test_a_name_may_be_symbol_and_programs_may_be_long() -> None:
    assert parse("symbol := Q_a").trace("ab")["symbol"].tolist() == [True, False]
    assert parse(programs.last_block(200)).run("ab").tolist() == [False, False]
    assert parse("A := 2147483647 * #[Q_a]").run("aaa")[-1] == 3 * 2147483647


def test_quoted_and_long_symbols() -> None:
    program = parse('x := #[Q_"<s>"] + #[Q_token_7]')
    assert program.run(["<s>", "token_7", "a"]).tolist() == [1, 2, 2]


@pytest.mark.parametrize(("source", "line", "column", "said"), [
    ("", 1, 1, "the program ends too early; expected a name"),
    ("A = 3", 1, 3, "unexpected '='; expected `:=`"),
    ("A := ", 1, 5, "the program ends too early; expected an expression"),
    ("A := #[Q_a", 1, 11, "the program ends too early; expected `]`"),
    ("A := Q_a\nB := A + 1", 2, 6, "this is a Boolean; expected a count"),
    ("A := #[Q_a]\nB := #[A]", 2, 8, "this is a count; expected a Boolean"),
    ("A := not 3", 1, 10, "this is a count; expected a Boolean"),
    ("A := 1 ? 2 : 3", 1, 6, "this is a count; expected a Boolean"),
    ("A := true ? 2 : Q_a", 1, 17, "this is a Boolean; expected a count"),
    ("A := 1 and Q_a", 1, 6, "this is a count; expected a Boolean"),
    ("A := Q_a < 1", 1, 6, "this is a Boolean; expected a count"),
    ("A := 1 B := C + 1", 1, 13, "'C' is not defined; expected a name defined above (A) or Q_C"),
    ("A := 1\nA := 2", 2, 1, "'A' is already defined; expected a new name"),
    ("min := 1", 1, 1, "'min' is a word of the language; expected another name"),
    ("A := min(1)", 1, 11, "unexpected ')'; expected `,`"),
    ("A := (Q_a or Q_b))", 1, 18, "unexpected ')'; expected the end or the next definition"),
    ("A := 1 % 2", 1, 8, "unexpected '%'; expected `*` or `+` or `-` or `?` or `and` or `or` or a comparison or"),
    ("A := (1 + 2 $", 1, 13, "unexpected '$'; expected `)` or `*` or `+` or `-` or `?` or `and` or `or` or a"),
    ("A $= 1", 1, 3, "unexpected '$'; expected `:=`"),
    ("Q_a := #[Q_b] > 0", 1, 1, "'Q_a' stands for a symbol; expected a name that does not begin with Q_"),
    ("A := 2147483648", 1, 6, "this may reach 2147483648 per letter of a word; expected less than 2147483648"),
    ("A := 2147483647\nB := 65536 * #[Q_a]\nC := B + A", 3, 6, "this may reach 2147549183 per letter of a word"),
    ("A := 65536 * #[Q_a]\nB := 65536 * min(A, 1)", 2, 6, "this may reach 4294967296 per letter of a word"),
    ("// only a comment", 1, 18, "the program ends too early; expected a name"),
])  # fmt: skip
def test_malformed_programs(source: str, line: int, column: int, said: str) -> None:
    with pytest.raises(CRaspError) as caught:
        parse(source)
    error = caught.value
    assert (error.line, error.column) == (line, column)
    assert str(error).startswith(f"line {line}, column {column}: {said}")
    assert str(error).endswith("\n  " + " " * (column - 1) + "^")


@pytest.mark.parametrize(("source", "line", "column", "said", "shown"), [
    ("A := 1\n\f\nB := #[A]", 3, 8, "this is a count; expected a Boolean", "B := #[A]"),
    ("// \u2028 \x85 \x0b\nB := #[1]\r\n", 2, 8, "this is a count; expected a Boolean", "B := #[1]"),
    ("A := \f #[1]", 1, 10, "this is a count; expected a Boolean", "A :=   #[1]"),
    ("A :=\t#[1]", 1, 8, "this is a count; expected a Boolean", "A := #[1]"),
    ("A := 1 // \f\n + ", 2, 3, "the program ends too early; expected an expression", " + "),
    ("A := 1 \u2028", 1, 8, "unexpected '\\u2028'; expected `*` or `+`", "A := 1  "),
    ("\ufeffA := 1", 1, 1, "unexpected '\\ufeff'; expected a name", " A := 1"),
])  # fmt: skip
def test_errors_show_the_line_that_they_name(source: str, line: int, column: int, said: str, shown: str) -> None:
    """Lines end where the parser's do, and the caret stands under what it is about."""
    with pytest.raises(CRaspError) as caught:
        parse(source)
    assert (caught.value.line, caught.value.column) == (line, column)
    told = str(caught.value).split("\n")
    assert told[0].startswith(f"line {line}, column {column}: {said}")
    assert told[1:] == [f"  {shown}", f"  {' ' * (column - 1)}^"]


def test_integers_of_any_length() -> None:
    """Python reads no integer of more than 4300 digits."""
    with pytest.raises(CRaspError, match="line 2, column 19: this integer has 5000 digits; expected less than"):
        parse(f"x := 1\ny := 2 * #[Q_a] + {'7' * 5000} * #[Q_a]")
    assert parse(f"x := {'0' * 5000}7 * #[Q_a]").run("a") == [7]


@pytest.mark.parametrize(("begin", "end", "each"), [("#[", "] > 0", 2), ("not ", "", 1), ("#[Q_b and ", "] > 0", 3)])
def test_how_deep_a_definition_may_be(begin: str, end: str, each: int) -> None:
    """As deep as the error says: 150 brackets or operators inside each other."""
    most = 150 // each
    deepest = parse(f"x := {begin * most}Q_a{end * most}")
    assert deepest.run("ab").shape == (2,)
    with pytest.raises(CRaspError) as caught:
        parse(f"x := {begin * (most + 1)}Q_a{end * (most + 1)}")
    assert "this is nested too deep; expected at most 150 brackets or operators inside each other" in str(caught.value)
    assert "(`#[…] > 0` is two operators): give inner parts names of their own" in str(caught.value)
    assert caught.value.line == 1


def test_what_cannot_be_asked() -> None:
    with pytest.raises(ValueError, match="the output 'A' is a count: end the program with a Boolean"):
        parse("A := #[Q_a]").accepts("a")
    with pytest.raises(ValueError, match="the empty word has no last position"):
        parse("A := Q_a").accepts("")
    for make in (programs.blocks, programs.last_block):
        with pytest.raises(ValueError, match="k must be at least 1 block, got 0"):
            make(0)
    with pytest.raises(ValueError, match="depth must be at least 1 level, got 0"):
        gate_program(0)


LANGUAGES = {
    "majority": (programs.MAJORITY, 1, ALPHABET, lambda w: w.count("a") > w.count("b")),
    "a^n b^n": (programs.A_N_B_N, 2, ALPHABET, lambda w: w == "a" * (len(w) // 2) + "b" * (len(w) // 2)),
    "a^n b^n c^n": (
        programs.A_N_B_N_C_N, 2, "abc", lambda w: w == "".join(x * (len(w) // 3) for x in "abc"),
    ),
    "Dyck-1": (
        programs.DYCK_1, 2, "()",
        lambda w: not re.sub(r"\(\)", "", re.sub(r"\(\)", "", re.sub(r"\(\)", "", re.sub(r"\(\)", "", w)))),
    ),
    "L5": (programs.L_5, 1, ALPHABET, lambda w: abs(w.count("a") - w.count("b")) < 5),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_programs_accept_their_language(name: str) -> None:
    source, depth, alphabet, member = LANGUAGES[name]
    program = parse(source)
    assert program.depth == depth
    for word in words_up_to(6 if alphabet == "abc" else 8, alphabet):
        assert program.accepts(word) == member(word), word


@pytest.mark.parametrize("k", [1, 2, 5])
def test_block_programs(k: int) -> None:
    member, last = parse(programs.blocks(k)), parse(programs.last_block(k))
    assert member.depth == max(2, k)
    assert last.depth == max(0, k - 2)
    pattern = re.compile("".join(f"{programs.block_symbol(block)}+" for block in range(1, k + 1)))
    for word in words_up_to(8):
        belongs = pattern.fullmatch(word) is not None
        assert member.accepts(word) == belongs, word
        if belongs:
            begin = len(word.rstrip(word[-1]))
            assert last.run(word).tolist() == [i >= begin for i in range(len(word))], word
