"""The map of heads, and the attention of the head that one chooses, which circuitsvis draws.

Report pages and notebooks show the same elements: circuitsvis's bundle, data in base64, and a content security policy
that forbids fetching and other scripts. circuitsvis's Python side is not used, because it writes tokens into a script
unescaped and needs 64 MB for a layer at 512 tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup, escape

from ln_probe.analyses.probes.statistics import SIGNIFICANCE
from ln_probe.analyses.probes.wording import NATS, unit_of
from ln_probe.analyses.text import disarmed, shortened, visible, write_text
from ln_probe.exhibits import PromptAttention
from ln_probe.hooks.norm import SCALING_FROZEN
from ln_probe.page import circuitsvis_script, compressed, own_script, packed, render
from ln_probe.page.figures import interval

if TYPE_CHECKING:
    from ln_probe.report import Report

# Where a colour of the map begins, in nats per token: every map of every page has this scale. Of a loss in another unit
# the last step begins at the largest change.
STEPS: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
TOP = 6  # heads in the list beside the map
TOKEN_LENGTH = 14  # characters of a token on an axis
LARGE = 40  # tokens from which on a picture fills its column, which is kept free for it
FRAME_HEIGHT = 1000  # pixels of a notebook's frame
_HEAD = re.compile(r"\bL(\d{1,5})H(\d{1,5})\b")
# circuitsvis sets tokens as HTML in some of its elements. These look alike and mean nothing in HTML.
_LOOKALIKES = str.maketrans({"<": "\u2039", ">": "\u203a"})


@dataclass(frozen=True)
class HeadCell:
    """One head of the map.

    Attributes:
        layer, head: which.
        change, certainty: its measurement as text.
        value: change of the loss (NaN: not measured).
        step: how many of the scale's steps it reaches, negative where the loss falls.
        estimate: whether it is a first-order estimate; tested: whether it has a p; significant: whether that passes.
        shown: whether its attention can be shown.
    """

    layer: int
    head: int
    change: str
    certainty: str = ""
    value: float = math.nan
    step: int = 0
    estimate: bool = False
    tested: bool = False
    significant: bool = False
    shown: bool = False

    @property
    def name(self) -> str:
        return f"L{self.layer}H{self.head}"

    @property
    def what(self) -> str:
        """The head and its measurement."""
        certainty = f"; {self.certainty}" if self.certainty else ""
        return f"Layer {self.layer}, head {self.head}: {self.change}{certainty}"

    @property
    def classes(self) -> str:
        """The classes of its element."""
        if math.isnan(self.value):
            return "unknown"
        sign = "less" if self.step < 0 else "more"
        mark = "significant" if self.significant else "pale"
        names = [f"{sign}{abs(self.step)}", mark, "estimate" if self.estimate else ""]
        return " ".join(filter(None, names))


@dataclass(frozen=True)
class HeadMap:
    """The change of the loss with scaling frozen for one head at a time.

    Attributes:
        rows: of cells, the last layer first, so that layer 0 is at the bottom.
        legend: (class, text) of each colour and mark that occurs.
        unit: of the loss.
    """

    rows: tuple[tuple[HeadCell, ...], ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    unit: str = ""

    @property
    def cells(self) -> list[HeadCell]:
        return [cell for row in self.rows for cell in row]

    @property
    def top(self) -> list[HeadCell]:
        """The heads with the largest changes, those that are significant before others."""
        measured = [cell for cell in self.cells if not math.isnan(cell.value)]
        return sorted(measured, key=lambda cell: (not cell.significant, -abs(cell.value)))[:TOP]

    @property
    def listed(self) -> list[HeadCell]:
        """The same heads by layer, because their order of size is not tested."""
        return sorted(self.top, key=lambda cell: (cell.layer, cell.head))

    @property
    def first(self) -> HeadCell | None:
        """The head whose attention is shown first."""
        in_order = sorted(self.cells, key=lambda cell: (cell.layer, cell.head))
        return next((cell for cell in (*self.top, *in_order) if cell.shown), None)


def head_map(report: Report) -> HeadMap:
    """Return the map of a report's heads; without rows if the report has nothing by head."""
    effects = report.tables["head_effects"]
    effects = effects[effects["variant"] == SCALING_FROZEN.name]
    shown = _shown(report.exhibits.attention)
    pairs = {(int(la), int(h)) for la, h in effects[["layer", "head"]].to_numpy()} | shown
    layers, heads = (range(1 + max((pair[axis] for pair in pairs), default=-1)) for axis in (0, 1))
    rows: dict[tuple[int, int], Mapping[Any, Any]] = {
        (int(row["layer"]), int(row["head"])): row for row in effects.to_dict("records")
    }
    unit, steps = unit_of(report.provenance), STEPS
    if unit != NATS:
        largest = max((abs(v) for row in rows.values() if math.isfinite(v := _value(row))), default=1.0)
        steps = tuple(step * largest / STEPS[-1] for step in STEPS)
    grid = tuple(
        tuple(_cell((layer, head), rows.get((layer, head)), shown, steps, unit) for head in heads)
        for layer in reversed(layers)
    )
    return HeadMap(grid, tuple(_legend(grid, steps, unit)), unit)


