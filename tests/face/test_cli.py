"""The command line as a user runs it: what it prints and writes, and one line with exit status 2 for what is wrong."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from faulty import command, ends, lab_model, without_pages, write_prompts
from safetensors.torch import load_file

import ln_probe
from ln_probe import batch, cli
from ln_probe.analyses.lab.experiments import EXPERIMENTS, Experiment, Request
from ln_probe.analyses.lab.results import Results, summarize
from ln_probe.batch import Outcome, Settings, Target
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.models import BUNDLED, bundled_folder

OPTIONS = ["from", "checkpoints", "prompts", "max-prompts", "max-tokens", "groups", "loss", "probes", "layers"]
OPTIONS += ["tokenizer", "out", "workers", "engine", "device", "dtype", "allow-pickle"]


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def refused(*args: object) -> str:
    """The one line of a command that ends with status 2 and writes nothing."""
    printed, said = ends(2, *args)
    said = said.removeprefix("loading PyTorch …\n")
    assert printed == ""
    assert said.startswith("ln-probe: ")
    assert len(said.splitlines()) == 1
    assert not Path("out").exists()
    return said


def test_quiet_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[bool] = []
    monkeypatch.setattr(ln_probe, "freezing_cost", lambda *_, progress, **more: shown.append(progress) or float("no"))
    for words in ([], ["--quiet"]):
        ends(1, "freezing-cost", "lm-none", *words)
    assert shown == [True, False]


@pytest.mark.parametrize(("words", "said"), [
    (["lm-layernrm"], "did you mean lm-layernorm"),
    (["./nothere"], "./nothere does not exist"),
    (["notes.txt"], "notes.txt is a file"),
    ([""], "empty"),
    ([" "], "empty"),
    (["lm-none", "--probes", "causel"], "did you mean causal?"),
    (["lm-none", "--probes", ","], "choose from decomposition"),
    (["lm-none", "--layers", "5-3"], "0,3-5"),
    (["lm-none", "--layers", "0-²"], "0,3-5"),
    (["lm-none", "--layers", "9" * 5000], "0,3-5"),
    (["gtp2"], "did you mean gpt2?"),
    (["empty"], "no config.json"),
    (["half"], "lab.json"),
    (["lm-none", "--probs", "causal"], "did you mean --probes"),
    (["lm-none", "--layers", "2,4"], "layers 0 to 3"),
    (["lm-none", "--device", "gpu"], "cuda:1"),
    (["lm-none", "--prompts", "notes.md"], ".jsonl"),
    (["lm-none", "--groups", "notes.txt"], "no label"),
    (["lm-none", "--loss", "nothing:loss"], "no module 'nothing'"),
    (["lm-none", "--engine", "slurm"], "neither local nor ray"),
    (["lm-none", "--dtype", "int8"], "'bfloat16'"),
    (["lm-none", "--loss", "module"], "MODULE:FUNCTION"),
    (["lm-none", "--max-tokens", "1"], "--max-tokens"),
    (["lm-none", "--max-prompts", "0"], "--max-prompts"),
    (["lm-none", "--workers", "many"], "--workers"),
    (["lm-none", "--checkpoints", "last"], "--checkpoints"),
    (["lm-none", "--checkpoints", "5"], "no training steps"),
    (["lm-none", "--prompts", "nothing.txt"], "no file 'nothing.txt'"),
    (["lm-none", "--prompts", "."], "'.' is a folder"),
    (["lm-none", "--groups", "nothing.txt"], "--groups"),
    (["lm-none", "--tokenizer", "nothing"], "--tokenizer"),
    (["--from", "nothing.txt"], "--from"),
    (["--from", "comment.txt"], "names no model"),
    (["--from", "latin.txt"], "UTF-8"),
])  # fmt: skip
def test_a_value_that_makes_no_sense(words: list[str], said: str) -> None:
    Path("notes.txt").touch()
    Path("notes.md").touch()
    Path("empty").mkdir()
    Path("half").mkdir()
    Path("half/lab.json").write_text("{")
    Path("comment.txt").write_text("# nothing\n")
    Path("latin.txt").write_bytes(b"\xe9\n")
    assert said in refused("report", *words, "--out", "out")


@pytest.mark.parametrize("words", [["nothing"], ["lm-nome"], ["lm-none", "--json", "--prompts", "missing"]])
def test_freezing_cost_of_something_that_is_not_there(words: list[str]) -> None:
    assert words[-1] in refused("freezing-cost", *words)


def test_a_folder_that_cannot_be_written() -> None:
    Path("file").touch()
    for out in ("file", "file/reports"):
        assert "cannot write to" in refused("report", "lm-none", "--out", out)


def test_one_model_twice(tmp_path: Path) -> None:
    Path("models.txt").write_text("lm-none  # again\n")
    _, said = ends(2, "report", "lm-none", "--from", "models.txt", "--out", "out", "--quiet")
    assert "lm-none" in said


def imported(*words: str) -> tuple[int, str]:
    """Status and errors of a command in a process of its own, which must not import what takes seconds."""
    heavy = ("torch", "numpy", "pandas", "transformers", "transformer_lens")
    code = (
        f"import sys; sys.argv = ['ln-probe', *{words}]\nfrom ln_probe.__main__ import main\n"
        f"try: main()\nfinally: print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [
    ("report", "lm-nome"), ("report", "gtp2"), ("report", "lm-none", "--probes", "causel"), ("lab", "run", "majorty"),
])  # fmt: skip
def test_wrong_arguments_are_noticed_before_heavy_imports(words: tuple[str, ...]) -> None:
    status, said = imported(*words)
    assert status == 2, said
    assert said.endswith("[]\n")
    assert "did you mean" in said


def test_the_first_command_leaves_transformer_lens_out() -> None:
    status, said = imported("freezing-cost", "lm-layernorm", "--max-prompts", "2")
    assert status == 0, said
    assert said.startswith("loading PyTorch …")
    assert said.endswith("['torch', 'numpy', 'pandas']\n")


def test_names_and_versions() -> None:
    printed, _ = ends(0, "models")
    for name, about in BUNDLED.items():
        assert " ".join(f"{name} {about}".split()) in " ".join(printed.split())
    assert ends(0, "--version")[0].strip() == f"ln-probe {ln_probe.__version__}"
    printed, _ = ends(0, "env")
    values = dict(text.split(": ", 1) for text in printed.splitlines())
    assert values["torch"] == importlib.metadata.version("torch")
    assert values["devices"].startswith("cpu")
    assert values["threads"] == f"{torch.get_num_threads()} of {os.cpu_count()}"
    assert values["worlds"] == "HookedTransformer, " * has_hooked_transformer() + "TransformerBridge"
    assert values["numba"] == importlib.metadata.version("numba")


def test_the_options_reach_the_measurement() -> None:
    lab_model(Path("m"))
    write_prompts(Path("p.jsonl"), [[1, 5, 7, 3], [2, 2, 9, 11, 4], [8, 1, 6], [3, 4, 5]])
    Path("labels.txt").write_text("a\na\nb\nc\n")
    Path("names.json").write_text(json.dumps([f"word{number}" for number in range(20)]))
    Path("models.txt").write_text("# of one model\n\nm\n")
    options = ["--prompts", "p.jsonl", "--max-prompts", 3, "--max-tokens", 2, "--groups", "labels.txt", "--layers", "0"]
    more = ["--probes", "decomposition,causal", "--tokenizer", "names.json", "--dtype", "float64", "--device", "cpu"]
    printed, said = ends(0, "report", "--from", "models.txt", *options, *more, "--out", "out", "--quiet")
    assert "1 of 1 reports" in printed
    assert said == "m: done\n"
    assert "m: " in printed  # what it says
    report = ln_probe.load_report("out/m")
    about = report.provenance
    assert (about["prompts"]["count"], about["prompts"]["longest"]) == (3, 2)
    assert (about["model"]["dtype"], about["calibration"]["groups"]) == ("float64", 2)
    assert set(report.tables["layernorms"]["layer"].dropna()) == {0}
    assert about["prompts"]["begin"][0].startswith("word1")
    ends(0, "report", "m", *options[:2], *more[:2], "--tokenizer", bundled_folder("lm-none"), "--out", "o", "--quiet")
    assert ln_probe.load_report("o/m").provenance["prompts"]["begin"][0] == "!%'#", "the folder of a tokenizer"


def test_what_a_command_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option reaches the settings of a batch; the first results are printed of a few models alone."""
    seen: list[Any] = []

    def outcomes(targets: list[Target], *rest: Any) -> Iterator[Outcome]:
        seen.append((targets, *rest))
        yield from (Outcome(t, "bad" * (place == 1), skipped=place == 2) for place, t in enumerate(targets))

    def pages(out: Path, failures: dict[str, str], targets: list[Target]) -> tuple[Path, list[str]]:
        seen.append((failures, targets))
        return out / "index.html", [f"{target}: found" for target in targets]

    monkeypatch.setattr(batch, "local_outcomes", outcomes)
    monkeypatch.setattr(batch, "write_pages", pages)
    for name in ("p.txt", "words.txt"):
        Path(name).touch()
    Path("labels.txt").write_text("a\n")
    names = ["lm-none", "lm-layernorm", "lm-scaling_only"]
    here = Path.cwd()
    options = "--prompts p.txt --max-prompts 5 --max-tokens 7 --groups labels.txt --loss math:pi --probes sinks,causal "
    options += "--layers 1,3 --tokenizer words.txt --dtype float16 --device mps --allow-pickle --overwrite --workers 3"
    printed, said = ends(1, "report", *names, *options.split(), "--quiet", "--out", "out")
    settings = Settings(
        here / "p.txt", 5, 7, here / "labels.txt", "math:pi", ("sinks", "causal"), (1, 3), here / "words.txt",
        "float16", "mps", allow_pickle=True, overwrite=True, progress=False,
    )  # fmt: skip
    targets = [Target(name) for name in names]
    assert seen == [(targets, settings, Path("out"), 3), ({"lm-layernorm": "bad"}, [targets[0], targets[2]])]
    assert said.splitlines() == ["lm-none: done", "lm-layernorm: bad", "lm-scaling_only: already there"]
    assert printed.splitlines() == ["lm-none: found", "lm-scaling_only: found", "2 of 3 reports; open out/index.html"]
    for count, shown in ((cli._SUMMARIZED, cli._SUMMARIZED - 1), (cli._SUMMARIZED + 1, 0)):
        several = [f"lm-none@{step}" for step in range(count)]
        _, said = ends(1, "report", *several)
        assert said.startswith("loading PyTorch …\n")
        assert len(seen[-1][1]) == shown
        assert seen[-2][1:] == (Settings(progress=True), Path("reports"), batch.default_workers(several, None))


