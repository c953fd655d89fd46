"""The published language models: d 8, four layers, four heads, and only the norm before attention varies.

After Brody, Alon & Yahav 2023, section 4.2: a GPT-2 with `ln_1` either LayerNorm or its projection alone (nothing
divides there, so `divisor` is 1), both without gain and bias. A third model divides the projected vectors by a constant
measured at initialization. Which share of the keys of a context can no query select: before the norm, after it, and as
a head sees them? Two sizes: one that a CPU trains in minutes, and the published one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from ln_probe.analyses.geometry.check import NAMES, UNSELECTABLE
from ln_probe.analyses.geometry.key_geometry import key_geometry
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, lines, panels, select, summarize_kinds
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import (
    Run,
    carry_out,
    checkpoint_steps,
    curves,
    finished,
    measured_once,
    planned,
    read_metrics,
    shared_settings,
    text_training,
    weights_of,
)
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

LAYERS, D_MODEL, HEADS = 4, 8, 4  # published
GPT2_VOCABULARY, GPT2_CONTEXT, GPT2_EMBED_STD = 50257, 1024, 0.02
CONTEXTS = 16  # held-out windows whose keys are measured
BEFORE, NORMALIZED, HEAD = "before the norm", "normalized", "head"
NORMS = (("layernorm", None, "-"), ("projection_only", 1.0, "1"), ("projection_only", None, "measured"))
KEYS = ["norm", "divisor", "step", "layer", "space", "measure"]
FRACTION, LOSS = "unselectable_fraction", "valid_loss"
_WITH, _WITHOUT = ("layernorm", "-"), ("projection_only", "1")
PUBLISHED = pd.DataFrame(  # tables 1 and 2, and figure 4 (test loss, one run each)
    [
        *((*_WITHOUT, layer, NORMALIZED, FRACTION, p) for layer, p in enumerate((0.510, 0.322, 0.347, 0.368))),
        *((*_WITH, layer, NORMALIZED, FRACTION, 0.0) for layer in range(LAYERS)),
        *((*_WITH, layer, BEFORE, FRACTION, p) for layer, p in enumerate((0.448, 0.285, 0.223, 0.261))),
        (*_WITHOUT, -1, "-", LOSS, 7.38),
        (*_WITH, -1, "-", LOSS, 7.33),
    ],
    columns=["norm", "divisor", "layer", "space", "measure", "published"],
)


# The authors' script sets no learning rate, and reads checkpoint 34000 with scaling and 50000 without.
PUBLISHED_HOW = (
    "tables 1 and 2; losses read off figure 4; one run each. Measured at 34,000 steps with scaling and at 50,000 "
    "without (the authors' script): scaling and training time are confounded there. Dropout 0.1; here none"
)


@dataclass(frozen=True)
class Size:
    """Everything that is not published shape: vocabulary, window, batch (windows), steps, learning rate."""

    d_vocab: int
    n_ctx: int
    batch: int
    steps: int
    lr: float = 2e-3
    embed_std: float = GPT2_EMBED_STD
    valid_windows: int = 64
    shares_kept: tuple[float, ...] = (0, 1 / 20, 1 / 4, 1 / 2)  # of the steps: models measured besides the last


SMALL = Size(d_vocab=1024, n_ctx=256, batch=4, steps=1500)
TINY = Size(d_vocab=512, n_ctx=128, batch=4, steps=300)
# Published: 50000 steps of 16 windows at 5e-5. A window takes a core a third of a second: fewer and larger steps.
FULL = Size(d_vocab=GPT2_VOCABULARY, n_ctx=GPT2_CONTEXT, batch=2, steps=3000, valid_windows=8)
# Measuring one model's keys takes longer than these steps: the first and the last.
FULL_TINY = Size(GPT2_VOCABULARY, GPT2_CONTEXT, batch=1, steps=40, valid_windows=2, shares_kept=(0,))


def published_model(norm: str, divisor: float | None, size: Size) -> LabConfig:
    """The published shape at a size of vocabulary and window."""
    return LabConfig(
        n_layers=LAYERS, d_model=D_MODEL, n_heads=HEADS, d_vocab=size.d_vocab, n_ctx=size.n_ctx, norm=norm,
        divisor=divisor, affine=False, bias_qkv=False, bias_unembed=False, act_fn="gelu_new", embed_std=size.embed_std,
    )  # fmt: skip


def make_runs(request: Request, size: Size) -> list[Run]:
    """A run per seed and norm; at GPT-2's vocabulary only the two that were published."""
    task = TextTask(
        request.texts, size.d_vocab, size.n_ctx, tokenizer=request.tokenizer, valid_windows=size.valid_windows
    )
    return planned(
        NORMS[: 2 if size.d_vocab == GPT2_VOCABULARY else None],
        request,
        keys=lambda cell: {"norm": cell[0], "divisor": cell[2]},
        name=lambda cell: cell[0] if cell[2] == "-" else f"{cell[0]}-divisor_{cell[2]}",
        task=lambda *_: task,
        spec=lambda cell: published_model(cell[0], cell[1], size),
        training=lambda _, seed: text_training(
            size,
            seed,
            size.lr,
            evaluate_every=max(1, size.steps // 20),
            save_at=tuple(int(share * size.steps) for share in size.shares_kept),
            state_every=max(1, size.steps // 100),
        ),
    )


def run(request: Request) -> Results:
    """At the size a CPU trains."""
    return _run(request, TINY if request.quick else SMALL)


def run_full(request: Request) -> Results:
    """At the published size, with fewer steps."""
    return _run(request, FULL_TINY if request.quick else FULL)


def _run(request: Request, size: Size) -> Results:
    runs = make_runs(request, size)
    lost = carry_out(runs, request)
    started = finished(runs, checkpoints=True)
    windows = cast(TextTask, started[0].task).held_out(CONTEXTS)
    fractions = unselectable_at_checkpoints(started, windows, key_places(range(LAYERS)))
    losses = select(curves(started), measure=["train_loss", LOSS]).assign(layer=-1, space="-")
    evaluated = [read_metrics(run.folder) for run in started]
    reached = min(int(table["step"].max()) if len(table) else 0 for table in evaluated)  # the last step of all runs
    at_kept = losses[losses["step"].isin({*fractions["step"], reached})]
    values = pd.concat([fractions, at_kept], ignore_index=True)[[*KEYS, "seed", "value"]]
    settings = shared_settings(started[0], ("norm", "divisor")) | {"contexts": CONTEXTS, "published": PUBLISHED_HOW}
    tables = analyse(values, losses, size.steps, size.d_vocab)
    return Results(tables, plot(tables), settings, lost)


def unselectable_share(keys: Float[Tensor, "batch pos d_model"] | Float[Tensor, "batch pos head d_head"]) -> float:
    """Share of keys that no query can select among those of their context, or of their context and head."""
    sets = keys.transpose(1, 2).flatten(0, 1) if keys.ndim == 4 else keys
    verdict = key_geometry(sets.detach().double().numpy(), margins=False).verdict
    return float((verdict == NAMES[UNSELECTABLE]).mean())


def key_places(layers: Iterable[int], spaces: Sequence[str] = (BEFORE, NORMALIZED, HEAD)) -> dict[tuple[int, str], str]:
    """Hook names of the keys of pre-norm layers, by layer and space."""
    leaves = {BEFORE: "hook_resid_pre", NORMALIZED: "ln1.hook_normalized", HEAD: "attn.hook_k"}
    return {(layer, space): f"blocks.{layer}.{leaves[space]}" for layer in layers for space in spaces}


@torch.no_grad()
def unselectable_keys(
    model: LabTransformer, tokens: Int[Tensor, "batch pos"], places: Mapping[tuple[int, str], str]
) -> Iterator[tuple[int, str, float]]:
    """Layer, space, and share of unselectable keys among those of each context (and head), mean over contexts.

    `places` are hook names of the keys, by layer and space.
    """
    _, cache = model.run_with_cache(tokens, names_filter=list(places.values()), return_type=None)
    for (layer, space), name in places.items():
        yield layer, space, unselectable_share(cache[name])


def unselectable_at_checkpoints(
    runs: Iterable[Run], tokens: Int[Tensor, "batch pos"], places: Mapping[tuple[int, str], str]
) -> pd.DataFrame:
    """`unselectable_keys` of every checkpoint of runs, a row per layer and space; kept in the run's folder."""

    def measured(run: Run, step: int) -> pd.DataFrame:
        shares = unselectable_keys(cast(LabTransformer, run.model(step)), tokens, places)
        return pd.DataFrame(shares, columns=["layer", "space", "value"])

    rows = []
    for run in runs:
        for step in checkpoint_steps(run.folder):
            name, weights = f"unselectable-{step:07d}", weights_of(run.folder, step)
            table = measured_once(run.folder, name, weights, partial(measured, run, step))
            rows.append(table.assign(step=step, measure=FRACTION, seed=run.seed, **dict(run.keys)))
    return pd.concat(rows, ignore_index=True)


def analyse(frame: pd.DataFrame, losses: pd.DataFrame, steps: int, d_vocab: int) -> dict[str, pd.DataFrame]:
    """Summary of KEYS, `seed`, `value`: shares and losses at the kept steps, beside what was published at the end.

    Losses of a small vocabulary do not compare with the published ones.
    """
    shares = frame["measure"] == FRACTION
    summary = summarize_kinds([(frame[shares], "share"), (frame[~shares], "mean")], KEYS, PUBLISHED)
    other = summary["step"] != steps
    if d_vocab != GPT2_VOCABULARY:
        other |= summary["measure"] == LOSS
    summary.loc[other, "published"] = float("nan")
    return {"summary": summary, "curves": losses, "seeds": frame}


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Unselectable fractions over training, a panel per layer."""
    rows = select(tables["summary"], measure=FRACTION).sort_values("step")
    figure, axes = panels(LAYERS, 3.75, 4.6, shared=True)
    named = rows.assign(line=rows["norm"] + ", " + rows["divisor"] + ": " + rows["space"])
    for layer, axis in enumerate(axes):
        lines(axis, select(named, layer=layer), "step", "line")
        axis.set(title=f"layer {layer}")
    axes[0].set_ylabel("unselectable keys (x: published)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return {"unselectable": figure}
