"""Counters by hand: what they are exact on, what a norm does to them, and an altered one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.counting import counters
from ln_probe.analyses.lab.counting.counters import Cell, exact_to
from ln_probe.analyses.lab.counting.counting_tasks import counted


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


def test_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "QUICK_LARGEST", 8)
    monkeypatch.setattr(counters, "STEPS", (4, 24))
    results = ran("counters", tmp_path / "out", seeds=(0,))
    rows = results.summary.set_index(["model", "norm", "norm_site", "step"])
    assert rows.loc[("rnn_relu", "none", "none", 0), "mean"] == 8
    assert rows.loc[("lstm", "none", "none", 0), "trained"] > 200  # of the kept results
    assert "lstm, no norm: exact to n = 8 (trained: 267)." in results.conclusions
    assert results.conclusions[-1] == "GRU: at most to n = 3, with steps of 2^-4 (trained: 94)."
    assert (tmp_path / "out" / "gru.png").exists()


def test_unknown_networks() -> None:
    with pytest.raises(ValueError, match="unknown model 'abacus': known are lstm, mirrored lstm, rnn_relu and gru"):
        Cell("abacus").build()
    with pytest.raises(ValueError, match="a rnn_relu has no readout of its state"):
        Cell("rnn_relu", "layernorm", "readout").build()
