"""Observers of a forward pass: each one's failures kept from the others, and a thread for those of a model on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from ln_probe.analyses.probes.base import Failure, Observer, Piece, Probe, View
from ln_probe.analyses.probes.registry import OWN, package_of
from ln_probe.seal import Seal, SealError


class GuardedObserver:
    """Calls a probe's observer; an exception of its ends its part, and no other's."""

    def __init__(
        self, probe: Probe, view: View, limit: int | None = None, seal: Seal | None = None, *, alone: bool = True
    ) -> None:
        """`seal`: of the model; `alone`: whether no other probe of another package watches the same passes."""
        self.probe, self.limit = probe, limit
        self.failure: Failure | None = None
        self._seal, self._alone = seal if is_foreign(probe) else None, alone
        self._observer: Observer | None = self._guard(probe.start, view)

    def takes(self, prompt: int) -> bool:
        return self.limit is None or prompt < self.limit

    def call(self, event: str, *given: object) -> Any:
        """Call a method of the observer ("norm", "attention", "prompt", "end" or "piece"), unless it has failed.

        Raises:
            SealError: it changed the model's weights.
        """
        if self.failure is not None:
            return None
        thorough = not self._alone or event not in ("norm", "attention")
        return self._guard(getattr(self._observer, event), *given, thorough=thorough)

    def _guard(self, work: Callable[..., Any], *given: object, thorough: bool = True) -> Any:
        try:
            with nullcontext() if self._seal is None else self._seal.watching(self.probe.name, thorough=thorough):
                return work(*given)
        except SealError:
            raise
        except Exception as error:
            self.failure = Failure.of(self.probe.name, package_of(self.probe), error)

    def piece(self) -> Piece | Failure:
        made = self.call("piece")
        if self.failure is None and not isinstance(made, Piece):
            wrong = TypeError(f"its observer's piece is a {type(made).__name__}, not a Piece")
            self.failure = Failure.of(self.probe.name, package_of(self.probe), wrong)
        return made if self.failure is None else self.failure


def is_foreign(probe: Probe) -> bool:
    """Whether a probe is not one of ln_probe's own."""
    return package_of(probe) != OWN


class BackgroundWorker:
    """A thread that does what it is given, one thing after the other. Entered, it ends with everything done.

    Args:
        room: bytes that may be held by what waits; 0: there is no thread, and everything is done at once.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._thread = (  # (gradients are switched off in every thread)
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
        while self._waiting and (self._waiting[0][0].done() or sum(s for _, s in self._waiting) + size > self.room):
            self._waiting.popleft()[0].result()
        self._waiting.append((self._thread.submit(work), size))

    def finish(self) -> None:
        """Wait until nothing is left.

        Raises:
            Exception: what some of it raised.
        """
        while self._waiting:
            self._waiting.popleft()[0].result()

    def __enter__(self) -> BackgroundWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._thread is not None:
            try:
                if kind is None:
                    self.finish()
            finally:
                self._thread.shutdown(cancel_futures=True)
