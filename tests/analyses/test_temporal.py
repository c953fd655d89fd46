"""Kₜ[#] against brute force, its translations from C-RASP and back, and compiled transformers read back as programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from crasp_reference import ALPHABET, BOOLEANS, Expression
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ln_probe.analyses.lab.crasp import read_back as reading
from ln_probe.analyses.lab.crasp import temporal
from ln_probe.analyses.lab.crasp.compiler import PROGRAMS
from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse
from ln_probe.analyses.lab.crasp.crasp_compiler import compile_program
from ln_probe.analyses.lab.crasp.read_back import read_back
from ln_probe.analyses.lab.crasp.temporal import formula_of, parse_formula, program_of

WORDS = st.text(ALPHABET, min_size=1, max_size=7)


def translated(drawn: Expression, word: str) -> None:
    """C-RASP to Kₜ[#] and back, and, of what has no choice, read as a formula: all by definition, and as deep."""
    assume(drawn.multiplied <= 6)
    truth, program = drawn.at(word), parse(f"x := {drawn.text}")
    try:
        formula = formula_of(program)
    except CRaspError as error:
        assume("too wide" not in str(error))
        raise
    assert formula.values(word).tolist() == truth
    assert formula.depth <= program.depth == drawn.nesting
    again = program_of(formula)
    assert again.run(word).tolist() == truth
    assert again.depth == formula.depth
    if len(text := str(formula)) < 2000:
        try:
            assert parse_formula(text).values(word).tolist() == truth
        except CRaspError as error:
            if "nested too deep" not in str(error):  # of the text; the graph is not
                raise
    if not drawn.has_choice:
        given_as_formula = parse_formula(drawn.text)
        assert given_as_formula.values(word).tolist() == truth
        assert given_as_formula.depth == formula.depth


@settings(max_examples=60, deadline=None)
@given(drawn=BOOLEANS, word=WORDS)
def test_translations_keep_values_and_depth(drawn: Expression, word: str) -> None:
    translated(drawn, word)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(drawn=BOOLEANS, word=WORDS)
def test_translations_of_2000_random_programs(drawn: Expression, word: str) -> None:
    translated(drawn, word)


def test_many_words_at_once() -> None:
    formula = parse_formula("#[#[Q_a] > #[Q_b]] >= 2 and not Q_a")
    assert (formula.depth, str(formula)) == (2, "(not (#[(#[Q_b] < #[Q_a])] < 2) and not Q_a)")
    words = list(itertools.product(ALPHABET, repeat=6))
    at_once = formula.values(np.array(words, dtype=object).T)
    assert np.array_equal(at_once, np.stack([formula.values(word) for word in words], axis=1))
    assert np.array_equal(at_once, program_of(formula).run(np.array(words, dtype=object).T))


def test_depth_is_that_of_the_program() -> None:
    for source, _ in PROGRAMS.values():
        program = parse(source)
        if program.output.kind == "Boolean":
            formula = formula_of(program)
            assert formula.depth in (program.depth, 0)  # 0: it is false everywhere
            assert program_of(formula).depth == formula.depth


@pytest.mark.parametrize(("call", "source", "line", "column", "said"), [
    (parse_formula, "Q_a and", 1, 8, "the formula ends too early; expected an expression"),
    (parse_formula, "#[Q_a]\n  + 1", 1, 1, "this is a count; expected a comparison, or a Boolean"),
    (parse_formula, "Q_a\n or #[Q_b > 1] > 0", 2, 7, "this is a Boolean; expected a count"),
    (parse_formula, "min(#[Q_a], 2) < 3", 1, 5, "a choice is C-RASP"),
    (parse_formula, "x or Q_a", 1, 1, "'x' is not defined"),
    (parse_formula, "x := Q_a", 1, 3, "unexpected ':'; expected the end"),
    (parse_formula, "(" * 200 + "Q_a" + ")" * 200, 1, 151, "nested too deep"),
    (lambda s: formula_of(parse(s)), "y := #[Q_a]", 1, 6, "the output is a count, and a formula is true or false"),
    (lambda s: formula_of(parse(s)), "p0 := Q_a " + " ".join(f"p{i} := #[p{i - 1}] > 0" for i in range(1, 300)),
     1, 5761, "too deep: 299 nested counts; expected at most 256"),
    (lambda s: formula_of(parse(s)), "c := " + " + ".join(["min(#[Q_a], #[Q_b])"] * 8) + "  y := c > 0", 1, 10,
     "too wide: 64 times 2 cases; expected at most 64 (fewer choices)"),
])  # fmt: skip
def test_what_is_refused(call: Callable[[str], Any], source: str, line: int, column: int, said: str) -> None:
    with pytest.raises(CRaspError) as raised:
        call(source)
    assert said in str(raised.value)
    assert (raised.value.line, raised.value.column) == (line, column)


def test_formulas_of_too_many_parts_or_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    doubled = "p0 := Q_a\n" + "\n".join(f"p{i} := #[p{i - 1}] > 0 and p{i - 1}" for i in range(1, 40))
    formula = formula_of(parse(doubled))  # 80 parts, and as text more than 2^39 letters
    with pytest.raises(ValueError, match="as text it has more than 1000000 letters; write it by program_of"):
        str(formula)
    assert program_of(formula).run("bab").tolist() == [False, True, False]
    monkeypatch.setattr(temporal, "MOST_NODES", 20)
    with pytest.raises(
        CRaspError, match=r"line 7, column 7: too wide: more than 20 parts; expected a formula of fewer parts"
    ):
        formula_of(parse(doubled))


# ------------------------------------------------------------------------------------------------------- reading back

BOOLEAN = [name for name, (source, _) in PROGRAMS.items() if parse(source).output.kind == "Boolean"]
TOO_WIDE = "large factors"  # a mean of four million steps


def same_on_every_word(source: str, alphabet: Any, length: int) -> None:
    program = parse(source)
    compiled = compile_program(program, "rounding", "none", alphabet=alphabet, n_ctx=length + 1)
    read = read_back(compiled)
    words = list(itertools.product(alphabet, repeat=length))
    truth = compiled.run(words).T  # of the transformer
    assert np.array_equal(read.run(np.array(words, dtype=object).T), truth)
    assert read.depth <= max(1, compiled.attending) == max(1, program.depth)


@pytest.mark.parametrize("name", ["majority", "Dyck-1", "member of L3", "last block of L8", "nothing"])
def test_a_compiled_program_is_read_back(name: str) -> None:
    same_on_every_word(*PROGRAMS[name], 7)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BOOLEAN if name != TOO_WIDE])
