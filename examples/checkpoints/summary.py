"""Summarize what every prompt and head gave: tables with means and 95 % CIs over prompts, which the site shows.

python examples/checkpoints/summary.py    # writes tables/{parts,plans-capp-gpt,heads,books}-summary.csv
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

import ln_probe
from ln_probe.analyses.probes.statistics import interval

TABLES = Path(__file__).parent / "tables"


def over_prompts(rows: pd.DataFrame) -> tuple[float, float, float]:
    """The mean loss increase over the predicted tokens of all prompts, and its interval over prompts."""
    weight = rows["predicted"].to_numpy(float)
    total = rows["delta_loss"].to_numpy(float) * weight
    return (float(total.sum() / weight.sum()), *interval(total, weight))


def grouped(rows: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """A row with mean and interval for each group, in the order of the file."""
    groups = rows.groupby(by, sort=False, dropna=False)
    return pd.DataFrame(
        [(*key, *over_prompts(some)) for key, some in groups], columns=[*by, "delta_loss", "low", "high"]
    )


def heads() -> dict[str, pd.DataFrame]:
    """First-order and exact effects of every head, by model."""
    names = (p for p in sorted(TABLES.glob("heads-*.csv")) if "summary" not in p.stem)
    return {p.stem.removeprefix("heads-"): pd.read_csv(p) for p in names}


def books() -> pd.DataFrame:
    """Return the mean loss increase on each book's prompts, for the primary contrasts of the bundled models."""
    windows = Path(ln_probe.__file__).parent / "data" / "windows.json"
    book_of_prompt = json.loads(windows.read_text())["books"]
    tables = []
    for path in sorted(TABLES.glob("*-books/causal_prompts.csv")):
        rows = pd.read_csv(path)
        rows = rows[rows["sites"].isin(["attention", "all"]) & rows["variant"].isin(["no_scaling", "no_projection"])]
        rows = rows.assign(
            model=path.parent.name.removesuffix("-books"), book=rows["prompt"].map(book_of_prompt.__getitem__)
        )
        keys = ["model", "sites", "variant", "book"]
        tables.append(rows.groupby(keys, sort=False).agg(prompts=("prompt", "size"), delta_loss=("delta_loss", "mean")))
    return pd.concat(tables).reset_index()


def summaries() -> dict[str, pd.DataFrame]:
    """The summary tables by the names of their files."""
    parts = [
        pd.read_csv(p).assign(checkpoint=p.stem.removeprefix("parts-"))
        for p in sorted(TABLES.glob("parts-*.csv"))
        if "summary" not in p.stem
    ]
    estimates = [
        (
            model,
            variant,
            len(some),
            some["delta_loss"].corr(some["estimate"], method="spearman"),
            some["delta_loss"].abs().max(),
        )
        for model, rows in heads().items()
        for variant, some in rows.groupby("variant", sort=False)
    ]
    return {
        "parts-summary": grouped(pd.concat(parts), ["checkpoint", "sites", "constants", "only"]),
        "plans-capp-gpt-summary": grouped(
            pd.read_csv(TABLES / "plans-capp-gpt.csv"), ["sites", "without", "constants"]
        ),
        "books-summary": books(),
        "heads-summary": pd.DataFrame(estimates, columns=["model", "variant", "heads", "rank_correlation", "largest"]),
    }


if __name__ == "__main__":
    for name, table in summaries().items():
        table.to_csv(TABLES / f"{name}.csv", index=False, float_format="%.6g")
