"""What a worker process does first, so that none outlives its parent."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading


def follow_parent() -> None:
    """Leave Ctrl-C to the parent, and end when it ends, however that happens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """The parent holds the other end of a pipe."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)
