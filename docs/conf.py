"""The site: `make docs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from ln_probe.reporting.software import __version__ as release

project, author, copyright = "ln_probe", "The ln_probe authors", "The ln_probe authors"
version = release
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme, html_title = "furo", "ln_probe"
exclude_patterns = ["_build", "conf.py"]
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
autodoc_default_options = {"show-inheritance": False}
default_role = "code"  # a name in `one pair of backticks`, as everywhere in the source
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_timeout = 1800  # a busy machine is slow; a notebook that hangs is found by the tests
nb_execution_raise_on_error = True
nb_merge_streams = True

# The notebooks live in examples/; the site shows executed copies.
_here = Path(__file__).parent
(_here / "notebooks").mkdir(exist_ok=True)
for _notebook in sorted((_here.parent / "examples").glob("*.py")):
    shutil.copy2(_notebook, _here / "notebooks" / _notebook.name)


def setup(app: object) -> None:
    app.connect("autodoc-process-docstring", _escape)  # type: ignore[attr-defined]


def _escape(_app: object, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Docstrings write |x| for a length; reStructuredText would look for a substitution of that name."""
    lines[:] = [line.replace("|", "\\|") for line in lines]
