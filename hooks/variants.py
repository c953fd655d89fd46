"""Variants: norms with a term removed, or replaced by something else.

    intact           Px / sigma
    no_scaling       Px / c           c = the site's mean sigma over other prompts: two numbers, one for position 0
    no_projection     x / sigma(Px)   1/√(1 - mean_share) times as long as intact
    both_removed      x / c

before gain and bias. Everything that measures, draws or describes variants iterates over the registry `VARIANTS`.
`VariantEdit` gives a norm one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.edits import Edit, Positions, held
from ln_probe.hooks.model import at_least_float32
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import Divisor

# From a site, its input and the constant that replaces sigma (None where the norm does not scale, or the variant does
# not remove scaling) to the norm's output before gain and bias.
Transform = Callable[[Site, Tensor, float | Tensor | None], Tensor]


@dataclass(frozen=True)
class Variant:
    """One way to change what a norm computes.

    Attributes:
        name: in tables and on the command line.
        removes: the terms of the norm that it removes: "scaling", "projection", both or none.
        label: in legends.
        color, marker: in pictures, as matplotlib takes them.
        wording: how a sentence about it begins ("Freezing scaling").
        state: what the norm is then ("scaling frozen").
        transform: what the norm computes instead, before gain and bias: from the site, its input (mean included) and
            the constant that replaces sigma, None unless "scaling" is removed and the norm scales.
            `site.normalize(x, divisor=c)` is the norm's own with that constant. None: the norm without the terms that
            are removed.
        without: what `ln_probe.hooks.without` calls it; empty: nothing.
        primary: whether its contrasts on the primary sites are fixed before the data. All others are exploratory.
        standard: whether it is one of the four that ln_probe began with; no other is, in this file or elsewhere. The
            others never change a number of these: their contrasts form separate families, and they have no say in
            which heads and keys are measured.

    Example:
        >>> register(Variant("my_tanh", frozenset({"scaling"}), "tanh", "#000000", "x", "Replacing norms by tanh",
        ...     "norm replaced by tanh", transform=lambda site, x, c: torch.tanh(site.normalize(x, divisor=c))))
    """

    name: str
    removes: frozenset[str]
    label: str
    color: str
    marker: str
    wording: str
    state: str
    transform: Transform | None = None
    without: str = ""
    primary: bool = False
    standard: bool = False

    @property
    def is_edit(self) -> bool:
        """Whether it changes anything at all."""
        return bool(self.removes) or self.transform is not None

    @property
    def is_combined(self) -> bool:
        """Whether it removes several terms at once and does nothing else."""
        return self.transform is None and len(self.removes) > 1

    @property
    def freezes_scaling(self) -> bool:
        """Whether a constant replaces sigma."""
        return "scaling" in self.removes

    def effect(self, site: Site) -> frozenset[str]:
        """What it changes at one norm: the terms that it removes and the norm has, or its own transform.

        Two variants with the same effect are the same computation.
        """
        if self.transform is not None:
            return frozenset() if site.stands_in else frozenset({self.name})
        has = {"scaling": site.scales, "projection": site.projects}
        return frozenset(term for term in self.removes if has[term])

    def takes_scaling(self, site: Site) -> bool:
        """Whether it replaces this site's sigma by a constant."""
        return site.scales and "scaling" in self.removes

    def takes_projection(self, site: Site) -> bool:
        """Whether it leaves this site's mean component in, and does nothing else to it."""
        return self.transform is None and site.projects and "projection" in self.removes


# All variants by name, in the order of tables and pictures; and their names by what `without` calls them.
VARIANTS: dict[str, Variant] = {}
VARIANT_WITHOUT: dict[str, str] = {}


def register(variant: Variant) -> Variant:
    """Add a variant to everything that is measured from now on.

    Raises:
        ValueError: there is a variant of that name, or one that `without` calls the same.
    """
    if variant.name in VARIANTS:
        raise ValueError(f"there is a variant {variant.name!r} already: give yours another name")
    if variant.without in VARIANT_WITHOUT:
        raise ValueError(f"without(model, {variant.without!r}) is a variant already: call yours something else there")
    VARIANTS[variant.name] = variant
    if variant.without:
        VARIANT_WITHOUT[variant.without] = variant.name
    return variant


def _standard(
    name: str, removes: Iterable[str], color: str, marker: str, wording: str, state: str, **more: Any
) -> Variant:
    return register(Variant(name, frozenset(removes), state, color, marker, wording, state, standard=True, **more))


INTACT = _standard("intact", [], "#0072b2", "o", "", "intact")
SCALING_FROZEN = _standard(
    "no_scaling", ["scaling"], "#d55e00", "s", "Freezing scaling", "scaling frozen", without="scaling", primary=True
)
PROJECTION_REMOVED = _standard(
    "no_projection",
    ["projection"],
    "#009e73",
    "^",
    "Removing projection",
    "projection removed",
    without="projection",
    primary=True,
)
BOTH_REMOVED = _standard(
    "both_removed",
    ["scaling", "projection"],
    "#cc79a7",
    "D",
    "Freezing scaling and removing projection",
    "both removed",
    without="both",
)


def edits_of_norms(*, standard: bool | None = None) -> list[Variant]:
    """The variants that change something; `standard`: only ln_probe's own, or only the others."""
    return [v for v in VARIANTS.values() if v.is_edit and standard in (None, v.standard)]


def primary_variants() -> list[Variant]:
    """The variants whose contrasts on the primary sites are fixed before the data."""
    return [v for v in VARIANTS.values() if v.primary]


def frozen_scaling(variants: Iterable[str]) -> list[bool]:
    """Which of these variants, by name, replace sigma by a constant; one that is not registered does not."""
    return [name in VARIANTS and VARIANTS[name].freezes_scaling for name in variants]


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
    if chosen.transform is not None:
        return chosen.transform(site, x, constant if frozen else None)
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
    if chosen.transform is not None or chosen.takes_scaling(site):
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
        self.divides = VARIANTS[variant].transform is None or self.replaced is not None

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
    if not chosen.is_edit or chosen.transform is not None:
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
