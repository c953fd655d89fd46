"""Public names that go or are called something else: they work for a while and say what to write instead.

What is promised: docs/stability.md. In a module whose function `old` is now `some.module.new`:

    __getattr__ = old_names(__name__, {"old": ("ln_probe.some.module.new", "0.3", "0.5")})

and where only an argument or a value is old, `deprecated("without(only_keys=True)", 'only="keys"', "0.3", "0.5")`.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import ParamSpec, TypeVar

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")


def deprecated(name: str, instead: str, since: str, gone: str, *, level: int = 1) -> None:
    """Warn (`DeprecationWarning`) that something is going.

    Args:
        name: what was used, as it is written.
        instead: what to write now.
        since: the version that warns first.
        gone: the version that will not have it any more.
        level: callers between this and the line to be named; 1: of the function that calls this.
    """
    said = f"{name} is deprecated since ln_probe {since} and will be gone in {gone}: use {instead}"
    warnings.warn(said, DeprecationWarning, stacklevel=level + 2)


def old_function(
    name: str, instead: str, since: str, gone: str
) -> Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]]:
    """A decorator: the function does what it did, and warns."""

    def of(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
        @functools.wraps(function)
        def warning(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
            deprecated(name, instead, since, gone)
            return function(*args, **kwargs)

        return warning

    return of


def old_names(module: str, moved: Mapping[str, tuple[str, str, str]]) -> Callable[[str], object]:
    """A module's `__getattr__` for names that live elsewhere now, or are called something else.

    Args:
        module: `__name__` of the module that had them.
        moved: old name -> (new name with its module, the version that warns first, the version without the old one).

    Raises (when called):
        AttributeError: a name that never was there.
    """

    def find(name: str) -> object:
        if name not in moved:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new, since, gone = moved[name]
        deprecated(f"{module}.{name}", new, since, gone)
        home, _, called = new.rpartition(".")
        return getattr(import_module(home), called)

    return find
