"""Apple's MPS has no float64: attribution, the logit lens and attention from a model on a stand-in for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from mps_standin import DEVICE, StandIn, moved
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe.analyses.attribution import Features
from ln_probe.hooks import model as hooked_models

TOKENS = torch.arange(1, 9)[None]
FORMS: dict[str, dict[str, Any]] = {
    "layernorm": {},
    "rotary": {"positions": "rotary", "norm": "scaling_only"},
    "alibi": {"positions": "alibi"},
}


def neurons(model: Any, cache: Any) -> Features:
    return Features("blocks.0.hook_mlp_out", model.blocks[0].mlp.W_out, cache["blocks.0.mlp.hook_post"])


MEASURES = {
    "logits": lambda model, given, cache: ln_probe.attribute_logits(model, given, target=3, against="mean").check(),
    "features": lambda model, given, cache: ln_probe.attribute_logits(
        model, given, target=3, features=neurons(model, cache)
    ),
    "lens": lambda model, given, cache: ln_probe.logit_lens(model, given).check(),
    "scores": lambda model, given, cache: ln_probe.attribute_scores(model, given, 1, 2, -1).check(),
    "score": lambda model, given, cache: ln_probe.attribute_scores(model, given, 1, 2, -1, 0, against=3).check(),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_model_on_mps_is_measured_as_on_the_cpu(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooked_models, "WITHOUT_FLOAT64", {DEVICE.type})
    on_cpu, on_mps = lab(**FORMS[form]), moved(lab(**FORMS[form]))

    def values(model: Any, measure: Any) -> list[Tensor]:
        _, cache = model.run_with_cache(TOKENS.to(hooked_models.device_of(model)))
        results = [measure(model, given, cache) for given in (TOKENS, cache)]
        return [result.values.detach().nan_to_num() for result in results]

    for name, measure in MEASURES.items():
        with StandIn():
            measured = values(on_mps, measure)
        for own, expected in zip(measured, values(on_cpu, measure), strict=True):
            assert torch.allclose(own, expected, rtol=1e-5, atol=2e-5), name
    with StandIn():
        picture = ln_probe.attention(on_mps, TOKENS[0], layer=1, edit=None)
    expected = ln_probe.attention(on_cpu, TOKENS[0], layer=1, edit=None)
    np.testing.assert_allclose(picture.patterns["intact"], expected.patterns["intact"], rtol=1e-5, atol=1e-6)
