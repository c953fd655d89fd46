"""The public path of the names that a probe is written with; `ln_probe.analyses.probes.base` defines them."""

from ln_probe.analyses.probes.base import *  # noqa: F403
from ln_probe.analyses.probes.base import __all__ as __all__
