"""ln_probe: what does LayerNorm do for this model's attention?

    model = ln_probe.load_model("gpt2")
    report = ln_probe.analyze(model)

Names resolve on first use (PEP 562), so that ``import ln_probe`` stays cheap; ``dir(ln_probe)`` lists them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ln_probe import analyses, hooks
    from ln_probe.analyses.attribution.logits import attribute_logits
    from ln_probe.analyses.attribution.scores import attribute_scores
    from ln_probe.analyses.geometry.api import key_geometry
    from ln_probe.analyses.probes.outliers import outlier_tokens
    from ln_probe.comparison import Comparison, compare
    from ln_probe.measure import analyze, freezing_cost, norm_constants
    from ln_probe.models import bundled_models, load_model, source_of
    from ln_probe.notebook import explore
    from ln_probe.report import Report, load_report

__version__ = "1.0.0"

_HOME = {
    "Comparison": "ln_probe.comparison",
    "Report": "ln_probe.report",
    "attribute_logits": "ln_probe.analyses.attribution.logits",
    "attribute_scores": "ln_probe.analyses.attribution.scores",
    "analyze": "ln_probe.measure",
    "bundled_models": "ln_probe.models",
    "compare": "ln_probe.comparison",
    "explore": "ln_probe.notebook",
    "freezing_cost": "ln_probe.measure",
    "key_geometry": "ln_probe.analyses.geometry.api",
    "load_model": "ln_probe.models",
    "load_report": "ln_probe.report",
    "norm_constants": "ln_probe.measure",
    "outlier_tokens": "ln_probe.analyses.probes.outliers",
    "source_of": "ln_probe.models",
}
# Public names of 0.2 and their new names; removed in 2.0.
_RENAMED = {"constants": "norm_constants"}
_SUBPACKAGES = ("analyses", "hooks")

__all__ = [
    "Comparison",
    "Report",
    "__version__",
    "analyses",
    "analyze",
    "attribute_logits",
    "attribute_scores",
    "bundled_models",
    "compare",
    "explore",
    "freezing_cost",
    "hooks",
    "key_geometry",
    "load_model",
    "load_report",
    "norm_constants",
    "outlier_tokens",
    "source_of",
]


def __getattr__(name: str) -> object:
    if name in _SUBPACKAGES:
        return import_module(f"ln_probe.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name in _RENAMED:
        from ln_probe.hooks.deprecation import deprecated

        deprecated(f"ln_probe.{name}", f"ln_probe.{_RENAMED[name]}", "1.0", "2.0")
        return __getattr__(_RENAMED[name])
    raise AttributeError(f"module 'ln_probe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


# Public modules of 0.2 and their new names; removed in 2.0.
_MOVED = {
    "prompting": {"prompts": "ln_probe.prompts"},
    "render": {
        **dict.fromkeys(("drawing", "effects", "figures", "norm_geometry"), "ln_probe.page.figures"),
        "heads": "ln_probe.page.heads",
    },
    "reporting": {"token_places": "ln_probe.exhibits"},
}


class _MovedModules(MetaPathFinder, Loader):
    """Import a moved module under its old name, with a DeprecationWarning."""

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        folder, _, module = fullname.removeprefix("ln_probe.").partition(".")
        if not fullname.startswith("ln_probe.") or folder not in _MOVED or (module and module not in _MOVED[folder]):
            return None
        return ModuleSpec(fullname, self, is_package=not module)

    def exec_module(self, module: ModuleType) -> None:
        _, folder, *name = module.__name__.split(".")
        if name:
            from ln_probe.hooks.deprecation import deprecated

            instead = _MOVED[folder][name[0]]
            deprecated(module.__name__, instead, "1.0", "2.0", level=5)
            sys.modules[module.__name__] = import_module(instead)


sys.meta_path.insert(0, _MovedModules())
