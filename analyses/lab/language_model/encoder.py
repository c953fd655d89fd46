"""Encoders of BERT's shape on masked text, without scaling or without projection: their loss and their keys.

After the comparison of Brody, Alon & Yahav 2023, section 4.2, made there with decoders: the norm that attention reads
differs, and in two more cells every norm. Two shapes: d 8 with four heads of two numbers, and d 64 with four heads of
16. An encoder is bidirectional and post-norm, with learned positions and a norm on the embeddings (Devlin et al. 2019);
left out of BERT are segment embeddings, dropout, and the dense layer before the unembedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model.published import (
    BEFORE,
    FRACTION,
    HEAD,
    LOSS,
    NORMALIZED,
    unselectable_at_checkpoints,
)
from ln_probe.analyses.lab.results import Results, contrasted, lines, minus_reference, panels, select, summarize_kinds
from ln_probe.analyses.lab.runs import Run, carry_out, curves, finished, planned, shared_settings
from ln_probe.analyses.lab.text_task import MaskedTextTask, TextTask
from ln_probe.analyses.lab.train import text_training
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer, norm_or_nothing


@dataclass(frozen=True)
class EncoderConfig(LabConfig):
    """Shape of an encoder: that of a lab model, and the norm that its attention reads.

    Attributes:
        norm_read: kind of the norm on the embeddings and at the end of every block but the last; None leaves it out.
    """

    norm_read: str | None = "layernorm"

    def build(self) -> Encoder:
        """A model of this shape, initialized from torch's global generator: the same weights under every norm."""
        return Encoder(self)


