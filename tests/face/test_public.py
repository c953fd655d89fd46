"""What is public stays, and what goes says so."""

from __future__ import annotations

import inspect
import runpy
import sys
import types
from importlib import import_module
from pathlib import Path

import public_names as public
import pytest

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
            deprecated("halved(half=True)", "x // 2", "0.3", "0.5")
        return x // 2

    with pytest.warns(DeprecationWarning, match="since ln_probe 0.3 and will be gone in 0.5: use x // 2") as heard:
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


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("ln_probe.render.absent")
