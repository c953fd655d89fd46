"""Language models that differ in the norm before attention, on text the user gives.

Run as a module, it trains one model of the size that ships with ln_probe (the published experiment is in
`published_language_model.py`):

    python -m ln_probe.analyses.lab.language_model --norm layernorm --out runs/lm-layernorm TEXT [TEXT…]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.training import TrainConfig, load_run, save_model, train
from ln_probe.analyses.lab.transformer import LabConfig


def bundle(run: Path, out: Path, task: TextTask, command: str) -> None:
    """Copy a finished run as a checkpoint to ship: float16 weights and the recipe, its loss measured after rounding."""
    out.mkdir(parents=True, exist_ok=True)
    save_model(load_run(run), out / "model.safetensors", torch.float16)
    for name in ("lab.json", "tokenizer.json", "metrics.jsonl"):
        (out / name).write_bytes((run / name).read_bytes())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    recipe = {
        "command": command,
        "stored_as": "float16",
        "train_loss": last["train_loss"],
        **task.evaluate(load_run(out)),
        "training_seconds": last["seconds"],
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="train one language model; only the norm before attention varies")
    parser.add_argument("text", nargs="+", help="UTF-8 text files")
    parser.add_argument("--norm", default="layernorm", choices=NORM_KINDS)
    parser.add_argument("--out", type=Path, required=True, help="the run's folder")
    parser.add_argument("--bundle", type=Path, help="then copy it here in float16, with its recipe")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=16, help="windows per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--no-unembedding-bias", action="store_true", help="as GPT-2 has it: the folder then opens as a GPT2LMHeadModel"
    )
    for name, size in (("layers", 4), ("d-model", 128), ("heads", 16), ("vocab", 1024), ("context", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(argv)
    task = TextTask(args.text, args.vocab, args.context)
    model = LabConfig(
        n_layers=args.layers,
        d_model=args.d_model,
        n_heads=args.heads,
        d_vocab=args.vocab,
        n_ctx=args.context,
        norm=args.norm,
        bias_unembed=not args.no_unembedding_bias,
    )
    steps = tuple(int(args.steps * part) for part in (0, 0.05, 0.25, 0.5))
    train(task, model, TrainConfig(steps=args.steps, batch=args.batch, seed=args.seed, save_at=steps), args.out)
    if args.bundle:
        texts = " ".join(Path(t).name for t in args.text)
        command = (
            f"python -m ln_probe.analyses.lab.language_model --norm {args.norm} --steps {args.steps} "
            f"--batch {args.batch} --seed {args.seed} {'--no-unembedding-bias ' * args.no_unembedding_bias}"
            f"--out runs/lm-{args.norm} {texts}"
        )
        bundle(args.out, args.bundle, task, command)
