"""Imports go one way between hooks, analyses and ln_probe, and modules that are imported at once form no circle."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import ln_probe

PACKAGE = Path(ln_probe.__file__).parent
FLOORS = ("ln_probe.hooks", "ln_probe.analyses")  # from the bottom up; everything else of ln_probe stands on both


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its name, those behind links to folders too."""
    found: dict[str, Path] = {}
    for folder in (package, *(p for p in package.iterdir() if p.is_symlink() and p.is_dir())):
        for path in sorted(folder.rglob("*.py")):
            parts = [package.name, *path.relative_to(package).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def at_once(node: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a module is imported: not the bodies of functions, not what is for types only."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not for_types and not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_once(child)


def imports(found: Mapping[str, Path], every: bool = True) -> dict[str, set[str]]:
    """The modules that each module imports: in any statement, or (`every=False`) in those that run at once."""
    arrows: dict[str, set[str]] = {}
    for name, path in found.items():
        arrows[name] = set()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree) if every else at_once(tree):
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{path}, line {node.lineno}: imports are absolute here"
                inside = [f"{node.module}.{alias.name}" for alias in node.names]
                named = [full if full in found else str(node.module) for full in inside]
            else:
                continue
            arrows[name] |= {n for n in named if n in found} - {name}
    return arrows


def circles(arrows: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other, a list for each circle (strongly connected components of more than one)."""
    reached: dict[str, set[str]] = {}
    for start in arrows:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            ahead += (new := arrows[ahead.pop()] - seen)
            seen |= new
        reached[start] = seen
    found = {tuple(sorted({b for b in reached[a] if a in reached[b]})) for a in arrows if a in reached[a]}
    return [list(circle) for circle in sorted(found)]


TOP = PACKAGE.parent
READ_AS_FILES = {"circuitsvis"}  # not imported
IMPORTED_AS = {"llvmlite": "numba", "mpl_toolkits": "matplotlib"}  # comes with it


def packages_of(path: Path) -> set[str]:
    """Names of the top-level packages that a module imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"ln_probe"}


def test_each_dependency_is_declared_and_used() -> None:
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=~! ]", r)[0].replace("-", "_") for r in requirements}

    core = names(project["dependencies"])
    extras = {name: names(listed) for name, listed in project["optional-dependencies"].items() if name != "dev"}
    importers: dict[str, set[str]] = {}
    for name, path in modules(PACKAGE).items():
        for package in packages_of(path):
            importers.setdefault(IMPORTED_AS.get(package, package), set()).add(name)
    of_lab = {p for p, by in importers.items() if all(".analyses.lab" in n for n in by)}
    assert not core & of_lab, "the laboratory's own packages belong to its extra"
    assert importers.keys() - of_lab <= core.union(*extras.values()), "an import that pyproject.toml does not declare"
    assert of_lab <= core | extras["lab"]
    assert core <= importers.keys() | READ_AS_FILES, "a dependency that nothing imports"


def floor(name: str) -> int:
    return next((i for i, top in enumerate(FLOORS) if name == top or name.startswith(f"{top}.")), len(FLOORS))


@pytest.fixture(scope="module")
def arrows() -> dict[str, set[str]]:
    return imports(modules(PACKAGE))


def test_imports_go_one_way(arrows: dict[str, set[str]]) -> None:
    assert {"ln_probe", "ln_probe.cli", "ln_probe.hooks.norms", "ln_probe.analyses.lab.train"} <= set(arrows)
    assert "ln_probe.hooks.norm" in arrows["ln_probe.hooks.norms"]
    assert len(arrows) > 60, "every room is seen"
    wrong = [f"{a} -> {b}" for a, into in arrows.items() for b in sorted(into) if floor(b) > floor(a)]
    assert wrong == [], "hooks import no analyses, and neither imports the face"


def test_no_imports_in_circles(arrows: dict[str, set[str]]) -> None:
    """Late and type-only imports close circles only among probes, and where pages draw a report that opens them."""
    assert circles(imports(modules(PACKAGE), every=False)) == []
    drawn, probes = sorted(circles(arrows), key=lambda circle: "ln_probe.report" not in circle)
    assert "ln_probe.report" in drawn
    assert all(name.startswith("ln_probe.analyses.probes.") for name in probes)
    assert {name for name in drawn if floor(name) < len(FLOORS) or ".loading" in name} == set()
