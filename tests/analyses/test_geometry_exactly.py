"""Verdicts of `key_geometry` against exact rational arithmetic, family by family; wrong and unproved ones are none."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from architectures import cases
from geometry_families import FAMILIES, Case, bench
from geometry_reference import Report, Truth

import ln_probe
from ln_probe.analyses.geometry.exact import proves


def generator(name: str, seed: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(name.encode()), seed])


def judged(case: Case) -> Report:
    geometry = ln_probe.key_geometry(**case.arguments())
    geometry.certify()
    return Truth(case).judge(geometry)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_verdict_is_wrong(name):
    report = Report()
    for n, d in ((10, 1), (20, 3)):
        report.add(judged(FAMILIES[name](generator(name, d), n, d)))
    assert not report.wrong, str(report)
    assert not report.unproved, str(report)


@pytest.mark.parametrize("sizes", cases([(8, 1), (16, 2), (20, 4)], slow=[[(20, 3), (20, 6), (30, 20)]]), ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_strict_verdicts_are_those_of_exact_arithmetic(name, sizes):
    for n, d in sizes:
        case = FAMILIES[name](generator(name, 10 + d), n, d)
        geometry = ln_probe.key_geometry(**case.arguments(), margins=False, strict=True)
        truth = Truth(case)
        expected = [truth.verdicts.decide(i).code for i in range(len(case.keys))]
        assert geometry.verdict.tolist() == expected


def test_the_reference_itself_is_proved():
    # Exact verdicts by arithmetic on fractions that shares nothing with how they were found.
    for name, family in FAMILIES.items():
        case = family(generator(name, 20), 12, 3)
        center, axes = case.query_set or (None, None)
        for i in range(0, len(case.keys), 3):
            verdict = Truth(case).exact.decide(i)
            assert proves(verdict, case.keys, case.bias, i, axes=axes, center=center), name


def test_the_reference_sees_what_is_wrong():
    case = Case(np.array([[0.0, 0.0], [1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]]))
    truth, geometry = Truth(case), ln_probe.key_geometry(case.keys)
    assert not truth.judge(geometry).wrong
    geometry.verdict[0], geometry.verdict[1] = "selectable", "unselectable"
    geometry.representative[4] = 3

    class Lies:
        verdict, representative, tau = geometry.verdict, geometry.representative, geometry.tau

        def witness(self, i):
            return np.array([1.0, 0.5])

        def weights(self, i):
            return np.array([0.5, 0.0, 0.0, 0.0, 0.5])

    report = truth.judge(Lies())
    assert report.wrong == [
        "key 0 is selectable, but in the hull of its rivals",
        "key 1 is unselectable, but further than tau from the hull of its rivals",
        "representative of key 4 is 3",
    ]
    assert len(report.unproved) == 5  # the witness above selects key 1 alone


@pytest.mark.slow
@pytest.mark.parametrize("d", [2, 3, 4, 6, 20])
def test_twenty_thousand_keys(d):
    report, seed = Report(), 0
    while report.keys < (5000 if d != 20 else 1500):
        for name, family in FAMILIES.items():
            report.add(judged(family(generator(name, 100 + 1000 * d + seed), 60 if d == 20 else 40, d)), name)
        seed += 1
    print(report)
    assert not report.wrong, str(report)
    assert not report.unproved, str(report)
    assert report.undecided <= 0.001 * report.keys, str(report)


@pytest.mark.parametrize("seed", cases(0, slow=[1, 2]))
def test_verdicts_that_follow_from_a_construction(seed):
    for name, keys, expected in bench.adversarial(np.random.default_rng(seed)):
        geometry = ln_probe.key_geometry(keys, causal=True)
        geometry.certify()
        assert geometry.verdict.tolist() == expected, name
