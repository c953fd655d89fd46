"""From the pieces of all probes to a report: the one way in which reports are made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import pandas as pd

from ln_probe.analyses import tables as declared
from ln_probe.analyses.attention_spread import random_angle
from ln_probe.analyses.calibration import Calibration
from ln_probe.analyses.probes import registry
from ln_probe.analyses.probes.protocol import Context, Failure, Marks, Piece, Probe, whole
from ln_probe.analyses.schema import Part, Table, TableError, joined
from ln_probe.hooks.objective import Objective
from ln_probe.loading.provenance import ModelSource
from ln_probe.measuring.recording import marked
from ln_probe.measuring.settings import Settings
from ln_probe.reporting.exhibits import Exhibits
from ln_probe.reporting.report import Report
from ln_probe.reporting.software import __version__, versions


def assemble(
    probes: Sequence[Probe],
    pieces: Mapping[str, Sequence[Piece | Failure]],
    context: Context,
    *,
    exhibits: Exhibits,
    provenance: Mapping[str, Any],
    notes: Sequence[str] = (),
    failures: Sequence[Failure] = (),
) -> Report:
    """A report of what the probes kept.

    Args:
        probes: those that ran.
        pieces: of each probe by name, in the order of the prompts; none for one that needs the calibration alone.
        context: what finishing needs.
        exhibits: for pictures, their keys not marked yet.
        provenance: where it comes from.
        notes: what a reader has to know, before what the probes say.
        failures: of probes that are not here.

    A probe that raises, or whose tables do not match their declarations, is named in the report's failures and notes,
    and its tables are empty; the others' results stand.
    """
    made = _Made(failures)
    for probe in probes:
        made.add(probe, pieces.get(probe.name, ()), context)
    made.tables[declared.SCALE_SUMS.name] = declared.SCALE_SUMS.check(context.calibration.constants.to_table())
    tables = {t.name: t for t in declared.BUILT_IN} | {t.name: t for p in probes for t in whole(p.tables)}
    return Report(
        tables={n: made.tables.get(n, t.empty()) for n, t in tables.items()},
        provenance=dict(provenance),
        notes=tuple(dict.fromkeys((*notes, *made.notes, *map(str, made.failures)))),
        exhibits=marked(exhibits, made.marks),
        declared=tables,
        probes=tuple(p for p in probes if registry.package_of(p) != registry.OWN),
        failures=tuple(made.failures),
    )


class _Made:
    """What has come of the probes so far."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.tables: dict[str, pd.DataFrame] = {}
        self.notes: list[str] = []
        self.marks: list[Marks] = []
        self.failures = list(failures)
        self._parts: dict[str, list[pd.DataFrame]] = {}  # of tables that several probes fill

    def add(self, probe: Probe, pieces: Sequence[Piece | Failure], context: Context) -> None:
        """Finish one probe's pieces; all of it counts, or nothing."""
        failed = next((p for p in pieces if isinstance(p, Failure)), None)
        if failed is not None:
            self.failures.append(failed)
            return
        kept = [p for p in pieces if isinstance(p, Piece)]
        try:
            found = probe.finish(kept, context)
            frames = dict(_checked(probe, found.tables))
            parts = {d.table.name: d.table for d in probe.tables if isinstance(d, Part) and d.table.name in frames}
            shared = {n: [*self._parts.get(n, ()), frames[n]] for n in parts}
            frames |= {n: table.check(joined(table, shared[n])) for n, table in parts.items()}
            marks = list(probe.marks(kept))
        except Exception as error:
            self.failures.append(Failure.of(probe.name, registry.package_of(probe), error))
            return
        self.tables |= frames
        self._parts |= shared
        self.notes += found.notes
        self.marks += marks


def _checked(probe: Probe, frames: Mapping[str, Any]) -> Iterator[tuple[str, pd.DataFrame]]:
    """The frames, each as it is declared; a table of which there is no frame is empty."""
    names = [t.name for t in whole(probe.tables)]
    if extra := [n for n in frames if n not in names]:
        raise TableError(f"it returned a table {extra[0]!r}, and declares {', '.join(names)}")
    for each in probe.tables:
        table = each
        if isinstance(each, Part):
            table = replace(each.table, columns=tuple(c for c in each.table.columns if c.name in each.columns))
        assert isinstance(table, Table)
        if table.name in frames:
            yield table.name, table.check(frames[table.name])


def provenance(
    source: ModelSource,
    prompts: Mapping[str, Any],
    settings: Settings,
    calibration: Calibration,
    d_model: int,
    probes: Sequence[Probe] = (),
    objective: Objective | None = None,
) -> dict[str, Any]:
    """Where tables come from, as plain JSON: the part that is the same whenever and however they are made."""
    objective = Objective() if objective is None else objective
    others = {p.name: registry.package_of(p) for p in probes if registry.package_of(p) != registry.OWN}
    return {
        "ln_probe": __version__,
        "model": asdict(source),
        "prompts": dict(prompts),
        "arguments": settings.plain,
        "constants": {name: c.plain for name, c in calibration.constants.pooled.items()},
        "calibration": {
            "constants": calibration.constants.source,
            "given": calibration.constants.given is not None,
            "groups": calibration.constants.group_count,
            "effective_groups": calibration.constants.effective_groups,
            **calibration.calibrated_on,
        },
        "loss": {"name": objective.name, "unit": objective.unit},
        "thresholds": _thresholds(probes),
        "random_angle_deg": random_angle(d_model, seed=settings.seed),
        "versions": versions(),
    } | ({"probes": others} if others else {})


def _thresholds(probes: Sequence[Probe]) -> dict[str, float]:
    """The constants that tables depend on: everybody's, the built-in probes' and those of `probes`."""
    import torch

    from ln_probe.analyses.geometry.key_coordinates import RANK_TOLERANCE, TAU
    from ln_probe.hooks.attention import PATTERN_TOLERANCE
    from ln_probe.hooks.sites import SAME_OUTPUT
    from ln_probe.hooks.state import CENTRED

    found = {
        "tau": TAU,
        "rank_tolerance": RANK_TOLERANCE,
        "pattern_tolerance_float32": PATTERN_TOLERANCE[torch.float32],
        "centred": CENTRED,
        "same_output": SAME_OUTPUT,
    }
    for probe in (*registry.chosen(registry.DEFAULT), *probes):
        found |= probe.thresholds
    return found
