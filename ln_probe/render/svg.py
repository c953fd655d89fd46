"""Figures as inline SVG that follows the page: its colours in light and dark, ids of its own, text as text."""

from __future__ import annotations

import io
import re
import warnings

import matplotlib as mpl
from markupsafe import escape
from matplotlib.figure import Figure

from ln_probe.analyses.probes.text import disarmed

# Okabe & Ito's colours (safe for the colour-blind); a variant has the same one in every picture. On a page they are
# variables, with lighter shades of the same hues on dark paper. Heat maps keep their own colours in both schemes: a
# scale that is turned round would be read wrongly.
BLUE, ORANGE, GREEN, PINK = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
GRID = "#b0b0b0"
DECIMALS = 2  # of coordinates: a hundredth of a unit cannot be seen, and a tenth of a page's pictures was such decimals
POINTS, SMALLEST, LEGIBLE = 72, 8, 11  # units of an SVG an inch, its smallest text in them, the least size in pixels
INK = "#000000"
_VARIABLES = {BLUE: "--c-blue", ORANGE: "--c-orange", GREEN: "--c-green", PINK: "--c-pink", GRID: "--c-grid"}


def svg(figure: Figure, name: str, title: str = "") -> str:
    """The figure as an inline SVG element, its ids beginning with `name`; the same figure gives the same text.

    Args:
        figure: any matplotlib figure; black becomes the page's ink, the palette above its colours.
        name: unique on the page, letters and digits.
        title: what a screen reader says.
    """
    with (
        mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}),
        warnings.catch_warnings(),
    ):
        # Text stays text and is drawn with the reader's fonts, so what matplotlib's lacks does not matter.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' (?:d|x|y)="[^"]*"', lambda m: re.sub(rf"(\.\d{{{DECIMALS}}})\d+", r"\1", m.group()), text)
    text = re.sub(r'\bid="(?=[A-Za-z])|url\(#(?=[A-Za-z])|href="#(?=[A-Za-z])', lambda m: f"{m.group(0)}{name}-", text)
    text = re.sub(rf"(?<=: ){INK}", "currentColor", text)
    for colour, variable in _VARIABLES.items():
        text = re.sub(rf"(?<=: ){colour}", f"var({variable}, {colour})", text)
    # How wide it must be for its smallest text (8 points) to have 11 pixels: phones scroll.
    width = round(figure.get_figwidth() * POINTS * LEGIBLE / SMALLEST)
    described = f'<svg role="img" aria-labelledby="{name}-title" style="--legible:{width}px" '
    head, _, rest = text.partition(">")
    return head.replace("<svg ", described, 1) + f'><title id="{name}-title">{escape(disarmed(title))}</title>' + rest
