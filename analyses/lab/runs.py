"""Several runs of one experiment: trained side by side, a run that diverges named and the others kept."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pandas as pd
import torch
from tqdm.auto import tqdm

from ln_probe.analyses.lab.run_folder import DIVERGED_FILE, read_metrics, why_diverged
from ln_probe.analyses.lab.training import DivergedError, ModelSpec, Task, TrainConfig, check_run, train
from ln_probe.analyses.processes import follow_parent, starting_workers
from ln_probe.analyses.progress import tell

if TYPE_CHECKING:
    from ln_probe.analyses.lab.experiments import Request


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


Cell = TypeVar("Cell")


def planned(
    cells: Iterable[Cell],
    request: Request,
    *,
    keys: Callable[[Cell], Mapping[str, str | int | float]],
    name: Callable[[Cell], str],
    task: Callable[[Cell, int], Task],
    spec: Callable[[Cell], ModelSpec],
    training: Callable[[Cell, int], TrainConfig],
) -> list[Run]:
    """Every run: all cells with the first seed, then all with the next, so that a part of it is already a result.

    Args:
        cells: what is compared, one model to train each.
        request: whose seeds and folder.
        keys: a cell's columns in the tables.
        name: of a cell; a run's folder is `runs/{name}-seed{seed}`.
        task, spec, training: of a cell (and a seed).

    Raises:
        ValueError: two cells have the same name, so that their runs would share a folder.
    """
    cells = list(cells)
    names = [name(cell) for cell in cells]
    if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
        raise ValueError(f"two cells are called {twice[0]!r}, so their runs would share a folder: name what differs")
    return [
        Run(
            keys(cell),
            task(cell, seed),
            spec(cell),
            training(cell, seed),
            request.out / "runs" / f"{name(cell)}-seed{seed}",
        )
        for seed in request.seeds
        for cell in cells
    ]


def carry_out(runs: Sequence[Run], request: Request) -> None:
    """Train what is not finished yet, or (`request.collect`) only make sure that what there is belongs to these runs.

    Raises:
        FileExistsError: a run's folder holds another run.
        ValueError: as `train_all`; or there is nothing to collect.
    """
    if request.collect:
        if runs and not any(run.folder.exists() for run in runs):
            raise ValueError(f"{request.out} holds none of these {len(runs)} runs: leave out --collect to train them")
        for run in runs:
            check_run(run.task, run.spec, run.training, run.folder)
    else:
        train_all(runs, jobs=request.jobs, progress=request.progress)


def train_all(runs: Sequence[Run], *, jobs: int = 1, until: int | None = None, progress: bool = True) -> None:
    """Train what is not finished yet, `jobs` at a time in processes of their own; runs that diverge are left as such.

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
                tqdm.write(f"[{i + 1}/{len(runs)}] {run.name}")
            _one(run, until, progress)
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(threads,))
    try:
        with starting_workers():
            waiting = [pool.submit(_one, run, until, False) for run in runs]
        tell("training", 0, len(runs), "runs")
        for count, done in enumerate(tqdm(as_completed(waiting), total=len(runs), disable=not progress, unit="run"), 1):
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


def _one(run: Run, until: int | None, progress: bool) -> None:
    with suppress(DivergedError):  # which has left its mark
        train(run.task, run.spec, run.training, run.folder, until=until, progress=progress)


def diverged(runs: Sequence[Run]) -> dict[str, str]:
    """What is known of the runs whose loss stopped being a number, by the run's name."""
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
