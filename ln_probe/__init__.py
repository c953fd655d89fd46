"""ln_probe: what does LayerNorm do for this model's attention?

Names resolve on first use (PEP 562), so that ``import ln_probe`` stays cheap; ``dir(ln_probe)`` lists them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ln_probe import analyses, hooks
    from ln_probe.analyses.hull import key_geometry

__version__ = "0.1.0"

_HOME = {
    "key_geometry": "ln_probe.analyses.hull",
}
_SUBPACKAGES = ("analyses", "hooks")

__all__ = ["__version__", "analyses", "hooks", "key_geometry"]


def __getattr__(name: str) -> object:
    if name in _SUBPACKAGES:
        return import_module(f"ln_probe.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ln_probe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
