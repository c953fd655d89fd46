"""Does depth decide which L_k a transformer learns, and does the norm move the boundary?

After Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"): transformers of depth d should length-generalize on L_k for
k <= d + 2 and not beyond. Theirs is post-norm LayerNorm at d_model 256 or 512; here a small model (d_model 64, MLP 256,
one head, no positions, words of 51 to 100 letters in training) with the norm as a switch: every norm of the model is of
the same kind, in post- and in pre-norm order. The theory's prediction is the depth of a C-RASP program.

What the depth runs show: where the boundary lies and at which threshold, and what each norm term costs beyond it.

The outcome is continuous: the share of words exactly right, at each length and over all lengths beyond the training's
(`REACH`). Whether a run "generalizes" needs a threshold, so it is swept. What scaling or projection changes is tested
over all depths of a side at once, from pairs of runs of one seed that differ in it alone: as many as there are seeds.
Runs of one seed at several depths are no independent trials either: shares of runs have intervals over seeds.

That scaling costs reach beyond the boundary was seen in the first seeds, and more were trained for it: what they tell
by themselves is tested apart (`fresh_terms`).

`depth_deep` asks under LayerNorm alone whether the boundary goes on at depths 4 to 10 (L6 to L12), and what rotary or
ALiBi positions change within it. Hypothesis for depths 7 to 10, written down before their runs (those of 4 to 6 had
been seen): with one block more than the theory allows the reach is lower, at every depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ln_probe.analyses.lab.crasp.depth_task import (
    BINS,
    EVALUATION_WORDS,
    KEYS,
    TRAIN_LENGTHS,
    BlockTask,
    Cell,
    measure,
    predicted_depth,
)
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import (
    Results,
    binomial_interval,
    contrasted,
    differences,
    effects,
    heat_map,
    interval,
    paired_p,
    panels,
    select,
    summarize,
)
from ln_probe.analyses.lab.train import TrainConfig, carry_out, curves, diverged, planned
from ln_probe.analyses.probes.statistics import holm

HIT = 0.99  # the threshold of a hit; `sweep` shows what the others would say
THRESHOLDS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0)
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
    3: (100, 100, 100, 100, 100, 100),
    4: (22, 100, 100, 100, 100, 100),
    5: (11, 51, 100, 100, 100, 100),
    6: (10, 8, 37, 100, 98, 100),
    7: (8, 8, 20, 49, 100, 100),
    8: (5, 6, 19, 52, 75, 95),
    10: (2, 2, 2, 6, 12, 49, 77, 96, 96, 98),
    12: (0, 0, 0, 1, 2, 4, 21, 30, 27, 62),
}
PUBLISHED_BIN = (151, 200)  # ours that lies farthest out while still at or beyond theirs
PUBLISHED_MODELS = "post-norm, d_model 256 or 512; one seed, the best of four configurations, blocks with a third norm"


def findings(table: pd.DataFrame, quick: bool = False, failed: pd.DataFrame | None = None) -> Results:
    """Tables and figures from the exact match of every run; `failed` are those that diverged (misses)."""
    values = table.drop(columns="step", errors="ignore")
    hits, swept = hit_rates(table, failed), sweep(table)
    terms, fresh = term_effects(values), fresh_terms(values)
    summary = summarized(values)
    return Results(
        summary,
        tables={
            "exact_match": table,
            "hits": hits,
            "sweep": swept,
            "terms": terms,
            "terms_fresh": fresh,
            "effects": effects(values, [*KEYS, "measure"], ["norm"]),
        },
        figures=_figures(summary),
        settings={
            "train_lengths": TRAIN_LENGTHS,
            **_settings(table, Cell(1, 3), training(quick, 0)),
            "published": f"exact match at 351-400 letters after training on 201-250; {PUBLISHED_MODELS}",
        },
    )


def _settings(table: pd.DataFrame, cell: Cell, schedule: TrainConfig) -> dict[str, Any]:
    return {
        "bins": BINS,
        "hit": HIT,
        "model": cell.spec().to_dict(),
        "training": vars(schedule),
        "seeds": sorted({int(seed) for seed in table["seed"]}),
    }


def summarized(values: pd.DataFrame) -> pd.DataFrame:
    """Shares over seeds for every cell and bin, with the depth that the theory predicts."""
    summary = summarize(values, [*KEYS, "measure"], published_table(), kind="share")
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


def worst_bins(table: pd.DataFrame, failed: pd.DataFrame | None = None) -> pd.DataFrame:
    """What every run has in its worst bin: KEYS, `seed`, `value`, `right` (HIT or more) and `side` of the boundary.

    `failed` are KEYS and `seed` of runs that diverged: they have 0.
    """
    worst = cast("pd.DataFrame", table.groupby([*KEYS, "seed"], sort=False, as_index=False)["value"].min())
    if failed is not None and len(failed):
        worst = pd.concat([worst, failed.assign(value=0.0)], ignore_index=True)
    return worst.assign(right=worst["value"] >= HIT, side=_side(worst))


def hit_rates(table: pd.DataFrame, failed: pd.DataFrame | None = None) -> pd.DataFrame:
    """How many seeds generalize to every bin of a cell, with an exact 95 % interval (Clopper-Pearson).

    Returns:
        KEYS, `predicted` (the theory says this depth suffices), `hits`, `seeds`, `rate`, `low`, `high`.
    """
    rows = []
    for key, part in worst_bins(table, failed).groupby(list(KEYS), sort=False):
        hits, seeds = int(part["right"].sum()), len(part)
        predicted = part["side"].iloc[0] == WITHIN
        rows.append(
            (*cast("tuple[Any, ...]", key), predicted, hits, seeds, hits / seeds, *binomial_interval(hits, seeds))
        )
    return pd.DataFrame(rows, columns=[*KEYS, "predicted", "hits", "seeds", "rate", "low", "high"])


def share_over_seeds(right: pd.Series, seeds: pd.Series) -> tuple[float, float]:
    """95 % interval of the share of runs that are right, each seed's runs one observation."""
    _, low, high = interval(right.groupby(seeds.to_numpy()).mean().to_numpy(float), "share")
    return low, high


