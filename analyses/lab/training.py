"""One trainer for every experiment of the laboratory: deterministic, resumable, streamed to disk.

A batch depends on the seed and the step alone, and everything else that moves (weights, Adam's moments, the step) is
in one checkpoint, so an interrupted run continues bit for bit (with the same number of threads: sums are split among
them). A run is a folder:

    lab.json                what was trained, on what, with which seed (the run's identity)
    metrics.jsonl           one line per evaluation
    checkpoints/*.safetensors   the model at chosen steps
    state.safetensors       the last resumable state (removed when the run ends)
    model.safetensors       the final model
    diverged.json           instead of it, if the loss stopped being a number
    tokenizer.json          where the task has text
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn
from tqdm.auto import tqdm

from ln_probe.analyses.files import read_json, write_atomically
from ln_probe.analyses.lab.arithmetic import arithmetic_of
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.run_folder import (
    DIVERGED_FILE,
    LAB_FILE,
    LOCK_FILE,
    METRICS_FILE,
    MODEL_FILE,
    STATE_FILE,
    DamagedTensorsError,
    check,
    check_evaluations,
    checkpoint_path,
    claim,
    hashes_beside,
    load_tensors,
    metric_line,
    metric_rows,
    save_tensors,
    weights_of,
    why_diverged,
)
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.progress import tell

FORMAT = 1
TEXT_BOUNDARY = "<|endoftext|>"  # begins every window of text, as in GPT-2

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

    `batch` is whatever `loss` takes, and depends on its arguments alone. `evaluate` runs without gradients.
    """

    name: str

    @property
    def identity(self) -> dict[str, Any]: ...
    def batch(self, step: int, size: int, seed: int) -> Any: ...
    def loss(self, model: nn.Module, batch: Any) -> Tensor: ...
    def evaluate(self, model: nn.Module) -> dict[str, float]: ...
    def write_files(self, out: Path) -> None: ...


class DivergedError(RuntimeError):
    """The loss of a run is no longer a number."""


def step_generator(seed: int, step: int) -> torch.Generator:
    """The random stream of one step: the same whatever came before it."""
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


def check_run(task: Task, spec: ModelSpec, training: TrainConfig, out: Path) -> None:
    """Raise FileExistsError if `out` holds a run that is not this one (ValueError: nobody can say); none is fine."""
    if (out / LAB_FILE).exists():
        check(out, _identity(task, spec, training))


def _pack(model: nn.Module, optimizer: torch.optim.Optimizer, counters: dict[str, float]) -> dict[str, Tensor]:
    packed = {f"model.{k}": v.contiguous() for k, v in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        packed |= {f"adam.{k}.{name}": v.contiguous() for k, v in optimizer.state[parameter].items()}
    packed |= {f"counter.{k}": torch.tensor(v, dtype=torch.float64) for k, v in counters.items()}
    return packed


def _unpack(model: nn.Module, optimizer: torch.optim.Optimizer, packed: dict[str, Tensor]) -> dict[str, float]:
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "adam": {}, "counter": {}}
    for key, value in packed.items():
        kind, name = key.split(".", 1)
        parts[kind][name] = value
    model.load_state_dict(parts["model"])
    for name, parameter in model.named_parameters():
        held = {k: parts["adam"][f"{k}.{name}"] for k in ("step", "exp_avg", "exp_avg_sq")}
        if held["exp_avg"].shape != parameter.shape:
            raise KeyError(f"adam.exp_avg.{name} of shape {tuple(held['exp_avg'].shape)}")
        optimizer.state[parameter] = held
    return {k: float(v) for k, v in parts["counter"].items()}


def save_model(
    model: nn.Module, path: Path, dtype: torch.dtype = torch.float32, *, about: Mapping[str, Any] | None = None
) -> None:
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_tensors(tensors, path, about)


