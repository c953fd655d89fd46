"""The page of the laboratory on what networks can express: depth, programs, approximation, counting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.counting.counting import better_than
from ln_probe.analyses.lab.counting.counting_tasks import TERMS, farthest
from ln_probe.analyses.lab.laboratory.on_approximation import (
    evaluation_error,
    longer_sentences,
    memory_table,
    product_on_text,
    trained_rates,
)
from ln_probe.analyses.lab.laboratory.on_traces import threshold_table, trace_table, what_networks_show
from ln_probe.analyses.lab.laboratory.reading import (
    change,
    kept_table,
    markdown,
    only_row,
    prose,
    rows_where,
    sentences,
    short_power,
    with_interval,
)

BINS = ("51_100", "101_150", "151_200", "201_250")


def depth() -> Iterator[str]:
    summary = kept_table("depth")
    yield from prose("depth 1")
    norms = ("layernorm", "projection_only", "scaling_only", "none")
    for order in ("post", "pre"):
        part = summary[(summary["norm_order"] == order) & (summary["positions"] == "none")]
        rows = []
        for depth, k in dict.fromkeys(zip(part["depth"], part["k"], strict=True)):
            cells, published = [], part[(part["depth"] == depth) & (part["k"] == k)]["published"].dropna()
            for norm in norms:
                cell = part[(part["depth"] == depth) & (part["k"] == k) & (part["norm"] == norm)].set_index("measure")
                bins = [f"exact_match_{b}" for b in BINS]
                told = "–"
                if len(cell):
                    told = " / ".join(f"{100 * cell.loc[b, 'mean']:.0f}" for b in bins[:-1])
                    told += f" / {with_interval(cell.loc[bins[-1]], 100)}"
                cells.append(f"{told} ({int(cell['seeds'].iloc[0])})" if len(cell) else told)
            within = (
                "yes" if part[(part["depth"] == depth) & (part["k"] == k)]["predicted_depth"].iloc[0] <= depth else "no"
            )
            rows.append((f"{depth}, L{k}", within, *cells, f"{100 * published.iloc[0]:.0f}" if len(published) else "–"))
        yield f"{order.capitalize()}-norm:"
        yield ""
        yield from markdown(("depth, language", "theory", *(f"`{n}`" for n in norms), "published"), rows)
    yield from prose("depth 2")
    yield from sentences("depth", "worst bin")
    yield from prose("depth 3")
    yield from sentences("depth", "at least 99%")
    yield from prose("depth 4")
    terms = rows_where(kept_table("depth", "terms"), depth="all", outcome="reach")
    rows = []
    for order, side in dict.fromkeys(zip(terms["norm_order"], terms["side"], strict=True)):
        of = rows_where(terms, norm_order=order, side=side)
        both = [only_row(of, term=term) for term in ("scaling", "projection")]
        where = f"{order} orders" if order == "both" else f"{order}-norm"
        rows.append(
            (f"{where}, {side}", str(both[0]["seeds"]), str(both[0]["units"]), *(change(r, 100, 1) for r in both))
        )
    yield from markdown(("order, side of the theory's reach", "seeds", "pairs", "scaling, points", "projection"), rows)
    yield from _beyond_by_seeds_and_depth()
    yield from prose("depth 5")


def _beyond_by_seeds_and_depth() -> Iterator[str]:
    """Beyond the boundary: what fresh seeds tell by themselves, and depth by depth (not tested)."""
    fresh, terms = kept_table("depth", "terms_fresh"), rows_where(kept_table("depth", "terms"), outcome="reach")
    yield from prose("depth fresh")
    rows = []
    for order in dict.fromkeys(fresh["norm_order"]):
        both = [only_row(fresh, norm_order=order, term=term) for term in ("scaling", "projection")]
        rows.append((f"{order}-norm, beyond", str(both[0]["seeds"]), *(change(r, 100, 1) for r in both)))
    yield from markdown(("seeds 3 to 9 alone", "seeds", "scaling, points", "projection"), rows)
    yield from prose("depth by depth")
    beyond = rows_where(terms, side="beyond")
    rows = []
    for order in ("post", "pre"):
        for term in ("scaling", "projection"):
            part = rows_where(beyond, norm_order=order, term=term)
            cells = (with_interval(only_row(part, depth=depth), 100, 1, sign=True) for depth in ("1", "2", "3"))
            rows.append((f"{order}-norm, {term}", *cells))
    yield from markdown(("by depth, points", "1, L4", "2, L5", "3, L6"), rows)


def depth_deep() -> Iterator[str]:
    summary = kept_table("depth_deep")
    yield from prose("depth_deep 1")
    bins = [m for m in dict.fromkeys(summary["measure"]) if m.startswith("exact_match_")]
    rows = []
    for (depth, k, positions), part in summary.groupby(["depth", "k", "positions"], sort=False):
        by = part.set_index("measure")
        within = "yes" if by["predicted_depth"].iloc[0] <= depth else "no"
        theirs = by["published"].dropna()
        published = f"{100 * theirs.iloc[0]:.0f}" if len(theirs) else "–"
        rows.append(
            (f"{depth}, L{k}", str(positions), within, *(with_interval(by.loc[b], 100) for b in bins), published)
        )
    header = (
        "depth, language",
        "positions",
        "theory",
        *(b.removeprefix("exact_match_").replace("_", "–") for b in bins),
        "published",
    )
    yield from markdown(header, rows)
    yield from sentences("depth_deep")
    yield from prose("depth_deep 2")


def compare() -> Iterator[str]:
    table = kept_table("depth", "hand_built")
    yield from prose("compare 1")
    rows = [
        (f"`{r['norm']}`", f"{r['eps']:g}", f"{100 * r['accuracy']:.2f}", f"{100 * r['words_right']:.0f}")
        for r in table[table["depth"] == 2].to_dict("records")
    ]
    yield from markdown(("norm", "eps", "answers right, %", "words entirely, %"), rows)


def compiler() -> Iterator[str]:
    agreement, operations = kept_table("compiler", "agreement"), kept_table("compiler", "operations")
    yield from prose("compiler 1")
    by = ["construction", "norm", "suffices"]
    models = agreement.groupby([*by, "program"], sort=False, as_index=False)["value"].min()
    rows: list[tuple[str, ...]] = []
    for (construction, norm, enough), part in models.groupby(by, sort=False):
        right = f"{(part['value'] == 1).sum()} of {len(part)}"
        rows.append((f"`{construction}`", f"`{norm}`", "yes" if enough else "no", right))
    yield from markdown(("construction", "norm", "suffices", "programs right on every word"), rows)
    yield from prose("compiler 2")
    about = ("operation", "program", "output", "exact_with", "in_principle")
    means = [str(c) for c in operations if c not in about]
    rows = [
        (
            str(row["operation"]),
            *("–" if np.isnan(row[m]) else "all" if row[m] == 1 else f"{100 * row[m]:.1f}" for m in means),
            str(row["exact_with"]),
            str(row["in_principle"]),
        )
        for row in operations.to_dict("records")
    ]
    yield from markdown(("operation", *means, "as compiled", "in principle"), rows)
    yield from prose("compiler 3")
    wide = kept_table("compiler", "lengths").pivot(index="means", columns="letters", values="value")
    order = dict.fromkeys(kept_table("compiler", "lengths")["means"])
    rows = [(str(m), *("all" if x == 1 else f"{100 * x:.1f}" for x in wide.loc[m])) for m in order]
    yield from markdown(("means", *map(str, wide.columns)), rows)


def approximation() -> Iterator[str]:
    errors = rows_where(kept_table("approximation"), measure="mse", norm="none")
    yield from prose("approximation 1")
    yield from evaluation_error()
    yield from memory_table()
    yield from prose("approximation 2")
    table = errors[(errors["kernel"] == "table") & ~errors["dot_product"].astype(bool)]
    table = table[table["target"].isin(["1b", "2a", "2b"])]
    widths = sorted(set(table["width"]))
    rows = []
    for (target, heads), part in table.groupby(["target", "heads"], sort=False):
        cells = []
        for w in widths:
            cell = {r["width"]: r for r in part.to_dict("records")}.get(w)
            if cell is None:
                cells.append("–")
                continue
            center, low, high = (short_power(cell[c]) for c in ("mean", "ci_low", "ci_high"))
            cells.append(center if pd.isna(cell["ci_low"]) else f"{center} [{low}, {high}]")
        rows.append((f"{target}, H = {heads}", *cells))
    yield from markdown(("", *(f"m = {w}" for w in widths)), rows)
    yield from prose("approximation 3")
    rows = [
        (
            f"`{r['norm']}`, {r['norm_order']}",
            f"{r['target']} {r['kernel']}, H {r['heads']}",
            f"{r['factor']:.2g} [{r['low']:.2g}, {r['high']:.2g}]",
            f"{r['p_holm']:.2g}",
        )
        for r in kept_table("approximation", "norm_factors").to_dict("records")
    ]
    yield from markdown(("norm, order", "model", "factor", "Holm"), rows)
    yield from prose("approximation rates")
    yield from sentences("approximation", "Attainable rate", "Trained rates")
    yield from prose("approximation rates trained")
    yield from trained_rates()
    yield from prose("approximation dot product")
    yield from sentences("approximation", "3a, dot product")
    yield from sentences("dot_product_text")
    yield from product_on_text()


def adaptive_memory() -> Iterator[str]:
    summary = kept_table("adaptive_memory")
    yield from prose("adaptive_memory 1")
    rows = []
    for width, product in dict.fromkeys(zip(summary["width"], summary["dot_product"], strict=True)):
        part = rows_where(summary, width=width, dot_product=product).set_index("heads")
        cells = []
        for _, r in part.sort_index().iterrows():
            told = f"{short_power(r['mean'])} [{short_power(r['ci_low'])}, {short_power(r['ci_high'])}]"
            least = "not known" if np.isnan(r["attainable"]) else f"{r['attainable']:g}"
            cells.append(f"{told}; least {least}")
        rows.append((f"FFN of {width}" if width else "none", "yes" if product else "no", *cells))
    heads = sorted(set(summary["heads"]))
    yield from markdown(("FFN", "dot product", *(f"{h} head{'s' if h > 1 else ''}" for h in heads)), rows)
    yield from sentences("adaptive_memory", "The dot product and no FFN", "an FFN of")
    yield "![Error of every run over heads](../analyses/lab/published/adaptive_memory/adaptive.png)"
    yield ""


def longer_inputs() -> Iterator[str]:
    summary = kept_table("longer_inputs")
    told = summary[summary["measure"] == "relative_mse"]
    yield from prose("longer_inputs 1")
    rows = []
    for (target, kernel, heads), part in told.groupby(["target", "kernel", "heads"], sort=False):
        by = part.set_index("length")
        rows.append((f"{target} {kernel}, H {heads}", "solved", *(short_power(x) for x in by["solved"])))
        if by["mean"].notna().all():
            cells = (
                f"{short_power(r['mean'])} [{short_power(r['ci_low'])}, {short_power(r['ci_high'])}]"
                for _, r in by.iterrows()
            )
            rows.append((f"{target} {kernel}, H {heads}", "trained", *cells))
    yield from markdown(("target, positions", "", *map(str, dict.fromkeys(told["length"]))), rows)
    yield from longer_sentences()


def counting() -> Iterator[str]:
    summary = kept_table("counting")
    yield from prose("counting 1")
    accuracy = summary[summary["measure"].str.startswith("accuracy_") & (summary["norm"] == "none")]
    lengths = [int(m.removeprefix("accuracy_")) for m in dict.fromkeys(accuracy["measure"])]
    for task in dict.fromkeys(accuracy["task"]):
        part = accuracy[accuracy["task"] == task]
        rows = []
        constants = part.drop_duplicates("measure").set_index("measure")
        best = {n: max(constants.loc[f"accuracy_{n}", ["constant_yes", "constant_no"]]) for n in lengths}
        rows.append(("constant", *(f"{100 * best[n]:.1f}" for n in lengths), ""))
        for model in dict.fromkeys(part["model"]):
            cell = part[part["model"] == model].set_index("measure")
            cells = []
            for n in lengths:
                if f"accuracy_{n}" not in cell.index:
                    cells.append("–")
                    continue
                row = cell.loc[f"accuracy_{n}"]
                told = with_interval(row, 100, 1) + (f" ({100 * row['published']:.1f})" if row["published"] > 0 else "")
                cells.append(told if better_than(best[n], row) else f"*{told}*")
            rows.append((str(model), *cells, str(int(cell["seeds"].iloc[0]))))
        yield f"{task}:"
        yield ""
        yield from markdown(("", *map(str, lengths), "seeds"), rows)
    yield from prose("counting 2")
    yield from sentences("counting", "published orderings", "none to compare", "this budget does not reach it")
    yield from prose("counting 3")
    yield from _term_changes(summary, farthest(kept_table("counting", "effects")))
    yield from prose("counting 4")
    fresh = kept_table("counting", "effects_fresh")
    rows = [
        (
            f"{r['model']}, `{r['norm']}` on its {r['norm_site']}",
            change(pd.Series(r), 100, 1),
        )
        for r in fresh[fresh["measure"] == "accuracy_1024"].to_dict("records")
    ]
    yield from markdown(("L5 at 1024", "points"), rows)
    yield from prose("counting 5")
    values = kept_table("counting", "values")
    ends = values[values["measure"].isin(["exact_from", "exact_to"])]
    rows = []
    for (task, model, norm, site), part in ends.groupby(["task", "model", "norm", "norm_site"], sort=False):
        wide = part.pivot(index="seed", columns="measure", values="value")
        pairs = wide[["exact_from", "exact_to"]].to_numpy(float)
        exact = [f"{low:.0f}–{high:.0f}" if high else "none" for low, high in pairs]
        rows.append((str(task), str(model), "–" if norm == "none" else f"`{norm}` on its {site}", ", ".join(exact)))
    yield from markdown(("words", "network", "norm", "exact on n"), rows)
    yield from prose("counting 6")
    yield from sentences("counting", "Majority gate")
    yield from prose("counting saturated")
    yield from sentences("saturated_states")
    yield from prose("counting rational")
    yield from sentences("rational_recurrence")


def _term_changes(summary: pd.DataFrame, found: pd.DataFrame) -> Iterator[str]:
    """A row per network and place of the norm, a column per norm: the change against none, paired by seed."""
    rows = []
    by = ["task", "model", "norm_site", "measure"]
    for task, model, site, measure in found[by].drop_duplicates().itertuples(index=False, name=None):
        of = rows_where(found, task=task, model=model, norm_site=site, measure=measure)
        share, cells = measure.startswith("accuracy_"), []
        for norm in TERMS:
            one = rows_where(of, norm=norm)
            if one.empty:
                cells.append("–")
                continue
            told = change(one.iloc[0], 100 if share else 1, 1)
            cell = only_row(summary, task=task, model=model, norm=norm, norm_site=site, measure=measure)
            constant = max(cell["constant_yes"], cell["constant_no"])
            idle = share and cell["mean"] < constant
            cells.append(told + (f", to {100 * cell['mean']:.1f} %: below a constant answer" if idle else ""))
        what = f"points at {measure.removeprefix('accuracy_')}" if share else "largest exact n"
        rows.append((f"{task}, {model}, its {site}", what, str(int(of["seeds"].max())), *cells))
    yield from markdown(("network, place of the norm", "of", "seeds", *(f"`{n}`" for n in TERMS)), rows)


def traces() -> Iterator[str]:
    networks = kept_table("counting_traces", "networks")
    yield from prose("traces 1")
    yield from trace_table(networks)
    yield from prose("traces thresholds")
    yield from threshold_table()
    yield from prose("traces 2")
    yield from what_networks_show(networks)
