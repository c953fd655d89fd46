"""C-RASP compiled to weights: agreement with the interpreter, depth, fixed precision, what suffices, bad input."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crasp_reference import BOOLEANS, COUNTS, Expression
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ln_probe.analyses.lab.arithmetic import Precision, fixed_precision
from ln_probe.analyses.lab.crasp import compiler, depth_task
from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse
from ln_probe.analyses.lab.crasp.crasp_compiler import CONSTRUCTIONS, CompiledProgram, compile_program
from ln_probe.analyses.lab.crasp.depth_task import gate_program
from ln_probe.analyses.lab.crasp.lowering import FALSE, TRUE, Decisions
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES
from ln_probe.analyses.lab.results import folder, table_at
from ln_probe.analyses.lab.run_folder import load_run
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.cli import app
from ln_probe.hooks import find_sites

SUFFICE = {"scaling": sorted(SCALES), "clip": NORM_KINDS, "rounding": NORM_KINDS}
MAJORITY_TWICE = gate_program(2)
PROGRAMS = {  # the smaller ones of the experiment's, and what this file alone tries
    name: compiler.PROGRAMS[name][0]
    for name in ("majority", "Dyck-1", "a^n b^n c^n", "last block of L5", "nothing", "cases, counted", "large factors")
} | {"a letter": "x := not Q_a or Q_b"}  # fmt: skip


FIRST_WRONG_WITH_ALIBI = 13  # the n from which on a^n b^(n-1) has no majority of a's


def every_word(compiled: CompiledProgram, length: int) -> list[tuple[str, ...]]:
    """All words of a length; their prefixes are all shorter ones, and are answered on the way."""
    return list(itertools.product(compiled.alphabet, repeat=length))


def truth(compiled: CompiledProgram, words: list[Any]) -> np.ndarray:
    return np.stack([compiled.program.run(list(word)) for word in words])


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_every_short_word(name: str, construction: Any) -> None:
    """Under the first and the last norm that suffices; all of them, and longer words: the slow test below."""
    program = parse(PROGRAMS[name])
    for norm in (SUFFICE[construction][0], SUFFICE[construction][-1]):
        compiled = compile_program(program, construction, norm, n_ctx=64)
        words = every_word(compiled, 5 if len(compiled.alphabet) < 3 else 4)
        assert np.array_equal(compiled.run(words), truth(compiled, words)), norm
        assert compiled.attending <= program.depth
        assert compiled.layers == max(1, program.depth) or construction != "rounding"


@pytest.mark.parametrize("construction", ["scaling", "clip"])
def test_outputs_that_are_counts(construction: Any) -> None:
    for name in ("cases", "a constant", "a choice", "a sum", "counted comparison"):
        program = parse(compiler.PROGRAMS[name][0])
        for norm in SUFFICE[construction]:
            compiled = compile_program(program, construction, norm, alphabet="ab", n_ctx=64)
            words = every_word(compiled, 6)
            assert np.array_equal(compiled.run(words), truth(compiled, words)), (name, norm)
            assert compiled.attending == max(1, program.depth)


def with_positions(compiled: CompiledProgram, positions: Any) -> CompiledProgram:
    """The same weights in a model with positions; a head gets a second dimension, which rotary positions turn."""
    old = compiled.model
    size = old.cfg.d_head + old.cfg.d_head % 2
    model = LabTransformer(replace(old.cfg, positions=positions, d_head=size)).double()
    weights = {name: torch.zeros_like(model.state_dict()[name]) for name in old.state_dict()}
    for name, own in old.state_dict().items():
        weights[name][tuple(slice(n) for n in own.shape)] = own
    model.load_state_dict(weights)
    return replace(compiled, model=model.eval())


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_positions_in_a_compiled_program(construction: Any) -> None:
    """Its queries are 0, so rotary positions turn nothing. ALiBi adds to every score, and counts are discounted."""
    for name in PROGRAMS:
        plain = compile_program(parse(PROGRAMS[name]), construction, n_ctx=64)
        words = compiler.random_words(plain.alphabet, 40, 9, torch.Generator().manual_seed(0))
        assert np.array_equal(with_positions(plain, "rotary").run(words), truth(plain, words)), name
    majority = compile_program(parse(PROGRAMS["majority"]), construction, n_ctx=64)
    biased = with_positions(majority, "alibi")
    right = [bool(biased.run([n * "a" + (n - 1) * "b"])[0, -1]) for n in range(2, 31)]
    assert right == [n < FIRST_WRONG_WITH_ALIBI for n in range(2, 31)]
    lag = np.arange(2 * FIRST_WRONG_WITH_ALIBI)  # by hand: the last letter has lag 0, BOS half a vote for "no"
    for n, holds in ((FIRST_WRONG_WITH_ALIBI - 1, True), (FIRST_WRONG_WITH_ALIBI, False)):
        votes = np.r_[-np.ones(n - 1), np.ones(n), -0.5]
        assert (votes @ np.exp(-(2.0**-8) * lag[: 2 * n]) > 0) == holds


@settings(max_examples=40, deadline=None)
@given(drawn=st.one_of(BOOLEANS, COUNTS), word=st.text("ab", min_size=1, max_size=9), data=st.data())
def test_random_programs_by_definition(drawn: Expression, word: str, data: st.DataObject) -> None:
    program = parse(f"x := {drawn.text}")
    boolean = program.output.kind == "Boolean"
    construction = data.draw(st.sampled_from(CONSTRUCTIONS if boolean else CONSTRUCTIONS[:2]))
    norm = data.draw(st.sampled_from(SUFFICE[construction]))
    try:
        compiled = compile_program(program, construction, norm, alphabet="ab", n_ctx=16, max_width=1024)
    except CRaspError as error:
        assume("too wide" not in str(error))
        raise
    assert compiled.run([word])[0].tolist() == drawn.at(word)
    # With rounding all layers are no more than the depth, otherwise those that attend.
    assert compiled.attending <= program.depth or not boolean
    assert (compiled.layers if construction == "rounding" else compiled.attending) <= max(1, program.depth)


SIMPLER = "y := #[#[Q_a] > 0 and not #[Q_a] > 0] > 0"  # what is counted never holds: one layer answers


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_fewer_layers_than_depth(construction: Any) -> None:
    compiled = compile_program(parse(SIMPLER), construction, alphabet="ab", n_ctx=16)
    assert (compiled.depth, compiled.layers) == (2, 1)
    words = every_word(compiled, 4)
    assert np.array_equal(compiled.run(words), truth(compiled, words))


def test_a_comparison_that_is_read_has_a_layer_a_level() -> None:
    assert [compile_program(parse(gate_program(depth)), "scaling").layers for depth in (1, 2, 3)] == [1, 2, 3]


def test_a_comparison_that_is_counted_needs_scaling_or_a_clip_or_rounding() -> None:
    """Random words of 120 letters; scaling's weights with a constant in the norm's place count differences."""
    program = parse(MAJORITY_TWICE)
    words = [["ab"[i] for i in row] for row in torch.randint(2, (20, 120), generator=torch.Generator().manual_seed(0))]

    def share_right(construction: Any, norm: str, rounding: Any = "down", **options: Any) -> float:
        compiled = compile_program(program, construction, norm, n_ctx=121, **options)
        return float((compiled.run(words, rounding) == truth(compiled, words)).mean())

    assert share_right("scaling", "layernorm") == share_right("scaling", "scaling_only") == 1
    assert share_right("scaling", "none") < 0.9
    assert share_right("scaling", "projection_only") < 0.9
    assert share_right("clip", "none") == share_right("rounding", "none") == 1
    assert share_right("clip", "none", clip_to=9) < 1
    assert share_right("rounding", "none", "nearest") < 0.9
    assert share_right("rounding", "none", None) < 0.9  # in real arithmetic nothing sharpens
    assert share_right("scaling", "layernorm", eps=1e-2) < 1


def test_fixed_precision_holds_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compile_program(parse(depth_task.L_5), "rounding", "layernorm", n_ctx=300)
    grid = compiled.precision
    assert grid is not None
    assert grid.misfits(compiled.model) == []
    words = [["a"] * 299, ["b"] * 299, ["a", "b"] * 149 + ["a"]]
    with fixed_precision(compiled.model, grid):
        _, cache = compiled.model.run_with_cache(compiled.tokens(words))
    outside = {name: x for name, x in cache.items() if not name.endswith(("attn_scores", "pattern"))}
    assert all(grid.holds(x) for x in outside.values())
    largest = max(float(x.abs().max()) for x in outside.values())
    assert largest <= 2.0 ** (grid.bits - 1) * grid.step, "nothing was cut off at the grid's end"
    assert not grid.holds(cache["blocks.0.attn.hook_pattern"])
    assert np.array_equal(compiled.run(words), truth(compiled, words))
    compiled.model.blocks[0].mlp.W_in.data[0, 0] = 1 / 3
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp\.W_in has numbers that Precision\(.*\) does not hold"):
        compiled.run(words)


def test_rounding() -> None:
    grid = Precision(bits=4, fraction=1)  # -4, -3.5, … 3.5
    x = torch.tensor([-9.0, -0.01, 0.0, 0.49, 0.74, 0.76, 9.0], dtype=torch.float64)
    assert grid.round(x).tolist() == [-4, -0.5, 0, 0, 0.5, 0.5, 3.5]
    assert grid.round(x, "nearest").tolist() == [-4, 0, 0, 0.5, 0.5, 1.0, 3.5]
    with pytest.raises(ValueError, match="no fixed-point numbers of 1 bits"):
        Precision(1, 0)
    model = LabConfig(1, 4, 1, 3, 8).build()
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.zero_()
    with pytest.raises(ValueError, match=r"made of float64: use model\.double\(\)"), fixed_precision(model, grid):
        pass


@pytest.mark.parametrize(("source", "options", "line", "column", "said"), [
    ("x := #[Q_a] > 0\ny := #[x and #[x] > 1] > 0", {"max_layers": 2}, 2, 6,
     "too deep: this count needs 3 layers; expected at most 2 (max_layers)"),
    ("x := #[Q_a] > 0 and #[Q_b] > 0\n  and #[Q_b] > 1", {"construction": "scaling", "max_layers": 1}, 1, 6,
     "too deep: this takes 2 layers; expected at most 1 (max_layers)"),
    ("c := " + " + ".join(f"(#[Q_a] > {i} ? {2**i} : 0)" for i in range(9)), {"construction": "clip"}, 1, 7,
     "too wide: this count has more than 256 cases; expected fewer choices"),
    ("x := " + " or\n ".join(f"#[Q_a] == 2 * #[Q_b] + {i}" for i in range(40)), {"max_width": 64}, 40, 2,
     "too wide: this takes 1024 units or entries; expected at most 64 (max_width)"),
    ("\n  n := #[Q_a] + 1", {}, 2, 8,
     "unsupported: the output is a count; expected a Boolean, since fixed precision has no room for counts, or"),
    ("x := 2147483647 * #[Q_a] > 2147483646 * #[Q_b]", {"construction": "clip", "n_ctx": 10**6}, 1, 6,
     "too wide: a sum of up to 8589934586 per letter, which float64 does not tell from 0; expected smaller factors"),
])  # fmt: skip
def test_what_does_not_fit_is_named_with_its_place(
    source: str, options: dict[str, Any], line: int, column: int, said: str
) -> None:
    with pytest.raises(CRaspError) as caught:
        compile_program(parse(source), options.pop("construction", "rounding"), **options)
    assert str(caught.value).startswith(f"line {line}, column {column}: {said}")
    assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize(("options", "said"), [
    ({"construction": "hardmax"}, "unknown construction 'hardmax': known ones are scaling, clip, rounding"),
    ({"norm": "batchnorm"}, "unknown norm 'batchnorm': known norms are layernorm"),
    ({"n_ctx": 1}, "1 positions have no room for BOS and a letter: at least 2"),
    ({"eps": -1.0}, "eps must not be negative, got -1.0"),
    ({"max_width": 0}, "max_width must be at least 1, got 0"),
    ({"alphabet": "aba"}, "the alphabet has a symbol twice: a, b, a"),
    ({"alphabet": ""}, "the alphabet is empty, and words are made of symbols: give one"),
])  # fmt: skip
def test_bad_arguments(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compile_program(parse(depth_task.MAJORITY), **options)


def test_words_that_cannot_be_run() -> None:
    with pytest.raises(
        ValueError, match="the program names no symbol, and words are made of symbols: give an alphabet"
    ):
        compile_program(parse("x := #[true] > 1"))
    compiled = compile_program(parse(depth_task.MAJORITY), n_ctx=4)
    with pytest.raises(ValueError, match="words of different lengths"):
        compiled.run(["a", "ab"])
    with pytest.raises(ValueError, match="'c' is no symbol of the alphabet a, b"):
        compiled.run(["abc"])
    with pytest.raises(ValueError, match="5 tokens are more than the context of 4"):
        compiled.run(["abab"])
    assert compile_program(parse("x := #[Q_c] > 0"), alphabet="ab", n_ctx=4).run(["ab"]).tolist() == [[False, False]]


TESTS = st.deferred(lambda: st.one_of(st.integers(0, 3), st.tuples(TESTS, TESTS, TESTS)))


@settings(max_examples=30, deadline=None)
@given(TESTS)
def test_decisions_by_truth_tables(node: Any) -> None:
    """`choose` of random functions of 4 variables: its values, its ways, and one number for one function."""
    store, rows = Decisions(), list(itertools.product((False, True), repeat=4))

    def made(node: Any) -> int:
        return store.variable(node) if isinstance(node, int) else store.choose(*map(made, node))

    def value(node: Any, row: tuple[bool, ...]) -> bool:
        if isinstance(node, int):
            return row[node]
        return value(node[1] if value(node[0], row) else node[2], row)

    function, table = made(node), [value(node, row) for row in rows]
    assert [store.evaluate(function, row.__getitem__) for row in rows] == table
    minterms = FALSE
    for row in itertools.compress(rows, table):
        here = TRUE
        for variable, holds in enumerate(row):
            literal = store.variable(variable)
            here = store.both(here, literal if holds else store.negate(literal))
        minterms = store.either(minterms, here)
    assert minterms == function
    for end, wanted in ((TRUE, table), (FALSE, [not x for x in table])):
        ways = list(store.ways(function, end))
        assert len(ways) == store.count_ways(function, end)
        assert [sum(all(row[v] == x for v, x in way.items()) for way in ways) for row in rows] == list(map(int, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", compiler.PROGRAMS)
def test_every_program_under_each_norm_that_suffices(name: str) -> None:
    """On all words up to length 8 and 1,000 random ones of length 200."""
    rows = compiler.agreement(name, 1, 1000, 8)
    wrong = [row for row in rows if row["suffices"] and row["value"] < 1]
    assert wrong == []
    assert {(row["construction"], row["norm"]) for row in rows if row["suffices"]} >= {
        (construction, norm) for construction in ("scaling", "clip") for norm in SUFFICE[construction]
    }


@pytest.mark.slow
def test_depth_198() -> None:
    program = parse(depth_task.last_block(200))
    compiled = compile_program(program, "rounding", "layernorm", n_ctx=402)
    assert compiled.layers == program.depth == 198
    words = ["aabb" * 100, "ab" * 200, "a" * 398 + "ba"]
    assert np.array_equal(compiled.run(words), truth(compiled, words))


@pytest.mark.slow
def test_the_experiment_and_what_it_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two programs, few words; a run that goes on reads what was measured; operations by their verdicts."""
    kept = {name: compiler.PROGRAMS[name] for name in ("majority of majorities, depth 2", "two symbols")}
    monkeypatch.setattr(compiler, "PROGRAMS", kept)
    monkeypatch.setattr(compiler, "QUICK_WORDS", 6)
    monkeypatch.setattr(compiler, "FEW_WORDS", 6)
    monkeypatch.setattr(compiler, "LENGTHS", (40, 80))
    monkeypatch.setattr(compiler, "LETTERS", 60)
    monkeypatch.setattr(compiler, "EVERY_WORD_TO", 5)
    request = Request(tmp_path, (0,), quick=True, progress=False)
    results = compiler.run(request)
    table = results.tables["agreement"]
    assert (table.loc[table["suffices"], "value"] == 1).all()
    assert len(table) == 4 * (12 + 8)  # measures; a count has no place in fixed precision
    assert "scaling under layernorm, scaling_only: 4 of 4 models right on every word." in results.conclusions
    assert any(
        s.startswith("scaling under projection_only, none (does not suffice): 2 of 4") for s in results.conclusions
    )
    verdicts = results.tables["operations"].set_index("operation")["exact_with"]
    assert verdicts["COMPARE, read at the end"] == verdicts["COUNTING"] == "neither"
    assert verdicts["COMPARE, counted"] == "scaling or clip or rounding"
    assert verdicts["CONDITIONAL on a comparison, as a count"] == "a bound for the length"
    said = "MIN, MAX as a count: as compiled exact with a bound for the length, in principle with neither."
    assert said in results.conclusions
    monkeypatch.setattr(compiler, "agreement", lambda *args: pytest.fail("measured twice"))
    assert compiler.run(request).tables["agreement"].equals(table)