def train(
    task: Task,
    spec: ModelSpec,
    training: TrainConfig,
    out: Path,
    *,
    until: int | None = None,
    progress: bool = True,
) -> nn.Module:
    """Train one model into the folder `out`, going on where an earlier call stopped.

    Divisors that were not given are measured on the first batch, in a pass through `task.loss`. With `until`, it stops
    after that step, ready to go on.

    Raises:
        FileExistsError: `out` holds something that is not this run, or another process trains it now.
        ValueError: its saved state is truncated, corrupt or of another model.
        DivergedError: the loss became NaN or infinite, now or in an earlier call (what was saved before stays).
    """
    out = Path(out)
    claim(out, _identity(task, spec, training))
    try:
        with nullcontext() if (out / MODEL_FILE).exists() else FileLock(out / LOCK_FILE, timeout=0):
            return _train(task, spec, training, out, until, progress)
    except Timeout:
        raise FileExistsError(f"{out} is being trained by another process: wait for it") from None


def _train(
    task: Task, spec: ModelSpec, training: TrainConfig, out: Path, until: int | None, progress: bool
) -> nn.Module:
    if (out / DIVERGED_FILE).exists():
        raise DivergedError(why_diverged(out))
    torch.manual_seed(training.seed)
    model = spec.build()
    if (out / MODEL_FILE).exists():
        about = load_weights(model, out / MODEL_FILE)
        check_evaluations(out / METRICS_FILE, len(metric_rows(out / METRICS_FILE)), about.get("evaluations"))
        return model.eval()
    with calibrate(model):
        task.loss(model, task.batch(0, training.batch, training.seed))
    optimizer = _optimizer(model, training)
    state = out / STATE_FILE
    counters = _restore(model, optimizer, state)
    start = int(counters["step"])
    task.write_files(out)
    about = {"beside": hashes_beside(out)}
    (out / "checkpoints").mkdir(exist_ok=True)
    metrics = out / METRICS_FILE
    rows = [row for row in metric_rows(metrics) if row["step"] <= start]  # what came after the state is done again
    check_evaluations(metrics, len(rows), counters.get("evaluations"))
    write_atomically(metrics, "".join(map(metric_line, rows)).encode())
    began = time.perf_counter() - counters["seconds"]
    stop = training.steps if until is None else max(start, min(until, training.steps))
    bar = tqdm(range(start, stop), initial=start, total=training.steps, disable=not progress, desc=out.name)
    for step in bar:
        tell(out.name, step, training.steps, "steps")
        if step in training.save_at:
            save_model(model, checkpoint_path(out, step), about=about)
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(step)
        loss = task.loss(model, task.batch(step, training.batch, training.seed))
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
                row |= task.evaluate(model)
            for name, found in row.items():
                if name.endswith("loss") and not math.isfinite(found):
                    raise _diverged(out, training, done, found)
            with metrics.open("a") as file:
                file.write(metric_line(row | {"seconds": round(time.perf_counter() - began, 1)}))
            counters["loss"], counters["counted"] = 0.0, 0.0
            bar.set_postfix({k: f"{v:.3f}" for k, v in row.items() if k.endswith("loss")})
        if (done % training.state_every == 0 or done == stop) and done < training.steps:
            if not finite(model):  # what was saved before stays
                raise _diverged(out, training, done, math.nan, "a weight")
            counters |= {"step": done, "seconds": time.perf_counter() - began, "evaluations": len(metric_rows(metrics))}
            save_tensors(_pack(model, optimizer, counters), state)
    if not finite(model):
        raise _diverged(out, training, stop, math.nan, "a weight")
    if stop < training.steps:
        return model
    save_model(model, checkpoint_path(out, training.steps), about=about)
    save_model(model, out / MODEL_FILE, about=about | {"evaluations": len(metric_rows(metrics))})
    state.unlink(missing_ok=True)
    return model


