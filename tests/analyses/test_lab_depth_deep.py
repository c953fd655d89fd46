"""The deep part of the depth experiment: its grid, its words, positions paired by seed, and a run from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from lab_runs import ran

from ln_probe.analyses.lab.crasp import depth_deep
from ln_probe.analyses.lab.crasp.depth import published_table
from ln_probe.analyses.lab.crasp.depth_deep import findings, grid, reach_contrasts
from ln_probe.analyses.lab.crasp.depth_task import BINS, IGNORED, BlockTask, Cell, measure, predicted_depth
from ln_probe.analyses.lab.train import TrainConfig


def test_the_grid_lies_on_both_sides_of_the_boundary() -> None:
    cells = grid(quick=False)
    assert len(cells) == len(set(cells))
    assert {c.depth for c in cells} == set(range(4, 11))
    assert max(c.k for c in cells) == 12
    assert {c.positions for c in cells} == {"none", "rotary", "alibi"}
    assert {predicted_depth(c.k) - c.depth for c in cells} == {0, 1}
    for cell in cells:
        lengths = BlockTask(cell.k, 50).batch(0, 50, 0).labels.ne(IGNORED).sum(1)
        assert 51 <= int(lengths.min()) <= int(lengths.max()) <= 100
        assert cell.spec().n_ctx > BINS[-1][1], "room for the longest tested word and its BOS"


def table(values: dict[tuple[str, int, int], float]) -> pd.DataFrame:
    """Exact match in every bin alike: positions, k, seed."""
    return pd.DataFrame([
        {"depth": 4, "k": k, "norm": "layernorm", "norm_order": "post", "positions": p, "seed": s, "step": 9,
         "measure": measure(b), "value": v}
        for (p, k, s), v in values.items() for b in BINS
    ])  # fmt: skip


def test_findings_by_hand() -> None:
    none = {("none", 6, 0): 1.0, ("none", 6, 1): 0.97, ("none", 7, 0): 0.3, ("none", 7, 1): 0.5}
    shown = table(none | {("alibi", 6, 0): 0.8, ("alibi", 6, 1): 0.87})
    found = reach_contrasts(shown).set_index("contrast")
    assert found["mean"].to_dict() == pytest.approx(
        {"depth 4: L6 minus L7": (0.7 + 0.47) / 2, "depth 4, L6: alibi positions minus none": -0.15}
    )
    half = 12.706204736432095 * 0.05  # Student's t with 1 degree of freedom; sd 0.05 sqrt 2, over sqrt 2
    alibi = found.loc["depth 4, L6: alibi positions minus none"]
    assert alibi[["ci_low", "ci_high"]].tolist() == pytest.approx([-0.15 - half, -0.15 + half])
    results = findings(shown)
    first, _, _, last = results.conclusions
    assert first.startswith("without positions, depth 4: at least 99% right in every bin to 250 letters in 1 of 2 runs")
    assert first.endswith("0 of 2 runs with k = depth + 3 [0%, 84%], their worst bins 30% to 50%.")
    assert last.startswith("depth 4, L6: alibi positions minus none: -15.0 [-78.5, +48.5] points of reach (2 seeds; no")
    summary = results.summary.set_index(["k", "positions", "measure"])
    assert summary.loc[(7, "none", "exact_match_151_200"), "published"] == 0.49
    assert np.isnan(summary.loc[(7, "none", "exact_match_201_250"), "published"])
    assert np.isnan(summary.loc[(6, "alibi", "exact_match_151_200"), "published"]), "published without positions"
    assert published_table().set_index(["depth", "k"]).loc[(6, 8), "published"] == 0.95


def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth_deep, "QUICK_WORDS", 4)
    monkeypatch.setattr(
        depth_deep, "training", lambda quick, seed: TrainConfig(2, 2, seed=seed, evaluate_every=2, state_every=2)
    )
    monkeypatch.setattr(depth_deep, "grid", lambda quick: (Cell(4, 6), Cell(4, 7), Cell(4, 6, positions="rotary")))
    results = ran("depth_deep", tmp_path / "deep")
    assert len(results.summary) == 3 * len(BINS)
    contrasts = set(results.tables["contrasts"]["contrast"])
    assert contrasts == {"depth 4: L6 minus L7", "depth 4, L6: rotary positions minus none"}
    assert (tmp_path / "deep" / "deep.png").exists()
