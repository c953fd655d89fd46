"""What the encoders show: masked loss and unselectable keys, and what leaving out a term changes, paired by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.intervals import doubt
from ln_probe.analyses.lab.language_model.published_language_model import BEFORE, FRACTION, HEAD, NORMALIZED
from ln_probe.analyses.lab.results import Results, contrasted, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYERS = 4
KEYS = ["shape", "norm", "step", "layer", "space", "measure"]
LOSS, ACCURACY = "valid_loss", "valid_accuracy"
LOSSES = (LOSS, ACCURACY)
WHOLE = "layernorm"  # what the others are compared with
LEFT_OUT = {
    "projection_only": "scaling where attention reads",
    "scaling_only": "projection where attention reads",
    "projection_only everywhere": "scaling everywhere",
    "scaling_only everywhere": "projection everywhere",
}
WIDTH = 0.17  # of a bar


def findings(
    values: pd.DataFrame, losses: pd.DataFrame, settings: Mapping[str, Any], lost: tuple[str, ...] = ()
) -> Results:
    """Tables, plots and sentences.

    Args:
        values: KEYS, `seed`, `value`: unselectable shares at kept steps, held-out loss and accuracy at the last.
        losses: the whole curves, for the record.
        settings: of the runs, with `training` and `unigram_loss`. lost: runs that diverged.
    """
    shares = values["measure"].isin((FRACTION, ACCURACY))
    parts = [summarize(values[shares], KEYS, kind="share"), summarize(values[~shares], KEYS)]
    summary = pd.concat([p for p in parts if len(p)], ignore_index=True)
    differences = effects_of_terms(values, int(settings["training"]["steps"]))
    return Results(
        summary=summary,
        tables={"seeds": values, "curves": losses, "effects": differences},
        figures={"unselectable": _draw(summary)},
        conclusions=tuple(_sentences(summary, differences, settings)),
        settings={**settings, "seeds": sorted({int(s) for s in values["seed"]})},
        diverged=lost,
    )


def effects_of_terms(values: pd.DataFrame, step: int) -> pd.DataFrame:
    """What leaving out a term changes at a step against LayerNorm: loss, and unselectable keys (mean over layers).

    Returns:
        shape, norm, space, measure, and the columns of `contrasted`; Holm's p is over all rows. After a norm that
        scales no key is unselectable by theorem, so what is normalized is not compared.
    """
    told = values[(values["step"] == step) & values["measure"].isin((LOSS, FRACTION)) & (values["space"] != NORMALIZED)]
    same = ["shape", "space", "measure", "seed"]
    means = told.groupby([*same, "norm"], sort=False, as_index=False)["value"].mean()
    pairs = means.merge(means[means["norm"] == WHOLE][[*same, "value"]], on=same, suffixes=("", "_whole"))
    pairs = pairs[pairs["norm"] != WHOLE]
    keys = ["shape", "norm", "space", "measure"]
    if pairs.empty:
        return pd.DataFrame(columns=keys)
    return contrasted(pairs.assign(value=pairs["value"] - pairs["value_whole"]), keys)


def _interval(row: Mapping[Any, Any], scale: float = 1.0, digits: int = 3, sign: bool = False) -> str:
    plus = "+" if sign else ""
    center, low, high = (f"{scale * float(row[c]):{plus}.{digits}f}" for c in ("mean", "ci_low", "ci_high"))
    return center if np.isnan(row["ci_low"]) else f"{center} [{low}, {high}]"


def _sentences(summary: pd.DataFrame, differences: pd.DataFrame, settings: Mapping[str, Any]) -> Iterator[str]:
    last = summary[summary["step"] == settings["training"]["steps"]]
    for shape in dict.fromkeys(last["shape"]):
        part = last[last["shape"] == shape]
        loss = part[(part["measure"] == LOSS) & (part["norm"] == WHOLE)]
        if len(loss):
            yield (
                f"{shape}: held-out masked loss with LayerNorm {_interval(loss.iloc[0].to_dict())} nats (seeds: "
                f"{int(loss['seeds'].iloc[0])}); token frequencies alone give {settings['unigram_loss']:.3f}."
            )
        for row in differences[differences["shape"] == shape].to_dict("records"):
            if row["measure"] == LOSS:
                what, told = "the held-out masked loss", f"{_interval(row, sign=True)} nats"
            else:
                where = "as heads see them" if row["space"] == HEAD else "before the norm"
                what = f"the share of unselectable keys {where} (mean over layers)"
                told = f"{_interval(row, 100, 1, sign=True)} points"
            clear = doubt(row["p_holm"], row["seeds"])
            term = LEFT_OUT[row["norm"]]
            yield f"{shape}: leaving out {term} changes {what} by {told} (seeds: {int(row['seeds'])}){clear}."


def _draw(summary: pd.DataFrame) -> Figure:
    """Unselectable keys at the last step, a panel per shape and space: bars over layers, whiskers over seeds."""
    from matplotlib.figure import Figure as NewFigure

    rows = summary[(summary["measure"] == FRACTION) & (summary["step"] == summary["step"].max())]
    shapes, spaces = list(dict.fromkeys(rows["shape"])), (BEFORE, NORMALIZED, HEAD)
    figure = NewFigure(figsize=(11, 2.8 * max(1, len(shapes))), layout="constrained")
    axes = figure.subplots(max(1, len(shapes)), len(spaces), sharey=True, squeeze=False)
    norms = list(dict.fromkeys(rows["norm"]))
    for line, shape in zip(axes, shapes, strict=True):
        for ax, space in zip(line, spaces, strict=True):
            for number, norm in enumerate(norms):
                one = rows[(rows["shape"] == shape) & (rows["space"] == space) & (rows["norm"] == norm)]
                reach = np.nan_to_num(np.vstack([one["mean"] - one["ci_low"], one["ci_high"] - one["mean"]]))
                at = one["layer"] + 1 + WIDTH * (number - (len(norms) - 1) / 2)
                ax.bar(at, one["mean"], 0.9 * WIDTH, yerr=reach, color=f"C{number}", label=norm, error_kw={"lw": 0.8})
            ax.set(title=f"{shape}: {space}", xticks=range(1, LAYERS + 1), xlabel="layer")
        line[0].set_ylabel("unselectable keys")
    axes[0, 0].legend(fontsize=7)
    return figure
