"""What scaling and projection before attention do to a language model: all four norms, over seeds.

`language_model_bundled`: the models that ship with ln_probe, with more seeds; seed 0 is the checkpoint that ships.
`fresh_seeds` and `fresh_seeds_long` were registered before their models were trained (commits fa50528 and 3c27a15): 2
layers, d 64, 8 heads; seeds 10 to 19 for 400 steps of 8 windows, and 20 to 29 with the bundled schedule. Outcomes:
held-out loss in nats/token; share of keys that no query of their head can select, mean over heads, layers and 8
windows. Primary contrasts, and no others: the main effects of scaling and of projection on both, paired t tests over
seeds after Holm's adjustment over these four. Hypotheses: scaling raises the loss and lowers the share; projection
changes neither, claimed only where the 90 % CI lies within the margin. A seed counts if its four models are finished.

A bundled model is made by `train(task, BUNDLED.spec(norm), BUNDLED.training(False, 0), run)` and `bundle(run, …)`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from matplotlib.figure import Figure

from ln_probe.analyses.lab import results
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model.published import FRACTION, LOSS, UNDECIDED, unselectable_share
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, Norm
from ln_probe.analyses.lab.runs import carry_out, measured_once, planned
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import MODEL_FILE, TrainConfig, load_run, save_model
from ln_probe.analyses.lab.transformer import Block, LabConfig, LabTransformer
from ln_probe.analyses.probes.statistics import holm
from ln_probe.hooks.edits import NoOpWarning, without

D_VOCAB, N_CTX = 1024, 256
STEPS, BATCH = 2000, 16
SHIPPED_SEED = 0
WITHOUT_SCALING = {FRACTION: "unselectable_without_scaling", UNDECIDED: "undecided_without_scaling"}
FROZEN = WITHOUT_SCALING[FRACTION]
SHARES = (*WITHOUT_SCALING, *WITHOUT_SCALING.values())
COSTS = {"scaling": "delta_loss_no_scaling", "projection": "delta_loss_no_projection"}  # of every norm, nats
CONTRASTS = {  # the norm that has the term, and the one that lacks it
    "scaling, with projection": ("layernorm", "projection_only"),
    "scaling, without projection": ("scaling_only", "none"),
    "projection, with scaling": ("layernorm", "scaling_only"),
    "projection, without scaling": ("projection_only", "none"),
}
# Of a registered outcome: its name, its unit, the factor from the tables to that unit, the equivalence margin.
OUTCOMES = {LOSS: ("Held-out loss", "nats", 1.0, 0.01), FRACTION: ("Unselectable keys", "points", 100.0, 1.0)}
KEYS = ["norm", "layer", "measure"]
ALL_LAYERS = -1  # the `layer` of means over layers and of what is not measured layer by layer


@dataclass(frozen=True)
class Design:
    """A shape, its seeds (the request's are counted from `first_seed`) and its schedule."""

    shape: Mapping[str, Any]
    first_seed: int
    steps: int
    batch: int
    warmup: int
    contexts: int  # held-out windows whose keys are measured

    def spec(self, norm: str) -> LabConfig:
        """A model whose norm before attention is of this kind."""
        return LabConfig(d_vocab=D_VOCAB, n_ctx=N_CTX, norm=norm, **self.shape)

    def training(self, quick: bool, seed: int) -> TrainConfig:
        """The schedule; models are kept at its beginning, after a twentieth, a quarter and a half."""
        if quick:
            return TrainConfig(steps=8, batch=2, warmup=2, seed=seed)
        kept = tuple(int(self.steps * part) for part in (0, 0.05, 0.25, 0.5))
        return TrainConfig(self.steps, self.batch, warmup=self.warmup, seed=seed, save_at=kept, state_every=100)


# The bundled models have no unembedding bias, as GPT-2, so that their folders open as a GPT2LMHeadModel.
BUNDLED = Design({"n_layers": 4, "d_model": 128, "n_heads": 16, "bias_unembed": False}, 0, STEPS, BATCH, 200, 16)
SHORT = Design({"n_layers": 2, "d_model": 64, "n_heads": 8}, 10, 400, 8, 40, 8)
LONG = replace(SHORT, first_seed=20, steps=STEPS, batch=BATCH, warmup=200)


def text(request: Request) -> TextTask:
    """The text of the request, which must be the one that the shipped checkpoints were trained on."""
    task = TextTask(request.texts, D_VOCAB, N_CTX, tokenizer=request.tokenizer)
    shipped = files("ln_probe.data") / "checkpoints" / "lm-layernorm" / "lab.json"
    wanted = json.loads(shipped.read_text(encoding="utf-8"))["data"]
    if task.identity != wanted and not request.quick:
        names = ", ".join(f"{f['name']} ({f['sha256'][:8]})" for f in wanted["files"])
        problem = f"the bundled models were trained on {names} and a tokenizer of these"
        raise ValueError(f"{problem}: give these files in this order, or run language_model for other text")
    return task


def run(request: Request) -> results.Results:
    """The bundled models with more seeds."""
    return _run(request, BUNDLED, analyse)


def run_fresh(request: Request) -> results.Results:
    """Ten fresh seeds, registered."""
    return _run(request, SHORT, analyse_registered)


def run_long(request: Request) -> results.Results:
    """Ten others with the bundled models' whole schedule."""
    return _run(request, LONG, analyse_registered)


def _run(
    request: Request, design: Design, analyse: Callable[[pd.DataFrame], dict[str, pd.DataFrame]]
) -> results.Results:
    """Train the four models of each seed and measure the seeds whose four are finished."""
    task, bundled = text(request), design is BUNDLED
    runs = planned(
        NORM_KINDS, replace(request, seeds=tuple(design.first_seed + seed for seed in request.seeds)),
        keys=lambda norm: {"norm": norm}, task=lambda *_: task, spec=design.spec,
        training=lambda _, seed: design.training(request.quick, seed),
    )  # fmt: skip
    shipped = bundled and not request.quick and SHIPPED_SEED in request.seeds
    runs = [run for run in runs if not (shipped and run.seed == SHIPPED_SEED)]
    lost = carry_out(runs, request)
    parts = [pd.DataFrame(columns=[*KEYS, "seed", "value"])]
    if shipped:
        for norm in NORM_KINDS:
            with as_file(files("ln_probe.data") / "checkpoints" / f"lm-{norm}") as folder:
                measured = loss_and_keys(folder, request.out, task, design)
                parts.append(measured.assign(norm=norm, seed=SHIPPED_SEED))
    done = [seed for seed in {run.seed: None for run in runs} if all(r.finished for r in runs if r.seed == seed)]
    for one in (run for run in runs if run.seed in done):
        measured = loss_and_keys(one.folder, one.folder, task, design)
        parts.append(measured.assign(norm=one.keys["norm"], seed=one.seed))
    tables = analyse(pd.concat(parts, ignore_index=True))
    settings = {
        "model": {k: v for k, v in design.spec("none").to_dict().items() if k != "norm"},
        "training": {k: v for k, v in vars(design.training(request.quick, 0)).items() if k != "seed"},
        "contexts": design.contexts,
    }
    return results.Results(tables, plot(tables), settings, lost)


def loss_and_keys(folder: Path, beside: Path, task: TextTask, design: Design) -> pd.DataFrame:
    """`layer, measure, value` of the model in a folder; kept beside it."""

    def measure() -> pd.DataFrame:
        model = load_run(folder)
        windows = task.held_out(task.valid_windows)
        more = costs(model, windows[::2], windows[1::2]) if design is BUNDLED else ()
        keys = unselectable(model, task.held_out(design.contexts))
        rows = [(ALL_LAYERS, LOSS, task.evaluate(model)[LOSS]), *more, *keys]
        return pd.DataFrame(rows, columns=["layer", "measure", "value"])

    return measured_once(beside, "measured", folder / MODEL_FILE, measure)


@torch.no_grad()
def costs(model: LabTransformer, tokens: torch.Tensor, calibration: torch.Tensor) -> Iterator[tuple[int, str, float]]:
    """By how much the loss on `tokens` rises without a term of every norm, sigmas measured on `calibration`."""
    intact = model(tokens, return_type="loss").item()
    for term, measure in COSTS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NoOpWarning)  # of norms that lack the term
            with without(model, term, sites="all", tokens=calibration):
                cost = model(tokens, return_type="loss").item() - intact
        yield ALL_LAYERS, measure, cost


