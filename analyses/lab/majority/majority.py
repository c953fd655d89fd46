"""Majority: what projection and scaling buy a transformer that has to attend uniformly.

Every position of a sequence predicts the class that occurs most often in it (Brody, Alon & Yahav 2023, section 4.1).
The published comparison confounds projection with size, for its layer without projection scales to norm 1/√d instead of
√d. So both are varied: {layernorm, scaling_only} × {radius √d, 1/√d}, with the norms that do not scale, and with
queries and keys or values alone made small. Rows with d 3 are of figures 1a and 1b. Data as published: `partitions` of
the length, ten examples for each. Equal tokens have equal outputs: one row per distinct token (`bag_logits`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64, UInt8
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab import results
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import Norm, calibrate
from ln_probe.analyses.lab.runs import Run, carry_out, curves, planned, shared_settings
from ln_probe.analyses.lab.train import ADAM, ModelSpec, Task, TrainConfig, step_generator
from ln_probe.analyses.lab.transformer import Attention, LabConfig, LabTransformer

PER_PARTITION, TRAIN_SHARE = 10, 0.8  # published
BATCH, EPOCH, STEPS = 6000, 14, 17_000  # published; the published loss is the mean of an epoch's 14 steps
EPOCHS_OF_DECAY = 10_000  # the published schedule: linear to 0 over ten times the published 1000 epochs
STEPS_SHOWN = (1000, 2000, 5000, STEPS)
PARTS = ("queries and keys", "values")  # what a norm before attention feeds
KEYS = ["d", "norm", "radius", "step", "measure"]
TESTED, ACCURACY, ANGLE = "train_loss", "test_accuracy", "angle_deg"
LEVELS = (0.75, 0.4, 0.21)  # training losses of the published model with projection at 1K, 2K and 5K steps
WHENEVER = -1  # the `step` of measures that are not taken at a step


@dataclass(frozen=True)
class MajoritySize:
    """Sizes of the task; the defaults are the published ones."""

    classes: int = 20
    length: int = 50
    margin: int = 6  # how often the majority class must occur more than the next
    examples: int = 100_000


@dataclass(frozen=True)
class Bags:
    """Sequences as counts: `counts` [example token], the class to predict, and which examples to look at."""

    counts: UInt8[np.ndarray, "example token"]
    label: UInt8[np.ndarray, " example"]
    chosen: Int64[np.ndarray, " batch"]


def partitions(total: int, smallest: int, parts: int, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Yield ways to write `total` as at most `parts` ascending numbers of at least `smallest`, depth first.

    Each next number is tried in random order, as in the published data: no uniform sample of partitions.
    """
    if total == 0:
        yield ()
        return
    if parts == 1:
        if total >= smallest:
            yield (total,)
        return
    for number in rng.permutation(np.arange(smallest, total + 1)).tolist():
        left = total - number
        if left == 0 or left >= number:
            for rest in partitions(left, number, parts - 1, rng):
                yield (number, *rest)


def make_data(seed: int, size: MajoritySize) -> tuple[Bags, Bags]:
    """Return training and test examples: 80 % and 20 % of every class.

    The seed is that of the search, of the classes and of the split.
    """
    rng = np.random.default_rng([seed, 0])
    rows: list[np.ndarray] = []
    for parts in partitions(size.length, 1, min(size.length, size.classes), rng):
        if len(parts) == 1 or parts[-1] - parts[-2] < size.margin:
            continue
        for _ in range(PER_PARTITION):
            row = np.zeros(size.classes, np.uint8)
            row[rng.permutation(size.classes)[: len(parts)]] = parts
            rows.append(row)
        if len(rows) > size.examples:
            break
    counts = np.stack(rows)
    label = counts.argmax(1).astype(np.uint8)
    classes = [rng.permutation(np.flatnonzero(label == wanted)) for wanted in np.unique(label)]
    train = np.concatenate([where[: round(TRAIN_SHARE * len(where))] for where in classes])
    test = np.concatenate([where[round(TRAIN_SHARE * len(where)) :] for where in classes])
    return Bags(counts, label, np.sort(train)), Bags(counts, label, np.sort(test))


def majority_model(norm: str, radius: float | None = None, size: MajoritySize | None = None, d: int = 8) -> LabConfig:
    """The published model: one pre-norm layer, d 8, one head, MLP 8, no positions, 584 parameters.

    No bias on queries, keys and values, no gain and bias before attention, no final norm, eps 0, tied embedding; it
    starts as torch's layers do.
    """
    size = size or MajoritySize()
    return LabConfig(
        n_layers=1, d_model=d, n_heads=1, d_vocab=size.classes, n_ctx=size.length, d_mlp=8, norm=norm, radius=radius,
        norm_final=None, eps=0.0, positions="none", causal=False, act_fn="relu", affine=False, bias_qkv=False,
        bias_unembed=False, init="torch",
    )  # fmt: skip


