"""Verdicts, margins and attention of all heads of a layer as tensors: for a GPU, where heads are at least 32 wide.

Verdicts come from white queries; margins from the smoothed smallest gap and attention from the log of the weight, by
accelerated projected ascent in float32 (Y. Nesterov, Math. Programming 103 (2005) 127-152). Every iterate proposes a
query and, by its softmax, weights. What they prove is computed in float64 on the device, by the rules of `check`. The
kernels of `decide` narrow what is not as narrow as was asked for. Reports do not use it: on an H200 with 16 processors
the kernels alone were faster (`bench/gpu.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ln_probe.analyses.geometry.check import AMPLE, EPS, SLACK, TAU, UNDERFLOW
from ln_probe.analyses.geometry.keys import QuerySet, judge, see

NARROWEST = 32  # narrower heads do not converge in this form, and the kernels are quick on them
# Share of the free memory that one batch of sets may take, bytes for each pair of keys in it, and bytes on a processor.
SHARE, PAIR_BYTES, ON_PROCESSOR = 0.3, 96, 2**28
# Iterations at most, between looks at how many keys are done, and the share that is enough.
MARGIN_STEPS, ATTENTION_STEPS, LOOK, ENOUGH = 300, 150, 25, 0.999
FIRST_TEMPERATURE = 4.0  # smoothing loses the diameter over this times log n at first
RIDGE = 1e-10  # of the covariance of keys that may lie in a subspace, over their mean square
CURVATURE = 0.25  # share of the smoothed gap's curvature bound that steps are made for


@dataclass(frozen=True)
class Points:
    """Keys as queries see them, in float64, and how far scores may be off."""

    rows: Float[Tensor, "set key r"]
    offset: Float[Tensor, "set key"]
    length: Float[Tensor, "set key"]
    noise: Float[Tensor, "set key"]
    error: Float[Tensor, "set key"]

    @classmethod
    def of(
        cls, rows: Float[Tensor, "set key r"], offset: Float[Tensor, "set key"], noise: Float[Tensor, "set key"]
    ) -> Points:
        """Return points with the bounds of `check.make_space`."""
        length, noise = rows.norm(dim=-1), noise + UNDERFLOW
        error = noise + AMPLE * (rows.shape[-1] + 4) * EPS * (length + offset.abs())
        return cls(rows, offset, length, noise, error)


@dataclass(frozen=True)
class Solution:
    """What is proved of every key of every set."""

    selected: Bool[np.ndarray, "set key"]
    query: Float[np.ndarray, "set key d"]
    margins: list[np.ndarray]  # lower and upper bounds, u of the lower ones; empty if they were not asked for
    attention: list[list[np.ndarray]]  # of each share of the queries: lower and upper bounds, u of both


def without_diagonal(scores: Float[Tensor, "set query key"]) -> Float[Tensor, "set query key"]:
    """Return scores with minus infinity for every key's own."""
    return scores - torch.diag_embed(torch.full(scores.shape[:2], math.inf, dtype=scores.dtype, device=scores.device))


def select_by_white_queries(space: Points) -> tuple[Bool[Tensor, "set key"], Tensor]:
    """Return which keys their white queries are proved to select by more than tau, copies included, and the queries."""
    rows, (_, count, dim) = space.rows, space.rows.shape
    gram = rows.mT @ rows / count + RIDGE * torch.eye(dim, dtype=rows.dtype, device=rows.device)
    factor, failed = torch.linalg.cholesky_ex(gram)
    queries = torch.cholesky_solve(rows.mT, factor).mT
    queries = queries / queries.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    scores = queries @ rows.mT
    own = scores.diagonal(dim1=1, dim2=2) - space.error
    lead = own - without_diagonal(scores + space.error[:, None, :]).amax(dim=-1)
    proved = (lead > TAU * (1 + SLACK) * (1 + (dim + 8) * EPS)) & (failed == 0)[:, None] & queries.isfinite().all(-1)
    return proved, queries


def into_ball(u: Float[Tensor, "set key r"]) -> Float[Tensor, "set key r"]:
    """Return points shortened until their length is at most 1, rounding included."""
    u = u.nan_to_num(0.0, 0.0, 0.0)
    length = u.norm(dim=-1, keepdim=True) * (1 + (u.shape[-1] + 8) * EPS)
    shortened: Tensor = u / length.clamp_min(1.0)
    return shortened


