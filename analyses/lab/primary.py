"""Main effects of scaling and of projection in every experiment with kept results:

    python -m ln_probe.analyses.lab.primary        # writes published/primary_contrasts.csv

With all four norms of a 2 x 2 design the main effect of scaling is the mean of LayerNorm and scaling alone minus the
mean of projection alone and no norm; that of projection likewise. Where a design has no model without a norm, it is
LayerNorm minus the norm that lacks the term. Each seed gives one value. Each experiment is a family of tests. Outcomes
and contrasts were named after most seeds had been seen, so Holm's adjustment corrects for their number, not for their
choice; those of `fresh_seeds` and `fresh_seeds_long` were registered before their models were trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats  # type: ignore[import-untyped]

from ln_probe.analyses.lab.norms import NORM_KINDS, PROJECTS, SCALES
from ln_probe.analyses.lab.results import PUBLISHED_FOLDER, folder, interval, paired_p, select, table_at
from ln_probe.analyses.probes.statistics import holm

FILE = PUBLISHED_FOLDER / "primary_contrasts.csv"
EQUIVALENCE = 0.90  # level of the interval whose larger end is the equivalence bound
SCALING, PROJECTION = "scaling", "projection"
HAVING = {SCALING: SCALES, PROJECTION: PROJECTS}  # the norms that have each of the two terms

Differences = Mapping[str, "pd.Series[float]"]  # a value per seed, by contrast


def main_effects(values: pd.DataFrame) -> dict[str, pd.Series]:
    """Both main effects per seed, of `norm`, `seed` and `value`; several rows of a norm and seed are averaged."""
    cells = values.groupby(["seed", "norm"])["value"].mean().unstack()
    effects = {}
    for term, with_term in HAVING.items():
        lacking = [n for n in NORM_KINDS if n in cells and n not in with_term]
        having = [n for n in NORM_KINDS if n in with_term] if "none" in cells else ["layernorm"]
        if lacking:
            effects[term] = (
                cells[having].mean(axis=1, skipna=False) - cells[lacking].mean(axis=1, skipna=False)
            ).dropna()
    return effects


def _rows(experiment: str, table: str, **wanted: object) -> pd.DataFrame:
    return select(table_at(folder(experiment), table), **wanted)


def _effects(experiment: str, table: str, **wanted: object) -> Callable[[], Differences]:
    return lambda: main_effects(_rows(experiment, table, **wanted))


def _majority() -> Differences:
    at = {"measure": "train_loss", "step": 1000}
    full = _rows("majority", "curves", radius="sqrt(d)", **at)
    base, short = (
        _rows("majority", "curves", norm="scaling_only", radius=radius, **at).set_index("seed")["value"]
        for radius in ("sqrt(d)", "1/sqrt(d) for values")
    )
    return {**main_effects(full), "value vectors of norm 1/√d instead of √d": (short - base).dropna()}


def _depth() -> Differences:
    bins = [f"exact_match_{span}" for span in ("101_150", "151_200", "201_250")]
    values = _rows("depth", "exact_match", positions="none", measure=bins)
    values = values[values["k"] == values["depth"] + 3]
    both = values.groupby("seed")["norm_order"].nunique()
    return main_effects(values[values["seed"].isin(both.index[both == 2])])


def _approximation() -> Differences:
    values = _rows("approximation", "errors", measure="relative_mse", lr=0.01, dot_product=False)
    norms = values.groupby(["target", "kernel", "heads", "width", "norm_order"])["norm"].transform("nunique")
    return main_effects(values[norms == len(NORM_KINDS)].assign(value=lambda t: np.log10(t["value"])))


def _removed() -> Differences:
    values = _rows("remove_norm", "seeds", measure="valid_loss", model=["removed", "kept"])
    cells = values.pivot(index="seed", columns="model", values="value")
    return {"all norms replaced by constants, fine-tuned": cells["removed"] - cells["kept"]}


FIRST = " (registered before the runs)"
FACTORS = {"points": 100.0}  # from a unit of the tables to that of an outcome; others are the same
# Experiment, outcome, unit, and the differences per seed.
OUTCOMES: tuple[tuple[str, str, str, Callable[[], Differences]], ...] = (
    ("majority", "training loss at step 1000", "nats", _majority),
    ("majority_in_space", "test accuracy", "points",
     _effects("majority_in_space", "scores", measure="test_accuracy", radius="sqrt(d)")),
    ("language_model", "keys that are unselectable in head space", "points",
     _effects("language_model", "seeds", measure="unselectable_fraction", space="head", step=1500,
              divisor=["-", "1"])),
    *(
        (experiment, f"{outcome}{when}", unit, _effects(experiment, "seeds", measure=measure))
        for experiment, when in (("language_model_bundled", ""), ("fresh_seeds", FIRST), ("fresh_seeds_long", FIRST))
        for outcome, unit, measure in (
            ("held-out loss", "nats", "valid_loss"),
            ("keys that are unselectable in head space", "points", "unselectable_fraction"),
        )
    ),
    ("encoder", "masked loss, narrow", "nats",
     _effects("encoder", "seeds", measure="valid_loss", shape="narrow", step=1000,
              norm=["layernorm", "scaling_only", "projection_only"])),
    ("encoder_passages", "accuracy, narrow", "points",
     _effects("encoder_passages", "values", measure="valid_accuracy", shape="narrow")),
    ("remove_norm", "held-out loss", "nats", _removed),
    ("depth", "exact match one block beyond the theory, 101 to 250 letters", "points", _depth),
    ("counting", "accuracy on L5 at 1024 letters, norm on the LSTM's state", "points",
     _effects("counting", "values", task="L5", model="lstm", measure="accuracy_1024", norm_site=["state", "none"])),
    ("counting", "accuracy on L5 at 1024 letters, transformer", "points",
     _effects("counting", "values", task="L5", model="transformer", measure="accuracy_1024",
              norm_site=["blocks", "none"])),
    ("approximation", "log10 of the trained error, mean over models", "decades", _approximation),
)  # fmt: skip


def effect_rows(differences: Differences, factor: float = 1.0) -> Iterator[dict[str, Any]]:
    """A row per contrast: `contrast`, `estimate` with `low` and `high`, `p`, `bound`, `seeds`, `agreeing`."""
    for contrast, per_seed in differences.items():
        values = per_seed.to_numpy(float) * factor
        estimate, low, high = interval(values)
        t = float(stats.t.ppf((1 + EQUIVALENCE) / 2, len(values) - 1))
        half = t * values.std(ddof=1) / np.sqrt(len(values))
        yield {
            "contrast": contrast, "estimate": estimate, "low": low, "high": high, "p": paired_p(values),
            "bound": abs(estimate) + half, "seeds": len(values),
            "agreeing": int((np.sign(values) == np.sign(estimate)).sum()),
        }  # fmt: skip


def primary_contrasts() -> pd.DataFrame:
    """One row per experiment, outcome and contrast.

    Returns:
        `estimate` with its 95 % CI (Student's t over seeds), `p`, and `p_holm` over the rows of the same experiment;
        `bound`: the larger end, in absolute value, of the 90 % CI, so that two one-sided tests at 5 % exclude larger
        effects; `seeds`, and how many of them have the sign of the estimate (`agreeing`).
    """
    rows = [
        {"experiment": experiment, "outcome": outcome, "unit": unit, **row}
        for experiment, outcome, unit, differences in OUTCOMES
        for row in effect_rows(differences(), FACTORS.get(unit, 1.0))
    ]
    table = pd.DataFrame(rows)
    adjusted = [pd.Series(holm(rows["p"].to_numpy()), rows.index) for _, rows in table.groupby("experiment")]
    table.insert(list(table).index("p") + 1, "p_holm", pd.concat(adjusted))
    return table


if __name__ == "__main__":
    primary_contrasts().to_csv(FILE, index=False, float_format="%.6g")
    print(pd.read_csv(FILE).drop(columns="outcome").to_string())
