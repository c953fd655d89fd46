"""What the networks of the counting experiment are trained on, and how far they are found to count.

Tagging of prefixes (Merrill et al. 2020, section 5) and next-token prediction of a^n b^n (c^n) (Weiss et al. 2018,
section 5).
"""

from __future__ import annotations

import itertools
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.counting.counter_languages import PAD, Tagged, allowed_next, counted_words, sample_prefixes
from ln_probe.analyses.lab.training import step_generator

TRAIN_LENGTH = 64
TEST_LENGTHS = (64, 128, 256, 512, 1024)
PUBLISHED_LENGTHS = (*TEST_LENGTHS, 2048)  # of the source's table: the networks without a norm are tested to its end
EVALUATION_SEED = 10_000  # apart from every training seed
EVALUATION_LABELS = 100_000  # labels per length, so that short and long words are measured alike well
ACCEPTED = 0.005  # a token is accepted if its probability exceeds this: Weiss et al.
LETTERS = {"anbn": 2, "anbncn": 3}
MAX_TRAINED_N = {"anbn": 99, "anbncn": 49}
QUICK_TRAINED_N = 30  # of both
MAX_TESTED_N = 3  # times the largest trained n
TERMS = ("layernorm", "scaling_only", "projection_only")  # the norms that each cell is varied with


def trained_to(language: str, quick: bool) -> int:
    """The longest n of the words that a network is trained on."""
    return QUICK_TRAINED_N if quick else MAX_TRAINED_N[language]


class PrefixTask:
    """Label every prefix of words of one length; accuracy over labels at every test length."""

    def __init__(self, language: str, lengths: tuple[int, ...] = TEST_LENGTHS) -> None:
        self.name, self.lengths = language, lengths

    @property
    def identity(self) -> dict[str, Any]:
        return {"train_length": TRAIN_LENGTH, "lengths": self.lengths, "labels": EVALUATION_LABELS}

    def batch(self, step: int, size: int, seed: int) -> Tagged:
        return sample_prefixes(self.name, TRAIN_LENGTH, size, step_generator(seed, step))

    def loss(self, model: nn.Module, batch: Tagged) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch.tokens).flatten(0, 1), batch.labels.flatten())

    @cached_property
    def _evaluation(self) -> dict[int, Tagged]:
        return {
            n: sample_prefixes(self.name, n, -(-EVALUATION_LABELS // n), step_generator(EVALUATION_SEED, n))
            for n in self.lengths
        }

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            f"accuracy_{n}": float((model(words.tokens).argmax(-1) == words.labels).float().mean())
            for n, words in self._evaluation.items()
        }

    def write_files(self, out: Path) -> None:
        pass


def constant_answers(language: str, lengths: tuple[int, ...] = TEST_LENGTHS) -> pd.DataFrame:
    """What somebody gets right who answers the same everywhere, on the words that networks are measured on.

    Returns:
        `task, measure, constant_yes, constant_no`, a row per length; shares of labels.
    """
    task = PrefixTask(language, lengths)
    rows = []
    for n, words in task._evaluation.items():
        yes = float(words.labels.float().mean())
        rows.append((language, f"accuracy_{n}", yes, 1 - yes))
    return pd.DataFrame(rows, columns=["task", "measure", "constant_yes", "constant_no"])


class CountingTask:
    """Predict the next token of a^n b^n or a^n b^n c^n, n uniform; how far is the network exact?"""

    def __init__(self, language: str, max_n: int | None = None) -> None:
        self.name, self.letters = language, LETTERS[language]
        self.max_n = max_n or MAX_TRAINED_N[language]

    @property
    def identity(self) -> dict[str, Any]:
        return {"max_n": self.max_n, "tested_n": MAX_TESTED_N * self.max_n, "accepted": ACCEPTED}

    def batch(self, step: int, size: int, seed: int) -> tuple[Int[Tensor, "word pos"], Int[Tensor, "word pos"]]:
        n = torch.randint(1, self.max_n + 1, (size,), generator=step_generator(seed, step))
        return counted_words(self.letters, n)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Float[Tensor, ""]:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=PAD)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return counted(model, self.letters, MAX_TESTED_N * self.max_n)

    def write_files(self, out: Path) -> None:
        pass


def counted(model: nn.Module, letters: int, largest: int) -> dict[str, float]:
    """How far a next-token model counts, for n = 1 … `largest`.

    It accepts a word if every token of it, EOS included, has p > 0.005 (Weiss et al.). It is exact on n if along
    a^n b^n (c^n), after each prefix, it accepts the tokens that may come next and no other: so it accepts the word and
    rejects every word that leaves it at any place.

    Returns:
        `exact_from`, `exact_to`: the longest run of n's on which it is exact (0, 0: there is none);
        `accepted_to`: the largest N such that it accepts the words of n = 1 … N.
    """
    exact, accepts = [], []
    for n in range(1, largest + 1):
        inputs, targets = counted_words(letters, torch.tensor([n]))
        p = model(inputs)[0].softmax(-1)
        exact.append(torch.equal(p > ACCEPTED, allowed_next(letters, n)))
        accepts.append(bool((p.gather(1, targets[0][:, None]) > ACCEPTED).all()))
    best = (0, 0)
    for right, run_of in itertools.groupby(enumerate(exact, start=1), key=lambda item: item[1]):
        found = [n for n, _ in run_of]
        if right and (not best[0] or len(found) > best[1] - best[0] + 1):
            best = found[0], found[-1]
    accepted_to = next((n for n, yes in enumerate(accepts) if not yes), largest)
    return {"exact_from": float(best[0]), "exact_to": float(best[1]), "accepted_to": float(accepted_to)}


def farthest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the longest words and of the largest exact n."""
    lengths = [int(m.removeprefix("accuracy_")) for m in table["measure"].unique() if m.startswith("accuracy_")]
    return table[table["measure"].isin([*([f"accuracy_{max(lengths)}"] if lengths else []), "exact_to"])]