def test_a_pickle_is_read_only_with_the_option(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    write_prompts(Path("p.jsonl"))
    for line in (["freezing-cost", folder], ["report", folder, "--out", "out"]):
        status, printed, said = command(*line, "--prompts", "p.jsonl", "--quiet")
        assert status
        assert "--allow-pickle" in printed + said
    ends(0, "freezing-cost", folder, "--prompts", "p.jsonl", "--quiet", "--allow-pickle")


def test_freezing_cost() -> None:
    lab_model(Path("m"))
    rows = np.random.default_rng(0).integers(1, 20, size=(3, 9)).tolist()
    write_prompts(Path("p.jsonl"), rows)
    line = ["freezing-cost", "m", "--prompts", "p.jsonl", "--quiet"]
    found = json.loads(ends(0, *line, "--json", "--max-prompts", 2)[0])
    expected = ln_probe.freezing_cost(ln_probe.load_model("m"), rows[:2], progress=False)
    assert found["estimate"] == pytest.approx(expected.estimate, rel=1e-5)
    assert (found["model"], found["prompts"]["count"], len(found["contrasts"])) == ("m", 2, 4)
    printed, progress = ends(0, *line[:-1])
    assert ("PyTorch" in progress, "PyTorch" in printed) == (True, False)
    assert "cuda:99" in "".join(ends(1, *line, "--device", "cuda:99"))
    assert "27 tokens" in printed


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Requests that an experiment called `toy` gets, which returns at once."""
    seen: list[Request] = []
    module = types.ModuleType("toy")

    def run(request: Request) -> Results:
        seen.append(request)
        values = pd.DataFrame({"norm": "a", "seed": request.seeds, "value": [float(s) for s in request.seeds]})
        return Results({"summary": summarize(values, ["norm"])}, diverged=("seed 9",) * (len(request.seeds) == 6))

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ln_probe.analyses.lab.toy", module)
    toy = Experiment("toy.run", "nobody", ("1 s", "1 s"), seeds=3, quick_seeds=2, summary="a toy")
    monkeypatch.setitem(EXPERIMENTS, "toy", toy)
    monkeypatch.setitem(EXPERIMENTS, "text_toy", replace(toy, needs_text=True))
    return seen


def test_an_experiment_is_run(requests: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    EXPERIMENTS["other"] = replace(EXPERIMENTS["toy"], source="nobody 2020, part 2", quick_seeds=1)
    EXPERIMENTS["last"] = replace(EXPERIMENTS["toy"], source="nobody 2020")
    listed = ends(0, "lab", "list")[0].partition("nobody\n")[2]
    seeds = "      3 seeds: 1 s; --quick, 2 seeds: 1 s"
    assert listed == (
        f"  toy: a toy\n{seeds}\n  text_toy: a toy\n{seeds}; needs --text\nnobody 2020\n"
        f"  other: a toy (part 2)\n{seeds.replace('2 seeds', '1 seed')}\n  last: a toy\n{seeds}\n"
    )
    line = ["lab", "run", "toy", "--out", "runs", "--quick"]
    monkeypatch.setattr(sys, "argv", ["/bin/ln-probe", *line])
    printed, said = ends(0, *line)
    assert "loading PyTorch" in said
    assert printed.splitlines()[1].split()[0] == "a", "rows are not numbered"
    assert requests == [Request(Path("runs"), (0, 1), quick=True)]
    about = json.loads(Path("runs/results.json").read_text())
    assert (about["experiment"], about["command"]) == ("toy", "ln-probe lab run toy --out runs --quick")
    assert ends(0, *line, "--seeds", "5", "--quiet")[1] == ""
    assert requests[-1] == replace(requests[0], seeds=(0, 1, 2, 3, 4), progress=False)
    Path("text.txt").touch()
    options = "--out more --jobs 2 --text text.txt --tokenizer runs --device cpu"
    ends(0, "lab", "run", "text_toy", *options.split())
    here = Path.cwd()
    asked = Request(Path("more"), (0, 1, 2), texts=(here / "text.txt",), tokenizer=here / "runs", jobs=2)
    assert requests[-1] == asked
    _, said = ends(1, *line, "--seeds", "6")
    assert "diverged: seed 9" in said


@pytest.mark.parametrize(("words", "said"), [
    (["majorty"], "did you mean majority"),
    (["text_toy"], "--text"),
    (["language_model"], "--text"),
    (["language_model", "--text", "missing.txt"], "'missing.txt'"),
    (["majority", "--seeds", "0"], "--seeds"),
    (["majority", "--jobs", "many"], "--jobs"),
    (["toy", "--device", "gpu"], "'gpu'"),
])  # fmt: skip
def test_bad_arguments_of_the_laboratory(words: list[str], said: str, requests: list[Request]) -> None:
    Path("notes.txt").touch()
    assert said in refused("lab", "run", *words, "--out", "out")
    assert not requests


def test_folders_of_something_else_are_left_alone(requests: list[Request]) -> None:
    Path("thesis").mkdir()
    Path("thesis/one.txt").write_text("mine")
    ends(0, "lab", "run", "toy", "--quick", "--out", "runs")
    for folder in ("thesis", "thesis/one.txt", "runs"):
        refused("lab", "run", "toy", "--out", folder)
    assert Path("thesis/one.txt").read_text() == "mine"
