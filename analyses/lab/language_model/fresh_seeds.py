"""A pre-registered 2 x 2 over ten fresh seeds: what scaling and projection before attention do to a language model.

Registered before any of its models was trained (the commit that added this file; `docs/laboratory.md` names it).

Design. {layernorm, scaling_only, projection_only, none} before attention, LayerNorm everywhere else; 2 layers, d 64,
8 heads of 8 dimensions; text, tokenizer, windows and schedule of the bundled models, with 400 steps of 8 windows in
place of 2000 of 16 (a core for an hour) and a warm-up of the same share. Seeds 10 to 19, which no other experiment here
has used. The runs of a seed share their batches.

`fresh_seeds_long` asks once more whether scaling before attention changes the loss, since 400 steps are early training:
the same with the bundled models' whole schedule, 2000 steps of 16 windows, and seeds 20 to 29. Registered in the commit
that added it, before any of its models was trained. Hypothesis, two-sided, after 400 steps had shown a loss lower by
0.025 nats with scaling and three bundled seeds a higher one: with the whole schedule scaling before attention raises
the loss. Outcomes, contrasts, tests, margins and rules are those of `fresh_seeds`.

Outcomes. Held-out loss in nats/token; share of keys that no query of their head can select, in points, mean over heads,
layers and 8 held-out windows of 256 tokens.

Primary contrasts, and no others: the main effects of scaling and of projection on both outcomes (`main_effects`), two-
sided paired t tests over seeds at 5 % after Holm's adjustment over these four, and Student's t intervals. Hypotheses,
from three seeds of the bundled models: scaling raises the loss, and lowers the share of unselectable keys; projection
changes neither. The last is claimed only where two one-sided tests at 5 % exclude effects beyond `MARGINS` (the 90 % CI
lies within them). The number of seeds is fixed. A seed counts if its four models are finished; were fewer than ten
finished, their number is reported and no seed is chosen by its outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model.bundled_seeds import (
    ALL_LAYERS,
    D_VOCAB,
    KEYS,
    N_CTX,
    draw,
    loss_and_keys,
    text,
    with_means,
)
from ln_probe.analyses.lab.language_model.published_language_model import FRACTION, LOSS
from ln_probe.analyses.lab.norms import NORM_KINDS
from ln_probe.analyses.lab.results import Results, effect_rows, main_effects, select, summarize_kinds
from ln_probe.analyses.lab.text_task import TextTask
from ln_probe.analyses.lab.train import Run, TrainConfig, carry_out, planned
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.analyses.probes.statistics import holm


@dataclass(frozen=True)
class Design:
    """What sets the two registered experiments apart; the request's seeds are counted from `first_seed`."""

    first_seed: int
    steps: int
    batch: int
    warmup: int


SHORT, LONG = Design(10, 400, 8, 40), Design(20, 2000, 16, 200)
WINDOWS = 8  # held-out windows whose keys are measured
MEASURED = 1  # version of what `loss_and_keys` measures
# Of an outcome: what it is called, its unit, the factor from the tables to that unit, and the equivalence margin.
OUTCOMES = {
    LOSS: ("Held-out loss", "nats", 1.0, 0.01),
    FRACTION: ("Unselectable keys", "points", 100.0, 1.0),
}
MARGINS = {measure: margin for measure, (*_, margin) in OUTCOMES.items()}


def fresh_model(norm: str) -> LabConfig:
    """The bundled models' shape, halved, with an unembedding bias, which these no longer have."""
    return LabConfig(n_layers=2, d_model=64, n_heads=8, d_vocab=D_VOCAB, n_ctx=N_CTX, norm=norm)


def training(quick: bool, seed: int, design: Design = SHORT) -> TrainConfig:
    """The bundled schedule, as long as the design says."""
    if quick:
        return TrainConfig(steps=8, batch=2, warmup=2, seed=seed)
    return TrainConfig(steps=design.steps, batch=design.batch, warmup=design.warmup, seed=seed, state_every=100)


def make_runs(request: Request, task: TextTask, design: Design) -> list[Run]:
    return planned(
        NORM_KINDS,
        replace(request, seeds=tuple(design.first_seed + seed for seed in request.seeds)),
        keys=lambda norm: {"norm": norm},
        name=lambda norm: norm,
        task=lambda *_: task,
        spec=fresh_model,
        training=lambda _, seed: training(request.quick, seed, design),
    )


def run(request: Request, design: Design = SHORT) -> Results:
    """Train the four models of each seed and measure the seeds whose four are finished."""
    task = text(request)
    runs = make_runs(request, task, design)
    lost = carry_out(runs, request)
    done = [seed for seed in {run.seed: None for run in runs} if all(r.finished for r in runs if r.seed == seed)]
    parts = [pd.DataFrame(columns=[*KEYS, "seed", "value"])]
    for each in (run for run in runs if run.seed in done):
        found = loss_and_keys(each.folder, each.folder, task, WINDOWS, MEASURED)
        parts.append(found.assign(norm=each.keys["norm"], seed=each.seed))
    values = pd.concat(parts, ignore_index=True)
    return replace(findings(values, {"training": vars(training(request.quick, 0, design))}), diverged=lost)


def run_long(request: Request) -> Results:
    """`run` with the bundled models' whole schedule."""
    return run(request, LONG)


def findings(values: pd.DataFrame, settings: dict[str, Any]) -> Results:
    """Tables from KEYS, `seed`, `value`."""
    everything = with_means(values)
    losses = everything["measure"] == LOSS
    effects = registered_effects(everything)
    return Results(
        summarize_kinds([(everything[losses], "mean"), (everything[~losses], "share")], KEYS),
        tables={"seeds": values, "effects": effects},
        figures={} if values.empty else {"seeds": draw(everything)},
        settings={
            "model": {k: v for k, v in fresh_model("none").to_dict().items() if k != "norm"},
            "training": {k: v for k, v in settings.get("training", {}).items() if k != "seed"},
            "windows": WINDOWS,
            "seeds": sorted({int(seed) for seed in values["seed"]}),
        },
    )


def registered_effects(values: pd.DataFrame) -> pd.DataFrame:
    """The four primary contrasts, each with its CI, p, Holm's p over the four, and the verdict on equivalence.

    Columns: as `primary.effect_rows`, `p_holm`, and `equivalent`: whether the 90 % CI lies within the margin.
    """
    rows: list[dict[str, Any]] = []
    for measure, (title, unit, factor, margin) in OUTCOMES.items():
        per_seed = main_effects(select(values, measure=measure, layer=ALL_LAYERS)) if len(values) else {}
        for row in effect_rows(per_seed, factor):
            rows.append({"measure": measure, "outcome": title, "unit": unit, **row, "margin": margin})
    if not rows:
        return pd.DataFrame()
    table = pd.DataFrame(rows)
    return table.assign(p_holm=holm(table["p"].to_numpy()), equivalent=table["bound"] < table["margin"])
