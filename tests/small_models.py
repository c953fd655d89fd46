"""Small laboratory models with gains, biases and means that matter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.norms import find_norms


def lab(**options: Any) -> Any:
    """Of d_model 32 with random weights, in evaluation mode; options go to LabConfig."""
    torch.manual_seed(0)
    model = LabConfig(**({"n_layers": 2, "d_model": 32, "n_heads": 4, "d_vocab": 50, "n_ctx": 32} | options)).build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn_like(parameter)
            parameter.copy_(noise + 1.0 if name.endswith(".w") else noise + 0.05)
    with calibrate(model):
        model(torch.arange(1, 11)[None])
    return model.eval()


def norm_of(place: int = 0, **options: Any) -> Norm:
    """A norm of a small model in float64, of one block and d_model 16: the first one, or that at another place."""
    model = lab(**({"n_layers": 1, "d_model": 16, "n_heads": 2, "n_ctx": 16} | options)).double()
    return find_norms(model)[place]


class DyT(nn.Module):
    """tanh(a x)·gain + bias with a norm's gain and bias (Zhu et al. 2025, Transformers without Normalization)."""

    def __init__(self, norm: Any, a: float) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a))
        self.weight, self.bias = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a * x) * self.weight + self.bias