@dataclass(frozen=True)
class PartShrunk:
    """The majority model with what queries and keys read, or what values read, divided by d after the norm.

    From radius √d that is radius 1/√d for this part alone. The factor is in the forward pass, as a small norm's:
    in the initial weights it would train differently, as Adam's steps do not depend on a gradient's size.
    """

    model: LabConfig
    part: str

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "part_shrunk", "part": self.part, **self.model.to_dict()}

    def build(self) -> LabTransformer:
        """A random model of this shape (torch's global generator)."""
        model = self.model.build()
        attention = ShrunkAttention(self.model, self.part)
        attention.load_state_dict(model.blocks[0].attn.state_dict())
        model.blocks[0].attn = attention
        model.setup()
        return model


class ShrunkAttention(Attention):
    """Attention whose queries and keys, or whose values, are made of an input divided by d_model."""

    def __init__(self, cfg: LabConfig, part: str) -> None:
        super().__init__(cfg)
        self.shrinks_scores = part == PARTS[0]

    def _project(self, x: Tensor, W: Tensor, b: Tensor | None) -> Float[Tensor, "batch pos head d_head"]:
        shrunk = (W is not self.W_V) == self.shrinks_scores
        return super()._project(x / self.cfg.d_model if shrunk else x, W, b)


def bag_logits(model: LabTransformer, bags: Bags) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [row label], the label and the weight of every distinct token of the chosen examples.

    Of a model of one layer and one head without positions: token a attends to token c with n_c exp(score(a, c)).
    """
    cfg, block = model.cfg, model.blocks[0]
    E, attention, ln2 = model.embed.W_E, block.attn, cast("Norm", block.ln2)
    y = block.ln1(E)[None]
    q, k, v = (attention._project(y, W, None)[0, :, 0] for W in (attention.W_Q, attention.W_K, attention.W_V))
    scores = q @ k.T / cfg.attn_scale
    factors = (scores - scores.amax(-1, keepdim=True)).exp()
    written = torch.cat([v @ attention.W_O[0], E.new_ones(len(E), 1)], dim=1)
    table = (factors[:, :, None] * written).permute(1, 0, 2)  # [key query d + 1]
    counts = torch.from_numpy(bags.counts[bags.chosen])
    example, token = counts.nonzero(as_tuple=True)
    n = counts.to(E.dtype)
    sums = (n @ table.flatten(1)).view(len(n), *table.shape[1:])[example, token]
    mid = E[token] + sums[:, :-1] / sums[:, -1:]
    mid = mid if attention.b_O is None else mid + attention.b_O
    stream = mid + block.mlp(ln2(mid)[None])[0]
    labels = torch.from_numpy(bags.label[bags.chosen].astype(np.int64))[example]
    return stream @ model.W_U, labels, n[example, token]


class MajorityTask(Task):
    """Sequences whose most frequent class leads by `size.margin`; all positions predict it.

    Args:
        seed: of the data; the published experiment drew new data in every run.
    """

    name = "majority"

    def __init__(self, seed: int, size: MajoritySize | None = None) -> None:
        self.seed, self.size = seed, size or MajoritySize()
        self._order: tuple[tuple[int, int], Int64[np.ndarray, " example"]] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        return {"seed": self.seed, **vars(self.size)}

    @cached_property
    def data(self) -> tuple[Bags, Bags]:
        return make_data(self.seed, self.size)

    def batch(self, step: int, size: int, seed: int) -> Bags:
        """Batches of a shuffled epoch; the last of an epoch has the remaining examples."""
        train = self.data[0]
        epoch, place = divmod(step, math.ceil(len(train.chosen) / size))
        if self._order is None or self._order[0] != (epoch, seed):
            shuffled = torch.randperm(len(train.chosen), generator=step_generator(seed, epoch)).numpy()
            self._order = (epoch, seed), train.chosen[shuffled]
        return Bags(train.counts, train.label, self._order[1][place * size : (place + 1) * size])

    def loss(self, model: nn.Module, batch: Bags) -> Float[Tensor, ""]:
        """Mean cross-entropy over all positions."""
        logits, labels, weights = bag_logits(cast("LabTransformer", model), batch)
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Test loss and accuracy (per position), and the angle of effective queries to the all-ones direction."""
        lab, test = cast("LabTransformer", model), self.data[1]
        logits, labels, weights = bag_logits(lab, test)
        losses, right = F.cross_entropy(logits, labels, reduction="none"), logits.argmax(-1) == labels
        share = torch.from_numpy(test.counts[test.chosen].sum(0, dtype=np.int64)).double()
        return {
            "test_loss": float((losses.double() * weights).sum() / weights.double().sum()),
            ACCURACY: float((right * weights.double()).sum() / weights.double().sum()),
            ANGLE: float((query_angles(lab).detach() * share).sum() / share.sum()),
        }


