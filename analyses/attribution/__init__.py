"""Exact attribution through norms: of logits and attention scores, to every component and every LN term."""

from ln_probe.analyses.attribution.features import Features
from ln_probe.analyses.attribution.logits import LogitAttribution, LogitLens, attribute_logits, logit_lens
from ln_probe.analyses.attribution.scores import ScoreAttribution, attribute_scores

__all__ = [
    "Features",
    "LogitAttribution",
    "LogitLens",
    "ScoreAttribution",
    "attribute_logits",
    "attribute_scores",
    "logit_lens",
]
