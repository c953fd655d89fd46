"""One trainer for every experiment of the laboratory, and the folder of a run.

A batch depends on the seed and the step alone, and everything else that moves (weights, moments, the step) is one dict
in `state.pt`, so an interrupted run continues bit for bit (on the same device, with the same number of threads).

lab.json            what the run is (task, model, training, data): two runs never share a folder
metrics.jsonl       a line per evaluation
checkpoints/        models kept on the way
model.safetensors   the final one
state.pt            where an interrupted run goes on
diverged.json       the loss stopped being a number
.lock               held by the process that trains it
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
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ln_probe.analyses.files import PARTIAL, replacing, write_atomically
from ln_probe.analyses.lab import points
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.progress import ProgressLine, follow_parent, tell
from ln_probe.analyses.text import step_named

LAB_FILE, METRICS_FILE, MODEL_FILE = "lab.json", "metrics.jsonl", "model.safetensors"
STATE_FILE, DIVERGED_FILE, LOCK_FILE = "state.pt", "diverged.json", ".lock"
TEXT_BOUNDARY = "<|endoftext|>"  # begins every window of text, as in GPT-2


@dataclass(frozen=True)
class TrainConfig:
    """Schedule and sizes of a run. `lr` warms up linearly, then goes to `lr_end` as `schedule` says, in `decay_steps`
    updates (None: `steps`). `clip` 0 means none. `save_at`: steps whose model is kept, beside the last.
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

    def lr_at(self, step: int) -> float:
        """The rate of an update, counted from 0."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        part = (step - self.warmup) / max(1, (self.decay_steps or self.steps) - self.warmup)
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "linear":
            return self.lr_end + (self.lr - self.lr_end) * max(0.0, 1 - part)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * min(1.0, part))) / 2

    def evaluates_at(self, done: int) -> bool:
        """Whether metrics are written after so many updates."""
        return done % self.evaluate_every == 0 or done == self.steps or done in self.evaluate_at


ADAM: dict[str, Any] = {"optimizer": "adam", "betas": (0.9, 0.999), "weight_decay": 0.0}  # torch's defaults


def text_training(size: Any, seed: int, lr: float, **others: Any) -> TrainConfig:
    """Warm up over a twentieth of the steps, then a cosine to a tenth of the rate; `size` has `steps` and `batch`."""
    warmup = size.steps // 20
    return TrainConfig(size.steps, size.batch, lr, lr / 10, warmup=warmup, clip=1.0, seed=seed, **others)


@runtime_checkable
class ModelSpec(Protocol):
    """What describes a model; `build` draws from torch's global generator, `to_dict` is plain JSON that decides it."""

    def build(self) -> nn.Module: ...
    def to_dict(self) -> dict[str, Any]: ...


@runtime_checkable
class Task(Protocol):
    """What a run trains on. `identity`, plain JSON, decides its batches; `batch` depends on its arguments alone."""

    name: str

    @property
    def identity(self) -> dict[str, Any]: ...
    def batch(self, step: int, size: int, seed: int) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...
    def evaluate(self, model: nn.Module) -> dict[str, float]: ...

    def write_files(self, out: Path) -> None:
        """Write into the run's folder what its model needs besides weights; nothing by default."""
        return


PAD = -100  # at padding there is no label; torch's default ignore_index
Words = tuple[Int[Tensor, "word pos"], Int[Tensor, "word pos"]]  # tokens and labels (or PAD)


