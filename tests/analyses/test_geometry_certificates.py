"""Every verdict of every family, checked in exact arithmetic on the keys as given (rational_checker.py)."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from architectures import cases
from geometry_families import FAMILIES, Case, adversarial
from rational_checker import RationalChecker, Report

import ln_probe
from ln_probe.analyses.geometry.key_geometry import KeyGeometry

# Families with keys about as far from each other, or from the others' hull, as tau.
NEAR_TIES = ("copies 0.3 to 3 tau apart", "chains of near-equal keys", "on a facet, and a few tau beside it")


def generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), seed])


def judged(case: Case, **options: Any) -> tuple[KeyGeometry, Report]:
    geometry = ln_probe.key_geometry(**case.arguments(), **options)
    geometry.certify()
    bias, coordinates = case.bias, None
    if case.query_set is not None:
        center, axes = case.query_set
        coordinates = np.flatnonzero(axes.any(axis=1))
        missing = np.setdiff1d(np.arange(len(axes)), coordinates)
        if len(missing):
            bias = case.keys[:, missing] @ center[missing] + (0.0 if bias is None else bias)
    return geometry, RationalChecker(case.keys, bias, coordinates).check(geometry)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_verdict_is_wrong(name: str) -> None:
    for n, d in ((10, 1), (20, 3), (60, 8)):
        geometry, report = judged(FAMILIES[name](generator(name, d), n, d))
        assert not report.wrong, str(report)
        assert geometry.undecided <= (5 if name in NEAR_TIES else 0), str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "d", "least"), [(40, 2, 3000), (40, 4, 3000), (60, 20, 3000), (256, 32, 10_000)])
def test_tens_of_thousands_of_keys(n: int, d: int, least: int) -> None:
    report, seed = Report(), 0
    while report.keys < least:
        for name, family in FAMILIES.items():
            report.add(judged(family(generator(name, 100 + 1000 * d + seed), n, d), margins=False)[1], name)
        seed += 1
    assert not report.wrong, str(report)
    assert report.undecided <= 0.01 * report.keys, str(report)


def test_keys_of_several_searches_are_counted() -> None:
    normal, ties = (FAMILIES[name](np.random.default_rng(1), 24, 4) for name in ("normal", "chains of near-equal keys"))
    assert ln_probe.key_geometry(**normal.arguments(), margins=False).repaired == 0
    assert ln_probe.key_geometry(**ties.arguments(), margins=False).repaired > 0


def test_the_checker_sees_what_is_wrong() -> None:
    keys = np.array([[0.0, 0.0], [1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    geometry = ln_probe.key_geometry(keys)
    checker = RationalChecker(keys)
    assert not checker.check(geometry).wrong

    class Lies:
        verdict, tau = geometry.verdict.copy(), geometry.tau

        def witness(self, i: int) -> np.ndarray:
            return np.array([1.0, 0.5])

        def weights(self, i: int) -> np.ndarray:
            return np.array([0.5, 0.0, 0.0, 0.0, 0.5])

    Lies.verdict[:2] = "selectable", "unselectable"
    wrong = checker.check(Lies()).wrong
    assert [text.split(",")[0] for text in wrong] == [
        "key 0 is selectable", "key 1 is unselectable", "key 2 is selectable", "key 3 is selectable",
        "key 4 is selectable",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", cases(0, slow=[1, 2]))
def test_verdicts_that_follow_from_a_construction(seed: int) -> None:
    for name, keys, expected in adversarial(np.random.default_rng(seed)):
        geometry = ln_probe.key_geometry(keys)
        geometry.certify()
        assert geometry.verdict.tolist() == expected, name


def test_verdicts_are_about_the_keys_and_margins_about_the_queries_of_the_set() -> None:
    square = np.array([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0], [0.0, 0.0, 1.0]])
    near = square * [1.0, 1.0, 5e-8]  # within tau of the middle of the square, but 40 nats above it for the queries
    geometry, report = judged(Case(near, None, (np.zeros(3), np.diag([1.0, 1.0, 8e8]))))
    assert not report.wrong
    assert geometry.verdict.tolist() == ["selectable"] * 4 + ["unselectable"]
    assert geometry.attainable[4] > 0.99
    assert geometry.margin_lower[4] > 1.0
    assert geometry.reachable.all()
    # The fifth key leads the square by its length along an axis, and the set's queries are short there.
    geometry, report = judged(Case(square, None, (np.zeros(3), np.diag([1.0, 1.0, 1e-8]))))
    assert not report.wrong
    assert geometry.verdict.tolist() == ["selectable"] * 5
    assert geometry.reachable.tolist() == [True] * 4 + [False]
    assert 0.0 <= geometry.margin_lower[4] <= geometry.margin_upper[4] < 1e-7
    assert ln_probe.key_geometry(square).reachable is None
    assert ln_probe.key_geometry(square, query_set=1.0, margins=False).reachable is None
    assert ln_probe.key_geometry(square[:1], query_set=1.0).reachable.tolist() == [True]
    assert ln_probe.key_geometry(square[[0, 0, 1]], query_set=1.0).reachable.tolist() == [False, False, True]
