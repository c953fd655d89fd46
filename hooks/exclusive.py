"""One at a time: what is measured through hooks on a model must not be mixed with another thread's.

Hooks belong to the model and not to whoever put them on, so two passes at once would each see the other's activations.
A thread that wants a model which another is looking at waits. The model's own forward pass in another thread, without
ln_probe, is refused while `analyze` measures (`hooks.cover`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # RLocks
_GUARD = Lock()


def _forget_locks() -> None:
    """Start with new locks in a forked process: the threads that held the old ones do not exist there."""
    global _LOCKS, _GUARD
    _LOCKS, _GUARD = WeakKeyDictionary(), Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


@contextmanager
def exclusive(model: object) -> Iterator[None]:
    """While it lasts no other thread enters it for this model; the same thread may, again."""
    with _GUARD:
        lock = _LOCKS.setdefault(cast(nn.Module, model), RLock())
    with lock:
        yield
