"""Kept results, a folder per experiment, as `ln-probe lab run` wrote them; README.md says how each was made."""

from __future__ import annotations

from pathlib import Path


def kept() -> list[str]:
    """The experiments of which results are kept."""
    return sorted(p.parent.name for p in Path(__file__).parent.glob("*/results.json"))


def folder(experiment: str) -> Path:
    """Where the kept results of an experiment lie.

    Raises:
        FileNotFoundError: nothing was kept of it (says what was), or this is an installed package, which has none.
    """
    found = Path(__file__).parent / experiment
    if not kept():
        raise FileNotFoundError("an installed ln_probe holds no kept results: they are in the source's analyses/lab")
    if not found.is_dir():
        raise FileNotFoundError(f"no kept results of {experiment!r}: there are {', '.join(kept())}")
    return found
