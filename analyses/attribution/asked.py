"""What is attributed: a prompt, a position in it and tokens, checked before anything runs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from ln_probe.hooks.capture import is_cache
from ln_probe.hooks.components import weight
from ln_probe.hooks.default_tokens import encode, tokenizer_of
from ln_probe.hooks.model import HookedModel, context_length, device_of, vocabulary_size

MEAN = "mean"
# A token by id or text, or several: their mean logit.
Tokens = SupportsIndex | str | Sequence[SupportsIndex | str] | Tensor | np.ndarray


class AttributionError(ValueError):
    """Something that cannot be attributed: says what was asked for, and what to ask for instead."""


def prompt(model: HookedModel, tokens: object) -> Int[Tensor, " pos"]:
    """The token ids of one prompt: text, ids [pos] or [1 pos], as tensor, array or list.

    Raises:
        AttributionError: something else; ids outside the vocabulary; longer than the context; empty.
    """
    if is_cache(tokens):
        raise AttributionError("this needs a pass of its own: give tokens, not a cache")
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
        raise AttributionError(f"attribution is of one prompt, [pos] or [1 pos] token ids: got {list(ids.shape)}")
    if len(ids) > context_length(model):
        raise AttributionError(
            f"{len(ids)} tokens are more than the context of {context_length(model)}: cut the prompt"
        )
    size = vocabulary_size(model)
    wrong = ids[(ids < 0) | (ids >= size)]
    if len(wrong):
        raise AttributionError(f"token id {int(wrong[0])} is outside the vocabulary of {size} (0 … {size - 1})")
    found: Tensor = ids.long().to(device_of(model))
    return found


def place(
    position: SupportsIndex, length: int, what: str = "position", whole: str = "the prompt", parts: str = "tokens"
) -> int:
    """A position from 0, negative ones counted from the end; or the like: a layer of the model, a head of a layer.

    Raises:
        AttributionError: there is none.
    """
    found = _whole(position, what)
    if not -length <= found < length:
        raise AttributionError(f"{what} {found} is out of range: {whole} has {length} {parts} (0 … {length - 1})")
    return found % length


def _whole(value: object, what: str) -> int:
    """A whole number of any kind (a tensor's or an array's entry too).

    Raises:
        AttributionError: it is none.
    """
    if isinstance(value, bool):
        raise AttributionError(f"{what} must be a whole number, got {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError) as error:
        raise AttributionError(f"{what} must be a whole number, got {value!r}") from error


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
        token = _of_text(model, one) if isinstance(one, str) else _whole(one, "a token id")
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


@dataclass(frozen=True, eq=False)
class Direction:
    """What is read off the final norm's output: vector·LN(x) + bias is the logit, or the difference of two.

    Attributes:
        vector: [d_model]; bias: the unembedding's share.
        label: in words.
    """

    vector: Float64[Tensor, " d_model"]
    bias: float
    label: str


def direction(
    model: HookedModel, target: list[int], against: list[int] | str | None, names: Callable[[int], str] | None = None
) -> Direction:
    """The direction of the mean logit of `target`, minus that of `against`.

    Raises:
        AttributionError: the model shows no W_U.
    """
    vector, bias = _mean_column(model, target)
    label = "logit of " + _said(target, names)
    if against is not None:
        other, lift = _mean_column(model, None if isinstance(against, str) else against)
        vector, bias = vector - other, bias - lift
        label += " minus " + ("the mean logit" if isinstance(against, str) else _said(against, names))
    return Direction(vector, bias, label)


def _said(ids: Sequence[int], names: Callable[[int], str] | None) -> str:
    shown = [repr(names(i)) if names is not None else str(i) for i in ids[:4]]
    return ", ".join(shown) + (f", … ({len(ids)} tokens, their mean)" if len(ids) > 4 else "")


def _mean_column(model: HookedModel, ids: list[int] | None) -> tuple[Float64[Tensor, " d_model"], float]:
    """Mean over tokens (None: the vocabulary) of the columns of W_U, and of b_U."""
    W_U, b_U = weight(model, "W_U"), weight(model, "b_U")
    if W_U is None or W_U.ndim != 2:
        raise AttributionError(f"{type(model).__name__} shows no unembedding W_U [d_model d_vocab] to read logits from")
    size = outputs(model)
    chosen = W_U[:, ids].double() if ids is not None else W_U[:, :size]
    lift = 0.0
    if b_U is not None:
        lift = float((b_U[ids] if ids is not None else b_U[:size]).double().mean())
    return chosen.mean(1, dtype=torch.float64).cpu(), lift


def outputs(model: HookedModel) -> int:
    """How many tokens have a logit: `d_vocab_out` where a model says so (its outputs may be others than its inputs)."""
    declared = getattr(model.cfg, "d_vocab_out", None)
    size = declared if isinstance(declared, int) and declared > 0 else vocabulary_size(model)
    W_U = weight(model, "W_U")
    return size if W_U is None else min(size, int(W_U.shape[1]))


def soft_cap(model: HookedModel) -> float:
    """What the model squashes its logits to, cap·tanh(logit / cap); 0 if it does not."""
    cap = getattr(model.cfg, "output_logits_soft_cap", None)
    return float(cap) if isinstance(cap, int | float) and cap > 0 else 0.0
