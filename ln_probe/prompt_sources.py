"""Texts and token ids in any form that a user has them in: files, folders, data sets, tensors, arrays, lists."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.arguments import received
from ln_probe.analyses.files import parse_json, read_text
from ln_probe.analyses.text import quoted

Entry = str | list[int]  # a text, or the token ids of one prompt

# Prompts that are not read: those that come with the package, and sequences sampled from the model.
BUNDLED, SAMPLED = "bundled", "sampled"
HUB_PREFIX = "hf:"
_OPTIONS = ("config", "split", "field")
_FIELDS = {"text": (str, "a text"), "tokens": (list, "a list of token ids")}  # of a line of JSON
# The largest vocabularies have some millions of entries; larger ids are other numbers, and arrays of 2³¹ would follow.
LARGEST_ID = 2**31 - 1
_SAVED = ("state.json", "dataset_dict.json")  # what Dataset.save_to_disk leaves
_DATA = (".parquet", ".arrow", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".xz", ".bz2", ".zip", ".tar")


@dataclass(frozen=True)
class DatasetName:
    """A Hugging Face data set: `hf:NAME` or a folder, with `?config=…&split=…&field=…` behind it where needed."""

    name: str
    config: str | None = None
    split: str | None = None
    field: str = "text"

    @classmethod
    def parse(cls, given: str) -> DatasetName:
        """Raises ValueError for an unknown option."""
        name, _, query = given.removeprefix(HUB_PREFIX).partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        unknown = [k for k in options if k not in _OPTIONS]
        if unknown or not name:
            raise ValueError(
                f"{given!r}: a data set is hf:NAME or a folder, with ?config=…&split=…&field=… behind it"
                + (f"; there is no option {unknown[0]!r}" if unknown else "")
            )
        return cls(name, options.get("config"), options.get("split"), options.get("field", "text"))


def is_dataset(given: str) -> bool:
    """Whether `given` names a data set (a folder, or hf:NAME) rather than a file."""
    # os.path answers False where pathlib raises (a name too long, or not a possible path at all).
    return given.startswith(HUB_PREFIX) or (not os.path.isfile(given) and os.path.isdir(given.partition("?")[0]))


def check_source(given: str) -> None:
    """Raise FileNotFoundError or ValueError for what can be seen to be wrong without reading."""
    if is_dataset(given):
        name = DatasetName.parse(given).name
        if not given.startswith(HUB_PREFIX) and not _holds_data(Path(name)):
            raise ValueError(
                f"--prompts {given!r}: no data set. A folder of prompts holds what Dataset.save_to_disk wrote, or "
                f"files of data ({', '.join(_DATA)}), itself or in its folders"
            )
    elif not os.path.exists(given):
        raise FileNotFoundError(f"no prompts file {quoted(given, 200)}")


def _holds_data(folder: Path) -> bool:
    """Whether a folder, or one of the folders in it, holds a file of data; not the root of the file system."""
    if folder.resolve() == Path(folder.resolve().anchor):
        return False
    return any(p.name in _SAVED or p.suffix in _DATA for pattern in ("*", "*/*") for p in folder.glob(pattern))


def entries(given: str | Path) -> Iterator[Entry]:
    """Yield the prompts of a `.txt` (a prompt a paragraph), `.jsonl`, `.npy` or a data set, streamed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file or data set is damaged, lacks the fields that are needed, or holds no prompts.
        ConnectionError: a data set that is not on this machine, and no network.
    """
    empty = True
    for entry in _read(str(given)):
        empty = False
        yield entry
    if empty:
        raise ValueError(f"no prompts ({given} is empty): give at least one")


def _read(given: str) -> Iterator[Entry]:
    if is_dataset(given):
        return _dataset(DatasetName.parse(given))
    check_source(given)
    path = Path(given)
    if path.suffix == ".npy":
        return _array(path)
    return _json_lines(path) if path.suffix in (".jsonl", ".json") else _paragraphs(path)


def _paragraphs(path: Path) -> Iterator[Entry]:
    words: list[str] = []
    for line in read_text(path).split("\n"):
        if line:
            words += line.split()
        elif words:
            yield " ".join(words)
            words = []
    if words:
        yield " ".join(words)


def _json_lines(path: Path) -> Iterator[Entry]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        entry = parse_json(line, where)
        held = {k: v for k, v in entry.items() if k in _FIELDS and v is not None} if isinstance(entry, dict) else {}
        if len(held) > 1:  # a text and how many tokens it has, for example
            held = {k: v for k, v in held.items() if isinstance(v, _FIELDS[k][0])} or held
        if len(held) != 1:
            more = ", and has both: leave one out" if held else ""
            raise ValueError(f'{where}: needs a "text" or a "tokens" field{more}')
        ((field, value),) = held.items()
        wanted, described = _FIELDS[field]
        if not isinstance(value, wanted):
            raise ValueError(f'{where}: "{field}" must be {described}, got {_short(value)}')
        yield value if isinstance(value, str) else _ids(value, where)


def _ids(values: object, where: str) -> list[int]:
    try:
        ids = np.asarray(values)
    except (ValueError, OverflowError) as error:  # ragged, or nothing that numpy has a type for
        raise ValueError(f"{where}: token ids must be a list of whole numbers ({error})") from error
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iuO"):
        raise ValueError(
            f"{where}: token ids must be whole numbers, one list a prompt, got {ids.dtype} {list(ids.shape)}"
        )
    found: list[int] = ids.tolist()
    for i in found:
        if not isinstance(i, int):
            raise ValueError(f"{where}: token ids must be whole numbers, one list a prompt, got {_short(i)} among them")
        if not 0 <= i <= LARGEST_ID:
            raise ValueError(f"{where}: {_short(i)} is no token id (0 … {LARGEST_ID})")
    return found


def _short(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of {value.bit_length()} bits"
    return repr(value)[:40]


def _array(path: Path) -> Iterator[Entry]:
    try:
        ids = np.atleast_2d(np.load(path, mmap_mode="r", allow_pickle=False))  # in memory row by row
    except (ValueError, OSError, EOFError, MemoryError, SyntaxError, RecursionError) as error:
        # What is in no format of NumPy's is taken for a pickle, and the advice is to read it as one.
        why = "it has another format, or holds objects" if "pickle" in str(error) else error
        raise ValueError(f"{path} is not a plain .npy file of token ids: {why}") from error
    if ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path}: token ids must be whole numbers [batch pos], got {ids.dtype} {list(ids.shape)}")
    for number, row in enumerate(ids):
        yield _ids(row, f"{path}, row {number}")


def _dataset(wanted: DatasetName) -> Iterator[Entry]:
    where = f"data set {wanted.name}"
    for number, row in enumerate(_dataset_rows(wanted, where)):
        if wanted.field not in row:
            raise ValueError(f"{where}: no field {wanted.field!r}; it has {', '.join(map(str, row))}: add ?field=…")
        value = row[wanted.field]
        if not isinstance(value, str):
            yield _ids(value, f"{where}, row {number}")
        elif value.strip():  # data sets of lines (WikiText) are full of empty ones
            yield value


def _dataset_rows(wanted: DatasetName, where: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set; errors of its library, also later ones, name the data set."""
    import datasets

    try:
        if any((Path(wanted.name) / name).is_file() for name in _SAVED):
            found = datasets.load_from_disk(wanted.name)
        else:
            options = {"streaming": True} | ({"name": wanted.config} if wanted.config else {})
            found = datasets.load_dataset(wanted.name, **options)
        yield from found[_split(list(found), wanted)] if isinstance(found, dict) else found
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ConnectionError(
            f"{where} is not on this machine and cannot be fetched ({error}): give a file or a local folder"
        ) from error
    except _SplitError:
        raise
    except Exception as error:  # a script that is not run, a damaged table, a wrong schema, …
        said = " ".join(str(error).split())[:300]
        raise ValueError(f"{where} cannot be read: {said or type(error).__name__}") from error


