"""Does depth decide which L_k a transformer learns, and does the norm move the boundary?

After Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"): transformers of depth d should length-generalize on L_k for
k <= d + 2 and not beyond. Theirs is post-norm LayerNorm at d_model 256 or 512; here a small model with the norm as a
switch. The outcome is continuous: the share of words exactly right, over all lengths beyond the training's (`REACH`).
That scaling costs reach beyond the boundary was seen in the first seeds, and more were trained for it: what they show
alone is tested apart (`fresh_terms`). `depth_deep` goes on to depth 10 under LayerNorm, and to positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Int
from matplotlib.figure import Figure
from torch import Tensor, nn

from ln_probe.analyses.lab import results
from ln_probe.analyses.lab.crasp.compiler import last_block
from ln_probe.analyses.lab.crasp.crasp import parse
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.runs import carry_out, curves, diverged, planned
from ln_probe.analyses.lab.train import PAD, TrainConfig, Words, WordsTask, step_generator
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.analyses.probes.statistics import holm

Analyse = Callable[[pd.DataFrame, pd.DataFrame], dict[str, pd.DataFrame]]
Plot = Callable[[Mapping[str, pd.DataFrame]], dict[str, Figure]]
BOS, A, B = 0, 1, 2
D_VOCAB = 3


def sample_block_words(k: int, lengths: tuple[int, int], size: int, generator: torch.Generator) -> Words:
    """Words of L_k: a length uniform in `lengths` (both included), k - 1 distinct places of change, uniform.

    Returns:
        BOS and the word, padded on the right; 1 in the last block, 0 before it, PAD at BOS and padding.
    """
    low, high = lengths
    length = torch.randint(low, high + 1, (size, 1), generator=generator)
    place = torch.arange(1, high)  # a change at p: letter p (from 0) begins a new block
    order = torch.rand(size, high - 1, generator=generator).masked_fill(place >= length, torch.inf)
    changes = torch.zeros(size, high, dtype=torch.long)
    chosen = order.argsort(dim=1)[:, : k - 1]
    changes[:, 1:].scatter_(1, chosen, 1)
    block = changes.cumsum(1)  # from 0
    inside = torch.arange(high) < length
    letters = torch.where(block % 2 == 0, A, B).masked_fill(~inside, A)
    labels = (block == k - 1).long().masked_fill(~inside, PAD)
    return (
        torch.cat([torch.full((size, 1), BOS), letters], dim=1),
        torch.cat([torch.full((size, 1), PAD), labels], dim=1),
    )


def exact_match(predicted: Int[Tensor, "word pos"], labels: Int[Tensor, "word pos"]) -> Bool[Tensor, " word"]:
    """Whether every label of a word is right, the published measure."""
    return ((predicted == labels) | (labels == PAD)).all(dim=1)


def predicted_depth(k: int) -> int:
    """The depth of the C-RASP program that labels the last block of L_k: what the theory says a transformer needs."""
    return parse(last_block(k)).depth


TRAIN_LENGTHS = (51, 100)
BINS = (TRAIN_LENGTHS, (101, 150), (151, 200), (201, 250))  # up to 2.5 times the training length
EVALUATION_WORDS = 500  # per bin: a standard error of at most 2.3 points
EVALUATION_SEED = 10_000  # apart from every training seed
KEYS = ("depth", "k", "norm", "norm_order", "positions")


class BlockTask(WordsTask):
    """Label the last block of words of L_k; loss per letter, measured as exact match per length bin.

    Args:
        k: blocks.
        words: per bin (BINS; the first is trained on) that are measured.
    """

    name = "depth"
    answers = 2

    def __init__(self, k: int, words: int = EVALUATION_WORDS) -> None:
        self.k, self.words = k, words
        sample_block_words(k, TRAIN_LENGTHS, 1, torch.Generator())  # raises what is wrong with k

    @property
    def identity(self) -> dict[str, Any]:
        return {"k": self.k, "lengths": TRAIN_LENGTHS, "bins": BINS, "words": self.words}

    def batch(self, step: int, size: int, seed: int) -> Words:
        return sample_block_words(self.k, TRAIN_LENGTHS, size, step_generator(seed, step))

    @cached_property
    def _evaluation(self) -> dict[tuple[int, int], Words]:
        return {b: sample_block_words(self.k, b, self.words, step_generator(EVALUATION_SEED, b[0])) for b in BINS}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {
            measure(lengths): float(exact_match(self.logits(model, words).argmax(-1), labels).float().mean())
            for lengths, (words, labels) in self._evaluation.items()
        }


def measure(lengths: tuple[int, int]) -> str:
    """The name under which a bin's exact match stands in the tables."""
    return f"exact_match_{lengths[0]}_{lengths[1]}"