def _side(frame: pd.DataFrame) -> pd.Series:
    return frame["k"].map(predicted_depth).le(frame["depth"]).map({True: WITHIN, False: BEYOND})


def sweep(table: pd.DataFrame) -> pd.DataFrame:
    """How many runs clear a threshold in every bin, for every threshold, on either side of the theory's boundary.

    Returns:
        `norm, norm_order, positions, side, threshold, hits, runs, low, high` (95 % over seeds), `worst`, `best`: the
        least and the largest value that any of these runs has in its worst bin. A threshold between the best run beyond
        and the worst run within tells the sides apart.
    """
    rows = []
    for key, part in worst_bins(table).groupby(["norm", "norm_order", "positions", "side"], sort=False):
        x = part["value"]
        for threshold in THRESHOLDS:
            right = x >= threshold
            found = (threshold, int(right.sum()), len(x), *share_over_seeds(right, part["seed"]), x.min(), x.max())
            rows.append((*cast("tuple[Any, ...]", key), *found))
    columns = ["norm", "norm_order", "positions", "side", "threshold", "hits", "runs", "low", "high", "worst", "best"]
    return pd.DataFrame(rows, columns=columns)


def outcomes(values: pd.DataFrame) -> pd.DataFrame:
    """Continuous outcomes of every run without positions: REACH and the last bin; KEYS, `seed`, `outcome`, `value`."""
    plain = values[values["positions"] == "none"]
    far = plain[plain["measure"] != measure(TRAIN_LENGTHS)]
    reach = far.groupby([*KEYS, "seed"], sort=False, as_index=False)["value"].mean().assign(outcome=REACH)
    last = far[far["measure"] == measure(BINS[-1])].rename(columns={"measure": "outcome"})
    both: pd.DataFrame = pd.concat([reach, last], ignore_index=True)[[*KEYS, "seed", "outcome", "value"]]
    return both


