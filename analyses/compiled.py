"""How the inner loops are compiled: numba, without the interpreter lock, cached on disk where possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import numba

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# Sums may be reordered (that is what lets them run on vector registers) and products fused, but NaN and
# infinity keep their meaning: an overflow must stay visible.
_FAST_MATH = {"reassoc", "contract", "nsz", "arcp"}


def compiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """Compile `function` on its first call.

    The machine code is cached beside the module, or in numba's own folder (`NUMBA_CACHE_DIR`) if that one is
    read-only; where neither can be written it is compiled anew in every process, which costs some seconds.
    """
    try:
        made = numba.njit(function, nogil=True, fastmath=_FAST_MATH, error_model="numpy", cache=True)
    except RuntimeError:  # numba: "no locator available": no folder it may write to
        made = numba.njit(function, nogil=True, fastmath=_FAST_MATH, error_model="numpy")
    return cast("Callable[_Args, _Result]", made)
