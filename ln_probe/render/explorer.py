"""What the map of heads shows, where it opens, and addresses of heads: `#L2H3P0` is layer 2, head 3, prompt 0."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup, escape

from ln_probe.analyses.probes.text import disarmed
from ln_probe.render.heads import MEASURES, measures_of
from ln_probe.reporting.by_head import by_head
from ln_probe.reporting.contents import Contents
from ln_probe.reporting.exhibits import Exhibits

# What "most affected" means: the first of these that is known. The others of the map can be chosen.
_FIRST = ("delta_loss", "entropy_change", "attainable_change")
_HEAD = re.compile(r"\bL(\d{1,5})H(\d{1,5})\b")


@dataclass(frozen=True, eq=False)
class HeadMap:
    """Measures of every head, for the map.

    Attributes:
        layers, heads: of the axes below.
        values: by measure (`ln_probe.render.heads.MEASURES`), the one shown first at the front; NaN: not known.
    """

    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()
    values: Mapping[str, Float[np.ndarray, "layer head"]] = field(default_factory=dict)

    @staticmethod
    def of(report: Contents) -> HeadMap:
        """The map of a report; without measures where there is nothing to show."""
        known = measures_of(report)
        if not known:
            return HeadMap()
        first = next((m for m in _FIRST if m in known), known[0])
        table = by_head(report)
        grids = {
            m: table.pivot(index="layer", columns="head", values=m) for m in sorted(known, key=lambda m: m != first)
        }
        axes = grids[first]
        return HeadMap(
            tuple(int(v) for v in axes.index),
            tuple(int(v) for v in axes.columns),
            {m: g.to_numpy(np.float64) for m, g in grids.items()},
        )

    def most_affected(self, exhibits: Exhibits, layer: int | None = None, prompt: int = 0) -> tuple[int, int]:
        """The (layer, head) whose first measure is largest in size, of those whose attention is kept.

        Raises:
            ValueError: nothing was kept of that prompt.
        """
        shown = exhibits.of_prompt(prompt)
        kept = [(la, h) for la in shown.layers for h in shown.heads if layer in (None, la)]
        if not self.values:
            return kept[0]
        grid = next(iter(self.values.values()))
        places = [
            (self.layers.index(la), self.heads.index(h)) for la, h in kept if la in self.layers and h in self.heads
        ]
        sizes = [abs(float(grid[p])) for p in places]
        if not any(np.isfinite(sizes)):
            return kept[0]
        row, column = places[int(np.nanargmax(sizes))]
        return self.layers[row], self.heads[column]

    def plain(self) -> dict[str, Any]:
        """As the scripts get it."""
        told = [
            {
                "name": name,
                "title": MEASURES[name].title,
                "unit": MEASURES[name].label,
                "meaning": MEASURES[name].meaning,
                "signed": MEASURES[name].signed,
                "values": values.astype(np.float32).ravel(),
            }
            for name, values in self.values.items()
        ]
        return {"layers": self.layers, "heads": self.heads, "measures": told}


def address(layer: int, head: int, prompt: int = 0) -> str:
    """Where a head stands, as the end of the page's address."""
    return f"#L{layer}H{head}P{prompt}"


def linked(text: str, exhibits: Exhibits) -> Markup:
    """A sentence in which heads whose attention is kept (L2H3) are links to it; everything else is escaped."""
    shown = exhibits.attention[0] if exhibits.attention else None
    made, end = Markup(), 0
    for match in _HEAD.finditer(text):
        layer, head = int(match[1]), int(match[2])
        if shown is not None and layer in shown.layers and head in shown.heads:
            made += escape(disarmed(text[end : match.start()]))
            made += Markup('<a href="{}">{}</a>').format(address(layer, head, shown.prompt), match[0])
            end = match.end()
    return made + escape(disarmed(text[end:]))
