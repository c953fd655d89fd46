"""A matplotlib Figure that a notebook shows without any magic."""

from __future__ import annotations

import io
import warnings

import matplotlib.figure

__all__ = [
    "Figure",
]

DPI = 192  # pixels per inch of what a notebook gets, which shows them at half that: sharp on dense screens


class Figure(matplotlib.figure.Figure):
    """As matplotlib's, and the last thing in a notebook's cell it is a picture there.

    matplotlib shows figures of `pyplot` only, and only after `%matplotlib inline`; figures here are made without
    pyplot, so that making many keeps none alive.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        """The picture, and the size in pixels at which it is meant to stand."""
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")  # tokens of scripts that a font lacks
            self.savefig(buffer, format="png", dpi=DPI)
        width, height = (round(inches * DPI / 2) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}
