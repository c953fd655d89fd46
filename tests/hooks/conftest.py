"""Models of every TransformerLens world, for tests of what hooks do to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ln_probe.analyses.lab.norms import calibrate
from ln_probe.analyses.lab.transformer import LabConfig, LabTransformer


def uncentred_lab_model(**options: Any) -> LabTransformer:
    """A small model with streams that are not centred, gains that are not 1 and attention that is not uniform."""
    torch.manual_seed(0)
    model = LabTransformer(
        LabConfig(**({"n_layers": 2, "d_model": 32, "n_heads": 4, "d_vocab": 50, "n_ctx": 32} | options))
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".w", ".b")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim > 1:
                parameter.copy_(0.3 * torch.randn_like(parameter) + 0.05)
    with calibrate(model):
        model(torch.arange(1, 21).view(2, 10))
    return model.eval()


@pytest.fixture
def make_lab() -> Callable[..., LabTransformer]:
    return uncentred_lab_model


@pytest.fixture
def worlds(request: pytest.FixtureRequest, make_bridge: Callable[..., Any]) -> list[tuple[str, Any]]:
    """A model of each world that the installed TransformerLens has."""
    found = [("lab", uncentred_lab_model()), ("bridge", make_bridge("gpt2"))]
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return found
    return [*found, ("hooked", request.getfixturevalue("make_hooked")())]
