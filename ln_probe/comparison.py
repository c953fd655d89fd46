"""Several reports side by side: a row of summary for each, heads by model, and paired loss changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ln_probe.analyses.probes import statistics, wording
from ln_probe.analyses.probes.tables import SUMMARY
from ln_probe.analyses.text import disarmed, shortened, step_named
from ln_probe.hooks.edits import GROUPS
from ln_probe.hooks.norm import INTACT, SCALING_FROZEN
from ln_probe.hooks.task import Objective
from ln_probe.report import Report

if TYPE_CHECKING:
    from ln_probe.page.figures import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Reports side by side.

    Attributes:
        names: a different one per report; reports: the reports themselves.
        summary: a row per report (`ln_probe.analyses.probes.tables.SUMMARY`): the loss and its difference from the
            first report's, sinks, shares and medians over heads, intact and with scaling frozen.
        paired: a row per report but the first, sites and variant: how much more its loss changes than the first
            one's on the `n` prompts that both have, with a paired 95 % CI and p (Holm-adjusted over groups of norms, or
            over single norms); only reports on the same tokens and layers and of the same loss are paired.
        notes: differences from the first report other than the model (prompts, layers, version).

    Example:
        >>> both = ln_probe.compare([report, report], names=["a", "b"])
        >>> both.summary[["model", "loss"]]
    """

    names: tuple[str, ...]
    reports: tuple[Report, ...]
    summary: pd.DataFrame
    paired: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def by_head(self) -> pd.DataFrame:
        """`Report.by_head` of all reports side by side: a row per layer and head, columns (measure, name)."""
        frames = [report.by_head().set_index(["layer", "head"]) for report in self.reports]
        wide: pd.DataFrame = pd.concat(dict(zip(self.names, frames, strict=True)), axis=1).swaplevel(axis=1)
        return wide[frames[0].columns]

    def __repr__(self) -> str:
        return f"Comparison({', '.join(map(repr, self.names))})"

    def _repr_html_(self) -> str:
        from markupsafe import Markup

        from ln_probe.page import render
        from ln_probe.page.index import losses

        rows = self.summary.dropna(axis=1, how="all")
        rows = rows.assign(model=[shortened(disarmed(name)) for name in rows["model"]])
        table = Markup(rows.to_html(index=False, float_format="{:.4g}".format))
        pictures = [drawing.svg for drawing in losses(self.names, self.reports)[:1]]
        name, notes = " · ".join(self.names), self.notes
        return render("cell.html", name=name, findings=[], notes=notes, pictures=[*pictures, table])

    def figure(self) -> Figure:
        """Draw the loss changes of all models with their 95 % CIs: a panel per term, a line per model.

        Example:
            >>> ln_probe.compare([report, report], names=["a", "b"]).figure().savefig("losses.svg")
        """
        from ln_probe.page.figures import forest

        return forest(self.names, self.reports)


def compare(reports: Sequence[Report], names: Sequence[str] | None = None) -> Comparison:
    """Compare several reports: a row of summary for each, and their loss changes paired by prompt.

    Args:
        reports: at least one.
        names: one name per report; None: the models' names, with the training step or a number where two are equal.

    Raises:
        ValueError: names that are not one per report and all different.
        TypeError: no reports, or something that is not a Report.

    Example:
        >>> ln_probe.compare([report, report], names=["before", "after"]).summary
    """
    reports = tuple(reports)
    if not reports or not all(isinstance(report, Report) for report in reports):
        raise TypeError("compare takes at least one Report; load a saved one with ln_probe.load_report")
    names = labels(reports) if names is None else tuple(map(str, names))
    if len(names) != len(reports) or len(set(names)) != len(names):
        raise ValueError(f"names must be {len(reports)} different ones, one per report, got {list(names)}")
    notes = setup_differences(names, reports)
    return Comparison(names, reports, summary(names, reports), paired(names, reports), notes)


