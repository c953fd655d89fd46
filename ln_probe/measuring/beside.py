"""Work of the processor beside the passes of a GPU: in a thread of its own, in order, and only so much of it waiting as
there is memory for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch


class Beside:
    """A thread that does what it is given, one thing after the other. Entered, it ends with everything done.

    Args:
        room: bytes that may be held by what waits; 0: there is no thread, and everything is done at once.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._thread = (  # (that no gradients are wanted is said in every thread)
            ThreadPoolExecutor(1, "ln_probe beside a GPU", torch.set_grad_enabled, (False,)) if room else None
        )
        self._waiting: deque[tuple[Future[None], int]] = deque()

    def do(self, work: Callable[[], None], size: int = 0) -> None:
        """Do it, after everything given before, which waits until there is room for `size` bytes more.

        Raises:
            Exception: what earlier work raised.
        """
        if self._thread is None:
            work()
            return
        while self._waiting and (self._waiting[0][0].done() or self._held + size > self.room):
            self._waiting.popleft()[0].result()
        self._waiting.append((self._thread.submit(work), size))

    def finish(self) -> None:
        """Wait until nothing is left.

        Raises:
            Exception: what some of it raised.
        """
        while self._waiting:
            self._waiting.popleft()[0].result()

    @property
    def _held(self) -> int:
        return sum(size for _, size in self._waiting)

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            try:
                if kind is None:
                    self.finish()
            finally:
                self._thread.shutdown(cancel_futures=True)
