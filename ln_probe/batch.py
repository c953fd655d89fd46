"""Reports on many checkpoints: each is one piece of work, for a process of this machine or a Ray task.

`report_one` loads a checkpoint, measures it and saves its report in a folder named after it. Processes and Ray tasks
share nothing but the folder of reports. An existing report of the same weights and settings is skipped, so the
same command resumes a batch that was stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ln_probe import __version__
from ln_probe.analyses.probes import DEFAULT
from ln_probe.analyses.progress import ProgressLine, available_processors, follow_parent, tell, tell_left
from ln_probe.analyses.text import FileError, read_json, read_text, sha256_of_file, whole_number

MAX_WORKERS = 4  # by default: each holds a model and about 1 GB beside it, and they compete for memory bandwidth
KILLED = "its process was killed twice; if memory was short, use fewer --workers or a smaller --max-tokens"
RAY_ANSWER_S = 10.0  # for a cluster's head to accept a connection
_LOCKS = ".locks"  # in the folder of reports; a Ray worker that does not see them does not see that folder
_FOLDER_LENGTH = 200  # file systems take names of 255 bytes


class BatchError(ValueError):
    """The batch cannot start, or cannot go on: the message says what to do."""


@dataclass(frozen=True)
class Target:
    """A checkpoint as `load_model` takes it: a name or path, and a training step or revision of it."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target of NAME or NAME@REVISION."""
        from ln_probe.models import split_revision

        return cls(*split_revision(text))

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"

    @property
    def folder(self) -> str:
        """The folder of its report: the target as typed, with "-" for what is not safe in a file name."""
        return re.sub(r"[^A-Za-z0-9._@-]+", "-", str(self)).strip("-.")[-_FOLDER_LENGTH:] or "model"

    def at_steps(self, steps: str) -> list[Target]:
        """Return the training checkpoints of a model on the hub or of a lab run: "all", or steps such as "0,1000".

        Raises:
            BatchError: no list of steps, or a model without training steps.
            ConnectionError: all steps of a model on the hub, and no network.
        """
        from ln_probe.loading.pretrained import checkpoints, official_name
        from ln_probe.models import kind_of

        numbers = [] if steps == "all" else [whole_number(step, 18) for step in steps.split(",")]
        if self.revision is not None or None in numbers:
            raise BatchError(f"--checkpoints takes 'all' or training steps such as 0,1000 of a NAME, got {steps!r:.60}")
        path = Path(self.name).expanduser()
        kind = kind_of(self.name, path)
        revisions = [str(number) for number in numbers]
        if kind == "lab" and not numbers:
            from ln_probe.analyses.lab.train import checkpoint_steps

            revisions = [str(step) for step in checkpoint_steps(path)]
        elif kind == "hub" and not numbers:
            revisions = checkpoints(official_name(self.name))
        if kind not in ("hub", "lab") or not revisions:
            raise BatchError(f"{self} has no training steps: leave out --checkpoints, or name the folder of each step")
        return [Target(self.name, revision) for revision in revisions]


@dataclass(frozen=True)
class Settings:
    """How checkpoints are loaded and what is measured, as for `load_model` and `analyze`; files are absolute paths.

    Attributes:
        overwrite: replace a report of other weights or settings.
        progress: show what is being measured; of several checkpoints, how much time is left alone.
    """

    prompts: Path | None = None
    max_prompts: int | None = None
    max_tokens: int = 512
    groups: Path | None = None
    loss: str | None = None
    probes: tuple[str, ...] = DEFAULT
    layers: tuple[int, ...] | None = None
    tokenizer: Path | None = None
    dtype: str | None = None
    device: str | None = None
    allow_pickle: bool = False
    overwrite: bool = False
    progress: bool = False

    def digest(self, weights_sha256: str) -> str:
        """Return the SHA-256 of what decides the tables: weights, settings, contents of files, version of ln_probe."""
        content = asdict(self) | {"weights": weights_sha256, "ln_probe": __version__}
        for name in ("device", "allow_pickle", "overwrite", "progress"):
            del content[name]
        for name in ("prompts", "groups", "tokenizer"):
            if (path := content[name]) is not None:
                files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.is_file())
                content[name] = [sha256_of_file(file) for file in files]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def digest_of(folder: Path) -> str | None:
    """Return the digest of the report in a folder: None without a report, "" where a probe failed."""
    try:
        return str(read_json(folder / "report.json")["provenance"].get("digest", "unknown"))
    except FileNotFoundError:
        return None