def step_of(report: Report) -> int | None:
    """Return the training step of a report, or None.

    It is `provenance["model"]["step"]`, or in a revision `step1000`, or in a folder's name, `checkpoint-500`.
    """
    model = report.provenance.get("model", {})
    if isinstance(model.get("step"), int):
        return int(model["step"])
    step = step_named(str(model.get("revision") or ""))
    return step_named(_checkpoint_folder(report.name)) if step is None else step


def run_of(report: Report) -> str:
    """Return the name that the checkpoints of a run share: the model's, or the folder above `checkpoint-500`."""
    if step_named(_checkpoint_folder(report.name)) is None:
        return report.name
    return str(PurePath(report.name).parent)


def _checkpoint_folder(name: str) -> str:
    path = PurePath(name)
    return path.name if len(path.parts) > 1 else ""


def labels(reports: Sequence[Report]) -> tuple[str, ...]:
    """Return a name per report: the model's, with its step or a number where several share it."""
    plain = [r.name for r in reports]
    names: list[str] = []
    for report in reports:
        step = step_of(report)
        name = report.name
        if plain.count(name) > 1 and step is not None:
            name = f"{name} step {step}"
        equal = sum(other == name or other.startswith(f"{name} (") for other in names)
        names.append(f"{name} ({equal + 1})" if equal else name)
    return tuple(names)


def summary(names: Sequence[str], reports: Sequence[Report]) -> pd.DataFrame:
    """Return a row per report (`ln_probe.analyses.probes.tables.SUMMARY`)."""
    rows = [
        {"model": name, **overview(report), **_loss(report, reports[0])}
        for name, report in zip(names, reports, strict=True)
    ]
    return pd.DataFrame(rows, columns=SUMMARY.names)


def _loss(report: Report, first: Report) -> dict[str, float]:
    """Return the intact loss over a report's prompts, and its difference from another's on the same prompts."""
    rows, of_first = (_intact(r) for r in (report, first))
    if not len(rows):
        return {}
    row = {"loss": float((rows["loss"] * rows["n"]).sum() / rows["n"].sum())}
    both = rows.merge(of_first, on="prompt", suffixes=("", "_first"))
    if report is not first and len(both) and comparable(first, report, (_PROMPTS, _LOSS)):
        change = (both["loss"] - both["loss_first"]) * both["n"]
        inference = _infer(both, change, first)
        row["loss_difference"] = float(change.sum() / both["n"].sum())
        row |= {"loss_difference_low": inference.low, "loss_difference_high": inference.high}
    return row


def _infer(rows: pd.DataFrame, change: pd.Series, report: Report) -> statistics.MeanInference:
    """Return the inference on summed changes of prompts over their groups, resampled within strata."""
    prompts = rows["prompt"].to_numpy(int)
    groups = prompts if report.constants is None else report.constants.groups[prompts]
    sums = statistics.by_group(change.to_numpy(float), groups)
    weights = statistics.by_group(rows["n"].to_numpy(float), groups)
    _, strata = np.unique(rows["stratum"], return_inverse=True)
    _, of_groups = np.unique(groups, return_index=True)
    return statistics.infer_mean(sums, weights, strata[of_groups])


def _intact(report: Report) -> pd.DataFrame:
    """Return the loss of the intact model, by prompt; prompts without a prediction are left out."""
    rows = report.causal_prompts.drop_duplicates("prompt")[["prompt", "stratum", "loss", "n"]]
    known: pd.DataFrame = rows[rows["loss"].notna() & (rows["n"] > 0)]
    return known


