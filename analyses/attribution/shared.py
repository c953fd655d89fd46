"""What both attributions share: checked prompts, positions and tokens, and what every result has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, Self, SupportsIndex

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ln_probe.hooks.components import CachedPrompts, Part, is_cache
from ln_probe.hooks.model import HookedModel, before_projection, outputs, weight_of, whole_number
from ln_probe.hooks.task import check_tokens, encode, tokenizer_of

MEAN = "mean"
TOP = 12  # rows of `top`: what fits a notebook cell
# A token by id or text, or several: their mean logit.
Tokens = SupportsIndex | str | Sequence[SupportsIndex | str] | Tensor | np.ndarray
Positions = SupportsIndex | slice | Sequence[SupportsIndex] | Tensor


class AttributionError(ValueError):
    """Something that cannot be attributed: says what was asked for, and what to ask for instead."""


def one_of(**names: Any) -> Any:
    """Return the value of an argument that has several names; None if it is not given.

    Raises:
        AttributionError: two of the names are given.
    """
    values = {name: value for name, value in names.items() if value is not None}
    if len(values) > 1:
        raise AttributionError(f"{' and '.join(values)} are two names of one argument: give one")
    return next(iter(values.values()), None)


class Prompts:
    """The prompts of an attribution: token ids to run, or a cache of their activations.

    Args:
        given: text or texts, ids [pos] or [batch pos], rows of ids of unequal length, or a cache.

    Attributes:
        rows: token ids of each prompt; empty for a cache.
        cache: the cached activations; None for token ids.
        lengths: tokens of each prompt.

    Raises:
        AttributionError: something else; ids outside the vocabulary; longer than the context; empty.
        SplitError: a cache of another model, or one without embeddings.
    """

    def __init__(self, model: HookedModel, given: Any) -> None:
        self.cache = CachedPrompts(model, given) if is_cache(given) else None
        self.rows: list[Int[Tensor, " _"]] = []
        if self.cache is not None:
            self.lengths = [self.cache.length] * self.cache.batch
            return
        rows = [given] if isinstance(given, str) else torch.as_tensor(given) if isinstance(given, np.ndarray) else given
        try:
            if isinstance(rows, list | tuple) and rows:
                if isinstance(rows[0], str):
                    rows = [encode(model, text) for text in rows]
                elif not hasattr(rows[0], "__len__"):
                    rows = [rows]
            self.rows = check_tokens(model, rows)
        except (TypeError, ValueError) as error:
            raise AttributionError(str(error)) from error
        self.lengths = [len(row) for row in self.rows]

    def of_equal_length(self) -> list[list[int]]:
        """Return the numbers of prompts that run together: padding would change what a bidirectional model reads."""
        return [list(map(int, some)) for some in pd.Series(self.lengths).groupby(self.lengths).indices.values()]

    def tokens(self, members: Sequence[int]) -> Int[Tensor, "batch pos"]:
        """Return the token ids of prompts of equal length."""
        return torch.stack([self.rows[i] for i in members])

    def places(self, positions: Any) -> list[list[int]]:
        """Return the positions that are asked for in each prompt, from 0.

        Args:
            positions: None (all), an index, a slice or a list; negative from the end of each prompt.
        """
        chosen = slice(None) if positions is None else positions
        places = []
        for length in self.lengths:
            try:
                at = torch.arange(length)[chosen]
            except (IndexError, TypeError, ValueError, RuntimeError) as error:
                raise AttributionError(
                    f"positions {positions!r}: give None, indices or a slice of {length} tokens (0 … {length - 1})"
                ) from error
            if not at.numel():
                raise AttributionError(f"positions {positions!r} are none of the prompt's {length}: give at least one")
            places.append(at.reshape(-1).tolist())
        return places


def is_index(given: object) -> bool:
    """Return whether this is one position or token id: not None, a slice or several."""
    several = given is None or isinstance(given, slice | Sequence)
    return not several and (not isinstance(given, Tensor | np.ndarray) or given.ndim == 0)


def place(position: SupportsIndex, length: int, what: str, whole: str = "the prompt") -> int:
    """Return a position (a layer, a head) from 0; negative ones are counted from the end.

    Raises:
        AttributionError: there is none.
    """
    index = whole_number(position, what, error=AttributionError)
    if not -length <= index < length:
        raise AttributionError(f"{what} {index} is out of range: {whole} has {length} (0 … {length - 1})")
    return index % length


def next_ids(
    model: HookedModel, rows: Sequence[Int[Tensor, " _"]], places: Sequence[Sequence[int]]
) -> tuple[Int[Tensor, "row 1"], Bool[Tensor, " row"]]:
    """Return the token after every position, prompt after prompt (0 where none follows), and whether there is one."""
    if not rows:
        raise AttributionError("a cache holds no tokens, so the next ones are not known: give target=")
    follows = [(r, p + 1) for r, at in zip(rows, places, strict=True) for p in at]
    valid = torch.tensor([p < len(r) for r, p in follows])
    ids = torch.tensor([[int(r[p]) if p < len(r) else 0] for r, p in follows])
    _check_ids(model, ids)
    return ids, valid


def ids_of_rows(
    model: HookedModel, given: Any, places: Sequence[Sequence[int]], what: str, *, single: bool = False
) -> Int[Tensor, "row token"]:
    """Return the token ids of every position, prompt after prompt: one token for all, or an id or ids for each.

    Args:
        single: of one position, several tokens are those whose logits are averaged.

    Raises:
        AttributionError: an id outside the vocabulary, a text that is not one token, another shape.
    """
    count = sum(map(len, places))
    texts = given if isinstance(given, list | tuple) else [given]
    if any(isinstance(one, str) for one in texts):
        given = [_of_text(model, one) if isinstance(one, str) else one for one in texts]
        given = given if len(given) > 1 else given[0]
    try:
        ids = torch.as_tensor(np.asarray(given) if isinstance(given, list | tuple) else given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise AttributionError(f"{what} must be a token, or an id for each position, got {given!r}") from error
    if not ids.numel() or ids.is_floating_point() or ids.dtype == torch.bool:
        raise AttributionError(f"{what} must hold token ids, whole numbers, got {given!r}")
    _check_ids(model, ids)
    if ids.ndim == 0 or (single and ids.ndim == 1):
        return ids.reshape(1, -1).expand(count, -1).long()
    shape = (len(places), len(places[0]))
    if ids.ndim == 1:  # one for each position of one prompt, or for one position of each
        ids = ids[None] if len(places) == 1 else ids[:, None]
    if ids.shape[:2] != shape or ids.ndim not in (2, 3) or any(len(at) != shape[1] for at in places):
        raise AttributionError(f"{what} must have an id for each position, {list(shape)}, got {list(ids.shape)}")
    return ids.reshape(count, -1).long()


def _check_ids(model: HookedModel, ids: Tensor) -> None:
    size = outputs(model)
    if len(wrong := ids[(ids < 0) | (ids >= size)]):
        raise AttributionError(f"token id {int(wrong[0])} has no logit: the model has {size} (0 … {size - 1})")


def _of_text(model: HookedModel, text: str) -> int:
    if (tokenizer := tokenizer_of(model)) is None:
        raise AttributionError(f"this model has no tokenizer, so {text!r} cannot be looked up: give token ids")
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]
    if len(ids) != 1:
        raise AttributionError(f"{text!r} is {len(ids)} tokens ({ids}): give one token's text (a leading space?)")
    return ids[0]


def token_name(model: HookedModel, token: int, *, quoted: bool = True) -> str:
    """Return a token as text, or its id without a tokenizer."""
    decode = getattr(tokenizer_of(model), "decode", None)
    text = str(token if decode is None else decode([token]))
    return repr(text) if quoted and decode is not None else text


def label_of(
    model: HookedModel, target: Int[Tensor, "row token"] | None, against: Int[Tensor, "row token"] | str | None
) -> str:
    """Return what is attributed, as text; `target` None: the next token."""

    def words(ids: Tensor | str | None) -> str:
        if not isinstance(ids, Tensor):
            return "the next token" if ids is None else "the mean logit"
        if bool((ids != ids[:1]).any()):
            return "the tokens given"
        names = ", ".join(token_name(model, token) for token in ids[0, :4].tolist())
        return names + (f", … ({ids.shape[1]} tokens, their mean)" if ids.shape[1] > 4 else "")

    return f"logit of {words(target)}" + ("" if against is None else f" minus {words(against)}")


def head_of(model: HookedModel) -> tuple[Float[Tensor, "d_model d_vocab"], Float[Tensor, " d_vocab"] | None]:
    """Return W_U and b_U, of the tokens that have a logit.

    Raises:
        AttributionError: the model shows no W_U.
    """
    W_U, b_U, size = weight_of(model, "W_U"), weight_of(model, "b_U"), outputs(model)
    if W_U is None or W_U.ndim != 2:
        raise AttributionError(f"{type(model).__name__} shows no unembedding W_U [d_model d_vocab] to read logits from")
    return W_U[:, :size], None if b_U is None else b_U[:size]


def mean_columns(
    model: HookedModel, ids: Int[Tensor, "row token"] | None
) -> tuple[Float64[Tensor, "row d_model"], Float64[Tensor, " row"]]:
    """Return the means of columns of W_U and of b_U over each row's tokens (None: one row, over all tokens)."""
    W_U, b_U = head_of(model)
    if ids is None:
        vectors, lifts = W_U.mean(1, dtype=torch.float64)[None], None if b_U is None else b_U.double().mean()[None]
    else:
        at = ids.to(W_U.device)
        vectors = W_U[:, at].double().mean(2).T
        lifts = None if b_U is None else b_U[at].double().mean(1)
    vectors = before_projection(model, vectors.cpu())
    return vectors, torch.zeros(len(vectors)).double() if lifts is None else lifts.cpu()


