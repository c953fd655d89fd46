"""Models of every TransformerLens world, for tests of what hooks do to them."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import hooked_transformer, make_bridge
from small_models import lab


@pytest.fixture
def worlds() -> list[tuple[str, Any]]:
    """A model of each world that the installed TransformerLens has."""
    found = [("lab", lab()), ("bridge", make_bridge("gpt2"))]
    try:
        return [*found, ("hooked", hooked_transformer())]
    except ImportError:
        return found
