"""Every public name has a docstring and an example, and the examples run."""

from __future__ import annotations

import doctest
import inspect
import re
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import pytest
import torch

import ln_probe

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
# Public are the names in `__all__` of the modules that the API page shows.
MODULES = re.findall(r"automodule:: (\S+)", API.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_has_what_it_lists(name: str) -> None:
    module = import_module(name)
    for public_name in module.__all__:
        value = getattr(module, public_name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{public_name} has no docstring"


def examples_of(documented: object) -> list[doctest.Example]:
    _, _, shown = (inspect.getdoc(documented) or "").partition("\nExample:\n")
    return doctest.DocTestParser().get_examples(shown)


PUBLIC = {f"{m}.{name}": getattr(import_module(m), name) for m in MODULES for name in import_module(m).__all__}
EXAMPLES = {
    name: found for name in [*PUBLIC, *MODULES] if (found := examples_of(PUBLIC.get(name) or import_module(name)))
}
LONG = re.compile(r"analyze\(|freezing_cost|constants\(|without\(")  # some seconds: whole default prompts


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_has_an_example(name: str) -> None:
    """A function has its own, or is used in that of its module."""
    if not inspect.isfunction(PUBLIC[name]):
        return
    module, _, short = name.rpartition(".")
    _, _, shared = (inspect.getdoc(import_module(module)) or "").partition("\nExample:\n")
    assert name in EXAMPLES or re.search(rf"\b{short}\b", shared), f"{name} has no example in its docstring"


@pytest.fixture(scope="module")
def model() -> object:
    return ln_probe.load_model("lm-layernorm")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] if any(LONG.search(e.source) for e in found) else [])
        for n, found in sorted(EXAMPLES.items())
    ],
)
def test_an_example_runs(
    name: str, model: object, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the lines at the beginning of docs/api.md; results that are shown are compared, but for those with "…"."""
    mpl.use("Agg")
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "ln_probe": ln_probe, "model": model, "tokens": torch.arange(1, 17)[None]}
    if any(re.search(r"\breport\b", example.source) for example in EXAMPLES[name]):
        names["report"] = request.getfixturevalue("report")
    for example in EXAMPLES[name]:
        kind = "eval" if example.want else "exec"
        result = eval(compile(example.source, name, kind), names) if example.want else exec(example.source, names)
        if example.want and "…" not in example.want:
            assert repr(result) == example.want.strip()
