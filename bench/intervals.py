"""Intervals that include the constants, against exact refits: how far is the linearization off?

    python bench/intervals.py lm-layernorm lm-scaling_only     # a quarter of an hour of one core

The interval of a primary contrast that freezes scaling takes what each prompt group does to everybody's constants to
first order (`ln_probe.analyses.probes.causal.shifts`). Here groups are resampled 200 times, and each time the
leave-one-out constants and every prompt's loss change are computed anew. Writes `bench/results/intervals.csv`: the
standard error of the loss change over prompts alone, with linearized constants, and from the exact refits.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer
from jaxtyping import Bool, Float
from torch import Tensor

import ln_probe
from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes.causal import Causal
from ln_probe.analyses.probes.edited_runs import PRIMARY_SITES
from ln_probe.hooks.edits import Positions, installed
from ln_probe.hooks.interventions import members
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.text import bundled_prompts
from ln_probe.hooks.variants import VariantEdit

TABLE = Path(__file__).parent / "results" / "intervals.csv"
REFITS, ROWS = 200, 8


class _OfRows:
    """A constant for each row of a batch, at position 0 and elsewhere."""

    def __init__(self, values: Float[Tensor, "row 2"]) -> None:
        self.values = values

    def at(self, first: Bool[Tensor, "*batch 1"], like: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        values = self.values.to(like)
        return torch.where(first, values[:, None, :1], values[:, None, 1:])


def losses(model: Any, sites: Any, batch: Tensor, constants: Float[np.ndarray, "row site 2"]) -> np.ndarray:
    """The summed loss of each row with its own constants."""
    parts = []
    for rows in torch.arange(len(batch)).split(ROWS):
        positions = Positions()
        divisors = [_OfRows(torch.from_numpy(constants[rows.numpy(), place])) for place in range(len(sites))]
        edits = [VariantEdit(s, "no_scaling", d, positions) for s, d in zip(sites, divisors, strict=True)]
        with torch.no_grad(), installed(model, edits):
            parts.append(Objective().sums(model(batch[rows], return_type="logits"), batch[rows]))
    return torch.cat(parts).numpy()


def standard_error(change: np.ndarray, weight: np.ndarray) -> float:
    """Of the ratio of their sums, groups being drawn."""
    residual = change - change.sum() / weight.sum() * weight
    n = len(change)
    return float(np.sqrt(n / (n - 1) * residual @ residual) / weight.sum())


def measure(name: str) -> list[dict[str, Any]]:
    model: Any = ln_probe.load_model(name)
    prompts = bundled_prompts(model)
    assert prompts is not None
    batch = torch.stack(list(prompts.measured))
    probe = Causal(single_norm_prompts=0, uniform=False, primary_only=True)
    report = ln_probe.analyze(model, probes=[probe], progress=False)
    constants: Constants = report.constants
    by_prompt = report.causal_prompts.set_index(["sites", "variant"]).sort_index()
    weight = np.full(len(batch), batch.shape[1] - 1.0)
    with torch.no_grad():
        intact = torch.cat([Objective().sums(model(b, return_type="logits"), b) for b in batch.split(ROWS)]).numpy()
    rows = []
    for group in PRIMARY_SITES:
        sites = [s for s in members(ln_probe.hooks.find_sites(model), group) if s.scales]
        places = [constants.sites.index(s.name) for s in sites]
        begun = time.process_time()
        estimates = []
        generator = np.random.default_rng(0)
        for _ in range(REFITS):
            times = generator.multinomial(len(batch), np.full(len(batch), 1 / len(batch)))
            drawn = np.flatnonzero(times)
            sums, counts = (v[:, places] for v in (constants.sums, constants.counts))
            total = [np.einsum("p,psk->sk", times, v) for v in (sums, counts)]
            other = [t - times[drawn, None, None] * v[drawn] for t, v in zip(total, (sums, counts), strict=True)]
            change = losses(model, sites, batch[torch.from_numpy(drawn)], other[0] / other[1]) - intact[drawn]
            estimates.append((times[drawn] @ change) / (times[drawn] @ weight[drawn]))
        row = report.causal.set_index(["sites", "variant"]).loc[(group, "no_scaling")]
        pairs = [
            (constants.of(p)[s.name].first, constants.of(p)[s.name].rest) for p in range(len(batch)) for s in sites
        ]
        change = losses(model, sites, batch, np.array(pairs).reshape(len(batch), len(sites), 2)) - intact
        exact = float(np.std(estimates, ddof=1))
        alone = standard_error(change, weight)
        linearized = standard_error(change + by_prompt.loc[(group, "no_scaling"), "shift"].to_numpy(), weight)
        half = (float(row["delta_loss_high"]) - float(row["delta_loss_low"])) / 2
        rows.append(
            {
                "model": name,
                "sites": group,
                "delta_loss": float(row["delta_loss"]),
                "half_width": half,
                "se_prompts_alone": alone,
                "se_linearized": linearized,
                "se_exact_refits": exact,
                "linearized_over_exact": linearized / exact,
                "linearized_over_prompts_alone": linearized / alone,
                "refits": REFITS,
                "seconds": round(time.process_time() - begun),
            }
        )
        print(rows[-1], flush=True)
    return rows


def main(names: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    names = names or ["lm-layernorm", "lm-scaling_only"]
    torch.set_num_threads(1)
    found = pd.DataFrame([row for name in names for row in measure(name)])
    if TABLE.exists():
        kept = pd.read_csv(TABLE)
        found = pd.concat([kept[~kept["model"].isin(names)], found])
    found.to_csv(TABLE, index=False, float_format="%.6g")


if __name__ == "__main__":
    typer.run(main)
