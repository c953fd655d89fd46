"""Batches of reports: the same tables by processes and by Ray, after kills of workers and of the driver; what a second
command, another set of options and a failed checkpoint do."""

from __future__ import annotations

import dataclasses
import inspect
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from disturbing import ALWAYS, ONCE
from faulty import ended, ends, lab_model, started, tables, without_pages, write_prompts
from typer.main import get_command

import ln_probe
from ln_probe import batch
from ln_probe.analyses.lab.experiments import Request
from ln_probe.batch import BatchError, Settings, Target
from ln_probe.cli import app

MODELS = {"m0": 20, "m1": 20, "m2": ONCE, "m3": 20}  # vocabularies
FATAL = "fatal"


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with checkpoints and prompts, in which the commands run."""
    folder = tmp_path_factory.mktemp("batch")
    for seed, (name, vocabulary) in enumerate([*MODELS.items(), (FATAL, ALWAYS)]):
        lab_model(folder / name, seed, vocabulary)
    write_prompts(folder / "prompts.jsonl")
    beside = Path(__file__).parent
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.syspath_prepend(str(beside))
        patched.setenv("PYTHONPATH", os.pathsep.join([str(beside), os.environ.get("PYTHONPATH", "")]))
        yield folder


def line(out: Path, *names: str) -> list[object]:
    options = ["--prompts", "prompts.jsonl", "--probes", "causal", "--loss", "disturbing:loss", "--out", out]
    return ["report", *(names or MODELS), *options, "--workers", 2, "--quiet"]


@pytest.fixture(scope="module")
def undisturbed(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reports of all models, each measured in this process."""
    out = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patched:
        without_pages(patched)
        for name in MODELS:
            ends(0, *line(out, name))
    return out


