"""The task that a model is measured on: prompts as token ids, and the loss of its output.

A bundled model brings windows of held-out text; any other model with a tokenizer gets the bundled passages. Both have
two parts without a common prompt: *measured*, on which effects are measured, and *calibration*.
"""

from __future__ import annotations

import importlib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.hooks.model import Facts, at_least_float32, probe_tokens

# -------------------------------------------------------------------- token ids

Rows = Int[Tensor, "batch pos"] | Sequence[Sequence[int] | Int[Tensor, " _"]]
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tokens(facts: Facts, tokens: object) -> list[Int[Tensor, " _"]]:
    """Return token ids as one tensor per prompt, from [pos], [batch pos] or a list of rows of different lengths.

    Raises:
        TypeError: neither a tensor nor a list of rows.
        ValueError: anything but whole numbers, other axes, or an empty row; a row that is longer than the
            context, or that holds an id outside the vocabulary.
    """
    if not isinstance(tokens, Tensor | list | tuple):
        raise TypeError(f"tokens must be a tensor of ids [batch pos] or a list of rows, got {type(tokens).__name__}")
    rows: list[Tensor] = []
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        every = tokens[None] if isinstance(tokens, Tensor) and tokens.ndim == 1 else tokens
        rows = [torch.as_tensor(row) for row in every]
    if not rows or not all(r.ndim == 1 and len(r) > 0 and r.dtype in _WHOLE for r in rows):
        given = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else repr(tokens)[:60]
        raise ValueError(f"tokens must be whole numbers [batch pos] or a list of rows, none empty, got {given}")
    size, limit = facts.vocabulary, facts.context
    for row in rows:
        if len(row) > limit:
            raise ValueError(f"{len(row)} tokens are more than the context of {limit}: cut the prompt")
        if len(wrong := row[(row < 0) | (row >= size)]):
            raise ValueError(f"token id {int(wrong[0])} is outside the vocabulary of {size} (0 … {size - 1})")
    return [row.long() for row in rows]


def encode(facts: Facts, text: str, *, prepend_bos: bool | None = None) -> Int[Tensor, " pos"]:
    """Return the token ids of one text.

    Args:
        facts: of a model with a tokenizer.
        text: not empty.
        prepend_bos: whether to begin with the tokenizer's first token; None: as the model was trained.

    Raises:
        ValueError: no tokenizer, a tokenizer without a first token to put there or that fails, or an empty text.
    """
    tokenizer = facts.tokenizer
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: pass token ids")
    if not text.strip():
        raise ValueError(f"an empty text ({text!r}): every prompt needs some text")
    try:
        ids = [int(i) for i in tokenizer(text)["input_ids"]]
    except Exception as error:
        raise ValueError(f"the tokenizer fails on {text[:40]!r} ({type(error).__name__}: {error})") from error
    first = getattr(tokenizer, "bos_token_id", None)
    if prepend_bos and first is None:
        raise ValueError("prepend_bos=True, but this model's tokenizer has no first token (bos_token_id): leave it out")
    wanted = facts.prepend_bos if prepend_bos is None else prepend_bos
    if first is not None and wanted and ids[:1] != [first]:
        ids = [int(first), *ids]
    elif prepend_bos is False and ids[:1] == [first] and len(ids) > 1:
        ids = ids[1:]
    while first is not None and ids[:2] == [first, first]:  # (written in the text, and added by the tokenizer)
        ids = ids[1:]
    return torch.tensor(ids)


def unpadded(facts: Facts, rows: list[Int[Tensor, " _"]]) -> tuple[list[Int[Tensor, " _"]], tuple[str, ...]]:
    """Return rows of one length without the padding token at either end, and a note about it.

    Where that token begins or ends texts too (GPT-2), and every row has it at that end, one of it stays. Rows of
    several lengths are not padded.

    Raises:
        ValueError: a row is nothing but padding.
    """
    pad = next(iter(facts.special["pad"]), None)
    if pad is None or len(set(map(len, rows))) != 1 or not len(rows[0]):
        return rows, ()
    spans = [(row != pad).nonzero()[:, 0].tolist() for row in rows]
    if not all(spans):
        raise ValueError(f"prompt {spans.index([])} is nothing but padding (token {pad})")
    most = int(pad in (*facts.special["bos"], *facts.special["eos"]))  # of it that is text
    first, last = [span[0] for span in spans], [span[-1] for span in spans]
    left, right = min(*first, most), min(len(rows[0]) - 1 - max(last), most)
    cut = [row[start - left : end + 1 + right] for row, start, end in zip(rows, first, last, strict=True)]
    padded = sum(len(row) > len(rest) for row, rest in zip(rows, cut, strict=True))
    note = f"padding (token {pad}) was left out of {padded} of {len(rows)} prompts"
    return cut, (f"{note}; pass the attention_mask too if some of it is text",) * bool(padded)


def unpadded_rows(facts: Facts, tokens: object) -> list[Int[Tensor, " _"]]:
    """Return `check_tokens` without padding, and warn if there was some."""
    rows, notes = unpadded(facts, check_tokens(facts, tokens))
    for note in notes:
        warnings.warn(f"tokens: {note}", stacklevel=4)
    return rows


# -------------------------------------------------------------- default prompts

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


