"""The site: `make docs`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat

from ln_probe import __version__ as release

sys.path.insert(0, str(Path(__file__).parent))
import measured

project, author, copyright = "ln_probe", "The ln_probe authors", "The ln_probe authors"
version = release
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme, html_title = "furo", "ln_probe"
exclude_patterns = ["jupyter_execute", "_build", "_extra", ".jupyter_cache", "conf.py", "measured.py"]
html_extra_path = ["_extra"]
html_static_path, html_css_files = ["_static"], ["site.css"]
myst_enable_extensions = ["dollarmath", "html_image"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"  # shapes hold stars, which are emphasis in a description
python_maximum_signature_line_length = 88
autodoc_preserve_defaults = True
napoleon_attr_annotations = False  # for the same stars
default_role = "code"  # a name in `one pair of backticks`, as everywhere in the source
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "cache"
nb_execution_timeout = -1  # none: a busy machine is slow
nb_execution_raise_on_error = True
nb_merge_streams, nb_output_stderr = True, "remove"  # (progress)

# The notebooks live in examples/; the site shows executed copies, each with a link to one that Colab opens.
_here = Path(__file__).parent
_repository = os.environ.get(
    "GITHUB_REPOSITORY"
)  # owner/name, where the site is published (.github/workflows/docs.yml)


def _colab(name: str) -> str:
    """Where Colab opens a notebook: from the published site's branch, or its dialog for a downloaded one."""
    site = "https://colab.research.google.com/"
    return f"{site}github/{_repository}/blob/gh-pages/colab/{name}.ipynb" if _repository else f"{site}#upload=true"


def _links(name: str) -> str:
    return f"""# %% [markdown]
# <a href="{_colab(name)}">Open in Colab</a> · <a href="../colab/{name}.ipynb" download>Download the notebook</a>
"""


# ln_probe is not on PyPI: a notebook installs it from the published repository, or says where it comes from.
_install = (
    f"%pip install -q git+https://github.com/{_repository}"
    if _repository
    else "# In a clone of ln_probe, before this notebook: pip install -c constraints.txt -e ."
)
(_here / "notebooks").mkdir(exist_ok=True)
(_here / "_extra" / "colab").mkdir(parents=True, exist_ok=True)
for _notebook in sorted((_here.parent / "examples").glob("*.py")):
    _head, _title, _rest = _notebook.read_text(encoding="utf-8").partition("\n# %% [markdown]\n")
    _first, _cell, _others = _rest.partition("\n# %%")
    _text = f"{_head}{_title}{_first}\n{_links(_notebook.stem)}{_cell}{_others}"
    (_here / "notebooks" / _notebook.name).write_text(_text, encoding="utf-8")
    _alone = jupytext.read(_notebook)
    _alone.cells.insert(1, nbformat.v4.new_code_cell(_install))
    jupytext.write(_alone, _here / "_extra" / "colab" / f"{_notebook.stem}.ipynb")


def setup(app: object) -> None:
    from docutils import nodes  # (not there where this file is only read, as by the tests)
    from docutils.parsers.rst import Directive, directives
    from docutils.statemachine import StringList

    class Measured(Directive):
        """A table of committed measurements (measured.py)."""

        required_arguments, has_content = 1, True
        option_spec = {"where": directives.unchanged}  # noqa: RUF012

        def table(self) -> str:
            return measured.table(self.arguments[0], list(self.content), self.options.get("where", ""))

        def run(self) -> list[nodes.Node]:
            container = nodes.container()
            self.state.nested_parse(StringList(self.table().splitlines()), self.content_offset, container)
            return list(container.children)

    class Claims(Measured):
        """What became of the claims of one source (measured.py)."""

        def table(self) -> str:
            return measured.claims_table(self.arguments[0])

    app.connect("autodoc-process-docstring", _escape)  # type: ignore[attr-defined]
    app.add_directive("measured", Measured)  # type: ignore[attr-defined]
    app.add_directive("claims", Claims)  # type: ignore[attr-defined]


def _escape(_app: object, _what: str, _name: str, _of: object, _options: object, lines: list[str]) -> None:
    """Docstrings write |x| for a length; reStructuredText would look for a substitution of that name."""
    lines[:] = [line.replace("|", "\\|") for line in lines]
