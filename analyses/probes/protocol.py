"""The names that a probe is written with.

A probe declares tables and what it needs, gives an observer (`start`), and makes tables of the observer's pieces.

Example:
    >>> from ln_probe.analyses.probes.protocol import (
    ...     Context, Cost, Finding, ProbeResults, Needs, Observer, Picture, Piece, Probe, Shape, View, whole,
    ... )
    >>> from ln_probe.analyses.schema import Column, Table
    >>> from ln_probe.page.figures import Figure
    >>> columns = (Column("site", "text", "the norm"), Column("longest", "float", "length of the longest vector"))
    >>> LENGTHS = Table("lengths", "Lengths", "A row per norm.", ("site",), columns)
    >>> class Watching(Observer):
    ...     def __init__(self):
    ...         self.longest = {}
    ...     def norm(self, prompt, site, x, y):  # x, y: what the norm reads and gives, [pos d]
    ...         self.longest[site.name] = max(float(x.norm(dim=-1).max()), self.longest.get(site.name, 0.0))
    ...     def piece(self):
    ...         return Piece(info=self.longest)
    >>> def draw(report):
    ...     "The longest vector that each norm reads."
    ...     figure = Figure()
    ...     figure.subplots().plot(report.tables["lengths"]["longest"])
    ...     return figure
    >>> class Lengths(Probe):
    ...     name, summary, tables, needs = "lengths", "how long vectors are", (LENGTHS,), Needs(norms=True)
    ...     def start(self, view: View):
    ...         return Watching()
    ...     def finish(self, pieces, context: Context):
    ...         names = pieces[0].info
    ...         rows = [{"site": name, "longest": max(p.info[name] for p in pieces)} for name in names]
    ...         return ProbeResults({"lengths": LENGTHS.frame(rows)}, ("the longest of all prompts",))
    ...     def findings(self, tables, provenance):
    ...         return [Finding(f"The longest vector has length {tables['lengths']['longest'].max():.3g}.", "drawn")]
    ...     def pictures(self):
    ...         return [Picture("drawn", "Longest vectors", draw, "lengths", "longest")]
    ...     def cost(self, shape: Shape):
    ...         return Cost(seconds=1e-4 * sum(shape.lengths))
    >>> whole(Lengths().tables)[0].names
    ['site', 'longest']
    >>> measured = ln_probe.analyze(model, tokens, probes=[Lengths()])
    >>> measured.tables["lengths"]
    >>> measured.failures  # a `Failure` for each probe that raised; `ProbeError`s are about its declaration
    ()

A probe about keys may also give `Marks`, which pictures of attention show. `ln_probe.analyses.probes.base` defines
these names.
"""

from ln_probe.analyses.probes.base import *  # noqa: F403
from ln_probe.analyses.probes.base import __all__ as __all__
