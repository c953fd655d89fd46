"""Probes: what is measured in a model's norms and attention. Reading their list imports none of them."""

from __future__ import annotations

# name: (class, summary), in the order of the tables and the notes; each in the module of its name.
BUILT_IN = {
    "decomposition": ("Decomposition", "every norm, term by term"),
    "selectability": ("Selectability", "which keys a query can select, by what margin"),
    "uniformity": ("Uniformity", "how uniformly heads attend"),
    "causal": ("Causal", "how the loss changes when a term is removed"),
    "head_effects": ("HeadEffects", "how the loss changes when one head reads its norm without a term"),
    "sinks": ("Sinks", "how much attention position 0 and outlier tokens receive"),
}
DEFAULT = tuple(BUILT_IN)


def listing() -> str:
    """Return every built-in probe with its one line."""
    return "; ".join(f"{name}: {summary}" for name, (_, summary) in BUILT_IN.items())