def prove_margins(space: Points, lower_at: Tensor, upper_at: Tensor, heat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what queries, and the weights that others have at some temperatures, prove of the margins; and u of the
    queries."""
    count, dim = space.rows.shape[1:]
    at = into_ball(lower_at.double())
    scores = at @ space.rows.mT + space.offset[:, None, :]
    own = scores.diagonal(dim1=1, dim2=2) - space.error
    lower = own - without_diagonal(scores + space.error[:, None, :]).amax(dim=-1)
    scores = upper_at.double() @ space.rows.mT + space.offset[:, None, :]
    share = torch.softmax(without_diagonal(scores) / heat.double(), dim=-1)
    few, total = AMPLE * EPS * (count + dim + 8), share.sum(dim=-1)

    def mean(values: Tensor) -> Tensor:
        return (share @ values[..., None])[..., 0]

    miss = (share @ space.rows - total[..., None] * space.rows).norm(dim=-1)
    lead = total * space.offset - mean(space.offset)
    doubt = mean(space.noise) + total * space.noise
    size = mean(space.length + space.offset.abs()) + total * (space.length + space.offset.abs())
    upper = (miss + lead + doubt + 2 * few * size) / total
    return lower, upper + 4 * EPS * upper.abs(), at


def prove_attention(space: Points, at: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax weights that queries give, and what their weights prove that none of the ball exceeds."""
    count = space.rows.shape[1]
    scores = at @ space.rows.mT + space.offset[:, None, :]
    logs = torch.log_softmax(scores, dim=-1)
    few = (count + 16) * AMPLE * EPS
    doubt = space.error + space.error.amax(dim=-1, keepdim=True) + few
    own = logs.diagonal(dim1=1, dim2=2)
    # The largest score is subtracted before the sum; its rounding is relative to the scores.
    doubt = doubt + 4 * EPS * scores.abs().amax(dim=-1)
    lower = (own - doubt).exp() * (1 - few)
    share = logs.exp()

    def mean(values: Tensor) -> Tensor:
        return (share @ values[..., None])[..., 0]

    total = share.sum(dim=-1)
    share = share / total[..., None]
    entropy = -torch.where(share > 0, share * share.clamp_min(1e-320).log(), 0.0).sum(dim=-1)
    move = (share @ space.rows - space.rows).norm(dim=-1)
    lead = mean(space.offset) - space.offset
    size = mean(space.length + space.offset.abs()) + space.length + space.offset.abs()
    doubt = mean(space.noise) + space.noise + 4 * few * (size + entropy + 1.0 + math.log(count))
    level = entropy + lead - radius * move - doubt
    return lower, ((-level).clamp(max=0.0).exp() * (1 + few)).clamp(max=1.0)


def ascend(
    space: Points, radius: Float[Tensor, "set 1 1"], gap: float, steps: int, starts: Tensor | None, *, margins: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximize the smallest gap, or the log of the weight, of every key over the unit ball, in float32.

    Args:
        radius: multiplies the rows.
        gap: how far bounds may be apart: relative for margins, absolute for weights.
        starts: u to start from; None: towards each key.

    Returns u of the best lower bound and of the best upper bound, and the temperature of the latter.
    """
    rows, offset = (space.rows * radius).float(), space.offset.float()
    count = rows.shape[1]
    across, log_count = rows.mT.contiguous(), math.log(count) + 1.0
    diameter = torch.cdist(rows, rows).amax(dim=-1, keepdim=True).clamp_min(1e-30)
    u = rows / rows.norm(dim=-1, keepdim=True).clamp_min(1e-30) if starts is None else starts.float()
    y, momentum = u.clone(), torch.ones_like(diameter)
    heat = diameter / (FIRST_TEMPERATURE * log_count) if margins else torch.ones_like(diameter)
    lower = torch.full_like(offset, -math.inf)
    upper, lower_at, upper_at, upper_heat = -lower, u.clone(), u.clone(), heat.clone()
    for step in range(1, steps + 1):
        scores = y @ across + offset[:, None, :]
        own = scores.diagonal(dim1=1, dim2=2)
        if margins:
            scores = without_diagonal(scores)
            low, share = own - scores.amax(dim=-1), torch.softmax(scores / heat, dim=-1)
        else:
            share = torch.softmax(scores, dim=-1)
            low = share.diagonal(dim1=1, dim2=2)
        x = share @ rows - rows
        lead = (share @ offset[..., None])[..., 0] - offset
        high = x.norm(dim=-1) - lead
        if not margins:
            high = (high - torch.special.entr(share).sum(dim=-1)).exp()
        better, tighter = low > lower, high < upper
        lower, upper = torch.maximum(lower, low), torch.minimum(upper, high)
        lower_at = torch.where(better[..., None], y, lower_at)
        upper_at, upper_heat = (torch.where(tighter[..., None], a, b) for a, b in ((y, upper_at), (heat, upper_heat)))
        new = y - x * (heat / (CURVATURE * diameter.square()))
        new = new / new.norm(dim=-1, keepdim=True).clamp_min(1.0)
        move = new - u
        restart = ((y - new) * move).sum(dim=-1, keepdim=True) > 0
        following = torch.where(restart, 1.0, (1.0 + (1.0 + 4.0 * momentum.square()).sqrt()) / 2.0)
        y = new + torch.where(restart, 0.0, (momentum - 1.0) / following) * move
        y = y / y.norm(dim=-1, keepdim=True).clamp_min(1.0)
        u, momentum = new, following
        if margins and step % 10 == 0:
            heat = torch.minimum(heat, (upper - lower)[..., None] / (2.0 * log_count))
            heat = torch.maximum(heat, 1e-6 * diameter / log_count)
        if step % LOOK == 0:
            asked = gap * torch.maximum(upper.abs(), lower.abs()) if margins else torch.full_like(upper, gap)
            if float(((upper - lower) <= 0.8 * asked).float().mean()) >= ENOUGH:
                break
    return lower_at, upper_at, upper_heat


def batches(sets: int, count: int, device: torch.device) -> Iterator[slice]:
    """Yield sets, as many at a time as the device has memory for."""
    room = torch.cuda.mem_get_info(device)[0] * SHARE if device.type == "cuda" else ON_PROCESSOR
    step = max(1, int(room // (PAIR_BYTES * count * count)))
    for first in range(0, sets, step):
        yield slice(first, min(first + step, sets))


def is_suited(keys: Float[np.ndarray, "set key d"], queries: Sequence[QuerySet] | None) -> bool:
    """Whether sets can be solved here: wide enough, several keys, and queries in all directions of the keys."""
    return (
        keys.shape[2] >= NARROWEST
        and keys.shape[1] > 1
        and (queries is None or all(q.missing.shape[1] == 0 and q.axes.shape[1] == keys.shape[2] for q in queries))
    )


def on_device(arrays: Iterable[Sequence[np.ndarray]], device: torch.device) -> Points:
    """Return the rows, offsets and noise of some sets as points on a device."""
    return Points.of(*(torch.from_numpy(np.stack(column)).to(device) for column in zip(*arrays, strict=True)))


@torch.no_grad()
def solve(
    keys: Float[np.ndarray, "set key d"],
    queries: Sequence[QuerySet] | None,
    inner: Float[np.ndarray, " set"] | None,
    gap: float | None,
    weight_gap: float | None,
    device: torch.device,
) -> Solution:
    """Prove what white queries and projected ascent find of sets of keys.

    Args:
        queries: of each set; None: verdicts alone.
        inner: shares of the sets of queries over which attention is also asked for.
        gap: width of a margin's bracket, as a share of the margin; None: no margins.
        weight_gap: how far bounds of attention may be apart; None: no attention.
    """
    parts = []
    for some in batches(len(keys), keys.shape[1], device):
        judged = [judge(one, None, None) for one in np.ascontiguousarray(keys[some])]
        bounds = [*select_by_white_queries(on_device([(j.rows, 0.0 * j.noise, j.noise) for j in judged], device))]
        if queries is not None:
            space = on_device([see(k, None, q) for k, q in zip(keys[some], queries[some], strict=True)], device)
            whole = torch.ones(len(judged), 1, 1, dtype=torch.float64, device=device)
            starts = None
            if gap is not None:
                bounds += prove_margins(space, *ascend(space, whole, gap, MARGIN_STEPS, None, margins=True))
                starts = bounds[-1]
            radii = [] if weight_gap is None else [whole]
            if weight_gap is not None and inner is not None:
                radii.append(torch.from_numpy(np.asarray(inner[some], np.float64)).to(device)[:, None, None])
            for radius in radii:
                assert weight_gap is not None
                low_at, high_at, _ = ascend(space, radius, weight_gap, ATTENTION_STEPS, starts, margins=False)
                low_at, high_at = (radius * into_ball(at.double()) for at in (low_at, high_at))
                starts = low_at / radius
                lower = prove_attention(space, low_at, radius[..., 0])[0]
                upper = prove_attention(space, high_at, radius[..., 0])[1]
                bounds += [lower, upper, low_at, high_at]
        parts.append([bound.cpu().numpy() for bound in bounds])
    selected, query, *rest = (np.concatenate(column) for column in zip(*parts, strict=True))
    margins = 3 if gap is not None and queries is not None else 0
    return Solution(selected, query, rest[:margins], [rest[k : k + 4] for k in range(margins, len(rest), 4)])
