"""Train and measure what `registration.md` registers, one process, one (item, cell, seed) after another.

    python registered/drive.py 3 2 5 4 --texts FOLDER --out FOLDER      # what results/ already has is skipped
    python registered/drive.py 3 --texts FOLDER --out FOLDER --seeds 99    # another seed, to time it: rows go to --out

Values go to `results/item-N.csv` next to this file: cell, seed, step, measure, value. A run that is interrupted goes on
from its last saved state in `--out`; a finished one leaves its rows in one write, and a line in `log.csv`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import ln_probe
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import fresh_seeds, published_language_model
from ln_probe.analyses.lab.language_model.bundled_seeds import text
from ln_probe.analyses.lab.majority.majority_task import EPOCH, MajorityTask, majority_model, published_training
from ln_probe.analyses.lab.run_folder import read_metrics
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import DivergedError, ModelSpec, Task, TrainConfig, text_training, train

HERE = Path(__file__).parent
BOOKS = ("kjv.txt", "shakespeare_complete_gut.txt", "moby_dick.txt")
TEN = tuple(range(10, 20))
SEEDS = {2: TEN, 3: TEN, 4: (10, 11, 12), 5: tuple(range(30, 40))}
Rows = Iterable[tuple[int, str, float]]

# Item 2: majority at three rates.
RATES, LEVEL, CAP, CHUNK = (1e-3, 3e-3, 8e-3), 0.4, 12_000, 500
SIZES = {"published": 8**-0.5, "equal": None}
PROJECTION = {"projection": "layernorm", "none": "scaling_only"}


def majority(cell: tuple[float, str, str], seed: int, out: Path, tasks: dict[int, MajorityTask]) -> Rows:
    """The curve until the training loss is at most LEVEL, or CAP steps."""
    rate, size, projection = cell
    task = tasks.setdefault(seed, MajorityTask(seed))
    training = published_training(CAP, seed, lr=rate, evaluate_every=100, decay_steps=EPOCH * 10_000)
    spec = majority_model(PROJECTION[projection], SIZES[size])
    for until in range(CHUNK, CAP + 1, CHUNK):
        train(task, spec, training, out, until=until, progress=False)
        metrics = read_metrics(out)
        if (metrics["train_loss"] <= LEVEL).any():
            break
    return curve(metrics, ("train_loss", "test_accuracy", "angle_deg"))


def curve(metrics: pd.DataFrame, measures: Iterable[str]) -> Rows:
    return [(int(row["step"]), name, row[name]) for row in metrics.to_dict("records") for name in measures]


def trained(task: Task, spec: ModelSpec, training: TrainConfig, out: Path) -> Rows:
    """Training and held-out losses over a whole run."""
    train(task, spec, training, out, progress=False)
    return curve(read_metrics(out), ("train_loss", "valid_loss"))


def language_model(norm: str, seed: int, out: Path, task: TextTask, size: Any, divisor: float | None) -> Rows:
    training = text_training(
        size, seed, size.lr, evaluate_every=size.steps // 20, state_every=max(1, size.steps // 100)
    )
    return trained(task, published_language_model.published_model(norm, divisor, size), training, out)


# Item 5: the uniform direction.
def uniform(seed: int, out: Path, task: TextTask) -> Rows:
    """Loss of a fresh model, then outcomes of every edit of its queries on 64 windows of the books."""
    training = fresh_seeds.training(False, seed, fresh_seeds.LONG)
    yield from trained(task, fresh_seeds.fresh_model("layernorm"), training, out)
    yield from edits(ln_probe.load_model(out), "books")


def edits(model: Any, prompts: str, limit: int = 128, outcome: str = "outcomes") -> Rows:
    sys.path[:0] = [str(HERE), str(HERE.parent / "examples" / "checkpoints")]
    import directions
    from measure import SOURCES

    return list(getattr(directions, outcome)(model, SOURCES[prompts](model, limit)))


def mgm(_seed: int, _out: Path) -> Rows:
    return edits(ln_probe.load_model(os.environ["LN_PROBE_MGM"], allow_pickle=True), "own")


def minilm(_seed: int, _out: Path) -> Rows:
    return edits(ln_probe.load_model(os.environ["LN_PROBE_MINILM"]), "wikitext", outcome="shares")


def work(item: int, texts: Path) -> Iterator[tuple[str, Callable[[int, Path], Rows]]]:
    """Cells of an item: a name, and what yields its rows for a seed and a folder."""
    books = [texts / name for name in BOOKS]
    size = published_language_model.FULL if item == 4 else published_language_model.SMALL
    if item == 2:
        tasks: dict[int, MajorityTask] = {}
        for rate in RATES:
            for scale in SIZES:
                for projection in PROJECTION:
                    cell = rate, scale, projection
                    yield f"rate {rate:g}, {scale} size, {projection}", partial(majority, cell, tasks=tasks)
    if item in (3, 4):
        tokenizer = texts.parent / "tokenizers" / "gpt2" if item == 4 else None
        task = TextTask(books, size.d_vocab, size.n_ctx, tokenizer=tokenizer, valid_windows=size.valid_windows)
        constant = None if item == 3 else 1.0
        yield "layernorm", partial(language_model, "layernorm", task=task, size=size, divisor=None)
        name = "measured divisor" if item == 3 else "divisor 1"
        yield f"projection, {name}", partial(language_model, "projection_only", task=task, size=size, divisor=constant)
    if item == 5:
        task = text(Request(Path("."), (0,), texts=tuple(books)))
        yield "layernorm", partial(uniform, task=task)


def finished(path: Path) -> set[tuple[str, int]]:
    if not path.exists():
        return set()
    return set(pd.read_csv(path, usecols=["cell", "seed"]).itertuples(index=False, name=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", type=int, nargs="+", choices=SEEDS)
    parser.add_argument("--texts", type=Path, required=True, help=f"folder with {', '.join(BOOKS)}")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs")
    parser.add_argument("--seeds", type=int, nargs="+", help="others than the registered ones: for timing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = args.out / "timing" if args.seeds else HERE / "results"
    results.mkdir(parents=True, exist_ok=True)
    for item in args.items:
        path, cells = results / f"item-{item}.csv", list(work(item, args.texts))
        for seed in args.seeds or SEEDS[item]:
            once = [("MGM", mgm), ("MiniLM", minilm)] if item == 5 and seed == SEEDS[5][0] else []
            for cell, rows in [*cells, *once]:
                if (cell, seed) in finished(path):
                    continue
                began = time.process_time()
                folder = args.out / "runs" / f"item-{item}" / f"{cell.replace(', ', '-').replace(' ', '_')}-seed{seed}"
                try:
                    values = list(rows(seed, folder))
                except DivergedError:
                    values = [(-1, "diverged", 1.0)]
                new = pd.DataFrame(values, columns=["step", "measure", "value"])
                new.insert(0, "cell", cell)
                new.insert(1, "seed", seed)
                new.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.7g")
                line = f"{item},{cell!r},{seed},{time.process_time() - began:.0f}\n"
                with (args.out / "log.csv").open("a") as log:
                    log.write(line)
                print(line, end="", flush=True)


if __name__ == "__main__":
    main()
