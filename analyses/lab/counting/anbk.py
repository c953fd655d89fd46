"""Does an LSTM tag a^n b^2n by where the count is close to n, and go on to longer words?

After the code released with Merrill et al. 2020 (the reader "anbk" and the first configuration that uses it; nothing of
it is in the publication, and the note left with it says that the LSTM does not learn the task). n is even. Every a is
tagged 0, of the 2n b's the n in the middle 1. So the tag is 1 while the difference between the numbers of a's and b's
is at most n/2 either way: an absolute value. The easier form, also released, keeps 1 to the end and needs a threshold.

As released: an LSTM of 10 hidden units, n = 2 … 298 in training and 310 … 318 in the test, batches of 16 words of
similar length, Adam at 1e-3, 100 epochs (1000 updates); the release stops earlier if 10 epochs bring nothing. A second
rate is the one `counting` takes.

Hypotheses, written down before the runs: at 1e-3 no word of the test is tagged right at every letter in either form;
at 1e-2 the share of tags that are right on the test is higher for the threshold than for the absolute value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn

from ln_probe.analyses.lab.counting.counting_tasks import PREFIX_VOCABULARY
from ln_probe.analyses.lab.counting.recurrent import RecurrentConfig
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, contrasted, differences, summarize
from ln_probe.analyses.lab.train import (
    ADAM,
    PAD,
    TrainConfig,
    Words,
    WordsTask,
    carry_out,
    curves,
    planned,
    step_generator,
)

ABSOLUTE, THRESHOLD = "absolute value", "threshold"
CONSTANT = {ABSOLUTE: 2 / 3, THRESHOLD: 1 / 2}  # tags that a constant answer has right
RATES = (1e-3, 1e-2)
TRAINED, TESTED = torch.arange(2, 300, 2), torch.arange(310, 320, 2)
UPDATES, QUICK_UPDATES = 1000, 60
KEYS = ["form", "lr"]
TAGS, WORDS, TRAINED_TAGS = "tags right, n 310 to 318", "words right, n 310 to 318", "tags right, n 2 to 298"


def tagged_words(n: Int[Tensor, " word"], form: str) -> Words:
    """The words a^n b^2n (a is 0, b is 1) and their tags, padded on the right (tags PAD)."""
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
        return {"form": self.form, "trained": TRAINED.tolist(), "tested": TESTED.tolist()}

    def batch(self, step: int, size: int, seed: int) -> Words:
        """Words of neighboring n."""
        first = int(torch.randint(len(TRAINED) - size + 1, (), generator=step_generator(seed, step)))
        return tagged_words(TRAINED[first : first + size], self.form)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        found = {}
        for name, n in ((TRAINED_TAGS, TRAINED[::8]), (TAGS, TESTED)):
            tokens, tags = tagged_words(n, self.form)
            right, there = model(tokens).argmax(-1) == tags, tags != PAD
            found[name] = float(right[there].double().mean())
        return found | {WORDS: float((right | ~there).all(1).double().mean())}


@dataclass(frozen=True)
class Cell:
    form: str
    lr: float

    def spec(self) -> RecurrentConfig:
        return RecurrentConfig("lstm", PREFIX_VOCABULARY, 2)


def run(request: Request) -> Results:
    runs = planned(
        [Cell(form, lr) for lr in RATES for form in CONSTANT],
        request,
        name=lambda cell: f"{cell.form.replace(' ', '_')}-lr{cell.lr:g}",
        task=lambda cell, _: AnbkTask(cell.form),
        training=lambda cell, seed: training(request.quick, seed, cell.lr),
    )
    lost = carry_out(runs, request)
    table = curves(runs)
    return replace(findings(table[table["measure"].isin([TRAINED_TAGS, TAGS, WORDS])], request.quick), diverged=lost)


def training(quick: bool, seed: int, lr: float) -> TrainConfig:
    """Adam at a constant rate, as released."""
    updates = QUICK_UPDATES if quick else UPDATES
    return TrainConfig(
        steps=updates,
        batch=16,
        lr=lr,
        schedule="constant",
        warmup=0,
        clip=0.0,
        seed=seed,
        evaluate_every=updates // 5,
        **ADAM,
    )


def findings(values: pd.DataFrame, quick: bool = False) -> Results:
    """Tables from what every run has right: KEYS, `seed`, `step`, `measure`, `value`."""
    last = values[values["step"] == values.groupby([*KEYS, "seed"])["step"].transform("max")]
    summary = summarize(last, [*KEYS, "measure"], kind="share")
    wide = last[last["measure"] == TAGS].pivot_table(index=["seed", "lr"], columns="form", values="value")
    pairs = differences(wide, {f"{THRESHOLD} minus {ABSOLUTE}": (THRESHOLD, ABSOLUTE)})
    changed = contrasted(pairs, ["contrast", "lr"], (-1.0, 1.0))
    return Results(
        summary,
        tables={"values": values, "contrasts": changed},
        settings={
            "training": {f"lr {lr:g}": vars(training(quick, 0, lr)) for lr in RATES},
            "constant_answer": CONSTANT,
            "seeds": sorted({int(seed) for seed in values["seed"]}),
        },
    )
