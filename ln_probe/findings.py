"""What the tables of a report say, in plain sentences; every number is computed from a table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ln_probe.render.text import visible

if TYPE_CHECKING:
    from ln_probe.report import Report

NOTEWORTHY = 0.01  # a change of less than a hundredth, in share of attention or of entropy, is not pointed out


@dataclass(frozen=True)
class Finding:
    """A sentence, and the picture of the page that shows it."""

    text: str
    picture: str


def findings(report: Report) -> list[Finding]:
    """Sentences about one report, the ones that matter most to attention first; empty for an empty report."""
    random_angle = float(report.provenance.get("random_angle_deg", math.nan))
    said = {
        "causal": _causal(report.causal),
        "attainable": _attainable(report.heads),
        "unselectable": _selectable(report.heads, "head", "As attention sees them, per head"),
        "entropy": _spread(report.heads),
        "projection": _projection(report.layernorms),
        "norms": _scaling(report.layernorms),
        "margins": _margins(report.heads),
        "geometry": _selectable(report.heads, "normalized", "At the norm's output"),
        "table-unembedding": _unembedding(report.unembedding),
        "angle": _uniform(report.heads, random_angle),
    }
    found = [Finding(text, picture) for picture, texts in said.items() for text in texts]
    if not found and not len(report.layernorms):
        return [Finding("The model has no normalization: there is nothing to take apart.", "")]
    return found


def _largest(rows: pd.DataFrame, values: pd.Series[float]) -> pd.Series[Any]:
    """The row at which `values` is largest."""
    return rows.iloc[int(np.nanargmax(values.to_numpy(float)))]


def _variant(heads: pd.DataFrame, variant: str, space: str = "head") -> pd.DataFrame:
    return heads[(heads["space"] == space) & (heads["variant"] == variant)]


def _causal(effects: pd.DataFrame) -> list[str]:
    """What the loss is without scaling, projection and both at every attention norm, and where it matters most."""
    if not len(effects) or effects["delta_loss"].isna().all():
        return []
    rows: dict[tuple[str, str], dict[Any, Any]] = {(r["sites"], r["variant"]): r for r in effects.to_dict("records")}
    said = []
    if ("attention", "intact") in rows:
        parts = []
        for variant, name in (("no_scaling", "scaling"), ("no_projection", "projection"), ("neither", "both")):
            row = rows.get(("attention", variant))
            if row is None:
                continue
            if row["no_op"]:
                parts.append(f"without {name} not at all, by construction")
                continue
            if math.isnan(row["delta_loss"]):  # the notes say why
                continue
            change = float(row["delta_loss"])
            text = f"without {name} by {f'{change:+.2g}' if abs(change) >= 1e-3 else 'less than 0.001'} nats per token"
            if not math.isnan(row["delta_loss_low"]):
                text += f" (95 % interval {row['delta_loss_low']:+.2g} to {row['delta_loss_high']:+.2g})"
            parts.append(text + _kept(row))
        if parts:
            said.append(f"Taken away at every attention norm, the loss changes: {'; '.join(parts)}.")
    alone = effects[effects["divisor"].notna() & (effects["variant"] == "no_scaling") & (effects["sites"] != "final")]
    if len(alone) > 1 and alone["delta_loss"].notna().any():
        worst = _largest(alone, alone["delta_loss"])
        said.append(
            f"The one norm whose scaling the loss needs most is {worst['sites']}: {worst['delta_loss']:+.2g} nats per "
            f"token without it, from {_number(worst['loss'] - worst['delta_loss'])}{_kept(worst)}."
        )
    return said


def _kept(row: Any) -> str:
    tail = float(row["delta_loss_tail"])
    return "" if math.isnan(tail) else f", {tail:+.2g} if position 0 keeps its scaling"


def _medians(heads: pd.DataFrame, column: str) -> tuple[float, float]:
    """The median head's value, intact and without scaling; the second is NaN where that changes nothing."""
    if not len(heads):
        return math.nan, math.nan
    frozen = _variant(heads, "no_scaling")
    changes_nothing = len(frozen) > 0 and bool((frozen["no_op"] != "").all())
    return (
        float(_variant(heads, "intact")[column].median()),
        math.nan if changes_nothing else float(frozen[column].median()),
    )


