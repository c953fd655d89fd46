"""The models that ship with ln_probe, with more seeds: the same shape, text and schedule.

Seed 0 is the checkpoint that ships (`main` trained it); the others are trained here. Measured are the
held-out loss; what it rises by without the scaling, or the projection, of every norm (on every other held-out window,
with constants from those between); and, on the keys of held-out windows, the share that no query of a head can select:
as the model is, and with each norm's scaling replaced by a constant (its mean sigma over the other tokens than those at
position 0, which keep a separate constant).

Run as a module, it trains one model of the size that ships with ln_probe:

    python -m ln_probe.analyses.lab.language_model --norm layernorm --out runs/lm-layernorm TEXT [TEXT…]
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import cast

import pandas as pd
import torch
from matplotlib.figure import Figure

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model.published_language_model import FRACTION, LOSS, unselectable_share
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, Norm
from ln_probe.analyses.lab.results import (
    Results,
    contrasted,
    differences,
    panels,
    select,
    summarize_kinds,
)
from ln_probe.analyses.lab.run_folder import MODEL_FILE, kept_beside, load_run, save_model
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import Run, TrainConfig, carry_out, planned, train
from ln_probe.analyses.lab.transformer import Block, LabConfig, LabTransformer
from ln_probe.hooks.interventions import NoOpWarning, without


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
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch", type=int, default=BATCH, help="windows per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="to train on")
    for name, size in (("layers", 4), ("d-model", 128), ("heads", 16), ("vocab", D_VOCAB), ("context", N_CTX)):
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
        bias_unembed=False,
    )
    train(task, model, schedule(args.steps, args.batch, args.seed), args.out, device=args.device)
    if args.bundle:
        texts = " ".join(Path(t).name for t in args.text)
        command = (
            f"python -m ln_probe.analyses.lab.language_model --norm {args.norm} --steps {args.steps} "
            f"--batch {args.batch} --seed {args.seed} --device {args.device} --out runs/lm-{args.norm} {texts}"
        )
        bundle(args.out, args.bundle, task, command)


D_VOCAB, N_CTX = 1024, 256
STEPS, BATCH = 2000, 16
CONTEXTS = 16  # held-out windows whose keys are measured
SHIPPED_SEED = 0
MEASURED = 2  # version of what `_measured` measures
FROZEN = "unselectable_without_scaling"
COSTS = {"scaling": "delta_loss_no_scaling", "projection": "delta_loss_no_projection"}  # of every norm, nats per token
CONTRASTS = {  # the norm that has the term, and the one that lacks it
    "scaling, with projection": ("layernorm", "projection_only"),
    "scaling, without projection": ("scaling_only", "none"),
    "projection, with scaling": ("layernorm", "scaling_only"),
    "projection, without scaling": ("projection_only", "none"),
}
KEYS = ["norm", "layer", "measure"]
ALL_LAYERS = -1  # the `layer` of means over layers and of what is not measured layer by layer


def bundled_model(norm: str) -> LabConfig:
    """The shape that ships: without an unembedding bias, as GPT-2, so that its folder opens as a GPT2LMHeadModel."""
    return LabConfig(n_layers=4, d_model=128, n_heads=16, d_vocab=D_VOCAB, n_ctx=N_CTX, norm=norm, bias_unembed=False)


def schedule(steps: int, batch: int, seed: int) -> TrainConfig:
    """The shipped schedule; models are kept at its beginning, after a twentieth, a quarter and a half."""
    kept = tuple(int(steps * part) for part in (0, 0.05, 0.25, 0.5))
    return TrainConfig(steps=steps, batch=batch, seed=seed, save_at=kept)


def training(quick: bool, seed: int) -> TrainConfig:
    return schedule(20, 2, seed) if quick else schedule(STEPS, BATCH, seed)


def shipped(norm: str) -> Traversable:
    """The folder of the checkpoint that ships."""
    return files("ln_probe.data") / "checkpoints" / f"lm-{norm}"


def text(request: Request) -> TextTask:
    """The text of the request, which must be the one that the shipped checkpoints were trained on.

    Raises:
        ValueError: it is another, and the run is not a quick one.
    """
    task = TextTask(request.texts, D_VOCAB, N_CTX, tokenizer=request.tokenizer)
    wanted = json.loads((shipped("layernorm") / "lab.json").read_text(encoding="utf-8"))["data"]
    if task.identity != wanted and not request.quick:
        asked, got = (
            ", ".join(f"{f['name']} ({f['sha256'][:8]})" for f in t["files"]) for t in (wanted, task.identity)
        )
        raise ValueError(
            f"the bundled models were trained on {asked} and a tokenizer of these, got {got}: their other seeds need "
            "the same files in the same order and no --tokenizer; for other text there is language_model"
        )
    return task


def run(request: Request) -> Results:
    """Train a model per norm and seed, but for the seed that ships, and measure those that are finished."""
    task = text(request)
    every = planned(
        NORM_KINDS,
        request,
        keys=lambda norm: {"norm": norm},
        name=lambda norm: norm,
        task=lambda *_: task,
        spec=bundled_model,
        training=lambda _, seed: training(request.quick, seed),
    )
    runs = [run for run in every if request.quick or run.seed != SHIPPED_SEED]
    lost = carry_out(runs, request)
    values = pd.concat([*measured(runs, request, task)], ignore_index=True)
    return replace(findings(values, request.quick), diverged=lost)


def measured(runs: Sequence[Run], request: Request, task: TextTask) -> Iterator[pd.DataFrame]:
    """KEYS, `seed` and `value` of the shipped checkpoints and of every finished run (kept in its folder)."""
    yield pd.DataFrame(columns=[*KEYS, "seed", "value"])
    if not request.quick and SHIPPED_SEED in request.seeds:
        for norm in NORM_KINDS:
            with as_file(shipped(norm)) as folder:
                yield _measured(folder, request.out, task).assign(norm=norm, seed=SHIPPED_SEED)
    for one in runs:
        if one.finished:
            yield _measured(one.folder, one.folder, task).assign(**dict(one.keys), seed=one.seed)


def _measured(folder: Path, beside: Path, task: TextTask) -> pd.DataFrame:
    windows = task.held_out(task.valid_windows)
    return loss_and_keys(folder, beside, task, CONTEXTS, MEASURED, lambda m: costs(m, windows[::2], windows[1::2]))


def loss_and_keys(
    folder: Path,
    beside: Path,
    task: TextTask,
    contexts: int,
    version: int,
    more: Callable[[LabTransformer], Iterable[tuple[int, str, float]]] = lambda _: (),
) -> pd.DataFrame:
    """`layer, measure, value` of the model in a folder, with what `more` measures of it; kept beside it."""

    def made() -> pd.DataFrame:
        model = load_run(folder)
        loss = (ALL_LAYERS, LOSS, task.evaluate(model)[LOSS])
        rows = [loss, *more(model), *unselectable(model, task.held_out(contexts))]
        return pd.DataFrame(rows, columns=["layer", "measure", "value"])

    return kept_beside(beside, "measured", folder / MODEL_FILE, version, made)


@torch.no_grad()
def costs(model: LabTransformer, tokens: torch.Tensor, calibration: torch.Tensor) -> Iterator[tuple[int, str, float]]:
    """By how much the loss on `tokens` rises without a term of every norm, sigmas measured on `calibration`."""
    intact = model(tokens, return_type="loss").item()
    for term, measure in COSTS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoOpWarning)  # of norms that lack the term; others of the model have it
            with without(model, term, sites="all", tokens=calibration):
                cost = model(tokens, return_type="loss").item() - intact
        yield ALL_LAYERS, measure, cost


@torch.no_grad()
def unselectable(model: LabTransformer, tokens: torch.Tensor) -> Iterator[tuple[int, str, float]]:
    """Layer, measure, and share of unselectable keys per head and context (mean), intact and without scaling."""
    leaves = ("hook_resid_pre", "attn.hook_k", "ln1.hook_scale")
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith(leaves), return_type=None)
    for layer, block in enumerate(model.blocks):
        yield layer, FRACTION, unselectable_share(cache[f"blocks.{layer}.attn.hook_k"])
        if model.cfg.norm in SCALES:
            sigma = cache[f"blocks.{layer}.ln1.hook_scale"]
            constant = sigma.clone()
            constant[:, 0], constant[:, 1:] = sigma[:, 0].mean(), sigma[:, 1:].mean()
            keys = _keys(block, cache[f"blocks.{layer}.hook_resid_pre"], constant)
            yield layer, FROZEN, unselectable_share(keys)


def _keys(block: Block, resid: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Keys [batch pos head d_head] of a norm that divides by `divisor` instead of by its own scale."""
    norm, attention = cast("Norm", block.ln1), block.attn
    x = (resid - resid.mean(-1, keepdim=True) if norm.projects else resid) / divisor
    assert norm.w is not None
    assert norm.b is not None
    return attention._project(x * norm.w + norm.b, attention.W_K, attention.b_K)


