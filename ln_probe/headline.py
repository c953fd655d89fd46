"""The first numbers of a report, alone: what freezing scaling costs a model, and the constants of its norms."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes.base import Failure, ProbeError
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.wording import PLACES, loss_change, strata_means, strata_sentence
from ln_probe.analyses.progress import ProgressLine, one_blas_thread
from ln_probe.analyses.text import check_flags, counted, disarmed, encodable, with_interval
from ln_probe.guard import REFUSE, hooked_model, seed_of, unchanged
from ln_probe.hooks.model import whole_number
from ln_probe.hooks.norm import SCALING_FROZEN, VARIANTS
from ln_probe.hooks.task import Loss, Objective
from ln_probe.passes import measure_norms, second_pass
from ln_probe.report import WIDTH

_SITES = {"all": "every norm", "attention": "attention's norms"}


@dataclass(frozen=True, eq=False, repr=False)
class FreezingCost:
    """What freezing scaling costs a model: `print` shows all contrasts with intervals, constants and prompts.

    Attributes:
        estimate: loss increase with scaling frozen at every norm, nats/token (or units of the user's loss); NaN where
            the edited model's logits are not finite (`table` then has the increase at attention's norms).
        low, high: its 95 % CI over prompt groups, the choice of constants included; NaN with fewer than 16 groups.
        loss: of the intact model on the same prompts.
        strata: the loss increase on the prompts of each book; the CI is over windows of these books. Empty for other
            prompts.
        table: the primary contrasts, columns as in `report.causal`.
        constants: what replaced sigma: `.of(i)` on prompt i, `.pooled`, `.observed`.
        sentence: the estimate and its interval, as a sentence.
        prompts: source, count, tokens and SHA-256 of the prompts, as in a report's provenance.
        unit: of losses.
        notes: what a reader has to know.
    """

    estimate: float
    low: float
    high: float
    loss: float
    strata: Mapping[str, float]
    table: pd.DataFrame
    constants: Constants
    sentence: str
    prompts: Mapping[str, Any]
    unit: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return self.sentence

    def __str__(self) -> str:
        lines = [textwrap.fill(self.sentence, WIDTH, break_on_hyphens=False), "", *self._contrasts(), ""]
        lines.append(f"intact loss: {self.loss:.4g} {self.unit} on {counted(self.prompts['count'], 'prompt')}")
        lines.append(f"prompts: {self.prompts['source']}, {self.prompts['tokens']} tokens")
        lines.append(f"constants: {self.constants.source}, {counted(self.constants.group_count, 'prompt group')}")
        return encodable(disarmed("\n".join([*lines, *(f"note: {note}" for note in self.notes)])))

    def _contrasts(self) -> Iterator[str]:
        """Yield one line for each contrast, columns aligned."""
        rows = [("", "loss rise", "95 % CI", "Holm's p")]
        row: Any  # of values of any type
        for row in self.table.sort_values("variant", ascending=False, kind="stable").itertuples():
            label = f"{VARIANTS[row.variant].label}, {_SITES[row.sites]}"
            p = _p(row.p)
            size, ends = with_interval(row.delta_loss, row.delta_loss_low, row.delta_loss_high)
            if math.isnan(row.delta_loss):
                size, ends, p = "not finite", "", ""
            rows.append((label, size, ends, p))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for cells in rows:
            padded = map(str.ljust, cells, widths)
            yield "  ".join(padded).rstrip()

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it; None for an interval that was not tested."""
        numbers = {name: getattr(self, name) for name in ("estimate", "low", "high", "loss", "unit")}
        constants = {
            "source": self.constants.source,
            "groups": self.constants.group_count,
            "pooled": {name: constant.plain for name, constant in self.constants.pooled.items()},
        }
        plain: dict[str, Any] = _finite(
            numbers
            | {
                "strata": dict(self.strata),
                "prompts": dict(self.prompts),
                "constants": constants,
                "contrasts": self.table.to_dict("records"),
                "notes": list(self.notes),
            }
        )
        return plain


def _p(value: float) -> str:
    return "not tested" if math.isnan(value) else "< 0.001" if value < 0.001 else f"{value:.2g}"


def _finite(value: Any) -> Any:
    """Return a value of JSON with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
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
    prepend_bos: bool | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    progress: bool = True,
    hooks: str = REFUSE,
) -> FreezingCost:
    """Measure how much freezing LayerNorm's scaling raises the loss, without the rest of a report.

    Args:
        model, prompts: as for `ln_probe.analyze`; the numbers are those of its `causal` table.
        calibration, groups, loss, max_prompts, max_tokens, prepend_bos, seed, tokenizer, progress, hooks: as there.

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
    objective, probe = Objective.of(loss), Causal(primary_only=True)
    hooked, on_hooks = hooked_model(model, tokenizer, hooks)
    max_tokens, seed = whole_number(max_tokens, "max_tokens", 2), seed_of(seed)
    with ProgressLine(quiet=not progress), unchanged(hooked), one_blas_thread():
        start = measure_norms(
            hooked,
            prompts,
            probes=[probe],
            loss=objective,
            calibration=calibration,
            groups=groups,
            prepend_bos=prepend_bos,
            max_prompts=max_prompts,
            max_tokens=max_tokens,
            seed=seed,
        )
        results = second_pass(start, [probe])[probe.name]
    if isinstance(results, Failure):
        raise ProbeError(str(results))
    notes = tuple(dict.fromkeys((*start.notes, *results.notes, *on_hooks)))
    table = results.tables.get("causal", pd.DataFrame(columns=["variant", "sites", "delta_loss"]))
    frozen = table[table["variant"] == SCALING_FROZEN.name]
    rows = frozen[frozen["sites"] == "all"]
    if not len(rows) or frozen["delta_loss"].isna().all():
        why = "; ".join(n for n in notes if n.startswith("causal: ")) or "the model has no norm that scales"
        raise ValueError(f"freezing_cost is not applicable: {why}")
    row = rows.iloc[0]
    strata = strata_means(results.tables["causal_prompts"], "all", SCALING_FROZEN)
    sentence = loss_change(row, objective.unit, f"{SCALING_FROZEN.wording} at {PLACES['all']}")
    estimate, low, high = (float(row[f"delta_loss{end}"]) for end in ("", "_low", "_high"))
    return FreezingCost(
        estimate, low, high, float(row["loss"] - row["delta_loss"]), strata, table, start.run.constants,
        sentence if math.isnan(row["delta_loss_low"]) else f"{sentence} {strata_sentence(strata)}".strip(),
        start.provenance["prompts"],
        objective.unit,
        notes,
    )  # fmt: skip


def norm_constants(
    model: object,
    prompts: Any = None,
    *,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    max_prompts: int | None = None,
    max_tokens: int = 512,
    prepend_bos: bool | None = None,
    seed: int = 0,
    tokenizer: Any = None,
    progress: bool = True,
    hooks: str = REFUSE,
) -> Constants:
    """Measure the constants that replace each norm's sigma when scaling is frozen: a forward pass per prompt.

    Args:
        model, prompts, calibration, groups, max_prompts, max_tokens, prepend_bos, seed, tokenizer, progress, hooks: as
            for `ln_probe.analyze`.

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
    with ProgressLine(quiet=not progress), unchanged(hooked):
        start = measure_norms(
            hooked, prompts, probes=[], calibration=calibration, groups=groups, prepend_bos=prepend_bos,
            max_prompts=max_prompts, max_tokens=whole_number(max_tokens, "max_tokens", 2), seed=seed_of(seed),
        )  # fmt: skip
    return start.run.constants