def wait_until(process: subprocess.Popen[str] | psutil.Popen, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, "the process ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children() if "spawn_main" in " ".join(p.cmdline())]


def finished(out: Path) -> set[str]:
    return {path.parent.name for path in out.glob("*/report.json")}


def test_a_killed_worker_costs_its_own_checkpoint_alone(undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _, said = ended(started(*line(out, FATAL, *MODELS), LN_PROBE_DISTURB=f"kill:{tmp_path}"), 1)
    assert (tmp_path / "kill").exists(), "no process was killed by the model that kills one"
    assert finished(out) == set(MODELS), "which is measured by the next"
    assert tables(out) == tables(undisturbed)
    for text in (said, (out / "index.html").read_text()):
        assert batch.KILLED in text


def test_a_killed_driver_is_resumed(undisturbed: Path, tmp_path: Path) -> None:
    for count in (1, 2):
        process = started(*line(tmp_path))
        wait_until(process, lambda least=count: len(finished(tmp_path)) >= least)
        workers = workers_of(process)
        process.kill()
        process.communicate()
        psutil.wait_procs(workers, timeout=60)
        assert not any(worker.is_running() for worker in workers)
    done = finished(tmp_path)
    _, said = ended(started(*line(tmp_path)), 0)
    assert {text.partition(":")[0] for text in said.splitlines() if "already" in text} >= done
    assert tables(tmp_path) == tables(undisturbed)


def test_an_interrupted_driver_ends_its_workers(tmp_path: Path) -> None:
    process = started(*line(tmp_path, "m0", "m1"), LN_PROBE_DISTURB=f"wait:{tmp_path}")
    wait_until(process, (tmp_path / "wait").exists)
    workers = workers_of(process)
    process.send_signal(signal.SIGTERM)
    _, said = ended(process, 130)
    assert len(said.splitlines()) == 1
    assert "repeat" in said
    assert not any(worker.is_running() for worker in workers)


def test_a_second_command_stops(tmp_path: Path) -> None:
    process = started(*line(tmp_path, "m0"), LN_PROBE_DISTURB=f"wait:{tmp_path}")
    wait_until(process, (tmp_path / "wait").exists)
    _, said = ends(2, *line(tmp_path, "m1", "m0"))
    assert len(said.splitlines()) == 1
    assert "another command" in said
    (tmp_path / "go on").touch()
    ended(process, 0)
    assert finished(tmp_path) == {"m0"}


def test_a_failed_checkpoint_does_not_stop_the_others(tmp_path: Path) -> None:
    shutil.copytree("m0", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    _, said = ended(started(*line(tmp_path / "out", str(tmp_path / "cut"), "m0")), 1)
    assert f"{tmp_path / 'cut'}: " in said
    assert finished(tmp_path / "out") == {"m0"}
    assert "cut" in (tmp_path / "out" / "index.html").read_text()


def test_a_report_of_other_settings_needs_overwrite(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pages(monkeypatch)
    ends(0, *line(tmp_path, "m0"))
    before = tables(tmp_path)
    _, said = ends(0, *line(tmp_path, "m0"))
    assert "already there" in said
    _, said = ends(1, *line(tmp_path, "m0"), "--max-prompts", 2)
    assert "--overwrite" in said
    assert tables(tmp_path) == before
    _, said = ends(0, *line(tmp_path, "m0"), "--max-prompts", 2, "--overwrite")
    assert ln_probe.load_report(tmp_path / "m0").provenance["prompts"]["count"] == 2
    (tmp_path / "m0" / "report.json").unlink()  # half a report
    ends(0, *line(tmp_path, "m0"))
    assert tables(tmp_path) == before


def test_the_index_is_rebuilt_from_the_reports(undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)
    (undisturbed / "index.html").unlink(missing_ok=True)
    printed, _ = ends(0, "report", "--out", undisturbed)
    assert "index.html" in printed
    assert (undisturbed / "index.html").read_text().split() == list(MODELS)


def test_targets(home: Path, lab_suite: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(Target("b" * 300).folder) <= 255 - len(".lock")
    assert Target.parse("EleutherAI/pythia-70m@step1000").folder == "EleutherAI-pythia-70m@step1000"
    assert Target.parse(str(home / "m0")).revision is None
    run = Target(str(lab_suite[0]))
    assert [target.revision for target in run.at_steps("all")] == ["0", "2", "4", "6"]
    assert [str(target) for target in Target("pythia-70m").at_steps("0,1000")] == ["pythia-70m@0", "pythia-70m@1000"]
    monkeypatch.setattr("ln_probe.loading.pretrained.checkpoints", lambda name: [f"{name}:step5"])
    assert Target("pythia-70m").at_steps("all") == [Target("pythia-70m", "EleutherAI/pythia-70m:step5")]
    for target, steps in ((Target("lm-none"), "all"), (run, "0,x"), (Target("gpt2", "main"), "0")):
        with pytest.raises(BatchError, match="checkpoints"):
            target.at_steps(steps)


def test_memory_that_is_short_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four logits of a prompt in float32, and the patterns of all heads twice."""
    model = SimpleNamespace(cfg=SimpleNamespace(n_ctx=1000, d_vocab=10**6, n_heads=10, n_layers=50))
    for tokens, most in ((512, 512), (2048, 1000)):
        needed = 4 * (4 * most * 10**6 + 2 * most**2 * 10 * 50)
        for free, is_short in ((needed, False), (needed - 2**30, True)):
            monkeypatch.setattr(batch, "free_memory", lambda free=free: free)
            assert ("--max-tokens" in batch.memory_shortage(model, tokens)) == is_short


@pytest.mark.parametrize(("limit", "free"), [("5000", 3000), ("max", 7 * 1024), (str(2**40), 7 * 1024)])
def test_memory_of_a_container(limit: str, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n", "memory.max": limit, "memory.current": "2000"}
    monkeypatch.setattr(Path, "read_text", lambda path: texts[path.name])
    assert batch.free_memory() == free


def test_defaults_are_those_of_the_calls() -> None:
    """Of every entry point, of the settings of a batch, and of the options of the command line."""
    reference = {"allow_pickle": False, "device": None, "dtype": None, "overwrite": False, "quiet": False}
    reference |= {name: p.default for name, p in inspect.signature(ln_probe.analyze).parameters.items()}
    for call in (ln_probe.freezing_cost, ln_probe.norm_constants, ln_probe.load_model):
        for name, parameter in inspect.signature(call).parameters.items():
            assert parameter.default == reference.get(name, parameter.default), name
    settings = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert settings == {name: reference[name] for name in settings} | {"progress": False}
    commands = get_command(app).commands
    run = {field.name: field.default for field in dataclasses.fields(Request)}
    for command, defaults in (
        (commands["report"], reference | {"probes": None, "workers": None, "engine": "local"}),
        (commands["freezing-cost"], reference | {"as_json": False}),
        (commands["lab"].commands["run"], {"jobs": run["jobs"], "device": run["device"], "quick": False}),
    ):
        for parameter in command.params:
            if parameter.name in defaults.keys() - {"model"}:
                assert parameter.default == defaults[parameter.name], parameter.name


def test_the_digest_covers_what_decides_the_tables(home: Path) -> None:
    plain = Settings()
    assert plain.digest("a") == Settings(device="cpu", overwrite=True, progress=True).digest("a")
    others = [Settings(max_prompts=3), Settings(prompts=home / "prompts.jsonl"), Settings(dtype="float64")]
    assert len({plain.digest("a"), plain.digest("b"), *(settings.digest("a") for settings in others)}) == 5


@contextmanager
def ray_node(*wrapper: str, **environment: str) -> Iterator[dict[str, str]]:
    """Start a Ray node, by the command `wrapper` if there is one, and give the environment of commands that use it."""
    pytest.importorskip("ray", reason="pip install ray")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # paths of sockets have to be short
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ray = [*wrapper, str(Path(sys.executable).with_name("ray")), "start", "--block", "--head", f"--port={port}"]
    options = "--num-cpus=2 --node-ip-address=127.0.0.1 --disable-usage-stats --object-store-memory=100000000"
    node = psutil.Popen(
        [*ray, *options.split(), f"--temp-dir={folder}", "--include-dashboard=false"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | token | environment,
    )
    try:
        wait_until(node, lambda: any(c.laddr.port == port and c.status == "LISTEN" for c in psutil.net_connections()))
        yield token | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        for process in [*node.children(recursive=True), node]:
            process.kill()
        node.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_ray_writes_the_same_tables(undisturbed: Path, tmp_path: Path) -> None:
    with ray_node(LN_PROBE_DISTURB=f"kill:{tmp_path}") as environment:
        ended(started(*line(tmp_path), "--engine", "ray", **environment), 0)
    assert (tmp_path / "kill").exists(), "no worker was killed"
    assert tables(tmp_path) == tables(undisturbed)
    assert (tmp_path / "index.html").exists()


def test_no_ray_cluster(tmp_path: Path) -> None:
    _, said = ended(started(*line(tmp_path, "m0"), "--engine", "ray", RAY_ADDRESS="127.0.0.1:1"), 2)
    assert len(said.splitlines()) == 1
    assert "RAY_ADDRESS" in said


def test_a_ray_node_that_does_not_see_the_folder(tmp_path: Path) -> None:
    """The node has another file system in the place of the folder."""
    mount = f"mount -t tmpfs none {tmp_path} && exec"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user cannot make a mount namespace")
    with ray_node("unshare", "--mount", "sh", "-c", f'{mount} "$@"', "sh") as environment:
        _, said = ended(started(*line(tmp_path, "m0"), "--engine", "ray", **environment), 2)
    assert len(said.splitlines()) == 1
    assert "share" in said