def with_means(values: pd.DataFrame) -> pd.DataFrame:
    """KEYS, `seed` and `value`, and with them the means over layers."""
    layered = values[values["layer"] != ALL_LAYERS]
    means = layered.groupby(["norm", "measure", "seed"], as_index=False, sort=False)["value"].mean()
    return pd.concat([values, cast("pd.DataFrame", means).assign(layer=ALL_LAYERS)], ignore_index=True)


def findings(values: pd.DataFrame, quick: bool = False) -> Results:
    """Tables from KEYS, `seed`, `value`."""
    values = with_means(values)
    shares = values["measure"].isin((FRACTION, FROZEN))
    summary = summarize_kinds([(values[~shares], "mean"), (values[shares], "share")], KEYS)
    compared = contrasts(values)
    return Results(
        summary,
        tables={"seeds": values[values["layer"].ge(0) | ~shares], "contrasts": compared},
        figures={} if values.empty else {"seeds": draw(values)},
        settings={
            "model": {k: v for k, v in bundled_model("none").to_dict().items() if k != "norm"},
            "training": {k: v for k, v in vars(training(quick, 0)).items() if k != "seed"},
            "contexts": CONTEXTS,
            "seeds": sorted({int(seed) for seed in values["seed"]}),
        },
    )


def contrasts(values: pd.DataFrame) -> pd.DataFrame:
    """Differences within a seed: what projection and what scaling change, with the other term and without.

    Columns: `contrast, measure`, then as `contrasted`; Holm's p over all rows.
    """
    wide = select(values, layer=ALL_LAYERS).pivot(index=["measure", "seed"], columns="norm", values="value")
    return contrasted(differences(wide, CONTRASTS), ["contrast", "measure"])


def draw(values: pd.DataFrame) -> Figure:
    """Held-out loss, costs of the terms and unselectable keys of every seed, a row per norm."""
    shown = [m for m in (LOSS, *COSTS.values(), FRACTION, FROZEN) if m in set(values["measure"])]
    figure, axes = panels(len(shown), 2.7, 2.6, shared=True)
    for measure, ax in zip(shown, axes, strict=True):
        part = select(values, measure=measure, layer=ALL_LAYERS)
        ax.plot(part["value"], [NORM_KINDS.index(str(n)) for n in part["norm"]], "o", markersize=4)
        ax.set(xlabel=measure.replace("_", " "))
        ax.set_yticks(range(len(NORM_KINDS)), labels=NORM_KINDS)
    ax.invert_yaxis()
    return figure
