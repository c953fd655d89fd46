"""What a work unit found out, as one file that is whole or not there and says whose result it is.

A safetensors file of arrays (and tables, as parquet inside it) whose header holds the unit's key and a SHA-256 over
all of its content: a file that was cut, altered, or made for something else is noticed before it is believed.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pandas as pd

from ln_probe.analyses.files import replacing
from ln_probe.analyses.probes.base import Failure, Piece

if TYPE_CHECKING:
    from ln_probe.batch.run import Unit

_HEADER = "ln_probe"
_TABLE = "table/"


DONE, FAILED, NO_STORAGE, DAMAGED, DIED, RETURNED = "done", "failed", "no storage", "damaged", "died", "returned"


@dataclass(frozen=True)
class Outcome:
    """How a unit ended.

    Attributes:
        state: DONE; FAILED (the checkpoint's own fault); NO_STORAGE (no worker can go on); DAMAGED (`again` names units
            whose results have to be made once more); DIED (the worker was killed); RETURNED (it was not begun).
        error: the message of what went wrong.
        seconds, tokens: spent and measured.
    """

    state: str
    error: str = ""
    seconds: float = 0.0
    tokens: int = 0
    again: tuple[Unit, ...] = ()


class StorageError(RuntimeError):
    """The output folder cannot be written to: nothing a single model can help."""


class DamagedError(ValueError):
    """A result file is not what its unit wrote."""


@contextmanager
def storing(out: Path) -> Iterator[None]:
    """Errors of the file system while it lasts become a StorageError that says what to do."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write to {out}: {error.strerror or error}. What was finished is kept: make room (or make the "
            "folder writable) and run the same command again"
        ) from error


@dataclass(frozen=True, eq=False)
class Result:
    """What a unit found out: arrays and tables by name, and plain JSON."""

    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)


def write(path: Path, key: str, result: Result) -> None:
    """Write a result aside and rename it into place, with a SHA-256 over all of its content.

    Raises:
        OSError: the disk is full, the folder read-only.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(a) for name, a in result.arrays.items()}
    for name, table in result.tables.items():
        buffer = io.BytesIO()
        table.to_parquet(buffer, index=False)
        arrays[_TABLE + name] = np.frombuffer(buffer.getvalue(), np.uint8)
    info = json.dumps(dict(result.info), sort_keys=True)
    digest = _digest(key, info, sorted(arrays.items()))
    header = json.dumps({"key": key, "sha256": digest, "info": info})
    with replacing(path) as aside:
        try:
            save_file(arrays, aside, metadata={_HEADER: header})
        except SafetensorError as error:  # which wraps errors of the file system
            code = re.search(r"os error (\d+)", str(error))
            raise (error if code is None else OSError(int(code[1]), str(error))) from error


def _digest(key: str, info: str, arrays: Iterable[tuple[str, np.ndarray]]) -> str:
    """SHA-256 of a result; `arrays` are in the order of their names."""
    digest = hashlib.sha256(f"{key}\n{info}\n".encode())
    for name, array in arrays:
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


class Stored:
    """A result on disk, verified when it is opened; arrays are read when they are asked for.

    Raises:
        FileNotFoundError: there is none.
        DamagedError: it is truncated, altered, or another unit's.
    """

    def __init__(self, path: Path, key: str) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing")
        try:
            self.file = cast(Any, safe_open(path, framework="np"))  # (to open it again reads the names of all arrays)
            header = json.loads(self.file.metadata()[_HEADER])
            maker, written, info = (str(header[field]) for field in ("key", "sha256", "info"))
            self.names = dict.fromkeys(sorted(self.file.keys()))
            digest = _digest(maker, info, ((name, self.file.get_tensor(name)) for name in self.names))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{path} is damaged ({error})") from error
        if digest != written:
            raise DamagedError(f"{path} is damaged (its content is not what was written)")
        if maker != key:
            raise DamagedError(f"{path} is the result of something else")
        self.info: dict[str, Any] = json.loads(info)

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        """The arrays whose names begin with `prefix`, by the rest of their names."""
        return dict(_Lazy(self, prefix))

    def table(self, name: str) -> pd.DataFrame:
        return pd.read_parquet(io.BytesIO(_Lazy(self, _TABLE)[name].tobytes()))


class _Lazy(Mapping[str, np.ndarray]):
    """The same arrays, each read when it is asked for."""

    def __init__(self, stored: Stored, prefix: str) -> None:
        self.stored, self.prefix = stored, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        if self.prefix + name not in self.stored.names:
            raise KeyError(name)
        found: np.ndarray = self.stored.file.get_tensor(self.prefix + name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (n.removeprefix(self.prefix) for n in self.stored.names if n.startswith(self.prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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
            tables = {name: stored.table(f"{probe}/{name}") for name in _Lazy(stored, f"{_TABLE}{probe}/")}
            found[probe] = Piece(_Lazy(stored, f"{probe}/"), tables, about["info"], tuple(about["notes"]))
    return found
