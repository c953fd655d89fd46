"""What attributions share: checked prompts, positions and tokens, and what every result has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from html import escape
from typing import Any, Self, SupportsIndex

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor, nn

from ln_probe.hooks.components import CachedPrompts, Part, Record, Wiring, record
from ln_probe.hooks.model import HookedModel, facts_of, outputs, whole_number
from ln_probe.hooks.task import encode, unpadded_rows

MEAN = "mean"
TOP = 12  # rows of `top`: what fits a notebook cell
# A token by id or text, or several: their mean logit.
Tokens = SupportsIndex | str | Sequence[SupportsIndex | str] | Tensor | np.ndarray
Ids = Int[Tensor, "row token"]  # of those tokens, at each position that is asked for
Positions = SupportsIndex | slice | Sequence[SupportsIndex] | Tensor


class AttributionError(ValueError):
    """Something that cannot be attributed: says what was asked for, and what to ask for instead."""


def one_of(**names: Any) -> Any:
    """Return the value of an argument that has several names, one of which may be given; None if none is.

    A tuple as `pos_slice` is, as in TransformerLens, (start, stop).
    """
    values = {name: value for name, value in names.items() if value is not None}
    if len(values) > 1:
        raise AttributionError(f"{' and '.join(values)} are two names of one argument: give one")
    value = next(iter(values.values()), None)
    return slice(*value) if "pos_slice" in values and isinstance(value, tuple) else value


def contrast_of(positions: Any, target: Any, against: Any, answers: Any, incorrect: Any) -> tuple[Any, Any]:
    """Return `target` and `against`, which may have TransformerLens's names `answer_tokens` and `incorrect_tokens`.

    The second of two columns of `answer_tokens`, a row for each prompt, is the incorrect tokens.
    """
    target = one_of(target=target, answer_tokens=answers)
    against = one_of(against=against, incorrect_tokens=incorrect)
    if answers is None or np.ndim(answers) != 2 or np.shape(answers)[1] != 2 or against is not None:
        return target, against
    if not _is_index(positions):
        raise AttributionError("answer_tokens [batch, 2] are of one position of each prompt: give pos=-1, or another")
    correct, incorrect = zip(*answers, strict=True)
    return list(correct), list(incorrect)


def _is_index(positions: Any) -> bool:
    return not isinstance(positions, slice | None) and np.ndim(positions) == 0


class Prompts:
    """The prompts and positions of an attribution: token ids to run, or a cache of their activations.

    Args:
        given: text or texts, ids [pos] or [batch pos], rows of ids of unequal length, or a cache.
        positions: None (all), an index, a slice or a list; negative from the end of each prompt.

    Attributes:
        rows: token ids of each prompt; empty for a cache.
        places: the positions that are asked for in each prompt, from 0; asked: prompt and position of each.
        single: whether this is one index of one prompt.

    Raises:
        AttributionError: something else; ids outside the vocabulary; longer than the context; empty.
        SplitError: a cache of another model, or one without embeddings.
    """

    def __init__(self, model: HookedModel, given: Any, positions: Any = None) -> None:
        self.model, self.rows = model, list[Int[Tensor, " _"]]()
        self.cache = CachedPrompts(model, given) if hasattr(given, "items") else None
        if self.cache is None:
            self.rows = _token_rows(model, given)
        self.lengths = [self.cache.length] * self.cache.batch if self.cache else [len(row) for row in self.rows]
        self.places = [_places(positions, length) for length in self.lengths]
        self.asked = [(number, position) for number, at in enumerate(self.places) for position in at]
        self.single = len(self.places) == 1 and _is_index(positions)

    def of_equal_length(self) -> list[list[int]]:
        """Return the numbers of prompts that run together: padding would change what a bidirectional model reads."""
        return [list(map(int, some)) for some in pd.Series(self.lengths).groupby(self.lengths).indices.values()]

    def tokens(self, members: Sequence[int]) -> Int[Tensor, "batch pos"]:
        """Return the token ids of prompts of equal length."""
        return torch.stack([self.rows[i] for i in members])

    def records(
        self, wiring: Wiring, place: str, points: Mapping[str, nn.Module] | None = None
    ) -> Iterator[tuple[list[int], Record]]:
        """Yield what the model shows at rows of `asked`, with their numbers: prompts of one length at a time."""
        for members in self.of_equal_length():
            start = {number: k * self.lengths[number] for k, number in enumerate(members)}
            rows = [row for row, (number, _) in enumerate(self.asked) if number in start]
            at = [start[number] + position for number, position in (self.asked[row] for row in rows)]
            if self.cache is not None:
                yield rows, self.cache.record(at, wiring, place, points or ())
            else:
                tokens = self.tokens(members)
                yield rows, record(self.model, tokens, at, wiring.norms, points)

    def by_prompt(self, values: Tensor, fill: float = math.nan) -> Tensor:
        """Return [… row] as [… batch pos], filled up behind a prompt's last position."""
        at = torch.tensor([(i, k) for i, some in enumerate(self.places) for k in range(len(some))]).T
        shape = (*values.shape[:-1], len(self.places), max(map(len, self.places)))
        padded = torch.full(shape, fill, dtype=values.dtype)
        padded[..., at[0], at[1]] = values
        return padded

    def next_ids(self) -> tuple[Int[Tensor, "row 1"], Bool[Tensor, " row"]]:
        """Return the token after every position (0 where none follows), and whether there is one."""
        if self.cache is not None:
            raise AttributionError("a cache holds no tokens, so the next ones are not known: give target=")
        following = [self.rows[number][position + 1 :][:1].tolist() for number, position in self.asked]
        ids = torch.tensor([tokens or [0] for tokens in following])
        _check_ids(self.model, ids)
        return ids, torch.tensor([bool(tokens) for tokens in following])

    def ids(self, given: Any, what: str) -> Ids:
        """Return token ids of every position: one token for all, or an id or ids for each.

        Of one index of one prompt, several tokens are those whose logits are averaged."""
        texts = given if isinstance(given, list | tuple) else [given]
        if any(isinstance(one, str) for one in texts):
            given = [_id_of(self.model, one) if isinstance(one, str) else one for one in texts]
            given = given if len(given) > 1 else given[0]
        ids = torch.empty(0)
        with suppress(TypeError, ValueError, RuntimeError):
            ids = torch.as_tensor(np.asarray(given) if isinstance(given, list | tuple) else given)
        if not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
            raise AttributionError(f"{what} must be a token, or an id for each position, got {given!r}")
        _check_ids(self.model, ids)
        if ids.ndim == 0 or (self.single and ids.ndim == 1):
            return ids.reshape(1, -1).expand(len(self.asked), -1).long()
        shape = (len(self.places), len(self.places[0]))
        if ids.ndim == 1:  # one for each position of one prompt, or for one position of each
            ids = ids[None] if shape[0] == 1 else ids[:, None]
        is_ragged = len(set(map(len, self.places))) > 1
        if is_ragged or ids.ndim not in (2, 3) or ids.shape[:2] != shape:
            raise AttributionError(f"{what} must have an id for each position, {list(shape)}, got {list(ids.shape)}")
        return ids.reshape(len(self.asked), -1).long()

    def label(self, target: Ids | None, against: Ids | str | None) -> str:
        """Return what is attributed, as text; `target` None: the next token."""

        def words(ids: Tensor | str | None) -> str:
            if not isinstance(ids, Tensor):
                return "the next token" if ids is None else "the mean logit"
            if bool((ids != ids[:1]).any()):
                return "the tokens given"
            names = ", ".join(token_name(self.model, token) for token in ids[0, :4].tolist())
            return names + (f", … ({ids.shape[1]} tokens, their mean)" if ids.shape[1] > 4 else "")

        return f"logit of {words(target)}" + ("" if against is None else f" minus {words(against)}")

    def others(self, against: Any) -> Ids | str | None:
        """Return the tokens whose logits are subtracted at every position, or the word for the mean."""
        is_word = against is None or (isinstance(against, str) and against == MEAN)
        return against if is_word else self.ids(against, "against")


