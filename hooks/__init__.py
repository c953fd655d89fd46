"""Hook points, norms, activations and edits of a TransformerLens model."""

from ln_probe.hooks.applied import Applied, apply
from ln_probe.hooks.edits import InterventionError, LostEditError
from ln_probe.hooks.equivalence import Equivalence, NotEquivalentError, check_equivalent
from ln_probe.hooks.interventions import Intervention, without
from ln_probe.hooks.linearized import linearized
from ln_probe.hooks.norm import Site, Terms
from ln_probe.hooks.sites import find_sites

__all__ = [
    "Applied",
    "Equivalence",
    "Intervention",
    "InterventionError",
    "LostEditError",
    "NotEquivalentError",
    "Site",
    "Terms",
    "apply",
    "check_equivalent",
    "find_sites",
    "linearized",
    "without",
]
