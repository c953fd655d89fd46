"""A thousand checkpoints in one folder: overhead of each, the driver's memory, kill and resume, slices, Ray, the index.

Twelve models of one layer (random weights, d_model 8, 32 tokens) with about 83 training steps each, two prompts of 8
tokens, the probe `causal` alone: next to nothing to measure, so that what remains is the suite's own cost.

* `local`: two workers (`--workers`); the driver is killed (SIGKILL) when a half of the reports are there, and run
  again.
* `slices`: `report --unit K/16`, as a job array of 16 runs them, two at a time, then `merge`; the first one is killed
  half way before, and run again with the others (processor time of what was killed is not counted).
* `ray`: two workers of a cluster on this machine; needs `pip install 'ln-probe[ray]'`.

Columns: wall and processor seconds of all processes; processor seconds per checkpoint; what of them a bare loop over
`load_model`, `analyze` and `save` takes in one process that has done ten already; the difference, the overhead; the
driver's resident memory when a quarter of the reports were there and when all were, and its peak, which the index
makes; the index's size, and seconds until headless Chromium has opened it, the median of 5. `done`: finished reports.
`index` makes one of as many reports with all probes (of twelve such checkpoints, in turn), without the suite.

    python bench/suite.py --scenes local slices ray --out bench/results/suite.csv
    python bench/suite.py --checkpoints 100
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from harness import LN_PROBE, chromium, environment_of, keep, write_prompts

MODELS, SLICES, VISITS, WORKERS = 12, 16, 5, 2
PROBES = "causal"
COLUMNS = (
    *("scene", "checkpoints", "done", "kills", "wall_s", "cpu_s", "cpu_each_s", "bare_each_s", "overhead_each_s"),
    *("driver_quarter_mb", "driver_end_mb", "driver_peak_mb", "index_mb", "index_opens_s"),
)
_LOOP = """
import pathlib, resource, sys, torch, ln_probe
from ln_probe.analyses.geometry.compiled import use_processors
torch.set_num_threads(1)
use_processors(1)
home, out, probes, *models = sys.argv[1:]
for number, name in enumerate(models):
    if number == 10:
        before = resource.getrusage(resource.RUSAGE_SELF)
    report = ln_probe.analyze(
        ln_probe.load_model(name), pathlib.Path(home, "prompts.jsonl"), probes=tuple(probes.split(",")), progress=False
    )
    report.save(f"{out}/{number}")
after = resource.getrusage(resource.RUSAGE_SELF)
print((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / (len(models) - 10))
"""

_INDEX = """
import copy, pathlib, sys, torch, ln_probe
from dataclasses import replace
from ln_probe.page.index import IndexEntry, for_index, index_page
torch.set_num_threads(1)
home, out, count, *models = sys.argv[1:]
prompts = pathlib.Path(home, "prompts.jsonl")
made = [ln_probe.analyze(ln_probe.load_model(m), prompts, progress=False) for m in models]
entries = []
for number in range(int(count)):
    report = copy.deepcopy(made[number % len(made)])
    name = f"model-{number % len(made)}/checkpoint-{10 * (number // len(made))}"
    report.provenance["model"]["name"] = name
    entries.append(IndexEntry(name, f"{number}/report.html", for_index(report, number)))
pathlib.Path(out).mkdir()
pathlib.Path(out, "index.html").write_text(index_page(entries))
"""


@dataclass
class Seen:
    """Measurements of commands: processor seconds, and (reports there, resident memory in MB) of the driver."""

    cpu: float = 0.0
    peak: float = 0.0
    memory: list[tuple[int, float]] = field(default_factory=list)


def made(home: Path, count: int) -> list[Path]:
    """The models' folders, checkpoint-0, checkpoint-10, … in each, and the prompts."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    rng = random.Random(0)
    write_prompts(home / "prompts.jsonl", [[rng.randrange(32) for _ in range(8)] for _ in range(2)])
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=1, **ends)
    models = [home / f"model-{number:02d}" for number in range(MODELS)]
    for number in range(count):
        torch.manual_seed(number)
        GPT2LMHeadModel(config).save_pretrained(models[number % MODELS] / f"checkpoint-{10 * (number // MODELS)}")
    return [m for m in models if m.exists()]


def command(*rest: object) -> list[str]:
    return [*LN_PROBE, *map(str, rest)]


def finished(out: Path) -> int:
    """How many reports there are: a look at one folder's names."""
    try:
        return sum(name.endswith(".json") for name in os.listdir(out / ".ln_probe" / "done"))
    except FileNotFoundError:
        return 0


def calibrated(out: Path) -> int:
    """How many checkpoints have a result."""
    return sum(1 for _ in (out / ".ln_probe" / "units").glob("*/calibration-*.safetensors"))


