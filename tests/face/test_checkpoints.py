"""What the documentation says of real checkpoints is what the committed tables say."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from ln_probe.analyses.probes import statistics
from ln_probe.analyses.probes.causal import holm_by_family
from ln_probe.analyses.probes.columns import CAUSAL, CAUSAL_PROMPTS

HERE = Path(__file__).parents[2] / "examples" / "checkpoints"
FOLDERS = sorted(p.parent for p in (HERE / "tables").glob("*/causal.csv"))


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"checkpoints_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_tables_come_from_what_every_prompt_gave(folder: Path) -> None:
    table, kept = (pd.read_csv(folder / f"{name}.csv") for name in ("causal", "causal_prompts"))
    assert list(table.columns) == CAUSAL.names
    assert list(kept.columns) == CAUSAL_PROMPTS.names
    groups = table[table["sites"].isin(["attention", "mlp", "final", "all"])]
    assert (groups["prompts"] >= 64).all()
    by_row = dict(list(kept.groupby(["sites", "variant"])))
    for row in table[table["variant"] != "intact"].to_dict("records"):
        mine = by_row[row["sites"], row["variant"]]
        weight = mine["predicted"].to_numpy(float)
        change = mine["delta_loss"].to_numpy(float) * weight
        if math.isnan(row["delta_loss"]):
            assert np.isnan(change).any()
            continue
        size = max(1e-3, float(np.abs(mine["delta_loss"]).max()))
        assert abs(change.sum() / weight.sum() - row["delta_loss"]) < 2e-5 * size + 1e-5
        if row["sites"] in set(groups["sites"]) and np.ptp(change) > 0:
            labels = mine["group"].to_numpy()
            sums = statistics.by_group(change + mine["shift"].to_numpy(), labels)
            low, high = statistics.interval(sums, statistics.by_group(weight, labels))
            assert abs(low - row["delta_loss_low"]) < 1e-3 * size
            assert abs(high - row["delta_loss_high"]) < 1e-3 * size
    idle = (table["variant"] == "intact") | table["no_op"].notna()
    signs = [
        math.nan if i else _sign_test(by_row[s, v])
        for i, s, v in zip(idle, table["sites"], table["variant"], strict=True)
    ]
    expected = holm_by_family(table.assign(p_adjusted=signs), "p_adjusted")
    np.testing.assert_allclose(table["p_adjusted"], expected, rtol=1e-5)
    about = json.loads((folder / "about.json").read_text())
    assert about["command"] == f"python examples/checkpoints/measure.py {folder.name}"
    assert about["prompts"]["count"] >= 64


def _sign_test(rows: pd.DataFrame) -> float:
    change = (rows["delta_loss"] * rows["predicted"]).to_numpy(float)
    return statistics.sign_test(statistics.by_group(change, rows["group"].to_numpy()))


def test_a_text_that_is_missing_or_another_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = script("measure")
    monkeypatch.setattr(measure, "SHARED", tmp_path)
    with pytest.raises(SystemExit, match=r"there is no .*kjv\.txt: put the text there \(SHA-256 [0-9a-f]{64}\)"):
        measure.corpus("kjv.txt")
    (tmp_path / "corpora").mkdir()
    (tmp_path / "corpora" / "kjv.txt").write_text("In the end")
    with pytest.raises(SystemExit, match="is another text: SHA-256"):
        measure.corpus("kjv.txt")


def test_predictions_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    checked, measure = script("checked"), script("measure")
    said = json.loads(checked.PREDICTIONS.read_text())["predictions"]
    for each in said:
        assert each["low"] < each["high"]
        assert each["column"] in CAUSAL.names
        assert measure.CASES[each["case"]].revision
        assert each["case"] not in {f.name for f in FOLDERS}  # not measured yet
    rows = [
        {
            "sites": s["sites"],
            "variant": s["variant"],
            "delta_loss": 0.05,
            "delta_loss_low": 0.01,
            "delta_loss_uniform": 5.0,
        }
        for s in said
        if s["case"] == "gpt2"
    ]
    table = pd.DataFrame(rows).drop_duplicates(["sites", "variant"])
    assert checked.check("gpt2", table) == [False, True, True, True]
    assert capsys.readouterr().out.startswith(
        "FAILS: delta_loss of all no_projection is +0.05, predicted -0.02 to 0.02"
    )
