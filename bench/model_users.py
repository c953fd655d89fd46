"""Count the functions and modules outside the probes that hold the model during one `analyze`.

    python bench/model_users.py [MODEL]

A function counts if one of its arguments or locals is the model, or an object that refers to it: through attributes,
lists, mappings, closures or bound methods. Run it on two versions of the code (PYTHONPATH) to compare them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any

from torch import nn

import ln_probe
from ln_probe.prompts import make_prompts

FOLDERS = ("/hooks/", "/analyses/", "/ln_probe/")
DEPTH = 4  # references followed
CALLS = 20  # of one function that are looked at


def parts(value: Any) -> Iterator[Any]:
    """Yield what a value refers to."""
    if isinstance(value, Mapping):
        yield from list(value.values())
    elif isinstance(value, list | tuple | set):
        yield from list(value)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, FunctionType):
        yield from value.__closure__ or ()
    elif isinstance(value, CellType):
        yield from () if value == CellType() else (value.cell_contents,)
    elif not isinstance(value, nn.Module | type) and type(value).__module__.startswith(("ln_probe", "contextlib")):
        yield from (getattr(value, "__dict__", None) or {}).values()
        yield from (v for n in getattr(type(value), "__slots__", ()) if (v := getattr(value, n, None)) is not None)


def refers(value: Any, model: Any, depth: int = DEPTH) -> bool:
    """Return whether a value is the model or refers to it."""
    return value is model or (depth > 0 and any(refers(part, model, depth - 1) for part in parts(value)))


def holders(model: Any, prompts: int) -> dict[str, set[str]]:
    """Return the functions that hold the model, by file."""
    tokens = make_prompts(model).tokens[:prompts]
    calls, found = defaultdict[CodeType, int](int), defaultdict[str, set[str]](set)
    known: set[CodeType] = set()

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = code.co_filename
        if event != "return" or code in known or not any(f in path for f in FOLDERS) or "site-packages" in path:
            return
        calls[code] += 1
        if calls[code] <= CALLS and any(refers(value, model) for value in frame.f_locals.values()):
            known.add(code)
            found["/".join(path.rsplit("/", 3)[1:])].add(code.co_qualname.split(".<locals>")[0])

    sys.setprofile(look)
    try:
        ln_probe.analyze(model, tokens, progress=False)
    finally:
        sys.setprofile(None)
    return found


if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "lm-layernorm"
    by_file = holders(ln_probe.load_model(name), 2)
    outside = {file: names for file, names in by_file.items() if "probes/" not in file}
    for file, names in sorted(outside.items()):
        print(f"{len(names):4d}  {file}: {', '.join(sorted(names))}")
    for text, of_hooks in (("of hooks", True), ("outside hooks and probes", False)):
        files = [file for file in outside if file.startswith("ln_probe/hooks/") == of_hooks]
        print(f"{sum(len(outside[file]) for file in files)} functions in {len(files)} modules {text}")
