"""What happens in a language model whose norms are removed: fine-tuned without them, beside the same with them.

The bundled lm-layernorm is trained on while its norms are replaced one by one by constants, their own mean sigmas
(position 0 apart at first: `replaceable_norm`), after Heimersheim 2024, "You can remove GPT2's LayerNorm by
fine-tuning", and Baroni et al. 2025. The same batches with norms kept are the control: what differs between the two is
the norms, what both have in common is the training. Each seed draws its own batches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.lab.intervals import doubt, holm
from ln_probe.analyses.lab.removal.removal_measures import LOSS, measures
from ln_probe.analyses.lab.removal.replaceable_norm import (
    ONE_CONSTANT,
    TWO_CONSTANTS,
    Schedule,
    Start,
    plain,
    replaceable_norms,
)
from ln_probe.analyses.lab.results import Results, contrasted, summarize
from ln_probe.analyses.lab.run_folder import LAB_FILE, MODEL_FILE, kept_beside, weights_of
from ln_probe.analyses.lab.runs import Run, carry_out, curves, diverged, planned
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.training import TrainConfig, load_weights, save_model
from ln_probe.analyses.lab.transformer import LabTransformer
from ln_probe.analyses.probes.text import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ln_probe.analyses.lab.experiments import Request

START = "lm-layernorm"
BEFORE, AT_ONCE, KEPT, REMOVED = "before", "removed at once", "kept", "removed"
KEYS = ["model", "measure"]
MEASURED = 1  # version of what `measures` measures
SENTENCES = {  # measures that are spoken of, and how
    LOSS: "held-out loss (nats per token)",
    "entropy_ratio": "attention entropy over its largest possible",
    "sink_rate": "share of queries with over 0.3 of their attention on position 0",
    "attention_on_first": "attention on position 0",
    "unselectable_head": "share of keys that no query can select, as heads see them",
    "unselectable_normalized": "the same of norm outputs",
}


@dataclass(frozen=True)
class Size:
    """How long, and how fast norms go. batch: windows a step; contexts: held-out windows that are measured."""

    steps: int
    batch: int
    schedule: Schedule
    valid_windows: int = 64
    contexts: int = 16


# 500 steps of 2048 tokens are an eighth of what the model was trained on, about four minutes of one core a run. A norm
# goes every 20 steps, so that the running means of the ones behind it (`MEMORY`) follow.
FULL = Size(500, 8, Schedule(20, 20, 10))
TINY = Size(60, 2, Schedule(6, 4, 2), valid_windows=8, contexts=2)


def start_folder() -> Path:
    """The bundled checkpoint that norms are taken out of."""
    return Path(str(files("ln_probe"))) / "data" / "checkpoints" / START


@dataclass(frozen=True)
class Step:
    """A batch, and the step it belongs to."""

    step: int
    windows: Int[Tensor, "batch pos"]


class Removal:
    """Text to train on, with the norms going as the schedule says (None: they stay).

    Args:
        text: the windows.
        schedule: when norms are replaced.
    """

    name = "remove_norm"

    def __init__(self, text: TextTask, schedule: Schedule | None) -> None:
        self.text, self.schedule = text, schedule

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.text.identity, "removal": asdict(self.schedule) if self.schedule else None}

    def batch(self, step: int, size: int, seed: int) -> Step:
        return Step(step, self.text.batch(step, size, seed))

    def loss(self, model: nn.Module, batch: Step) -> Float[Tensor, ""]:
        assert isinstance(model, LabTransformer)
        if self.schedule is not None:
            self.schedule.set_stages(replaceable_norms(model), batch.step)
        return self.text.loss(model, batch.windows)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.text.evaluate(model)

    def write_files(self, out: Path) -> None:
        self.text.write_files(out)


def training(size: Size, seed: int) -> TrainConfig:
    """A rate between those that the model was last trained with (1e-4) and trained at most with (1e-3)."""
    return TrainConfig(
        steps=size.steps,
        batch=size.batch,
        lr=5e-4,
        lr_end=5e-5,
        warmup=size.steps // 20,
        clip=1.0,
        seed=seed,
        evaluate_every=max(1, size.steps // 20),
        state_every=max(1, size.steps // 20),
    )


def make_runs(request: Request, size: Size, start: Path) -> list[Run]:
    """A run with norms removed and one with norms kept for each seed.

    Raises:
        ValueError: a tokenizer is given: the model has its own.
    """
    if request.tokenizer is not None:
        raise ValueError(f"{START} reads text with its own tokenizer: leave out --tokenizer {request.tokenizer}")
    shape = Start(start).build().cfg
    text = TextTask(request.texts, shape.d_vocab, shape.n_ctx, tokenizer=start, valid_windows=size.valid_windows)
    return planned(
        (REMOVED, KEPT),
        request,
        keys=lambda cell: {"model": cell},
        name=lambda cell: cell,
        task=lambda cell, _: Removal(text, size.schedule if cell == REMOVED else None),
        spec=lambda _: Start(start),
        training=lambda _, seed: training(size, seed),
    )


def run(request: Request) -> Results:
    """Fine-tune (or go on), measure, and write each model without norms as a folder that `load_model` takes."""
    return run_from(request, TINY if request.quick else FULL, start_folder())


def run_from(request: Request, size: Size, start: Path) -> Results:
    """The same from any lab run whose norms are LayerNorms."""
    runs = make_runs(request, size, start)
    carry_out(runs, request)
    finished = [r for r in runs if (r.folder / MODEL_FILE).exists()]
    if not finished:
        raise ValueError("no run is finished yet: leave out --collect to train")
    for each in finished:
        if each.keys["model"] == REMOVED:
            write_plain(each, request.out / "models" / f"removed-seed{each.seed}")
    return findings(runs, finished, size, start)


def trained(run: Run) -> LabTransformer:
    """The final model of a run, as an ordinary lab model."""
    model = run.spec.build()
    assert isinstance(model, LabTransformer)
    load_weights(model, run.folder / MODEL_FILE)
    return plain(model)


def write_plain(run: Run, out: Path) -> None:
    """A finished run's model as a lab run's folder, whose norms are constants; written once."""
    if (out / MODEL_FILE).exists():
        return
    model = trained(run)
    about = json.loads((run.folder / LAB_FILE).read_text()) | {"model": model.cfg.to_dict()}
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / LAB_FILE, (json.dumps(about, indent=1) + "\n").encode())
    for name in ("tokenizer.json", "metrics.jsonl"):
        write_atomically(out / name, (run.folder / name).read_bytes())
    save_model(model, out / MODEL_FILE)


# ------------------------------------------------------------------------------------------------------- measurement


def at_once(start: Path, task: Removal, size: Size, seed: int, stage: int) -> LabTransformer:
    """The starting model with all norms replaced and nothing trained; constants from the seed's first ten batches."""
    model = Start(start).build()
    norms = replaceable_norms(model)
    for step in range(10):
        with torch.enable_grad():  # a norm follows its sigmas where it trains
            model(task.text.batch(step, size.batch, seed), return_type=None)
    for norm in norms:
        norm.stage.fill_(stage)
    return model.eval()


