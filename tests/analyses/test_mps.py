"""Apple's MPS has no float64: attribution, the logit lens and attention from a model on a stand-in for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from mps_standin import DEVICE, StandIn, moved
from small_models import lab
from torch import Tensor

import ln_probe
from ln_probe.analyses.attribution import Features, attribute_logits, attribute_scores, logit_lens
from ln_probe.hooks import model as hooked_models

TOKENS = torch.arange(1, 9)[None]
FORMS: list[dict[str, Any]] = [{}, {"positions": "rotary", "norm": "scaling_only"}, {"positions": "alibi"}]


def measures(model: Any) -> list[Tensor]:
    """Return numbers of everything that takes tokens or a cache."""
    tokens = TOKENS.to(hooked_models.device_of(model.parameters()))
    _, cache = model.run_with_cache(tokens)
    neurons = Features("blocks.0.hook_mlp_out", model.blocks[0].mlp.W_out, cache["blocks.0.mlp.hook_post"])
    results: list[Any] = []
    for given in (tokens, cache):
        logits = partial(attribute_logits, model, given, target=3)
        results += [logits(against="mean").check(), logits(features=neurons), logit_lens(model, given).check()]
        results.append(attribute_scores(model, given, 1, 2, -1).check())
        results.append(attribute_scores(model, given, 1, 2, -1, 0, against=3).check())
    pattern = ln_probe.attention(model, tokens[0], layer=1, edit=None).patterns["intact"]
    return [*(result.values.detach().nan_to_num() for result in results), torch.tensor(pattern)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_model_on_mps_is_measured_as_on_the_cpu(form: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooked_models, "WITHOUT_FLOAT64", {DEVICE.type})
    with StandIn():
        measured = measures(moved(lab(**form)))
    for values, expected in zip(measured, measures(lab(**form)), strict=True):
        assert torch.allclose(values, expected, rtol=1e-5, atol=2e-5)
