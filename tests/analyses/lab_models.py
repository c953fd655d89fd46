"""Small runs of the laboratory, texts, and references: a relative transformer by definition, unselectable keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.optimize import linprog

from ln_probe.analyses.lab.experiments import Request, run
from ln_probe.analyses.lab.results import Results
from ln_probe.analyses.lab.train import read_metrics


def assert_same_run(one: Any, one_folder: Path, other: Any, other_folder: Path) -> None:
    """Two models and the metrics of their runs are the same to the bit, but for the seconds they took."""
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    tables = (read_metrics(folder).drop(columns="seconds") for folder in (one_folder, other_folder))
    pd.testing.assert_frame_equal(*tables, check_exact=True)


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


def ran(experiment: str, out: Path, seeds: tuple[int, ...] = (0, 1), **options: Any) -> Results:
    """Results of an experiment's quick form, in the folder `out`; options go to Request."""
    request = Request(out, seeds, **({"quick": True, "progress": False} | options))
    return run(experiment, request, command="", ln_probe_version="0")
