"""What a model is run on: the bundled prompts, the user's text or token ids, or sequences sampled from the model."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.wording import encodable
from ln_probe.hooks.default_tokens import (
    COMMONEST_SHARE,
    MAX_TOKENS,
    bundled_texts,
    commonest,
    encode,
    sample,
    special_tokens,
    tokenizer_of,
)
from ln_probe.hooks.model import HookedModel, context_length, vocabulary_size
from ln_probe.prompting.sources import BUNDLED, SAMPLED, Entry, entries

# How many prompts a report shows the beginnings of, how much of each, and how many of the commonest tokens.
_SHOWN_PROMPTS, _SHOWN_TOKENS, _COMMONEST = 64, 24, 12
_FEW_TOKENS = 20  # of which a third can be the same by chance


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts as token ids, with how to show them and where they came from.

    Attributes:
        tokens: one tensor [pos] per prompt.
        strings: token strings by prompt and position (the ids themselves where there is no tokenizer).
        source: "bundled", "sampled", "tokens", "texts" or a file's name.
        notes: what was done to them (cut, sampled), in plain sentences.
        name_of: the string of a token id.
        given: how many tokens each prompt had before it was cut.
    """

    tokens: tuple[Int[Tensor, " _"], ...]
    strings: tuple[tuple[str, ...], ...]
    source: str
    notes: tuple[str, ...]
    name_of: Callable[[int], str]
    given: tuple[int, ...]

    @property
    def summary(self) -> dict[str, Any]:
        """What a report's provenance says of them."""
        return summary(self.source, self.tokens, self.name_of)


def summary(
    source: str, rows: Iterable[Int[Tensor, " _"]], name_of: Callable[[int], str] | None = None
) -> dict[str, Any]:
    """Source, counts and hash (of the token ids, prompt by prompt) of any number of prompts.

    With `name_of`, also what a reader can judge them by: how the first of them begin, the commonest tokens with their
    shares, and how many prompts are the same as an earlier one.
    """
    digest = hashlib.sha256()
    lengths = []
    counts = Counter[int]()
    seen: set[tuple[int, ...]] = set()
    begin: list[str] = []
    for row in rows:
        ids = row.tolist()
        digest.update(np.asarray([len(row), *ids], np.int64).tobytes())
        lengths.append(len(row))
        counts.update(ids)
        seen.add(tuple(ids))
        if name_of is not None and len(begin) < _SHOWN_PROMPTS:
            begin.append("".join(_spaced([name_of(i) for i in ids[:_SHOWN_TOKENS]])))
    shown: dict[str, Any] = {}
    if name_of is not None:
        common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:_COMMONEST]
        shown = {
            "commonest": {name_of(i): round(n / sum(lengths), 4) for i, n in common},
            "repeated": len(lengths) - len(seen),
            "begin": begin,
        }
    return {
        "source": source,
        "count": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths, default=0),
        "sha256": digest.hexdigest(),
        **shown,
    }


def _spaced(names: Sequence[str]) -> list[str]:
    """Token strings as one text: spaces go between names of tokens (`<EOS>`, ids), not between pieces of words."""
    words = all(n.isdigit() or (n[:1] == "<" and n[-1:] == ">") or len(n) > 1 for n in names)
    pieces = any(n[:1].isspace() for n in names)
    return [n if pieces or not words else f"{n} " for n in names]


