"""Which tokens lose: a table by hand, and against the keys table of a real report."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ln_probe.analyses.probes.columns import TOKENS
from ln_probe.exhibits import VERDICTS, Exhibits, PromptAttention, by_token, to_bytes
from ln_probe.report import Report


def shown(tokens: list[str], attainable: list[float], frozen: list[float], **options: object) -> PromptAttention:
    n = len(tokens)
    values = {
        "prompt": 0,
        "tokens": tuple(tokens),
        "layers": (0,),
        "heads": (0,),
        "edges": np.arange(n + 1),
        "cells": np.zeros((1, 1, n, n), np.uint8),
        "verdict": np.zeros((1, 1, n), np.uint8),
        "margin": np.ones((1, 1, n), np.float16),
        "attainable": np.array([[attainable]], np.float16),
        "verdict_frozen": np.zeros((1, 1, n), np.uint8),
        "attainable_frozen": np.array([[frozen]], np.float16),
        "received": np.zeros((1, 1, n), np.uint8),
    }
    return PromptAttention(**(values | options))  # type: ignore[arg-type]


def test_tokens_that_lose_come_first_and_position_0_and_sinks_stand_apart() -> None:
    tokens = ["a", "b", "c", "b", *"x" * 10]
    one = shown(
        tokens,
        [0.9, 0.5, 0.5, 0.7, *[0.5] * 10],
        [0.9, 0.25, 0.75, 0.25, *[0.5] * 10],
        received=to_bytes(np.array([[[0.1, 0.1, 0.4, 0.0, *[0.0] * 9, 0.9]]])),  # however much: `sinks` decides
        verdict_frozen=np.array([[[0, 1, 0, 2, *[0] * 10]]], np.uint8),
    )
    rows = [{"prompt": 0, "position": 2, "sink": True}, {"prompt": 0, "position": 3, "sink": False},
            {"prompt": 1, "position": 5, "sink": True}]  # fmt: skip
    table = by_token(Exhibits((one,)), pd.DataFrame(rows))
    assert list(table.columns) == TOKENS.names
    assert table[["token", "place", "keys"]].to_numpy().tolist() == [
        ["a", "position 0", 1], ["c", "sink", 1], ["b", "elsewhere", 2], ["x", "elsewhere", 10],
    ]  # fmt: skip
    b = table[table["token"] == "b"].iloc[0]
    assert (b["unselectable"], b["unselectable_no_scaling"]) == (0, 2)
    assert b["attainable_median"] == pytest.approx(0.6, abs=1e-3)
    assert b["attainable_change"] == pytest.approx(0.25 - 0.6, abs=1e-3)


def test_what_was_not_measured_is_nan() -> None:
    unknown = np.full((1, 1, 2), VERDICTS.index("not measured"), np.uint8)
    one = shown(["a", "b"], [np.nan] * 2, [np.nan] * 2, verdict=unknown, verdict_frozen=unknown)
    table = by_token(Exhibits((one,)))
    assert table[["unselectable", "unselectable_no_scaling", "attainable_median"]].isna().all().all()
    assert by_token(Exhibits()).empty


def test_against_the_keys_table(long_report: Report) -> None:
    """With keys='all' the table of keys holds what this one sums up."""
    table = by_token(long_report.exhibits)
    keys = long_report.keys.query("space == 'head' and variant == 'intact'")
    assert table["keys"].sum() == len(keys)
    assert table["unselectable"].sum() == keys["verdict"].isin(["unselectable", "duplicate"]).sum()
    first = keys[keys["position"] == 0].groupby("token")["attainable_last"].median()
    mine = table[table["place"] == "position 0"].set_index("token")["attainable_median"]
    assert np.allclose(mine, first[mine.index], rtol=1e-3)


def test_a13_one_definition_of_a_sink(long_report: Report) -> None:
    """What the table of tokens calls a sink is what findings and the table of sinks call one."""
    sinks = long_report.sinks[long_report.sinks["sink"].astype(bool)]
    shown = {p.prompt: p for p in long_report.exhibits.attention}
    later = sinks[(sinks["position"] > 0) & sinks["prompt"].isin(list(shown))]
    table = by_token(long_report.exhibits, long_report.sinks)
    heads = {p: len(kept.layers) * len(kept.heads) for p, kept in shown.items()}
    assert table.loc[table["place"] == "sink", "keys"].sum() == sum(heads[int(p)] for p in later["prompt"])
    without = by_token(long_report.exhibits, sinks.head(0))
    assert "sink" not in set(without["place"])
