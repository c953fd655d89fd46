"""The plan of a run as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ln_probe.batch.cost import Cost
from ln_probe.batch.plan import Run
from ln_probe.batch.suite import Target


def cost_table(run: Run, costs: Sequence[tuple[Target, Cost | None]], there: Mapping[Target, int], workers: int) -> str:
    """A line per checkpoint, and the sum; what cannot be told without loading a model is a question mark."""
    rows = [("checkpoint", "units", "done", "tokens", "core time", "memory", "disk")]
    known = [c for _, c in costs if c is not None]
    for target, c in costs:
        if c is None:
            rows.append((target.label, "failed:", target.error, "", "", "", ""))
        else:
            rows.append(
                (
                    target.label,
                    str(c.units),
                    str(there.get(target, 0)),
                    number(c.tokens),
                    duration(c.seconds),
                    size(c.memory_bytes),
                    size(c.disk_bytes),
                )
            )
    seconds = math.fsum(c.seconds for c in known)
    disk = math.fsum(c.disk_bytes for c in known)
    plain = [r for r in rows if r[1] != "failed:"]
    widths = [max(len(r[i]) for r in plain) for i in range(len(rows[0]))]
    lines = [
        f"{r[0]}  failed: {r[2]}"
        if r[1] == "failed:"
        else "  ".join(v.ljust(w) if i == 0 else v.rjust(w) for i, (v, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    units, each, shards = sum(c.units for c in known), run.corpus.per_shard, run.corpus.shards
    lines.append(
        f"{units} units, {shards} shard{'s' * (shards != 1)} of {each} prompt{'s' * (each != 1)}: "
        f"about {duration(seconds / workers)} with {workers} worker{'s' * (workers != 1)} (a rough estimate), "
        f"at most {size(disk)} of results under {run.work} until the reports are made"
    )
    return "\n".join(lines)


def number(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:,.0f}"


def duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "?"
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(value: float) -> str:
    if math.isnan(value):
        return "?"
    return f"{value / 2**20:.0f} MB" if value < 2**30 else f"{value / 2**30:.1f} GB"