def _restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: Path) -> dict[str, float]:
    """Where an interrupted run stopped, put back into model and optimizer; zeros if there is nothing to go on from."""
    if not state.exists():
        return {"step": 0.0, "loss": 0.0, "counted": 0.0, "seconds": 0.0}
    try:
        return _unpack(model, optimizer, load_tensors(state)[0])
    except DamagedTensorsError as error:
        raise ValueError(f"{error}; delete it to start again") from error
    except (KeyError, RuntimeError, ValueError) as error:
        where = state.parent / LAB_FILE
        raise ValueError(f"{state} does not fit {where} ({error}): delete it to start again") from error


def finite(model: nn.Module) -> bool:
    """Whether every weight is a number."""
    return all(bool(w.isfinite().all()) for w in model.parameters())


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


def load_run(path: str | Path, step: int | None = None) -> LabTransformer:
    """The model of a lab run's folder: the final one, or the one kept at `step`.

    Weights are float32 in memory, whatever they are on disk, unless the folder says that the model computes otherwise
    (`arithmetic`: compiled programs). The tokenizer is attached where the folder has one.

    Raises:
        FileNotFoundError: the folder holds no lab run, is unfinished, or has no such step (says which it has).
        ValueError: a file is truncated or does not fit the configuration beside it.
    """
    path = Path(path)
    if not (path / LAB_FILE).is_file():
        raise FileNotFoundError(f"{path} holds no {LAB_FILE}: not a lab run's folder")
    weights = weights_of(path, step)
    tensors, about = _read_weights(weights)
    for name, digest in about.get("beside", {}).items():
        if hashes_beside(path).get(name) != digest:
            raise ValueError(f"{path / name} is not what it was when {weights} was written: restore it")
    config = _config(path / LAB_FILE, len(tensors))
    with torch.device("meta"):  # before memory is spent on it
        _check_fit(LabTransformer(config), tensors, weights)
    arithmetic = arithmetic_of(path)
    model = LabTransformer(config, tokenizer=_tokenizer(path)).to(arithmetic.dtype)  # which takes weights of any format
    model.load_state_dict(tensors)
    arithmetic.give(model)
    return model.eval()


def _config(path: Path, tensors: int) -> LabConfig:
    """What a run's file says of its model, which has at most as many layers as there are tensors."""
    try:
        config = LabConfig(**read_json(path)["model"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not describe a lab model ({error!r})") from error
    if config.n_layers > tensors:
        raise ValueError(f"{path} says {config.n_layers} layers, and the weights are {tensors} tensors")
    return config


def load_weights(model: nn.Module, weights: Path) -> dict[str, Any]:
    """Put a saved model's weights into a module of the same shape, as float32; what else the file says.

    Raises:
        ValueError: the file is damaged, of another shape, or holds NaN or infinite numbers.
    """
    tensors, about = _read_weights(weights)
    _check_fit(model, tensors, weights)
    model.load_state_dict(tensors)
    return about


def _read_weights(weights: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, about = load_tensors(weights)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise ValueError(
                f"{weights}: {name} holds {count} numbers that are NaN or infinite: the file is damaged or the "
                "training diverged; nothing can be measured on it"
            )
    return tensors, about


def _check_fit(model: nn.Module, tensors: dict[str, Tensor], weights: Path) -> None:
    wanted = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    found = {k: tuple(v.shape) for k, v in tensors.items()}
    wrong = next((k for k in sorted({*wanted, *found}) if wanted.get(k) != found.get(k)), None)
    if wrong is not None:
        raise ValueError(
            f"{weights} does not fit {weights.parent / LAB_FILE}: {wrong} is of shape {found.get(wrong)} in the file, "
            f"{wanted.get(wrong)} in the model"
        )


def _tokenizer(path: Path) -> Any:
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token=TEXT_BOUNDARY, eos_token=TEXT_BOUNDARY)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise ValueError(f"{file} is not a tokenizer ({error}): restore it") from error
