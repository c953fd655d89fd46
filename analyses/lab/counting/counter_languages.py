"""Languages that need a counter: samplers and labels.

Every prefix of a random word gets a label (Merrill et al. 2020, "A Formal Hierarchy of RNN Architectures", section 5):

    L5        | #a - #b | < 5, words uniform over {a, b}
    anbnS     the prefix lies in a^n b^n S* for some n >= 1; half the words begin with a random a^n b^n
    anbnaS    the same words with the labels that were released: a^n b^n a S*, so a further b never counts

Words of a^n b^n and a^n b^n c^n between BOS and EOS, for prediction of the next token (Weiss, Goldberg & Yahav 2018,
"On the Practical Computational Power of Finite Precision RNNs").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PrefixLanguage = Literal["L5", "anbnS", "anbnaS"]
PREFIX_LANGUAGES: tuple[str, ...] = get_args(PrefixLanguage)
PREFIX_VOCABULARY = 2  # a, b
MAX_DIFFERENCE = 5

EOS = 0  # of the counted words; then the letters from 1 on, then BOS, which is never predicted
PAD = -100  # target of padding, torch's default ignore_index


@dataclass(frozen=True)
class Tagged:
    """Words and the label of each prefix, [word pos]: tokens 0 (a) and 1 (b), labels 0 and 1."""

    tokens: Int[Tensor, "word pos"]
    labels: Int[Tensor, "word pos"]


def prefix_labels(language: str, tokens: Int[Tensor, "word pos"]) -> Bool[Tensor, "word pos"]:
    """Whether each prefix of each word lies in the language.

    Raises:
        ValueError: an unknown language.
    """
    is_a = tokens == 0
    if language == "L5":
        return torch.where(is_a, 1, -1).cumsum(1).abs() < MAX_DIFFERENCE
    if language not in PREFIX_LANGUAGES:
        raise ValueError(f"unknown language {language!r}: known ones are {', '.join(PREFIX_LANGUAGES)}")
    place = torch.arange(1, tokens.shape[1] + 1)
    n = (is_a.long().cumprod(1)).sum(1, keepdim=True)  # the a's a word begins with
    b_run = ((~is_a | (place <= n)).long().cumprod(1).sum(1, keepdim=True)) - n  # the b's that follow
    if language == "anbnS":
        return (n >= 1) & (b_run >= n) & (place >= 2 * n)
    return (n >= 1) & (b_run == n) & (place > 2 * n)


def sample_prefixes(language: str, length: int, size: int, generator: torch.Generator) -> Tagged:
    """Random words of one length with the labels of their prefixes.

    Raises:
        ValueError: length or size below 1, an unknown language.
    """
    if length < 1 or size < 1:
        raise ValueError(f"length and size must be at least 1, got length={length}, size={size}")
    tokens = torch.randint(PREFIX_VOCABULARY, (size, length), generator=generator)
    if language in ("anbnS", "anbnaS"):
        n = torch.randint(length // 2 + 1, (size, 1), generator=generator)
        n = n * torch.randint(2, (size, 1), generator=generator)
        place = torch.arange(length)
        tokens = torch.where(place < n, 0, torch.where(place < 2 * n, 1, tokens))
    return Tagged(tokens, prefix_labels(language, tokens).long())


def bos(letters: int) -> int:
    """The token that begins a^n b^n (2 letters) or a^n b^n c^n (3); those below it are what can be predicted.

    Raises:
        ValueError: letters not 2 or 3.
    """
    if letters not in (2, 3):
        raise ValueError(f"letters must be 2 (a^n b^n) or 3 (a^n b^n c^n), got {letters}")
    return letters + 1


def counted_words(letters: int, n: Int[Tensor, " word"]) -> tuple[Int[Tensor, "word pos"], Int[Tensor, "word pos"]]:
    """The words a^n b^n (c^n) as (inputs, targets) of a language model, padded on the right.

    Inputs are BOS and the word, targets the word and EOS (PAD beyond).

    Raises:
        ValueError: letters not 2 or 3, an n below 1.
    """
    first = torch.full((len(n), 1), bos(letters))
    if int(n.min()) < 1:
        raise ValueError(f"n must be at least 1, got {int(n.min())}")
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
