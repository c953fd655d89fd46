"""The prompts that a model is measured on: texts, token ids and files in any form, as rows of token ids."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.text import check_flags, encodable
from ln_probe.hooks.model import Facts, HookedModel, check_model, facts_of, whole_number
from ln_probe.hooks.task import (
    MAX_TOKENS,
    bundled_texts,
    default_tokens,
    encode,
    unpadded,
)

_SHOWN_PROMPTS, _SHOWN_TOKENS = 64, 24  # what a report shows of prompts

BUNDLED = "bundled"
_TEXT_FIELD, _ID_FIELDS = "text", ("tokens", "input_ids")
_SUFFIXES = (".txt", ".jsonl")

__all__ = ["Prompts", "make_prompts"]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts as token ids, with how to show them and where they came from.

    Attributes:
        tokens: one tensor [pos] per prompt.
        strings: token strings by prompt and position (the ids themselves where there is no tokenizer).
        source: "bundled", "tokens", "texts" or a file's name.
        notes: what was done to them (cut, unpadded), in plain sentences.
        summary: the description of the prompts for a report's provenance.
        strata: what each prompt is a sample of (its book); empty: there is one stratum.

    Example:
        >>> from ln_probe.prompts import make_prompts
        >>> prompts = make_prompts(model, ["The ships came home."])
        >>> prompts.summary, prompts.strings[0][:3]
    """

    tokens: tuple[Int[Tensor, " _"], ...]
    strings: tuple[tuple[str, ...], ...]
    source: str
    notes: tuple[str, ...]
    summary: dict[str, Any]
    strata: tuple[str, ...] = ()


def make_prompts(
    model: HookedModel | Facts,
    prompts: Any = None,
    *,
    max_tokens: int = MAX_TOKENS,
    max_prompts: int | None = None,
    prepend_bos: bool | None = None,
    token_names: Mapping[int, str] | None = None,
) -> Prompts:
    """Return prompts for `model` from any form that a user has them in.

    Args:
        model: any hooked model, or what `facts_of` says of it.
        prompts: None (a bundled model's own held-out windows, or the bundled passages); a text, or a list of texts; a
            `Path` (`.txt`: a prompt a paragraph, as it stands; `.jsonl`: `{"text": …}` or `{"tokens": […]}` a line); a
            data set of `datasets` with a column "text", "tokens" or "input_ids"; token ids as a tensor, array or lists
            ([pos], [batch pos] or ragged), or a tokenizer's output; what this function returned.
        max_tokens: longer prompts are cut to this, and to the model's context.
        max_prompts: use only so many of the first prompts; None: all.
        prepend_bos: whether texts begin with the tokenizer's first token; None: as the model was trained.
        token_names: strings of tokens by id, instead of the tokenizer's (`read_token_names`).

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: a prompt that is empty or holds ids outside the vocabulary; text, or no prompts at all, for a model
            without a tokenizer; an unknown format; the name of a file as a text.
        TypeError: any other object; no hooked model.

    Example:
        >>> from ln_probe.prompts import make_prompts
        >>> make_prompts(model, ["The ships came home."], max_tokens=8).tokens[0]
    """
    facts = model if isinstance(model, Facts) else facts_of(check_model(model))
    max_tokens = whole_number(max_tokens, "max_tokens", 1)
    max_prompts = None if max_prompts is None else whole_number(max_prompts, "max_prompts", 1)
    if isinstance(prompts, Prompts):
        return prompts
    columns = getattr(prompts, "column_names", None) or ()
    if {"input_ids", "attention_mask"}.issubset(columns) and _TEXT_FIELD not in columns:
        prompts = {name: list(prompts[name]) for name in ("input_ids", "attention_mask")}
    _check_unpacked(prompts, columns)
    if isinstance(prompts, Mapping) and "input_ids" in prompts and prompts.get("attention_mask") is None:
        prompts = prompts["input_ids"]
    entries, source = _entries(facts, prompts)
    entries = entries[:max_prompts]
    notes: tuple[str, ...] = ()
    texts = [entry for entry in entries if isinstance(entry, str)]
    if prepend_bos is not None:
        check_flags(prepend_bos=prepend_bos)
        if entries and not texts:
            raise ValueError(f"prepend_bos={prepend_bos} is for texts: token ids are taken as they are, leave it out")
        how = "with" if prepend_bos else "without"
        notes = (f"texts begin {how} the tokenizer's first token (prepend_bos={prepend_bos})",)
    if isinstance(prompts, Mapping):
        rows, more = _unmasked(prompts)
    else:
        rows, more = [], ()
        for number, entry in enumerate(entries):
            try:
                is_text = isinstance(entry, str)
                rows.append(encode(facts, entry, prepend_bos=prepend_bos) if is_text else _row(entry, number))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}" if len(entries) > 1 and is_text else str(error)) from error
        if not texts:
            rows, more = unpadded(facts, rows)
    finished = _finished(facts, rows[:max_prompts], source, max_tokens, (*notes, *more), token_names)
    own = facts.bundled_prompts if prompts is None else None
    return finished if own is None else replace(finished, strata=own.strata[: len(finished.tokens)])