def write_pages(out: Path, failures: Mapping[str, str], targets: Sequence[Target]) -> tuple[Path, list[str]]:
    """Write the index of the reports in a folder.

    Args:
        failures: why a model has no report, by the model's name.
        targets: whose first findings are returned.

    Returns:
        The index, and the first finding of each target, with the model's name.
    """
    if "torch" not in sys.modules:  # its import takes seconds, and worker processes have it
        with ProcessPoolExecutor(1, mp_context=_PROCESSES) as pool:
            return pool.submit(_write_pages, out, failures, targets).result()
    return _write_pages(out, failures, targets)


def _write_pages(out: Path, failures: Mapping[str, str], targets: Sequence[Target]) -> tuple[Path, list[str]]:
    from ln_probe.page.index import write_index
    from ln_probe.report import load_report

    reports = [load_report(out / target.folder) for target in targets]
    return write_index(out, failures), [f"{report.name}: {report.findings()[0]}" for report in reports]


def report_one(target: Target, settings: Settings, out: Path) -> Path:
    """Load a checkpoint, measure it and save its report; one of the same weights and settings is left as it is.

    Returns:
        The report's folder in `out`.

    Raises:
        BatchError: the folder holds a report of other weights or settings, and `overwrite` is off.
        ProbeError: a probe failed. The others' tables are saved, and the same command measures all again.
        Exception: whatever `load_model`, `analyze` and `Report.save` raise.
    """
    from ln_probe.analyses.probes.base import ProbeError
    from ln_probe.measure import analyze
    from ln_probe.models import load_as_trained, source_of

    folder = out / target.folder
    options = {"device": settings.device, "dtype": settings.dtype, "allow_pickle": settings.allow_pickle}
    model: Any = load_as_trained(target.name, revision=target.revision, **options)
    digest = settings.digest(str(source_of(model).weights_sha256))
    existing = digest_of(folder)
    if existing == digest:
        return folder
    if existing and not settings.overwrite:
        raise BatchError(f"{folder} holds a report of other weights or settings: --overwrite replaces it")
    token_strings = settings.tokenizer
    if token_strings is not None and token_strings.is_dir():
        from transformers import AutoTokenizer

        model.tokenizer = AutoTokenizer.from_pretrained(token_strings, local_files_only=True)
        token_strings = None
    if line := memory_shortage(model, settings.max_tokens):
        print(f"{target}: {line}", file=sys.stderr)
    report = analyze(
        model,
        settings.prompts,
        max_prompts=settings.max_prompts,
        max_tokens=settings.max_tokens,
        groups=None if settings.groups is None else read_labels(settings.groups)[: settings.max_prompts],
        loss=settings.loss,
        probes=settings.probes,
        layers=settings.layers,
        tokenizer=token_strings,
        progress=settings.progress,
    )
    failed = "; ".join(map(str, report.failures))
    report = replace(report, provenance={**report.provenance, "digest": "" if failed else digest})
    report.save(folder, index="../index.html")
    if failed:
        raise ProbeError(failed)
    return folder


def read_labels(path: Path) -> list[str]:
    """Return the group labels of a file, a line for each prompt.

    Raises:
        OSError: it cannot be read.
        FileError: it is not UTF-8, or a line holds no label.
    """
    labels = read_text(path).splitlines()
    for number, label in enumerate(labels or [""], start=1):
        if not label.strip():
            raise FileError(f"{path}: line {number} holds no label; write one label a line, a line for each prompt")
    return labels


def memory_shortage(model: Any, max_tokens: int) -> str:
    """Return a line if a report is expected to need more memory than is free, else ""."""
    config, tokens = model.cfg, min(max_tokens, model.cfg.n_ctx)
    logits = 4 * tokens * config.d_vocab  # of one prompt, in float32
    patterns = 4 * tokens**2 * config.n_heads * config.n_layers
    needed, free = 4 * logits + 2 * patterns, free_memory()
    if needed <= free:
        return ""
    return f"about {needed / 2**30:.1f} GB needed, {free / 2**30:.1f} GB free: use a smaller --max-tokens or --workers"


