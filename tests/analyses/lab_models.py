"""Small runs of the laboratory, whether two are the same, texts, and a reference for unselectable keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import linprog

from ln_probe.analyses.lab.majority.majority import MajoritySize, MajorityTask, majority_model
from ln_probe.analyses.lab.runs import Run
from ln_probe.analyses.lab.train import TrainConfig, read_metrics


def assert_same_run(one: Any, one_folder: Path, other: Any, other_folder: Path) -> None:
    """Two models and the metrics of their runs are the same to the bit, but for the seconds they took."""
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    tables = (read_metrics(folder).drop(columns="seconds") for folder in (one_folder, other_folder))
    pd.testing.assert_frame_equal(*tables, check_exact=True)


def majority_run(folder: Path, seed: int = 0, **options: Any) -> Run:
    """A run of a small majority model with LayerNorm; options go to TrainConfig."""
    size = MajoritySize(classes=6, length=12, margin=2, examples=400)
    training = TrainConfig(**{"steps": 4, "batch": 50, "warmup": 0, "clip": 0.0, "seed": seed} | options)
    model = majority_model("layernorm", size=size)
    return Run({"norm": "layernorm"}, MajorityTask(seed, size), model, training, folder)


def write_words(path: Path, words: Sequence[str], count: int = 4000) -> Path:
    """A text file of words drawn at random."""
    drawn = torch.randint(len(words), (count,), generator=torch.Generator().manual_seed(0))
    path.write_text(" ".join(words[i] for i in drawn.tolist()))
    return path


def is_interior(keys: np.ndarray, i: int) -> bool:
    """Whether key i is a convex combination of the others, by a linear program."""
    others = np.delete(keys, i, axis=0)
    system = np.vstack([others.T, np.ones(len(others))])
    return bool(linprog(np.zeros(len(others)), A_eq=system, b_eq=[*keys[i], 1], bounds=(0, None)).status == 0)
