"""What the networks of the counting experiment are trained on, and how far they are found to count.

Every prefix of a random word gets a label (Merrill et al. 2020, "A Formal Hierarchy of RNN Architectures", section 5):

    L5        | #a - #b | < 5, words uniform over {a, b}
    anbnS     the prefix lies in a^n b^n S* for some n >= 1; half the words begin with a random a^n b^n
    anbnaS    the same words with the labels that were released: a^n b^n a S*, so a further b never counts

Words of a^n b^n and a^n b^n c^n between BOS and EOS, for prediction of the next token (Weiss, Goldberg & Yahav 2018,
"On the Practical Computational Power of Finite Precision RNNs", section 5).

Words a^n b^2n with a tag at every letter (`AnbkTask`): code released with Merrill et al. 2020, not in the publication.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from ln_probe.analyses.lab.train import PAD, Words, WordsTask, step_generator

PREFIX_VOCABULARY = 2  # a, b
MAX_DIFFERENCE = 5

EOS = 0  # of the counted words; then the letters from 1 on, then BOS, which is never predicted


def prefix_labels(language: str, tokens: Int[Tensor, "word pos"]) -> Bool[Tensor, "word pos"]:
    """Whether each prefix of each word lies in the language."""
    is_a = tokens == 0
    if language == "L5":
        return torch.where(is_a, 1, -1).cumsum(1).abs() < MAX_DIFFERENCE
    place = torch.arange(1, tokens.shape[1] + 1)
    n = (is_a.long().cumprod(1)).sum(1, keepdim=True)  # the a's a word begins with
    b_run = ((~is_a | (place <= n)).long().cumprod(1).sum(1, keepdim=True)) - n  # the b's that follow
    if language == "anbnS":
        return (n >= 1) & (b_run >= n) & (place >= 2 * n)
    return (n >= 1) & (b_run == n) & (place > 2 * n)


def sample_prefixes(language: str, length: int, size: int, generator: torch.Generator) -> Words:
    """Random words of one length, tokens 0 (a) and 1 (b), and the labels of their prefixes, 0 and 1."""
    tokens = torch.randint(PREFIX_VOCABULARY, (size, length), generator=generator)
    if language in ("anbnS", "anbnaS"):
        n = torch.randint(length // 2 + 1, (size, 1), generator=generator)
        n = n * torch.randint(2, (size, 1), generator=generator)
        place = torch.arange(length)
        tokens = torch.where(place < n, 0, torch.where(place < 2 * n, 1, tokens))
    return tokens, prefix_labels(language, tokens).long()


def bos(letters: int) -> int:
    """The token that begins a^n b^n (2 letters) or a^n b^n c^n (3); those below it are what can be predicted."""
    return letters + 1


def counted_words(letters: int, n: Int[Tensor, " word"]) -> Words:
    """The words a^n b^n (c^n) as (inputs, targets) of a language model, padded on the right.

    Inputs are BOS and the word, targets the word and EOS (PAD beyond).
    """
    first = torch.full((len(n), 1), bos(letters))
    n = n[:, None]
    place = torch.arange(letters * int(n.max()) + 1)
    letter = 1 + place // n
    targets = torch.where(place < letters * n, letter, torch.where(place == letters * n, EOS, PAD))
    inputs = torch.cat([first, targets[:, :-1]], dim=1)
    return inputs.masked_fill((inputs == PAD) | (place > letters * n), EOS), targets


def allowed_next(letters: int, n: int) -> Bool[Tensor, "pos token"]:
    """Which tokens may follow each prefix of BOS a^n b^n (c^n), [letters·n + 1, token].

    While there are a's only, another a or the first b; then what the count leaves.
    """
    table = torch.zeros(letters * n + 1, bos(letters), dtype=torch.bool)
    place = torch.arange(letters * n + 1)
    table[place, torch.where(place < letters * n, 1 + place // n, EOS)] = True
    table[: n + 1, 1] = True  # BOS a^i: another a
    table[1 : n + 1, 2] = True  # a^i: the first b
    return table


TRAIN_LENGTH = 64
TEST_LENGTHS = (64, 128, 256, 512, 1024)
PUBLISHED_LENGTHS = (*TEST_LENGTHS, 2048)  # of the published table: networks without a norm are tested to its end
EVALUATION_SEED = 10_000  # apart from every training seed
EVALUATION_LABELS = 100_000  # per length, so that short and long words are measured equally well
ACCEPTED = 0.005  # a token is accepted if its probability exceeds this: Weiss et al.
LETTERS = {"anbn": 2, "anbncn": 3}
MAX_TRAINED_N = {"anbn": 99, "anbncn": 49}
QUICK_TRAINED_N = 30  # of both
MAX_TESTED_N = 3  # times the largest trained n
TERMS = ("layernorm", "scaling_only", "projection_only")  # the norms that each cell is varied with


class PrefixTask(WordsTask):
    """Label every prefix of words of one length; accuracy over labels at every test length."""

    def __init__(self, language: str, lengths: tuple[int, ...] = TEST_LENGTHS) -> None:
        self.name, self.lengths = language, lengths

    @property
    def identity(self) -> dict[str, Any]:
        return {"train_length": TRAIN_LENGTH, "lengths": self.lengths, "labels": EVALUATION_LABELS}

    def batch(self, step: int, size: int, seed: int) -> Words:
        return sample_prefixes(self.name, TRAIN_LENGTH, size, step_generator(seed, step))

    @cached_property
    def _evaluation(self) -> dict[int, Words]:
        return {
            n: sample_prefixes(self.name, n, -(-EVALUATION_LABELS // n), step_generator(EVALUATION_SEED, n))
            for n in self.lengths
        }

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            f"accuracy_{n}": float((model(words).argmax(-1) == labels).float().mean())
            for n, (words, labels) in self._evaluation.items()
        }


def constant_answers(languages: Iterable[str]) -> pd.DataFrame:
    """The accuracy of a constant answer on the words that networks are measured on.

    Returns:
        `task, measure, constant_yes, constant_no`, a row per language and length; shares of labels.
    """
    rows = []
    for language in languages:
        for n, (_, labels) in PrefixTask(language, PUBLISHED_LENGTHS)._evaluation.items():
            yes = float(labels.float().mean())
            rows.append((language, f"accuracy_{n}", yes, 1 - yes))
    return pd.DataFrame(rows, columns=["task", "measure", "constant_yes", "constant_no"])


class CountingTask(WordsTask):
    """Predict the next token of a^n b^n or a^n b^n c^n, n uniform; how far is the network exact?"""

    def __init__(self, language: str, max_n: int | None = None) -> None:
        self.name, self.letters = language, LETTERS[language]
        self.max_n = max_n or MAX_TRAINED_N[language]

    @property
    def identity(self) -> dict[str, Any]:
        return {"max_n": self.max_n, "tested_n": MAX_TESTED_N * self.max_n, "accepted": ACCEPTED}

    def batch(self, step: int, size: int, seed: int) -> Words:
        n = torch.randint(1, self.max_n + 1, (size,), generator=step_generator(seed, step))
        return counted_words(self.letters, n)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return counted(model, self.letters, MAX_TESTED_N * self.max_n)


def counted(model: nn.Module, letters: int, largest: int) -> dict[str, float]:
    """How far a next-token model counts, for n = 1 … `largest`.

    It accepts a word if every token, EOS included, has p > 0.005 (Weiss et al.). It is exact on n if along
    a^n b^n (c^n), after each prefix, it accepts the tokens that may come next and no other: so it accepts the word
    and rejects every word that leaves it.

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