def free_memory() -> float:
    """Return the bytes of memory that are free, on this machine and in its container; infinite where unknown."""
    free, container = math.inf, Path("/sys/fs/cgroup")
    with suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # "max": no limit
        limit = int((container / "memory.max").read_text())
        current = int((container / "memory.current").read_text())
        free = min(free, limit - current)
    return free


@dataclass(frozen=True)
class Outcome:
    """How the work on a checkpoint ended: `error` says why it has no report; `skipped` if its report was there."""

    target: Target
    error: str = ""
    skipped: bool = False


def attempt(target: Target, settings: Settings, out: Path) -> Outcome:
    """Make a report; an error is in the outcome, so that it costs this checkpoint alone."""
    try:
        existing = digest_of(out / target.folder)
        skipped = digest_of(report_one(target, settings, out)) == existing
    except Exception as error:
        return Outcome(target, f"{type(error).__name__}: {error}")
    return Outcome(target, skipped=skipped)


@contextmanager
def locked(targets: Sequence[Target], out: Path) -> Iterator[None]:
    """Hold the locks of these reports; other commands may write those of other targets to the same folder.

    Raises:
        BatchError: another command writes one of them, or two targets have one folder.
        OSError: `out` cannot be written.
    """
    folders = [target.folder for target in targets]
    if repeated := [folder for folder in folders if folders.count(folder) > 1]:
        raise BatchError(f"two models would have the report {out / repeated[0]}: name each once")
    with ExitStack() as stack:
        for target in targets:
            _lock_file(target, out).parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(_lock_file(target, out), timeout=0))
            except Timeout:
                raise BatchError(f"{out / target.folder} is being written by another command") from None
        yield


def _lock_file(target: Target, out: Path) -> Path:
    return out / _LOCKS / f"{target.folder}.lock"


def default_workers(targets: Sequence[Target], device: str | None) -> int:
    """Return how many checkpoints are measured side by side: one on a GPU, else up to MAX_WORKERS."""
    on_gpu = device is not None and device.startswith("cuda")
    if device is None and any(Path("/dev").glob("nvidia[0-9]*")):  # only then is torch worth its import
        import torch

        on_gpu = torch.cuda.is_available()
    return 1 if on_gpu else min(len(targets), available_processors(), MAX_WORKERS)


