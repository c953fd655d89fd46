"""How near queries come to the direction that gives every key the same score.

With projection, norm outputs are orthogonal to 1 before gain and bias, so a query with gain * (W_K q) ∝ 1 scores all
keys alike (Brody, Alon & Yahav 2023, section 3.1).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.attention import Heads
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.stream import visible_keys

_ROWS = 64  # queries handled at once where each sees its own rotated keys: bounds memory at 64·pos·head·d_head


def angle_to_uniform(heads: Heads, site: Norm, q: Float[Tensor, "query head d_head"]) -> Float[Tensor, "query head"]:
    """Angle in degrees (0–90) of gain * (W_K q) to the all-ones direction; q before rotary positions.

    A QK-norm's gain comes before W_K. With rotary positions a query has one such direction per key, W_K R_jᵀ q_rot;
    their mean over visible keys is given.
    """
    along, rest = heads.once(site, "uniform", lambda: _key_maps(heads, site))

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
    """Return what gives the part of gain * (W_K w) along the all-ones direction, and a factor as long as the rest.

    (From a Gram matrix, or by the arc cosine, half the digits would be lost.)
    """
    gain = site.gain
    weights = heads.W_K if gain is None else heads.W_K * gain.double()[:, None].to(heads.W_K.device)
    along = weights.sum(1) / math.sqrt(weights.shape[1])  # 1·(gain * W_K w) / |1| = along·w
    return along, torch.linalg.qr(weights - weights.mean(1, keepdim=True), mode="r").R


def _into_keys(norm: Norm | None, w: Float[Tensor, "*batch head d_head"]) -> Float[Tensor, "*batch head d_head"]:
    """What reads a key after its QK-norm, as what reads it before (but for the length that the norm divides by)."""
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
    """Mean angle in degrees (0–90) of random directions of R^d to the all-ones direction: that of unrelated queries."""
    v = torch.randn(2000, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    cosine = (v.sum(-1).abs() / (v.norm(dim=-1) * math.sqrt(d))).clamp(0.0, 1.0)
    return float(torch.rad2deg(torch.acos(cosine)).mean())
