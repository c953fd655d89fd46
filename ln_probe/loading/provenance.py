"""Where a model came from: the record of every loaded model, and the hashes of the files that were read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ln_probe.analyses.arguments import received
from ln_probe.analyses.files import FileError, sha256_of_file
from ln_probe.loading.folder import Checkpoint

if TYPE_CHECKING:
    from torch import nn

# For models in memory: transformers draws a head that a checkpoint lacks at random, and the model does not show it.
UNKNOWN_HEAD = "whether its head was in a checkpoint cannot be known"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model came from and how it was loaded.

    Attributes:
        name: the name or path as it was given.
        kind: ``hub``, ``folder``, ``gguf``, ``lab``, ``bundled``, or ``object`` (not loaded by us).
        revision: the revision asked for (hub models and lab runs).
        commit: the hub's commit the revision stood for.
        weights_sha256: SHA-256 of the weight file; of several files, the SHA-256 of the lines that
            ``sha256sum`` prints for them in order of name; of a model not loaded by us, of its state
            dict (`sha256_of_state`).
        inputs_sha256: SHA-256 of the lines ``name hash`` of every file that was read (weights, configuration,
            tokenizer), which were the same before reading and after; None for a model not loaded by us.
        deviations: those notes that report that something else than asked was loaded: without layers that the weights
            hold, or without the tokenizer.
        architecture: the Hugging Face class name, or for a lab model or an unknown one its own class name.
        world: ``HookedTransformer``, ``TransformerBridge``, ``lab``, or the class name of something else.
        dtype: the format of the weights in memory, ``float32`` and so on.
        transformer_lens_version: the installed one.
        processing: what was done to the weights on request (``fold_ln``, …); empty for weights as trained.
        logits_max_difference: largest absolute difference from the Hugging Face model's logits on a few
            tokens, divided by the largest absolute logit; None where there was nothing to compare with.
        notes: for the reader of the results, in sentences.
    """

    name: str
    kind: str
    revision: str | None = None
    commit: str | None = None
    weights_sha256: str | None
    architecture: str
    world: str = ""
    dtype: str
    transformer_lens_version: str = field(default_factory=partial(version, "transformer-lens"))
    processing: tuple[str, ...] = ()
    logits_max_difference: float | None = None
    notes: tuple[str, ...] = ()
    inputs_sha256: str | None = None
    deviations: tuple[str, ...] = ()


# Not an attribute of the models: nn.Module's attribute lookup, state dicts and copies stay untouched.
_SOURCES: WeakKeyDictionary[nn.Module, ModelSource] = WeakKeyDictionary()


def remember(model: nn.Module, source: ModelSource, **loaded: Any) -> None:
    """Record where `model` came from, for as long as it lives; `loaded`: what loading found out."""
    _SOURCES[model] = replace(source, **loaded)


def source_of(model: nn.Module) -> ModelSource:
    """Return where `model` came from.

    For a model that `load_model` did not load, that is its class, its dtype, and a hash of its state dict (which reads
    all its weights).

    Raises:
        TypeError: not a model.

    Example:
        >>> ln_probe.source_of(model).name
    """
    if isinstance(model, type) or not callable(getattr(model, "parameters", None)):
        raise TypeError(f"source_of takes a model, got {received(model)}: ln_probe.load_model loads one")
    known = _SOURCES.get(model)
    if known is not None:
        return known
    kind = type(model).__name__
    config = getattr(model, "cfg", None)
    architecture = getattr(config, "original_architecture", None) or getattr(config, "architecture", None) or kind
    parameter = next(model.parameters(), None)
    return ModelSource(
        name=str(getattr(config, "model_name", None) or kind),
        kind="object",
        weights_sha256=sha256_of_state(model),
        architecture=str(architecture),
        world=kind,
        dtype="none" if parameter is None else str(parameter.dtype).removeprefix("torch."),
        notes=(f"not loaded by ln_probe: name, dtype and hash were read from the model itself; {UNKNOWN_HEAD}",),
    )


def sha256_of_hashes(hashes: Mapping[Path, str]) -> str:
    """Return one file's hash as it is; of several, the SHA-256 of their ``sha256sum`` lines in order of name."""
    if len(hashes) == 1:
        return next(iter(hashes.values()))
    by_name = {path.name: digest for path, digest in hashes.items()}
    lines = "".join(f"{by_name[name]}  {name}\n" for name in sorted(by_name))
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


def sha256_of_state(model: nn.Module) -> str:
    """Return the SHA-256 of a line per tensor of the state dict, by name: name, dtype, shape, SHA-256 of its bytes.

    Tensors are hashed in parallel: hashing hundreds of megabytes takes as long as a forward pass.
    """
    import torch

    def line(name: str) -> str:
        tensor = state[name]
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
        return f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n"

    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        lines = "".join(pool.map(line, sorted(state)))
    return hashlib.sha256(lines.encode()).hexdigest()


class ChangedError(ValueError):
    """A file changed after the work began."""


def files_of_checkpoint(checkpoint: Checkpoint) -> tuple[Path, ...]:
    """Return the weights, configuration and tokenizer of a Hugging Face folder."""
    patterns = ("*.json", "*.txt", "*.model", "*.jinja")
    beside = {p for pattern in patterns for p in checkpoint.folder.glob(pattern)} - set(checkpoint.weights)
    return (*checkpoint.weights, *sorted(p for p in beside if p.is_file()))


def files_of_lab_run(folder: Path, step: int | None) -> tuple[Path, ...]:
    """Return the weights, description, tokenizer and loss-optimal constants of a lab run.

    Raises:
        FileNotFoundError: it has no model of that step.
    """
    from ln_probe.analyses.lab.run_folder import weights_of

    beside = (folder / "lab.json", folder / "tokenizer.json", folder / "optimal.json")
    return (weights_of(folder, step), *(p for p in beside if p.is_file()))


def hashes(files: Sequence[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file; empty for one that cannot be read."""
    found = {}
    for file in files:
        try:
            found[file] = sha256_of_file(file)
        except (OSError, FileError):
            found[file] = ""
    return found


def combined(found: dict[Path, str]) -> str:
    """Return one hash of several files: of a line `name hash` for each, in order of name."""
    lines = sorted(os.fsencode(f"{path.name} {digest}\n") for path, digest in found.items())
    return hashlib.sha256(b"".join(lines)).hexdigest()


@contextmanager
def unchanged(files: Sequence[Path]) -> Iterator[dict[Path, str]]:
    """Give the files' hashes, and compare them again after the block.

    Raises:
        ChangedError: a file was written, replaced or removed during the block (names the first).
    """
    before = hashes(files)
    yield before
    after = hashes(files)
    for file in files:
        if after[file] != before[file]:
            now = f"now {after[file][:16]}…" if after[file] else "now it cannot be read"
            raise ChangedError(
                f"{file} changed while it was being read (SHA-256 {before[file][:16]}… before, {now}). Wait until "
                "it is complete, and load it again."
            )
