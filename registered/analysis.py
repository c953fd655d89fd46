"""Analyse the registered runs from `results/item-N.csv` alone; prints tables and writes `results/analysis.csv`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

RESULTS = Path(__file__).parent / "results"
LEVEL, CAP = 0.4, 12_000
RATES = ("0.001", "0.003", "0.008")


def paired(item: str, contrast: str, a: pd.Series, b: pd.Series, margin: float, *, ratio: bool = False) -> dict:
    """Return the mean difference a - b (or geometric mean ratio a / b) over common seeds, with CIs."""
    both = pd.concat([a.rename("a"), b.rename("b")], axis=1).dropna()
    change = np.log(both["a"] / both["b"]) if ratio else both["a"] - both["b"]
    n = len(change)
    row = {"item": item, "contrast": contrast, "seeds": n, "margin": margin, "estimate": np.nan}
    if n < 2:
        return row
    error = change.std(ddof=1) / n**0.5
    half95, half90 = (float(stats.t.ppf(1 - tail, n - 1)) * error for tail in (0.025, 0.05))
    limit = np.log(margin) if ratio else margin
    back = np.exp if ratio else float
    p = float(2 * stats.t.sf(abs(change.mean()) / error, n - 1)) if error > 0 else float("nan")
    return row | {
        "estimate": back(change.mean()),
        "low": back(change.mean() - half95),
        "high": back(change.mean() + half95),
        "bound": back(abs(change.mean()) + half90),
        "equivalent": bool(abs(change.mean()) + half90 < limit),
        "p": p,
        "agreeing": int((np.sign(change) == np.sign(change.mean())).sum()),
    }


def holm(rows: list[dict]) -> list[dict]:
    """Add Holm-adjusted p-values over the contrasts of one item."""
    known = sorted((row for row in rows if row.get("p", np.nan) == row.get("p", np.nan)), key=lambda row: row["p"])
    least = 0.0
    for place, row in enumerate(known):
        least = max(least, min(1.0, (len(known) - place) * row["p"]))
        row["p_holm"] = least
    return rows


def read(item: int) -> pd.DataFrame:
    path = RESULTS / f"item-{item}.csv"
    return pd.read_csv(path) if path.exists() else pd.DataFrame(columns=["cell", "seed", "step", "measure", "value"])


def at(table: pd.DataFrame, cell: str, measure: str, step: int) -> pd.Series:
    rows = table[(table["cell"] == cell) & (table["measure"] == measure) & (table["step"] == step)]
    return rows.set_index("seed")["value"]


def item_3_or_4(item: int, other: str, step: int, margin: float) -> list[dict]:
    table = read(item)
    losses = (at(table, cell, "valid_loss", step) for cell in (other, "layernorm"))
    return holm([paired(f"{item}", f"{other} minus layernorm, loss at step {step}", *losses, margin)])


def steps_to_level(run: pd.DataFrame) -> tuple[float, bool]:
    """Return the interpolated step at which the training loss is LEVEL, and whether the run came there."""
    losses = run[run["measure"] == "train_loss"].sort_values("step")
    below = np.flatnonzero(losses["value"].to_numpy() <= LEVEL)
    if not len(below):
        return float(CAP), False
    i = int(below[0])
    if i == 0:
        return float(losses["step"].iloc[0]), True
    (s0, s1), (v0, v1) = losses["step"].iloc[i - 1 : i + 1], losses["value"].iloc[i - 1 : i + 1]
    return float(s0 + (v0 - LEVEL) / (v0 - v1) * (s1 - s0)), True


def item_2() -> list[dict]:
    found = [(*key, *steps_to_level(run)) for key, run in read(2).groupby(["cell", "seed"])]
    steps = pd.DataFrame(found, columns=["cell", "seed", "steps", "reached"])
    if steps.empty:
        return []
    summary = steps.groupby("cell").agg(
        seeds=("seed", "size"), reached=("reached", "sum"), geometric_mean=("steps", lambda x: np.exp(np.log(x).mean()))
    )
    print(summary.to_string())
    means = summary["geometric_mean"]

    def of(rate: str, size: str, projection: str) -> pd.Series:
        cell = f"rate {rate}, {size} size, {projection}"
        return steps[steps["cell"] == cell].set_index("seed")["steps"]

    def best(size: str, projection: str) -> str:
        cells = {rate: means.get(f"rate {rate}, {size} size, {projection}", np.inf) for rate in RATES}
        return min(cells, key=lambda rate: cells[rate])

    published, equal, with_projection = best("published", "none"), best("equal", "none"), best("equal", "projection")
    cells = {
        f"1 size at the best rates ({published}, {equal})": (
            (published, "published", "none"),
            (equal, "equal", "none"),
        ),
        "2 size at matched steps of the output": (("0.008", "published", "none"), ("0.001", "equal", "none")),
        f"3 projection at equal size, best rates ({equal}, {with_projection})": (
            (equal, "equal", "none"),
            (with_projection, "equal", "projection"),
        ),
        "4 the published comparison": (("0.001", "published", "none"), ("0.001", "equal", "projection")),
    }
    return holm([paired("2", name, of(*a), of(*b), 1.25, ratio=True) for name, (a, b) in cells.items()])


def item_5() -> list[dict]:
    table = read(5)
    models = table[(table["cell"] == "layernorm") & ~table["measure"].isin(["train_loss", "valid_loss"])]
    sums = models.groupby(["seed", "measure"])["value"].sum().unstack()
    if sums.empty:
        return []
    rows = []
    for outcome, margin in (("loss", 0.01), ("entropy", 0.02)):
        for edit in ("away", "towards"):
            both = (sums[f"{outcome}_{kind}"] / sums["predicted"] for kind in (edit, f"{edit}_random"))
            rows.append(paired("5", f"{edit} minus its control, {outcome}", *both, margin))
    counts = models[models["measure"] == "share"].groupby("seed").size()
    shares = (sums[name] / counts for name in ("share", "chance"))
    return [*holm(rows), paired("5", "share of squared query length minus chance", *shares, np.nan)]


def main() -> None:
    rows = [
        *item_3_or_4(3, "projection, measured divisor", 1500, 0.01),
        *item_2(),
        *item_5(),
        *item_3_or_4(4, "projection, divisor 1", 3000, 0.01),
    ]
    table = pd.DataFrame(rows)
    table.to_csv(RESULTS / "analysis.csv", index=False, float_format="%.9g")
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
