"""What a Hugging Face folder or a GGUF file holds, checked before anything is built from it."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ln_probe.analyses.files import FileError, read_json

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_PICKLE_SUFFIXES = (".pt", ".pth")

# What the Hugging Face trainer leaves next to the weights; none of these is a state dict of the model.
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
    """A folder that can be loaded: config.json as it stands, the files of its weights in order of name, whether they
    are pickles (which may be read), and whether it holds the files of a tokenizer."""

    folder: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    pickled: bool
    has_tokenizer: bool


def inspect_folder(folder: Path, *, allow_pickle: bool) -> Checkpoint:
    """Check that an existing folder is a Hugging Face checkpoint that can be read safely, and say what is in it.

    Raises:
        FileNotFoundError: no config.json, no weights, or a shard that the index names is missing.
        ValueError: config.json is not JSON or describes what cannot be loaded (quantized weights, an
            adapter, custom code), weights only as pickles without `allow_pickle`, or a weight file
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
        # A path here would make the loader read the file that it names.
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
    return some((child.name for child in folder.iterdir()), 8) or "nothing"


def some(names: Iterable[str], most: int = 4) -> str:
    """The first names in order of the alphabet, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


# What the libraries loop over, or make a list of: with 1e9 of them, building a model takes hours before it fails. The
# deepest models have some hundreds of layers, the widest some hundreds of experts and heads.
COUNTS_AT_MOST = 10_000
# Classes of a classification head: a dictionary is made of them.
LABELS_AT_MOST = 100_000
# Entries of a vocabulary, and so ids in one: 64 times the largest published.
VOCABULARY_AT_MOST = 2**24

_LAYERS = re.compile(r"n_layers?|num_layers|num_hidden_layers|block_count|((num_)?(en|de)coder_layers)")
_COUNT = re.compile(
    r"(num|n)_(\w+_)?(layers?|blocks?|experts?|heads?|groups)|\w*_layers|(\w+_)?(block|head|expert)_count(_kv)?|depth"
)
_LABELS = "num_labels"
_VOCABULARY = re.compile(r"(.*_token_id|(.*_)?vocab_size)")


def check_numbers(values: Mapping[str, Any], where: str, tensors: int | None = None) -> None:
    """Raise ValueError for a number that no model can have.

    Args:
        values: by name, as in config.json or a GGUF file; objects inside objects too.
        where: the file, for errors.
        tensors: how many the weights are, if that is known: every layer has one at least.
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            check_numbers(value, where, tensors)
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        limit = _limit(name.rpartition(".")[2])
        if limit is not None and value > limit:
            raise ValueError(
                f"{where} says {name} = {_short(value)}, and no model has more than {limit}: it is damaged."
            )
        if tensors is not None and _LAYERS.fullmatch(name.rpartition(".")[2]) and value > tensors:
            raise ValueError(
                f"{where} says {name} = {value}, and the weights are {tensors} tensors: they do not belong together, "
                "or the file is damaged."
            )


def _limit(name: str) -> int | None:
    if name == _LABELS:
        return LABELS_AT_MOST
    if _VOCABULARY.fullmatch(name):
        return VOCABULARY_AT_MOST
    return COUNTS_AT_MOST if _COUNT.fullmatch(name) or _LAYERS.fullmatch(name) else None


def _short(value: int) -> str:
    return str(value) if value.bit_length() < 100 else f"a number of {value.bit_length()} bits"


def check_tokenizer(file: Path) -> None:
    """Raise ValueError if a tokenizer.json is no JSON, or gives ids that no vocabulary has: they are listed up to."""
    held = read_json(file)
    model = held.get("model") if isinstance(held, Mapping) else None
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    added = held.get("added_tokens") if isinstance(held, Mapping) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else []
    ids += [a.get("id") for a in added if isinstance(a, Mapping)] if isinstance(added, list) else []
    wrong = next((i for i in ids if isinstance(i, int) and i >= VOCABULARY_AT_MOST), None)
    if wrong is not None:
        raise ValueError(f"{file} gives the token id {_short(wrong)}, and no vocabulary has one: it is damaged.")


MAGIC = b"GGUF"
VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_DIMENSIONS_AT_MOST = 8  # ggml has 4
_NESTED_AT_MOST = 2


class _HeaderError(ValueError):
    pass


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> int | float | bool:
        size = struct.calcsize(code)
        self.skip(size)
        value: int | float | bool = struct.unpack_from("<" + code, self.data, self.at - size)[0]
        return value

    def count(self, smallest: int) -> int:
        """A 64-bit count of things of at least `smallest` bytes each, which the rest of the file has room for."""
        value = int(self.number("Q"))
        if value * smallest > len(self.data) - self.at:
            raise _HeaderError(f"it counts {value} entries at byte {self.at - 8}, and ends at {len(self.data)}")
        return value

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise _HeaderError(f"it ends at byte {len(self.data)}, in the middle of its header")

    def string(self) -> str:
        length = self.count(1)
        self.skip(length)
        return self.data[self.at - length : self.at].decode("utf-8", "replace")

    def value(self, kind: int, nested: int = 0) -> int | float | bool | None:
        """A number; None for text and lists, which are passed over."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            self.skip(self.count(1))
        elif kind == _ARRAY and nested < _NESTED_AT_MOST:
            inner = int(self.number("I"))
            if inner in _NUMBERS:
                size = struct.calcsize(_NUMBERS[inner])
                self.skip(size * self.count(size))
            else:
                for _ in range(self.count(8)):
                    self.value(inner, nested + 1)
        else:
            raise _HeaderError(f"a value at byte {self.at} is of no type that there is ({kind})")
        return None


def check_header(file: Path) -> int:
    """How many numbers a GGUF file's weights are; ValueError if its header does not fit into the file, or says numbers
    that no model has."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(MAGIC))
        if start != MAGIC:
            raise ValueError(
                f"{file} is not a GGUF file (it begins with {start!r}, expected {MAGIC!r}). Copy it again."
            )
        try:
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                numbers, tensors, elements = _walk(_Reader(data), size)
        except _HeaderError as error:
            raise ValueError(f"{file} is not a GGUF file that can be read: {error}. Copy it again.") from error
    check_numbers(numbers, str(file), tensors)
    return elements


def _walk(reader: _Reader, size: int) -> tuple[dict[str, int | float | bool], int, int]:
    reader.skip(len(MAGIC))
    version = reader.number("I")
    if version not in VERSIONS:
        raise _HeaderError(f"its version is {version}, known are {', '.join(map(str, VERSIONS))}")
    tensors = int(reader.number("Q"))
    numbers: dict[str, int | float | bool] = {}
    for _ in range(reader.count(13)):  # a name's length, a type, a value of one byte
        name = reader.string()
        value = reader.value(int(reader.number("I")))
        if value is not None:
            numbers[name] = value
    if tensors * 24 > size - reader.at:  # a name's length, dimensions, a type, an offset
        raise _HeaderError(f"it counts {tensors} tensors, in {size} bytes")
    total = 0
    for _ in range(tensors):
        name = reader.string()
        dimensions = int(reader.number("I"))
        if dimensions > _DIMENSIONS_AT_MOST:
            raise _HeaderError(f"tensor {name[:60]!r} has {dimensions} dimensions")
        elements = 1
        for _ in range(dimensions):
            elements *= int(reader.number("Q"))
        if elements > 8 * size:  # no format has less than a bit for each
            raise _HeaderError(f"tensor {name[:60]!r} has {elements} elements, in a file of {size} bytes")
        reader.skip(4 + 8)
        total += elements
    return numbers, tensors, total
