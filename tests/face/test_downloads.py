"""A list of checkpoints on the hub, measured within a bound of disk space: `--suite FILE`, `--disk SIZE`."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import ended, plain_model, started, tables, without_pages, word_tokenizer, write_prompts
from hub_standin import Hub, reached, serving
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM
from typer.testing import CliRunner

from ln_probe.batch.downloads import Downloads
from ln_probe.batch.pool import Schedule
from ln_probe.batch.results import Outcome
from ln_probe.batch.run import Unit
from ln_probe.batch.suite import hub_info, suite
from ln_probe.batch.worker import Worker
from ln_probe.cli import app
from ln_probe.loading import hub as hub_names

REPOSITORY = "EleutherAI/pythia-70m"
STEPS = ("step0", "step1", "step512")
TINY = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 64,
        "vocab_size": 3000, "max_position_embeddings": 64, "rotary_pct": 0.25, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip


def models(home: Path, shape: dict[str, Any], revisions: tuple[str, ...]) -> dict[str, Path]:
    """A folder for each revision: untrained weights of a seed of its own, and a tokenizer of five words."""
    for seed, name in enumerate(revisions):
        torch.manual_seed(seed)
        GPTNeoXForCausalLM(GPTNeoXConfig(**shape)).half().save_pretrained(home / name)
        word_tokenizer(["?", "<s>", "</s>", "the", "norm"]).save_pretrained(home / name)
    return {name: home / name for name in revisions}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return models(tmp_path_factory.mktemp("repository"), TINY, STEPS)


@pytest.fixture
def hub(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, for this process and for those that it starts, with an empty cache. Pages are not drawn."""
    without_pages(monkeypatch)
    hub_info.cache_clear()  # which one command keeps
    with reached(tmp_path / "cache", monkeypatch) as served:
        served.add(REPOSITORY, folders)
        for name, value in environment(served, tmp_path).items():
            monkeypatch.setenv(name, value)
        yield served


def environment(served: Hub, home: Path) -> dict[str, str]:
    return {"HF_ENDPOINT": served.endpoint, "HF_HUB_CACHE": str(home / "cache"), "HF_HUB_OFFLINE": "0"}


@pytest.fixture
def line(tmp_path: Path) -> Callable[..., list[str]]:
    """The command for a list of checkpoints, written to a file."""
    write_prompts(tmp_path / "ids.jsonl", [[3, 4, 3, 4], [4, 3, 3]])

    def of(*lines: str, disk: str | None = None, command: str = "report") -> list[str]:
        (tmp_path / "suite.txt").write_text("".join(f"{text}\n" for text in lines))
        options = ["--suite", tmp_path / "suite.txt", "--prompts", tmp_path / "ids.jsonl", "--out", tmp_path / "out"]
        options += ["--probes", "decomposition", "--max-tokens", 6]
        options += ["--workers", 0] if command == "report" else []
        return [command, *map(str, options), *(["--disk", disk] if disk else [])]

    return of


def run(line: list[str], status: int = 0) -> str:
    done = CliRunner().invoke(app, line)
    assert done.exit_code == status, done.output
    return done.output


def whole(served: Hub, *steps: str) -> int:
    """Bytes of what is fetched of some steps."""
    wanted = (".json", ".safetensors", ".txt", ".jinja")
    files = [
        (n, d) for s in steps for n, d in served.held[REPOSITORY][s].items() if n.endswith(wanted) and "/" not in n
    ]
    return sum(len(data) for _, data in files)