@torch.no_grad()
def unselectable(model: LabTransformer, tokens: torch.Tensor) -> Iterator[tuple[int, str, float]]:
    """Layer, measure, and share of unselectable keys per head and context (mean), intact and without scaling."""
    leaves = ("hook_resid_pre", "attn.hook_k", "ln1.hook_scale")
    _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith(leaves), return_type=None)
    for layer, block in enumerate(model.blocks):
        for measure, share in unselectable_share(cache[f"blocks.{layer}.attn.hook_k"]).items():
            yield layer, measure, share
        if model.cfg.norm in SCALES:
            sigma = cache[f"blocks.{layer}.ln1.hook_scale"]
            constant = sigma.clone()
            constant[:, 0], constant[:, 1:] = sigma[:, 0].mean(), sigma[:, 1:].mean()
            keys = _keys(block, cache[f"blocks.{layer}.hook_resid_pre"], constant)
            for measure, share in unselectable_share(keys).items():
                yield layer, WITHOUT_SCALING[measure], share


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


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary, and what projection and scaling change within a seed, with the other term and without.

    Holm's p is over all rows of `contrasts`.
    """
    values = with_means(frame)
    wide = results.select(values, layer=ALL_LAYERS).pivot(index=["measure", "seed"], columns="norm", values="value")
    contrasts = results.contrasted(results.differences(wide, CONTRASTS), ["contrast", "measure"])
    return {"summary": results.summarize(values, KEYS, shares=SHARES), "seeds": frame, "contrasts": contrasts}


def analyse_registered(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary, and the four primary contrasts with Holm's p over these and the verdict on equivalence.

    `effects`: as `effect_rows`, `p_holm`, and `equivalent`: whether the 90 % CI lies within the margin.
    """
    values = with_means(frame)
    rows: list[dict[str, Any]] = []
    for measure, (title, unit, factor, margin) in OUTCOMES.items():
        outcomes = results.select(values, measure=measure, layer=ALL_LAYERS)
        per_seed = results.main_effects(outcomes) if len(values) else {}
        for row in results.effect_rows(per_seed, factor):
            rows.append({"measure": measure, "outcome": title, "unit": unit, **row, "margin": margin})
    effects = pd.DataFrame(rows)
    if rows:
        effects = effects.assign(p_holm=holm(effects["p"].to_numpy()), equivalent=effects["bound"] < effects["margin"])
    return {"summary": results.summarize(values, KEYS, shares=SHARES), "seeds": frame, "effects": effects}


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Held-out loss, costs of the terms and unselectable keys of every seed, a row per norm."""
    values = results.select(with_means(tables["seeds"]), layer=ALL_LAYERS)
    shown = [m for m in (LOSS, *COSTS.values(), FRACTION, FROZEN) if m in set(values["measure"])]
    figure, axes = results.panels(max(1, len(shown)), 2.7, 2.6, shared=True)
    for measure, ax in zip(shown, axes, strict=False):
        part = results.select(values, measure=measure)
        ax.plot(part["value"], [NORM_KINDS.index(str(n)) for n in part["norm"]], "o", markersize=4)
        ax.set(xlabel=measure.replace("_", " "))
        ax.set_yticks(range(len(NORM_KINDS)), labels=NORM_KINDS)
    return {"seeds": figure}


def bundle(run: Path, out: Path, task: TextTask, command: str) -> None:
    """Copy a finished run as a checkpoint to ship: float16 weights and the recipe, with the loss after rounding."""
    out.mkdir(parents=True, exist_ok=True)
    save_model(load_run(run), out / "model.safetensors", torch.float16)
    for name in ("lab.json", "tokenizer.json", "metrics.jsonl"):
        (out / name).write_bytes((run / name).read_bytes())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    recipe = {
        "command": command, "stored_as": "float16", "train_loss": last["train_loss"], **task.evaluate(load_run(out)),
        "training_seconds": last["seconds"],
    }  # fmt: skip
    (out / "recipe.json").write_text(json.dumps(recipe, indent=1) + "\n")
