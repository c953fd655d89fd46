"""How much attention a key can get from any position that sees it: brute force, one position at a time, and models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from architectures import cases

import ln_probe
from ln_probe.analyses.geometry.api import attainable_attention
from ln_probe.analyses.geometry.newton import WEIGHT_GAP
from ln_probe.analyses.geometry.positions import QuerySets, attainable_anywhere
from ln_probe.hooks.attention import Rotary
from ln_probe.hooks.capture import visible_keys

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
        here = attainable_attention(keys[seen], (center, axes), None if bias is None else bias[seen], gap=1e-6)
        low[seen], high[seen] = np.maximum(low[seen], here[0]), np.maximum(high[seen], here[1])
    return low, high


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_bounds_hold_at_every_position(mask: str, rotary: bool, bias: bool) -> None:
    causal, window = MASKS[mask]
    for seed in range(3):
        keys, lift, queries = case(seed, rotary, bias)
        weight, upper = attainable_anywhere(keys, lift, queries, rotary=rotary, causal=causal, window=window)
        low, high = by_position(keys, lift, queries, causal, window)
        assert (weight <= high + 1e-9).all(), "no more than what some position gives"
        assert (low <= upper + 1e-9).all(), "no less than what any position gives"
        if causal:
            assert np.mean(low - weight) < 0.15, "the first position that sees a key gives it much of what it can get"
        assert np.mean(upper - high) < 0.25


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_without_rotary_positions_and_windows_the_answer_is_known_to_the_gap(causal: bool, bias: bool) -> None:
    for seed in range(4):
        keys, lift, queries = case(seed, False, bias)
        weight, upper = attainable_anywhere(keys, lift, queries, rotary=False, causal=causal)
        low, high = by_position(keys, lift, queries, causal, None)
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


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("rotary", [False, True])
def test_some_keys_are_bounded_as_all_are(rotary: bool, window: int | None) -> None:
    keys, bias, queries = case(7, rotary, True)
    options: dict[str, Any] = {"rotary": rotary, "causal": True, "window": window}
    weight, upper = attainable_anywhere(keys, bias, queries, **options)
    only = np.array([0, 3, 4, 11, 13])
    some = attainable_anywhere(keys, bias, queries, **options, only=only)
    np.testing.assert_allclose(some[0], weight[only], rtol=1e-9)
    np.testing.assert_allclose(some[1], upper[only], rtol=1e-9)


def test_positions_are_taken_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from ln_probe.analyses.geometry import positions

    keys, bias, queries = case(8, True, True)
    whole = attainable_anywhere(keys, bias, queries, rotary=True, causal=True)
    monkeypatch.setattr(positions, "_BLOCK", 3 * T * D)
    np.testing.assert_allclose(attainable_anywhere(keys, bias, queries, rotary=True, causal=True), whole, rtol=1e-9)


@pytest.mark.parametrize(("number", "window"), [(1, None), (1, 4), (6, 1)])
def test_where_no_position_sees_another_key_there_is_no_answer(number: int, window: int | None) -> None:
    keys, _, queries = case(0, False, False)
    for found in attainable_anywhere(keys[:number], None, queries, rotary=False, causal=True, window=window):
        assert found.shape == (number,)
        assert np.isnan(found).all()


# Models.

TOKENS = torch.randint(2, 50, (2, 28), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("arch", cases("gpt2", "neox", "llama", "bloom", slow=["mistral", "neo", "qwen3"]))
def test_no_key_received_more_than_it_can_get(arch: str, make_bridge: Callable[..., Any]) -> None:
    report = ln_probe.analyze(make_bridge(arch), TOKENS, probes=["selectability"], keys="all", progress=False)
    keys = report.keys.query("space == 'head'")
    assert keys["attainable_upper"].notna().all()
    assert (keys["pattern_max"] <= keys["attainable_upper"] + 1e-9).all()
    assert (keys["attainable"] <= keys["attainable_upper"] + 1e-12).all()
    assert (keys["attainable_last"] <= keys["attainable_upper"] + 1e-9).all(), "the last position is one of them"
    if arch in ("gpt2", "bloom"):
        assert (keys["attainable_upper"] - keys["attainable"] <= WEIGHT_GAP).all()
    if arch != "mistral":
        last = keys[keys["position"] == 27]
        assert (last["attainable"] >= last["attainable_last"] - WEIGHT_GAP).all(), "seen from the last position alone"


@pytest.mark.slow
def test_no_key_of_a_bundled_model_received_more_than_it_can_get() -> None:
    report = ln_probe.analyze(
        ln_probe.load_model("lm-layernorm"), max_tokens=64, probes=["selectability"], keys="all", progress=False
    )
    keys = report.keys.query("space == 'head'")
    assert (keys["pattern_max"] <= keys["attainable_upper"] + 1e-9).all()
    assert (keys["pattern_max"] > keys["attainable_last_upper"]).mean() > 0.3, "the last position alone is no bound"


def test_queries_without_a_bound_are_the_empirical_ones(make_hooked: Callable[..., Any]) -> None:
    report = ln_probe.analyze(
        make_hooked(normalization_type=None), TOKENS, probes=["selectability"], keys="all", progress=False
    )
    keys = report.keys.query("space == 'head'")
    assert (keys["pattern_max"] <= keys["attainable_upper"] + 1e-9).all()
    assert (keys["attainable_upper"] - keys["attainable"] <= WEIGHT_GAP).all()


def test_sampled_keys_have_the_bounds_of_all(make_bridge: Callable[..., Any]) -> None:
    place = ["layer", "head", "space", "variant", "prompt", "position"]
    options: dict[str, Any] = {"probes": ["selectability"], "keys": "all", "progress": False, "layers": [0]}
    model = make_bridge("llama")
    every = ln_probe.analyze(model, TOKENS, **options).keys.set_index(place)
    some = ln_probe.analyze(model, TOKENS, keys_sample=7, **options).keys.set_index(place)
    for column in ("attainable", "attainable_upper"):
        np.testing.assert_allclose(some[column], every.loc[some.index, column], rtol=1e-6)
