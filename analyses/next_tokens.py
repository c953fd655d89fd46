"""Next-token distributions without keeping logits: the unembedding is applied a block of the vocabulary at a time.

What is wanted of a distribution (cross-entropy, KL to the unedited model's, whether both favour the same token) is
summed while a block is in the processor's cache. Where a model's own logits are anything else than W_Uᵀ y + b_U to
rounding (a soft cap, a 16-bit format), they are taken as the model gives them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.hooks.model import HookedModel

# Logits that are looked at together: 6 MB, which stay in the cache.
_LOGITS = 1_500_000
_NARROWEST = 1024  # columns of the unembedding at a time: with fewer its product is slower
# Logits made here may differ from the model's by this many units in the last place of the largest, times √d_model.
_UNITS = 16.0

Sums = dict[str, float]


class Reference:
    """The next-token distributions of one prompt in the unedited model, and how others compare with them.

    Args:
        logits: of the model, [1 pos vocab].
        unembedding: what makes logits of the final norm's output; None: the model itself does.
        tokens: of the prompt.
    """

    def __init__(
        self, logits: Float[Tensor, "1 pos vocab"], unembedding: Unembedding | None, tokens: Int[Tensor, " pos"]
    ) -> None:
        self.unembedding, self.after = unembedding, tokens[1:]
        self.logits = logits[0]
        if unembedding is not None:  # made as those of edited models are, so that rounding is the same
            self.logits = torch.cat([part[0].clone() for _, part in unembedding.blocks(unembedding.read)], dim=-1)
        self.favourite = self.logits.argmax(-1)
        self.level = _LogSum(self.logits.shape[:1], self.logits)
        for _, part in _columns(self.logits[None]):
            self.level.add(part[0])
        self.shares = (self.logits - self.level.value()[:, None].to(self.logits)).exp_()

    def itself(self) -> Sums:
        """The unedited model compared with itself."""
        wanted = torch.full((1, len(self.after)), math.nan, dtype=torch.float64, device=self.logits.device)
        _pick(self.logits[None, :-1], self.after, slice(0, self.logits.shape[-1]), wanted)
        loss = float((self.level.value()[:-1] - wanted[0]).sum())
        return {"nll": loss, "kl": 0.0, "agree": float(len(self.logits))}

    def compare(self, made: Float[Tensor, "row pos size"], whole: bool) -> list[Sums]:
        """Sums over the prompt for each row of logits, or of what the unembedding reads: `nll`, and if `whole` is
        wanted `kl` (NaN unless all is finite) and `agree`."""
        parts = _columns(made) if self.unembedding is None else self.unembedding.blocks(made)
        rows, length = made.shape[:2]
        level = _LogSum((rows, length), self.logits)
        wanted = torch.full((rows, max(0, length - 1)), math.nan, dtype=torch.float64, device=made.device)
        own, apart = (torch.zeros(rows, length, dtype=torch.float64, device=made.device) for _ in range(2))
        own -= math.inf
        for columns, part in parts:
            _pick(part[:, :-1], self.after, columns, wanted)
            if whole:
                _pick(part, self.favourite, columns, own)
                difference = self.logits[:, columns] - part
                apart += difference.mul_(self.shares[:, columns]).sum(-1)
            level.add(part)
        value = level.value()
        losses = (value[:, :-1] - wanted).sum(-1)
        found = [{"nll": float(loss), "kl": math.nan, "agree": math.nan} for loss in losses]
        if whole:
            distances = (apart + value - self.level.value()).sum(-1)
            agreed = (own >= level.largest).sum(-1)
            for sums, distance, agree in zip(found, distances.tolist(), agreed.tolist(), strict=True):
                if math.isfinite(distance):
                    sums |= {"kl": distance, "agree": float(agree)}
        return found


class _LogSum:
    """log Σ exp over the vocabulary, a block at a time, in double precision."""

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self.largest = torch.full(tuple(shape), -math.inf, dtype=like.dtype, device=like.device)
        self.total = torch.zeros(tuple(shape), dtype=torch.float64, device=like.device)

    def add(self, part: Float[Tensor, "*batch columns"]) -> None:
        largest = torch.maximum(self.largest, part.amax(-1))
        self.total *= (self.largest.double() - largest.double()).nan_to_num(nan=0.0).exp()
        self.total += (part - largest[..., None]).exp_().sum(-1)
        self.largest = largest

    def value(self) -> Float[Tensor, "*batch"]:
        return self.largest.double() + self.total.log()


class Unembedding:
    """W_U and b_U, applied a block of the vocabulary at a time.

    Attributes:
        read: what the unembedding read in the unedited pass, [1 pos d_model].
    """

    def __init__(
        self, weight: Float[Tensor, "d_model vocab"], bias: Float[Tensor, " vocab"] | None, read: Tensor
    ) -> None:
        self.weight, self.bias, self.read = weight, bias, read

    def blocks(
        self, read: Float[Tensor, "row pos d_model"]
    ) -> Iterator[tuple[slice, Float[Tensor, "row pos columns"]]]:
        """Logits, a slice of the vocabulary at a time; a block is overwritten by the next one."""
        size = self.weight.shape[1]
        flat = read.reshape(-1, read.shape[-1])
        step = min(size, max(_NARROWEST, _LOGITS // len(flat)))
        room = torch.empty(len(flat) * step, dtype=read.dtype, device=read.device)
        for first in range(0, size, step):
            columns = slice(first, min(first + step, size))
            part = room[: len(flat) * (columns.stop - first)].view(len(flat), -1)
            if part.device.type == "cpu":  # numpy's product is half as fast again as torch's on so wide a matrix
                np.matmul(flat.numpy(), self.weight[:, columns].numpy(), out=part.numpy())
            else:
                torch.mm(flat, self.weight[:, columns], out=part)
            if self.bias is not None:
                part += self.bias[columns]
            yield columns, part.view(*read.shape[:2], -1)


def find_unembedding(
    model: HookedModel, read: Sequence[Tensor], logits: Float[Tensor, "1 pos vocab"]
) -> Unembedding | None:
    """The model's unembedding, if its logits are W_Uᵀ y + b_U of what it read."""
    try:
        weight, bias = cast(Any, model).W_U, cast(Any, model).b_U
    except AttributeError:
        return None
    if len(read) != 1 or not isinstance(weight, Tensor) or weight.dtype not in (torch.float32, torch.float64):
        return None
    weight, size = weight.detach(), logits.shape[-1]
    made = read[0]
    if made.ndim != 3 or made.shape[:2] != logits.shape[:2] or weight.shape != (made.shape[-1], size):
        return None
    if made.dtype != weight.dtype or logits.dtype != weight.dtype:
        return None
    lift = bias.detach() if isinstance(bias, Tensor) and bool(bias.any()) else None
    found = Unembedding(weight, lift, made)
    allowed = _UNITS * math.sqrt(len(weight)) * torch.finfo(weight.dtype).eps * float(logits.abs().max())
    if lift is not None and lift.shape != (size,):
        return None
    near = all(float((part - logits[..., c]).abs().max()) <= allowed for c, part in found.blocks(made))
    return found if near else None


def _columns(logits: Float[Tensor, "row pos vocab"]) -> Iterator[tuple[slice, Float[Tensor, "row pos columns"]]]:
    """Logits that are there, a slice of the vocabulary at a time."""
    step = max(_NARROWEST, _LOGITS // max(1, logits.shape[0] * logits.shape[1]))
    for first in range(0, logits.shape[-1], step):
        columns = slice(first, min(first + step, logits.shape[-1]))
        yield columns, logits[..., columns]


def _pick(
    part: Float[Tensor, "row pos columns"], which: Int[Tensor, " pos"], columns: slice, out: Float[Tensor, "row pos"]
) -> None:
    """Into `out`, the logits of the tokens `which` (one a position), of those that are among these columns."""
    here = ((which >= columns.start) & (which < columns.stop)).nonzero()[:, 0]
    out[:, here] = part[:, here, which[here] - columns.start].to(out)


def wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()
