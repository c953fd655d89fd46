"""What leaving out a term costs where an encoder is fine-tuned: which of the given books is a passage from?

In place of SST-2 (Brody, Alon & Yahav 2023), whose sentences and labels are not among texts that a user gives: one
short passage, one label, decided by words all over it. What would give a book away without reading is taken out:
letters and apostrophes alone are left, in lower case, on one line; no verse numbers, no speakers, no breaks of verse.
The encoders are those of the experiment `encoder`, which are trained first where they are missing. Each is fine-tuned
with the norm that it was trained with, and its accuracy is compared with LayerNorm's of the same seed.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import encoder
from ln_probe.analyses.lab.language_model.encoder import ACCURACY, WHOLE, Encoder, EncoderConfig, Size
from ln_probe.analyses.lab.language_model.published_language_model import LOSS
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.results import (
    Results,
    contrasted,
    minus_reference,
    select,
    summarize_kinds,
)
from ln_probe.analyses.lab.run_folder import MODEL_FILE, load_weights
from ln_probe.analyses.lab.text_task import VALID_SHARE, MaskedTextTask, TaskOnText, TextTask
from ln_probe.analyses.lab.train import Run, TrainConfig, carry_out, curves, finished, step_generator

NOT_WORDS = re.compile(r"[^a-z'’]+")  # of text in lower case
SPEAKERS = re.compile(r"^[A-Z][A-Z ]+\.$", re.MULTILINE)  # a separate line in plays: "FIRST LORD."


def plain_words(text: str) -> str:
    """Words in lower case with a space between; names of speakers, digits and punctuation are left out."""
    return NOT_WORDS.sub(" ", SPEAKERS.sub(" ", text).lower()).replace("’", "'").strip()


@dataclass(frozen=True)
class Passages:
    """Passages and the number of the book of each."""

    tokens: Int[Tensor, "batch pos"]
    books: Int[Tensor, " batch"]


class PassagesTask(TaskOnText):
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
            raise ValueError(f"passages are classified by their book: give at least 2 texts, not {len(files)}")
        super().__init__(text)
        self.files, self.length, self.count = files, length, held_out
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

    def batch(self, step: int, size: int, seed: int) -> Passages:
        """As many passages of every book, to one."""
        generator = step_generator(seed, step)
        books, made = torch.arange(size) % len(self.files), []
        for tokens in self.train_tokens:
            starts = torch.randint(len(tokens) - self.length + 1, (size,), generator=generator)
            made.append(self.text.windows(tokens, starts, self.length))
        return Passages(torch.stack(made)[books, torch.arange(size)], books)

    def held_out(self) -> Passages:
        """The held-out passages, as many of every book."""
        made = []
        for tokens in self.held_tokens:
            starts = torch.linspace(0, len(tokens) - self.length, self.count).long()
            made.append(self.text.windows(tokens, starts, self.length))
        return Passages(torch.cat(made), torch.arange(len(made)).repeat_interleave(self.count))

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


@dataclass(frozen=True)
class ClassifierSpec:
    """A classifier that starts as an encoder of this shape with the weights of a file."""

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
    """The stream at the boundary, through a dense layer and a tanh, to a logit per class: BERT's classifier."""

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


KEYS = ["shape", "norm", "step", "measure"]


@dataclass(frozen=True)
class Tuning:
    """Tokens of a passage (SST-2's sentences have about 20 words), passages a step, steps, held out of each book."""

    length: int
    batch: int
    steps: int
    held_out: int


FULL = Tuning(length=32, batch=32, steps=150, held_out=700)
TINY = Tuning(length=32, batch=16, steps=40, held_out=100)
TUNED = ("layernorm", "projection_only", "scaling_only")  # encoders without a term where attention reads
RATE_SHARE = 0.5  # of the rate of the training before; BERT's is 0.2 to 0.5 of it


def make_runs(request: Request, encoders: Iterable[Run], task: PassagesTask, tuning: Tuning) -> list[Run]:
    """A run for each trained encoder, all of a seed on the same passages."""
    made = []
    for run in encoders:
        assert isinstance(run.spec, EncoderConfig)
        rate = run.training.lr * RATE_SHARE
        training = TrainConfig(
            steps=tuning.steps,
            batch=tuning.batch,
            lr=rate,
            lr_end=0.0,
            warmup=tuning.steps // 10,
            schedule="linear",
            clip=1.0,
            seed=run.seed,
            evaluate_every=tuning.steps,
            state_every=tuning.steps,
        )
        spec = ClassifierSpec(run.spec, run.folder / MODEL_FILE, len(request.texts))
        made.append(Run(run.keys, task, spec, training, request.out / "passages" / run.folder.name))
    return made


def run(request: Request, size: Size | None = None, tuning: Tuning | None = None) -> Results:
    """Train encoders, fine-tune them (or resume), and compare; at the request's sizes or others.

    Raises:
        ValueError: fewer than two texts.
    """
    size = size or (encoder.TINY if request.quick else encoder.SMALL)
    tuning = tuning or (TINY if request.quick else FULL)
    encoders = encoder.make_runs(request, size, [cell for cell in encoder.CELLS if cell[1] in TUNED])
    text = cast(MaskedTextTask, encoders[0].task).text
    task = PassagesTask(request.texts, text, tuning.length, tuning.held_out)  # refuses texts before anything is trained
    lost = carry_out(encoders, request)
    runs = make_runs(request, [run for run in encoders if run.finished], task, tuning)
    lost += carry_out(runs, request)
    done = finished(runs)
    values = select(curves(done), measure=[ACCURACY, LOSS])[[*KEYS, "seed", "value"]]
    settings = {
        "training": {k: v for k, v in vars(done[0].training).items() if k not in ("seed", "lr")}
        | {"lr": {shape: rate * RATE_SHARE for shape, rate in encoder.RATES.items()}},
        "encoder": vars(size),
        "data": task.identity,
        "counted_accuracy": task.counted_accuracy(),
        "published": "SST-2: another task, whose figures were not at hand",
    }
    return replace(findings(values.reset_index(drop=True), settings), diverged=lost)


def findings(values: pd.DataFrame, settings: Mapping[str, Any]) -> Results:
    """Tables from KEYS, `seed`, `value`."""
    share = values["measure"] == ACCURACY
    summary = summarize_kinds([(values[share], "share"), (values[~share], "mean")], KEYS)
    last = select(values, step=settings["training"]["steps"], measure=ACCURACY)
    differences = costs(last)
    return Results(
        summary=summary,
        tables={"values": values, "effects": differences},
        settings={**settings, "seeds": sorted({int(s) for s in values["seed"]})},
    )


def costs(last: pd.DataFrame) -> pd.DataFrame:
    """Accuracy minus LayerNorm's of the same seed and shape, with intervals and Holm's p over all rows."""
    same = ["shape", "step", "measure", "seed"]
    return contrasted(minus_reference(last, last["norm"] == WHOLE, same), KEYS, (-1.0, 1.0))
