"""The old home of `ln_probe.prompts`: importing from here works and warns."""

import sys

from ln_probe import prompts
from ln_probe.hooks.deprecation import deprecated

deprecated("ln_probe.prompting.prompts", "ln_probe.prompts", "0.3", "0.5")
sys.modules["ln_probe.prompting.prompts"] = prompts
