"""Text as token ids, and the prompts that a model is measured on by default.

A bundled model brings windows of held-out text; any other model with a tokenizer gets the bundled passages. Both come
in two parts that have no prompt in common: *measured*, on which effects are measured, and *calibration*.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.hooks.model import HookedModel, context_length, vocabulary_size

MAX_TOKENS = 512  # longer texts are cut
CALIBRATION, MEASURED = "calibration", "measured"


@dataclass(frozen=True, eq=False)
class BundledPrompts:
    """Prompts that a bundled model brings: held-out text of the kind that it was trained on.

    Attributes:
        measured, calibration: token ids of each prompt.
        source: what provenance and pages call them.
        strata: the book of each measured prompt; any number of the first ones is balanced over the books.
    """

    measured: tuple[Int[Tensor, " _"], ...]
    calibration: tuple[Int[Tensor, " _"], ...]
    source: str
    strata: tuple[str, ...] = ()


def bundled_prompts(model: HookedModel) -> BundledPrompts | None:
    """Return the prompts that the loader left on a bundled model; None for other models."""
    prompts = getattr(model, "__dict__", {}).get("bundled_prompts")
    return prompts if isinstance(prompts, BundledPrompts) else None


@cache
def bundled_texts(split: str = MEASURED) -> tuple[str, ...]:
    """Return one part of the bundled passages, which were written for this project."""
    lines = resources.files("ln_probe").joinpath("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    passages = [json.loads(line) for line in lines]
    return tuple(passage["text"] for passage in passages if passage["split"] == split)


def tokenizer_of(model: HookedModel) -> Any:
    """Return the model's tokenizer, or None."""
    return getattr(model, "tokenizer", None)


def encode(model: HookedModel, text: str, *, prepend_bos: bool | None = None) -> Int[Tensor, " pos"]:
    """Return the token ids of one text.

    Args:
        model: a model with a tokenizer.
        text: not empty.
        prepend_bos: whether to begin with the tokenizer's first token; None: as the model was trained.

    Raises:
        ValueError: the model has no tokenizer, its tokenizer no first token to put there, or the text is empty or one
            that the tokenizer fails on.
    """
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so text cannot be turned into tokens: pass token ids")
    if not text.strip():
        raise ValueError(f"an empty text ({text!r}): every prompt needs some text")
    try:
        ids = [int(i) for i in tokenizer(text)["input_ids"]]
    except Exception as error:
        raise ValueError(f"the tokenizer fails on {text[:40]!r} ({type(error).__name__}: {error})") from error
    first = getattr(tokenizer, "bos_token_id", None)
    wanted = bool(getattr(model.cfg, "default_prepend_bos", True)) if prepend_bos is None else prepend_bos
    if prepend_bos and first is None:
        raise ValueError("prepend_bos=True, but this model's tokenizer has no first token (bos_token_id): leave it out")
    if first is not None and ids[:1] != [first] and wanted:
        ids = [int(first), *ids]
    elif prepend_bos is False and first is not None and ids[:1] == [first] and len(ids) > 1:
        ids = ids[1:]
    return torch.tensor(ids)


def default_tokens(model: HookedModel, split: str = MEASURED) -> list[Int[Tensor, " _"]]:
    """Return one part of a bundled model's own prompts, or of the bundled passages.

    Raises:
        ValueError: the model has neither prompts of its own nor a tokenizer.
    """
    limit = min(MAX_TOKENS, context_length(model))
    if (own := bundled_prompts(model)) is not None:
        return [row[:limit] for row in (own.measured if split == MEASURED else own.calibration)]
    if tokenizer_of(model) is None:
        raise ValueError(
            "this model has no tokenizer and no prompts of its own: pass token ids as prompts= (or tokens=)"
        )
    return [encode(model, text)[:limit] for text in bundled_texts(split)]


def special_tokens(model: HookedModel, kind: str) -> list[int]:
    """Return the ids of the model's "eos", "bos" or "pad" tokens, as its tokenizer and its configuration have them.

    A model without its original (a HookedTransformer) is asked for the `special_token_ids` that `load_model` leaves on
    it. Ids outside the vocabulary are left out (GPT-2's default configuration names 50256 for any vocabulary).
    """
    original = getattr(model, "original_model", None)
    holders = (tokenizer_of(model), getattr(original, "config", None), getattr(original, "generation_config", None))
    values = [getattr(holder, f"{kind}_token_id", None) for holder in holders]
    values.append(getattr(model, "__dict__", {}).get("special_token_ids", {}).get(kind))
    ids = [i for value in values for i in (value if isinstance(value, list | tuple) else [value])]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocabulary_size(model)))
