"""What a report holds, apart from how it is drawn and stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import columns as declared_here
from ln_probe.analyses.probes.base import Failure, Probe
from ln_probe.analyses.schema import Table
from ln_probe.reporting.exhibits import Exhibits


@dataclass(frozen=True, eq=False, repr=False)
class Contents:
    """What LayerNorm does in one model on some prompts.

    Attributes:
        tables: every table by name: those of the built-in probes (empty where one did not run), then those of other
            packages' probes. `describe` says what their columns mean.
        provenance: model, prompts, arguments, constants, thresholds, versions, durations; plain JSON.
        notes: what a reader has to know before believing the tables.
        exhibits: what is kept for pictures: attention patterns, marks of keys, vectors around the norms.
        declared: what the tables are, by name.
        probes: of other packages, that ran and are installed here.
        failures: probes that failed, and why.
    """

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    exhibits: Exhibits = field(default_factory=Exhibits)
    declared: Mapping[str, Table] = field(default_factory=dict)
    probes: tuple[Probe, ...] = ()
    failures: tuple[Failure, ...] = ()

    def __post_init__(self) -> None:
        own = {t.name: t for t in declared_here.BUILT_IN}
        declared = own | {n: Table.of_frame(n, f) for n, f in self.tables.items() if n not in own} | dict(self.declared)
        tables = {n: t.empty() for n, t in declared.items()} | dict(self.tables)
        object.__setattr__(self, "declared", declared)
        object.__setattr__(self, "tables", tables)

    @property
    def layernorms(self) -> pd.DataFrame:
        """A row per norm."""
        return self.tables["layernorms"]

    @property
    def heads(self) -> pd.DataFrame:
        """A row per (layer, head, space, variant)."""
        return self.tables["heads"]

    @property
    def keys(self) -> pd.DataFrame:
        """A row per chosen key and variant."""
        return self.tables["keys"]

    @property
    def causal(self) -> pd.DataFrame:
        """A row per (sites, variant)."""
        return self.tables["causal"]

    @property
    def causal_prompts(self) -> pd.DataFrame:
        """A row per (prompt, sites, variant): what the intervals of `causal` come from."""
        return self.tables["causal_prompts"]

    @property
    def constants(self) -> Constants:
        """What replaced each norm's sigma on every prompt: `.of(i)`, `.pooled`, `.observed`.

        Raises:
            ValueError: the report is of a version that did not keep them.
        """
        table, about = self.tables["scale_sums"], self.provenance.get("calibration", {})
        if "constants" not in about:
            raise ValueError("this report is of an ln_probe that did not keep the sums of sigma: make it again")
        given = self.provenance["constants"] if about["given"] else None
        return Constants.of_table(table, str(about["constants"]), given)

    @property
    def head_effects(self) -> pd.DataFrame:
        """The table `head_effects`."""
        return self.tables["head_effects"]

    @property
    def sinks(self) -> pd.DataFrame:
        """The table `sinks`."""
        return self.tables["sinks"]

    @property
    def sink_heads(self) -> pd.DataFrame:
        """The table `sink_heads`."""
        return self.tables["sink_heads"]

    @property
    def token_sizes(self) -> pd.DataFrame:
        """The table `token_sizes`."""
        return self.tables["token_sizes"]

    @property
    def outlier_dimensions(self) -> pd.DataFrame:
        """The table `outlier_dimensions`."""
        return self.tables["outlier_dimensions"]

    @property
    def unembedding(self) -> pd.DataFrame:
        """A row per token that is hard to predict."""
        return self.tables["unembedding"]

    @property
    def name(self) -> str:
        return str(self.provenance.get("model", {}).get("name", "model"))

    @property
    def deviations(self) -> tuple[str, ...]:
        """How what was measured differs from what was asked for, a sentence each: a part of the model or of the prompts
        that could not be used."""
        model, prompts = (self.provenance.get(part, {}) for part in ("model", "prompts"))
        return (*model.get("deviations", ()), *([prompts["skipped"]] if prompts.get("skipped") else []))

    def describe(self, table: str) -> pd.DataFrame:
        """What the columns of a table mean: a row per column with `column`, `dtype`, `unit`, `meaning`.

        Raises:
            ValueError: the report has no such table (says which there are).
        """
        if table not in self.declared:
            raise ValueError(f"this report has no table {table!r}: there are {', '.join(self.declared)}")
        return self.declared[table].describe()
