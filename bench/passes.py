"""Count the rows (prompts × passes) that go through a model's first block during one `analyze`, by purpose.

    python bench/passes.py [MODEL] [PROMPTS]

A purpose is the function of ln_probe that runs the model, with its caller. Blocks that are passed over do not count.
Run it on two versions of the code (PYTHONPATH) to compare them.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from torch import Tensor

import ln_probe
from ln_probe.prompts import make_prompts

# Functions through which others run the model.
THROUGH = ("run", "stream", "run_model", "_call", "__call__", "<lambda>", "<listcomp>", "<genexpr>")
FOLDERS = ("/hooks/", "/analyses/", "/ln_probe/")


def purpose(frame: FrameType | None) -> str:
    """Return the two innermost functions of ln_probe that a call comes from."""
    names: list[str] = []
    while frame is not None and len(names) < 2:
        path = frame.f_code.co_filename
        own = any(folder in path for folder in FOLDERS) and "site-packages" not in path and "/bench/" not in path
        if own and frame.f_code.co_name not in THROUGH:
            names.append(f"{path.rsplit('/', 1)[1].removesuffix('.py')}.{frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


def rows_by_purpose(model: Any, prompts: int) -> Counter[str]:
    """Return the rows that pass the first block, by purpose."""
    first, rows = model.blocks[0], Counter[str]()
    block, forward = type(first), type(first).forward  # (on the class: no hook, and passed-over blocks do not count)

    def counting(module: Any, *args: Any, **kwargs: Any) -> Any:
        if module is first:
            rows[purpose(sys._getframe())] += len(next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)))
        return forward(module, *args, **kwargs)

    try:
        block.forward = counting
        ln_probe.analyze(model, make_prompts(model).tokens[:prompts], progress=False)
    finally:
        block.forward = forward
    return rows


if __name__ == "__main__":
    name, prompts = (sys.argv[1:] + ["lm-layernorm", "8"][len(sys.argv) - 1 :])[:2]
    counted = rows_by_purpose(ln_probe.load_model(name), int(prompts))
    for name, rows in counted.most_common():
        print(f"{rows:6d}  {name}")
    print(f"{counted.total():6d}  in all, {prompts} prompts")
