"""ln_probe: what does LayerNorm do for this model's attention?

    model = ln_probe.load_model("gpt2")
    report = ln_probe.analyze(model)

Names resolve on first use (PEP 562), so that ``import ln_probe`` stays cheap; ``dir(ln_probe)`` lists them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ln_probe import analyses, hooks
    from ln_probe.analyses.attribution.logits import attribute_logits, logit_lens
    from ln_probe.analyses.attribution.scores import attribute_scores
    from ln_probe.analyses.geometry.key_geometry import key_geometry
    from ln_probe.comparison import Comparison, compare
    from ln_probe.headline import freezing_cost, norm_constants
    from ln_probe.measure import analyze
    from ln_probe.models import bundled_models, load_model
    from ln_probe.outliers import outlier_tokens
    from ln_probe.page.attention import attention
    from ln_probe.report import Report, load_report

__version__ = "0.1.0"

_HOME = {
    "Comparison": "ln_probe.comparison",
    "Report": "ln_probe.report",
    "attention": "ln_probe.page.attention",
    "attribute_logits": "ln_probe.analyses.attribution.logits",
    "attribute_scores": "ln_probe.analyses.attribution.scores",
    "analyze": "ln_probe.measure",
    "bundled_models": "ln_probe.models",
    "compare": "ln_probe.comparison",
    "freezing_cost": "ln_probe.headline",
    "key_geometry": "ln_probe.analyses.geometry.key_geometry",
    "load_model": "ln_probe.models",
    "load_report": "ln_probe.report",
    "logit_lens": "ln_probe.analyses.attribution.logits",
    "norm_constants": "ln_probe.headline",
    "outlier_tokens": "ln_probe.outliers",
}
_SUBPACKAGES = ("analyses", "hooks")

__all__ = [
    "Comparison",
    "Report",
    "__version__",
    "analyses",
    "analyze",
    "attention",
    "attribute_logits",
    "attribute_scores",
    "bundled_models",
    "compare",
    "freezing_cost",
    "hooks",
    "key_geometry",
    "load_model",
    "load_report",
    "logit_lens",
    "norm_constants",
    "outlier_tokens",
]


def __getattr__(name: str) -> object:
    if name in _SUBPACKAGES:
        return import_module(f"ln_probe.{name}")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ln_probe' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
