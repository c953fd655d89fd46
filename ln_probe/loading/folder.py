"""What a Hugging Face folder holds, checked before anything is built from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ln_probe.analyses.machinery.files import FileError, read_json
from ln_probe.loading.bounds import check_numbers

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLE_SUFFIXES = (".pt", ".pth")

# What the Hugging Face trainer leaves beside the weights; none of these is a state dict of the model.
_TRAINER_LEFTOVERS = ("optimizer", "scheduler", "rng_state", "scaler", "training_args")

# Any one of these is a whole tokenizer, or (pairs) its two halves.
_TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)

_LONGEST_NAME = 255  # of a file, on any file system there is

_LFS_POINTER = b"version https://git-lfs"

PICKLE_WARNING = (
    "A pickle can run code when it is opened, so it is read only on request: pass allow_pickle=True "
    "(--allow-pickle) if you know where it came from; it is then read with weights_only=True, which admits "
    "tensors and nothing else."
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that can be loaded: its config, the weight files that will be read, and its tokenizer.

    Attributes:
        folder: where it is.
        config: config.json as it stands.
        weights: the files that hold tensors, in order of name.
        pickled: the weights are pickles (and may be read).
        has_tokenizer: the folder holds the files of a tokenizer.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    pickled: bool
    has_tokenizer: bool


def inspect_folder(folder: Path, *, allow_pickle: bool) -> Checkpoint:
    """Check that `folder` is a Hugging Face checkpoint that can be read safely, and say what is in it.

    Args:
        folder: an existing folder.
        allow_pickle: whether weights in a pickle may be read.

    Raises:
        FileNotFoundError: no config.json, no weights, or a shard that the index names is missing.
        ValueError: config.json is not JSON or describes what cannot be loaded (quantized weights, an
            adapter, code of its own), weights only as pickles without `allow_pickle`, or a weight file
            that is truncated, corrupt, or outside the folder.
    """
    config = _read_config(folder)
    weights, pickled = _weight_files(folder, allow_pickle=allow_pickle)
    tensors = sum(_check_weight_file(file, pickled=pickled) for file in weights)
    check_numbers(config, str(folder / "config.json"), None if pickled else tensors)
    return Checkpoint(folder, config, weights, pickled, has_tokenizer(folder))


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds the files of a tokenizer (transformers invents an empty one if not)."""
    return any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS)


def _read_config(folder: Path) -> Mapping[str, Any]:
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds a PEFT adapter (adapter_config.json), which is not a whole model. Merge it into "
            "its base model (peft: merge_and_unload, then save_pretrained) and give that folder."
        )
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder (found: "
            f"{_listing(folder)}). "
            "Give the folder that save_pretrained wrote: config.json and model.safetensors side by side."
        )
    try:
        config = read_json(path)
    except (OSError, FileError) as error:
        said = str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path} is not valid JSON: {said}. Copy the file again.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a {type(config).__name__}, expected an object with a model_type.")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"{folder} holds quantized weights (quantization_config in config.json, method {method!r}). "
            "What a norm does to the keys would be measured on packed numbers: give a folder with plain "
            "float weights, or a .gguf file, whose weights are unpacked on loading."
        )
    return config


def _weight_files(folder: Path, *, allow_pickle: bool) -> tuple[tuple[Path, ...], bool]:
    single, index = (folder / name for name in SAFETENSORS)
    if single.is_file():
        return (single,), False
    if index.is_file():
        return _shards(index), False

    single, index = (folder / name for name in PICKLES)
    loose = sorted(
        file
        for file in folder.iterdir()
        if file.suffix in _PICKLE_SUFFIXES and not file.stem.startswith(_TRAINER_LEFTOVERS)
    )
    found = [file for file in (single, index) if file.is_file()] or loose
    if not found:
        looked_for = ", ".join([*SAFETENSORS, *PICKLES])
        raise FileNotFoundError(
            f"{folder} has a config.json but no weights. Looked for: {looked_for}, *.pt, *.pth "
            f"(found: {_listing(folder)})."
        )
    if not allow_pickle:
        raise ValueError(
            f"{folder} holds its weights only as a pickle ({', '.join(f.name for f in found)}). {PICKLE_WARNING}"
        )
    if found[0] == index:
        return _shards(index), True
    if found == loose and len(loose) > 1:
        raise ValueError(
            f"{folder} holds several pickles ({', '.join(file.name for file in loose)}), and none is called "
            f"{PICKLES[0]}: leave the one that holds the model's state dict."
        )
    return (found[0],), True


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        weight_map = read_json(index)["weight_map"]
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of weight files (expected an object with a weight_map from tensor "
            f"names to file names): {error!r}. Copy the file again."
        ) from error
    for name in names:
        # A path here would make the loader read whatever it names.
        if not isinstance(name, str) or name != Path(name).name or "\\" in name or len(name) > _LONGEST_NAME:
            raise ValueError(f"{index} names {str(name)[:80]!r}, which is not a file in its own folder: refused.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{index.parent} lacks {len(missing)} of the {len(names)} weight files that {index.name} names: "
            f"{', '.join(missing[:5])}. Copy the missing files."
        )
    if not names:
        raise ValueError(f"{index} names no weight files.")
    return tuple(index.parent / name for name in names)


def _check_weight_file(file: Path, *, pickled: bool) -> int:
    """Raise ValueError for a file that cannot be read; the number of its tensors (0: not known)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_POINTER))
    if size == 0:
        raise ValueError(f"{file} is empty. Copy the file again.")
    if start == _LFS_POINTER:
        raise ValueError(f"{file} is a Git LFS pointer of {size} bytes, not the weights: run `git lfs pull`.")
    if pickled:
        return 0
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return len(list(tensors.keys()))
    except SafetensorError as error:
        raise ValueError(
            f"{file} ({size} bytes) is truncated or corrupt: {error}. Copy or download the file again."
        ) from error


def parameters_of(weights: Sequence[Path], pickled_dtype: str = "") -> int:
    """How many numbers weight files hold.

    Args:
        weights: checked files.
        pickled_dtype: the format of those in pickles, which are not opened; anything else than a format: float32.

    Raises:
        ValueError: a file is truncated or corrupt.
    """
    from safetensors import SafetensorError, safe_open

    total = 0
    for file in weights:
        if file.suffix != ".safetensors":
            total += file.stat().st_size // {"float64": 8, "bfloat16": 2, "float16": 2}.get(pickled_dtype, 4)
            continue
        try:
            with safe_open(file, framework="numpy") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in list(tensors.keys()))
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read ({error}): it is truncated or corrupt") from error
    return total


def _listing(folder: Path) -> str:
    names = sorted(child.name for child in folder.iterdir())
    if not names:
        return "nothing"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
