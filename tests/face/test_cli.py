"""The command line as a user runs it, and bad values: each is shown, with what is allowed; none is called a fault of
ln_probe."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from faulty import PROBES, command, ends, lab_model, report, without_pages, write_prompts
from typer.main import get_command
from typer.testing import CliRunner

import ln_probe
from ln_probe.analyses.lab import experiments
from ln_probe.analyses.lab.experiments import EXPERIMENTS, Experiment, Request
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.analyses.probes.registry import BUILT_IN
from ln_probe.batch import exits
from ln_probe.batch.options import MEASURED, MODELS, OUTPUT, PROMPTS, WORK
from ln_probe.batch.suite import SuiteError, suite
from ln_probe.cli import app

runner = CliRunner()
GROUPS = (MODELS, PROMPTS, MEASURED, WORK, OUTPUT)
LONG, DIGITS, SUPERSCRIPT = "a" * 5000, "9" * 5000, "²"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)


def test_a_vocabulary_names_the_tokens_of_a_model_without_a_tokenizer(capp: Path, tmp_path: Path) -> None:
    names = {str(i): f"part-{i}" for i in range(json.loads((capp / "config.json").read_text())["vocab_size"])}
    (tmp_path / "names.json").write_text(json.dumps(names))
    asked = ("--max-tokens", 8, "--max-prompts", 4, "--probes", "sinks,decomposition", "--layers", "0")
    ends(0, report, capp, "--out", tmp_path / "r", *asked, "--vocab", tmp_path / "names.json")
    about = ln_probe.load_report(tmp_path / "r" / "capp_gpt").provenance["prompts"]
    assert all(text.startswith("part-") for text in about["begin"])
    assert about["count"] == 4  # of the sequences that it is sampled, too
    _, said = ends(2, report, capp, "--out", tmp_path / "s", *asked, "--vocab", tmp_path / "missing.json")
    assert "missing.json" in said


def test_one_number_alone(capp: Path, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).integers(1, 20, size=(3, 9))
    np.save(tmp_path / "rows.npy", rows)
    asked = ["freezing-cost", str(capp), "--prompts", str(tmp_path / "rows.npy"), "--quiet"]
    found = json.loads(runner.invoke(app, [*asked, "--json", "--max-prompts", "2"]).stdout)
    wanted = ln_probe.freezing_cost(ln_probe.load_model(capp), rows[:2].tolist(), progress=False)
    assert found["estimate"] == pytest.approx(wanted.estimate, rel=1e-5)
    assert (found["low"], found["prompts"]["count"], len(found["contrasts"])) == (None, 2, 4)
    assert found["constants"]["pooled"].keys() == wanted.constants.pooled.keys()
    few = ("freezing-cost", "lm-none", "--json", "--quiet", "--max-prompts", "2", "--max-tokens", "16")
    about = json.loads(runner.invoke(app, few).stdout)["prompts"]  # of the default ones, as in a report
    assert (about["count"], about["tokens"], about["source"].startswith("held-out")) == (2, 32, True), about
    said = runner.invoke(app, asked).stdout
    assert re.search(r"^scaling frozen, every norm +[+-]0\.\d+", said, re.MULTILINE), said
    assert "prompts: rows.npy, 27 tokens" in said
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (("nothere",), 1, "No model is called 'nothere'. Nearest known names: "),
        (("lm-none", "--prompts", "missing.txt"), 2, "no prompts file 'missing.txt'"),
        (("lm-none", "--calibration", "."), 2, "--calibration . is a folder: give a .txt, .jsonl or .npy file"),
        (("lm-none", "--max-tokens", "1"), 2, "'1' is not a whole number from 2"),
        (("lm-none", "--dtype", "int8"), 2, "int8"),
    ],
)
def test_one_number_that_cannot_be_had(asked: tuple[str, ...], code: int, said: str) -> None:
    ended = runner.invoke(app, ["freezing-cost", *asked, "--quiet"])
    assert (ended.exit_code, ended.stdout) == (code, "")
    assert said in ended.stderr


@pytest.mark.parametrize(("options", "said"), [
    (["--prompts", "empty.txt"], "no prompts (empty.txt is empty): give at least one"),
    (["--prompts", "cut.jsonl"], "cut.jsonl, line 2: not JSON (Expecting property name enclosed in double quotes, "),
    (["--prompts", "abc.npy"], "abc.npy is not a plain .npy file of token ids: it has another format"),
    (["--calibration", "empty.txt"], "--calibration: no prompts (empty.txt is empty): give at least one"),
    (["--calibration", "cut.jsonl"], "--calibration: cut.jsonl, line 2: not JSON"),
    (["--calibration", "nothing.txt"], "--calibration: no prompts file 'nothing.txt'"),
    (["--calibration", "hf:some/data"], "--calibration hf:some/data is a data set: give a .txt, .jsonl or .npy file"),
    (["--calibration", "again.jsonl"], "--calibration again.jsonl holds the prompts that are measured: leave it out"),
    (["--groups", "two.txt"], "--groups two.txt holds 2 labels for 3 prompts: write one label a line"),
    (["--groups", "three.txt", "--max-prompts", "1"], "--groups three.txt holds 3 labels for 1 prompt: "),
    (["--groups", "nothing.txt"], "--groups: no groups file 'nothing.txt': give a UTF-8 text file with a label a line"),
    (["--groups", "latin.txt"], "--groups: latin.txt: not UTF-8 text (byte 0): give a UTF-8 text file with a label"),
    (["--groups", "."], "--groups: .: a folder, not a file: give a UTF-8 text file with a label a line"),
])  # fmt: skip
def test_files_are_read_before_a_model_is_loaded(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, prompts = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    content = {"empty.txt": b"", "cut.jsonl": b'{"tokens": [1, 2]}\n{,\n', "abc.npy": b"abc", "latin.txt": b"\xe9\n"}
    content |= {"again.jsonl": prompts.read_bytes(), "two.txt": b"a\nb\n", "three.txt": b"a\nb\nb\n"}
    for name, held in content.items():
        (tmp_path / name).write_bytes(held)
    monkeypatch.setattr(ln_probe, "load_model", None)
    for asked in (["report", "--out", "out"], ["plan"], ["freezing-cost"]):
        code, printed, heard = command(*asked, model, "--quiet", "--prompts", prompts.name, *options)
        assert (code, printed) == (2, "")
        assert heard.startswith(f"ln-probe: {said}")
        assert len(heard.splitlines()) == 1
        assert not (tmp_path / "out").exists()


def test_a_failing_model_leaves_the_others_done(capp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # pages are drawn
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((capp / "config.json").read_text())
    (broken / "model.safetensors").write_bytes((capp / "model.safetensors").read_bytes()[:5000])
    out = tmp_path / "reports"
    printed, said = ends(
        1, report, broken, capp, "--out", out, "--max-tokens", 12, "--probes", "decomposition", "--json"
    )
    assert [bool(model["error"]) for model in json.loads(printed)["models"]] == [True, False]
    assert (out / "capp_gpt" / "report.html").exists()
    for text in (said, (out / "index.html").read_text()):
        assert "failed:" in text
        assert "truncated or corrupt" in text
    assert not (out / "broken").exists()


@pytest.mark.slow
def test_heads_and_layers_are_chosen(capp: Path, tmp_path: Path) -> None:
    out = tmp_path / "reports"
    ends(0, report, capp, "--out", out, "--max-tokens", 12, "--heads", "0,2-3", "--layers", "0,2-3")
    made = ln_probe.load_report(out / "capp_gpt")
    assert set(made.heads["layer"]) == {0, 2, 3}
    assert set(made.heads.loc[made.heads["space"] == "head", "head"]) == {0, 2, 3}
    assert made.exhibits.attention[0].heads == (0, 2, 3)
    _, said = ends(2, report, capp, "--out", out, "--heads", "0,99")
    assert "no head 99: " in said
    assert "capp_gpt has heads 0 … " in said


def test_options_from_a_file(capp: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "suite.toml", tmp_path / "reports"
    config.write_text(
        f"model = ['{capp}']\nmax-tokens = 9\nprobes = ['decomposition', 'uniformity']\nlayers = [0, 2]\nseed = 4\n"
        f"out = '{tmp_path / 'elsewhere'}'\njson = true\n"
    )
    line = ["report", "--quiet", "--workers", 0, "--config", config, "--out", out, "--seed", 5]
    printed, _ = ends(0, command, *line)
    assert json.loads(printed)["models"][0]["model"] == str(capp)
    asked = ln_probe.load_report(out / "capp_gpt").provenance["request"]
    assert {k: asked[k] for k in ("max_tokens", "probes", "layers", "seed")} == {
        "max_tokens": 9, "probes": ["decomposition", "uniformity"], "layers": [0, 2], "seed": 5,
    }  # fmt: skip
    assert not (tmp_path / "elsewhere").exists(), "options on the command line override the file"


@pytest.mark.parametrize(("text", "said"), [
    ("max-token = 3", "unknown option 'max-token'; report takes address, allow-pickle, batch-size, calibration"),
    ("[report]\nseed = 1", "unknown option 'report'; report takes"),
    ("config = 'b.toml'", "unknown option 'config'"),
    ("seed = 1979-05-27", "seed is datetime.date(1979, 5, 27): an option is a text, a number, true or false"),
    ("layers = [[1]]", "layers is [[1]]: an option is a text"),
    ("seed =", "cannot be read (Invalid value (at"),
    ("max-tokens = 0", "a.toml: max-tokens is 0: '0' is not a whole number from 2 to"),
    ("allow-pickle = 'perhaps'", "a.toml: allow-pickle is 'perhaps': "),
    ("optimal = 3", "a.toml: optimal is 3: "),
    ("gpus = -1", "a.toml: gpus is -1: '-1' is not a number of GPUs"),
    (None, "cannot be read (No such file or directory)"),
])  # fmt: skip
def test_a_file_of_options_that_makes_no_sense(text: str | None, said: str, tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    if text is not None:
        config.write_text(text)
    _, error = ends(2, report, "x", "--config", config, "--out", tmp_path / "out")
    assert said in error
    assert not (tmp_path / "out").exists()


def test_a_folder_of_checkpoints_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    for step in (0, 100, 2000):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    _, said = ends(2, report, tmp_path / "run", "--out", tmp_path / "out")
    assert "run is no checkpoint, it holds 3 of them (steps 0, 100, 2000): add --checkpoints all, or --chec" in said


# -------------------------------------------------------------------------------------------------------- bad values

STEPS, RANGES = "--checkpoints takes 'all' or training steps such as 0,1000, got ", "--layers takes numbers and ranges"
SLICE, NUMBER = "--unit takes K/N with K from 1 to N, such as 3/16, got ", " is not a whole number from "


@pytest.mark.parametrize(("options", "said"), [
    (["--checkpoints", SUPERSCRIPT], STEPS + "'²'"),
    (["--checkpoints", DIGITS], STEPS + "'" + "9" * 60 + "'… (5000 characters)"),
    (["--checkpoints", "٣"], STEPS + "'٣'"),
    (["--checkpoints", "last"], STEPS + "'last'"),
    (["--unit", "²/3"], SLICE + "'²/3'"),
    (["--unit", "0/3"], SLICE + "'0/3'"),
    (["--unit", "4/3"], SLICE + "'4/3'"),
    (["--unit", f"1/{DIGITS}"], SLICE + "'1/999"),
    (["--unit", "1/2", "--fresh"], "--fresh would delete what other slices have done"),
    (["--layers", "0-²"], RANGES + " such as 0,3-5, got '0-²'"),
    (["--layers", "a-b"], RANGES + " such as 0,3-5, got 'a-b'"),
    (["--layers", "9" * 50], RANGES + " such as 0,3-5, got '99999"),
    (["--layers", "5-3"], "names no layer"),
    (["--layers", "0-999999999"], "--layers '0-999999999': no model has a layer 999999999"),
    (["--layers", "9"], "no layer 9: {model} has layers 0 … 0"),
    (["--dtype", "int8"], "dtype must be one of float32, float64, bfloat16, float16, got 'int8'"),
    (["--device", "gpu"], "device must be 'cpu', 'cuda', 'cuda:0', …, got 'gpu'"),
    (["--keys", "few"], "--keys must be one of hardest, all, got 'few'"),
    (["--engine", "slurm"], "--engine must be one of local, ray, got 'slurm'"),
    (["--shard", "9" * 30], f"'{'9' * 30}'{NUMBER}1 to 1000000000"),
    (["--shard", DIGITS], f"(5000 characters){NUMBER}1 to 1000000000"),
    (["--shard", SUPERSCRIPT], f"'²'{NUMBER}1 to 1000000000"),
    (["--shard", "0"], f"'0'{NUMBER}1 to 1000000000"),
    (["--max-tokens", "0"], f"'0'{NUMBER}2 to 1000000000"),
    (["--max-tokens", "-1"], f"'-1'{NUMBER}2 to 1000000000"),
    (["--seed", "9" * 30], f"'{'9' * 30}'{NUMBER}0 to 1000000000000000000"),
    (["--workers", "many"], f"'many'{NUMBER}0 to 1000000000"),
    (["--keys-sample", "1.5"], f"'1.5'{NUMBER}0 to 1000000000"),
    (["--prompts", "nothing.txt"], "no prompts file 'nothing.txt'"),
    (["--prompts", LONG], "no prompts file '" + "a" * 200 + "'… (5000 characters)"),
    (["--prompts", f"x/{'a' * 300}/y.txt"], "no prompts file 'x/aaaa"),
    (["--prompts", "/"], "--prompts '/': no data set. A folder of prompts holds what Dataset.save_to_disk wrote, or"),
    (["--prompts", "\udcff"], r"no prompts file '\udcff'"),
    (["--prompts", "hf:some/data?splitt=train"], "there is no option 'splitt'"),
    (["--vocab", LONG], " characters) is not a readable vocabulary: File name too long"),
    (["--probes", "\udcff"], r"unknown probe '\udcff': choose from decomposition"),
    (["--probes", "magic"], "unknown probe 'magic': choose from decomposition, selectability, uniformity"),
    (["--probes", " , "], "names no probe"),
    (["--config", LONG], "cannot be read (File name too long)"),
    (["--gpus", "nan", "--engine", "ray"], "'nan' is not a number of GPUs per worker, 0 or more"),
    (["--gpus", "-1", "--engine", "ray"], "'-1' is not a number of GPUs per worker, 0 or more"),
    (["--gpus", "x", "--engine", "ray"], "'x' is not a number of GPUs per worker, 0 or more"),
    (["--gpus", "3"], "--address and --gpus are about a Ray cluster: add --engine ray, or leave them out"),
    (["--address", "auto"], "--address and --gpus are about a Ray cluster: add --engine ray, or leave them out"),
    (["--dry-run", "--unit", "x"], SLICE + "'x'"),
    (["--out", ""], "'--out': the name is empty: give a path"),
    (["{model}"], "is given twice"),
])  # fmt: skip
def test_b06_c10_options(options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged once, and before anything is written."""
    monkeypatch.setenv("COLUMNS", "6000")  # typer wraps its messages
    model, out = lab_model(tmp_path / "m"), tmp_path / "out"
    given = [option.format(model=model) for option in options]
    prompts = [] if "--prompts" in options else ["--prompts", write_prompts(tmp_path / "p.jsonl")]
    _, heard = ends(2, command, "report", model, "lm-none", "--quiet", *prompts, "--out", out, *given)
    assert said.format(model=model) in heard
    assert "fault of ln_probe" not in heard
    assert "Usage" in heard or len(heard.strip().splitlines()) == 1
    assert "Usage" in heard or len(heard) < 1500
    assert not out.exists()


