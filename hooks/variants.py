"""Variants: norms with a term removed.

    intact           Px / sigma
    no_scaling       Px / c           c = the norm's mean sigma over other prompts: two numbers, one for position 0
    no_projection     x / sigma(Px)   1/√(1 - mean_share) times as long as intact
    both_removed      x / c

before gain and bias. Everything that measures, draws or describes variants iterates over `VARIANTS`.
`VariantEdit` gives a norm one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.edits import Edit, Positions, held
from ln_probe.hooks.model import at_least_float32
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import Divisor


@dataclass(frozen=True)
class Variant:
    """A norm with some of its terms removed.

    Attributes:
        name: in tables.
        removes: the terms of the norm that it removes: "scaling", "projection", both or none.
        label: in legends and sentences ("scaling frozen").
        color, marker: in pictures, as matplotlib takes them.
        wording: the beginning of a sentence about it ("Freezing scaling").
    """

    name: str
    removes: frozenset[str]
    label: str
    color: str
    marker: str
    wording: str

    @property
    def is_edit(self) -> bool:
        """Whether it changes anything at all."""
        return bool(self.removes)

    @property
    def is_combined(self) -> bool:
        """Whether it removes several terms at once."""
        return len(self.removes) > 1

    @property
    def primary(self) -> bool:
        """Whether its contrasts on the primary sites are fixed before the data. All others are exploratory."""
        return len(self.removes) == 1

    @property
    def freezes_scaling(self) -> bool:
        """Whether a constant replaces sigma."""
        return "scaling" in self.removes

    def effect(self, site: Site) -> frozenset[str]:
        """Return the terms that it removes and the norm has.

        Two variants with the same effect are the same computation.
        """
        has = {"scaling": site.scales, "projection": site.projects}
        return frozenset(term for term in self.removes if has[term])

    def takes_scaling(self, site: Site) -> bool:
        """Return whether it replaces this norm's sigma by a constant."""
        return site.scales and "scaling" in self.removes

    def takes_projection(self, site: Site) -> bool:
        """Return whether it leaves this norm's mean component in."""
        return site.projects and "projection" in self.removes


_BOTH = frozenset({"scaling", "projection"})
INTACT, SCALING_FROZEN, PROJECTION_REMOVED, BOTH_REMOVED = _TABLE = (
    Variant("intact", frozenset(), "intact", "#0072b2", "o", ""),
    Variant("no_scaling", frozenset({"scaling"}), "scaling frozen", "#d55e00", "s", "Freezing scaling"),
    Variant("no_projection", frozenset({"projection"}), "projection removed", "#009e73", "^", "Removing projection"),
    Variant("both_removed", _BOTH, "both removed", "#cc79a7", "D", "Freezing scaling and removing projection"),
)
# By name, in the order of tables and pictures; and names by what `without` calls them.
VARIANTS = {variant.name: variant for variant in _TABLE}
VARIANT_WITHOUT = {"scaling": "no_scaling", "projection": "no_projection", "both": "both_removed"}


def edits_of_norms() -> list[Variant]:
    """Return the variants that change something."""
    return [v for v in VARIANTS.values() if v.is_edit]


def primary_variants() -> list[Variant]:
    """Return the variants whose contrasts on the primary sites are fixed before the data."""
    return [v for v in VARIANTS.values() if v.primary]


def frozen_scaling(variants: Iterable[str]) -> list[bool]:
    """Return which of these variants, by name, replace sigma by a constant."""
    return [VARIANTS[name].freezes_scaling for name in variants]


def normalized(
    site: Site,
    variant: str,
    x: Float[Tensor, "*batch d"],
    constant: float | Float[Tensor, "*batch 1"] | None,
    sigma: Float[Tensor, "*batch 1"] | None = None,
) -> Float[Tensor, "*batch d"]:
    """The norm's output before gain and bias under one variant, in x's own precision.

    `constant` is c; `sigma` what is divided by where scaling stays (None: that of x).
    """
    chosen = VARIANTS[variant]
    frozen = chosen.takes_scaling(site)
    assert not frozen or constant is not None
    return site.normalize(x, keep_mean=chosen.takes_projection(site), divisor=constant if frozen else sigma)


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
    wide, chosen = at_least_float32(x), VARIANTS[variant]
    if chosen.takes_scaling(site):
        return site.affine(normalized(site, variant, wide, constant), live=True).to(y.dtype)
    if not chosen.takes_projection(site):
        return y
    back = wide.mean(-1, keepdim=True) / (site.sigma(wide) if sigma is None else sigma.to(wide))
    back = back if (gain := site.live_gain()) is None else back * gain.to(back)
    return (y.to(back.dtype) + back).to(y.dtype)


class VariantEdit(Edit):
    """The edit that gives one norm a variant.

    Args:
        site, variant: the norm, and the variant's name.
        replaced: what replaces sigma; needed where the variant takes this norm's scaling.
        positions: shared by the edits of one intervention; None: its own.
        label: for messages; empty: the variant.
    """

    def __init__(
        self, site: Site, variant: str, replaced: Divisor | None, positions: Positions | None = None, *, label: str = ""
    ) -> None:
        where = positions or Positions()
        super().__init__(site, self._change, label or variant, where)
        self.variant, self.where = variant, where
        self.replaced = replaced if VARIANTS[variant].takes_scaling(site) else None

    def _rows(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"] | None:
        if self.replaced is None:
            return None
        return self.replaced.at(self.where.first(self.site, x), at_least_float32(x))

    def _change(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        linear = held(self.site.module)
        sigma = None if linear is None else linear.sigma(x)
        return changed_output(self.site, self.variant, x, y, self._rows(x), sigma)

    def divisor(self, x: Float[Tensor, "*batch d"], sigma: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch 1"]:
        rows = self._rows(x)
        return sigma if rows is None else rows.to(sigma)

    def normalized(self, x: Float[Tensor, "*batch d"], used: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch d"]:
        return normalized(self.site, self.variant, x, used, used)

    def after(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return y


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
    chosen = VARIANTS[variant]
    if chosen.is_edit and site.kind == "unknown":
        return f"{site.kind}: no norm that ln_probe knows, so no term can be taken away"
    if chosen.is_edit and site.bare:
        return "no norm: attention reads the stream itself"
    if not chosen.is_edit:
        return ""
    reasons = []
    if "projection" in chosen.removes:
        if not site.projects:
            reasons.append("it has no projection")
        elif "centred" in site.state:
            reasons.append("its input is already centred")
    if chosen.freezes_scaling and not site.scales:
        reasons.append("it does not scale")
    return f"{site.kind}: " + " and ".join(reasons) if len(reasons) == len(chosen.removes) else ""
