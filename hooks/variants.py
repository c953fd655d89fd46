"""What is left of a norm without one of its terms: the four variants, as formulas of its input.

    intact           Px / sigma
    no_scaling       Px / c           c = the site's mean sigma over calibration tokens: two numbers, one for position 0
    no_projection     x / sigma(Px)   its norm grows by 1/√(1 - mean_share): not size-matched
    neither           x / c

before gain and bias. `make_edit` is the hook that puts one of them in place of a norm's output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.edits import Edit, Positions, held
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import Divisor

VARIANTS = ("intact", "no_scaling", "no_projection", "neither")
VARIANT_WITHOUT = {"scaling": "no_scaling", "projection": "no_projection", "both": "neither"}


def takes_scaling(site: Site, variant: str) -> bool:
    """Whether the variant replaces this site's sigma by a constant."""
    return site.scales and variant in ("no_scaling", "neither")


def takes_projection(site: Site, variant: str) -> bool:
    """Whether the variant leaves this site's mean component in."""
    return site.projects and variant in ("no_projection", "neither")


def normalized(
    site: Site, variant: str, x: Float[Tensor, "*batch d"], constant: float | Float[Tensor, "*batch 1"] | None
) -> Float[Tensor, "*batch d"]:
    """The norm's output before gain and bias under one variant, in x's own precision; `constant` is c."""
    frozen = takes_scaling(site, variant)
    assert not frozen or constant is not None
    return site.normalize(x, keep_mean=takes_projection(site, variant), divisor=constant if frozen else None)


def changed_output(
    site: Site,
    variant: str,
    x: Float[Tensor, "*batch d"],
    y: Float[Tensor, "*batch d"],
    constant: float | Float[Tensor, "*batch 1"] | None,
    sigma: Float[Tensor, "*batch 1"] | None = None,
) -> Float[Tensor, "*batch d"]:
    """The norm's output under a variant, from its input x and its own output y; 16-bit formats computed in float32.

    `sigma`: what is divided by where scaling stays, if it is held (`linearized`); None: that of x.

    Where scaling stays, the output is the norm's own plus gain·mu/sigma: so where there is nothing to put back,
    nothing changes, rounding included.
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if takes_scaling(site, variant):
        return site.affine(normalized(site, variant, wide, constant)).to(y.dtype)
    if not takes_projection(site, variant):
        return y
    back = wide.mean(-1, keepdim=True) / (site.sigma(wide) if sigma is None else sigma.to(wide))
    back = back if site.gain is None else back * site.gain.to(back)
    return (y.to(back.dtype) + back).to(y.dtype)


def make_edit(
    site: Site,
    variant: str,
    divisor: Divisor | None,
    positions: Positions | None = None,
    *,
    label: str = "",
    make: Callable[..., Edit] = Edit,
) -> Edit:
    """The edit that gives one norm a variant.

    Args:
        divisor: what stands for sigma; needed where the variant takes this norm's scaling.
        positions: shared by the edits of one intervention; None: its own.
        make: Edit, or what else is made of (site, change, label, positions), to change it for some readers alone.
    """
    where = positions or Positions()

    def change(x: Tensor, y: Tensor) -> Tensor:
        rows = None
        if divisor is not None and takes_scaling(site, variant):
            wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
            rows = divisor.at(where.first(site, x), wide)
        linear = held(site.module)
        return changed_output(site, variant, x, y, rows, None if linear is None else linear.sigma(x))

    return make(site, change, label or variant, where)


# Why a norm whose readers are centred loses nothing with its projection.
MEAN_IGNORED = "what reads it ignores the mean (its weights are centred, as folding the norm into them does)"
# A shift along the gain that moves what reads a norm this much less than noise of its size is ignored by design: after
# folding in float32 the ratio is 1e-7 to 1e-6, in a raw model 0.1 to 10; 16-bit weights are centred to about 1e-3.
_IGNORED, _IGNORED_HALF = 1e-4, 1e-2


def ignored_below(dtype: torch.dtype) -> float:
    """Ratio under which a shift of the mean counts as ignored in a model of this format (MEAN_IGNORED)."""
    return _IGNORED if dtype in (torch.float32, torch.float64) else _IGNORED_HALF


def no_op(site: Site, variant: str) -> str:
    """Why this variant of this site changes nothing by construction; empty if it does change something."""
    if variant != "intact" and site.kind == "unknown":
        return f"{site.kind}: no norm that ln_probe knows, so no term can be taken away"
    if variant != "intact" and site.bare:
        return "no norm: attention reads the stream itself"
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
