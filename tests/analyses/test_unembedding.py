"""Tokens that cannot be predicted: planted ones are found, and probabilities are what an optimizer finds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import make_bridge
from scipy.optimize import minimize
from small_models import norm_of

import ln_probe
from ln_probe.analyses.probes import unembedding
from ln_probe.analyses.probes.columns import UNEMBEDDING
from ln_probe.hooks.norm import Site


def a_final_norm(d: int = 6) -> Site:
    return norm_of(-1, d_model=d)


def test_planted_rows_are_found() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(60, 8))
    rows[7] = rng.dirichlet(np.ones(20)) @ rows[20:40]
    rows[9] = rows[50]
    table, undecided = unembedding.measure(rows, None, a_final_norm(8), str, hardest=5)
    assert undecided == 0
    table = table.set_index("token_id")
    assert table.loc[7, "verdict"] == "unselectable"
    assert set(table.index[table["verdict"] == "duplicate"]) == {9, 50}
    assert (table.loc[[7, 9, 50], "margin_upper"] < 1e-9).all()
    assert table.loc[[7, 9, 50], "attainable"].max() <= 0.5 + 1e-9
    assert list(table["attainable"]) == sorted(table["attainable"])


def test_tokens_that_all_reach_probability_one_are_not_all_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 50,257 × 768 numbers that took 76 s."""
    rows, again = np.random.default_rng(3).normal(size=(2000, 32)), list[int]()
    rows *= 60 / np.linalg.norm(rows, axis=1, keepdims=True)
    exactly = unembedding.pointed_at
    monkeypatch.setattr(unembedding, "pointed_at", lambda *given: again.append(len(given[-1])) or exactly(*given))
    table, undecided = unembedding.measure(rows, None, a_final_norm(32), str, hardest=5)
    assert undecided == 0
    assert again == [1024]
    assert list(table["verdict"]) == 5 * ["selectable"]
    assert table["attainable"].min() > 1.0 - 1e-9


def test_a_bias_can_save_or_bury_a_token() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(60, 8))
    rows[7] = rng.dirichlet(np.ones(20)) @ rows[20:40]
    bias = np.zeros(60)
    bias[7] = 2.0  # above what the mixture has: now it wins somewhere
    verdicts = [
        unembedding.measure(rows, b, a_final_norm(8), str, hardest=60)[0].set_index("token_id")["verdict"][7]
        for b in (bias, -bias)
    ]
    assert verdicts == ["selectable", "unselectable"]


@pytest.mark.slow
def test_probability_is_what_an_optimizer_finds() -> None:
    site = a_final_norm()
    rng = np.random.default_rng(2)
    rows, bias = rng.normal(size=(25, 6)), rng.normal(size=25)
    table, _ = unembedding.measure(rows, bias, site, str, hardest=25)
    assert len(table) == 25

    def loss(x: np.ndarray, i: int) -> float:
        y = site.affine(torch.tensor((x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + site.eps))).numpy()
        logits = rows @ y + bias
        return float(np.logaddexp.reduce(logits) - logits[i])

    for row in table.itertuples():
        found = max(
            np.exp(-minimize(loss, rng.normal(size=6) * s, args=(row.token_id,), method="BFGS").fun)
            for s in (0.001, 0.01, 1, 1, 1, 1)
        )
        assert found <= row.attainable_upper + 1e-6, "an ordinary vector beats the bound"
        assert row.attainable <= row.attainable_upper <= row.attainable + 0.01 + 1e-9
        # The ball is larger than the sphere that eps = 1e-5 nearly leaves of it, so this is one-sided near its middle.
        assert found >= row.attainable - 0.05


def test_the_queries_are_the_final_norms_outputs() -> None:
    site = a_final_norm()
    queries = unembedding.final_queries(site)
    x = torch.randn(200, 6, dtype=torch.float64) * torch.logspace(-3, 3, 200, dtype=torch.float64)[:, None]
    kept = x - x.mean(-1, keepdim=True)
    y = site.affine(kept / site.sigma(x)).numpy()
    u = (y - queries.center) @ np.linalg.pinv(queries.axes).T
    np.testing.assert_allclose(queries.center + u @ queries.axes.T, y, atol=1e-9)
    assert np.linalg.norm(u, axis=1).max() <= 1 + 1e-9


@pytest.mark.parametrize("size", [1e-4, 300.0])
def test_behind_a_norm_that_does_not_scale_a_length_has_no_meaning(size: float) -> None:
    """Any output can be had, of any length: margins and probabilities are NaN, verdicts those of the rows alone."""
    rng = np.random.default_rng(4)
    rows = size * rng.normal(size=(50, 6))
    rows[3], rows[8] = rng.dirichlet(np.ones(9)) @ rows[10:19], rows[30]
    free = Site(**{**vars(a_final_norm()), "kind": "projection_only", "constant_scale": 1.0, "radius": math.nan})
    table, undecided = unembedding.measure(rows, None, free, str, hardest=50)
    assert undecided == 0
    assert table.drop(columns=["token_id", "token", "verdict"]).isna().all(axis=None)
    expected = ln_probe.key_geometry(rows, margins=False).verdict
    assert (table.set_index("token_id").loc[range(50), "verdict"] == expected).all()
    assert expected[3] == "unselectable"


def test_a_planted_token_in_a_real_checkpoint(capp: Path) -> None:
    model: Any = ln_probe.load_model(capp)
    before = ln_probe.analyze(model, torch.tensor([[1, 2]]), probes=("unembedding",), progress=False).unembedding
    assert (before["verdict"] == "selectable").all()
    with torch.no_grad():
        parameters = dict(model.named_parameters())
        weight = parameters.get("unembed.W_U", model.W_U)
        weight[:, 20] = weight[:, [3, 30, 41]].mean(1)
    after = ln_probe.analyze(model, torch.tensor([[1, 2]]), probes=("unembedding",), progress=False)
    stuck = after.unembedding[after.unembedding["verdict"] != "selectable"]
    assert stuck["token_id"].tolist() == [20]
    assert stuck["attainable_upper"].item() < 0.5
    assert any("1 token can never be the most likely one" in f for f in after.findings())


def test_heavy_tails_leave_some_undecided_and_say_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(400, 12)) * rng.lognormal(size=(400, 1))
    everything, none_left = unembedding.measure(rows, None, a_final_norm(12), str, hardest=400)
    assert none_left == 0
    monkeypatch.setattr(unembedding, "_BUDGET", 1.0)
    some, undecided = unembedding.measure(rows, None, a_final_norm(12), str, hardest=400)
    assert undecided > 0
    assert (some["verdict"] == "undecided").sum() == undecided
    both = some.merge(everything, on="token_id")
    decided = both[both["verdict_x"] != "undecided"]
    assert (decided["verdict_x"] == decided["verdict_y"]).all()


def test_the_table_of_a_bridge_is_as_long_as_it_may_be() -> None:
    report = ln_probe.analyze(make_bridge("gpt2"), torch.tensor([[1, 2, 3]]), probes=("unembedding",), progress=False)
    assert set(report.unembedding.columns) == set(UNEMBEDDING.names)
    assert len(report.unembedding) == unembedding.HARDEST
