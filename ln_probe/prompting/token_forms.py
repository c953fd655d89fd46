"""Token ids in whatever form a user has them, as one row per prompt: nobody's padding counts as text.

A tensor or array [batch pos] or [pos], lists of whole numbers, ragged or not, or what a tokenizer returns (a dict with
`input_ids` and mostly an `attention_mask`).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

_WANTED = "token ids must be whole numbers: [pos], [batch pos], or a list of whole numbers for each prompt"


@dataclass(frozen=True)
class Sampled:
    """Sequences that the model itself writes, as prompts: `count` of them; None: as many as are needed."""

    count: int | None = None


def sampled(count: int | None = None) -> Sampled:
    """Prompts that are sampled from the model itself, at temperature 1, for `ln_probe.analyze(model, prompts=…)`.

    Args:
        count: how many sequences; None: until there are enough of them and enough tokens (32 and 512).

    Raises:
        TypeError, ValueError: not a whole number, or less than one.
    """
    if count is None:
        return Sampled()
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"sampled(count) takes the number of sequences, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"sampled(count) takes at least one sequence, got {count}")
    return Sampled(count)


def token_rows(given: Any, *, pad: int | None = None, ends: Sequence[int] = ()) -> tuple[list[Tensor], tuple[str, ...]]:
    """Token ids of every prompt, and what was left out of them.

    Args:
        given: ids in any of the forms above.
        pad: the tokenizer's padding id; trailing ones of a batch are left out where some row has none.
        ends: ids that end or begin a text: if `pad` is one of them, only a mask can tell what is padding.

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
            f"{', '.join(map(str, given))}"
        )
    rows = _rows(given["input_ids"])
    if given.get("attention_mask") is None:
        return _unpadded(rows, pad, ends) if _rectangular(given["input_ids"]) else (rows, ())
    masks = _rows(_numbers(given["attention_mask"]), "attention_mask")
    if [len(r) for r in rows] != [len(m) for m in masks]:
        shapes = f"{len(rows)} prompts and {len(masks)} masks" if len(rows) != len(masks) else "other lengths"
        raise ValueError(f"attention_mask does not fit input_ids ({shapes}): give both as the tokenizer returned them")
    found = [_seen(number, row, mask) for number, (row, mask) in enumerate(zip(rows, masks, strict=True))]
    hidden = sum(len(row) > len(kept) for row, kept in zip(rows, found, strict=True))
    note = f"padding was left out of {hidden} of {len(rows)} prompts, as their attention_mask says"
    return found, (note,) * bool(hidden)


def _numbers(mask: Any) -> Any:
    """A mask of truth values as 0 and 1."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return mask.long()
    return mask.astype(np.int64) if isinstance(mask, np.ndarray) and mask.dtype == bool else mask


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
    """Trailing padding left out, where it can be told: some row of the batch has none."""
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
    if isinstance(given, Tensor):
        return _of_array(given.detach().cpu().numpy() if not given.is_floating_point() else given.float().numpy(), what)
    if isinstance(given, np.ndarray) and given.dtype != object:
        return _of_array(given, what)
    if isinstance(given, str | bytes) or not isinstance(given, Sequence | np.ndarray):
        raise TypeError(f"{what}: {_WANTED}; got {type(given).__name__}")
    if all(_is_number(v) for v in given):
        return [_row(given, what)] if len(given) else []
    for number, row in enumerate(given):
        if isinstance(row, str | bytes) or not isinstance(row, Sequence | np.ndarray | Tensor):
            raise TypeError(f"{what}, prompt {number}: {_WANTED}; got {type(row).__name__}")
    return [_row(row, f"{what}, prompt {number}") for number, row in enumerate(given)]


def _of_array(values: np.ndarray, what: str) -> list[Tensor]:
    if values.dtype.kind not in "iu" or values.ndim not in (1, 2):
        raise ValueError(f"{what}: {_WANTED}; got {values.dtype} {list(values.shape)}")
    return [torch.from_numpy(row.astype(np.int64)) for row in np.atleast_2d(values)]


def _row(values: Any, what: str) -> Int[Tensor, " _"]:
    if isinstance(values, Tensor | np.ndarray):
        found = _rows(values, what)
        if len(values.shape) != 1:
            raise ValueError(f"{what}: {_WANTED}; got {list(values.shape)}")
        return found[0]
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
