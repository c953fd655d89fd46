"""The probe `uniformity`: how near each head comes to attending uniformly, and what each term of the norm contributes.

A query attends uniformly iff q·k is the same for all visible keys. With projection, norm outputs are orthogonal to 1
before gain and bias, so any query with gain * (W_K q) ∝ 1 does (Brody, Alon & Yahav 2023, section 3.1). Measured here:
the angle of gain * (W_K q) to 1, the entropy of attention over log(visible keys), and the spread of scores in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.base import (
    DESCRIBED,
    NOTEWORTHY,
    Finding,
    Needs,
    Observer,
    Probe,
    ProbeResults,
    Run,
    by_layer,
    largest,
    of_variant,
)
from ln_probe.analyses.probes.columns import HEADS
from ln_probe.analyses.probes.keys import GEOMETRY_PROMPTS, HEAD, KeyObserver, KeyRows
from ln_probe.analyses.text import percent
from ln_probe.hooks.attention import Heads, heads_at_once, visible_softmax
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.stream import visible_keys

# Of one head on one prompt, means over the queries that see more than one key (columns of the `heads` table).
MEASURES = ("entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor")
_QUERIES = "queries"  # kept with them: how many these are


class UniformityProbe(Probe):
    name = "uniformity"
    summary = "how uniformly heads attend"
    tables = (HEADS,)
    needs = Needs(attention=True)
    interleaved = True
    prompts = GEOMETRY_PROMPTS

    def start(self, run: Run) -> Observer:
        return _Watching(run)

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        heads = tables[HEADS.name]
        random_angle = float(provenance.get("random_angle_deg", math.nan))
        return [
            *_entropy_finding(heads),
            *(Finding(text, "angle", DESCRIBED) for text in _most_uniform(heads, random_angle)),
        ]


class _Watching(KeyObserver):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        if attended.heads is None:
            return
        first = attended.length == 1 or attended.seen.causal  # sees no other key
        queries = np.full((len(attended.chosen), 1), float(attended.length - first))

        def measure(variant: str) -> dict[str, np.ndarray]:
            uniform, _ = spread(attended, variant)
            return {m: uniform[m][attended.chosen].numpy()[:, None] for m in MEASURES} | {_QUERIES: queries}

        self.add(attended, HEAD, measure)

    def finish(self) -> ProbeResults:
        rows = [
            {**r.place, "head": head, "query_radius": r.radii[row]} | {**_summary(r, row), "no_op": r.no_op}
            for block in self.blocks()
            for r in block.values()
            for row, head in enumerate(r.heads)
        ]
        if not rows:
            return ProbeResults()
        return ProbeResults({HEADS.name: pd.DataFrame(rows)}, self.run.notes_on_projection)


def _summary(rows: KeyRows, row: int) -> dict[str, float]:
    """Means over prompts; a prompt counts with the queries that had a choice."""
    weights = rows.measures[_QUERIES][row]
    if not weights.sum():
        return dict.fromkeys(MEASURES, math.nan)
    counts = weights > 0
    return {m: float(np.average(rows.measures[m][row, counts], weights=weights[counts])) for m in MEASURES}


def _entropy_finding(heads: pd.DataFrame) -> list[Finding]:
    """Whether attention becomes sharper or flatter with scaling frozen, by its normalized entropy."""
    intact, frozen = by_layer(heads, "entropy_ratio")
    change = frozen - intact
    if not len(change) or change.abs().max() < NOTEWORTHY:
        return []
    one, two = float(intact.mean()), float(frozen.mean())
    way = "as sharp on average" if abs(two - one) < NOTEWORTHY else "flatter" if two > one else "sharper"
    text = (
        f"With scaling frozen for its keys (queries unchanged), attention is {way}: the median head's normalized "
        f"entropy goes from {percent(one)} to {percent(two)}"
    )
    if len(change) > 1:
        low, high = (f"{np.round(100 * c) + 0.0:+.0f}" for c in (change.min(), change.max()))
        text += f" (mean over {len(change)} layers; by layer {low} to {high} points)"
    return [Finding(f"{text}.", "entropy", DESCRIBED, size=abs(two - one))]


def _most_uniform(heads: pd.DataFrame, random_angle: float) -> list[str]:
    rows = of_variant(heads, "intact") if len(heads) else heads
    if not len(rows) or rows["entropy_ratio"].isna().all():
        return []
    top = largest(rows, rows["entropy_ratio"])
    text = (
        f"The most uniform head is L{int(top['layer'])}H{int(top['head'])}: its attention has "
        f"{percent(top['entropy_ratio'])} of the entropy of uniform attention"
    )
    if not rows["uniform_angle_deg"].isna().all():
        near = largest(rows, -rows["uniform_angle_deg"])
        text += (
            f"; the queries closest to the uniform direction are those of L{int(near['layer'])}H{int(near['head'])}, "
            f"at {near['uniform_angle_deg']:.0f}° (a random direction: {random_angle:.0f}°)"
        )
    return [text + "."]


_BISECTIONS = 100  # of the logarithm of a range of float64 numbers
_ROWS = 64  # queries handled at once where each sees its own rotated keys: bounds memory at 64·pos·head·d_head


def scores(
    q: Float[Tensor, "query head d_head"],
    k: Float[Tensor, "key head d_head"],
    divisor: float,
    bias: Float[Tensor, "head key"] | None = None,
) -> Float[Tensor, "head query key"]:
    """q·k / divisor, and a bias per key, in nats."""
    found = torch.einsum("qhd,khd->hqk", q, k) / divisor
    return found if bias is None else found + bias[:, None]


def _visible(like: Float[Tensor, "head query key"], causal: bool, window: int | None) -> Bool[Tensor, "query key"]:
    return visible_keys(*like.shape[-2:], causal=causal, window=window, device=like.device)


def entropy_ratio(
    pattern: Float[Tensor, "head query key"], *, causal: bool = True, window: int | None = None
) -> Float[Tensor, "head query"]:
    """Entropy of each row of a pattern over the log of the keys it sees; NaN for a row that sees one key."""
    entropy = torch.special.entr(pattern).sum(-1)
    count = _visible(pattern, causal, window).sum(-1).to(pattern)
    return torch.where(count > 1, entropy / count.log(), math.nan)


def score_spread(
    s: Float[Tensor, "head query key"], *, causal: bool = True, window: int | None = None
) -> Float[Tensor, "head query"]:
    """Standard deviation, in nats, of each query's scores over the keys it sees."""
    visible = _visible(s, causal, window)
    count = visible.sum(-1)
    mean = s.where(visible, 0.0).sum(-1) / count
    return ((s - mean[..., None]).where(visible, 0.0).pow(2).sum(-1) / count).sqrt()


