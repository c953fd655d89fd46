"""Matrix products of a model's passes by oneDNN, on processors for which PyTorch's own library has no fast ones.

PyTorch multiplies float32 matrices on x86 with Intel's MKL. On an AMD EPYC (Zen 5), the one processor of another maker
that was tried, oneDNN, which comes with PyTorch too, is twice as fast: 244 and 113 GFLOP/s on one core at
440 × 768 × 3072. Both round in float32; sums are in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ln_probe.hooks.model import HookedModel, device_of, dtype_of

# Multiply-adds from which oneDNN is asked: the call takes about 10 µs longer, the product half the time.
_LEAST = 2_000_000
# Rows from which a copy of the right matrix pays (768 × 13,636: 24 ms, with the copy 29 at 110 rows, 11 and 21 at 440).
_ROWS = 256
# In a narrower model, the other operations lose more by passing through Python than the products gain (one core, 128
# tokens: d_model 128, 8.3 ms and 13.5 ms with it; 256: 32 and 35, eight prompts 188 and 139; 512: 158 and 128).
_NARROW = 256


@contextmanager
def fast_products(model: HookedModel) -> Iterator[None]:
    """While it lasts, large float32 products in this thread are made by oneDNN, where that is faster; forward and
    backward."""
    wide = getattr(model.cfg, "d_model", 0) >= _NARROW
    if not wide or device_of(model).type != "cpu" or dtype_of(model) != torch.float32 or not _is_faster():
        yield
        return
    with OneDNN():  # type: ignore[no-untyped-call]
        yield


@cache
def _is_faster() -> bool:
    """Whether this is an x86 processor with 512-bit registers, not made by Intel."""
    information = Path("/proc/cpuinfo")
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not information.is_file():
        return False
    return product_of_onednn() is not None and "GenuineIntel" not in information.read_text(errors="replace")


def product_of_onednn() -> Callable[..., Tensor] | None:
    """`x Wᵀ + b` of oneDNN; None in a build of PyTorch without it."""
    operations = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(operations, "_linear_pointwise"):
        return None
    return operations._linear_pointwise


class OneDNN(TorchDispatchMode):
    """Hands large products of float32 matrices on the processor to oneDNN, all else to PyTorch."""

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten.mm.default:
            if _is_large(*args):
                return _product(*args)
        elif function is torch.ops.aten.addmm.default:
            bias, left, right = args
            if bias.ndim == 1 and not kwargs and _is_large(left, right):
                return _product(left, right, bias)
        elif function is torch.ops.aten.bmm.default:
            left, right = args
            if len(left) == 1 and _is_large(left[0], right[0]):
                return _product(left[0], right[0])[None]
        return function(*args, **kwargs)


def _is_large(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN makes a product: it is large, and has _ROWS rows or more where the right matrix must be copied."""
    if not left.dtype == right.dtype == torch.float32 or not left.device.type == right.device.type == "cpu":
        return False
    return left.shape[0] * left.shape[1] * right.shape[1] >= _LEAST and (_is_dense(right) or len(left) >= _ROWS)


def _is_dense(matrix: Tensor) -> bool:
    return matrix.is_contiguous() or matrix.T.is_contiguous()


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    product = product_of_onednn()
    assert product is not None
    if not _is_dense(right):  # of part of a matrix, oneDNN's products are thousands of times slower
        right = right.contiguous()
    return product(left.contiguous(), right.T, bias, "none", [], "")
