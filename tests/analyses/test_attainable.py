"""How much attention a key can get, from one set of queries and from any position that sees it: known answers, brute
force one position at a time, and models (test_geometry_truth.py asks a general solver)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases, make_bridge, make_hooked

import ln_probe
from ln_probe.analyses.geometry import positions
from ln_probe.analyses.geometry.api import set_attention
from ln_probe.analyses.geometry.inputs import QuerySet, query_sets
from ln_probe.analyses.geometry.newton import WEIGHT_GAP
from ln_probe.analyses.geometry.positions import QuerySets, attainable_anywhere
from ln_probe.hooks.attention import Rotary
from ln_probe.hooks.capture import visible_keys


def weights(keys, queries):
    scores = queries @ keys.T
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return odds / odds.sum(axis=1, keepdims=True)


def test_axes_that_lack_directions_and_axes_of_no_length():
    rng = np.random.default_rng(0)
    keys, center, axis = rng.standard_normal((20, 4)), rng.standard_normal(4), rng.standard_normal((4, 1))
    best = weights(keys, center + np.linspace(-1, 1, 20001)[:, None] @ axis.T).max(axis=0)
    for axes in (axis, np.concatenate([axis, np.zeros((4, 2))], axis=1), axis @ np.array([[0.6, 0.8]])):
        geometry = ln_probe.key_geometry(keys, query_set=(center, axes))
        geometry.certify()
        assert (np.abs(geometry.attainable - best) <= WEIGHT_GAP + 1e-6).all()
        # A line of queries sees two coordinates of a key: its score in the middle of the line, and how it grows.
        assert (geometry.verdict == ln_probe.key_geometry(keys @ axis, bias=keys @ center).verdict).all()
    point = ln_probe.key_geometry(keys, query_set=(center, np.zeros((4, 0))))
    np.testing.assert_allclose(point.attainable, weights(keys, center[None])[0], atol=1e-12)
    np.testing.assert_allclose(point.attainable_upper, point.attainable, atol=1e-12)


def test_an_unselectable_key_gets_at_most_half():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((200, 4))
    geometry = ln_probe.key_geometry(keys, query_set=100.0)
    hidden = geometry.verdict == "unselectable"
    assert hidden.sum() > 50
    assert (geometry.attainable[hidden] <= 0.5).all()
    assert (geometry.attainable[geometry.margin_lower > 10.0] > 0.98).all()


def test_heavy_tailed_heads_are_certified():
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((256, 32)) * rng.lognormal(0, 1, (256, 1))
    geometry = ln_probe.key_geometry(keys, query_set=3.0)  # scores up to some 100 nats
    assert (geometry.attainable_upper - geometry.attainable <= WEIGHT_GAP + 1e-12).all()
    geometry.certify()


def test_attention_alone_is_that_of_the_geometry():
    rng = np.random.default_rng(0)
    keys, bias = rng.standard_normal((3, 20, 4)), rng.standard_normal((3, 20))
    queries = rng.standard_normal((3, 4)), rng.standard_normal((3, 4, 6))
    geometry = ln_probe.key_geometry(keys, bias=bias, query_set=queries)
    for b, own in enumerate(query_sets(queries, 3, 4)):
        found = set_attention(keys[b], bias[b], own)
        np.testing.assert_allclose(found.weight, geometry.attainable[b], atol=WEIGHT_GAP)
        assert (found.weight <= geometry.attainable_upper[b] + 1e-12).all()
        assert (geometry.attainable[b] <= found.upper + 1e-12).all()
        tight = set_attention(keys[b], bias[b], own, gap=1e-6)
        assert (tight.upper - tight.weight <= 1e-6).all()
        assert (tight.weight >= found.weight - 1e-9).all()


def test_attainable_at_is_the_query_and_a_good_place_to_start_from():
    rng = np.random.default_rng(4)
    keys = rng.standard_normal((3, 40, 5)) * rng.lognormal(size=(3, 40, 1))
    center, axes = rng.standard_normal((3, 5)), rng.standard_normal((3, 5, 4))
    geometry = ln_probe.key_geometry(keys, query_set=(center, axes))
    assert (np.linalg.norm(geometry.attainable_at, axis=-1) <= 1 + 1e-12).all()
    for b in range(3):
        paid = weights(keys[b], center[b] + geometry.attainable_at[b] @ axes[b].T)
        np.testing.assert_allclose(paid.diagonal(), geometry.attainable[b], rtol=1e-9)
        half = QuerySet(center[b], axes[b] / 2)
        cold, warm = (set_attention(keys[b], None, half, starts=u) for u in (None, geometry.attainable_at[b]))
        assert (warm.upper - warm.weight <= WEIGHT_GAP).all()
        assert ((warm.weight <= cold.upper + 1e-12) & (cold.weight <= warm.upper + 1e-12)).all()  # both are certified
    alone = ln_probe.key_geometry(keys)
    assert alone.attainable_at is None
    assert np.isnan(alone.attainable).all()


# From any position.

T, D = 14, 4
MASKS = {"causal": (True, None), "windowed": (True, 5), "all": (False, None)}


def rotation(seed: int) -> Rotary:
    angle = torch.arange(T)[:, None] * torch.tensor([1.0, 0.13], dtype=torch.float64)
    return Rotary(angle.cos().repeat(1, 2), angle.sin().repeat(1, 2), False)


def sets_of(center: np.ndarray, axes: np.ndarray, rotary: Rotary | None) -> QuerySets:
    def at(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if rotary is None:
            return center[None], axes[None]
        place = torch.from_numpy(positions)
        rows = torch.from_numpy(np.column_stack([center, axes]).T)[None].expand(len(positions), -1, -1)
        turned = rotary(rows, place).numpy()
        return turned[:, 0], turned[:, 1:].transpose(0, 2, 1)

    return at


def case(seed: int, rotary: bool, bias: bool) -> tuple[np.ndarray, np.ndarray | None, QuerySets]:
    rng = np.random.default_rng(seed)
    queries = sets_of(
        0.3 * rng.standard_normal(D), 0.7 * rng.standard_normal((D, D)), rotation(seed) if rotary else None
    )
    return rng.standard_normal((T, D)) + 1.0, rng.standard_normal(T) if bias else None, queries


def by_position(
    keys: np.ndarray, bias: np.ndarray | None, queries: QuerySets, causal: bool, window: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Bounds of the largest weight at each position that sees a key and another one, each a problem of its own."""
    low, high = np.zeros(T), np.zeros(T)
    mask = visible_keys(T, T, causal=causal, window=window).numpy()
    for t in range(T):
        seen = np.flatnonzero(mask[t])
        if len(seen) < 2:
            continue
        center, axes = (part[0] for part in queries(np.array([t])))
        lift = None if bias is None else bias[seen]
        here = set_attention(keys[seen], lift, QuerySet(center, np.ascontiguousarray(axes)), gap=1e-6)
        low[seen], high[seen] = np.maximum(low[seen], here.weight), np.maximum(high[seen], here.upper)
    return low, high


