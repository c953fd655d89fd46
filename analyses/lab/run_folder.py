"""The folder of a lab run: what its files are called, whose it is, what it has come to.

lab.json            what the run is (task, model, training, data): two runs never share a folder
metrics.jsonl       a line per evaluation
checkpoints/        models kept on the way
model.safetensors   the final one
state.safetensors   where an interrupted run goes on
diverged.json       the loss stopped being a number
.lock               held by the process that trains it
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ln_probe.analyses.files import PARTIAL, FileError, parse_json, read_json, write_atomically
from ln_probe.analyses.lab.arithmetic import Arithmetic, Precision, install
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer
from ln_probe.analyses.text import step_named

_KEY = "ln_probe"


def save_tensors(tensors: Mapping[str, Tensor], path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write tensors by name into a safetensors file, with a SHA-256 over names, types, shapes and numbers.

    `about` is what else is to be known of them, as plain JSON; hashed with them.
    """
    held = {k: v.contiguous() for k, v in tensors.items()}
    header = {"about": dict(about or {}), "sha256": _digest(held, about or {})}
    write_atomically(path, save(held, {_KEY: json.dumps(header)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote: the tensors, and what is to be known of them.

    A file without any header of ours (of ln_probe 0.1.0, or from elsewhere) is read as it is.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is truncated or altered.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = path.read_bytes()  # not mapped into memory, where another process could overwrite it
        tensors = load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__")
        if not metadata or set(metadata) == {"format"}:  # what safetensors' own writers leave
            return tensors, {}
        header = json.loads(metadata[_KEY])
        about: dict[str, Any] = header["about"]
        whole = header["sha256"] == _digest(tensors, about)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error}): it is truncated or corrupt") from error
    if not whole:
        raise ValueError(f"{path} is damaged: its content is not what was written")
    return tensors, about


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


LAB_FILE = "lab.json"
METRICS_FILE = "metrics.jsonl"
MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
DIVERGED_FILE = "diverged.json"
LOCK_FILE = ".lock"
TOKENIZER_FILE = "tokenizer.json"
TEXT_BOUNDARY = "<|endoftext|>"  # begins every window of text, as in GPT-2
_CHECK = "check"


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
        held = read_json(path)
    except FileError as error:
        raise ValueError(f"{error}: delete {out} or choose another folder") from error
    if not isinstance(held, dict):
        raise ValueError(f"{path} holds no object: delete {out} or choose another folder")
    wrong = sorted(k for k in {*identity, *held} if held.get(k) != identity.get(k))
    if wrong:
        raise FileExistsError(
            f"{out} holds another run (not the same: {', '.join(wrong)}): choose another folder or delete it"
        )


def metric_line(row: dict[str, Any]) -> str:
    """A row as a line of a metrics file, with a hash over what it says."""
    return json.dumps({**row, _CHECK: _checked(row)}) + "\n"


def metric_rows(metrics: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file; half a line at its end (a run that was killed) is left out.

    Raises:
        ValueError: another line is not what was written (names it).
    """
    lines = metrics.read_bytes().decode("utf-8", "replace").splitlines(keepends=True) if metrics.exists() else []
    sealed = any(f'"{_CHECK}"' in line for line in lines)  # those of 0.1.0 have no hashes
    rows = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n") and not _holds_a_row(line):
            break
        where = f"{metrics}, line {number}"
        again = f"delete {metrics.parent} to train the run again"
        try:
            row = parse_json(line, where)
        except FileError as error:
            raise ValueError(f"{error}: {again}") from error
        check = row.pop(_CHECK, None) if isinstance(row, dict) else None
        known = isinstance(row, dict) and all(isinstance(v, int | float) for v in row.values())
        if not known or (sealed and check != _checked(row)):
            raise ValueError(f"{where} is damaged (it is not what was written): {again}")
        rows.append(row)
    return rows


def _holds_a_row(line: str) -> bool:
    """Whether a line begins with all of a row: then what ends it was altered, for a kill leaves less than that."""
    try:
        json.JSONDecoder().raw_decode(line)
    except (ValueError, RecursionError):
        return False
    return True


def check_evaluations(metrics: Path, found: int, expected: float | None) -> None:
    """Raise ValueError if a metrics file has not as many lines as when the weights in its folder were saved."""
    if expected is not None and found != int(expected):
        raise ValueError(
            f"{metrics} holds {found} of {int(expected)} evaluations: delete {metrics.parent} to train the run again"
        )


def _checked(row: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def why_diverged(run: Path) -> str:
    """What `diverged.json` says; ValueError if it is damaged."""
    path = run / DIVERGED_FILE
    try:
        return str(read_json(path)["message"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): delete it to resume from the last state") from error


def hashes_beside(run: Path) -> dict[str, str]:
    """SHA-256 of the files without which weights mean something else: what the model is, and its tokenizer.

    Of what they say: how they are written does not matter.
    """
    found = {}
    for file in (run / LAB_FILE, run / TOKENIZER_FILE):
        if file.is_file():
            try:
                said = json.dumps(read_json(file), sort_keys=True)
            except FileError as error:
                said = str(error)
            found[file.name] = hashlib.sha256(said.encode()).hexdigest()
    return found


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


def save_model(
    model: nn.Module, path: Path, dtype: torch.dtype = torch.float32, *, about: Mapping[str, Any] | None = None
) -> None:
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in model.state_dict().items()}
    save_tensors(tensors, path, about)


def load_run(path: str | Path, step: int | None = None) -> LabTransformer:
    """The model of a lab run's folder: the final one, or the one kept at `step`.

    Weights are float32 in memory, in any format on disk, unless the folder says that the model computes otherwise
    (`arithmetic`: compiled programs). The tokenizer is attached where the folder has one.

    Raises:
        FileNotFoundError: the folder holds no lab run, is unfinished, or has no such step (says which it has).
        ValueError: a file is truncated or does not fit the configuration in its folder.
    """
    path = Path(path)
    if not (path / LAB_FILE).is_file():
        raise FileNotFoundError(f"{path} holds no {LAB_FILE}: not a lab run's folder")
    weights = weights_of(path, step)
    tensors, about = load_tensors(weights)
    for name, digest in about.get("beside", {}).items():
        if hashes_beside(path).get(name) != digest:
            raise ValueError(f"{path / name} is not what it was when {weights} was written: restore it")
    config = _config(path / LAB_FILE, len(tensors))
    with torch.device("meta"):  # before memory is spent on it
        _check_fit(LabTransformer(config), tensors, weights)
    arithmetic = arithmetic_of(path)
    model = LabTransformer(config, tokenizer=_tokenizer(path)).to(arithmetic.dtype)  # which takes weights of any format
    model.load_state_dict(tensors)
    if arithmetic.precision is not None:
        install(model, arithmetic.precision)
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
    tensors, about = load_tensors(weights)
    _check_fit(model, tensors, weights)
    model.load_state_dict(tensors)
    return about


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


_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def arithmetic_of(folder: Path) -> Arithmetic:
    """What the lab.json of a folder says.

    Raises:
        ValueError: it is damaged, or of a program that an earlier version compiled and saved in float32.
    """
    path = folder / LAB_FILE
    held = read_json(path)
    if not isinstance(held, dict):
        raise ValueError(f"{path} does not describe a lab model (it holds no object)")
    if "dtype" not in held:
        if held.get("task") == "compiled":
            raise ValueError(
                f"{path} is of a program compiled by an earlier version of ln_probe, which saved it in float32: there "
                "it does not do what the program does. Compile it again"
            )
        return Arithmetic()
    try:
        dtype, grid = _DTYPES[held["dtype"]], held["precision"]
        return Arithmetic(dtype, True, None if grid is None else Precision(**grid))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not say in which numbers its model computes ({error!r})") from error
