"""Compilation: once for every state of the sources, works without a cache, and costs nothing before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest

import ln_probe
from ln_probe.analyses.geometry import attention, check, decide, keys, nearest
from ln_probe.analyses.geometry.compiled import Compilation, cache_folder, compiled_in_place


@pytest.fixture(autouse=True)
def _folders_anew():
    cache_folder.cache_clear()
    yield
    cache_folder.cache_clear()


def test_without_a_folder_for_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "a file" / "below"))

    @compiled_in_place
    def twice(x: float) -> float:
        return 2 * x

    assert twice(1.5) == pytest.approx(3)


def test_the_cache_of_others_stays_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    numba.njit(lambda x: x)(1)  # it reads the environment again when it compiles
    before = numba.config.CACHE_DIR

    @compiled_in_place
    def half(x: float) -> float:
        return x / 2

    assert half(3.0) == pytest.approx(1.5)
    assert before == numba.config.CACHE_DIR == str(tmp_path)
    (place,) = tmp_path.iterdir()
    assert list(place.rglob("*.nbi"))


def test_the_package_does_not_import_the_compiler() -> None:
    code = "import sys, ln_probe; print(sorted({'numba', 'torch', 'scipy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


def test_a_changed_callee_in_another_file_is_compiled_anew(tmp_path: Path) -> None:
    (tmp_path / "outer.py").write_text(
        "from inner import inner\n"
        "from ln_probe.analyses.geometry.compiled import compiled_in_place\n"
        "@compiled_in_place\n"
        "def outer(x):\n"
        "    return 10 * inner(x)\n"
    )

    def run(inner: str) -> float:
        (tmp_path / "inner.py").write_text(
            "from ln_probe.analyses.geometry.compiled import compiled_part\n"
            f"@compiled_part\ndef inner(x):\n    return {inner}\n"
        )
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from outer import outer; print(outer(3.0))"
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        return float(done.stdout)

    assert run("x + 1") == 40
    assert run("x + 22") == 250
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_no_kernel_is_compiled_twice() -> None:
    rng = np.random.default_rng(0)
    ln_probe.key_geometry(rng.standard_normal((30, 3)), bias=rng.standard_normal(30), query_set=1.0)
    ln_probe.key_geometry(np.concatenate([rng.standard_normal((9, 3))] * 2), margins="exact")
    kernels = {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in (attention, check, decide, keys, nearest)
        for name, kernel in vars(module).items()
        if hasattr(kernel, "signatures")
    }
    assert len(kernels) > 20
    assert {name for name, count in kernels.items() if count > 1} == set()


def test_compilation_starts_in_the_background_and_reports_its_error() -> None:
    release, done = threading.Event(), []

    def work() -> None:
        release.wait(10)
        done.append(threading.current_thread().name)

    compilation = Compilation(work)
    compilation.start()
    assert not done
    release.set()
    compilation.wait()
    compilation.wait()
    assert done == ["compilation"]

    def fail() -> None:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="compiler"):
        Compilation(fail).wait()


def test_another_process_fills_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(
        "import os, pathlib\n"
        "from ln_probe.analyses.geometry.compiled import Compilation\n"
        "def work():\n"
        "    with pathlib.Path(__file__).with_name('processes').open('a') as said:\n"
        "        print(os.getpid(), file=said)\n"
        "compilation = Compilation(work)\n"
    )
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("kernels")
    for _ in range(2):
        Compilation(module.work).wait(quiet=True)
    other, *here = map(int, (tmp_path / "processes").read_text().split())
    assert other != os.getpid()
    assert here == [os.getpid()] * 2
