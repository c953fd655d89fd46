"""A report in one row, and what to call several of them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ln_probe.reporting.contents import Contents


def step_of(report: Contents) -> int | None:
    """The training step a report is about: `provenance["model"]["step"]`, or the number in a revision `step1000`."""
    model = report.provenance.get("model", {})
    if isinstance(model.get("step"), int):
        return int(model["step"])
    match = re.fullmatch(r"(?:step[-_ ]?)?(\d+)", str(model.get("revision") or ""))
    return int(match[1]) if match else None


def told_apart(reports: Sequence[Contents]) -> tuple[str, ...]:
    """A name per report: the model's, with its step or a number where several share it."""
    plain = [r.name for r in reports]
    steps = [step_of(r) for r in reports]
    found: list[str] = []
    for name, step in zip(plain, steps, strict=True):
        called = name if plain.count(name) == 1 or step is None else f"{name} step {step}"
        again = sum(f == called or f.startswith(f"{called} (") for f in found)
        found.append(called if not again else f"{called} ({again + 1})")
    return tuple(found)


def overview(report: Contents) -> dict[str, float | int | None]:
    """One row of figures about a report: shares over all keys, medians over norms and heads."""
    norms, heads = report.layernorms, report.heads
    found: dict[str, float | int | None] = {"step": step_of(report), "norms": len(norms)}
    found["mean_share"] = float(norms["mean_share"].median()) if len(norms) else math.nan
    for variant, ending in (("intact", ""), ("no_scaling", "_no_scaling")):
        rows = heads[(heads["space"] == "head") & (heads["variant"] == variant)] if len(heads) else heads
        keys = rows["keys"].sum() if len(rows) else 0
        found[f"unselectable{ending}"] = rows["unselectable"].sum() / keys if keys else math.nan
        for name, column in (
            ("attainable", "attainable_last_median"),
            ("margin", "margin_median"),
            ("entropy_ratio", "entropy_ratio"),
        ):
            found[f"{name}{ending}"] = float(rows[column].median()) if len(rows) else math.nan
    return found
