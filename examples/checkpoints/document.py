"""Write the tables of docs/checkpoints.md and README.md from what is committed in examples/checkpoints/tables.

    python examples/checkpoints/document.py

What stands between `<!-- made: NAME -->` and `<!-- end -->` in those files is made here; a test makes it again.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "checkpoints.md", ROOT / "docs" / "statistics.md")
GROUPS = ("attention", "mlp", "final", "all")
_BLOCK = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

PROMPTS = {
    "own": "its own sequences",
    "parts": "parts to be made, its own plans",
    "books": "held-out ends of its books",
    "wikitext": "wikitext-2",
}


def cases() -> list[str]:
    """The cases of which there are tables, in the order of their names."""
    return sorted(p.parent.name for p in (HERE / "tables").glob("*/causal.csv"))


def read(case: str) -> tuple[pd.DataFrame, dict[str, object]]:
    """The causal table of a case, by (sites, variant), and where it comes from."""
    folder = HERE / "tables" / case
    rows = (
        pd.read_csv(folder / "causal.csv", dtype={"no_op": object})
        .fillna({"no_op": ""})
        .set_index(["sites", "variant"])
    )
    return rows, json.loads((folder / "about.json").read_text(encoding="utf-8"))


def change(value: float, low: float = math.nan, high: float = math.nan) -> str:
    """A change of the loss, with its interval where there is one."""
    if math.isnan(value):
        return "–"
    text = f"{value:+.3f}" if abs(value) < 10 else f"{value:+.1f}"
    return text if math.isnan(low) else f"{text} [{low:.3f}, {high:.3f}]"


def _cell(row: pd.Series) -> str:
    if row["no_op"]:
        return f"nothing: {str(row['no_op']).split('; ')[0].split(': ')[-1]}"
    return change(row["delta_loss"], row["delta_loss_low"], row["delta_loss_high"])


def groups_table() -> str:
    """Every case and group: with two constants, one, resampled; without projection; without both."""
    lines = [
        "| checkpoint, prompts (loss) | norms | without scaling | … one constant | … resampled | without projection "
        "| both |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        rows, about = read(case)
        source = str(about["prompts"]["source"]).removesuffix(".jsonl")  # type: ignore[index]
        loss = rows.loc[("all", "intact"), "loss"]
        for sites in GROUPS:
            scaled, other, both = (rows.loc[(sites, v)] for v in ("no_scaling", "no_projection", "neither"))
            first = f"{case.removesuffix('-' + source)}, {PROMPTS[source]} ({loss:.2f})" if sites == GROUPS[0] else ""
            idle = bool(scaled["no_op"])
            lines.append(
                f"| {first} | {sites} | {_cell(scaled)} | {'' if idle else change(scaled['delta_loss_uniform'])} | "
                f"{'' if idle else change(scaled['delta_loss_resampled'])} | {_cell(other)} | {_cell(both)} |"
            )
    return "\n".join(lines)


def short_table() -> str:
    """For the README: a row per case, at every norm that attention reads and at all."""
    lines = [
        "| checkpoint, prompts | loss | attention without scaling | … one constant | all without projection |",
        "|---|---|---|---|---|",
    ]
    for case in cases():
        rows, about = read(case)
        source = str(about["prompts"]["source"]).removesuffix(".jsonl")  # type: ignore[index]
        scaled, other = rows.loc[("attention", "no_scaling")], rows.loc[("all", "no_projection")]
        lines.append(
            f"| {case.removesuffix('-' + source)}, {PROMPTS[source]} | {rows.loc[('all', 'intact'), 'loss']:.2f} | "
            f"{_cell(scaled)} | {'' if scaled['no_op'] else change(scaled['delta_loss_uniform'])} | {_cell(other)} |"
        )
    return "\n".join(lines)


def prompts_table() -> str:
    """What each case was measured on."""
    lines = ["| case | command | prompts | tokens | commonest tokens |", "|---|---|---|---|---|"]
    for case in cases():
        _, about = read(case)
        found = about["prompts"]
        assert isinstance(found, dict)
        common = ", ".join(f"`{_shown(t)}` {100 * s:.1f} %" for t, s in list(found["commonest"].items())[:4])
        lines.append(f"| {case} | `{about['command']}` | {found['count']} | {found['tokens']} | {common} |")
    return "\n".join(lines)


def _shown(token: str) -> str:
    return token.replace("\n", "⏎").replace("|", "¦").replace("`", "'") or "∅"


def earlier_table() -> str:
    """What was said before, on four prompts with one constant, beside what is measured now."""
    lines = [
        "| checkpoint | norms, without | said before (4 prompts, one constant) | two constants | one constant |",
        "|---|---|---|---|---|",
    ]
    for old in pd.read_csv(HERE / "tables" / "earlier.csv").to_dict("records"):
        if old["case"] not in cases():
            continue
        rows, _ = read(str(old["case"]))
        if (old["sites"], old["variant"]) not in rows.index:
            continue
        row = rows.loc[(old["sites"], old["variant"])]
        what = {"no_scaling": "scaling", "no_projection": "projection", "neither": "both"}[str(old["variant"])]
        before = change(float(old["delta_loss"]), float(old["low"]), float(old["high"]))
        lines.append(
            f"| {old['case']} | {old['sites']}, {what} | {before} | {_cell(row)} | "
            f"{change(row['delta_loss_uniform'])} |"
        )
    return "\n".join(lines)


def singles_table() -> str:
    """The three norms of each case that the loss needs most, one by one."""
    lines = ["| case | norm | without its scaling | prompts worse | p (sign test, Holm) |", "|---|---|---|---|---|"]
    for case in cases():
        rows, _ = read(case)
        alone = rows.xs("no_scaling", level="variant")
        alone = alone[~alone.index.isin(GROUPS) & (alone["no_op"] == "")]
        for site, row in alone.sort_values("delta_loss", ascending=False).head(3).iterrows():
            worse = f"{int(row['prompts_worse'])} of {int(row['prompts'])}"
            lines.append(f"| {case} | `{site}` | {change(row['delta_loss'])} | {worse} | {row['p_adjusted']:.2g} |")
    return "\n".join(lines)


def coverage_table() -> str:
    """Simulated coverage of the interval over prompts."""
    found = pd.read_csv(HERE / "tables" / "coverage.csv")
    lines = ["| effects | " + " | ".join(c for c in found.columns if c != "effects") + " |", "|---|" + "---|" * 5]
    lines += ["| " + " | ".join(str(v) for v in row) + " |" for row in found.astype(str).to_numpy()]
    return "\n".join(lines)


BLOCKS = {
    "checkpoints": groups_table,
    "checkpoints-short": short_table,
    "checkpoint-prompts": prompts_table,
    "earlier": earlier_table,
    "singles": singles_table,
    "coverage": coverage_table,
}


def made(text: str) -> str:
    """A page with its blocks made again."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{BLOCKS[m[2]]()}\n\n{m[3]}", text)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(made(page.read_text(encoding="utf-8")), encoding="utf-8")
