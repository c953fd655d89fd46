"""How long the vectors are that each norm reads: a probe of another package."""

from matplotlib.figure import Figure

from ln_probe.analyses.probes.protocol import Finding, Needs, Observer, Picture, Piece, Probe
from ln_probe.analyses.schema import Column, Table

PROMPT = Column("prompt", "int", "number of the prompt")
LONGEST = Column("longest", "float", "length of the longest vector", "L2 norm")
LENGTHS = Table(
    "lengths",
    "Lengths",
    "A row per norm and prompt.",
    ("site", "prompt"),
    (Column("site", "text", "the norm that reads"), PROMPT, LONGEST),
)


class Watching(Observer):
    def __init__(self):
        self.rows = []

    def norm(self, prompt, site, x, y):
        self.rows.append({"site": site.name, "prompt": prompt, "longest": float(x.double().norm(dim=-1).max())})

    def piece(self):
        return Piece(tables={"lengths": LENGTHS.frame(self.rows)})


class Lengths(Probe):
    name, summary = "lengths", "how long the vectors are that each norm reads"
    tables, needs = (LENGTHS,), Needs(norms=True)

    def start(self, view):
        return Watching()

    def findings(self, tables, provenance):
        return [Finding(f"The longest vector has length {tables['lengths']['longest'].max():.3g}.", "lengths-drawn")]

    def pictures(self):
        return [Picture("lengths-drawn", "Longest vectors", draw, "lengths", "longest")]


def draw(report):
    """The longest vector that each norm reads."""
    figure = Figure()
    figure.subplots().plot(report.tables["lengths"].groupby("site", sort=False)["longest"].max().to_numpy())
    return figure
