"""The majority task, its model, its loss from one row per distinct token, its findings; and in three dimensions."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lab_models import majority_run

from ln_probe.analyses.lab.experiments import Request, run
from ln_probe.analyses.lab.majority import majority_in_space, majority_task
from ln_probe.analyses.lab.majority.majority import findings, start_angles
from ln_probe.analyses.lab.norms import NORM_KINDS, calibrate
from ln_probe.analyses.lab.run_folder import load_run
from ln_probe.analyses.lab.train import curves, diverged, train_all
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer

SMALL = majority_task.MajoritySize(classes=6, length=12, margin=2, examples=400)


@pytest.fixture(scope="module")
def task() -> majority_task.MajorityTask:
    return majority_task.MajorityTask(0, SMALL)


def model(norm: str, radius: float | str | None = None, seed: int = 0) -> LabTransformer:
    torch.manual_seed(seed)
    if isinstance(radius, str):
        return majority_task.PartShrunk(majority_task.majority_model(norm, None, SMALL), radius).build()
    made = LabTransformer(majority_task.majority_model(norm, radius, SMALL))
    with calibrate(made), torch.no_grad():
        made.blocks[0].ln1(made.embed.W_E)
    return made


@pytest.mark.parametrize(
    ("norm", "radius"),
    [*((norm, None) for norm in NORM_KINDS), ("none", 8**-0.5), *(("layernorm", part) for part in majority_task.PARTS)],
)
def test_the_reduction_is_exact(norm: str, radius: float | str | None, task: majority_task.MajorityTask) -> None:
    """Loss and gradients of the compiled float32 rows against the model itself on the sequences, in float64."""
    plain = majority_task.MajorityTask(0, SMALL, reduced=False)
    ours = model(norm, radius)
    for chosen in (task.batch(0, 150, 0), task.batch(3, 1, 0)):  # more rows than lanes, and fewer
        loss = task.loss(ours, chosen)
        gradients = torch.autograd.grad(loss, list(ours.parameters()))
        double = model(norm, radius).double()
        expected = plain.loss(double, chosen)
        wanted = torch.autograd.grad(expected, list(double.parameters()))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
        largest = max(float(g.abs().max()) for g in wanted)
        for (name, _), got, right in zip(ours.named_parameters(), gradients, wanted, strict=True):
            assert float((got - right).abs().max()) < 2e-6 * largest, name


@pytest.mark.parametrize("part", majority_task.PARTS)
def test_one_part_is_small_and_the_other_is_not(part: str) -> None:
    """The attention of a shrunk part is that of the norm at radius 1/√d, the rest that at √d; from the same weights."""
    tokens = torch.randint(6, (3, 12), generator=torch.Generator().manual_seed(1))
    models = {
        "large": model("scaling_only"),
        "small": model("scaling_only", 8**-0.5),
        "part": model("scaling_only", part),
    }
    seen = {name: one.run_with_cache(tokens)[1] for name, one in models.items()}
    for hook in ("hook_q", "hook_k", "hook_v"):
        small = (hook == "hook_v") == (part == "values")
        wanted = seen["small" if small else "large"][f"blocks.0.attn.{hook}"]
        torch.testing.assert_close(seen["part"][f"blocks.0.attn.{hook}"], wanted)
    with pytest.raises(ValueError, match="unknown part 'all': known are queries and keys, values"):
        majority_task.PartShrunk(majority_task.majority_model("scaling_only"), "all")


def test_scores_of_hundreds_of_nats_do_not_overflow(task: majority_task.MajorityTask) -> None:
    ours = model("layernorm")
    with torch.no_grad():
        ours.blocks[0].attn.W_Q.mul_(400)
        ours.embed.W_E.mul_(30)
    batch = task.batch(0, 100, 0)
    loss = task.loss(ours, batch)
    expected = majority_task.MajorityTask(0, SMALL, reduced=False).loss(ours.double(), batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_partitions() -> None:
    """All of them, by another recursion; and the published search reaches each exactly once."""

    def count(total: int, parts: int, largest: int) -> int:
        if total == 0:
            return 1
        return sum(count(total - k, parts - 1, k) for k in range(1, min(total, largest) + 1)) if parts else 0

    for total, parts in ((10, 10), (10, 3), (17, 5)):
        found = list(majority_task.partitions(total, 1, parts, np.random.default_rng(0)))
        assert len(found) == len(set(found)) == count(total, parts, total)
        assert all(sum(p) == total and list(p) == sorted(p) and len(p) <= parts for p in found)
    assert count(10, 10, 10) == 42


def test_data() -> None:
    size = majority_task.MajoritySize(examples=3000)
    train, test = majority_task.make_data(0, size)
    again, other = majority_task.make_data(0, size), majority_task.make_data(1, size)
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


def test_an_epoch_sees_every_example_once(task: majority_task.MajorityTask) -> None:
    steps = task.steps_per_epoch(100)
    seen = [task.batch(step, 100, 0).chosen for step in range(steps)]
    assert [len(s) for s in seen[:-1]] == [100] * (steps - 1)
    assert sorted(np.concatenate(seen)) == sorted(task.data[0].chosen)
    fresh = majority_task.MajorityTask(0, SMALL)
    assert np.array_equal(fresh.batch(steps + 1, 100, 0).chosen, task.batch(steps + 1, 100, 0).chosen)
    tokens, labels = majority_task.sequences(task.batch(0, 100, 0))
    assert tokens.shape == (100, 12)
    assert [Counter(row).most_common(1)[0][0] for row in tokens.tolist()] == labels.tolist()


def test_angles_of_planted_queries() -> None:
    ours = model("layernorm")
    with torch.no_grad():
        ours.blocks[0].attn.W_K.zero_()
        ours.blocks[0].attn.W_K[0, :, 0] = 1.0  # every effective query lies along the ones-vector
    torch.testing.assert_close(majority_task.query_angles(ours), torch.zeros(6), atol=0.05, rtol=0)
    with torch.no_grad():
        ours.blocks[0].attn.W_K[0, ::2, 0] = -1.0  # and now at a right angle to it
    torch.testing.assert_close(majority_task.query_angles(ours), torch.full((6,), 90.0), atol=0.05, rtol=0)


def test_evaluation(task: majority_task.MajorityTask) -> None:
    ours = model("layernorm")
    found = task.evaluate(ours)
    tokens, labels = majority_task.sequences(task.data[1])
    logits = ours(tokens)
    assert found["test_accuracy"] == pytest.approx(float((logits.argmax(-1) == labels[:, None]).float().mean()), 1e-6)
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, None].expand_as(tokens).flatten())
    assert found["test_loss"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(("options", "said"), [
    ({"n_layers": 2}, r"the reduction to distinct tokens is for n_layers=1, got n_layers=2: use .*reduced=False"),
    ({"positions": "learned", "causal": True}, r"for positions='none', causal=False, got positions='learned'"),
])  # fmt: skip
def test_shapes_that_cannot_be_reduced(options: dict[str, object], said: str, task: majority_task.MajorityTask) -> None:
    other = LabConfig(**{**majority_task.majority_model("layernorm", size=SMALL).to_dict(), **options})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        task.loss(other.build(), task.batch(0, 10, 0))
    assert torch.isfinite(majority_task.MajorityTask(0, SMALL, reduced=False).loss(other.build(), task.batch(0, 10, 0)))


def test_bad_sizes() -> None:
    with pytest.raises(
        ValueError, match=r"margin of 1 to the length, got MajoritySize\(classes=20, length=50, margin=60"
    ):
        majority_task.MajoritySize(margin=60)
    with pytest.raises(ValueError, match="a length of 2 to 255"):
        majority_task.MajoritySize(length=300)


def test_findings_need_a_run(tmp_path: Path) -> None:
    runs = [replace(majority_run(tmp_path / "nothing"), keys={"norm": "layernorm", "radius": "sqrt(d)"})]
    with pytest.raises(ValueError, match="no run has been evaluated yet"):
        findings(curves(runs), start_angles(runs))


def test_a_diverging_seed_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    runs = [majority_run(tmp_path / f"seed{seed}", seed, lr=1e30 if seed == 1 else 1e-3) for seed in (0, 1, 2)]
    for _ in range(2):  # and again, from what was written
        train_all(runs, progress=False)
        (told,) = diverged(runs).values()
        assert told.startswith("norm layernorm, seed 1: ")
        assert "(seed 1); the last state before it is kept. Lower lr (now 1e+30)" in told
    assert all((tmp_path / f"seed{seed}" / "model.safetensors").exists() for seed in (0, 2))
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        train_all(runs, jobs=0)


@pytest.mark.slow
def test_side_by_side_is_the_same(tmp_path: Path) -> None:
    """In processes of their own: the same weights, and a diverged seed named."""
    found = []
    for jobs in (1, 2):
        runs = [majority_run(tmp_path / f"{jobs}-{seed}", seed, lr=1e30 if seed == 1 else 1e-3) for seed in (0, 1, 2)]
        train_all(runs, jobs=jobs, progress=False)
        assert list(diverged(runs)) == ["norm layernorm, seed 1"]
        found.append([load_run(runs[i].folder).state_dict() for i in (0, 2)])
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.values(), other.values(), strict=True))


@pytest.mark.slow
def test_side_by_side_the_first_refusal_stops_all(tmp_path: Path) -> None:
    """A run that cannot go on is told at once; what was waiting behind it is not begun."""
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "thesis.txt").write_text("mine")
    runs = [majority_run(tmp_path / str(seed), seed, steps=20_000) for seed in range(6)]
    with pytest.raises(FileExistsError, match="is not empty and holds no lab run"):
        train_all(runs, jobs=2, progress=False)
    assert not (tmp_path / "5").exists()
    assert not list(tmp_path.glob("*/model.safetensors"))


def model_of(norm: str, radius: str = "sqrt(d)") -> LabTransformer:
    torch.manual_seed(3)
    model = majority_in_space.space_model(norm, radius).build()
    with calibrate(model):
        model(torch.arange(10)[None], return_type=None)
    return model


@pytest.mark.parametrize("norm", list(majority_in_space.STAGE_OF))
def test_dot_products_of_the_points_are_the_models_scores(norm: str) -> None:
    """Of the stage that the model has, up to the constant that a norm which does not scale divides by."""
    model = model_of(norm).double()
    _, cache = model.run_with_cache(torch.arange(10)[None])
    found = {(stage, role): vectors for stage, role, vectors in majority_in_space.points(model)}
    stage = majority_in_space.STAGE_OF[norm]
    divisor = model.blocks[0].ln1.divisor
    constant = 1.0 if divisor is None else float(divisor) ** 2
    scores = found[stage, "query"] @ found[stage, "key"].T / math.sqrt(3) / constant
    np.testing.assert_allclose(scores, cache["blocks.0.attn.hook_attn_scores"][0, 0].numpy(), rtol=1e-9, atol=1e-12)
    mean = majority_in_space.angle_to_ones(found[stage, "query"]).mean()
    assert mean == pytest.approx(float(majority_task.query_angles(model).mean()), abs=1e-6)


def test_what_each_term_does() -> None:
    """Projection puts keys into a plane, scaling on a sphere; scaling turns no query, projection does."""
    found = {(stage, role): vectors for stage, role, vectors in majority_in_space.points(model_of("layernorm"))}
    for stage in ("projected", "both"):
        np.testing.assert_allclose(found[stage, "key"].sum(-1), 0, atol=1e-12)
    for stage in ("scaled", "both"):
        np.testing.assert_allclose(np.linalg.norm(found[stage, "key"], axis=-1), math.sqrt(3), rtol=1e-12)
    turned = {stage: majority_in_space.angle_to_ones(found[stage, "query"]) for stage in majority_in_space.STAGES}
    np.testing.assert_allclose(turned["scaled"], turned["stream"], atol=1e-6)
    np.testing.assert_allclose(turned["both"], turned["projected"], atol=1e-6)
    assert np.abs(turned["projected"] - turned["stream"]).max() > 1
    with pytest.raises(ValueError, match="vector 1 is zero: it cannot be scaled"):
        majority_in_space.stages_of(torch.tensor([[1.0, 2.0, 4.0], [2.0, 2.0, 2.0]]))


def test_angles_that_are_known() -> None:
    known = {(1, 1, 1): 0.0, (-2, -2, -2): 0.0, (1, -1, 0): 90.0, (1, 0, 0): math.degrees(math.acos(1 / math.sqrt(3)))}
    np.testing.assert_allclose(
        majority_in_space.angle_to_ones(np.array(list(known), float)), list(known.values()), atol=1e-6
    )
    drawn = np.random.default_rng(0).standard_normal((200_000, 3))
    assert majority_in_space.angle_to_ones(drawn).mean() == pytest.approx(
        math.degrees(1.0), abs=0.2
    )  # standard error 0.05


@pytest.mark.slow
def test_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(majority_in_space, "STEPS_QUICK", 2)
    monkeypatch.setattr(majority_in_space, "SIZE", replace(majority_in_space.SIZE, examples=500))
    monkeypatch.setattr(majority_in_space, "CELLS", (("layernorm", "sqrt(d)"), ("scaling_only", "1/sqrt(d)")))
    request = Request(tmp_path / "m", (1,), quick=True, progress=False)
    with pytest.raises(ValueError, match=r"holds none of these [0-9]+ runs: leave out --collect"):
        run("majority_in_space", replace(request, collect=True), command="", ln_probe_version="0")
    found = run("majority_in_space", request, command="", ln_probe_version="0")
    table = found.tables["coordinates"]
    assert list(table.columns) == majority_in_space.COORDINATES
    assert len(table) == 2 * 2 * len(majority_in_space.STAGES) * 2 * 10  # cells, steps, stages, roles, classes
    told = found.summary.set_index(["norm", "step", "measure"])["seeds"]
    assert told["layernorm", 2, majority_in_space.ANGLE] == told["scaling_only", 2, majority_in_space.ACCURACY] == 1
    start = majority_in_space.angles(table).set_index(["norm", "seed", "step"])["value"]
    torch.manual_seed(1)
    first = majority_task.query_angles(majority_in_space.space_model("scaling_only", "1/sqrt(d)").build())
    assert start["scaling_only", 1, 0] == pytest.approx(float(first.mean()), abs=1e-3)
