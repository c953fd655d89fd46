"""The data of the majority task: bags of classes of which one leads, as counts.

After Brody, Alon & Yahav 2023 (section 4.1 and their published set-up): the counts are partitions of the length, in
the order of a random depth-first search, ten examples for each with classes drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt8

from ln_probe.analyses.lab.majority.bags.loss import Bags

PER_PARTITION = 10  # published
LONGEST = 255  # counts are bytes
TRAIN_SHARE = 0.8  # published; of the examples of every class


@dataclass(frozen=True)
class MajoritySize:
    """Sizes of the task; the defaults are the published ones."""

    classes: int = 20
    length: int = 50
    margin: int = 6  # how often the majority class must occur more than the next
    examples: int = 100_000

    def __post_init__(self) -> None:
        if min(self.classes, self.length, self.examples) < 2 or not 1 <= self.margin <= self.length <= LONGEST:
            raise ValueError(
                f"majority needs 2 or more classes and examples, a length of 2 to {LONGEST} and a margin of 1 to the "
                f"length, got {self}"
            )


def partitions(total: int, smallest: int, parts: int, rng: np.random.Generator) -> Iterator[tuple[int, ...]]:
    """Ways to write `total` as at most `parts` ascending numbers of at least `smallest`, depth first.

    At every level the next number is tried in random order, as in the published data: examples are then not a uniform
    sample of all partitions, but those under whichever first numbers came up.
    """
    if total == 0:
        yield ()
        return
    if parts == 1:
        if total >= smallest:
            yield (total,)
        return
    for number in rng.permutation(np.arange(smallest, total + 1)).tolist():
        left = total - number
        if left == 0 or left >= number:
            for rest in partitions(left, number, parts - 1, rng):
                yield (number, *rest)


def _examples(rng: np.random.Generator, size: MajoritySize) -> UInt8[np.ndarray, "example token"]:
    """Counts of every example: partitions of the length, and for each, ten draws of which class has which count."""
    rows = []
    for parts in partitions(size.length, 1, min(size.length, size.classes), rng):
        if len(parts) == 1 or parts[-1] - parts[-2] < size.margin:
            continue
        for _ in range(PER_PARTITION):
            row = np.zeros(size.classes, np.uint8)
            row[rng.permutation(size.classes)[: len(parts)]] = parts
            rows.append(row)
        if len(rows) > size.examples:
            break
    return np.stack(rows)


def make_data(seed: int, size: MajoritySize) -> tuple[Bags, Bags]:
    """Training and test examples: 80 % and 20 % of every class (the counts of a test example may be among the others').

    Args:
        seed: of the search, of the classes and of the split.
        size: sizes.
    """
    rng = np.random.default_rng([seed, 0])
    counts = _examples(rng, size)
    label = counts.argmax(1).astype(np.uint8)
    train: list[Int64[np.ndarray, " part"]] = []
    test: list[Int64[np.ndarray, " part"]] = []
    for wanted in np.unique(label):
        where = rng.permutation(np.flatnonzero(label == wanted))
        cut = round(TRAIN_SHARE * len(where))
        train.append(where[:cut])
        test.append(where[cut:])
    return (
        Bags(counts, label, np.sort(np.concatenate(train))),
        Bags(counts, label, np.sort(np.concatenate(test))),
    )