@pytest.mark.parametrize(("mask", "rotary", "bias"), [
    ("causal", False, False), ("causal", True, True), ("windowed", False, True), ("windowed", True, False),
    ("all", False, False), ("all", True, True),
])  # fmt: skip
def test_bounds_hold_at_every_position(mask: str, rotary: bool, bias: bool) -> None:
    """Without rotary positions and windows the answer is known to the gap."""
    causal, window = MASKS[mask]
    for seed in range(2):
        keys, lift, queries = case(seed, rotary, bias)
        weight, upper = attainable_anywhere(keys, lift, queries, rotary=rotary, causal=causal, window=window)
        low, high = by_position(keys, lift, queries, causal, window)
        assert (weight <= high + 1e-9).all(), "no more than what some position gives"
        assert (low <= upper + 1e-9).all(), "no less than what any position gives"
        if causal:
            assert np.mean(low - weight) < 0.15, "the first position that sees a key gives it much of what it can get"
        assert np.mean(upper - high) < 0.25
        if not rotary and window is None:
            assert (upper - weight <= WEIGHT_GAP).all()
            assert (weight >= low - WEIGHT_GAP).all()
            assert (upper <= high + WEIGHT_GAP).all()


def test_a_key_of_the_middle_gets_less_and_less() -> None:
    """Keys at the corners of a square, then their middle: an even share of those seen is all that it can get."""
    keys = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]])
    queries = sets_of(np.zeros(2), 50.0 * np.eye(2), None)
    weight, upper = attainable_anywhere(keys, None, queries, rotary=False, causal=True)
    assert (weight[:4] > 0.98).all()
    assert upper[4] == pytest.approx(1 / 5, abs=WEIGHT_GAP)
    assert upper[5] == pytest.approx(1 / 6, abs=WEIGHT_GAP)
    assert weight[5] <= 1 / 6 <= upper[5] + 1e-12


