"""Makes the helper modules of this folder importable, wherever the tests are run from; text to train on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from lab_models import write_words


@pytest.fixture(scope="session")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of some 50,000 letters, easily learned."""
    words = ("the lamp", "was lit", "and the ships", "came home", "before the ice", "again;")
    return write_words(tmp_path_factory.mktemp("text") / "prose.txt", words)
