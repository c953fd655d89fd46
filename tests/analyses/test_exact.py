"""Exact verdicts: known answers, proofs that hold as fractions, and the same answer whatever the hints."""

from fractions import Fraction

import numpy as np
import pytest

from ln_probe.analyses.geometry import exact as exact_arithmetic
from ln_probe.analyses.geometry.exact import ExactSet, ExactVerdict, eliminate, independent, proves, solve

ULP = 2.0**-52


def codes(points, bias=None, **measured):
    """Verdicts on all keys of a set, each with a proof that holds."""
    found = [ExactSet(points, bias, **measured).decide(i) for i in range(len(points))]
    assert all(proves(verdict, points, bias, i, **measured) for i, verdict in enumerate(found))
    return [verdict.code for verdict in found]


SQUARE = np.array([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
CROSS = 4.0 * np.concatenate([np.eye(3), -np.eye(3)])
LINE = np.array([[-1.0], [1.0], [0.0]])
FLAT = {"axes": np.array([[1.0], [0.0]])}  # sees the first coordinate alone
SIDES = np.array([[0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]])
LETTERS = {"s": "selectable", "u": "unselectable", "d": "duplicate"}
# Keys, their bias and how they are measured, and the verdict of each key by its first letter.
KNOWN = {
    "the ends of a line": (np.array([[0.25], [-3.0], [1e300], [1e-300], [0.0]]), None, {}, "ussuu"),
    "one key": (np.array([[2.0, 3.0]]), None, {}, "s"),
    "equal keys": (np.array([[2.0, 3.0]] * 3), None, {}, "ddd"),
    "a line in the plane": (np.array([[0.0, 0.0], [1.0, 3.0], [2.0, 6.0], [5.0, 15.0]]), None, {}, "suus"),
    "an ulp off it": (np.array([[0.0, 0.0], [1.0 + ULP, 3.0], [2.0, 6.0], [5.0, 15.0]]), None, {}, "ssus"),
    "on the edge of a square": (np.append(SQUARE, [[1.0, 0.3]], axis=0), None, {}, "ssssu"),
    "an ulp beyond the edge": (np.append(SQUARE, [[1.0 + ULP, 0.3]], axis=0), None, {}, "sssss"),
    "an ulp within the edge": (np.append(SQUARE, [[1.0 - ULP / 2, 0.3]], axis=0), None, {}, "ssssu"),
    "on a facet": (np.append(CROSS, [[2.0, 1.0, 1.0]], axis=0), None, {}, "ssssssu"),
    "an ulp beyond the facet": (np.append(CROSS, [[2.0, 1.0, 1.0 + ULP]], axis=0), None, {}, "sssssss"),
    "an ulp within the facet": (np.append(CROSS, [[2.0, 1.0, 1.0 - ULP / 2]], axis=0), None, {}, "ssssssu"),
    "copies of a vertex and of an inner key": (
        np.concatenate([SQUARE, SQUARE[:1], [[0.0, -0.0], [0.0, 0.0]], SQUARE[1:2] + np.array([ULP, 0.0])]),
        None,
        {},
        "dussduus",
    ),
    "a bias above the line": (LINE, np.array([0.0, 1.0, 0.5 + ULP]), {}, "sss"),
    "a bias on the line": (LINE, np.array([0.0, 1.0, 0.5]), {}, "ssu"),
    "a bias below the line": (LINE, np.array([0.0, 1.0, 0.5 - ULP]), {}, "ssu"),
    "a long query overcomes a bias": (LINE, np.array([-1e9, 1.0, 0.0]), {}, "sss"),
    "equal keys and other biases": (np.zeros((3, 2)), np.array([0.0, ULP, -1.0]), {}, "usu"),
    "equal keys, two equal biases": (np.zeros((3, 2)), np.array([1.0, 1.0, 0.0]), {}, "ddu"),
    "through one axis": (SIDES, None, FLAT, "uuss"),
    # Where the axes see nothing, the center decides.
    "through one axis and a center": (SIDES, None, FLAT | {"center": np.array([0.0, 1.0])}, "suss"),
    "a center that axes reach": (SIDES, None, {"axes": np.eye(2), "center": np.array([0.0, 9.0])}, "ssss"),
    # In float64 the first two products are equal.
    "products an ulp apart": (
        np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]),
        None,
        {"axes": np.array([[1.0], [ULP / 4]])},
        "uss",
    ),
    "axes that see nothing": (SIDES, None, {"axes": np.zeros((2, 2))}, "dddd"),
    "no axes": (SIDES, None, {"axes": np.zeros((2, 0))}, "dddd"),
    "a center alone": (SIDES, None, {"axes": np.zeros((2, 2)), "center": np.array([1.0, 2.0])}, "suuu"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_answers(name):
    keys, bias, measured, letters = KNOWN[name]
    assert codes(keys, bias, **measured) == [LETTERS[letter] for letter in letters]


def test_weights_are_exact():
    verdict = ExactSet(np.array([[0.0], [3.0], [1.0]])).decide(2)
    assert verdict.weights == (Fraction(2, 3), Fraction(1, 3))
    assert verdict.index == (0, 1)
    assert verdict.query is None


def test_only_some_compete():
    keys = np.array([[0.0], [1.0], [2.0], [2.0]])
    assert ExactSet(keys).decide(1, among=[2, 3]).code == "selectable"
    assert ExactSet(keys).decide(2, among=[0, 1]).code == "selectable"
    assert ExactSet(keys).decide(2, among=[0, 3]).code == "duplicate"
    assert ExactSet(keys).decide(2, among=[]).code == "selectable"


def sets(rng):
    for trial in range(32):
        n, d = int(rng.integers(2, 14)), int(rng.integers(1, 4))
        keys = rng.integers(-2, 3, (n, d)).astype(float)
        if trial % 2:
            keys = rng.standard_normal((n, d)) * 10.0 ** rng.integers(-8, 9, (n, 1))
        bias = (None, rng.integers(-1, 2, n).astype(float), rng.standard_normal(n))[trial % 3]
        measured = {}
        if trial % 4 > 1:
            measured["axes"] = rng.standard_normal((d, int(rng.integers(1, d + 2))))
        if trial % 8 > 5:
            measured["center"] = rng.standard_normal(d)
        yield keys, bias, measured


@pytest.mark.parametrize("library", ["flint", "none"])
def test_hints_and_libraries_change_no_verdict(library, monkeypatch):
    if library != "none":
        pytest.importorskip(library, reason=f"{library} is not installed: pip install ln-probe[exact]")
    else:
        monkeypatch.setattr(exact_arithmetic, "flint", None)
    rng = np.random.default_rng(1)
    asked = 0
    for keys, bias, measured in sets(rng):
        exact = ExactSet(keys, bias, **measured)
        blind = ExactSet(keys, bias, **measured)
        blind._guess = lambda key: ([], [], None)  # from nothing at all
        for i in range(len(keys)):
            verdict = exact.decide(i)
            assert proves(verdict, keys, bias, i, **measured)
            other = blind.decide(i)
            assert proves(other, keys, bias, i, **measured)
            hinted = exact.decide(
                i, support=rng.integers(0, len(keys), 4), query=rng.standard_normal(len(verdict.query or keys[0]))
            )
            assert proves(hinted, keys, bias, i, **measured)
            assert verdict.code == other.code == hinted.code
            asked += 1
    assert asked > 150


def test_a_hint_that_is_right_saves_the_search(monkeypatch):
    rng = np.random.default_rng(2)
    keys = np.concatenate([rng.standard_normal((60, 5)), np.zeros((1, 5))])
    exact = ExactSet(keys)
    inside, outside = exact.decide(60), exact.decide(int(np.linalg.norm(keys, axis=1).argmax()))
    monkeypatch.setattr(exact, "_guess", None)
    assert exact.decide(60, support=inside.index).weights == inside.weights
    far = int(np.linalg.norm(keys, axis=1).argmax())
    assert exact.decide(far, query=keys[far]).code == outside.code == "selectable"
    assert exact.decide(far, query=keys[far]).steps == 0


def test_deciding_ends_in_time():
    with pytest.raises(TimeoutError, match="key 2 was not decided in the time it was given, after 0 supports"):
        ExactSet(np.array([[0.0], [1.0], [0.5]])).decide(2, seconds=-1.0)


def test_equations_in_whole_numbers():
    assert solve([], []) == ([], 1)
    assert solve([[0, 2], [-3, 0]], [4, 9]) in (([-3, 2], 1), ([-18, 12], 6))
    with pytest.raises(ZeroDivisionError):
        eliminate([[1, 2], [2, 4]], [1, 1])
    with pytest.raises(ZeroDivisionError):
        solve([[k * r for k in range(8)] for r in range(8)], [1] * 8)
    rng = np.random.default_rng(0)
    for size in (1, 3, 9):
        rows = [[int(v) for v in row] for row in rng.integers(-(2**60), 2**60, (size, size))]
        right = [int(v) for v in rng.integers(-(2**60), 2**60, size)]
        for value, below in (solve(rows, right), eliminate(rows, right)):
            assert [sum(a * b for a, b in zip(row, value, strict=True)) for row in rows] == [r * below for r in right]


def test_independent_columns():
    kept = independent([[1, 2, 3], [2, 4, 6], [0, 0, 2**80], [0, 1, 0]])
    assert kept == [0, 2, 3]
    assert independent([]) == []


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_whole_numbers_are_the_keys(biased, seen):
    rng = np.random.default_rng(2)
    points = rng.standard_normal((5, 3)) * [1.0, 1e-3, 1e4]
    points[0, 0], points[2] = 0.0, [3.0, 0.5, -2.0]
    bias = 10 * rng.standard_normal(5) if biased else None
    axes, center = (rng.standard_normal((3, 2)), rng.standard_normal(3)) if seen else (np.eye(3), np.zeros(3))
    exact = ExactSet(points, bias, axes=axes if seen else None, center=center if seen else None)
    for j, row in enumerate(points):
        key = [Fraction(float(v)) for v in row]
        columns = [*axes.T, center] if biased or seen else axes.T
        expected = [sum(Fraction(float(a)) * k for a, k in zip(column, key, strict=True)) for column in columns]
        if biased:
            expected[-1] += Fraction(float(bias[j]))
        assert [v * unit for v, unit in zip(exact.whole[j], exact.units, strict=True)] == expected


def test_a_proof_is_of_other_keys_and_sums_to_one() -> None:
    points = np.array([[0.0], [2.0], [1.0], [4.0]])
    half = Fraction(1, 2)

    def holds(index: tuple[int, ...], weights: tuple[Fraction, ...], among: list[int] | None = None) -> bool:
        return proves(ExactVerdict("unselectable", index, weights, None, 0), points, None, 2, among=among)

    assert holds((0, 1), (half, half))
    assert not holds((2,), (Fraction(1),))
    assert not holds((0, 1), (half, half), among=[0, 2, 3])
    assert not holds((1,), (half,))
    assert not holds((0, 1, 3), (Fraction(1, 4), Fraction(1), Fraction(-1, 4)))
    assert not holds((0, 3), (half, half))
    lifted = ExactVerdict("unselectable", (0, 1), (half, half), None, 0)
    assert proves(lifted, points, np.array([1.0, 1.0, 1.0, 0.0]), 2)
    assert proves(lifted, points, np.array([1.0, 1.0, 0.5, 0.0]), 2)
    assert not proves(lifted, points, np.array([1.0, 1.0, 1.5, 0.0]), 2)
    query = ExactVerdict("selectable", (), (), (Fraction(1),), 0)
    assert proves(query, points, None, 3)
    assert not proves(query, points, None, 1)
    assert proves(query, points, None, 1, among=[0, 1, 2])
    assert not proves(query, np.append(points, [[4.0]], axis=0), None, 3)
