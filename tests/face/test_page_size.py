"""A page about 12 × 12 heads at 512 tokens is small, and shows what it promises."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from ln_probe.exhibits import CELLS, Exhibits, PromptAttention, ScoreSums, bin_edges, pooled, to_bytes
from ln_probe.page.page import report_page
from ln_probe.recording import COMPONENTS, EXPLAINED, FULL_HEADS, PAIRS, plan
from ln_probe.report import Report

LIMIT = 6_000_000  # bytes; circuitsvis itself takes 63.8 MB for one layer
LAYERS, HEADS, TOKENS = 12, 12, 512


def made_up(rng: np.random.Generator) -> Exhibits:
    """Attention without any structure that could be compressed, in the amount that a report keeps."""
    kept, prompts, _ = plan([TOKENS] * 4, range(LAYERS), HEADS, 4)
    assert len(kept) == LAYERS
    hidden, edges = np.triu(np.ones((TOKENS, TOKENS), bool), 1), bin_edges(TOKENS)
    shape = (LAYERS, HEADS, TOKENS)
    shown = []
    for prompt, whole in prompts.items():
        cells, full = [], {}
        for layer in range(LAYERS):
            scores = np.where(hidden, -np.inf, 1.5 * rng.normal(size=(HEADS, TOKENS, TOKENS)))
            pattern = np.exp(scores - scores.max(-1, keepdims=True))
            pattern /= pattern.sum(-1, keepdims=True)
            cells.append(to_bytes(pooled(pattern, edges)))
            full[layer, layer] = to_bytes(pattern[layer])
        numbers = [rng.lognormal(-3, 2, size=shape).clip(0, 1).astype(np.float16) for _ in range(3)]
        verdicts = [rng.choice(2, size=shape, p=[0.9, 0.1]).astype(np.uint8) for _ in range(2)]
        one = PromptAttention(
            prompt, tuple(f" w{rng.integers(5000)}" for _ in range(TOKENS)), tuple(range(LAYERS)), tuple(range(HEADS)),
            edges, np.array(cells), verdicts[0], numbers[0], numbers[1], verdicts[1], numbers[2],
            to_bytes(rng.lognormal(-6, 1, size=shape).clip(0, 1)), full if whole else {},
            cells_frozen=np.array(cells)[:, ::-1].copy(),
        )  # fmt: skip
        shown.append(one)
    pairs = LAYERS * HEADS * (1 + PAIRS)

    def number(*shape: int) -> np.ndarray:
        return rng.normal(size=(pairs, *shape)).astype(np.float32)

    def index(*shape: int) -> np.ndarray:
        return rng.integers(0, LAYERS * HEADS, size=(pairs, *shape)).astype(np.int32)

    parts = tuple(f"L{a}H{b}" for a in range(LAYERS) for b in range(HEADS))
    places = [index() for _ in range(4)]
    sizes = [number() for _ in range(3)]
    components = index(2, COMPONENTS), number(2, COMPONENTS)
    sums = ScoreSums(0, EXPLAINED, parts, *places, *sizes, *components, number(2, 4))
    return Exhibits(tuple(shown), scores=(sums,))


@pytest.mark.slow
def test_without_structure_to_compress(report: Report) -> None:
    rng = np.random.default_rng(0)
    exhibits = replace(made_up(rng), samples=report.exhibits.samples * 5)
    shown = exhibits.of_prompt(0)
    assert shown.cells.shape == (LAYERS, HEADS, CELLS, CELLS)
    assert len(shown.full) >= FULL_HEADS == 12
    assert all(p.shape == (TOKENS, TOKENS) for p in shown.full.values())
    layer = report.heads[report.heads["layer"] == 0]
    heads = [layer.assign(layer=i, head=layer["head"] + 4 * j) for i in range(LAYERS) for j in range(3)]
    keys = pd.concat([report.keys] * 33, ignore_index=True)  # as many as 12 × 12 heads have
    numbers = keys.select_dtypes("float").columns
    keys[numbers] = rng.lognormal(size=(len(keys), len(numbers)))
    tables = {**report.tables, "heads": pd.concat(heads, ignore_index=True), "keys": keys}
    big = replace(report, tables=tables, exhibits=exhibits)
    assert len(keys) > 10_000
    page = report_page(big)
    assert len(page.encode()) <= LIMIT
