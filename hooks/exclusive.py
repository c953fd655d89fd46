"""One at a time: what is measured through hooks on a model must not be mixed with another thread's.

Hooks belong to the model and not to whoever put them on, so two passes at once would each see the other's activations.
A thread that wants a model which another is looking at waits. (Running the model's own forward pass meanwhile, without
ln_probe, is not kept from anybody.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock
from typing import Any, cast
from weakref import WeakKeyDictionary

from torch import nn

_LOCKS: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # RLocks
_GUARD = Lock()


@contextmanager
def exclusive(model: object) -> Iterator[None]:
    """While it lasts no other thread enters it for this model; the same thread may, again."""
    with _GUARD:
        lock = _LOCKS.setdefault(cast(nn.Module, model), RLock())
    with lock:
        yield
