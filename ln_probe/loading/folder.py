"""What a Hugging Face folder or a GGUF file holds, checked before anything is built from it."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ln_probe.analyses.files import FileError, read_json

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")

# Any one of these is a whole tokenizer, or (pairs) its two halves.
_TOKENIZERS = (
    ("tokenizer.json",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("tokenizer.model",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
)

PICKLE_WARNING = (
    "A pickle can run code when it is opened, so it is read only on request: pass allow_pickle=True "
    "(--allow-pickle) if you know where it came from; it is then read with weights_only=True, which admits "
    "tensors and nothing else."
)


@dataclass(frozen=True)
class Checkpoint:
    """A folder that can be loaded.

    Attributes:
        config: config.json as it stands.
        weights: the files, in order of name; pickled: whether they are pickles (which may be read).
        parameters: how many numbers the weights are; of pickles, which are not opened, from their size.
    """

    folder: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    pickled: bool
    parameters: int


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
    for file in weights:
        _check_file(file)
    if pickled:
        dtype = str(config.get("dtype", config.get("torch_dtype")))
        each = {"float64": 8, "bfloat16": 2, "float16": 2}.get(dtype, 4)
        tensors, parameters = None, sum(file.stat().st_size // each for file in weights)
    else:
        shapes = [shape for file in weights for shape in shapes_of(file)]
        tensors, parameters = len(shapes), sum(map(math.prod, shapes))
    check_numbers(config, str(folder / "config.json"), tensors)
    return Checkpoint(folder, config, weights, pickled, parameters)


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds the files of a tokenizer (transformers invents an empty one if not)."""
    return any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS)


def _check_no_adapter(folder: Path) -> None:
    """Raise ValueError for a folder with an adapter, which transformers would follow to another model."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{folder} holds a PEFT adapter (adapter_config.json), which is not a whole model. Merge it into "
            "its base model (peft: merge_and_unload, then save_pretrained) and give that folder."
        )


def _read_config(folder: Path) -> Mapping[str, Any]:
    _check_no_adapter(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder (found: {_listing(folder)}). Give "
            "the folder that save_pretrained wrote: config.json and model.safetensors side by side."
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
    """The files of a folder's weights, and whether they are pickles."""
    # What the Hugging Face trainer leaves next to the weights is no state dict of the model.
    leftovers = ("optimizer", "scheduler", "rng_state", "scaler", "training_args")
    loose = sorted(f.name for f in folder.iterdir() if f.suffix in (".pt", ".pth") and not f.stem.startswith(leftovers))
    found = [name for name in (*SAFETENSORS, *PICKLES) if (folder / name).is_file()][:1] or loose
    if not found:
        raise FileNotFoundError(
            f"{folder} has a config.json but no weights. Looked for: {', '.join([*SAFETENSORS, *PICKLES])}, *.pt, "
            f"*.pth (found: {_listing(folder)})."
        )
    pickled = found[0] not in SAFETENSORS
    if pickled and not allow_pickle:
        raise ValueError(f"{folder} holds its weights only as a pickle ({', '.join(found)}). {PICKLE_WARNING}")
    if len(found) > 1:
        raise ValueError(
            f"{folder} holds several pickles ({', '.join(found)}), and none is called {PICKLES[0]}: leave the one that "
            "holds the model's state dict."
        )
    file = folder / found[0]
    return _shards(file) if file.name in (SAFETENSORS[1], PICKLES[1]) else (file,), pickled


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{index} is not an index of weight files (expected an object with a weight_map from tensor names to file "
            f"names): {error!r}. Copy the file again."
        ) from error
    for name in names:
        # A path here would make the loader read the file that it names. No file system has names of 256 characters.
        if not isinstance(name, str) or name != Path(name).name or "\\" in name or len(name) > 255:
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


def _check_file(file: Path) -> None:
    """Raise ValueError for an empty file of weights, or a pointer that git has in its place."""
    with file.open("rb") as stream:
        start = stream.read(23)
    if not start:
        raise ValueError(f"{file} is empty. Copy the file again.")
    if start == b"version https://git-lfs":
        size = file.stat().st_size
        raise ValueError(f"{file} is a Git LFS pointer of {size} bytes, not the weights: run `git lfs pull`.")


def shapes_of(file: Path) -> list[list[int]]:
    """The shape of every tensor of a safetensors file; ValueError if it is truncated or corrupt."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            return [tensors.get_slice(name).get_shape() for name in list(tensors.keys())]
    except SafetensorError as error:
        raise ValueError(
            f"{file} ({file.stat().st_size} bytes) is truncated or corrupt: {error}. Copy or download the file again."
        ) from error


def _listing(folder: Path) -> str:
    return some((child.name for child in folder.iterdir()), 8) or "nothing"


def some(names: Iterable[str], most: int = 4) -> str:
    """The first names in order of the alphabet, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:most]) + (f" and {len(ordered) - most} more" if len(ordered) > most else "")


