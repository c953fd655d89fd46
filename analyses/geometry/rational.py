"""Linear equations in whole numbers, solved exactly: by python-flint where it is installed, else by elimination."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Int64
from numpy.typing import NDArray

# A prime below 2^31: products of remainders fit int64.
_PRIME = 2**31 - 1
# Equations from which on python-flint (Dixon lifting) is faster than elimination with Python's own integers, its
# conversions included: 0.07 against 0.11 ms at 7 equations, 0.05 against 0.05 at 4.
_FLINT_FROM = 6


def _optional(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


flint = _optional("flint")
gmpy2 = _optional("gmpy2")


def solve(rows: list[list[int]], right: list[int]) -> tuple[list[int], int]:
    """The solution of a square system of whole numbers, as numerators over one positive denominator.

    Raises:
        ZeroDivisionError: the system is singular.
    """
    size = len(rows)
    if size == 0:
        return [], 1
    if flint is not None and size >= _FLINT_FROM:
        matrix = flint.fmpz_mat(size, size, [value for row in rows for value in row])
        found, below = matrix.solve(flint.fmpz_mat(size, 1, right)).numer_denom()
        numerators, denominator = [int(found[k, 0]) for k in range(size)], int(below)
    else:
        numerators, denominator = eliminate(rows, right)
    return (numerators, denominator) if denominator > 0 else ([-value for value in numerators], -denominator)


def eliminate(rows: list[list[int]], right: list[int]) -> tuple[list[int], int]:
    """As `solve`, by fraction-free elimination (Bareiss 1968): every division leaves no remainder."""
    whole: Any = int if gmpy2 is None else gmpy2.mpz  # a third of the time at 65 equations
    table = [[whole(value) for value in row] + [whole(last)] for row, last in zip(rows, right, strict=True)]
    size, before = len(table), whole(1)
    for k in range(size):
        at = next((row for row in range(k, size) if table[row][k] != 0), None)
        if at is None:
            raise ZeroDivisionError(f"the system of {size} equations is singular")
        table[k], table[at] = table[at], table[k]
        head = table[k]
        pivot = head[k]
        for row in range(k + 1, size):
            this = table[row]
            first = this[k]
            table[row] = [0] * (k + 1) + [
                (pivot * a - first * b) // before for a, b in zip(this[k + 1 :], head[k + 1 :], strict=True)
            ]
        before = pivot
    found = [whole(0)] * size  # over the determinant, `before`
    for k in reversed(range(size)):
        this = table[k]
        rest = this[size] * before - sum((this[t] * found[t] for t in range(k + 1, size)), whole(0))
        found[k] = rest // this[k]
    return [int(value) for value in found], int(before)


def independent(columns: list[list[int]]) -> tuple[list[int], list[int]]:
    """Places of columns, first come first kept, and of as many rows on which these are a regular square system.

    Decided modulo a prime: what is independent there is independent. (What is not may be left out wrongly, once in
    some 10⁹ times.)
    """
    if not columns:
        return [], []
    table: NDArray[np.int64] = np.array([[value % _PRIME for value in column] for column in columns], np.int64).T
    kept: list[int] = []
    rows: list[int] = []
    free = np.ones(len(table), bool)
    for k in range(table.shape[1]):
        left: Int64[np.ndarray, " row"] = np.flatnonzero(free & (table[:, k] != 0))
        if len(left) == 0:
            continue
        at = int(left[0])
        kept.append(k)
        rows.append(at)
        free[at] = False
        table[at] = table[at] * pow(int(table[at, k]), -1, _PRIME) % _PRIME
        for row in left[1:]:
            table[row] = (table[row] - table[row, k] * table[at]) % _PRIME
        if not free.any():
            break
    return kept, rows
