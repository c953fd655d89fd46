"""The depth experiments: words of L_k and their labels, grids, hit rates, positions paired by seed, and runs."""

from __future__ import annotations

import re

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ln_probe.analyses.lab.crasp import compiler, depth
from ln_probe.analyses.lab.crasp.crasp import parse
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
