"""The languages L_k: words of k alternating blocks, L1 = a+, L2 = a+b+, L3 = a+b+a+, …

The task of Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"): say at every position whether it lies in the last
block. A program of depth k - 2 does it, and none of smaller depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ln_probe.analyses.lab.depth.crasp import parse
from ln_probe.analyses.lab.depth.crasp_programs import last_block

BOS, A, B = 0, 1, 2
D_VOCAB = 3
IGNORED = -100  # label of BOS and of padding, torch's default ignore_index


@dataclass(frozen=True)
class BlockWords:
    """Words of L_k as a model gets them, padded on the right.

    Attributes:
        tokens: BOS, then the word; [word pos].
        labels: 1 in the last block, 0 before it, IGNORED at BOS and padding; [word pos].
    """

    tokens: Int[Tensor, "word pos"]
    labels: Int[Tensor, "word pos"]


def sample_block_words(k: int, lengths: tuple[int, int], size: int, generator: torch.Generator) -> BlockWords:
    """Words of L_k: the length uniform in `lengths` (both included), the k - 1 places of change distinct and uniform.

    Raises:
        ValueError: k or size below 1, or a shortest length that has no room for k blocks.
    """
    low, high = lengths
    if k < 1:
        raise ValueError(f"k must be at least 1 block, got {k}")
    if size < 1:
        raise ValueError(f"at least 1 word is needed, got size={size}")
    if not 1 <= low <= high:
        raise ValueError(f"lengths must be a range (low, high) with 1 <= low <= high, got ({low}, {high})")
    if low < k:
        raise ValueError(
            f"a word of {low} letters has no room for {k} blocks: give lengths from {k} on, or a smaller k"
        )
    length = torch.randint(low, high + 1, (size, 1), generator=generator)
    place = torch.arange(1, high)  # a change at p: letter p (from 0) begins a new block
    order = torch.rand(size, high - 1, generator=generator).masked_fill(place >= length, torch.inf)
    changes = torch.zeros(size, high, dtype=torch.long)
    chosen = order.argsort(dim=1)[:, : k - 1]
    changes[:, 1:].scatter_(1, chosen, 1)
    block = changes.cumsum(1)  # from 0
    inside = torch.arange(high) < length
    letters = torch.where(block % 2 == 0, A, B).masked_fill(~inside, A)
    labels = (block == k - 1).long().masked_fill(~inside, IGNORED)
    return BlockWords(
        torch.cat([torch.full((size, 1), BOS), letters], dim=1),
        torch.cat([torch.full((size, 1), IGNORED), labels], dim=1),
    )


def exact_match(predicted: Int[Tensor, "word pos"], labels: Int[Tensor, "word pos"]) -> Bool[Tensor, " word"]:
    """Whether every label of a word is right, the published measure."""
    return ((predicted == labels) | (labels == IGNORED)).all(dim=1)


def predicted_depth(k: int) -> int:
    """The depth of the C-RASP program that labels the last block of L_k: what the theory says a transformer needs."""
    return parse(last_block(k)).depth