@dataclass(frozen=True)
class Cell:
    """One square of the grid."""

    depth: int
    k: int
    norm: str = "layernorm"
    norm_order: Literal["pre", "post"] = "post"
    positions: Literal["learned", "none", "sinusoidal", "rotary", "alibi"] = "none"

    def spec(self) -> LabConfig:
        """The published shape, smaller: one head, ReLU, torch's initialization; the final norm only in pre-norm."""
        return LabConfig(
            n_layers=self.depth, d_model=64, n_heads=1, d_mlp=256, d_vocab=D_VOCAB, n_ctx=BINS[-1][1] + 1,
            norm=self.norm, norm_mlp=self.norm, norm_final=self.norm if self.norm_order == "pre" else None,
            norm_order=self.norm_order, positions=self.positions, tied=False, act_fn="relu", init="torch",
        )  # fmt: skip


HIT = 0.99  # the threshold of a hit
REACH = "reach"  # mean exact match over the bins beyond the training lengths
WITHIN, BEYOND = "within", "beyond"  # of what the theory says this depth suffices for
ALL_DEPTHS, BOTH = "all", "both"
CHOSEN_SEEDS = 3  # that had been seen when more were trained, to look at scaling beyond the boundary
# Norms with a term and without it, the other term held: with it, without it.
TERMS = {
    "scaling": (("layernorm", "projection_only"), ("scaling_only", "none")),
    "projection": (("layernorm", "scaling_only"), ("projection_only", "none")),
}

# Exact match in % at lengths 351-400 after training on 201-250 (1.6 times the longest training word), by depth
# 1, 2, 3, …: the published table of this bin. One seed, the best of four configurations, blocks with a third norm.
PUBLISHED = {
    3: (100, 100, 100, 100, 100, 100), 4: (22, 100, 100, 100, 100, 100), 5: (11, 51, 100, 100, 100, 100),
    6: (10, 8, 37, 100, 98, 100), 7: (8, 8, 20, 49, 100, 100), 8: (5, 6, 19, 52, 75, 95),
    10: (2, 2, 2, 6, 12, 49, 77, 96, 96, 98), 12: (0, 0, 0, 1, 2, 4, 21, 30, 27, 62),
}  # fmt: skip
PUBLISHED_BIN = (151, 200)  # ours that lies farthest out while still at or beyond theirs
PUBLISHED_MODELS = "post-norm, d_model 256 or 512; one seed, the best of four configurations, blocks with a third norm"


def analyse(frame: pd.DataFrame, failed: pd.DataFrame | None = None) -> dict[str, pd.DataFrame]:
    """Make the tables of the exact match of every run; `failed` are KEYS and seed of those that diverged (misses)."""
    values = frame.drop(columns="step", errors="ignore")
    terms = {"terms": term_effects(values), "terms_fresh": fresh_terms(values)}
    return {"summary": summarized(values), "exact_match": frame, "hits": hit_rates(frame, failed), **terms}


def summarized(values: pd.DataFrame) -> pd.DataFrame:
    """Shares over seeds for every cell and bin, with the depth that the theory predicts."""
    summary = results.summarize(values, [*KEYS, "measure"], published_table(), kind="share")
    summary.insert(len(KEYS), "predicted_depth", summary["k"].map(predicted_depth))
    return summary


def published_table() -> pd.DataFrame:
    """The published exact match (0-1), beside our bin 151-200 of the same shape of model."""
    rows = [
        (depth, k, "layernorm", "post", "none", measure(PUBLISHED_BIN), percent / 100)
        for k, percents in PUBLISHED.items()
        for depth, percent in enumerate(percents, start=1)
    ]
    return pd.DataFrame(rows, columns=[*KEYS, "measure", "published"])


def hit_rates(table: pd.DataFrame, failed: pd.DataFrame | None = None) -> pd.DataFrame:
    """How many seeds generalize to every bin of a cell, with an exact 95 % interval (Clopper-Pearson).

    A hit has HIT or more in its worst bin; runs in `failed` have none. `predicted`: the theory says the depth suffices.
    """
    worst = cast("pd.DataFrame", table.groupby([*KEYS, "seed"], sort=False, as_index=False)["value"].min())
    if failed is not None and len(failed):
        worst = pd.concat([worst, failed.assign(value=0.0)], ignore_index=True)
    rows = []
    for key, part in worst.groupby(list(KEYS), sort=False):
        hits, seeds = int((part["value"] >= HIT).sum()), len(part)
        predicted = _side(part).iloc[0] == WITHIN
        interval = results.binomial_interval(hits, seeds)
        rows.append((*cast("tuple[Any, ...]", key), predicted, hits, seeds, hits / seeds, *interval))
    return pd.DataFrame(rows, columns=[*KEYS, "predicted", "hits", "seeds", "rate", "low", "high"])


