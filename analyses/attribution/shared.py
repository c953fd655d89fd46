"""What both attributions share: checked prompts, positions and tokens, and what every result has."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from ln_probe.hooks.components import CachedPrompts, Part, is_cache
from ln_probe.hooks.model import HookedModel, before_projection, device_of, n_layers, outputs, weight_of, whole_number
from ln_probe.hooks.task import check_ids, encode, tokenizer_of

MEAN = "mean"
TOP = 12  # rows of `top`: what fits a notebook cell
# A token by id or text, or several: their mean logit.
Tokens = SupportsIndex | str | Sequence[SupportsIndex | str] | Tensor | np.ndarray


class AttributionError(ValueError):
    """Something that cannot be attributed: says what was asked for, and what to ask for instead."""


class Prompts:
    """The prompts of an attribution: token ids to run, or a cache of their activations.

    Args:
        given: what `prompt` takes, ids [batch pos], a list of texts or of rows of ids, or a cache.

    Attributes:
        rows: token ids of each prompt; empty for a cache.
        cache: the cached activations; None for token ids.
        lengths: tokens of each prompt.

    Raises:
        AttributionError: as `prompt`, with the number of the prompt where there are several.
        SplitError: a cache of another model, or one without embeddings.
    """

    def __init__(self, model: HookedModel, given: Any) -> None:
        self.cache = CachedPrompts(model, given) if is_cache(given) else None
        self.rows: list[Int[Tensor, " _"]] = []
        if self.cache is not None:
            count, length = self.cache.shape()
            self.lengths = [length] * count
            return
        first = given[0] if isinstance(given, list | tuple) and given else None
        several = isinstance(first, str | list | tuple) or getattr(first, "ndim", 0) > 0
        each = given if several or (len(getattr(given, "shape", ())) == 2 and len(given)) else [given]
        for row in each:
            try:
                self.rows.append(prompt(model, row))
            except AttributionError as error:
                raise AttributionError(f"prompt {len(self.rows)}: {error}" if len(each) > 1 else str(error)) from error
        self.lengths = [len(row) for row in self.rows]

    def of_equal_length(self) -> list[list[int]]:
        """Prompts that run together: padding would change what a bidirectional model reads."""
        return [list(map(int, some)) for some in pd.Series(self.lengths).groupby(self.lengths).indices.values()]

    def tokens(self, members: Sequence[int]) -> Int[Tensor, "batch pos"]:
        """The token ids of prompts of equal length."""
        return torch.stack([self.rows[i] for i in members])


def prompt(model: HookedModel, tokens: object) -> Int[Tensor, " pos"]:
    """The token ids of one prompt: text, ids [pos] or [1 pos], as tensor, array or list.

    Raises:
        AttributionError: something else; ids outside the vocabulary; longer than the context; empty.
    """
    if is_cache(tokens):
        raise AttributionError("this runs the model: give tokens, not a cache")
    try:
        ids = encode(model, tokens) if isinstance(tokens, str) else _tensor(tokens, "tokens must be text or token ids")
        if not ids.numel():
            raise ValueError("the prompt is empty: give at least one token")
        if not _is_whole(ids):
            raise ValueError(f"token ids are whole numbers, got {str(ids.dtype).removeprefix('torch.')}")
        if ids.ndim == 2 and len(ids) == 1:
            ids = ids[0]
        if ids.ndim != 1:
            raise ValueError(f"a prompt is [pos] or [1 pos] token ids (several: [batch pos]): got {list(ids.shape)}")
        check_ids(model, ids)
    except ValueError as error:
        raise AttributionError(str(error)) from error
    return ids.long().to(device_of(model))


def _tensor(given: Any, requirement: str) -> Tensor:
    """Numbers of any kind as a tensor; an AttributionError that states the requirement for anything else."""
    try:
        return torch.as_tensor(np.asarray(given) if isinstance(given, list | tuple) else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise AttributionError(f"{requirement}, got {given!r}") from error


def _is_whole(ids: Tensor) -> bool:
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)


def is_mean(given: object) -> bool:
    """Whether `against` is the word for the mean."""
    return isinstance(given, str) and given == MEAN


def is_index(given: object) -> bool:
    """Whether this is one position or token id: not None, a slice or several."""
    several = given is None or isinstance(given, slice | Sequence)
    return not several and (not isinstance(given, Tensor | np.ndarray) or given.ndim == 0)


def places_of(positions: Any, length: int) -> list[int]:
    """The positions of one prompt that are asked for, from 0."""
    if isinstance(positions, str | dict | set):
        raise AttributionError(f"positions must be None, an index, a slice or a list of indices, got {positions!r}")
    if positions is None or isinstance(positions, slice):
        if not (within := list(range(length))[positions or slice(None)]):
            raise AttributionError(f"{positions} holds none of the prompt's {length} positions: give at least one")
        return within
    several = [positions] if is_index(positions) else list(positions)
    if not several:
        raise AttributionError("an empty list of positions: give at least one, or None for all")
    return [place(one, length) for one in several]


def next_ids(
    model: HookedModel, rows: Sequence[Int[Tensor, " _"]], places: Sequence[Sequence[int]]
) -> tuple[Int[Tensor, "row 1"], Bool[Tensor, " row"]]:
    """The token that follows every position, prompt after prompt (0 where none does), and whether there is one."""
    if not rows:
        raise AttributionError("a cache holds no tokens, so the next ones are not known: give target=")
    follows = [(r, p + 1) for r, at in zip(rows, places, strict=True) for p in at]
    valid = torch.tensor([p < len(r) for r, p in follows])
    ids = torch.tensor([[int(r[p]) if p < len(r) else 0] for r, p in follows])
    if len(beyond := ids[ids >= outputs(model)]):
        raise AttributionError(
            f"token id {int(beyond[0])}, the next one at one of these positions, has no logit: the model has "
            f"{outputs(model)} outputs. Give target=, or positions= that no such token follows"
        )
    return ids, valid


def ids_of_rows(model: HookedModel, given: Any, places: Sequence[Sequence[int]], what: str) -> Int[Tensor, "row token"]:
    """The token ids of every position, prompt after prompt: one token for all, or an id or ids for each."""
    count = sum(map(len, places))
    if isinstance(given, str) or is_index(given):
        return torch.tensor(token_ids(model, given)).expand(count, -1)
    ids = _tensor(given, f"{what} must be a token, or an id for each position")
    if not ids.numel():
        raise AttributionError(f"{what} is an empty list of tokens: give an id for each position, or None")
    if not _is_whole(ids):
        dtype = str(ids.dtype).removeprefix("torch.")
        raise AttributionError(f"{what} must hold token ids, whole numbers: got {dtype}")
    shape = (len(places), len(places[0]))
    if ids.ndim == 1 and len(places) == 1:
        ids = ids[None]
    if ids.ndim == 1 and shape[1] == 1:  # one for each prompt
        ids = ids[:, None]
    if ids.shape[:2] != shape or ids.ndim not in (2, 3) or any(len(at) != shape[1] for at in places):
        raise AttributionError(f"{what} must have an id for each position, {list(shape)}, got {list(ids.shape)}")
    for one in ids.unique().tolist():
        token_ids(model, one)
    return ids.reshape(count, -1).long()


def place(
    position: SupportsIndex, length: int, what: str = "position", whole: str = "the prompt", parts: str = "tokens"
) -> int:
    """A position from 0, negative ones counted from the end; or the like: a layer of the model, a head of a layer.

    Raises:
        AttributionError: there is none.
    """
    found = whole_number(position, what, error=AttributionError)
    if not -length <= found < length:
        raise AttributionError(f"{what} {found} is out of range: {whole} has {length} {parts} (0 … {length - 1})")
    return found % length


def layer_of(model: HookedModel, layer: SupportsIndex) -> int:
    """A layer of the model from 0, negative ones counted from the end."""
    return place(layer, n_layers(model), "layer", "the model", "layers")


def token_ids(model: HookedModel, tokens: Tokens) -> list[int]:
    """Ids of one or several tokens.

    Raises:
        AttributionError: an id outside the vocabulary, a text that is not one token, a text without a tokenizer.
    """
    if isinstance(tokens, Tensor | np.ndarray):
        tokens = tokens.tolist()
    several: list[Any] = list(tokens) if isinstance(tokens, Iterable) and not isinstance(tokens, str) else [tokens]
    if not several:
        raise AttributionError("an empty set of tokens has no logit: give at least one")
    size, found = outputs(model), list[int]()
    for one in several:
        is_text = isinstance(one, str)
        token = _of_text(model, one) if is_text else whole_number(one, "a token id", error=AttributionError)
        if not 0 <= token < size:
            raise AttributionError(f"token id {token} is outside the vocabulary of {size} (0 … {size - 1})")
        if token in found:
            raise AttributionError(f"token id {token} is given twice")
        found.append(token)
    return found


def _of_text(model: HookedModel, text: str) -> int:
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise AttributionError(f"this model has no tokenizer, so {text!r} cannot be looked up: give token ids")
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if len(ids) != 1:
        raise AttributionError(
            f"{text!r} is {len(ids)} tokens ({ids}): give one token's text (a leading space?), or ids"
        )
    return ids[0]


def token_names(model: HookedModel, ids: Sequence[int]) -> str:
    """Tokens as text, or their ids without a tokenizer."""
    decode = getattr(tokenizer_of(model), "decode", None)
    shown = [str(i) if decode is None else repr(str(decode([i]))) for i in ids[:4]]
    return ", ".join(shown) + (f", … ({len(ids)} tokens, their mean)" if len(ids) > 4 else "")


def mean_columns(
    model: HookedModel, ids: Int[Tensor, "row token"] | None
) -> tuple[Float64[Tensor, "row d_model"], Float64[Tensor, " row"]]:
    """Per row the mean over its tokens (None: one row, the mean over the vocabulary) of the columns of W_U and of b_U.

    Raises:
        AttributionError: the model shows no W_U.
    """
    W_U, b_U = weight_of(model, "W_U"), weight_of(model, "b_U")
    if W_U is None or W_U.ndim != 2:
        raise AttributionError(f"{type(model).__name__} shows no unembedding W_U [d_model d_vocab] to read logits from")
    size = outputs(model)
    if ids is None:
        vector = W_U[:, :size].mean(1, dtype=torch.float64).cpu()[None]
        lift = torch.zeros(1).double() if b_U is None else b_U[:size].double().mean().cpu()[None]
        return before_projection(model, vector), lift
    at = ids.to(W_U.device)
    vectors = W_U[:, at].double().mean(2, dtype=torch.float64).cpu().T
    vectors = before_projection(model, vectors)
    return vectors, torch.zeros(len(ids)).double() if b_U is None else b_U[at].double().mean(1).cpu()


def part_columns(part: Part) -> dict[str, object]:
    """The columns of a table that say which part a row is about."""
    return {"part": part.name, "kind": part.kind, "layer": part.layer, "index": part.index}


AnySums = TypeVar("AnySums", bound="Sums")


class Sums:
    """A sum over components and the model's own number: what every result of an attribution has.

    `total`, `own` and `scale` are floats, or tensors with an entry per position (NaN where a prompt has none).
    """

    total: Any
    own: Any
    scale: Any
    bound: float
    label: str
    _number = "logit"
    _remedy = ""

    def _errors(self) -> Float64[Tensor, " *pos"]:
        total, own, scale = (torch.as_tensor(v, dtype=torch.float64) for v in (self.total, self.own, self.scale))
        absent = total.isnan() & own.isnan() & (total.ndim > 0)
        return ((total - own).abs() / scale).masked_fill(absent, 0.0)

    @property
    def error(self) -> float:
        """|total − own| relative to `scale`, the largest of all positions."""
        return float(self._errors().max())

    def check(self: AnySums) -> AnySums:
        """Return this result if its components add up to the model's own number everywhere.

        Raises:
            AttributionError: they do not; says where and by how much.
        """
        errors = self._errors().flatten()
        if not float(errors.max()) <= self.bound:
            at = int(errors.nan_to_num(math.inf).argmax())
            total, own = (float(torch.as_tensor(v).flatten()[at]) for v in (self.total, self.own))
            raise AttributionError(
                f"the parts add up to {total:.6g}, and the model's own {self.label}{self._place(at)} is {own:.6g}: "
                f"{float(errors[at]):.1e} of the largest {self._number} apart (rounding explains {self.bound:.0e})"
                f"{self._remedy}"
            )
        return self

    def _place(self, at: int) -> str:
        """Which entry it is, as text."""
        return ""

    def top(self, k: int = TOP) -> pd.DataFrame:
        """Return the k components with the largest contributions, either way."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.top().to_html(index=False, float_format='{:+.4g}'.format)}"


