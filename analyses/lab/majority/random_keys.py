"""Random keys: how often some key, and what share of the keys, no query can select, with and without LayerNorm.

After Brody, Alon & Yahav 2023, figures 1c and 1d: n keys drawn from a normal distribution in d dimensions, 100 draws.
Their heat map shows how many draws had *any* unselectable key (so their code computes it), though the caption speaks
of the fraction of keys; both are given here. LayerNorm puts keys on a sphere, where every one is selectable; a head
sees them through its W_K, where the guarantee is lost, so a third map shows keys of one head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64
from matplotlib.figure import Figure

from ln_probe.analyses.geometry.check import NAMES, UNDECIDED, UNSELECTABLE
from ln_probe.analyses.geometry.key_geometry import key_geometry
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.results import Results, binomial_interval, panels, select, share_interval_of, summarize
from ln_probe.analyses.progress import ProgressLine, tell

DRAWS = 100  # published; per seed
DIMENSIONS, COUNTS = tuple(range(3, 16)), tuple(range(3, 61))  # published
HEAD_D_MODEL = 64  # of the map of one head: d_head is its d
NORMAL, NORMALIZED, HEAD = "keys as drawn", "after LayerNorm", f"after LayerNorm and W_K (d_model {HEAD_D_MODEL})"
# Heads as models have them, with more keys than the maps: (d_model, d_head); the first is the paper's language model.
HEADS, HEAD_COUNTS = ((8, 2), (8, 4), (64, 8), (64, 16), (768, 64)), (128, 896)
HEAD_DRAWS = 8
WHOLE_HEAD = "a head"  # the space of those heads in the tables
MEASURES = ("any_unselectable", "unselectable_fraction", "undecided_fraction")
KEYS = ["space", "d_model", "d", "n", "measure"]
SHOWN = (3, 5, 6, 8)  # dimensions whose value at n = 60 the summary gives
PUBLISHED = pd.DataFrame(
    [
        *((NORMAL, d, 60, "any_unselectable", p) for d, p in zip(SHOWN, (1.0, 1.0, 1.0, 0.93), strict=True)),
        *((NORMALIZED, d, 60, "any_unselectable", 0.0) for d in SHOWN),
    ],
    columns=["space", "d", "n", "measure", "published"],
)


@dataclass(frozen=True)
class Cell:
    """One square of a map: `draws` sets of n keys in d dimensions, made from vectors of d_model."""

    space: str
    d_model: int
    d: int
    n: int
    draws: int

    def keys(self, seed: int) -> Float64[np.ndarray, "draw key d"]:
        """The keys; a head's are LN(x) W_K with a separate W_K in every draw."""
        rng = np.random.default_rng([seed, self.d_model, self.d, self.n, self.space == NORMAL])
        x = rng.standard_normal((self.draws, self.n, self.d_model))
        if self.space == NORMAL:
            return x
        x -= x.mean(-1, keepdims=True)
        x /= np.sqrt((x**2).mean(-1, keepdims=True))
        if self.space == NORMALIZED:
            return x
        W_K = rng.standard_normal((self.draws, self.d_model, self.d)) / np.sqrt(self.d_model)
        keys: Float64[np.ndarray, "draw key d"] = x @ W_K
        return keys


def unselectable(cell: Cell, seed: int, threads: int = 1) -> tuple[float, float, float]:
    """Share of draws with an unselectable key, and mean shares of unselectable and of undecided keys."""
    verdict = key_geometry(cell.keys(seed), margins=False, threads=threads).verdict
    lost = verdict == NAMES[UNSELECTABLE]
    return float(lost.any(-1).mean()), float(lost.mean()), float((verdict == NAMES[UNDECIDED]).mean())


def cells(quick: bool) -> Iterator[Cell]:
    """The maps, square by square, then the heads."""
    dimensions = DIMENSIONS[::3] if quick else DIMENSIONS
    counts = (*COUNTS[::9], COUNTS[-1]) if quick else COUNTS
    draws = DRAWS // 5 if quick else DRAWS
    for space in (NORMAL, NORMALIZED, HEAD):
        for d in sorted({*dimensions, *SHOWN}):
            for n in counts:
                yield Cell(space, HEAD_D_MODEL if space == HEAD else d, d, n, draws)
    for d_model, d_head in HEADS[: 4 if quick else None]:
        for n in HEAD_COUNTS[: 1 if quick else None]:
            yield Cell(WHOLE_HEAD, d_model, d_head, n, HEAD_DRAWS)


def run(request: Request) -> Results:
    todo = [(seed, cell) for seed in request.seeds for cell in cells(request.quick)]
    rows = []
    with ProgressLine() if request.progress else nullcontext():
        for count, (seed, cell) in enumerate(todo):
            tell("sets of keys", count, len(todo), "maps")
            for measure, value in zip(MEASURES, unselectable(cell, seed, request.jobs), strict=True):
                rows.append((cell.space, cell.d_model, cell.d, cell.n, measure, seed, value))
    table = pd.DataFrame(rows, columns=[*KEYS, "seed", "value"])
    draws = next(cells(request.quick)).draws
    tables = analyse(summarize(table, KEYS).drop(columns="published"), draws)
    return Results(tables, plot(tables), {"draws": draws, "distribution": "normal", "eps": 0})


def analyse(maps: pd.DataFrame, draws: int = DRAWS) -> dict[str, pd.DataFrame]:
    """Add intervals to every square's mean, spread and number of seeds; the summary has n = 60 and the heads.

    Whether a draw has any unselectable key has the binomial interval over all seeds' draws, the rest that of a share.
    """
    bounds = []
    for row in maps.to_dict("records"):
        trials = row["seeds"] * (HEAD_DRAWS if row["space"] == WHOLE_HEAD else draws)
        if row["measure"] == MEASURES[0]:
            bounds.append(binomial_interval(round(row["mean"] * trials), trials))
        else:
            bounds.append(share_interval_of(row["mean"], row["sd"], row["seeds"]))
    maps = maps.assign(ci_low=[low for low, _ in bounds], ci_high=[high for _, high in bounds])
    shown = maps[((maps["n"] == COUNTS[-1]) & maps["d"].isin(SHOWN)) | (maps["space"] == WHOLE_HEAD)]
    on = [k for k in KEYS if k in PUBLISHED.columns]
    return {"summary": shown.merge(PUBLISHED, how="left", on=on, validate="many_to_one"), "maps": maps}


def plot(tables: Mapping[str, pd.DataFrame]) -> dict[str, Figure]:
    """Draw the maps."""
    means = tables["maps"]
    means = means[means["space"] != WHOLE_HEAD]
    groups = list(select(means, measure=[*MEASURES[:2]]).groupby(["measure", "space"], sort=False))
    figure, axes = panels(len(groups), 4.2, 3.6, columns=3)
    for ((measure, space), part), axis in zip(groups, axes, strict=True):
        grid = part.pivot(index="n", columns="d", values="mean")
        axis.pcolormesh(grid.columns, grid.index, grid.to_numpy(), vmin=0, vmax=1, cmap="magma_r", shading="nearest")
        axis.set_title(f"{str(measure).replace('_', ' ')}\n{space}", fontsize=9)
        axis.set(xlabel="d", ylabel="n")
    return {"maps": figure}
