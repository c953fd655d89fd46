"""Is the dot product needed? Pairs of runs of one seed that differ in it alone.

Wang & E (2024), section 6: 3a, on the sum 1b ("marginal"), and 3b, on text, where the model with it is always better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.intervals import doubt
from ln_probe.analyses.lab.results import contrasted
from ln_probe.analyses.probes.text import counted

SWITCH = "dot_product"


def paired(values: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """With the dot product minus without, of the same seed.

    Args:
        values: long form: `keys`, `dot_product`, `seed`, `value`.
        keys: what must be equal in both.

    Returns:
        A row per combination that has both: `keys` and what `contrasted` gives.
    """
    same, has = [*keys, "seed"], values[SWITCH].astype(bool)
    pairs = values[has].merge(values[~has][[*same, "value"]], on=same, suffixes=("", "_without"), validate="1:1")
    pairs["value"] = pairs["value"] - pairs["value_without"]
    return contrasted(pairs, keys)


def dot_product_factors(errors: pd.DataFrame) -> pd.DataFrame:
    """By what factor the dot product changes the squared error (3a): geometric means over seeds.

    Args:
        errors: the kept values of the approximation experiment.

    Returns:
        `target, kernel, heads, width, factor, low, high` (95 %), `seeds, p, p_holm`.
    """
    plain = errors[(errors["measure"] == "mse") & (errors["norm"] == "none")]
    logs = plain.assign(value=np.log(plain["value"].astype(float)))
    keys = ["target", "kernel", "heads", "width"]
    found = paired(logs, [*keys, "norm_order", "lr"])
    columns = {"mean": "factor", "ci_low": "low", "ci_high": "high"}
    told = found.assign(**{c: np.exp(found[c].astype(float)) for c in columns}).rename(columns=columns)
    return told[[*keys, *columns.values(), "seeds", "p", "p_holm"]]


def product_sentences(factors: pd.DataFrame) -> Iterator[str]:
    """3a in words."""
    for row in factors.to_dict("records"):
        spread = "" if np.isnan(row["low"]) else f" [{row['low']:.2g}, {row['high']:.2g}]"
        heads = counted(row["heads"], "head")
        yield (
            f"3a, dot product on {row['target']}, {row['kernel']}, {heads}, FFN of {row['width']}: "
            f"{row['factor']:.2g}{spread} times the error without it ({counted(row['seeds'], 'seed')})"
            f"{doubt(row['p_holm'], row['seeds'])}."
        )