def overview(report: Report) -> dict[str, float | int | None]:
    """Summarize a report in one row: shares over all keys, medians over heads."""
    heads, sinks = report.heads, report.sink_heads
    row: dict[str, float | int | None] = {"step": step_of(report)}
    for variant, ending in ((INTACT.name, ""), (SCALING_FROZEN.name, "_no_scaling")):
        of_variant = heads[heads["variant"] == variant]
        row[f"unselectable{ending}"] = wording.unselectable_share(heads, variant)
        for name, column in (
            ("attainable", "attainable_median"),
            ("margin", "margin_median"),
            ("entropy_ratio", "entropy_ratio"),
        ):
            row[f"{name}{ending}"] = float(of_variant[column].median())
    return row | {name: float(sinks[name].mean()) for name in ("sink_rate", "first_attention")}


# What reports have in common apart from the model, by the note where they differ. Losses are paired where they
# share the first three.
_PAIRED = _PROMPTS, _LOSS, _LAYERS = "on other prompts", "by another loss", "in other layers"
_SETUP: dict[str, Callable[[Report], object]] = {
    _PROMPTS: lambda report: report.provenance.get("prompts", {}).get("sha256", object()),
    _LOSS: lambda report: report.provenance.get("loss", {}).get("name", Objective.name),
    _LAYERS: lambda report: wording.in_layers(report.provenance),  # that groups of norms are of
    "with another version of ln_probe": lambda report: report.provenance.get("ln_probe"),
}


def comparable(one: Report, other: Report, setup: Sequence[str] = _PAIRED) -> bool:
    """Whether two reports share these parts of their setup."""
    return all(_SETUP[part](one) == _SETUP[part](other) for part in setup)


def setup_differences(names: Sequence[str], reports: Sequence[Report]) -> tuple[str, ...]:
    """Return a sentence per kind of difference, except the model, between the first and the other reports."""
    first = reports[0] if reports else Report()
    others = list(zip(names, reports, strict=True))[1:]
    unpaired = ": figures side by side differ for that, too, and losses are not paired"
    sentences = []
    for what, part in _SETUP.items():
        if different := [name for name, report in others if part(report) != part(first)]:
            rest = unpaired if what in _PAIRED else ""
            sentences.append(f"{', '.join(different)}: measured {what} than {names[0]}{rest}.")
    return tuple(sentences)


_PAIRED_COLUMNS = ("model", "against", "sites", "variant", "difference", "low", "high", "p", "prompts_more", "n")


def paired(names: Sequence[str], reports: Sequence[Report]) -> pd.DataFrame:
    """Return differences of `causal_prompts.delta_loss` from the first report's, over the prompts that both have.

    Reports on other tokens or layers than the first one's, or of another loss, are left out.
    """
    first, key = reports[0], ["prompt", "sites", "variant"]
    rows: list[dict[str, object]] = []
    for name, report in zip(names[1:], reports[1:], strict=True):
        one, two = (r.tables["causal_prompts"] for r in (first, report))
        if not len(one) or not len(two) or not comparable(first, report):
            continue
        both = one.merge(two, on=key, suffixes=("", "_other"))
        both = both[both["n"] > 0]
        for (sites, variant), of_edit in both.groupby(["sites", "variant"], sort=False):
            each = of_edit["delta_loss_other"] - of_edit["delta_loss"]
            shift = of_edit["shift_other"].fillna(0.0) - of_edit["shift"].fillna(0.0)
            inference = _infer(of_edit, each * of_edit["n"] + shift, first)
            rows.append(
                {
                    "model": name,
                    "against": names[0],
                    "sites": sites,
                    "variant": variant,
                    "difference": float((each * of_edit["n"]).sum() / of_edit["n"].sum()),
                    "low": inference.low,
                    "high": inference.high,
                    "p": inference.p,
                    "prompts_more": int((each > 0).sum()) if np.isfinite(each).all() else np.nan,
                    "n": len(of_edit),
                }
            )
    table = pd.DataFrame(rows, columns=list(_PAIRED_COLUMNS))
    groups, p = table["sites"].isin(GROUPS), table["p"].copy()
    for family in (groups, ~groups):
        known = table.loc[family, "difference"].notna()
        p[family] = statistics.holm(p[family].to_list(), known.to_list())
    return table.assign(p=p)
