"""Fit the loss-optimal constants of the bundled models, and save them with the weights.

    python bench/optimal.py lm-layernorm lm-none     # about ten minutes of one core for a model with nine norms
    python bench/optimal.py                          # every bundled model

For the norms that attention reads ("attention") and for all norms ("all"), constants are fitted on the model's held-out
windows ("every") and on each half of them ("halves"); windows alternate between the halves. Writes
`ln_probe/data/checkpoints/NAME/optimal.json`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer

import ln_probe
from ln_probe.analyses.text import sha256_of_file
from ln_probe.hooks.constants import fit, mean_sigmas
from ln_probe.hooks.edits import members
from ln_probe.models import bundled_folder
from ln_probe.prompts import summary

GROUPS = ("attention", "all")


def fit_model(name: str, device: str) -> None:
    """Fit the constants of one model, and write them."""
    model: Any = ln_probe.load_model(name, device=device)
    prompts, folder = vars(model).get("bundled_prompts"), bundled_folder(name)
    assert prompts is not None
    rows = [row.to(device) for row in prompts.measured]
    every: dict[str, Any] = {}
    halves: dict[str, Any] = {}
    for group in GROUPS:
        norms = [n for n in members(ln_probe.hooks.find_norms(model), group) if n.scales]
        if not norms:
            print(f"{name}: no norm of the group {group!r} scales", flush=True)
            continue
        start = mean_sigmas(model, norms, rows)
        fits = [fit(model, norms, some, start=start) for some in (rows, rows[::2], rows[1::2])]
        pairs = [{n: [c.first, c.rest] for n, c in constants.items()} for constants in fits]
        every[group], halves[group] = pairs[0], pairs[1:]
        print(name, group, pairs[0], flush=True)
    if every:
        digests = {
            "weights_sha256": sha256_of_file(folder / "model.safetensors"),
            "prompts_sha256": summary("", rows)["sha256"],
        }
        (folder / "optimal.json").write_text(json.dumps({**digests, "every": every, "halves": halves}) + "\n")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="bundled models; all of them if left out")] = None,
    device: str = "cpu",
) -> None:
    torch.set_num_threads(1)
    for name in names or ln_probe.bundled_models():
        fit_model(name, device)


if __name__ == "__main__":
    typer.run(main)
