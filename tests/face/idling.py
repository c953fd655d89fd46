"""What worker processes do in the tests of engines: importable there, and quick to import."""

from __future__ import annotations

import time


def begin(*_given: object) -> None:
    pass


def idle(_target: object, _unit: object) -> None:
    time.sleep(600)
