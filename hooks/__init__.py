"""Hook points, norms, activations and edits of a TransformerLens model."""

from ln_probe.hooks.edits import InterventionError, LostEditError
from ln_probe.hooks.interventions import Intervention, without
from ln_probe.hooks.linearized import linearized
from ln_probe.hooks.norm import Site, Terms
from ln_probe.hooks.sites import find_sites

__all__ = [
    "Intervention",
    "InterventionError",
    "LostEditError",
    "Site",
    "Terms",
    "find_sites",
    "linearized",
    "without",
]
