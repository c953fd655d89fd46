"""The first number of every report alone: what freezing scaling costs, and the constants it is measured with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.decomposition import Decomposition
from ln_probe.analyses.probes.protocol import Context, Failure, Piece, ProbeError
from ln_probe.hooks.objective import Loss, Objective
from ln_probe.measuring.given_constants import calibration_prompts
from ln_probe.measuring.passes import Passes
from ln_probe.measuring.seal import Seal, hooked_model
from ln_probe.measuring.settings import Settings
from ln_probe.prompting.prompts import Prompts, make_prompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from ln_probe.analyses.calibration import Calibration
    from ln_probe.analyses.constants import Constants


@dataclass(frozen=True, eq=False, repr=False)
class FreezingCost:
    """What freezing scaling costs a model: `print` it for a sentence.

    Attributes:
        estimate: loss increase with scaling frozen at every norm, nats/token (or units of the user's loss); NaN where
            the edited model's logits are not finite (`table` then has the increase at attention's norms).
        low, high: its 95 % CI over prompt groups, the choice of constants included; NaN with fewer than 32 groups.
        loss: of the intact model on the same prompts.
        table: the primary contrasts, columns as in `report.causal`.
        constants: what replaced sigma: `.of(i)` on prompt i, `.pooled`, `.observed`.
        notes: what a reader has to know.
    """

    estimate: float
    low: float
    high: float
    loss: float
    table: pd.DataFrame
    constants: Constants
    sentence: str
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return self.sentence


def freezing_cost(
    model: object,
    prompts: Any = None,
    *,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    loss: Loss | str | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
) -> FreezingCost:
    """Measure what freezing LayerNorm's scaling costs: the first number of a report, alone.

    Args:
        model, prompts, calibration, groups, loss, max_tokens, seed, tokenizer: as for `ln_probe.analyze`; the numbers
            are those of its `causal` table.

    Returns:
        The loss increase at every norm with its CI, the other primary contrasts, and the constants.

    Raises:
        TypeError, ValueError: as `ln_probe.analyze`; ValueError also where the loss is not applicable (says why).

    Example:
        >>> ln_probe.freezing_cost(ln_probe.load_model("lm-layernorm"))
        Freezing scaling at every norm raises the loss by 0.408 nats/token (…)
    """
    objective = Objective.of(loss)
    probe = Causal(single_norm_prompts=0, uniform=False, primary_only=True)
    with _first_pass(model, prompts, probe, objective, calibration, groups, max_tokens, seed, tokenizer) as first:
        passes, ready, calibrated = first
        piece = passes.measure(list(enumerate(ready.tokens)), calibrated, default=prompts is None)[probe.name]
    if isinstance(piece, Failure):
        raise ProbeError(str(piece))
    assert isinstance(piece, Piece)
    made = probe.finish([piece], Context(calibrated, None, lambda _p, _i: "", seed=seed))
    table = made.tables["causal"]
    frozen = table[(table["family"] == "primary") & (table["variant"] == "no_scaling")]
    rows = frozen[frozen["sites"] == "all"]
    notes = (*ready.notes, *calibrated.notes, *made.notes)
    if not len(rows) or frozen["delta_loss"].isna().all():
        why = "; ".join(n for n in notes if n.startswith("causal: ")) or "the model has no normalization"
        raise ValueError(f"freezing_cost is not applicable: {why}")
    row = rows.iloc[0]
    said = probe.findings({"causal": table}, {"prompts": {"source": ready.source}, "loss": {"unit": objective.unit}})
    return FreezingCost(
        float(row["delta_loss"]),
        float(row["delta_loss_low"]),
        float(row["delta_loss_high"]),
        float(row["loss"] - row["delta_loss"]),
        table,
        calibrated.constants,
        said[0].text,
        tuple(dict.fromkeys(notes)),
    )


def constants(
    model: object,
    prompts: Any = None,
    *,
    calibration: Any = None,
    groups: Sequence[Hashable] | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    tokenizer: Any = None,
) -> Constants:
    """Measure the constants that replace each norm's sigma when scaling is frozen: one forward pass per prompt.

    Args:
        model, prompts, calibration, groups, max_tokens, seed, tokenizer: as for `ln_probe.analyze`.

    Returns:
        The constants: `.of(i)` those of prompt i (means over the prompts outside its group), `.pooled` those over all
        prompts, `.observed` the mean sigmas.

    Raises:
        TypeError, ValueError: as `ln_probe.analyze`.

    Example:
        >>> model = ln_probe.load_model("lm-layernorm")
        >>> scale = ln_probe.constants(model).pooled
        >>> with ln_probe.hooks.without(model, "scaling", scale=scale): ...
    """
    probe = Decomposition()
    with _first_pass(model, prompts, probe, Objective(), calibration, groups, max_tokens, seed, tokenizer) as first:
        return first[2].constants


@contextmanager
def _first_pass(
    model: object,
    prompts: Any,
    probe: Causal | Decomposition,
    objective: Objective,
    calibration: Any,
    groups: Sequence[Hashable] | None,
    max_tokens: int,
    seed: int,
    tokenizer: Any,
) -> Iterator[tuple[Passes, Prompts, Calibration]]:
    """The passes over a model, its prompts and what the first pass finds; the model is in evaluation mode meanwhile."""
    hooked, _ = hooked_model(model, tokenizer)
    settings = Settings(probes=(probe.name,), max_tokens=max_tokens, seed=seed)
    with Seal(hooked) as seal:
        ready = make_prompts(hooked, prompts, max_tokens=max_tokens, seed=seed)
        seal.compare(ready.tokens[0])
        other = None if calibration is None else calibration_prompts(hooked, calibration, max_tokens, seed)
        objective.check(hooked, ready.tokens[0])
        passes = Passes(hooked, settings, probes=[probe], objective=objective, seal=seal)
        numbered = list(enumerate(ready.tokens))
        yield (
            passes,
            ready,
            passes.calibrate(numbered, groups=groups, calibration=other, default=prompts is None),
        )
