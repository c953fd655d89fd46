"""The laboratory by its definitions: training, cells as torch's, labels by brute force, majority, targets."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from ln_probe.analyses.lab.approximation import relative as targets
from ln_probe.analyses.lab.approximation.approximation import ApproximationTask, Cell
from ln_probe.analyses.lab.approximation.text_models import RelativeTextConfig
from ln_probe.analyses.lab.counting import counting, tasks, traces
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig
from ln_probe.analyses.lab.crasp.crasp import CRaspError, parse
from ln_probe.analyses.lab.crasp.read_back import read_back
from ln_probe.analyses.lab.crasp.weights import CompiledProgram, compile_program
from ln_probe.analyses.lab.experiments import Request, run
from ln_probe.analyses.lab.language_model import remove_norm
from ln_probe.analyses.lab.majority import majority
from ln_probe.analyses.lab.norms import NORM_KINDS, Norm, calibrate
from ln_probe.analyses.lab.text_task import TextTask, read_tokenizer
from ln_probe.analyses.lab.train import TrainConfig, load_run, train
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer, alibi_slopes, sinusoidal_table

SHAPE = LabConfig(n_layers=1, d_model=8, n_heads=2, d_vocab=280, n_ctx=8)
SHORT = TrainConfig(steps=2, batch=2, save_at=(0,))


def compiled(source: str, **options: Any) -> CompiledProgram:
    return compile_program(parse(source), **options)


def refused_run(out: Path, name: str = "majority", **options: Any) -> Any:
    return run(name, Request(out, **{"seeds": (0,)} | options), command="", ln_probe_version="0")


REFUSED: list[tuple[Callable[[Path, Path], Any], type[Exception], str]] = [
    (lambda out, _: refused_run(out, seeds=()), ValueError, "seeds"),
    (lambda out, _: refused_run(out, "language_model"), ValueError, "text"),
    (lambda out, text: refused_run(out, texts=(text,)), ValueError, "no text"),
    (lambda out, text: refused_run(text), FileExistsError, "file"),
    (lambda out, text: refused_run(out, "fresh_seeds", texts=(text,)), ValueError, "trained on"),
    (lambda out, _: replace(SHAPE, positions="rotary", d_head=5), ValueError, "odd"),  # type: ignore[arg-type]
    (lambda out, _: replace(SHAPE, d_head=None, n_heads=3), ValueError, "divisible"),
    (lambda out, _: replace(SHAPE, norm="batchnorm"), ValueError, "unknown"),
    (lambda out, _: Norm("none", 4, divisor=2.0, radius=1.0), ValueError, "not both"),
    (lambda out, _: Norm("none", 4, divisor=0.0), ValueError, "positive"),
    (lambda out, _: SHAPE.build()(torch.zeros(1, 9, dtype=torch.long)), ValueError, "context"),
    (lambda out, text: TextTask([text], 280, 100_000), ValueError, "short"),
    (lambda out, _: read_tokenizer(remove_norm.start_folder(), 1023), ValueError, "1024"),
    (lambda out, _: compiled("x := Q_a").tokens(["a", "aa"]), ValueError, "lengths"),
    (lambda out, _: compiled("x := Q_a").run(["a" * 512]), ValueError, "513"),  # with BOS
    (lambda out, _: compiled("x := 400000000 * #[Q_a] > #[Q_b]", n_ctx=10**6), CRaspError, "factors"),
    (lambda out, _: compiled("x := Q_a", eps=-1e-5), ValueError, "eps"),
    (lambda out, _: read_back(compiled("x := Q_a", norm="none")), ValueError, "norm"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_refused(number: int, tmp_path: Path, prose: Path) -> None:
    call, error, word = REFUSED[number]
    with pytest.raises(error, match=word):
        call(tmp_path, prose)


def test_taggers_by_definition() -> None:
    model = counting.TransformerSpec(2, 2, "layernorm", 12).build()
    words = torch.randint(2, (3, 9), generator=torch.Generator().manual_seed(0))
    for t in range(9):
        alone = model.body(torch.cat([torch.full((3, 1), 2), words[:, : t + 1]], dim=1))[:, -1, :2]
        torch.testing.assert_close(model(words)[:, t], alone, rtol=1e-4, atol=1e-5)
    specs = {cell: counting.Cell("L5", cell).spec() for cell in ("qrnn+", "qrnn x2", counting.TRANSFORMER)}
    assert specs[counting.TRANSFORMER].to_dict()["n_ctx"] == 1025
    plus, twice = specs["qrnn+"].build(), specs["qrnn x2"].build()
    x = plus.layers[0](plus.embed(words))
    torch.testing.assert_close(plus(words), plus.out(1 / (1 + (-plus.plus(x)).exp())))
    assert [layer.window for layer in twice.layers] == [2, 1]
    torch.testing.assert_close(twice(words), twice.out(twice.layers[1](twice.layers[0](twice.embed(words)))))


def test_runs_that_cannot_go_on(tmp_path: Path, prose: Path) -> None:
    task, out = TextTask([prose], 280, 8), tmp_path / "run"
    train(task, SHAPE, SHORT, out, progress=False)
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-4] + np.array([math.nan], np.float32).tobytes())
    with pytest.raises(ValueError, match="NaN"):
        load_run(out)
    (out / "model.safetensors").unlink()
    with FileLock(out / ".lock"), pytest.raises(FileExistsError, match="another process"):
        train(task, SHAPE, SHORT, out, progress=False)
    (out / "state.pt").write_bytes(b"not a state")
    with pytest.raises(ValueError, match="damaged"):
        train(task, SHAPE, SHORT, out, progress=False)


def belongs(language: str, word: str) -> bool:
    if language == "L5":
        return abs(word.count("a") - word.count("b")) < 5
    after = "a" if language == "anbnaS" else ""
    return any(word.startswith("a" * n + "b" * n + after) for n in range(1, len(word) + 1))


@pytest.mark.parametrize("language", ["L5", "anbnS", "anbnaS"])
def test_labels_of_all_short_words(language: str) -> None:
    words = list(itertools.product((0, 1), repeat=9))
    labels = tasks.prefix_labels(language, torch.tensor(words))
    for word, row in zip(words, labels.tolist(), strict=True):
        letters = "".join("ab"[i] for i in word)
        assert row == [belongs(language, letters[: t + 1]) for t in range(9)], letters


class Known(torch.nn.Module):
    """Knows a^n b^n (c^n) for a range of n and n = 12, and gives a wrong token a chance at the end of other words."""

    def __init__(self, letters: int, knows: tuple[int, int], chance: float) -> None:
        super().__init__()
        self.letters, self.knows, self.chance = letters, knows, chance

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = int((tokens[0] == 1).sum())
        table = tasks.allowed_next(self.letters, n).double()
        p = table / table.sum(-1, keepdim=True)
        if not self.knows[0] <= n <= self.knows[1] and n != 12:
            p[-1] = (1 - self.chance) * p[-1]
            p[-1, 1] += self.chance
        return (p + 1e-12).log()[None]


@pytest.mark.parametrize("letters", [2, 3])
def test_exactness_of_known_networks(letters: int) -> None:
    for knows, chance, expected in (
        ((1, 7), 0.02, (1, 7, 12)),
        ((3, 7), 0.02, (3, 7, 12)),
        ((3, 7), 0.004, (1, 12, 12)),  # below what counts as accepted
        ((20, 20), 0.02, (12, 12, 12)),  # of one n
        ((1, 7), 0.999, (1, 7, 7)),  # then EOS itself is rejected
    ):
        found = tasks.counted(Known(letters, knows, chance), letters, 12)
        assert tuple(found[key] for key in ("exact_from", "exact_to", "accepted_to")) == expected


@pytest.mark.parametrize(("cell", "site", "norm"), [
    *((cell, site, norm) for cell in ("gru", "rnn_tanh") for site in ("state", "gates") for norm in NORM_KINDS[:3]),
    *((cell, "nowhere", "none") for cell in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
    *(("lstm", site, norm) for site in ("state", "readout", "gates") for norm in NORM_KINDS[:3]),
])  # fmt: skip
def test_a_norm_in_the_cell_by_definition(cell: str, site: str, norm: str) -> None:
    """The equations of each cell letter by letter, with the laboratory's norm at its place; values and gradients."""
    torch.manual_seed(0)
    layer = RecurrentConfig(cell, 3, 2, norm=norm, norm_site=site).build().double().layers[0]
    if layer.norm_state is not None:
        assert (layer.norm_state.w is None) == (layer.norm_state.b is None) == (site == "state")
    for weight in layer.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    x = torch.randn(5, 7, 4, dtype=torch.float64)
    w_ih, w_hh, b_ih, b_hh = layer.weights.parameters()
    h, c = states = [torch.zeros(5, 10).double()] * 2
    for t in range(7):
        i, r = x[:, t] @ w_ih.T, h @ w_hh.T
        if site == "gates":
            i, r = layer.norm_input(i), layer.norm_recurrent(r)
        i, r = i + b_ih, r + b_hh
        if cell == "lstm":
            put, keep, new, show = (i + r).chunk(4, dim=-1)
            c = keep.sigmoid() * c + put.sigmoid() * new.tanh()
            c = layer.norm_state(c) if site == "state" else c
            h = show.sigmoid() * (layer.norm_state(c) if site == "readout" else c).tanh()
        elif cell == "gru":
            (i_r, i_z, i_n), (r_r, r_z, r_n) = i.chunk(3, dim=-1), r.chunk(3, dim=-1)
            z = (i_z + r_z).sigmoid()
            h = z * h + (1 - z) * (i_n + (i_r + r_r).sigmoid() * r_n).tanh()
        else:
            h = (i + r).tanh() if cell == "rnn_tanh" else (i + r).relu()
        h = layer.norm_state(h) if site == "state" and cell != "lstm" else h
        states.append(h)
    expected, weights, parameters = torch.stack(states[2:], dim=1), torch.randn(7, 10).double(), [*layer.parameters()]
    gradients = torch.autograd.grad((expected * weights).sum(), parameters)
    for out in (layer(x), layer.unfused(x)):  # torch's kernel, where there is no norm, and step by step
        actual = (out, *torch.autograd.grad((out * weights).sum(), parameters))
        torch.testing.assert_close(actual, (expected, *gradients), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("cell", ["qrnn", "qrnn f", "qrnn ifo"])
def test_qrnn_by_definition(cell: str) -> None:
    torch.manual_seed(0)
    model = RecurrentConfig(cell, 2, 2).build().double()
    layer, x = model.layers[0], torch.randn(1, 6, 4, dtype=torch.float64)
    weight, bias = layer.gates.weight, layer.gates.bias
    c, out, before = torch.zeros(10).double(), [], torch.cat([torch.zeros(1, 4).double(), x[0]])
    for t in range(6):
        gates = (weight @ torch.cat([x[0, t], before[t]]) + bias).split(10)
        z, f = gates[0].tanh(), gates[1].sigmoid()
        i = gates[3].sigmoid() if cell == "qrnn ifo" else 1 - f
        c = f * c + i * z
        out.append(c if cell == "qrnn f" else gates[2].sigmoid() * c)
    torch.testing.assert_close(layer(x)[0], torch.stack(out))


def test_which_dimension_counts() -> None:
    """One that turns, straight both ways; without such a one the straightest that turns, and no candidate."""
    up, bent = np.arange(20.0), np.arange(20.0) ** 1.5
    still, rises, turns = [0 * up] * 3, [up, up + 20, up + 40], [up, bent[::-1], 0 * up]
    counts, later = [0 * up, 3 * up, -2 * up], [up, up, -up]
    trace = np.stack([np.stack(d) for d in (still, rises, turns, counts, later)], axis=2)
    assert traces.counter_of(trace, 2)[2] == 2
    assert traces.counter_of(trace[:, :, :4], 2) == (3, 1, 1)
    assert traces.counter_of(trace, 1) == (2, 0, 0)
    assert traces.counter_of(trace[:, :, :2], 2) == (0, 0, 0)
    wave = 5 * up + np.where(up == 9, 1.0, 0.0)
    line = traces.line_through(wave)
    x = np.arange(6, 21)
    slope, start = np.polyfit(x, wave[5:], 1)
    assert line.slope == pytest.approx(slope)
    assert line.off == pytest.approx(np.abs(wave[5:] - start - slope * x).max() / slope)
    assert line.r2 == pytest.approx(np.corrcoef(x, wave[5:])[0, 1] ** 2)
    assert np.isnan(traces.line_through(0 * up + 3).r2)
    assert traces.line_through(0 * up + 3).off == math.inf


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


@pytest.mark.parametrize(("norm", "radius"), [
    *((norm, None) for norm in NORM_KINDS), ("none", 8**-0.5), *(("layernorm", part) for part in majority.PARTS),
])  # fmt: skip
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


def random_inputs(size: int, length: int = targets.LENGTH, seed: int = 0) -> torch.Tensor:
    return 2.0 * torch.randint(2, (size, length), generator=torch.Generator().manual_seed(seed)).double() - 1


def test_targets_by_hand() -> None:
    x, s = random_inputs(3), np.arange(1, targets.LENGTH + 1)
    rows = x.numpy()
    with np.errstate(divide="ignore"):
        power = np.where(s < 1000, (1000.0 - s) ** -0.5, 0)
    np.testing.assert_allclose(targets.evaluate("4a", x), rows @ power, atol=1e-12)
    np.testing.assert_allclose(targets.evaluate("4b", x), rows @ np.exp(-5.0 * (1000 - s)), atol=1e-12)
    np.testing.assert_allclose(targets.evaluate("2b", x), rows[:, 47] + rows[:, 55] + rows[:, 98], atol=1e-12)
    only = x.clone()
    only[:, 98] *= -1
    assert not torch.equal(targets.evaluate("2a", x), targets.evaluate("2a", only))
    only[:, [98, 99]] *= -1
    for target in ("1b", "2a", "2b"):
        assert torch.equal(targets.evaluate(target, x), targets.evaluate(target, only))


@pytest.mark.parametrize("dot_product", [True, False])
def test_attention_is_its_definition(dot_product: bool) -> None:
    torch.manual_seed(0)
    model = RelativeTextConfig(2, 4, 50, 12, d_model=16, dot_product=dot_product).build().double()
    attention = model.blocks[1].attn
    with torch.no_grad():
        attention.log_slope.normal_()
        if dot_product:
            attention.W_Q.normal_()
            attention.W_K.normal_()
    tokens = torch.randint(50, (3, 12))
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(model(tokens), logits, rtol=1e-10, atol=1e-10)  # the fused path
    q, k = cache["blocks.1.attn.hook_q"], cache["blocks.1.attn.hook_k"]
    scores = torch.full((3, 4, 12, 12), -math.inf, dtype=torch.float64)
    for head in range(4):
        for t in range(12):
            for s in range(t + 1):
                dot = (q[:, t, head] * k[:, s, head]).sum(-1) / 2 if dot_product else 0.0
                scores[:, head, t, s] = dot - attention.log_slope[head].exp().item() * math.log(1 + t - s)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"], scores.softmax(-1), rtol=1e-9, atol=1e-12)
    trained = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
    assert ({"W_Q", "W_K", "b_Q", "b_K"} & trained != set()) == dot_product


def adaptive_by_hand(grain: float = 1e-7) -> targets.RelativeTransformer:
    """Two heads with the dot product and no FFN whose error is near 0, in float64.

    Args:
        grain: of a head's weight on all lags but its own together.
    """
    model = targets.RelativeConfig(targets.LENGTH, 2, 0, "table", True).build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed[0, 0], model.embed[1, 0] = -1.0, 1.0  # the input itself, in one dimension of the stream
        model.embed[:, 1] = 1.0
        for head, (place, used_for) in enumerate(((targets.IF_PLUS, 1.0), (targets.IF_MINUS, -1.0))):
            model.bias[head] = np.log(grain / targets.LENGTH)
            model.bias[head, targets.LENGTH - place] = 0.0
            # The score of a token: 0 where the head is used, else large for +1s and as small for -1s.
            model.W_Q[head, 0, 0], model.W_Q[head, 1, 0] = -used_for, 1.0
            model.W_K[head, 0, 0] = -np.log(grain) * np.sqrt(targets.D_HEAD)
            model.W_V[head, 0, 0] = model.W_O[head, 0, 2] = 1.0
        model.out.weight[0, 2] = 1.0  # the sum of both: one of them is 1
        model.out.bias[0] = -1.0
    return model


def test_two_heads_with_the_dot_product_do_it_by_hand() -> None:
    model, x = adaptive_by_hand(), random_inputs(4096, seed=3)
    evaluated_on = ApproximationTask("adaptive")._evaluation
    combinations = evaluated_on[:, [999, 98, 47]].unique(dim=0, return_counts=True)[1]
    assert combinations.tolist() == [len(evaluated_on) // 8] * 8  # of what the last input and both memories are
    assert targets.evaluate("adaptive", evaluated_on).var(correction=0) == targets.variance("adaptive")
    with torch.no_grad():
        assert float((model(x) - targets.evaluate("adaptive", x)).pow(2).mean()) < 1e-10
        assert float(ApproximationTask("adaptive").loss(model, x)) < 1e-10
        found = ApproximationTask("2b").evaluate(Cell("2b", "table", 1).spec().build())
        assert found["relative_mse"] * targets.variance("2b") == pytest.approx(found["mse"])
        assert 1e-10 < float((adaptive_by_hand(1e-2)(x) - targets.evaluate("adaptive", x)).pow(2).mean()) < 1e-2


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_training_is_torchs(schedule: str, optimizer: str, tmp_path: Path, prose: Path) -> None:
    """The same weights by torch's optimizer, a rate by formula, clipping by hand and decay of matrices alone."""
    task = TextTask([prose], 280, 8)
    config: Any = replace(
        SHORT, steps=6, evaluate_at=(4,), seed=3, lr=0.02, lr_end=0.004, warmup=2, weight_decay=0.3, clip=0.4,
        optimizer=optimizer, schedule=schedule, decay_steps=None if schedule == "cosine" else 8,
    )  # fmt: skip
    shape = replace(SHAPE, norm="projection_only")
    trained = train(task, shape, config, tmp_path / "run", progress=False)
    torch.manual_seed(3)
    model = shape.build()
    with calibrate(model):
        model(task.batch(0, 2, 3))
    parameters = list(model.parameters())
    decayed = [{"params": [p], "weight_decay": 0.3 if p.ndim > 1 else 0.0} for p in parameters]
    steps = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[optimizer](decayed, betas=(0.9, 0.98))
    losses = []
    for step in range(6):
        part = (step - 2) / ((config.decay_steps or 6) - 2)
        falling = {"cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part, "constant": 1.0}[schedule]
        for group in steps.param_groups:
            group["lr"] = 0.02 * (step + 1) / 2 if step < 2 else 0.004 + 0.016 * falling
        loss = model(task.batch(step, 2, 3), return_type="loss")
        losses.append(loss.item())
        steps.zero_grad()
        loss.backward()
        norm = float(torch.cat([p.grad.flatten() for p in parameters]).norm())
        for parameter in parameters:
            parameter.grad *= min(1.0, 0.4 / (norm + 1e-6))
        steps.step()
    for (name, ours), theirs in zip(trained.named_parameters(), parameters, strict=True):
        if not name.endswith("b_K"):  # whose gradient is rounding alone: softmax does not see it
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 6]
    assert [row["train_loss"] for row in rows] == pytest.approx([np.mean(losses[:4]), np.mean(losses[4:])], rel=1e-5)


def test_positions_by_formula() -> None:
    """Rotary: coordinates j and j + d_head/2 are turned by the position over 10000^(2j/d_head) (Su et al. 2021)."""
    model = replace(SHAPE, positions="rotary", d_head=6).build().double()
    assert not any("rotary" in name for name in model.state_dict()), "files hold trained numbers"
    _, cache = model.run_with_cache(torch.randint(280, (1, 8)))
    turned = []
    for letter in "qk":
        x = cache[f"blocks.0.attn.hook_{letter}"][0]
        angle = torch.arange(8.0).double()[:, None] / 10_000 ** (torch.arange(3) / 3)
        turned.append(torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(8, 1, 3).double(), angle[:, None]))
    scores = torch.einsum("qhj,khj->hqk", turned[0], turned[1].conj()).real / math.sqrt(6)
    expected = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf).softmax(-1)
    torch.testing.assert_close(cache["blocks.0.attn.hook_pattern"][0], expected)
    table = sinusoidal_table(20, 7)
    expected = [[(math.sin, math.cos)[i % 2](t / 10_000 ** (i // 2 * 2 / 7)) for i in range(7)] for t in range(20)]
    torch.testing.assert_close(table, torch.tensor(expected), atol=1e-5, rtol=0)
    assert alibi_slopes(4).tolist() == [2**-2, 2**-4, 2**-6, 2**-8]
    names = {p: replace(SHAPE, positions=p).positional_embedding_type for p in ("learned", "none", "rotary", "alibi")}
    assert names == {"learned": "standard", "none": "standard", "rotary": "rotary", "alibi": "alibi"}


@pytest.mark.parametrize("kernel", ["log", "linear", "t5"])
def test_lags_by_formula(kernel: str) -> None:
    features = targets.lag_features(kernel, 300).tolist()
    for z in range(300):
        beyond = 16 * math.log(min(max(z, 16), 128) / 16) / math.log(8)
        phi = {"log": -math.log(z) if z else -math.inf, "linear": -z, "t5": -min(z, 16) - beyond}[kernel]
        assert features[z] == pytest.approx(phi), z


def test_weights_start_as_torchs_or_gpt2s() -> None:
    torch.manual_seed(0)
    shape: Any = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_vocab": 500, "n_ctx": 300, "tied": False}
    model = LabConfig(**shape, embed_std=0.3).build()
    block = model.blocks[1]
    wide = {model.embed.W_E: 0.3, model.pos_embed.W_pos: 0.02, block.attn.W_Q: 0.02, model.W_U: 0.02}
    for weight, std in (wide | {block.attn.W_O: 0.01, block.mlp.W_out: 0.01, block.mlp.W_in: 0.02}).items():
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert not any(parameter.any() for name, parameter in model.named_parameters() if ".b_" in name)
    model = LabConfig(**shape, init="torch").build()
    attention, linear = torch.nn.MultiheadAttention(64, 4), torch.nn.Linear
    block = model.blocks[0]
    bounds = {
        block.attn.W_Q: attention.in_proj_weight, block.attn.W_V: attention.in_proj_weight,
        block.attn.W_O: attention.out_proj.weight, block.mlp.W_in: linear(64, 256).weight,
        block.mlp.b_in: linear(64, 256).bias, block.mlp.W_out: linear(256, 64).weight,
        block.mlp.b_out: linear(256, 64).bias, model.W_U: linear(64, 500).weight, model.b_U: linear(64, 500).bias,
    }  # fmt: skip
    for ours, theirs in bounds.items():
        assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.08)
        assert float(ours.mean()) == pytest.approx(0, abs=0.2 * float(ours.abs().max()))
    for table in (model.embed.W_E, model.pos_embed.W_pos):
        assert float(table.std()) == pytest.approx(1, rel=0.05)
    relative = targets.RelativeConfig(9, 64, 5, "table", True).build()  # sums over what is read keep their variance
    for weight, inputs in ((relative.W_Q, 1), (relative.W_K, 1), (relative.W_V, 1), (relative.W_O, 64)):
        assert weight.std().item() == pytest.approx((inputs * weight.shape[1]) ** -0.5, rel=0.05)


def by_definition(model: Any, x: torch.Tensor) -> torch.Tensor:
    """A RelativeTransformer through the whole attention row of the last position."""
    pre = model.cfg.norm_order == "pre"
    stream = model.embed[(x > 0).long()]
    read = model.norm_attention(stream) if pre else stream
    score = model.lag_bias().flip(1).expand(len(x), -1, -1)  # [batch head pos]
    if model.cfg.dot_product:
        query = torch.einsum("bd,hde->bhe", read[:, -1], model.W_Q)
        score = score + torch.einsum("bhe,bsd,hde->bhs", query, read, model.W_K) / math.sqrt(targets.D_HEAD)
    z = torch.einsum("bhs,bsd,hde->bhe", score.softmax(-1), read, model.W_V)
    last = stream[:, -1] + torch.einsum("bhe,hed->bd", z, model.W_O)
    last = last if pre else model.norm_attention(last)
    if model.ffn is not None:
        last = last + model.ffn(model.norm_ffn(last) if pre else last)
    last = last if pre else model.norm_ffn(last)
    return model.out(last).squeeze(-1)


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.sampled_from(("log", "linear", "t5", "table")),
    dot_product=st.booleans(),
    norm=st.sampled_from(NORM_KINDS),
    order=st.sampled_from(("pre", "post")),
    heads=st.integers(1, 4),
    width=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_the_model_is_its_definition(
    kernel: str, dot_product: bool, norm: str, order: str, heads: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = targets.RelativeConfig(20, heads, width, kernel, dot_product, norm, order).build().double()
    assert {type(model.norm_attention), type(model.norm_ffn)} == {torch.nn.Identity if norm == "none" else Norm}
    if kernel == "table":
        torch.nn.init.normal_(model.bias)
    x = random_inputs(6, 20, seed)
    with calibrate(model):
        model(x)
    torch.testing.assert_close(model(x), by_definition(model, x), rtol=1e-10, atol=1e-10)