def _entries(facts: Facts, prompts: Any) -> tuple[Sequence[Any], str]:
    """Return the texts or rows of token ids, and what they are called."""
    if prompts is None:
        if (own := facts.bundled_prompts) is not None:
            return own.measured, own.source
        entries = bundled_texts() if facts.tokenizer is not None else default_tokens(facts)
        return entries, BUNDLED
    if isinstance(prompts, str):
        _check_no_file_name(prompts)
        return [prompts], "texts"
    if isinstance(prompts, Path):
        return list(read_prompts(prompts)), prompts.name
    if hasattr(prompts, "column_names"):
        return _of_dataset(prompts), "data set"
    if isinstance(prompts, Mapping):
        return [], "tokens"
    if isinstance(prompts, Tensor | np.ndarray):
        if prompts.ndim not in (1, 2):
            raise ValueError(f"token ids must be [pos] or [batch pos], got {list(prompts.shape)}")
        return ([prompts] if prompts.ndim == 1 and prompts.dtype != object else list(prompts)), "tokens"
    if isinstance(prompts, Sequence) and not isinstance(prompts, bytes):
        if prompts and all(isinstance(entry, str) for entry in prompts):
            return prompts, "texts"
        for entry in prompts:
            if isinstance(entry, str | bytes | Mapping) or entry is None:
                raise TypeError(f"a list of prompts holds texts alone or token ids alone, got {entry!r:.40} among them")
        one_row = bool(prompts) and all(map(_is_number, prompts))
        return ([prompts] if one_row else prompts), "tokens"
    raise TypeError(
        "prompts must be a text, a list of texts, token ids, a pathlib.Path, a data set or a tokenizer's output, got "
        f"{type(prompts).__name__}"
    )


def read_prompts(path: Path) -> Iterator[str | list[int]]:
    """Yield the prompts of a file: texts, or lists of token ids.

    Args:
        path: a `.txt`, of which every paragraph is a prompt as it stands (line breaks and indentation are kept), or a
            `.jsonl` with a "text" or a "tokens" field in each line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another kind of file, not UTF-8, or a line without prompts.
    """
    if not path.exists():
        raise FileNotFoundError(f"no prompts file {str(path)!r}")
    if path.suffix not in _SUFFIXES:
        raise ValueError(f"prompts file {str(path)!r} must be a .txt (a prompt a paragraph) or a .jsonl")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text: {error}") from error
    if path.suffix == ".txt":
        yield from (part.strip("\n") for part in re.split(r"\n(?:[ \t]*\n)+", text) if part.strip())
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _of_json(line, f"{path}, line {number}")


def _of_json(line: str, where: str) -> str | list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error})") from error
    entry = entry if isinstance(entry, dict) else {}
    if isinstance(text := entry.get(_TEXT_FIELD), str):
        return text
    ids: list[int] | None = next((entry[name] for name in _ID_FIELDS if isinstance(entry.get(name), list)), None)
    if ids is None:
        raise ValueError(f'{where}: needs a "text" (a string) or "tokens" (a list of ids)')
    _check_unpacked(entry, ())
    if isinstance(mask := entry.get("attention_mask"), list):
        ids = _unmasked({"input_ids": ids, "attention_mask": mask})[0][0].tolist()
    return ids


