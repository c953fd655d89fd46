"""The runs of an experiment: a grid of cells and seeds, trained side by side, and a table of their metrics."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import pandas as pd
import torch
from torch import nn

from ln_probe.analyses.lab import train as trainer
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.progress import ProgressLine, follow_parent, tell
from ln_probe.analyses.text import write_atomically


@dataclass(frozen=True)
class Run:
    """One model to train; `keys` set it apart but for the seed, column by column ("norm": "layernorm", …)."""

    keys: Mapping[str, str | int | float]
    task: trainer.Task
    spec: trainer.ModelSpec
    training: trainer.TrainConfig
    folder: Path

    @property
    def seed(self) -> int:
        return self.training.seed

    @property
    def name(self) -> str:
        return ", ".join(f"{k} {v}" for k, v in self.keys.items()) + f", seed {self.seed}"

    @property
    def finished(self) -> bool:
        return (self.folder / trainer.MODEL_FILE).exists()

    def model(self, step: int | None = None) -> nn.Module:
        """Load the trained model, the final one or that of a saved step."""
        model = self.spec.build()
        trainer.load_weights(model, trainer.weights_of(self.folder, step))
        return model.eval()


Cell = TypeVar("Cell")


def planned(
    cells: Iterable[Cell],
    request: Request,
    *,
    task: Callable[[Cell, int], trainer.Task],
    training: Callable[[Cell, int], trainer.TrainConfig],
    spec: Callable[[Cell], trainer.ModelSpec] | None = None,
    keys: Callable[[Cell], Mapping[str, str | int | float]] = vars,
) -> list[Run]:
    """List every run: all cells with the first seed, then all with the next, in folders named after keys and seed.

    `spec` is by default a cell's method `spec`, `keys` (its columns in the tables) its fields.
    """
    cells = list(cells)
    names = [re.sub(r"[^\w.+-]+", "_", "-".join(map(str, keys(cell).values()))) for cell in cells]
    if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
        raise ValueError(f"two cells are called {twice[0]!r}, so their runs would share a folder: name what differs")
    return [
        Run(
            dict(keys(cell)),
            task(cell, seed),
            spec(cell) if spec is not None else cast("Any", cell).spec(),
            training(cell, seed),
            request.out / "runs" / f"{name}-seed{seed}",
        )
        for seed in request.seeds
        for name, cell in zip(names, cells, strict=True)
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
        threads = max(1, (os.cpu_count() or 1) // request.jobs)
        context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        pool = ProcessPoolExecutor(request.jobs, mp_context=context, initializer=_begin, initargs=(threads,))
        with pool, ProgressLine() if request.progress else nullcontext():
            tasks = [pool.submit(_one, run, False, request.device) for run in runs]
            try:
                for count, task in enumerate(as_completed(tasks), 1):
                    task.result()
                    tell("training", count, len(runs), "runs")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return tuple(diverged(runs).values())


def _begin(threads: int) -> None:
    follow_parent()
    torch.set_num_threads(threads)


def _one(run: Run, progress: bool, device: str) -> None:
    with suppress(trainer.DivergedError):  # which has left its mark
        trainer.train(run.task, run.spec, run.training, run.folder, progress=progress, device=device)


def finished(runs: Iterable[Run], *, checkpoints: bool = False) -> list[Run]:
    """Return the runs with a final model, or with `checkpoints` those with any; ValueError if none."""
    complete = [run for run in runs if (trainer.checkpoint_steps(run.folder) if checkpoints else run.finished)]
    if not complete:
        raise ValueError("no run is finished")
    return complete


def shared_settings(run: Run, varied: Sequence[str]) -> dict[str, Any]:
    """Return the training, the model and the data that all runs share, without the seed and the fields `varied`."""
    parts = {"training": vars(run.training), "model": run.spec.to_dict(), "data": run.task.identity}
    return {name: {k: v for k, v in part.items() if k not in ("seed", *varied)} for name, part in parts.items()}


def diverged(runs: Sequence[Run]) -> dict[str, str]:
    """Return messages of the runs whose loss became NaN or infinite, by the run's name."""
    reasons = {run.name: trainer.why_diverged(run.folder) for run in runs}
    return {name: f"{name}: {reason}" for name, reason in reasons.items() if reason}


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the metrics of all runs so far in long form: a row per (keys, seed, step, measure) with its `value`."""
    columns = [*runs[0].keys, "seed", "step", "measure", "value"]
    parts = [pd.DataFrame(columns=columns)]
    for run in runs:
        wide = trainer.read_metrics(run.folder).drop(columns="seconds", errors="ignore")
        if not wide.empty:
            long = wide.melt(id_vars="step", var_name="measure", value_name="value")
            parts.append(long.assign(**dict(run.keys), seed=run.seed)[columns])
    return pd.concat(parts[1:] or parts, ignore_index=True)


def measured_once(run: Path, name: str, weights: Path, measure: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """Return a table measured of a file of weights, cached in a folder as NAME-KEY.csv."""
    file = run / f"{name}-{hashlib.sha256(weights.read_bytes()).hexdigest()[:12]}.csv"
    if not file.exists():
        write_atomically(file, measure().to_csv(index=False).encode())
    return pd.read_csv(file)
