"""A stand-in for Apple's MPS: tensors that say they are on a device, computed on the CPU, and without float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# A device that torch knows and that no machine has. (For "mps" itself torch looks whether it was built with it.)
CPU, DEVICE = torch.device("cpu"), torch.device("lazy")


class OnDevice(Tensor):
    """A tensor of the stand-in; `inner` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        options = {"dtype": inner.dtype, "device": DEVICE, "strides": inner.stride()}
        tensor: OnDevice = Tensor._make_wrapper_subclass(cls, inner.shape, **options)  # type: ignore[attr-defined]
        tensor.inner = inner
        return tensor

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class StandIn(TorchDispatchMode):
    """Make the tensors that are asked for on the device, while it lasts."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; its result is on the device of its arguments, or on the one that it asks for."""
    name, asked = str(func), kwargs.get("device")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
    if "copy" not in name and "index" not in name:
        devices = {tensor.device for tensor in tensors if tensor.ndim}
        assert len(devices) <= 1, f"{name}: tensors are on {devices}"
    if asked is not None:
        kwargs = {**kwargs, "device": CPU}
    plain, options = tree_map_only(OnDevice, lambda tensor: tensor.inner, (args, kwargs))
    result = func(*plain, **options)
    if name.startswith("aten.copy_."):
        return args[0]
    # (A copy to the CPU in another format is converted on the device.)
    formats = {leaf.dtype for leaf in tree_leaves(result) if isinstance(leaf, Tensor)}
    assert not (on_device and torch.float64 in formats), "cannot convert to float64, which the device does not have"
    if asked == DEVICE or (on_device and asked != CPU):
        return tree_map_only(Tensor, OnDevice, result)
    return result


def moved(model: Any) -> Any:
    """Return the model, its parameters and buffers on the stand-in."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(OnDevice(parameter.detach()), requires_grad=False)
        module._buffers.update(
            {name: OnDevice(buffer) for name, buffer in module._buffers.items() if buffer is not None}
        )
    return model
