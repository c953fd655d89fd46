"""Traces of cells: a counter by hand is found, followed, read and moved; lines of known traces; the experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.counting import counting, counting_traces
from ln_probe.analyses.lab.counting.counting_tasks import CountingTask, PrefixTask, bos, counted_words
from ln_probe.analyses.lab.counting.counting_traces import (
    MOVED,
    READABLE,
    SETTLING,
    STRAIGHT,
    LetterByLetter,
    before_phase,
    carried,
    counter_of,
    dimension_table,
    holds_to,
    letters_read,
    line_through,
    phases,
)
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig, RecurrentTagger
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import folder, table_at
from ln_probe.analyses.lab.train import Run, TrainConfig

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
    reader = LetterByLetter(by_hand(), 2)
    trace = phases(reader, 60)
    np.testing.assert_allclose(trace[0, :, 0], np.arange(1, 61), atol=1e-9)
    np.testing.assert_allclose(trace[1, :, 0], np.arange(59, -1, -1), atol=1e-9)
    counter = counter_of(dimension_table(trace), 1)
    assert (counter.dimension, counter.earlier, counter.counting, counter.turning) == (0, 0, (0,), (0,))
    assert counter.counts
    assert counter.straight == pytest.approx(1.0)
    assert holds_to(trace[0, :, 0]) == 60
    n = np.arange(1, 61)
    np.testing.assert_array_equal(letters_read(reader, before_phase(reader, 1, n), 1, 90), n)
    slope, moves = carried(reader, 1, 30, np.array([1.0, 0.0]))
    assert slope == pytest.approx(1.0)
    np.testing.assert_array_equal(moves["read"], 30 + np.arange(-MOVED, MOVED + 1))
    half, _ = carried(reader, 1, 30, np.array([0.5, 9.0]))  # the other unit is not read
    assert half == pytest.approx(0.5, abs=0.02)
    assert np.isnan(letters_read(reader, before_phase(reader, 1, n), 1, 10)[10:]).all(), "they have not ended by then"


def test_a_norm_on_the_state_ends_the_count_and_one_on_the_readout_leaves_it() -> None:
    normed = phases(LetterByLetter(by_hand("scaling_only", "state"), 2), 40)
    assert np.abs(normed[0, SETTLING:, 0] - np.sqrt(2)).max() < 0.3, "on a circle there is no counting on"
    assert not counter_of(dimension_table(normed), 1).counting
    seen = phases(LetterByLetter(by_hand("scaling_only", "readout"), 2), 40)
    np.testing.assert_allclose(seen[0, :, 0], np.arange(1, 41), atol=1e-9)
    assert counter_of(dimension_table(seen), 1).counting == (0,)


@pytest.mark.parametrize(
    ("cell", "norm", "site"),
    [("lstm", norm, "state") for norm in NORM_KINDS]
    + [("lstm", "layernorm", site) for site in ("readout", "gates")]
    + [(cell, "layernorm", "state") for cell in ("gru", "rnn_relu", "rnn_tanh")],
)
def test_letter_by_letter_is_the_network(cell: str, norm: str, site: str) -> None:
    torch.manual_seed(0)
    model = RecurrentConfig(cell, bos(3) + 1, bos(3), d_embed=3, norm=norm, norm_site=site).build()
    reader = LetterByLetter(model, 3)
    words, _ = counted_words(3, torch.tensor([6]))
    with torch.no_grad():
        theirs = model.double()(words)[0]
        state = reader.start()
        for place, token in enumerate(words[0].tolist()):
            state = state if place == 0 else reader.read(state, token)
            torch.testing.assert_close(reader.model.out(state.h)[0], theirs[place], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(before_phase(reader, 2, np.array([3, 6])).h[1], _after(reader, "a" * 6 + "b" * 6))
    np.testing.assert_array_equal(phases(reader, 6)[-1, -1], reader.state(state)[0])


def _after(reader: LetterByLetter, word: str) -> torch.Tensor:
    state = reader.start()
    for letter in word:
        state = reader.read(state, 1 + "abc".index(letter))
    return state.h[0]


def test_lines_of_known_traces() -> None:
    letter = np.arange(1, 101)
    line = line_through(3.0 - 0.25 * letter)
    assert (line.slope, line.r2) == pytest.approx((-0.25, 1.0))
    assert line.off < 1e-9
    still = line_through(np.full(100, 0.1))
    assert np.isnan(still.r2)
    assert np.isinf(still.off)
    kinked = np.minimum(letter, 60).astype(float)  # counts to 60, then stands
    end = holds_to(kinked)
    assert end == 60
    assert line_through(kinked[:end]).off <= READABLE < line_through(kinked[: end + 1]).off
    assert holds_to(np.sqrt(letter.astype(float))) < 30
    fallen = [line_through(np.exp(-r * letter / 100)).r2 for r in (0.22, 0.51)]  # slopes fall by 20 % and by 40 %
    assert fallen[0] > STRAIGHT > fallen[1]
    with pytest.raises(ValueError, match="a line takes 8 letters or more, got 7"):
        line_through(np.arange(7.0))


def test_the_straightest_of_several_counters_is_named() -> None:
    rows = []
    for dimension, (up, down, r2) in enumerate(((1, -1, 0.9995), (-2, 2, 0.99999), (1, 1, 1.0), (1, -1, 0.5))):
        rows += [(dimension, "a", up, 1.0, up), (dimension, "b", down, r2, down), (dimension, "c", 0.0, np.nan, 0.0)]
    table = pd.DataFrame(rows, columns=["dimension", "phase", "slope", "r2", "difference"])
    found = counter_of(table, 1)
    assert (found.dimension, found.straight, found.counting, found.turning) == (1, 0.99999, (0, 1), (0, 1, 3))
    nothing = counter_of(table, 2)
    assert (nothing.counts, nothing.counting, nothing.turning) == (False, (), ())
    assert np.isnan(nothing.straight)


def test_what_cannot_be_traced() -> None:
    with pytest.raises(ValueError, match="traces are of one LSTM, GRU or Elman layer, got RecurrentConfig"):
        LetterByLetter(RecurrentConfig("qrnn", 4, 3).build(), 2)
    with pytest.raises(ValueError, match="traces are of one LSTM, GRU or Elman layer, got Linear"):
        LetterByLetter(torch.nn.Linear(1, 1), 2)


def test_kept_networks_read_n_right_wherever_they_are_exact() -> None:
    """Two ways that share no code: `counted` on whole words in float32, and letter by letter in float64."""
    networks, readings = (table_at(folder("counting_traces"), name) for name in ("networks", "readings"))
    for row in networks[networks["exact_to"] > 0].to_dict("records"):
        same = np.logical_and.reduce([readings[k] == row[k] for k in counting_traces.NETWORK])
        mine = readings[same].set_index("n")["read"].loc[int(row["exact_from"]) : int(row["exact_to"])]
        assert (mine == mine.index).all(), row


def traced(bend: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A network whose dimension counts to 100 and back, its rise bent by so many letters, and its trace."""
    keys = {"task": "anbn", "model": "lstm", "norm": "none", "norm_site": "none", "seed": 0, "phase": "b"}
    letter = np.arange(1, 101)
    words = [np.concatenate([k * letter + bend * np.sin(np.pi * letter / 100), k * letter[::-1]]) for k in (1, 1)]
    lines = [line_through(phase) for phase in words[0].reshape(2, 100)]
    straight = min(line.r2 for line in lines)
    network = {
        **keys, "before": "a", "trained_n": 100, "tested_n": 300, "dimensions_counting": int(straight >= STRAIGHT),
        "slope_before": lines[0].slope, "slope_in": lines[1].slope, "r2_before": lines[0].r2, "r2_in": lines[1].r2,
    }  # fmt: skip
    long = np.concatenate([np.arange(300.0), np.minimum(np.arange(300.0), 200)])
    rows = [pd.DataFrame({"n": n, "value": word}) for n, word in ((100, words[0]), (300, long))]
    return pd.DataFrame([network]), pd.concat(rows).assign(**keys)


