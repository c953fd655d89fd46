"""Exact attribution through norms: of logits and of attention scores, to every part of the model and every LN term."""

from ln_probe.analyses.attribution.later_layers import LayersAttribution, attribute_through_layers
from ln_probe.analyses.attribution.logit_parts import LogitAttribution, attribute_logits
from ln_probe.analyses.attribution.score_parts import ScoreAttribution, attribute_scores

__all__ = [
    "LayersAttribution",
    "LogitAttribution",
    "ScoreAttribution",
    "attribute_logits",
    "attribute_scores",
    "attribute_through_layers",
]