def test_every_program_is_read_back_to_length_10(name: str) -> None:
    same_on_every_word(*PROGRAMS[name], 10)


# (Most drawn programs are too wide to be read back, which costs little: they are left out before they are compiled.)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(drawn=BOOLEANS)
def test_random_programs_are_read_back(drawn: Expression) -> None:
    assume(drawn.multiplied <= 2)
    program = parse(f"x := {drawn.text}")
    try:
        read = read_back(compile_program(program, "rounding", "none", alphabet=ALPHABET, n_ctx=8))
    except ValueError as error:
        assume("too wide" not in str(error))
        raise
    words = np.array(list(itertools.product(ALPHABET, repeat=7)), dtype=object).T
    assert np.array_equal(read.run(words), program.run(words))


def test_what_cannot_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    majority = parse(PROGRAMS["majority"][0])
    with pytest.raises(
        ValueError, match="compiled with 'scaling', whose stream is not rounded: only 'rounding' is read"
    ):
        read_back(compile_program(majority, "scaling", n_ctx=8))
    with pytest.raises(ValueError, match="too wide: a mean of 3999999 steps of the grid; at most 65536"):
        read_back(compile_program(parse(PROGRAMS[TOO_WIDE][0]), "rounding", n_ctx=8))
    looks = compile_program(majority, "rounding", n_ctx=8)
    looks.model.blocks[0].attn.W_Q.data.fill_(1.0)
    with pytest.raises(ValueError, match="attention that is not uniform, or positions: only uniform attention"):
        read_back(looks)
    monkeypatch.setattr(reading, "MOST_STATES", 3)
    with pytest.raises(ValueError, match="too wide: 2 vectors times 2 answers; at most 3 together"):
        read_back(compile_program(majority, "rounding", n_ctx=8))


def test_an_altered_weight_is_another_program() -> None:
    compiled = compile_program(parse("x := #[Q_a] > #[Q_b]"), "rounding", alphabet=ALPHABET, n_ctx=8)
    compiled.model.embed.W_E.data[[1, 2]] = compiled.model.embed.W_E.data[[2, 1]]
    words = np.array(list(itertools.product(ALPHABET, repeat=6)), dtype=object).T
    assert np.array_equal(read_back(compiled).run(words), parse("x := #[Q_b] > #[Q_a]").run(words))
