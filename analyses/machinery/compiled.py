"""How the inner loops are compiled: numba, without the interpreter lock, cached on disk where possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

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
# the tenth digit from call to call, with whatever addresses the allocator had to give.
_APART = 64


def compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile `function` on its first call.

    The machine code is cached beside the module, or in numba's own folder (`NUMBA_CACHE_DIR`) if that one is
    read-only; where neither can be written it is compiled anew in every process, which costs some seconds.
    """
    return _compile(function, fastmath=_FAST_MATH)


def compiled_in_order(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """The same without reordered sums or fused products: it rounds alike wherever its arrays lie."""
    return _compile(function)


def _compile(function: Callable[_Args, _Result], **options: Any) -> Callable[_Args, _Result]:
    options |= _OPTIONS
    folders = {Path(file).resolve().parent for file in (function.__code__.co_filename, __file__)}
    try:
        made = numba.njit(function, cache=True, **options)
    except RuntimeError:  # "no locator available": no folder to write to
        made = None
    if made is None or not _valid_while(made, tuple(_sources(folder) for folder in sorted(folders))):
        made = numba.njit(function, **options)
    return cast("Callable[_Args, _Result]", made)


def _valid_while(made: Any, stamp: tuple[Any, ...]) -> bool:
    """Have cached machine code taken for stale once `stamp` is another; False if this numba cannot be told.

    numba takes cached code for valid while the function's own file is unchanged, but it contains what the function
    calls in other files: any change in its folder, or in this one, makes it stale. numba has no public way to say so.
    Where its inside is another one nothing is cached: slower to begin with, never stale.
    """
    index: Any = getattr(getattr(made, "_cache", None), "_cache_file", None)
    if not hasattr(index, "_source_stamp"):
        return False
    index._source_stamp = stamp
    return True


@cache
def _sources(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of every source file in a folder."""
    found = [(path.name, path.stat()) for path in sorted(folder.glob("*.py"))]
    return tuple((name, status.st_mtime_ns, status.st_size) for name, status in found)


@compiled
def room(count: int) -> NDArray[np.float64]:
    """An array of `count` numbers, not set to anything, for a compiled loop to write to."""
    return np.empty(count + 2 * _APART)[_APART : _APART + count]


@compiled
def table(rows: int, columns: int) -> NDArray[np.float64]:
    """The same with two axes."""
    return room(rows * columns).reshape((rows, columns))