def term_effects(values: pd.DataFrame) -> pd.DataFrame:
    """What a norm term changes on each side of the boundary, at each depth and over all depths.

    A unit is a pair of runs of one seed, depth and order that differ in this term alone (two pairs: with the other term
    and without). Intervals are Student's t over seeds that have all depths and orders, of the mean over a seed's units
    (NaN with fewer than two such seeds). Only REACH over all depths is tested: `p` is of the
    same t, and `p_holm` over these rows. `units` are the pairs that the mean is of.

    Returns:
        `term, norm_order` ("both": over pre- and post-norm runs)`, side, depth, outcome, mean, ci_low, ci_high, seeds,
        units, p, p_holm`.
    """
    told = outcomes(values)
    index = ["norm_order", "side", "outcome", "depth", "seed"]
    wide = told.assign(side=_side(told)).pivot(index=index, columns="norm", values="value")
    rows: list[tuple[Any, ...]] = []
    for term, pairs in TERMS.items():
        change = differences(wide, {have: (have, lack) for have, lack in pairs}, "pair")
        change["own_order"] = change["norm_order"]
        both = change.assign(norm_order=BOTH) if change["norm_order"].nunique() > 1 else change[:0]
        for key, part in pd.concat([change, both]).groupby(["norm_order", "side", "outcome"], sort=False):
            order, side, outcome = cast("tuple[str, str, str]", key)
            groups = [(str(depth), one) for depth, one in part.groupby("depth")] if order != BOTH else []
            for depth, one in [*groups, (ALL_DEPTHS, part)]:
                tests = depth == ALL_DEPTHS and outcome == REACH
                pairs_by_seed = one.pivot(index="seed", columns=["own_order", "depth", "pair"], values="value")
                complete = pairs_by_seed.dropna()
                seeds = complete.mean(axis=1).to_numpy(float)
                p = paired_p(seeds) if tests and len(seeds) else np.nan
                center = interval(seeds) if len(seeds) else (float(one["value"].mean()), np.nan, np.nan)
                units = complete.size or len(one)
                rows.append((term, order, side, depth, outcome, *center, len(seeds), units, p))
    columns = ["term", "norm_order", "side", "depth", "outcome", "mean", "ci_low", "ci_high", "seeds", "units", "p"]
    found = pd.DataFrame(rows, columns=columns)
    return found.assign(p_holm=holm(found["p"].to_numpy(float)))


def fresh_terms(values: pd.DataFrame) -> pd.DataFrame:
    """`term_effects` beyond the boundary over the seeds that were trained after the first had been seen.

    Holm's p is over these alone: two terms in each order. Empty if there are no such seeds.
    """
    later = values[values["seed"] >= CHOSEN_SEEDS]
    found = term_effects(later if len(later) else values)
    tested = select(found, depth=ALL_DEPTHS, outcome=REACH, side=BEYOND, norm_order=["post", "pre"])
    fresh = tested[: len(tested) * bool(len(later))].reset_index(drop=True)
    return fresh.assign(p_holm=holm(fresh["p"].to_numpy(float)))


def _figures(summary: pd.DataFrame) -> dict[str, Figure]:
    """The boundary as a map; curves over length of the post-norm runs, where there are any."""
    found = {} if summary[summary["positions"] == "none"].empty else {"boundary": _heat_maps(summary)}
    post = select(summary, norm_order="post", positions="none")
    if len(post):
        found["lengths"] = length_curves(post, "norm", 2)
    return found


