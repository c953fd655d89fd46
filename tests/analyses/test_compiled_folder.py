"""A compiled program's folder: what is loaded from it does what the program does, and can be measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import ln_probe
from ln_probe.analyses.lab.arithmetic import Arithmetic, Precision
from ln_probe.analyses.lab.crasp import compiler, depth_task
from ln_probe.analyses.lab.crasp.crasp import Program, parse
from ln_probe.analyses.lab.crasp.crasp_compiler import CONSTRUCTIONS, compile_program, save_compiled
from ln_probe.analyses.lab.run_folder import arithmetic_of, load_run, load_tensors, save_tensors
from ln_probe.analyses.lab.train import step_generator
from ln_probe.cli import app
from ln_probe.hooks import find_sites

LETTERS = 200
RUNNER = CliRunner()
PROGRAMS = {
    name: compiler.PROGRAMS[name][0] for name in ("Dyck-1", "a^n b^n", "large factors", "largest factor", "a sum")
}
# The grid of this one is so fine that eps has to be finer still: 33 bits behind the point.
PROGRAMS |= {"finest": "x := 2147483647 * #[Q_a] > 2147483646 * #[Q_b]"}


def compiled_to(folder: Path, source: str, *options: str) -> Path:
    path = folder / "program.crasp"
    path.write_text(source, encoding="utf-8")
    done = RUNNER.invoke(
        app, ["lab", "compile", str(path), "--out", str(folder / "m"), "--letters", str(LETTERS), *options]
    )
    assert done.exit_code == 0, done.stderr
    return folder / "m"


def tokens(folder: Path, words: list[Any]) -> torch.Tensor:
    letters = json.loads((folder / "lab.json").read_text())["alphabet"]
    return torch.tensor([[0, *(letters.index(symbol) + 1 for symbol in word)] for word in words])


def said(model: torch.nn.Module, program: Program, given: torch.Tensor) -> np.ndarray:
    with torch.no_grad():
        logits = model(given)[:, 1:]
    if program.output.kind == "Boolean":
        return (logits[..., 1] > logits[..., 0]).numpy()
    return (logits[..., 1] / logits[..., 0]).nan_to_num(0.0).round().long().numpy()


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in ("Dyck-1", "a sum") else pytest.mark.slow) for n in PROGRAMS]
)
def test_what_is_loaded_does_what_the_program_does(name: str, construction: Any, tmp_path: Path) -> None:
    """By the command line and `load_model`, on random words of 200 letters, all right."""
    program = parse(PROGRAMS[name])
    if construction == "rounding" and program.output.kind == "count":
        pytest.skip("fixed precision has no room for counts")
    folder = compiled_to(tmp_path, PROGRAMS[name], "--construction", construction)
    model = ln_probe.load_model(folder, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert ln_probe.source_of(model).dtype == "float64"
    letters = json.loads((folder / "lab.json").read_text())["alphabet"]
    words = compiler.random_words(letters, LETTERS, 9, step_generator(0, 1))
    assert np.array_equal(said(model, program, tokens(folder, words)), compiler.interpreted(program, words))


@pytest.mark.parametrize("norm", ["scaling_only", "none"])
def test_rounding_is_installed_and_norms_are_on_the_grid_by_themselves(norm: str, tmp_path: Path) -> None:
    """As `fixed_precision` computes, to the bit; what norms return needs no rounding; hooks that are reset stay."""
    made = compile_program(parse(depth_task.DYCK_1), "rounding", norm, n_ctx=LETTERS + 1)
    model: Any = ln_probe.load_model(save_compiled(made, tmp_path / "m"), device="cpu")
    words = compiler.random_words("()", LETTERS, 6, step_generator(0, 2))
    given = made.tokens(words)
    model.reset_hooks()
    with torch.no_grad():
        assert torch.equal(model(given), made.logits(given))
        assert not torch.equal(model(given), made.model(given))  # which computes in real arithmetic
        _, cache = model.run_with_cache(given)
    outside = {name: x for name, x in cache.items() if not name.endswith(("attn_scores", "pattern"))}
    assert all(made.precision.holds(x) for x in outside.values())
    assert any("fixed precision" in note for note in ln_probe.source_of(model).notes)


def test_analyses_of_a_loaded_program(tmp_path: Path) -> None:
    """Norms are told as what they are, and come apart without a rest, with rounding too."""
    made = compile_program(parse(depth_task.DYCK_1), "rounding", "layernorm", n_ctx=64)
    model: Any = ln_probe.load_model(save_compiled(made, tmp_path / "m"), device="cpu")
    assert {site.kind for site in find_sites(model)} == {"layernorm"}
    given = made.tokens(["(())()" * 4, "())(()" * 4])
    report = ln_probe.analyze(model, prompts=given, probes=("decomposition",), progress=False)
    assert report.layernorms["reconstruction_error"].max() < 1e-12
    assert report.failures == ()
    assert report.layernorms["scale_cv"].max() == 0  # the divisor is the same on every word
    with torch.no_grad():
        before = model(given)
        with ln_probe.hooks.linearized(model, sigma="own"):
            assert torch.equal(model(given), before)
    with pytest.raises(ValueError, match="is not the sum of what embeddings, heads, MLPs and norms wrote"):
        ln_probe.attribute_logits(model, given[:1], -1, target=1)  # what is rounded is no sum


@pytest.mark.slow
def test_a_report_on_a_compiled_folder(tmp_path: Path) -> None:
    folder = compiled_to(tmp_path, depth_task.DYCK_1, "--construction", "rounding")
    np.save(tmp_path / "words.npy", tokens(folder, ["(())()" * 4, "())(()" * 4]).numpy())
    arguments = ["report", str(folder), "--prompts", str(tmp_path / "words.npy"), "--out", str(tmp_path / "out")]
    done = RUNNER.invoke(app, [*arguments, "--probes", "decomposition", "--quiet"])
    assert done.exit_code == 0, done.stderr
    (made,) = [path.parent for path in (tmp_path / "out").rglob("report.json")]
    report = ln_probe.load_report(made)
    assert report.provenance["model"]["dtype"] == "float64"
    assert report.layernorms["reconstruction_error"].max() < 1e-12
    assert report.failures == ()


@pytest.mark.parametrize("construction", CONSTRUCTIONS)
def test_another_format_is_refused_before_anything_is_written(construction: str, tmp_path: Path) -> None:
    folder = compiled_to(tmp_path, depth_task.MAJORITY, "--construction", construction)
    why = (
        "is a compiled program, which does what the program does in float64 alone: in float32 its comparisons are other"
    )
    with pytest.raises(ValueError, match=why):
        ln_probe.load_model(folder, device="cpu", dtype="float32")
    assert ln_probe.load_model(folder, device="cpu", dtype="float64").training is False
    out = tmp_path / "out"
    refused = RUNNER.invoke(app, ["report", str(folder), "--dtype", "float32", "--out", str(out), "--quiet"])
    assert refused.exit_code == 2
    assert why in " ".join(refused.stderr.split())
    assert "Leave dtype (--dtype) out, or give float64" in " ".join(refused.stderr.split())
    assert not (out / "index.html").exists()


def test_a_folder_that_does_not_say_how_it_computes(tmp_path: Path) -> None:
    made = compile_program(parse(depth_task.MAJORITY), "rounding", n_ctx=9)
    folder = save_compiled(made, tmp_path / "m")
    assert arithmetic_of(folder) == Arithmetic(torch.float64, True, made.precision)
    whole = json.loads((folder / "lab.json").read_text())
    tensors, _ = load_tensors(folder / "model.safetensors")
    assert {t.dtype for t in tensors.values()} == {torch.float64}

    def described(**changed: Any) -> None:
        (folder / "lab.json").write_text(json.dumps({k: v for k, v in (whole | changed).items() if v != "left out"}))

    described(precision={"bits": 9, "fraction": 1})
    with pytest.raises(ValueError, match=r"lab\.json is not what it was when .* was written: restore it"):
        load_run(folder)
    save_tensors(tensors, folder / "model.safetensors")  # and now nothing says what lab.json was
    for wrong in ({"dtype": "float16"}, {"precision": {"bits": 1, "fraction": 0}}, {"precision": 3}):
        described(**wrong)
        with pytest.raises(ValueError, match="does not say in which numbers its model computes"):
            load_run(folder)
    described(dtype="left out")
    with pytest.raises(ValueError, match="compiled by an earlier version of ln_probe, which saved it in float32"):
        load_run(folder)
    (folder / "lab.json").write_text("[]")
    with pytest.raises(ValueError, match="does not describe a lab model"):
        load_run(folder)


def test_an_eps_that_only_a_rounded_norm_would_lose(tmp_path: Path) -> None:
    made = compile_program(parse(depth_task.MAJORITY), "rounding", eps=1e-5, n_ctx=9)
    with pytest.raises(ValueError, match=r"eps 1e-05 is lost only where norms round, .* compile without eps"):
        save_compiled(made, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    save_compiled(compile_program(parse(depth_task.MAJORITY), "rounding", "none", eps=1e-5, n_ctx=9), tmp_path / "n")
    assert Precision(8, 3).absorbs(1e-30)
    assert not Precision(80, 60).absorbs(1e-30)
