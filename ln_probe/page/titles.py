"""Titles of pictures: one that is saved alone says what it shows, of which model and prompts.

A page has its own headings and captions, so it draws the pictures without (`inspect.unwrap`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from ln_probe.analyses.probes.base import Picture
from ln_probe.analyses.text import counted, disarmed

if TYPE_CHECKING:
    from ln_probe.page.figures import Figure
    from ln_probe.report import Report

_Draw = Callable[["Report"], "Figure"]
PICTURES: dict[str, Picture] = {}
_SIZE, _LETTERS, _LINE = 9, 14, 0.17  # points; letters per inch of width; inches per line
_NAME = 48  # letters of a model's name


def picture(id: str, title: str, table: str, column: str) -> Callable[[_Draw], _Draw]:
    """Decorate a function that draws a picture of the page: see `Picture`, and `PICTURES`, which has it by its id.

    The first line of its docstring becomes the title of the figure that it returns.
    """

    def decorate(draw: _Draw) -> _Draw:
        @wraps(draw)
        def with_title(report: Report) -> Figure:
            return entitle(draw(report), report, caption(draw))

        PICTURES[id] = Picture(id, title, with_title, table, column)
        return with_title

    return decorate


def caption(draw: Callable[..., Any]) -> str:
    """Return the first line of a docstring."""
    return (draw.__doc__ or "").strip().partition("\n")[0]


def entitle(figure: Figure, report: Report, text: str) -> Figure:
    """Write model, number of prompts and `text` above a figure, which grows by that height."""
    count = report.provenance.get("prompts", {}).get("count")
    name = disarmed(report.name).replace("\n", " ")
    if len(name) > _NAME:
        name = f"{name[: _NAME // 2]}…{name[-_NAME // 2 :]}"
    about = name + (f", {counted(count, 'prompt')}" if count else "")
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(f"{about}. {text}", int(_LETTERS * width))
    taller = height + _LINE * len(lines) + 0.05
    figure.set_size_inches(width, taller)
    place = {}
    if figure.get_layout_engine() is None:
        figure.subplots_adjust(top=figure.subplotpars.top * height / taller)
        place = {"y": 1 - 0.05 / taller, "va": "top"}  # a layout engine makes room only for a title that it places
    figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize=_SIZE, parse_math=False, **place)
    return figure
