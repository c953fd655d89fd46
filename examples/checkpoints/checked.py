"""Which of the predictions that were written down beforehand hold."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

PREDICTIONS = Path(__file__).with_name("predictions.json")


def check(case: str, causal: pd.DataFrame) -> list[bool]:
    """Print, for each prediction about a case, the value and whether it holds."""
    rows = causal.set_index(["sites", "variant"])
    held = []
    for said in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["predictions"]:
        if said["case"] != case:
            continue
        value = float(rows.loc[(said["sites"], said["variant"]), said["column"]])
        held.append(said["low"] <= value <= said["high"])
        print(
            f"{'holds' if held[-1] else 'FAILS'}: {said['column']} of {said['sites']} {said['variant']} is {value:+.4g}"
            f", predicted {said['low']:g} to {said['high']:g} ({said['why']})"
        )
    return held
