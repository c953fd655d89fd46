"""Pages of reports: templates, and the data and scripts inside a page.

Base64 holds none of the characters that end a script or an attribute, so no text from a model or a user can escape from
its element; and the page's content security policy names its own scripts by hash, so no other script runs.
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

_TYPES = {"uint8": "Uint8Array", "uint16": "Uint16Array", "int32": "Int32Array", "float32": "Float32Array"}
_ALIGN = 8  # typed arrays must begin at a multiple of their item's size


@cache  # templates are compiled once
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ln_probe.page", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) or not isinstance(value, str) else disarmed(value),
    )
    environment.filters |= {"visible": visible, "shortened": shortened}
    environment.globals["zip"] = zip
    return environment


def render(template: str, **values: Any) -> str:
    """Fill in a template of this folder; every value is escaped, and control characters are made visible."""
    return _environment().get_template(template).render(values)


def packed(content: Any) -> str:
    """JSON-like content with numpy arrays in it, as base64 of zlib: a header, then the arrays' bytes.

    float16 goes as its 16 bits (`half` in the scripts decodes them), other floats as float32. Numbers outside arrays
    must be finite or NaN (sent as null).

    Raises:
        TypeError: something that is neither JSON nor a numeric array.
    """
    blobs: list[bytes] = []
    offset = 0

    def plain(value: Any) -> Any:
        nonlocal offset
        if isinstance(value, np.ndarray):
            array = value.view(np.uint16) if value.dtype == np.float16 else value
            if array.dtype.kind == "f":
                array = array.astype(np.float32)
            elif array.dtype.kind in "iub" and str(array.dtype) not in _TYPES:
                array = array.astype(np.int32)
            if str(array.dtype) not in _TYPES:
                raise TypeError(f"cannot send an array of {value.dtype} to a page")
            data = np.ascontiguousarray(array).tobytes()
            sent = {"$": _TYPES[str(array.dtype)], "at": offset, "n": array.size}
            data += b"\0" * (-len(data) % _ALIGN)
            blobs.append(data)
            offset += len(data)
            return sent
        if isinstance(value, Mapping):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, str) or value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | np.integer):
            return int(value)
        if isinstance(value, float | np.floating):
            return float(value) if math.isfinite(value) else None
        if isinstance(value, Sequence):
            return [plain(v) for v in value]
        raise TypeError(f"cannot send {type(value).__name__} to a page")

    header = json.dumps(plain(content), allow_nan=False, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 4) % _ALIGN)
    return compressed(len(header).to_bytes(4, "little") + header + b"".join(blobs))


def compressed(content: bytes) -> str:
    """base64 of zlib."""
    return base64.b64encode(zlib.compress(content, 9)).decode()


@cache
def own_script(*names: str) -> str:
    """The package's scripts of these names, one after the other."""
    folder = resources.files("ln_probe.page")
    return "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in names)


@cache
def circuitsvis_script() -> str:
    """The JavaScript bundle of the installed circuitsvis, as it may stand inside a script element.

    Raises:
        FileNotFoundError: circuitsvis comes without its bundle.
    """
    spec = find_spec("circuitsvis")  # not imported: it would load torch
    places = [] if spec is None else list(spec.submodule_search_locations or ())
    path = next((p for place in places if (p := Path(place, "dist", "cdn", "iife.js")).exists()), None)
    if path is None:
        raise FileNotFoundError(
            "circuitsvis has no dist/cdn/iife.js, which attention is drawn with: pip install 'circuitsvis>=1.43'"
        )
    text = path.read_text(encoding="utf-8").split("\n//# sourceMappingURL=")[0]
    # Inside its string literals, where alone they occur, these mean the same and end no script element.
    return text.replace("</script", "<\\/script").replace("<script", "<\\x73cript").replace("<!--", "<\\!--")


def policy(*scripts: str) -> str:
    """A content security policy under which these scripts run and nothing is fetched."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
