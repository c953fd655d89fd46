"""Measure what a default report of GPT-2 small's shape costs, by probe and as a whole: seconds and peak memory.

Random weights (seed 0) in a Hugging Face folder with the real tokenizer (of LN_PROBE_SHARED), so nothing is downloaded.
Every stage runs in a separate process: loading, each probe alone through `analyze`, then `ln-probe report`.

    python bench/whole.py                         this checkout
    python bench/whole.py --against ../before     and another one, in turn
    python bench/whole.py --stages causal --stages whole --repeats 3 --prompts 4
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from harness import LN_PROBE, ROOT, measure_command, show, show_head

STAGES = ("loading", "decomposition", "uniformity", "selectability", "causal", "head_effects", "sinks", "whole")
_LOADING = "import ln_probe, sys; ln_probe.load_model(sys.argv[1])"
_PROBE = (
    "import ln_probe, pathlib, sys; model = ln_probe.load_model(sys.argv[1]); "
    "ln_probe.analyze(model, pathlib.Path(sys.argv[3]), probes=(sys.argv[2],), progress=False)"
)


def checkpoint(folder: Path) -> Path:
    """Write a folder as the model hub has it: GPT-2 small's config and tokenizer, initial weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    home = folder / "gpt2-shape"
    GPT2LMHeadModel(GPT2Config()).save_pretrained(home)
    shared = Path(os.environ.get("LN_PROBE_SHARED", "../shared")) / "tokenizers" / "gpt2"
    for name in ("merges.txt", "vocab.json", "tokenizer_config.json"):
        shutil.copy(shared / name, home / name)
    return home


def command(stage: str, model: Path, prompts: Path, out: Path) -> list[str]:
    """Return the command of a stage."""
    if stage == "loading":
        return [sys.executable, "-c", _LOADING, str(model)]
    if stage == "whole":
        shutil.rmtree(out, ignore_errors=True)
        return [*LN_PROBE, "report", str(model), "--out", str(out), "--prompts", str(prompts)]
    return [sys.executable, "-c", _PROBE, str(model), stage, str(prompts)]


def main(
    against: Annotated[Path | None, typer.Option(help="another checkout of the package")] = None,
    stages: Annotated[list[str] | None, typer.Option(help=", ".join(STAGES))] = None,
    repeats: int = 1,
    prompts: Annotated[int, typer.Option(help="the first so many bundled texts")] = 32,
) -> None:
    from ln_probe.hooks.task import bundled_texts

    checkouts = ({"before": against.resolve()} if against else {}) | {"here": ROOT}
    show_head("stage", "checkout", "wall, s", "processor, s", "peak, MB")
    with tempfile.TemporaryDirectory() as scratch:
        model, file = checkpoint(Path(scratch)), Path(scratch) / "prompts.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in bundled_texts()[:prompts]))
        for stage in stages or STAGES:
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
            for _ in range(repeats):
                for name, checkout in checkouts.items():
                    runs[name].append(measure_command(command(stage, model, file, Path(scratch) / "reports"), checkout))
            for name, figures in runs.items():
                median = {k: statistics.median(run[k] for run in figures) for k in figures[0]}
                show(stage, name, f"{median['wall']:.1f}", f"{median['cpu']:.1f}", f"{median['largest']:.0f}")


if __name__ == "__main__":
    typer.run(main)
