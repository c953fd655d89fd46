"""The pictures of a report: which there are, keyed by the table they are about, and how they are drawn.

A picture of a built-in table stands in `GROUPS`; a probe of another package brings its own (`Probe.pictures`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from ln_probe.analyses.probes.base import Failure, Picture
from ln_probe.analyses.probes.registry import package_of
from ln_probe.analyses.probes.text import shortened, visible
from ln_probe.render import figures, norm_geometry
from ln_probe.render.effects import causal_effects
from ln_probe.render.emptiness import nothing_to_see
from ln_probe.render.heads import MEASURES, heads_map, measures_of
from ln_probe.render.svg import svg
from ln_probe.reporting.contents import Contents

GEOMETRIES = 5  # norms whose geometry a page offers: about 95 kB each


@dataclass(frozen=True)
class Drawing:
    """One SVG with what is said under it; of several, the one called `first` is shown first."""

    name: str
    svg: Markup
    caption: str
    first: bool = True


@dataclass(frozen=True)
class Shown:
    """A picture of the page; `id` is what findings link to, `choice` what distinguishes its drawings.

    `said` stands in for a picture on which nothing would be seen.
    """

    id: str
    title: str
    drawings: tuple[Drawing, ...]
    wide: bool = False
    choice: str = "Norm"
    said: str = ""


@dataclass(frozen=True)
class Group:
    """Pictures that belong together, under a heading."""

    id: str
    title: str
    about: str
    pictures: tuple[Shown, ...]


GROUPS = (
    (
        "norms-pictures",
        "What each norm does",
        "Every norm along the depth of the model, term by term.",
        (
            Picture(
                "norms",
                "Lengths before and after each norm",
                figures.norms_over_depth,
                "layernorms",
                "norm_before_mean",
            ),
            Picture(
                "projection",
                "Projection: the part along the ones-vector",
                figures.projection_over_depth,
                "layernorms",
                "mean_share",
            ),
        ),
    ),
    (
        "keys-pictures",
        "Which keys a query can select",
        "Per head, as attention sees the keys, under each variant.",
        (
            Picture(
                "attainable",
                "Attention a key can get",
                figures.attainable_over_depth,
                "heads",
                "attainable_last_median",
            ),
            Picture("margins", "Margins over depth", figures.margins_over_depth, "heads", "margin_median"),
            Picture(
                "unselectable",
                "Keys no query can select",
                figures.unselectable_by_head,
                "heads",
                "unselectable_fraction",
            ),
            Picture("margin-map", "Margins by head", figures.margins_by_head, "heads", "margin_median"),
        ),
    ),
    (
        "queries-pictures",
        "How attention spreads",
        "What the queries do with these keys.",
        (
            Picture("entropy", "How uniform attention is", figures.entropy_by_layer, "heads", "entropy_ratio"),
            Picture(
                "angle",
                "Queries and the uniform direction",
                figures.uniform_angle_by_layer,
                "heads",
                "uniform_angle_deg",
            ),
        ),
    ),
    (
        "causal-pictures",
        "What the model loses without it",
        "A term switched off in the running model.",
        (Picture("causal", "Change of the loss", causal_effects, "causal", "delta_loss"),),
    ),
    ("heads-pictures", "Head by head", "What the tables say of each head, layer × head; choose the measure.", ()),
)

CELL = GROUPS[1][3]  # of a notebook's cell: the first of these that there is


def has(report: Contents, picture: Picture) -> bool:
    """Whether there is anything to draw; of heads that is what attention sees, not the norm's output."""
    frame = report.tables.get(picture.table)
    if frame is not None and picture.table == "heads":
        frame = frame[frame["space"] == "head"]
    return frame is not None and picture.column in frame and not frame[picture.column].isna().all()


def drawn(report: Contents, picture: Picture, prefix: str = "") -> Drawing:
    """The picture as SVG, with its caption."""
    caption = (picture.draw.__doc__ or "").strip().splitlines()[0]
    if picture.id == "projection" and not report.layernorms["kind"].isin(["layernorm", "projection_only"]).any():
        caption = "No norm here projects. What one would remove: the share of squared length along the ones-vector."
    name = f"{prefix}{picture.id}"
    return Drawing(picture.title, Markup(svg(picture.draw(report), name, f"{picture.title}. {caption}")), caption)


def groups(report: Contents) -> Iterator[Group]:
    """All pictures of a report, under their headings."""
    for name, title, about, plans in GROUPS:
        shown = [_shown(report, p) for p in plans if has(report, p)]
        if name == "norms-pictures":
            shown += _geometry(report)
        if name == "heads-pictures":
            shown += _by_head(report)
        if shown:
            yield Group(name, title, about, tuple(shown))


def _shown(report: Contents, picture: Picture) -> Shown:
    said = nothing_to_see(report, picture.id)
    return Shown(picture.id, picture.title, () if said else (drawn(report, picture),), said=said)


def others(report: Contents) -> tuple[list[Group], list[str]]:
    """Pictures that other packages' probes bring, and why some of them could not be drawn."""
    found, failed = [], []
    for probe in report.probes:
        try:
            shown = [Shown(p.id, p.title, (drawn(report, p),)) for p in probe.pictures() if has(report, p)]
        except Exception as error:
            failed.append(str(Failure.of(probe.name, package_of(probe), error)))
            continue
        if shown:
            title = probe.summary[:1].upper() + probe.summary[1:]
            found.append(Group(f"{probe.name}-pictures", title, f"From {package_of(probe)}.", tuple(shown)))
    return found, failed


def _by_head(report: Contents) -> list[Shown]:
    known = measures_of(report)
    drawings = []
    for measure in known:
        caption = f"{MEASURES[measure].meaning[:1].upper()}{MEASURES[measure].meaning[1:]}."
        drawn = Markup(svg(heads_map(report, measure), f"by-head-{measure}", caption))
        drawings.append(Drawing(MEASURES[measure].title, drawn, caption, first=measure == known[0]))
    return [Shown("by-head", "Every head", tuple(drawings), wide=True, choice="Measure")] if drawings else []


def _geometry(report: Contents) -> list[Shown]:
    samples = report.exhibits.samples
    if not samples:
        return []
    first = norm_geometry.most_spread(report)
    spaced = {samples[i].site for i in np.linspace(0, len(samples) - 1, min(GEOMETRIES, len(samples))).astype(int)}
    drawings = []
    for number, sample in enumerate(samples):
        if sample is not first and sample.site not in spaced:
            continue
        text = norm_geometry.caption(sample)
        drawn = Markup(svg(norm_geometry.draw(sample), f"geometry-{number}", f"Geometry. {text}"))
        drawings.append(Drawing(shortened(visible(sample.site)), drawn, text, first=sample is first))
    return [Shown("geometry", "Tokens around a norm: projection and scaling", tuple(drawings), wide=True)]
