"""The next-token loss, which kills or holds up the process that computes it as LN_PROBE_DISTURB=ACT:FOLDER says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor

ONCE, ALWAYS = 21, 22  # vocabularies of models at whose measurement one process, or each, is killed


def loss(output: Any, tokens: Tensor) -> Tensor:
    """The mean loss of each prompt."""
    act, _, folder = os.environ.get("LN_PROBE_DISTURB", "").partition(":")
    mark, vocabulary = Path(folder, act), output.shape[-1]
    if act == "kill" and (vocabulary == ALWAYS or (vocabulary == ONCE and not mark.exists())):
        if vocabulary == ONCE:
            mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "wait":
        mark.touch()
        while not Path(folder, "go on").exists():
            time.sleep(0.02)
    scores = output[:, :-1].log_softmax(-1)
    return -scores.gather(-1, tokens[:, 1:, None])[..., 0].mean(-1)
