"""The folder of a lab run: what its files are called, whose it is, what it has come to.

lab.json            what the run is (task, model, training, data): two runs never share a folder
metrics.jsonl       a line per evaluation
checkpoints/        models kept on the way
model.safetensors   the final one
state.pt            where an interrupted run goes on: one dict, by torch.save
diverged.json       the loss stopped being a number
.lock               held by the process that trains it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ln_probe.analyses.files import PARTIAL, FileError, read_json, write_atomically
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.text import step_named

LAB_FILE = "lab.json"
METRICS_FILE = "metrics.jsonl"
MODEL_FILE = "model.safetensors"
STATE_FILE = "state.pt"
DIVERGED_FILE = "diverged.json"
LOCK_FILE = ".lock"
TEXT_BOUNDARY = "<|endoftext|>"  # begins every window of text, as in GPT-2


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is truncated or no safetensors file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        return load(path.read_bytes())  # not mapped into memory, where another process could overwrite it
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or corrupt") from error


def claim(out: Path, identity: dict[str, Any]) -> None:
    """Make `out` this run's folder, or raise if it holds something else."""
    path = out / LAB_FILE
    if path.exists():
        check(out, identity)
        return
    if out.exists() and any(p.suffix != PARTIAL for p in out.iterdir()):  # half a file is all that a kill can leave
        raise FileExistsError(f"{out} is not empty and holds no lab run: choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(identity, indent=1) + "\n").encode())


def check(out: Path, identity: dict[str, Any]) -> None:
    """Raise FileExistsError if `out` holds another run, ValueError if its file is damaged."""
    path = out / LAB_FILE
    try:
        existing = read_json(path)
    except FileError as error:
        raise ValueError(f"{error}: delete {out} or choose another folder") from error
    wrong = sorted(k for k in {*identity, *existing} if existing.get(k) != identity.get(k))
    if wrong:
        raise FileExistsError(
            f"{out} holds another run (not the same: {', '.join(wrong)}): choose another folder or delete it"
        )


def metric_rows(metrics: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file; half a line at its end (a run that was killed) is left out."""
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in row.items() if k != "check"} for row in rows]  # bundled runs have checksums


def why_diverged(run: Path) -> str:
    """Return what `diverged.json` says."""
    return str(read_json(run / DIVERGED_FILE)["message"])


def read_metrics(run: Path) -> pd.DataFrame:
    """A row per evaluation of a run: `step`, `train_loss` (mean since the row before), the task's own, `seconds`."""
    return pd.DataFrame(metric_rows(run / METRICS_FILE))


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}.safetensors"


def checkpoint_steps(run: Path) -> list[int]:
    """Steps whose model a run's folder holds, ascending."""
    kept = (run / "checkpoints").glob("step-*.safetensors")
    return sorted(step for path in kept if (step := step_named(path.stem)) is not None)


def kept_beside(folder: Path, name: str, weights: Path, version: int, make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A table measured once from a file of weights and kept in a folder as NAME-KEY.csv.

    It is measured again if the weights are others, or the version, which is raised whenever what is measured changes.
    """
    key = hashlib.sha256(weights.read_bytes() + version.to_bytes(4, "big")).hexdigest()[:12]
    kept = folder / f"{name}-{key}.csv"
    if not kept.exists():
        write_atomically(kept, make().to_csv(index=False).encode())
    return pd.read_csv(kept)


def weights_of(run: Path, step: int | None = None) -> Path:
    """The file of the model kept at `step`, or of the final one; FileNotFoundError (says which there are) if none."""
    weights = run / MODEL_FILE if step is None else checkpoint_path(run, step)
    if not weights.exists():
        steps = ", ".join(map(str, checkpoint_steps(run))) or "none"
        what = "no final model (unfinished?)" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{run} holds {what}; steps it has: {steps}")
    return weights


def save_model(model: nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a model's weights as safetensors."""
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    write_atomically(path, save({k: v.contiguous() for k, v in tensors.items()}, {"format": "pt"}))


def load_run(path: str | Path, step: int | None = None) -> LabTransformer:
    """The model of a lab run's folder: the final one, or the one kept at `step`.

    Weights are float32 in memory, in any format on disk. The tokenizer is attached where the folder has one.

    Raises:
        FileNotFoundError: the folder holds no lab run, is unfinished, or has no such step (says which it has).
        ValueError: a file is truncated or does not fit the configuration in its folder.
    """
    path = Path(path)
    if not (path / LAB_FILE).is_file():
        raise FileNotFoundError(f"{path} holds no {LAB_FILE}: not a lab run's folder")
    weights = weights_of(path, step)
    tensors = load_tensors(weights)
    config = _config(path / LAB_FILE, len(tensors))
    with torch.device("meta"):  # before memory is spent on it
        _check_fit(LabTransformer(config), tensors, weights)
    model = LabTransformer(config, tokenizer=_tokenizer(path))  # which takes weights of any format
    model.load_state_dict(tensors)
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


def load_weights(model: nn.Module, weights: Path) -> None:
    """Put a saved model's weights into a module of the same shape, as float32.

    Raises:
        ValueError: the file is damaged, of another shape, or holds NaN or infinite numbers.
    """
    tensors = load_tensors(weights)
    _check_fit(model, tensors, weights)
    model.load_state_dict(tensors)


def _check_fit(model: nn.Module, tensors: dict[str, Tensor], weights: Path) -> None:
    """Raise ValueError if a file's tensors are not of the model's shapes, or not finite."""
    built = model.state_dict()
    wanted = {k: tuple(v.shape) for k, v in built.items()}
    found = {k: tuple(v.shape) for k, v in tensors.items()}
    wrong = next((k for k in sorted({*wanted, *found}) if wanted.get(k) != found.get(k)), None)
    if wrong is not None:
        raise ValueError(
            f"{weights} does not fit {weights.parent / LAB_FILE}: {wrong} is of shape {found.get(wrong)} in the file, "
            f"{wanted.get(wrong)} in the model"
        )
    for name, tensor in tensors.items():
        # A kernel's lag 0 may be infinite by construction.
        as_built = not built[name].is_meta and torch.equal(built[name], tensor)
        if tensor.is_floating_point() and not as_built and not bool(tensor.isfinite().all()):
            count = int((~tensor.isfinite()).sum())
            raise ValueError(
                f"{weights}: {name} holds {count} numbers that are NaN or infinite: the file is damaged or the "
                "training diverged; nothing can be measured on it"
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
