"""What both attributions share: checked prompts, positions and tokens, and the picture of a sum as bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from markupsafe import Markup
from torch import Tensor

from ln_probe.hooks.capture import is_cache
from ln_probe.hooks.components import Part
from ln_probe.hooks.default_tokens import encode, tokenizer_of
from ln_probe.hooks.model import HookedModel, before_projection, device_of, outputs, weight_of, whole_number
from ln_probe.hooks.scales import check_ids

MEAN = "mean"
TOP = 12  # bars before the rest, rows of `top`: what fits a notebook cell
# A token by id or text, or several: their mean logit.
Tokens = SupportsIndex | str | Sequence[SupportsIndex | str] | Tensor | np.ndarray


class AttributionError(ValueError):
    """Something that cannot be attributed: says what was asked for, and what to ask for instead."""


def prompts(model: HookedModel, tokens: object) -> list[Int[Tensor, " _"]]:
    """One or several prompts: what `prompt` takes, ids [batch pos], or a list of texts or of rows of ids.

    Raises:
        AttributionError: as `prompt`, with the number of the prompt where there are several.
    """
    shape = getattr(tokens, "shape", None)
    several = (shape is not None and len(shape) == 2) or (
        isinstance(tokens, list | tuple)
        and len(tokens) > 0
        and (isinstance(tokens[0], str | list | tuple) or getattr(tokens[0], "ndim", 0) > 0)
    )
    if not several:
        return [prompt(model, tokens)]
    rows: list[Tensor] = []
    for row in cast(Iterable[object], tokens):
        try:
            rows.append(prompt(model, row))
        except AttributionError as error:
            raise AttributionError(
                f"prompt {len(rows)}: {error}" if len(cast(Any, tokens)) > 1 else str(error)
            ) from error
    if not rows:
        raise AttributionError("the prompt is empty: give at least one token")
    return rows


def prompt(model: HookedModel, tokens: object) -> Int[Tensor, " pos"]:
    """The token ids of one prompt: text, ids [pos] or [1 pos], as tensor, array or list.

    Raises:
        AttributionError: something else; ids outside the vocabulary; longer than the context; empty.
    """
    if is_cache(tokens):
        raise AttributionError("this runs the model: give tokens, not a cache")
    ids: Any
    if isinstance(tokens, str):
        try:
            ids = encode(model, tokens)
        except ValueError as error:
            raise AttributionError(str(error)) from error
    else:
        try:
            ids = torch.as_tensor(np.asarray(tokens) if isinstance(tokens, list | tuple) else tokens)
        except (TypeError, ValueError, RuntimeError) as error:
            raise AttributionError(f"tokens must be text or token ids of one prompt, got {tokens!r}") from error
    if not ids.numel():
        raise AttributionError("the prompt is empty: give at least one token")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise AttributionError(f"token ids are whole numbers, got {str(ids.dtype).removeprefix('torch.')}")
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise AttributionError(f"a prompt is [pos] or [1 pos] token ids (several: [batch pos]): got {list(ids.shape)}")
    try:
        check_ids(model, ids)
    except ValueError as error:
        raise AttributionError(str(error)) from error
    found: Tensor = ids.long().to(device_of(model))
    return found


def is_index(positions: object) -> bool:
    return positions is not None and (not isinstance(positions, Tensor | np.ndarray) or positions.ndim == 0)


def places_of(positions: Any, length: int) -> list[int]:
    """The positions of one prompt that are asked for, from 0."""
    if positions is None:
        return list(range(length))
    if isinstance(positions, str | dict | set):
        raise AttributionError(f"positions must be None, an index, a slice or a list of indices, got {positions!r}")
    if isinstance(positions, slice):
        if not (within := list(range(length))[positions]):
            raise AttributionError(f"{positions} holds none of the prompt's {length} positions: give at least one")
        return within
    if is_index(positions) and not isinstance(positions, Sequence):
        return [place(positions, length)]
    several = positions.tolist() if isinstance(positions, Tensor | np.ndarray) else list(positions)
    if not several:
        raise AttributionError("an empty list of positions: give at least one, or None for all")
    return [place(one, length) for one in several]


def of_equal_length(lengths: Sequence[int]) -> list[list[int]]:
    """Prompts that run together: padding would change what a bidirectional model reads."""
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault(length, []).append(number)
    return list(groups.values())


def row_number(places: Sequence[Sequence[int]], prompt_number: int, k: int) -> int:
    return sum(len(at) for at in places[:prompt_number]) + k


def ids_of_rows(
    model: HookedModel, target: Any, places: Sequence[Sequence[int]], rows: Sequence[Int[Tensor, " _"]]
) -> tuple[Int[Tensor, "row token"], Bool[Tensor, " row"]]:
    """The target of every position asked for, prompt after prompt; and whether there is one."""
    count = sum(map(len, places))
    if target is None:
        if not rows:
            raise AttributionError("a cache holds no tokens, so the next ones are not known: give target=")
        follows = [
            (int(r[p + 1]), True) if p + 1 < len(r) else (0, False)
            for r, at in zip(rows, places, strict=True)
            for p in at
        ]
        if beyond := [i for i, _ in follows if i >= outputs(model)]:
            raise AttributionError(
                f"token id {beyond[0]}, the next one at one of these positions, has no logit: the model has "
                f"{outputs(model)} outputs. Give target=, or positions= that no such token follows"
            )
        return torch.tensor([[i] for i, _ in follows]), torch.tensor([k for _, k in follows])
    return others_of_rows(model, target, places, "target"), torch.ones(count, dtype=torch.bool)


def others_of_rows(model: HookedModel, given: Any, places: Sequence[Sequence[int]], what: str = "against") -> Any:
    """Token ids [row token] of every position; None and "mean" as they are."""
    if given is None or (isinstance(given, str) and given == MEAN and what == "against"):
        return given
    count = sum(map(len, places))
    if isinstance(given, str) or (is_index(given) and not isinstance(given, Sequence)):
        return torch.tensor(token_ids(model, given)).expand(count, -1)
    try:
        ids = torch.as_tensor(given if isinstance(given, Tensor) else np.asarray(given))
    except (TypeError, ValueError) as error:
        raise AttributionError(f"{what} must be a token, or an id for each position: got {given!r}") from error
    if not ids.numel():
        raise AttributionError(f"{what} is an empty list of tokens: give an id for each position, or None")
    shape = (len(places), len(places[0]))
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise AttributionError(
            f"{what} must hold token ids, whole numbers: got {str(ids.dtype).removeprefix('torch.')}"
        )
    if ids.ndim == 1 and len(places) == 1:
        ids = ids[None]
    if ids.ndim == 1 and shape[1] == 1:  # one for each prompt
        ids = ids[:, None]
    if ids.shape[:2] != shape or ids.ndim not in (2, 3) or any(len(at) != shape[1] for at in places):
        raise AttributionError(f"{what} must have an id for each position, {list(shape)}, got {list(ids.shape)}")
    flat_ids = ids.reshape(count, -1).long()
    for one in flat_ids.unique().tolist():
        token_ids(model, one)
    return flat_ids


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
    size, found = outputs(model), []
    for one in several:
        token = (
            _of_text(model, one) if isinstance(one, str) else whole_number(one, "a token id", error=AttributionError)
        )
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


def token_names(ids: Sequence[int], names: Callable[[int], str] | None) -> str:
    """Tokens as text, or their ids without a tokenizer."""
    shown = [repr(names(i)) if names is not None else str(i) for i in ids[:4]]
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


def soft_cap(model: HookedModel) -> float:
    """What the model squashes its logits to, cap·tanh(logit / cap); 0 if it does not."""
    cap = getattr(model.cfg, "output_logits_soft_cap", None)
    return float(cap) if isinstance(cap, int | float) and cap > 0 else 0.0


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


class SumsAtPositions(Sums):
    """Sums at several positions of one or several prompts.

    `values` is [component batch …], `total` one of its components' sums [batch …].
    """

    components: tuple[Part, ...]
    values: Any

    def _components(self) -> pd.DataFrame:
        return pd.DataFrame([part_columns(part) for part in self.components])

    def _rows(self, **positions: Tensor) -> pd.DataFrame:
        """A row per component and entry: `batch`, the entry's positions, and the component's columns."""
        present, each = self.total.isfinite(), len(self.components)
        table = self._components().iloc[np.tile(np.arange(each), int(present.sum()))].reset_index(drop=True)
        columns = {"batch": torch.nonzero(present)[:, 0]} | {n: at[present] for n, at in positions.items()}
        for i, (name, at) in enumerate(columns.items()):
            table.insert(i, name, at.numpy().repeat(each))
        return table

    def top(self, k: int = TOP) -> pd.DataFrame:
        """The k components with the largest mean |contribution|: their columns, `mean` and `mean_abs`."""
        k = whole_number(k, "k", 1, AttributionError)
        table, values = self._components(), self.values.flatten(1)
        table["mean"], table["mean_abs"] = values.nanmean(1).numpy(), values.abs().nanmean(1).numpy()
        return table.sort_values("mean_abs", ascending=False, kind="stable").head(k).reset_index(drop=True)


# ------------------------------------------------------------------------------------------------------------- pictures

_WIDTH, _ROW, _LABEL, _NUMBER, _LETTER = 640, 20, 190, 70, 6.4  # pixels
_LONGEST = 360  # pixels of the widest label
_UP, _DOWN, _REST = "#2166ac", "#b2182b", "#888888"  # colour-blind safe (ColorBrewer RdBu)


@dataclass(frozen=True)
class Bar:
    """One summand: a label, its value, and what it would be without projection (None: no mark)."""

    label: str
    value: float
    mark: float | None = None
    rest: bool = False


def largest(bars: Sequence[Bar], top: int = TOP) -> list[Bar]:
    """The `top` largest by absolute value, and one bar for all others."""
    ranked = sorted(bars, key=lambda b: -abs(b.value))
    shown, others = ranked[:top], ranked[top:]
    if len(others) == 1:
        return [*shown, *others]
    if others:
        marked = all(b.mark is not None for b in others)
        mark = sum(b.mark or 0.0 for b in others) if marked else None
        shown.append(Bar(f"{len(others)} others", sum(b.value for b in others), mark, rest=True))
    return shown


def draw(bars: Sequence[Bar], title: str, note: str = "") -> Markup:
    """Bars as SVG with their numbers, the title above and a note below; everything escaped."""
    values = [v for b in bars for v in (b.value, b.mark) if v is not None]
    low, high = min([0.0, *values]), max([0.0, *values])
    span = (high - low) or 1.0
    wide = min(max([_LABEL, *(round(8 + _LETTER * len(b.label)) for b in bars)]), _LONGEST)
    room = _WIDTH - wide - _NUMBER

    def at(value: float) -> float:
        return wide + (value - low) / span * room

    rows = [_bar(bar, i * _ROW, at, wide) for i, bar in enumerate(bars)]
    zero = _line(at(0.0), 0, len(bars) * _ROW, 1, 0.4)
    svg = Markup(
        '<svg viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" aria-label="{title}" '
        'style="font:12px sans-serif;max-width:100%">{zero}{rows}</svg>'
    ).format(w=_WIDTH, h=len(bars) * _ROW + 4, title=title, zero=zero, rows=Markup("").join(rows))
    below = Markup('<div style="font:12px sans-serif;opacity:0.75;max-width:{}px">{}</div>').format(_WIDTH, note)
    head = Markup('<div style="font:600 14px sans-serif;margin:4px 0">{}</div>').format(title)
    return Markup("<div>{}{}{}</div>").format(head, svg, below if note else "")


def _bar(bar: Bar, y: int, at: Callable[[float], float], wide: int) -> Markup:
    colour = _REST if bar.rest else _UP if bar.value >= 0 else _DOWN
    left, right = sorted((at(0.0), at(bar.value)))
    label = Markup('<text x="{}" y="{}" text-anchor="end" fill="currentColor">{}</text>').format(
        wide - 8, y + 14, bar.label
    )
    box = Markup(
        '<rect x="{:.1f}" y="{}" width="{:.1f}" height="{}" fill="{}"><title>{}: {:.6g}</title></rect>'
    ).format(left, y + 4, max(right - left, 1.0), _ROW - 8, colour, bar.label, bar.value)
    mark = Markup("") if bar.mark is None else _line(at(bar.mark), y + 2, y + _ROW - 2, 2, 1.0)
    number = Markup('<text x="{}" y="{}" fill="currentColor">{:+.3g}</text>').format(
        _WIDTH - _NUMBER + 8, y + 14, bar.value
    )
    return label + box + mark + number


def _line(x: float, top: int, bottom: int, wide: int, opacity: float) -> Markup:
    where = Markup('<line x1="{0:.1f}" x2="{0:.1f}" y1="{1}" y2="{2}" ').format(x, top, bottom)
    return where + Markup('stroke="currentColor" stroke-width="{}" stroke-opacity="{}"/>').format(wide, opacity)
