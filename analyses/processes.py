"""How processes end, on Ctrl-C and SIGTERM alike, no worker after its parent; and how many threads BLAS has."""

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
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal has asked this process to stop.

    Attributes:
        status: the exit status by which a shell tells so.
        message: what the command says then.
    """

    message = "stopped: re-run the same command to resume"

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__()
        self.status = 128 + number


# The signal that has arrived: what it raised may have been lost, in a callback or in a module half imported.
_requested = 0


def stop_on_signals() -> None:
    """Raise Stopped in the main thread on Ctrl-C and on SIGTERM, which Slurm sends before a job's time is over."""
    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    global _requested
    again, _requested = _requested == signal.SIGTERM == number, number
    if not again:  # a second SIGTERM does not disturb what the first one has begun
        raise Stopped(number)


def check_stopped() -> None:
    """Raise Stopped if a signal has arrived."""
    if _requested:
        raise Stopped(_requested)


@contextmanager
def starting_workers() -> Iterator[None]:
    """Keep signals from processes that are started while this lasts, until they `follow_parent`."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # which unblocks these signals once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it ends, however that happens. Run first in a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The parent holds the other end of a pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """NumPy's and SciPy's matrix products use one thread while this lasts.

    Theirs would wait for each other, and for torch's: with two processors `selectability` took twice as long.
    """
    with _blas().limit(limits=1, user_api="blas"):
        yield


@cache
def _blas() -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    import_module("scipy.linalg")  # whose BLAS must be there to be found
    return ThreadpoolController()
