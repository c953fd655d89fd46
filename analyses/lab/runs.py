"""Several runs of one experiment: trained side by side, a run that diverges named and the others kept."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

from ln_probe.analyses.lab.training import DivergedError, ModelSpec, Task, TrainConfig, read_metrics, train


@dataclass(frozen=True)
class Run:
    """One model to train.

    Attributes:
        keys: what sets it apart from the others but for the seed, column by column ("norm": "layernorm", …).
        task, spec, training: what is trained (the seed is `training.seed`).
        folder: where.
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


def train_all(
    runs: Sequence[Run], *, jobs: int = 1, until: int | None = None, progress: bool = True
) -> tuple[str, ...]:
    """Train what is not finished yet, `jobs` at a time in processes of their own, and name the runs that diverged.

    With `until`, every run stops after that step, ready to go on.

    Raises:
        ValueError: jobs below 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    diverged: dict[str, str] = {}
    if jobs == 1:
        for i, run in enumerate(runs):
            if progress:
                tqdm.write(f"[{i + 1}/{len(runs)}] {run.name}")
            diverged |= _one(run, until, progress)
        return tuple(diverged.values())
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        waiting = [pool.submit(_one, run, until, False) for run in runs]
        for done in tqdm(as_completed(waiting), total=len(waiting), disable=not progress, unit="run"):
            diverged |= done.result()
    return tuple(diverged[run.name] for run in runs if run.name in diverged)


def _one(run: Run, until: int | None, progress: bool) -> dict[str, str]:
    try:
        train(run.task, run.spec, run.training, run.folder, until=until, progress=progress)
    except DivergedError as error:
        return {run.name: f"{run.name}: {error}"}
    return {}


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
