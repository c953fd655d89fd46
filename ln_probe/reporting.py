"""The old home of `ln_probe.exhibits.by_token`: importing it from here works and warns."""

import sys

from ln_probe import exhibits
from ln_probe.hooks.deprecation import deprecated

deprecated("ln_probe.reporting.token_places", "ln_probe.exhibits", "0.3", "0.5")
token_places = sys.modules["ln_probe.reporting.token_places"] = exhibits