@pytest.mark.parametrize("name", [LONG, f"owner/{LONG}", f"./{'ü' * 128}/model", " "])
def test_b06_names_of_models(name: str, tmp_path: Path) -> None:
    said = "no model's name: give a hub name, a path or a bundled name" if name.strip() else "the model's name is empty"
    with pytest.raises(SuiteError, match=said):
        suite([name])
    with pytest.raises(ValueError, match=said):
        ln_probe.load_model(name)
    _, heard = ends(2, command, "report", name, "--quiet", "--out", tmp_path / "out")
    assert said in heard
    assert len(heard) < 400
    assert not (tmp_path / "out").exists()


def test_b06_names_that_are_no_text_or_long(tmp_path: Path) -> None:
    """A lone surrogate is how Python has bytes that are no UTF-8: files may be called so."""
    _, said = ends(1, report, "\udcff", "--out", tmp_path / "out")
    assert r"No model is called '\udcff'" in said
    home = tmp_path / "\udcff"
    home.mkdir()
    prompts = write_prompts(home / "\udcfe.jsonl")
    for name in ("m", "m" * 255):
        line = [lab_model(home / name), "--prompts", prompts, "--out", home / "out"]
        ends(0, report, *line)
        ln_probe.load_report(home / "out" / name[:200])
        ends(0, command, "plan", *line, "--quiet")


