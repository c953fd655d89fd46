"""Worker processes that end with their parent, and the threads of NumPy's and SciPy's matrix products."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController


def follow_parent() -> None:
    """Leave Ctrl-C to the parent process, and end when it ends, however that happens. Call first in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy's and SciPy's matrix products use one thread while this lasts.

    Theirs would wait for each other, and for torch's: with two processors `selectability` took twice as long.
    """
    with _blas().limit(limits=1, user_api="blas"):
        yield


@cache
def _blas() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    import_module("scipy.linalg")  # its BLAS can only be limited once it is loaded
    return ThreadpoolController()