class _SplitError(ValueError):
    """The split that is asked for is not there."""


def _split(names: list[str], wanted: DatasetName) -> str:
    chosen = wanted.split or ("train" if "train" in names or len(names) != 1 else names[0])
    if chosen not in names:
        raise _SplitError(f"data set {wanted.name} has no split {chosen!r}; it has {', '.join(names)}: add ?split=…")
    return chosen


_MASK = "attention_mask"
_WANTED = "token ids must be whole numbers: [pos], [batch pos], or a list of whole numbers for each prompt"


@dataclass(frozen=True)
class Sampled:
    """Sequences that the model itself writes, as prompts: `count` of them; None: as many as are needed."""

    count: int | None = None


def sampled_prompts(count: int | None = None) -> Sampled:
    """Prompts that are sampled from the model itself, at temperature 1, for `ln_probe.analyze(model, prompts=…)`.

    Args:
        count: how many sequences; None: until there are enough of them and enough tokens (32 and 512).

    Raises:
        TypeError, ValueError: not a whole number, or less than one.

    Example:
        >>> ln_probe.sampled_prompts(2)
        Sampled(count=2)
        >>> ln_probe.analyze(model, ln_probe.sampled_prompts(2), max_tokens=8, probes=["causal"]).causal
    """
    if count is None:
        return Sampled()
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"sampled_prompts(count) takes the number of sequences, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"sampled_prompts(count) takes at least one sequence, got {count}")
    return Sampled(count)


