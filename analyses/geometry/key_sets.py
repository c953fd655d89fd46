"""What a user may give as keys: arrays or tensors of any floating-point type, checked, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from numpy.typing import NDArray

Array = np.ndarray | torch.Tensor


def key_sets(
    keys: Any, bias: Any
) -> tuple[Float64[np.ndarray, "set key d"], Float64[np.ndarray, "set key"] | None, bool]:
    """Copies of keys and bias as a batch of sets in float64, and whether they were given as a batch.

    Raises:
        TypeError: not of a floating-point type.
        ValueError: no keys, no dimensions, NaN or infinite values, shapes that do not fit.
    """
    values = floats("keys", keys)
    if values.ndim not in (2, 3):
        raise ValueError(f'keys must have the shape "keys d" or "batch keys d", got {values.shape}')
    for size, what in zip(values.shape[-2:], ("keys", "dimensions"), strict=True):
        if size == 0:
            raise ValueError(f"there are no {what}: keys have the shape {values.shape}; give at least one")
    if len(values) == 0:
        raise ValueError(f"there are no sets of keys: keys have the shape {values.shape}; give at least one")
    _finite("key", values)
    lift = None
    if bias is not None:
        lift = floats("bias", bias)
        if lift.shape not in (values.shape[:-1], values.shape[-2:-1]):
            raise ValueError(f"bias must have the shape {values.shape[:-1]}, one value per key, got {lift.shape}")
        lift = np.broadcast_to(lift, values.shape[:-1])
        _finite("bias", lift[..., None])
    if values.ndim == 3:
        return values, lift, True
    return values[None], None if lift is None else lift[None], False


def floats(name: str, values: Any) -> NDArray[np.float64]:
    """A copy of an array or tensor of any floating-point type, in float64.

    Raises:
        TypeError: of another type, sparse, or without values (the "meta" device).
    """
    if isinstance(values, torch.Tensor):
        kind, floating = str(values.dtype), values.is_floating_point()
        if values.layout is not torch.strided:
            raise TypeError(f"{name} must be dense, got a tensor of layout {values.layout}: call .to_dense() first")
        if values.is_meta:
            raise TypeError(f"{name} must have values, got a tensor of shape {tuple(values.shape)} on the meta device")
        if floating:
            return np.array(values.detach().to(device="cpu").to(torch.float64).numpy(), order="C")
    else:
        if hasattr(values, "toarray"):  # scipy's sparse matrices
            raise TypeError(f"{name} must be dense, got {type(values).__name__}: call .toarray() first")
        try:
            values = np.asarray(values)
        except ValueError as error:
            raise ValueError(f"{name} must be a rectangular array, one row per key: {error}") from error
        kind, floating = str(values.dtype), values.dtype.kind == "f"
        if floating:
            return np.array(values, dtype=np.float64, order="C")
    raise TypeError(f"{name} must be of a floating-point type, got {kind}: convert them first, e.g. to float64")


def _finite(name: str, values: Float64[np.ndarray, "*batch key d"]) -> None:
    bad = ~np.isfinite(values).all(axis=-1)
    if bad.any():
        place = np.argwhere(bad)[0]
        value = values[tuple(place)]
        what = "NaN" if np.isnan(value).any() else "an infinite value"
        where = f"{name} {place[-1]}" + (f" of set {place[0]}" if len(place) > 1 else "")
        raise ValueError(f"{where} contains {what} ({bad.sum()} of {bad.size} do): remove or repair it first")
