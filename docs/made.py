"""Write what README, CONTRIBUTING and the site say of measurements, from what is committed.

    python docs/made.py

What stands between `<!-- made: NAME -->` and `<!-- end -->` in those files is made here; a test makes it again. Who
makes it: `examples/checkpoints/document.py` what real checkpoints gave, `bench/document.py` everything else.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAKERS = ("examples/checkpoints/document.py", "bench/document.py")
SITE = (
    *("attribution", "checkpoints", "compiler", "cost", "geometry", "heads", "interventions", "migrating"),
    *("quickstart", "speed", "statistics", "suites"),
)
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / f"{name}.md" for name in SITE))
BLOCK = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def blocks() -> dict[str, Callable[[], str]]:
    """Every block by its name; a name that two makers give is an error."""
    found: dict[str, Callable[[], str]] = {}
    for maker in MAKERS:
        own: dict[str, Callable[[], str]] = runpy.run_path(str(ROOT / maker))["BLOCKS"]
        if twice := found.keys() & own.keys():
            raise ValueError(f"{maker}: {', '.join(sorted(twice))} made elsewhere, too")
        found |= own
    return found


def made(text: str, of: dict[str, Callable[[], str]]) -> str:
    """A page with its blocks made again."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{of[m[2]]()}\n\n{m[3]}", text)


if __name__ == "__main__":
    every = blocks()
    for page in PAGES:
        page.write_text(made(page.read_text(encoding="utf-8"), every), encoding="utf-8")
