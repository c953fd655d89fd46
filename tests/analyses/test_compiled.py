"""Compilation works without a cache, and costs nothing before it is needed."""

import subprocess
import sys

import numba
import pytest

from ln_probe.analyses.compiled import compiled


def test_without_a_folder_for_the_cache(monkeypatch):
    given = []
    njit = numba.njit

    def no_locator(function, **options):
        given.append(options.get("cache", False))
        if options.get("cache"):
            raise RuntimeError("cannot cache function 'twice': no locator available for file 'x.py'")
        return njit(function, **options)

    monkeypatch.setattr(numba, "njit", no_locator)

    @compiled
    def twice(x: float) -> float:
        return 2 * x

    assert twice(1.5) == pytest.approx(3)
    assert given == [True, False]


def test_the_package_does_not_import_the_compiler():
    code = "import sys, ln_probe; assert not {'numba', 'torch', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
