"""One trainer for every experiment of the laboratory, and the folder of a run.

A batch depends on the seed and the step alone; all else that changes (weights, moments, the step) is one dict
in `state.pt`, so an interrupted run continues bit for bit (on the same device, with the same number of threads).

lab.json            what the run is (task, model, training, data): two runs never share a folder
metrics.jsonl       a line per evaluation
checkpoints/        models at the steps `save_at` and at the last
model.safetensors   the final one
state.pt            where an interrupted run goes on
diverged.json       the loss stopped being a number
.lock               locked by the process that trains it
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, Protocol, runtime_checkable

import pandas as pd
import torch
import torch.nn.functional as F
from filelock import FileLock, Timeout
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ln_probe.analyses.lab import points
from ln_probe.analyses.lab.experiments import claim
from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.progress import ProgressLine, tell
from ln_probe.analyses.text import replacing, step_named, write_atomically

LAB_FILE, METRICS_FILE, MODEL_FILE = "lab.json", "metrics.jsonl", "model.safetensors"
STATE_FILE, DIVERGED_FILE, LOCK_FILE = "state.pt", "diverged.json", ".lock"
TEXT_BOUNDARY = "<|endoftext|>"  # begins every window of text, as in GPT-2


@dataclass(frozen=True)
class TrainConfig:
    """Schedule and sizes of a run. `lr` warms up linearly, then goes to `lr_end` as `schedule` says, in `decay_steps`
    updates (None: `steps`). `clip` 0 means none. `save_at`: steps whose model is saved, beside the last.
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

    def evaluates_at(self, step: int) -> bool:
        """Whether metrics are written after so many updates."""
        return step % self.evaluate_every == 0 or step == self.steps or step in self.evaluate_at


ADAM: dict[str, Any] = {"optimizer": "adam", "betas": (0.9, 0.999), "weight_decay": 0.0}


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
    """Load saved weights into a module, as float32; ValueError if damaged, of another shape or not finite."""
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} is missing")
    try:
        tensors = load(weights.read_bytes())  # mapped, another process could overwrite it
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{weights} cannot be read ({error}): it is truncated or corrupt") from error
    built = model.state_dict()
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise ValueError(f"{weights} does not fit {weights.parent / LAB_FILE}: {error}") from None
    for name, tensor in tensors.items():
        # A kernel's lag 0 may be infinite by construction.
        if tensor.is_floating_point() and not torch.equal(built[name], tensor) and not bool(tensor.isfinite().all()):
            raise ValueError(f"{weights}: {name} holds NaN or infinite numbers; nothing can be measured on it")


def load_run(path: str | Path, step: int | None = None) -> LabTransformer:
    """Load a lab run's model, the final one or that of `step`, in float32, with the folder's tokenizer.

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
        problem = f"{path / LAB_FILE} does not describe a LabTransformer ({error})"
        raise ValueError(f"{problem}: load other models with `Run.model()` of their experiment") from error
    model: LabTransformer = LabTransformer(config, tokenizer=_tokenizer(path)).eval()
    load_weights(model, weights)
    return model


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
    """Where the model of a step is saved."""
    return run / "checkpoints" / f"step-{step:07d}.safetensors"


def checkpoint_steps(run: Path) -> list[int]:
    """Return the steps whose model a run's folder holds, ascending."""
    files = (run / "checkpoints").glob("step-*.safetensors")
    return sorted(step for path in files if (step := step_named(path.stem)) is not None)


def weights_of(run: Path, step: int | None = None) -> Path:
    """Return the file of the model saved at `step`, or the final one; FileNotFoundError lists the steps."""
    weights = run / MODEL_FILE if step is None else checkpoint_path(run, step)
    if not weights.exists():
        steps = ", ".join(map(str, checkpoint_steps(run))) or "none"
        what = "no final model (unfinished?)" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{run} holds {what}; steps it has: {steps}")
    return weights


class DivergedError(RuntimeError):
    """The loss of a run is no longer a number."""


