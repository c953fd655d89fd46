"""What touches a forward pass: where the norms are, what goes through them, what happens without their terms."""

from ln_probe.hooks.interventions import Intervention, without

__all__ = ["Intervention", "without"]
