"""The header of a GGUF file, walked through once: every count and length in it is held against the file's size.

The readers that others wrote believe the header: with a tensor count of 2⁶⁰ or 2³¹ layers they work for hours.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from ln_probe.loading.bounds import check_numbers

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS_AT_MOST = 8  # ggml has 4
_NESTED_AT_MOST = 2


class _HeaderError(ValueError):
    pass


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> int | float | bool:
        size = struct.calcsize(code)
        self.skip(size)
        value: int | float | bool = struct.unpack_from("<" + code, self.data, self.at - size)[0]
        return value

    def count(self, smallest: int) -> int:
        """A 64-bit count of things of at least `smallest` bytes each, which the rest of the file has room for."""
        value = int(self.number("Q"))
        if value * smallest > len(self.data) - self.at:
            raise _HeaderError(f"it counts {value} entries at byte {self.at - 8}, and ends at {len(self.data)}")
        return value

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise _HeaderError(f"it ends at byte {len(self.data)}, in the middle of its header")

    def string(self) -> str:
        length = self.count(1)
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int, nested: int = 0) -> int | float | bool | None:
        """A number; None for text and lists, which are passed over."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            self.skip(self.count(1))
        elif kind == _ARRAY and nested < _NESTED_AT_MOST:
            inner = int(self.number("I"))
            if inner in _NUMBERS:
                size = struct.calcsize(_NUMBERS[inner])
                self.skip(size * self.count(size))
            else:
                for _ in range(self.count(8)):
                    self.value(inner, nested + 1)
        else:
            raise _HeaderError(f"a value at byte {self.at} is of no type that there is ({kind})")
        return None


def check_header(file: Path) -> int:
    """How many numbers a GGUF file's weights are; ValueError if its header does not fit into the file, or says numbers
    that no model has."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(MAGIC))
        if start != MAGIC:
            raise ValueError(
                f"{file} is not a GGUF file (it begins with {start!r}, expected {MAGIC!r}). Copy it again."
            )
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                numbers, tensors, elements = _walk(_Reader(data), size)
        except _HeaderError as error:
            raise ValueError(f"{file} is not a GGUF file that can be read: {error}. Copy it again.") from error
    check_numbers(numbers, str(file), tensors)
    return elements


def _walk(reader: _Reader, size: int) -> tuple[dict[str, int | float | bool], int, int]:
    reader.skip(len(MAGIC))
    version = reader.number("I")
    if version not in VERSIONS:
        raise _HeaderError(f"its version is {version}, known are {', '.join(map(str, VERSIONS))}")
    tensors = int(reader.number("Q"))
    numbers: dict[str, int | float | bool] = {}
    for _ in range(reader.count(13)):  # a name's length, a type, a value of one byte
        name = reader.string()
        value = reader.value(int(reader.number("I")))
        if value is not None:
            numbers[name] = value
    if tensors * 24 > size - reader.at:  # a name's length, dimensions, a type, an offset
        raise _HeaderError(f"it counts {tensors} tensors, in {size} bytes")
    total = 0
    for _ in range(tensors):
        name = reader.string()
        dimensions = int(reader.number("I"))
        if dimensions > _DIMENSIONS_AT_MOST:
            raise _HeaderError(f"tensor {name[:60]!r} has {dimensions} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= int(reader.number("Q"))
        if elements > 8 * size:  # no format has less than a bit for each
            raise _HeaderError(f"tensor {name[:60]!r} has {elements} elements, in a file of {size} bytes")
        reader.skip(4 + 8)
        total += elements
    return numbers, tensors, total
