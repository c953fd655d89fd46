"""What attribution costs, in forward passes and in memory, at GPT-2 small's shape and 512 tokens.

*One logit* over all heads and MLPs (`attribute_logits`, from the model to the table: finding norms, parts and wiring
included); *one score* against another key; the *writers* and *attribution* observers on a prompt, their own pass
included (norms and wiring are found once a model, and are not counted). Random weights, two threads; medians of repeats
that alternate with a bare forward pass, in one process, wall and processor time. Peaks of memory are of separate
processes, compared with the forward pass's. Bounds: one logit ≤ 2 passes; `writers` ≤ 2.5 passes and 1.3 × the memory.

`--beside`: 128 tokens, one thread, beside TransformerLens's direct logit attribution on the folded model and
`run_with_cache`, all in one process, in turn. Bounds: all positions ≤ 2 × direct logit attribution and ≤ 1.5 × the
memory of `run_with_cache`; one position ≤ 1.3 passes; one head's scores of one query ≤ 3 passes.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import ln_probe
from ln_probe.analyses.constants import Calibration, Constants
from ln_probe.analyses.probes.base import View
from ln_probe.analyses.probes.columns import LAYERNORMS
from ln_probe.analyses.probes.registry import find
from ln_probe.hooks.model import run
from ln_probe.hooks.sites import find_sites

TOKENS, THREADS, REPEATS = 512, 2, 5
PARTS = ("forward", "logit", "score", "writers", "attribution")
BESIDE_TOKENS = 128
# What is measured beside TransformerLens, each with the part of TransformerLens's that its time is compared with.
BESIDE = {"cache": "", "direct": "", "direct_layers": "", "positions": "direct", "layers": "direct_layers",
          "position": "", "keys": ""}  # fmt: skip
BOUNDS = {"logit": (2.0, None), "writers": (2.5, 1.3)}


def gpt2_small(vocabulary: int = 50257) -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocabulary)
    config._attn_implementation = "eager"
    hf = GPT2LMHeadModel(config).eval()
    return build_bridge_from_module(
        hf, "GPT2LMHeadModel", hf_config=config, tokenizer=None, model_name="gpt2-small-shape"
    )


def direct_logit_attribution(model: Any, tokens: torch.Tensor, heads: bool) -> torch.Tensor:
    """Of every next token's logit, through TransformerLens's cache of a folded model [component pos]."""
    _, cache = model.run_with_cache(tokens[None])
    if heads:
        components = cache.get_full_resid_decomposition(expand_neurons=False, apply_ln=True)
    else:
        components = cache.decompose_resid(apply_ln=True)
    return torch.einsum("cpd,dp->cp", components[:, 0, :-1], model.W_U[:, tokens[1:]])


def view_of(model: Any) -> View:
    sites = find_sites(model)
    ones = np.ones((1, len(sites), 2))  # the sums and counts of sigma of one prompt: every constant is 1
    constants = Constants(tuple(s.name for s in sites), np.zeros(1, np.int64), ones, ones)
    calibration = Calibration(LAYERNORMS.empty(), constants, {}, {}, ())
    return View(model, sites, range(model.cfg.n_layers), None, calibration, str)


def doing(part: str, model: Any, tokens: torch.Tensor) -> Callable[[], object]:
    if part == "cache":
        return lambda: model.run_with_cache(tokens[None])
    if part.startswith("direct"):
        return lambda: direct_logit_attribution(model, tokens, part == "direct")
    if part in ("positions", "layers"):
        components = "heads" if part == "positions" else part
        return lambda: ln_probe.attribute_logits(model, tokens, components=components).check()
    if part == "keys":
        return lambda: ln_probe.attribute_scores(model, tokens, 11, 3, -1).check()
    if part in ("logit", "position"):
        return lambda: ln_probe.attribute_logits(model, tokens, -1).check()
    if part == "score":
        return lambda: ln_probe.attribute_scores(model, tokens, 11, 3, -1, 0, against=5).check()
    if part == "forward":
        return lambda: run(model, tokens[None], return_type="logits")
    observer = find(part).start(view_of(model))
    return lambda: observer.prompt(0, tokens)


def measure(part: str, vocabulary: int, repeats: int) -> dict[str, float]:
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    model = gpt2_small(vocabulary)
    length = BESIDE_TOKENS if part in BESIDE else TOKENS
    tokens = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(1))
    if part.startswith("direct"):
        model.enable_compatibility_mode(disable_warnings=True, fold_ln=True, center_writing_weights=True)
    wanted, bare = doing(part, model, tokens), doing("forward", model, tokens)
    bare()
    if part != "forward":
        wanted()
    taken: dict[str, list[float]] = {n: [] for n in ("wall", "processor", "bare_wall", "bare_processor")}
    for _ in range(repeats):
        for name, act in (("", wanted), ("bare_", bare)):
            start, used = time.perf_counter(), time.process_time()
            act()
            taken[f"{name}wall"].append(time.perf_counter() - start)
            taken[f"{name}processor"].append(time.process_time() - used)
    found = {n: statistics.median(t) for n, t in taken.items()}
    return found | {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def take_turns(vocabulary: int, repeats: int) -> dict[str, float]:
    """Processor time of the parts of BESIDE, which run in turn in this process: medians, in seconds."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    raw, folded = gpt2_small(vocabulary), gpt2_small(vocabulary)
    folded.enable_compatibility_mode(disable_warnings=True, fold_ln=True, center_writing_weights=True)
    tokens = torch.randint(0, vocabulary, (BESIDE_TOKENS,), generator=torch.Generator().manual_seed(1))
    acts = {part: doing(part, folded if part.startswith("direct") else raw, tokens) for part in ("forward", *BESIDE)}
    taken: dict[str, list[float]] = {part: [] for part in acts}
    for number in range(repeats + 1):
        for part, act in acts.items():
            used = time.process_time()
            act()
            if number:  # the first is for what is found once a model
                taken[part].append(time.process_time() - used)
    return {part: statistics.median(t) for part, t in taken.items()}


