"""Do single-layer QRNNs reach the published accuracy at the training length, and how far do they then go?

`counting` trains every network with 10,000 updates, after which a QRNN is points short of its published accuracy where
it was trained (Merrill et al. 2020, section 5: up to 100 epochs of 100,000 words, until 10 epochs bring nothing). An
order of networks beyond the training length means little if they were not trained equally well. So QRNN and
QRNN+ are trained ten times as long here, at two learning rates, and their accuracy at longer words is read where they
first reach the published accuracy at 64, and at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.counting import counting
from ln_probe.analyses.lab.counting.counting import PUBLISHED, published_table
from ln_probe.analyses.lab.counting.counting_tasks import PUBLISHED_LENGTHS, TRAIN_LENGTH, PrefixTask, constant_answers
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, panels, summarize
from ln_probe.analyses.lab.train import ModelSpec, TrainConfig, carry_out, curves, planned

TASKS, MODELS = ("L5", "anbnaS"), ("qrnn", "qrnn+")
RATES = (1e-3, 1e-2)  # Adam's default, and what `counting` takes
UPDATES, EVALUATIONS = 100_000, 20
PUBLISHED_UPDATES = 100 * 100_000 // 16  # 100 epochs of 100,000 words in batches of 16: the most it can have been
KEYS = ("task", "model", "lr")
AT_END, WHEN_REACHED = "at the end", "when the published accuracy is first reached"


@dataclass(frozen=True)
class Cell:
    task: str
    model: str
    lr: float

    def spec(self) -> ModelSpec:
        return counting.Cell(self.task, self.model).spec()


def grid(quick: bool) -> tuple[Cell, ...]:
    if quick:
        return tuple(Cell("L5", model, RATES[1]) for model in MODELS)
    return tuple(Cell(task, model, lr) for lr in RATES for task in TASKS for model in MODELS)


def training(quick: bool, seed: int, lr: float) -> TrainConfig:
    """The schedule of `counting` with more updates, evaluated on the way."""
    updates = 2000 if quick else UPDATES
    usual = counting.training(counting.Cell(TASKS[0], MODELS[0]), quick, seed)
    return replace(usual, steps=updates, lr=lr, evaluate_every=updates // EVALUATIONS, state_every=5000)


def run(request: Request) -> Results:
    """Train the missing runs of the grid and read the accuracy beyond where the published one is reached."""
    runs = planned(
        grid(request.quick),
        request,
        name=lambda cell: f"{cell.task}-{cell.model}-lr{cell.lr:g}",
        task=lambda cell, _: PrefixTask(cell.task, PUBLISHED_LENGTHS[:3] if request.quick else PUBLISHED_LENGTHS),
        training=lambda cell, seed: training(request.quick, seed, cell.lr),
    )
    lost = carry_out(runs, request)
    table = curves(runs)
    table = table[table["measure"].str.startswith("accuracy_").astype(bool)].reset_index(drop=True)
    return replace(findings(table, request.quick), diverged=lost)


def findings(values: pd.DataFrame, quick: bool = False) -> Results:
    """Tables from the accuracies of all evaluations: KEYS, `seed`, `step`, `measure`, `value`."""
    done = values.groupby([*KEYS, "seed"])["step"].transform("max") >= training(quick, 0, RATES[0]).steps
    read = readings(values[done])
    at_end = read[read["read"] == AT_END]
    summary = summarize(at_end, [*KEYS, "measure"], published_table(), kind="share")
    summary = summary.merge(constant_answers(sorted(set(values["task"]))), on=["task", "measure"], how="left")
    return Results(
        summary,
        tables={"values": values, "readings": read},
        figures={} if values.empty else {"budget": draw(values)},
        settings={
            "training": {f"lr {lr:g}": vars(training(quick, 0, lr)) for lr in RATES},
            "published_updates": f"at most {PUBLISHED_UPDATES} (100 epochs of 100,000 words; batches of 16 are ours)",
            "seeds": sorted({int(seed) for seed in values["seed"]}),
        },
    )


def readings(values: pd.DataFrame) -> pd.DataFrame:
    """Accuracies of every run at the end, and where it first reached the published accuracy at the training length.

    Returns:
        KEYS, `seed`, `read` (AT_END or WHEN_REACHED; no row of the second if it was not reached), `step`, `measure`,
        `value`.
    """
    trained = f"accuracy_{TRAIN_LENGTH}"
    found = []
    for (task, model, _, _), run in values.groupby([*KEYS, "seed"], sort=False):
        found.append(run[run["step"] == run["step"].max()].assign(read=AT_END))
        there = run[(run["measure"] == trained) & (run["value"] >= PUBLISHED[str(task), str(model)][0] / 100)]
        if len(there):
            found.append(run[run["step"] == there["step"].min()].assign(read=WHEN_REACHED))
    columns = [*KEYS, "seed", "read", "step", "measure", "value"]
    return pd.concat(found, ignore_index=True)[columns] if found else pd.DataFrame(columns=columns)


def draw(values: pd.DataFrame) -> Figure:
    """Accuracy at the training length and at the longest over updates, a panel per task and model."""
    lengths = sorted({int(m.removeprefix("accuracy_")) for m in values["measure"]})
    groups = list(values.groupby(["task", "model"], sort=False))
    figure, axes = panels(len(groups), 4.2, 3.4)
    for ((task, model), part), ax in zip(groups, axes, strict=True):
        for style, length in zip(("-", ":"), (lengths[0], lengths[-1]), strict=True):
            rows = part[part["measure"] == f"accuracy_{length}"]
            for number, lr in enumerate(RATES):
                for _, run in rows[rows["lr"] == lr].groupby("seed"):
                    ax.plot(run["step"], run["value"], f"C{number}{style}", linewidth=0.9)
        ax.axhline(PUBLISHED[str(task), str(model)][0] / 100, color="k", linewidth=0.6)
        ax.set(title=f"{task}, {model}", xlabel="updates", ylabel=f"accuracy at {lengths[0]}, dotted: {lengths[-1]}")
    figure.axes[0].plot([], [], "C0", label=f"lr {RATES[0]:g}")
    figure.axes[0].plot([], [], "C1", label=f"lr {RATES[1]:g}")
    figure.axes[0].plot([], [], "k", linewidth=0.6, label=f"published at {TRAIN_LENGTH}")
    figure.axes[0].legend(fontsize=7)
    return figure
