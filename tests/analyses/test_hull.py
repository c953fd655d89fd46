"""Known answers about which keys can be selected, and laws of selectability."""

import numpy as np
import pytest
import torch
from architectures import cases

import ln_probe
from ln_probe.analyses.geometry.check import CertificateError


def normalized(x):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True))


def circle(n):
    angle = 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angle), np.sin(angle)], axis=1)


def test_a_circle_with_one_key_inside():
    keys = np.concatenate([circle(8), [[0.1, -0.2]]])
    geometry = ln_probe.key_geometry(keys)
    assert geometry.verdict.tolist() == ["selectable"] * 8 + ["unselectable"]
    geometry.certify()
    assert "8 selectable, 1 unselectable" in repr(geometry)
    for i in range(8):
        scores = keys @ geometry.witness(i)
        assert scores.argmax() == i
        assert (np.delete(scores, i) < scores[i]).all()
    weights = geometry.weights(8)
    assert weights[8] == 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_allclose(weights @ keys, keys[8], atol=1e-7)


def test_duplicates_of_a_vertex_and_of_an_interior_point():
    keys = np.concatenate([circle(6), circle(6)[2:3], [[0.1, 0.0], [0.1, 0.0], [0.1, 1e-9]]])
    geometry = ln_probe.key_geometry(keys)
    corners = ["selectable"] * 6
    corners[2] = "duplicate"
    assert geometry.verdict.tolist() == [*corners, "duplicate", *["unselectable"] * 3]
    assert geometry.representative.tolist() == [0, 1, 2, 3, 4, 5, 2, 7, 7, 7]
    # A copy leaves no margin; 1e-9 away it leaves no more than that.
    assert (geometry.margin_lower[[2, 6, 7, 8, 9]] == 0).all()
    assert (geometry.margin_upper[[2, 6, 7, 8]] < 1e-14).all()
    apart = 1e-9 / np.sqrt(((keys - keys.mean(0)) ** 2).sum(1).mean())
    assert apart * (1 - 1e-9) <= geometry.margin_upper[9] <= 1.01 * apart
    geometry.certify()
    scores = keys @ geometry.witness(6)
    assert set(np.flatnonzero(scores > scores.max() - 1e-9)) == {2, 6}
    assert geometry.weights(6)[2] == 1
    assert geometry.weights(2)[6] == 1
    assert (geometry.weights(8)[[7, 8, 9]] == 0).all()


def test_one_key_and_two():
    geometry = ln_probe.key_geometry(np.array([[1.0, 2.0]]))
    assert geometry.verdict.tolist() == ["selectable"]
    assert np.isnan([geometry.margin_lower, geometry.margin_upper]).all()
    assert (geometry.witness(0) == 0).all()
    geometry.certify()
    geometry = ln_probe.key_geometry(np.array([[1.0, 2.0], [4.0, -2.0]]), margins="exact")
    assert geometry.verdict.tolist() == ["selectable"] * 2
    np.testing.assert_allclose(geometry.margin_lower, 2, rtol=1e-6)  # 5 apart, each 2.5 from their mean
    geometry.certify()


@pytest.mark.parametrize("value", [1 / 3, -1e50])
def test_keys_that_are_all_equal(value):
    geometry = ln_probe.key_geometry(np.full((5, 3), value))
    assert (geometry.verdict == "duplicate").all()
    assert (geometry.margin_lower == 0).all()
    assert (geometry.margin_upper == 0).all()
    geometry.certify()


@pytest.mark.parametrize(
    ("beside", "offset", "verdict"),
    [
        ("an edge", 1e-3, "selectable"),
        ("an edge", 1e-6, "selectable"),
        ("an edge", 1e-9, "unselectable"),
        ("an edge", -1e-6, "unselectable"),
        ("a corner", 1e-3, "selectable"),
        ("a corner", 1e-6, "selectable"),
        ("a corner", 1e-8, "duplicate"),
        ("a corner", 1e-9, "duplicate"),
    ],
)
def test_tolerance_decides_between_near_points(beside, offset, verdict):
    # Of a close pair at a corner, the outer one hides the inner one, unless they count as one.
    square = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    key = [1.0 + offset, 0.0 if beside == "an edge" else 1.0 + offset / 2]
    geometry = ln_probe.key_geometry(np.concatenate([square, [key]]))
    assert geometry.verdict[4] == verdict
    assert beside == "a corner" or (geometry.verdict[:4] == "selectable").all()
    geometry.certify()


