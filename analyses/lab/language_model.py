"""Language models that differ in the norm before attention, on text the user gives.

The published experiment (Brody, Alon & Yahav 2023, section 4.2) varies `ln_1` of a GPT-2-shaped model. This file makes
the task (byte-level BPE trained on the same text, random windows) and, run as a module, trains one model:

    python -m ln_probe.analyses.lab.language_model --norm layernorm --out runs/lm-layernorm TEXT [TEXT…]
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.lab.model import LabConfig
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.training import (
    TEXT_BOUNDARY,
    TrainConfig,
    load_run,
    save_model,
    step_generator,
    train,
)

VALID_SHARE = 0.05  # the end of every text is held out
VALID_WINDOWS = 64  # windows the held-out loss is measured on, spread evenly


class TextTask:
    """Windows of text: a boundary token, then `n_ctx - 1` tokens from a random place of the training part.

    Args:
        files: text files (UTF-8); the last 5 % of each is held out.
        d_vocab: size of the byte-level BPE, trained on the training parts.
        n_ctx: length of a window in tokens.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: too little text for one held-out window.
    """

    name = "language_model"

    def __init__(self, files: Sequence[str | Path], d_vocab: int, n_ctx: int) -> None:
        self.n_ctx, self.d_vocab = n_ctx, d_vocab
        texts = []
        self._files = []
        for file in map(Path, files):
            if not file.is_file():
                raise FileNotFoundError(f"no text file {file}")
            raw = file.read_bytes()
            texts.append(raw.decode("utf-8", errors="replace"))
            self._files.append({"name": file.name, "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw)})
        cuts = [int(len(t) * (1 - VALID_SHARE)) for t in texts]
        self.tokenizer = train_tokenizer([t[:c] for t, c in zip(texts, cuts, strict=True)], d_vocab)
        self.train_tokens = self._encode([t[:c] for t, c in zip(texts, cuts, strict=True)])
        self.valid_tokens = self._encode([t[c:] for t, c in zip(texts, cuts, strict=True)])
        if min(len(self.train_tokens), len(self.valid_tokens)) < n_ctx:
            raise ValueError(
                f"the text is too short: {len(self.train_tokens)} training and {len(self.valid_tokens)} held-out "
                f"tokens, but a window needs {n_ctx}: give more text or a smaller n_ctx"
            )
        self.boundary = self.tokenizer.get_vocab()[TEXT_BOUNDARY]

    def _encode(self, texts: Sequence[str]) -> Int[Tensor, tokens]:
        ids = [np.asarray(self.tokenizer.encode(t).ids, dtype=np.int64) for t in texts]
        return torch.from_numpy(np.concatenate(ids))

    @property
    def identity(self) -> dict[str, Any]:
        return {
            "files": self._files,
            "d_vocab": self.d_vocab,
            "n_ctx": self.n_ctx,
            "train_tokens": len(self.train_tokens),
            "valid_tokens": len(self.valid_tokens),
            "tokenizer_sha256": hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest(),
        }

    def _windows(self, tokens: Tensor, starts: Tensor) -> Int[Tensor, "batch pos"]:
        windows = tokens[starts[:, None] + torch.arange(self.n_ctx - 1)]
        return torch.cat([torch.full_like(windows[:, :1], self.boundary), windows], dim=1)

    def batch(self, step: int, size: int, seed: int) -> Int[Tensor, "batch pos"]:
        last = len(self.train_tokens) - self.n_ctx + 1
        return self._windows(self.train_tokens, torch.randint(last, (size,), generator=step_generator(seed, step)))

    def loss(self, model: nn.Module, batch: Tensor) -> Float[Tensor, ""]:
        loss: Tensor = model(batch, return_type="loss")
        return loss

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        last = len(self.valid_tokens) - self.n_ctx + 1
        windows = self._windows(self.valid_tokens, torch.linspace(0, last - 1, VALID_WINDOWS).long())
        losses = [float(model(part, return_type="loss")) * len(part) for part in windows.split(16)]
        return {"valid_loss": sum(losses) / len(windows)}

    def write_files(self, out: Path) -> None:
        write_atomically(out / "tokenizer.json", self.tokenizer.to_str().encode())


def train_tokenizer(texts: Sequence[str], d_vocab: int) -> Tokenizer:
    """A byte-level BPE with the text boundary as token 0; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=d_vocab,
        special_tokens=[TEXT_BOUNDARY],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


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
    )
    steps = tuple(int(args.steps * part) for part in (0, 0.05, 0.25, 0.5))
    train(task, model, TrainConfig(steps=args.steps, batch=args.batch, seed=args.seed, save_at=steps), args.out)
    if args.bundle:
        texts = " ".join(Path(t).name for t in args.text)
        command = (
            f"python -m ln_probe.analyses.lab.language_model --norm {args.norm} --steps {args.steps} "
            f"--batch {args.batch} --seed {args.seed} --out runs/lm-{args.norm} {texts}"
        )
        bundle(args.out, args.bundle, task, command)


if __name__ == "__main__":
    main()