@pytest.mark.parametrize(("rotary", "window"), [(False, None), (True, 5)])
def test_some_keys_are_bounded_as_all_are_however_many_positions_at_a_time(
    rotary: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, bias, queries = case(7, rotary, True)
    options: dict[str, Any] = {"rotary": rotary, "causal": True, "window": window}
    whole = attainable_anywhere(keys, bias, queries, **options)
    only = np.array([0, 3, 4, 11, 13])
    some = attainable_anywhere(keys, bias, queries, **options, only=only)
    np.testing.assert_allclose(some, np.stack(whole)[:, only], rtol=1e-9)
    monkeypatch.setattr(positions, "_BLOCK", 3 * T * D)
    np.testing.assert_allclose(attainable_anywhere(keys, bias, queries, **options), whole, rtol=1e-9)


@pytest.mark.parametrize(("number", "window"), [(1, None), (1, 4), (6, 1)])
def test_where_no_position_sees_another_key_there_is_no_answer(number: int, window: int | None) -> None:
    keys, _, queries = case(0, False, False)
    for found in attainable_anywhere(keys[:number], None, queries, rotary=False, causal=True, window=window):
        assert found.shape == (number,)
        assert np.isnan(found).all()


# Models.

TOKENS = torch.randint(2, 50, (1, 18), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("arch", cases("neox", "bloom", slow=["gpt2", "llama", "mistral", "neo", "qwen3"]))
def test_no_key_received_more_than_it_can_get(arch: str) -> None:
    report = ln_probe.analyze(make_bridge(arch), TOKENS, probes=["selectability"], keys="all", progress=False)
    keys = report.keys.query("space == 'head'")
    assert keys["attainable_upper"].notna().all()
    assert (keys["pattern_max"] <= keys["attainable_upper"] + 1e-9).all()
    assert (keys["attainable"] <= keys["attainable_upper"] + 1e-12).all()
    assert (keys["attainable_last"] <= keys["attainable_upper"] + 1e-9).all(), "the last position is one of them"
    if arch in ("gpt2", "bloom"):
        assert (keys["attainable_upper"] - keys["attainable"] <= WEIGHT_GAP).all()
    if arch != "mistral":
        last = keys[keys["position"] == 17]
        assert (last["attainable"] >= last["attainable_last"] - WEIGHT_GAP).all(), "seen from the last position alone"


@pytest.mark.slow
def test_no_key_of_a_bundled_model_received_more_than_it_can_get() -> None:
    report = ln_probe.analyze(
        ln_probe.load_model("lm-layernorm"), max_tokens=64, probes=["selectability"], keys="all", progress=False
    )
    keys = report.keys.query("space == 'head'")
    assert (keys["pattern_max"] <= keys["attainable_upper"] + 1e-9).all()
    assert (keys["pattern_max"] > keys["attainable_last_upper"]).mean() > 0.3, "the last position alone is no bound"


def test_queries_without_a_bound_are_the_empirical_ones() -> None:
    report = ln_probe.analyze(
        make_hooked(normalization_type=None), TOKENS, probes=["selectability"], keys="all", progress=False
    )
    keys = report.keys.query("space == 'head'")
    assert (keys["pattern_max"] <= keys["attainable_upper"] + 1e-9).all()
    assert (keys["attainable_upper"] - keys["attainable"] <= WEIGHT_GAP).all()


def test_sampled_keys_have_the_bounds_of_all() -> None:
    place = ["layer", "head", "space", "variant", "prompt", "position"]
    options: dict[str, Any] = {"probes": ["selectability"], "keys": "all", "progress": False, "layers": [0]}
    model = make_bridge("llama")
    every = ln_probe.analyze(model, TOKENS, **options).keys.set_index(place)
    some = ln_probe.analyze(model, TOKENS, keys_sample=7, **options).keys.set_index(place)
    for column in ("attainable", "attainable_upper"):
        np.testing.assert_allclose(some[column], every.loc[some.index, column], rtol=1e-6)
