"""What a default report of GPT-2 small's real shape costs, by stage and as a whole: wall, processor time, peak memory.

Random weights (seed 0) in a Hugging Face folder with the real tokenizer (of LN_PROBE_SHARED), so nothing is downloaded;
every stage in a separate process: loading, then each probe alone through `analyze`, then `ln-probe report` as a user
types it. Memory is the largest resident set of a process (`largest`), and for the whole command also the largest sum of
the private memory of all its processes (`sum`: proportional set sizes, twice a second), and when its page is there for
the first time (`page`).

    python bench/whole.py                         this checkout
    python bench/whole.py --against ../before     and another one, taking turns, for comparison
    python bench/whole.py --stages causal whole --repeats 3
    python bench/whole.py --prompts 4             on the first four of the bundled prompts alone
    python bench/whole.py --out FILE.csv          the table as a file, memory in GB
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from harness import LN_PROBE, measure_command, write_table

PROBES = ("decomposition", "uniformity", "selectability", "causal", "head_effects", "sinks")
STAGES = ("loading", *PROBES, "whole")
COLUMNS = ("stage", "checkout", "prompts", "repeats", "wall_s", "cpu_s", "largest_gb", "page_s")

_LOADING = "import ln_probe, sys; ln_probe.load_model(sys.argv[1])"
_PROBE = (
    "import json, ln_probe, sys; model = ln_probe.load_model(sys.argv[1]); "
    "texts = [json.loads(line)['text'] for line in open(sys.argv[3])] if sys.argv[3:] else None; "
    "ln_probe.analyze(model, texts, probes=(sys.argv[2],), progress=False)"
)


def checkpoint(folder: Path, layers: int) -> Path:
    """A folder as the model hub has it: GPT-2 small's config and tokenizer, weights as it is initialized."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    home = folder / "gpt2-shape"
    GPT2LMHeadModel(GPT2Config(n_layer=layers)).save_pretrained(home)
    shared = Path(os.environ.get("LN_PROBE_SHARED", "../shared")) / "tokenizers" / "gpt2"
    for name in ("merges.txt", "vocab.json", "tokenizer_config.json"):
        shutil.copy(shared / name, home / name)
    return home


def _memory(pid: int) -> float:
    """Proportional set size of a process and its children, MB (0 if one of them has just ended)."""
    try:
        process = psutil.Process(pid)
        return sum(p.memory_full_info().pss for p in (process, *process.children(recursive=True))) / 2**20
    except psutil.Error:
        return 0.0


def _some_prompts(folder: Path, count: int) -> Path:
    """The first of the bundled prompts, as a file of a user's own."""
    from ln_probe.hooks.task import bundled_texts

    file = folder / f"prompts-{count}.jsonl"
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in bundled_texts()[:count]))
    return file


def _stage(name: str, model: Path, checkout: Path, out: Path, prompts: Path | None) -> dict[str, float]:
    """Seconds of the wall and of processors, memory in MB (`largest`, `sum`), and when the page is there."""
    most, seen = 0.0, math.nan
    command = [sys.executable, "-c", _PROBE, str(model), name, *([str(prompts)] if prompts else [])]
    if name == "loading":
        command = [sys.executable, "-c", _LOADING, str(model)]
    elif name == "whole":
        shutil.rmtree(out, ignore_errors=True)
        rest = [str(model), "--out", str(out), *(["--prompts", str(prompts)] if prompts else [])]
        command = [*LN_PROBE, "report", *rest]

    def look(pid: int) -> None:
        nonlocal most, seen
        most = max(most, _memory(pid))
        if math.isnan(seen) and name == "whole" and any(out.glob("*/report.html")):
            seen = time.perf_counter() - began

    began = time.perf_counter()
    measured = measure_command(command, checkout, look)
    return measured | {"sum": most, "page": seen}


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    given.add_argument("--against", type=Path, help="another checkout of the package")
    given.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    given.add_argument("--repeats", type=int, default=1)
    given.add_argument("--layers", type=int, default=12)
    given.add_argument("--prompts", type=int, help="the first so many of the bundled ones (default: all)")
    given.add_argument("--out", type=Path, help="a CSV file for the table")
    asked = given.parse_args()
    rows: list[tuple[object, ...]] = [COLUMNS]
    checkouts = {"here": Path(__file__).resolve().parent.parent}
    if asked.against:
        checkouts = {"before": asked.against.resolve()} | checkouts
    print(
        f"{'stage':14s} {'':8s} {'wall s':>8s} {'cpu s':>8s} {'largest MB':>11s} {'sum MB':>8s} {'page s':>7s}",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as scratch:
        model = checkpoint(Path(scratch), asked.layers)
        prompts = _some_prompts(Path(scratch), asked.prompts) if asked.prompts else None
        for stage in asked.stages:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
            for _ in range(asked.repeats):
                for name, checkout in checkouts.items():
                    found[name].append(_stage(stage, model, checkout, Path(scratch) / "reports", prompts))
            for name, runs in found.items():
                middle = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
                print(
                    f"{stage:14s} {name:8s} {middle['wall']:8.1f} {middle['cpu']:8.1f} {middle['largest']:11.0f} "
                    f"{middle['sum']:8.0f} {middle['page']:7.1f}",
                    flush=True,
                )
                last = "" if math.isnan(middle["page"]) else f"{middle['page']:.0f}"
                figures = (f"{middle['wall']:.1f}", f"{middle['cpu']:.1f}", f"{middle['largest'] / 1024:.1f}", last)
                rows.append((stage, name, asked.prompts or "default", asked.repeats, *figures))
    write_table(asked.out, rows)


if __name__ == "__main__":
    main()
