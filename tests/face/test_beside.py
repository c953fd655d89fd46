"""Beside the passes of a GPU the processor looks at what they left: the same tables, however long it takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import ln_probe
from ln_probe import passes
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import Needs, Observer, Probe, View
from ln_probe.analyses.schema import Column, Table
from ln_probe.hooks.capture import ActivationError
from ln_probe.measure import ProbeFailedWarning
from ln_probe.observers import BackgroundWorker
from ln_probe.passes import Passes

PROBES = ("decomposition", "selectability", "uniformity", "sinks", "causal")
ROOM = 1 << 30
PATIENCE = 60.0  # seconds after which a test that waits for something gives up


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1, 50, n).tolist() for n in (7, 4, 8)]


def measured(model: Any, room: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> dict[str, pd.DataFrame]:
    monkeypatch.setattr(Passes, "_gpu_memory", room)
    options = {"probes": PROBES, "batch_size": 1} | options
    return dict(ln_probe.analyze(model, prompts(), keys="all", progress=False, **options).tables)


def assert_equal(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> None:
    assert set(one) == set(other)
    for name, table in one.items():
        pd.testing.assert_frame_equal(table, other[name], obj=name)


def test_work_is_done_in_order_and_by_another_thread() -> None:
    done: list[tuple[int, str, bool]] = []

    def work(number: int) -> None:
        done.append((number, threading.current_thread().name, torch.is_grad_enabled()))

    with BackgroundWorker(100) as beside:
        for number in range(20):
            beside.do(partial(work, number), 30)
        beside.finish()
        assert len(done) == 20
        beside.do(partial(work, 20), 1000)  # more than there is room for, alone
    assert [number for number, _, _ in done] == list(range(21))
    assert {name for _, name, _ in done} == {done[0][1]} != {threading.current_thread().name}
    assert not any(grad for _, _, grad in done)


def test_only_so_much_waits_as_there_is_room_for() -> None:
    go, waiting = threading.Event(), 0

    def work() -> None:
        nonlocal waiting
        assert go.wait(PATIENCE)
        waiting -= 40

    def give() -> None:
        nonlocal waiting
        for _ in range(6):
            beside.do(work, 40)
            waiting += 40
            most.append(waiting)

    most: list[int] = []
    with BackgroundWorker(100) as beside:
        giver = threading.Thread(target=give)
        giver.start()
        end = time.monotonic() + PATIENCE
        while len(most) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        giver.join(0.2)  # (time enough to give more, if there were room)
        assert most == [40, 80]  # the third has to wait
        go.set()
        giver.join(PATIENCE)
        assert len(most) == 6
    assert waiting == 0


def test_without_a_gpu_there_is_no_other_thread() -> None:
    here: list[str] = []
    with BackgroundWorker(0) as beside:
        beside.do(lambda: here.append(threading.current_thread().name), 10**12)
        assert here == [threading.current_thread().name]
        beside.finish()


def test_what_goes_wrong_there_is_raised_here_and_ends_it() -> None:
    done: list[bool] = []

    def fail() -> None:
        raise KeyError("there")

    def failing(finish: bool) -> None:
        with BackgroundWorker(100) as beside:
            beside.do(fail)
            if finish:
                beside.finish()

    def broken_off() -> None:
        def first() -> None:  # ends when what is behind it has been called off
            end = time.monotonic() + PATIENCE
            while not all(later.cancelled() for later in behind) and time.monotonic() < end:
                time.sleep(0.01)
            done.append(True)

        with BackgroundWorker(100) as beside:
            begin = threading.Event()
            behind: list[Future[None]] = []
            beside.do(lambda: (begin.wait(PATIENCE), first())[1])
            for _ in range(5):
                beside.do(lambda: done.append(False))
            behind += [future for future, _ in beside._waiting][1:]
            assert len(behind) == 5
            begin.set()
            raise ZeroDivisionError

    for finish in (True, False):
        with pytest.raises(KeyError, match="there"):
            failing(finish)
    with pytest.raises(ZeroDivisionError):
        broken_off()
    assert done == [True]  # what waits is not begun any more


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"batch_size": 1}, {"batch_size": 2, "probes": PROBES[1:4]}])
def test_tables_are_the_same(
    options: dict[str, Any], make_hooked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_hooked()
    assert_equal(measured(model, 0, monkeypatch, **options), measured(model, ROOM, monkeypatch, **options))


def test_what_is_looked_at_later_is_as_it_was(make_hooked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A later block may use the memory of what an earlier one read: here it is overwritten before anybody looks."""
    model = make_hooked()
    plain = measured(model, 0, monkeypatch, probes=PROBES[1:4])
    gone, seen = threading.Event(), []
    norm, mlp, free = model.blocks[0].ln1, model.blocks[0].mlp, passes.return_free_memory

    def overwrite(*_: Any) -> None:
        for tensor in seen:
            tensor.fill_(7.0)
        gone.set()

    def patient() -> None:
        if threading.current_thread() is not threading.main_thread():
            assert gone.wait(PATIENCE)
        free()

    monkeypatch.setattr(passes, "return_free_memory", patient)
    handles = [
        norm.register_forward_hook(lambda _m, args, out: seen.extend([args[0], out])),
        model.blocks[0].attn.hook_pattern.register_forward_hook(lambda _m, _a, out: seen.append(out)),
        mlp.register_forward_pre_hook(overwrite),
    ]
    try:
        later = measured(model, ROOM, monkeypatch, probes=PROBES[1:4])
    finally:
        for handle in handles:
            handle.remove()
    assert_equal(plain, later)


def test_a_probe_that_fails_there_leaves_the_others(
    make_hooked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Observer):
        def attention(self, prompt: int, attended: AttentionLayer) -> None:
            raise ZeroDivisionError(f"of prompt {prompt}")

    class Broken(Probe):
        name, summary, needs = "broken", "fails", Needs(attention=True)
        tables = (
            Table("broken", "Broken", "A row per prompt.", ("prompt",), (Column("prompt", "int", "its number"),)),
        )

        def start(self, view: View) -> Observer:
            return Failing()

    monkeypatch.setattr(Passes, "_gpu_memory", ROOM)
    model = make_hooked()
    with pytest.warns(ProbeFailedWarning, match="of prompt 0"):
        found = ln_probe.analyze(model, prompts(), probes=("uniformity", Broken()), batch_size=1, progress=False)
    assert [f.probe for f in found.failures] == ["broken"]
    assert len(found.tables["heads"])


def test_a_pass_that_breaks_off_leaves_no_thread(
    make_hooked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_hooked()
    with torch.no_grad():
        model.blocks[1].mlp.W_out.fill_(float("inf"))
    before = set(threading.enumerate())
    with pytest.raises(ActivationError, match="holds NaN or infinite values"):
        measured(model, ROOM, monkeypatch)
    assert not {t for t in threading.enumerate() if t not in before and "beside" in t.name}
