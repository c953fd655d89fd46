"""The old home of `ln_probe.page`: importing public names from here works and warns."""

import sys

from ln_probe.hooks.deprecation import deprecated
from ln_probe.page import figures
from ln_probe.page import heads as heads

deprecated("ln_probe.render", "ln_probe.page", "0.3", "0.5")
drawing = effects = norm_geometry = figures
for _name in ("drawing", "effects", "figures", "norm_geometry"):
    sys.modules[f"ln_probe.render.{_name}"] = figures
sys.modules["ln_probe.render.heads"] = heads
