"""The first number of a report, alone: what freezing scaling costs a model, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from ln_probe.analyses.text import counted, disarmed, encodable, with_interval
from ln_probe.hooks.norm import VARIANTS

if TYPE_CHECKING:
    from ln_probe.analyses.constants import Constants

_SITES = {"all": "every norm", "attention": "attention's norms"}


@dataclass(frozen=True, eq=False, repr=False)
class FreezingCost:
    """What freezing scaling costs a model: `print` it for all contrasts with their intervals, constants and prompts.

    Attributes:
        estimate: loss increase with scaling frozen at every norm, nats/token (or units of the user's loss); NaN where
            the edited model's logits are not finite (`table` then has the increase at attention's norms).
        low, high: its 95 % CI over prompt groups, the choice of constants included; NaN with fewer than 32 groups.
        loss: of the intact model on the same prompts.
        table: the primary contrasts, columns as in `report.causal`.
        constants: what replaced sigma: `.of(i)` on prompt i, `.pooled`, `.observed`.
        sentence: the estimate in words.
        prompts: source, count, tokens and SHA-256 of the prompts, as in a report's provenance.
        unit: of losses.
        notes: what a reader has to know.
    """

    estimate: float
    low: float
    high: float
    loss: float
    table: pd.DataFrame
    constants: Constants
    sentence: str
    prompts: Mapping[str, Any]
    unit: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return self.sentence

    def __str__(self) -> str:
        lines = [self.sentence, "", *self._contrasts(), ""]
        lines.append(f"intact loss: {self.loss:.4g} {self.unit} on {counted(self.prompts['count'], 'prompt')}")
        lines.append(f"prompts: {self.prompts['source']}, {self.prompts['tokens']} tokens")
        lines.append(f"constants: {self.constants.source}, {counted(self.constants.group_count, 'prompt group')}")
        return encodable(disarmed("\n".join([*lines, *(f"note: {note}" for note in self.notes)])))

    def _contrasts(self) -> Iterator[str]:
        """One line for each primary contrast, columns aligned."""
        rows = [("", "loss increase", "95 % CI", "Holm-adjusted p")]
        primary = self.table[self.table["family"] == "primary"].sort_values("variant", ascending=False)
        row: Any  # of values of any type
        for row in primary.itertuples():
            if row.no_op or math.isnan(row.delta_loss):
                said = (f"0 ({row.no_op})" if row.no_op else "not finite", "", "")
            else:
                said = (*with_interval(row.delta_loss, row.delta_loss_low, row.delta_loss_high), _p(row.p_mean))
            rows.append((f"{VARIANTS[row.variant].label}, {_SITES.get(row.sites, row.sites)}", *said))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for cells in rows:
            yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it; what is not known is None."""
        rows = self.table[self.table["family"] == "primary"].to_dict("records")
        found = {name: getattr(self, name) for name in ("estimate", "low", "high", "loss", "unit")} | {
            "prompts": dict(self.prompts),
            "constants": {
                "source": self.constants.source,
                "groups": self.constants.group_count,
                "pooled": {name: constant.plain for name, constant in self.constants.pooled.items()},
            },
            "contrasts": [{str(name): value for name, value in row.items()} for row in rows],
            "notes": list(self.notes),
        }
        return {name: _known(value) for name, value in found.items()}


def _p(value: float) -> str:
    return "" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.2g}"


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _known(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_known(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
