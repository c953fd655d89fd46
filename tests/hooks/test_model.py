"""Models that cannot be measured are refused, and told why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked
from torch._subclasses.fake_tensor import FakeTensorMode

import ln_probe
from ln_probe.hooks.model import check_model


def refuses(model: Any, said: str) -> None:
    for use in (check_model, lambda m: ln_probe.analyze(m, torch.arange(5)[None], progress=False)):
        with pytest.raises(ValueError, match=said):
            use(model)


def test_models_without_all_their_weights() -> None:
    half = make_bridge("llama")
    half.blocks[1].mlp.to("meta")
    refuses(half, r"model\.layers\.1\.mlp\.\S+ is on the meta device")
    refuses(make_bridge("gpt2").to("meta"), "meta device")


def test_weights_on_several_devices() -> None:
    """No second device is needed to see where a tensor says that it is."""
    model = make_bridge("gpt2")
    block = model.blocks[1].ln1.original_component
    with FakeTensorMode(allow_non_fake_inputs=True):
        block.weight = torch.nn.Parameter(torch.empty(32, device="cuda"))
    refuses(model, r"transformer\.h\.1\.ln_1 on cuda:0")


def test_quantized_models() -> None:
    model = make_bridge("llama")
    mlp = model.blocks[0].mlp.original_component
    mlp.up_proj = torch.ao.quantization.quantize_dynamic(torch.nn.Sequential(torch.nn.Linear(32, 80)))[0]
    refuses(model, r"up_proj \(torch\.ao\.nn\.quantized\S+\) is quantized")
    for dtype in (torch.uint8, torch.float8_e4m3fn):
        model = make_hooked()
        model.blocks[0].attn.W_Q = torch.nn.Parameter(torch.zeros(8, 4).to(dtype), requires_grad=False)
        refuses(model, r"blocks\.0\.attn .* is quantized")
