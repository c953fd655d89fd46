"""One trainer for every experiment of the laboratory: deterministic, resumable, streamed to disk.

A batch depends on the seed and the step alone, and everything else that moves (weights, Adam's moments, the step) is
in one checkpoint, so an interrupted run continues bit for bit (on the same device, with the same number of threads:
sums are split among them). A run is a folder (`run_folder`). The runs of one experiment are trained side by side, a run
that diverges is named and the others are kept.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, Protocol, TypeVar, cast, runtime_checkable

import pandas as pd
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.files import replacing, write_atomically
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.run_folder import (
    DIVERGED_FILE,
    LAB_FILE,
    LOCK_FILE,
    METRICS_FILE,
    MODEL_FILE,
    STATE_FILE,
    check,
    checkpoint_path,
    checkpoint_steps,
    claim,
    load_weights,
    metric_rows,
    read_metrics,
    save_model,
    weights_of,
    why_diverged,
)
from ln_probe.analyses.processes import follow_parent
from ln_probe.analyses.progress import ProgressLine, tell

FORMAT = 1

_CHOICES = {"optimizer": ("adamw", "adam"), "schedule": ("cosine", "linear", "constant")}


@dataclass(frozen=True)
class TrainConfig:
    """Schedule and sizes of a run. `lr` warms up linearly, then goes to `lr_end` as `schedule` says.

    Attributes:
        steps: updates in the run. batch: examples per update.
        decay_steps: updates after which `lr_end` would be reached; None means `steps`.
        clip: largest gradient norm; 0 means none.
        evaluate_every: updates between lines of `metrics.jsonl`.
        evaluate_at: more steps to evaluate at.
        save_at: steps whose model is kept; the last always is.
        state_every: updates between resumable states.

    Raises (on construction):
        ValueError: a size below 1, an unknown optimizer or schedule.
    """

    steps: int
    batch: int
    lr: float = 1e-3
    lr_end: float = 1e-4
    warmup: int = 200
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 0.5
    seed: int = 0
    evaluate_every: int = 200
    save_at: tuple[int, ...] = ()
    state_every: int = 200
    optimizer: Literal["adamw", "adam"] = "adamw"
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    decay_steps: int | None = None
    evaluate_at: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluate_every", "state_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}: known choices are {', '.join(known)}")

    def lr_at(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        part = (step - self.warmup) / max(1, (self.decay_steps or self.steps) - self.warmup)
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "linear":
            return self.lr_end + (self.lr - self.lr_end) * max(0.0, 1 - part)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * min(1.0, part))) / 2

    def evaluates_at(self, done: int) -> bool:
        return done % self.evaluate_every == 0 or done == self.steps or done in self.evaluate_at


ADAM: dict[str, Any] = {"optimizer": "adam", "betas": (0.9, 0.999), "weight_decay": 0.0}  # torch's defaults


def text_training(size: Any, seed: int, lr: float, **others: Any) -> TrainConfig:
    """Warm up over a twentieth of the steps, then a cosine to a tenth of the rate; `size` has `steps` and `batch`."""
    warmup = size.steps // 20
    return TrainConfig(size.steps, size.batch, lr, lr / 10, warmup=warmup, clip=1.0, seed=seed, **others)


@runtime_checkable
class ModelSpec(Protocol):
    """What describes a model: `LabConfig`, or a frozen dataclass of a task's own.

    `build` makes the module from torch's global generator (the trainer seeds it); `to_dict` is plain JSON and all that
    decides what is built.
    """

    def build(self) -> nn.Module: ...
    def to_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class Task(Protocol):
    """What a run trains on. `identity` is everything that decides its batches, as plain JSON.

    `batch` is the input of `loss`, and depends on its arguments alone. `evaluate` runs without gradients.
    """

    name: str

    @property
    def identity(self) -> dict[str, Any]: ...
    def batch(self, step: int, size: int, seed: int) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...
    def evaluate(self, model: nn.Module) -> dict[str, float]: ...

    def write_files(self, out: Path) -> None:
        """Write into the run's folder what its model needs besides weights; nothing by default."""
        return


PAD = -100  # at padding nothing is to be said; torch's default ignore_index
Words = tuple[Int[Tensor, "word pos"], Int[Tensor, "word pos"]]  # tokens, and what is to be said at each (or PAD)


