"""Files of a saved report: that each is what was written, and no larger in memory than a report can be."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from ln_probe.loading.provenance import sha256_of_file

# A page is some megabytes, and what it shows was once in such a file; a small file that unpacks to more is none.
EXHIBIT_BYTES = 512 * 2**20
# Rows that a byte of a parquet file can stand for: our tables take some bytes a row, columns of one value almost none.
ROWS_PER_BYTE = 100
FEW_ROWS = 1_000_000  # which are read without a look at the file's size


def check_file(file: Path, digest: str | None) -> None:
    """Raise FileNotFoundError or ValueError if a file is missing, no file, or (where its hash is known) altered."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: make the report again")
    if not file.is_file():
        raise ValueError(f"{file} is damaged (a folder, not a file): make the report again")
    if digest is not None and sha256_of_file(file) != digest:
        raise ValueError(f"{file} is damaged (its content is not what was written): make the report again")


def check_exhibits(file: Path) -> None:
    """Raise ValueError for an archive that unpacks to more than EXHIBIT_BYTES."""
    try:
        with zipfile.ZipFile(file) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{file} is damaged ({error}): make the report again") from error
    if size > EXHIBIT_BYTES:
        raise ValueError(f"{file} unpacks to {size} bytes (at most {EXHIBIT_BYTES} are read): make the report again")


def read_table(file: Path) -> pd.DataFrame:
    """A parquet file of a plausible number of rows.

    Raises:
        OSError, ValueError: it is damaged, or says that it holds more.
    """
    from pyarrow import parquet

    with file.open("rb") as stream:  # not its path: pyarrow takes only those that are UTF-8
        rows = parquet.read_metadata(stream).num_rows
        if rows > max(FEW_ROWS, ROWS_PER_BYTE * file.stat().st_size):
            raise ValueError(f"it says {rows} rows, in {file.stat().st_size} bytes")
        stream.seek(0)
        return pd.read_parquet(stream)


def hashes_of(folder: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 of files by name."""
    return {name: sha256_of_file(folder / name) for name in names}


def unlisted(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Tables in a report's folder that the report does not name."""
    return sorted(p.name for p in folder.glob("[!.]*.parquet") if p.name not in files)
