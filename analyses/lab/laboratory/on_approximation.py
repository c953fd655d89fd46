"""What the page says of approximation beside its tables: what a sample is off by, trained rates, longer inputs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.approximation.approximation import EVALUATION_INPUTS, EXACT, PUBLISHED_BOUNDS
from ln_probe.analyses.lab.approximation.rates import FOLLOWS, ROUNDED
from ln_probe.analyses.lab.intervals import SIGNIFICANT, holm, paired_p
from ln_probe.analyses.lab.laboratory.reading import (
    kept_about,
    kept_table,
    markdown,
    only_row,
    rows_where,
    short_power,
    with_interval,
)

LINEAR_MEMORY = ("4a", "4b")


def memory_table() -> Iterator[str]:
    """4a and 4b: trained errors beside what is attainable exactly, on the same inputs and in float64."""
    summary, optima = kept_table("approximation"), kept_table("approximation", "optima")
    errors = rows_where(summary, measure="mse", norm="none")
    errors = errors[errors["target"].isin(LINEAR_MEMORY)]
    rows = []
    for (target, kernel, width), part in errors.groupby(["target", "kernel", "width"], sort=False):
        for heads in dict.fromkeys(part["heads"]):
            cell = part[part["heads"] == heads].set_index("lr")
            trained = [_trained(cell.loc[lr]) if lr in cell.index else "–" for lr in (1e-2, 1e-3)]
            best = only_row(optima, target=target, kernel=kernel, heads=heads)
            published = cell["published"].dropna()
            bound = "< " if (target, kernel, heads) in PUBLISHED_BOUNDS else ""
            rows.append(
                (
                    f"{target} {kernel}",
                    str(heads),
                    str(width) if width else "none",
                    *trained,
                    *(_size(float(best[c])) for c in ("mse_extended", "mse_sampled", "mse")),
                    str(best["found"]),
                    "–" if published.empty else bound + short_power(float(published.iloc[0])),
                )
            )
    header = (
        "target, positions", "heads", "FFN", f"trained, lr 1e-2 (one sample: {_worst()} off in common)", "trained, lr "
        "1e-3 (as beside)", "attainable",
        f"the same on the {EVALUATION_INPUTS} inputs", "held in float64", "slopes", "published",
    )  # fmt: skip
    yield from markdown(header, rows)


def _trained(row: pd.Series) -> str:
    told = f"{short_power(row['mean'])} [{short_power(row['ci_low'])}, {short_power(row['ci_high'])}]"
    return told + (" (exact)" if row["evaluated_on"] == EXACT else "")


def _size(error: float) -> str:
    return "0" if error == 0 else short_power(error)


def evaluation_error() -> Iterator[str]:
    """What all seeds' errors are off by together, for they are measured on one sample."""
    optima = kept_table("approximation", "optima")
    told = []
    for target in LINEAR_MEMORY:
        of = rows_where(optima, target=target)
        off = 100 * of[of["mse_extended"] > ROUNDED]["sampling_error"]
        told.append(f"of {target}'s least-squares solutions {off.min():.1f} to {off.max():.1f} %")
    one = only_row(optima, target="4a", kernel="t5", heads=1)
    errors = rows_where(kept_table("approximation"), measure="mse", norm="none", dot_product=False)
    errors = errors[errors["target"].isin(LINEAR_MEMORY)]
    trained = only_row(errors, target="4a", kernel="t5", heads=1, width=0)
    below, below_here = (int((errors["mean"] < errors[c]).sum()) for c in ("optimum", "optimum_sampled"))
    # of a sample a neighbour of the optimum may be better than the optimum itself
    short = 100 * (1 - errors["mean"] / errors["optimum_sampled"]).max()
    least = f" (by {short:.2g} %, for a sample has an optimum of its own)" if below_here else ""
    yield (
        f"**What a trained error is off by.** Kept ones were measured on one sample of {EVALUATION_INPUTS} inputs, the "
        "same for all seeds: its error is common to them, and no interval over seeds holds it. The relative standard "
        f"error of a squared error on that many inputs is {' and '.join(told)}, and {_worst()} at most of any model "
        "that is affine in its inputs (no FFN); of models with an FFN it is not known. So a trained error is to be "
        "compared with the attainable one *on the same inputs*: 4a with T5's positions and one head is trained to "
        f"{trained['mean']:.4f}, below the exact {one['mse_extended']:.4f}, which on these inputs is "
        f"{one['mse_sampled']:.4f}. Of {len(errors)} trained errors (4a and 4b) {below} lie below the exact attainable "
        f"one, {below_here} below that on these inputs{least}. New runs without an FFN are measured exactly, and "
        "marked so."
    )
    yield ""


def _worst() -> str:
    return f"{100 * np.sqrt(2 / EVALUATION_INPUTS):.1f} %"