def test_an_unwritable_folder_is_found_out_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for asked in (["report", "no-such-model", "--workers", 0], ["plan", "no-such-model"]):
        for out in (tmp_path / "file" / "reports", tmp_path / "file"):
            _, said = ends(2, command, *asked, "--out", out)
            assert "cannot write to" in said
            assert "no-such-model" not in said, "the work began before the folder was checked"


# ------------------------------------------------------------------------------------------------------------ memory


def test_b06_what_is_said_of_memory() -> None:
    for error in (
        MemoryError(),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("can't start new thread"),
    ):
        words = exits.last_words(error)
        assert words.startswith(f"not enough memory ({type(error).__name__}: ")
        assert "ulimit -v" in words
        assert "--workers" in words
        assert "fault of ln_probe" not in words
    caused = ValueError("the file cannot be read")
    caused.__cause__ = MemoryError("Unable to allocate 3 GiB")
    assert exits.last_words(caused).startswith("not enough memory")
    assert "This is a fault of ln_probe" in exits.last_words(ValueError("odd"))


@pytest.mark.slow
@pytest.mark.parametrize("gigabytes", [0.4, 0.9, 1.6, 2.4])
@pytest.mark.parametrize("workers", [0, 1])
def test_b06_a_limit_on_memory(gigabytes: float, workers: int, tmp_path: Path) -> None:
    """With less and less of it a command fails in more and more places: it says so, and shows no traceback."""
    model, prompts = lab_model(tmp_path / "m"), write_prompts(tmp_path / "p.jsonl")
    arguments = ["report", model, "--prompts", prompts, "--probes", PROBES, "--out", tmp_path / "out", "--quiet"]
    words = [sys.executable, "-m", "ln_probe", *map(str, arguments), "--workers", str(workers)]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -v {int(gigabytes * 2**20)}; exec "$@"', "-", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        timeout=400,
    )
    assert "Traceback" not in done.stderr
    assert "fault of ln_probe" not in done.stderr
    if done.returncode == 127:  # the C library ends a process without room for a thread's variables: none can catch it
        assert "cannot allocate memory for thread-local data: ABORT" in done.stderr
        assert not ln_probe.load_report(tmp_path / "out" / "m").failures  # it was complete
        return
    assert done.returncode in (0, 1), done.stderr
    assert done.returncode == 0 or "memory" in done.stderr.lower(), done.stderr


