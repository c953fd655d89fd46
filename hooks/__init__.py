"""What touches a forward pass: where the norms are, what goes through them, what happens without their terms."""

from ln_probe.hooks.equivalence import Equivalence, NotEquivalentError, check_equivalent
from ln_probe.hooks.interventions import Intervention, without

__all__ = ["Equivalence", "Intervention", "NotEquivalentError", "check_equivalent", "without"]
