"""The counting experiment: labels by brute force, cells against torch's, exactness of known networks, the gate."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_runs import ran

from ln_probe.analyses.lab.counting import counting, counting_tasks
from ln_probe.analyses.lab.counting.counting import gate, gate_table
from ln_probe.analyses.lab.counting.counting_tasks import (
    EOS,
    PAD,
    PREFIX_LANGUAGES,
    allowed_next,
    bos,
    counted,
    counted_words,
    prefix_labels,
    sample_prefixes,
)
from ln_probe.analyses.lab.counting.recurrent import CELLS, NORM_SITES, RecurrentConfig
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.train import TrainConfig


def belongs(language: str, word: str) -> bool:
    if language == "L5":
        return abs(word.count("a") - word.count("b")) < 5
    after = "a" if language == "anbnaS" else ""
    return any(word.startswith("a" * n + "b" * n + after) for n in range(1, len(word) + 1))


@pytest.mark.parametrize("language", PREFIX_LANGUAGES)
def test_labels_of_all_short_words(language: str) -> None:
    words = list(itertools.product((0, 1), repeat=9))
    labels = prefix_labels(language, torch.tensor(words))
    for word, row in zip(words, labels.tolist(), strict=True):
        letters = "".join("ab"[i] for i in word)
        assert row == [belongs(language, letters[: t + 1]) for t in range(9)], letters


def test_half_of_the_words_begin_with_a_counted_prefix() -> None:
    words = sample_prefixes("anbnS", 40, 4000, torch.Generator().manual_seed(0))
    # n is 0 for half the words and for one in 21 of the others; those are uniform, n >= 5 is then rare: 2^-10 each.
    long = (words.tokens[:, :5] == 0).all(1) & words.labels.any(1)
    n = (words.tokens == 0).long().cumprod(1).sum(1)
    assert float(long.double().mean()) == pytest.approx(0.5 * 16 / 21, abs=0.04)  # n = 5 … 20
    assert int(n[long].max()) >= 20
    uniform = sample_prefixes("L5", 40, 4000, torch.Generator().manual_seed(0)).tokens.double().mean(0)
    assert float((uniform - 0.5).abs().max()) < 0.04  # five standard deviations


def test_counted_words() -> None:
    inputs, targets = counted_words(3, torch.tensor([1, 2]))
    assert bos(3) == 4
    assert inputs.tolist() == [[4, 1, 2, 3, EOS, EOS, EOS], [4, 1, 1, 2, 2, 3, 3]]
    assert targets.tolist() == [[1, 2, 3, EOS, PAD, PAD, PAD], [1, 1, 2, 2, 3, 3, EOS]]


@pytest.mark.parametrize("letters", [2, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_may_come_next_by_brute_force(letters: int, n: int) -> None:
    language = [[bos(letters), *(1 + x for x in range(letters) for _ in range(m)), EOS] for m in range(1, n + 3)]
    word = language[n - 1]
    table = allowed_next(letters, n)
    for i in range(letters * n + 1):
        following = {other[i + 1] for other in language if other[: i + 1] == word[: i + 1]}
        assert set(table[i].nonzero().flatten().tolist()) == following


class Known(torch.nn.Module):
    """Knows a^n b^n (c^n) for a range of n, and gives a wrong token a chance at the end of other words."""

    def __init__(self, letters: int, knows: tuple[int, int], chance: float) -> None:
        super().__init__()
        self.letters, self.knows, self.chance = letters, knows, chance

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = int((tokens[0] == 1).sum())
        table = allowed_next(self.letters, n).double()
        p = table / table.sum(-1, keepdim=True)
        if not self.knows[0] <= n <= self.knows[1]:
            p[-1] = (1 - self.chance) * p[-1]
            p[-1, 1] += self.chance
        return (p + 1e-12).log()[None]


@pytest.mark.parametrize("letters", [2, 3])
def test_exactness_of_known_networks(letters: int) -> None:
    for knows, chance, expected in (
        ((1, 7), 0.02, (1, 7, 12)),
        ((3, 7), 0.02, (3, 7, 12)),
        ((3, 7), 0.004, (1, 12, 12)),  # below what counts as accepted
        ((20, 20), 0.02, (0, 0, 12)),
        ((1, 7), 0.999, (1, 7, 7)),  # then EOS itself is rejected
    ):
        found = counted(Known(letters, knows, chance), letters, 12)
        assert tuple(found[key] for key in ("exact_from", "exact_to", "accepted_to")) == expected


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_step_by_step_is_torchs_kernel(cell: str) -> None:
    torch.manual_seed(0)
    model = RecurrentConfig(cell, 3, 2, n_layers=2).build().double()
    x = torch.randn(5, 17, 4, dtype=torch.float64)
    layer = model.layers[0]
    torch.testing.assert_close(layer.unfused(x), layer.weights(x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", NORM_KINDS)
@pytest.mark.parametrize(
    ("cell", "site"),
    [(c, s) for c in ("lstm", "gru", "rnn_tanh", "rnn_relu") for s in NORM_SITES if s != "readout" or c == "lstm"],
)
def test_compiled_recurrence_is_the_step_by_step_one(cell: str, site: str, norm: str) -> None:
    torch.manual_seed(0)
    layer = RecurrentConfig(cell, 3, 2, norm=norm, norm_site=site).build().double().layers[0]
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    x = torch.randn(5, 7, 4, dtype=torch.float64, requires_grad=True)
    seen = torch.randn(5, 7, 10, dtype=torch.float64)
    both = [
        (out, torch.autograd.grad((out * seen).sum(), [x, *layer.parameters()])) for out in (layer(x), layer.unfused(x))
    ]
    torch.testing.assert_close(both[0], both[1], rtol=1e-10, atol=1e-10)


def test_hooks_inside_a_recurrence_see_every_step() -> None:
    torch.manual_seed(0)
    layer = RecurrentConfig("lstm", 3, 2, norm="layernorm", norm_site="state").build().layers[0]
    x, seen = torch.randn(5, 7, 4), []
    before = layer(x)
    layer.norm_state.hook_scale.add_hook(lambda scale, hook: seen.append(scale.shape))
    torch.testing.assert_close(layer(x), before)
    assert seen == [(5, 1)] * 7


@pytest.mark.parametrize("cell", ["qrnn", "qrnn f", "qrnn ifo"])
def test_qrnn_by_definition(cell: str) -> None:
    torch.manual_seed(0)
    model = RecurrentConfig(cell, 2, 2).build().double()
    layer, x = model.layers[0], torch.randn(1, 6, 4, dtype=torch.float64)
    weight, bias = layer.gates.weight, layer.gates.bias
    c, out = torch.zeros(10, dtype=torch.float64), []
    for t in range(6):
        before = x[0, t - 1] if t else torch.zeros(4, dtype=torch.float64)
        gates = (weight @ torch.cat([x[0, t], before]) + bias).split(10)
        z, f = gates[0].tanh(), gates[1].sigmoid()
        i = gates[3].sigmoid() if cell == "qrnn ifo" else 1 - f
        c = f * c + i * z
        out.append(c if cell == "qrnn f" else gates[2].sigmoid() * c)
    torch.testing.assert_close(layer(x)[0], torch.stack(out))


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("site", NORM_SITES)
@pytest.mark.parametrize("norm", ["layernorm", "none"])
def test_outputs_do_not_look_ahead(cell: str, site: str, norm: str) -> None:
    if norm != "none" and (cell.startswith("qrnn") or (site == "readout" and cell != "lstm")):
        with pytest.raises(ValueError, match=f"a {cell[:4]}.* has no (recurrent product|readout)"):
            RecurrentConfig(cell, 2, 2, norm=norm, norm_site=site)
        return
    torch.manual_seed(0)
    model = RecurrentConfig(cell, 2, 2, n_layers=2, norm=norm, norm_site=site).build()
    x = torch.randint(2, (3, 12))
    later = x.clone()
    later[:, 8:] = 1 - later[:, 8:]
    torch.testing.assert_close(model(x)[:, :8], model(later)[:, :8])
    assert not torch.equal(model(x)[:, 8:], model(later)[:, 8:])


def test_each_term_acts_on_the_state() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 30, 4)
    for norm, has_mean, has_size in (
        ("layernorm", False, False),
        ("projection_only", False, True),
        ("scaling_only", True, False),
    ):
        layer = RecurrentConfig("rnn_relu", 2, 2, norm=norm, norm_site="state", eps=0.0).build().layers[0]
        with torch.no_grad():
            states = layer(x)
        assert (float(states.mean(-1).abs().max()) > 1e-5) == has_mean
        sizes = states.norm(dim=-1)
        assert (float((sizes - math.sqrt(10)).abs().max()) > 1e-4) == has_size


def test_readout_leaves_the_counter() -> None:
    """A norm on the readout does not enter the LSTM's state: from equal gates it is the plain cell's."""
    torch.manual_seed(0)
    plain = RecurrentConfig("lstm", 2, 2).build().layers[0]
    read = RecurrentConfig("lstm", 2, 2, norm="layernorm", norm_site="readout").build().layers[0]
    read.weights.load_state_dict(plain.weights.state_dict())
    c, gates = torch.randn(1, 10), torch.randn(1, 40)
    assert torch.equal(read._lstm(gates, c)[1], plain._lstm(gates, c)[1])
    assert not torch.equal(read._lstm(gates, c)[0], plain._lstm(gates, c)[0])


@settings(max_examples=100, deadline=None)
@given(a=st.integers(0, 10_000), b=st.integers(0, 10_000))
def test_the_gate_is_the_sign_of_the_difference(a: int, b: int) -> None:
    if a + b == 0:
        return
    shares = torch.tensor([a, b], dtype=torch.float64) / (a + b)
    projected = gate(shares, "projection_only")
    torch.testing.assert_close(projected, torch.tensor([a - b, b - a], dtype=torch.float64) / (2 * (a + b)))
    if a != b:
        sign = math.copysign(1, a - b)
        torch.testing.assert_close(gate(shares, "layernorm"), torch.tensor([sign, -sign], dtype=torch.float64))


def test_gate_table() -> None:
    table = gate_table().set_index(["norm", "length"])["output"]
    # eps = 1e-5 against a variance of 1 / (4 t²): by hand at t = 5001
    assert table["layernorm", 5001] == pytest.approx(1 / math.sqrt(1 + 4 * 5001**2 * 1e-5))
    assert table["layernorm", 51] > 0.9
    assert table["projection_only", 501] == pytest.approx(1 / 1002)
    assert table["scaling_only", 501] == pytest.approx(1 / 501, rel=1e-3)
    with pytest.raises(ValueError, match="lengths must be odd and positive, got 4"):
        gate_table([4])


@pytest.mark.parametrize(("call", "said"), [
    (lambda: sample_prefixes("L5", 0, 1, torch.Generator()), "must be at least 1, got length=0, size=1"),
    (lambda: sample_prefixes("L6", 5, 1, torch.Generator()), "unknown language 'L6': known ones are L5, anbnS, anbnaS"),
    (lambda: counted_words(4, torch.tensor([1])), r"letters must be 2 \(a\^n b\^n\) or 3 \(a\^n b\^n c\^n\), got 4"),
    (lambda: counted_words(2, torch.tensor([3, 0])), "n must be at least 1, got 0"),
    (lambda: RecurrentConfig("elman", 2, 2), "unknown cell 'elman': known are lstm, gru"),
    (lambda: RecurrentConfig("lstm", 2, 2, hidden=0), "hidden must be at least 1, got 0"),
    (lambda: RecurrentConfig("lstm", 2, 2, norm="batch"), "unknown norm 'batch'"),
    (lambda: RecurrentConfig("lstm", 2, 2, norm_site="door"), "unknown norm_site 'door': known are gates, readout"),
])  # fmt: skip
def test_bad_input(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize(("lstm", "qrnn", "constant", "said"), [
    (0.995, 0.997, 0.6, ["L5, accuracy_64: 0 of 1 published orderings hold; inverted: lstm against qrnn."]),
    (1.0, 1.0, 0.6, ["L5, accuracy_64: 0 of 1 published orderings hold; equal here: lstm against qrnn."]),
    (1.0, 0.9, 0.6, ["L5, accuracy_64: 1 of 1 published orderings hold."]),
    (1.0, 0.8, 0.6, ["L5, qrnn: 80.0 % at length 64, published 90.2 %: this budget does not reach it, so it is not "
                     "compared at longer words."]),
    (1.0, 0.9, 0.95, ["L5, accuracy_64: none to compare; not a point above a constant answer (95.0 %): qrnn."]),
    (1.0, 0.9, 0.895, ["L5, accuracy_64: none to compare; not a point above a constant answer (89.5 %): qrnn."]),
])  # fmt: skip
def test_ordering_sentences(lstm: float, qrnn: float, constant: float, said: list[str]) -> None:
    means = {"lstm": lstm, "qrnn": qrnn, "gru": 1.0}
    rows = [("L5", model, "none", "none", "accuracy_64", mean) for model, mean in means.items()]
    summary = pd.DataFrame(rows, columns=[*counting.KEYS, "measure", "mean"])
    summary = summary.merge(counting.published_table(), how="left", on=[*counting.KEYS, "measure"])
    summary = summary.assign(constant_yes=constant, constant_no=1 - constant, least=summary["mean"])
    assert list(counting._ordering(summary)) == said


def test_one_seed_at_a_constant_answer_is_not_better_than_it() -> None:
    """Two seeds far above, one a hundredth of a point above: not better."""
    row = {"mean": 0.9, "least": 0.8001}
    assert not counting.better_than(0.8, row)
    assert counting.better_than(0.79, row)


def test_tagging_alone_has_tables_and_pictures() -> None:
    """Nothing of a^n b^n among the runs: columns keep their types."""
    rows = [
        (task, "lstm", "none", "none", seed, 10, f"accuracy_{n}", 0.9 + 0.01 * seed)
        for task in ("L5", "anbnaS")
        for seed in (0, 1)
        for n in (64, 2048)
    ]
    found = counting.findings(pd.DataFrame(rows, columns=[*counting.KEYS, "seed", "step", "measure", "value"]))
    assert found.summary["ci_low"].dtype == float
    assert found.summary["least"].tolist() == [0.9] * 4
    assert "lengths" in found.figures


def test_the_grid_has_what_must_be_shown() -> None:
    cells = counting.grid(quick=False)
    assert len(cells) == len(set(cells))
    for task, model in counting.PUBLISHED:
        assert counting.Cell(task, model) in cells
    for cell in cells:
        cell.spec()  # no cell that a model refuses
    assert {c.norm for c in cells if c.model == "transformer"} == {
        "layernorm",
        "scaling_only",
        "projection_only",
        "none",
    }


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (
        counting.Cell("L5", "lstm"),
        counting.Cell("L5", "qrnn x2"),
        counting.Cell("L5", "lstm", "layernorm", "state"),
        counting.Cell("L5", "transformer", "none", "blocks"),
        counting.Cell("anbn", "gru"),
    )
    monkeypatch.setattr(counting, "grid", lambda quick: cells)
    monkeypatch.setattr(counting_tasks, "EVALUATION_LABELS", 500)
    monkeypatch.setattr(counting, "training", lambda cell, quick, seed: TrainConfig(steps=2, batch=2, seed=seed))
    results = ran("counting", out := tmp_path / "counting")
    table = results.summary.set_index(["task", "model", "norm", "measure"])
    assert table.loc[("L5", "lstm", "none", "accuracy_512"), "published"] == pytest.approx(0.979)
    assert np.isnan(table.loc[("L5", "lstm", "layernorm", "accuracy_512"), "published"])
    assert table.loc[("anbn", "gru", "none", "exact_to"), "seeds"] == 2
    assert any("lstm with layernorm on its state: accuracy_512" in sentence for sentence in results.conclusions)
    assert any(sentence.startswith("anbn, gru: exact on n = ") for sentence in results.conclusions)
    values, effects = results.tables["values"], results.tables["effects"]
    far = values[values["measure"] == "accuracy_512"].pivot_table(index="norm", columns="seed", values="value")
    lstm = values[(values["model"] == "lstm") & (values["norm"] == "none") & (values["measure"] == "accuracy_512")]
    expected = far.loc["layernorm"].mean() - lstm["value"].mean()
    shown = effects[(effects["norm"] == "layernorm") & (effects["measure"] == "accuracy_512")]
    assert shown["mean"].tolist() == pytest.approx([expected])
    assert {"gate.csv", "lengths.png", "norms_over_lengths.png", "effects.csv", "exact.png"} <= {
        p.name for p in out.iterdir()
    }
    pd.testing.assert_frame_equal(ran("counting", out, collect=True).summary, results.summary)


@pytest.mark.slow
def test_quick_shows_who_counts(tmp_path: Path) -> None:
    table = ran("counting", tmp_path / "counting", (0,)).summary
    table = table.set_index(["task", "model", "norm", "measure"])["mean"]
    assert table["L5", "lstm", "none", "accuracy_512"] > table["L5", "qrnn", "none", "accuracy_512"] + 0.1
