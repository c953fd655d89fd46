"""Where a model came from: the record of every loaded model, and the hashes of its weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ln_probe.analyses.text import received

if TYPE_CHECKING:
    from torch import nn

# For models in memory: transformers draws a head that a checkpoint lacks at random, and the model does not show it.
UNKNOWN_HEAD = "whether its head was in a checkpoint cannot be known"


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model came from and how it was loaded.

    Attributes:
        name: the name or path as it was given, without a revision.
        kind: ``hub``, ``folder``, ``gguf``, ``lab``, ``bundled``, or, of a model that `load_model` did not load,
            ``memory`` (a Hugging Face model) or ``object``.
        revision: the revision asked for (hub models and lab runs).
        commit: the hub's commit the revision stood for.
        weights_sha256: SHA-256 of the weight file; of several files, the SHA-256 of the lines that
            ``sha256sum`` prints for them in order of name; of a lab model and of a model not loaded by us,
            of its state dict (`sha256_of_state`).
        architecture: the Hugging Face class name, or for a lab model or an unknown one its own class name.
        world: ``HookedTransformer``, ``TransformerBridge``, ``lab``, or the class name of something else.
        dtype: the format of the weights in memory, ``float32`` and so on.
        transformer_lens_version: the installed one.
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
    logits_max_difference: float | None = None
    notes: tuple[str, ...] = ()


# Not an attribute of the models: nn.Module's attribute lookup, state dicts and copies stay untouched.
_SOURCES: WeakKeyDictionary[nn.Module, ModelSource] = WeakKeyDictionary()


def remember(model: nn.Module, source: ModelSource, **loaded: Any) -> None:
    """Record where `model` came from, for as long as it lives; `loaded`: fields that loading has determined."""
    _SOURCES[model] = replace(source, **loaded)


def source_of(model: nn.Module) -> ModelSource:
    """Return where `model` came from.

    For a model that `load_model` did not load, that is its class, its dtype, and a hash of its state dict (which reads
    all its weights).

    Raises:
        TypeError: not a model.

    Example:
        >>> ln_probe.models.source_of(model).name
    """
    if isinstance(model, type) or not callable(getattr(model, "parameters", None)):
        raise TypeError(f"source_of takes a model, got {received(model)}: ln_probe.load_model loads one")
    if model in _SOURCES:
        return _SOURCES[model]
    world, config = type(model).__name__, getattr(model, "cfg", None)
    architecture = getattr(config, "original_architecture", None) or getattr(config, "architecture", None) or world
    name, dtype = getattr(config, "model_name", None) or world, getattr(next(model.parameters(), None), "dtype", "none")
    note = f"not loaded by ln_probe: name, dtype and hash were read from the model itself; {UNKNOWN_HEAD}"
    difference = vars(model).get("logits_difference")  # of a Hugging Face model in memory
    if difference is not None:
        original: Any = getattr(model, "original_model").config  # noqa: B009 - of a bridge
        name = getattr(original, "_name_or_path", "") or architecture
        note = f"a Hugging Face model in memory, wrapped in a bridge for the measurement; {UNKNOWN_HEAD}"
    return ModelSource(
        name=str(name),
        kind="object" if difference is None else "memory",
        weights_sha256=sha256_of_state(model),
        architecture=str(architecture),
        world=world,
        dtype=str(dtype).removeprefix("torch."),
        logits_max_difference=difference,
        notes=(note,),
    )


def sha256_of_files(files: Sequence[Path]) -> str:
    """Return one file's SHA-256; of several files, that of their ``sha256sum`` lines in order of name."""
    digests = {}
    for path in files:
        with path.open("rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(os.fsencode(lines)).hexdigest()


def sha256_of_state(model: nn.Module) -> str:
    """Return the SHA-256 of a line per tensor of the state dict, by name: name, dtype, shape, SHA-256 of its bytes.

    Tensors are hashed in parallel: hashing hundreds of megabytes takes as long as a forward pass. On a GPU they are
    copied in streams of their own, so that a forward pass beside this does not wait for the copies.
    """
    import torch

    def line(name: str) -> str:
        tensor = state[name]
        with torch.cuda.stream(streams.get(tensor.device)):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest = hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
        return f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest}\n"

    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    streams = {device: torch.cuda.Stream(device) for device in {t.device for t in state.values() if t.is_cuda}}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        lines = "".join(pool.map(line, sorted(state)))
    return hashlib.sha256(lines.encode()).hexdigest()