def _token_rows(model: HookedModel, given: Any) -> list[Int[Tensor, " _"]]:
    rows = torch.as_tensor(given) if isinstance(given, np.ndarray) else [given] if isinstance(given, str) else given
    try:
        if isinstance(rows, list | tuple) and rows and isinstance(rows[0], str):
            rows = [encode(facts_of(model), text) for text in rows]
        elif isinstance(rows, list | tuple) and rows and not hasattr(rows[0], "__len__"):
            rows = [rows]
        return unpadded_rows(facts_of(model), rows)
    except (TypeError, ValueError) as error:
        raise AttributionError(str(error)) from error


def _places(positions: Any, length: int) -> list[int]:
    at: list[int] = []
    with suppress(IndexError, TypeError, ValueError, RuntimeError):
        at = torch.arange(length)[slice(None) if positions is None else positions].reshape(-1).tolist()
    if not at:
        raise AttributionError(f"positions {positions!r}: give indices or a slice of {length} tokens, at least one")
    return at


def _check_ids(model: HookedModel, ids: Tensor) -> None:
    size = outputs(model)
    if len(wrong := ids[(ids < 0) | (ids >= size)]):
        raise AttributionError(f"token id {int(wrong[0])} has no logit: the model has {size} (0 … {size - 1})")


