"""In which numbers a lab model computes, as the lab.json beside its weights says: float32 unless it says otherwise.

A compiled program is right in float64 alone (`"dtype": "float64"`), and one that is compiled for fixed precision
only where its activations are rounded (`"precision": {"bits": …, "fraction": …}`).

Fixed precision outside attention: every activation but attention's scores and weights is rounded to a grid.

The grid has `bits` bits, `fraction` of them behind the point: the multiples of 2^-fraction in [-2^(bits-1-fraction),
2^(bits-1-fraction)). As in Yang, Cadilhac & Chiang (2025, "Knee-Deep in C-RASP"), whose transformers round everywhere
except inside attention: a weighted mean is taken exactly and rounded once. Here "exactly" is float64, and what is
rounded are the embeddings, queries, keys, values, means, what attention and MLP write, the stream, both sides of the
MLP's activation, and every norm's divisor and result. Rounding down keeps the sign of a mean however small it is;
rounding to the nearest makes 0 of what is less than half a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.HookedRootModule import HookedRootModule

INSIDE_ATTENTION = ("hook_attn_scores", "hook_pattern")
OF_NORMS = ("hook_scale", "hook_normalized")

Rounding = Literal["down", "nearest"]


@dataclass(frozen=True)
class Precision:
    """A grid of fixed-point numbers.

    Raises (on construction):
        ValueError: fewer than 2 bits, a negative fraction, or a grid that float64's exponents do not hold.
    """

    bits: int
    fraction: int

    def __post_init__(self) -> None:
        if self.bits < 2 or not 0 <= self.fraction <= 1000 or self.bits - self.fraction > 1000:
            raise ValueError(f"no fixed-point numbers of {self.bits} bits, {self.fraction} of them behind the point")

    @property
    def step(self) -> float:
        return 2.0**-self.fraction

    def round(self, x: Float[Tensor, "*shape"], rounding: Rounding = "down") -> Float[Tensor, "*shape"]:
        """The largest number of the grid that is not above x ("down"), or the nearest (halves to even)."""
        whole = x / self.step
        whole = whole.floor() if rounding == "down" else whole.round()
        most = 2.0 ** (self.bits - 1)
        return whole.clamp(-most, most - 1) * self.step

    def holds(self, x: Float[Tensor, "*shape"]) -> bool:
        """Whether every number is one of the grid's."""
        return bool((self.round(x) == x).all())

    def absorbs(self, eps: float) -> bool:
        """Whether a norm that scales has a number of the grid for a divisor, be it not rounded.

        For vectors whose root mean square is one of the grid's; the least of those is a step.
        """
        return self.step**2 + eps == self.step**2

    def misfits(self, model: nn.Module) -> list[str]:
        """Parameters that are not numbers of the grid."""
        return [name for name, parameter in model.named_parameters() if not self.holds(parameter)]


def _rounded(precision: Precision, rounding: Rounding = "down") -> Callable[..., Tensor]:
    return lambda tensor, hook: precision.round(tensor, rounding)


def _seen(tensor: Tensor, hook: HookPoint) -> Tensor:
    return tensor


def _points(model: HookedRootModule, besides: Iterable[str]) -> Iterator[str]:
    """Where activations are rounded: not at a norm's own ends, since the stream around it has its own points."""
    others = (*INSIDE_ATTENTION, ".hook_in", ".hook_out", *besides)
    return (name for name in model.hook_dict if not name.endswith(others))


def _check(model: HookedRootModule, precision: Precision) -> None:
    if off := precision.misfits(model):
        raise ValueError(f"{off[0]} has numbers that {precision} does not hold: more bits, or other weights")
    if any(parameter.dtype != torch.float64 for parameter in model.parameters()):
        raise ValueError("fixed precision is made of float64: use model.double()")


def install(model: HookedRootModule, precision: Precision) -> None:
    """Let a lab model compute in fixed precision from now on (rounding down).

    The hooks are permanent ones, which `reset_hooks` leaves. What is inside a norm is not rounded: norms are identified
    by their answers to vectors of any size, and on a coarse grid none would be found. So a norm's divisor and result
    have to be numbers of the grid by themselves: a compiled program's are for every word, if `precision.absorbs` eps.

    Raises:
        ValueError: as `fixed_precision`.
    """
    _check(model, precision)
    for name in _points(model, OF_NORMS):
        model.hook_dict[name].add_perma_hook(_rounded(precision))
    for name in model.hook_dict:
        if name.endswith(OF_NORMS[0]):  # torch's fused layer_norm has other roundings: the norm as it is written
            model.hook_dict[name].add_perma_hook(_seen)


@contextmanager
def fixed_precision(model: HookedRootModule, precision: Precision, rounding: Rounding = "down") -> Iterator[None]:
    """Within it, a lab model computes in fixed precision everywhere but inside attention.

    Raises:
        ValueError: a parameter is not a number of the grid (says which), or the model is not in float64.
    """
    _check(model, precision)
    rounded = _rounded(precision, rounding)
    with model.hooks(fwd_hooks=[(name, rounded) for name in _points(model, ())]):
        yield


@dataclass(frozen=True)
class Arithmetic:
    """The numbers of a lab model.

    Attributes:
        dtype: of its weights and activations.
        bound: it computes something else in any other format.
        precision: the grid that its activations are rounded to; None: real arithmetic, as far as `dtype` goes.
    """

    dtype: torch.dtype = torch.float32
    bound: bool = False
    precision: Precision | None = None
