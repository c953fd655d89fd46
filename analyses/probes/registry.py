"""The built-in probes by name. Reading the list imports none of them, so that the command line can show it."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ln_probe.analyses.probes.base import Probe

# name: (module, class, summary), in the order of the tables, the notes and the pictures
BUILT_IN = {
    "decomposition": ("decomposition", "Decomposition", "every norm, term by term"),
    "selectability": ("selectability", "Selectability", "which keys a query can select, by what margin"),
    "uniformity": ("uniformity", "UniformityProbe", "how uniformly heads attend"),
    "causal": ("causal", "Causal", "how the loss changes when a term is removed"),
    "head_effects": ("head_effects", "HeadEffects", "how the loss changes when one head reads its norm without a term"),
    "sinks": ("sinks", "Sinks", "where attention falls, which tokens are outliers, and where they come from"),
}
DEFAULT = tuple(BUILT_IN)


def listing() -> str:
    """Return every built-in probe with its one line."""
    return "; ".join(f"{name}: {summary}" for name, (_, _, summary) in BUILT_IN.items())


def find(name: str) -> Probe:
    """Return the built-in probe of that name.

    Raises:
        ProbeError: there is none.
    """
    from ln_probe.analyses.probes.base import ProbeError

    if name not in BUILT_IN:
        raise ProbeError(f"there is no probe {name!r}: give some of {', '.join(BUILT_IN)}, or a Probe object")
    module, probe_class, _ = BUILT_IN[name]
    probe: Probe = getattr(import_module(f"ln_probe.analyses.probes.{module}"), probe_class)()
    return probe


def chosen(probes: Any) -> tuple[Probe, ...]:
    """Return the probes that were asked for, by name or as objects, in the order of the list.

    Raises:
        ProbeError: one does not exist, lacks an attribute, or has the name or the table of another.
    """
    from ln_probe.analyses.probes.base import ProbeError

    if isinstance(probes, str) or not isinstance(probes, Iterable) or not list(probes):
        raise ProbeError(f"probes must be a list of {', '.join(BUILT_IN)}, or of Probe objects, got {probes!r}")
    by_name: dict[str, Probe] = {}
    for each in probes:
        probe = find(each) if isinstance(each, str) else each
        _check(probe)
        if type(by_name.setdefault(probe.name, probe)) is not type(probe):
            raise ProbeError(f"two probes are called {probe.name!r}: rename one")
        by_name[probe.name] = probe
    order = [*(name for name in BUILT_IN if name in by_name), *(name for name in by_name if name not in BUILT_IN)]
    return tuple(by_name[name] for name in order)


def _check(probe: Any) -> None:
    """Raise ProbeError if a probe does not declare what it has to, or has the name or a table of a built-in one."""
    from ln_probe.analyses.probes import columns
    from ln_probe.analyses.probes.base import Needs, Probe, ProbeError
    from ln_probe.analyses.schema import Table

    if not isinstance(probe, Probe):
        raise ProbeError(f"a probe is a name or a Probe object, got {type(probe).__name__}")
    who = f"the probe {getattr(probe, 'name', '?')!r} of {type(probe).__module__}"
    for attribute, kind in (("name", str), ("summary", str), ("tables", tuple), ("needs", Needs)):
        value = getattr(probe, attribute, None)
        if not isinstance(value, kind) or (kind is not Needs and not value):
            raise ProbeError(f"{who} needs a {attribute} ({kind.__name__}), got {value!r}")
    if not probe.name.isidentifier():
        raise ProbeError(f"{who}: a probe's name is made of letters, digits and _")
    if wrong := [table for table in probe.tables if not isinstance(table, Table)]:
        raise ProbeError(f"{who}: its tables must be declared as Table, got {wrong[0]!r}")
    if probe.name in BUILT_IN:
        if type(probe) is not type(find(probe.name)):
            raise ProbeError(f"{who} has the name of a built-in one: rename it")
        return
    own = {table.name for table in (*columns.BUILT_IN, columns.TOKENS, columns.SUMMARY)}
    if taken := [table.name for table in probe.tables if table.name in own]:
        raise ProbeError(f"{who} declares a table {taken[0]!r}, which ln_probe has: rename it")