class WordsTask(Task):
    """Say something at every letter of words; the loss is the mean over letters that are not PAD.

    Attributes:
        answers: how many of a model's logits are answers, the first; None: all.
    """

    answers: int | None = None

    def logits(self, model: nn.Module, tokens: Int[Tensor, "word pos"]) -> Float[Tensor, "word pos answer"]:
        logits: Tensor = model(tokens)
        return logits[..., : self.answers]

    def loss(self, model: nn.Module, batch: Words) -> Float[Tensor, ""]:
        return F.cross_entropy(self.logits(model, batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=PAD)


def with_gradients(value: float, inputs: Iterable[Tensor], gradients: Iterable[Tensor]) -> Float[Tensor, ""]:
    """A scalar with this value and these gradients, for a loss whose gradients are computed along with it."""
    terms = [(g * (x - x.detach())).sum() for x, g in zip(inputs, gradients, strict=True)]  # each is 0
    return value + torch.stack(terms).sum()


class DivergedError(RuntimeError):
    """The loss of a run is no longer a number."""


def step_generator(seed: int, step: int) -> torch.Generator:
    """The random stream of one step: independent of earlier steps."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _identity(task: Task, model: ModelSpec, training: TrainConfig) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(  # through JSON, to be compared with what a file holds
        json.dumps(
            {
                "format": FORMAT,
                "task": task.name,
                "model": model.to_dict(),
                "training": asdict(training),
                "data": task.identity,
            }
        )
    )
    return plain


def _save_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, counters: dict[str, float]) -> None:
    with replacing(path) as aside:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **counters}, aside)


def train(
    task: Task,
    spec: ModelSpec,
    training: TrainConfig,
    out: Path,
    *,
    until: int | None = None,
    progress: bool = True,
    device: str = "cpu",
) -> nn.Module:
    """Train one model into the folder `out`, resuming where an earlier call stopped; the model comes back on the CPU.

    Divisors that were not given are measured on the first batch, in a pass through `task.loss`. With `until`, it stops
    after that step, ready to go on. On another device than the CPU batches are moved there and evaluations are made
    on the CPU.

    Raises:
        FileExistsError: `out` holds something that is not this run, or another process trains it now.
        ValueError: its saved state is truncated, corrupt or of another model.
        DivergedError: the loss became NaN or infinite, now or in an earlier call (what was saved before stays).
    """
    out = Path(out)
    claim(out, _identity(task, spec, training))
    try:
        lock = nullcontext() if (out / MODEL_FILE).exists() else FileLock(out / LOCK_FILE, timeout=0)
        with lock, _deterministic(device), ProgressLine() if progress else nullcontext():
            return _train(task, spec, training, out, until, torch.device(device)).cpu()
    except Timeout:
        raise FileExistsError(f"{out} is being trained by another process: wait for it") from None


def _train(
    task: Task,
    spec: ModelSpec,
    training: TrainConfig,
    out: Path,
    until: int | None,
    device: torch.device,
) -> nn.Module:
    if (out / DIVERGED_FILE).exists():
        raise DivergedError(why_diverged(out))
    torch.manual_seed(training.seed)
    model = spec.build()
    if (out / MODEL_FILE).exists():
        load_weights(model, out / MODEL_FILE)
        return model.eval()
    with calibrate(model):
        task.loss(model, task.batch(0, training.batch, training.seed))
    model.to(device)
    optimizer = _optimizer(model, training)
    state = out / STATE_FILE
    counters = _restore(model, optimizer, state)
    start = int(counters["step"])
    task.write_files(out)
    (out / "checkpoints").mkdir(exist_ok=True)
    metrics = out / METRICS_FILE
    rows = [row for row in metric_rows(metrics) if row["step"] <= start]  # what came after the state is done again
    write_atomically(metrics, "".join(json.dumps(row) + "\n" for row in rows).encode())
    began = time.perf_counter() - counters["seconds"]
    stop = training.steps if until is None else max(start, min(until, training.steps))
    for step in range(start, stop):
        tell(out.name, step, training.steps, "steps")
        if step in training.save_at:
            save_model(model, checkpoint_path(out, step))
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(step)
        loss = task.loss(model, _moved(task.batch(step, training.batch, training.seed), device))
        value = loss.item()
        if not math.isfinite(value):
            raise _diverged(out, training, step, value)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if training.clip:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        done = step + 1
        counters["loss"], counters["counted"] = counters["loss"] + value, counters["counted"] + 1
        if training.evaluates_at(done):
            row = {"step": done, "train_loss": counters["loss"] / counters["counted"]}
            with torch.no_grad():
                row |= task.evaluate(model.cpu())
            model.to(device)
            for name, found in row.items():
                if name.endswith("loss") and not math.isfinite(found):
                    raise _diverged(out, training, done, found)
            rows.append(row | {"seconds": round(time.perf_counter() - began, 1)})
            with metrics.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            counters["loss"], counters["counted"] = 0.0, 0.0
        if done % training.state_every == 0 or done == stop:
            if not all(bool(w.isfinite().all()) for w in model.parameters()):  # what was saved before stays
                raise _diverged(out, training, done, math.nan, "a weight")
            counters |= {"step": done, "seconds": time.perf_counter() - began}
            _save_state(state, model, optimizer, counters)
    if stop < training.steps:
        return model
    save_model(model, checkpoint_path(out, training.steps))
    save_model(model, out / MODEL_FILE)
    state.unlink(missing_ok=True)
    return model


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, float]:
    """Where an interrupted run stopped, put back into model and optimizer; zeros if there is no saved state."""
    counters = {"step": 0.0, "loss": 0.0, "counted": 0.0, "seconds": 0.0}
    if not path.exists():
        return counters
    try:
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return {name: float(saved[name]) for name in counters}
    except (KeyError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, or of another model: delete it to start again") from error


@contextmanager
def _deterministic(device: str) -> Iterator[None]:
    """On a GPU, sums in the same order every time."""
    if torch.device(device).type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch asks for
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, tuple | list):
        return type(batch)(_moved(part, device) for part in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return replace(batch, **{f.name: _moved(getattr(batch, f.name), device) for f in fields(batch)})
    return batch


def _diverged(out: Path, training: TrainConfig, step: int, value: float, what: str = "the loss") -> DivergedError:
    """The error to raise, its mark left in the run's folder."""
    message = (
        f"{out}: {what} is {value} at step {step} (seed {training.seed}); the last state before it is "
        f"kept. Lower lr (now {training.lr:g}) or clip (now {training.clip:g})"
    )
    write_atomically(out / DIVERGED_FILE, (json.dumps({"step": step, "message": message}) + "\n").encode())
    return DivergedError(message)


def _optimizer(model: nn.Module, training: TrainConfig) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [  # decay is for matrices alone
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], betas=training.betas)


