"""How inner loops are compiled (numba, cached on disk) and run in several threads.

Loops round as they are written: sums are not reordered and products not fused. So results do not depend
on where arrays lie in memory, on threads, or on the cache. Loops run on vector registers where they go along
the last axis of arrays that they add to (`out[j] += a * row[j]`); sums of products do not.

numba takes cached code for valid while a function's own file is unchanged, but the code contains what
the function calls in other files. So every state of the sources, version of numba and kind of processor
has a separate folder.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import numba
import numpy as np
from filelock import FileLock
from llvmlite import binding  # type: ignore[import-untyped]

from ln_probe.analyses.progress import available_processors, tell_delay

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
_Table = TypeVar("_Table", bound=NamedTuple)


# Without memory to allocate ("_nrt") there are no references to count, which took half of the time
# of small sets; arrays in compiled functions took a tenth of the compilation.
_IN_PLACE: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "_nrt": False}
# (A part that does not say so is inlined wherever it is called, if what calls it first is inlined itself.)
_PART = _IN_PLACE | {"no_cpython_wrapper": True, "forceinline": False}


def compiled_in_place(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile `function`, which makes no arrays, on its first call.

    The machine code is cached in the user's cache folder, or below `NUMBA_CACHE_DIR`;
    where neither can be written it is compiled anew in every process.
    """
    folder = cache_folder(Path(function.__code__.co_filename).resolve().parent)
    if folder is None:
        return cast("Callable[_Args, _Result]", numba.njit(function, **_IN_PLACE))
    settings: Any = numba.config  # its attributes are set when it is imported
    before, settings.CACHE_DIR = settings.CACHE_DIR, str(folder)
    try:
        return cast("Callable[_Args, _Result]", numba.njit(function, cache=True, **_IN_PLACE))
    finally:
        settings.CACHE_DIR = before


def compiled_part(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile `function`, which makes no arrays, for compiled functions alone to call."""
    return cast("Callable[_Args, _Result]", numba.njit(function, **_PART))


def compiled_inline(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile `function` into those that call it: a part with many arrays, called from one place.

    Machine code is made of a function, and again wherever it is inlined, so each place costs time.
    """
    return cast("Callable[_Args, _Result]", numba.njit(function, **_PART | {"forceinline": True}))


def compiled_slice(kind: type[_Table]) -> Callable[[_Table, int], _Table]:
    """Return a compiled function that takes one set from a table of several."""
    fields = ", ".join(f"table.{name}[b]" for name in kind._fields)
    return compiled_part(eval(f"lambda table, b: kind({fields})", {"kind": kind}))


# Of a constant that a kernel is called with: numba would compile it once for each constant.
whole: Any = np.int64


@cache
def cache_folder(sources: Path) -> Path | None:
    """Make the folder for the machine code of a folder of sources; None where none can be made."""
    processor = f"{binding.get_host_cpu_name()} {binding.get_host_cpu_features().flatten()}"
    digest = hashlib.sha256(f"{numba.__version__} {processor}".encode())
    for path in sorted({*sources.glob("*.py"), *Path(__file__).resolve().parent.glob("*.py")}):
        if b"@compiled" in (content := path.read_bytes()):
            digest.update(path.name.encode() + content)
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ln_probe"
    folder = Path(os.environ.get("NUMBA_CACHE_DIR") or user) / f"kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else None
    except OSError:
        return None


class Compilation:
    """Compiles kernels once: in the background if it is asked to, and in one process at a time.

    Another process fills the cache: numba replaces how its whole process shows warnings while it
    compiles, so that a program in another thread lost one warning in thirty.

    Args:
        work: a function that calls every kernel, of the module whose `compilation` this is.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._lock = work, threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Begin to compile in the background; returns at once."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="compilation", daemon=True)
                self._thread.start()

    def wait(self, quiet: bool = False) -> None:
        """Return when everything is compiled; say what it waits for, if not `quiet`."""
        self.start()
        assert self._thread is not None
        if threading.current_thread() is self._thread:
            return
        self._thread.join(None if quiet else 0.5)
        if self._thread.is_alive():
            tell_delay("compiling kernels: about 15 seconds, only the first time")
            self._thread.join()
            tell_delay("")
        if self._error is not None:
            raise self._error

    def fill(self, folder: str) -> None:
        """Compile in this thread, for the cache in a folder."""
        self._thread = threading.current_thread()
        with FileLock(f"{folder}/lock"):  # a second process finds the code of the first
            self._work()
        Path(folder, "filled").touch()

    def _run(self) -> None:
        folder = cache_folder(Path(__file__).resolve().parent)
        try:
            if folder is not None and not (folder / "filled").exists():
                code = f"from {self._work.__module__} import compilation; compilation.fill({str(folder)!r})"
                paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
                # Where this fails the kernels are compiled below, and an error is raised.
                subprocess.run([sys.executable, "-P", "-c", code], env=os.environ | paths, capture_output=True)
            self._work()
        except BaseException as error:
            self._error = error


_share: int | None = None  # of the machine, where several processes divide it among them


def processors() -> int:
    """How many threads this process works in."""
    return available_processors() if _share is None else _share


def use_processors(count: int | None) -> None:
    """Use so many from now on (None: all there are). Results do not depend on it."""
    global _share
    _share = count


def in_threads(work: Callable[[_Item], _Result], items: Sequence[_Item], threads: int) -> list[_Result]:
    """Return `[work(item) for item in items]`, with the work of `threads - 1` other threads."""
    if threads == 1 or len(items) < 2:
        return [work(item) for item in items]
    results, left = [cast("_Result", None)] * len(items), iter(range(len(items)))

    def share() -> None:
        for place in left:
            results[place] = work(items[place])

    others = [_threads(threads - 1).submit(share) for _ in range(min(threads, len(items)) - 1)]
    share()
    for other in others:
        if not other.cancel():  # one that has not begun finds nothing to do
            other.result()
    return results


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    """Return threads that are kept from call to call, since it takes long to start one."""
    return ThreadPoolExecutor(count, "geometry")
