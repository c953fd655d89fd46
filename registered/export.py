"""Write what the analysis rests on, for the site: values of every seed, contrasts, curves of item 4.

    python registered/export.py FOLDER    # values.csv, contrasts.csv, curves.csv
"""

from __future__ import annotations

import sys
from pathlib import Path

import analysis
import pandas as pd


def over_prompts(model: str, paired: object) -> list[dict]:
    """Contrasts of item 5 for one model, unit the prompt: exploratory, so without Holm's adjustment."""
    table = analysis.read(5)
    rows = table[table["cell"] == model].pivot(index="step", columns="measure", values="value")
    contrasts = []
    if "predicted" in rows:
        for outcome, margin in (("loss", 0.01), ("entropy", 0.02)):
            for edit in ("away", "towards"):
                both = (rows[f"{outcome}_{kind}"] / rows["predicted"] for kind in (edit, f"{edit}_random"))
                contrasts.append(paired("5", f"{model}, {edit} minus its control, {outcome}", *both, margin))
    both = rows["share"], rows["chance"]
    return [*contrasts, paired("5", f"{model}, share of squared query length minus chance", *both, float("nan"))]


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values, paired = [], analysis.paired

    def recorded(item: str, contrast: str, a: pd.Series, b: pd.Series, margin: float, *, ratio: bool = False) -> dict:
        both = pd.concat([a.rename("value"), b.rename("reference")], axis=1).dropna().rename_axis("seed").reset_index()
        values.append(both.assign(item=int(item), contrast=contrast, kind="ratio" if ratio else "difference"))
        return paired(item, contrast, a, b, margin, ratio=ratio)

    analysis.paired = recorded
    analysis.main()
    exploratory = [row for name in ("MGM", "MiniLM") for row in over_prompts(name, recorded)]
    table = pd.concat(values)[["item", "contrast", "kind", "seed", "value", "reference"]]
    table = table.rename(columns={"seed": "unit"})
    counts = table.groupby(["item", "contrast"])["unit"].transform("size")
    complete = counts >= table["item"].map({2: 10, 3: 10, 4: 3, 5: 10})
    table[complete].to_csv(folder / "values.csv", index=False, float_format="%.9g")
    contrasts = pd.read_csv(analysis.RESULTS / "analysis.csv")
    contrasts = pd.concat([contrasts, pd.DataFrame(exploratory).astype({"item": int})]).rename(columns={"seeds": "units"})
    shown = table[complete][["item", "contrast"]].drop_duplicates()
    contrasts.merge(shown, on=["item", "contrast"]).to_csv(folder / "contrasts.csv", index=False, float_format="%.9g")
    curves = analysis.read(4)
    curves[curves["measure"] == "valid_loss"].to_csv(folder / "curves.csv", index=False, float_format="%.7g")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