@dataclass(frozen=True)
class Run:
    """One model to train.

    `keys` set it apart from the others but for the seed, column by column ("norm": "layernorm", …).
    """

    keys: Mapping[str, str | int | float]
    task: Task
    spec: ModelSpec
    training: TrainConfig
    folder: Path

    @property
    def seed(self) -> int:
        return self.training.seed

    @property
    def name(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in self.keys.items()) + f", seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.folder / MODEL_FILE).exists()

    def model(self, step: int | None = None) -> nn.Module:
        """The trained model, the final one or that of a saved step.

        Raises:
            FileNotFoundError: it is not there (lists the steps that are).
        """
        model = self.spec.build()
        load_weights(model, weights_of(self.folder, step))
        return model.eval()


Cell = TypeVar("Cell")


def planned(
    cells: Iterable[Cell],
    request: Request,
    *,
    name: Callable[[Cell], str],
    task: Callable[[Cell, int], Task],
    training: Callable[[Cell, int], TrainConfig],
    spec: Callable[[Cell], ModelSpec] | None = None,
    keys: Callable[[Cell], Mapping[str, str | int | float]] = vars,
) -> list[Run]:
    """Every run: all cells with the first seed, then all with the next, so that a part of it is already a result.

    Args:
        name: of a cell; a run's folder is `runs/{name}-seed{seed}`.
        task, training: of a cell and a seed.
        spec: of a cell; None: its method `spec`.
        keys: a cell's columns in the tables; by default its fields.

    Raises:
        ValueError: two cells have the same name, so that their runs would share a folder.
    """
    cells = list(cells)
    names = [name(cell) for cell in cells]
    if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
        raise ValueError(f"two cells are called {twice[0]!r}, so their runs would share a folder: name what differs")
    return [
        Run(
            dict(keys(cell)),
            task(cell, seed),
            spec(cell) if spec is not None else cast("Any", cell).spec(),
            training(cell, seed),
            request.out / "runs" / f"{name(cell)}-seed{seed}",
        )
        for seed in request.seeds
        for cell in cells
    ]