def angle_to_uniform(
    heads: Heads, gain: Float[Tensor, " d_model"] | None, q: Float[Tensor, "query head d_head"]
) -> Float[Tensor, "query head"]:
    """Angle in degrees (0–90) of gain * (W_K q) to the all-ones direction; q before rotary positions.

    A QK-norm's gain comes before W_K. With rotary positions a query has one such direction per key, W_K R_jᵀ q_rot;
    their mean over visible keys is given.
    """
    weights = heads.W_K if gain is None else heads.W_K * gain.double()[:, None].to(heads.W_K.device)
    along = weights.sum(1) / math.sqrt(weights.shape[1])  # [head d_head]: 1·(gain * W_K w) / |1| = along·w
    # The rest of it has the length of R w (from a Gram matrix, or by the arc cosine, half the digits would be lost).
    rest = torch.linalg.qr(weights - weights.mean(1, keepdim=True), mode="r").R

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
    return angle_to_uniform(heads, site.gain, q)[first:].nanmean(0).cpu()


def spread_floor(
    k: Float[Tensor, "key head d_head"],
    queries: tuple[Float[Tensor, "head d_head"], Float[Tensor, "head d_head axis"]] | None,
) -> Float[Tensor, " head"]:
    """Least standard deviation of scores, in nats, that a query c + A u with |u| = 1 can have over the keys.

    With M the centred keys·A and b the centred keys·c, both over √keys, it is the least |M u + b|. Where b is 0, that
    is M's smallest singular value (0 where the keys differ in fewer directions than A has). In general the best u
    solves (MᵀM + m) u = −Mᵀb for the m ≥ −(smallest eigenvalue) at which |u| = 1: |u| falls with m, so m is found by
    bisection (Moré & Sorensen 1983; at the end of the range, their hard case, the rest of u's length goes along the
    smallest eigenvector). From M's singular values, not MᵀM's eigenvalues: what is 0 stays 0.

    Args:
        k: keys.
        queries: center c and axes A of the queries; None: unbounded, and the result is NaN.
    """
    if queries is None:
        return torch.full((k.shape[1],), math.nan, dtype=torch.float64)
    if len(k) < 2:
        return torch.zeros(k.shape[1], dtype=torch.float64)
    center, axes = queries
    centred = _differences(k.transpose(0, 1).cpu()) / math.sqrt(len(k))
    reads, offset = centred @ axes, centred @ center[..., None]
    left, values, _ = torch.linalg.svd(reads, full_matrices=False)
    of_left = left.mT @ offset
    outside = (offset - left @ of_left)[..., 0].norm(dim=-1)  # what no query changes
    # Singular values from the smallest, with the zeros of directions in which no two keys differ, and b along them.
    more = axes.shape[-1] - values.shape[-1]
    values = torch.nn.functional.pad(values, (0, more)).flip(-1)
    along = torch.nn.functional.pad(of_left[..., 0], (0, more)).flip(-1)
    pull, above = (values * along).abs(), values.square() - values[:, :1].square()

    def u(shift: Tensor) -> Tensor:  # the absolute coordinates of u
        divisor = above + shift[:, None]
        return torch.where(pull > 0, pull / divisor, 0.0)

    # Multipliers from next to the smallest eigenvalue on, in equal steps of their logarithm: a direction that next to
    # nothing pulls can still be most of u.
    high = pull.norm(dim=-1)
    low = torch.maximum(pull[:, 0], high * 2.0**-_BISECTIONS)
    hard = ~(u(low).norm(dim=-1) > 1)
    for _ in range(_BISECTIONS):
        middle = low.sqrt() * high.sqrt()
        longer = u(middle).norm(dim=-1) > 1
        low, high = torch.where(longer, middle, low), torch.where(longer, high, middle)
    shift = torch.where(hard, 0.0, high)
    rest = u(shift)[:, 1:].square().sum(-1)
    # The remainder of b along each: b (m − smallest) / (its eigenvalue + m − …); along the first what |u| = 1 leaves.
    divisor = above + shift[:, None]
    left_over = along * torch.where(divisor > 0, (shift - values[:, 0].square())[:, None] / divisor, 1.0)
    first = (along[:, 0].abs() - values[:, 0] * (1 - rest).clamp_min(0.0).sqrt()).abs()
    left_over[:, 0] = torch.where((rest < 0.5) | hard, first, left_over[:, 0])
    least: Tensor = torch.linalg.vector_norm(torch.cat([left_over, outside[:, None]], -1), dim=-1)
    return least


