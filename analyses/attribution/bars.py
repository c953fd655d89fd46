"""A picture of what adds up to a number: a bar per summand, the largest first, the rest in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

TOP = 12  # bars before the rest: what fits a notebook cell
_WIDTH, _ROW, _LABEL, _NUMBER = 640, 20, 190, 70  # pixels
_UP, _DOWN, _REST = "#2166ac", "#b2182b", "#888888"  # colour-blind safe (ColorBrewer RdBu)


@dataclass(frozen=True)
class Bar:
    """One summand: a label, its value, and what it would be without projection (None: no mark)."""

    label: str
    value: float
    mark: float | None = None
    rest: bool = False


def largest(bars: Sequence[Bar], top: int = TOP) -> list[Bar]:
    """The `top` largest by absolute value, and one bar for all others."""
    ranked = sorted(bars, key=lambda b: -abs(b.value))
    shown, others = ranked[:top], ranked[top:]
    if len(others) == 1:
        return [*shown, *others]
    if others:
        marked = all(b.mark is not None for b in others)
        mark = sum(b.mark or 0.0 for b in others) if marked else None
        shown.append(Bar(f"{len(others)} others", sum(b.value for b in others), mark, rest=True))
    return shown


def draw(bars: Sequence[Bar], title: str, note: str = "") -> Markup:
    """Bars as SVG with their numbers, the title above and a note below; everything escaped."""
    values = [v for b in bars for v in (b.value, b.mark) if v is not None]
    low, high = min([0.0, *values]), max([0.0, *values])
    span = (high - low) or 1.0
    room = _WIDTH - _LABEL - _NUMBER

    def at(value: float) -> float:
        return _LABEL + (value - low) / span * room

    rows = [_bar(bar, i * _ROW, at) for i, bar in enumerate(bars)]
    zero = _line(at(0.0), 0, len(bars) * _ROW, 1, 0.4)
    svg = Markup(
        '<svg viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{title}" '
        'style="font:12px sans-serif;max-width:100%">{zero}{rows}</svg>'
    ).format(w=_WIDTH, h=len(bars) * _ROW + 4, title=title, zero=zero, rows=Markup("").join(rows))
    below = Markup('<div style="font:12px sans-serif;opacity:0.75;max-width:{}px">{}</div>').format(_WIDTH, note)
    head = Markup('<div style="font:600 14px sans-serif;margin:4px 0">{}</div>').format(title)
    return Markup("<div>{}{}{}</div>").format(head, svg, below if note else "")


def _bar(bar: Bar, y: int, at: Callable[[float], float]) -> Markup:
    colour = _REST if bar.rest else _UP if bar.value >= 0 else _DOWN
    left, right = sorted((at(0.0), at(bar.value)))
    label = Markup('<text x="{}" y="{}" text-anchor="end" fill="currentColor">{}</text>').format(
        _LABEL - 8, y + 14, bar.label
    )
    box = Markup(
        '<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="{}"><title>{}: {:.6g}</title></rect>'
    ).format(left, y + 4, max(right - left, 1.0), _ROW - 8, colour, bar.label, bar.value)
    mark = Markup("") if bar.mark is None else _line(at(bar.mark), y + 2, y + _ROW - 2, 2, 1.0)
    number = Markup('<text x="{}" y="{}" fill="currentColor">{:+.3g}</text>').format(
        _WIDTH - _NUMBER + 8, y + 14, bar.value
    )
    return label + box + mark + number


def _line(x: float, top: int, bottom: int, wide: int, opacity: float) -> Markup:
    where = Markup('<line x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}" ').format(x, top, bottom)
    return where + Markup('stroke="currentColor" stroke-width="{}" stroke-opacity="{}"/>').format(wide, opacity)
