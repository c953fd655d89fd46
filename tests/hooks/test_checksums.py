"""A checksum that shows every change of a bit and of order, and weights that are compared by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ln_probe.hooks.sealing import Fingerprint, checksum


def values(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", [2, 7, 4096, 40_001])
def test_every_flipped_bit_and_the_order_show(size: int) -> None:
    x = values(size)
    known = int(checksum(x))
    for place in {0, size // 2, size - 1}:
        for bit in (0, 15, 30):
            other = x.clone()
            other.view(torch.int32)[place] ^= 1 << bit
            assert int(checksum(other)) != known
    for a, b in ((0, 1), (0, size - 1), (size // 2, size // 2 - 1)):
        other = x.clone()
        other[[a, b]] = other[[b, a]]
        assert int(checksum(other)) != known
    assert int(checksum(x.flip(0))) != known
    assert int(checksum(x.clone())) == known


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]
)
def test_formats_and_layouts(dtype: torch.dtype) -> None:
    x = (values(35) * 20).to(dtype).view(5, 7)
    assert int(checksum(x.t().contiguous().t())) == int(checksum(x))
    assert int(checksum(x[1:, 2:])) == int(checksum(x[1:, 2:].clone()))
    other = x.clone()
    other[3, 4] += 1
    assert int(checksum(other)) != int(checksum(x))
    assert int(checksum(torch.tensor([True, False]))) != int(checksum(torch.tensor([False, True])))
    assert int(checksum(torch.zeros(0))) != int(checksum(torch.zeros(1)))


def in_place(model: nn.Linear) -> None:
    with torch.no_grad():
        model.weight[1, 1] += 1


def through_data(model: nn.Linear) -> None:
    model.weight.data[1, 1] += 1


def other_memory(model: nn.Linear) -> None:
    model.weight.data = model.weight.data + 1


def other_parameter(model: nn.Linear) -> None:
    model.weight = nn.Parameter(model.weight.detach() + 1)


@pytest.mark.parametrize(("edit", "touched"), [(in_place, "weight"), (through_data, ""), (other_memory, "weight"),
                                               (other_parameter, "")])  # fmt: skip
def test_edits_of_a_weight(edit: Callable[[nn.Linear], None], touched: str) -> None:
    model = nn.Linear(3, 4)
    known = Fingerprint(model)
    assert (known.touched(), known.changed()) == ("", "")
    edit(model)
    assert (known.touched(), known.changed()) == (touched, "weight")


def test_a_buffer_and_a_module_that_are_new() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    known = Fingerprint(model)
    model.register_buffer("added", torch.zeros(2))
    assert known.changed() == "added"


def test_what_was_written_back_is_the_same() -> None:
    model = nn.Linear(3, 4)
    known, kept = Fingerprint(model), model.weight.detach().clone()
    in_place(model)
    with torch.no_grad():
        model.weight.copy_(kept)
    assert (known.touched(), known.changed()) == ("weight", "")
    known.renew()
    assert known.touched() == ""
