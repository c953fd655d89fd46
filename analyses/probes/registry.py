"""Which probes there are: the built-in ones, and those of other packages by the entry point `ln_probe.probes`.

    [project.entry-points."ln_probe.probes"]
    lengths = "some_package.lengths:Lengths"          # in the other package's pyproject.toml

Reading the list loads none of them, so that the command line can show it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ln_probe.analyses.probes.base import Probe

GROUP = "ln_probe.probes"
OWN = "ln_probe"
_HERE = "ln_probe.analyses.probes"

# name: (module and class, what it finds out). The order is that of the tables, the notes and the pictures.
BUILT_IN = {
    "decomposition": (f"{_HERE}.decomposition:Decomposition", "every norm, term by term"),
    "selectability": (f"{_HERE}.selectability:Selectability", "which keys a query can select, by what margin"),
    "uniformity": (f"{_HERE}.uniformity:UniformityProbe", "how uniformly heads attend"),
    "causal": (f"{_HERE}.causal:Causal", "how the loss changes when a term is removed"),
    "head_effects": (
        f"{_HERE}.head_effects:HeadEffects",
        "how the loss changes when one head reads its norm without a term",
    ),
    "sinks": (f"{_HERE}.sinks:Sinks", "where attention falls, which tokens are outliers, and where they come from"),
    "writers": (
        f"{_HERE}.writers:WritersProbe", "components that set sigma, and that write along the all-ones direction",
    ),
    "attribution": (
        f"{_HERE}.writers:Attribution", "which parts write the next token's logit, through the final norm",
    ),
}  # fmt: skip
# Asked for by name: `writers` costs two passes a prompt and has up to thousands of rows (norms × parts).
ON_REQUEST = ("writers", "attribution")
DEFAULT = tuple(n for n in BUILT_IN if n not in ON_REQUEST)  # what runs unless something else is asked for


@dataclass(frozen=True)
class Entry:
    """A registered probe, not loaded."""

    summary: str
    package: str
    point: EntryPoint

    def load(self) -> Probe:
        """The probe.

        Raises:
            ProbeError: its module cannot be imported, or holds something else.
        """
        from ln_probe.analyses.probes.base import Probe, ProbeError

        which = f"the probe {self.point.name!r} of {self.package}"
        try:
            found = self.point.load()
            made = found() if isinstance(found, type) else found
        except Exception as error:
            raise ProbeError(f"{which} cannot be loaded ({type(error).__name__}: {error})") from error
        if not isinstance(made, Probe):
            raise ProbeError(f"{which} is a {type(made).__name__}, not a Probe")
        if made.name != self.point.name:
            raise ProbeError(f"{which} calls itself {made.name!r}: use one name")
        return made


def entries() -> dict[str, Entry]:
    """All registered probes by name, the built-in ones first, the others by name and package.

    Warns:
        UserWarning: a name that is taken: the first is kept, the later one left out.
    """
    return dict(_read(tuple(sys.path)))


@cache
def _read(_path: tuple[str, ...]) -> dict[str, Entry]:
    """What is installed on this path: reading it takes some 20 ms, and a report asks dozens of times."""
    found = {n: Entry(summary, OWN, EntryPoint(n, target, GROUP)) for n, (target, summary) in BUILT_IN.items()}
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.name, _package(p))):
        package = _package(point)
        if point.name in found:
            warnings.warn(
                f"the probe {point.name!r} of {package} is left out: {found[point.name].package} has one of that name",
                stacklevel=3,
            )
            continue
        summary = (point.dist.metadata["Summary"] if point.dist is not None else None) or "of another package"
        found[point.name] = Entry(summary, package, point)
    return found


def listing() -> str:
    """Every registered probe with its one line."""
    return "; ".join(f"{n}: {e.summary}{'' if e.package == OWN else f' ({e.package})'}" for n, e in entries().items())


def package_of(probe: Probe) -> str:
    """The package a probe comes from, for messages and keys; the module of one that is not registered."""
    entry = entries().get(probe.name)
    known = entry is not None and (entry.package != OWN or type(probe).__module__.startswith(f"{_HERE}."))
    return entry.package if entry is not None and known else f"module {type(probe).__module__}"


def find(name: str) -> Probe:
    """The registered probe of that name.

    Raises:
        ProbeError: there is none, or it cannot be loaded.
    """
    from ln_probe.analyses.probes.base import ProbeError

    known = entries()
    if name not in known:
        raise ProbeError(f"there is no probe {name!r} here: registered are {', '.join(known)}")
    return known[name].load()


def chosen(asked: Sequence[Any]) -> tuple[Probe, ...]:
    """The probes that were asked for, by name or as objects, in the registry's order.

    Raises:
        ProbeError: one does not exist, cannot be loaded, or has the name or the table of another.
    """
    from ln_probe.analyses.probes.base import Probe, ProbeError

    found: dict[str, Probe] = {}
    for each in asked:
        probe = find(each) if isinstance(each, str) else each
        if not isinstance(probe, Probe):
            raise ProbeError(f"a probe is a name or a Probe, got {type(probe).__name__}")
        _check(probe)
        known = entries().get(probe.name)
        if not isinstance(each, str) and known is not None and type(known.load()) is not type(probe):
            raise ProbeError(
                f"the probe {probe.name!r} of {package_of(probe)} has the name of one of {known.package}: rename it"
            )
        if probe.name in found and type(found[probe.name]) is not type(probe):
            raise ProbeError(f"two probes are called {probe.name!r}: rename one")
        found[probe.name] = probe
    order = list(entries())
    made = sorted(found.values(), key=lambda p: order.index(p.name) if p.name in order else len(order))
    _check_tables(made)
    return tuple(made)


def _check(probe: Probe) -> None:
    """Raise ProbeError if the probe does not declare what it has to."""
    from ln_probe.analyses.probes.base import Needs, ProbeError
    from ln_probe.analyses.schema import Part, Table

    who = f"the probe {getattr(probe, 'name', '?')!r} of module {type(probe).__module__}"
    for attribute, kind in (("name", str), ("summary", str), ("tables", tuple), ("needs", Needs)):
        value = getattr(probe, attribute, None)
        if not isinstance(value, kind) or (kind is not Needs and not value):
            raise ProbeError(f"{who} needs a {attribute} ({kind.__name__}), got {value!r}")
    if not probe.name.isidentifier():  # it stands in file names and on the command line
        raise ProbeError(f"{who}: a probe's name is made of letters, digits and _")
    if wrong := [t for t in probe.tables if not isinstance(t, Table | Part)]:
        raise ProbeError(f"{who}: its tables must be declared as Table or Part, got {wrong[0]!r}")


def _check_tables(probes: Iterable[Probe]) -> None:
    from ln_probe.analyses.probes import columns
    from ln_probe.analyses.probes.base import ProbeError
    from ln_probe.analyses.schema import Part

    taken = {t.name: t for t in (*columns.BUILT_IN, *columns.ON_REQUEST, columns.TOKENS, columns.SUMMARY)}
    seen: dict[str, object] = {}
    for probe in probes:
        who = f"the probe {probe.name!r} of {package_of(probe)} declares a table"
        for declared in probe.tables:
            table = declared.table if isinstance(declared, Part) else declared
            name = table.name
            if name in taken and not (package_of(probe) == OWN and taken[name] is table):
                raise ProbeError(f"{who} {name!r}: that is the name of ln_probe's table {name!r}")
            if name in seen and not (isinstance(declared, Part) and seen[name] is table):
                raise ProbeError(f"{who} {name!r}, which another probe declares too: rename it")
            seen[name] = table if isinstance(declared, Part) else object()


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name} {point.dist.version}" if point.dist is not None else f"module {point.module}"
