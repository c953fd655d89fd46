"""The training step in the name of a checkpoint, wherever one is named: hub branches, folders, lab runs, reports."""

from __future__ import annotations

import re

_NAME = re.compile(r"(?:step|checkpoint)?[-_ ]?([0-9]{1,18})")


def step_named(name: str) -> int | None:
    """The training step that a branch, folder or revision names (step1000, checkpoint-1000, 1000); None if none."""
    match = _NAME.fullmatch(name)
    return None if match is None else int(match[1])