def _shown(attention: PromptAttention | None) -> set[tuple[int, int]]:
    return set() if attention is None else {(layer, head) for layer in attention.layers for head in attention.heads}


def _value(row: Mapping[Any, Any]) -> float:
    """Return the change as run, or else as estimated."""
    return float(row["estimate"] if math.isnan(row["delta_loss"]) else row["delta_loss"])


def _cell(
    pair: tuple[int, int],
    row: Mapping[Any, Any] | None,
    shown: set[tuple[int, int]],
    steps: tuple[float, ...],
    unit: str,
) -> HeadCell:
    if row is None or math.isnan(value := _value(row)):
        return HeadCell(*pair, "not measured", shown=pair in shown)
    estimate, tested = math.isnan(row["delta_loss"]), math.isfinite(row["p"])
    ends = (math.nan, math.nan) if estimate else (row["delta_loss_low"], row["delta_loss_high"])
    if tested:
        certainty = "p < 0.001" if row["p"] < 0.001 else f"p = {row['p']:.2g}"
    else:
        certainty = "first-order estimate" if estimate else f"not tested, {row['n']:.0f} prompts"
    step = sum(abs(value) >= least for least in steps) * (-1 if value < 0 else 1)
    change = interval((value, *ends), unit)
    return HeadCell(*pair, change, certainty, value, step, estimate, tested, row["p"] < SIGNIFICANCE, pair in shown)


def _legend(rows: tuple[tuple[HeadCell, ...], ...], steps: tuple[float, ...], unit: str) -> Iterator[tuple[str, str]]:
    """Yield what the colours mean: every step of the scale, and the marks that occur."""
    cells = [cell for row in rows for cell in row]
    known = [cell for cell in cells if not math.isnan(cell.value)]
    if not known:
        yield "unknown", "not measured"
        return
    yield from ((f"less{i}", f"−{steps[i - 1]:.2g}") for i in range(len(steps), 0, -1))
    yield "more0", "0"
    yield from ((f"more{i + 1}", f"+{step:.2g}") for i, step in enumerate(steps))
    if any(cell.significant for cell in known):
        yield "more4 significant", "outlined: significant"
    if any(not cell.significant and not cell.estimate for cell in known):
        untested = {cell.certainty for cell in known if not cell.tested and not cell.estimate}
        yield "more4 pale", f"pale: {', '.join(sorted(untested)) or 'not significant'}"
    if any(cell.estimate for cell in known):
        yield "more4 pale estimate", "hatched: first-order estimate, not tested"
    if len(known) < len(cells):
        yield "unknown", "grey: not measured"


# --------------------------------------------------------------------------------------- the attention of one head


