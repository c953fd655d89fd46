"""How inner loops are compiled (numba, without the interpreter lock, cached on disk) and run in several threads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numba.core import event
from numpy.typing import NDArray

from ln_probe.analyses.processes import one_blas_thread
from ln_probe.analyses.progress import tell_delay

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

# Sums may be reordered (that is what lets them run on vector registers) and products fused, but NaN and
# infinity keep their meaning: an overflow must stay visible.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}

# `forceinline`: a compiled function holds copies of those it calls, and without it the linker took whichever copy it
# had met first. In a process that compiled them these were the functions' own (optimized apart from their caller,
# rounding otherwise), in one that read them from the cache the caller's: the same keys gave attainable weights that
# differed in the 12th digit. Inlined, there is nothing left to choose.
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "forceinline": True}

# Arrays that compiled loops write stand this many numbers away from all others in memory: more than one step of an
# unrolled loop on 512-bit registers. Before it writes, such a loop checks how far apart its arrays lie and takes a
# scalar path if that is less, which rounds otherwise: without the distance, the same keys gave weights that differed in
# the tenth digit from call to call, with the addresses that the allocator happened to give.
_APART = 64


class _Compiling(event.Listener):
    """Says that loops are being compiled, so that a first call does not seem to hang."""

    depth = 0

    def on_start(self, _event: event.Event) -> None:
        self.depth += 1
        if self.depth == 1:
            tell_delay("compiling kernels: a minute or two, only the first time")

    def on_end(self, _event: event.Event) -> None:
        self.depth -= 1
        if self.depth == 0:
            tell_delay("")


event.register("numba:compile", _Compiling())  # type: ignore[no-untyped-call]


def compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile `function` on its first call.

    The machine code is cached next to the module, or in the user's cache folder if that one is read-only (both give way
    to `NUMBA_CACHE_DIR`); where neither can be written it is compiled anew in every process, which costs some seconds.
    """
    return _compile(function, fastmath=_FAST_MATH)


def compiled_in_order(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """The same without reordered sums or fused products: it rounds alike wherever its arrays lie."""
    return _compile(function)


def _compile(function: Callable[_Args, _Result], **options: Any) -> Callable[_Args, _Result]:
    options |= _OPTIONS
    own, ours = Path(function.__code__.co_filename).resolve().parent, Path(__file__).resolve().parent
    place = _place(own, _stamp(own) + _stamp(ours))
    if place is None:
        return cast("Callable[_Args, _Result]", numba.njit(function, **options))
    settings: Any = numba.config  # (its attributes are made as it is imported)
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(place)
    try:
        made = numba.njit(function, cache=True, **options)
    except RuntimeError:  # "no locator available": the folder cannot be written after all
        made = numba.njit(function, **options)
    finally:
        settings.CACHE_DIR = before
    return cast("Callable[_Args, _Result]", made)


def _place(folder: Path, stamp: str) -> Path | None:
    """The folder for the machine code of these sources, made; None where none can be.

    numba takes cached code for valid while the function's own file is unchanged, but it contains what the function
    calls in other files: so the code of every state of the sources, and of every numba, has its own folder.
    """
    name = f"numba-{hashlib.sha256(f'{numba.__version__} {stamp}'.encode()).hexdigest()[:16]}"
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ln_probe"
    for home in [Path(chosen)] if chosen else [folder / "__pycache__", user]:
        place = home / name
        try:
            place.mkdir(parents=True, exist_ok=True)
            if os.access(place, os.W_OK):
                return place
        except OSError:
            continue
    return None


@cache
def _stamp(folder: Path) -> str:
    """What the source files of a folder hold."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return found.hexdigest()


@compiled
def room(count: int) -> NDArray[np.float64]:
    """An array of `count` numbers, not set to anything, for a compiled loop to write to."""
    return np.empty(count + 2 * _APART)[_APART : _APART + count]


@compiled
def table(rows: int, columns: int) -> NDArray[np.float64]:
    """The same with two axes."""
    return room(rows * columns).reshape((rows, columns))


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


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item], threads: int | None = None) -> list[_Result]:
    """`[work(item) for item in items]`, `threads` (default: all processors) at a time.

    Raises:
        ValueError: `threads` below 1.
    """
    if threads is None:
        threads = processors()
    else:
        from ln_probe.hooks.model import whole_number  # (with torch, which the kernels do without)

        threads = whole_number(threads, "threads", 1)
    todo = list(items)
    if threads == 1 or len(todo) < 2:
        return [work(item) for item in todo]
    with one_blas_thread(), ThreadPoolExecutor(min(threads, len(todo))) as pool:
        return list(pool.map(work, todo))
