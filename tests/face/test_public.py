"""What is public: its names are written down, and its examples run."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
import types
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import public_names as public
import pytest
import torch

import ln_probe

KEPT = Path(__file__).with_name("public_names.txt")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_public_names_are_those_that_were_written_down() -> None:
    before, now = KEPT.read_text(encoding="utf-8").splitlines(), public.names().splitlines()
    gone, new = [n for n in before if n not in now], [n for n in now if n not in before]
    assert before == now, (
        f"public names or parameters changed.\n  not any more: {gone}\n  new: {new}\n"
        "If that is meant: python tests/public_names.py > tests/face/public_names.txt, with a line in the CHANGELOG."
    )


@pytest.mark.parametrize("name", public.MODULES)
def test_a_public_module_has_what_it_lists_and_says_what_it_is(name: str) -> None:
    module = import_module(name)
    for found in module.__all__:
        value = getattr(module, found)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{found} has no docstring"
    assert f".. automodule:: {name}\n" in (DOCS / "api.md").read_text(), f"docs/api.md does not show {name}"


def examples_of(documented: object) -> list[doctest.Example]:
    _, _, shown = (inspect.getdoc(documented) or "").partition("\nExample:\n")
    return doctest.DocTestParser().get_examples(shown)


PUBLIC = {f"{m}.{name}": getattr(import_module(m), name) for m in public.MODULES for name in import_module(m).__all__}
EXAMPLES = {
    name: found
    for name in [*PUBLIC, *public.MODULES]
    if (found := examples_of(PUBLIC.get(name) or import_module(name)))
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


def test_a_changed_signature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("ln_probe.made_up")
    exec(
        "class Thing:\n    size: int\n    def do(self, n, *, fast=False): ...\ndef make(a, b=2.5): ...\nLIMIT = 3",
        vars(module),
    )
    module.__all__ = ["LIMIT", "Thing", "make"]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ln_probe.made_up", module)
    monkeypatch.setattr(public, "MODULES", ("ln_probe.made_up",))
    assert public.names().splitlines() == [
        "ln_probe.made_up.LIMIT: int",
        "class ln_probe.made_up.Thing(…)",
        "    .do(self, n, *, fast=False)",
        "    .size",
        "ln_probe.made_up.make(a, b=2.5)",
    ]
