"""The files that a model is read from: what they are, by hash, and that they stay so while they are read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ln_probe.analyses.machinery.files import FileError, sha256_of_file
from ln_probe.loading.folder import Checkpoint

_CONFIG_FILES = ("*.json", "*.txt", "*.model", "*.jinja")  # beside the weights: configuration and tokenizer


class ChangedError(ValueError):
    """A file is not any more what it was when the work began."""


def files_of_checkpoint(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Weights, configuration and tokenizer of a Hugging Face folder."""
    beside = {p for pattern in _CONFIG_FILES for p in checkpoint.folder.glob(pattern)} - set(checkpoint.weights)
    return (*checkpoint.weights, *sorted(p for p in beside if p.is_file()))


def files_of_lab_run(folder: Path, step: int | None) -> tuple[Path, ...]:
    """Weights, description, tokenizer and loss-optimal constants of a lab run.

    Raises:
        FileNotFoundError: it has no model of that step.
    """
    from ln_probe.analyses.lab.run_folder import weights_of

    beside = (folder / "lab.json", folder / "tokenizer.json", folder / "optimal.json")
    return (weights_of(folder, step), *(p for p in beside if p.is_file()))


def hashes(files: Sequence[Path]) -> dict[Path, str]:
    """The SHA-256 of each file; empty for one that cannot be read."""
    found = {}
    for file in files:
        try:
            found[file] = sha256_of_file(file)
        except (OSError, FileError):
            found[file] = ""
    return found


def combined(found: dict[Path, str]) -> str:
    """One hash of several files: of a line `name hash` for each, in order of name."""
    lines = sorted(os.fsencode(f"{path.name} {digest}\n") for path, digest in found.items())
    return hashlib.sha256(b"".join(lines)).hexdigest()


@contextmanager
def unchanged(files: Sequence[Path]) -> Iterator[dict[Path, str]]:
    """The files' hashes, taken before the block and again after it.

    Raises:
        ChangedError: a file was written, replaced or removed meanwhile (names the first).
    """
    before = hashes(files)
    yield before
    after = hashes(files)
    for file in files:
        if after[file] != before[file]:
            now = f"now {after[file][:16]}…" if after[file] else "now it cannot be read"
            raise ChangedError(
                f"{file} changed while it was being read (SHA-256 {before[file][:16]}… before, {now}). Wait until "
                "nobody writes it, and load it again."
            )
