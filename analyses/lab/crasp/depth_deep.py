"""Depths 4 to 10 on L6 to L12, with and without positions, at the size and with the schedule of `depth`.

The depth experiment (`depth`) ends at depth 3. The norm is LayerNorm alone here: what is asked is whether the boundary
k = depth + 2 of Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP") goes on, and what rotary or ALiBi positions
change within it. The grid is the two squares on either side of the boundary, k up to 12; `CUT` says what is not
trained.

Hypothesis for depths 7 to 10, written down before their runs (those of 4 to 6 had been seen): with one block more than
the theory allows the reach is lower, at every depth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from ln_probe.analyses.lab.crasp import depth
from ln_probe.analyses.lab.crasp.depth_task import BINS, EVALUATION_WORDS, Cell, measure
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, contrasted, differences, doubt, interval_text
from ln_probe.analyses.lab.train import TrainConfig
from ln_probe.analyses.text import counted

QUICK_STEPS, QUICK_WORDS = 60, 100
POSITIONS = ("none", "rotary", "alibi")
DEPTHS = tuple(range(4, 11))
CUT = (
    "the norms other than LayerNorm, and pre-norm order",
    "squares farther than one from the boundary, and depth 10 on L13",
    "rotary and ALiBi positions beyond the boundary, and at depths 5 to 10",
)


def grid(quick: bool) -> tuple[Cell, ...]:
    """What is trained: either side of the boundary; with rotary and ALiBi positions depth 4 on L6 alone."""
    if quick:
        return (Cell(4, 6), Cell(4, 7), Cell(10, 12))
    squares = [Cell(d, k) for d in DEPTHS for k in (d + 2, d + 3) if k <= DEPTHS[-1] + 2]
    return (*squares, *(Cell(4, 6, positions=p) for p in ("rotary", "alibi")))


def training(quick: bool, seed: int) -> TrainConfig:
    """`depth`'s schedule; quick: with fewer steps."""
    whole = depth.training(quick, seed)
    if not quick:
        return whole
    return replace(whole, steps=QUICK_STEPS, warmup=QUICK_STEPS // 4, evaluate_every=QUICK_STEPS)


def run(request: Request) -> Results:
    """Train the missing runs of the grid and report on which side of the boundary words are labelled correctly."""
    words, name = QUICK_WORDS if request.quick else EVALUATION_WORDS, "{positions}-L{k}-depth{depth}"
    table, failed, lost = depth.exact_matches(grid(request.quick), request, training, words, name)
    return replace(findings(table, request.quick, failed), diverged=lost)


def findings(table: pd.DataFrame, quick: bool = False, failed: pd.DataFrame | None = None) -> Results:
    """Tables, figures and sentences from the exact match of every run; `failed` are those that diverged (misses)."""
    values = table.drop(columns="step", errors="ignore")
    hits, contrasts = depth.hit_rates(table, failed), reach_contrasts(values)
    summary = depth.summarized(values, depth.published_table())
    return Results(
        summary,
        tables={"exact_match": table, "hits": hits, "contrasts": contrasts},
        figures={} if table.empty else {"deep": depth.length_curves(summary, "positions", 4)},
        conclusions=(*_boundary(table, failed), *_contrast_sentences(contrasts)),
        settings={
            "bins": BINS,
            "hit": depth.HIT,
            "model": Cell(4, 6).spec().to_dict(),
            "training": vars(training(quick, 0)),
            "seeds": sorted({int(seed) for seed in table["seed"]}),
            "cut": CUT,
            "published": "exact match at 1.4 to 1.6 times the longest training word (351-400 letters); post-norm, "
            "d_model 256 or 512; one seed, the best of four configurations, blocks with a third norm",
        },
    )


def reach_contrasts(values: pd.DataFrame) -> pd.DataFrame:
    """What one block, one layer or positions change in REACH (mean exact match beyond the training lengths).

    Returns:
        `contrast` (as text), and what `contrasted` gives of differences between runs of one seed, Holm's p over all:
        a depth on its longest language within reach minus one block more; a language with one layer more minus without
        it; rotary and ALiBi positions minus none.
    """
    far = values[values["measure"] != measure(BINS[0])]
    reach = far.pivot_table(index="seed", columns=["depth", "k", "positions"], values="value", sort=False)
    none = POSITIONS[0]
    pairs = {f"depth {d}: L{d + 2} minus L{d + 3}": ((d, d + 2, none), (d, d + 3, none)) for d in DEPTHS[:-1]}
    pairs |= {f"L{d + 3}: depth {d + 1} minus {d}": ((d + 1, d + 3, none), (d, d + 3, none)) for d in DEPTHS[:-1]}
    pairs |= {f"depth 4, L6: {p} positions minus none": ((4, 6, p), (4, 6, none)) for p in POSITIONS[1:]}
    return contrasted(differences(reach, pairs), ["contrast"], (-1.0, 1.0))


def _boundary(table: pd.DataFrame, failed: pd.DataFrame | None) -> Iterator[str]:
    """On either side, how many runs are right in every bin, and what their worst bins have; intervals over seeds."""
    for positions, part in depth.worst_bins(table, failed).groupby("positions", sort=False):
        where = "without positions" if positions == "none" else f"{positions} positions"
        depths = sorted(set(part["depth"]))
        shown = f"depth{'s' if len(depths) > 1 else ''} {', '.join(map(str, depths))}"
        hit = f"at least {depth.HIT:.0%} right in every bin to {BINS[-1][1]} letters"
        yield f"{where}, {shown}: {hit} in {'; '.join(depth.sides(part, ends=True))}."


def _contrast_sentences(contrasts: pd.DataFrame) -> Iterator[str]:
    for row in contrasts.to_dict("records"):
        told = doubt(row).removeprefix(": ") or f"Holm {row['p_holm']:.2g}"
        yield (
            f"{row['contrast']}: {interval_text(row, '+.1f', 100)} points of {depth.REACH} "
            f"({counted(row['seeds'], 'seed')}; {told})."
        )
