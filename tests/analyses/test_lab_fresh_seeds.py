"""The registered 2 x 2: seeds nobody has seen, main effects with known answers, and a run from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import fresh_seeds
from ln_probe.analyses.lab.language_model.bundled_seeds import ALL_LAYERS
from ln_probe.analyses.lab.language_model.fresh_seeds import FRACTION, KEYS, LOSS, MARGINS, findings
from ln_probe.analyses.lab.text_task import TextTask

# Of scaling and of projection, built into the values below: nats, and points of the share.
PLANTED = {LOSS: {"scaling": 0.1, "projection": 0.0}, FRACTION: {"scaling": -5.0, "projection": 0.2}}


def planted(seeds: int) -> pd.DataFrame:
    rows = []
    for seed in range(seeds):
        noise = 0.001 * (-1) ** seed
        for norm, scaled, projected in (
            ("layernorm", 1, 1), ("scaling_only", 1, 0), ("projection_only", 0, 1), ("none", 0, 0),
        ):  # fmt: skip
            change = {
                m: scaled * (of["scaling"] + noise) + projected * (of["projection"] - noise)
                for m, of in PLANTED.items()
            }
            rows.append((norm, ALL_LAYERS, LOSS, seed, 4 + seed + change[LOSS]))
            rows += [(norm, layer, FRACTION, seed, 0.3 + 0.1 * layer + change[FRACTION] / 100) for layer in (0, 1)]
    return pd.DataFrame(rows, columns=[*KEYS, "seed", "value"])


def test_main_effects_and_equivalence() -> None:
    effects = findings(planted(10), {}).tables["effects"].set_index(["measure", "contrast"])
    assert len(effects) == 4
    for measure, of in PLANTED.items():
        for contrast, wanted in of.items():
            row = effects.loc[(measure, contrast)]
            assert row["estimate"] == pytest.approx(wanted, abs=1e-9)
            assert row["equivalent"] == (abs(wanted) < MARGINS[measure])
    assert (effects["p_holm"] >= effects["p"]).all()


@pytest.mark.slow
def test_a_run(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"d_vocab": 300, "n_ctx": 24}
    task = TextTask([prose], small["d_vocab"], small["n_ctx"], valid_windows=4)
    monkeypatch.setattr(fresh_seeds, "text", lambda _request: task)
    whole = fresh_seeds.fresh_model
    monkeypatch.setattr(fresh_seeds, "fresh_model", lambda norm: replace(whole(norm), **small))
    request = Request(tmp_path, (0, 1), quick=True, texts=(prose,), progress=False)
    found = fresh_seeds.run(request)
    assert found.settings["seeds"] == [10, 11]
    assert len(found.tables["effects"]) == len(found.conclusions) == 4
    assert sorted(p.name for p in (tmp_path / "runs").iterdir())[:2] == ["layernorm-seed10", "layernorm-seed11"]
    again = fresh_seeds.run(request)  # from what is there
    pd.testing.assert_frame_equal(again.tables["effects"], found.tables["effects"])
