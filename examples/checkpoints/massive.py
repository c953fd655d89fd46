"""Which prompts of a case have an outlier token elsewhere than at position 0, which two constants a norm do not know.

    python examples/checkpoints/massive.py smollm2-135m    # writes examples/checkpoints/tables/massive-smollm2-135m.csv

Outlier tokens as `ln_probe.outlier_tokens` finds them, at some norm of the model.
"""

from __future__ import annotations

import argparse

import pandas as pd
import torch
from measure import CASES, HERE, SOURCES, load

import ln_probe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CASES)
    name = parser.parse_args().name
    torch.set_num_threads(1)
    case = CASES[name]
    model = load(case)
    rows = []
    for prompt, row in enumerate(SOURCES[case.prompts](model, case.tokens)):
        found = ln_probe.outlier_tokens(model, torch.tensor([row]))
        places = found.mask[0].nonzero()[:, 0].tolist()
        rows.append((prompt, 0 in places, sum(place > 0 for place in places)))
    table = pd.DataFrame(rows, columns=["prompt", "at_first", "elsewhere"])
    table.to_csv(HERE / "tables" / f"massive-{name}.csv", index=False)
    print(table.sum())


if __name__ == "__main__":
    main()
