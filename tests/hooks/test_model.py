"""Models that cannot be measured are refused, and told why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked
from torch._subclasses.fake_tensor import FakeTensorMode

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
    assert "model.layers.1.mlp.gate_proj.weight is on the meta" in refusals(half)
    assert "transformer.wte.weight is on the meta" in refusals(make_bridge("gpt2").to("meta"))


def test_weights_on_several_devices() -> None:
    """No second device is needed to see where a tensor says that it is."""
    model = make_bridge("gpt2")
    block = model.blocks[1].ln1.original_component
    with FakeTensorMode(allow_non_fake_inputs=True):
        block.weight = torch.nn.Parameter(torch.empty(32, device="cuda"))
    message = refusals(model)
    assert "transformer.wte.weight on cpu" in message
    assert "transformer.h.1.ln_1.weight on cuda:0" in message


def test_quantized_models() -> None:
    model = make_bridge("llama")
    mlp = model.blocks[0].mlp.original_component
    mlp.up_proj = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(32, 80)))[0]
    assert "quantized (blocks.0.mlp.up_proj" in refusals(model)
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        model = make_hooked()
        model.blocks[0].attn.W_Q = torch.nn.Parameter(torch.zeros(8, 4).to(dtype), requires_grad=False)
        assert "quantized (blocks.0.attn.W_Q" in refusals(model)
