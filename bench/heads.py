"""What `sinks` and `head_effects` cost, in processor time and in forward passes; medians of a few repeats.

    sinks          a prompt of 512 tokens through GPT-2 small's shape: the pass that the probe watches over a bare one
    estimates      first-order effects of all its 144 heads under three terms, over a bare pass
    exact          all 64 heads of lm-layernorm under three terms, 32 prompts of 128 tokens

Two threads, random weights for GPT-2's shape (a vocabulary of 5000: what is measured is the blocks). The sinks' prompt
has an outlier token at position 0, so that its key is also rebuilt in every layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import ln_probe
from ln_probe.analyses.probes.head_effects import HeadRuns
from ln_probe.analyses.probes.registry import chosen
from ln_probe.hooks.model import run
from ln_probe.hooks.scales import mean_sigmas
from ln_probe.hooks.sites import find_sites
from ln_probe.passes import Passes
from ln_probe.settings import Settings

TOKENS, THREADS = 512, 2
PROMPTS, LENGTH = 32, 128


def gpt2_shape() -> Any:
    from transformer_lens.model_bridge.sources import build_bridge_from_module
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=5000)
    config._attn_implementation = "eager"
    hf = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        hf.transformer.wte.weight[0] *= 300  # an outlier token
    return build_bridge_from_module(
        hf, "GPT2LMHeadModel", hf_config=config, tokenizer=None, model_name="gpt2-small-shape"
    )


def seconds(whats: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Medians of processor time, measured alternately."""
    found: list[list[float]] = [[] for _ in whats]
    for _ in range(repeats + 1):
        for what, times in zip(whats, found, strict=True):
            began = time.process_time()
            what()
            times.append(time.process_time() - began)
    return [statistics.median(times[1:]) for times in found]  # the first compiles and warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part", choices=("sinks", "estimates", "exact"), help="one of them alone")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    if args.part != "exact":
        model = gpt2_shape()
        tokens = torch.randint(1, 5000, (TOKENS,), generator=torch.Generator().manual_seed(0))
        tokens[0] = 0
        print(f"GPT-2 small's shape, {TOKENS} tokens")
        if args.part != "estimates":
            passes = Passes(model, Settings(probes=("sinks",)), probes=chosen(["sinks"]))
            calibration = passes.calibrate([(0, tokens)])
            bare, watched = seconds(
                [lambda: run(model, tokens[None]), lambda: passes.measure([(0, tokens)], calibration)], args.repeats
            )
            print(f"sinks: {watched / bare:.2f} forward passes a prompt (a bare one: {bare:.2f} s of processor time)")
        if args.part != "sinks":
            sites = find_sites(model)
            runs = HeadRuns(model, sites, mean_sigmas(model, sites, [tokens]), layers=range(12), exact=())
            bare, took = seconds([lambda: run(model, tokens[None]), lambda: runs.measure(0, tokens)], args.repeats)
            print(f"head_effects, estimates of 144 heads × 3 terms: {took / bare:.1f} forward passes a prompt")
    if args.part in (None, "exact"):
        model = ln_probe.load_model("lm-layernorm")
        sites = find_sites(model)
        prompts = torch.randint(1, 1024, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(0))
        runs = HeadRuns(model, sites, mean_sigmas(model, sites, list(prompts[:2])), layers=range(4))
        assert len(runs.exact) == 64
        began, wall = time.process_time(), time.perf_counter()
        for number, row in enumerate(prompts):
            runs.measure(number, row)
        spent, wall = time.process_time() - began, time.perf_counter() - wall
        print(
            f"head_effects, 64 heads × 3 terms run exactly, {PROMPTS} prompts of {LENGTH} tokens: {spent:.0f} s of "
            f"processor time on {THREADS} threads, {wall:.0f} s by the clock"
        )


if __name__ == "__main__":
    main()
