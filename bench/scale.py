"""What a report costs as models grow: time and memory against tokens, heads, d_head, layers, prompts; fitted exponents.

One layer with random weights, keys of which one is a sink (its length ten times the others') and the rest heavy-tailed
(lognormal(1) lengths), four variants, verdicts, margins, attainable attention over the reachable and the observed set,
in head space: all keys, or a sample of 64 of each head. With `--seven-b` the layer of a 7B model's shape: 32 heads of
128, 2048 tokens, sampled. Every measurement runs in a separate process; peak memory is given with what the keys
themselves take; compiling is done before the clock starts.

Layers and prompts: `ln_probe.analyze` as it is by default, of a GPT-2 with random weights (d_model 128, 4 heads, a
vocabulary of 512), 4 layers, 8 prompts of 64 tokens.

    python bench/scale.py --quick          # up to 1024 tokens
    python bench/scale.py --seven-b
    python bench/scale.py --out FILE.csv   # the rows, and the exponents as rows with a `power` and its 95 % CI

The CI of an exponent is that of the slope of a regression of log time on log size: what is left is how far the points
are from a power, not how a repeated measurement would differ.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from harness import in_process, peak_mb, show, show_head, write_table
from scipy import stats
from transformer_lens import HookedTransformer, HookedTransformerConfig

import ln_probe
from ln_probe.analyses.geometry.api import key_geometry, set_attention, set_geometry
from ln_probe.analyses.geometry.compiled import in_threads
from ln_probe.analyses.geometry.inputs import QuerySet
from ln_probe.hooks.variants import VARIANTS

THREADS, SAMPLE = 2, 64
BASE = {"tokens": 512, "heads": 4, "d_head": 64}
STEPS = {"tokens": (256, 512, 1024, 2048, 4096), "heads": (2, 4, 8, 16), "d_head": (16, 32, 64, 128)}
REPORT = {"layers": 4, "prompts": 8}
REPORT_STEPS = {"layers": (2, 4, 8, 16, 32), "prompts": (4, 8, 16, 32, 64)}
SEVEN_B = {"tokens": 2048, "heads": 32, "d_head": 128}
NATS = 2.0  # by which the scores of typical keys deviate under a query of the reachable set
COLUMNS = ("what", "size", "sample", "wall_s", "cpu_s", "peak_mb", "undecided", "power", "power_low", "power_high")
RHO = 0.4  # of the observed set: between what SmolLM2's heads have


def keys_of(tokens: int, heads: int, d_head: int, seed: int) -> np.ndarray:
    """Keys [head key d_head] with a sink at position 0 and heavy-tailed lengths."""
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((heads, tokens, d_head)) * np.exp(rng.standard_normal((heads, tokens, 1)))
    keys[:, 0] *= 10.0 * np.linalg.norm(keys, axis=2).mean() / np.linalg.norm(keys[:, 0], axis=1)[:, None]
    return keys


def measure(tokens: int, heads: int, d_head: int, sample: int) -> dict[str, float]:
    """Seconds of the wall and of processors for four variants."""
    key_geometry(np.random.default_rng(0).standard_normal((1, 40, d_head)), query_set=1.0)  # compile
    axes = np.broadcast_to(NATS / math.sqrt(d_head) * np.eye(d_head) * math.sqrt(d_head), (heads, d_head, d_head))
    center = np.zeros((heads, d_head))
    wall, spent, undecided = 0.0, 0.0, 0
    for variant in range(len(VARIANTS)):
        keys = keys_of(tokens, heads, d_head, variant)
        begun, used = time.perf_counter(), time.process_time()
        if sample:
            undecided += _sampled(keys, center, axes, min(sample, tokens))
        else:
            undecided += _whole(keys, center, axes)
        wall, spent = wall + time.perf_counter() - begun, spent + time.process_time() - used
    return {"wall": wall, "cpu": spent, "peak_mb": peak_mb(), "undecided": undecided}


def _whole(keys: np.ndarray, center: np.ndarray, axes: np.ndarray) -> int:
    found = key_geometry(keys, query_set=(center, axes), causal=True, threads=THREADS)

    def observed(head: int) -> None:
        assert found.attainable_at is not None
        queries = QuerySet(center[head], RHO * axes[head])
        set_attention(keys[head], None, queries, starts=found.attainable_at[head])

    in_threads(observed, range(len(keys)), THREADS)
    return found.undecided


def _sampled(keys: np.ndarray, center: np.ndarray, axes: np.ndarray, count: int) -> int:
    def one(head: int) -> int:
        only = np.sort(np.random.default_rng(head).choice(keys.shape[1], count, replace=False))
        full = QuerySet(center[head], np.ascontiguousarray(axes[head])).compact()
        found = set_geometry(keys[head], None, full, True, only=only)
        assert found.attainable is not None
        set_attention(keys[head], None, QuerySet(full.center, RHO * full.axes), only, found.attainable.point)
        return int((found.proved.verdicts.code[only] == 0).sum())

    return sum(in_threads(one, range(len(keys)), THREADS))


def measure_report(layers: int, prompts: int) -> dict[str, float]:
    """Seconds of a whole report."""
    torch.set_num_threads(THREADS)
    random = torch.Generator().manual_seed(0)
    texts = list(torch.randint(0, 512, (prompts, 64), generator=random))

    def model(n_layers: int) -> HookedTransformer:
        return HookedTransformer(
            HookedTransformerConfig(
                n_layers=n_layers, d_model=128, d_head=32, n_heads=4, n_ctx=64, d_vocab=512, act_fn="gelu", seed=0
            )
        )

    ln_probe.analyze(model(1), texts[:2], progress=False)  # compile
    measured = model(layers)
    begun, used = time.perf_counter(), time.process_time()
    report = ln_probe.analyze(measured, texts, progress=False)
    wall, spent = time.perf_counter() - begun, time.process_time() - used
    return {"wall": wall, "cpu": spent, "peak_mb": peak_mb(), "undecided": int(report.heads["undecided"].sum())}


def one(given: dict[str, int]) -> dict[str, float]:
    return measure_report(**given) if "layers" in given else measure(**given)


def row(what: str, given: dict[str, int], size: int) -> float:
    """Measure, print and keep one size; processor seconds."""
    found = in_process(one, given, threads=1, OMP_WAIT_POLICY="PASSIVE")
    sample = given.get("sample", "") or "all"
    figures = (f"{found['wall']:.1f}", f"{found['cpu']:.1f}", f"{found['peak_mb']:.0f}", f"{found['undecided']:.0f}")
    show(what, size, sample, *figures)
    rows.append((what, size, sample, *figures, "", "", ""))
    return found["cpu"]


def exponent(what: str, sizes: list[int], spent: list[float], sample: int | str) -> None:
    """Fit, print and keep the power of a size that processor time grows with."""
    fit = stats.linregress(np.log(sizes), np.log(spent))
    half = float(stats.t.ppf(0.975, len(sizes) - 2)) * fit.stderr
    power = [f"{x:.2f}" for x in (fit.slope, fit.slope - half, fit.slope + half)]
    show(f"CPU ∝ {what}^{power[0]} [{power[1]}, {power[2]}]", "", sample, "", "", "", "")
    rows.append((what, "", sample, "", "", "", "", *power))


rows: list[tuple[object, ...]] = []  # of COLUMNS


def main(
    quick: Annotated[bool, typer.Option("--quick", help="up to 1024 tokens, 8 heads")] = False,
    seven_b: Annotated[bool, typer.Option("--seven-b", help="one layer of a 7B model's shape, sampled")] = False,
    out: Annotated[Path | None, typer.Option(help="a CSV file for the table")] = None,
) -> None:
    print(f"\nscale: {THREADS} threads; seconds of the wall and of processors")
    show_head("what grows", "size", "keys of a head", "wall, s", "CPU, s", "peak, MB", "undecided")
    if seven_b:
        row("7B layer", SEVEN_B | {"sample": SAMPLE}, SEVEN_B["tokens"])
        write_table(out, [COLUMNS, *rows])
        return
    for sample in (0, SAMPLE):
        for what, steps in STEPS.items():
            sizes = [s for s in steps if not quick or (what, s) not in _LONG]
            spent = [row(what, BASE | {what: size, "sample": sample}, size) for size in sizes]
            exponent(what, sizes, spent, sample or "all")
    for what, steps in REPORT_STEPS.items():
        sizes = list(steps[:3] if quick else steps)
        exponent(what, sizes, [row(what, REPORT | {what: size}, size) for size in sizes], "all")
    write_table(out, [COLUMNS, *rows])


_LONG = {("tokens", 2048), ("tokens", 4096), ("heads", 16)}

if __name__ == "__main__":
    typer.run(main)
