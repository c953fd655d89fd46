"""Seeds of the bundled models: keys without scaling, and what is made of several seeds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model.bundled_seeds import (
    ALL_LAYERS,
    COSTS,
    FRACTION,
    FROZEN,
    KEYS,
    LOSS,
    _keys,
    contrasts,
    costs,
    findings,
    text,
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


def test_what_the_terms_cost() -> None:
    """With each site's constants put in by hand; a model that does not project loses nothing without projection."""
    torch.manual_seed(0)
    made = LabConfig(2, 8, 4, 11, 16, norm="scaling_only", norm_mlp="scaling_only", norm_final="scaling_only")
    model = made.build()
    tokens, others = torch.randint(11, (5, 16)), torch.randint(11, (5, 16))
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.3 * torch.randn_like(weights)
    found = {measure: (layer, cost) for layer, measure, cost in costs(model, tokens, others)}
    assert found[COSTS["projection"]] == (ALL_LAYERS, 0)
    _, cache = model.run_with_cache(others)
    frozen = {
        name: torch.cat([sigma[:, :1].mean(0), sigma[:, 1:].mean().expand(15, 1)])
        for name, sigma in cache.items()
        if name.endswith("hook_scale")
    }
    hooks = [(name, lambda sigma, hook: frozen[hook.name].expand_as(sigma)) for name in frozen]
    with torch.no_grad():
        by_hand = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks) - model(tokens, return_type="loss")
    assert found[COSTS["scaling"]] == (ALL_LAYERS, pytest.approx(float(by_hand), abs=1e-6))
    assert abs(by_hand) > 1e-3


def test_other_text_than_the_shipped(tmp_path: Path) -> None:
    """Seed 0 is the checkpoint that ships: its tokens mean nothing to another tokenizer."""
    file = tmp_path / "other.txt"
    file.write_text("".join(f"{i} green bottles hanging on the wall, " for i in range(9000)))
    request = Request(tmp_path, (0, 1), texts=(file,))
    with pytest.raises(ValueError, match=r"trained on kjv\.txt \(262804ea\), .*, got other\.txt \("):
        text(request)
    assert text(replace(request, quick=True)).d_vocab == 1024


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
