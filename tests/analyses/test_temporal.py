"""Kₜ[#] against brute force, its translations from C-RASP and back, compiled transformers and what is read of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from crasp_reference import ALPHABET, BOOLEANS, Expression
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ln_probe.analyses.lab.crasp import compiler
from ln_probe.analyses.lab.crasp.compiler import PROGRAMS
from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse
from ln_probe.analyses.lab.crasp.read_back import _possible, read_back
from ln_probe.analyses.lab.crasp.temporal import Formulas, Sum, formula_of, parse_formula, program_of
from ln_probe.analyses.lab.crasp.weights import CompiledProgram, compile_program
from ln_probe.analyses.lab.norms import SCALES

WORDS = st.text(ALPHABET, min_size=1, max_size=7)


def translations(drawn: Expression, word: str) -> list[list[bool]]:
    """Values of C-RASP translated to Kₜ[#] and back, and, of what has no choice, read as a formula; all as deep."""
    assume(drawn.multiplied <= 6)
    program = parse(f"x := {drawn.text}")
    try:
        formula = formula_of(program)
    except CRaspError as error:
        assume("too wide" not in str(error))
        raise
    back = program_of(formula)
    assert back.depth == formula.depth <= program.depth == drawn.nesting
    together = np.array([list(word), list(word[::-1])], dtype=object).T  # two words at once
    values = [formula.values(word), back.run(word), formula.values(together)[:, 0]]
    if len(text := str(formula)) < 2000:
        try:
            values.append(parse_formula(text).values(word))
        except CRaspError as error:
            if "nested too deep" not in str(error):  # of the text; the graph is not
                raise
    if not drawn.has_choice:
        from_text = parse_formula(drawn.text)
        assert from_text.depth == formula.depth
        values.append(from_text.values(word))
    return [each.tolist() for each in values]


@settings(max_examples=60, deadline=None)
@given(drawn=BOOLEANS, word=WORDS)
def test_translations_keep_values_and_depth(drawn: Expression, word: str) -> None:
    assert all(values == drawn.at(word) for values in translations(drawn, word))


@pytest.mark.parametrize(("call", "source", "line", "column", "said"), [
    (parse_formula, "Q_a and", 1, 8, "the formula ends too early; expected an expression"),
    (parse_formula, "#[Q_a]\n  + 1", 1, 1, "this is a count; expected a comparison, or a Boolean"),
    (parse_formula, "Q_a\n or #[Q_b > 1] > 0", 2, 7, "this is a Boolean; expected a count"),
    (parse_formula, "min(#[Q_a], 2) < 3", 1, 5, "a choice is C-RASP"),
    (parse_formula, "x or Q_a", 1, 1, "'x' is not defined"),
    (parse_formula, "x := Q_a", 1, 3, "unexpected ':'; expected the end"),
    (parse_formula, "not " * 200 + "Q_a", 1, 201, "nested too deep"),
    (parse_formula, "(" * 100_000 + "Q_a", 1, 100_004, "the formula ends too early"),
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


def truth(compiled: CompiledProgram, words: list[Any]) -> np.ndarray:
    return np.stack([compiled.program.run(list(word)) for word in words])


def wrong_answers(source: str, alphabet: Any, length: int, norm: str = "layernorm") -> tuple[int, int]:
    """On every word: answers of the transformer, and of what is read of its weights, that are not the interpreter's."""
    program = parse(source)
    compiled = compile_program(program, norm, alphabet=alphabet, n_ctx=length + 1)
    words = list(itertools.product(alphabet, repeat=length))
    expected, read = truth(compiled, words), read_back(compiled)
    assert read.depth <= compiled.attending <= program.depth
    again = read.run(np.array(words, dtype=object).T).T
    return int((compiled.run(words) != expected).sum()), int((again != expected).sum())


@pytest.mark.parametrize("norm", sorted(SCALES))
@pytest.mark.parametrize("name", ["majority", "Dyck-1", "member of L3", "last block of L5", "nothing", "large factors"])
def test_a_program_is_compiled_and_read_back(name: str, norm: str) -> None:
    assert wrong_answers(*PROGRAMS[name], 6, norm) == (0, 0)


def test_the_largest_factors_are_told_apart() -> None:
    program = parse("x := 2000000000 * #[Q_a] > 1999999999 * #[Q_b]")
    assert compile_program(program, n_ctx=50_000).run(["ba" * 200])[0].tolist() == [False, True] * 200


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_read_back_to_length_10(name: str) -> None:
    source, alphabet = PROGRAMS[name]
    assert wrong_answers(source, alphabet, 10 if len(alphabet) < 3 else 7) == (0, 0)


def wrong_of_random(drawn: Expression) -> tuple[int, int]:
    """`wrong_answers` of a random program on words of 6 letters."""
    assume(drawn.multiplied <= 6)
    try:
        return wrong_answers(f"x := {drawn.text}", ALPHABET, 6)
    except ValueError as error:
        assume("too wide" not in str(error))
        raise


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(drawn=BOOLEANS)
def test_random_programs_are_compiled_and_read_back(drawn: Expression) -> None:
    assert wrong_of_random(drawn) == (0, 0)


@pytest.mark.slow
@settings(max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(drawn=BOOLEANS)
def test_2000_random_programs_are_compiled_and_read_back(drawn: Expression) -> None:
    assert wrong_of_random(drawn) == (0, 0)


def test_a_comparison_that_is_counted_needs_scaling() -> None:
    """Random words of 120 letters; the same weights with a constant in the norm's place count differences."""
    program = parse(compiler.gate_program(2))
    words = [["ab"[i] for i in row] for row in torch.randint(2, (20, 120), generator=torch.Generator().manual_seed(0))]

    def share_right(norm: str, **options: Any) -> float:
        compiled = compile_program(program, norm, n_ctx=121, **options)
        return float((compiled.run(words) == truth(compiled, words)).mean())

    assert share_right("layernorm") == share_right("scaling_only") == 1
    assert max(share_right("none"), share_right("projection_only"), share_right("layernorm", eps=1e-2)) < 1
    layers = [compile_program(parse(compiler.gate_program(depth))).model.cfg.n_layers for depth in (1, 2, 3)]
    assert layers == [1, 2, 3]


def test_an_altered_weight_is_another_program() -> None:
    compiled = compile_program(parse("x := #[Q_a] > #[Q_b]"), alphabet=ALPHABET, n_ctx=8)
    compiled.model.embed.W_E.data[[1, 2]] = compiled.model.embed.W_E.data[[2, 1]]
    words = np.array(list(itertools.product(ALPHABET, repeat=6)), dtype=object).T
    assert np.array_equal(read_back(compiled).run(words), parse("x := #[Q_b] > #[Q_a]").run(words))
    compiled = compile_program(parse("x := #[Q_a] <= #[Q_b]"), alphabet=ALPHABET, n_ctx=8)
    compiled.model.blocks[0].attn.W_O.data[0, 0] /= 2  # the smallest sums are less than the bends, but on their side
    assert np.array_equal(read_back(compiled).run(words), compiled.program.run(words))
    compiled = compile_program(parse("x := #[Q_a] > 2   y := #[Q_b] > 1   z := x and y"), n_ctx=8)
    block = compiled.model.blocks[0]
    seen = (block.attn.W_O[0] @ block.mlp.W_in).detach()  # [sum unit]
    units = [int(reads.nonzero()[0]) for reads in seen if reads.any()]
    block.mlp.W_in.data[:, units[0]] += block.mlp.W_in[:, units[1]].detach()
    with pytest.raises(ValueError, match="two sums"):
        read_back(compiled)


def test_what_no_number_can_be() -> None:
    """A number x with x + a and ±x + b below 0 or not: exact where the two bound it from both sides."""
    formula = Formulas().true
    for a, b, sign, below, other in itertools.product(
        range(-2, 3), range(-2, 3), (1, -1), (True, False), (True, False)
    ):
        meets = any((x + a < 0) == below and (sign * x + b < 0) == other for x in range(-9, 10))
        left, right = (Sum(((formula, 1),), a), below), (Sum(((formula, sign),), b), other)
        assert _possible(left, right) == meets