VOCABULARY_AT_MOST = 2**24  # 64 times the largest published
_LAYERS = r"n_layers?|num_layers|num_hidden_layers|block_count|((num_)?(en|de)coder_layers)"
# The most of what a name counts. The libraries loop over it, or make a list of it: with 1e9 layers, building a model
# takes hours before it fails. The deepest models have some hundreds of layers, the widest some hundreds of experts and
# heads; a dictionary is made of the labels of a classifier.
_AT_MOST = (
    ("num_labels", 100_000),
    (r".*_token_id|(.*_)?vocab_size", VOCABULARY_AT_MOST),
    (rf"{_LAYERS}|(num|n)_(\w+_)?(layers?|blocks?|experts?|heads?|groups)|\w*_layers|depth", 10_000),
    (r"(\w+_)?(block|head|expert)_count(_kv)?", 10_000),
)


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
        last = name.rpartition(".")[2]
        limit = next((most for pattern, most in _AT_MOST if re.fullmatch(pattern, last)), math.inf)
        if value > limit:
            raise ValueError(
                f"{where} says {name} = {_short(value)}, and no model has more than {limit}: it is damaged."
            )
        if tensors is not None and value > tensors and re.fullmatch(_LAYERS, last):
            raise ValueError(
                f"{where} says {name} = {value}, and the weights are {tensors} tensors: they do not belong together, "
                "or the file is damaged."
            )


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


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Header:
    """The header of a GGUF file, read from its beginning; ValueError where it does not fit into the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> bytes:
        self.at += size
        if self.at > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, in the middle of its header")
        return self.data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, smallest: int) -> int:
        """A 64-bit count of things of at least `smallest` bytes each, which the rest of the file has room for."""
        value = int(self.number("Q"))
        if value * smallest > len(self.data) - self.at:
            raise ValueError(f"it counts {value} entries at byte {self.at - 8}, and ends at {len(self.data)}")
        return value

    def string(self) -> str:
        return self.take(self.count(1)).decode("utf-8", "replace")

    def value(self, kind: int, nested: int = 0) -> int | float | bool | None:
        """A number; None for text and lists (of at most two levels), which are passed over."""
        if kind in _NUMBERS:
            number: int | float | bool = self.number(_NUMBERS[kind])
            return number
        if kind == _STRING:
            self.take(self.count(1))
        elif kind == _ARRAY and nested < 2:
            inner = self.number("I")
            if inner in _NUMBERS:
                size = struct.calcsize("<" + _NUMBERS[inner])
                self.take(size * self.count(size))
            else:
                for _ in range(self.count(8)):
                    self.value(inner, nested + 1)
        else:
            raise ValueError(f"a value at byte {self.at} is of no type that there is ({kind})")
        return None


def check_header(file: Path) -> int:
    """How many numbers a GGUF file's weights are; ValueError if its header does not fit into the file, or says numbers
    that no model has, or if there is an adapter next to it."""
    _check_no_adapter(file.parent)
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            numbers, tensors, parameters = _walk(_Header(data))
    except ValueError as error:  # of an empty file, too
        raise ValueError(f"{file} is not a GGUF file that can be read: {error}. Copy it again.") from error
    check_numbers(numbers, str(file), tensors)
    return parameters


def _walk(header: _Header) -> tuple[dict[str, int | float | bool], int, int]:
    """The numbers that a header names, how many tensors there are, and how many numbers they hold."""
    size = len(header.data)
    if (start := header.take(4)) != b"GGUF":
        raise ValueError(f"it begins with {start!r}, expected b'GGUF'")
    if (version := header.number("I")) not in (2, 3):
        raise ValueError(f"its version is {version}, known are 2, 3")
    tensors = header.number("Q")
    numbers: dict[str, int | float | bool] = {}
    for _ in range(header.count(13)):  # a name's length, a type, a value of one byte
        name = header.string()
        value = header.value(header.number("I"))
        if value is not None:
            numbers[name] = value
    if tensors * 24 > size - header.at:  # a name's length, dimensions, a type, an offset
        raise ValueError(f"it counts {tensors} tensors, in {size} bytes")
    total = 0
    for _ in range(tensors):
        name, dimensions = header.string(), header.number("I")
        if dimensions > 8:  # ggml has 4
            raise ValueError(f"tensor {name[:60]!r} has {dimensions} dimensions")
        elements = math.prod(header.number("Q") for _ in range(dimensions))
        if elements > 8 * size:  # no format has less than a bit for each
            raise ValueError(f"tensor {name[:60]!r} has {elements} elements, in a file of {size} bytes")
        header.take(4 + 8)
        total += elements
    return numbers, tensors, total
