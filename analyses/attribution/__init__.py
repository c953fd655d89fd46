"""Exact attribution through norms: of logits and of attention scores, to every part of the model and every LN term."""

from ln_probe.analyses.attribution.logits import (
    LayersAttribution,
    LogitAttribution,
    attribute_logits,
    attribute_through_layers,
)
from ln_probe.analyses.attribution.scores import ScoreAttribution, attribute_scores

__all__ = [
    "LayersAttribution",
    "LogitAttribution",
    "ScoreAttribution",
    "attribute_logits",
    "attribute_scores",
    "attribute_through_layers",
]
