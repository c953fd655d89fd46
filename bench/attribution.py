"""What attribution costs, in forward passes and in memory, at GPT-2 small's shape and 512 tokens.

*One logit* over all heads and MLPs (`attribute_logits`, from the model to the table: finding norms, parts and wiring
included); *one score* against another key. Random weights, two threads; medians of repeats
that alternate with a bare forward pass, in one process, wall and processor time. Peaks of memory are of separate
processes, compared with the forward pass's. Bound: one logit ≤ 2 passes.

`--beside`: 128 tokens, one thread, beside TransformerLens's direct logit attribution on the folded model and
`run_with_cache`, all in one process, in turn. Bounds: all positions ≤ 2 × direct logit attribution and ≤ 1.5 × the
memory of `run_with_cache`; one position ≤ 1.3 passes; one head's scores of one query ≤ 3 passes.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from harness import gpt2_small, in_process, in_turn, keep, peak_mb, show, show_head, write_table

import ln_probe
from ln_probe.hooks.model import run

TOKENS, THREADS = 512, 2
PARTS = ("forward", "logit", "score")
BESIDE_TOKENS = 128
# What is measured beside TransformerLens, each with the part of TransformerLens's that its time is compared with.
BESIDE = {"cache": "", "direct": "", "direct_layers": "", "positions": "direct", "layers": "direct_layers",
          "position": "", "keys": ""}  # fmt: skip
BOUNDS = {"logit": "2 passes"}


def direct_logit_attribution(model: Any, tokens: torch.Tensor, heads: bool) -> torch.Tensor:
    """Of every next token's logit, through TransformerLens's cache of a folded model [component pos]."""
    _, cache = model.run_with_cache(tokens[None])
    if heads:
        components = cache.get_full_resid_decomposition(expand_neurons=False, apply_ln=True)
    else:
        components = cache.decompose_resid(apply_ln=True)
    return torch.einsum("cpd,dp->cp", components[:, 0, :-1], model.W_U[:, tokens[1:]])


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
    return lambda: run(model, tokens[None], return_type="logits")


def folded(vocabulary: int) -> Any:
    model = gpt2_small(vocabulary)
    model.enable_compatibility_mode(disable_warnings=True, fold_ln=True, center_writing_weights=True)
    return model


def prompt(vocabulary: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(1))


def measure(part: str, vocabulary: int, repeats: int) -> dict[str, float]:
    torch.set_num_threads(THREADS)
    torch.set_grad_enabled(False)
    model = folded(vocabulary) if part.startswith("direct") else gpt2_small(vocabulary)
    tokens = prompt(vocabulary, BESIDE_TOKENS if part in BESIDE else TOKENS)
    taken = in_turn({"part": doing(part, model, tokens), "bare": doing("forward", model, tokens)}, repeats)
    wall, processor = np.median(taken["part"], axis=0)
    bare = np.median(taken["bare"], axis=0)
    return {"wall": wall, "passes": wall / bare[0], "processor_passes": processor / bare[1], "peak_mb": peak_mb()}


def beside_transformer_lens(vocabulary: int, repeats: int, out: Path | None) -> None:
    version = importlib.metadata.version("transformer-lens")
    print(f"\nattribution beside TransformerLens {version}: GPT-2 small's shape, {BESIDE_TOKENS} tokens, one thread")
    memory = {part: in_process(measure, part, vocabulary, 1, threads=1)["peak_mb"] for part in BESIDE}
    torch.set_num_threads(1)  # (after the children: a child's peak is at least its parent's)
    torch.set_grad_enabled(False)
    raw, direct, tokens = gpt2_small(vocabulary), folded(vocabulary), prompt(vocabulary, BESIDE_TOKENS)
    acts = {part: doing(part, direct if part.startswith("direct") else raw, tokens) for part in ("forward", *BESIDE)}
    taken = in_turn(acts, repeats)
    seconds = {part: float(np.median(each[:, 1])) for part, each in taken.items()}
    columns = ("transformer_lens", "part", "passes", "direct", "memory")
    rows = []
    for part, other in BESIDE.items():
        ratio = f"{seconds[part] / seconds[other]:.2f}" if other else ""
        figures = (f"{seconds[part] / seconds['forward']:.2f}", ratio, f"{memory[part] / memory['cache']:.2f}")
        rows.append((version, part, *figures))
    for row in (columns, *rows):
        print(" ".join(cell.rjust(16) for cell in row))
    keep(out, columns, rows, order=str)


def main(
    beside: Annotated[bool, typer.Option("--beside", help="TransformerLens's functions in turn")] = False,
    vocabulary: int = 50257,
    repeats: int = 5,
    out: Annotated[Path | None, typer.Option(help="a CSV file; --beside replaces the rows of its version")] = None,
) -> None:
    if beside:
        return beside_transformer_lens(vocabulary, repeats, out)
    print(f"\nattribution: GPT-2 small's shape, {TOKENS} tokens, {THREADS} threads")
    show_head("part", "seconds", "passes (wall)", "passes (processor)", "peak, MB", "… of the first", "bound")
    base, rows = 0.0, [("part", "passes", "memory")]
    for part in PARTS:
        found = in_process(measure, part, vocabulary, repeats, threads=THREADS)
        base = base or found["peak_mb"]
        passes, memory = found["processor_passes"], found["peak_mb"] / base
        figures = f"{found['passes']:.2f}", f"{passes:.2f}", f"{found['peak_mb']:.0f}", f"{memory:.2f}"
        show(part, f"{found['wall']:.2f}", *figures, BOUNDS.get(part, ""))
        if part != "forward":
            rows.append((part, f"{passes:.1f}", f"{memory:.1f}"))
    write_table(out, rows)


if __name__ == "__main__":
    typer.run(main)