def _heat_maps(summary: pd.DataFrame) -> Figure:
    """Exact match in the farthest bin, depth against k, a map per norm and order."""
    far = select(summary, measure=measure(BINS[-1]), positions="none")
    orders, norms = _in_order(far["norm_order"]), _in_order(far["norm"])
    figure = Figure(figsize=(2.7 * len(norms) + 0.6, 2.5 * len(orders) + 0.4), layout="constrained")
    axes = figure.subplots(len(orders), len(norms), squeeze=False).flat
    for (order, norm), ax in zip(itertools.product(orders, norms), axes, strict=True):
        part = select(far, norm_order=order, norm=norm).pivot(index="depth", columns="k", values="mean")
        if part.empty:
            ax.set_axis_off()
            continue
        image = heat_map(ax, part.rename(columns="L{}".format), "{:.0%}".format, 0.6, vmin=0, vmax=1)
        ax.set(title=f"{norm}, {order}-norm", ylabel="depth")
    figure.colorbar(image, ax=figure.axes, label=f"exact match, {BINS[-1][0]}-{BINS[-1][1]} letters", shrink=0.8)
    return figure


def length_curves(part: pd.DataFrame, by: str, columns: int, *, height: float = 2.6) -> Figure:
    """Exact match over length: a panel per (depth, k), a line per value of the column `by`; stars are published."""
    squares = list(dict.fromkeys(zip(part["depth"], part["k"], strict=True)))
    figure, axes = panels(len(squares), 4.2, height, columns=columns, shared=True)
    lengths, order = [sum(b) / 2 for b in BINS], _in_order(part[by])
    for (depth, k), ax in zip(squares, axes, strict=True):
        cell = select(part, depth=depth, k=k)
        for name in _in_order(cell[by]):
            line = cell[cell[by] == name].set_index("measure").reindex([measure(b) for b in BINS])
            color = f"C{order.index(name)}"
            ax.plot(lengths, line["mean"], color=color, marker="o", markersize=3, label=name)
            ax.fill_between(lengths, line["ci_low"], line["ci_high"], color=color, alpha=0.15)
            ax.plot(lengths, line["published"], "r*")
        side = "within" if predicted_depth(int(k)) <= depth else "beyond"
        ax.set(title=f"depth {depth}, L{k}: {side} the theory's reach", xlabel="letters", ylim=(0, 1.05))
    axes[0].set_ylabel("exact match")
    axes[0].legend(fontsize=7)
    return figure


def _in_order(column: Sequence[str] | pd.Series) -> list[str]:
    return list(dict.fromkeys(column))


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


def training(quick: bool, seed: int) -> TrainConfig:
    steps = 300 if quick else 2000
    return TrainConfig(
        steps=steps,
        batch=32,
        lr=1e-3,
        lr_end=1e-5,
        warmup=100,
        clip=1.0,
        seed=seed,
        evaluate_every=steps,
    )


def exact_matches(
    cells: Iterable[Cell], request: Request, schedule: Callable[[bool, int], TrainConfig], words: int, name: str
) -> tuple[pd.DataFrame, pd.DataFrame, tuple[str, ...]]:
    """Train a run per seed and cell, called by a format string over KEYS, each bin measured on so many words.

    Returns:
        Exact match of every run in every bin; KEYS and seed of runs that diverged, and their messages.
    """
    runs = planned(
        cells,
        request,
        name=lambda cell: name.format(**vars(cell)),
        task=lambda cell, _: BlockTask(cell.k, words),
        training=lambda _, seed: schedule(request.quick, seed),
    )
    carry_out(runs, request)
    table, lost = curves(runs), diverged(runs)
    failed = pd.DataFrame([{**run.keys, "seed": run.seed} for run in runs if run.name in lost])
    return table[table["measure"].isin([measure(b) for b in BINS])], failed, tuple(lost.values())


