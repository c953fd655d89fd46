"""Models that cannot be measured are refused, and told why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import make_bridge, make_hooked

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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantized_models(dtype: torch.dtype) -> None:
    model = make_hooked()
    model.blocks[0].attn.W_Q = torch.nn.Parameter(torch.zeros(8, 4).to(dtype), requires_grad=False)
    refuses(model, r"blocks\.0\.attn\.W_Q is quantized")
