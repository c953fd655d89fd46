"""Loss-optimal constants of the bundled models: fit them, save them with the weights, measure both estimates.

    python bench/optimal.py lm-layernorm lm-none     # about 20 minutes of one core for a model with nine norms
    python bench/optimal.py                          # every bundled model

For the norms that attention reads ("attention") and for all norms ("all"), constants are fitted on the model's 64
held-out windows and on each half of them; windows alternate between the halves. Descents begin at the mean sigmas over
the 64 windows. Writes `ln_probe/data/checkpoints/NAME/optimal.json` (`ln_probe.hooks.optimal_constants.Shipped`) and a
row of `bench/results/optimal.csv` for each model and group, which has the loss increase with mean constants and with
loss-optimal constants of the half that a window is not in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import typer
from torch import Tensor

import ln_probe
from ln_probe.analyses.files import sha256_of_file
from ln_probe.hooks.constants import Constant, fit, mean_sigmas
from ln_probe.hooks.edits import members, without
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.optimal_constants import Halves, Shipped, fit_halves
from ln_probe.hooks.text import bundled_prompts
from ln_probe.models import bundled_folder
from ln_probe.prompts import summary

GROUPS = ("attention", "all")
TABLE = Path(__file__).parent / "results" / "optimal.csv"


def mean_loss(model: Any, rows: Sequence[Tensor], constants: Mapping[str, Constant] | None) -> float:
    """The mean next-token loss, intact or with scaling frozen at these constants."""
    batch = torch.stack(list(rows))
    with torch.no_grad():
        if constants is None:
            sums = Objective().sums(model(batch, return_type="logits"), batch)
        else:
            with without(model, "scaling", sites=list(constants), scale=dict(constants)):
                sums = Objective().sums(model(batch, return_type="logits"), batch)
    return float(sums.sum()) / (batch.shape[0] * (batch.shape[1] - 1))


def on_other_halves(model: Any, rows: Sequence[Tensor], halves: Halves) -> float:
    """The mean loss, every prompt with the constants of the half that it is not in."""
    total = 0.0
    for half in (0, 1):
        mine = [i for i, number in enumerate(halves.half) if number == half]
        total += len(mine) * mean_loss(model, [rows[i] for i in mine], halves.of(mine[0]))
    return total / len(rows)


def measure(name: str, device: str) -> list[dict[str, Any]]:
    """Fit and measure one model; its rows of the table."""
    model: Any = ln_probe.load_model(name, device=device)
    prompts = bundled_prompts(model)
    assert prompts is not None
    rows = [row.to(device) for row in prompts.measured]
    every, divided, table = {}, {}, []
    for group in GROUPS:
        sites = [s for s in members(ln_probe.hooks.find_norms(model), group) if s.scales]
        if not sites:
            print(f"{name}: no norm of the group {group!r} scales", flush=True)
            continue
        begun = time.perf_counter()
        start = mean_sigmas(model, sites, rows)
        divided[group] = fit_halves(model, sites, rows, range(len(rows)), start=start)
        print(f"{name}, {group}\n{divided[group].table.to_string()}", flush=True)
        every[group] = fit(model, sites, rows, start=start)
        print(every[group].table.to_string(), flush=True)
        seconds = time.perf_counter() - begun
        descents = pd.concat([divided[group].table, every[group].table])
        intact = mean_loss(model, rows, None)
        table.append(
            {
                "model": name,
                "group": group,
                "norms": len(sites),
                "loss": intact,
                "delta_mean": mean_loss(model, rows, start) - intact,
                "delta_optimal": on_other_halves(model, rows, divided[group]) - intact,
                "delta_optimal_same_prompts": every[group].best.loss - intact,
                "evaluations": int(descents["evaluations"].sum()),
                "converged": int(descents["converged"].sum()),
                "descents": len(descents),
                "starts_differ": max(
                    abs(f.descents[0].loss - f.descents[1].loss) for f in (*divided[group].fits, every[group])
                ),
                "seconds": round(seconds),
            }
        )
        print(table[-1], flush=True)
    if every:
        folder = bundled_folder(name)
        shipped = Shipped(sha256_of_file(folder / "model.safetensors"), summary("", rows)["sha256"], every, divided)
        (folder / "optimal.json").write_text(json.dumps(shipped.to_json()) + "\n")
    return table


def main(
    names: Annotated[list[str] | None, typer.Argument(help="bundled models; all of them if left out")] = None,
    device: str = "cpu",
) -> None:
    torch.set_num_threads(1)
    for name in names or ln_probe.bundled_models():
        before = pd.read_csv(TABLE) if TABLE.is_file() else pd.DataFrame({"model": []})
        after = pd.concat([before[before["model"] != name], pd.DataFrame(measure(name, device))], ignore_index=True)
        after.sort_values(["model", "group"]).to_csv(TABLE, index=False, float_format="%.6g", lineterminator="\n")


if __name__ == "__main__":
    typer.run(main)
