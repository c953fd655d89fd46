"""The command line as a user runs it."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import ln_probe
from ln_probe.analyses.probes.registry import BUILT_IN
from ln_probe.batch.options import MEASURED, MODELS, OUTPUT, PROMPTS, WORK
from ln_probe.cli import app

runner = CliRunner()
GROUPS = (MODELS, PROMPTS, MEASURED, WORK, OUTPUT)


def report(*args: object) -> tuple[int, str, str]:
    result = runner.invoke(app, ["report", "--quiet", "--workers", "0", *map(str, args)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_one_real_checkpoint(capp: Path, tmp_path: Path) -> None:
    out = tmp_path / "reports"
    asked = ("--max-tokens", 24, "--layers", "0,2-3", "--probes", "decomposition,uniformity")
    code, printed, said = report(capp, "--out", out, *asked, "--json")
    assert code == 0, said
    assert json.loads(printed)["models"][0]["error"] is None
    assert (out / "index.html").exists()
    made = ln_probe.load_report(out / "capp_gpt")
    assert set(made.heads["layer"]) == {0, 2, 3}
    assert made.provenance["request"]["max_tokens"] == 24
    stamp = (out / "capp_gpt" / "report.json").stat().st_mtime_ns
    assert "already done" in report(capp, "--out", out, *asked)[2]
    assert (out / "capp_gpt" / "report.json").stat().st_mtime_ns == stamp
    (out / "capp_gpt" / "heads.parquet").write_bytes(b"PAR1")
    code, _, said = report(capp, "--out", out, *asked)
    assert code == 0
    assert "doing it again" in said
    assert len(ln_probe.load_report(out / "capp_gpt").heads) > 0


def test_a_vocabulary_names_the_tokens_of_a_model_without_a_tokenizer(capp: Path, tmp_path: Path) -> None:
    names = {str(i): f"part-{i}" for i in range(json.loads((capp / "config.json").read_text())["vocab_size"])}
    (tmp_path / "names.json").write_text(json.dumps(names))
    asked = ("--max-tokens", 8, "--max-prompts", 4, "--probes", "sinks,decomposition", "--layers", "0")
    code, _, said = report(capp, "--out", tmp_path / "r", *asked, "--vocab", tmp_path / "names.json")
    assert code == 0, said
    about = ln_probe.load_report(tmp_path / "r" / "capp_gpt").provenance["prompts"]
    assert all(text.startswith("part-") for text in about["begin"])
    assert about["count"] == 4  # of the sequences that it is sampled, too
    code, _, said = report(capp, "--out", tmp_path / "s", *asked, "--vocab", tmp_path / "missing.json")
    assert code == 2
    assert "missing.json" in said


def test_a_failing_model_leaves_the_others_done(capp: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text((capp / "config.json").read_text())
    (broken / "model.safetensors").write_bytes((capp / "model.safetensors").read_bytes()[:5000])
    out = tmp_path / "reports"
    code, _, said = report(broken, capp, "--out", out, "--max-tokens", 12, "--probes", "decomposition")
    assert code == 1
    assert "failed:" in said
    assert "model.safetensors" in said
    assert (out / "capp_gpt" / "report.html").exists()
    assert "failed:" in (out / "index.html").read_text()
    assert not (out / "broken").exists()


@pytest.mark.parametrize(("args", "said"), [
    (["x", "--probes", "magic"], "unknown probe 'magic': choose from decomposition, selectability, uniformity"),
    (["x", "--keys", "few"], "--keys must be one of hardest, all, got 'few'"),
    (["x", "--layers", "a-b"], "--layers takes numbers and ranges such as 0,3-5, got 'a-b'"),
    (["x", "--layers", "5-3"], "names no layer"),
    (["x", "--prompts", "nothing.txt"], "no prompts file 'nothing.txt'"),
    (["x", "x"], "'x' is given twice"),
])  # fmt: skip
def test_bad_arguments_exit_with_2(args: list[str], said: str, tmp_path: Path) -> None:
    code, _, error = report(*args, "--out", tmp_path / "out")
    assert code == 2
    assert said in error


@pytest.mark.slow
def test_heads_are_chosen(capp: Path, tmp_path: Path) -> None:
    out, probes = tmp_path / "reports", "decomposition,uniformity"
    code, _, said = report(capp, "--out", out, "--max-tokens", 12, "--heads", "0,2-3", "--probes", probes)
    assert code == 0, said
    made = ln_probe.load_report(out / "capp_gpt")
    assert set(made.heads.loc[made.heads["space"] == "head", "head"]) == {0, 2, 3}
    assert made.exhibits.attention[0].heads == (0, 2, 3)
    code, _, said = report(capp, "--out", out, "--heads", "0,99")
    assert code == 2
    assert "no head 99: " in said
    assert "capp_gpt has heads 0 … " in said


def test_options_from_a_file(capp: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "suite.toml", tmp_path / "reports"
    config.write_text(
        f"model = ['{capp}']\nmax-tokens = 9\nprobes = ['decomposition', 'uniformity']\nlayers = [0, 2]\nseed = 4\n"
        f"out = '{tmp_path / 'elsewhere'}'\njson = true\n"
    )
    code, printed, said = report("--config", config, "--out", out, "--seed", 5)
    assert code == 0, said
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
    ("max-tokens = 0", "--max-tokens"),
    ("allow-pickle = 'perhaps'", "allow-pickle"),
    (None, "cannot be read (No such file or directory)"),
])  # fmt: skip
def test_a_file_of_options_that_makes_no_sense(text: str | None, said: str, tmp_path: Path) -> None:
    config = tmp_path / "a.toml"
    if text is not None:
        config.write_text(text)
    code, _, error = report("x", "--config", config, "--out", tmp_path / "out")
    assert code == 2
    assert said in error
    assert not (tmp_path / "out").exists()


def test_a_folder_of_checkpoints_is_told_from_a_checkpoint(capp: Path, tmp_path: Path) -> None:
    for step in (0, 100, 2000):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    code, _, said = report(tmp_path / "run", "--out", tmp_path / "out")
    assert code == 2
    assert "run is no checkpoint, it holds 3 of them (steps 0, 100, 2000): add --checkpoints all, or --chec" in said


def test_help_has_groups_and_names_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = runner.invoke(app, ["report", "--help"]).stdout
    places = [said.index(f" {group} ") for group in GROUPS]
    assert places == sorted(places)
    for name in BUILT_IN:
        assert f"{name}: " in said
    groups = {p.rich_help_panel for p in get_command(app).commands["report"].params if p.name not in ("model", "help")}
    assert groups == set(GROUPS), "every option is in a group"


def test_max_tokens_below_one(tmp_path: Path) -> None:
    assert report("x", "--max-tokens", 0, "--out", tmp_path)[0] == 2


def test_an_unwritable_folder_is_found_out_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, _, said = report("no-such-model", "--out", tmp_path / "file" / "reports")
    assert code == 2
    assert "cannot write to" in said
    assert "no-such-model" not in said, "the work began before the folder was checked"


def test_an_unknown_model_fails_with_its_name(tmp_path: Path) -> None:
    code, _, said = report("gpt3-enormous", "--out", tmp_path / "r")
    assert code == 1
    assert "gpt3-enormous" in said


def test_help_and_import_are_cheap() -> None:
    """Neither torch nor TransformerLens is imported before it is needed."""
    code = (
        "import sys, ln_probe, ln_probe.cli; from typer.testing import CliRunner; "
        "r = CliRunner().invoke(ln_probe.cli.app, ['report', '--help']); assert r.exit_code == 0; "
        "print([m for m in ('torch', 'transformer_lens', 'pandas', 'matplotlib', 'numba') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_names() -> None:
    listed = runner.invoke(app, ["models", "--bundled"]).stdout.split()
    assert listed == ln_probe.bundled_models()
    assert "by hub name" in runner.invoke(app, ["models"]).stdout
    assert runner.invoke(app, ["--version"]).stdout.strip() == f"ln-probe {ln_probe.__version__}"
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


def test_the_package_is_a_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "ln_probe", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"ln-probe {ln_probe.__version__}"
