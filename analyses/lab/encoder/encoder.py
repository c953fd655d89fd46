"""Encoders of BERT's shape on masked text, without scaling or without projection: their loss and their keys.

After the comparison of Brody, Alon & Yahav 2023, section 4.2, made there with decoders: the norm that attention reads
differs (`encoder_model`), and in two more cells every norm. Two shapes: d 8 with four heads of two numbers, the
published decoders', and d 64 with four heads of 16, in which few keys are out of reach anyway. Norms without scaling
divide by a constant measured at initialization, so that all start at the same size. Every query of an encoder sees all
keys of its context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
import torch

from ln_probe.analyses.lab.encoder.encoder_findings import KEYS, LAYERS, LOSSES, findings
from ln_probe.analyses.lab.encoder.encoder_model import Encoder, EncoderConfig, read_places
from ln_probe.analyses.lab.encoder.masked_text import MaskedTextTask
from ln_probe.analyses.lab.language_model.published_language_model import (
    BEFORE,
    FRACTION,
    HEAD,
    NORMALIZED,
    unselectable_share,
)
from ln_probe.analyses.lab.run_folder import LAB_FILE, MODEL_FILE, checkpoint_steps, kept_beside, weights_of
from ln_probe.analyses.lab.runs import Run, carry_out, curves, diverged, planned
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.training import TrainConfig, load_weights

if TYPE_CHECKING:
    from ln_probe.analyses.lab.experiments import Request
    from ln_probe.analyses.lab.results import Results

MEASURED = 1  # version of what is measured of a checkpoint
HEADS = 4
SHAPES = {"narrow": 8, "wide": 64}  # d_model
RATES = {"narrow": 5e-3, "wide": 2e-3}
# What attention reads, and every other norm. In post-norm order what attention reads has just passed another norm, so
# leaving a term out there alone leaves it in the stream: the last two leave it out everywhere.
NORMS = {
    "layernorm": ("layernorm", "layernorm"),
    "projection_only": ("projection_only", "layernorm"),
    "scaling_only": ("scaling_only", "layernorm"),
    "projection_only everywhere": ("projection_only", "projection_only"),
    "scaling_only everywhere": ("scaling_only", "scaling_only"),
}
CELLS = (  # the wide shape, whose keys are all within reach, without the last two
    *(("narrow", norm) for norm in NORMS),
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
    task = MaskedTextTask(text)
    return planned(
        CELLS if cells is None else cells,
        request,
        keys=lambda cell: {"shape": cell[0], "norm": cell[1]},
        name=lambda cell: f"{cell[0]}-{cell[1].replace(' ', '-')}",
        task=lambda *_: task,
        spec=lambda cell: encoder_config(*cell, size),
        training=lambda cell, seed: TrainConfig(
            steps=size.steps,
            batch=size.batch,
            lr=RATES[cell[0]],
            lr_end=RATES[cell[0]] / 10,
            warmup=size.steps // 20,
            clip=1.0,
            seed=seed,
            evaluate_every=max(1, size.steps // 10),
            save_at=(0, size.steps // 4),
            state_every=max(1, size.steps // 10),
        ),
    )


def run(request: Request) -> Results:
    """Train (or go on), measure, and put side by side."""
    return run_at(request, TINY if request.quick else SMALL)


def run_at(request: Request, size: Size) -> Results:
    """The same at any size.

    Raises:
        ValueError: with `collect`, nothing has been trained.
    """
    runs = make_runs(request, size)
    carry_out(runs, request)
    started = [r for r in runs if (r.folder / LAB_FILE).exists() and checkpoint_steps(r.folder)]
    if not started:
        raise ValueError("no run has been trained yet: leave out --collect to train")
    losses = curves(started)
    losses = losses[losses["measure"].isin(("train_loss", *LOSSES))]
    fractions = pd.concat([measure(each, size) for each in started], ignore_index=True)
    last = losses[(losses["step"] == size.steps) & losses["measure"].isin(LOSSES)].assign(layer=-1, space="-")
    values = pd.concat([fractions, last], ignore_index=True)[[*KEYS, "seed", "value"]]
    return findings(values, losses, _settings(started[0], size), tuple(diverged(runs).values()))


def trained(run: Run, step: int | None = None) -> Encoder:
    """The encoder of a run, the final one or that of a kept step.

    Raises:
        FileNotFoundError: it is not there (says which steps are).
    """
    model = cast("Encoder", run.spec.build())
    load_weights(model, weights_of(run.folder, step))
    return model.eval()


def finished(run: Run) -> bool:
    return (run.folder / MODEL_FILE).exists()


@torch.no_grad()
def unselectable_read(model: Encoder, tokens: torch.Tensor) -> Iterator[tuple[int, str, float]]:
    """Layer, space, and share of unselectable keys among all keys of a context, mean over contexts (and heads).

    Spaces as of the decoders: what attention reads before its norm and after, and a head's keys.
    """
    places = {
        (layer, space): name
        for layer in range(LAYERS)
        for space, name in zip(
            (BEFORE, NORMALIZED, HEAD), (*read_places(layer), f"blocks.{layer}.attn.hook_k"), strict=True
        )
    }
    _, cache = model.run_with_cache(tokens, names_filter=list(places.values()), return_type=None)
    for (layer, space), name in places.items():
        keys = cache[name]
        yield layer, space, unselectable_share(keys.transpose(1, 2).flatten(0, 1) if space == HEAD else keys)


def _at(run: Run, size: Size, step: int) -> pd.DataFrame:
    assert isinstance(run.task, MaskedTextTask)
    found = unselectable_read(trained(run, step), run.task.text.held_out(size.contexts))
    return pd.DataFrame(found, columns=["layer", "space", "value"])


def measure(run: Run, size: Size) -> pd.DataFrame:
    """A row per kept step, layer and space of one run; kept beside it."""
    rows = []
    for step in checkpoint_steps(run.folder):
        name, weights = f"unselectable-{step:07d}", weights_of(run.folder, step)
        table = kept_beside(run.folder, name, weights, MEASURED, partial(_at, run, size, step))
        rows.append(table.assign(step=step, measure=FRACTION, seed=run.seed, **dict(run.keys)))
    return pd.concat(rows, ignore_index=True)


def _settings(run: Run, size: Size) -> dict[str, Any]:
    assert isinstance(run.task, MaskedTextTask)
    varied = ("norm", "norm_mlp", "norm_read", "d_model", "d_head", "d_mlp")
    return {
        "training": {k: v for k, v in vars(run.training).items() if k not in ("seed", "lr", "lr_end")} | {"lr": RATES},
        "model": {k: v for k, v in run.spec.to_dict().items() if k not in varied} | {"d_model": SHAPES},
        "data": run.task.identity,
        "contexts": size.contexts,
        "unigram_loss": run.task.unigram_loss(),
        "published": "decoders only (section 4.2: the experiment language_model); of an encoder no figure was at hand",
    }
