"""One thread at a time on a model, and a forked process that waits for nobody."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from torch import nn

from ln_probe.hooks.model import exclusive


def ends(process: int, seconds: float = 60.0) -> bool:
    """Whether a child process ends by itself; it is killed if it does not."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if os.waitpid(process, os.WNOHANG) != (0, 0):
            return True
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_b03_a_fork_while_another_thread_has_the_model() -> None:
    model = nn.Linear(2, 2)
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with exclusive(model):
            inside.set()
            done.wait(120)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:  # pragma: no cover - it has no thread that could let go of the lock
        with exclusive(model):
            os._exit(0)
    try:
        assert ends(child, 10), "the forked process waits for a thread that it does not have"
    finally:
        done.set()
        thread.join()
    with exclusive(model), exclusive(model):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_b03_a_fork_inside() -> None:
    """The forking thread itself has the model: its copy goes on, and leaves, as it would have."""
    model = nn.Linear(2, 2)
    with exclusive(model):
        child = os.fork()
        if not child:  # pragma: no cover
            with exclusive(model):
                pass
            os._exit(0)
        assert ends(child, 10)


def test_the_second_thread_waits() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    order: list[str] = []
    begun = threading.Event()

    def second() -> None:
        with exclusive(other):
            order.append("another model")
        begun.set()
        with exclusive(model):
            order.append("second")

    thread = threading.Thread(target=second)
    with exclusive(model), exclusive(model):
        thread.start()
        assert begun.wait(60)
        time.sleep(0.05)
        order.append("first")
    thread.join(60)
    assert order == ["another model", "first", "second"]
