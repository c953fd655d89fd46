"""The queries that heads can make, and how near they come to the one that gives every key the same score.

Behind a norm that scales, a head can make only a bounded set of queries. With projection, norm outputs
are orthogonal to 1 before gain and bias, so a query with gain * (W_K q) ∝ 1 scores all keys alike
(Brody, Alon & Yahav 2023, section 3.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from einops import rearrange
from jaxtyping import Float, Float64
from torch import Tensor

from ln_probe.hooks.attention import Heads
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.stream import visible_keys

_INVERTIBLE = 1e8  # axes with a condition number below this are inverted as they are
_ROWS = 64  # queries handled at once where each sees its own rotated keys: bounds memory at 64·pos·head·d_head


@dataclass(frozen=True, eq=False)
class ReachableQueries:
    """The queries {c + A u, |u| ≤ 1} that a norm lets each head make, before rotary positions and the divisor.

    Attributes:
        center: float64, on the CPU.
        axes: at most d_head of them.
    """

    center: Float[Tensor, "head d_head"]
    axes: Float[Tensor, "head d_head axis"]

    @cached_property
    def inverse(self) -> Float[Tensor, "head axis d_head"]:
        """A⁺: of a query q, |A⁺(q - c)| is 1 on the edge."""
        if self.axes.shape[-2] == self.axes.shape[-1]:
            inverse, _ = torch.linalg.inv_ex(self.axes)
            condition = self.axes.flatten(1).norm(dim=1) * inverse.flatten(1).norm(dim=1)
            if bool((condition < _INVERTIBLE).all()):  # a tenth of the time
                return cast(Tensor, inverse)
        return cast(Tensor, torch.linalg.pinv(self.axes))


def reachable_queries(heads: Heads, norm: Norm) -> ReachableQueries | None:
    """Return what `norm` lets each head make: its outputs through W_Q and b_Q, or what a QK-norm
    can put out; None for a norm that does not scale. Computed once for the weights."""
    if norm.name not in heads.known:
        if heads.q_norm is None:
            outputs = norm.reachable(heads.W_Q)
            outputs = outputs and (outputs[0] + heads.b_Q.cpu(), outputs[1])
        else:
            outputs = heads.q_norm.reachable()
            outputs = outputs and (_per_head(heads, outputs[0]), _per_head(heads, outputs[1]))
        heads.known[norm.name] = outputs and ReachableQueries(
            outputs[0], _compact(outputs[1].to(heads.W_Q.device)).cpu()
        )
    reached: ReachableQueries | None = heads.known[norm.name]
    return reached


def query_ellipsoid(
    heads: Heads, norm: Norm, position: int
) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "head d_head axis"]] | None:
    """Return center c and axes A of the scaled queries {c + A u, |u| ≤ 1} that a head can make at
    `position`; None for a norm that does not scale."""
    if (reached := reachable_queries(heads, norm)) is None:
        return None
    name = f"{norm.name}, at a position"  # the last one asked for: prompts of one length ask for the same
    if name not in heads.known or heads.known[name][0] != position:
        center, axes = _turned(heads, reached.center, reached.axes, position)
        heads.known[name] = position, (center / heads.divisor, axes / heads.divisor)
    ellipsoid: tuple[Tensor, Tensor] = heads.known[name][1]
    return ellipsoid


def query_directions(
    heads: Heads, norm: Norm, position: int
) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "head d_head axis"]]:
    """Return center c and directions A of all queries {c + A u}, u of any length, that a head can
    make at `position` behind a norm that does not scale, or none."""
    center, axes = norm.directions(heads.W_Q)
    center, axes = _turned(heads, center + heads.b_Q.cpu(), axes, position)
    return center / heads.divisor, _compact(axes / heads.divisor)


def query_radius(heads: Heads, norm: Norm, y: Float[Tensor, "pos d_model"]) -> Float64[Tensor, "pos head"] | None:
    """Return |A⁺(q - c)| of the queries of one prompt: 1 on the edge of the reachable ellipsoid.

    None if the norm does not scale: its queries are not bounded.
    """
    if (reached := reachable_queries(heads, norm)) is None:
        return None
    queries = heads.queries(y, rotate=False).cpu()
    distance: Tensor = torch.einsum("had,phd->pha", reached.inverse, queries - reached.center).norm(dim=-1)
    return distance


def _per_head(heads: Heads, values: Float[Tensor, " wide *axis"]) -> Float[Tensor, "head d_head *axis"]:
    """Return what a query norm can put out, of each head."""
    parts = values.reshape(-1, heads.W_Q.shape[-1], *values.shape[1:])
    return parts.expand(heads.n_heads, *parts.shape[1:])


def _turned(heads: Heads, center: Tensor, axes: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """Return a set of queries before rotary positions as it is at `position`."""
    if heads.rotary is None:
        return center, axes
    here = torch.full((axes.shape[-1],), position)
    table = heads.rotary.cpu()
    spun = table(rearrange(axes, "head d_head wide -> wide head d_head"), here)
    return table(center[None], here[:1])[0], rearrange(spun, "wide head d_head -> head d_head wide")


def _compact(axes: Float[Tensor, "head d_head wide"]) -> Float[Tensor, "head d_head axis"]:
    """Return the same ellipsoids with at most d_head axes: Aᵀ = Q R, and Q only turns the ball."""
    if axes.shape[-1] <= axes.shape[-2]:
        return axes
    factor: Tensor = torch.linalg.qr(axes.mT, mode="r").R.mT.contiguous()
    return factor


def angle_to_uniform(heads: Heads, site: Norm, q: Float[Tensor, "query head d_head"]) -> Float[Tensor, "query head"]:
    """Angle in degrees (0–90) of gain * (W_K q) to the all-ones direction; q before rotary positions.

    A QK-norm's gain comes before W_K. With rotary positions a query has one such direction per key, W_K R_jᵀ q_rot;
    their mean over visible keys is given.
    """
    along, rest = _key_maps(heads, site)

    def angle(w: Tensor) -> Tensor:  # [… head d_head]
        w = _into_keys(heads.k_norm, w)
        far = torch.einsum("hij,...hj->...hi", rest, w).norm(dim=-1)
        near = torch.einsum("...hi,hi->...h", w, along).abs()
        return torch.rad2deg(torch.atan2(far, near)).where((far > 0) | (near > 0), math.nan)

    if heads.rotary is None:
        return angle(q)
    positions = torch.arange(len(q), device=q.device)
    turned = heads.rotary(q, positions)
    found = []
    for rows in positions.split(_ROWS):
        pairs = turned[rows][:, None].expand(-1, len(q), -1, -1).reshape(-1, *q.shape[1:])
        back = heads.rotary.inverse(pairs, positions.repeat(len(rows)))
        per_key = angle(back).view(len(rows), len(q), -1)
        seen = visible_keys(len(q), len(q), causal=heads.causal, window=heads.window, device=q.device)[rows][..., None]
        found.append(per_key.where(seen, 0.0).sum(1) / seen.sum(1))
    return torch.cat(found)


def _key_maps(heads: Heads, site: Norm) -> tuple[Float[Tensor, "head d_head"], Float[Tensor, "head d_head d_head"]]:
    """Return what gives the part of gain * (W_K w) along the all-ones direction, and a factor R with
    R w as long as the rest (a Gram matrix would lose half the digits). Computed once."""
    if (name := f"{site.name}, keys") not in heads.known:
        gain = site.gain
        weights = heads.W_K if gain is None else heads.W_K * gain.double()[:, None].to(heads.W_K.device)
        along = weights.sum(1) / math.sqrt(weights.shape[1])  # 1·(gain * W_K w) / |1| = along·w
        heads.known[name] = along, torch.linalg.qr(weights - weights.mean(1, keepdim=True), mode="r").R
    maps: tuple[Tensor, Tensor] = heads.known[name]
    return maps


def _into_keys(norm: Norm | None, w: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch head d_head"]:
    """Return what reads a key after its QK-norm as what reads it before, but for the length."""
    if norm is None:
        return w
    heads, d_head = w.shape[-2:]
    if norm.gain is not None:
        gain = norm.gain.double().to(w.device).view(-1, d_head)  # of each head, or of all heads together (OLMo 2)
        w = w * gain.repeat_interleave(heads // len(gain), dim=0)
    return w - w.mean(-1, keepdim=True) if norm.projects else w


def mean_angle(heads: Heads, site: Norm, q: Float[Tensor, "query head d_head"]) -> Float[Tensor, " head"]:
    """Mean of `angle_to_uniform` over the queries that see more than one key; NaN without projection."""
    first = 1 if heads.causal else 0
    if not site.projects or len(q) < 2:
        return torch.full((heads.n_heads,), math.nan, dtype=torch.float64)
    return angle_to_uniform(heads, site, q)[first:].nanmean(0).cpu()


def random_angle(d: int, *, seed: int = 0) -> float:
    """Mean angle in degrees (0–90) of random directions of R^d to the all-ones direction."""
    v = torch.randn(2000, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    cosine = (v.sum(-1).abs() / (v.norm(dim=-1) * math.sqrt(d))).clamp(0.0, 1.0)
    return float(torch.rad2deg(torch.acos(cosine)).mean())
