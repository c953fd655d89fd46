"""Which of a head's inputs needs an attention norm's scaling: queries, keys or values, edited one at a time.

    python examples/checkpoints/parts.py mgm    # or smollm2-135m; writes examples/checkpoints/tables/parts-mgm.csv

The prompts and the constants are those of `measure.py`, whose tables must be there. At the norm where an effect of one
constant was reported once, and at all that attention reads; every prompt's change of the loss is kept.
"""

from __future__ import annotations

import argparse
import json

import pandas as pd
import torch
from measure import CASES, HERE, SOURCES, load

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
    two = json.loads((HERE / "tables" / name / "about.json").read_text())["constants"]
    one = {site: {"first": c["rest"], "rest": c["rest"]} for site, c in two.items()}
    rows = []
    for sites in (SITES[name], "attention"):
        for constants, scale in (("two", two), ("one", one)):
            for only in WAYS:
                with torch.no_grad(), without(model, "scaling", sites=sites, scale=scale, only=only):
                    changed = losses(model, prompts)
                for prompt, (after, before) in enumerate(zip(changed, base, strict=True)):
                    rows.append(
                        (sites, constants, only or "all three", prompt, len(prompts[prompt]) - 1, after - before)
                    )
                print(sites, constants, only, pd.Series(changed).sub(base).mean(), flush=True)
    columns = ["sites", "constants", "only", "prompt", "predicted", "delta_loss"]
    table = pd.DataFrame(rows, columns=columns)
    table.to_csv(HERE / "tables" / f"parts-{name}.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main()
