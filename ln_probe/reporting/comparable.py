"""Whether reports can be read side by side: were they measured on the same prompts, layers, version?"""

from __future__ import annotations

from collections.abc import Sequence

from ln_probe.analyses.probes.base import asked_layers
from ln_probe.reporting.contents import Contents


def same_tokens(one: Contents, other: Contents) -> bool:
    """Whether both say that they were measured on the same tokens."""
    first, second = (r.provenance.get("prompts", {}).get("sha256") for r in (one, other))
    return first is not None and bool(first == second)


def same_layers(one: Contents, other: Contents) -> bool:
    """Whether groups of norms ("all", "attention") are of the same layers in both."""
    return asked_layers(one.provenance) == asked_layers(other.provenance)


def apart(names: Sequence[str], reports: Sequence[Contents], baseline: int = 0) -> tuple[str, ...]:
    """What else than the model differs between the baseline and the others: a sentence per kind of difference."""
    first = reports[baseline] if reports else Contents()
    others = [(n, r) for i, (n, r) in enumerate(zip(names, reports, strict=True)) if i != baseline]
    unpaired = ": figures side by side differ for that, too, and losses are not paired"
    kinds = (
        ("on other prompts", unpaired, [n for n, r in others if not same_tokens(first, r)]),
        ("in other layers", unpaired, [n for n, r in others if not same_layers(first, r)]),
        (
            "with another version of ln_probe",
            "",
            [n for n, r in others if r.provenance.get("ln_probe") != first.provenance.get("ln_probe")],
        ),
    )
    return tuple(
        f"{', '.join(found)}: measured {what} than {names[baseline]}{rest}." for what, rest, found in kinds if found
    )
