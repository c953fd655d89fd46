"""A device that is not there: its tensors are computed on the CPU, and refuse what those on a GPU refuse.

They do not mix with the CPU's (but for tensors without axes, and indices), are no NumPy arrays, and begin where a
device is named. That shows where a program mixes devices, and nothing about arithmetic, memory or speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

NAME = "standin"
CPU = torch.device("cpu")
# What turns an axis-bearing tensor of the CPU into places: allowed for an indexed tensor elsewhere.
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


def can_be_had() -> bool:
    return hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


@cache
def device() -> torch.device:
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    return torch.device(NAME, 0)


class Away(torch.Tensor):
    """A tensor on the device; `held` is what it holds."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            device=device(), requires_grad=held.requires_grad,
        )  # fmt: skip
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


def _carried_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation on the CPU, if a GPU would do it."""
    name = func._schema.name
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    away = [x for x in tensors if isinstance(x, Away)]
    target = kwargs.get("device")
    goes = torch.device(target).type == NAME if target is not None else bool(away)
    mixed = away and any(x.ndim for x in tensors if not isinstance(x, Away))
    moves = target is not None or name in ("aten::copy_", "aten::_to_copy")
    if mixed and not moves and not (name in _INDEXING and isinstance(args[0], Away)):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} was given some of two")
    if away and name == "aten::linalg_lstsq" and kwargs.get("driver") not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")
    here, named = tree_map_only(Away, lambda t: t.held, (args, kwargs))
    result = func(*here, **(named | ({"device": CPU} if target is not None else {})))
    if not goes or name == "aten::_local_scalar_dense":
        return result
    if name == "aten::copy_":
        return args[0]
    known = {id(a.held): a for a in away}
    return tree_map_only(torch.Tensor, lambda t: known[id(t)] if id(t) in known else Away(t), result)


class _Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carried_out(func, args, kwargs or {})


class _Called(TorchFunctionMode):
    """What asks a device's driver before anything is dispatched is answered first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            return _to(args[0], CPU) if func is torch.Tensor.cpu else _to(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            goes = kwargs.pop("device")
            return _to(args[0] if isinstance(args[0], torch.Tensor) else func(*args, **kwargs), goes)
        if args and isinstance(args[0], Away):
            if func in (torch.Tensor.data_ptr, torch.Tensor.tolist):
                return func(args[0].held)
            if func is torch.Tensor.new_tensor:
                return _to(torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)), device())
            if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
                args = (args[0], _indices(args[1]), *args[2:])
        return func(*args, **kwargs)


def _indices(given: Any) -> Any:
    """Lists as the tensors that are made of them."""
    if isinstance(given, tuple):
        return tuple(_indices(one) for one in given)
    return torch.tensor(given) if isinstance(given, list) else given


def _to(tensor: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    goes, dtype = named.get("device"), named.get("dtype")
    for one in given:
        if isinstance(one, torch.Tensor):
            goes, dtype = one.device, one.dtype
        elif isinstance(one, torch.dtype):
            dtype = one
        elif isinstance(one, (str, torch.device)):
            goes = one
    goes = tensor.device if goes is None else torch.device(goes)
    dtype = tensor.dtype if dtype is None else dtype
    if (goes.type, dtype) == (tensor.device.type, tensor.dtype) and not named.get("copy"):
        return tensor
    moved: torch.Tensor = _Move.apply(tensor, goes, dtype)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, goes: torch.device, dtype: torch.dtype) -> torch.Tensor:
        ctx.back = tensor.device, tensor.dtype
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            held = tensor.held if isinstance(tensor, Away) else tensor
            copied = held.detach().to(dtype, copy=True)
            return Away(copied) if goes.type == NAME else copied

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor) -> Any:
        return _to(given[0], *ctx.back), None, None


@contextmanager
def stand_in() -> Iterator[torch.device]:
    """While it holds, there is the device."""
    there = device()
    with _Dispatched(), _Called():
        yield there


def move(model: torch.nn.Module) -> None:
    """Parameters and buffers to the device; whoever holds one holds what it has become."""
    for one in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
        held = Away(one.detach().clone())
        is_weight = isinstance(one, torch.nn.Parameter)
        torch.utils.swap_tensors(one, torch.nn.Parameter(held, requires_grad=one.requires_grad) if is_weight else held)
