"""Units on a Ray cluster: an actor per worker holds its checkpoint and does one unit after another.

Results go to the run's folder, which all machines have to share; what passes through Ray is a unit's name and how it
ended.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from ln_probe.batch.pool import THREAD_VARIABLES, THREADS, Engine
from ln_probe.batch.results import DIED, RETURNED, Outcome
from ln_probe.batch.run import WORK_FOLDER, Run, Unit
from ln_probe.batch.suite import Target

ANSWER_S = 10.0  # for a cluster's head to accept a connection


class RayError(ValueError):
    """Ray is not installed, or the cluster cannot do what is asked of it."""


class RayEngine(Engine):
    """Workers on the nodes of a Ray cluster. An actor that is lost with its node is replaced on another one.

    Args:
        run: its folder must be the same path on every node.
        workers: number of actors; None means one per processor of the cluster (or per GPU share).
        address: "auto" for a cluster that runs, host:port, or None to start one on this machine.
        gpus: per actor, fractions too.

    Raises:
        RayError: Ray is missing, there is no cluster at the address, or it has no room for a worker.
    """

    def __init__(self, run: Run, workers: int | None, *, address: str | None = None, gpus: float = 0.0) -> None:
        self._ray = connect(address, gpus)
        self.run, self._gpus = run, gpus
        self.workers = workers or _room(self._ray, gpus)
        self._actors: dict[int, Any] = {}
        self._starting: dict[int, Any] = {}
        self._running: dict[Any, int] = {}

    def available(self) -> set[int]:
        others = [w for w in range(self.workers) if w not in self._actors]
        return {*self._actors, *others[: max(0, _room(self._ray, self._gpus) - len(self._actors))]}

    def submit(self, worker: int, target: Target, unit: Unit) -> None:
        if worker not in self._actors:
            variables = dict.fromkeys(THREAD_VARIABLES, str(THREADS))
            remote = self._ray.remote(_Actor).options(
                num_cpus=1, num_gpus=self._gpus, max_restarts=0, max_concurrency=1, runtime_env={"env_vars": variables}
            )
            self._actors[worker] = remote.remote(self.run, os.getcwd())
            self._starting[worker] = self._actors[worker].__ray_ready__.remote()
        self._running[self._actors[worker].do.remote(target, unit)] = worker

    def wait(self, seconds: float) -> list[tuple[int, Outcome]]:
        done, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        ended = []
        for reference in done:
            worker = self._running.pop(reference)
            self._starting.pop(worker, None)
            try:
                outcome: Outcome = self._ray.get(reference)
            except self._ray.exceptions.RayActorError as error:  # killed, or gone with its node
                self._actors.pop(worker)
                outcome = Outcome(DIED, f"the worker was lost ({str(error).strip().splitlines()[-1]})")
            ended.append((worker, outcome))
        return ended + self._take_back()

    def _take_back(self) -> list[tuple[int, Outcome]]:
        """Units of actors that wait for a node which is no longer there: they would wait for ever."""
        for worker, ready in list(self._starting.items()):
            if self._ray.wait([ready], timeout=0)[0]:
                del self._starting[worker]
        returned = []
        while self._starting and len(self._actors) > _room(self._ray, self._gpus):
            worker, _ = self._starting.popitem()
            self._ray.kill(self._actors.pop(worker))
            self._running = {r: w for r, w in self._running.items() if w != worker}
            returned.append((worker, Outcome(RETURNED, "the cluster has no room for this worker any more")))
        return returned

    def close(self) -> None:
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        self._ray.shutdown()


def connect(address: str | None, gpus: float) -> Any:
    """The package ray, connected to the cluster at an address; arguments and errors as `RayEngine`."""
    try:
        import ray
    except ImportError as error:
        raise RayError("--engine ray needs the package ray: pip install 'ln-probe[ray]'") from error
    if not ray.is_initialized():
        _check_address(address)
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RayError(f"no Ray cluster at {address!r} ({error}): start one with `ray start --head`") from error
    if _room(ray, gpus) < 1:
        raise RayError(f"the Ray cluster has no room for a worker: it has {ray.cluster_resources()}")
    return ray


def _room(ray: Any, gpus: float) -> int:
    """How many actors the nodes that are alive have room for."""
    have = ray.cluster_resources()
    return int(have.get("GPU", 0) / gpus) if gpus else int(have.get("CPU", 0))


def _check_address(address: str | None) -> None:
    """Raise RayError if nothing listens there: Ray itself would try for many minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or "//" in host or not port.isdigit():
        return  # none, "auto", or a Ray Client's ray://…
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_S).close()
    except OSError as error:
        raise RayError(f"no Ray cluster at {address!r} ({error}): start one with `ray start --head`") from error


class _Actor:
    """A worker in Ray's hands."""

    def __init__(self, run: Run, folder: str) -> None:
        from ln_probe.batch.worker import Worker

        if os.path.isdir(folder):
            os.chdir(folder)  # paths mean what they mean to the driver
        if not (run.work / "run.json").is_file():
            raise FileNotFoundError(
                f"{run.out / WORK_FOLDER} is not there on this node: --out must be a folder that all nodes share"
            )
        self._worker = Worker(run, 1)

    def do(self, target: Target, unit: Unit) -> Outcome:
        return self._worker.do(target, unit)
