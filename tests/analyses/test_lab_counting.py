"""Counting: labels by brute force, cells against torch, known networks, counters by hand, and traces of cells."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.counting import counters, counting, counting_traces
from ln_probe.analyses.lab.counting import counting_tasks as tasks
from ln_probe.analyses.lab.counting.counters import Cell, exact_to
from ln_probe.analyses.lab.counting.counting import gate_table
from ln_probe.analyses.lab.counting.counting_tasks import CountingTask, PrefixTask, bos, counted, counted_words
from ln_probe.analyses.lab.counting.recurrent import NORM_SITES, RecurrentConfig, RecurrentTagger
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.train import Run, TrainConfig


def belongs(language: str, word: str) -> bool:
    if language == "L5":
        return abs(word.count("a") - word.count("b")) < 5
    after = "a" if language == "anbnaS" else ""
    return any(word.startswith("a" * n + "b" * n + after) for n in range(1, len(word) + 1))


@pytest.mark.parametrize("language", tasks.PREFIX_LANGUAGES)
def test_labels_of_all_short_words(language: str) -> None:
    words = list(itertools.product((0, 1), repeat=9))
    labels = tasks.prefix_labels(language, torch.tensor(words))
    for word, row in zip(words, labels.tolist(), strict=True):
        letters = "".join("ab"[i] for i in word)
        assert row == [belongs(language, letters[: t + 1]) for t in range(9)], letters


def test_counted_words() -> None:
    inputs, targets = tasks.counted_words(3, torch.tensor([1, 2]))
    assert tasks.bos(3) == 4
    assert inputs.tolist() == [
        [4, 1, 2, 3, tasks.EOS, tasks.EOS, tasks.EOS],
        [4, 1, 1, 2, 2, 3, 3],
    ]
    assert targets.tolist() == [
        [1, 2, 3, tasks.EOS, tasks.PAD, tasks.PAD, tasks.PAD],
        [1, 1, 2, 2, 3, 3, tasks.EOS],
    ]


@pytest.mark.parametrize("letters", [2, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_what_may_come_next_by_brute_force(letters: int, n: int) -> None:
    language = [
        [tasks.bos(letters), *(1 + x for x in range(letters) for _ in range(m)), tasks.EOS] for m in range(1, n + 3)
    ]
    word = language[n - 1]
    table = tasks.allowed_next(letters, n)
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
        table = tasks.allowed_next(self.letters, n).double()
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
        found = tasks.counted(Known(letters, knows, chance), letters, 12)
        assert tuple(found[key] for key in ("exact_from", "exact_to", "accepted_to")) == expected


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "rnn_relu"])
def test_step_by_step_is_torchs_kernel(cell: str) -> None:
    torch.manual_seed(0)
    model = RecurrentConfig(cell, 3, 2, n_layers=2).build().double()
    x = torch.randn(5, 17, 4, dtype=torch.float64)
    layer = model.layers[0]
    torch.testing.assert_close(layer.unfused(x), layer.weights(x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("cell", "site", "norm"), [
    *(("lstm", site, "layernorm") for site in NORM_SITES), *(("gru", "state", norm) for norm in NORM_KINDS),
    ("gru", "gates", "layernorm"), ("rnn_tanh", "gates", "scaling_only"), ("rnn_relu", "state", "projection_only"),
])  # fmt: skip
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


@pytest.mark.parametrize(("call", "said"), [
    (lambda: tasks.sample_prefixes("L5", 0, 1, torch.Generator()), "must be at least 1, got length=0, size=1"),
    (lambda: tasks.sample_prefixes("L6", 5, 1, torch.Generator()), "unknown language 'L6': known ones are L5, anbnS"),
    (lambda: tasks.counted_words(4, torch.tensor([1])), r"letters must be 2 \(a\^n b\^n\) or 3 .*, got 4"),
    (lambda: tasks.counted_words(2, torch.tensor([3, 0])), "n must be at least 1, got 0"),
    (lambda: RecurrentConfig("elman", 2, 2), "unknown cell 'elman': known are lstm, gru"),
    (lambda: RecurrentConfig("lstm", 2, 2, hidden=0), "hidden must be at least 1, got 0"),
    (lambda: RecurrentConfig("lstm", 2, 2, norm="batch"), "unknown norm 'batch'"),
    (lambda: RecurrentConfig("lstm", 2, 2, norm_site="door"), "unknown norm_site 'door': known are gates, readout"),
    (lambda: RecurrentConfig("qrnn", 2, 2, norm="layernorm", norm_site="state"), "a qrnn.* has no recurrent product"),
    (lambda: RecurrentConfig("gru", 2, 2, norm="layernorm", norm_site="readout"), "a gru.* has no readout"),
    (lambda: gate_table([4]), "lengths must be odd and positive, got 4"),
])  # fmt: skip
def test_bad_input(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=said):
        call()


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
    monkeypatch.setattr(tasks, "EVALUATION_LABELS", 500)
    monkeypatch.setattr(counting, "training", lambda cell, quick, seed: TrainConfig(steps=2, batch=2, seed=seed))
    results = ran("counting", out := tmp_path / "counting")
    table = results.summary.set_index(["task", "model", "norm", "measure"])
    assert table.loc[("L5", "lstm", "none", "accuracy_512"), "published"] == pytest.approx(0.979)
    assert np.isnan(table.loc[("L5", "lstm", "layernorm", "accuracy_512"), "published"])
    assert table.loc[("anbn", "gru", "none", "exact_to"), "seeds"] == 2

    assert {"gate.csv", "lengths.png", "norms_over_lengths.png", "effects.csv", "exact.png"} <= {
        p.name for p in out.iterdir()
    }
    pd.testing.assert_frame_equal(ran("counting", out, collect=True).summary, results.summary)


@pytest.mark.slow
def test_quick_shows_who_counts(tmp_path: Path) -> None:
    table = ran("counting", tmp_path / "counting", (0,)).summary
    table = table.set_index(["task", "model", "norm", "measure"])["mean"]
    assert table["L5", "lstm", "none", "accuracy_512"] > table["L5", "qrnn", "none", "accuracy_512"] + 0.1


@pytest.mark.parametrize(("cell", "exact"), [
    (Cell("lstm"), 60), (Cell("rnn_relu"), 60), (Cell("mirrored lstm"), 60),
    (Cell("mirrored lstm", "projection_only", "state"), 60), (Cell("lstm", "projection_only", "state"), 1),
    (Cell("mirrored lstm", "scaling_only", "state"), 0), (Cell("rnn_relu", "layernorm", "state"), 0),
    *((Cell("gru", step=k), math.isqrt(int(counters.UNREAD * 2**k))) for k in (6, 8, 10, 12)),
    (Cell("gru", step=24), 1),
])  # fmt: skip
def test_to_which_n_a_counter_is_exact(cell: Cell, exact: int) -> None:
    assert abs(exact_to(cell.build(), 60) - exact) <= (cell.model == "gru")


@pytest.mark.parametrize("model", ["lstm", "rnn_relu"])
def test_beside_the_measure_of_trained_networks(model: str) -> None:
    found = counted(Cell(model).build(), 2, 25)  # other loops, and a word at a time
    assert found == {"exact_from": 1, "exact_to": 25, "accepted_to": 25}


def test_a_count_that_leaks_is_noticed() -> None:
    model = Cell("lstm").build()
    with torch.no_grad():
        list(model.layers[0].weights.parameters())[2][4] = 4.0  # keeps 98 % of the count
    assert 1 < exact_to(model, 60) < 20


def test_the_counters_of_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "QUICK_LARGEST", 8)
    monkeypatch.setattr(counters, "STEPS", (4, 24))
    results = ran("counters", tmp_path / "out", seeds=(0,))
    rows = results.summary.set_index(["model", "norm", "norm_site", "step"])
    assert rows.loc[("rnn_relu", "none", "none", 0), "mean"] == 8
    assert rows.loc[("lstm", "none", "none", 0), "trained"] > 200  # of the kept results
    assert (tmp_path / "out" / "gru.png").exists()


def test_unknown_networks() -> None:
    with pytest.raises(ValueError, match="unknown model 'abacus': known are lstm, mirrored lstm, rnn_relu and gru"):
        Cell("abacus").build()
    with pytest.raises(ValueError, match="a rnn_relu has no readout of its state"):
        Cell("rnn_relu", "layernorm", "readout").build()


SURE = 50.0  # of a gate: 1 - sigmoid(50) is 2e-22


def by_hand(norm: str = "none", norm_site: str = "gates") -> RecurrentTagger:
    """An LSTM of two units whose first counts a's less b's; it lets a word end where that is at most 0."""
    model = RecurrentConfig("lstm", bos(2) + 1, 3, d_embed=4, hidden=2, norm=norm, norm_site=norm_site).build()
    w_ih, w_hh, b_ih, b_hh = model.layers[0].weights.parameters()
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(4))
        for weight in (w_ih, w_hh, b_ih, b_hh, model.out.weight, model.out.bias):
            weight.zero_()
        b_ih[[0, 1, 2, 3, 6, 7]] = SURE  # put, keep and out are open; what is put is 0 but for
        w_ih[4, 1], w_ih[4, 2] = SURE, -SURE  # a and b, in the first unit
        model.out.weight[0, 0], model.out.bias[0] = -40.0, 10.0  # tanh(1) is .76: e^10 at 0, e^-20 from 1 on
    return model


def test_a_counter_by_hand_is_found_read_and_moved() -> None:
    reader = counting_traces.LetterByLetter(by_hand(), 2)
    trace = counting_traces.phases(reader, 60)
    np.testing.assert_allclose(trace[0, :, 0], np.arange(1, 61), atol=1e-9)
    np.testing.assert_allclose(trace[1, :, 0], np.arange(59, -1, -1), atol=1e-9)
    counter = counting_traces.counter_of(counting_traces.dimension_table(trace), 1)
    assert (counter.dimension, counter.earlier, counter.counting, counter.turning) == (0, 0, (0,), (0,))
    assert counting_traces.holds_to(trace[0, :, 0]) == 60
    n = np.arange(1, 61)
    np.testing.assert_array_equal(
        counting_traces.letters_read(reader, counting_traces.before_phase(reader, 1, n), 1, 90), n
    )
    slope, moves = counting_traces.carried(reader, 1, 30, np.array([1.0, 0.0]))
    assert slope == pytest.approx(1.0)
    np.testing.assert_array_equal(moves["read"], 30 + np.arange(-counting_traces.MOVED, counting_traces.MOVED + 1))
    half, _ = counting_traces.carried(reader, 1, 30, np.array([0.5, 9.0]))  # the other unit is not read
    assert half == pytest.approx(0.5, abs=0.02)
    assert np.isnan(
        counting_traces.letters_read(reader, counting_traces.before_phase(reader, 1, n), 1, 10)[10:]
    ).all(), "they have not ended by then"


def test_a_norm_on_the_state_ends_the_count_and_one_on_the_readout_leaves_it() -> None:
    normed = counting_traces.phases(counting_traces.LetterByLetter(by_hand("scaling_only", "state"), 2), 40)
    assert np.abs(normed[0, counting_traces.SETTLING :, 0] - np.sqrt(2)).max() < 0.3, (
        "on a circle there is no counting on"
    )
    assert not counting_traces.counter_of(counting_traces.dimension_table(normed), 1).counting
    seen = counting_traces.phases(counting_traces.LetterByLetter(by_hand("scaling_only", "readout"), 2), 40)
    np.testing.assert_allclose(seen[0, :, 0], np.arange(1, 41), atol=1e-9)
    assert counting_traces.counter_of(counting_traces.dimension_table(seen), 1).counting == (0,)


@pytest.mark.parametrize(
    ("cell", "norm", "site"),
    [("lstm", "projection_only", "state"), *(("lstm", "layernorm", site) for site in ("readout", "gates"))]
    + [(cell, "layernorm", "state") for cell in ("gru", "rnn_relu", "rnn_tanh")],
)
def test_letter_by_letter_is_the_network(cell: str, norm: str, site: str) -> None:
    torch.manual_seed(0)
    model = RecurrentConfig(cell, bos(3) + 1, bos(3), d_embed=3, norm=norm, norm_site=site).build()
    reader = counting_traces.LetterByLetter(model, 3)
    words, _ = counted_words(3, torch.tensor([6]))
    with torch.no_grad():
        theirs = model.double()(words)[0]
        state = reader.start()
        for place, token in enumerate(words[0].tolist()):
            state = state if place == 0 else reader.read(state, token)
            torch.testing.assert_close(reader.model.out(state.h)[0], theirs[place], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        counting_traces.before_phase(reader, 2, np.array([3, 6])).h[1], _after(reader, "a" * 6 + "b" * 6)
    )
    np.testing.assert_array_equal(counting_traces.phases(reader, 6)[-1, -1], reader.state(state)[0])


def _after(reader: counting_traces.LetterByLetter, word: str) -> torch.Tensor:
    state = reader.start()
    for letter in word:
        state = reader.read(state, 1 + "abc".index(letter))
    return state.h[0]


def test_what_cannot_be_traced() -> None:
    with pytest.raises(ValueError, match="traces are of one LSTM, GRU or Elman layer, got RecurrentConfig"):
        counting_traces.LetterByLetter(RecurrentConfig("qrnn", 4, 3).build(), 2)
    with pytest.raises(ValueError, match="traces are of one LSTM, GRU or Elman layer, got Linear"):
        counting_traces.LetterByLetter(torch.nn.Linear(1, 1), 2)
    with pytest.raises(ValueError, match="a line takes 8 letters or more, got 7"):
        counting_traces.line_through(np.arange(7.0))


def test_the_traces_of_an_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "training", lambda cell, quick, seed: TrainConfig(steps=2, batch=2, seed=seed))
    monkeypatch.setattr(counting, "make_task", lambda cell, quick: CountingTask(cell.task, 10))
    results = ran("counting_traces", tmp_path / "t")
    cells = counting_traces.grid(quick=True)
    networks = results.tables["networks"]
    assert len(networks) == 2 * len(cells)
    assert set(networks["phase"]) == {"b"}
    names = {p.name for p in (tmp_path / "t" / "runs").iterdir()}
    assert "anbn-lstm-layernorm-state-seed1" in names, "the names that counting gives its runs"
    assert len(results.tables["traces"]) == 2 * len(cells) * (2 * 10 + 2 * 30)
    for name, columns in counting_traces.COLUMNS.items():
        assert tuple(results.tables[name].columns) == columns
    tagging = Run({}, PrefixTask("L5"), RecurrentConfig("lstm", 2, 2), TrainConfig(steps=1, batch=1), tmp_path)
    with pytest.raises(ValueError, match=r"traces are of a\^n b\^n and a\^n b\^n c\^n, got a run on L5"):
        counting_traces.followed(tagging)


def test_ends_of_the_longest_run() -> None:
    runs = ((1, 1, 1, 0, 1), (0, 1, 1, 0, 1), (0, 0, 0))
    assert [counting_traces._longest_run(np.array(right, dtype=bool)) for right in runs] == [3, 3, 0]
