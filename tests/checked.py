"""What checks every call in every test against its annotations: beartype, at no more cost than it needs."""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

import beartype

# (an int where a float is asked for is right: PEP 484)
_beartype = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """A check that jaxtyping asked for, made at its first call: most functions are never called in a process.

    jaxtyping has two for each function, one of its arguments and one of these once more and of what was returned; here
    the second is of what was returned alone, with the shapes that the first has found.
    """
    if "return" in function.__annotations__ and function.__annotations__["return"] is not Any:
        function.__annotations__ = {"return": function.__annotations__["return"]}

    @functools.cache
    def made() -> Callable[..., Any]:
        return _beartype(function)

    def check(*args: Any, **kwargs: Any) -> Any:
        return made()(*args, **kwargs)

    return check


_by_calling = typing._ProtocolMeta.__instancecheck__  # type: ignore[attr-defined]


def _by_looking(protocol: Any, instance: object) -> bool:
    """Whether the members of a protocol of ours are there: Python 3.11 calls properties to find out, and a bridge's
    `hook_dict`, in which it gathers all its hook points anew, took a seventh of the tests' time."""
    ours = protocol._is_protocol and protocol.__module__.startswith("ln_probe.")  # and no class that inherits from one
    if ours and all(inspect.getattr_static(instance, name, None) is not None for name in _members(protocol)):
        return True
    return bool(_by_calling(protocol, instance))


@functools.cache
def _members(protocol: Any) -> frozenset[str]:
    return frozenset(typing._get_protocol_attrs(protocol))  # type: ignore[attr-defined]


if sys.version_info < (3, 12):
    typing._ProtocolMeta.__instancecheck__ = _by_looking  # type: ignore[attr-defined]
