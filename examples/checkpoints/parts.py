"""Which of a head's inputs needs an attention norm's scaling: queries, keys or values, edited one at a time.

    python examples/checkpoints/parts.py mgm    # or smollm2-135m; writes examples/checkpoints/tables/parts-mgm.csv

The prompts are those of `measure.py`, whose tables must be there; the constants of a prompt are the means over the
others. Edited are the norm where an effect of one constant was reported once, and all that attention reads; every
prompt's change of the loss is kept.
"""

from __future__ import annotations

import argparse
from typing import Any

import pandas as pd
import torch
from measure import CASES, HERE, SOURCES, load

import ln_probe
from ln_probe.hooks import without
from ln_probe.hooks.model import run

SITES = {"mgm": "blocks.2.ln1", "smollm2-135m": "blocks.16.ln1"}
WAYS = (None, "queries", "keys", "values")


def losses(model: object, prompts: list[list[int]], read: int = 1) -> list[float]:
    """Mean loss of each prompt, nats per token; its first `read` tokens are read and not counted."""
    found = []
    for row in prompts:
        tokens = torch.tensor([row])
        logits = run(model, tokens, return_type="logits")[0, read - 1 : -1].double()
        found.append(float(torch.nn.functional.cross_entropy(logits, tokens[0, read:])))
    return found


def edited_losses(
    model: object,
    prompts: list[list[int]],
    constants: Any,
    what: str,
    *,
    one: bool = False,
    read: int = 1,
    **chosen: Any,
) -> list[float]:
    """Mean loss of each prompt with norms edited, sigma replaced by the prompt's constants (`one`: position 0 too)."""
    found = []
    for number, row in enumerate(prompts):
        scale = {
            site: {"first": c.rest if one else c.first, "rest": c.rest} for site, c in constants.of(number).items()
        }
        with torch.no_grad(), without(model, what, scale=scale, **chosen):
            found += losses(model, [row], read)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SITES)
    name = parser.parse_args().name
    torch.set_num_threads(1)
    case = CASES[name]
    model = load(case)
    prompts = SOURCES[case.prompts](model, case.tokens)
    kept = pd.read_csv(HERE / "tables" / name / "causal_prompts.csv")
    intact = kept.groupby("prompt")["loss"].first()  # of the model as it is, with every row
    base = losses(model, prompts)
    if not max(abs(a - b) for a, b in zip(base, intact, strict=True)) < 1e-4:
        raise SystemExit(f"{name}: these are not the prompts of tables/{name}: run measure.py {name} first")
    constants = ln_probe.norm_constants(model, prompts)
    rows = []
    for sites in (SITES[name], "attention"):
        for kind in ("two", "one"):
            for only in WAYS:
                changed = edited_losses(model, prompts, constants, "scaling", one=kind == "one", sites=sites, only=only)
                for prompt, (after, before) in enumerate(zip(changed, base, strict=True)):
                    rows.append((sites, kind, only or "all three", prompt, len(prompts[prompt]) - 1, after - before))
                print(sites, kind, only, pd.Series(changed).sub(base).mean(), flush=True)
    columns = ["sites", "constants", "only", "prompt", "predicted", "delta_loss"]
    table = pd.DataFrame(rows, columns=columns)
    table.to_csv(HERE / "tables" / f"parts-{name}.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
