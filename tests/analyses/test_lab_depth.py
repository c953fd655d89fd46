"""The depth experiments: words of L_k and their labels, grids, hit rates, positions paired by seed, and runs."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ln_probe.analyses.lab.crasp import compiler, depth
from ln_probe.analyses.lab.crasp.crasp import parse
from ln_probe.analyses.lab.crasp.depth import hit_rates
from ln_probe.analyses.lab.train import PAD


@settings(max_examples=30, deadline=None)
@given(k=st.integers(1, 6), extra=st.integers(0, 8), spread=st.integers(0, 6), seed=st.integers(0, 99))
def test_samples_are_words_of_the_language_labelled_as_the_program_does(
    k: int, extra: int, spread: int, seed: int
) -> None:
    low, high = k + extra, k + extra + spread
    words = depth.sample_block_words(k, (low, high), 20, torch.Generator().manual_seed(seed))
    pattern = re.compile("".join(f"{compiler.block_symbol(block)}+" for block in range(1, k + 1)))
    program = parse(compiler.last_block(k))
    for tokens, labels in zip(*(part.tolist() for part in words), strict=True):
        length = sum(label != PAD for label in labels)
        assert low <= length <= high
        assert tokens[0] == depth.BOS
        assert labels[0] == PAD
        assert set(labels[1 + length :]) <= {PAD}
        word = "".join(" ab"[t] for t in tokens[1 : 1 + length])
        assert pattern.fullmatch(word), word
        assert labels[1 : 1 + length] == [int(x) for x in program.run(word)]


def test_hit_rates() -> None:
    rows = [
        (1, k, "layernorm", "post", "none", seed, depth.measure(lengths), value)
        for k, seed, values in ((3, 0, (1, 1, 1, 0.99)), (3, 1, (1, 1, 1, 0.98)), (4, 0, (0.4, 0.3, 0.2, 0.1)))
        for lengths, value in zip(depth.BINS, values, strict=True)
    ]
    table = pd.DataFrame(rows, columns=[*depth.KEYS, "seed", "measure", "value"])
    hits = hit_rates(table).set_index("k")
    assert hits[["predicted", "hits", "seeds"]].to_numpy().tolist() == [[True, 1, 2], [False, 0, 1]]
    # Clopper-Pearson of 1 out of 2 by hand: 1 - (1 - p)^2 = 0.025 at the lower end, p^2 = ... by symmetry above
    assert hits.loc[3, "low"] == pytest.approx(1 - np.sqrt(0.975), abs=1e-9)
    assert hits.loc[3, "high"] == pytest.approx(np.sqrt(0.975), abs=1e-9)
    failed = pd.DataFrame([(1, 3, "layernorm", "post", "none", 2)], columns=[*depth.KEYS, "seed"])
    assert hit_rates(table, failed).set_index("k").loc[3, ["hits", "seeds"]].tolist() == [1, 3]
