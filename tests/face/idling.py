"""What worker processes do in the tests of engines: importable there, and quick to import."""

from __future__ import annotations

import time


def begin(*_given: object) -> None:
    from ln_probe.analyses.processes import follow_parent

    follow_parent()  # as the engine's own workers do: signals are kept from them until then


def idle(_target: object, _unit: object) -> None:
    time.sleep(600)
