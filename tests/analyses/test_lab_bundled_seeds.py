"""Seeds of the bundled models: keys without scaling, and what is made of several seeds."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

from ln_probe.analyses.lab.language_model.bundled_seeds import (
    ALL_LAYERS,
    FRACTION,
    FROZEN,
    KEYS,
    LOSS,
    _keys,
    contrasts,
    findings,
    unselectable,
)
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, calibrate
from ln_probe.analyses.lab.transformer import LabConfig


@pytest.mark.parametrize("norm", NORM_KINDS)
def test_keys_of_a_constant_divisor(norm: str) -> None:
    """With each token's own scale they are the model's; only norms that scale are measured frozen."""
    torch.manual_seed(0)
    model = LabConfig(2, 8, 4, 11, 16, norm=norm).build()
    tokens = torch.randint(11, (3, 16))
    with calibrate(model), torch.no_grad():
        model(tokens)
    _, cache = model.run_with_cache(tokens)
    for layer, block in enumerate(model.blocks):
        at = f"blocks.{layer}"
        made = _keys(block, cache[f"{at}.hook_resid_pre"], cache[f"{at}.ln1.hook_scale"])
        torch.testing.assert_close(made, cache[f"{at}.attn.hook_k"])
    found = list(unselectable(model, tokens))
    assert [(layer, measure) for layer, measure, _ in found] == [
        (layer, measure) for layer in (0, 1) for measure in ((FRACTION, FROZEN) if norm in SCALES else (FRACTION,))
    ]
    assert all(0 < share < 1 for _, _, share in found)


def test_contrasts_are_within_seeds() -> None:
    lost = {"layernorm": 3.9, "scaling_only": 3.8, "projection_only": 3.5, "none": 3.4}
    rows = [(norm, ALL_LAYERS, LOSS, seed, loss + 0.1 * seed) for norm, loss in lost.items() for seed in range(3)]
    rows += [
        (norm, layer, FRACTION, seed, 0.1 + 0.02 * layer) for norm in lost for layer in range(4) for seed in range(3)
    ]
    values = pd.DataFrame(rows, columns=[*KEYS, "seed", "value"])
    results = findings(values)
    table = results.tables["contrasts"].set_index(["measure", "contrast"])
    assert table.loc[(LOSS, "scaling, with projection"), "mean"] == pytest.approx(0.4)
    assert table.loc[(LOSS, "projection, with scaling"), "mean"] == pytest.approx(0.1)
    assert table.loc[(FRACTION, "scaling, without projection"), "p_holm"] == 1
    means = results.summary.set_index(KEYS)["mean"]
    assert means["none", ALL_LAYERS, FRACTION] == pytest.approx(0.13)
    assert len(results.tables["seeds"]) == len(values)
    assert contrasts(values[values["norm"] == "none"]).empty