def _margins(heads: pd.DataFrame) -> list[str]:
    """How far the strongest query can raise a key above the others."""
    one, two = _medians(heads, "margin_median")
    if math.isnan(one):
        return []
    text = (
        f"A typical key can be raised {_number(one)} nats above every other key by the strongest query its head can "
        "make"
    )
    if not math.isnan(two):
        text += f"; with scaling replaced by a constant, {_number(two)}"
    low_one, low_two = _medians(heads, "margin_p05")
    if not math.isnan(low_two) and max(low_one, low_two) > 0:
        text += f". For the hardest twentieth of keys: {_number(low_one)} against {_number(low_two)} nats"
    return [text + "."]


def _attainable(heads: pd.DataFrame) -> list[str]:
    """How much attention keys can get, and how much less or more without scaling."""
    one, two = _medians(heads, "attainable_median")
    if math.isnan(one):
        return []
    low_one, low_two = _medians(heads, "attainable_p05")
    if math.isnan(two):
        return [
            f"From queries of the size that occur, a typical key can get {_percent(one)} of the attention of the last "
            f"position, one of the hardest twentieth {_percent(low_one)}."
        ]
    text = (
        f"From queries of the size that occur, a typical key can get {_percent(one)} of the attention of the last "
        f"position ({_percent(two)} without scaling), one of the hardest twentieth {_percent(low_one)} "
        f"({_percent(low_two)})"
    )
    per_layer = {v: _variant(heads, v).groupby("layer")["attainable_p05"].median() for v in ("intact", "no_scaling")}
    change = (per_layer["no_scaling"] - per_layer["intact"]).dropna()
    if len(change) > 1 and change.abs().max() >= NOTEWORTHY:
        layer = int(change.index[int(change.abs().to_numpy().argmax())])
        before, after = (float(per_layer[v][layer]) for v in ("intact", "no_scaling"))
        text += (
            f"; it matters most in layer {layer}, where without scaling its hardest keys can get {_percent(after)} "
            f"instead of {_percent(before)}"
        )
    return [text + "."]


def _selectable(heads: pd.DataFrame, space: str, where: str) -> list[str]:
    """Keys in the hull of the others, in one space."""
    if not len(heads) or heads["keys"].isna().all():
        return []
    parts = []
    for variant, name in (("intact", "intact"), ("no_scaling", "without scaling"), ("neither", "without both")):
        rows = _variant(heads, variant, space)
        if len(rows) and rows["keys"].sum():
            parts.append(f"{100 * rows['unselectable'].sum() / rows['keys'].sum():.1f} % {name}")
    if not parts:
        return []
    rows = heads[heads["space"] == space]
    known = ""
    if (rows["by_theorem"] != "").all():
        known = f" All by theorem ({rows['by_theorem'].iloc[-1]}), not a finding."
    elif (rows[rows["variant"] == "intact"]["by_theorem"] != "").all():
        known = " The intact figure is so by theorem (keys on a sphere)."
    return [f"{where}, keys that no query can select: {', '.join(parts)}.{known}"]


def _spread(heads: pd.DataFrame) -> list[str]:
    """Where taking scaling away changes how widely attention is spread."""
    if not len(heads):
        return []
    per_layer = {v: _variant(heads, v).groupby("layer")["entropy_ratio"].median() for v in ("intact", "no_scaling")}
    change = (per_layer["no_scaling"] - per_layer["intact"]).dropna()
    if not len(change) or change.abs().max() < NOTEWORTHY:
        return []
    layer = int(change.index[int(change.abs().to_numpy().argmax())])
    one, two = (float(per_layer[v][layer]) for v in ("intact", "no_scaling"))
    return [
        f"Scaling decides how widely attention spreads, most of all in layer {layer}: with its divisor constant, the "
        f"median head's entropy goes from {_percent(one)} to {_percent(two)} of the greatest possible."
    ]


