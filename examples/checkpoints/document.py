"""What README.md and pages in docs/ say of real checkpoints, made of what is committed.

`python docs/made.py` writes it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd

from ln_probe.analyses.probes.statistics import SIGNIFICANCE, interval

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHECKPOINTS = ROOT / "ln_probe" / "data" / "checkpoints"
LABORATORY = ROOT / "analyses" / "lab" / "published"
GROUPS = ("attention", "mlp", "final", "all")

PROMPTS = {
    "own": "its own sequences",
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


def _of_prompts(case: str, sites: str, column: str) -> str:
    """A group's loss increase with other constants, with the interval over its prompts."""
    rows = pd.read_csv(HERE / "tables" / case / "causal_prompts.csv")
    rows = rows[(rows["sites"] == sites) & (rows["variant"] == "no_scaling")]
    return "" if rows[column].isna().any() else change(*_over_prompts(rows, column))


def _cell(row: pd.Series) -> str:
    if row["no_op"]:
        return f"nothing: {str(row['no_op']).split('; ')[0].split(': ')[-1]}"
    text = change(row["delta_loss"], row["delta_loss_low"], row["delta_loss_high"])
    adjusted = row["p_mean"] >= SIGNIFICANCE and row["delta_loss_low"] * row["delta_loss_high"] > 0
    return f"{text} (p = {row['p_mean']:.2f})" if adjusted else text


