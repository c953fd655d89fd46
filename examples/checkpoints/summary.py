"""Summarize what every prompt, pair and head gave: tables with means and 95 % CIs, which the site shows.

python examples/checkpoints/summary.py    # writes tables/{books,heads,geometry,patching,keys-at-length}-summary.csv
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats  # type: ignore[import-untyped]

import ln_probe
from ln_probe.analyses.probes.statistics import holm, infer_mean

TABLES = Path(__file__).parent / "tables"
CLOSER = 5.0  # degrees: heads whose queries are that much closer to the all-ones direction than random ones are counted
LIMITS = {"margin": (None, None), "uniform_angle_deg": (0, 90)}  # of the measures that are not shares
BY_QUERY = ("entropy_ratio", "uniform_angle_deg", "first_rate")  # means over queries, so prompts have weights


def books() -> pd.DataFrame:
    """Return the mean loss increase on each book's prompts, for the primary contrasts of the bundled models."""
    windows = Path(ln_probe.__file__).parent / "data" / "windows.json"
    book_of_prompt = json.loads(windows.read_text())["books"]
    tables = []
    for path in sorted(TABLES.glob("*-books/causal_prompts.csv")):
        rows = pd.read_csv(path)
        rows = rows[rows["sites"].isin(["attention", "all"]) & rows["variant"].isin(["no_scaling", "no_projection"])]
        model = path.parent.name.removesuffix("-books")
        rows = rows.assign(model=model, book=rows["prompt"].map(book_of_prompt.__getitem__))
        keys = ["model", "sites", "variant", "book"]
        tables.append(rows.groupby(keys, sort=False).agg(prompts=("prompt", "size"), delta_loss=("delta_loss", "mean")))
    return pd.concat(tables).reset_index()


def heads() -> Iterator[dict[str, Any]]:
    """Yield a row for each model and variant: how well first-order estimates of single heads rank exact effects."""
    for path in sorted(TABLES.glob("heads-*.csv")):
        if path.stem == "heads-summary":
            continue
        for variant, rows in pd.read_csv(path).groupby("variant", sort=False):
            rank = rows["delta_loss"].corr(rows["estimate"], method="spearman")
            row = {"model": path.stem.removeprefix("heads-"), "variant": variant, "heads": len(rows)}
            yield row | {"rank_correlation": rank, "largest": rows["delta_loss"].abs().max()}


def mean_and_half_width(prompts: pd.DataFrame, measure: str) -> tuple[float, float]:
    """Return the mean over prompts, by queries where it is one of queries, and half the width of its 95 % CI."""
    known = prompts[prompts[measure].notna()]
    values = known[measure].to_numpy(float)
    weight = known["queries"].to_numpy(float) if measure in BY_QUERY else np.ones(len(known))
    if len(known) < 2:
        return float(values.sum()) if len(known) else np.nan, np.nan
    center = float(weight @ values / weight.sum())
    spread = np.square(weight * (values - center)).sum() * len(known) / (len(known) - 1)  # of a ratio (Cochran 1977)
    return center, float(stats.t.ppf(0.975, len(known) - 1) * spread**0.5 / weight.sum())


def geometry() -> Iterator[dict[str, Any]]:
    """Yield a row for each checkpoint and variant, of keys as heads see them: means over heads, CIs over prompts."""
    for path in sorted(TABLES.glob("geometry/*-prompts.csv")):
        name = path.stem.removesuffix("-prompts")
        prompts, of_heads = pd.read_csv(path), pd.read_csv(path.with_name(f"{name}.csv"))
        for variant in ("intact", "no_scaling"):
            some, own = (t[(t["space"] == "head") & (t["variant"] == variant)] for t in (prompts, of_heads))
            if own["no_op"].notna().any():  # this norm does not scale
                continue
            row: dict[str, Any] = {"checkpoint": name, "variant": variant, "prompts": len(some), "heads": len(own)}
            for measure in ("margin", "attainable", *BY_QUERY):
                center, half = mean_and_half_width(some, measure)
                ends = np.clip((center, center - half, center + half), *LIMITS.get(measure, (0, 1)))
                row |= dict(zip((measure, f"{measure}_low", f"{measure}_high"), ends, strict=True))
            angles = own[own["random_angle_deg"].notna()]
            below = angles["random_angle_deg"] - angles["uniform_angle_deg"]
            row["random_angle_deg"] = angles["random_angle_deg"].mean()
            row["closer"] = (below > CLOSER).mean() if len(angles) else np.nan
            yield row


def patching() -> pd.DataFrame:
    """Return the rank correlations of attribution patching with exact effects: means over pairs, and differences."""
    rows = []
    for name in ("lm-layernorm", "mgm", "capp-gpt"):
        for kind, pairs in pd.read_csv(TABLES / f"patching-{name}.csv").groupby("kind", sort=False):
            if kind == "paths":
                continue
            standard, linearized = pairs["rank_standard"].to_numpy(float), pairs["rank_linearized"].to_numpy(float)
            better, change = linearized > standard, infer_mean(linearized - standard, np.ones(len(pairs)))
            means = [values.mean() for values in (standard, linearized, linearized - standard)]
            rows.append([name, kind, len(pairs), *means, change.low, change.high, change.p, int(better.sum())])
    columns = ["model", "kind", "pairs", "standard", "linearized", "change", "low", "high", "p", "pairs_better"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(p_holm=holm(table["p"].to_numpy(float)))


def keys_at_length() -> pd.DataFrame:
    """Return the share of unselectable keys of each model, variant and n, beside normal keys of the same n and d.

    `hull` is what 2 sqrt(2 pi ln n) vertices of the convex hull leave in two dimensions (Rényi and Sulanke 1963).
    """
    table = pd.read_csv(TABLES / "keys-at-length.csv")
    table["keys"] = table["n"] * table["contexts"]
    about = ["model", "d_head", "variant", "n"]
    totals = table.groupby(about, sort=False)[["keys", "unselectable", "undecided"]].sum().reset_index()
    totals["share"] = totals["unselectable"] / totals["keys"]
    heads = table.assign(share=table["unselectable"] / table["keys"]).groupby(about, sort=False)["share"]
    totals = totals.merge(heads.max().rename("largest_head").reset_index(), on=about)
    normal = totals[totals["model"] == "random"].set_index(["d_head", "n"])["share"]
    lengths = {d: rows.droplevel(0) for d, rows in normal.groupby(level=0)}
    totals["normal"] = [
        float(np.interp(np.log(n), np.log(lengths[d].index), lengths[d])) if d in lengths else np.nan
        for d, n in zip(totals["d_head"], totals["n"], strict=True)
    ]
    hull = 1 - 2 * np.sqrt(2 * np.pi * np.log(totals["n"])) / totals["n"]
    return totals.assign(n_over_d=totals["n"] / totals["d_head"], hull=hull.where(totals["d_head"] == 2))


def summaries() -> dict[str, pd.DataFrame]:
    """Return the summary tables by the names of their files."""
    tables = {make.__name__.replace("_", "-"): make for make in (books, heads, geometry, patching, keys_at_length)}
    return {f"{name}-summary": pd.DataFrame(make()) for name, make in tables.items()}


if __name__ == "__main__":
    for name, table in summaries().items():
        table.to_csv(TABLES / f"{name}.csv", index=False, float_format="%.6g")
