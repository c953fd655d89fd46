"""Models of `published` and `encoder` read on shorter texts: sentences, and passages whose book is to be told.

`sentences` (Brody, Alon & Yahav 2023, tables 3 and 4): the decoder without scaling, and an encoder (d 8, four heads,
four layers, 3072 hidden units) whose norms are all the identity, each next to the same with LayerNorm, read on
sentences of at most 128 tokens. `encoder_passages`, in place of SST-2: encoders fine-tuned to tell which of the given
books a passage is from, without capitals, digits, punctuation and names of speakers.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import encoder, published
from ln_probe.analyses.lab.language_model.encoder import ACCURACY, WHOLE, Encoder, EncoderConfig, encoder_config
from ln_probe.analyses.lab.language_model.published import (
    FRACTION,
    HEAD,
    LAYERS,
    LOSS,
    NORMALIZED,
    published_model,
    unselectable_keys,
)
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.results import Results, contrasted, minus_reference, select, summarize_kinds
from ln_probe.analyses.lab.runs import Run, carry_out, curves, finished, measured_once, planned, shared_settings
from ln_probe.analyses.lab.text_task import VALID_SHARE, MaskedTextTask, TaskOnText, TextTask
from ln_probe.analyses.lab.train import (
    MODEL_FILE,
    Task,
    TrainConfig,
    load_weights,
    step_generator,
    text_training,
    weights_of,
)
from ln_probe.analyses.lab.transformer import LabTransformer

DECODER, ENCODER, IDENTITY, NO_SCALING = "decoder", "encoder", "identity", "projection_only"
# A step takes a core 0.05 and 0.08 seconds (published: 50,000 steps of 16 windows of 1024 for decoders).
DECODERS = replace(published.SMALL, steps=300)
ENCODERS = replace(encoder.SMALL, batch=4, steps=200, valid_windows=64)
CELLS = ((DECODER, NO_SCALING), (DECODER, WHOLE), (ENCODER, IDENTITY), (ENCODER, WHOLE))
HIDDEN = 3072  # published, of the encoder
LONGEST = 128  # tokens of a sentence, the boundary before it among them: published
READ, READ_QUICK = 64, 16  # sentences
WINDOWS = 8  # of the decoder's training length, read for comparison
LONG = f"{NORMALIZED}, long windows"
KEYS = ["shape", "norm", "step", "layer", "space", "measure"]
ENDS = re.compile(r"(?<=[.?!])\s+|\n\s*\n")


def sentences(text: TextTask, count: int) -> list[Int[Tensor, " pos"]]:
    """Return the first sentences of a text's held-out part, a boundary token and at most LONGEST - 1 tokens each.

    What does not end in a full stop, a question mark or an exclamation mark is left out.
    """
    parts = [part.strip() for part in ENDS.split(text.tokenizer.decode(text.valid_tokens.tolist()))]
    whole = [part for part in parts[1:] if part.endswith((".", "?", "!"))]  # the first may have begun before
    if len(whole) < count:
        raise ValueError(f"the held-out text has {len(whole)} sentences and {count} are read: give more text")
    ids = [torch.tensor(text.tokenizer.encode(part).ids[: LONGEST - 1]) for part in whole[:count]]
    return [torch.cat([torch.tensor([text.boundary]), one]) for one in ids]


def make_runs(request: Request) -> list[Run]:
    """A run per seed, model and norm; within a seed and model all see the same batches."""
    decoders = published.TINY if request.quick else DECODERS
    encoders = replace(encoder.TINY, n_ctx=LONGEST) if request.quick else ENCODERS  # sentences must fit
    sizes: dict[str, published.Size | encoder.Size] = {DECODER: decoders, ENCODER: encoders}
    texts = {
        shape: TextTask(request.texts, s.d_vocab, s.n_ctx, tokenizer=request.tokenizer, valid_windows=s.valid_windows)
        for shape, s in sizes.items()
    }
    tasks: dict[str, Task] = {DECODER: texts[DECODER], ENCODER: MaskedTextTask(texts[ENCODER])}
    specs = {(DECODER, WHOLE): published_model(WHOLE, None, decoders)}
    specs[DECODER, NO_SCALING] = published_model(NO_SCALING, 1.0, decoders)
    for norm in (IDENTITY, WHOLE):
        specs[ENCODER, norm] = replace(encoder_config("narrow", norm, encoders), d_mlp=HIDDEN)
    rates = {DECODER: decoders.lr, ENCODER: encoder.RATES["narrow"]}
    return planned(
        CELLS,
        request,
        keys=lambda cell: {"shape": cell[0], "norm": cell[1]},
        name="-".join,
        task=lambda cell, _: tasks[cell[0]],
        spec=specs.__getitem__,
        training=lambda cell, seed: text_training(
            sizes[cell[0]], seed, rates[cell[0]], evaluate_every=sizes[cell[0]].steps // 5
        ),
    )


def run(request: Request) -> Results:
    """Train what is not trained, and read every model on sentences, decoders on long windows as well."""
    runs = make_runs(request)
    lost = carry_out(runs, request)
    done = finished(runs)
    shares = pd.concat([read_on_sentences(one, READ_QUICK if request.quick else READ) for one in done])
    losses = select(curves(done), measure=LOSS).assign(layer=-1, space="-")
    ends = losses["step"] == losses.groupby(["shape", "norm", "seed"])["step"].transform("max")
    values = pd.concat([shares, losses[ends]], ignore_index=True)[[*KEYS, "seed", "value"]]
    varied = ("norm", "norm_mlp", "norm_read", "norm_final", "divisor")
    tables = analyse(values)
    settings = {str(one.keys["shape"]): shared_settings(one, varied) for one in done}
    return Results(tables, plot(tables), settings, lost)


def read_on_sentences(run: Run, count: int) -> pd.DataFrame:
    """Unselectable shares of a finished run's model: the columns KEYS, `seed`, `value`; kept in its folder."""
    text = run.task if isinstance(run.task, TextTask) else cast(MaskedTextTask, run.task).text
    is_decoder = run.keys["shape"] == DECODER
    places = published.key_places(range(LAYERS)) if is_decoder else encoder.key_places()

    def measure() -> pd.DataFrame:
        model = cast(LabTransformer, run.model())
        contexts = [one[None] for one in sentences(text, count)]
        rows = [(layer, space, value) for c in contexts for layer, space, value in unselectable_keys(model, c, places)]
        if is_decoder:
            long = {place: name for place, name in places.items() if place[1] == NORMALIZED}
            rows += [(layer, LONG, v) for layer, _, v in unselectable_keys(model, text.held_out(WINDOWS), long)]
        table = pd.DataFrame(rows, columns=["layer", "space", "value"])
        return cast("pd.DataFrame", table.groupby(["layer", "space"], sort=False, as_index=False)["value"].mean())

    shares = measured_once(run.folder, f"sentences-{count}", weights_of(run.folder), measure)
    return shares.assign(step=run.training.steps, measure=FRACTION, seed=run.seed, **dict(run.keys))


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary of KEYS, `seed`, `value`, and what the hypotheses are about.

    `effects`: no scaling or no norm minus LayerNorm, and sentences minus long windows, means over layers; Holm's p over
    all rows.
    """
    shares = frame["measure"] == FRACTION
    same, first = ["shape", "measure", "seed"], ["norm", "space"]
    means = cast("pd.DataFrame", frame.groupby([*same, *first], sort=False, as_index=False)["value"].mean())
    seen = select(means, space=[HEAD, "-"])
    read = select(means, shape=DECODER, norm=NO_SCALING, space=[NORMALIZED, LONG])
    pairs = [
        minus_reference(seen, seen["norm"] == WHOLE, [*same, "space"]).assign(minus=WHOLE),
        minus_reference(read, read["space"] == LONG, [*same, "norm"]).assign(minus=LONG),
    ]
    return {
        "summary": summarize_kinds([(frame[shares], "share"), (frame[~shares], "mean")], KEYS),
        "seeds": frame,
        "effects": contrasted(pd.concat(pairs, ignore_index=True), ["shape", *first, "measure", "minus"]),
    }


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Unselectable keys, a panel per model and space."""
    return encoder.plot({"summary": tables["summary"].assign(step=0)})


