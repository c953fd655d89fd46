"""What these scripts share: GPT-2 small's shape, ways that take turns, separate processes, and tables in files."""

from __future__ import annotations

import csv
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
LN_PROBE = [sys.executable, "-c", "from ln_probe.cli import app; app()"]  # the command line
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_TICK = 0.5  # seconds between two looks at a running command
_MEASURE = (
    "import json, resource, subprocess, sys; done = subprocess.run(json.loads(sys.argv[1]), stdout=sys.stderr); "
    "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    "print(json.dumps([done.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))"
)


def gpt2_small(vocabulary: int = 50257, change: Callable[[Any], object] | None = None) -> Any:
    """A bridge of GPT-2 small's shape with random weights (seed 0), which `change` may alter beforehand."""
    import torch
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocabulary)
    config._attn_implementation = "eager"
    hf = GPT2LMHeadModel(config).eval()
    if change is not None:
        with torch.no_grad():
            change(hf)
    return build_bridge_from_module(
        hf, "GPT2LMHeadModel", hf_config=config, tokenizer=None, model_name="gpt2-small-shape"
    )


def in_turn(ways: Mapping[str, Callable[[], object]], repeats: int, warm: int = 1) -> dict[str, np.ndarray]:
    """Seconds of the wall and of the processor [repeat 2] of each way.

    The ways take turns, so that a busy machine slows all alike. The first `warm` rounds are not counted.
    """
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-warm, repeats):
        for name, way in ways.items():
            start, used = time.perf_counter(), time.process_time()
            way()
            seconds = time.perf_counter() - start, time.process_time() - used
            if number >= 0:
                taken[name].append(seconds)
    return {name: np.array(rows) for name, rows in taken.items()}


def in_process(work: Callable[..., Any], *arguments: object, threads: int, **environment: str) -> Any:
    """What a function of a script returns in a separate process with so many threads; all of it goes through JSON."""
    script = Path(work.__code__.co_filename)
    code = (
        f"import json, sys; sys.path.insert(0, {str(script.parent)!r}); from {script.stem} import {work.__name__}; "
        f"print(json.dumps({work.__name__}(*json.loads(sys.argv[1]))))"
    )
    env = os.environ | dict.fromkeys(THREADS, str(threads)) | environment
    command = [sys.executable, "-c", code, json.dumps(arguments)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def environment_of(checkout: Path = ROOT) -> dict[str, str]:
    """The environment of commands of a checkout, without the model hub."""
    path = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def measure_command(
    command: list[str], checkout: Path = ROOT, look: Callable[[int], object] | None = None, **environment: str
) -> dict[str, float]:
    """Seconds (`wall`, `cpu`) and the largest resident set in MB (`largest`) of a command and all it starts.

    `look` is called with its process id twice a second. This process exits if the command fails.
    """
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", _MEASURE, json.dumps(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of(checkout) | environment,
        cwd=checkout,
    )
    while True:
        if look is not None:
            look(process.pid)
        try:
            out, errors = process.communicate(timeout=_TICK)
            break
        except subprocess.TimeoutExpired:
            continue
    wall = time.perf_counter() - began
    code, cpu, largest = json.loads(out.splitlines()[-1])
    if code:
        sys.exit(f"{' '.join(command[:5])} … failed ({code}):\n{errors[-2000:]}")
    return {"wall": wall, "cpu": cpu, "largest": largest}


def peak_mb() -> float:
    """The largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(*cells: object) -> None:
    """Print a row of a table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def show_head(*cells: object) -> None:
    """Print the head of a table and the line below it."""
    show(*cells)
    print("|" + "---|" * len(cells), flush=True)


def write_table(path: Path | None, rows: Iterable[Iterable[object]]) -> None:
    """Write rows, the head first, as a CSV file; None: nowhere."""
    if path is not None:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


def keep(
    path: Path | None,
    columns: Sequence[str],
    rows: Iterable[Iterable[object]],
    *,
    about: int = 1,
    order: Callable[[str], Any] | None = None,
) -> None:
    """Write rows into a CSV file, in the place of those that begin with the same `about` cells; the others stay.

    Args:
        path: of the file; None: nothing is written.
        columns: its head.
        rows: the new ones.
        about: how many cells say what a row is about.
        order: the key of a row's first cell to sort by; None: new rows come last.
    """
    if path is None:
        return
    made = [list(map(str, row)) for row in rows]
    new = {tuple(row[:about]) for row in made}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            made = [row for row in list(csv.reader(file))[1:] if tuple(row[:about]) not in new] + made
    write_table(path, [columns, *(made if order is None else sorted(made, key=lambda row: order(row[0])))])
