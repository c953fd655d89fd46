"""Imports go one way, dependencies are declared and used; every public name has an example, and it runs."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import re
import sys
import tomllib
from dataclasses import is_dataclass
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import pytest
import torch
from typer.main import get_command

import ln_probe
from ln_probe.cli import app

PACKAGE = Path(ln_probe.__file__).parent
FLOORS = ("ln_probe.hooks", "ln_probe.analyses")  # from the bottom up; everything else of ln_probe stands on both
READ_AS_FILES = {"circuitsvis"}  # not imported
IMPORTED_AS = {"llvmlite": "numba", "mpl_toolkits": "matplotlib"}  # comes with it


def modules() -> dict[str, Path]:
    """Every module of the package by its name, those behind links to folders too."""
    found: dict[str, Path] = {}
    for folder in (PACKAGE, *(p for p in PACKAGE.iterdir() if p.is_symlink() and p.is_dir())):
        for path in sorted(folder.rglob("*.py")):
            parts = [PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> set[str]:
    """The modules that a module imports anywhere, and the names that it imports from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}, line {node.lineno}: imports are absolute here"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor(name: str) -> int:
    return next((i for i, top in enumerate(FLOORS) if f"{name}.".startswith(f"{top}.")), len(FLOORS))


def test_imports_go_one_way() -> None:
    wrong = []
    for name, path in modules().items():
        inside = [other for other in imported(path) if f"{other}.".startswith("ln_probe.")]
        wrong += [f"{name} -> {other}" for other in inside if floor(other) > floor(name)]
    assert len(modules()) > 60, "every folder is seen"
    assert wrong == [], "hooks import no analyses, and neither imports the face"


def test_each_dependency_is_declared_and_used() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=~! ]", r)[0].replace("-", "_") for r in requirements}

    core = names(project["dependencies"])
    extras = {name: names(listed) for name, listed in project["optional-dependencies"].items() if name != "dev"}
    importers: dict[str, set[str]] = {}
    for name, path in modules().items():
        for package in {other.partition(".")[0] for other in imported(path)} - {*sys.stdlib_module_names, "ln_probe"}:
            importers.setdefault(IMPORTED_AS.get(package, package), set()).add(name)
    of_lab = {p for p, by in importers.items() if all(".analyses.lab" in n for n in by)}
    assert not core & of_lab, "the laboratory's own packages belong to its extra"
    assert importers.keys() - of_lab <= core.union(*extras.values()), "an import that pyproject.toml does not declare"
    assert of_lab <= core | extras["lab"]
    assert core <= importers.keys() | READ_AS_FILES, "a dependency that nothing imports"


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


def test_defaults_are_those_that_users_know() -> None:
    """Another default is another number for whoever relies on it: it is entered here and in CHANGELOG."""
    names, found = dict(PUBLIC), {}
    for module in (name for name in modules() if ".lab." in name):
        own = {k: v for k, v in vars(import_module(module)).items() if getattr(v, "__module__", "") == module}
        names |= {f"{module}.{k}": v for k, v in own.items() if not k.startswith("_")}
    names |= {f"ln-probe {name}": command.callback for name, command in get_command(app).commands.items()}
    for name, value in names.items():
        known = inspect.isfunction(value) or (is_dataclass(value) and callable(value))
        signature = inspect.signature(value).parameters.values() if known else ()
        given = {p.name: str(p.default) for p in signature if isinstance(p.default, int | float | str | tuple)}
        found |= {name: given} if given else {}
    assert found == json.loads((Path(__file__).parent / "defaults.json").read_text())
