"""What the hub says of a checkpoint that is not here yet: its config.json and how large its weights are."""

from __future__ import annotations

from functools import cache

from ln_probe.batch.suite import Target
from ln_probe.loading.hub import Description


@cache
def described(target: Target) -> Description:
    """Of a name on the hub; empty for anything else, and where the hub does not tell (loading will say why)."""
    import os
    from pathlib import Path

    from ln_probe.loading import hub
    from ln_probe.models import bundled_models, kind_of

    if target.error or kind_of(target.name, Path(os.path.expanduser(target.name))) != "hub":
        return Description({}, 0)
    try:
        return hub.describe(hub.official_name(target.name, also=tuple(bundled_models())), revision=target.revision)
    except (ValueError, OSError):
        return Description({}, 0)