def _projection(norms: pd.DataFrame) -> list[str]:
    rows = norms[norms["kind"].isin(["layernorm", "projection_only"])] if len(norms) else norms
    if not len(rows) or rows["mean_share"].isna().all():
        return []
    if rows["state"].str.contains("centred").all():
        return ["Projection removes nothing: the residual stream is already centred at every norm, by construction."]
    worst = _largest(rows, rows["mean_share_tail"].fillna(rows["mean_share"]))
    share = worst["mean_share_tail"] if not math.isnan(worst["mean_share_tail"]) else worst["mean_share"]
    middle = rows["mean_share_tail"].fillna(rows["mean_share"]).median()
    return [
        f"Projection removes {_percent(middle)} of a vector's squared length at the median norm and at most "
        f"{_percent(share)} ({worst['site']}); the streams stand at {rows['angle_to_ones_deg_tail'].median():.1f}° to "
        "the ones-vector (90° would leave projection nothing to do)."
    ]


def _scaling(norms: pd.DataFrame) -> list[str]:
    rows = norms[norms["kind"].isin(["layernorm", "rmsnorm", "scaling_only"])] if len(norms) else norms
    if not len(rows) or rows["norm_before_mean"].isna().all():
        return []
    first = (rows["sigma_mean"] / rows["sigma_mean_tail"]).max()
    spread = _largest(rows, rows["norm_before_cv_tail"].fillna(0))
    text = (
        f"What scaling evens out is largest at {spread['site']}: input lengths there vary by "
        f"{_percent(spread['norm_before_cv_tail'])} of their mean"
    )
    if not math.isnan(first) and first > 1.5:
        at = _largest(rows, rows["sigma_mean"] / rows["sigma_mean_tail"])
        text += f"; position 0 alone raises the mean divisor {first:.1f}-fold at {at['site']}, so it is kept apart"
    return [text + "."]


def _unembedding(tokens: pd.DataFrame) -> list[str]:
    if not len(tokens):
        return []
    stuck = int((tokens["verdict"] != "selectable").sum())
    text = f"{stuck} tokens can never be the most likely one" if stuck else "Every token can be the most likely one"
    if not tokens["attainable"].isna().all():
        low = tokens.iloc[int(np.nanargmin(tokens["attainable"].to_numpy(float)))]
        hardest = f"the hardest of those looked at ({visible(low['token'])})"
        if low["attainable"] > 0.5:
            text += f", and even {hardest} can get {_percent(low['attainable'])} of the probability"
        else:
            text += (
                f"; {hardest} can get at most {_percent(low['attainable_upper'])} of the probability, from any "
                "residual vector"
            )
    return [text + "."]


def _uniform(heads: pd.DataFrame, random_angle: float) -> list[str]:
    rows = _variant(heads, "intact") if len(heads) else heads
    if not len(rows) or rows["entropy_ratio"].isna().all():
        return []
    top = _largest(rows, rows["entropy_ratio"])
    text = (
        f"The most uniform head is {int(top['layer'])}.{int(top['head'])} (layer.head): its attention has "
        f"{_percent(top['entropy_ratio'])} of the greatest possible entropy"
    )
    if not rows["uniform_angle_deg"].isna().all():
        near = _largest(rows, -rows["uniform_angle_deg"])
        text += (
            f"; the queries nearest the uniform direction are those of {int(near['layer'])}.{int(near['head'])}, at "
            f"{near['uniform_angle_deg']:.0f}° (a random direction: {random_angle:.0f}°)"
        )
    return [text + "."]


def _number(value: float) -> str:
    return f"{value:.3g}"


def _percent(share: float) -> str:
    if 0 < share < 1e-5:
        return "less than 0.001 %"
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
