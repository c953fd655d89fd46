"""Inputs on which users of other libraries reported faults, with values that are computed here by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import bridge_of, hugging_face
from torch import Tensor

import ln_probe
from ln_probe.hooks import linearized, without
from ln_probe.hooks.constants import bundled_constants
from ln_probe.hooks.task import default_tokens

IDS = torch.arange(3, 15)[None]


# ------------------------------------------------------------------------------- gradient checkpointing (pyvene #242)


def gradient_of(arch: str, context: Any, *, reentrant: bool | None = None, as_bridge: bool = False) -> Tensor:
    """Return the gradient of the loss inside a block by all parameters; `reentrant`: None without checkpointing."""
    original = hugging_face(arch).train()
    for module in original.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if reentrant is not None:
        original.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        original.enable_input_require_grads()
    model = bridge_of(original).train() if as_bridge else original
    with context(model):
        (model(IDS, return_type="loss") if as_bridge else model(IDS, labels=IDS, use_cache=False).loss).backward()
    return torch.cat([p.grad.flatten() for p in original.parameters() if p.grad is not None])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("arch", "as_bridge"), [("llama", False), ("gpt2", True)])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_gradients_with_checkpointing_are_those_without(arch: str, as_bridge: bool, reentrant: bool) -> None:
    """`backward()` runs the blocks again: position 0 must have its own constant in that run, too."""
    for context in (lambda m: without(m, "scaling", sites="all", tokens=IDS), linearized):
        expected = gradient_of(arch, context, as_bridge=as_bridge)
        with pytest.warns(UserWarning, match="call backward"):
            gradient = gradient_of(arch, context, reentrant=reentrant, as_bridge=as_bridge)
        assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------------------------ what is read once


def test_constants_follow_weights_that_change_through_data() -> None:
    """PyTorch counts no edits of `.data` (old optimizers, averaged weights)."""
    model = ln_probe.load_model("lm-layernorm", device="cpu")
    with without(model, "scaling") as before, torch.no_grad():
        assert bundled_constants(model)
    model.embed.W_E.data.mul_(2) if hasattr(model.embed, "W_E") else model.embed.weight.data.mul_(2)
    with without(model, "scaling") as edit:
        pass
    x = torch.cat(
        [model.run_with_cache(row[None])[1]["blocks.0.hook_resid_pre"][0, 1:] for row in default_tokens(model)]
    )
    sigma = (x.double().var(-1, correction=0) + 1e-5).sqrt().mean()
    assert edit.divisors["blocks.0.ln1"].rest == pytest.approx(float(sigma), rel=1e-6)
    assert edit.divisors != before.divisors
    assert not bundled_constants(model), "they were fitted to other weights"