def prompts_named(given: str | None, most: int | None = None) -> tuple[Any, int | None]:
    """Return what `make_prompts` takes for the words of a command line (None, "sampled", a file or a data set), and how
    many prompts it holds, which have been read; None where that depends on the model.

    Args:
        given: as typed; most: only so many of the first prompts; None: all.

    Raises:
        FileNotFoundError, ValueError, ConnectionError: as `entries`.
    """
    if given is None or given == SAMPLED:
        return (None if given is None else Sampled(most)), None
    found = list(islice(entries(given), most))
    return Path(given) if most is None and not is_dataset(given) else found, len(found)


def token_rows(given: Any, *, pad: int | None = None, ends: Sequence[int] = ()) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the token ids of every prompt, and notes on padding that was removed.

    A tensor or array [batch pos] or [pos], lists of whole numbers, ragged or not, or a tokenizer's output (a dict with
    `input_ids` and mostly an `attention_mask`).

    Args:
        given: ids in any of the forms above.
        pad: the tokenizer's padding id; trailing ones of a batch are removed if some row has none.
        ends: ids that end or begin a text: if `pad` is one of them, only a mask identifies padding.

    Raises:
        ValueError: not whole numbers, more than two dimensions, a mask that does not fit, has gaps or hides all.
        TypeError: something that holds no token ids.
    """
    if isinstance(given, Mapping):
        return _of_tokenizer(given, pad, ends)
    rows = _rows(given)
    return _unpadded(rows, pad, ends) if _rectangular(given) else (rows, ())


def _of_tokenizer(
    given: Mapping[Any, Any], pad: int | None, ends: Sequence[int]
) -> tuple[list[Tensor], tuple[str, ...]]:
    if "input_ids" not in given:
        raise ValueError(
            'a dict as prompts is a tokenizer\'s output and needs "input_ids"; this one has '
            f"{', '.join(map(str, given)) or 'nothing'}"
        )
    rows = _rows(given["input_ids"])
    if given.get("attention_mask") is None:
        return _unpadded(rows, pad, ends) if _rectangular(given["input_ids"]) else (rows, ())
    masks = _rows(given["attention_mask"], _MASK)
    if [len(r) for r in rows] != [len(m) for m in masks]:
        raise ValueError(
            "attention_mask does not fit input_ids (other lengths): give both as the tokenizer returned them"
        )
    found = [_seen(number, row, mask) for number, (row, mask) in enumerate(zip(rows, masks, strict=True))]
    hidden = sum(len(row) > len(kept) for row, kept in zip(rows, found, strict=True))
    note = f"padding was left out of {hidden} of {len(rows)} prompts, as their attention_mask says"
    return found, (note,) * bool(hidden)


def _seen(number: int, row: Int[Tensor, " pos"], mask: Int[Tensor, " pos"]) -> Int[Tensor, " _"]:
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"attention_mask of prompt {number} holds {int(mask[(mask != 0) & (mask != 1)][0])}: 0 and 1 only"
        )
    places = mask.nonzero()[:, 0]
    if not len(places):
        raise ValueError(f"attention_mask of prompt {number} hides all of its tokens")
    first, last = int(places[0]), int(places[-1])
    if last - first + 1 != len(places):
        gap = first + int((mask[first:] == 0).nonzero()[0])
        raise ValueError(
            f"attention_mask of prompt {number} hides position {gap} between tokens that it shows: ln_probe leaves "
            "padding out at either end, and cannot measure a prompt with a hole"
        )
    return row[first : last + 1]


def _unpadded(rows: list[Tensor], pad: int | None, ends: Sequence[int]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Remove trailing padding if it is identified: some row of the batch has none."""
    if pad is None or len(rows) < 2:
        return rows, ()
    lengths = [len(r) - _trailing(r, pad) for r in rows]
    padded = sum(kept < len(r) for kept, r in zip(lengths, rows, strict=True))
    if not padded or padded == len(rows):
        return rows, ()
    if pad in ends:
        if max(len(r) - kept for kept, r in zip(lengths, rows, strict=True)) < 2:
            return rows, ()
        return rows, (
            f"{padded} of {len(rows)} prompts end in token {pad}, which pads and ends texts alike, so it was kept: "
            "give what the tokenizer returned, with its attention_mask, if it is padding",
        )
    if empty := [n for n, kept in enumerate(lengths) if not kept]:
        raise ValueError(f"prompt {empty[0]} is nothing but padding (token {pad})")
    note = f"padding (token {pad}) was left out at the end of {padded} of {len(rows)} prompts"
    return [r[:kept] for r, kept in zip(rows, lengths, strict=True)], (note,)


