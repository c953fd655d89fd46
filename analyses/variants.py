"""What a norm's output would be without one of its terms: the four counterfactual variants.

    intact           Px / sigma
    no_scaling       Px / c           c = the site's mean sigma over calibration tokens other than position 0
    no_projection     x / sigma(Px)   its norm grows by 1/√(1 - mean_share): not size-matched
    neither           x / c

before gain and bias. They are computed from the intact model's own inputs of the norm. A norm that lacks a term has
variants that change nothing; `no_op` says which and why, so that they are not read as findings.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.sites import Site

VARIANTS = ("intact", "no_scaling", "no_projection", "neither")


def variant_outputs(site: Site, x: Float[Tensor, "pos d"], constant: float) -> dict[str, Float[Tensor, "pos d"]]:
    """The norm's output before gain and bias under each variant, float64.

    Args:
        site: the norm.
        x: its inputs.
        constant: c, the divisor that replaces sigma.

    Raises:
        ValueError: the constant is not a positive number.
    """
    if not constant > 0:
        raise ValueError(f"{site.name}: the constant that replaces sigma must be positive, got {constant}")
    x = x.double()
    projected = x - x.mean(-1, keepdim=True) if site.projects else x
    sigma = site.sigma(x)
    divisor = constant if site.scales else sigma
    return {
        "intact": projected / sigma,
        "no_scaling": projected / divisor,
        "no_projection": x / sigma,
        "neither": x / divisor,
    }


def no_op(site: Site, variant: str) -> str:
    """Why this variant of this site changes nothing by construction; empty if it does change something."""
    still = []
    if variant in ("no_projection", "neither"):
        if not site.projects:
            still.append("it has no projection")
        elif "centred" in site.state:
            still.append("its input is already centred")
    if variant in ("no_scaling", "neither") and not site.scales:
        still.append("it does not scale")
    needed = 2 if variant == "neither" else 1
    return f"{site.kind}: " + " and ".join(still) if variant != "intact" and len(still) == needed else ""