def _differences(k: Float[Tensor, "head key d_head"]) -> Float[Tensor, "head key-1 d_head"]:
    """Coordinates of the centred keys in an orthonormal basis orthogonal to the all-ones direction (Helmert's):
    as many as there are directions, where the centred keys are one more, and a rounding error apart from dependent."""
    count = torch.arange(1, k.shape[1], dtype=k.dtype)[:, None]
    return (k[:, :-1].cumsum(1) - count * k[:, 1:]) / (count * (count + 1)).sqrt()


def spread(
    layer: AttentionLayer, variant: str
) -> tuple[dict[str, Float[Tensor, " head"]], Float[np.ndarray, "head key"]]:
    """How uniformly all heads attend to the keys of a variant (MEASURES), and the largest weight that each key gets."""
    return layer.once("spread", variant, lambda: _measured(layer, variant))


def _measured(
    layer: AttentionLayer, variant: str
) -> tuple[dict[str, Float[Tensor, " head"]], Float[np.ndarray, "head key"]]:
    """The same: a few heads at a time, for scores and patterns of all heads would take more memory than the pass."""
    heads, (q, plain), k = layer.maps, layer.queries, layer.keys(variant)
    found = {name: torch.full((heads.n_heads,), math.nan, dtype=torch.float64) for name in MEASURES}
    most = torch.empty(heads.n_heads, len(k), dtype=torch.float64)
    causal, window, bias = heads.causal, heads.window, heads.bias(len(k))
    first = 1 if causal else 0
    for some in heads_at_once((heads.n_heads, len(q), len(k))):
        s = scores(q[:, some], k[:, some], heads.divisor, None if bias is None else bias[some])
        if len(q) > 1:
            found["score_spread"][some] = score_spread(s, causal=causal, window=window)[:, first:].mean(-1).cpu()
        pattern = visible_softmax(s, causal=causal, window=window)
        del s
        most[some] = received(pattern, causal=causal).cpu()
        if len(q) > 1:
            entropy = entropy_ratio(pattern, causal=causal, window=window)
            found["entropy_ratio"][some] = entropy[:, first:].mean(-1).cpu()
    if len(q) > 1:
        found["uniform_angle_deg"] = layer.once("angle", "", lambda: mean_angle(heads, layer.site, plain))
        if bias is None:
            seen = k if window is None else k[-window:]  # by the last query
            found["score_spread_floor"] = spread_floor(seen, layer.ellipsoid(layer.length - 1))
    return found, most.numpy()


def received(pattern: Float[Tensor, "head query key"], *, causal: bool = True) -> Float[Tensor, "head key"]:
    """The largest weight each key really got, from queries at t ≥ max(position, 1) (all, if attention is not causal);
    NaN if there is no such query."""
    rows = pattern.shape[-2]
    if rows < 2:
        return torch.full_like(pattern[:, 0], math.nan)
    return pattern[:, 1 if causal else 0 :].amax(1)  # causal: rows before a key hold zeros


def random_angle(d: int, *, seed: int = 0) -> float:
    """Mean angle in degrees (0–90) of random directions of R^d to the all-ones direction: that of unrelated queries."""
    v = torch.randn(2000, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    cosine = (v.sum(-1).abs() / (v.norm(dim=-1) * math.sqrt(d))).clamp(0.0, 1.0)
    return float(torch.rad2deg(torch.acos(cosine)).mean())
