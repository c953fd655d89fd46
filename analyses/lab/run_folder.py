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

import json
from pathlib import Path
from typing import Any

import pandas as pd

from ln_probe.analyses.checkpoint_names import step_named
from ln_probe.analyses.machinery.files import PARTIAL, write_atomically

LAB_FILE = "lab.json"
METRICS_FILE = "metrics.jsonl"
MODEL_FILE = "model.safetensors"
STATE_FILE = "state.safetensors"
DIVERGED_FILE = "diverged.json"
LOCK_FILE = ".lock"


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
    """Raise FileExistsError if `out` holds another run, ValueError if it cannot be told."""
    path = out / LAB_FILE
    try:
        held = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): delete {out} or choose another folder") from error
    wrong = sorted(k for k in {*identity, *held} if held.get(k) != identity.get(k))
    if wrong:
        raise FileExistsError(
            f"{out} holds another run (its {', '.join(wrong)} differ): choose another folder or delete it"
        )


def metric_rows(metrics: Path) -> list[dict[str, Any]]:
    """Lines of a metrics file; half a line at its end (a run that was killed) is left out."""
    rows = []
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def read_metrics(run: Path) -> pd.DataFrame:
    """A row per evaluation of a run: `step`, `train_loss` (mean since the row before), the task's own, `seconds`."""
    return pd.DataFrame(metric_rows(run / METRICS_FILE))


def checkpoint_path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:07d}.safetensors"


def checkpoint_steps(run: Path) -> list[int]:
    """Steps whose model a run's folder holds, ascending."""
    kept = (run / "checkpoints").glob("step-*.safetensors")
    return sorted(step for path in kept if (step := step_named(path.stem)) is not None)


def weights_of(run: Path, step: int | None = None) -> Path:
    """The file of the model kept at `step`, or of the final one; FileNotFoundError (says which there are) if none."""
    weights = run / MODEL_FILE if step is None else checkpoint_path(run, step)
    if not weights.exists():
        steps = ", ".join(map(str, checkpoint_steps(run))) or "none"
        what = "no final model (unfinished?)" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(f"{run} holds {what}; steps it has: {steps}")
    return weights
