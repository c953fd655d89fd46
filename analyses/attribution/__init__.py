"""Exact attribution through norms: of logits and of attention scores, to every part of the model and every LN term."""

from ln_probe.analyses.attribution.logits import LogitAttribution, attribute_logits
from ln_probe.analyses.attribution.scores import ScoreAttribution, attribute_scores

__all__ = ["LogitAttribution", "ScoreAttribution", "attribute_logits", "attribute_scores"]