def query_angles(model: LabTransformer) -> Float[Tensor, " token"]:
    """Return the angle (0-90 degrees) of each token's W_K q to the all-ones direction.

    At 0 degrees, projected keys all score alike. A shrunk input changes the length of W_K q, not its angle.
    """
    attention = model.blocks[0].attn
    effective = model.blocks[0].ln1(model.embed.W_E) @ attention.W_Q[0] @ attention.W_K[0].T
    cosine = F.cosine_similarity(effective, torch.ones_like(effective), dim=-1).abs()
    return torch.rad2deg(torch.acos(cosine.clamp(max=1.0)))


QUICK = MajoritySize(examples=20_000)
SIZES = {8: MajoritySize(), 3: MajoritySize(10, 30)}  # by d, as published
# With d 3. With the published batch and rate 300 steps, which take as long, leave accuracy at a third.
SPACE_STEPS, SPACE_STEPS_QUICK, SPACE_BATCH, SPACE_RATE = 3000, 600, 500, 1e-2
SMALL_RADIUS = "1/sqrt(d)"


@dataclass(frozen=True)
class Cell:
    """One model; `radius` as text, of the whole norm or of one of PARTS."""

    d: int
    norm: str
    radius: str

    def spec(self, size: MajoritySize) -> ModelSpec:
        part = next((part for part in PARTS if self.radius.endswith(part)), None)
        radius = 1 / math.sqrt(self.d) if self.radius == SMALL_RADIUS else None
        model = majority_model(self.norm, radius, size, self.d)
        return PartShrunk(model, part) if part else model

    def training(self, quick: bool, seed: int) -> TrainConfig:
        """The published optimizer: Adam with a linear schedule to 0, without warm-up, weight decay and clipping."""
        if self.d == 3:
            steps = SPACE_STEPS_QUICK if quick else SPACE_STEPS
            sizes: dict[str, Any] = {"steps": steps, "batch": SPACE_BATCH, "lr": SPACE_RATE}
            sizes["evaluate_every"] = steps // 10
        else:
            steps = 1000 if quick else STEPS
            sizes = {
                "steps": steps,
                "batch": BATCH // 3 if quick else BATCH,
                "evaluate_every": 200 if quick else 100,
                "evaluate_at": tuple(s - EPOCH for s in STEPS_SHOWN if s <= steps),
                "save_at": tuple(s for s in (0, *STEPS_SHOWN) if s < steps),
                "decay_steps": EPOCH * EPOCHS_OF_DECAY,
            }
        schedule: Any = {"schedule": "linear", "lr_end": 0.0, "warmup": 0, "clip": 0.0, "state_every": 500}
        return TrainConfig(seed=seed, **sizes, **schedule, **ADAM)


