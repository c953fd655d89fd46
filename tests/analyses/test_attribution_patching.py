"""Estimates of attribution patching are the derivatives of what exact patching measures, through the norms or not."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import ln_probe
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.hooks import linearized

STEP = 1e-4


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "examples" / "checkpoints")
        return importlib.import_module("attribution_patching")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    made = LabConfig(3, 16, 2, 11, 8, norm="layernorm").build().double().eval()
    with torch.no_grad():
        for weights in made.parameters():
            weights += 0.3 * torch.randn_like(weights)
    return made


def pair(script: Any) -> Any:
    return script.Pair(torch.tensor([0, 3, 1, 4, 1, 5]), torch.tensor([0, 3, 7, 4, 1, 5]), 2, 9)


@pytest.mark.parametrize("hold", [False, True])
def test_estimates_are_derivatives(script: Any, model: Any, hold: bool) -> None:
    """Of heads, positions and paths; with sigma held, of the model that divides by the corrupt run's sigmas."""
    points, given = script.Points(model), pair(script)
    clean, _ = script.activations(model, points, given.clean)
    corrupt, logits = script.activations(model, points, given.corrupt)
    base = float(given.metric(logits))
    sigma = linearized.sigmas(model, given.corrupt[None])
    slopes = script.gradients(model, points, given, hold=hold)
    nodes, expected = [], []
    for kind, layer, index in (("z", 0, 1), ("z", 2, 0), ("resid", 1, 3), ("resid", 2, 5)):
        mine = (slice(None), index) if kind == "z" else (index,)
        change = clean[kind, layer][mine] - corrupt[kind, layer][mine]
        nodes.append((kind, layer, index, corrupt[kind, layer][mine] + STEP * change))
        expected.append(float((slopes[kind, layer][mine] * change).sum()))
    with linearized(model, sigma) if hold else nullcontext():
        exact = script.patched(model, points, given, nodes)
    assert [(v - base) / STEP for v in exact] == pytest.approx(expected, rel=1e-2, abs=1e-6)
    assert min(map(abs, expected[1:])) > 1e-5

    receiver = (2, 1)
    weight = slopes["z", 2][:, 1]
    paths = script.path_gradients(model, points, given, receiver, weight, hold=hold)
    sources, expected = [], []
    for layer, head in ((0, 0), (1, 1)):
        change = clean["z", layer][:, head] - corrupt["z", layer][:, head]
        sources.append((layer, head, corrupt["z", layer][:, head] + STEP * change))
        expected.append(float((paths[layer][:, head] * change).sum()))
    with linearized(model, sigma) if hold else nullcontext():
        seen = script.received(model, points, given, corrupt, receiver, sources)
    found = [float((weight * (z - corrupt["z", 2][:, 1])).sum()) / STEP for z in seen]
    assert found == pytest.approx(expected, rel=1e-2, abs=1e-7)


def test_the_whole_last_stream_gives_the_clean_metric(script: Any, model: Any) -> None:
    """The metric reads the last position: its residual stream before the last block's MLP and attention decides it."""
    points, given = script.Points(model), pair(script)
    clean, logits = script.activations(model, points, given.clean)
    one = script.Pair(given.clean, given.clean, 2, 9)
    same = script.patched(model, points, one, [("resid", 2, 5, clean["resid", 2][5]), ("z", 1, 0, clean["z", 1][:, 0])])
    assert same == pytest.approx([float(given.metric(logits))] * 2, abs=1e-9)


def test_a_pair_from_end_to_end(script: Any, model: Any) -> None:
    points, given = script.Points(model), pair(script)
    nodes = script.effects(model, points, given)
    assert set(nodes["kind"]) == {"heads", "positions", "paths"}
    of = nodes[nodes["kind"] == "positions"]
    assert of["index"].min() == 2  # what comes before the changed token is the same in both runs
    rows = list(script.agreement(nodes))
    assert {r["kind"] for r in rows} == {*script.KINDS}
    perfect = nodes.assign(standard=nodes["exact"], linearized=-nodes["exact"])
    for row in script.agreement(perfect):
        assert (row["rank_standard"], row["rank_linearized"]) == pytest.approx((1, -1))
        assert (row["error_standard"], row["error_linearized"]) == pytest.approx((0, 2))


def test_heads_of_a_bridge(script: Any) -> None:
    """A bridge shows the outputs of all heads in one row."""
    bundled = ln_probe.load_model("lm-layernorm")
    nodes = script.effects(
        bundled, script.Points(bundled), script.Pair(torch.tensor([0, 9]), torch.tensor([0, 7]), 2, 9)
    )
    counts = nodes.groupby("kind").size()
    assert counts["heads"] == 4 * 16
    assert counts["paths"] == 3 * 16
    whole = nodes[(nodes["kind"] == "positions") & (nodes["layer"] == 0)]
    assert list(whole["index"]) == [1]


def test_the_summary(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"pair": n, "kind": kind, "nodes": 8, "size": 1.0, "rank_standard": 0.5 + 0.001 * n, "rank_linearized": 0.7,
         "error_standard": 0.5, "error_linearized": 0.4}
        for n in range(48) for kind in script.KINDS
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(tmp_path / "patching-mgm.csv", index=False)
    monkeypatch.setattr(script, "TABLES", tmp_path)
    table = script.summarize().set_index(["kind", "outcome"])
    assert (table["family"] == "primary").sum() == 2
    assert table.loc[("heads", "rank"), "change"] == pytest.approx(0.1765)
    assert table.loc[("heads", "rank"), "p_holm"] < 0.05
    assert table.loc[("paths", "error"), "pairs_better"] == 48