@dataclass(frozen=True, eq=False)
class AttentionView:
    """The result of `Report.attention`: an interactive picture in a notebook; `to_html` writes it to a file.

    Raises (on construction):
        ValueError: the report has no attention of that layer or head.
    """

    report: Report = field(repr=False)
    layer: int | None = None
    head: int | None = None

    def __post_init__(self) -> None:
        shown = self.report.exhibits.attention
        if shown is None:
            raise ValueError(
                "this report has no attention: analyze with the probe 'selectability' or 'uniformity' a model whose "
                "attention reads a norm"
            )
        for what, number, known in (("layer", self.layer, shown.layers), ("head", self.head, shown.heads)):
            if number is not None and number not in known:
                raise ValueError(f"{what} {number!r} has no attention here: there are {', '.join(map(str, known))}")

    def document(self) -> str:
        """Return the picture as a whole HTML document that opens offline."""
        heads = head_map(self.report)
        first = heads.first
        if self.layer is not None or self.head is not None:
            cells = [c for c in (*heads.top, *heads.cells) if self.layer in (None, c.layer) and c.shown]
            first = next((c for c in cells if self.head in (None, c.head)), first)
        own = own_script("page.js", "heads.js")
        values = {"name": self.report.name, "heads": heads, "first": first}
        return render("attention.html", own, circuitsvis_script(), **values, **attention_data(self.report))

    def _repr_html_(self) -> str:
        return Markup(
            '<iframe title="Attention" sandbox="allow-scripts" style="width:100%;height:{}px;border:0" srcdoc="{}">'
            "</iframe>"
        ).format(FRAME_HEIGHT, self.document())

    def to_html(self, path: str | Path) -> Path:
        """Write the picture as one self-contained page and return its path."""
        write_text(Path(path), self.document())
        return Path(path)


def attention_data(report: Report) -> dict[str, Any]:
    """Return what the template `heads.html` needs to show attention: the data, the bundle, and what is shown."""
    shown = report.exhibits.attention
    if shown is None:
        return {"attention": None}
    count = len(shown.tokens)
    what = f"Prompt {shown.prompt}, {'all' if count == shown.length else f'the first {count} of'} {shown.length} tokens"
    size = "large" if count > LARGE else ""
    return {"attention": what, "size": size, "data": _data(shown), "bundle": _compressed_bundle()}


@cache  # takes half a second, and is the same in every page
def _compressed_bundle() -> str:
    return compressed(circuitsvis_script().encode())


def _data(shown: PromptAttention) -> str:
    """Pack every weight of every head; a causal pattern's weights above the diagonal are left out."""
    count = len(shown.tokens)
    rows, columns = np.tril_indices(count) if shown.causal else np.indices((count, count)).reshape(2, -1)
    intact = shown.intact[..., rows, columns]
    # As differences in 8 bits, most of which are small, so that they compress.
    change = shown.frozen[..., rows, columns] - intact
    tokens = [shortened(visible(t), TOKEN_LENGTH).partition("… (")[0].translate(_LOOKALIKES) for t in shown.tokens]
    same = {"layers": shown.layers, "heads": shown.heads, "causal": shown.causal}
    return packed({"tokens": tokens, "intact": intact, "change": change, **same})


def linked(text: str, report: Report) -> Markup:
    """Escape a sentence and link the heads in it (L2H3) whose attention is shown."""
    shown, parts, end = _shown(report.exhibits.attention), Markup(), 0
    for match in _HEAD.finditer(text):
        if (int(match[1]), int(match[2])) in shown:
            parts += escape(disarmed(text[end : match.start()]))
            parts += Markup('<a href="#{0}">{0}</a>').format(match[0])
            end = match.end()
    # No line ends between a number and its unit.
    html = str(parts + escape(disarmed(text[end:])))
    return Markup(re.sub(r" (?=%)|(?<=\bp) (?=[=&])|(?<=\bp =) |(?<=\bp &lt;) ", "&nbsp;", html))
