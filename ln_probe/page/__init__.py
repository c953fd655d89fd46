"""Pages of reports: templates, and the data and scripts inside a page.

Base64 holds none of the characters that end a script or an attribute, so no text from a model or a user can leave its
element; and the page's content security policy names its own scripts by hash, so no other script runs.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from ln_probe.analyses.text import disarmed, shortened, visible


@cache  # templates are compiled once
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ln_probe.page", "."),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else disarmed(value),
    )
    environment.filters |= {"visible": visible, "shortened": shortened}
    return environment


def render(template: str, *scripts: str, **values: Any) -> str:
    """Fill in a template of this folder; every value is escaped, and control characters are made visible.

    Args:
        template: its file name.
        scripts: the scripts that may run: the first stands at the end of the page, the others are added by it.
        values: by name.
    """
    own = Markup(scripts[0]) if scripts else ""
    return _environment().get_template(template).render(values, policy=policy(*scripts), script=own)


def packed(content: Any) -> str:
    """Return JSON-like content with arrays of bytes in it as base64 of zlib: a header, then the arrays' bytes.

    Numbers outside arrays must be finite or NaN (sent as null).

    Raises:
        TypeError: something that is neither JSON nor an array of uint8.
    """
    blobs: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:
            blobs.append(value.tobytes())
            return {"$": sum(map(len, blobs[:-1])), "n": value.size}
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, str | bool) or value is None:
            return value
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            return float(value) if math.isfinite(value) else None
        if isinstance(value, Sequence):
            return [plain(v) for v in value]
        raise TypeError(f"cannot send {type(value).__name__} to a page")

    header = json.dumps(plain(content), allow_nan=False, separators=(",", ":")).encode()
    return compressed(len(header).to_bytes(4, "little") + header + b"".join(blobs))


def compressed(content: bytes) -> str:
    """Return base64 of zlib."""
    return base64.b64encode(zlib.compress(content)).decode()


@cache
def own_script(*names: str) -> str:
    """Return the package's scripts of these names, one after the other."""
    folder = resources.files("ln_probe.page")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


@cache
def circuitsvis_script() -> str:
    """Return the JavaScript bundle of the installed circuitsvis, as it may stand inside a script element."""
    spec: Any = find_spec("circuitsvis")  # not imported: it would load torch
    path = Path(spec.submodule_search_locations[0], "dist", "cdn", "iife.js")
    text = path.read_text(encoding="utf-8").split("\n//# sourceMappingURL=")[0]
    # Inside its string literals, where alone they occur, these mean the same and end no script element.
    return text.replace("</script", "<\\/script").replace("<script", "<\\x73cript").replace("<!--", "<\\!--")


def policy(*scripts: str) -> str:
    """Return a content security policy under which these scripts run and nothing is fetched."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
