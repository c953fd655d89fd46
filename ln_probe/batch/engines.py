"""Where units are done: in processes of this machine, or in this very process."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ln_probe.analyses.machinery import pulse
from ln_probe.analyses.machinery.files import temporary_folder
from ln_probe.analyses.machinery.worker import follow_parent, starting_workers
from ln_probe.batch.plan import Run, Unit
from ln_probe.batch.suite import Target

if TYPE_CHECKING:
    from ln_probe.batch.work import Outcome, Worker

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
THREADS = 1  # of torch and BLAS in every worker: with it the bytes of a result are the same on any number of workers


@runtime_checkable
class Engine(Protocol):
    """Workers that do one unit at a time each."""

    workers: int

    def available(self) -> set[int]:
        """The workers that there are now; machines come and go."""

    def submit(self, worker: int, target: Target, unit: Unit) -> None:
        """Give an idle worker something to do."""

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        """What ended meanwhile, by worker; empty if nothing did within `seconds`."""

    def close(self) -> None:
        """End all workers, whatever they are doing."""


class LocalEngine:
    """A process per worker. One that is killed is replaced; all of them end when this process does.

    Args:
        run: what is to be done.
        workers: number of processes.
        processors: that the geometry of each may use; its results do not depend on them.
    """

    def __init__(self, run: Run, workers: int, processors: int = 1) -> None:
        self.run, self.workers, self.processors = run, workers, processors
        self._pools: dict[int, ProcessPoolExecutor] = {}
        self._processes: dict[int, set[multiprocessing.process.BaseProcess]] = {}
        self._running: dict[Future[Outcome], int] = {}
        self._open = ExitStack()
        self._signs = self._open.enter_context(temporary_folder())

    def pulses(self) -> list[pulse.Pulse]:
        """What the busy workers are doing."""
        return [pulse.read(self._sign(worker)) for worker in sorted(set(self._running.values()))]

    def _sign(self, worker: int) -> Path:
        return self._signs / str(worker)

    def available(self) -> set[int]:
        return set(range(self.workers))

    def submit(self, worker: int, target: Target, unit: Unit) -> None:
        if worker not in self._pools:
            # A pool of one, so that it is known who does what. Spawned: torch's threads do not survive a fork.
            self._pools[worker] = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), _begin, (self.run, self.processors, self._sign(worker))
            )
        before = set(multiprocessing.active_children())
        with _few_threads(), starting_workers():
            self._running[self._pools[worker].submit(_do, target, unit)] = worker
        if begun := set(multiprocessing.active_children()) - before:  # the pool does not say which process is its own
            self._processes[worker] = begun

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        from ln_probe.batch.work import DIED, Outcome

        done, _ = wait(self._running, timeout=seconds, return_when=FIRST_COMPLETED)
        ended = []
        for future in done:
            worker = self._running.pop(future)
            try:
                outcome = future.result()
            except BrokenProcessPool as error:
                self._pools.pop(worker).shutdown(wait=False)
                outcome = Outcome(DIED, f"the worker process ended ({error})")
            ended.append((worker, outcome))
        return ended

    def close(self) -> None:
        busy = set(self._running.values())
        for worker, pool in self._pools.items():
            # Idle ones end by themselves, and free what they hold: terminated, they would leave semaphores behind.
            for process in self._processes.get(worker, ()) if worker in busy else ():
                process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)
        self._pools.clear()
        self._processes.clear()
        self._open.close()


class InProcess:
    """No worker processes: units are done here, one after another (for debugging, and for tests)."""

    workers = 1

    def __init__(self, run: Run) -> None:
        import torch

        from ln_probe.batch.work import Worker

        self._threads = torch.get_num_threads()
        self._worker = Worker(run)
        self._next: tuple[Target, Unit] | None = None

    def available(self) -> set[int]:
        return {0}

    def submit(self, worker: int, target: Target, unit: Unit) -> None:
        self._next = target, unit

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        if self._next is None:
            return []
        (target, unit), self._next = self._next, None
        return [(0, self._worker.do(target, unit))]

    def close(self) -> None:
        import torch

        torch.set_num_threads(self._threads)


@contextmanager
def _few_threads() -> Iterator[None]:
    """Processes started meanwhile use one thread in libraries that decide once, when they are imported."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(THREADS)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_worker: Worker | None = None  # of this process


def _begin(run: Run, processors: int, sign: Path) -> None:
    """What a worker process does first."""
    global _worker
    try:
        follow_parent()
        pulse.write_to(sign)
        pulse.tell("starting")
        from ln_probe.batch.work import Worker

        _worker = Worker(run, processors)
    except Exception as error:  # the pool would log a traceback
        print(f"ln-probe: a worker cannot start: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _do(target: Target, unit: Unit) -> Outcome:
    assert _worker is not None
    try:
        return _worker.do(target, unit)
    finally:
        pulse.tell("")