@cache
def bundled_texts(split: str = MEASURED) -> tuple[str, ...]:
    """Return one part of the bundled passages, which were written for this project."""
    lines = resources.files("ln_probe").joinpath("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    passages = [json.loads(line) for line in lines]
    return tuple(passage["text"] for passage in passages if passage["split"] == split)


def default_tokens(facts: Facts, split: str = MEASURED) -> list[Int[Tensor, " _"]]:
    """Return one part of a bundled model's own prompts, or of the bundled passages.

    Raises:
        ValueError: the model has neither prompts of its own nor a tokenizer.
    """
    limit = min(MAX_TOKENS, facts.context)
    if (own := facts.bundled_prompts) is not None:
        return [row[:limit] for row in (own.measured if split == MEASURED else own.calibration)]
    if facts.tokenizer is None:
        raise ValueError("this model has no tokenizer and no prompts of its own: pass token ids (tokens= or prompts=)")
    return [encode(facts, text)[:limit] for text in bundled_texts(split)]


# --------------------------------------------------------------------- the loss

# From the model's output and the token ids [batch pos] to the mean loss of each prompt [batch]; lower is better.
Loss = Callable[[Any, Tensor], Tensor]
# In a causal model a later token changes earlier logits only by the rounding of another batch row (1e-2 in bf16).
_SAME_LOGITS = 2e-2


class ObjectiveError(ValueError):
    """A loss that cannot be used: names it and what it returned."""


@dataclass(frozen=True)
class Objective:
    """A loss of each prompt, and its weight in a mean over prompts.

    Attributes:
        function: the user's loss; None: the mean next-token loss, in nats per token.
        name: `module:function`, for provenance; "next-token loss" for the default.
    """

    function: Loss | None = None
    name: str = "next-token loss"

    @classmethod
    def of(cls, given: object) -> Objective:
        """Return the objective for None, a function, or the text "module:function".

        Raises:
            ObjectiveError: no such module or function, or something that cannot be called.
        """
        if given is None:
            return cls()
        function = given
        if isinstance(given, str):
            module, _, attribute = given.partition(":")
            try:
                function = getattr(importlib.import_module(module), attribute)
            except Exception as error:  # whatever the module raises while it is imported
                raise ObjectiveError(f"loss {given!r} must be module:function ({error})") from error
        if not callable(function):
            raise ObjectiveError(f"loss must be a function of (output, tokens), got {type(function).__name__}")
        name = f"{getattr(given, '__module__', '')}:{getattr(given, '__qualname__', type(given).__name__)}"
        return cls(function, given if isinstance(given, str) else name)

    @property
    def unit(self) -> str:
        """What a mean is given in: nats/token, or "units of module:function" under a loss of the user's."""
        return "nats/token" if self.function is None else f"units of {self.name}"

    def weight(self, tokens: Int[Tensor, " pos"]) -> int:
        """Return what a prompt counts in a mean over prompts: the tokens it predicts, or 1 under a user's loss."""
        return max(0, len(tokens) - 1) if self.function is None else 1

    def sums(self, output: Any, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, " batch"]:
        """Return the loss of each prompt times its weight, float64; differentiable where the loss is."""
        return self.by_token(output, tokens).sum(-1, dtype=torch.float64)

    def by_token(self, output: Any, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch next"]:
        """Return the loss of each predicted token, or one number per prompt under a user's loss.

        Args:
            output: of the model, with `return_type="logits"`.
            tokens: equal in length.

        Raises:
            ObjectiveError: the user's loss raised, or returned something else than one number per prompt.
        """
        if self.function is None:
            logits, wanted = at_least_float32(output[:, :-1]), tokens[:, 1:].to(output.device)
            losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
            return losses.view(wanted.shape)
        try:
            losses = self.function(output, tokens)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ObjectiveError(f"{self.name}(output, tokens) raised {type(error).__name__}: {error}") from error
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != [len(tokens)] or not losses.is_floating_point():
            raise ObjectiveError(f"{self.name} must return floating-point numbers [{len(tokens)}], got {shape}")
        return losses.double()[:, None]

    def obstacle(self, facts: Facts, logits: Any) -> str:
        """Return why no loss of a model means anything; empty if it does, or if the user's loss decides.

        Args:
            facts: of the model.
            logits: of `twins`, or what the model gives in their place.
        """
        if facts.missing_head or self.function is not None:
            return facts.missing_head
        outputs = logits.shape[-1] if isinstance(logits, Tensor) and logits.ndim == 3 else 0
        if outputs < facts.vocabulary:
            size = facts.vocabulary
            return f"the model has {outputs} outputs for {size} tokens, so there is no next-token loss; give loss="
        ahead = (logits[0, :-1].float() - logits[1, :-1].float()).abs().max()
        if ahead > _SAME_LOGITS * logits.float().abs().max().clamp_min(1.0):
            return "attention is bidirectional, so there is no next-token loss; give loss="
        return ""

    @torch.no_grad()
    def check(self, output: Any, tokens: Int[Tensor, "1 pos"]) -> None:
        """Raise ObjectiveError if the user's loss of one prompt is not finite, or another value the second time."""
        if self.function is None:
            return
        first, second = float(self.sums(output, tokens)[0]), float(self.sums(output, tokens)[0])
        if not math.isfinite(first) or first != second:
            raise ObjectiveError(f"{self.name} returned {first} and {second} on one output: must be finite and fixed")


def twins(facts: Facts) -> Int[Tensor, "2 4"]:
    """Return two prompts that differ in the last token: with causal attention, all other logits are equal."""
    tokens = probe_tokens(facts.vocabulary, 4).repeat(2, 1)
    tokens[1, -1] = 0
    return tokens