NORMS = (
    *((norm, radius) for radius in ("sqrt(d)", SMALL_RADIUS) for norm in ("layernorm", "scaling_only")),
    *((norm, "sqrt(d)") for norm in ("projection_only", "none")),
)
CELLS = (
    *(Cell(8, *norm) for norm in NORMS),
    *(Cell(8, "scaling_only", f"{SMALL_RADIUS} for {part}") for part in PARTS),
    *(Cell(3, *norm) for norm in NORMS if norm != ("layernorm", SMALL_RADIUS)),
)
WITH, WITHOUT = ("layernorm", "sqrt(d)"), ("scaling_only", SMALL_RADIUS)  # the two published models
MATCHED = ("scaling_only", "sqrt(d)"), ("layernorm", SMALL_RADIUS)  # the cells that were not published
_SMALL_SCORES, _SMALL_VALUES = (("scaling_only", f"{SMALL_RADIUS} for {part}") for part in PARTS)
# Differences between cells, each paired by seed (same data, same order): the first minus the second.
CONTRASTS: dict[str, tuple[Hashable, Hashable]] = {
    "the published gap": (WITHOUT, WITH),
    "no projection, at radius sqrt(d)": (MATCHED[0], WITH),
    "no projection, at radius 1/sqrt(d)": (WITHOUT, MATCHED[1]),
    "size 1/sqrt(d), with projection": (MATCHED[1], WITH),
    "size 1/sqrt(d), without projection": (WITHOUT, MATCHED[0]),
    "size 1/sqrt(d) of queries and keys alone": (_SMALL_SCORES, MATCHED[0]),
    "size 1/sqrt(d) of values alone": (_SMALL_VALUES, MATCHED[0]),
    "size 1/sqrt(d) of queries and keys, beside such values": (WITHOUT, _SMALL_VALUES),
}
SPACE_CONTRASTS: dict[str, tuple[Hashable, Hashable]] = {
    **{name: CONTRASTS[name] for name in ("no projection, at radius sqrt(d)", "the published gap")},
    "no scaling": (("projection_only", "sqrt(d)"), WITH),
    "neither term": (("none", "sqrt(d)"), WITH),
}
PUBLISHED = pd.DataFrame(  # read off the plots (Brody, Alon & Yahav 2023, figures 1-3), to about two digits
    [
        (8, *cell, step, measure, value)
        for cell, step, measure, value in (
            (WITH, 1000, TESTED, 0.75), (WITH, 2000, TESTED, 0.4), (WITH, 5000, TESTED, 0.21),
            (WITHOUT, 1000, TESTED, 1.5), (WITHOUT, 2000, TESTED, 0.86), (WITHOUT, 5000, TESTED, 0.43),
            (WITH, 1000, ACCURACY, 0.74), (WITH, 5000, ACCURACY, 0.93),
            (WITHOUT, 1000, ACCURACY, 0.52), (WITHOUT, 5000, ACCURACY, 0.85),
            (WITH, 0, ANGLE, 70.0), (WITH, 17000, ANGLE, 11.0),
            (WITHOUT, 0, ANGLE, 70.0), (WITHOUT, 17000, ANGLE, 83.0),
        )
    ],
    columns=[*KEYS, "published"],
)  # fmt: skip


def make_runs(request: Request) -> list[Run]:
    """A run per seed and cell, all cells of a seed and d on the same data in the same order."""
    sizes = {8: QUICK if request.quick else SIZES[8], 3: SIZES[3]}
    tasks = {(d, seed): MajorityTask(seed, size) for d, size in sizes.items() for seed in request.seeds}
    return planned(
        [cell for cell in CELLS if not (request.quick and cell.radius.endswith(PARTS))],
        request,
        task=lambda cell, seed: tasks[cell.d, seed],
        spec=lambda cell: cell.spec(sizes[cell.d]),
        training=lambda cell, seed: cell.training(request.quick, seed),
    )


def run(request: Request) -> results.Results:
    """Train all cells and compare them."""
    runs = make_runs(request)
    lost = carry_out(runs, request)
    measured = curves(runs)
    shown = results.select(measured, measure=["train_loss", "test_loss", ACCURACY, ANGLE])
    tables = analyse(pd.concat([start_angles(runs), shown], ignore_index=True))
    return results.Results(tables, plot(tables), shared_settings(runs[0], KEYS), lost)


def start_angles(runs: Sequence[Run]) -> pd.DataFrame:
    """Angles before training, in long form (every class is as frequent as any other)."""
    rows = []
    for run in runs:
        torch.manual_seed(run.seed)
        model = cast("LabTransformer", run.spec.build())
        with calibrate(model):
            angle = float(query_angles(model).mean())
        rows.append({**run.keys, "seed": run.seed, "step": 0, "measure": ANGLE, "value": angle})
    return pd.DataFrame(rows)


