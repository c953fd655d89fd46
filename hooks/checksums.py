"""Has a weight changed? Checksums of the bits of a model's parameters and buffers, and what shows a change at no cost.

PyTorch counts in-place edits of a tensor (`_version`), but not those through `.data`: only its bits show these.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import cast

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, stretches_positions

_ROW = 4096  # words summed at a time: GPT-2's weights take a tenth of a second on one core


def checksum(values: Shaped[Tensor, "*_"]) -> Int64[Tensor, ""]:
    """A number that depends on every bit of a tensor and on where it stands.

    The bits are read as 64-bit words in rows; row sums and column sums are weighted with odd numbers that depend on the
    row and the column, modulo 2^64. So a change of one word always shows, and so do two words that change places,
    unless weights happen to agree (once in 2^60).

    Args:
        values: a tensor of any format on any device.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> bool(checksum(x) == checksum(x.flip(0)))
        False
    """
    found = values.detach()
    found = (torch.view_as_real(found) if found.is_complex() else found).contiguous().flatten().view(torch.uint8)
    found = torch.nn.functional.pad(found, (0, -len(found) % 8)) if len(found) % 8 else found
    if found.storage_offset() % 8:
        found = found.clone()
    words = found.view(torch.int64)
    whole = len(words) // _ROW * _ROW
    body, rest = words[:whole].view(-1, _ROW), words[whole:]
    weights = _weights(max(_ROW, len(body))).to(words.device)
    rows = (body.sum(1) * weights[: len(body)]).sum()
    columns = (body.sum(0) * weights[:_ROW]).sum()
    return 3 * rows + columns + 5 * (rest * weights[: len(rest)]).sum() + len(words)


@lru_cache(maxsize=4)
def _weights(count: int) -> Int64[Tensor, " count"]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64) * 2 + 1


class Fingerprint:
    """What a model's parameters and buffers hold, to be compared with what they hold later.

    Buffers that a model itself writes in a forward pass are left out: rotary frequencies that depend on the length of
    the prompt (`longrope`, `dynamic`).
    """

    def __init__(self, model: HookedModel | nn.Module) -> None:
        self.model = cast(nn.Module, model)
        self._own = "inv_freq" if stretches_positions(model) else None
        self._tensors = dict(self._named())
        self._sums = _sums(list(self._tensors.values()))
        self._states = [_state(t) for t in self._tensors.values()]

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        both = chain(self.model.named_parameters(), self.model.named_buffers())
        for path, tensor in both:
            if tensor.device.type != "meta" and (self._own is None or self._own not in path):
                yield path, tensor

    def touched(self) -> str:
        """The first tensor that was written to in place or given other memory since; empty if none was.

        Neither edits through `.data` nor tensors that were replaced show here.
        """
        pairs = zip(self._tensors.items(), self._states, strict=True)
        return _plain(next((name for (name, tensor), state in pairs if _state(tensor) != state), ""))

    def changed(self) -> str:
        """The first tensor that does not hold what it held, bit for bit, or is there no more, or is new."""
        now = dict(self._named())
        if other := next((n for n in (*self._tensors, *now) if (n in now) != (n in self._tensors)), ""):
            return _plain(other)
        sums = _sums(list(now.values()))
        before = [self._sums[place] for place in map(list(self._tensors).index, now)]
        return _plain(next((n for n, a, b in zip(now, before, sums, strict=True) if a != b), ""))

    def renew(self) -> None:
        """Take the present versions for known: what was written since was written back."""
        self._tensors = dict(self._named())
        self._states = [_state(t) for t in self._tensors.values()]


def _plain(path: str) -> str:
    """Without what a bridge wraps: that says nothing to a reader."""
    return path.replace("_original_component.", "")


def _state(tensor: Tensor) -> tuple[int, int, torch.dtype, torch.Size]:
    version = -1 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr(), tensor.dtype, tensor.shape


def _sums(tensors: list[Tensor]) -> list[tuple[int, torch.dtype, torch.Size]]:
    """Checksums with formats and shapes."""
    if not tensors:
        return []
    found = torch.stack([checksum(t).cpu() for t in tensors]).tolist()
    return [(s, t.dtype, t.shape) for s, t in zip(found, tensors, strict=True)]
