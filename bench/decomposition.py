"""Cost of decomposing every norm, compared with a bare forward pass and with a full activation cache.

GPT-2 small's shape, random weights, 8 prompts of 512 tokens, two threads. *Bare*: eight forward passes, nothing looked
at. *Decomposition*: `ln_probe.analyze(…, probes=("decomposition",))`, from the model to the table. *Cache*: the same
statistics by `run_with_cache`, a prompt at a time (the cache of all eight would take 8 GB). Times are medians of
alternated repeats in one process (processor time too, which other users of the machine disturb less); each peak of
memory is that of a separate process (which has loaded the same packages and model), compared with the bare one's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import harness
import numpy as np
import torch
import typer
from harness import in_process, in_turn, show, show_head

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes.decomposition import SiteStatistics, layernorms_table
from ln_probe.hooks.model import run
from ln_probe.hooks.sites import find_sites
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.measure import analyze

PROMPTS, TOKENS, THREADS = 8, 512, 2
PARTS = ("bare", "decomposition", "cache")
TIME_BOUND, MEMORY_BOUND = 1.15, 1.1


def gpt2_small(world: str) -> Any:
    if world == "hooked":
        from transformer_lens import HookedTransformer, HookedTransformerConfig

        config = HookedTransformerConfig(
            n_layers=12,
            d_model=768,
            n_heads=12,
            d_head=64,
            d_mlp=3072,
            d_vocab=50257,
            n_ctx=1024,
            act_fn="gelu_new",
            normalization_type="LN",
            default_prepend_bos=False,
            device="cpu",
        )
        torch.manual_seed(0)
        return HookedTransformer(config).eval()
    return harness.gpt2_small()


def bare(model: Any, tokens: torch.Tensor) -> None:
    for prompt in tokens:
        run(model, prompt[None])


def decomposition(model: Any, tokens: torch.Tensor) -> Any:
    return analyze(model, tokens, probes=("decomposition",), progress=False).layernorms


def cache(model: Any, tokens: torch.Tensor, world: str) -> Any:
    sites = find_sites(model)
    found, alone = [SiteStatistics(s) for s in sites], np.arange(len(tokens))
    for prompt in tokens:
        with torch.no_grad():
            _, kept = model.run_with_cache(prompt[None])
        for each in found:
            x, y = norm_of(kept, each.site, world)
            each.add(x[0], y[0])
    unknown = np.ones((len(tokens), len(sites), 2))  # (the constants' columns are no work of a cache)
    return layernorms_table(found, Constants(tuple(s.name for s in sites), alone, unknown, unknown))


def norm_of(kept: Any, site: Any, world: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm's input and output out of a cache; HookedTransformer caches neither under the norm's name."""
    if world == "bridge":
        return kept[f"{site.name}.hook_in"], kept[f"{site.name}.hook_out"]
    stream = {"attention": "hook_resid_pre", "mlp": "hook_resid_mid"}.get(site.reads)
    x = kept[f"blocks.{site.layer}.{stream}"] if stream else kept[f"blocks.{site.layer - 1}.hook_resid_post"]
    return x, site.affine(kept[f"{site.name}.hook_normalized"])


def peak_mb() -> float:
    status = Path("/proc/self/status")
    if status.exists():
        return float(next(line.split()[1] for line in status.read_text().splitlines() if "VmHWM" in line)) / 1024
    return harness.peak_mb()


def part(name: str, world: str, repeats: int) -> dict[str, Any]:
    torch.set_num_threads(THREADS)
    model = gpt2_small(world)
    tokens = torch.randint(0, 50257, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(1))
    runs: dict[str, Callable[[], Any]] = {
        "bare": lambda: bare(model, tokens),
        "decomposition": lambda: decomposition(model, tokens),
        "cache": lambda: cache(model, tokens, world),
    }
    if name in PARTS:  # memory of one part alone
        with contextlib.suppress(OSError):  # forget the peak of building the model, where the system lets us
            Path("/proc/self/clear_refs").write_text("5")
        loaded = peak_mb()
        runs[name]()
        return {"peak_mb": peak_mb(), "loaded_mb": loaded}
    taken = in_turn(runs, repeats)
    ratios = {p: np.median(times / taken["bare"], axis=0) for p, times in taken.items()}
    return {p: [float(np.median(times[:, 0])), *ratios[p].tolist()] for p, times in taken.items()}


def main(world: Literal["hooked", "bridge"] | None = None, repeats: int = 5) -> None:
    worlds = [world] if world else ["bridge", *(["hooked"] if has_hooked_transformer() else [])]
    print(f"\ndecomposition: 12 layers, d 768, {PROMPTS} × {TOKENS} tokens, {THREADS} threads")
    times = ("seconds", "… of bare", "processor time, … of bare")
    show_head("world", "part", *times, "peak, MB", "… of bare", "before it ran, MB")
    for world in worlds:
        found = {name: in_process(part, name, world, repeats, threads=THREADS) for name in ("times", *PARTS)}
        for name in PARTS:
            seconds, wall, processor = found["times"][name]
            peak, memory = found[name]["peak_mb"], found[name]["peak_mb"] / found["bare"]["peak_mb"]
            times = f"{seconds:.2f}", f"{wall:.2f}", f"{processor:.2f}"
            show(world, name, *times, f"{peak:.0f}", f"{memory:.2f}", f"{found[name]['loaded_mb']:.0f}")
            if name == "decomposition" and (wall > TIME_BOUND or memory > MEMORY_BOUND):
                show(world, "**beyond the bound**", "", TIME_BOUND, "", "", MEMORY_BOUND, "")


if __name__ == "__main__":
    typer.run(main)
