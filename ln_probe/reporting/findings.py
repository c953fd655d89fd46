"""What the tables of a report say, in plain sentences: what each probe says of its own, ranked."""

from __future__ import annotations

from ln_probe.analyses.probes.base import Failure, Finding
from ln_probe.analyses.probes.registry import DEFAULT, chosen, package_of
from ln_probe.reporting.contents import Contents

NO_NORMS = "the model has no normalization"  # how the note begins that says so


def findings(report: Contents) -> list[Finding]:
    """Sentences about one report, the ones that matter most to attention first; empty for an empty report."""
    found: list[Finding] = []
    for probe in (*chosen(DEFAULT), *report.probes):
        try:
            found += probe.findings(report.tables, report.provenance)
        except Exception as error:
            if probe not in report.probes:
                raise
            found.append(Finding(str(Failure.of(probe.name, package_of(probe), error))))
    if any(n.startswith(NO_NORMS) for n in report.notes):
        found.append(Finding("The model has no normalization: there is nothing to take apart.", rank=0))
    elif not any(len(table) for table in report.tables.values()):
        found.append(Finding("Nothing was measured: no table holds a row.", rank=0))
    return sorted(found, key=lambda f: (f.rank, -f.size))