def groups_table() -> str:
    """Every case and group: scaling frozen (mean constants, one constant, loss-optimal ones), projection, both "
    "removed."""
    lines = [
        "| checkpoint, prompts (intact loss) | norms | scaling frozen | … one constant | … loss-optimal constants "
        "| projection removed | both removed |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases():
        rows, about = read(case)
        source = str(about["prompts"]["source"]).removesuffix(".jsonl")  # type: ignore[index]
        source = source if source in PROMPTS else "books"
        loss = rows.loc[("all", "intact"), "loss"]
        for sites in GROUPS:
            scaled, other, both = (rows.loc[(sites, v)] for v in ("no_scaling", "no_projection", "neither"))
            first = f"{case.removesuffix('-' + source)}, {PROMPTS[source]} ({loss:.2f})" if sites == GROUPS[0] else ""
            columns = ("delta_loss_uniform", "delta_loss_optimal")
            one, best = ("" if scaled["no_op"] else _of_prompts(case, sites, column) for column in columns)
            lines.append(f"| {first} | {sites} | {_cell(scaled)} | {one} | {best} | {_cell(other)} | {_cell(both)} |")
    return "\n".join(lines)


def findings_list() -> str:
    """For the README: three findings, each with where its figures stand."""
    own, _ = read("lm-layernorm-books")
    mgm, _ = read("mgm")
    loss = float(own.loc[("all", "intact"), "loss"])
    scaled, mean = own.loc[("all", "no_scaling")], own.loc[("all", "no_projection")]
    first = (
        f"Freezing scaling at every norm raises the loss of `lm-layernorm` by {_cell(scaled)} nats/token, from "
        f"{loss:.2f} ({100 * scaled['delta_loss'] / loss:.1f} %), with mean constants, and by "
        f"{_of_prompts('lm-layernorm-books', 'all', 'delta_loss_optimal')} with loss-optimal constants. Removing "
        f"projection raises it by {_cell(mean)}. In three seeds, on longer windows of the same books, scaling gives "
        f"{_of_seeds('delta_loss_no_scaling')} and projection {_of_seeds('delta_loss_no_projection')}."
    )
    attention = mgm.loc[("attention", "no_scaling")]
    second = (
        f"Freezing scaling at the norms that attention reads raises MGM's loss by {_cell(attention)} nats/token, from "
        f"{mgm.loc[('all', 'intact'), 'loss']:.2f}. With one constant for all positions, instead of one for position "
        f"0 and one for the others, it rises by {_of_prompts('mgm', 'attention', 'delta_loss_uniform')}: an "
        f"attention sink at position 0 then becomes much too long."
    )
    late = _contrast("the published gap", 17000), _contrast("no projection, at radius sqrt(d)", 17000)
    third = (
        f"Trained from scratch to name the majority token (ten seeds), making vectors as short as in the published "
        f"model without projection changes the training loss by {_contrast('size 1/sqrt(d), with projection')} at step "
        f"1000, and that is the values' size: values alone {_contrast('size 1/sqrt(d) of values alone')}, queries and "
        f"keys alone {_contrast('size 1/sqrt(d) of queries and keys alone')}. Leaving projection out at the same size: "
        f"{_contrast('no projection, at radius sqrt(d)')}. At step 17,000, where the published curves end, the "
        f"published gap is {late[0]}, and leaving projection out at the same size changes the loss by {late[1]}."
    )
    return "\n".join(f"{number}. {text}" for number, text in enumerate((first, second, third), start=1))


def _of_seeds(measure: str) -> str:
    """What leaving out a term of every norm costs `lm-layernorm`, with its interval over seeds."""
    rows = pd.read_csv(LABORATORY / "language_model_bundled" / "summary.csv")
    row = rows[(rows["norm"] == "layernorm") & (rows["layer"] == -1) & (rows["measure"] == measure)].iloc[0]
    if row["seeds"] != 3:
        raise ValueError(f"{measure}: the README says three seeds, the table {row['seeds']}")
    return change(row["mean"], row["ci_low"], row["ci_high"])


def _contrast(name: str, step: int = 1000) -> str:
    """A paired difference of the majority experiment, with its interval over seeds and its adjusted p."""
    rows = pd.read_csv(LABORATORY / "majority" / "contrasts.csv")
    row = rows[(rows["contrast"] == name) & (rows["step"] == step) & (rows["measure"] == "train_loss")].iloc[0]
    if row["seeds"] != 10:
        raise ValueError(f"{name}: the README says ten seeds, the table {row['seeds']}")
    return f"{row['mean']:+.2f} [{row['ci_low']:.2f}, {row['ci_high']:.2f}] nats (Holm {row['p_holm']:.2g})"


def bundled_table() -> str:
    """For the README: the four bundled models beside each other."""
    names = [f"lm-{norm}" for norm in ("layernorm", "scaling_only", "projection_only", "none")]
    held = [json.loads((CHECKPOINTS / n / "recipe.json").read_text(encoding="utf-8"))["valid_loss"] for n in names]
    rows, best = [read(f"{name}-books")[0] for name in names], "delta_loss_optimal"

    def line(title: str, cells: list[str]) -> str:
        return f"| {title} | " + " | ".join(cells) + " |"

    return "\n".join(
        [
            line("", [f"`{name}`" for name in names]),
            "|---" * 5 + "|",
            line("loss on held-out text, after training", [f"{loss:.3f}" for loss in held]),
            line("… on the 64 default windows of it", [f"{r.loc[('all', 'intact'), 'loss']:.2f}" for r in rows]),
            line("scaling frozen at attention's norms", [_cell(r.loc[("attention", "no_scaling")]) for r in rows]),
            line("… with loss-optimal constants", [_of_prompts(f"{n}-books", "attention", best) for n in names]),
            line("scaling frozen at every norm", [_cell(r.loc[("all", "no_scaling")]) for r in rows]),
            line("… with loss-optimal constants", [_of_prompts(f"{n}-books", "all", best) for n in names]),
            line("projection removed at every norm", [_cell(r.loc[("all", "no_projection")]) for r in rows]),
        ]
    )


def prompts_table() -> str:
    """What each case was measured on."""
    lines = ["| case | command | prompts | repeats | tokens | commonest tokens |", "|---|---|---|---|---|---|"]
    for case in cases():
        _, about = read(case)
        found = about["prompts"]
        assert isinstance(found, dict)
        common = ", ".join(f"`{_shown(t)}` {100 * s:.1f} %" for t, s in list(found["commonest"].items())[:4])
        counts = (found[c] for c in ("count", "repeated", "tokens"))
        lines.append(f"| {case} | `{about['command']}` | {' | '.join(map(str, counts))} | {common} |")
    return "\n".join(lines)


def _shown(token: str) -> str:
    return token.replace("\n", "⏎").replace("|", "¦").replace("`", "'") or "∅"


def earlier_table() -> str:
    """What was said before, on four prompts with one constant, beside what is measured now."""
    lines = [
        "| checkpoint | norms, without | said before (4 prompts, one constant) | … position 0 kept | two constants | "
        "one constant |",
        "|---|---|---|---|---|---|",
    ]
    for old in pd.read_csv(HERE / "tables" / "earlier.csv").to_dict("records"):
        rows, _ = read(str(old["case"]))
        what = {"no_scaling": "scaling", "no_projection": "projection", "neither": "both"}[str(old["variant"])]
        before = change(float(old["delta_loss"]), float(old["low"]), float(old["high"]))
        kept = "–" if math.isnan(old["first_kept"]) else f"{old['first_kept']:+g}"
        now = "not taken one by one", "–"
        if (old["sites"], old["variant"]) in rows.index:
            row = rows.loc[(old["sites"], old["variant"])]
            fewer = "" if row["prompts"] == 64 else f" ({int(row['prompts'])} prompts)"
            now = _cell(row) + fewer, change(row["delta_loss_uniform"])
        lines.append(f"| {old['case']} | {old['sites']}, {what} | {before} | {kept} | " + " | ".join(now) + " |")
    return "\n".join(lines)


def earlier_constants_table() -> str:
    """What constants of other text gave, beside leave-one-out constants on the same prompts."""
    lines = ["| case | norms | constants of other text (version 0.2) | leave-one-out means |", "|---" * 4 + "|"]
    for old in pd.read_csv(HERE / "tables" / "earlier-constants.csv").to_dict("records"):
        row = read(str(old["case"]))[0].loc[(old["sites"], old["variant"])]
        before = change(float(old["delta_loss"]), float(old["low"]), float(old["high"]))
        lines.append(f"| {old['case']} | {old['sites']} | {before} | {_cell(row)} |")
    return "\n".join(lines)


def earlier_prompts_table() -> str:
    """What the prompts of before gave (no line breaks, unknown words cut out), with two constants, beside these."""
    lines = ["| case | without scaling | loss, before | now | change, before | now |", "|---" * 6 + "|"]
    for old in pd.read_csv(HERE / "tables" / "earlier-prompts.csv").to_dict("records"):
        rows, _ = read(str(old["case"]))
        row = rows.loc[(old["sites"], old["variant"])]
        if row["no_op"] or math.isnan(old["delta_loss"]):
            continue
        intact = float(rows.loc[("all", "intact"), "loss"])
        before = change(float(old["delta_loss"]), float(old["low"]), float(old["high"]))
        losses = f"{old['loss'] - old['delta_loss']:.2f} | {intact:.2f}"
        lines.append(f"| {old['case']} | {old['sites']} | {losses} | {before} | {_cell(row)} |")
    return "\n".join(lines)


def plans_table() -> str:
    """What CAPP-GPT's plans lose, for parts drawn evenly: the plan's tokens alone are scored."""
    kept = pd.read_csv(HERE / "tables" / "plans-capp-gpt.csv", keep_default_na=False)
    ways = {"without scaling": ("scaling", "two"), "… one constant": ("scaling", "one"),
            "without projection": ("projection", ""), "both": ("both", "two")}  # fmt: skip
    lines = ["| norms | " + " | ".join(ways) + " |", "|---" * (len(ways) + 1) + "|"]
    for sites, rows in kept.groupby("sites", sort=False):
        cells = []
        for what, constants in ways.values():
            mine = rows[(rows["without"] == what) & (rows["constants"] == constants)]
            cells.append(change(*_over_prompts(mine, "delta_loss")))
        lines.append(f"| {sites} | " + " | ".join(cells) + " |")
    one = kept[(kept["sites"] == "all") & (kept["without"] == "both")]
    loss = (one["loss"] * one["predicted"]).sum() / one["predicted"].sum()
    lines += [
        "",
        f"{len(one)} parts, {one['predicted'].sum()} tokens of plans; their loss in the intact model: {loss:.3f}.",
    ]
    return "\n".join(lines)


def _over_prompts(rows: pd.DataFrame, column: str) -> tuple[float, float, float]:
    """The mean of a column over the predicted tokens of all prompts, and its interval over prompts."""
    weight = rows["predicted"].to_numpy(float)
    total = rows[column].to_numpy(float) * weight
    return (float(total.sum() / weight.sum()), *interval(total, weight))


def singles_table() -> str:
    """The three norms of each case whose frozen scaling raises the loss most, one by one."""
    lines = ["| case | norm | scaling frozen | prompts worse | p (sign test, Holm) |", "|---|---|---|---|---|"]
    for case in cases():
        rows, _ = read(case)
        alone = rows.xs("no_scaling", level="variant")
        alone = alone[~alone.index.isin(GROUPS) & (alone["no_op"] == "")]
        for site, row in alone.sort_values("delta_loss", ascending=False).head(3).iterrows():
            worse = f"{int(row['prompts_worse'])} of {int(row['prompts'])}"
            lines.append(f"| {case} | `{site}` | {change(row['delta_loss'])} | {worse} | {row['p_adjusted']:.2g} |")
    return "\n".join(lines)


def parts_table() -> str:
    """Effects of scaling on queries, keys and values one at a time, with each of the two kinds of constants."""
    lines = [
        "| checkpoint | norms | constants | all three | queries alone | keys alone | values alone |",
        "|---" * 7 + "|",
    ]
    ways = ("all three", "queries", "keys", "values")
    for path in sorted((HERE / "tables").glob("parts-*.csv")):
        kept = pd.read_csv(path)
        for (sites, constants), rows in kept.groupby(["sites", "constants"], sort=False):
            cells = []
            for only in ways:
                cells.append(change(*_over_prompts(rows[rows["only"] == only], "delta_loss")))
            name = path.stem.removeprefix("parts-")
            lines.append(f"| {name} | `{sites}` | {constants} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def overflow_list() -> str:
    """Of which cells there is no number, and why."""
    found = []
    for case in cases():
        for note in read(case)[1]["notes"]:  # type: ignore[attr-defined]
            if "not finite" in note:
                found.append(f"{case}: {note.split(': ')[-1]}")
    return "\n".join(f"* {line}" for line in found)


def head_estimates() -> dict[str, pd.DataFrame]:
    """First-order and exact effects of every head, by model."""
    return {p.stem.removeprefix("heads-"): pd.read_csv(p) for p in sorted((HERE / "tables").glob("heads-*.csv"))}


def estimates_table() -> str:
    """How well first-order effects of heads order the exact ones."""
    lines = ["| model | term left out | heads | rank correlation | largest effect, nats |", "|---|---|---|---|---|"]
    for name, rows in head_estimates().items():
        for variant, term in (("no_scaling", "scaling"), ("no_projection", "projection"), ("neither", "both")):
            some = rows[rows["variant"] == variant]
            rank = some["delta_loss"].corr(some["estimate"], method="spearman")
            lines.append(f"| {name} | {term} | {len(some)} | {rank:.2f} | {some['delta_loss'].abs().max():.4f} |")
    return "\n".join(lines)


def second_way_table() -> str:
    """Losses of a hand-edited Hugging Face model beside ours, one constant, measured once."""
    found = pd.read_csv(HERE / "tables" / "second-way.csv", dtype=str)
    lines = ["| model | edited | ours | Hugging Face's |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in found.to_numpy())])


def conclusions() -> str:
    """What became of the three conclusions of 0.1.0's README, and of SmolLM2's prompts: `conclusions.md`, filled in."""
    cost = {m: read(f"lm-{m}-books")[0].loc[("all", "no_projection")] for m in ("none", "scaling_only")}
    seeds = pd.read_csv(LABORATORY / "language_model_bundled" / "seeds.csv")
    seeds = seeds[(seeds["norm"] == "none") & (seeds["measure"] == "delta_loss_no_projection") & (seeds["seed"] > 0)]
    kept = {name: pd.read_csv(HERE / "tables" / f"parts-{name}.csv") for name in ("mgm", "smollm2-135m")}

    def rows(name: str, sites: str, constants: str, only: str) -> pd.DataFrame:
        some = kept[name]
        return some[(some["sites"] == sites) & (some["constants"] == constants) & (some["only"] == only)]

    def part(name: str, sites: str, constants: str, only: str) -> float:
        return _over_prompts(rows(name, sites, constants, only), "delta_loss")[0]

    ways, one_norm = ("queries", "keys", "values"), {"mgm": "blocks.2.ln1", "smollm2-135m": "blocks.16.ln1"}
    for name, sites in one_norm.items():
        for where, constants in ((sites, "one"), ("attention", "two")):
            if part(name, where, constants, "all three") <= sum(part(name, where, constants, only) for only in ways):
                raise ValueError(f"{name}, {where}: parts cost no more together than alone: write what they do")
    mine = [part("mgm", "attention", "two", only) for only in ways]
    smol = {only: f"{part('smollm2-135m', 'attention', 'two', only):+.2f}" for only in ways}
    two = rows("smollm2-135m", "attention", "two", "all three")
    massive = pd.read_csv(HERE / "tables" / "massive-smollm2-135m.csv").set_index("prompt")["elsewhere"] > 0
    has = two["prompt"].map(massive)
    text = (HERE / "conclusions.md").read_text(encoding="utf-8").rstrip()
    return text.format(
        none=_cell(cost["none"]),
        none_final=_cell(read("lm-none-books")[0].loc[("final", "no_projection")]),
        scaling_only=_cell(cost["scaling_only"]),
        other_seeds=" and ".join(f"{x:+.3f}" for x in seeds["value"]),
        least=f"{min(mine):+.3f}",
        most=f"{max(mine):+.3f}",
        **smol,
        attention=change(*_over_prompts(two, "delta_loss")),
        median=f"{two['delta_loss'].median():.1f}",
        largest=f"{two['delta_loss'].max():.1f}",
        massive=int(has.sum()),
        prompts=len(two),
        with_massive=f"{_over_prompts(two[has], 'delta_loss')[0]:.1f}",
        without_massive=f"{_over_prompts(two[~has], 'delta_loss')[0]:.1f}",
        one_at_16=change(*_over_prompts(rows("smollm2-135m", "blocks.16.ln1", "one", "all three"), "delta_loss")),
        two_at_16=change(*_over_prompts(rows("smollm2-135m", "blocks.16.ln1", "two", "all three"), "delta_loss")),
    )


BLOCKS = {
    "conclusions": conclusions,
    "second-way": second_way_table,
    "bundled": bundled_table,
    "checkpoints": groups_table,
    "checkpoint-prompts": prompts_table,
    "earlier": earlier_table,
    "earlier-constants": earlier_constants_table,
    "earlier-prompts": earlier_prompts_table,
    "estimates": estimates_table,
    "overflows": overflow_list,
    "parts": parts_table,
    "plans": plans_table,
    "findings": findings_list,
    "singles": singles_table,
}