def _side(frame: pd.DataFrame) -> pd.Series:
    return frame["k"].map(predicted_depth).le(frame["depth"]).map({True: WITHIN, False: BEYOND})


def term_effects(values: pd.DataFrame) -> pd.DataFrame:
    """What a norm term changes in REACH on each side of the boundary, at each depth and over all depths.

    A unit is a pair of runs of one seed, depth and order that differ in this term alone (two pairs: with the other term
    and without). Intervals are Student's t over seeds that have all depths and orders, of the mean over a seed's
    `units`. Only rows over all depths are tested: `p` is of the same t, and `p_holm` over these rows.
    """
    plain = values[(values["positions"] == "none") & (values["measure"] != measure(TRAIN_LENGTHS))]
    reach = cast("pd.DataFrame", plain.groupby([*KEYS, "seed"], sort=False, as_index=False)["value"].mean())
    index = ["norm_order", "side", "depth", "seed"]
    wide = reach.assign(side=_side(reach)).pivot(index=index, columns="norm", values="value")
    rows: list[tuple[Any, ...]] = []
    for term, pairs in TERMS.items():
        change = results.differences(wide, {have: (have, lack) for have, lack in pairs}, "pair")
        change["own_order"] = change["norm_order"]
        both = change.assign(norm_order=BOTH) if change["norm_order"].nunique() > 1 else change[:0]
        for key, part in pd.concat([change, both]).groupby(["norm_order", "side"], sort=False):
            order, side = cast("tuple[str, str]", key)
            groups = [(str(depth), one) for depth, one in part.groupby("depth")] if order != BOTH else []
            for depth, one in [*groups, (ALL_DEPTHS, part)]:
                pairs_by_seed = one.pivot(index="seed", columns=["own_order", "depth", "pair"], values="value")
                complete = pairs_by_seed.dropna()
                seeds = complete.mean(axis=1).to_numpy(float)
                p = results.paired_p(seeds) if depth == ALL_DEPTHS and len(seeds) else np.nan
                center = results.interval(seeds) if len(seeds) else (float(one["value"].mean()), np.nan, np.nan)
                rows.append((term, order, side, depth, REACH, *center, len(seeds), complete.size or len(one), p))
    columns = ["term", "norm_order", "side", "depth", "outcome", "mean", "ci_low", "ci_high", "seeds", "units", "p"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(p_holm=holm(table["p"].to_numpy(float)))


def fresh_terms(values: pd.DataFrame) -> pd.DataFrame:
    """`term_effects` beyond the boundary over the seeds trained after the first had been seen.

    Holm's p is over these alone: two terms in each order. Empty without such seeds.
    """
    later = values[values["seed"] >= CHOSEN_SEEDS]
    terms = term_effects(later if len(later) else values)
    tested = results.select(terms, depth=ALL_DEPTHS, side=BEYOND, norm_order=["post", "pre"])
    fresh = tested[: len(tested) * bool(len(later))].reset_index(drop=True)
    return fresh.assign(p_holm=holm(fresh["p"].to_numpy(float)))


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Words right in the farthest bin by k and depth; curves over length of the post-norm runs."""
    summary = tables["summary"]
    far = results.select(summary, measure=measure(BINS[-1]), positions="none")
    post = results.select(summary, norm_order="post", positions="none")
    axes: dict[str, Any] = {"ylim": (0, 1.05), "ylabel": "exact match"}
    return {
        "boundary": results.line_panels(far, ["norm_order", "norm"], "k", "depth", published=False, **axes),
        "lengths": length_curves(post, "norm"),
    }


def length_curves(part: pd.DataFrame, by: str) -> Figure:
    """Exact match over length: a panel per (depth, k), a line per value of the column `by`; crosses are published."""
    middles = {measure(lengths): sum(lengths) / 2 for lengths in BINS}
    named = part.assign(letters=part["measure"].map(middles), language=part["k"].map("L{}".format))
    return results.line_panels(named, ["depth", "language"], "letters", by, ylim=(0, 1.05))


def grid(quick: bool) -> tuple[Cell, ...]:
    """What is trained: either side of the theory's boundary (k = depth + 2, depth + 3), cheapest first.

    "none" divides by a constant in the norm's place, so that it has an order too.
    """
    if quick:
        return tuple(Cell(1, k, norm) for norm in NORM_KINDS for k in (3, 4))
    squares = [
        Cell(depth, depth + beyond, norm, order)
        for order in ("post", "pre")
        for depth in (1, 2, 3)
        for beyond in (2, 3)
        for norm in NORM_KINDS
    ]
    positions = [Cell(2, k, positions=p) for p in ("rotary", "alibi") for k in (4, 5)]
    return (*squares, *positions)


def training(quick: bool) -> TrainConfig:
    """The schedule of every run."""
    steps = 300 if quick else 2000
    return TrainConfig(steps=steps, batch=32, lr=1e-3, lr_end=1e-5, warmup=100, clip=1.0, evaluate_every=steps)


def _run(
    request: Request, cells: Iterable[Cell], schedule: TrainConfig, words: int, analyse: Analyse, plot: Plot
) -> results.Results:
    """Train a run per seed and cell, each bin measured on so many words, and make tables and figures of them."""
    runs = planned(
        cells,
        request,
        task=lambda cell, _: BlockTask(cell.k, words),
        training=lambda _, seed: replace(schedule, seed=seed),
    )
    lost = carry_out(runs, request)
    failed = pd.DataFrame([{**run.keys, "seed": run.seed} for run in runs if run.name in diverged(runs)])
    tables = analyse(results.select(curves(runs), measure=[measure(b) for b in BINS]), failed)
    settings = {"training": vars(schedule), "published": PUBLISHED_MODELS}
    return results.Results(tables, plot(tables), settings, lost)


def run(request: Request) -> results.Results:
    """Train the missing runs of the grid and compare the norms on either side of the boundary."""
    words = 200 if request.quick else EVALUATION_WORDS
    return _run(request, grid(request.quick), training(request.quick), words, analyse, plot)


POSITIONS = ("none", "rotary", "alibi")
DEPTHS = tuple(range(4, 11))


def deep_grid(quick: bool) -> tuple[Cell, ...]:
    """Either side of the boundary at DEPTHS, k up to 12; with rotary and ALiBi positions depth 4 on L6 alone."""
    if quick:
        return (Cell(4, 6), Cell(4, 7), Cell(10, 12))
    squares = [Cell(d, k) for d in DEPTHS for k in (d + 2, d + 3) if k <= DEPTHS[-1] + 2]
    return (*squares, *(Cell(4, 6, positions=p) for p in ("rotary", "alibi")))


def run_deep(request: Request) -> results.Results:
    """`run` at DEPTHS under LayerNorm."""
    schedule, words = training(request.quick), 100 if request.quick else EVALUATION_WORDS
    if request.quick:
        schedule = replace(schedule, steps=60, warmup=15, evaluate_every=60)
    return _run(request, deep_grid(request.quick), schedule, words, analyse_deep, plot_deep)


def plot_deep(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Exact match over length."""
    return {"deep": length_curves(tables["summary"], "positions")}


def analyse_deep(frame: pd.DataFrame, failed: pd.DataFrame | None = None) -> dict[str, pd.DataFrame]:
    """As `analyse`, of DEPTHS."""
    values = frame.drop(columns="step", errors="ignore")
    return {
        "summary": summarized(values),
        "exact_match": frame,
        "hits": hit_rates(frame, failed),
        "contrasts": reach_contrasts(values),
    }


def reach_contrasts(values: pd.DataFrame) -> pd.DataFrame:
    """What one block, one layer or positions change in REACH (mean exact match beyond the training lengths).

    Differences between runs of one seed, Holm's p over all: a depth on its longest language within reach minus one
    block more; a language with one layer more minus without it; rotary and ALiBi positions minus none.
    """
    far = values[values["measure"] != measure(TRAIN_LENGTHS)]
    reach = far.pivot_table(index="seed", columns=["depth", "k", "positions"], values="value", sort=False)
    none = POSITIONS[0]
    pairs = {f"depth {d}: L{d + 2} minus L{d + 3}": ((d, d + 2, none), (d, d + 3, none)) for d in DEPTHS[:-1]}
    pairs |= {f"L{d + 3}: depth {d + 1} minus {d}": ((d + 1, d + 3, none), (d, d + 3, none)) for d in DEPTHS[:-1]}
    pairs |= {f"depth 4, L6: {p} positions minus none": ((4, 6, p), (4, 6, none)) for p in POSITIONS[1:]}
    return results.contrasted(results.differences(reach, pairs), ["contrast"], (-1.0, 1.0))