# -------------------------------------------------------------------------------------------------------- other words


def test_help_has_groups_and_names_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = runner.invoke(app, ["report", "--help"]).stdout
    places = [said.index(f" {group} ") for group in GROUPS]
    assert places == sorted(places)
    for name in BUILT_IN:
        assert f"{name}: " in said
    groups = {p.rich_help_panel for p in get_command(app).commands["report"].params if p.name not in ("model", "help")}
    assert groups == set(GROUPS), "every option is in a group"


def test_help_and_import_are_cheap() -> None:
    """Nothing heavy is imported before it is needed."""
    heavy = ("torch", "transformers", "transformer_lens", "numpy", "safetensors", "pandas", "matplotlib", "numba")
    code = (
        "import sys, ln_probe, ln_probe.models, ln_probe.cli; from typer.testing import CliRunner; "
        "r = CliRunner().invoke(ln_probe.cli.app, ['report', '--help']); assert r.exit_code == 0; "
        f"print([m for m in {heavy} if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(("given", "is_set"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_asleep_unless_the_user_says_otherwise(given: str | None, is_set: str) -> None:
    code = "import os, sys; from ln_probe.__main__ import main; sys.argv = ['ln-probe', '--version']\n"
    code += "try:\n    main()\nfinally:\n    print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split()[-2:] == [is_set, "False"]


@pytest.mark.parametrize(("asked", "known"), [
    (["heads"], "models, report, freezing-cost, plan, merge, env, lab"),
    (["lab", "train"], "list, run"),
])  # fmt: skip
def test_an_unknown_command_is_answered_with_those_that_there_are(asked: list[str], known: str) -> None:
    found = runner.invoke(app, asked, env={"COLUMNS": "200"})
    assert found.exit_code == 2
    assert f"No such command '{asked[-1]}': choose from {known}" in found.output


def test_names() -> None:
    listed = runner.invoke(app, ["models", "--bundled"]).stdout.split()
    assert listed == ln_probe.bundled_models()
    assert "by hub name" in runner.invoke(app, ["models"]).stdout
    done = subprocess.run([sys.executable, "-m", "ln_probe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"ln-probe {ln_probe.__version__}"
    with pytest.raises(AttributeError, match="module 'ln_probe' has no attribute 'analyse'"):
        _ = ln_probe.analyse  # type: ignore[attr-defined]


def test_env_says_what_a_report_of_a_fault_needs() -> None:
    result = runner.invoke(app, ["env"])
    assert result.exit_code == 0, result.output
    said = dict(line.split(": ", 1) for line in result.stdout.splitlines())
    assert said["ln_probe"] == ln_probe.__version__
    assert said["torch"] == importlib.metadata.version("torch")
    assert "TransformerBridge" in said["worlds"]
    assert ("HookedTransformer" in said["worlds"]) == said["transformer-lens"].startswith("3.")
    assert said["devices"].startswith("cpu")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """An experiment called `toy` that returns at once; the requests it got."""
    seen: list[Request] = []
    module = types.ModuleType("toy_experiment")

    def run(request: Request) -> Results:
        seen.append(request)
        values = pd.DataFrame({"norm": "a", "seed": request.seeds, "value": [float(s) for s in request.seeds]})
        return Results(
            summarize(values, ["norm"]), diverged=("seed 9",) * request.collect
        )

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_experiment", module)
    monkeypatch.setitem(
        EXPERIMENTS,
        "toy",
        Experiment("toy_experiment", "a toy", "nobody", seeds=3, quick_seeds=2, duration=("1 s", "1 s")),
    )
    return seen


def test_every_experiment_has_something_to_run() -> None:
    for name, experiment in EXPERIMENTS.items():
        assert callable(getattr(importlib.import_module(experiment.module), experiment.function)), name


def lab_run(*args: object) -> tuple[int, str, str]:
    return command("lab", "run", *args)


def test_the_command_line_of_the_laboratory(toy: list[Request], tmp_path: Path) -> None:
    listed, _ = ends(0, command, "lab", "list")
    assert "majority" in listed
    assert "toy: a toy" in listed
    line = ["toy", "--out", tmp_path / "o", "--quick"]
    ends(0, lab_run, *line)
    assert toy[-1].seeds == (0, 1)
    assert json.loads((tmp_path / "o" / "results.json").read_text())["experiment"] == "toy"
    assert lab_run(*line, "--seeds", "5")[0] == 0
    assert toy[-1].seeds == (0, 1, 2, 3, 4)
    _, said = ends(1, lab_run, *line, "--collect")
    assert "diverged: seed 9" in said


@pytest.mark.parametrize(("args", "said"), [
    (["nothing"], "unknown experiment 'nothing': known ones are "),
    (["toy", "--text", "x.txt"], "toy takes no text and no tokenizer: leave out x.txt"),
    (["language_model"], "language_model trains on text that you give: add --text FILE"),
    (["language_model", "--text", "no-such.txt"], "no text file no-such.txt"),
    (["language_model", "--text", "."], "ln-probe: .: a folder, not a file"),
    (["language_model", "--text", ""], "'--text': the name is empty: give a path"),
    (["majority", "--seeds", "9" * 20], f"'{'9' * 20}'{NUMBER}1 to 10000"),
    (["majority", "--jobs", "9" * 20], f"'{'9' * 20}'{NUMBER}1 to 10000"),
    (["majority", "--seeds", "0"], f"'0'{NUMBER}1 to 10000"),
])  # fmt: skip
def test_b06_bad_arguments_of_the_laboratory(
    args: list[str], said: str, toy: list[Request], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    _, heard = ends(2, lab_run, *args, "--out", tmp_path / "out")
    assert said in heard
    assert not toy
    assert not (tmp_path / "out").exists()


def test_no_seeds(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no seeds: at least 1 is needed"):
        experiments.run("majority", Request(tmp_path, ()), command="", ln_probe_version="")


def test_folders_of_something_else_are_left_alone(toy: list[Request], tmp_path: Path) -> None:
    thesis, out, cut = tmp_path / "thesis", tmp_path / "o", tmp_path / "cut"
    thesis.mkdir()
    (thesis / "one.txt").write_text("mine")
    cut.mkdir()  # as a kill can leave it
    (cut / ".experiment.json.7.partial").write_text("{")
    for folder in (out, cut):
        assert lab_run("toy", "--quick", "--out", folder)[0] == 0
    for folder, content, said in (
        (thesis, "", "is not empty and holds no experiment: choose another --out"),
        (thesis / "one.txt", "", "one.txt (Not a directory): choose another --out"),
        (out, "", "holds another experiment (toy, quick; this is toy)"),
        (out, "{", "experiment.json: not JSON ("),
        (out, "[]", "experiment.json is damaged"),
    ):
        if content:
            (folder / "experiment.json").write_text(content)
        _, heard = ends(2, lab_run, "toy", "--out", folder)
        assert said in heard
    assert [p.name for p in thesis.iterdir()] == ["one.txt"]


@pytest.mark.parametrize("command", [["lab", "list"], ["models"]])
def test_lists_break_between_words(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def words(columns: str) -> list[str]:
        monkeypatch.setenv("COLUMNS", columns)
        found = runner.invoke(app, command)
        assert found.exit_code == 0
        assert max(map(len, found.stdout.splitlines())) <= int(columns)
        assert "1 seeds" not in found.stdout
        return found.stdout.split()

    assert words("80") == words("400")
