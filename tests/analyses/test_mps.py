"""Apple's MPS has no float64: attribution, the lens and attention from a model on a stand-in for it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from small_models import lab
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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


# A device that torch knows and that no machine has. (For "mps" itself torch looks whether it was built with it.)
CPU, DEVICE = torch.device("cpu"), torch.device("lazy")


class StandIn(TorchDispatchMode):
    """Make tensors that are asked for on the device, while it lasts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on the CPU; its result is on the device of its arguments, or on the one that it asks for."""
        name, options = str(func), kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Tensor)]
        on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
        if "copy" not in name and "index" not in name:
            assert len({tensor.device for tensor in tensors if tensor.ndim}) <= 1, f"{name}: tensors on two devices"
        wanted = options.get("device", DEVICE if on_device else CPU)
        options = options | ({"device": CPU} if "device" in options else {})
        plain, options = tree_map_only(OnDevice, lambda tensor: tensor.inner, (args, options))
        result = func(*plain, **options)
        if name.startswith("aten.copy_."):
            return args[0]
        formats = {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}  # (made before a copy)
        assert not (on_device and torch.float64 in formats), "the device has no float64"
        return tree_map_only(Tensor, OnDevice, result) if wanted == DEVICE else result


class OnDevice(Tensor):
    """A tensor of the stand-in; `inner` has its values."""

    inner: Tensor
    __torch_dispatch__ = classmethod(StandIn.__torch_dispatch__)  # type: ignore[assignment, arg-type]

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        options = {"dtype": inner.dtype, "device": DEVICE, "strides": inner.stride()}
        tensor: OnDevice = Tensor._make_wrapper_subclass(cls, inner.shape, **options)  # type: ignore[attr-defined]
        tensor.inner = inner
        return tensor

    def data_ptr(self) -> int:
        return self.inner.data_ptr()


def moved(model: Any) -> Any:
    """Return the model, its parameters and buffers on the stand-in."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = parameter if parameter is None else nn.Parameter(OnDevice(parameter.detach()))
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer if buffer is None else OnDevice(buffer)
    return model
