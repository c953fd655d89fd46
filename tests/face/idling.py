"""What worker processes do in the tests of engines: importable there, and quick to import."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection


def serve(jobs: Connection, *_given: object) -> None:
    from ln_probe.analyses.processes import follow_parent

    follow_parent()  # as the engine's own workers do: signals are kept from them until then
    jobs.recv()
    idle()


def idle() -> None:
    time.sleep(600)
