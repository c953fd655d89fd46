"""The task of the depth experiment, its model, and what a cell of its grid is.

The languages L_k are words of k alternating blocks, L1 = a+, L2 = a+b+, L3 = a+b+a+, … The task of Yang, Cadilhac &
Chiang (2025, "Knee-Deep in C-RASP") is to say at every position whether it lies in the last block: a C-RASP program of
depth k - 2 does it (`last_block`), and they prove that none of smaller depth does. There are programs for the other
languages of the laboratory, too.

`gate_program(depth)` asks for a majority (depth 1), for the majority of the prefixes' majorities (depth 2), and so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.crasp.crasp import parse
from ln_probe.analyses.lab.train import PAD, Words, WordsTask, step_generator
from ln_probe.analyses.lab.transformer import LabConfig

MAJORITY = "majority := #[Q_a] > #[Q_b]"

DYCK_1 = """
open := #[Q_"("]
close := #[Q_")"]
never_negative := #[open < close] == 0
dyck := open == close and never_negative
"""

A_N_B_N = """
in_order := #[Q_a and #[Q_b] > 0] == 0    // no a after a b
a_n_b_n := in_order and #[Q_a] == #[Q_b]
"""

A_N_B_N_C_N = """
in_order := #[Q_a and #[Q_b or Q_c] > 0 or Q_b and #[Q_c] > 0] == 0
a_n_b_n_c_n := in_order and #[Q_a] == #[Q_b] and #[Q_b] == #[Q_c]
"""

L_5 = "l_5 := #[Q_a] - #[Q_b] < 5 and #[Q_b] - #[Q_a] < 5"

SYMBOLS = "ab"


def block_symbol(number: int) -> str:
    """The letter of the block with this number (from 1): a, b, a, b, …"""
    return SYMBOLS[(number - 1) % 2]


def _check_blocks(k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be at least 1 block, got {k}")


def _reached(last: int) -> list[str]:
    """Definitions `in_j`: the position lies in block j or later of a word that begins with a (depth j - 1)."""
    lines = ["in_1 := true"]
    for block in range(2, last + 1):
        lines.append(f"in_{block} := #[in_{block - 1} and Q_{block_symbol(block)}] > 0")
    return lines


def last_block(k: int) -> str:
    """A program that holds exactly on the last block of a word of L_k; its depth is max(0, k - 2).

    A position is in the last block if an earlier one was in block k - 1 and it carries the last letter.

    Raises:
        ValueError: k below 1.
    """
    _check_blocks(k)
    if k == 1:
        return "last := true"
    return "\n".join([*_reached(k - 1), f"last := in_{k - 1} and Q_{block_symbol(k)}"])


def blocks(k: int) -> str:
    """A program that accepts L_k (k blocks, beginning with a) among words over {a, b}; its depth is max(2, k).

    Raises:
        ValueError: k below 1.
    """
    _check_blocks(k)
    begins = "begins_with_a := #[Q_b and #[Q_a] == 0] == 0"
    return "\n".join([begins, *_reached(k + 1), f"member := begins_with_a and in_{k} and not in_{k + 1}"])


BOS, A, B = 0, 1, 2
D_VOCAB = 3


def sample_block_words(k: int, lengths: tuple[int, int], size: int, generator: torch.Generator) -> Words:
    """Words of L_k: the length uniform in `lengths` (both included), the k - 1 places of change distinct and uniform.

    Returns:
        BOS and the word, padded on the right; 1 in the last block, 0 before it, PAD at BOS and padding.

    Raises:
        ValueError: k or size below 1, or a shortest length that has no room for k blocks.
    """
    low, high = lengths
    _check_blocks(k)
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
    labels = (block == k - 1).long().masked_fill(~inside, PAD)
    return (
        torch.cat([torch.full((size, 1), BOS), letters], dim=1),
        torch.cat([torch.full((size, 1), PAD), labels], dim=1),
    )


def exact_match(predicted: Int[Tensor, "word pos"], labels: Int[Tensor, "word pos"]) -> Bool[Tensor, " word"]:
    """Whether every label of a word is right, the published measure."""
    return ((predicted == labels) | (labels == PAD)).all(dim=1)


def predicted_depth(k: int) -> int:
    """The depth of the C-RASP program that labels the last block of L_k: what the theory says a transformer needs."""
    return parse(last_block(k)).depth


def gate_program(depth: int) -> str:
    """A program whose every level asks for the majority of the one below: comparisons of counts of comparisons.

    Raises:
        ValueError: depth below 1.
    """
    if depth < 1:
        raise ValueError(f"depth must be at least 1 level, got {depth}")
    lines = ["level_1 := #[Q_a] > #[Q_b]"]
    lines += [f"level_{i} := 2 * #[level_{i - 1}] > #[true]" for i in range(2, depth + 1)]
    return "\n".join(lines)


TRAIN_LENGTHS = (51, 100)
BINS = (TRAIN_LENGTHS, (101, 150), (151, 200), (201, 250))  # up to 2.5 times the training length
EVALUATION_WORDS = 500  # per bin: a standard error of at most 2.3 points
EVALUATION_SEED = 10_000  # apart from every training seed
KEYS = ("depth", "k", "norm", "norm_order", "positions")


class BlockTask(WordsTask):
    """Label the last block of words of L_k; loss per letter, measured as exact match per length bin.

    Args:
        k: blocks.
        words: per bin (BINS; the first is trained on) that are measured.

    Raises:
        ValueError: k below 1, or too large for the shortest training words.
    """

    name = "depth"
    answers = 2

    def __init__(self, k: int, words: int = EVALUATION_WORDS) -> None:
        self.k, self.words = k, words
        sample_block_words(k, TRAIN_LENGTHS, 1, torch.Generator())  # raises what is wrong with k now, not in a run

    @property
    def identity(self) -> dict[str, Any]:
        return {"k": self.k, "lengths": TRAIN_LENGTHS, "bins": BINS, "words": self.words}

    def batch(self, step: int, size: int, seed: int) -> Words:
        return sample_block_words(self.k, TRAIN_LENGTHS, size, step_generator(seed, step))

    @cached_property
    def _evaluation(self) -> dict[tuple[int, int], Words]:
        return {b: sample_block_words(self.k, b, self.words, step_generator(EVALUATION_SEED, b[0])) for b in BINS}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            measure(lengths): float(exact_match(self.logits(model, words).argmax(-1), labels).float().mean())
            for lengths, (words, labels) in self._evaluation.items()
        }


def measure(lengths: tuple[int, int]) -> str:
    """The name under which a bin's exact match stands in the tables."""
    return f"exact_match_{lengths[0]}_{lengths[1]}"


@dataclass(frozen=True)
class Cell:
    """One square of the grid.

    Raises (on construction):
        ValueError: depth below 1.
    """

    depth: int
    k: int
    norm: str = "layernorm"
    norm_order: Literal["pre", "post"] = "post"
    positions: Literal["learned", "none", "sinusoidal", "rotary", "alibi"] = "none"

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ValueError(f"depth must be at least 1 layer, got {self.depth}")

    def spec(self) -> LabConfig:
        """The published shape, smaller: one head, ReLU, torch's initialization; the final norm only in pre-norm."""
        return LabConfig(
            n_layers=self.depth,
            d_model=64,
            n_heads=1,
            d_mlp=256,
            d_vocab=D_VOCAB,
            n_ctx=BINS[-1][1] + 1,
            norm=self.norm,
            norm_mlp=self.norm,
            norm_final=self.norm if self.norm_order == "pre" else None,
            norm_order=self.norm_order,
            positions=self.positions,
            tied=False,
            act_fn="relu",
            init="torch",
        )