def test_the_kept_operations_say_what_they_are_exact_with() -> None:
    kept = table_at(folder("compiler"), "operations")
    assert list(kept["operation"]) == list(compiler.OPERATIONS)
    assert [compiler.exact_with(row) for row in kept.to_dict("records")] == list(kept["exact_with"])


def test_a_compiled_folder_loads_and_commands_refuse(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.crasp", tmp_path / "bad.crasp"
    good.write_text(depth_task.DYCK_1)
    bad.write_text("n := 1 +\n  #[Q_a]")
    done = CliRunner().invoke(app, ["lab", "compile", str(good), "--out", str(tmp_path / "m"), "--letters", "30"])
    assert done.exit_code == 0, done.stderr
    assert "depth 2, 3 layers (2 attend), d_model 64, tokens BOS ( )" in done.stdout
    loaded, compiled = load_run(tmp_path / "m"), compile_program(parse(depth_task.DYCK_1), n_ctx=31)
    tokens = compiled.tokens(["(())()", "())(()"])
    said = loaded(tokens)[:, 1:]
    assert np.array_equal((said[..., 1] > said[..., 0]).numpy(), compiled.run(["(())()", "())(()"]))
    site = find_sites(compiled.model)[0]
    assert (site.kind, site.eps) == ("layernorm", pytest.approx(1e-30))
    marked = tmp_path / "marked.crasp"  # with a byte order mark, as an editor on Windows may leave it
    marked.write_text("x := #[Q_a] > 0", encoding="utf-8-sig")
    for path, options, shown in (
        (marked, ["--alphabet", ""], "ln-probe: the alphabet is empty"),
        (bad, ["--construction", "rounding"], "line 1, column 6: unsupported: the output is a count"),
        (bad, ["--construction", "hardmax"], "unknown construction 'hardmax': known ones are scaling, clip, rounding"),
        (bad, ["--norm", "batchnorm"], "unknown norm 'batchnorm'"),
        (marked, ["--norm", "batchnorm"], "ln-probe: unknown norm 'batchnorm'"),
        (tmp_path / "none.crasp", [], "none.crasp: No such file or directory\n"),
        (tmp_path, [], f"ln-probe: {tmp_path}: a folder, not a file"),
        (marked, ["--out", str(bad)], f"ln-probe: cannot write to {bad} (Not a directory): choose another --out"),
        (bad, ["--out", str(tmp_path / "m")], "holds another run (not the same: alphabet, model, program)"),
    ):
        arguments = ["lab", "compile", str(path), "--out", str(tmp_path / "n"), *options]
        refused = CliRunner().invoke(app, arguments)
        assert refused.exit_code == 2
        assert shown in refused.stderr
