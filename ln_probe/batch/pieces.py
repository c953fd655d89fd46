"""Pieces of probes in the result file of a work unit, whatever the probe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import numpy as np
import pandas as pd

from ln_probe.analyses.probes.base import Failure, Piece
from ln_probe.batch.store import Result, Stored


def packed(pieces: Mapping[str, Piece | Failure]) -> Result:
    """One result of all pieces of a unit, by the names of their probes."""
    arrays: dict[str, np.ndarray] = {}
    tables: dict[str, pd.DataFrame] = {}
    about: dict[str, object] = {}
    for probe, piece in pieces.items():
        if isinstance(piece, Failure):
            about[probe] = {"failure": asdict(piece)}
            continue
        arrays |= {f"{probe}/{name}": array for name, array in piece.arrays.items()}
        tables |= {f"{probe}/{name}": table for name, table in piece.tables.items()}
        about[probe] = {"info": dict(piece.info), "notes": list(piece.notes)}
    return Result(arrays, tables, {"pieces": about})


def unpacked(stored: Stored) -> dict[str, Piece | Failure]:
    """What `packed` packed; arrays are read when they are asked for."""
    found: dict[str, Piece | Failure] = {}
    for probe, about in stored.info["pieces"].items():
        if "failure" in about:
            found[probe] = Failure(**about["failure"])
        else:
            found[probe] = Piece(
                stored.lazily(f"{probe}/"), stored.tables(f"{probe}/"), about["info"], tuple(about["notes"])
            )
    return found