class Encoder(LabTransformer):
    """A bidirectional post-norm transformer with a norm on its embeddings."""

    def __init__(self, cfg: EncoderConfig) -> None:
        super().__init__(cfg)
        self.ln_embed = norm_or_nothing(cfg, cfg.norm_read, affine=False)
        self.hook_embedded = HookPoint()
        for block in self.blocks[:-1]:
            block.ln2 = norm_or_nothing(cfg, cfg.norm_read, affine=False)
        self.setup()  # type: ignore[no-untyped-call]

    def embedded(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """What the first block reads: embeddings and positions, normed."""
        normed: Tensor = self.ln_embed(self.hook_embedded(super().embedded(tokens)))
        return normed


LAYERS = 4
KEYS = ["shape", "norm", "step", "layer", "space", "measure"]
ACCURACY = "valid_accuracy"
WHOLE = "layernorm"  # what the others are compared with


def analyse(frame: pd.DataFrame, losses: pd.DataFrame, steps: int) -> dict[str, pd.DataFrame]:
    """Summary of KEYS, `seed`, `value`: shares at kept steps, loss and accuracy at the last; and what terms change.

    `effects`: at the last step against LayerNorm, loss, and unselectable keys (mean over layers); Holm's p over all
    rows. After a norm that scales no key is unselectable by theorem, so what is normalized is not compared.
    """
    shares = frame["measure"].isin((FRACTION, ACCURACY))
    told = select(frame[frame["space"] != NORMALIZED], step=steps, measure=[LOSS, FRACTION])
    same = ["shape", "space", "measure", "seed"]
    means = cast("pd.DataFrame", told.groupby([*same, "norm"], sort=False, as_index=False)["value"].mean())
    pairs = minus_reference(means, means["norm"] == WHOLE, same)
    return {
        "summary": summarize_kinds([(frame[shares], "share"), (frame[~shares], "mean")], KEYS),
        "seeds": frame,
        "curves": losses,
        "effects": contrasted(pairs, ["shape", "norm", "space", "measure"]),
    }


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Unselectable keys at the last step over layers, a panel per shape and space."""
    summary = tables["summary"]
    rows = select(summary, measure=FRACTION, step=summary["step"].max())
    groups = list(rows.groupby(["shape", "space"], sort=False))
    figure, axes = panels(len(groups), 3.7, 2.8, columns=3, shared=True)
    for ((shape, space), part), ax in zip(groups, axes, strict=True):
        lines(ax, part, "layer", "norm", published=False)
        ax.set(title=f"{shape}: {space}")
    axes[0].set_ylabel("unselectable keys")
    axes[0].legend(fontsize=7)
    return {"unselectable": figure}


HEADS = 4
SHAPES = {"narrow": 8, "wide": 64}  # d_model
RATES = {"narrow": 5e-3, "wide": 2e-3}
# What attention reads, and every other norm. In post-norm order what attention reads has just passed another norm, so
# leaving a term out there alone leaves it in the stream: the last two leave it out everywhere.
NORMS: dict[str, tuple[str | None, str | None]] = {
    "layernorm": ("layernorm", "layernorm"),
    "projection_only": ("projection_only", "layernorm"),
    "scaling_only": ("scaling_only", "layernorm"),
    "projection_only everywhere": ("projection_only", "projection_only"),
    "scaling_only everywhere": ("scaling_only", "scaling_only"),
    "identity": (None, None),  # no norm at all: of `sentences`
}
CELLS = (  # the wide shape, whose keys are all within reach, without the last two
    *(("narrow", norm) for norm in tuple(NORMS)[:5]),
    *(("wide", norm) for norm in tuple(NORMS)[:3]),
)


@dataclass(frozen=True)
class Size:
    """Vocabulary (the mask not counted), window, batch (windows), steps; windows that loss and keys are measured on."""

    d_vocab: int
    n_ctx: int
    batch: int
    steps: int
    valid_windows: int
    contexts: int


# BERT: 30,000 tokens, windows of 512, 256 of them a step, 10⁶ steps. Here a run takes a core half a minute to a minute.
SMALL = Size(d_vocab=1024, n_ctx=128, batch=8, steps=1000, valid_windows=256, contexts=8)
TINY = Size(d_vocab=512, n_ctx=64, batch=4, steps=100, valid_windows=32, contexts=2)


def encoder_config(shape: str, norm: str, size: Size) -> EncoderConfig:
    """An encoder of one of SHAPES and NORMS."""
    read, others = NORMS[norm]
    return EncoderConfig(
        n_layers=LAYERS, d_model=SHAPES[shape], n_heads=HEADS, d_vocab=size.d_vocab + 1, n_ctx=size.n_ctx, causal=False,
        norm_order="post", norm=others, norm_mlp=others, norm_final=None, norm_read=read,
    )  # fmt: skip


def make_runs(request: Request, size: Size, cells: Sequence[tuple[str, str]] | None = None) -> list[Run]:
    """A run per seed, shape and norm; within a seed and shape all start at the same weights and see the same masks."""
    text = TextTask(
        request.texts, size.d_vocab, size.n_ctx, tokenizer=request.tokenizer, valid_windows=size.valid_windows
    )
    task, tenth = MaskedTextTask(text), max(1, size.steps // 10)
    return planned(
        CELLS if cells is None else cells,
        request,
        keys=lambda cell: {"shape": cell[0], "norm": cell[1]},
        name=lambda cell: f"{cell[0]}-{cell[1].replace(' ', '-')}",
        task=lambda *_: task,
        spec=lambda cell: encoder_config(*cell, size),
        training=lambda cell, seed: text_training(
            size, seed, RATES[cell[0]], evaluate_every=tenth, save_at=(0, size.steps // 4), state_every=tenth
        ),
    )


def run(request: Request) -> Results:
    """Train (or resume), measure, and compare."""
    size = TINY if request.quick else SMALL
    runs = make_runs(request, size)
    lost = carry_out(runs, request)
    started = finished(runs, checkpoints=True)
    task = cast(MaskedTextTask, started[0].task)
    losses = select(curves(started), measure=["train_loss", LOSS, ACCURACY])
    fractions = unselectable_at_checkpoints(started, task.text.held_out(size.contexts), key_places())
    last = select(losses, step=size.steps, measure=[LOSS, ACCURACY]).assign(layer=-1, space="-")
    values = pd.concat([fractions, last], ignore_index=True)[[*KEYS, "seed", "value"]]
    varied = ("norm", "norm_mlp", "norm_read", "d_model", "d_head", "d_mlp", "lr", "lr_end")
    settings = shared_settings(started[0], varied) | {"unigram_loss": task.unigram_loss(), "contexts": size.contexts}
    tables = analyse(values, losses, size.steps)
    return Results(tables, plot(tables), settings, lost)


def key_places() -> dict[tuple[int, str], str]:
    """Hook names by layer and space: what attention reads before its norm and after, and a head's keys."""
    places = {}
    for layer in range(LAYERS):
        places[layer, BEFORE] = f"blocks.{layer - 1}.hook_resid_post" if layer else "hook_embedded"
        places[layer, NORMALIZED] = f"blocks.{layer}.hook_resid_pre"  # norms that attention reads have no gain and bias
        places[layer, HEAD] = f"blocks.{layer}.attn.hook_k"
    return places