class Watch:
    """Looks at a folder of downloads until it is closed.

    Attributes:
        most: bytes of its files, links apart, at the most.
        seen: names of the checkpoints' folders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.most, self.seen = folder, 0, set[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.01):
            total = 0
            for folder, below, files in os.walk(self.folder):
                if os.path.basename(folder) == "snapshots":
                    self.seen.update(below)
                for name in files:
                    with suppress(OSError):  # deleted since
                        status = os.lstat(os.path.join(folder, name))
                        total += status.st_size * stat.S_ISREG(status.st_mode)
            self.most = max(self.most, total)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


# ------------------------------------------------------------------------------------------------------------ the list


@pytest.mark.slow
def test_a_list_of_checkpoints_within_a_bound(hub: Hub, line: Callable[..., list[str]], tmp_path: Path) -> None:
    """Only one checkpoint fits at a time, and one that the user has is neither fetched nor deleted."""
    hub_names.fetch(REPOSITORY, revision="step1", allow_pickle=False)
    mine = sorted(p for p in (tmp_path / "cache").rglob("*") if p.is_file())
    hub.asked.clear()
    largest = max(whole(hub, step) for step in STEPS)
    watch = Watch(tmp_path / "out" / ".ln_probe")
    names = ["# an atlas", "", "pythia-70m@step0", "pythia-70m@step1 ", f"{REPOSITORY}@512"]
    run(line(*names, disk=f"{largest + 50_000}"))
    watch.close()
    fetched = [a for a in hub.asked if a.startswith("GET") and a.endswith("model.safetensors")]
    assert [a.split("/")[-2] for a in fetched] == [hub.commit(REPOSITORY, s) for s in ("step0", "step512")]
    out = tmp_path / "out"
    reports = [json.loads((p / "report.json").read_text())["provenance"]["model"] for p in sorted(out.glob("*70m*"))]
    assert [(m["revision"], m["commit"]) for m in reports] == [
        (s, hub.commit(REPOSITORY, s)) for s in ("step512", "step0", "step1")
    ]
    assert not (out / ".ln_probe" / "hub").exists()
    assert sorted(p for p in (tmp_path / "cache").rglob("*") if p.is_file()) == mine
    assert watch.seen == {hub.commit(REPOSITORY, s) for s in ("step0", "step512")}
    index = (out / "index.html").read_text().splitlines()
    assert index == ["pythia-70m · step0", "pythia-70m · step1", "EleutherAI/pythia-70m · 512"]
    assert "already done" in run(line(*names, disk="1GB"))


@pytest.mark.slow
def test_the_next_checkpoint_is_fetched_while_one_is_measured(
    hub: Hub, line: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's calibration does not begin before the second one is here."""
    original, seen = Worker.do, []

    def held() -> set[str]:
        there = (tmp_path / "out" / ".ln_probe" / "hub").glob("*/snapshots/*/model.safetensors")
        return {path.parent.name for path in there}

    def do(worker: Worker, target: Any, unit: Any) -> Any:
        if not seen:
            end = time.monotonic() + 60
            while time.monotonic() < end and len(held()) < 2:
                time.sleep(0.05)
            seen.append(held())
        return original(worker, target, unit)

    monkeypatch.setattr(Worker, "do", do)
    run(line(*(f"pythia-70m@{step}" for step in STEPS), disk="10MB"))
    assert seen == [{hub.commit(REPOSITORY, step) for step in STEPS[:2]}]
    assert not held()


def test_one_is_fetched_ahead_and_what_is_done_is_deleted(hub: Hub, tmp_path: Path) -> None:
    """Room for two: the third is fetched when the first one is done, and each when the one before it is begun."""
    todo = {target: [Unit("calibration")] for target in suite([f"pythia-70m@{step}" for step in STEPS])}
    schedule, downloads = Schedule(todo), Downloads(tmp_path / "hub", 2 * whole(hub, "step0") + 100, todo)

    def here() -> list[str]:
        """The steps whose weights are here when nothing more is fetched."""
        downloads.advance(schedule.begun, schedule.over)
        downloads.wait(60)
        schedule.awaited = downloads.awaited
        there = {path.parent.name for path in (tmp_path / "hub").glob("*/snapshots/*/model.safetensors")}
        return [step for step in STEPS if hub.commit(REPOSITORY, step) in there]

    assert here() == here() == ["step0"]
    for unit in ("calibration", "report"):
        job = schedule.next(0)
        assert (job[0].revision, job[1].kind) == ("step0", unit)
        assert here() == here() == ["step0", "step1"]
        schedule.ended(*job, Outcome("done"))
    assert here() == here() == ["step1"]
    job = schedule.next(0)
    assert job[0].revision == "step1"
    assert here() == here() == ["step1", "step512"]
    downloads.close()