def part_columns(part: Part) -> dict[str, object]:
    """Return the columns of a table that say which component a row is about."""
    return {"part": part.name, "kind": part.kind, "layer": part.layer, "index": part.index}


class Sums:
    """Sums over components and the model's own numbers: what every result of an attribution has.

    `values` is [component batch …]; `total`, `own` and `scale` are [batch …] (NaN where a prompt has no such position),
    or floats for one number.
    """

    components: tuple[Part, ...]
    values: Any
    total: Any
    own: Any
    scale: Any
    bound: float
    label: str
    _number = "logit"
    _remedy = ""
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
        """Return which entry it is, as text."""
        return ""

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{self.top().to_html(index=False, float_format='{:+.4g}'.format)}"

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.values.shape[1:]))
        return f"{type(self).__name__}({self.label}: {len(self.components)} components, {shape} {self._entries})"

    def _components(self) -> pd.DataFrame:
        return pd.DataFrame([part_columns(part) for part in self.components])

    def _rows(self, **positions: Tensor) -> pd.DataFrame:
        """Return a row per component and entry: `batch`, the entry's positions, and the component's columns."""
        present, each = self.values.isfinite().all(0), len(self.components)
        entries = {"batch": torch.nonzero(present)[:, 0]} | {name: at[present] for name, at in positions.items()}
        columns = pd.DataFrame({name: at.numpy().repeat(each) for name, at in entries.items()})
        components = self._components().iloc[np.tile(np.arange(each), int(present.sum()))]
        return pd.concat([columns, components.reset_index(drop=True)], axis=1)

    def top(self, k: int = TOP) -> pd.DataFrame:
        """Return the k components with the largest mean |contribution|: their columns, `mean` and `mean_abs`."""
        k = whole_number(k, "k", 1, AttributionError)
        table, values = self._components(), self.values.flatten(1)
        table["mean"], table["mean_abs"] = values.nanmean(1).numpy(), values.abs().nanmean(1).numpy()
        return table.sort_values("mean_abs", ascending=False, kind="stable").head(k).reset_index(drop=True)