def _of_dataset(dataset: Any) -> Sequence[Any]:
    """Return the token ids or texts of a data set (blank ones, common in data sets of lines, left out)."""
    columns = dataset.column_names
    name = next((n for n in (_TEXT_FIELD, *_ID_FIELDS) if isinstance(columns, Sequence) and n in columns), None)
    if name is None:
        raise ValueError(f"a data set needs one split and a column text, tokens or input_ids, got {columns}")
    entries = list(dataset[name])
    return [entry for entry in entries if entry.strip()] if name == _TEXT_FIELD else entries


def _check_no_file_name(text: str) -> None:
    """Raise ValueError for a text that is the name of a file of prompts."""
    if text.endswith(_SUFFIXES) and not any(c.isspace() for c in text):
        raise ValueError(
            f"{text!r} would be a text: pass pathlib.Path({text!r}) to read a file, or a list for the text"
        )


def _length(row: Any) -> int:
    """Return how many tokens a row has; a value that is no row has none."""
    return len(row) if hasattr(row, "__len__") else 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | np.integer) or (isinstance(value, Tensor) and value.ndim == 0)


def _array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    return np.asarray(values)


def _check_unpacked(prompts: Any, columns: Sequence[str]) -> None:
    """Raise ValueError for rows that hold several texts, as their position_ids or seq_lengths say."""
    names = prompts if isinstance(prompts, Mapping) else columns
    ids = prompts["position_ids"] if "position_ids" in names and "attention_mask" not in names else ()
    lengths = prompts["seq_lengths"] if "seq_lengths" in names else ()
    if any(bool((row.diff() <= 0).any()) for row in _rows(ids)) or any(_length(row) > 1 for row in lengths):
        raise ValueError("a row holds several texts (position_ids begin again, or seq_lengths): give a row for each")


def _row(values: Any, number: int) -> Int[Tensor, " _"]:
    """Return the token ids of one prompt."""
    try:
        array = _array(values)
    except ValueError as error:  # ragged
        raise ValueError(f"prompt {number}: token ids must be one list of whole numbers ({error})") from error
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        what = f"{array.dtype} {list(array.shape)}"
        raise ValueError(f"prompt {number}: token ids must be one list of whole numbers, got {what}")
    return torch.from_numpy(array.astype(np.int64))


def _unmasked(given: Mapping[Any, Any]) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return a tokenizer's token ids without what its attention_mask hides, and a note about it."""
    if "input_ids" not in given:
        raise ValueError(f'a tokenizer\'s output needs "input_ids", this has {", ".join(map(str, given)) or "nothing"}')
    rows = _rows(given["input_ids"])
    masks = _rows(given["attention_mask"], lambda mask: (_array(mask) != 0).astype(int))  # (or true and false)
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise ValueError("attention_mask does not fit input_ids: their lengths differ")
    visible = []
    for number, (row, mask) in enumerate(zip(rows, masks, strict=True)):
        places = mask.nonzero()[:, 0]
        if not len(places):
            raise ValueError(f"prompt {number}: its attention_mask hides all of its tokens")
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 != len(places):
            raise ValueError(f"prompt {number}: its attention_mask hides tokens between others, not padding at an end")
        visible.append(row[first : last + 1])
    hidden = sum(len(row) > len(rest) for row, rest in zip(rows, visible, strict=True))
    note = f"padding was left out of {hidden} of {len(rows)} prompts, as their attention_mask says"
    return visible, (note,) * bool(hidden)


def _rows(given: Any, read: Callable[[Any], Any] = lambda entry: entry) -> list[Tensor]:
    one_row = len(given) and _is_number(given[0])
    return [_row(read(entry), number) for number, entry in enumerate([given] if one_row else given)]


