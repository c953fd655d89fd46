"""Which book is a passage from? A classification task that needs no labels but the texts themselves.

In place of SST-2 (Brody, Alon & Yahav 2023), whose sentences and labels are not among texts that a user gives: one
short passage, one label, decided by words all over it. What would give a book away without reading is taken out:
letters and apostrophes alone are left, in lower case, on one line; no verse numbers, no speakers, no breaks of verse.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.encoder.encoder_model import Encoder, EncoderConfig
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.text_task import VALID_SHARE, TextTask
from ln_probe.analyses.lab.training import load_weights, step_generator

NOT_WORDS = re.compile(r"[^a-z'’]+")  # of text in lower case
SPEAKERS = re.compile(r"^[A-Z][A-Z ]+\.$", re.MULTILINE)  # a line of its own in plays: "FIRST LORD."


def plain_words(text: str) -> str:
    """Words in lower case with a space between; names of speakers, digits and punctuation are left out."""
    return NOT_WORDS.sub(" ", SPEAKERS.sub(" ", text).lower()).replace("’", "'").strip()


@dataclass(frozen=True)
class Passages:
    """Passages and the number of the book of each."""

    tokens: Int[Tensor, "batch pos"]
    books: Int[Tensor, " batch"]


class PassagesTask:
    """Passages of a boundary token and `length` tokens of one book; held out is the end of every book (`TextTask`).

    Args:
        files: a book each (UTF-8).
        text: whose tokenizer is used.
        length: tokens of a passage, besides the boundary.
        held_out: passages that are held out, of each book, spread evenly.

    Raises:
        ValueError: fewer than two books, or a book too short for one held-out passage.
    """

    name = "passages"

    def __init__(self, files: Sequence[Path], text: TextTask, length: int, held_out: int) -> None:
        if len(files) < 2:
            raise ValueError(f"passages are told apart by their book: give at least 2 texts, not {len(files)}")
        self.files, self.text, self.length, self.count = files, text, length, held_out
        self.train_tokens: list[Int[Tensor, " tokens"]] = []
        self.held_tokens: list[Int[Tensor, " tokens"]] = []
        for file in files:
            raw = file.read_text(encoding="utf-8")
            cut = int(len(raw) * (1 - VALID_SHARE))
            for part, into in ((raw[:cut], self.train_tokens), (raw[cut:], self.held_tokens)):
                into.append(torch.tensor(text.tokenizer.encode(plain_words(part)).ids, dtype=torch.int64))
                if len(into[-1]) < length:
                    raise ValueError(f"{file} is too short: {len(into[-1])} tokens in a part, a passage has {length}")

    @property
    def identity(self) -> dict[str, Any]:
        return {
            **self.text.identity,
            "books": [file.name for file in self.files],
            "length": self.length,
            "held_out": self.count,
        }

    def _passages(self, tokens: Tensor, starts: Tensor) -> Int[Tensor, "batch pos"]:
        body = tokens[starts[:, None] + torch.arange(self.length)]
        return torch.cat([torch.full_like(body[:, :1], self.text.boundary), body], dim=1)

    def batch(self, step: int, size: int, seed: int) -> Passages:
        """As many passages of every book, to one."""
        generator = step_generator(seed, step)
        books = torch.arange(size) % len(self.files)
        made = []
        for tokens in self.train_tokens:
            made.append(
                self._passages(tokens, torch.randint(len(tokens) - self.length + 1, (size,), generator=generator))
            )
        return Passages(torch.stack(made)[books, torch.arange(size)], books)

    def held_out(self) -> Passages:
        """The held-out passages, as many of every book."""
        parts = [
            self._passages(tokens, torch.linspace(0, len(tokens) - self.length, self.count).long())
            for tokens in self.held_tokens
        ]
        return Passages(torch.cat(parts), torch.arange(len(parts)).repeat_interleave(self.count))

    def loss(self, model: nn.Module, batch: Passages) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch.tokens), batch.books)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss and accuracy on held-out passages."""
        held = self.held_out()
        logits = cast("Tensor", model(held.tokens))
        right = float((logits.argmax(-1) == held.books).double().mean())
        return {"valid_loss": float(F.cross_entropy(logits, held.books)), "valid_accuracy": right}

    def counted_accuracy(self) -> float:
        """What token counts alone give on the held-out passages: naive Bayes, each token counted once more."""
        counts = torch.stack([1.0 + torch.bincount(t, minlength=self.text.d_vocab).double() for t in self.train_tokens])
        logs = (counts / counts.sum(-1, keepdim=True)).log()
        held = self.held_out()
        scores = logs[:, held.tokens[:, 1:]].sum(-1)
        return float((scores.argmax(0) == held.books).double().mean())

    def write_files(self, out: Path) -> None:
        self.text.write_files(out)


@dataclass(frozen=True)
class ClassifierSpec:
    """A classifier that starts as a trained encoder.

    Attributes:
        encoder: its shape. weights: the file of its trained weights. classes: how many.
    """

    encoder: EncoderConfig
    weights: Path
    classes: int

    def to_dict(self) -> dict[str, Any]:
        start = hashlib.sha256(self.weights.read_bytes()).hexdigest()
        return {"kind": "classifier", "classes": self.classes, "start": start, **self.encoder.to_dict()}

    def build(self) -> Classifier:
        """The encoder with its trained weights (its constants stay what they are) and a new classifier on it."""
        return Classifier(self)


class Classifier(nn.Module):
    """What stands at the boundary, through a dense layer and a tanh, to a logit per class: BERT's classifier."""

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        d = spec.encoder.d_model
        self.encoder: Encoder = spec.encoder.build()
        load_weights(self.encoder, spec.weights)
        for norm in (m for m in self.encoder.modules() if isinstance(m, Norm)):
            norm.measured = False  # the constant that it was trained with
        self.pool, self.head = nn.Linear(d, d), nn.Linear(d, spec.classes)
        nn.init.normal_(self.head.weight, std=1 / math.sqrt(d))

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch book"]:
        logits: Tensor = self.head(self.pool(self.encoder.stream(tokens)[:, 0]).tanh())
        return logits
