"""What an experiment found: tidy tables, means and 95 % intervals over seeds, the published figure beside them.

summary.csv       a row per (what was varied, measure): center, interval, number of seeds, published figure
<table>.csv       the values behind it, a row per seed; .parquet if it is long
<figure>.png
results.json      command, versions, settings, runs that diverged, conclusions in sentences
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ln_probe.analyses.files import write_atomically
from ln_probe.analyses.lab.intervals import Kind, holm, interval, paired_p

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS_FILE, SUMMARY_FILE = "results.json", "summary.csv"
LONG = 1000  # rows; a longer table is parquet
STATISTICS = ("mean", "ci_low", "ci_high", "median", "sd", "seeds")
PACKAGES = ("torch", "transformer-lens", "numpy")


@dataclass(frozen=True)
class Results:
    """Everything `ln-probe lab run` writes.

    Attributes:
        summary: as `summarize` makes it.
        tables: other tables by name (a row per seed, or per point of a map), in long form.
        figures: matplotlib figures by name.
        conclusions: what was found, in sentences.
        settings: what was run (sizes, steps, seeds), as plain JSON.
        diverged: runs whose loss stopped being a number, by name and step.
    """

    summary: pd.DataFrame
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    conclusions: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    diverged: tuple[str, ...] = ()


def summarize(
    values: pd.DataFrame, keys: Sequence[str], published: pd.DataFrame | None = None, kind: Kind = "mean"
) -> pd.DataFrame:
    """Center, median and 95 % interval over seeds for every combination of `keys`.

    Args:
        values: long form: the columns of `keys`, `seed` and `value`.
        keys: columns that set rows apart ("norm", "step", "measure", …).
        published: the columns of `keys` (or some of them) and `published`; NaN where nothing was published.
        kind: of interval (`intervals`): "share" for what lies between 0 and 1, "log" for errors.

    Returns:
        keys, then `mean` (geometric if `kind` is "log"), `ci_low`, `ci_high` (NaN with one seed), `median`, `sd`,
        `seeds`, `published`.

    Raises:
        ValueError: a seed occurs twice under the same keys.
    """
    keys = list(keys)
    repeated = values.duplicated([*keys, "seed"])
    if repeated.any():
        first = values[repeated][[*keys, "seed"]].iloc[0]
        raise ValueError(f"two values for {first.to_dict()}")
    rows = []
    for key, group in values.dropna(subset="value").groupby(keys, sort=False, dropna=False):
        x = group["value"].to_numpy(float)
        sd = float(x.std(ddof=1)) if len(x) > 1 else np.nan
        cell = key if isinstance(key, tuple) else (key,)
        rows.append((*cell, *interval(x, kind), float(np.median(x)), sd, len(x)))
    table = pd.DataFrame(rows, columns=[*keys, *STATISTICS])
    if published is None:
        return table.assign(published=np.nan)
    on = [k for k in keys if k in published.columns]
    return table.merge(published[[*on, "published"]], how="left", on=on, validate="many_to_one")


def effects(
    values: pd.DataFrame,
    keys: Sequence[str],
    switch: Sequence[str],
    bounds: tuple[float, float] = (-np.inf, np.inf),
) -> pd.DataFrame:
    """What a norm changes: each value minus the one of the same seed without a norm, with intervals over seeds.

    Runs of one seed see the same batches, so what they share drops out of the difference.

    Args:
        values: long form, as for `summarize`; a column `norm`, which is "none" without one.
        keys: columns that set rows apart, `norm` among them.
        switch: those of `keys` that tell of the norm (`norm` and where it stands); the others must be equal.
        bounds: between which the difference must lie (of shares: -1 and 1); intervals end there.

    Returns:
        A row per key with a norm: keys, `mean`, `ci_low`, `ci_high`, `median`, `sd`, `seeds` of the difference, `p`
        of the paired t test and `p_holm`, adjusted over all rows; seeds without a partner are left out.
    """
    same = [k for k in keys if k not in switch] + ["seed"]
    plain = values["norm"] == "none"
    pairs = values[~plain].merge(values[plain][[*same, "value"]], on=same, suffixes=("", "_plain"), validate="m:1")
    pairs["value"] = pairs["value"] - pairs["value_plain"]
    return contrasted(pairs, keys, bounds)


def contrasted(
    differences: pd.DataFrame, keys: Sequence[str], bounds: tuple[float, float] = (-np.inf, np.inf)
) -> pd.DataFrame:
    """Means of paired differences with intervals, p and Holm's p over all rows.

    Args:
        differences: long form, as for `summarize`; `value` is a difference within a seed.
        keys: columns that set contrasts apart.
        bounds: between which a difference must lie; intervals end there.

    Returns:
        As `effects`.
    """
    found = summarize(differences, keys).drop(columns="published")
    groups = differences.dropna(subset="value").groupby(list(keys), sort=False, dropna=False)["value"]
    p = [paired_p(group.to_numpy(float)) for _, group in groups]
    found["ci_low"], found["ci_high"] = found["ci_low"].clip(lower=bounds[0]), found["ci_high"].clip(upper=bounds[1])
    return found.assign(p=np.array(p, dtype=float), p_holm=holm(p))


def write_results(
    results: Results, out: Path, *, experiment: str, command: str, ln_probe_version: str, seconds: float
) -> None:
    """Write every table and figure into `out`, `results.json` last; what only an earlier call wrote is removed."""
    before = _written(out)
    write_atomically(out / SUMMARY_FILE, results.summary.to_csv(index=False, float_format="%.6g").encode())
    tables = [SUMMARY_FILE]
    for name, table in results.tables.items():
        if len(table) > LONG:
            buffer = io.BytesIO()
            table.to_parquet(buffer, index=False)
            tables.append(f"{name}.parquet")
            write_atomically(out / tables[-1], buffer.getvalue())
        else:
            tables.append(f"{name}.csv")
            write_atomically(out / tables[-1], table.to_csv(index=False, float_format="%.6g").encode())
    for name, figure in results.figures.items():
        write_atomically(out / f"{name}.png", png(figure))
    about = {
        "experiment": experiment,
        "command": command,
        "versions": {"ln-probe": ln_probe_version} | {name: version(name) for name in PACKAGES},
        "seconds": round(seconds, 1),
        "settings": dict(results.settings),
        "diverged": list(results.diverged),
        "conclusions": list(results.conclusions),
        "tables": tables,
        "figures": [f"{name}.png" for name in results.figures],
    }
    write_atomically(out / RESULTS_FILE, (json.dumps(about, indent=1) + "\n").encode())
    for name in before - _written(out):
        (out / name).unlink(missing_ok=True)


def png(figure: Figure) -> bytes:
    """A picture as it is written."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, bbox_inches="tight")
    return buffer.getvalue()


def _written(out: Path) -> set[str]:
    """Files that the results in a folder name."""
    try:
        about = json.loads((out / RESULTS_FILE).read_text())
        return {Path(name).name for name in (*about["tables"], *about["figures"])}
    except (OSError, ValueError, KeyError, TypeError):
        return set()