def farthest(measures: Iterable[str]) -> list[str]:
    """The measures of the longest words and of the largest exact n."""
    lengths = [int(m.removeprefix("accuracy_")) for m in measures if m.startswith("accuracy_")]
    return [*([f"accuracy_{max(lengths)}"] if lengths else []), "exact_to"]


ABSOLUTE, THRESHOLD = "absolute value", "threshold"
ANBK_TRAINED, ANBK_TESTED = torch.arange(2, 300, 2), torch.arange(310, 320, 2)  # as released
TAGS, WORDS_RIGHT, TRAINED_TAGS = "tags right, n 310 to 318", "words right, n 310 to 318", "tags right, n 2 to 298"


def tagged_words(n: Int[Tensor, " word"], form: str) -> Words:
    """The words a^n b^2n (a is 0, b is 1) and their tags, padded on the right (tags PAD).

    Every a is tagged 0, of the 2n b's the n in the middle 1: the tag is 1 while the difference between the numbers of
    a's and b's is at most n/2 either way, an absolute value. The threshold form keeps 1 to the end.
    """
    n = n[:, None]
    place = torch.arange(3 * int(n.max()))
    tags = place >= n + n // 2
    if form == ABSOLUTE:
        tags &= place < 2 * n + n // 2
    return (place >= n).long(), tags.long().masked_fill(place >= 3 * n, PAD)


class AnbkTask(WordsTask):
    """Tag every letter of a^n b^2n in one of its forms."""

    name = "anbk"

    def __init__(self, form: str) -> None:
        self.form = form

    @property
    def identity(self) -> dict[str, Any]:
        return {"form": self.form, "trained": ANBK_TRAINED.tolist(), "tested": ANBK_TESTED.tolist()}

    def batch(self, step: int, size: int, seed: int) -> Words:
        """Words of neighboring n."""
        first = int(torch.randint(len(ANBK_TRAINED) - size + 1, (), generator=step_generator(seed, step)))
        return tagged_words(ANBK_TRAINED[first : first + size], self.form)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        shares = {}
        for name, n in ((TRAINED_TAGS, ANBK_TRAINED[::8]), (TAGS, ANBK_TESTED)):
            tokens, tags = tagged_words(n, self.form)
            right, inside = model(tokens).argmax(-1) == tags, tags != PAD
            shares[name] = float(right[inside].double().mean())
        return shares | {WORDS_RIGHT: float((right | ~inside).all(1).double().mean())}
