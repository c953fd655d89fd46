"""What a norm's output would be under the four variants, computed from the intact model's own inputs of the norm.

The formulas are those of `ln_probe.hooks.variants`. A norm that lacks a term has variants that change nothing; `no_op`
says which and why, so that they are not read as findings.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import Constant
from ln_probe.hooks.variants import VARIANTS, no_op, normalized

__all__ = ["VARIANTS", "no_op", "variant_outputs"]


def variant_outputs(
    site: Site, x: Float[Tensor, "pos d"], constant: Constant | float
) -> dict[str, Float[Tensor, "pos d"]]:
    """The norm's output before gain and bias under each variant, float64.

    Args:
        site: the norm.
        x: its inputs on one prompt.
        constant: c, the divisor that replaces sigma at position 0 and elsewhere.

    Raises:
        ValueError: the constant is not a positive number.
    """
    c = Constant.of(constant)
    if not (c.first > 0 and c.rest > 0):
        wrong = c.first if not c.first > 0 else c.rest
        raise ValueError(f"{site.name}: the constant that replaces sigma must be positive, got {wrong}")
    rows = c.rows(len(x)).to(x.device)
    return {variant: normalized(site, variant, x.double(), rows) for variant in VARIANTS}