class WordsTask(Task):
    """Label every letter of words; the loss is the mean over letters that are not PAD."""

    answers: int | None = None  # how many of a model's logits are answers, the first; None: all

    def logits(self, model: nn.Module, tokens: Int[Tensor, "word pos"]) -> Float[Tensor, "word pos answer"]:
        """The logits that are answers."""
        logits: Tensor = model(tokens)
        return logits[..., : self.answers]

    def loss(self, model: nn.Module, batch: Words) -> Float[Tensor, ""]:
        return F.cross_entropy(self.logits(model, batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=PAD)


def step_generator(seed: int, step: int) -> torch.Generator:
    """Return the random stream of one step: independent of earlier steps."""
    digest = hashlib.sha256(f"{seed}/{step}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def save_model(model: nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a model's weights as safetensors."""
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    write_atomically(path, save({k: v.contiguous() for k, v in tensors.items()}, {"format": "pt"}))


def load_weights(model: nn.Module, weights: Path) -> None:
    """Put a saved model's weights into a module, as float32; ValueError if damaged, of another shape or not finite."""
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} is missing")
    try:
        tensors = load(weights.read_bytes())  # not mapped into memory, where another process could overwrite it
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{weights} cannot be read ({error}): it is truncated or corrupt") from error
    built = model.state_dict()
    shapes, wanted = ({k: tuple(v.shape) for k, v in t.items()} for t in (tensors, built))
    if wrong := [k for k in sorted({*wanted, *shapes}) if wanted.get(k) != shapes.get(k)]:
        raise ValueError(
            f"{weights} does not fit {weights.parent / LAB_FILE}: {wrong[0]} is of shape {shapes.get(wrong[0])} in the "
            f"file, {wanted.get(wrong[0])} in the model"
        )
    for name, tensor in tensors.items():
        # A kernel's lag 0 may be infinite by construction.
        if tensor.is_floating_point() and not torch.equal(built[name], tensor) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{weights}: {name} holds NaN or infinite numbers; nothing can be measured on it")
    model.load_state_dict(tensors)


def load_run(path: str | Path, step: int | None = None) -> LabTransformer:
    """Load the model of a lab run's folder, the final one or that of `step`, in float32, with the folder's tokenizer.

    Raises:
        FileNotFoundError: the folder holds no lab run, is unfinished, or has no such step (says which it has).
        ValueError: a file does not fit the configuration in its folder, or the model is no `LabTransformer`.
    """
    path = Path(path)
    if not (path / LAB_FILE).is_file():
        raise FileNotFoundError(f"{path} holds no {LAB_FILE}: not a lab run's folder")
    weights = weights_of(path, step)
    try:
        config = LabConfig(**json.loads((path / LAB_FILE).read_text(encoding="utf-8"))["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path / LAB_FILE} does not describe a LabTransformer ({error}): load other models of the laboratory with "
            "`Run.model()` of their experiment"
        ) from error
    model = LabTransformer(config, tokenizer=_tokenizer(path))
    load_weights(model, weights)
    return model.eval()


def _tokenizer(path: Path) -> Any:
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    try:
        return points.tokenizer_class()(tokenizer_file=str(file), bos_token=TEXT_BOUNDARY, eos_token=TEXT_BOUNDARY)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"{file} is not a tokenizer ({error}): restore it") from error


def read_metrics(run: Path) -> pd.DataFrame:
    """Return a row per evaluation: `step`, `train_loss` (mean since the row before), the task's own, `seconds`."""
    file = run / METRICS_FILE
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    table = pd.DataFrame([json.loads(line) for line in lines if line.endswith("\n")])  # not half a line of a kill
    return table.drop(columns="check", errors="ignore")  # bundled runs have a checksum in every line


def checkpoint_path(run: Path, step: int) -> Path:
    """Where the model of a step is kept."""
    return run / "checkpoints" / f"step-{step:07d}.safetensors"


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps whose model a run's folder holds, ascending."""
    files = (run / "checkpoints").glob("step-*.safetensors")
    return sorted(step for path in files if (step := step_named(path.stem)) is not None)


def weights_of(run: Path, step: int | None = None) -> Path:
    """Return the file of the model kept at `step`, or of the final one; FileNotFoundError lists the steps."""
    weights = run / MODEL_FILE if step is None else checkpoint_path(run, step)
    if not weights.exists():
        steps = ", ".join(map(str, checkpoint_steps(run))) or "none"
        what = "no final model (unfinished?)" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{run} holds {what}; steps it has: {steps}")
    return weights


def measured_once(run: Path, name: str, weights: Path, measure: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Return a table measured of a file of weights, which is kept in a folder as NAME-KEY.csv."""
    file = run / f"{name}-{hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}.csv"
    if not file.exists():
        write_atomically(file, measure().to_csv(index=False).encode())
    return pd.read_csv(file)


def _claim(out: Path, identity: dict[str, Any]) -> None:
    """Make `out` this run's folder; FileExistsError if it holds something else."""
    path = out / LAB_FILE
    if path.exists():
        existing = json.loads(path.read_text(encoding="utf-8"))
        if wrong := sorted(k for k in {*identity, *existing} if existing.get(k) != identity.get(k)):
            raise FileExistsError(f"{out} holds another run (not the same: {', '.join(wrong)}): choose another folder")
    else:
        if out.exists() and any(p.suffix != PARTIAL for p in out.iterdir()):  # half a file is what a kill can leave
            raise FileExistsError(f"{out} is not empty and holds no lab run: choose another folder")
        write_atomically(path, (json.dumps(identity, indent=1) + "\n").encode())


class DivergedError(RuntimeError):
    """The loss of a run is no longer a number."""


def train(
    task: Task,
    spec: ModelSpec,
    training: TrainConfig,
    out: str | Path,
    *,
    progress: bool = True,
    device: str = "cpu",
) -> nn.Module:
    """Train a model, resuming where an earlier call stopped; it comes back on the CPU.

    Divisors that were not given are measured on the first batch, in a pass through `task.loss`. Evaluations are made on
    the CPU.

    Raises:
        FileExistsError: `out` holds something that is not this run, or another process trains it now.
        ValueError: its saved state is truncated, corrupt or of another model.
        DivergedError: the loss became NaN or infinite, now or in an earlier call (what was saved before stays).
    """
    out = Path(out)
    about = {"task": task.name, "model": spec.to_dict(), "training": asdict(training), "data": task.identity}
    _claim(out, json.loads(json.dumps(about)))  # as a file would hold it
    try:
        lock = nullcontext() if (out / MODEL_FILE).exists() else FileLock(out / LOCK_FILE, timeout=0)
        with lock, _deterministic(device), ProgressLine() if progress else nullcontext():
            return _train(task, spec, training, out, torch.device(device)).cpu()
    except Timeout:
        raise FileExistsError(f"{out} is being trained by another process: wait for it") from None


def _train(task: Task, spec: ModelSpec, training: TrainConfig, out: Path, device: torch.device) -> nn.Module:
    if (out / DIVERGED_FILE).exists():
        raise DivergedError(_why_diverged(out))
    torch.manual_seed(training.seed)
    model = spec.build()
    if (out / MODEL_FILE).exists():
        load_weights(model, out / MODEL_FILE)
        return model.eval()
    with calibrate(model):
        task.loss(model, task.batch(0, training.batch, training.seed))
    model.to(device)
    optimizer = _optimizer(model, training)
    state = _restored(model, optimizer, out / STATE_FILE)
    start, total, counted = state["step"], state["loss"], state["counted"]
    task.write_files(out)
    metrics = out / METRICS_FILE
    rows = read_metrics(out)  # what came after the state is done again
    lines = [json.dumps(row) + "\n" for row in rows.to_dict("records") if row["step"] <= start]
    write_atomically(metrics, "".join(lines).encode())
    began = time.perf_counter() - state["seconds"]
    for step in range(start, training.steps):
        tell(out.name, step, training.steps, "steps")
        if step in training.save_at:
            save_model(model, checkpoint_path(out, step))
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(step)
        loss = task.loss(model, _moved(task.batch(step, training.batch, training.seed), device))
        value = loss.item()
        if not math.isfinite(value):
            raise _diverged(out, training, step, f"the loss is {value}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if training.clip:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        done, total, counted = step + 1, total + value, counted + 1
        if training.evaluates_at(done):
            with torch.no_grad():
                row = {"step": done, "train_loss": total / counted, **task.evaluate(model.cpu())}
            model.to(device)
            if not all(math.isfinite(x) for name, x in row.items() if name.endswith("loss")):
                raise _diverged(out, training, done, "a measured loss is not finite")
            with metrics.open("a") as file:
                file.write(json.dumps(row | {"seconds": round(time.perf_counter() - began, 1)}) + "\n")
            total, counted = 0.0, 0
        if done % training.state_every == 0 or done == training.steps:
            if not all(bool(w.isfinite().all()) for w in model.parameters()):  # what was saved before stays
                raise _diverged(out, training, done, "a weight is not finite")
            numbers = {"step": done, "loss": total, "counted": counted, "seconds": time.perf_counter() - began}
            with replacing(out / STATE_FILE) as aside:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **numbers}, aside)
    save_model(model, checkpoint_path(out, training.steps))
    save_model(model, out / MODEL_FILE)
    (out / STATE_FILE).unlink(missing_ok=True)
    return model


def _restored(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    """Where an interrupted run stopped, put back into model and optimizer; the beginning if there is no saved state."""
    if not path.exists():
        return {"step": 0, "loss": 0.0, "counted": 0, "seconds": 0.0}
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    except (KeyError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, or of another model: delete it to start again") from error
    return state


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


def _diverged(out: Path, training: TrainConfig, step: int, what: str) -> DivergedError:
    """The error to raise, its mark left in the run's folder."""
    message = f"{out}: {what} at step {step} (seed {training.seed}). Lower lr (now {training.lr:g}) or clip"
    write_atomically(out / DIVERGED_FILE, (json.dumps({"step": step, "message": message}) + "\n").encode())
    return DivergedError(message)


def _why_diverged(run: Path) -> str:
    return str(json.loads((run / DIVERGED_FILE).read_text(encoding="utf-8"))["message"])


def _optimizer(model: nn.Module, training: TrainConfig) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    groups = [  # decay is for matrices alone
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], betas=training.betas)


@dataclass(frozen=True)
class Run:
    """One model to train; `keys` set it apart but for the seed, column by column ("norm": "layernorm", …)."""

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
        """Load the trained model, the final one or that of a saved step."""
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
    """List every run: all cells with the first seed, then all with the next, in folders `runs/{name}-seed{seed}`.

    `spec` is by default a cell's method `spec`, `keys` (its columns in the tables) its fields.
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
    """Train the unfinished runs, `request.jobs` processes at a time; return a message for each that diverged.

    Ctrl-C, or a run that cannot go on (as `train`), stops all: what they have saved stays.
    """
    if request.jobs == 1:
        for i, run in enumerate(runs):
            if request.progress:
                print(f"[{i + 1}/{len(runs)}] {run.name}", file=sys.stderr)
            _one(run, request.progress, request.device)
    else:
        _side_by_side(runs, request)
    return tuple(diverged(runs).values())


def _side_by_side(runs: Sequence[Run], request: Request) -> None:
    threads = max(1, (os.cpu_count() or 1) // request.jobs)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(request.jobs, mp_context=context, initializer=_begin, initargs=(threads,))
    try:
        waiting = [pool.submit(_one, run, False, request.device) for run in runs]
        with ProgressLine() if request.progress else nullcontext():
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


def _one(run: Run, progress: bool, device: str) -> None:
    with suppress(DivergedError):  # which has left its mark
        train(run.task, run.spec, run.training, run.folder, progress=progress, device=device)


def finished(runs: Iterable[Run], *, checkpoints: bool = False) -> list[Run]:
    """Return the runs that have their final model, or with `checkpoints` those that have any; ValueError if none."""
    done = [run for run in runs if (checkpoint_steps(run.folder) if checkpoints else run.finished)]
    if not done:
        raise ValueError("no run is finished")
    return done


def shared_settings(run: Run, varied: Sequence[str]) -> dict[str, Any]:
    """Return the training, the model and the data that all runs share, without the seed and the fields `varied`."""
    parts = {"training": vars(run.training), "model": run.spec.to_dict(), "data": run.task.identity}
    return {name: {k: v for k, v in part.items() if k not in ("seed", *varied)} for name, part in parts.items()}


def diverged(runs: Sequence[Run]) -> dict[str, str]:
    """Return messages of the runs whose loss became NaN or infinite, by the run's name."""
    marked = [run for run in runs if (run.folder / DIVERGED_FILE).exists()]
    return {run.name: f"{run.name}: {_why_diverged(run.folder)}" for run in marked}


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the metrics of all runs so far in long form: a row per (keys, seed, step, measure) with its `value`."""
    frames = []
    for run in runs:
        wide = read_metrics(run.folder)
        if wide.empty:
            continue
        long = wide.melt(id_vars="step", var_name="measure", value_name="value")
        frames.append(long.assign(**dict(run.keys), seed=run.seed))
    columns = [*runs[0].keys, "seed", "step", "measure", "value"]
    return pd.concat(frames, ignore_index=True)[columns] if frames else pd.DataFrame(columns=columns)
