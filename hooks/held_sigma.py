"""The edit that holds a norm's sigma: the output stays, and gradients become those of a linear map.

With sigma held, LN(x) = gain·Px / sigma + bias is linear in x, so the gradient of anything after the norm is that of
the linear map, Jᵀg = P(gain·g) / sigma. The value is not recomputed where the norm's own sigma is held: the output is
handed on bit for bit and only the graph behind it is another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.edits import Edit, InterventionError, edits_on
from ln_probe.hooks.site import Site

# From a norm's input to the sigma that is held, [*batch 1], without a gradient; None: its own.
Held = Callable[[Float[Tensor, "*batch d"]], Float[Tensor, "*batch 1"]]


class LinearEdit(Edit):
    """A forward hook under which a norm is linear. It stands before other edits of the norm, which see its output."""

    def __init__(self, site: Site, given: Tensor | None) -> None:
        self.given = given
        super().__init__(site, self._linear, "linearized")

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """The sigma that is held on these inputs."""
        if self.given is None:
            return self.site.sigma(_wide(x.detach()))
        return fitted(self.site, self.given, x).to(_wide(x))

    def _linear(self, x: Tensor, y: Tensor) -> Tensor:
        wide = _wide(x)
        linear = self.site.affine(self.site.project(wide) / self.sigma(wide)).to(y.dtype)
        if self.given is not None:
            return linear
        # 0 + y is y, bit for bit, and its gradient is that of `linear`
        return (linear - linear.detach()) + y.detach()


def _wide(x: Tensor) -> Tensor:
    """In float32 at least: sigma of a 16-bit vector would be rounded to three digits."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def fitted(site: Site, given: Tensor, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
    """A sigma per token of another run, laid out as the norm's input is.

    Raises:
        InterventionError: it is for another number of tokens.
    """
    wanted, laid = x.shape[:-1], given.to(x.device)
    if laid.ndim == 1:
        laid = laid[None]
    if laid.ndim == len(wanted) - 1:  # every head with an input of its own: a token's sigma is that of all
        laid = laid[..., None]
    if laid.ndim != len(wanted) or any(g not in (1, w) for g, w in zip(laid.shape, wanted, strict=True)):
        raise InterventionError(
            f"{site.name}: sigma was given for tokens {list(given.shape)}, and the norm's input is {list(x.shape)}: "
            "record it on as many tokens (ln_probe.hooks.linearized.sigmas)"
        )
    return laid.expand(wanted)[..., None]


def held(module: nn.Module) -> LinearEdit | None:
    """The linearization that a norm's module is under, if any."""
    return next((e for e in edits_on(module) if isinstance(e, LinearEdit) and not e.suspended), None)
