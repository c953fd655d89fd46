"""The depth experiments: words of L_k and their labels, grids, hit rates, positions paired by seed, and runs."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_runs import ran

from ln_probe.analyses.lab.crasp import depth, depth_task
from ln_probe.analyses.lab.crasp.crasp import parse
from ln_probe.analyses.lab.crasp.depth import hit_rates, term_effects
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES
from ln_probe.analyses.lab.train import PAD, TrainConfig


@settings(max_examples=30, deadline=None)
@given(k=st.integers(1, 6), extra=st.integers(0, 8), spread=st.integers(0, 6), seed=st.integers(0, 99))
def test_samples_are_words_of_the_language_labelled_as_the_program_does(
    k: int, extra: int, spread: int, seed: int
) -> None:
    low, high = k + extra, k + extra + spread
    words = depth_task.sample_block_words(k, (low, high), 20, torch.Generator().manual_seed(seed))
    pattern = re.compile("".join(f"{depth_task.block_symbol(block)}+" for block in range(1, k + 1)))
    program = parse(depth_task.last_block(k))
    for tokens, labels in zip(*(part.tolist() for part in words), strict=True):
        length = sum(label != PAD for label in labels)
        assert low <= length <= high
        assert tokens[0] == depth_task.BOS
        assert labels[0] == PAD
        assert set(labels[1 + length :]) <= {PAD}
        word = "".join(" ab"[t] for t in tokens[1 : 1 + length])
        assert pattern.fullmatch(word), word
        assert labels[1 : 1 + length] == [int(x) for x in program.run(word)]


def test_places_of_change_and_lengths_are_uniform() -> None:
    _, labels = depth_task.sample_block_words(2, (4, 5), 20_000, torch.Generator().manual_seed(0))
    length = (labels != PAD).sum(1)
    first_b = (labels == 1).float().argmax(1) - 1  # the letter that begins the last block, from 0
    counts = pd.crosstab(length.numpy(), first_b.numpy()).to_numpy()
    assert counts.shape == (2, 4)
    expected = np.array([[1 / 3, 1 / 3, 1 / 3, 0], [1 / 4] * 4]) * 10_000
    assert np.abs(counts - expected).max() < 5 * np.sqrt(10_000 / 3)  # five standard deviations
    assert counts[0, 3] == 0


def test_a_pad_is_never_wrong_and_a_letter_may_be() -> None:
    labels = torch.tensor([[PAD, 0, 1, PAD], [PAD, 0, 1, 1]])
    predicted = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 0]])
    assert depth_task.exact_match(predicted, labels).tolist() == [True, False]


@pytest.mark.parametrize(("k", "lengths", "size", "said"), [
    (0, (5, 9), 1, "k must be at least 1 block, got 0"),
    (7, (6, 9), 1, "a word of 6 letters has no room for 7 blocks: give lengths from 7 on, or a smaller k"),
    (1, (9, 5), 1, r"lengths must be a range \(low, high\) with 1 <= low <= high, got \(9, 5\)"),
    (1, (0, 5), 1, r"lengths must be a range"),
    (1, (2, 5), 0, "at least 1 word is needed, got size=0"),
])  # fmt: skip
def test_what_cannot_be_sampled(k: int, lengths: tuple[int, int], size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        depth_task.sample_block_words(k, lengths, size, torch.Generator())
    with pytest.raises(ValueError, match="depth must be at least 1 layer, got 0"):
        depth.Cell(0, 3)


def test_the_grid_lies_on_both_sides_of_the_boundary() -> None:
    cells = depth.grid(quick=False)
    assert len(cells) == len(set(cells)) == 2 * 3 * 2 * 4 + 4
    for cell in cells:
        assert (depth_task.predicted_depth(cell.k) <= cell.depth) == (cell.k == cell.depth + 2)
    assert {c.positions for c in cells} == {"none", "rotary", "alibi"}
    for cell in depth.grid(quick=True):
        assert cell.spec().build().cfg.norm_final is None  # post-norm: the last block's own norm is the final one


def test_hit_rates() -> None:
    rows = [
        (1, k, "layernorm", "post", "none", seed, depth.measure(lengths), value)
        for k, seed, values in ((3, 0, (1, 1, 1, 0.99)), (3, 1, (1, 1, 1, 0.98)), (4, 0, (0.4, 0.3, 0.2, 0.1)))
        for lengths, value in zip(depth.BINS, values, strict=True)
    ]
    table = pd.DataFrame(rows, columns=[*depth.KEYS, "seed", "measure", "value"])
    hits = hit_rates(table).set_index("k")
    assert hits[["predicted", "hits", "seeds"]].to_numpy().tolist() == [[True, 1, 2], [False, 0, 1]]
    # Clopper-Pearson of 1 out of 2 by hand: 1 - (1 - p)^2 = 0.025 at the lower end, p^2 = ... by symmetry above
    assert hits.loc[3, "low"] == pytest.approx(1 - np.sqrt(0.975), abs=1e-9)
    assert hits.loc[3, "high"] == pytest.approx(np.sqrt(0.975), abs=1e-9)
    failed = pd.DataFrame([(1, 3, "layernorm", "post", "none", 2)], columns=[*depth.KEYS, "seed"])
    assert hit_rates(table, failed).set_index("k").loc[3, ["hits", "seeds"]].tolist() == [1, 3]


def planted(shift: float, seeds: int = 3) -> pd.DataFrame:
    """Runs at both sides of the boundary at three depths, in which scaling costs `shift` beyond it."""
    rng = np.random.default_rng(0)
    rows = []
    for d, beyond, norm, seed in itertools.product((1, 2, 3), (2, 3), NORM_KINDS, range(seeds)):
        for lengths in depth.BINS:
            value = 1.0 if beyond == 2 else 0.6 + 0.05 * rng.uniform() - shift * (norm in SCALES)
            rows.append((d, d + beyond, norm, "post", "none", seed, depth.measure(lengths), value))
    return pd.DataFrame(rows, columns=[*depth.KEYS, "seed", "measure", "value"])


def test_what_scaling_costs_is_seen_over_all_depths_at_once() -> None:
    for shift in (0.3, 0.0):
        terms = term_effects(planted(shift)).set_index(["term", "side", "depth", "outcome"])
        row = terms.loc["scaling", "beyond", "all", "reach"]
        assert row["mean"] == pytest.approx(-shift, abs=0.02)
        assert row["units"] == 3 * 3 * 2
        assert row["ci_low"] <= -shift <= row["ci_high"]
        assert (row["p_holm"] < 0.05) == (shift > 0)
        assert terms.loc["projection", "beyond", "all", "reach"]["p_holm"] > 0.05
        assert terms.loc["scaling", "within", "all", "reach"]["mean"] == 0
        assert terms["p"].notna().sum() == 2 * 2, "only the reach over all depths is tested"


@pytest.mark.slow
def test_a_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = (depth.Cell(1, 3, "none"), depth.Cell(1, 4, "layernorm", "pre"))
    monkeypatch.setattr(depth, "grid", lambda quick: cells)
    monkeypatch.setattr(depth, "training", lambda quick, seed: TrainConfig(steps=2, batch=2, seed=seed))
    results = ran("depth", out := tmp_path / "depth")
    assert results.diverged == ()
    assert len(results.summary) == 2 * len(depth.BINS)
    assert set(results.summary["predicted_depth"]) == {1, 2}
    assert (results.summary["seeds"] == 2).all()
    assert {"boundary.png", "lengths.png", "hits.csv", "results.json"} <= {p.name for p in out.iterdir()}
    pd.testing.assert_frame_equal(ran("depth", out, collect=True).summary, results.summary)
    mark = next(out.glob("runs/*L3*seed1")) / "diverged.json"
    mark.write_text('{"step": 1, "message": "the loss is nan"}')
    (sentence,) = ran("depth", out, collect=True).diverged
    assert sentence == ("depth 1, k 3, norm none, norm_order post, positions none, seed 1: the loss is nan")


def test_the_deep_grid_lies_on_both_sides_of_the_boundary() -> None:
    cells = depth.deep_grid(quick=False)
    assert len(cells) == len(set(cells))
    assert {c.depth for c in cells} == set(range(4, 11))
    assert max(c.k for c in cells) == 12
    assert {c.positions for c in cells} == {"none", "rotary", "alibi"}
    assert {depth_task.predicted_depth(c.k) - c.depth for c in cells} == {0, 1}
    for cell in cells:
        lengths = depth_task.BlockTask(cell.k, 50).batch(0, 50, 0)[1].ne(PAD).sum(1)
        assert 51 <= int(lengths.min()) <= int(lengths.max()) <= 100
        assert cell.spec().n_ctx > depth.BINS[-1][1], "room for the longest tested word and its BOS"


def test_deep_findings_by_hand() -> None:
    none = {("none", 6, 0): 1.0, ("none", 6, 1): 0.97, ("none", 7, 0): 0.3, ("none", 7, 1): 0.5}
    rows = [
        (4, k, "layernorm", "post", positions, seed, 9, depth.measure(lengths), value)
        for (positions, k, seed), value in (none | {("alibi", 6, 0): 0.8, ("alibi", 6, 1): 0.87}).items()
        for lengths in depth.BINS  # exact match in every bin alike
    ]
    shown = pd.DataFrame(rows, columns=[*depth.KEYS, "seed", "step", "measure", "value"])
    found = depth.reach_contrasts(shown).set_index("contrast")
    assert found["mean"].to_dict() == pytest.approx(
        {"depth 4: L6 minus L7": (0.7 + 0.47) / 2, "depth 4, L6: alibi positions minus none": -0.15}
    )
    half = 12.706204736432095 * 0.05  # Student's t with 1 degree of freedom; sd 0.05 sqrt 2, over sqrt 2
    alibi = found.loc["depth 4, L6: alibi positions minus none"]
    assert alibi[["ci_low", "ci_high"]].tolist() == pytest.approx([-0.15 - half, -0.15 + half])
    results = depth.deep_findings(shown)
    summary = results.summary.set_index(["k", "positions", "measure"])
    assert summary.loc[(7, "none", "exact_match_151_200"), "published"] == 0.49
    assert np.isnan(summary.loc[(7, "none", "exact_match_201_250"), "published"])
    assert np.isnan(summary.loc[(6, "alibi", "exact_match_151_200"), "published"]), "published without positions"
    assert depth.published_table().set_index(["depth", "k"]).loc[(6, 8), "published"] == 0.95


def test_a_deep_run_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depth, "DEEP_QUICK_WORDS", 4)
    monkeypatch.setattr(
        depth, "deep_training", lambda quick, seed: TrainConfig(2, 2, seed=seed, evaluate_every=2, state_every=2)
    )
    cells = (depth.Cell(4, 6), depth.Cell(4, 7), depth.Cell(4, 6, positions="rotary"))
    monkeypatch.setattr(depth, "deep_grid", lambda quick: cells)
    results = ran("depth_deep", tmp_path / "deep")
    assert len(results.summary) == 3 * len(depth.BINS)
    contrasts = set(results.tables["contrasts"]["contrast"])
    assert contrasts == {"depth 4: L6 minus L7", "depth 4, L6: rotary positions minus none"}
    assert (tmp_path / "deep" / "deep.png").exists()


@pytest.mark.parametrize(("experiment", "runs", "every"), [
    ("depth", 8, 52), ("depth_deep", 3, 15), ("counting", 8, 69), ("counting_traces", 3, 15),
    ("approximation", 24, 137), ("adaptive_memory", 4, 12), ("longer_inputs", 6, 12), ("majority", 8, 8),
])  # fmt: skip
def test_the_grid_and_nothing_to_collect_yet(experiment: str, runs: int, every: int, tmp_path: Path) -> None:
    """Of one seed: so many models in the quick form, and so many in all."""
    for quick, count in ((True, runs), (False, every)):
        with pytest.raises(ValueError, match=rf"holds none of these {count} runs: leave out --collect to train them"):
            ran(experiment, tmp_path / f"o{quick}", (0,), collect=True, quick=quick)


@pytest.mark.slow
def test_quick_shows_the_boundary(tmp_path: Path) -> None:
    hits = ran("depth", tmp_path / "depth", (0,)).tables["hits"]
    assert (hits["hits"] == hits["predicted"]).all()