def analyse(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Make the tables of the metrics of every run, step 0 (`start_angles`) among them.

    Returns:
        `summary` at the steps shown; `contrasts` (paired by seed, Holm's p over the training losses of d 8, and over
        what d 3 ends with); `steps_to`, the steps of every run to a training loss; `curves`.
    """
    space = frame["d"] == 3
    ends = space & (frame["step"] == frame["step"][space].max())
    shown = frame[ends | ~space & frame["step"].isin(STEPS_SHOWN)]
    times = steps_to(frame[~space])
    complete = times[times.groupby(["norm", "radius", "level"])["reached"].transform("all")]
    speeds = [  # of cells whose seeds have all come there: of the others a mean would be too small
        complete.assign(
            value=complete[column], measure=[f"{name}_{x:g}" for x in complete["level"]], step=WHENEVER, d=8
        )
        for column, name in (("steps", "steps_to"), ("times", "times_the_steps_to"))
    ]
    values = pd.concat([frame[frame["step"] == 0], shown, *speeds], ignore_index=True)[[*KEYS, "seed", "value"]]
    return {
        "summary": summarized(values, PUBLISHED),
        "contrasts": _contrasts(shown),
        "curves": frame,
        "steps_to": times,
    }


def summarized(values: pd.DataFrame, published: pd.DataFrame | None = None) -> pd.DataFrame:
    """`summarize` with the interval of a share for accuracies; those of angles end at 0° and 90°."""
    summary = results.summarize(values, KEYS, published, shares=(ACCURACY,))
    angles = summary["measure"].eq(ANGLE)
    summary.loc[angles, ["ci_low", "ci_high"]] = summary.loc[angles, ["ci_low", "ci_high"]].clip(0.0, 90.0)
    return summary.assign(ci_low=summary["ci_low"].clip(lower=0.0))  # of losses


def steps_to(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of every run to a training loss, and how many times those of `WITH` with the same seed.

    Columns: norm, radius, seed, level, `steps` (interpolated between evaluations), `reached`, `times` (NaN if `WITH`
    has not come there). Of a run that has not come there, `steps` is its last: both are lower bounds.
    """
    rows = []
    losses = results.select(frame, measure=TESTED).sort_values("step", kind="stable")
    for (norm, radius, seed), run in losses.groupby(["norm", "radius", "seed"], sort=False):
        step, loss = run["step"].to_numpy(float), run["value"].to_numpy(float)
        for level in LEVELS:
            reached = bool((loss <= level).any())
            end = int((loss <= level).argmax()) + 1 if reached else len(loss)
            last = slice(max(end - 2, 0), end)  # between these two evaluations
            steps = np.interp(-level, -loss[last], step[last]) if reached else step[-1]
            rows.append((norm, radius, seed, level, float(steps), reached))
    times = pd.DataFrame(rows, columns=["norm", "radius", "seed", "level", "steps", "reached"])
    first = results.select(times, norm=WITH[0], radius=WITH[1], reached=True)
    reference = first.rename(columns={"steps": "reference"})[["seed", "level", "reference"]]
    times = times.merge(reference, on=["seed", "level"], how="left")
    return times.assign(times=times["steps"] / times["reference"]).drop(columns="reference")


def _contrasts(table: pd.DataFrame) -> pd.DataFrame:
    """Paired differences of CONTRASTS and SPACE_CONTRASTS over seeds whose cells have all come that far.

    (All of those that any seed has taken that far: to the end only some are trained.)
    """
    wide = table.pivot(index=["d", "seed", "step", "measure"], columns=["norm", "radius"], values="value")
    cells = [cell for cell in (WITH, WITHOUT, *MATCHED) if cell in wide]
    parts = [part.dropna(subset=[c for c in cells if part[c].notna().any()]) for _, part in wide.groupby(level="step")]
    complete, keys = pd.concat(parts) if parts else wide, ["d", "contrast", "step", "measure"]
    flat, space = (complete[complete.index.get_level_values("d") == d] for d in (8, 3))
    in_space = results.select(results.differences(space, SPACE_CONTRASTS), measure=[ANGLE, ACCURACY])
    contrasts = results.contrasted(in_space, keys)
    most = contrasts["measure"].map({ANGLE: 90.0, ACCURACY: 1.0}).astype(float)
    contrasts[["ci_low", "ci_high"]] = contrasts[["ci_low", "ci_high"]].clip(-most, most, axis=0)
    published = results.contrasted(results.differences(flat, CONTRASTS), keys, tested={"measure": TESTED})
    return pd.concat([part for part in (published, contrasts) if len(part)], ignore_index=True)


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Loss, accuracy and angle over steps: mean and 95 % interval over seeds, published figures as crosses."""
    shown = {TESTED: "training loss (nats)", ACCURACY: "test accuracy", ANGLE: "query to ones (°)"}
    figure, axes = results.panels(len(shown), 5, 4.2)
    curve = results.select(tables["curves"], measure=list(shown), d=8)
    means = summarized(curve[curve["step"] % 100 == 0], PUBLISHED)
    named = means.assign(line=means["norm"] + ", radius " + means["radius"])
    for axis, (measure, label) in zip(axes, shown.items(), strict=True):
        results.lines(axis, results.select(named, measure=measure), "step", "line")
        axis.set(ylabel=label)
    axes[0].set_yscale("log")
    axes[-1].legend(fontsize=7, title="x: published", title_fontsize=7)
    return {"curves": figure}
