"""What CAPP-GPT's plans lose with a term switched off: parts drawn evenly, its own plans, and they alone scored.

    python examples/checkpoints/plans.py    # writes examples/checkpoints/tables/plans-capp-gpt.csv

A part is described by one token of each of six kinds, which the model never learned to predict: what is counted is the
loss of the plan that follows. The constants of a part are the means over the others. On plans that the model drew
itself a change of the loss estimates a KL divergence.
"""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import torch
from measure import CASES, HERE, PROMPTS, SHARED, load
from parts import edited_losses, losses

import ln_probe
from ln_probe.hooks.model import run
from ln_probe.hooks.task import special_tokens

KINDS = ("geometry_", "holes_", "external_threads_", "surface_finish_", "tolerance_", "batch_size_")
LIMIT = 64  # tokens of a part and its plan
GROUPS = ("attention", "mlp", "final", "all")


def draw(model: Any, count: int, seed: int) -> list[list[int]]:
    """Parts and the model's plans for them, up to its end token."""
    tokens = json.loads((SHARED / "checkpoints" / "capp_gpt" / "token_mappings.json").read_text())["token2id"]
    choices = [[i for name, i in tokens.items() if name.startswith(kind)] for kind in KINDS]
    ends = set(special_tokens(model, "eos"))
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        row = [c[int(torch.randint(len(c), (1,), generator=generator))] for c in choices]
        while len(row) < LIMIT and row[-1] not in ends:
            logits = run(model, torch.tensor([row]), return_type="logits")[0, -1]
            row.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        found.append(row)
    return found


def main() -> None:
    torch.set_num_threads(1)
    model = load(CASES["capp-gpt-own"])
    with torch.no_grad():
        rows = draw(model, PROMPTS, 0)
        constants = ln_probe.norm_constants(model, rows)
        base = losses(model, rows, read=len(KINDS))
        ways = (("scaling", "two"), ("scaling", "one"), ("projection", ""), ("both", "two"))
        found = []
        for sites in GROUPS:
            for what, kind in ways:
                changed = edited_losses(model, rows, constants, what, one=kind == "one", read=len(KINDS), sites=sites)
                for prompt, (row, before, after) in enumerate(zip(rows, base, changed, strict=True)):
                    found.append((sites, what, kind, prompt, len(row) - len(KINDS), before, after - before))
    columns = ["sites", "without", "constants", "prompt", "predicted", "loss", "delta_loss"]
    table = pd.DataFrame(found, columns=columns)
    table.to_csv(HERE / "tables" / "plans-capp-gpt.csv", index=False, float_format="%.6g")
    print(table.groupby(["sites", "without", "constants"])["delta_loss"].mean())


if __name__ == "__main__":
    main()