def measured(run: Run, size: Size) -> pd.DataFrame:
    """What a finished run has become; kept beside it."""

    def made() -> pd.DataFrame:
        assert isinstance(run.task, Removal)
        return pd.DataFrame(measures(trained(run), run.task.text, size.contexts), columns=["measure", "value"])

    table = kept_beside(run.folder, "measures", weights_of(run.folder), MEASURED, made)
    return table.assign(model=run.keys["model"], seed=run.seed)


def findings(runs: Sequence[Run], finished: Sequence[Run], size: Size, start: Path) -> Results:
    """Tables, plots and sentences from the runs that are finished."""
    task = runs[0].task
    assert isinstance(task, Removal)
    seeds = sorted({run.seed for run in finished})
    before = pd.DataFrame(measures(plain(Start(start).build()), task.text, size.contexts), columns=["measure", "value"])
    rows = [measured(run, size) for run in finished]
    rows += [before.assign(model=BEFORE, seed=seed) for seed in seeds]  # the same model, whatever the seed
    for seed in seeds:
        for stage, measure in ((TWO_CONSTANTS, f"{LOSS}_position_0_apart"), (ONE_CONSTANT, LOSS)):
            loss = task.evaluate(at_once(start, task, size, seed, stage))["valid_loss"]
            rows.append(pd.DataFrame([{"model": AT_ONCE, "seed": seed, "measure": measure, "value": loss}]))
    settings = {
        "start": START if start == start_folder() else str(start),
        "norms": len(replaceable_norms(Start(start).build())),
        "training": vars(training(size, 0)) | {"seed": None},
        "schedule": asdict(size.schedule),
        "contexts": size.contexts,
        "data": task.text.identity,
        "seeds": seeds,
        "finished": [run.name for run in finished],
    }
    values = pd.concat(rows, ignore_index=True)[[*KEYS, "seed", "value"]]
    results = results_of(values, curves(runs), settings, tuple(diverged(runs).values()))
    before_here = json.loads((start / LAB_FILE).read_text(encoding="utf-8"))["data"]
    if task.text.identity["files"] == before_here["files"]:
        return results
    warning = (
        "The text is not the one that the model was trained on: what is held out here it may have been trained on."
    )
    return replace(results, conclusions=(warning, *results.conclusions))


