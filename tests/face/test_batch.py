"""Batch reports: the same tables however the work is divided, resumed or joined, here or on a Ray cluster; bad input is
told apart and said."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from architectures import hugging_face
from faulty import command, ended, ends, started, tables, without_pages, write_prompts
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

import ln_probe
from ln_probe.analyses.probes import edited_runs, leading
from ln_probe.analyses.probes.columns import BUILT_IN
from ln_probe.batch import run as batch_run
from ln_probe.batch.pool import ATTEMPTS, Schedule
from ln_probe.batch.results import DAMAGED, DIED, DONE, FAILED, DamagedError, Outcome, Result, Stored, write
from ln_probe.batch.run import CALIBRATION, PROMPTS, REPORT, WEIGHTS, WORK_FOLDER, BusyError, Slice, Unit, locked
from ln_probe.batch.suite import SuiteError, Target, suite
from ln_probe.hooks.interventions import GROUPS

TABLES = tuple(table.name for table in BUILT_IN)


def report(*args: object) -> tuple[int, str, str]:
    return command("report", "--workers", 0, *args)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        without_pages(patched)
        yield


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    long = "and the ships came home before the ice came again; the lamp was lit"
    texts = ["the lamp was lit", long, "ice", "again; the lamp", "ships, ships"]
    return write_prompts(tmp_path_factory.mktemp("prompts") / "texts.jsonl", texts)


@pytest.fixture(scope="module")
def whole(lab_suite: list[Path], prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an undisturbed run over two checkpoints, in one shard."""
    out = tmp_path_factory.mktemp("whole")
    ends(0, report, *lab_suite, "--prompts", prompts, "--out", out, "--max-tokens", 9, "--shard", 99)
    return out