# -------------------------------------------------------------------------------------------------------- passages

NOT_WORDS = re.compile(r"[^a-z'’]+")  # of text in lower case
SPEAKERS = re.compile(r"^[A-Z][A-Z ]+\.$", re.MULTILINE)  # a separate line in plays: "FIRST LORD."
PASSAGE_KEYS = ["shape", "norm", "step", "measure"]
TUNED = ("layernorm", "projection_only", "scaling_only")  # encoders without a term where attention reads
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
        for tokens in self.held_tokens:
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
        return {LOSS: float(F.cross_entropy(logits, books)), ACCURACY: right}

    def counted_accuracy(self) -> float:
        """What token counts alone give on the held-out passages: naive Bayes, each token counted once more."""
        counts = torch.stack([1.0 + torch.bincount(t, minlength=self.text.d_vocab).double() for t in self.train_tokens])
        logs = (counts / counts.sum(-1, keepdim=True)).log()
        tokens, books = self.held_out()
        return float((logs[:, tokens[:, 1:]].sum(-1).argmax(0) == books).double().mean())


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


def run_passages(request: Request) -> Results:
    """Train encoders, fine-tune them (or resume), and compare."""
    size = encoder.TINY if request.quick else encoder.SMALL
    # Tokens of a passage (SST-2's sentences have about 20 words), passages a step, steps, held out of each book.
    length, batch, steps, held_out = (32, 16, 40, 100) if request.quick else (32, 32, 150, 700)
    encoders = encoder.make_runs(request, size, [cell for cell in encoder.CELLS if cell[1] in TUNED])
    text = cast(MaskedTextTask, encoders[0].task).text
    task = PassagesTask(request.texts, text, length, held_out)  # refuses texts before anything is trained
    lost = carry_out(encoders, request)
    runs = []
    for one in (run for run in encoders if run.finished):
        training = TrainConfig(
            steps=steps, batch=batch, lr=one.training.lr * RATE_SHARE, lr_end=0.0, warmup=steps // 10,
            schedule="linear", clip=1.0, seed=one.seed, evaluate_every=steps, state_every=steps,
        )  # fmt: skip
        spec = ClassifierSpec(cast(EncoderConfig, one.spec), one.folder / MODEL_FILE, len(request.texts))
        runs.append(Run(one.keys, task, spec, training, request.out / "passages" / one.folder.name))
    lost += carry_out(runs, request)
    values = select(curves(finished(runs)), measure=[ACCURACY, LOSS])[[*PASSAGE_KEYS, "seed", "value"]]
    settings = {"data": task.identity, "counted_accuracy": task.counted_accuracy(), "encoder": vars(size)}
    return Results(analyse_passages(values.reset_index(drop=True)), {}, settings, lost)


def analyse_passages(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary of PASSAGE_KEYS, `seed`, `value`, and accuracy minus LayerNorm's of the same seed and shape.

    Holm's p is over all rows of `effects`.
    """
    share = frame["measure"] == ACCURACY
    last = select(frame, step=int(frame["step"].max()), measure=ACCURACY)
    pairs = minus_reference(last, last["norm"] == WHOLE, ["shape", "step", "measure", "seed"])
    return {
        "summary": summarize_kinds([(frame[share], "share"), (frame[~share], "mean")], PASSAGE_KEYS),
        "values": frame,
        "effects": contrasted(pairs, PASSAGE_KEYS, (-1.0, 1.0)),
    }
