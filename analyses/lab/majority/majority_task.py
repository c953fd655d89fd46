"""Majority: what projection and scaling buy a transformer that has to attend uniformly.

Every position of a sequence predicts the class that occurs most often in it (Brody, Alon & Yahav 2023, section 4.1).
Attending uniformly solves it, and LayerNorm's projection makes that easy: a query along the all-ones direction scores
every projected key alike. The published comparison confounds projection with size, for its layer without projection
scales to norm 1/√d instead of √d, which makes the scores d² times smaller. So both are varied here: {layernorm,
scaling_only} × {radius √d, 1/√d}, and with them the two norms that do not scale. A small norm makes values small as
well as scores: `PartShrunk` makes one of them small and leaves the other.

The data, as in the published set-up: counts of classes, which are partitions of the length in the order of a random
depth-first search, ten examples for each with classes drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int64, UInt8
from torch import Tensor, nn

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.majority.bags import Bags, Tables, bag_accuracy, bag_loss
from ln_probe.analyses.lab.norms import Norm
from ln_probe.analyses.lab.train import ADAM, ModelSpec, Run, Task, TrainConfig, planned, step_generator
from ln_probe.analyses.lab.transformer import Attention, LabConfig, LabTransformer

PER_PARTITION = 10  # published
LONGEST = 255  # counts are bytes
TRAIN_SHARE = 0.8  # published; of the examples of every class


@dataclass(frozen=True)
class MajoritySize:
    """Sizes of the task; the defaults are the published ones."""

    classes: int = 20
    length: int = 50
    margin: int = 6  # how often the majority class must occur more than the next
    examples: int = 100_000

    def __post_init__(self) -> None:
        if min(self.classes, self.length, self.examples) < 2 or not 1 <= self.margin <= self.length <= LONGEST:
            raise ValueError(
                f"majority needs 2 or more classes and examples, a length of 2 to {LONGEST} and a margin of 1 to the "
                f"length, got {self}"
            )


def partitions(total: int, smallest: int, parts: int, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as at most `parts` ascending numbers of at least `smallest`, depth first.

    At every level the next number is tried in random order, as in the published data: examples are then not a uniform
    sample of all partitions, but those under whichever first numbers came up.
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


def _examples(rng: np.random.Generator, size: MajoritySize) -> UInt8[np.ndarray, "example token"]:
    """Counts of every example: partitions of the length, and for each, ten draws of which class has which count."""
    rows = []
    for parts in partitions(size.length, 1, min(size.length, size.classes), rng):
        if len(parts) == 1 or parts[-1] - parts[-2] < size.margin:
            continue
        for _ in range(PER_PARTITION):
            row = np.zeros(size.classes, np.uint8)
            row[rng.permutation(size.classes)[: len(parts)]] = parts
            rows.append(row)
        if len(rows) > size.examples:
            break
    return np.stack(rows)


def make_data(seed: int, size: MajoritySize) -> tuple[Bags, Bags]:
    """Training and test examples: 80 % and 20 % of every class (the counts of a test example may be among the others').

    The seed is that of the search, of the classes and of the split.
    """
    rng = np.random.default_rng([seed, 0])
    counts = _examples(rng, size)
    label = counts.argmax(1).astype(np.uint8)
    classes = [rng.permutation(np.flatnonzero(label == wanted)) for wanted in np.unique(label)]
    train = np.concatenate([where[: round(TRAIN_SHARE * len(where))] for where in classes])
    test = np.concatenate([where[round(TRAIN_SHARE * len(where)) :] for where in classes])
    return Bags(counts, label, np.sort(train)), Bags(counts, label, np.sort(test))


STEPS = 17_000  # the published curves end near there
STEPS_SHOWN = (1000, 2000, 5000, STEPS)
PARTS = ("queries and keys", "values")  # what a norm before attention feeds, and `PartShrunk` makes small
BATCH, EPOCH = 6000, 14  # published; the published loss is the mean of an epoch's 14 steps


def published_training(steps: int, seed: int, *, lr: float = 1e-3, batch: int = BATCH, **others: Any) -> TrainConfig:
    """The published optimizer: Adam with a linear schedule to 0, without warm-up, weight decay and clipping."""
    return TrainConfig(
        steps=steps,
        batch=batch,
        lr=lr,
        lr_end=0.0,
        warmup=0,
        clip=0.0,
        seed=seed,
        state_every=500,
        schedule="linear",
        **ADAM,
        **others,
    )


def majority_runs(
    request: Request,
    cells: Sequence[tuple[str, str]],
    size: MajoritySize,
    spec: Callable[[str, str], ModelSpec],
    training: Callable[[int], TrainConfig],
) -> list[Run]:
    """A run per seed and cell (norm and radius), all cells of a seed on the same data in the same order."""
    tasks = {seed: MajorityTask(seed, size) for seed in request.seeds}
    return planned(
        cells,
        request,
        keys=lambda cell: {"norm": cell[0], "radius": cell[1]},
        name=lambda cell: f"{cell[0]}-{cell[1].replace('/', '_over_').replace(' ', '_')}",
        task=lambda _, seed: tasks[seed],
        spec=lambda cell: spec(*cell),
        training=lambda _, seed: training(seed),
    )


def majority_model(norm: str, radius: float | None = None, size: MajoritySize | None = None) -> LabConfig:
    """The published model: one pre-norm layer, d 8, one head, MLP 8, no positions, 584 parameters.

    No bias on queries, keys and values, no gain and bias before attention, no final norm, eps 0, tied embedding; it
    starts as torch's layers do.
    """
    size = size or MajoritySize()
    return LabConfig(
        n_layers=1,
        d_model=8,
        n_heads=1,
        d_vocab=size.classes,
        n_ctx=size.length,
        d_mlp=8,
        norm=norm,
        radius=radius,
        norm_final=None,
        eps=0.0,
        positions="none",
        causal=False,
        act_fn="relu",
        affine=False,
        bias_qkv=False,
        bias_unembed=False,
        init="torch",
    )


@dataclass(frozen=True)
class PartShrunk:
    """The majority model with what queries and keys read, or what values read, divided by d after the norm.

    From radius √d that is radius 1/√d for this part alone. The factor stands in the forward pass and not in the initial
    weights, as it does where the norm is small: Adam's steps do not depend on the size of a gradient, so the two train
    differently.

    Attributes:
        model: the model, of radius √d.
        part: "queries and keys" or "values".

    Raises (on construction):
        ValueError: another part.
    """

    model: LabConfig
    part: str

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ValueError(f"unknown part {self.part!r}: known are {', '.join(PARTS)}")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "part_shrunk", "part": self.part, **self.model.to_dict()}

    def build(self) -> LabTransformer:
        """A model of this shape, initialized from torch's global generator."""
        model = self.model.build()
        attention = ShrunkAttention(self.model, self.part)
        attention.load_state_dict(model.blocks[0].attn.state_dict())
        model.blocks[0].attn = attention
        model.setup()  # type: ignore[no-untyped-call]
        return model


class ShrunkAttention(Attention):
    """Attention whose queries and keys, or whose values, are made of an input divided by d_model."""

    def __init__(self, cfg: LabConfig, part: str) -> None:
        super().__init__(cfg)
        self.shrinks_scores = part == PARTS[0]

    def seen_by(self, W: Tensor, x: Tensor) -> Tensor:
        """What W_Q, W_K or W_V is multiplied with."""
        return x / self.cfg.d_model if (W is not self.W_V) == self.shrinks_scores else x

    def _project(self, x: Tensor, W: Tensor, b: Tensor | None) -> Float[Tensor, "batch pos head d_head"]:
        return super()._project(self.seen_by(W, x), W, b)


class MajorityTask(Task):
    """Sequences whose most frequent class leads by `size.margin`; all positions predict it.

    Args:
        seed: of the data; the published experiment drew new data in every run.
        size: sizes.
        reduced: compute the loss from one row per distinct token, which is exact for the published shape and tens of
            times faster; otherwise run the model on the sequences.

    Raises (on the first loss):
        ValueError: `reduced`, and the model is not a single pre-norm layer with one head and no positions.
    """

    name = "majority"

    def __init__(self, seed: int, size: MajoritySize | None = None, *, reduced: bool = True) -> None:
        self.seed, self.size, self.reduced = seed, size or MajoritySize(), reduced
        self._order: tuple[tuple[int, int], Int64[np.ndarray, " example"]] | None = None

    @property
    def identity(self) -> dict[str, Any]:
        return {"seed": self.seed, **vars(self.size)}

    @cached_property
    def data(self) -> tuple[Bags, Bags]:
        return make_data(self.seed, self.size)

    def steps_per_epoch(self, batch: int) -> int:
        return math.ceil(len(self.data[0].chosen) / batch)

    def batch(self, step: int, size: int, seed: int) -> Bags:
        """Batches of a shuffled epoch; the last of an epoch has the remaining examples."""
        train = self.data[0]
        epoch, place = divmod(step, self.steps_per_epoch(size))
        if self._order is None or self._order[0] != (epoch, seed):
            shuffled = torch.randperm(len(train.chosen), generator=step_generator(seed, epoch)).numpy()
            self._order = (epoch, seed), train.chosen[shuffled]
        return Bags(train.counts, train.label, self._order[1][place * size : (place + 1) * size])

    def loss(self, model: nn.Module, batch: Bags) -> Float[Tensor, ""]:
        lab = cast("LabTransformer", model)
        if self.reduced:
            return bag_loss(tables_of(lab), batch, lab.cfg.eps)
        tokens, labels = sequences(batch)
        logits: Tensor = lab(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels[:, None].expand_as(tokens).flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Test loss and accuracy (per position), and the angle of effective queries to the all-ones direction."""
        lab, test = cast("LabTransformer", model), self.data[1]
        tables = tables_of(lab)
        loss, accuracy = bag_accuracy(tables, test, lab.cfg.eps)
        share = torch.from_numpy(test.counts[test.chosen].sum(0, dtype=np.int64)).float()
        angles = query_angles(lab)
        return {
            "test_loss": loss,
            "test_accuracy": accuracy,
            "angle_deg": float((angles.detach() * share).sum() / share.sum()),
            "score_sd": float(tables.S.detach().std()),
        }


def sequences(bags: Bags) -> tuple[Int[Tensor, "batch pos"], Int[Tensor, " batch"]]:
    """The chosen examples as tokens (in order of class: the model has no positions) and their labels."""
    counts = bags.counts[bags.chosen]
    classes = np.tile(np.arange(counts.shape[1]), len(counts))
    tokens = np.repeat(classes, counts.ravel()).reshape(len(counts), -1)
    return torch.from_numpy(tokens), torch.from_numpy(bags.label[bags.chosen].astype(np.int64))


def query_angles(model: LabTransformer) -> Float[Tensor, " token"]:
    """Angle (0-90 degrees) of each token's W_K q to the all-ones direction: at 0, projected keys all score alike."""
    attention = model.blocks[0].attn
    y = model.blocks[0].ln1(model.embed.W_E)
    effective = y @ attention.W_Q[0] @ attention.W_K[0].T  # a shrunk input changes its length, not its angle
    cosine = F.cosine_similarity(effective, torch.ones_like(effective), dim=-1).abs()
    return torch.rad2deg(torch.acos(cosine.clamp(max=1.0)))


def tables_of(model: LabTransformer) -> Tables:
    """What all tokens of one layer without positions share, a row per token of the vocabulary.

    Raises:
        ValueError: a model of another shape (more layers or heads, positions, a causal mask): it cannot be reduced.
    """
    cfg = model.cfg
    needs = {
        "n_layers": 1,
        "n_heads": 1,
        "positions": "none",
        "causal": False,
        "norm_order": "pre",
        "norm_final": None,
        "norm_mlp": "layernorm",
        "act_fn": "relu",
        "affine_others": True,
        "bias_mlp": True,
        "bias_unembed": False,
    }
    if wrong := {k: getattr(cfg, k) for k, v in needs.items() if getattr(cfg, k) != v}:
        raise ValueError(
            f"the reduction to distinct tokens is for {', '.join(f'{k}={needs[k]!r}' for k in wrong)}, got "
            f"{', '.join(f'{k}={v!r}' for k, v in wrong.items())}: use MajorityTask(…, reduced=False)"
        )
    block = model.blocks[0]
    attention, ln2, mlp = block.attn, cast("Norm", block.ln2), cast("Any", block.mlp)
    E = model.embed.W_E
    y = block.ln1(E)

    def made(W: Tensor, b: Tensor | None) -> Tensor:
        x = attention.seen_by(W, y) if isinstance(attention, ShrunkAttention) else y
        return x @ W[0] if b is None else x @ W[0] + b[0]

    scores = made(attention.W_Q, attention.b_Q) @ made(attention.W_K, attention.b_K).T / cfg.attn_scale
    values = made(attention.W_V, attention.b_V) @ attention.W_O[0]
    base = E if attention.b_O is None else E + attention.b_O
    assert ln2.w is not None
    assert ln2.b is not None
    return Tables(scores, values, base, ln2.w, ln2.b, mlp.W_in, mlp.b_in, mlp.W_out, mlp.b_out, model.W_U.T)
