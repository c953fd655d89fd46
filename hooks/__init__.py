"""Hook points, norms, activations and edits of a TransformerLens model."""

from ln_probe.hooks.edits import Intervention, edit_hooks, linearized, linearized_hooks, without
from ln_probe.hooks.norm import Norm, Terms
from ln_probe.hooks.norm_edits import InterventionError, LostEditError
from ln_probe.hooks.norms import find_norms

__all__ = [
    "Intervention",
    "InterventionError",
    "LostEditError",
    "Norm",
    "Terms",
    "edit_hooks",
    "find_norms",
    "linearized",
    "linearized_hooks",
    "without",
]