def carry_out(runs: Sequence[Run], request: Request) -> tuple[str, ...]:
    """Train the unfinished runs, or (`request.collect`) only check that the folders belong to these runs.

    Returns:
        What became of the runs that diverged, a message each.

    Raises:
        FileExistsError: a run's folder holds another run.
        ValueError: as `train_all`; or there is nothing to collect.
    """
    if request.collect:
        if runs and not any(run.folder.exists() for run in runs):
            raise ValueError(f"{request.out} holds none of these {len(runs)} runs: leave out --collect to train them")
        for run in runs:
            if (run.folder / LAB_FILE).exists():
                check(run.folder, _identity(run.task, run.spec, run.training))
    else:
        train_all(runs, jobs=request.jobs, progress=request.progress, device=request.device)
    return tuple(diverged(runs).values())


def train_all(
    runs: Sequence[Run], *, jobs: int = 1, until: int | None = None, progress: bool = True, device: str = "cpu"
) -> None:
    """Train what is not finished yet, `jobs` at a time in separate processes; runs that diverge are left as such.

    With `until`, every run stops after that step, ready to go on. Ctrl-C, or a run that cannot go on, stops all: what
    they have saved stays.

    Raises:
        ValueError: jobs below 1.
        FileExistsError, ValueError: of the first run that `train` refuses.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    if jobs == 1:
        for i, run in enumerate(runs):
            if progress:
                print(f"[{i + 1}/{len(runs)}] {run.name}", file=sys.stderr)
            _one(run, until, progress, device)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(threads,))
    try:
        waiting = [pool.submit(_one, run, until, False, device) for run in runs]
        tell("training", 0, len(runs), "runs")
        with ProgressLine() if progress else nullcontext():
            for count, done in enumerate(as_completed(waiting), 1):
                done.result()
                tell("training", count, len(runs), "runs")
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate()
        raise
    pool.shutdown()


def _begin(threads: int) -> None:
    follow_parent()
    torch.set_num_threads(threads)


def _one(run: Run, until: int | None, progress: bool, device: str) -> None:
    with suppress(DivergedError):  # which has left its mark
        train(run.task, run.spec, run.training, run.folder, until=until, progress=progress, device=device)


def finished(runs: Iterable[Run], *, checkpoints: bool = False) -> list[Run]:
    """Return the runs that have their final model, or with `checkpoints` those that have any.

    Raises:
        ValueError: none has.
    """
    done = [run for run in runs if (checkpoint_steps(run.folder) if checkpoints else run.finished)]
    if not done:
        raise ValueError("no run has got there yet: leave out --collect to train")
    return done


def shared_settings(run: Run, varied: Sequence[str]) -> dict[str, Any]:
    """Return the training, the model and the data that all runs share, without the seed and the fields `varied`."""
    parts = {"training": vars(run.training), "model": run.spec.to_dict(), "data": run.task.identity}
    return {name: {k: v for k, v in part.items() if k not in ("seed", *varied)} for name, part in parts.items()}


def diverged(runs: Sequence[Run]) -> dict[str, str]:
    """Messages of the runs whose loss became NaN or infinite, by the run's name."""
    marked = [run for run in runs if (run.folder / DIVERGED_FILE).exists()]
    return {run.name: f"{run.name}: {why_diverged(run.folder)}" for run in marked}


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """Metrics of all runs so far in long form: a row per (keys, seed, step, measure) with its `value`."""
    frames = []
    for run in runs:
        wide = read_metrics(run.folder)
        if wide.empty:
            continue
        long = wide.melt(id_vars="step", var_name="measure", value_name="value")
        frames.append(long.assign(**dict(run.keys), seed=run.seed))
    columns = [*runs[0].keys, "seed", "step", "measure", "value"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)
