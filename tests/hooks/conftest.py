"""Models of every TransformerLens world, for tests of what hooks do to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from small_models import lab


@pytest.fixture
def make_lab() -> Callable[..., Any]:
    return lab


@pytest.fixture
def worlds(request: pytest.FixtureRequest, make_bridge: Callable[..., Any]) -> list[tuple[str, Any]]:
    """A model of each world that the installed TransformerLens has."""
    found = [("lab", lab()), ("bridge", make_bridge("gpt2"))]
    try:
        from transformer_lens import HookedTransformer  # noqa: F401
    except ImportError:
        return found
    return [*found, ("hooked", request.getfixturevalue("make_hooked")())]
