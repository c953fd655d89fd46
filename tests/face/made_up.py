"""A made-up experiment's page, and the reader of what pages carry."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ln_probe.analyses.lab.results import Results, summarize, write_results
from ln_probe.page.lab import write_lab_page


def lab_page(out: Path, norms: dict[str, float], **more: Any) -> str:
    """The page of an experiment that gave these means; more of its results are options of Results."""
    values = pd.DataFrame({"norm": list(norms), "seed": 0, "value": list(norms.values())})
    results = Results(summarize(values, ["norm"]), settings={"steps": 7}, **more)
    write_results(results, out, experiment="toy", command="ln-probe lab run toy", ln_probe_version="0", seconds=1)
    return write_lab_page(out).read_text()


def unpacked(text: str) -> Any:
    """What unpack.js does, written again."""
    raw = zlib.decompress(base64.b64decode(text))
    length = int.from_bytes(raw[:4], "little")
    kinds = {"Uint8Array": np.uint8, "Uint16Array": np.uint16, "Int32Array": np.int32, "Float32Array": np.float32}

    def array(value: dict[str, Any]) -> Any:
        if "$" not in value:
            return value
        start = 4 + length + value["at"]
        kind = np.dtype(kinds[value["$"]])
        assert start % kind.itemsize == 0
        return np.frombuffer(raw, kind, value["n"], start)

    return json.loads(raw[4 : 4 + length], object_hook=array)
