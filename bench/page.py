"""How large a report's page is and how soon it opens, in headless Chromium: 12 × 12 heads, one prompt of 512 tokens.

Attention is made up without structure, so it compresses worse than a model's; the rest is a bundled model's
on short prompts. Prints the medians of several visits; `--out FILE.csv` writes them, too.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from harness import chromium, write_table

import ln_probe
from ln_probe.exhibits import CELLS, Exhibits, PromptAttention, bin_edges, pooled, to_bytes

LAYERS, HEADS, TOKENS = 12, 12, 512
VISITS = 7


def made_up() -> Exhibits:
    """Patterns of random scores and random marks, a full pattern per layer."""
    rng = np.random.default_rng(0)
    hidden = np.triu(np.ones((TOKENS, TOKENS), bool), 1)
    cells = np.zeros((LAYERS, HEADS, CELLS, CELLS), np.uint8)
    frozen = np.zeros_like(cells)
    full = {}
    for layer in range(LAYERS):
        scores = np.where(hidden, -np.inf, 1.5 * rng.normal(size=(HEADS, TOKENS, TOKENS)))
        pattern = np.exp(scores - scores.max(-1, keepdims=True))
        pattern /= pattern.sum(-1, keepdims=True)
        cells[layer] = to_bytes(pooled(pattern, bin_edges(TOKENS)))
        full[layer, layer] = to_bytes(pattern[layer])
        frozen[layer] = cells[layer][::-1]  # as hard to compress: another head's
    shape = (LAYERS, HEADS, TOKENS)
    shares = [rng.lognormal(-3, 2, size=shape).clip(0, 1).astype(np.float16) for _ in range(3)]
    verdicts = [rng.choice(2, size=shape, p=[0.9, 0.1]).astype(np.uint8) for _ in range(2)]
    shown = PromptAttention(
        0,
        tuple(f" w{i}" for i in range(TOKENS)),
        tuple(range(LAYERS)),
        tuple(range(HEADS)),
        bin_edges(TOKENS),
        cells,
        verdicts[0],
        shares[0],
        shares[1],
        verdicts[1],
        shares[2],
        to_bytes(shares[2].astype(float)),
        full,
        cells_frozen=frozen,
    )
    return Exhibits((shown,))


def main(out: Annotated[Path | None, typer.Option(help="a CSV file for what is printed")] = None) -> None:
    model = ln_probe.load_model(ln_probe.bundled_models()[0])
    small = ln_probe.analyze(model, max_tokens=48, progress=False)
    report = replace(small, exhibits=replace(made_up(), samples=small.exhibits.samples))
    with tempfile.TemporaryDirectory() as folder, chromium() as browser:
        if browser is None:
            sys.exit("bench/page.py needs Chromium on the PATH")
        started = time.process_time()
        path = report.to_html(Path(folder, "page.html"))
        took, size = time.process_time() - started, path.stat().st_size / 1e6
        print(f"made in {took:.1f} s of processor time, {size:.2f} MB")
        rows = [("what", "value", "unit"), ("size", f"{size:.1f}", "MB"), ("made", f"{took:.1f}", "s")]
        found: dict[str, list[float]] = {"first paint": [], "loaded": [], "attention drawn": []}
        for _ in range(VISITS):
            page = browser.new_page()
            begun = time.perf_counter()
            page.goto(path.as_uri())
            paint, loaded = page.evaluate(
                "[performance.getEntriesByType('paint')[0]?.startTime ?? NaN,"
                " performance.getEntriesByType('navigation')[0].loadEventEnd]"
            )
            page.frame_locator("iframe.attention").locator("#pattern canvas").wait_for()
            found["attention drawn"].append(time.perf_counter() - begun)
            found["first paint"].append(paint / 1000)
            found["loaded"].append(loaded / 1000)
            page.close()
        for what, seconds in found.items():
            print(f"{what}: {statistics.median(seconds):.2f} s ({min(seconds):.2f}–{max(seconds):.2f})")
            rows.append((what, f"{statistics.median(seconds):.2f}", "s"))
    write_table(out, rows)


if __name__ == "__main__":
    typer.run(main)
