"""List the public names.

    python tests/public_names.py > tests/face/public_names.txt

A test compares that file with the current names, so that it shows every change of a name or a signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from types import ModuleType

# Public are the names in `__all__` of these modules, and nothing else.
MODULES = (
    "ln_probe",
    "ln_probe.hooks",
    "ln_probe.analyses.attribution",
    "ln_probe.analyses.probes.base",
    "ln_probe.analyses.schema",
    "ln_probe.prompts",
    "ln_probe.page.figures",
    "ln_probe.page.heads",
)


def names() -> str:
    """Every public name with its parameters, a line each."""
    return "\n".join(line for module in MODULES for line in _of_module(import_module(module))) + "\n"


def _of_module(module: ModuleType) -> Iterator[str]:
    for name in sorted(module.__all__):
        found, full = getattr(module, name), f"{module.__name__}.{name}"
        if inspect.isclass(found):
            own = _ours(found.__init__)
            yield f"class {full}{_parameters(found) if own else '(…)'}"
            yield from _of_class(found, full)
        elif callable(found):
            yield f"{full}{_parameters(found)}"
        elif not inspect.ismodule(found):
            yield f"{full}: {type(found).__name__}"
        else:
            yield f"module {full}"


def _of_class(made: type, full: str) -> Iterator[str]:
    """Public attributes that this package wrote: methods, properties, fields."""
    written = [c for c in made.__mro__ if _ours(c)]
    found = {name for c in written for name in (*vars(c), *inspect.get_annotations(c)) if not name.startswith("_")}
    for name in sorted(found):
        value = inspect.getattr_static(made, name, None)
        if isinstance(value, cached_property):
            value = property(value.func)
        if inspect.isroutine(value) and not _ours(value):
            continue  # matplotlib gives every figure class a method of its own
        if isinstance(value, staticmethod | classmethod):
            value = getattr(made, name)
        yield f"    .{name}{_parameters(value) if inspect.isroutine(value) else ''}"


def _ours(found: object) -> bool:
    return str(getattr(found, "__module__", "")).split(".")[0] == "ln_probe"


def _parameters(called: object) -> str:
    """Names, kinds and defaults; types are left to the documentation."""
    try:
        found = inspect.signature(called)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(…)"
    bare = [
        p.replace(
            annotation=inspect.Parameter.empty,
            default=p.default if isinstance(p.default, str | int | float | bool | tuple | None) else ...,
        )
        if p.default is not inspect.Parameter.empty
        else p.replace(annotation=inspect.Parameter.empty)
        for p in found.parameters.values()
    ]
    return str(found.replace(parameters=bare, return_annotation=inspect.Signature.empty)).replace("Ellipsis", "…")


if __name__ == "__main__":
    print(names(), end="")