def test_tables_are_those_of_analyze(whole: Path, lab_suite: list[Path], prompts: Path, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # what every worker has
    try:
        model = ln_probe.load_model(lab_suite[1])
        alone = ln_probe.analyze(model, prompts, max_tokens=9, progress=False)
    finally:
        torch.set_num_threads(threads)
    alone.save(tmp_path / "run-projection_only")
    expected = tables(tmp_path)
    assert len(expected) == len(TABLES) + 1
    assert [n for n, content in expected.items() if tables(whole)[n] != content] == []
    made = ln_probe.load_report(whole / "run-projection_only")
    assert (made.exhibits.attention[0].verdict < 4).all(), "the keys in the pictures are not marked"
    assert made.notes == alone.notes
    assert any("1 of 5 prompts were cut to 9 tokens" in note for note in made.notes)
    for part in ("model", "prompts", "arguments", "constants", "thresholds", "random_angle_deg", "versions"):
        assert made.provenance[part] == json.loads(json.dumps(alone.provenance[part])), part


@pytest.mark.parametrize(("shard", "workers"), [(1, 0), (2, 0), (1, 2), (2, 3)])
@pytest.mark.slow
def test_tables_do_not_depend_on_shards_and_workers(
    shard: int, workers: int, whole: Path, lab_suite: list[Path], prompts: Path, tmp_path: Path
) -> None:
    options = ("--prompts", prompts, "--out", tmp_path, "--max-tokens", 9, "--shard", shard, "--workers", workers)
    ends(0, command, "report", *lab_suite, *options)
    assert tables(tmp_path) == tables(whole)
    assert not list((tmp_path / ".ln_probe" / "units").iterdir()), "results of units are kept after the report is made"


def test_the_norms_of_a_large_model_are_chosen_once_for_all_shards(
    lab_suite: list[Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leading, "EXACT_WORK", 0.0)
    monkeypatch.setattr(edited_runs, "LEADING_NORMS", 2)
    options = ("--prompts", prompts, "--max-tokens", 9, "--probes", "causal")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # with two, products of matrices round otherwise
        assert report(lab_suite[0], *options, "--out", tmp_path, "--shard", 1)[0] == 0
        made = ln_probe.load_report(next(tmp_path.glob("run-*")))
        alone = ln_probe.analyze(
            ln_probe.load_model(lab_suite[0]), prompts, max_tokens=9, probes=["causal"], progress=False
        )
    finally:
        torch.set_num_threads(threads)
    pd.testing.assert_frame_equal(made.causal, alone.causal, rtol=1e-6, atol=1e-7)
    assert made.notes == alone.notes
    effects = alone.causal[(alone.causal["variant"] == "no_scaling") & ~alone.causal["sites"].isin(GROUPS)]
    assert effects["delta_loss"].notna().sum() == 2 < len(effects)


@pytest.mark.slow
def test_torch_threads_change_rounding_alone(lab_suite: list[Path], prompts: Path) -> None:
    model, threads = ln_probe.load_model(lab_suite[0]), torch.get_num_threads()
    made = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            made.append(ln_probe.analyze(model, prompts, max_tokens=9, progress=False))
    finally:
        torch.set_num_threads(threads)
    for name in TABLES:
        pd.testing.assert_frame_equal(made[0].tables[name], made[1].tables[name], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_slices_damage_and_merging(whole: Path, lab_suite: list[Path], prompts: Path, tmp_path: Path) -> None:
    line = [*lab_suite, "--prompts", prompts, "--out", tmp_path, "--max-tokens", 9, "--shard", 2]
    for part in (1, 3):
        printed, _ = ends(0, report, *line, "--unit", f"{part}/3", "--json")
        assert json.loads(printed)["units"] > 0
    _, said = ends(1, command, "merge", tmp_path, "--workers", 0)
    assert "missing: run its slice again" in said
    assert report(*line, "--unit", "2/3")[0] == 0
    first, second = sorted((tmp_path / ".ln_probe" / "units").rglob("prompts-00000.safetensors"))
    content = bytearray(first.read_bytes())
    content[-3] ^= 1  # a single bit of a number
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-10])
    heard = ""
    for part in (1, 2, 3):
        _, said = ends(0, report, *line, "--unit", f"{part}/3")
        heard += said
    assert "is damaged (its content is not what was written); doing it again" in heard
    assert "is damaged (Error while deserializing header: incomplete metadata" in heard
    for file in (first, second):
        os.utime(file, (4e9, 4e9))  # a clock that jumped: files of the year 2096
    ends(0, command, "merge", tmp_path, "--workers", 0)
    assert tables(tmp_path) == tables(whole)
    assert "run layernorm" in (tmp_path / "index.html").read_text()


def test_slices_start_together(tmp_path: Path) -> None:
    """Each looks for a moment whether a whole run has the folder: another's look is no whole run."""
    work = tmp_path / WORK_FOLDER
    work.mkdir()
    look = FileLock(work / "driver.lock", thread_local=False)
    look.acquire()
    threading.Timer(0.3, look.release).start()
    with locked(tmp_path, Slice(1, 16)):
        assert not look.is_locked


def test_two_runs_in_one_folder(
    whole: Path, lab_suite: list[Path], prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["--prompts", prompts, "--out", whole]
    _, said = ends(2, report, *lab_suite, *line, "--max-tokens", 8)
    assert f"{whole} holds another run (max_tokens: 9 there, 8 now): choose another --out, or --fresh" in said
    changed = tmp_path / prompts.name
    changed.write_text(prompts.read_text() + json.dumps({"text": "one more"}) + "\n")
    _, said = ends(2, report, *lab_suite, "--prompts", changed, "--out", whole, "--max-tokens", 9)
    assert "prompts_sha256:" in said
    with locked(whole):
        _, said = ends(2, report, *lab_suite, *line, "--max-tokens", 9)
        assert f"{whole} is being written by process {os.getpid()} on" in said
        monkeypatch.setattr(batch_run, "_AT_ONCE_S", 0.1)
        with pytest.raises(BusyError), locked(whole, Slice(1, 2)):
            pass
    with locked(whole, Slice(1, 2)), locked(whole, Slice(2, 2)), pytest.raises(BusyError), locked(whole):
        pass


@pytest.mark.slow
def test_more_models_join_a_folder_and_fresh_replaces_it(lab_suite: list[Path], prompts: Path, tmp_path: Path) -> None:
    line = ["--prompts", prompts, "--out", tmp_path, "--probes", "decomposition", "--checkpoints"]
    assert report(lab_suite[0], *line, "0,4")[0] == 0
    printed, _ = ends(0, report, lab_suite[0], *line, "6", "--json")
    entries = json.loads(printed)["models"]
    assert [e["revision"] for e in entries] == ["step0", "step4", "step6"]
    assert all(Path(e["page"]).is_file() for e in entries)
    assert {p.name for p in tmp_path.iterdir()} >= {"run-layernorm-step0", "run-layernorm-step4", "run-layernorm-step6"}
    made = ln_probe.load_report(tmp_path / "run-layernorm-step4")
    assert made.provenance["model"]["revision"] == "step4"
    printed, _ = ends(0, report, lab_suite[0], *line, "2", "--fresh", "--max-tokens", "8", "--json")
    assert [e["revision"] for e in json.loads(printed)["models"]] == ["step2"]


def test_suites(lab_suite: list[Path], tmp_path: Path) -> None:
    run = str(lab_suite[0])
    assert [t.revision for t in suite([run], "all")] == ["step0", "step2", "step4", "step6"]
    assert len({t.identity for t in suite([run], "all")}) == 4
    (missing,) = suite([run], "3")
    assert "no checkpoint of step 3; steps it has: 0, 2, 4, 6" in missing.error
    assert suite(["lm-layernorm"], "all")[0].revision is None
    assert re.search("it is one checkpoint|has no training steps", suite(["lm-layernorm"], "5")[0].error)
    assert "nothing-of-the-kind" in suite(["nothing-of-the-kind"])[0].error
    same = str(lab_suite[0].parent / "." / lab_suite[0].name) + "/"
    for models, steps, revision, said in (
        ([run, run], None, None, "is given twice"),
        ([run, same], None, None, r"is given twice \(as "),
        ([run], "0,2,0", None, "--checkpoints 0,2,0: step 0 is given twice"),
        ([run], "0", "step2", "exclude each other"),
    ):
        with pytest.raises(SuiteError, match=said):
            suite(models, steps, revision)


@pytest.mark.slow
def test_a_folder_of_checkpoints_is_a_suite(tmp_path: Path) -> None:
    """What a trainer leaves: one folder per step."""
    for step in (1000, 0):
        hugging_face("gpt2").save_pretrained(tmp_path / "training" / f"checkpoint-{step}")
    found = suite([str(tmp_path / "training")], "all")
    assert [t.name for t in found] == [str(tmp_path / "training" / f"checkpoint-{s}") for s in (0, 1000)]
    assert [t.folder for t in found] == ["training-checkpoint-0", "training-checkpoint-1000"]
    assert not any(t.error for t in found)
    options = ["--checkpoints", "all", "--max-tokens", 6, "--probes", "decomposition"]
    ends(0, report, tmp_path / "training", *options, "--out", tmp_path / "out")
    assert "no tokenizer" in (tmp_path / "out" / "training-checkpoint-0" / "report.json").read_text()


def test_the_plan_loads_nothing(lab_suite: list[Path], prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    printed, _ = ends(0, command, "plan", *lab_suite, "--prompts", prompts, "--out", out, "--shard", 2, "--json")
    found = json.loads(printed)
    assert found["shards"] == 3
    assert [m["units"] for m in found["models"]] == [6, 6]  # calibration, three shards, unembedding, report
    assert all(m["tokens"] > 0 and m["seconds"] > 0 and m["memory_bytes"] > 1e8 for m in found["models"])
    assert not out.exists()
    text, _ = ends(1, command, "report", lab_suite[0], "no-such-model", "--prompts", prompts, "--out", out, "--dry-run")
    assert "5 shards of 1 prompt: about" in text  # of so few
    assert "no-such-model  failed: ValueError: No model is called" in text
    assert not out.exists()


def test_merging_what_is_not_there(tmp_path: Path) -> None:
    _, said = ends(2, command, "merge", tmp_path)
    assert f"{tmp_path} holds no run of ln-probe report" in said


# ------------------------------------------------------------------------------------------------- result files


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_altered_byte_of_a_result_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("store") / "unit.safetensors"
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b/ü": np.array([3], np.int8)}
    write(path, "key", Result(arrays, info={"says": "hello", "nan": float("nan")}))
    stored = Stored(path, "key")
    assert stored.info["says"] == "hello"
    np.testing.assert_array_equal(stored.arrays("b/")["ü"], arrays["b/ü"])
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        again = Stored(path, "key")
    except DamagedError:
        return
    # only white space of the header may change without changing what is read
    assert again.info["says"] == "hello"
    np.testing.assert_array_equal(again.arrays("")["a"], arrays["a"])


def test_a_result_of_something_else(tmp_path: Path) -> None:
    write(tmp_path / "unit", "one key", Result({"a": np.ones(2)}))
    with pytest.raises(DamagedError, match="is the result of something else"):
        Stored(tmp_path / "unit", "another key")
    with pytest.raises(FileNotFoundError, match="is missing"):
        Stored(tmp_path / "nothing", "key")


# ------------------------------------------------------------------------------------------------------ schedule


def targets(count: int) -> list[Target]:
    return [Target(f"m{i}", None, f"m{i}", "x") for i in range(count)]


def units(shards: int) -> list[Unit]:
    return [Unit(CALIBRATION), *(Unit(PROMPTS, k) for k in range(shards))]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.integers(1, 4), st.integers(0, 10**6))
def test_every_unit_once_in_order_and_few_loads(models: int, shards: int, workers: int, seed: int) -> None:
    generator = random.Random(seed)
    schedule = Schedule({t: units(shards) for t in targets(models)})
    assert len(schedule) == models * (shards + 2)
    running: dict[int, tuple[Target, Unit]] = {}
    done: dict[Target, list[Unit]] = {t: [] for t in targets(models)}
    loads: list[tuple[int, Target]] = []
    while True:
        for worker in range(workers):
            if worker not in running and (job := schedule.next(worker)) is not None:
                running[worker] = job
                if job[1].kind != REPORT and (worker, job[0]) not in loads:
                    loads.append((worker, job[0]))
        if not running:
            break
        worker = generator.choice(sorted(running))
        target, unit = running.pop(worker)
        if generator.random() < 0.1 and unit.kind == PROMPTS:
            schedule.ended(target, unit, Outcome(DAMAGED, "bad", again=(Unit(CALIBRATION),)))
            continue
        done[target].append(unit)
        schedule.ended(target, unit, Outcome(DONE))
    for target, order in done.items():
        if target in schedule.errors:
            continue
        assert sorted(u.shard for u in order if u.kind == PROMPTS) == list(range(shards))
        assert order[0] == Unit(CALIBRATION)
        assert order[-1] == Unit(REPORT)
    if workers == 1:
        assert len(loads) == models
    assert len(loads) <= models + workers * (workers - 1) + workers


def test_weights_are_measured_while_others_wait_for_the_calibration() -> None:
    (target,) = targets(1)
    schedule = Schedule({target: [*units(1), Unit(WEIGHTS, probe="unembedding")]})
    assert schedule.next(0) == (target, Unit(CALIBRATION))
    assert schedule.next(1) == (target, Unit(WEIGHTS, probe="unembedding"))
    assert schedule.next(2) is None
    schedule.ended(target, Unit(WEIGHTS, probe="unembedding"), Outcome(DONE))
    assert schedule.next(1) is None
    schedule.ended(target, Unit(CALIBRATION), Outcome(DONE))
    assert schedule.next(1) == (target, Unit(PROMPTS, 0))
    schedule.ended(target, Unit(PROMPTS, 0), Outcome(DONE))
    assert schedule.next(0) == (target, Unit(REPORT))


def test_a_unit_that_kills_its_workers_fails_its_model_alone() -> None:
    bad, good = targets(2)
    schedule = Schedule({bad: units(2), good: units(1)})
    for _ in range(ATTEMPTS):
        target, unit = schedule.next(0) or pytest.fail("nothing to do")
        assert (target, unit) == (bad, Unit(CALIBRATION))
        schedule.ended(target, unit, Outcome(DIED, "killed"))
    assert "its worker died 3 times during calibration (killed)" in schedule.errors[bad]
    assert schedule.next(0) == (good, Unit(CALIBRATION))
    schedule.ended(good, Unit(CALIBRATION), Outcome(FAILED, "ValueError: no"))
    assert schedule.next(0) is None
    assert schedule.errors[good] == "ValueError: no"


# --------------------------------------------------------------------------------------------------- a Ray cluster

TOKENS = [[1, 7, 30, 4, 22, 9, 41, 13, 2, 38], [5, 5, 17, 46, 3, 28, 11], [44, 8, 19, 6, 33, 25, 12, 40]]


class Cluster:
    """`ray start --head`, and a second `ray start`; one processor each."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = tempfile.mkdtemp(prefix="ray", dir="/tmp" if os.path.isdir("/tmp") else None)  # sockets: short
        self.address = f"127.0.0.1:{port}"
        head = ["--head", f"--port={port}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        # Ray checks a token of its own between nodes and drivers; this cluster has one for itself.
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.nodes = [self._start(*head)]
        time.sleep(5)
        self.nodes.append(self._start(f"--address={self.address}"))

    def _start(self, *options: str) -> psutil.Process:
        about = "--num-cpus=1 --node-ip-address=127.0.0.1 --disable-usage-stats --object-store-memory=100000000"
        node = subprocess.Popen(
            [str(Path(sys.executable).with_name("ray")), "start", "--block", *about.split(), *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | self.token,
        )
        return psutil.Process(node.pid)

    def workers(self, node: int) -> list[psutil.Process]:
        """Processes of our actors on a node."""
        try:
            return [p for p in self.nodes[node].children(recursive=True) if "_Actor" in " ".join(p.cmdline())]
        except psutil.NoSuchProcess:
            return []

    def kill(self, node: int) -> None:
        try:
            for process in [*self.nodes[node].children(recursive=True), self.nodes[node]]:
                process.kill()
        except psutil.NoSuchProcess:
            pass

    def close(self) -> None:
        for node in range(len(self.nodes)):
            self.kill(node)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="pip install 'ln-probe[ray]'")
    found = Cluster()
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def line(lab_suite: list[Path], tmp_path: Path) -> list[object]:
    prompts = write_prompts(tmp_path / "tokens.jsonl", TOKENS)
    return ["report", *lab_suite, "--checkpoints", "all", "--prompts", prompts, "--shard", 1, "--max-tokens", 10]


@pytest.mark.slow
def test_a_node_is_lost(line: list[object], cluster: Cluster, tmp_path: Path) -> None:
    line += ["--workers", 2, "--out"]
    on_ray = started(*line, tmp_path / "ray", "--engine", "ray", "--address", cluster.address, **cluster.token)
    end = time.monotonic() + 240
    units = tmp_path / "ray" / ".ln_probe" / "units"
    while time.monotonic() < end and on_ray.poll() is None:
        if cluster.workers(1) and len(list(units.rglob("prompts-*.safetensors"))) > 1:
            break
        time.sleep(0.05)
    assert on_ray.poll() is None, on_ray.communicate()[0]
    assert cluster.workers(0), "the first node has no worker"
    assert cluster.workers(1), "the second node has no worker"
    cluster.kill(1)
    _, said = ended(on_ray, 0)
    assert "the worker was lost" in said
    ended(started(*line, tmp_path / "local"), 0)
    assert tables(tmp_path / "ray") == tables(tmp_path / "local")
    assert len(list((tmp_path / "local").glob("*/report.json"))) == 8


@pytest.mark.slow
def test_no_cluster(line: list[object], tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="pip install 'ln-probe[ray]'")
    _, said = ended(started(*line, "--engine", "ray", "--address", "127.0.0.1:1", "--out", tmp_path / "out"), 2)
    assert "no Ray cluster at '127.0.0.1:1'" in said
