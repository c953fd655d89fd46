"""Encoders of BERT's shape on masked text, without scaling or without projection: their loss and their keys.

After the comparison of Brody, Alon & Yahav 2023, section 4.2, made there with decoders: the norm that attention reads
differs, and in two more cells every norm. Two shapes: d 8 with four heads of two numbers, and d 64 with four heads of
16; of table 4, which reads sentences, d 8 with 3072 hidden units and no norm at all. In place of SST-2 the encoders are
fine-tuned to tell which of the given books a passage is from. An encoder is BERT without segment embeddings, dropout,
and the dense layer before the unembedding.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import published
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.points import HookPoint
from ln_probe.analyses.lab.results import Results, contrasted, line_panels, minus_reference, select, summarize
from ln_probe.analyses.lab.runs import Run, carry_out, curves, finished, planned, shared_settings
from ln_probe.analyses.lab.text_task import MaskedTextTask, PassagesTask, TextTask
from ln_probe.analyses.lab.train import MODEL_FILE, TrainConfig, load_weights, text_training
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer, norm_or_nothing


@dataclass(frozen=True)
class EncoderConfig(LabConfig):
    """Shape of an encoder: that of a lab model, and the norm that its attention reads.

    Attributes:
        norm_read: kind of the norm on the embeddings and at the end of every block but the last; None leaves it out.
    """

    norm_read: str | None = "layernorm"

    def build(self) -> Encoder:
        """A random model of this shape (torch's global generator): the same weights under every norm."""
        return Encoder(self)


class Encoder(LabTransformer):
    """A bidirectional post-norm transformer with a norm on its embeddings."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__(cfg)
        self.ln_embed = norm_or_nothing(cfg, cfg.norm_read, affine=False)
        self.hook_embedded = HookPoint()
        for block in self.blocks[:-1]:
            block.ln2 = norm_or_nothing(cfg, cfg.norm_read, affine=False)
        self.setup()

    def embedded(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """What the first block reads: embeddings and positions, normed."""
        normed: Tensor = self.ln_embed(self.hook_embedded(super().embedded(tokens)))
        return normed


LAYERS = 4
KEYS = ["shape", "norm", "step", "layer", "space", "measure"]
ACCURACY = "valid_accuracy"
WHOLE = "layernorm"  # what the others are compared with


def analyse(frame: pd.DataFrame, losses: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary of KEYS, `seed`, `value`: shares at measured steps, loss and accuracy at the last; and what terms change.

    `effects`: at the last step minus LayerNorm of the same seed (unselectable keys: means over layers), with Holm's p
    over the rows of one kind: encoders on windows, encoders of table 4, passages. After a norm that scales no key is
    unselectable by theorem, so what is normalized is not compared.
    """
    ends = frame[frame["step"] == frame.groupby(["shape", "space"])["step"].transform("max")]
    passages = ends["space"] == PASSAGES
    seen = ends["space"].isin((published.BEFORE, published.HEAD, "-")) & ends["measure"].isin(
        (published.FRACTION, published.LOSS)
    )
    read = (ends["shape"] == MANY_HIDDEN) & (
        (ends["measure"] == published.LOSS)
        | (ends["space"] == published.HEAD + published.SENTENCES) & (ends["measure"] == published.FRACTION)
    )
    same = ["shape", "space", "measure", "seed"]
    tests = []
    for rows in (seen & (ends["shape"] != MANY_HIDDEN), read, passages & (ends["measure"] == ACCURACY)):
        means = cast("pd.DataFrame", ends[rows].groupby([*same, "norm"], sort=False, as_index=False)["value"].mean())
        pairs = minus_reference(means, means["norm"] == WHOLE, same)
        tests.append(contrasted(pairs, ["shape", "norm", "space", "measure"]))
    return {
        "summary": summarize(frame, KEYS, shares=(published.FRACTION, published.UNDECIDED, ACCURACY)),
        "seeds": frame,
        "curves": losses,
        "effects": pd.concat([table for table in tests if len(table)], ignore_index=True),
    }


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Unselectable keys at the last step over layers, a panel per shape and space."""
    summary = tables["summary"]
    rows = select(
        summary,
        measure=published.FRACTION,
        step=summary["step"].max(),
        space=[published.BEFORE, published.NORMALIZED, published.HEAD],
    )
    return {"unselectable": line_panels(rows, ["shape", "space"], "layer", "norm", published=False, columns=3)}


HEADS = 4
MANY_HIDDEN = "narrow, 3072 hidden"  # of table 4
SHAPES: dict[str, tuple[int, int | None]] = {"narrow": (8, None), "wide": (64, None), MANY_HIDDEN: (8, 3072)}
RATES = {"narrow": 5e-3, "wide": 2e-3, MANY_HIDDEN: 5e-3}
# What attention reads, and every other norm. In post-norm order what attention reads has just passed another norm, so
# leaving a term out there alone leaves it in the stream: the last two leave it out everywhere.
NORMS: dict[str, tuple[str | None, str | None]] = {
    "layernorm": ("layernorm", "layernorm"),
    "projection_only": ("projection_only", "layernorm"),
    "scaling_only": ("scaling_only", "layernorm"),
    "projection_only everywhere": ("projection_only", "projection_only"),
    "scaling_only everywhere": ("scaling_only", "scaling_only"),
    "identity": (None, None),  # no norm at all: of table 4
}
CELLS = (  # the wide shape, whose keys are all within reach, without terms left out everywhere
    *(("narrow", norm) for norm in tuple(NORMS)[:5]),
    *(("wide", norm) for norm in tuple(NORMS)[:3]),
    *((MANY_HIDDEN, norm) for norm in (WHOLE, "identity")),
)
RATE_SHARE = 0.5  # of the rate of the training before; BERT's is 0.2 to 0.5 of it
TUNED = tuple(NORMS)[:3]  # norms of encoders that are fine-tuned on passages
PASSAGES = "passages"  # the space of their loss and accuracy


@dataclass(frozen=True)
class Size:
    """Vocabulary (the mask not counted), window, batch (windows), steps; what loss and keys are measured on."""

    d_vocab: int
    n_ctx: int
    batch: int
    steps: int
    valid_windows: int
    contexts: int
    sentences: int


# BERT: 30,000 tokens, windows of 512, 256 of them a step, 10⁶ steps. Here a run takes a core half a minute to a minute.
SMALL = Size(d_vocab=1024, n_ctx=128, batch=8, steps=1000, valid_windows=256, contexts=8, sentences=64)
TINY = Size(d_vocab=512, n_ctx=128, batch=4, steps=50, valid_windows=32, contexts=2, sentences=16)


def encoder_config(shape: str, norm: str, size: Size) -> EncoderConfig:
    """An encoder of one of SHAPES and NORMS."""
    read, others = NORMS[norm]
    return EncoderConfig(
        n_layers=LAYERS, d_model=SHAPES[shape][0], d_mlp=SHAPES[shape][1], n_heads=HEADS, d_vocab=size.d_vocab + 1,
        n_ctx=size.n_ctx, causal=False, norm_order="post", norm=others, norm_mlp=others, norm_final=None,
        norm_read=read,
    )  # fmt: skip


def make_runs(request: Request, size: Size) -> list[Run]:
    """A run per seed, shape and norm; within a seed and shape all have the same initial weights and masks."""
    text = TextTask(
        request.texts, size.d_vocab, size.n_ctx, tokenizer=request.tokenizer, valid_windows=size.valid_windows
    )
    task, tenth = MaskedTextTask(text), max(1, size.steps // 10)
    return planned(
        CELLS,
        request,
        keys=lambda cell: {"shape": cell[0], "norm": cell[1]},
        task=lambda *_: task,
        spec=lambda cell: encoder_config(*cell, size),
        training=lambda cell, seed: text_training(
            size, seed, RATES[cell[0]], evaluate_every=tenth, save_at=(0, size.steps // 4), state_every=tenth
        ),
    )


def run(request: Request) -> Results:
    """Train (or resume), measure, fine-tune, and compare."""
    size = TINY if request.quick else SMALL
    runs = make_runs(request, size)
    text = cast("MaskedTextTask", runs[0].task).text
    task = None
    if len(request.texts) > 1:  # refuses texts before anything is trained; SST-2's sentences have about 20 words
        task = PassagesTask(request.texts, text, 32, 100 if request.quick else 700)
    lost = carry_out(runs, request)
    encoders = [run for run in runs if run.keys["norm"] in TUNED and run.keys["shape"] != MANY_HIDDEN]
    tuned = passage_runs(request, encoders, task) if task else []
    lost += carry_out(tuned, request)
    started = finished(runs, checkpoints=True)
    losses = select(curves(started), measure=["train_loss", published.LOSS, ACCURACY])
    parts = [
        published.unselectable_at_checkpoints(started, text.held_out(size.contexts), key_places()),
        *(
            published.on_sentences(run, text, key_places(), size.sentences)
            for run in started
            if run.finished and run.keys["shape"] == MANY_HIDDEN
        ),
        select(losses, step=size.steps, measure=[published.LOSS, ACCURACY]).assign(layer=-1, space="-"),
    ]
    if tuned:
        parts.append(select(curves(tuned), measure=[published.LOSS, ACCURACY]).assign(layer=-1, space=PASSAGES))
    values = pd.concat(parts, ignore_index=True)[[*KEYS, "seed", "value"]]
    varied = ("norm", "norm_mlp", "norm_read", "d_model", "d_head", "d_mlp", "lr", "lr_end")
    settings = shared_settings(started[0], varied) | {"contexts": size.contexts}
    settings |= {"unigram_loss": cast("MaskedTextTask", runs[0].task).unigram_loss()}
    settings |= {"passages": task.identity} if task else {}
    tables = analyse(values, losses)
    return Results(tables, plot(tables), settings, lost)


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


def passage_runs(request: Request, encoders: Iterable[Run], task: PassagesTask) -> list[Run]:
    """Return a run of fine-tuning for each finished encoder."""
    steps, batch = (40, 16) if request.quick else (150, 32)
    shared = TrainConfig(
        steps=steps,
        batch=batch,
        lr_end=0.0,
        warmup=steps // 10,
        schedule="linear",
        clip=1.0,
        evaluate_every=steps,
        state_every=steps,
    )
    runs = []
    for run in (run for run in encoders if run.finished):
        training = replace(shared, lr=run.training.lr * RATE_SHARE, seed=run.seed)
        spec = ClassifierSpec(cast("LabConfig", run.spec), run.folder / MODEL_FILE, len(request.texts))
        runs.append(Run(run.keys, task, spec, training, request.out / "passages" / run.folder.name))
    return runs


def key_places() -> dict[tuple[int, str], str]:
    """Hook names by layer and space: what attention reads before its norm and after, and a head's keys."""
    places = {}
    for layer in range(LAYERS):
        places[layer, published.BEFORE] = f"blocks.{layer - 1}.hook_resid_post" if layer else "hook_embedded"
        places[layer, published.NORMALIZED] = f"blocks.{layer}.hook_resid_pre"
        places[layer, published.HEAD] = f"blocks.{layer}.attn.hook_k"
    return places
