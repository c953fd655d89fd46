"""The majority task, its model, its loss from one row per distinct token, and its data."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from ln_probe.analyses.lab.majority import majority
from ln_probe.analyses.lab.norms import NORM_KINDS, calibrate
from ln_probe.analyses.lab.transformer import LabTransformer

SMALL = majority.MajoritySize(classes=6, length=12, margin=2, examples=400)


@pytest.fixture(scope="module")
def task() -> majority.MajorityTask:
    return majority.MajorityTask(0, SMALL)


def model(norm: str, radius: float | str | None = None, seed: int = 0) -> LabTransformer:
    torch.manual_seed(seed)
    if isinstance(radius, str):
        return majority.PartShrunk(majority.majority_model(norm, None, SMALL), radius).build()
    made = LabTransformer(majority.majority_model(norm, radius, SMALL))
    with calibrate(made), torch.no_grad():
        made.blocks[0].ln1(made.embed.W_E)
    return made


def on_sequences(model: LabTransformer, bags: majority.Bags) -> torch.Tensor:
    """The loss of all positions of the chosen sequences, in order of class: the model has no positions."""
    counts = bags.counts[bags.chosen]
    tokens = torch.from_numpy(np.stack([np.repeat(np.arange(counts.shape[1]), row) for row in counts]))
    labels = torch.from_numpy(bags.label[bags.chosen].astype(np.int64))[:, None].expand_as(tokens)
    return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("norm", "radius"),
    [*((norm, None) for norm in NORM_KINDS), ("none", 8**-0.5), *(("layernorm", part) for part in majority.PARTS)],
)
def test_the_reduction_is_exact(norm: str, radius: float | str | None, task: majority.MajorityTask) -> None:
    """Loss and gradients of one row per distinct token against the model itself on the sequences, in float64."""
    ours = model(norm, radius)
    for chosen in (task.batch(0, 150, 0), task.batch(3, 1, 0)):  # more rows than lanes, and fewer
        loss = task.loss(ours, chosen)
        gradients = torch.autograd.grad(loss, list(ours.parameters()))
        double = model(norm, radius).double()
        expected = on_sequences(double, chosen)
        wanted = torch.autograd.grad(expected, list(double.parameters()))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        largest = max(float(g.abs().max()) for g in wanted)
        for (name, _), got, right in zip(ours.named_parameters(), gradients, wanted, strict=True):
            assert float((got - right).abs().max()) < 2e-6 * largest, name


def test_partitions() -> None:
    """All of them, by another recursion; and the published search reaches each exactly once."""

    def count(total: int, parts: int, largest: int) -> int:
        if total == 0:
            return 1
        return sum(count(total - k, parts - 1, k) for k in range(1, min(total, largest) + 1)) if parts else 0

    for total, parts in ((10, 10), (10, 3), (17, 5)):
        found = list(majority.partitions(total, 1, parts, np.random.default_rng(0)))
        assert len(found) == len(set(found)) == count(total, parts, total)
        assert all(sum(p) == total and list(p) == sorted(p) and len(p) <= parts for p in found)
    assert count(10, 10, 10) == 42


def test_data() -> None:
    size = majority.MajoritySize(examples=3000)
    train, test = majority.make_data(0, size)
    again, other = majority.make_data(0, size), majority.make_data(1, size)
    assert np.array_equal(train.counts, again[0].counts)
    assert np.array_equal(test.chosen, again[1].chosen)
    assert not np.array_equal(train.counts[:100], other[0].counts[:100])
    counts = np.sort(train.counts, axis=1)
    assert (counts.sum(1) == 50).all()
    assert (counts[:, -1].astype(int) - counts[:, -2] >= 6).all()
    assert (train.label == train.counts.argmax(1)).all()
    assert sorted([*train.chosen, *test.chosen]) == list(range(len(counts)))
    assert len(counts) == 3010
    for label in range(20):
        share = (train.label[train.chosen] == label).sum() / (train.label == label).sum()
        assert share == pytest.approx(0.8, abs=0.01)


def test_steps_to_a_loss_by_hand() -> None:
    """Lines between evaluations; a level that is reached at the first, and one that never is."""
    losses = {majority.WITH: (0.9, 0.7, 0.3), majority.WITHOUT: (0.5, 0.45, 0.41)}
    frame = pd.DataFrame([
        (*cell, 0, 100 * (i + 1), "train_loss", loss) for cell, three in losses.items() for i, loss in enumerate(three)
    ], columns=["norm", "radius", "seed", "step", "measure", "value"])  # fmt: skip
    times = majority.steps_to(frame.sample(frac=1, random_state=0))
    found = times.set_index(["norm", "level"])[["steps", "reached", "times"]].astype(float)
    expected = {
        ("layernorm", 0.75): (175, 1, 1), ("layernorm", 0.4): (275, 1, 1), ("layernorm", 0.21): (300, 0, np.nan),
        ("scaling_only", 0.75): (100, 1, 100 / 175), ("scaling_only", 0.4): (300, 0, 300 / 275),
        ("scaling_only", 0.21): (300, 0, np.nan),
    }  # fmt: skip
    assert len(found) == len(expected)
    for place, row in expected.items():
        np.testing.assert_allclose(found.loc[place], row)
