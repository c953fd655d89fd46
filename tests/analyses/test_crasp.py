"""C-RASP: the parser's errors, the interpreter against brute force, programs and words of the depth experiments."""

from __future__ import annotations

import re

import pytest
import torch
from crasp_reference import ALPHABET, BOOLEANS, COUNTS, Expression, words_up_to
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ln_probe.analyses.lab.crasp import compiler, depth
from ln_probe.analyses.lab.crasp import compiler as programs
from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse
from ln_probe.analyses.lab.train import PAD


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
    # A is 1, 2, 1 and B false, true, false; (not B) or (Q_a and B) ? 1 : ((B and Q_b) ? 2 : 3)
    assert list(program.definitions) == ["A", "B", "out"]
    assert program.run("aab").tolist() == [1, 1, 1]
    assert program.depth == 1
    assert program.name == "out"


@pytest.mark.parametrize(("source", "line", "column"), [
    ("", 1, 1),
    ("A = 3", 1, 3),
    ("A := ", 1, 5),
    ("A := #[Q_a", 1, 11),
    ("A := Q_a\nB := A + 1", 2, 6),
    ("A := #[Q_a]\nB := #[A]", 2, 8),
    ("A := not 3", 1, 10),
    ("A := 1 ? 2 : 3", 1, 6),
    ("A := true ? 2 : Q_a", 1, 17),
    ("A := 1 and Q_a", 1, 6),
    ("A := Q_a < 1", 1, 6),
    ("A := 1 B := C + 1", 1, 13),
    ("A := 1\nA := 2", 2, 1),
    ("min := 1", 1, 1),
    ("A := min(1)", 1, 11),
    ("A := (Q_a or Q_b))", 1, 18),
    ("A := 1 % 2", 1, 8),
    ("A := (1 + 2 $", 1, 13),
    ("A $= 1", 1, 3),
    ("Q_a := #[Q_b] > 0", 1, 1),
    ("A := 2147483648", 1, 6),
    ("A := 1 - 12345678901", 1, 10),
    ("A := " + "-" * 20_000 + "1", 1, 1),
    ("A := 2147483647\nB := 65536 * #[Q_a]\nC := B + A", 3, 6),
    ("A := 65536 * #[Q_a]\nB := 65536 * min(A, 1)", 2, 6),
    ("// only a comment", 1, 18),
])  # fmt: skip
def test_malformed_programs(source: str, line: int, column: int) -> None:
    with pytest.raises(CRaspError) as caught:
        parse(source)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(caught.value).endswith("\n  " + " " * (column - 1) + "^")


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
        assert program.run(word)[-1] == member(word), word


@pytest.mark.parametrize("k", [1, 2, 5])
def test_block_programs(k: int) -> None:
    member, last = parse(programs.blocks(k)), parse(programs.last_block(k))
    assert member.depth == max(2, k)
    assert last.depth == max(0, k - 2)
    pattern = re.compile("".join(f"{programs.block_symbol(block)}+" for block in range(1, k + 1)))
    for word in words_up_to(8):
        belongs = pattern.fullmatch(word) is not None
        assert member.run(word)[-1] == belongs, word
        if belongs:
            begin = len(word.rstrip(word[-1]))
            assert last.run(word).tolist() == [i >= begin for i in range(len(word))], word


@settings(max_examples=30, deadline=None)
@given(k=st.integers(1, 6), extra=st.integers(0, 8), spread=st.integers(0, 6), seed=st.integers(0, 99))
def test_samples_are_words_of_the_language_labelled_as_the_program_does(
    k: int, extra: int, spread: int, seed: int
) -> None:
    low, high = k + extra, k + extra + spread
    words = depth.sample_block_words(k, (low, high), 20, torch.Generator().manual_seed(seed))
    pattern = re.compile("".join(f"{compiler.block_symbol(block)}+" for block in range(1, k + 1)))
    program = parse(compiler.last_block(k))
    right = depth.exact_match(words[1] ^ (torch.arange(20) == seed % 20)[:, None], words[1])
    assert right.tolist() == [place != seed % 20 for place in range(20)]
    for tokens, labels in zip(*(part.tolist() for part in words), strict=True):
        length = sum(label != PAD for label in labels)
        assert low <= length <= high
        assert tokens[0] == depth.BOS
        assert labels[0] == PAD
        assert set(labels[1 + length :]) <= {PAD}
        word = "".join(" ab"[t] for t in tokens[1 : 1 + length])
        assert pattern.fullmatch(word), word
        assert labels[1 : 1 + length] == [int(x) for x in program.run(word)]