def _spent() -> float:
    """Processor seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watched(seen: Seen, line: list[str], out: Path, kill_at: int = 0) -> None:
    """Run a command to its end, or until so many reports are there."""
    before = _spent()
    process = subprocess.Popen(line, env=environment_of(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    killed = False
    while process.poll() is None:
        _look(seen, process.pid, finished(out))
        if kill_at and finished(out) >= kill_at:
            process.send_signal(signal.SIGKILL)
            killed = True
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
    said = process.communicate()[0]
    seen.cpu += _spent() - before
    if process.returncode and not killed:
        sys.exit(f"{' '.join(line[3:6])} … failed ({process.returncode}):\n{said[-2000:]}")


def _look(seen: Seen, pid: int, done: int) -> None:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return
    now, most = (re.search(rf"{name}:\s+(\d+) kB", status) for name in ("VmRSS", "VmHWM"))
    if now and most:
        seen.memory.append((done, int(now[1]) / 1024))
        seen.peak = max(seen.peak, int(most[1]) / 1024)


def local(seen: Seen, base: list[object], out: Path, count: int, workers: int) -> int:
    line = command("report", *base, "--workers", workers, "--quiet")
    watched(seen, line, out, kill_at=count // 2)
    seen.cpu = 0.0  # workers of a killed driver are nobody's children: what follows is counted, of the other half
    left = count - finished(out)
    watched(seen, line, out)
    seen.cpu *= count / left
    return 1


def slices(seen: Seen, base: list[object], out: Path, count: int, workers: int) -> int:
    before = _spent()
    waiting = [
        command("report", *base, "--workers", 1, "--quiet", "--unit", f"{k}/{SLICES}") for k in range(1, SLICES + 1)
    ]
    killed = subprocess.Popen(waiting[0], env=environment_of())
    while killed.poll() is None and calibrated(out) < count // SLICES // 2:
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    for at in range(0, SLICES, workers):
        given = {"env": environment_of(), "stderr": subprocess.PIPE, "text": True}
        for process in [subprocess.Popen(line, **given) for line in waiting[at : at + workers]]:
            said = process.communicate()[1]
            if process.returncode:
                sys.exit(f"a slice failed ({process.returncode}):\n{said[-2000:]}")
    seen.cpu += _spent() - before
    watched(seen, command("merge", out, "--workers", workers, "--quiet"), out)
    return 1


def ray(seen: Seen, base: list[object], out: Path, count: int, workers: int) -> int:
    watched(seen, command("report", *base, "--engine", "ray", "--workers", workers, "--quiet"), out)
    seen.cpu = float("nan")  # Ray's processes are not the driver's children
    return 0


def index(seen: Seen, base: list[object], out: Path, count: int, workers: int) -> int:
    """An index of reports with all probes; of the base only the models matter."""
    models = [str(sorted(m.iterdir())[0]) for m in base if isinstance(m, Path) and m.is_dir()]
    line = [sys.executable, "-c", _INDEX, str(out.parent), str(out), str(count), *models]
    watched(seen, line, out)
    return 0


SCENES = {"local": local, "slices": slices, "ray": ray, "index": index}


def bare(home: Path, models: list[Path]) -> float:
    """Processor seconds of a checkpoint in a loop."""
    some = [str(folder) for model in models for folder in sorted(model.iterdir())[:3]][:30]
    line = [sys.executable, "-c", _LOOP, str(home), str(home / "loop"), PROBES, *some]
    done = subprocess.run(line, env=environment_of(), check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def opens(page: Path) -> float:
    """Seconds until Chromium has loaded a page and its scripts have run; NaN without Chromium."""
    found = []
    with chromium() as browser:
        for _ in range(VISITS if browser else 0):
            visit = browser.new_page()
            begun = time.perf_counter()
            visit.goto(page.as_uri(), wait_until="load")
            visit.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
            found.append(time.perf_counter() - begun)
            visit.close()
    return statistics.median(found) if found else float("nan")


def row(scene: str, home: Path, models: list[Path], count: int, each: float, workers: int) -> list[str]:
    out, seen = home / scene, Seen()
    base: list[object] = [*models, "--checkpoints", "all", "--prompts", home / "prompts.jsonl", "--probes", PROBES]
    base += ["--shard", 2]
    begun = time.perf_counter()
    kills = SCENES[scene](seen, [*base, "--out", out], out, count, workers)
    wall = time.perf_counter() - begun
    quarter = next((m for done, m in seen.memory if done >= count // 4), float("nan"))
    # of the last look before the last report was there, that is before the index is made
    end = [m for done, m in seen.memory if done < count][-1:] or [float("nan")]
    index = out / "index.html"
    figures = (wall, seen.cpu, seen.cpu / count, each, seen.cpu / count - each, quarter, *end, seen.peak)
    digits = (0, 0, 2, 2, 2, 0, 0, 0)
    size = f"{index.stat().st_size / 2**20:.2f}", f"{opens(index):.2f}"
    plain = ["" if v != v else f"{v:.{n}f}" for v, n in zip(figures, digits, strict=True)]
    return [scene, str(count), str(finished(out)), str(kills), *plain, *size]


def main() -> None:
    given = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    given.add_argument("--scenes", nargs="+", choices=SCENES, default=["local", "slices"])
    given.add_argument("--checkpoints", type=int, default=1000)
    given.add_argument("--workers", type=int, default=WORKERS, help="of `local` and `ray`; slices at a time")
    given.add_argument("--out", type=Path, help="a CSV file for the table; other scenes' rows in it are kept")
    asked = given.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        suites = set(asked.scenes) - {"index"}
        models = made(home, asked.checkpoints if suites else MODELS)
        each = bare(home, models) if suites else float("nan")
        print(",".join(COLUMNS), flush=True)
        for scene in asked.scenes:
            found = row(scene, home, models, asked.checkpoints, each, asked.workers)
            print(",".join(found), flush=True)
            keep(asked.out, COLUMNS, [found], order=list(SCENES).index)


if __name__ == "__main__":
    main()