GIVE = "give one a line, such as pythia-70m@step1000"


@pytest.mark.parametrize(("lines", "options", "said"), [
    ([], [], f"names no checkpoint: {GIVE}"),
    (["# none"], [], f"names no checkpoint: {GIVE}"),
    (["pythia-70m@step0", "pythia-70m@step0"], [], "'pythia-70m@step0' is given twice"),
    (["pythia-70m@"], [], "'pythia-70m@' names no revision: write name@revision"),
    (["@step0"], [], "'@step0' names no model: write name@revision"),
    (["pythia-70m@step0"], ["--revision", "main"], "pythia-70m@step0 names a revision, and so does --revision main"),
    (["pythia-70m@step0"], ["--checkpoints", "1"], "pythia-70m@step0 names a revision, and so does --checkpoints 1"),
    (["pythia-70m@step0"], ["--disk", "much"], "--disk takes a size such as 500MB or 2GB, got 'much'"),
    (["pythia-70m@step0"], ["--disk", "1kB"], "--disk 0 MB has no room for pythia-70m"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(
    lines: list[str], options: list[str], said: str, hub: Hub, line: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert said in " ".join(run([*line(*lines), *options], 2).split())
    assert not (tmp_path / "out").exists()


def test_a_list_that_cannot_be_read(line: Callable[..., list[str]], tmp_path: Path) -> None:
    given = line()
    (tmp_path / "suite.txt").write_bytes(b"\xff\xfe")
    assert "cannot be read (not UTF-8 text (byte 0))" in " ".join(run(given, 2).split())
    (tmp_path / "suite.txt").unlink()
    assert "cannot be read (No such file or directory)" in " ".join(run(given, 2).split())


@pytest.mark.slow
def test_names_that_nothing_has_fail_alone(hub: Hub, line: Callable[..., list[str]], tmp_path: Path) -> None:
    said = " ".join(run(line("pythia-70m@step7", "no such model", "pythia-70m@step0", disk="10MB"), 1).split())
    assert "pythia-70m · step7: failed: ValueError: EleutherAI/pythia-70m has no revision 'step7'" in said
    assert "No model is called 'no such model'" in said
    assert "index.html: 1 of 3 models" in said


def test_a_path_with_an_at_sign_is_a_path(tmp_path: Path) -> None:
    folder = plain_model(tmp_path / "runs@home" / "a@b")
    (found,) = suite([str(folder)])
    assert (found.name, found.revision, found.error) == (str(folder), None, "")


def test_the_plan_says_how_much_is_needed(hub: Hub, line: Callable[..., list[str]]) -> None:
    names = [f"pythia-70m@{step}" for step in STEPS]
    said = " ".join(run(line(*names, command="plan")).split())
    largest, all_of_them = (f"{n / 2**20:.0f} MB" for n in (whole(hub, "step0"), whole(hub, *STEPS)))
    assert f"{all_of_them} to download and keep in the hub's cache; with --disk at least {largest}, or" in said
    rows = json.loads(run([*line(*names, command="plan"), "--json"]).partition("{")[2].join(["{", ""]))["models"]
    assert [row["download_bytes"] for row in rows] == [whole(hub, step) for step in STEPS]


@pytest.mark.slow
def test_a_disk_without_room_stops_the_run(
    hub: Hub, line: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint that is downloaded by the worker: files may not grow past 100 kB, as on a disk that is full."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        said = " ".join(run(line("pythia-70m@step0", "pythia-70m@step1", disk="10MB"), 1).split())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "there is no room for the download of EleutherAI/pythia-70m (File too large)" in said
    assert "make room and run the same command again" in said
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 50_000))  # type: ignore[attr-defined]
    said = " ".join(run(line("pythia-70m@step0", disk="10MB"), 2).split())
    assert "(0 MB free) has no room for pythia-70m · step0, whose files take" in said
    monkeypatch.undo()


# --------------------------------------------------------------------------------------------- what a killed run leaves


def downloads(hub: Hub, folder: Path, bound: int, *steps: str) -> Downloads:
    targets = suite([f"pythia-70m@{step}" for step in steps])
    return Downloads(folder, bound, {target: [Unit("calibration")] for target in targets})


def test_what_an_interrupted_run_left_is_kept_if_it_fits_and_is_wanted(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    with hub_names.downloads_in(folder):
        for step in STEPS:
            hub_names.fetch(REPOSITORY, revision=step, allow_pickle=False)
    part = folder / "models--EleutherAI--pythia-70m" / "blobs" / "0123.abcd.incomplete"
    part.write_bytes(b"half")

    def left() -> set[str]:
        return {path.name for path in folder.glob("*/snapshots/*")}

    downloads(hub, folder, 10**9, "step0", "step1").close()
    assert left() == {hub.commit(REPOSITORY, step) for step in ("step0", "step1")}
    assert not part.exists()
    downloads(hub, folder, whole(hub, "step0") + 100, "step0", "step1").close()
    assert left() == {hub.commit(REPOSITORY, "step0")}
    downloads(hub, folder, 10**9).close()
    assert not folder.exists()


PYTHIA = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6, "intermediate_size": 2048,
          "vocab_size": 50304, "max_position_embeddings": 2048, "rotary_pct": 0.25, "bos_token_id": 0,
          "eos_token_id": 0}  # fmt: skip
ATLAS = (*(f"step{2**k}" for k in range(10)), *(f"step{1000 * k}" for k in range(14)))


@pytest.mark.slow
def test_an_atlas_that_is_killed_twice(tmp_path: Path) -> None:
    """24 checkpoints of Pythia-70m's shape, room for two: killed in the middle, resumed, the tables are the same."""
    write_prompts(tmp_path / "ids.jsonl", [[3, 4, 3, 4, 4, 3, 4, 3], [4, 3, 3, 4, 3, 4]])
    (tmp_path / "suite.txt").write_text("".join(f"pythia-70m@{step}\n" for step in ATLAS))
    line = ["report", "--suite", tmp_path / "suite.txt", "--prompts", tmp_path / "ids.jsonl", "--workers", 1]
    line += ["--probes", "decomposition", "--max-tokens", 8]
    with serving() as served:
        served.add(REPOSITORY, models(tmp_path / "repository", PYTHIA, ATLAS))
        variables = environment(served, tmp_path)
        bound = 2 * whole(served, ATLAS[0]) + 2**20
        disturbed = tmp_path / "disturbed"
        watch = Watch(disturbed / ".ln_probe" / "hub")
        for reports in (5, 14, None):
            process = started(*line, "--disk", bound, "--out", disturbed, **variables)
            if reports is not None:
                while process.poll() is None and len([*disturbed.glob("*/report.json")]) < reports:
                    time.sleep(0.05)
                os.killpg(process.pid, signal.SIGKILL)
            code, said = ended(process)
            assert code == (0 if reports is None else -signal.SIGKILL), said
        watch.close()
        assert not [*disturbed.glob(".ln_probe/hub*")]
        ended(started(*line, "--out", tmp_path / "undisturbed", **variables), 0)
    print(f"bound {bound}, most {watch.most}, checkpoints of {whole(served, ATLAS[0])} bytes", file=sys.stderr)
    assert whole(served, ATLAS[0]) < watch.most <= bound
    assert len(tables(disturbed)) >= 24
    assert tables(disturbed) == tables(tmp_path / "undisturbed")
