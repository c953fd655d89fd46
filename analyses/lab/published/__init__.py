"""Kept results, a folder per experiment, as `ln-probe lab run` wrote them; README.md says how each was made."""

from __future__ import annotations

from pathlib import Path


def folder(experiment: str) -> Path:
    """Where the kept results of an experiment lie.

    Raises:
        FileNotFoundError: nothing was kept of it (says what was).
    """
    here = Path(__file__).parent
    if not (here / experiment).is_dir():
        known = ", ".join(sorted(p.parent.name for p in here.glob("*/results.json")))
        raise FileNotFoundError(f"no kept results of {experiment!r}: there are {known}")
    return here / experiment
