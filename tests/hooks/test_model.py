"""Models that cannot be measured are refused, and told why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked

import ln_probe
from ln_probe.hooks.model import check_model


def refusals(model: Any) -> str:
    """Return what both `check_model` and `analyze` say of a model that they refuse."""
    messages = []
    for use in (check_model, lambda m: ln_probe.analyze(m, torch.arange(5)[None], progress=False)):
        with pytest.raises(ValueError) as raised:  # noqa: PT011  (the caller looks for a word)
            use(model)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_models_without_all_their_weights() -> None:
    half = make_bridge("llama")
    half.blocks[1].mlp.to("meta")
    assert "meta" in refusals(half)
    assert "transformer.wte.weight" in refusals(make_bridge("gpt2").to("meta"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantized_models(dtype: torch.dtype) -> None:
    model = make_hooked()
    model.blocks[0].attn.W_Q = torch.nn.Parameter(torch.zeros(8, 4).to(dtype), requires_grad=False)
    assert "blocks.0.attn.W_Q is quantized" in refusals(model)