def test_a_batch_is_its_sets_one_by_one_at_any_number_of_threads():
    rng = np.random.default_rng(0)
    keys, bias = rng.standard_normal((5, 50, 4)), rng.standard_normal((5, 50))
    one = ln_probe.key_geometry(keys, bias=bias, query_set=1.0, threads=1)
    two = ln_probe.key_geometry(keys, bias=bias, query_set=1.0, threads=2)
    for b in range(5):
        alone = ln_probe.key_geometry(keys[b], bias=bias[b], query_set=1.0)
        for name in ("verdict", "margin_lower", "margin_upper", "attainable", "representative"):
            assert (getattr(one, name)[b] == getattr(alone, name)).all()
            assert (getattr(two, name)[b] == getattr(alone, name)).all()
        inside = np.flatnonzero(alone.verdict == "unselectable")
        assert (two.weights(b, inside[0]) == alone.weights(inside[0])).all()
        assert (two.weights((b, inside[0])) == alone.weights(inside[0])).all()
    two.certify()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_what_is_given_in_another_precision_is_judged_as_it_stands(dtype):
    keys = np.random.default_rng(0).standard_normal((50, 3)).astype(dtype)
    exact = ln_probe.key_geometry(keys.astype(np.float64))
    for given in (keys, torch.from_numpy(keys), torch.from_numpy(keys).requires_grad_()):
        geometry = ln_probe.key_geometry(given)
        assert (geometry.verdict == exact.verdict).all()
        assert (geometry.margin_lower == exact.margin_lower).all()


@pytest.mark.parametrize(
    ("part", "array", "key", "change", "word"),
    [
        ("verdicts", "query", 3, lambda v: -v, "query"),
        ("verdicts", "value", 8, lambda v: np.arange(len(v), dtype=float), "weights"),
        ("verdicts", "first", 5, lambda v: 4, "differ"),
        ("margins", "upper", 2, lambda v: v / 2, "margin_upper"),
        ("margins", "lower", 2, lambda v: v * 1.1, "margin_lower"),
        ("attention", "lower", 4, lambda v: v + 0.02, "attention"),
        ("attention", "upper", 4, lambda v: v - 0.02, "attention"),
    ],
)
def test_a_certificate_that_does_not_hold_is_found(part, array, key, change, word):
    query_set = 2.0 if part == "attention" else None
    geometry = ln_probe.key_geometry(np.concatenate([circle(8), [[0.1, -0.2]]]), query_set=query_set)
    geometry.certify()
    values = getattr(getattr(geometry._sets[0].solved.answers, part), array)
    values[key] = change(values[key])
    with pytest.raises(CertificateError, match=f"key {key}.*{word}"):
        geometry.certify()


# science.md §2: LayerNorm'd random keys through random W_K; the fraction that is unselectable.
@pytest.mark.parametrize(("n", "d", "heads", "d_head", "share"), cases(
    (128, 8, 2, 4, 0.477), (128, 64, 4, 16, 0.0), slow=[
        (896, 8, 2, 4, 0.750), (896, 64, 4, 16, 0.004), (128, 8, 4, 2, 0.910), (896, 8, 4, 2, 0.980),
        (128, 64, 8, 8, 0.090), (896, 64, 8, 8, 0.411),
    ],
))  # fmt: skip
def test_table_of_random_heads(n, d, heads, d_head, share):
    rng, draws = np.random.default_rng(0), []
    for _ in range(32 // heads):  # 32 random heads
        x = normalized(rng.standard_normal((n, d)))
        geometry = ln_probe.key_geometry(x @ rng.standard_normal((heads, d, d_head)), margins=False)
        draws.append((geometry.verdict == "unselectable").mean())
    # Keys of one draw are not independent and the table was one draw itself: 4 standard errors of a draw.
    error = 4 * max(np.std(draws), np.sqrt(share * (1 - share) / n / heads)) + 5e-4
    assert abs(np.mean(draws) - share) < error, (np.mean(draws), share)


# science.md §4 (figure 1c/d of the paper): 60 random keys, share of draws that hide any key, mean fraction.
def test_the_result_does_not_share_memory_with_the_keys():
    keys = np.concatenate([circle(8), [[0.1, -0.2]]])
    for given in (keys, torch.from_numpy(keys)):
        geometry = ln_probe.key_geometry(given)
        before = geometry.witness(0).copy()
        given[:] = 0
        geometry.witness(0)[:] = 7
        geometry.certify()
        assert (geometry.witness(0) == before).all()
        keys[:] = np.concatenate([circle(8), [[0.1, -0.2]]])