def _trailing(row: Int[Tensor, " pos"], pad: int) -> int:
    others = (row != pad).nonzero()
    return len(row) - 1 - int(others[-1]) if len(others) else len(row)


def _rectangular(given: Any) -> bool:
    return isinstance(given, Tensor | np.ndarray) and given.ndim == 2


def _rows(given: Any, what: str = "prompts") -> list[Tensor]:
    if (array := _array_of(given)) is not None:
        return [torch.tensor(row) for row in np.atleast_2d(_whole(array, what, 1, 2))]
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray):
        raise TypeError(f"{what}: {_WANTED}; got {type(given).__name__}")
    if all(_is_number(v) for v in given):
        return [_row(given, what)] if len(given) else []
    if isinstance(given[0], str) and (odd := [n for n, t in enumerate(given) if not isinstance(t, str)]):
        raise TypeError(f"{what}, prompt {odd[0]}: a list of texts holds texts only; got {received(given[odd[0]])}")
    for number, row in enumerate(given):
        if isinstance(row, str | bytes) or not isinstance(row, Sequence | np.ndarray | Tensor):
            raise TypeError(f"{what}, prompt {number}: {_WANTED}; got {type(row).__name__}")
    return [_row(row, f"{what}, prompt {number}") for number, row in enumerate(given)]


def _array_of(given: Any) -> np.ndarray | None:
    """Return a tensor or an array of numbers as an array; None for anything else."""
    if isinstance(given, Tensor):
        return given.detach().cpu().numpy() if not given.is_floating_point() else given.float().numpy()
    return given if isinstance(given, np.ndarray) and given.dtype != object else None


def _whole(array: np.ndarray, what: str, *dimensions: int) -> np.ndarray:
    if array.dtype.kind not in ("iub" if what.startswith(_MASK) else "iu") or array.ndim not in dimensions:
        raise ValueError(f"{what}: {_WANTED}; got {array.dtype} {list(array.shape)}")
    return array.astype(np.int64)


def _row(values: Any, what: str) -> Int[Tensor, " _"]:
    if (array := _array_of(values)) is not None:
        return torch.from_numpy(_whole(array, what, 1))
    ids = []
    for value in values:
        if not _is_number(value):
            raise ValueError(f"{what}: {_WANTED}; got {value!r:.40}")
        ids.append(operator.index(value))
    try:
        return torch.tensor(ids, dtype=torch.long)
    except (OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"{what}: token id {max(ids, key=abs)} is no id of any vocabulary") from error


def _is_number(value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return False
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 0 and str(value.dtype).rpartition(".")[2].startswith(("int", "uint"))
    return isinstance(value, int | np.integer)
