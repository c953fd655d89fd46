"""Imports go one way between hooks, analyses and ln_probe; each dependency is declared, and each is used."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import ln_probe

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
