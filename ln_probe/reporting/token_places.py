"""Which tokens lose: what keys of each token can get, with and without scaling, sinks and position 0 apart.

Computed from what the report keeps of its prompts (`Report.exhibits`): every key of every head, not only the hardest.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pandas as pd

from ln_probe.analyses.probes.columns import TOKENS
from ln_probe.analyses.probes.head_columns import SINKS
from ln_probe.analyses.probes.text import encodable
from ln_probe.reporting.exhibits import VERDICTS, Exhibits, PromptAttention, to_weights

__all__ = [
    "by_token",
]

PLACES = ("position 0", "sink", "elsewhere")


def by_token(exhibits: Exhibits, sinks: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row per token and place (`ln_probe.analyses.probes.columns.TOKENS`), the tokens that scaling helps most first.

    Args:
        exhibits: `Report.exhibits`.
        sinks: `Report.sinks`, which says which tokens of which prompts are sinks. None: no token is called one.

    `keys` counts (layer, head, prompt, position); medians are over them. `attainable_change` is what taking
    scaling away does to the median attainable attention: negative where the token loses.
    """
    of_sinks = SINKS.empty() if sinks is None else sinks[sinks["sink"].astype(bool)]
    known = [(int(prompt), int(at)) for prompt, at in of_sinks[["prompt", "position"]].to_numpy()]
    rows = [_keys(shown, {at for prompt, at in known if prompt == shown.prompt}) for shown in exhibits.attention]
    if not rows:
        return TOKENS.empty()
    keys = pd.concat(rows, ignore_index=True)
    grouped = keys.groupby(["token", "place"], sort=False)
    table = grouped.agg(
        keys=("stuck", "size"),
        unselectable=("stuck", "sum"),
        unselectable_no_scaling=("stuck_frozen", "sum"),
        attainable_median=("attainable", "median"),
        attainable_no_scaling_median=("attainable_frozen", "median"),
        margin_median=("margin", "median"),
        received_mean=("received", "mean"),
    ).reset_index()
    for column, measured in (("unselectable", "known"), ("unselectable_no_scaling", "known_frozen")):
        some = grouped[measured].any().to_numpy()
        table[column] = table[column].astype(float).where(some)
    table["attainable_change"] = table["attainable_no_scaling_median"] - table["attainable_median"]
    order = table.assign(rank=table["place"].map(PLACES.index)).sort_values(
        ["rank", "attainable_change", "keys"], ascending=[True, True, False], kind="stable"
    )
    return order[TOKENS.names].reset_index(drop=True)


def _keys(shown: PromptAttention, sinks: Collection[int]) -> pd.DataFrame:
    layers, heads, length = shown.verdict.shape
    received = to_weights(shown.received)
    position = np.broadcast_to(np.arange(length), shown.verdict.shape)
    place = np.where(position == 0, 0, np.where(np.isin(position, sorted(sinks)), 1, 2))
    stuck = [VERDICTS.index("unselectable"), VERDICTS.index("duplicate")]
    unknown = VERDICTS.index("not measured")
    return pd.DataFrame(
        {
            "token": np.tile(np.array([encodable(t) for t in shown.tokens], object), layers * heads),
            "place": np.array(PLACES, object)[place.ravel()],
            "stuck": np.isin(shown.verdict, stuck).ravel(),
            "stuck_frozen": np.isin(shown.verdict_frozen, stuck).ravel(),
            "known": (shown.verdict != unknown).ravel(),
            "known_frozen": (shown.verdict_frozen != unknown).ravel(),
            "attainable": shown.attainable.astype(np.float64).ravel(),
            "attainable_frozen": shown.attainable_frozen.astype(np.float64).ravel(),
            "margin": shown.margin.astype(np.float64).ravel(),
            "received": received.ravel(),
        }
    )
