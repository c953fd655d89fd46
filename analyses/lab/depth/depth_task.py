"""The task of the depth experiment, its model, and what a cell of its grid is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.analyses.lab.depth.block_languages import D_VOCAB, BlockWords, exact_match, sample_block_words
from ln_probe.analyses.lab.training import step_generator
from ln_probe.analyses.lab.transformer import LabConfig

TRAIN_LENGTHS = (51, 100)
BINS = (TRAIN_LENGTHS, (101, 150), (151, 200), (201, 250))  # up to 2.5 times the training length
EVALUATION_WORDS = 500  # per bin: a standard error of at most 2.3 points
EVALUATION_SEED = 10_000  # apart from every training seed
KEYS = ("depth", "k", "norm", "norm_order", "positions")


class BlockTask:
    """Label the last block of words of L_k; loss per letter, measured as exact match per length bin.

    Args:
        k: blocks.
        words: per bin (BINS; the first is trained on) that are measured.

    Raises:
        ValueError: k below 1, or too large for the shortest training words.
    """

    name = "depth"

    def __init__(self, k: int, words: int = EVALUATION_WORDS) -> None:
        self.k, self.words = k, words
        sample_block_words(k, TRAIN_LENGTHS, 1, torch.Generator())  # raises what is wrong with k now, not in a run

    @property
    def identity(self) -> dict[str, Any]:
        return {"k": self.k, "lengths": TRAIN_LENGTHS, "bins": BINS, "words": self.words}

    def batch(self, step: int, size: int, seed: int) -> BlockWords:
        return sample_block_words(self.k, TRAIN_LENGTHS, size, step_generator(seed, step))

    def loss(self, model: nn.Module, batch: BlockWords) -> Float[Tensor, ""]:
        return F.cross_entropy(_label_logits(model, batch).flatten(0, 1), batch.labels.flatten())

    @cached_property
    def _evaluation(self) -> dict[tuple[int, int], BlockWords]:
        return {b: sample_block_words(self.k, b, self.words, step_generator(EVALUATION_SEED, b[0])) for b in BINS}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            measure(lengths): float(exact_match(_label_logits(model, words).argmax(-1), words.labels).float().mean())
            for lengths, words in self._evaluation.items()
        }

    def write_files(self, out: Path) -> None:
        pass


def _label_logits(model: nn.Module, words: BlockWords) -> Float[Tensor, "word pos label"]:
    logits: Tensor = model(words.tokens)
    return logits[..., :2]


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
