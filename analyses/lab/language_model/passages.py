"""Passages whose book is to be told, by an encoder with a classifier on it: in place of SST-2.

The encoders of `encoder` are fine-tuned to tell which of the given books a passage is from, without capitals, digits,
punctuation and names of speakers.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.runs import Run
from ln_probe.analyses.lab.text_task import VALID_SHARE, TaskOnText, TextTask
from ln_probe.analyses.lab.train import MODEL_FILE, TrainConfig, load_weights, step_generator
from ln_probe.analyses.lab.transformer import LabConfig

NOT_WORDS = re.compile(r"[^a-z'’]+")  # of text in lower case
SPEAKERS = re.compile(r"^[A-Z][A-Z ]+\.$", re.MULTILINE)  # a separate line in plays: "FIRST LORD."
RATE_SHARE = 0.5  # of the rate of the training before; BERT's is 0.2 to 0.5 of it


def plain_words(text: str) -> str:
    """Words in lower case with a space between; names of speakers, digits and punctuation are left out."""
    return NOT_WORDS.sub(" ", SPEAKERS.sub(" ", text).lower()).replace("’", "'").strip()


class PassagesTask(TaskOnText):
    """Passages of a boundary token and `length` tokens of one book; held out is the end of every book (`TextTask`).

    Args:
        files: a book each (UTF-8).
        text: whose tokenizer is used.
        length: tokens of a passage, besides the boundary.
        held_out: passages that are held out, of each book, spread evenly.
    """

    name = "passages"

    def __init__(self, files: Sequence[Path], text: TextTask, length: int, held_out: int) -> None:
        if len(files) < 2:
            raise ValueError(f"passages are classified by their book: give at least 2 texts, not {len(files)}")
        super().__init__(text)
        self.files, self.length, self.count = files, length, held_out
        self.train_tokens: list[Int[Tensor, " tokens"]] = []
        self.valid_tokens: list[Int[Tensor, " tokens"]] = []
        for file in files:
            raw = file.read_text(encoding="utf-8")
            cut = int(len(raw) * (1 - VALID_SHARE))
            for part, into in ((raw[:cut], self.train_tokens), (raw[cut:], self.valid_tokens)):
                into.append(torch.tensor(text.tokenizer.encode(plain_words(part)).ids, dtype=torch.int64))
                if len(into[-1]) < length:
                    raise ValueError(f"{file} is too short: {len(into[-1])} tokens in a part, a passage has {length}")

    @property
    def identity(self) -> dict[str, Any]:
        books = [file.name for file in self.files]
        return {**self.text.identity, "books": books, "length": self.length, "held_out": self.count}

    def batch(self, step: int, size: int, seed: int) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """As many passages of every book, to one, and the numbers of their books."""
        generator = step_generator(seed, step)
        books, drawn = torch.arange(size) % len(self.files), []
        for tokens in self.train_tokens:
            starts = torch.randint(len(tokens) - self.length + 1, (size,), generator=generator)
            drawn.append(self.text.windows(tokens, starts, self.length))
        return torch.stack(drawn)[books, torch.arange(size)], books

    def held_out(self) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
        """The held-out passages, as many of every book, and the numbers of their books."""
        parts = []
        for tokens in self.valid_tokens:
            starts = torch.linspace(0, len(tokens) - self.length, self.count).long()
            parts.append(self.text.windows(tokens, starts, self.length))
        return torch.cat(parts), torch.arange(len(parts)).repeat_interleave(self.count)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch[0]), batch[1])

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and accuracy on held-out passages."""
        tokens, books = self.held_out()
        logits = cast("Tensor", model(tokens))
        right = float((logits.argmax(-1) == books).double().mean())
        return {"valid_loss": float(F.cross_entropy(logits, books)), "valid_accuracy": right}

    def counted_accuracy(self) -> float:
        """What token counts alone give on the held-out passages: naive Bayes, each token counted once more."""
        counts = torch.stack([1.0 + torch.bincount(t, minlength=self.text.d_vocab).double() for t in self.train_tokens])
        logs = (counts / counts.sum(-1, keepdim=True)).log()
        tokens, books = self.held_out()
        return float((logs[:, tokens[:, 1:]].sum(-1).argmax(0) == books).double().mean())


@dataclass(frozen=True)
class ClassifierSpec:
    """A classifier that starts as an encoder of this shape with the weights of a file."""

    encoder: LabConfig
    weights: Path
    classes: int

    def to_dict(self) -> dict[str, Any]:
        start = hashlib.sha256(self.weights.read_bytes()).hexdigest()
        return {"kind": "classifier", "classes": self.classes, "start": start, **self.encoder.to_dict()}

    def build(self) -> Classifier:
        """The encoder with its trained weights (its constants stay what they are) and a new classifier on it."""
        return Classifier(self)


class Classifier(nn.Module):
    """The stream at the boundary, through a dense layer and a tanh, to a logit per class: BERT's classifier."""

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        d = spec.encoder.d_model
        self.encoder = spec.encoder.build()
        load_weights(self.encoder, spec.weights)
        for norm in (m for m in self.encoder.modules() if isinstance(m, Norm)):
            norm.measured = False  # the constant that it was trained with
        self.pool, self.head = nn.Linear(d, d), nn.Linear(d, spec.classes)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(d))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch book"]:
        logits: Tensor = self.head(self.pool(self.encoder.stream(tokens)[:, 0]).tanh())
        return logits


def make_runs(request: Request, encoders: Iterable[Run], task: PassagesTask) -> list[Run]:
    """Return a run of fine-tuning for each finished encoder."""
    batch, steps = (16, 40) if request.quick else (32, 150)
    runs = []
    for run in (run for run in encoders if run.finished):
        training = TrainConfig(
            steps=steps,
            batch=batch,
            lr=run.training.lr * RATE_SHARE,
            lr_end=0.0,
            warmup=steps // 10,
            schedule="linear",
            clip=1.0,
            seed=run.seed,
            evaluate_every=steps,
            state_every=steps,
        )
        spec = ClassifierSpec(cast("LabConfig", run.spec), run.folder / MODEL_FILE, len(request.texts))
        runs.append(Run(run.keys, task, spec, training, request.out / "passages" / run.folder.name))
    return runs
