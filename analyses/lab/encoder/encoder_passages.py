"""What leaving out a term costs where an encoder is fine-tuned: which of the given books is a passage from?

After Brody, Alon & Yahav 2023, who fine-tune on SST-2; here the task is made of the texts themselves (`passages`). The
encoders are those of the experiment `encoder`, trained first where they are not there yet; each is fine-tuned with the
norm it was trained with, all of it, and the accuracy is compared with LayerNorm's of the same seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.encoder import encoder
from ln_probe.analyses.lab.encoder.encoder import Size, finished
from ln_probe.analyses.lab.encoder.encoder_findings import LEFT_OUT, WHOLE
from ln_probe.analyses.lab.encoder.encoder_model import EncoderConfig
from ln_probe.analyses.lab.encoder.masked_text import MaskedTextTask
from ln_probe.analyses.lab.encoder.passages import ClassifierSpec, PassagesTask
from ln_probe.analyses.lab.intervals import doubt
from ln_probe.analyses.lab.results import Results, contrasted, summarize
from ln_probe.analyses.lab.run_folder import MODEL_FILE
from ln_probe.analyses.lab.runs import Run, carry_out, curves, diverged
from ln_probe.analyses.lab.training import TrainConfig

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ln_probe.analyses.lab.experiments import Request

KEYS = ["shape", "norm", "step", "measure"]
ACCURACY, LOSS = "valid_accuracy", "valid_loss"


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


def make_runs(request: Request, pretrained: list[Run], tuning: Tuning) -> list[Run]:
    """A run for each finished encoder, all of a seed on the same passages."""
    if not pretrained:
        return []
    masked = pretrained[0].task
    assert isinstance(masked, MaskedTextTask)
    task = PassagesTask(request.texts, masked.text, tuning.length, tuning.held_out)
    made = []
    for run in pretrained:
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


def run(request: Request) -> Results:
    """Train encoders, fine-tune them (or go on), and compare."""
    return run_at(request, encoder.TINY if request.quick else encoder.SMALL, TINY if request.quick else FULL)


def run_at(request: Request, size: Size, tuning: Tuning) -> Results:
    """The same at any size.

    Raises:
        ValueError: fewer than two texts; with `collect`, nothing has been trained.
    """
    if len(request.texts) < 2:
        raise ValueError(f"passages are told apart by their book: give at least 2 texts, not {len(request.texts)}")
    before = encoder.make_runs(request, size, [cell for cell in encoder.CELLS if cell[1] in TUNED])
    carry_out(before, request)
    runs = make_runs(request, [r for r in before if finished(r)], tuning)
    carry_out(runs, request)
    done = [r for r in runs if finished(r)]
    if not done:
        raise ValueError("no run is finished yet: leave out --collect to train")
    values = curves(done)
    values = values[values["measure"].isin((ACCURACY, LOSS))][[*KEYS, "seed", "value"]]
    task = done[0].task
    assert isinstance(task, PassagesTask)
    settings = {
        "training": {k: v for k, v in vars(done[0].training).items() if k not in ("seed", "lr")}
        | {"lr": {shape: rate * RATE_SHARE for shape, rate in encoder.RATES.items()}},
        "encoder": vars(size),
        "data": task.identity,
        "counted_accuracy": task.counted_accuracy(),
        "published": "SST-2: another task, whose figures were not at hand",
    }
    lost = (*diverged(before).values(), *diverged(runs).values())
    return findings(values.reset_index(drop=True), settings, lost)


def findings(values: pd.DataFrame, settings: Mapping[str, Any], lost: tuple[str, ...] = ()) -> Results:
    """Tables, a figure and sentences from KEYS, `seed`, `value`."""
    share = values["measure"] == ACCURACY
    summary = pd.concat([summarize(values[share], KEYS, kind="share"), summarize(values[~share], KEYS)])
    summary = summary.reset_index(drop=True)
    last = values[(values["step"] == settings["training"]["steps"]) & share]
    differences = costs(last)
    return Results(
        summary=summary,
        tables={"values": values, "effects": differences},
        figures={"accuracy": _draw(last)},
        conclusions=tuple(_sentences(summary, differences, settings)),
        settings={**settings, "seeds": sorted({int(s) for s in values["seed"]})},
        diverged=lost,
    )


def costs(last: pd.DataFrame) -> pd.DataFrame:
    """Accuracy minus LayerNorm's of the same seed and shape, with intervals and Holm's p over all rows."""
    same = ["shape", "step", "measure", "seed"]
    pairs = last.merge(last[last["norm"] == WHOLE][[*same, "value"]], on=same, suffixes=("", "_whole"))
    pairs = pairs[pairs["norm"] != WHOLE]
    if pairs.empty:
        return pd.DataFrame(columns=KEYS)
    return contrasted(pairs.assign(value=pairs["value"] - pairs["value_whole"]), KEYS, (-1.0, 1.0))


def _sentences(summary: pd.DataFrame, differences: pd.DataFrame, settings: Mapping[str, Any]) -> Iterator[str]:
    last = summary[(summary["step"] == settings["training"]["steps"]) & (summary["measure"] == ACCURACY)]
    books = len(settings["data"]["books"])
    for row in last[last["norm"] == WHOLE].to_dict("records"):
        yield (
            f"{row['shape']}, LayerNorm: {_interval(row)} % of held-out passages of {settings['data']['length']} "
            f"tokens are given to the right one of {books} books (seeds: {row['seeds']}). By chance it would be "
            f"{100 / books:.0f} %; token counts alone give {100 * settings['counted_accuracy']:.1f} %."
        )
    for row in differences.to_dict("records"):
        clear = doubt(row["p_holm"], row["seeds"])
        yield (
            f"{row['shape']}: leaving out {LEFT_OUT[row['norm']]} changes the accuracy by {_interval(row, sign=True)} "
            f"points (seeds: {row['seeds']}){clear}."
        )


def _interval(row: Mapping[Any, Any], sign: bool = False) -> str:
    plus = "+" if sign else ""
    center, low, high = (f"{100 * float(row[c]):{plus}.1f}" for c in ("mean", "ci_low", "ci_high"))
    return center if np.isnan(row["ci_low"]) else f"{center} [{low}, {high}]"


def _draw(last: pd.DataFrame) -> Figure:
    """Accuracy of every seed, a panel per shape: lines join what is paired."""
    from matplotlib.figure import Figure as NewFigure

    shapes = list(dict.fromkeys(last["shape"]))
    figure = NewFigure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots(1, max(1, len(shapes)), squeeze=False)[0]
    for ax, shape in zip(axes, shapes, strict=False):
        wide = last[last["shape"] == shape].pivot(index="seed", columns="norm", values="value")
        for seed, line in wide.iterrows():
            ax.plot(list(wide.columns), line, "o-", label=f"seed {seed}")
        ax.set(title=shape, ylabel="held-out accuracy")
        ax.tick_params(labelsize=7)
    axes[-1].legend(fontsize=7)
    return figure
