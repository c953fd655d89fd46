"""What happens in a language model whose norms are removed: fine-tuned without them, next to the same with them.

The bundled lm-layernorm is trained on while its norms are replaced one by one by constants, after Heimersheim 2024,
"You can remove GPT2's LayerNorm by fine-tuning", and Baroni et al. 2025. The same batches with norms kept are the
control. A norm computes

    LAYERNORM      Px / sigma
    TWO_CONSTANTS  Px / c0 at position 0, Px / c elsewhere: the mean sigmas that the norm had before it was replaced
    ONE_CONSTANT   Px / c everywhere: what the norm-free GPT-2s of Heimersheim 2024 and Baroni et al. 2025 compute

Gain and bias stay, and are trained on. Position 0 is apart at first because attention sinks live there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import published
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.results import Results, contrasted, differences, lines, panels, select, summarize
from ln_probe.analyses.lab.runs import Run, carry_out, curves, finished, measured_once, planned
from ln_probe.analyses.lab.text_task import TaskOnText, TextTask
from ln_probe.analyses.lab.train import (
    LAB_FILE,
    MODEL_FILE,
    TrainConfig,
    load_run,
    save_model,
    text_training,
    weights_of,
)
from ln_probe.analyses.lab.transformer import LabTransformer
from ln_probe.analyses.probes.uniformity import entropy_ratio
from ln_probe.analyses.text import write_atomically

LAYERNORM, TWO_CONSTANTS, ONE_CONSTANT = range(3)
# Weight of a new batch in the running means of sigma: some ten batches, or 20,000 tokens.
MEMORY = 0.1


class ReplaceableNorm(nn.Module):
    """LayerNorm that follows its own mean sigmas while it trains, and divides by them once it is replaced."""

    stage: Tensor
    first: Float[Tensor, ""]
    rest: Float[Tensor, ""]
    batches: Tensor

    def __init__(self, norm: Norm) -> None:
        """Take over gain and bias of a LayerNorm with both, at the usual radius."""
        super().__init__()
        self.d_model, self.eps = norm.d_model, norm.eps
        self.w, self.b = cast("nn.Parameter", norm.w), cast("nn.Parameter", norm.b)
        for name in ("first", "rest"):
            self.register_buffer(name, torch.zeros(()))
        for name in ("stage", "batches"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))

    def follow(self, x: Float[Tensor, "batch pos d_model"]) -> None:
        """Take a batch into the running means of sigma at position 0 and elsewhere."""
        sigma = (x.detach().var(-1, correction=0) + self.eps).sqrt()
        weight = max(MEMORY, 1 / (int(self.batches) + 1))
        for mean, part in ((self.first, sigma[:, 0]), (self.rest, sigma[:, 1:])):
            mean.lerp_(part.mean(), weight)
        self.batches += 1

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        if self.stage == LAYERNORM:
            if self.training and torch.is_grad_enabled():
                self.follow(x)
            return F.layer_norm(x, (self.d_model,), self.w, self.b, self.eps)
        divisor = self.rest.repeat(x.shape[1])
        if self.stage == TWO_CONSTANTS:
            divisor[0] = self.first
        return (x - x.mean(-1, keepdim=True)) / divisor[:, None] * self.w + self.b


def replaceable_norms(model: LabTransformer) -> list[ReplaceableNorm]:
    """Norms in the order of replacement: those of the MLPs, those of attention, the final one.

    (Heimersheim 2024, whose order this is: norms of MLPs cost least.)
    """
    norms = [*(block.ln2 for block in model.blocks), *(block.ln1 for block in model.blocks), model.ln_final]
    return [cast("ReplaceableNorm", norm) for norm in norms]


def plain(model: LabTransformer) -> LabTransformer:
    """The same function as an ordinary lab model, for `analyze`: LayerNorm everywhere or one constant a norm."""
    stages = {int(norm.stage) for norm in replaceable_norms(model)}
    kinds = {LAYERNORM: "layernorm", ONE_CONSTANT: "projection_only"}
    if len(stages) > 1 or not stages <= set(kinds):
        raise ValueError(f"norms at stages {sorted(stages)}: only all at {LAYERNORM} or all at {ONE_CONSTANT} is plain")
    kind = kinds[stages.pop()]
    weights = {}
    for name, value in model.state_dict().items():
        owner, leaf = name.rsplit(".", 1)
        if leaf == "rest" and kind == "projection_only":
            weights[f"{owner}.divisor"] = value
        if leaf not in ("first", "rest", "stage", "batches"):
            weights[name] = value
    cfg = replace(model.cfg, norm=kind, norm_mlp=kind, norm_final=kind, divisor=None)
    copied = LabTransformer(cfg, tokenizer=model.tokenizer)
    copied.load_state_dict(weights)
    return cast("LabTransformer", copied.eval())


@dataclass(frozen=True)
class Start:
    """The trained model that norms are taken out of: the folder of a lab run."""

    folder: Path

    def build(self) -> LabTransformer:
        """The model with a ReplaceableNorm in the place of each of its LayerNorms; it computes what it did."""
        model = load_run(self.folder)
        for block in model.blocks:
            block.ln1, block.ln2 = (ReplaceableNorm(cast("Norm", norm)) for norm in (block.ln1, block.ln2))
        model.ln_final = ReplaceableNorm(cast("Norm", model.ln_final))
        return cast("LabTransformer", model.train())

    def to_dict(self) -> dict[str, Any]:
        weights = (self.folder / MODEL_FILE).read_bytes()
        return {"start": self.folder.name, "sha256": hashlib.sha256(weights).hexdigest()}


@dataclass(frozen=True)
class Schedule:
    """When the norms go: the i-th is replaced at `first + i every`, and its position 0 joins the others later.

    Position 0 gives up its constant after all are replaced, `joined_every` steps between norms.
    """

    first: int
    every: int
    joined_every: int

    def replaced(self, norms: int) -> int:
        """The step at which all norms are replaced."""
        return self.first + norms * self.every

    def set_stages(self, norms: Sequence[ReplaceableNorm], step: int) -> None:
        """What each norm computes at a step."""
        for i, norm in enumerate(norms):
            joined = step >= self.replaced(len(norms)) + i * self.joined_every
            gone = step >= self.first + i * self.every
            norm.stage.fill_(ONE_CONSTANT if joined else TWO_CONSTANTS if gone else LAYERNORM)


SINK = 0.3  # of attention (threshold of Gu et al. 2025 for a head's mean over queries)
KEY_CONTEXTS = 2  # held-out windows whose keys are decided: 64 heads of 256 keys each, some ten seconds a window


@torch.no_grad()
def measures(model: LabTransformer, text: TextTask, contexts: int) -> Iterator[tuple[str, float]]:
    """Measure and value, means over layers, heads, held-out windows and their positions.

    valid_loss; attention_on_first: attention that queries after position 0 pay to it; queries_on_sink: the share of
    them that pay over SINK; entropy_ratio: of attention over its largest possible; unselectable_head,
    undecided_normalized, …: shares of keys.
    """
    yield published.LOSS, text.evaluate(model)[published.LOSS]
    layers, windows = range(model.cfg.n_layers), text.held_out(contexts)
    rows = []
    for part in windows.split(4):
        _, cache = model.run_with_cache(part, names_filter=lambda name: name.endswith("hook_pattern"), return_type=None)
        for pattern in cache.values():
            on_first = pattern[:, :, 1:, 0]
            ratios = [entropy_ratio(one.double())[:, 1:].mean() for one in pattern]
            sinks = float((on_first > SINK).float().mean())
            rows.append((float(on_first.mean()), sinks, float(sum(ratios)) / len(part)))
    means = np.average(rows, axis=0)
    yield from zip(("attention_on_first", "queries_on_sink", "entropy_ratio"), map(float, means), strict=True)
    for space in (published.NORMALIZED, published.HEAD):
        keys = list(published.unselectable_keys(model, windows[:KEY_CONTEXTS], published.key_places(layers, (space,))))
        for measure in (published.FRACTION, published.UNDECIDED):
            shares = [share for _, _, of, share in keys if of == measure]
            yield f"{measure.removesuffix('_fraction')}_{space}", sum(shares) / len(layers)


START = "lm-layernorm"
BEFORE, KEPT, REMOVED = "before", "kept", "removed"
KEYS = ["model", "measure"]
TESTED = (
    published.LOSS,
    "entropy_ratio",
    "queries_on_sink",
    "attention_on_first",
    "unselectable_head",
    "unselectable_normalized",
)


@dataclass(frozen=True)
class Size:
    """How long, and how fast norms go. batch: windows a step; contexts: held-out windows that are measured."""

    steps: int
    batch: int
    schedule: Schedule
    valid_windows: int = 64
    contexts: int = 16


# An eighth of what the model was trained on. Between norms the running means of those behind follow (`MEMORY`).
FULL = Size(500, 8, Schedule(20, 20, 10))
TINY = Size(60, 2, Schedule(6, 4, 2), valid_windows=8, contexts=2)


def start_folder() -> Path:
    """The bundled checkpoint that norms are taken out of."""
    return Path(str(files("ln_probe"))) / "data" / "checkpoints" / START


class Removal(TaskOnText):
    """Text to train on, with the norms going as the schedule says (None: they stay)."""

    name = "remove_norm"

    def __init__(self, text: TextTask, schedule: Schedule | None) -> None:
        super().__init__(text)
        self.schedule = schedule

    @property
    def identity(self) -> dict[str, Any]:
        return {**self.text.identity, "removal": asdict(self.schedule) if self.schedule else None}

    def batch(self, step: int, size: int, seed: int) -> tuple[int, Int[Tensor, "batch pos"]]:
        """The step and its windows."""
        return step, self.text.batch(step, size, seed)

    def loss(self, model: nn.Module, batch: tuple[int, Int[Tensor, "batch pos"]]) -> Float[Tensor, ""]:
        step, windows = batch
        if self.schedule is not None:
            self.schedule.set_stages(replaceable_norms(cast(LabTransformer, model)), step)
        return self.text.loss(model, windows)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return self.text.evaluate(model)


def training(size: Size, seed: int) -> TrainConfig:
    """A rate between those that the model was last trained with (1e-4) and trained at most with (1e-3)."""
    every = max(1, size.steps // 20)
    return text_training(size, seed, 5e-4, evaluate_every=every, state_every=every)


def make_runs(request: Request, size: Size, start: Path) -> list[Run]:
    """A run with norms removed and one with norms kept for each seed."""
    if request.tokenizer is not None:
        raise ValueError(f"{START} reads text with its own tokenizer: leave out --tokenizer {request.tokenizer}")
    shape = Start(start).build().cfg
    text = TextTask(request.texts, shape.d_vocab, shape.n_ctx, tokenizer=start, valid_windows=size.valid_windows)
    return planned(
        (REMOVED, KEPT), request, keys=lambda cell: {"model": cell},
        task=lambda cell, _: Removal(text, size.schedule if cell == REMOVED else None), spec=lambda _: Start(start),
        training=lambda _, seed: training(size, seed),
    )  # fmt: skip


def run(request: Request, size: Size | None = None, start: Path | None = None) -> Results:
    """Fine-tune (or resume), measure, and write each model without norms as a folder that `load_model` takes.

    Args:
        start: any lab run whose norms are LayerNorms; None: the bundled one.
    """
    size = size or (TINY if request.quick else FULL)
    start = start or start_folder()
    runs = make_runs(request, size, start)
    lost = carry_out(runs, request)
    done = finished(runs)
    for each in done:
        if each.keys["model"] == REMOVED:
            write_plain(each, request.out / "models" / f"removed-seed{each.seed}")
    task = cast(Removal, runs[0].task)
    seeds = sorted({each.seed for each in done})
    before = pd.DataFrame(measures(load_run(start), task.text, size.contexts), columns=["measure", "value"])
    rows = [measured(each, size) for each in done]
    rows += [before.assign(model=BEFORE, seed=seed) for seed in seeds]  # the same model for every seed
    trained_on = json.loads((start / LAB_FILE).read_text(encoding="utf-8"))["data"]["files"]
    norms = len(replaceable_norms(Start(start).build()))
    settings = {
        "start": START if start == start_folder() else str(start),
        "text_is_that_of_the_start": task.text.identity["files"] == trained_on, "norms": norms,
        "training": vars(training(size, 0)) | {"seed": None}, "schedule": asdict(size.schedule),
        "contexts": size.contexts, "data": task.text.identity, "finished": [each.name for each in done],
    }  # fmt: skip
    values = pd.concat(rows, ignore_index=True)[[*KEYS, "seed", "value"]]
    tables = analyse(values, curves(runs))
    return Results(tables, plot(tables, size.schedule, norms), settings, lost)


def write_plain(run: Run, out: Path) -> None:
    """A finished run's model, its norms constants, as a lab run's folder; written once."""
    if (out / MODEL_FILE).exists():
        return
    model = plain(cast(LabTransformer, run.model()))
    about = json.loads((run.folder / LAB_FILE).read_text()) | {"model": model.cfg.to_dict()}
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / LAB_FILE, (json.dumps(about, indent=1) + "\n").encode())
    for name in ("tokenizer.json", "metrics.jsonl"):
        write_atomically(out / name, (run.folder / name).read_bytes())
    save_model(model, out / MODEL_FILE)


def measured(run: Run, size: Size) -> pd.DataFrame:
    """What a finished run has become; kept in its folder."""

    def made() -> pd.DataFrame:
        text = cast(Removal, run.task).text
        model = plain(cast(LabTransformer, run.model()))
        return pd.DataFrame(measures(model, text, size.contexts), columns=["measure", "value"])

    table = measured_once(run.folder, "measures", weights_of(run.folder), made)
    return table.assign(model=run.keys["model"], seed=run.seed)


def analyse(frame: pd.DataFrame, losses: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Summary, and differences of the same seed: removed compared with kept, and each with the start.

    Holm's p is over the measures TESTED of `removed - kept`.
    """
    one = frame["model"].eq(BEFORE) & frame["seed"].ne(frame["seed"].min())
    wide = frame.pivot(index=["measure", "seed"], columns="model", values="value")
    pairs = {f"{left} - {right}": (left, right) for left, right in ((REMOVED, KEPT), (REMOVED, BEFORE), (KEPT, BEFORE))}
    tested = {"difference": f"{REMOVED} - {KEPT}", "measure": [*TESTED]}
    effects = contrasted(differences(wide, pairs, "difference"), ["difference", "measure"], tested=tested)
    return {"summary": summarize(frame[~one], KEYS), "effects": effects, "seeds": frame, "curves": losses}


def plot(tables: Mapping[str, pd.DataFrame], schedule: Schedule, norms: int) -> dict[str, Figure]:
    """Held-out loss over fine-tuning, a line per seed: norms removed and kept."""
    figure, (ax,) = panels(1, 7, 4.2)
    rows = select(tables["curves"], measure=published.LOSS)
    lines(ax, rows.assign(line=rows["model"] + ", seed " + rows["seed"].astype(str)), "step", "line", "value")
    ax.axvspan(schedule.first, schedule.replaced(norms), color="0.9", label="norms go, one by one")
    ax.set(xlabel="step", ylabel="held-out loss, nats per token")
    ax.legend(fontsize=7)
    return {"losses": figure}