def local_outcomes(targets: Sequence[Target], settings: Settings, out: Path, workers: int) -> Iterator[Outcome]:
    """Measure the checkpoints in processes of this machine, and yield each outcome as it comes.

    A worker is a process pool of its own: if killed, it costs only its checkpoint, which is tried once more.
    """
    if len(targets) == 1:
        yield attempt(targets[0], settings, out)  # needs no second process
        return
    clock = _Clock(targets, workers)
    start = partial(_worker, max(1, available_processors() // workers), clock)
    waiting = deque((target, 0) for target in targets)  # with how many processes died of it
    idle = [start() for _ in range(min(workers, len(targets)))]
    running: dict[Future[Outcome], tuple[Target, int, ProcessPoolExecutor]] = {}
    try:
        while waiting or running:
            while waiting and idle:
                (target, deaths), worker = waiting.popleft(), idle.pop()
                try:
                    running[worker.submit(_attempt, target, settings, out)] = target, deaths, worker
                except BrokenProcessPool:  # killed while it was idle
                    waiting.appendleft((target, deaths))
                    idle.append(start())
            clock.show([target for target, _, _ in running.values()], len(waiting))
            for future in wait(running, timeout=_LOOK_S, return_when=FIRST_COMPLETED).done:
                target, deaths, worker = running.pop(future)
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    worker = start()
                    if not deaths:
                        waiting.appendleft((target, 1))
                        idle.append(worker)
                        continue
                    outcome = Outcome(target, KILLED)
                idle.append(worker)
                yield outcome
    finally:
        for process in multiprocessing.active_children():
            process.kill()


class _Clock:
    """Shows which of several models are measured, and the time left, as their processes estimate it."""

    def __init__(self, targets: Sequence[Target], workers: int) -> None:
        self.targets, self.workers = [str(target) for target in targets], workers
        self.shared = _PROCESSES.Array("d", [math.nan] * len(targets))  # when each will be done
        self.started: dict[str, float] = {}

    def show(self, running: Sequence[Target], waiting: int) -> None:
        """Set the progress line."""
        now, names = time.time(), [str(target) for target in running]
        ends = [self.shared[self.targets.index(name)] - now for name in names]
        elapsed = [now - self.started.setdefault(name, now) for name in names]
        whole = [sum(times) for times in zip(ends, elapsed, strict=True)]
        first = len(self.targets) - waiting - len(running) + 1
        last = f" to {first + len(running) - 1}" * (len(running) > 1)
        is_known = bool(names) and not any(map(math.isnan, ends))
        doing = "" if is_known else ": loading, first pass"
        tell(f"model{'s' * bool(last)} {first}{last} of {len(self.targets)} ({', '.join(names)}){doing}")
        if is_known:
            tell_left(max(*ends, 0.0) + sum(whole) / len(whole) * math.ceil(waiting / self.workers))


# Workers are forked from a process that has imported what takes seconds, and nothing else.
_PROCESSES: Any = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
_PROCESSES.set_forkserver_preload(["ln_probe.measure", "ln_probe.page.index"])
_LOOK_S = 0.5  # between two looks at the workers


def _worker(threads: int, clock: _Clock) -> ProcessPoolExecutor:
    arguments = (threads, clock.targets, clock.shared)
    return ProcessPoolExecutor(1, mp_context=_PROCESSES, initializer=_start_worker, initargs=arguments)


def _start_worker(threads: int, targets: list[str], shared: Any) -> None:
    global _shared
    follow_parent()
    use_threads(threads)
    _shared = targets, shared


_shared: tuple[list[str], Any] = [], None  # of a worker: all targets, and when each will be done


def _attempt(target: Target, settings: Settings, out: Path) -> Outcome:
    """Make a report in a worker, which tells the driver when it expects to be done."""
    targets, shared = _shared

    def on_left(seconds: float) -> None:
        shared[targets.index(str(target))] = time.time() + seconds

    with ProgressLine(quiet=True, on_left=on_left):
        return attempt(target, replace(settings, progress=False), out)


def use_threads(count: int) -> None:
    """Let torch and the geometry use at most so many threads in this process."""
    import torch

    from ln_probe.analyses.geometry.compiled import use_processors

    torch.set_num_threads(min(count, torch.get_num_threads()))
    use_processors(count)


def ray_outcomes(targets: Sequence[Target], settings: Settings, out: Path, workers: int | None) -> Iterator[Outcome]:
    """Measure the checkpoints as tasks of a Ray cluster, at most `workers` at a time, and yield how each ended.

    The cluster is that of RAY_ADDRESS, else one on this machine, else one that is started for the command.

    Raises:
        BatchError: Ray cannot be reached, or its workers do not see the folder `out`.
    """
    import ray

    host, _, port = os.environ.get("RAY_ADDRESS", "").rpartition(":")
    try:
        if port.isdigit() and "//" not in host:  # Ray would try for many minutes where nobody listens
            socket.create_connection((host, int(port)), timeout=RAY_ANSWER_S).close()
        ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise BatchError(f"no Ray cluster can be reached ({error}): check RAY_ADDRESS") from error
    on_gpu = settings.device is not None and settings.device.startswith("cuda")
    task = ray.remote(_ray_task).options(num_cpus=1, num_gpus=int(on_gpu), max_retries=1)
    waiting = deque(targets)
    running: dict[Any, Target] = {}
    try:
        while waiting or running:
            while waiting and (workers is None or len(running) < workers):
                target = waiting.popleft()
                running[task.remote(target, settings, out.absolute(), Path.cwd())] = target
            (reference, *_), _ = ray.wait(list(running), num_returns=1)
            target = running.pop(reference)
            try:
                yield ray.get(reference)
            except ray.exceptions.RayTaskError as error:  # `attempt` raises nothing
                raise BatchError(str(error.cause)) from error
            except ray.exceptions.RayError:
                yield Outcome(target, KILLED)
    finally:
        ray.shutdown()


def _ray_task(target: Target, settings: Settings, out: Path, folder: Path) -> Outcome:
    """Make a report on a node of the cluster."""
    if not _lock_file(target, out).is_file():
        raise BatchError(f"{out} is not there on node {socket.gethostname()}: --out must be a folder all nodes share")
    with suppress(OSError):
        os.chdir(folder)  # relative names of models mean what they mean to the driver
    use_threads(1)
    return attempt(target, settings, out)
