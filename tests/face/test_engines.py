"""Worker processes of this machine end with their engine, told apart without looking inside the pool."""

from __future__ import annotations

import multiprocessing

import idling
import pytest

from ln_probe.batch import pool
from ln_probe.batch.run import Run, Unit
from ln_probe.batch.suite import Target


def test_closing_ends_busy_workers_and_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_begin", idling.begin)
    monkeypatch.setattr(pool, "_do", idling.idle)
    run, target, unit = (object.__new__(kind) for kind in (Run, Target, Unit))  # the engine only hands them on
    foreign = multiprocessing.get_context("spawn").Process(target=idling.idle, args=(target, unit))
    foreign.start()
    engine = pool.LocalEngine(run, 2)
    try:
        engine.submit(0, target, unit)
        engine.submit(1, target, unit)
        ours = set(multiprocessing.active_children()) - {foreign}
        assert len(ours) == 2
        assert engine.wait(0.01) == []
        engine.close()
        for process in ours:
            process.join(60)
            assert process.exitcode is not None
        assert foreign.is_alive()
    finally:
        foreign.terminate()
        foreign.join(60)
    engine.close()  # again: nothing is left to do
