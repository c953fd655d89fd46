"""The first numbers of a report, alone: what freezing scaling costs a model, and the constants of its norms."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes.base import Failure, ProbeError
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.tables import CAUSAL
from ln_probe.analyses.probes.wording import PLACES, loss_change
from ln_probe.analyses.progress import ProgressLine, one_blas_thread
from ln_probe.analyses.text import check_flags, counted, disarmed, encodable, with_interval
from ln_probe.guard import REFUSE, hooked_model, seed_of, token_limit, unchanged
from ln_probe.hooks.norm import SCALING_FROZEN, VARIANTS
from ln_probe.hooks.task import Loss, Objective
from ln_probe.measure import measure_norms
from ln_probe.passes import second_pass

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
            if math.isnan(row.delta_loss):
                said = ("not finite", "", "")
            else:
                said = (*with_interval(row.delta_loss, row.delta_loss_low, row.delta_loss_high), _p(row.p))
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


def freezing_cost(
    model: object,
    prompts: Any = None,
    *,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    loss: Loss | str | None = None,
    max_prompts: int | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
    progress: bool = True,
    hooks: str = REFUSE,
) -> FreezingCost:
    """Measure how much freezing LayerNorm's scaling raises the loss: the first number of a report, alone.

    Args:
        model, prompts, calibration, groups, loss, max_prompts, max_tokens, seed, tokenizer, progress, hooks: as for
            `ln_probe.analyze`; the numbers are those of its `causal` table.

    Returns:
        The loss increase at every norm with its CI, the other primary contrasts, and the constants.

    Raises:
        TypeError, ValueError, ModelStateError, FileNotFoundError: as `ln_probe.analyze`; ValueError also where the loss
            is not applicable (says why).

    Example:
        >>> cost = ln_probe.freezing_cost(ln_probe.load_model("lm-layernorm"))
        >>> cost
        Freezing scaling at every norm raises the loss by … nats/token (…)
        >>> print(cost)  # all primary contrasts, prompts and constants; on the command line: ln-probe freezing-cost
    """
    check_flags(progress=progress)
    objective = Objective.of(loss)
    probe = Causal(primary_only=True)
    hooked, on_hooks = hooked_model(model, tokenizer, hooks)
    options: dict[str, Any] = {"max_tokens": token_limit(max_tokens), "seed": seed_of(seed), "max_prompts": max_prompts}
    with ProgressLine(quiet=not progress), unchanged(hooked), one_blas_thread():
        start = measure_norms(
            hooked, prompts, probes=[probe], loss=objective, calibration=calibration, groups=groups, **options
        )
        results = second_pass(start.run, [probe], start.inputs, start.limit, None, None)[probe.name]
    if isinstance(results, Failure):
        raise ProbeError(str(results))
    table = results.tables["causal"] if results.tables else CAUSAL.empty()
    frozen = table[(table["family"] == "primary") & (table["variant"] == SCALING_FROZEN.name)]
    rows = frozen[frozen["sites"] == "all"]
    asked = (note for note in results.notes if "single norms" not in note)  # which no one asked for here
    notes = (*start.notes, *asked, *on_hooks)
    if not len(rows) or frozen["delta_loss"].isna().all():
        why = "; ".join(n for n in notes if n.startswith("causal: ")) or "the model has no normalization"
        raise ValueError(f"freezing_cost is not applicable: {why}")
    row = rows.iloc[0]
    return FreezingCost(
        float(row["delta_loss"]),
        float(row["delta_loss_low"]),
        float(row["delta_loss_high"]),
        float(row["loss"] - row["delta_loss"]),
        table,
        start.run.constants,
        loss_change(row, objective.unit, f"{SCALING_FROZEN.wording} at {PLACES['all']}"),
        start.provenance["prompts"],
        objective.unit,
        tuple(dict.fromkeys(notes)),
    )


def norm_constants(
    model: object,
    prompts: Any = None,
    *,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
    progress: bool = True,
    hooks: str = REFUSE,
) -> Constants:
    """Measure the constants that replace each norm's sigma when scaling is frozen: one forward pass per prompt.

    Args:
        model, prompts, calibration, groups, max_tokens, seed, tokenizer, progress, hooks: as for `ln_probe.analyze`.

    Returns:
        The constants: `.of(i)` those of prompt i (means over the prompts outside its group), `.pooled` those over all
        prompts, `.observed` the mean sigmas.

    Raises:
        TypeError, ValueError, ModelStateError, FileNotFoundError: as `ln_probe.analyze`.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> scale = ln_probe.norm_constants(model).pooled
        >>> with ln_probe.hooks.without(model, "scaling", scale=scale): ...
    """
    check_flags(progress=progress)
    hooked, _ = hooked_model(model, tokenizer, hooks)
    options: dict[str, Any] = {"max_tokens": token_limit(max_tokens), "seed": seed_of(seed)}
    with ProgressLine(quiet=not progress), unchanged(hooked):
        return measure_norms(
            hooked, prompts, probes=[], calibration=calibration, groups=groups, **options
        ).run.constants