class SumsAtPositions(Sums):
    """Sums at several positions of one or several prompts.

    `values` is [component batch …], `total` one of its components' sums [batch …].
    """

    components: tuple[Part, ...]
    values: Any
    _entries = "positions"

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.total.shape))
        return f"{type(self).__name__}({self.label}: {len(self.components)} components, {shape} {self._entries})"

    def _components(self) -> pd.DataFrame:
        return pd.DataFrame([part_columns(part) for part in self.components])

    def _rows(self, **positions: Tensor) -> pd.DataFrame:
        """A row per component and entry: `batch`, the entry's positions, and the component's columns."""
        present, each = self.total.isfinite(), len(self.components)
        entries = {"batch": torch.nonzero(present)[:, 0]} | {name: at[present] for name, at in positions.items()}
        columns = pd.DataFrame({name: at.numpy().repeat(each) for name, at in entries.items()})
        components = self._components().iloc[np.tile(np.arange(each), int(present.sum()))]
        return pd.concat([columns, components.reset_index(drop=True)], axis=1)

    def top(self, k: int = TOP) -> pd.DataFrame:
        """The k components with the largest mean |contribution|: their columns, `mean` and `mean_abs`."""
        k = whole_number(k, "k", 1, AttributionError)
        table, values = self._components(), self.values.flatten(1)
        table["mean"], table["mean_abs"] = values.nanmean(1).numpy(), values.abs().nanmean(1).numpy()
        return table.sort_values("mean_abs", ascending=False, kind="stable").head(k).reset_index(drop=True)
