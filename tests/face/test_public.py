"""What is public stays, and what goes says so."""

from __future__ import annotations

import doctest
import inspect
import re
import runpy
import sys
import types
from importlib import import_module
from pathlib import Path

import matplotlib as mpl
import public_names as public
import pytest
import torch

import ln_probe
from ln_probe import hooks

KEPT = Path(__file__).with_name("public_names.txt")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_public_names_are_those_that_were_written_down() -> None:
    before, now = KEPT.read_text(encoding="utf-8").splitlines(), public.names().splitlines()
    gone, new = [n for n in before if n not in now], [n for n in now if n not in before]
    assert before == now, (
        f"public names or parameters changed.\n  not any more: {gone}\n  new: {new}\n"
        "If that is meant: python tests/public_names.py > tests/face/public_names.txt, with a line in the CHANGELOG. A "
        "name or parameter that is 'not any more' must first work for a minor version with a DeprecationWarning "
        "(docs/stability.md, hooks/deprecation.py)."
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
LONG = re.compile(
    r"analyze\(|freezing_cost|constants\(|explore|apply\(|without\("
)  # some seconds: whole default prompts


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_has_an_example(name: str) -> None:
    """Its own, or it is used in that of its module."""
    value = PUBLIC[name]
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
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


def test_a_deprecated_argument_warns_at_the_line_that_uses_it() -> None:
    # As users have it: here the checks of types stand between a function and its caller.
    deprecated = runpy.run_path(str(Path(hooks.__file__).with_name("deprecation.py")))["deprecated"]

    def halved(x: int, half: bool = True) -> int:
        if half:
            deprecated("halved(half=True)", "x // 2", "1.0", "2.0")
        return x // 2

    with pytest.warns(DeprecationWarning, match="since ln_probe 1.0 and will be gone in 2.0: use x // 2") as heard:
        assert halved(4) == 2
    assert heard[0].filename == __file__


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("prompting.prompts", "prompts"),
        ("render.drawing", "page.figures"),
        ("render.effects", "page.figures"),
        ("render.figures", "page.figures"),
        ("render.norm_geometry", "page.figures"),
        ("render.heads", "page.heads"),
        ("reporting.token_places", "exhibits"),
    ],
)
def test_a_moved_module_loads_under_its_old_name_and_warns(old: str, new: str) -> None:
    sys.modules.pop(f"ln_probe.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"^ln_probe\.{old} is deprecated .*: use ln_probe\.{new}$"):
        assert import_module(f"ln_probe.{old}") is import_module(f"ln_probe.{new}")


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("ln_probe", "constants", "norm_constants"),
        ("ln_probe", "sampled", "sampled_prompts"),
        ("ln_probe.page.figures", "geometry", "norm_geometry"),
        ("ln_probe.analyses.probes.protocol", "Found", "ProbeResults"),
    ],
)
def test_a_renamed_object_has_its_old_name_too_and_warns(module: str, old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{old} is deprecated .*: use {module}\.{new}$"):
        found = getattr(import_module(module), old)
    assert found is getattr(import_module(module), new)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        import_module(module).absent  # noqa: B018


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("ln_probe.render.absent")
