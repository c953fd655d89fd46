"""Tables of an experiment: estimates with 95 % intervals over seeds, tests, and the files for them.

Three kinds of numbers are measured (`interval`):

mean    anything without a natural bound: Student's t over seeds
share   a share of words, keys or draws, between 0 and 1: the beta (Clopper-Pearson) interval of a binomial with as many
        trials as the spread between seeds says they are worth (Korn & Graubard 1998, Survey Methodology 24)
log     errors over many orders of magnitude: Student's t of the logarithms; it cannot fall below 0

A single seed has no interval. Differences are paired by seed; Holm's p is over an experiment's tested
contrasts.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]

from ln_probe.analyses.lab.norms import NORM_KINDS, PROJECTS, SCALES
from ln_probe.analyses.probes.statistics import holm
from ln_probe.analyses.text import write_atomically

LEVEL = 0.95
EQUIVALENCE = 0.90  # level of the interval whose larger end is the equivalence bound
AGREEMENT = 1e-6  # spread of shares over seeds below which they agree: one in a million words; 0.1 three times is 1e-17
# Fewer hits than this: the lower end, at most 0.025^(1/hits), is below 1e-400, and solvers of it overflow.
_NO_HITS = 0.004
Kind = Literal["mean", "share", "log"]
MEAN, FACTOR = ("mean", "ci_low", "ci_high"), ("factor", "low", "high")


def interval(values: Float[np.ndarray, " seed"], kind: Kind = "mean") -> tuple[float, float, float]:
    """Return the center over seeds (of "log" the geometric mean) and its 95 % interval, NaN for a single seed."""
    if kind == "share":
        return share_interval(values)
    if kind == "log":
        center, low, high = np.exp(interval(np.log(values)))
        return float(center), float(low), float(high)
    center = float(values.mean())
    if len(values) == 1:
        return center, np.nan, np.nan
    half = _t(len(values)) * float(values.std(ddof=1)) / np.sqrt(len(values))
    return center, center - half, center + half


def share_interval(shares: Float[np.ndarray, " seed"]) -> tuple[float, float, float]:
    """Return the mean of one share per seed and its Korn-Graubard interval (`share_interval_of`)."""
    mean, seeds = float(shares.mean()), len(shares)
    return mean, *share_interval_of(mean, float(shares.std(ddof=1)) if seeds > 1 else np.nan, seeds)


def share_interval_of(mean: float, sd: float, seeds: int) -> tuple[float, float]:
    """Return the Korn-Graubard interval from the mean, the standard deviation over seeds and their number.

    The effective number of trials is p (1 - p) over the variance of the mean, times (z / t)² for estimating that
    variance from few seeds. Where all agree, each seed is one trial: three seeds of three at 1 give [0.29, 1].
    """
    if seeds == 1:
        return np.nan, np.nan
    trials = float(seeds)
    if sd > AGREEMENT and 0 < mean < 1:
        trials = mean * (1 - mean) / (sd**2 / seeds) * float(stats.norm.ppf((1 + LEVEL) / 2) / _t(seeds)) ** 2
    low, high = binomial_interval(mean * trials, trials)
    return min(low, mean), high


def binomial_interval(hits: float, trials: float) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) 95 % interval of a share; hits and trials need not be whole numbers."""
    tail = (1 - LEVEL) / 2
    low = 0.0 if hits < _NO_HITS else float(stats.beta.ppf(tail, hits, trials - hits + 1))
    high = 1.0 if hits == trials else float(stats.beta.ppf(1 - tail, hits + 1, trials - hits))
    return low, high


def paired_p(differences: Float[np.ndarray, " seed"]) -> float:
    """Return the two-sided p of Student's paired t test; NaN with one seed.

    Where all differences are the same, t knows no end: 1 if they are 0, else that of the sign test, 2^(1 - n).
    """
    if len(differences) < 2:
        return np.nan
    if float(differences.std(ddof=1)) <= AGREEMENT * max(1e-300, float(np.abs(differences).max())):
        return 1.0 if not differences.any() else float(2.0 ** (1 - len(differences)))
    return float(stats.ttest_1samp(differences, 0).pvalue)


def _t(seeds: int) -> float:
    return float(stats.t.ppf((1 + LEVEL) / 2, seeds - 1))