def _id_of(model: HookedModel, text: str) -> int:
    if (tokenizer := facts_of(model).tokenizer) is None:
        raise AttributionError(f"this model has no tokenizer, so {text!r} cannot be looked up: give token ids")
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if len(ids) != 1:
        raise AttributionError(f"{text!r} is {len(ids)} tokens ({ids}): give one token's text (a leading space?)")
    return ids[0]


def place(position: SupportsIndex, length: int, what: str, whole: str = "the prompt") -> int:
    """Return a position (a layer, a head) from 0, counted from the end if negative; AttributionError for no such."""
    index = whole_number(position, what, error=AttributionError)
    if not -length <= index < length:
        raise AttributionError(f"{what} {index} is out of range: {whole} has {length} (0 … {length - 1})")
    return index % length


def token_name(model: HookedModel, token: int, *, quoted: bool = True) -> str:
    """Return a token as text, or its id without a tokenizer."""
    decode = getattr(facts_of(model).tokenizer, "decode", None)
    text = str(token if decode is None else decode([token]))
    return repr(text) if quoted and decode is not None else text


def part_columns(parts: Sequence[Part], **same: str) -> pd.DataFrame:
    """Return the columns of a table that say which component a row is about."""
    columns = {"part": "name", "kind": "kind", "layer": "layer", "index": "index"}
    return pd.DataFrame(same | {column: [getattr(part, name) for part in parts] for column, name in columns.items()})


class Sums:
    """Sums over components and the model's own numbers: what every result of an attribution has.

    `values` is [component batch …]; `total`, `own` and `scale` are [batch …] (NaN where a prompt has no such position),
    or floats for one number.
    """

    components: tuple[Part, ...]
    table: Any
    values: Any
    total: Any
    own: Any
    scale: Any
    bound: float
    label: str
    _entries = "positions"

    def _errors(self) -> Float64[Tensor, " *pos"]:
        total, own, scale = (torch.as_tensor(v, dtype=torch.float64) for v in (self.total, self.own, self.scale))
        absent = total.isnan() & own.isnan() & (total.ndim > 0)
        return ((total - own).abs() / scale).masked_fill(absent, 0.0)

    @property
    def error(self) -> float:
        """|total − own| relative to `scale`, the largest of all positions."""
        return float(self._errors().max())

    def check(self) -> Self:
        """Return this result if its components add up to the model's own number everywhere; an AttributionError says
        where they do not, and by how much."""
        errors = self._errors().flatten()
        if not float(errors.max()) <= self.bound:
            at = int(errors.nan_to_num(math.inf).argmax())
            total, own = (float(torch.as_tensor(v).flatten()[at]) for v in (self.total, self.own))
            raise AttributionError(
                f"the parts add up to {total:.6g}, and the model's own {self.label}{self._place(at)} is {own:.6g}: "
                f"{float(errors[at]):.1e} of the largest apart (rounding explains {self.bound:.0e}). "
                "Does something change it after what is read?"
            )
        return self

    def _place(self, at: int) -> str:
        """Return which entry it is, as text."""
        return ""

    def _rows(self, **positions: Tensor) -> pd.DataFrame:
        """Return a row per component and entry: `batch`, the entry's positions, and the component's columns."""
        present, each = self.values.isfinite().all(0), len(self.components)
        entries = {"batch": torch.nonzero(present)[:, 0]} | {name: at[present] for name, at in positions.items()}
        columns = pd.DataFrame({name: at.numpy().repeat(each) for name, at in entries.items()})
        components = self._components().iloc[np.tile(np.arange(each), int(present.sum()))]
        return pd.concat([columns, components.reset_index(drop=True)], axis=1)

    def _components(self) -> pd.DataFrame:
        return part_columns(self.components)

    def _summands(self) -> pd.DataFrame:
        return pd.DataFrame(self.table)

    def top(self, k: int = TOP) -> pd.DataFrame:
        """Return the k largest summands, either way, of one number (of a score: `query_part`, `key_part`); of several
        numbers, the k components with the largest mean |contribution|: their columns, `mean` and `mean_abs`."""
        k = whole_number(k, "k", 1, AttributionError)
        if isinstance(self.total, float):
            table, by = self._summands(), "contribution"
        else:
            values, by = self.values.flatten(1), "mean_abs"
            means = {"mean": values.nanmean(1).numpy(), "mean_abs": values.abs().nanmean(1).numpy()}
            table = self._components().assign(**means)
        return table.sort_values(by, key=abs, ascending=False, kind="stable", ignore_index=True).head(k)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.values.shape[1:]))
        return f"{type(self).__name__}({self.label}: {len(self.components)} components, {shape} {self._entries})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.top().to_html(index=False, float_format='{:+.4g}'.format)}"