def test_a_counter_is_straight_by_the_letter_and_not_by_r2_alone() -> None:
    straight, bent = (counting_traces.with_verdicts(*traced(bend)).iloc[0] for bend in (0.3, 3.0))
    assert bent["r2_before"] > STRAIGHT, "R² lets it pass"
    assert bent["dimensions_counting"] == 1
    assert bent["off_before"] > READABLE > bent["off_in"]
    assert (straight["counts"], bent["counts"]) == (1, 0)
    assert bent["holds_to_in"] == straight["holds_to_in"] == 201, (
        "of the phase that is read, which stands still from 201 on"
    )
    swept = counting_traces.thresholds(counting_traces.with_verdicts(*traced(3.0)))
    passed = swept.set_index(["criterion", "threshold"])["networks"]
    assert passed.loc["r2"].tolist() == [1, 1, 1, 0, 0]
    assert passed.loc["off"].tolist() == [0, 0, 0, 1]


def test_with_projection_alone_on_its_state_no_kept_network_counts() -> None:
    networks = table_at(folder("counting_traces"), "networks")
    part = networks[(networks["norm"] == "projection_only") & (networks["norm_site"] == "state")]
    assert part["counts"].tolist() == [0, 0, 0]
    assert part["dimensions_counting"].tolist() == [1, 0, 1], "what R² alone said"
    assert (part[["off_before", "off_in"]].max(axis=1) > 2 * READABLE).all()


def test_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert len(results.conclusions) == len(cells) + 2 * len(cells)
    for name, columns in counting_traces.COLUMNS.items():
        assert tuple(results.tables[name].columns) == columns
    tagging = Run({}, PrefixTask("L5"), RecurrentConfig("lstm", 2, 2), TrainConfig(steps=1, batch=1), tmp_path)
    with pytest.raises(ValueError, match=r"traces are of a\^n b\^n and a\^n b\^n c\^n, got a run on L5"):
        counting_traces.followed(tagging)


def test_ends_of_the_longest_run() -> None:
    def ends(*right: int) -> int:
        return counting_traces._longest_run(np.array(right, dtype=bool))

    assert [ends(1, 1, 1, 0, 1), ends(0, 1, 1, 0, 1), ends(0, 0, 0), ends(1, 1, 1)] == [3, 3, 0, 3]