def summarize(
    values: pd.DataFrame,
    keys: Sequence[str],
    published: pd.DataFrame | None = None,
    kind: Kind = "mean",
    shares: Collection[str] = (),
) -> pd.DataFrame:
    """Return center, median and 95 % interval over seeds for every combination of `keys`.

    Args:
        values: long form: the columns of `keys`, `seed` and `value`.
        keys: columns that set rows apart ("norm", "step", "measure", …).
        published: the columns of `keys` (or some of them) and `published`; NaN where nothing was published.
        kind: of `interval`. shares: values of the key `measure` that are shares, whatever the others are.

    Returns:
        keys, then `mean` (geometric if `kind` is "log"), `ci_low`, `ci_high` (NaN with one seed), `median`, `sd`,
        `seeds`, `published`.
    """
    keys = list(keys)
    repeated = values.duplicated([*keys, "seed"])
    if repeated.any():
        raise ValueError(f"two values for {values[repeated][[*keys, 'seed']].iloc[0].to_dict()}")
    rows = []
    for key, group in values.dropna(subset="value").groupby(keys, sort=False, dropna=False):
        x = group["value"].to_numpy(float)
        sd = float(x.std(ddof=1)) if len(x) > 1 else np.nan
        cell = key if isinstance(key, tuple) else (key,)
        of_kind: Kind = "share" if shares and cell[keys.index("measure")] in shares else kind
        rows.append((*cell, *interval(x, of_kind), float(np.median(x)), sd, len(x)))
    table = pd.DataFrame(rows, columns=[*keys, *MEAN, "median", "sd", "seeds"])
    if published is None:
        return table.assign(published=np.nan)
    on = [k for k in keys if k in published.columns]
    return table.merge(published[[*on, "published"]], how="left", on=on, validate="many_to_one")


def select(table: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Return the rows in which every named column has the wanted value, or one of a list."""
    for column, value in wanted.items():
        table = table[table[column].isin(value if isinstance(value, list) else [value])]
    return table


def minus_reference(values: pd.DataFrame, reference: pd.Series, same: Sequence[str]) -> pd.DataFrame:
    """Return every other row's `value` minus that of the reference row with equal `same`, if there is one."""
    of = values[reference][[*same, "value"]]
    pairs = values[~reference].merge(of, on=list(same), suffixes=("", "_reference"), validate="m:1")
    return pairs.assign(value=pairs["value"] - pairs.pop("value_reference"))


def differences(
    wide: pd.DataFrame, pairs: Mapping[str, tuple[Hashable, Hashable]], name: str = "contrast"
) -> pd.DataFrame:
    """Return differences of pairs of columns in long form; a pair that lacks a column is left out.

    Args:
        wide: a column per cell; its index names what a difference is taken within, `seed` among it.
        pairs: minuend and subtrahend, by the name of their difference.
        name: of the column that holds these names.
    """
    rows = [
        (wide[left] - wide[right]).dropna().rename("value").reset_index().assign(**{name: label})
        for label, (left, right) in pairs.items()
        if left in wide and right in wide
    ]
    columns = [*wide.index.names, name, "value"]
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=columns)


def contrasted(
    differences: pd.DataFrame,
    keys: Sequence[str],
    bounds: tuple[float, float] = (-np.inf, np.inf),
    tested: Mapping[str, Any] | None = None,
) -> pd.DataFrame:
    """Return means of paired differences with intervals, p and Holm's p over all rows that are tested.

    Args:
        differences: long form, as for `summarize`; `value` is a difference within a seed.
        keys: columns that set contrasts apart.
        bounds: between which a difference must lie (of shares: -1 and 1); intervals end there.
        tested: columns and their values (as `select`) in the rows that are tested; p of the others is NaN.

    Returns:
        keys, `mean`, `ci_low`, `ci_high`, `median`, `sd`, `seeds` of the difference, `p` (paired t test), `p_holm`.
    """
    table = summarize(differences, keys).drop(columns="published")
    groups = differences.dropna(subset="value").groupby(list(keys), sort=False, dropna=False)["value"]
    p = pd.Series([paired_p(group.to_numpy(float)) for _, group in groups], dtype=float)
    p = p.where(p.index.isin(select(table, **(tested or {})).index))
    table["ci_low"], table["ci_high"] = table["ci_low"].clip(lower=bounds[0]), table["ci_high"].clip(upper=bounds[1])
    return table.assign(p=p, p_holm=holm(p.to_numpy(float)))


