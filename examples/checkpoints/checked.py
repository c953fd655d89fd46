"""Which of the predictions that were written down beforehand hold."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

PREDICTIONS = Path(__file__).with_name("predictions.json")


KEYS = {"causal": ("sites", "variant"), "geometry": ("space", "variant")}  # of a row, by the prediction's table


def check(case: str, causal: pd.DataFrame, geometry: pd.DataFrame | None = None) -> list[bool]:
    """Print, for each prediction about a case, the value and whether it holds; tables not given are passed over.

    Args:
        case: of `measure.py`.
        causal: the table of its report.
        geometry: what `geometry.rows_of` gives.
    """
    tables = {"causal": causal, "geometry": geometry}
    held = []
    for said in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["predictions"]:
        name = said.get("table", "causal")
        table = tables[name]
        if said["case"] != case or table is None:
            continue
        row = [said[key] for key in KEYS[name]]
        value = float(table.set_index(list(KEYS[name])).loc[tuple(row), said["column"]])
        held.append(said["low"] <= value <= said["high"])
        print(
            f"{'holds' if held[-1] else 'FAILS'}: {said['column']} of {' '.join(row)} is {value:+.4g}"
            f", predicted {said['low']:g} to {said['high']:g} ({said['why']})"
        )
    return held
