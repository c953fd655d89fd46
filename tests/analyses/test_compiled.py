"""Compilation works without a cache, and costs nothing before it is needed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numba
import pytest

from ln_probe.analyses.files import mark
from ln_probe.analyses.geometry.compiled import compiled


@pytest.mark.parametrize("obstacle", ["no locator", "nothing can be written"])
def test_without_a_folder_for_the_cache(obstacle, monkeypatch, tmp_path):
    given, njit = [], numba.njit
    (tmp_path / "a file").write_text("")
    if obstacle == "nothing can be written":
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a file" / "below"))

    def watched(function, **options):
        if function.__name__ == "twice":  # numba compiles functions of its own on first use
            given.append(options.get("cache", False))
        if options.get("cache") and obstacle == "no locator":
            raise RuntimeError("cannot cache function 'twice': no locator available for file 'x.py'")
        return njit(function, **options)

    monkeypatch.setattr(numba, "njit", watched)

    @compiled
    def twice(x: float) -> float:
        return 2 * x

    assert twice(1.5) == pytest.approx(3)
    assert given == ([True, False] if obstacle == "no locator" else [False])


def test_the_cache_of_others_stays_where_it_was(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    numba.njit(lambda x: x)(1)  # it reads the environment again when it compiles
    before = numba.config.CACHE_DIR

    @compiled
    def half(x: float) -> float:
        return x / 2

    assert half(3.0) == pytest.approx(1.5)
    assert before == numba.config.CACHE_DIR == str(tmp_path)
    (place,) = tmp_path.iterdir()
    assert place.name.startswith("numba-")
    assert list(place.rglob("*.nbi"))


def test_b01_importing_deletes_no_folder_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`numba-*` folders older than a week were removed, whoever had made them; now only those that are marked are."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    theirs, ours, both = tmp_path / "numba-thesis", tmp_path / "numba-old", tmp_path / "numba-both"
    recent, other = tmp_path / "numba-recent", tmp_path / "other"
    long_ago = time.time() - 30 * 24 * 3600

    def cache(folder: Path) -> None:
        (folder / "geometry_1").mkdir(parents=True)
        for name in ("hull.f-1.py311.nbi", "hull.f-1.py311.1.nbc"):
            (folder / "geometry_1" / name).write_text("code")

    for folder in (theirs, ours, both, recent, other):
        cache(folder)
    (theirs / "thesis.tex").write_text("mine")
    for folder in (ours, both, recent):
        mark(folder)
    (both / "notes.md").write_text("mine")
    for folder in (theirs, ours, both, other):
        os.utime(folder, (long_ago, long_ago))

    @compiled
    def fifth(x: float) -> float:
        return x / 5

    assert fifth(10.0) == 2
    assert (theirs / "thesis.tex").exists()
    assert (theirs / "geometry_1" / "hull.f-1.py311.nbi").exists()
    assert not ours.exists()
    assert recent.exists()
    assert other.exists()
    assert [p.name for p in both.iterdir()] == ["notes.md"]


def test_the_package_does_not_import_the_compiler():
    code = "import sys, ln_probe; assert not {'numba', 'torch', 'scipy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_code_of_other_files_is_not_taken_from_a_stale_cache(tmp_path):
    (tmp_path / "outer.py").write_text(
        "from inner import inner\n"
        "from ln_probe.analyses.geometry.compiled import compiled\n"
        "@compiled\n"
        "def outer(x):\n"
        "    return 10 * inner(x)\n"
    )

    def run(inner):
        (tmp_path / "inner.py").write_text(
            f"from ln_probe.analyses.geometry.compiled import compiled\n@compiled\ndef inner(x):\n    return {inner}\n"
        )
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from outer import outer; print(outer(3.0))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return float(done.stdout)

    assert run("x + 1") == 40
    assert run("x + 22") == 250
    assert list(tmp_path.rglob("*.nbi"))  # it was cached


@pytest.mark.slow
def test_code_from_the_cache_gives_the_bytes_of_code_just_compiled(tmp_path):
    code = (
        "import hashlib, numpy as np\n"
        "from ln_probe.analyses.geometry.key_geometry import key_geometry\n"
        "rng = np.random.default_rng(0)\n"
        "keys = rng.normal(size=(4, 48, 8)) * np.exp(rng.normal(size=(4, 48, 1)))\n"
        "found = key_geometry(keys, query_set=(rng.normal(size=(4, 8)), rng.normal(size=(4, 8, 16))))\n"
        "arrays = (found.margin_lower, found.margin_upper, found.attainable, found.attainable_upper)\n"
        "print(hashlib.sha256(b''.join(a.tobytes() for a in arrays)).hexdigest())\n"
    )
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout
