"""Tensors in a file that says what was written into it: one that was altered is noticed when it is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from ln_probe.analyses.files import write_atomically

_KEY = "ln_probe"


class DamagedTensorsError(ValueError):
    """A file of tensors is truncated, altered, or none."""


def save_tensors(tensors: Mapping[str, Tensor], path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write tensors, with a SHA-256 over names, types, shapes and numbers.

    Args:
        tensors: by name.
        path: a safetensors file, replaced as a whole.
        about: what else is to be known of them, as plain JSON; hashed with them.
    """
    held = {k: v.contiguous() for k, v in tensors.items()}
    header = {"about": dict(about or {}), "sha256": _digest(held, about or {})}
    write_atomically(path, save(held, {_KEY: json.dumps(header)}))


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What `save_tensors` wrote: the tensors, and what is to be known of them.

    A file without any header of ours (of ln_probe 0.1.0, or from elsewhere) is read as it is.

    Raises:
        FileNotFoundError: there is none.
        DamagedTensorsError: it is truncated or altered.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    try:
        content = path.read_bytes()  # not mapped into memory: whoever writes over the file does not change the tensors
        tensors = load(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")]).get("__metadata__")
        if not metadata or set(metadata) == {"format"}:  # what safetensors' own writers leave
            return tensors, {}
        header = json.loads(metadata[_KEY])
        about: dict[str, Any] = header["about"]
        whole = header["sha256"] == _digest(tensors, about)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedTensorsError(f"{path} cannot be read ({error}): it is truncated or corrupt") from error
    if not whole:
        raise DamagedTensorsError(f"{path} is damaged: its content is not what was written")
    return tensors, about


def _digest(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