def train(
    task: Task, spec: ModelSpec, training: TrainConfig, out: str | Path, *, progress: bool = True, device: str = "cpu"
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
    claim(out, LAB_FILE, about, "run")
    if reason := why_diverged(out):
        raise DivergedError(reason)
    torch.manual_seed(training.seed)
    model = spec.build()
    if (out / MODEL_FILE).exists():
        load_weights(model, out / MODEL_FILE)
        return model.eval()
    if torch.device(device).type == "cuda":  # sums in the same order every time, from here on
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which torch asks for
        torch.use_deterministic_algorithms(True)
    try:
        with FileLock(out / LOCK_FILE, timeout=0), ProgressLine() if progress else nullcontext():
            _train(model, task, training, out, torch.device(device))
    except Timeout:
        raise FileExistsError(f"{out} is being trained by another process: wait for it") from None
    return model.cpu()


def _train(model: nn.Module, task: Task, training: TrainConfig, out: Path, device: torch.device) -> None:
    with calibrate(model):
        task.loss(model, task.batch(0, training.batch, training.seed))
    model.to(device)
    optimizer = _optimizer(model, training)
    state = _restored(model, optimizer, out / STATE_FILE)
    task.write_files(out)
    rows = read_metrics(out)  # what came after the state is done again
    lines = [json.dumps(row) + "\n" for row in rows.to_dict("records") if row["step"] <= state["step"]]
    write_atomically(out / METRICS_FILE, "".join(lines).encode())
    began = time.perf_counter() - state["seconds"]

    def stop_unless(finite: bool, problem: str) -> None:
        if not finite:
            message = f"{out}: {problem} at step {step} (seed {training.seed}). Lower lr (now {training.lr:g}) or clip"
            write_atomically(out / DIVERGED_FILE, (json.dumps({"step": step, "message": message}) + "\n").encode())
            raise DivergedError(message)

    for step in range(state["step"], training.steps):
        tell(out.name, step, training.steps, "steps")
        if step in training.save_at:
            save_model(model, checkpoint_path(out, step))
        for group in optimizer.param_groups:
            group["lr"] = training.lr_at(step)
        batch = task.batch(step, training.batch, training.seed)
        loss = task.loss(model, tree_map_only(Tensor, lambda tensor: tensor.to(device), batch))
        value = loss.item()
        stop_unless(math.isfinite(value), f"the loss is {value}")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if training.clip:
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        state |= {"step": step + 1, "loss": state["loss"] + value, "counted": state["counted"] + 1}
        if training.evaluates_at(step + 1):
            with torch.no_grad():
                measures = {"train_loss": state["loss"] / state["counted"], **task.evaluate(model.cpu())}
            model.to(device)
            losses = [x for name, x in measures.items() if name.endswith("loss")]
            stop_unless(all(map(math.isfinite, losses)), "a measured loss is not finite")
            with (out / METRICS_FILE).open("a") as file:
                row = {"step": step + 1, **measures, "seconds": round(time.perf_counter() - began, 1)}
                file.write(json.dumps(row) + "\n")
            state |= {"loss": 0.0, "counted": 0}
        if (step + 1) % training.state_every == 0 or step + 1 == training.steps:
            stop_unless(all(bool(w.isfinite().all()) for w in model.parameters()), "a weight is not finite")
            state |= {"seconds": time.perf_counter() - began}
            with replacing(out / STATE_FILE) as aside:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **state}, aside)
    save_model(model, checkpoint_path(out, training.steps))
    save_model(model, out / MODEL_FILE)
    (out / STATE_FILE).unlink(missing_ok=True)


def _restored(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> dict[str, Any]:
    """Restore an interrupted run's state; return its numbers, those of the beginning without a saved state."""
    if not path.exists():
        return {"step": 0, "loss": 0.0, "counted": 0, "seconds": 0.0}
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True)
        model.load_state_dict(state.pop("model"))
        optimizer.load_state_dict(state.pop("optimizer"))
    except (KeyError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
        raise ValueError(f"{path} is damaged, or of another model: delete it to start again") from error
    return state


def why_diverged(run: Path) -> str:
    """Return why a run stopped for good; empty if it did not."""
    file = run / DIVERGED_FILE
    return str(json.loads(file.read_text(encoding="utf-8"))["message"]) if file.exists() else ""


def _optimizer(model: nn.Module, training: TrainConfig) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == many] for many in (True, False))
    groups = [  # decay is for matrices alone
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return kind([group for group in groups if group["params"]], betas=training.betas, fused=True)
