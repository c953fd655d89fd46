"""Hook points, norms, activations and edits of a TransformerLens model."""

from ln_probe.hooks.edits import InterventionError, LostEditError
from ln_probe.hooks.equivalence import Equivalence, NotEquivalentError, check_equivalent
from ln_probe.hooks.interventions import Intervention, without
from ln_probe.hooks.linearized import linearized
from ln_probe.hooks.norm import Site, Terms
from ln_probe.hooks.permanent import PermanentEdit, make_permanent
from ln_probe.hooks.sites import find_sites

__all__ = [
    "Equivalence",
    "Intervention",
    "InterventionError",
    "LostEditError",
    "NotEquivalentError",
    "PermanentEdit",
    "Site",
    "Terms",
    "check_equivalent",
    "find_sites",
    "linearized",
    "make_permanent",
    "without",
]
