"""Several pieces of work at a time; the compiled kernels do not hold the interpreter lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


_share: int | None = None  # of the machine, where several processes divide it among them


def available() -> int:
    """How many processors there are for this process and its like."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processors() -> int:
    """How many processors this process may use."""
    return available() if _share is None else _share


def use_processors(count: int | None) -> None:
    """Use so many from now on (None: all there are). Results do not depend on it."""
    global _share
    _share = count


def in_threads(work: Callable[[_Item], _Found], items: Iterable[_Item], threads: int | None = None) -> list[_Found]:
    """`[work(item) for item in items]`, `threads` (default: all processors) at a time.

    Raises:
        ValueError: `threads` below 1.
    """
    threads = processors() if threads is None else threads
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    todo = list(items)
    if threads == 1 or len(todo) < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(min(threads, len(todo))) as pool:
        return list(pool.map(work, todo))