def trained_rates() -> Iterator[str]:
    """The exponents of the trained models, with intervals and Holm's p."""
    rows = []
    for r in kept_table("approximation", "rates_trained").to_dict("records"):
        told, row = r["p_holm"] < SIGNIFICANT, pd.Series(r)
        interval = with_interval(row, 1, 2, sign=True)
        rows.append(
            (
                f"{r['target']} {r['kernel']}",
                str(r["width"]) if r["width"] else "none",
                f"{r['lr']:g}",
                str(r["heads"]),
                f"**{interval}**" if told else interval,
                f"{r['p_holm']:.2g}",
                f"{r['residual']:.2g}" + ("" if r["residual"] < FOLLOWS else ": no power"),
            )
        )
    header = ("target, positions", "FFN", "lr", "heads", "a of H^-a, trained", "Holm", "off, decades")
    yield from markdown(header, rows)


def longer_sentences() -> Iterator[str]:
    """What longer inputs do to each encoding."""
    summary = rows_where(kept_table("longer_inputs"), measure="relative_mse")
    fitted, longest = int(summary["length"].min()), int(summary["length"].max())
    one_longer = sorted(set(summary["length"]))[1]
    seeds, steps = int(summary["seeds"].max()), kept_about("longer_inputs")["settings"]["training"]["steps"]
    largest = only_row(kept_table("approximation", "optima"), target="4a", kernel="t5", heads=16)["largest_coefficient"]

    def at(length: int, target: str, kernel: str, heads: int) -> pd.Series:
        return only_row(summary, target=target, kernel=kernel, heads=heads, length=length)

    near = rows_where(summary, target="4b", length=longest)
    cell = ("4a", "t5", 16)
    yield (
        f"4b lies in the first lags, and every encoding keeps it (at {longest} inputs "
        f"{short_power(near['solved'].max())} of the best constant's error at most where solved, "
        f"{short_power(near['mean'].max())} where trained). Of 4a a logarithmic head of slope 1/2 is exact at {fitted} "
        f"inputs and nowhere else ({at(longest, '4a', 'log', 1)['solved']:.2f} at {longest}): the softmax divides by a "
        "larger sum. Linear heads keep their near lags and miss the new ones (16: "
        f"{short_power(at(fitted, '4a', 'linear', 16)['solved'])} and "
        f"{at(longest, '4a', 'linear', 16)['solved']:.2f}). T5's positions, constant from lag 128 on, give every new "
        "input the weight of the far ones; 16 least-squares heads cancel each other with coefficients of up to "
        f"{largest:.0e}, which holds at {fitted} inputs alone ({at(fitted, *cell)['solved']:.2g}, and "
        f"{at(one_longer, *cell)['solved']:.3g} at {one_longer}). Trained heads ({seeds} seeds, {steps} steps) find no "
        "such cancellation: on T5's positions and 4000 inputs 16 of them leave "
        f"{with_interval(at(4000, *cell), 1, 2)}, one {with_interval(at(4000, '4a', 't5', 1), 1, 2)}; {_more_heads()} "
        f"{_longer_by_seed(fitted, longest)}"
    )
    yield ""


def _logs(**where: object) -> pd.DataFrame:
    """Logarithms of the trained errors of every seed."""
    table = rows_where(kept_table("longer_inputs", "errors"), measure="relative_mse", **where)
    return table.assign(value=np.log(table["value"].astype(float)))


def _more_heads() -> str:
    wide = _logs(target="4a", kernel="t5", length=4000).pivot(index="seed", columns="heads", values="value")
    p = paired_p((wide[16] - wide[1]).to_numpy(float))
    said = "differ" if p < SIGNIFICANT else "cannot be told apart"
    return f"paired by seed they {said} (p {p:.2g})."


def _longer_by_seed(fitted: int, longest: int) -> str:
    p = []
    for _, part in _logs(target="4b").groupby(["kernel", "heads"], sort=False):
        wide = part.pivot(index="seed", columns="length", values="value")
        p.append(paired_p((wide[longest] - wide[fitted]).to_numpy(float)))
    told = int((holm(p) < SIGNIFICANT).sum())
    return (
        f"On 4b, of {len(p)} encodings and numbers of heads the trained error at {longest} inputs can be told from "
        f"that at {fitted} in {told or 'none'} (paired by seed, Holm; {part['seed'].nunique()} seeds, which could tell "
        "large changes alone)."
    )


def product_on_text() -> Iterator[str]:
    """Where the measured differences of the dot product lie, size by size."""
    table = kept_table("dot_product_text", "dot_product")
    better, told = int((table["mean"] < 0).sum()), table[table["p_holm"] < SIGNIFICANT]
    overlap = table["ci_low"].max() <= table["ci_high"].min()
    at = f" (at {', '.join(f'{r} layers' for r in told['layers'])})" if len(told) else ""
    yield (
        f"With the dot product the mean loss is lower, as published, in {better} of {len(table)} sizes; "
        f"{len(told) or 'none'} of these differences {'is' if len(told) == 1 else 'are'} told after Holm's "
        f"adjustment{at}. The published gap grows with the model; here the intervals of all sizes "
        f"{'overlap' if overlap else 'do not all overlap'}."
    )
    yield ""