def run(request: Request) -> Results:
    """Train the missing runs of the grid and report where the boundary lies under each norm."""
    words, name = 200 if request.quick else EVALUATION_WORDS, "{norm_order}-{positions}-L{k}-depth{depth}-{norm}"
    table, failed, lost = exact_matches(grid(request.quick), request, training, words, name)
    return replace(findings(table, request.quick, failed), diverged=lost)


POSITIONS = ("none", "rotary", "alibi")
DEPTHS = tuple(range(4, 11))
DEEP_QUICK_STEPS, DEEP_QUICK_WORDS = 60, 100
CUT = (
    "the norms other than LayerNorm, and pre-norm order",
    "squares farther than one from the boundary, and depth 10 on L13",
    "rotary and ALiBi positions beyond the boundary, and at depths 5 to 10",
)


def deep_grid(quick: bool) -> tuple[Cell, ...]:
    """Either side of the boundary at DEPTHS, k up to 12; with rotary and ALiBi positions depth 4 on L6 alone."""
    if quick:
        return (Cell(4, 6), Cell(4, 7), Cell(10, 12))
    squares = [Cell(d, k) for d in DEPTHS for k in (d + 2, d + 3) if k <= DEPTHS[-1] + 2]
    return (*squares, *(Cell(4, 6, positions=p) for p in ("rotary", "alibi")))


def deep_training(quick: bool, seed: int) -> TrainConfig:
    """The schedule of the other depths; quick: with fewer steps."""
    whole = training(quick, seed)
    if not quick:
        return whole
    return replace(whole, steps=DEEP_QUICK_STEPS, warmup=DEEP_QUICK_STEPS // 4, evaluate_every=DEEP_QUICK_STEPS)


def run_deep(request: Request) -> Results:
    """`run` at DEPTHS."""
    words, name = DEEP_QUICK_WORDS if request.quick else EVALUATION_WORDS, "{positions}-L{k}-depth{depth}"
    table, failed, lost = exact_matches(deep_grid(request.quick), request, deep_training, words, name)
    return replace(deep_findings(table, request.quick, failed), diverged=lost)


def deep_findings(table: pd.DataFrame, quick: bool = False, failed: pd.DataFrame | None = None) -> Results:
    """As `findings`, of DEPTHS."""
    values = table.drop(columns="step", errors="ignore")
    contrasts, summary = reach_contrasts(values), summarized(values)
    return Results(
        summary,
        tables={"exact_match": table, "hits": hit_rates(table, failed), "contrasts": contrasts},
        figures={} if table.empty else {"deep": length_curves(summary, "positions", 4)},
        settings={
            **_settings(table, Cell(4, 6), deep_training(quick, 0)),
            "cut": CUT,
            "published": "exact match at 1.4 to 1.6 times the longest training word (351-400 letters); "
            f"{PUBLISHED_MODELS}",
        },
    )


def reach_contrasts(values: pd.DataFrame) -> pd.DataFrame:
    """What one block, one layer or positions change in REACH (mean exact match beyond the training lengths).

    Returns:
        `contrast` (as text), and what `contrasted` gives of differences between runs of one seed, Holm's p over all:
        a depth on its longest language within reach minus one block more; a language with one layer more minus without
        it; rotary and ALiBi positions minus none.
    """
    far = values[values["measure"] != measure(TRAIN_LENGTHS)]
    reach = far.pivot_table(index="seed", columns=["depth", "k", "positions"], values="value", sort=False)
    none = POSITIONS[0]
    pairs = {f"depth {d}: L{d + 2} minus L{d + 3}": ((d, d + 2, none), (d, d + 3, none)) for d in DEPTHS[:-1]}
    pairs |= {f"L{d + 3}: depth {d + 1} minus {d}": ((d + 1, d + 3, none), (d, d + 3, none)) for d in DEPTHS[:-1]}
    pairs |= {f"depth 4, L6: {p} positions minus none": ((4, 6, p), (4, 6, none)) for p in POSITIONS[1:]}
    return contrasted(differences(reach, pairs), ["contrast"], (-1.0, 1.0))
