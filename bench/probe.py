"""What the whole probe costs, in forward passes and in memory, on one prompt of 512 tokens with two threads.

Three models: GPT-2 small's shape with random weights, made so that scores deviate by about 2 nats (easy: keys behind a
norm have equal lengths); the same with every token's keys stretched by a lognormal(1) factor, which no weights behind a
norm could do, so it is done to the keys that ln_probe rebuilds; and the MGM checkpoint, if LN_PROBE_MGM names its
folder. Of each: a bare forward pass; verdicts and bracketed margins of the intact variant; selectability as `analyze`
measures it (both spaces, four variants, attainable attention, reachable and observed); then everything `analyze` does,
the causal probe's many forward passes included. Each part runs in a separate process, whose peak memory is reported
as a multiple of the forward pass's.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
from harness import gpt2_small, in_process, in_turn, peak_mb, show, show_head

import ln_probe
from ln_probe.analyses.geometry.api import key_geometry
from ln_probe.analyses.probes.registry import DEFAULT as PROBES
from ln_probe.hooks import attention
from ln_probe.hooks.capture import AttentionInput, stream
from ln_probe.hooks.model import run
from ln_probe.hooks.sites import find_sites

TOKENS, THREADS, REPEATS = 512, 2, 5
PARTS = ("forward", "intact", "selectability", "whole")
MODELS = {"equal": "GPT-2 small's shape", "lognormal": "… keys × lognormal(1)", "mgm": "MGM"}


def load(name: str) -> Any:
    if name == "mgm":
        return ln_probe.load_model(os.environ["LN_PROBE_MGM"], allow_pickle=True)
    if name == "lognormal":
        stretch_keys()
    return gpt2_small(5000, spread_scores)  # a smaller vocabulary: not what is measured


def spread_scores(model: Any) -> None:
    """Make scores deviate by about 2 nats."""
    for block in model.transformer.h:
        block.attn.c_attn.weight.normal_(std=0.06)


def stretch_keys() -> None:
    """Multiply all keys that ln_probe rebuilds by a factor per token, and leave out the check against the model."""
    lengths = torch.randn(TOKENS, 1, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64).exp() / math.e
    plain = attention.Heads.keys
    attention.Heads.keys = lambda heads, y: plain(heads, y) * lengths[: len(y)]  # type: ignore[method-assign]
    attention._disagreement = lambda *_: 0.0


def intact(model: Any, tokens: torch.Tensor) -> dict[str, float]:
    """Verdicts and margins to 1 % of the intact keys of all heads, in head space."""
    sites = find_sites(model)
    spent, deviation = [], []

    def measure(seen: AttentionInput) -> None:
        heads = attention.read_heads(seen, sites)
        keys, queries = heads.keys(seen.y), heads.queries(seen.y)
        deviation.append(float((torch.einsum("qhd,khd->hqk", queries, keys) / heads.divisor).std()))
        ellipsoid = heads.query_ellipsoid(seen.site, TOKENS - 1)
        assert ellipsoid is not None
        # In the axes' coordinates a margin in nats is a plain distance; attainable attention is left out.
        scaled = torch.einsum("khd,hda->hka", keys, ellipsoid[1]).numpy()
        start = time.perf_counter()
        key_geometry(scaled, threads=THREADS)
        spent.append(time.perf_counter() - start)

    stream(model, tokens, sites, on_attention=measure)
    return {"seconds": sum(spent), "score_deviation": statistics.median(deviation)}


def part(name: str, kind: str) -> dict[str, float]:
    torch.set_num_threads(THREADS)
    model = load(kind)
    vocabulary = int(model.cfg.d_vocab)
    tokens = torch.randint(0, vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(1))
    forward = in_turn({"forward": lambda: run(model, tokens[None])}, REPEATS)["forward"]
    found = {"forward": float(np.median(forward[:, 0]))}
    short = tokens[:40]
    if name == "intact":
        key_geometry(torch.randn(2, 40, 64).numpy(), threads=THREADS)  # compile
        found |= intact(model, tokens)
    elif name != "forward":
        probes = PROBES if name == "whole" else (name,)
        ln_probe.analyze(model, short[None], probes=probes, layers=[0], progress=False)  # compile
        start = time.perf_counter()
        report = ln_probe.analyze(model, tokens[None], probes=probes, progress=False)
        found["seconds"] = time.perf_counter() - start
        found["undecided"] = float(report.heads["undecided"].sum())
    return found | {"peak_mb": peak_mb()}


def main() -> None:
    print(f"\nprobe: {TOKENS} tokens, {THREADS} threads; GPT-2 small's shape: 12 layers × 12 heads, d 768")
    show_head("model", "part", "seconds", "forward pass, s", "passes", "peak, MB", "… of forward")
    for kind, title in MODELS.items():
        if kind == "mgm" and "LN_PROBE_MGM" not in os.environ:
            print("(MGM left out: LN_PROBE_MGM is not set)")
            continue
        base = 0.0
        for name in PARTS:
            found = in_process(part, name, kind, threads=THREADS)
            base = base or found["peak_mb"]
            seconds = found.get("seconds", found["forward"])
            extra = f" (scores ± {found['score_deviation']:.1f} nats)" if "score_deviation" in found else ""
            extra += f" (undecided {found['undecided']:.0f})" if "undecided" in found else ""
            passes = f"{seconds / found['forward']:.1f}"
            memory = f"{found['peak_mb']:.0f}", f"{found['peak_mb'] / base:.2f}"
            show(title, name + extra, f"{seconds:.2f}", f"{found['forward']:.2f}", passes, *memory)


if __name__ == "__main__":
    main()
