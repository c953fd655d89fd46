"""What reports keep for their pictures: the model's own attention, marked as the tables say, in bounded space; and what
is summed up of it, by token and by head."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import make_bridge
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from made_up import HOSTILE
from matplotlib.figure import Figure

import ln_probe
from ln_probe.analyses.probes.columns import BY_HEAD, TOKENS
from ln_probe.exhibits import (
    CELLS,
    VERDICTS,
    Exhibits,
    PromptAttention,
    bin_edges,
    by_token,
    pooled,
    to_bytes,
    to_weights,
)
from ln_probe.page.figures import svg
from ln_probe.page.heads import MEASURES, heads_map, known_measures
from ln_probe.page.page import groups
from ln_probe.recording import BUDGET, FIRST_PROMPT, FULL_HEADS, MARKS, plan
from ln_probe.report import Report

STORED = 0.004  # what the README and the page promise: to within 0.4 % of the attention


@settings(deadline=None)
@given(hnp.arrays(np.float64, (7, 5), elements=st.floats(0, 1)))
def test_weights_are_kept_to_within_what_is_promised(weights: np.ndarray) -> None:
    kept = to_weights(to_bytes(weights))
    assert np.abs(kept - weights).max() <= STORED
    assert (to_weights(to_bytes(np.array([0.0, 1.0]))) == [0, 1]).all()
    assert len(set(to_bytes(np.array([1e-4, 2e-4, 5e-4, 1e-3, 2e-3])))) == 5


@settings(deadline=None)
@given(st.integers(1, 300))
def test_bins_cover_every_position_once(length: int) -> None:
    edges = bin_edges(length)
    assert (edges[0], edges[-1]) == (0, length)
    sizes = np.diff(edges)
    assert len(sizes) == min(CELLS, length)
    assert sizes.min() >= 1
    assert sizes.max() - sizes.min() <= 1


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 5))
def test_pooled_rows_still_sum_to_one(length: int, seed: int) -> None:
    pattern = np.random.default_rng(seed).dirichlet(np.ones(length), (2, length))
    found = pooled(pattern, bin_edges(length))
    assert np.allclose(found.sum(-1), 1)
    if length <= CELLS:
        assert np.allclose(found, pattern)
    pattern = np.array([[[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]]])
    assert np.allclose(pooled(pattern, np.array([0, 2, 4])), [[[1, 0], [0.4, 0.6]]])


def test_patterns_are_the_models_own(long_report: Report, long_model: Any, long_prompts: list[list[int]]) -> None:
    assert [a.prompt for a in long_report.exhibits.attention] == [0, 1, 2]
    assert long_report.exhibits.notes == ()
    for shown, row in zip(long_report.exhibits.attention, long_prompts, strict=True):
        _, cache = long_model.run_with_cache(torch.tensor([row]))
        assert shown.tokens == tuple(map(str, row))
        assert (shown.layers, shown.heads, shown.causal) == ((0, 1, 2), (0, 1), True)
        assert shown.pooled == (len(row) > CELLS)
        for place, layer in enumerate(shown.layers):
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0].numpy()
            assert np.abs(to_weights(shown.cells[place]) - pooled(pattern, shown.edges)).max() <= STORED
            seen = np.arange(len(row), 0, -1)
            seen[0] = max(1, len(row) - 1)
            received = pattern[:, 1:].sum(1) / seen
            assert np.abs(to_weights(shown.received[place]) - received).max() <= STORED
            for head in shown.heads:
                assert np.abs(to_weights(shown.full[layer, head]) - pattern[head]).max() <= STORED


def test_marks_are_those_of_the_keys_table(long_report: Report) -> None:
    keys = long_report.keys[long_report.keys["space"] == "head"]
    assert len(keys)
    for variant, ending in (("intact", ""), ("no_scaling", "_frozen")):
        for shown in long_report.exhibits.attention:
            rows = keys[(keys["variant"] == variant) & (keys["prompt"] == shown.prompt)]
            at = tuple(rows[["layer", "head", "position"]].to_numpy(int).T)
            assert (np.array(VERDICTS)[getattr(shown, f"verdict{ending}")[at]] == rows["verdict"]).all()
            attainable = getattr(shown, f"attainable{ending}")[at].astype(float)
            assert np.allclose(attainable, rows["attainable"], rtol=1e-3, atol=1e-6, equal_nan=True)
            if not ending:
                middle = (rows["margin_lower"] + rows["margin_upper"]) / 2
                assert np.allclose(shown.margin[at].astype(float), middle, rtol=1e-3, atol=1e-6, equal_nan=True)
    table = by_token(long_report.exhibits)
    assert table["keys"].sum() == sum(shown.verdict.size for shown in long_report.exhibits.attention)


def equal(a: Any, b: Any) -> bool:
    for one in fields(a):
        x, y = getattr(a, one.name), getattr(b, one.name)
        if isinstance(x, np.ndarray):
            if x.dtype != y.dtype or not np.array_equal(x, y, equal_nan=x.dtype.kind == "f"):
                return False
        elif one.name == "full":
            if set(x) != set(y) or any(not np.array_equal(x[k], y[k]) for k in x):
                return False
        elif x != y:
            return False
    return True


def same(a: Exhibits, b: Exhibits) -> bool:
    return a.notes == b.notes and all(equal(x, y) for x, y in zip(a.attention, b.attention, strict=True))


def test_saved_exhibits_load_as_they_were(long_report: Report, tmp_path: Path) -> None:
    first = long_report.exhibits.attention[0]
    tokens = tuple((HOSTILE * 2)[: len(first.tokens)])
    whole = replace(long_report.exhibits, attention=(replace(first, tokens=tokens),), notes=("a note",))
    whole.save(tmp_path / "e.npz")
    assert same(Exhibits.load(tmp_path / "e.npz"), whole)
    whole.save(tmp_path / "again.npz")
    assert (tmp_path / "e.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()
    Exhibits().save(tmp_path / "none.npz")
    assert same(Exhibits.load(tmp_path / "none.npz"), Exhibits())


def test_the_change_of_attention_to_position_0(long_report: Report) -> None:
    short = long_report.exhibits.of_prompt(2)
    assert not short.pooled
    assert short.cells_frozen is not None
    assert short.first_change is not None
    mean = [to_weights(cells)[:, :, 1:, 0].mean(-1) for cells in (short.cells_frozen, short.cells)]
    assert short.first_change == pytest.approx(mean[0] - mean[1], abs=0.01)
    every = np.mean([a.first_change for a in long_report.exhibits.attention], axis=0)
    assert long_report.by_head()["first_change"].to_numpy() == pytest.approx(every.ravel())


@pytest.mark.slow
def test_heads_that_were_asked_for() -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(1, 25)[None]
    report = ln_probe.analyze(model, tokens, heads=[3, 1], layers=[1], progress=False)
    shown = report.exhibits.of_prompt(0)
    assert (shown.layers, shown.heads) == ((1,), (1, 3))
    whole = ln_probe.analyze(model, tokens, progress=False).exhibits.of_prompt(0)
    assert np.array_equal(shown.cells[0], whole.cells[1][[1, 3]])
    assert np.array_equal(shown.verdict[0], whole.verdict[1][[1, 3]])


def test_what_was_not_measured_is_not_known() -> None:
    model, tokens = make_bridge("gpt2"), torch.arange(1, 25)[None]
    uniform = ln_probe.analyze(model, tokens, probes=("uniformity",), progress=False).exhibits
    assert {VERDICTS[v] for v in uniform.of_prompt(0).verdict.ravel()} == {"not measured"}
    assert np.isnan(uniform.of_prompt(0).attainable).all()
    with pytest.raises(ValueError, match="selectability"):
        ln_probe.analyze(model, tokens, probes=("decomposition",), progress=False).attention(0)


def test_what_is_not_there_is_named(long_report: Report) -> None:
    with pytest.raises(ValueError, match="prompt 3"):
        long_report.attention(prompt=3)
    with pytest.raises(ValueError, match="layer 3"):
        long_report.attention(3)
    with pytest.raises(ValueError, match="head 9"):
        long_report.attention(head=9)


@pytest.mark.parametrize(("layers", "heads", "lengths"), [
    (12, 12, [512]), (12, 12, [512] * 50), (4, 16, [180] * 5), (200, 32, [512] * 3), (30, 9, [512] * 9), (1, 1, [1]),
    (48, 25, [1024, 20]), (12, 12, [70] * 400),
])  # fmt: skip
def test_what_is_kept_is_bounded(layers: int, heads: int, lengths: list[int]) -> None:
    kept, chosen, notes = plan(lengths, range(layers), heads, len(lengths))
    assert chosen[0]
    size = 0
    for prompt, whole in chosen.items():
        cells = min(CELLS, lengths[prompt])
        size += len(kept) * heads * (cells * (cells + 1) + MARKS * lengths[prompt])
        size += FULL_HEADS * lengths[prompt] * (lengths[prompt] + 1) // 2 if whole and lengths[prompt] > CELLS else 0
        assert size <= (FIRST_PROMPT if prompt == 0 else BUDGET)
    assert any("attention is shown for the first" in n for n in notes) == (len(chosen) < len(lengths))
    assert any("layers: all would not fit" in n for n in notes) == (len(kept) < layers)
    if layers == heads == 12 and lengths[0] == 512:
        assert len(kept) == 12
        assert size <= BUDGET


def shown(tokens: list[str], attainable: list[float], frozen: list[float], **options: object) -> PromptAttention:
    n = len(tokens)
    values = {
        "prompt": 0,
        "tokens": tuple(tokens),
        "layers": (0,),
        "heads": (0,),
        "edges": np.arange(n + 1),
        "cells": np.zeros((1, 1, n, n), np.uint8),
        "verdict": np.zeros((1, 1, n), np.uint8),
        "margin": np.ones((1, 1, n), np.float16),
        "attainable": np.array([[attainable]], np.float16),
        "verdict_frozen": np.zeros((1, 1, n), np.uint8),
        "attainable_frozen": np.array([[frozen]], np.float16),
        "received": np.zeros((1, 1, n), np.uint8),
    }
    return PromptAttention(**(values | options))  # type: ignore[arg-type]


def test_tokens_that_lose_come_first_and_position_0_and_sinks_stand_apart() -> None:
    tokens = ["a", "b", "c", "b", *"x" * 10]
    one = shown(
        tokens,
        [0.9, 0.5, 0.5, 0.7, *[0.5] * 10],
        [0.9, 0.25, 0.75, 0.25, *[0.5] * 10],
        received=to_bytes(np.array([[[0.1, 0.1, 0.4, 0.0, *[0.0] * 9, 0.9]]])),  # however much: `sinks` decides
        verdict_frozen=np.array([[[0, 1, 0, 2, *[0] * 10]]], np.uint8),
    )
    rows = [{"prompt": 0, "position": 2, "sink": True}, {"prompt": 0, "position": 3, "sink": False},
            {"prompt": 1, "position": 5, "sink": True}]  # fmt: skip
    table = by_token(Exhibits((one,)), pd.DataFrame(rows))
    assert list(table.columns) == TOKENS.names
    assert table[["token", "place", "keys"]].to_numpy().tolist() == [
        ["a", "position 0", 1], ["c", "sink", 1], ["b", "elsewhere", 2], ["x", "elsewhere", 10],
    ]  # fmt: skip
    b = table[table["token"] == "b"].iloc[0]
    assert (b["unselectable"], b["unselectable_no_scaling"]) == (0, 2)
    assert b["attainable_median"] == pytest.approx(0.6, abs=1e-3)
    assert b["attainable_change"] == pytest.approx(0.25 - 0.6, abs=1e-3)
    unknown = np.full((1, 1, 2), VERDICTS.index("not measured"), np.uint8)
    one = shown(["a", "b"], [np.nan] * 2, [np.nan] * 2, verdict=unknown, verdict_frozen=unknown)
    table = by_token(Exhibits((one,)))
    assert table[["unselectable", "unselectable_no_scaling", "attainable_median"]].isna().all().all()
    assert by_token(Exhibits()).empty


def test_a13_one_definition_of_a_sink(long_report: Report) -> None:
    """What the table of tokens calls a sink is what findings and the table of sinks call one."""
    sinks = long_report.sinks[long_report.sinks["sink"].astype(bool)]
    shown = {p.prompt: p for p in long_report.exhibits.attention}
    later = sinks[(sinks["position"] > 0) & sinks["prompt"].isin(list(shown))]
    table = by_token(long_report.exhibits, long_report.sinks)
    heads = {p: len(kept.layers) * len(kept.heads) for p, kept in shown.items()}
    assert table.loc[table["place"] == "sink", "keys"].sum() == sum(heads[int(p)] for p in later["prompt"])
    without = by_token(long_report.exhibits, sinks.head(0))
    assert "sink" not in set(without["place"])


def test_every_figure_is_that_of_its_table(report: Report) -> None:
    table = report.by_head()
    assert table[["layer", "head"]].to_numpy().tolist() == [[i, h] for i in range(2) for h in range(4)]
    assert table.columns.tolist() == BY_HEAD.names
    effects = report.tables["head_effects"].set_index(["layer", "head", "variant"])
    heads = report.heads[report.heads["space"] == "head"].set_index(["layer", "head", "variant"])
    sinks = report.tables["sink_heads"].set_index(["layer", "head"])
    for row in table.to_dict("records"):
        place = (row["layer"], row["head"])
        assert row["delta_loss"] == effects.loc[(*place, "no_scaling"), "delta_loss"]
        assert row["delta_loss_both_removed"] == effects.loc[(*place, "both_removed"), "delta_loss"]
        assert row["exact"]
        intact, frozen = (heads.loc[(*place, v)] for v in ("intact", "no_scaling"))
        assert row["entropy_change"] == frozen["entropy_ratio"] - intact["entropy_ratio"]
        assert row["received"] == intact["pattern_max_median"]
        assert row["margin"] == intact["margin_median"]
        assert row["first_attention"] == sinks.loc[place, "first_attention"]
    effects = report.tables["head_effects"].copy()  # what was not run is estimated
    gone = (effects["layer"] == 1) & (effects["head"] == 2)
    effects.loc[gone, ["delta_loss", "p_sign"]] = np.nan
    table = report.with_tables(head_effects=effects).by_head().set_index(["layer", "head"])
    estimate = effects[gone & (effects["variant"] == "no_scaling")]["estimate"].iloc[0]
    assert table.loc[(1, 2), "delta_loss"] == estimate
    assert not table.loc[(1, 2), "exact"]
    assert table.loc[(1, 1), "exact"]
    sizes = report.by_head("delta_loss")["delta_loss"].abs()
    assert sizes.is_monotonic_decreasing
    with pytest.raises(ValueError, match="loss_delta"):
        report.by_head("loss_delta")
    empty = Report()
    assert len(empty.by_head()) == 0
    assert empty.by_head().columns.tolist() == BY_HEAD.names
    assert known_measures(empty.by_head()) == []
    some = report.with_tables(head_effects=report.tables["head_effects"].iloc[:0])
    assert len(some.by_head()) == 8
    assert some.by_head()["delta_loss"].isna().all()
    assert "delta_loss" not in known_measures(some.by_head())


def test_the_picture_of_every_measure_is_offered(report: Report) -> None:
    for measure in known_measures(report.by_head()):
        figure = heads_map(report, measure)
        assert isinstance(figure, Figure)
        mesh = figure.axes[0].collections[0]
        table = report.by_head().pivot(index="layer", columns="head", values=measure)
        np.testing.assert_array_equal(np.asarray(mesh.get_array()).reshape(2, 4), table.to_numpy())
        low, high = mesh.get_clim()
        assert (low == -high) == bool(MEASURES[measure].signed or (table < 0).any(axis=None))
    assert svg(figure, "x") == svg(heads_map(report, measure), "x")
    with pytest.raises(ValueError, match="size"):
        heads_map(report, "size")
    (group,) = [g for g in groups(report) if g.id == "heads-pictures"]
    assert [p.id for p in group.pictures] == ["by-head"]
