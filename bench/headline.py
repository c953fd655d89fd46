"""Compare leave-one-out constants with constants from other prompts of the same kind, on models of several kinds.

    python bench/headline.py [NAMES]        rows of bench/results/headline.csv

`leave_one_out` is the loss increase of `ln_probe.freezing_cost`, `held_out` the same with `calibration=` prompts from
the same source, none of which is measured. They agree if they differ by at most 0.01 or 10 % of `held_out`.

Corpora and CAPP-GPT are read from LN_PROBE_SHARED, MGM from LN_PROBE_MGM, SmolLM2 from LN_PROBE_GGUF.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "checkpoints"))

import measure

import ln_probe

RESULTS = Path(__file__).parent / "results" / "headline.csv"
CASES = {
    "mgm": "mgm",
    "smollm2-135m": "smollm2-135m",
    "capp-gpt": "capp-gpt-own",
    **{name: f"{name}-books" for name in ("lm-layernorm", "lm-scaling_only", "lm-projection_only", "lm-none")},
}
LEAST, SHARE = 0.01, 0.1  # they agree within the larger of these


def rows_of(name: str) -> list[dict[str, Any]]:
    """Return a row per primary group of norms of one model."""
    case = measure.CASES[CASES[name]]
    model, source = measure.load(case), measure.SOURCES[case.prompts]
    measured, others = source(model, case.tokens), source(model, case.tokens, others=True)
    tables = [
        cost.table[cost.table["variant"] == "no_scaling"].set_index("sites")
        for cost in (
            ln_probe.freezing_cost(model, measured, max_tokens=case.tokens),
            ln_probe.freezing_cost(model, measured, max_tokens=case.tokens, calibration=others),
        )
    ]
    rows = []
    for group in ("attention", "all"):
        own, held_out = tables[0].loc[group], float(tables[1].loc[group]["delta_loss"])
        difference = float(own["delta_loss"]) - held_out
        rows.append(
            {
                "model": name,
                "group": group,
                "n": len(measured),
                "leave_one_out": own["delta_loss"],
                "held_out": held_out,
                "difference": difference,
                "agrees": abs(difference) <= max(LEAST, SHARE * abs(held_out)),
                "half_width": (own["delta_loss_high"] - own["delta_loss_low"]) / 2,
            }
        )
    return rows


def main(names: Annotated[list[str] | None, typer.Argument(help=", ".join(CASES))] = None) -> None:
    torch.set_num_threads(1)
    for name in names or CASES:
        rows = pd.DataFrame(rows_of(name))
        print(rows.to_string(index=False), flush=True)
        table = pd.read_csv(RESULTS)
        pd.concat([table[table["model"] != name], rows]).to_csv(RESULTS, index=False, float_format="%.6g")


if __name__ == "__main__":
    typer.run(main)
