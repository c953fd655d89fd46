"""Encoders of BERT's shape on masked text, without scaling or without projection: their loss and their keys.

After the comparison of Brody, Alon & Yahav 2023, section 4.2, made there with decoders: the norm that attention reads
differs, and in two more cells every norm. Two shapes: d 8 with four heads of two numbers, the published decoders', and
d 64 with four heads of 16, in which few keys are out of reach anyway. Norms without scaling divide by a constant
measured at initialization, so that all start at the same size. Every query of an encoder sees all keys of its context.

An encoder is bidirectional and post-norm, with learned positions and a norm on the embeddings (Devlin et al. 2019). The
norms that attention reads have no gain and bias: the one on the embeddings, and the one that ends every block but the
last. MLPs read `norm`, the unembedding `norm_mlp`. Left out of BERT: segment embeddings (one segment), dropout, and the
dense layer before the unembedding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor
from transformer_lens.hook_points import HookPoint

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model.published_language_model import (
    BEFORE,
    FRACTION,
    HEAD,
    LOSS,
    NORMALIZED,
    unselectable_at_checkpoints,
)
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import (
    Results,
    contrasted,
    minus_reference,
    panels,
    select,
    summarize_kinds,
)
from ln_probe.analyses.lab.text_task import MaskedTextTask, TextTask
from ln_probe.analyses.lab.train import Run, carry_out, curves, finished, planned, shared_settings, text_training
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer, norm_or_nothing


@dataclass(frozen=True)
class EncoderConfig(LabConfig):
    """Shape of an encoder: that of a lab model, and the norm that its attention reads.

    Attributes:
        norm_read: kind of the norm on the embeddings and at the end of every block but the last; None leaves it out.

    Raises (on construction):
        ValueError: an unknown norm, a causal or pre-norm shape, a final norm, or what `LabConfig` refuses.
    """

    norm_read: str | None = "layernorm"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_read not in (*NORM_KINDS, None):
            raise ValueError(f"unknown norm_read {self.norm_read!r}: known norms are {', '.join(NORM_KINDS)}")
        needs = {"causal": False, "norm_order": "post", "norm_final": None}
        for name, wanted in needs.items():
            if getattr(self, name) != wanted:
                raise ValueError(f"an encoder has {name}={wanted!r}, got {getattr(self, name)!r}")

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
LOSSES = (LOSS, ACCURACY)
WHOLE = "layernorm"  # what the others are compared with
LEFT_OUT = {
    "projection_only": "scaling where attention reads",
    "scaling_only": "projection where attention reads",
    "projection_only everywhere": "scaling everywhere",
    "scaling_only everywhere": "projection everywhere",
}
WIDTH = 0.17  # of a bar


def findings(values: pd.DataFrame, losses: pd.DataFrame, settings: Mapping[str, Any]) -> Results:
    """Tables and plots from KEYS, `seed`, `value`: shares at kept steps, loss and accuracy at the last."""
    shares = values["measure"].isin((FRACTION, ACCURACY))
    summary = summarize_kinds([(values[shares], "share"), (values[~shares], "mean")], KEYS)
    differences = effects_of_terms(values, int(settings["training"]["steps"]))
    return Results(
        summary=summary,
        tables={"seeds": values, "curves": losses, "effects": differences},
        figures={"unselectable": draw(summary)},
        settings={**settings, "seeds": sorted({int(s) for s in values["seed"]})},
    )


def effects_of_terms(values: pd.DataFrame, step: int) -> pd.DataFrame:
    """What leaving out a term changes at a step against LayerNorm: loss, and unselectable keys (mean over layers).

    Returns:
        shape, norm, space, measure, and the columns of `contrasted`; Holm's p is over all rows. After a norm that
        scales no key is unselectable by theorem, so what is normalized is not compared.
    """
    told = select(values[values["space"] != NORMALIZED], step=step, measure=[LOSS, FRACTION])
    same = ["shape", "space", "measure", "seed"]
    means = cast("pd.DataFrame", told.groupby([*same, "norm"], sort=False, as_index=False)["value"].mean())
    pairs = minus_reference(means, means["norm"] == WHOLE, same)
    return contrasted(pairs, ["shape", "norm", "space", "measure"])


def draw(summary: pd.DataFrame) -> Figure:
    """Unselectable keys at the last step, a panel per shape and space: bars over layers, whiskers over seeds."""
    rows = select(summary, measure=FRACTION, step=summary["step"].max())
    shapes, spaces = list(dict.fromkeys(rows["shape"])), (BEFORE, NORMALIZED, HEAD)
    figure, axes = panels(len(shapes) * len(spaces), 11 / len(spaces), 2.8, columns=len(spaces), shared=True)
    norms = list(dict.fromkeys(rows["norm"]))
    for (shape, space), ax in zip(itertools.product(shapes, spaces), axes, strict=True):
        for number, norm in enumerate(norms):
            one = select(rows, shape=shape, space=space, norm=norm)
            if one.empty:
                continue
            reach = np.nan_to_num(np.vstack([one["mean"] - one["ci_low"], one["ci_high"] - one["mean"]]))
            at = one["layer"] + 1 + WIDTH * (number - (len(norms) - 1) / 2)
            ax.bar(at, one["mean"], 0.9 * WIDTH, yerr=reach, color=f"C{number}", label=norm, error_kw={"lw": 0.8})
        ax.set(title=f"{shape}: {space}", xticks=range(1, LAYERS + 1), xlabel="layer")
        if space == spaces[0]:
            ax.set_ylabel("unselectable keys")
            if ax.containers:
                ax.legend(fontsize=7)
    return figure


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
        n_layers=LAYERS,
        d_model=SHAPES[shape],
        n_heads=HEADS,
        d_vocab=size.d_vocab + 1,
        n_ctx=size.n_ctx,
        causal=False,
        norm_order="post",
        norm=others,
        norm_mlp=others,
        norm_final=None,
        norm_read=read,
    )


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


def run(request: Request, size: Size | None = None) -> Results:
    """Train (or resume), measure, and compare; at the request's size or another."""
    size = size or (TINY if request.quick else SMALL)
    runs = make_runs(request, size)
    lost = carry_out(runs, request)
    started = finished(runs, checkpoints=True)
    task = cast(MaskedTextTask, started[0].task)
    losses = select(curves(started), measure=["train_loss", *LOSSES])
    fractions = unselectable_at_checkpoints(started, task.text.held_out(size.contexts), key_places())
    last = select(losses, step=size.steps, measure=[*LOSSES]).assign(layer=-1, space="-")
    values = pd.concat([fractions, last], ignore_index=True)[[*KEYS, "seed", "value"]]
    varied = ("norm", "norm_mlp", "norm_read", "d_model", "d_head", "d_mlp", "lr", "lr_end")
    shared = shared_settings(started[0], varied)
    settings = {
        **shared,
        "training": shared["training"] | {"lr": RATES},
        "model": shared["model"] | {"d_model": SHAPES},
        "contexts": size.contexts,
        "unigram_loss": task.unigram_loss(),
        "published": "decoders only (section 4.2: the experiment language_model); of an encoder no figure was at hand",
    }
    return replace(findings(values, losses, settings), diverged=lost)


def key_places() -> dict[tuple[int, str], str]:
    """Hook names by layer and space: what attention reads before its norm and after, and a head's keys."""
    places = {}
    for layer in range(LAYERS):
        places[layer, BEFORE] = f"blocks.{layer - 1}.hook_resid_post" if layer else "hook_embedded"
        places[layer, NORMALIZED] = f"blocks.{layer}.hook_resid_pre"  # norms that attention reads have no gain and bias
        places[layer, HEAD] = f"blocks.{layer}.attn.hook_k"
    return places