def results_of(
    values: pd.DataFrame, losses: pd.DataFrame, settings: Mapping[str, Any], diverged: tuple[str, ...] = ()
) -> Results:
    """The results of the values of every seed and the curves, as they are kept."""
    one = values["model"].eq(BEFORE) & values["seed"].ne(values["seed"].min())  # it is one model, whatever the seed
    differences, summary = paired(values), summarize(values[~one], KEYS)
    return Results(
        summary=summary,
        tables={"effects": differences, "seeds": values, "curves": losses},
        figures={"losses": _plot(losses, Schedule(**settings["schedule"]), int(settings["norms"]))},
        conclusions=tuple(_sentences(summary, differences)),
        settings=dict(settings),
        diverged=diverged,
    )


def paired(values: pd.DataFrame) -> pd.DataFrame:
    """Differences of the same seed: what removing does beside keeping (`removed - kept`), and each beside the start.

    Tested, with Holm's p, are those that sentences speak of.
    """
    wide = values.pivot(index=["measure", "seed"], columns="model", values="value")
    made = []
    for left, right in ((REMOVED, KEPT), (REMOVED, BEFORE), (KEPT, BEFORE)):
        if {left, right} <= set(wide.columns):
            long = (wide[left] - wide[right]).dropna().rename("value").reset_index()
            made.append(long.assign(difference=f"{left} - {right}"))
    if not made or not sum(map(len, made)):
        return pd.DataFrame(columns=["difference", "measure"])
    found = contrasted(pd.concat(made, ignore_index=True), ["difference", "measure"])
    told = (found["difference"] == f"{REMOVED} - {KEPT}") & found["measure"].isin(SENTENCES)
    p = found["p"].where(told)
    return found.assign(p=p, p_holm=holm(p.to_numpy(float)))


def _sentences(summary: pd.DataFrame, differences: pd.DataFrame) -> Iterator[str]:
    mean = {(r["model"], r["measure"]): r["mean"] for r in summary.to_dict("records")}
    effect = {r["measure"]: r for r in differences.to_dict("records") if r.get("difference") == f"{REMOVED} - {KEPT}"}
    for measure, name in SENTENCES.items():
        row = effect.get(measure)
        if row is None:
            continue
        several = row["seeds"] > 1
        interval = f" [{row['ci_low']:+.3g}, {row['ci_high']:+.3g}]" if several else ""
        told = f", Holm {row['p_holm']:.2g}" if several else ""
        yield (
            f"{name[0].upper()}{name[1:]}: {mean[BEFORE, measure]:.3f} before, {mean[KEPT, measure]:.3f} fine-tuned "
            f"with norms, {mean[REMOVED, measure]:.3f} without; difference {row['mean']:+.3g}{interval} "
            f"({counted(row['seeds'], 'seed')}{told}){doubt(row['p_holm'], row['seeds'])}."
        )
    if (AT_ONCE, LOSS) in mean:
        yield (
            f"All norms replaced at once, without training: a loss of {mean[AT_ONCE, LOSS]:.3f} "
            f"({mean[AT_ONCE, f'{LOSS}_position_0_apart']:.3f} with a constant of its own for position 0)."
        )


def _plot(losses: pd.DataFrame, schedule: Schedule, norms: int) -> Figure:
    """Held-out loss over fine-tuning, a line per seed: norms removed and kept."""
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(7, 4.2), layout="constrained")
    ax = figure.subplots()
    rows = losses[losses["measure"] == "valid_loss"]
    for (model, _), one in rows.groupby(["model", "seed"]):
        label = str(model) if one["seed"].iloc[0] == rows["seed"].min() else None
        ax.plot(one["step"], one["value"], color="C0" if model == KEPT else "C1", label=label)
    ax.axvspan(schedule.first, schedule.replaced(norms), color="0.9", label="norms go, one by one")
    ax.axvspan(schedule.replaced(norms), schedule.over(norms), color="0.95", label="position 0 joins")
    ax.set(xlabel="step", ylabel="held-out loss, nats per token")
    ax.legend()
    return figure