def as_factors(differences: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Return differences of logarithms (`contrasted`) as factors: `keys`, FACTOR, `seeds`, `p`, `p_holm`."""
    of = {c: np.exp(differences[c].astype(float)) for c in MEAN}
    renamed = differences.assign(**of).rename(columns=dict(zip(MEAN, FACTOR, strict=True)))
    return renamed[[*keys, *FACTOR, "seeds", "p", "p_holm"]]


def main_effects(values: pd.DataFrame) -> dict[str, pd.Series]:
    """Return both main effects per seed, of `norm`, `seed` and `value`.

    The effect of a term is the mean of the norms that have it minus the mean of those that do not.
    """
    cells = values.pivot(index="seed", columns="norm", values="value")
    effects = {}
    for term, having in (("scaling", SCALES), ("projection", PROJECTS)):
        lacking = [norm for norm in NORM_KINDS if norm not in having]
        with_term, without = (cells[norms].mean(axis=1, skipna=False) for norms in (sorted(having), lacking))
        effects[term] = (with_term - without).dropna()
    return effects


def effect_rows(differences: Mapping[str, pd.Series], factor: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield a row per contrast: `contrast`, `estimate` with `low` and `high`, `p`, `bound`, `seeds`, `agreeing`.

    `bound` is the larger end, in absolute value, of the 90 % CI: two one-sided tests at 5 % exclude larger effects.
    `agreeing` seeds have the sign of the estimate.
    """
    for contrast, per_seed in differences.items():
        values = per_seed.to_numpy(float) * factor
        estimate, low, high = interval(values)
        t = float(stats.t.ppf((1 + EQUIVALENCE) / 2, len(values) - 1))
        half = t * values.std(ddof=1) / np.sqrt(len(values))
        yield {
            "contrast": contrast, "estimate": estimate, "low": low, "high": high, "p": paired_p(values),
            "bound": abs(estimate) + half, "seeds": len(values),
            "agreeing": int((np.sign(values) == np.sign(estimate)).sum()),
        }  # fmt: skip


RESULTS_FILE, SUMMARY_FILE = "results.json", "summary.csv"
LONG = 1000  # rows; a longer table is parquet


@dataclass(frozen=True)
class Results:
    """Everything `ln-probe lab run` writes.

    Attributes:
        tables: by name; `summary` is what the command prints.
        figures: matplotlib figures by name.
        settings: what was run (sizes, steps, seeds), as plain JSON.
        diverged: runs whose loss stopped being a number, by name and step.
    """

    tables: Mapping[str, pd.DataFrame]
    figures: Mapping[str, Figure] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    diverged: tuple[str, ...] = ()

    @property
    def summary(self) -> pd.DataFrame:
        return self.tables["summary"]


def write_results(
    results: Results, out: Path, *, experiment: str, command: str, ln_probe_version: str, seconds: float
) -> None:
    """Write every table and figure into `out`, `results.json` last."""
    files = {f"{name}.{'parquet' if len(t) > LONG else 'csv'}": t for name, t in results.tables.items()}
    files = {SUMMARY_FILE if name.startswith("summary.") else name: table for name, table in files.items()}
    for name, table in files.items():
        csv = name.endswith(".csv")
        content = table.to_csv(index=False, float_format="%.12g").encode() if csv else table.to_parquet(index=False)
        write_atomically(out / name, content)
    for name, figure in results.figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
        write_atomically(out / f"{name}.png", buffer.getvalue())
    about = {
        "experiment": experiment, "command": command,
        "versions": {"ln-probe": ln_probe_version} | {n: version(n) for n in ("torch", "transformer-lens", "numpy")},
        "seconds": round(seconds, 1), "settings": dict(results.settings), "diverged": list(results.diverged),
        "tables": list(files), "figures": [f"{name}.png" for name in results.figures],
    }  # fmt: skip
    write_atomically(out / RESULTS_FILE, (json.dumps(about, indent=1) + "\n").encode())


def panels(
    count: int, width: float, height: float, *, columns: int | None = None, shared: bool = False
) -> tuple[Figure, list[Axes]]:
    """Make a figure of panels in rows; the places that the last row has left over stay empty.

    Args:
        width, height: of a panel, in inches.
        columns: most panels side by side; None: all.
        shared: whether all have the same vertical axis.
    """
    columns = max(1, min(columns or count, count))
    rows = max(1, -(-count // columns))
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=shared).flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def lines(ax: Axes, table: pd.DataFrame, x: str, by: str, y: str = "mean", published: bool = True) -> None:
    """Draw a line per value of the column `by` with its interval; published figures as crosses."""
    for number, (name, line) in enumerate(table.groupby(by, sort=False)):
        line = line.sort_values(x)
        ax.plot(line[x], line[y], f"C{number}{'o-' if len(line) < 40 else '-'}", markersize=3, label=str(name))
        if "ci_low" in line:
            ax.fill_between(line[x], line["ci_low"], line["ci_high"], color=f"C{number}", alpha=0.15, lw=0)
        if published and "published" in line:
            ax.plot(line[x], line["published"], f"C{number}x")
    ax.set_xlabel(x)


def line_panels(
    table: pd.DataFrame,
    panel: Sequence[str],
    x: str,
    by: str,
    y: str = "mean",
    *,
    published: bool = True,
    columns: int = 4,
    **axes: Any,
) -> Figure:
    """Draw `lines` in a panel per combination of the columns `panel`; `axes` are properties of every panel."""
    groups = list(table.groupby(list(panel), sort=False))
    figure, places = panels(max(1, len(groups)), 3.7, 2.7, columns=columns, shared=True)
    figure.supylabel(axes.pop("ylabel", y), fontsize=9)
    for (names, part), ax in zip(groups, places, strict=False):
        lines(ax, part, x, by, y, published)
        ax.set(title=", ".join(map(str, cast("tuple[Any, ...]", names))), **axes)
        ax.title.set_fontsize(8)
    if groups:
        handles = places[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=7, title=by, title_fontsize=7)
    return figure