def _finished(
    facts: Facts,
    rows: Sequence[Tensor],
    source: str,
    max_tokens: int,
    notes: tuple[str, ...],
    token_names: Mapping[int, str] | None,
) -> Prompts:
    """Check and cut rows of token ids, and name their tokens."""
    if not rows:
        raise ValueError(f"no prompts ({source} is empty): give at least one")
    size, context = facts.vocabulary, facts.context
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompt {number} has no tokens")
        wrong = row[(row < 0) | (row >= size)]
        if len(wrong):
            raise ValueError(f"prompt {number}: token id {int(wrong[0])} is outside the vocabulary (0 … {size - 1})")
    limit = min(max_tokens, context)
    lengths = [len(row) for row in rows]
    if long := sum(length > limit for length in lengths):
        longest = f"the longest had {max(lengths)}; context {context}"
        notes = (*notes, f"{long} of {len(rows)} prompts were cut to {limit} tokens ({longest})")
    tokens = tuple(row[:limit] for row in rows)
    if token_names is not None:
        notes += _naming_notes(token_names, size)
    tokenizer = facts.tokenizer

    def name_of(token: int) -> str:
        if token_names is not None:
            return encodable(token_names.get(token, str(token)))
        return str(token) if tokenizer is None else encodable(str(tokenizer.decode([token])))

    names = {i: name_of(i) for i in torch.cat(tokens).unique().tolist()}
    strings = tuple(tuple(names[i] for i in row.tolist()) for row in tokens)
    separator = " " if token_names is not None or tokenizer is None else ""
    begin = [separator.join(row[:_SHOWN_TOKENS]) for row in strings[:_SHOWN_PROMPTS]]
    return Prompts(tokens, strings, source, notes, {**summary(source, tokens), "begin": begin})


def calibration_prompts(
    facts: Facts, prompts: Any, *, max_tokens: int = MAX_TOKENS, prepend_bos: bool | None = None
) -> Prompts:
    """Return the user's calibration text as prompts (`make_prompts`); errors begin with "calibration"."""
    try:
        return make_prompts(facts, prompts, max_tokens=max_tokens, prepend_bos=prepend_bos)
    except (ValueError, TypeError) as error:
        raise type(error)(f"calibration: {error}") from error


def summary(source: str, rows: Iterable[Int[Tensor, " _"]]) -> dict[str, Any]:
    """Return source, counts and hash (of the token ids, prompt by prompt) of prompts."""
    ids = [row.tolist() for row in rows]
    digest = hashlib.sha256()
    for row in ids:
        digest.update(np.asarray([len(row), *row], np.int64).tobytes())
    return {
        "source": source,
        "count": len(ids),
        "tokens": sum(map(len, ids)),
        "longest": max(map(len, ids), default=0),
        "sha256": digest.hexdigest(),
    }


def read_token_names(tokens: str | Path | Sequence[str]) -> dict[int, str]:
    """Return token strings by id, for a model without a tokenizer.

    Args:
        tokens: a list of them, or a file: a JSON list, or text with a token a line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no tokens.
    """
    if not isinstance(tokens, str | Path):
        return dict(enumerate(map(str, tokens)))
    path = Path(tokens)
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text) if path.suffix == ".json" else text.removesuffix("\n").split("\n")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no tokenizer file {str(path)!r}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer file {path} cannot be read: {error}") from error
    if not isinstance(content, list) or not content or not all(isinstance(token, str) for token in content):
        raise ValueError(f"tokenizer file {path} holds no tokens: give a JSON list, or a token a line")
    return dict(enumerate(content))


def _naming_notes(names: Mapping[int, str], size: int) -> tuple[str, ...]:
    """Return a note on tokens without a name; ValueError for names of tokens that the model does not have."""
    beyond = [i for i in names if not 0 <= i < size]
    if beyond:
        raise ValueError(f"tokenizer= names token {beyond[0]}, and the model has 0 … {size - 1}: another model's file?")
    missing = size - len(names)
    return (f"tokenizer= names {len(names)} of the model's {size} tokens: the others appear as ids",) * bool(missing)