def beside(arguments: argparse.Namespace) -> None:
    version, vocabulary = importlib.metadata.version("transformer-lens"), arguments.vocabulary
    print(f"\nattribution beside TransformerLens {version}: GPT-2 small's shape, {BESIDE_TOKENS} tokens, one thread")
    memory = {part: child(part, vocabulary, 1, threads=1)["peak_mb"] for part in BESIDE}
    seconds = take_turns(vocabulary, arguments.repeats)  # (last: a child's peak is at least its parent's)
    columns = ("transformer_lens", "part", "passes", "direct", "memory")
    rows = []
    for part, other in BESIDE.items():
        ratio = f"{seconds[part] / seconds[other]:.2f}" if other else ""
        figures = (f"{seconds[part] / seconds['forward']:.2f}", ratio, f"{memory[part] / memory['cache']:.2f}")
        rows.append(dict(zip(columns, (version, part, *figures), strict=True)))
    print(pd.DataFrame(rows).to_string(index=False))
    if arguments.out:
        kept = (
            pd.read_csv(arguments.out, dtype=str, keep_default_na=False)
            if arguments.out.exists()
            else pd.DataFrame(columns=columns)
        )
        kept = pd.concat([kept[kept["transformer_lens"] != version], pd.DataFrame(rows)])
        kept.sort_values("transformer_lens", kind="stable").to_csv(arguments.out, index=False)


def child(part: str, vocabulary: int, repeats: int, threads: int = THREADS) -> Any:
    """What a separate process measures of a part."""
    counts = {n: str(threads) for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, __file__, "--part", part, "--vocabulary", str(vocabulary)]
    command += ["--repeats", str(repeats)]
    done = subprocess.run(command, env=os.environ | counts, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--part", choices=(*PARTS, *BESIDE))
    parser.add_argument("--beside", action="store_true", help="TransformerLens's functions in turn")
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--out", type=Path, help="a CSV file; --beside replaces the rows of its version")
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(measure(arguments.part, arguments.vocabulary, arguments.repeats)))
        return
    if arguments.beside:
        beside(arguments)
        return
    print(f"\nattribution: GPT-2 small's shape, {TOKENS} tokens, {THREADS} threads")
    print("| part | seconds | passes (wall) | passes (processor) | peak, MB | … of the first | bound |")
    print("|---|---|---|---|---|---|---|")
    base, rows = 0.0, [("part", "passes", "memory")]
    for part in PARTS:
        found = child(part, arguments.vocabulary, arguments.repeats)
        base = base or found["peak_mb"]
        passes, memory = BOUNDS.get(part, (None, None))
        bound = "" if passes is None else f"{passes} passes" + ("" if memory is None else f", {memory} × memory")
        print(
            f"| {part} | {found['wall']:.2f} | {found['wall'] / found['bare_wall']:.2f} | "
            f"{found['processor'] / found['bare_processor']:.2f} | {found['peak_mb']:.0f} | "
            f"{found['peak_mb'] / base:.2f} | {bound} |",
            flush=True,
        )
        if part != "forward":
            passes_taken, memory_held = found["processor"] / found["bare_processor"], found["peak_mb"] / base
            rows.append((part, f"{passes_taken:.1f}", f"{memory_held:.1f}"))
    if arguments.out:
        with arguments.out.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