def make_prompts(
    model: HookedModel,
    prompts: Sequence[str] | str | Path | Tensor | None = None,
    *,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
) -> Prompts:
    """Prompts for `model` from whatever the user gave.

    Args:
        prompts: None (bundled texts; sampled sequences if the model has no tokenizer), texts, token ids [batch pos],
            "sampled", or a file: `.txt` (a prompt a paragraph), `.jsonl` (`{"text": …}` or `{"tokens": […]}` a line),
            `.npy` (ids [batch pos] or [pos]).
        max_tokens: longer prompts are cut to this, and to the model's context.
        seed: of sampled sequences.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: no prompts, an empty prompt, ids outside the vocabulary, text without a tokenizer, unknown format.
        TypeError: something that is none of the above.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    limit = min(max_tokens, context_length(model))
    if prompts is None:
        if tokenizer_of(model) is None:
            return _sampled(
                model,
                limit,
                seed,
                "the model has no tokenizer, so prompts were sampled from the model itself",
            )
        return _finish(model, [encode(model, t) for t in bundled_texts()], BUNDLED, limit)
    if isinstance(prompts, str | Path):
        if str(prompts) == SAMPLED:
            return _sampled(model, limit, seed, "prompts were sampled from the model itself")
        path = Path(prompts)
        if not path.exists():
            hint = (
                ' (a text to analyze goes in a list: prompts=["…"])'
                if isinstance(prompts, str) and not path.suffix
                else ""
            )
            raise FileNotFoundError(f"no prompts file {str(prompts)!r}{hint}")
        return of_entries(model, entries(path), path.name, max_tokens=max_tokens)
    if isinstance(prompts, Tensor):
        return _finish(model, _rows(prompts, "prompts"), "tokens", limit)
    if isinstance(prompts, Sequence) and all(isinstance(t, str) for t in prompts):
        return _finish(model, [encode(model, t) for t in prompts], "texts", limit)
    raise TypeError(f"prompts must be texts, token ids [batch pos], a file or 'sampled', got {type(prompts).__name__}")


def _rows(ids: Tensor, where: str) -> list[Tensor]:
    if ids.ndim != 2 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{where}: token ids must be whole numbers [batch pos], got {ids.dtype} {list(ids.shape)}")
    return list(ids.long().cpu())


def of_entries(model: HookedModel, found: Iterable[Entry], source: str, *, max_tokens: int = MAX_TOKENS) -> Prompts:
    """Prompts for `model` from texts and ids that were read already; arguments and errors as `make_prompts`."""
    rows = [encode(model, e) if isinstance(e, str) else torch.tensor(e, dtype=torch.long) for e in found]
    return _finish(model, rows, source, min(max_tokens, context_length(model)))


def _finish(
    model: HookedModel, rows: Sequence[Tensor], source: str, limit: int, notes: tuple[str, ...] = ()
) -> Prompts:
    if not rows:
        raise ValueError(f"no prompts ({source} is empty): give at least one")
    size = vocabulary_size(model)
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompt {number} has no tokens")
        wrong = row[(row < 0) | (row >= size)]
        if len(wrong):
            raise ValueError(
                f"prompt {number}: token id {int(wrong[0])} is outside the vocabulary of {size} (0 … {size - 1})"
            )
    given = tuple(map(len, rows))
    cut = tuple(row[:limit] for row in rows)
    name_of = namer(model)
    strings = tuple(tuple(map(name_of, row.tolist())) for row in cut)
    said = (*notes, *cut_notes(given, limit, context_length(model)), *monotony_notes(cut, name_of))
    return Prompts(cut, strings, source, said, name_of, given)


def cut_notes(given: Sequence[int], limit: int, context: int) -> tuple[str, ...]:
    """What to say about prompts that had more tokens than were used, from the lengths of all."""
    long = sum(length > limit for length in given)
    if not long:
        return ()
    return (
        f"{long} of {len(given)} prompts were cut to {limit} tokens (the longest had {max(given)}; context {context})",
    )


def monotony_notes(rows: Sequence[Int[Tensor, " _"]], name_of: Callable[[int], str]) -> tuple[str, ...]:
    """A warning where one token makes up most of the prompts: then a report is about that token."""
    total = sum(map(len, rows))
    ((token, count),) = commonest(rows, 1)
    if count <= COMMONEST_SHARE * total or total < _FEW_TOKENS:
        return ()
    return (
        f"the token {name_of(token)!r} makes up {count / total:.0%} of the prompts: what is measured describes it more "
        "than anything else",
    )


def namer(model: HookedModel) -> Callable[[int], str]:
    """The string of a token id: of the vocabulary file or the tokenizer; the id itself where there is neither."""
    tokenizer = tokenizer_of(model)
    if (names := vars(model).get("token_names")) is not None:
        return lambda i: encodable(names.get(i, str(i)))
    return str if tokenizer is None else lambda i: encodable(str(tokenizer.decode([i])))


def _sampled(model: HookedModel, limit: int, seed: int, why: str) -> Prompts:
    rows = sample(model, limit=limit, seed=seed)
    lengths = sorted(map(len, rows))
    ends = set(special_tokens(model, "eos"))
    ended = sum(int(row[-1]) in ends for row in rows)
    how = f"{lengths[0]} to {lengths[-1]}" if lengths[0] < lengths[-1] else f"{lengths[0]}"
    until = f"{ended} of them up to an end token" if ends else "no end token is known"
    note = f"{why}: {len(rows)} sequences of {how} tokens ({until}), temperature 1, seed {seed}"
    return _finish(model, rows, SAMPLED, limit, (note,))
