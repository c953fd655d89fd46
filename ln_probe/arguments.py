"""Arguments of `analyze` that are numbers or lists of numbers, and a file of groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ln_probe.analyses.arguments import LARGEST_SEED
from ln_probe.analyses.files import read_text
from ln_probe.hooks.model import whole_number


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """Return a list of layers or heads as a tuple.

    Raises:
        TypeError: it is no list of whole numbers.
    """
    try:
        if not isinstance(values, str | bytes):
            return tuple(whole_number(v, what) for v in values)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{what} must be a list of whole numbers, such as [0, 1], got {values!r}")


def indices(values: Any, what: str, count: int) -> list[int]:
    """Return a list of layers or heads; negative layers count from the end.

    Raises:
        TypeError, ValueError: no list of whole numbers, an empty one, or one that the model lacks.
    """
    numbers = whole_numbers(values, f"{what}s")
    if what == "layer":
        numbers = tuple(i + count if -count <= i < 0 else i for i in numbers)
    if wrong := [i for i in numbers if not 0 <= i < count]:
        raise ValueError(f"no {what} {wrong[0]}: the model has {what}s 0 … {count - 1}")
    if not numbers:
        raise ValueError(f"an empty list of {what}s leaves nothing to analyze: None means all")
    return list(numbers)


def token_limit(value: Any) -> int:
    """Return `max_tokens`; ValueError unless it is a whole number, 2 or more: one token alone predicts nothing."""
    return whole_number(value, "max_tokens", 2)


def seed_of(value: Any) -> int:
    """Return a seed; ValueError unless it is a whole number, 0 or more and at most 10^18."""
    seed = whole_number(value, "seed", 0)
    if seed > LARGEST_SEED:
        raise ValueError("seed must be at most 10^18")
    return seed


def read_groups(path: str | Path) -> list[str]:
    """Return the group labels of a file, a line for each prompt.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no label.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no groups file {str(path)!r}")
    labels = read_text(path).splitlines()
    if not labels or not all(label.strip() for label in labels):
        empty = next((n for n, label in enumerate(labels, start=1) if not label.strip()), 1)
        raise ValueError(f"{path}: line {empty} holds no label; write one label a line, a line for each prompt")
    return labels
