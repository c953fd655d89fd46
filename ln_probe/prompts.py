"""What a model is run on: the bundled prompts, the user's text or token ids, or sequences sampled from the model."""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.arguments import check_flags
from ln_probe.analyses.files import FileError, read_json, read_text
from ln_probe.analyses.text import encodable, quoted
from ln_probe.hooks.default_tokens import (
    COMMONEST_SHARE,
    MAX_TOKENS,
    bundled_prompts,
    bundled_texts,
    commonest,
    encode,
    sample,
    special_tokens,
    tokenizer_of,
)
from ln_probe.hooks.model import HookedModel, check_model, context_length, vocabulary_size, whole_number
from ln_probe.prompt_sources import BUNDLED, SAMPLED, Entry, Sampled, entries, token_rows

# How many prompts a report shows the beginnings of, how much of each, and how many of the commonest tokens.
_SHOWN_PROMPTS, _SHOWN_TOKENS, _COMMONEST = 64, 24, 12
# How many skipped prompts are named, with how much of the reason.
_NAMED, _REASON = 5, 200
_FEW_TOKENS = 20  # of which a third can be the same by chance


__all__ = [
    "Prompts",
    "make_prompts",
]


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
        skipped: the prompts that could not be used, by their number among all that were given, and why; the others are
            numbered without them.

    Example:
        >>> from ln_probe.prompts import make_prompts
        >>> prompts = make_prompts(model, ["The ships came home."])
        >>> prompts.summary, prompts.strings[0][:3]
    """

    tokens: tuple[Int[Tensor, " _"], ...]
    strings: tuple[tuple[str, ...], ...]
    source: str
    notes: tuple[str, ...]
    name_of: Callable[[int], str]
    given: tuple[int, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    @property
    def summary(self) -> dict[str, Any]:
        """The description of the prompts for a report's provenance."""
        return summary(self.source, self.tokens, self.name_of, skipped=self.skipped)


def labels_of(prompts: Prompts, given: Any) -> Any:
    """Return the labels of the prompts that are left from one for each that was given, skipped ones too."""
    if isinstance(given, Tensor):  # whose entries are tensors too, none of which equals another one as a label
        given = given.tolist()
    left_out = {number for number, _ in prompts.skipped}
    if not left_out or isinstance(given, str | Set | Mapping) or not isinstance(given, Collection):
        return given
    if len(given) != len(prompts.tokens) + len(left_out):
        return given
    return [label for number, label in enumerate(given) if number not in left_out]


def summary(
    source: str,
    rows: Iterable[Int[Tensor, " _"]],
    name_of: Callable[[int], str] | None = None,
    *,
    skipped: Sequence[tuple[int, str]] = (),
) -> dict[str, Any]:
    """Return source, counts and hash (of the token ids, prompt by prompt) of any number of prompts.

    With `skipped` also a sentence on which were skipped. With `name_of` also how the first prompts begin, the commonest
    tokens with their shares, and how many prompts repeat an earlier one.
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
        names = Counter(name_of(i) for i, _ in common)  # bytes that are no character by themselves look all alike
        alike = {i: f" (token {i})" if names[name_of(i)] > 1 else "" for i, _ in common}
        shown = {
            "commonest": {name_of(i) + alike[i]: round(n / sum(lengths), 4) for i, n in common},
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
        **({"skipped": skip_note(skipped, len(lengths))} if skipped else {}),
    }


def skip_note(skipped: Sequence[tuple[int, str]], kept: int) -> str:
    """Return a note on prompts that were skipped.

    Args:
        skipped: number (from 0) and reason of each.
        kept: how many are left.

    Raises:
        ValueError: none is left.
    """
    named = "; ".join(f"prompt {number}: {why[:_REASON]}" for number, why in skipped[:_NAMED])
    more = f"; and {len(skipped) - _NAMED} more" if len(skipped) > _NAMED else ""
    if not kept:
        raise ValueError(f"none of {len(skipped)} prompts can be used ({named}{more})")
    return f"{len(skipped)} of {kept + len(skipped)} prompts were skipped ({named}{more})"


def _spaced(names: Sequence[str]) -> list[str]:
    """Add spaces between names of tokens (`<EOS>`, ids), but not between pieces of words."""
    words = all(n.isdigit() or (n[:1] == "<" and n[-1:] == ">") or len(n) > 1 for n in names)
    pieces = any(n[:1].isspace() for n in names)
    return [n if pieces or not words else f"{n} " for n in names]


def make_prompts(
    model: HookedModel,
    prompts: Any = None,
    *,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    prepend_bos: bool | None = None,
    most: int | None = None,
) -> Prompts:
    """Return prompts for `model` from any form that a user has them in.

    Args:
        model: any hooked model.
        prompts: None (a bundled model's own held-out windows; bundled texts; sampled sequences if the model has no
            tokenizer); a text, or a list of texts; a `Path` (`.txt`: a prompt a paragraph; `.jsonl`: `{"text": …}` or
            `{"tokens": […]}` a line; `.npy`: ids); token ids in any form (`prompt_sources.token_rows`), a tokenizer's
            output among them; `ln_probe.sampled_prompts(n)`; what this function returned.
        max_tokens: longer prompts are cut to this, and to the model's context.
        seed: of sampled sequences.
        prepend_bos: whether texts begin with the tokenizer's first token; None: as the model was trained.
        most: use only the first so many prompts; None: all.

    In a list of texts or a file, prompts that cannot be used (empty ones, for example) are skipped and named.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: no prompt that can be used, ids outside the vocabulary, text without a tokenizer, an unknown
            format, the name of an existing file or the word "sampled" as a text.
        TypeError: any other object; no hooked model.

    Example:
        >>> from ln_probe.prompts import make_prompts
        >>> make_prompts(model, ["The ships came home."], max_tokens=8).tokens[0]
    """
    model = check_model(model)
    max_tokens, seed = whole_number(max_tokens, "max_tokens", 1), whole_number(seed, "seed", 0)
    most = None if most is None else whole_number(most, "most", 1)
    if isinstance(prompts, Prompts):
        return prompts
    limit = min(max_tokens, context_length(model))
    notes: tuple[str, ...] = ()
    if prepend_bos is not None:
        check_flags(prepend_bos=prepend_bos)
        how = "with" if prepend_bos else "without"
        notes = (f"texts begin {how} the tokenizer's first token (prepend_bos={prepend_bos})",)
    if prompts is None and (own := bundled_prompts(model)) is not None:
        return _finish(model, own.measured[:most], own.source, limit, notes)
    if isinstance(prompts, str):
        row = encode(model, prompts, prepend_bos=prepend_bos)
        return _finish(model, [row], "texts", limit, (*_text_notes(prompts), *notes))
    texts: Iterable[Entry] | None = None
    source = "texts"
    if isinstance(prompts, Path):
        if not prompts.exists():
            raise FileNotFoundError(f"no prompts file {str(prompts)!r}")
        texts, source = islice(entries(prompts), most), prompts.name
    elif prompts is None and tokenizer_of(model) is not None:
        texts, source = bundled_texts()[:most], BUNDLED
    elif isinstance(prompts, Sequence) and not isinstance(prompts, bytes) and all(isinstance(t, str) for t in prompts):
        texts = prompts[:most]
    if texts is not None:
        read = of_entries(model, texts, source, max_tokens=limit, prepend_bos=prepend_bos, notes=notes)
        if not read.skipped:
            return read
        note = skip_note(read.skipped, len(read.tokens))
        warnings.warn(note, stacklevel=4)  # the line that calls `analyze`
        return replace(read, notes=(note, *read.notes))
    if prepend_bos is not None:
        raise ValueError(
            f"prepend_bos={prepend_bos} is about texts: token ids are taken as they are, so put the first token in "
            "front of them, or leave prepend_bos out"
        )
    if prompts is None or isinstance(prompts, Sampled):
        rows = sample(model, limit=limit, seed=seed, count=None if prompts is None else prompts.count)[:most]
        why = "the model has no tokenizer, so " if prompts is None else ""
        ends = special_tokens(model, "eos")
        note = (
            f"{why}prompts were sampled from the model itself: {_sample_note(rows, ends)}, temperature 1, seed {seed}"
        )
        return _finish(model, rows, SAMPLED, limit, (note,))
    if type(prompts).__name__ == "ActivationCache":
        raise TypeError(
            "an ActivationCache holds what one pass computed, and ln_probe runs the model itself: pass the tokens it "
            "was made from"
        )
    pad = next(iter(special_tokens(model, "pad")), None)
    ends = [*special_tokens(model, "bos"), *special_tokens(model, "eos")]
    try:
        rows, notes = token_rows(prompts, pad=pad, ends=ends)
    except TypeError as error:
        raise TypeError(
            "prompts must be a text, a list of texts, token ids, a Path, ln_probe.sampled_prompts(n) or a tokenizer's "
            f"output, got {type(prompts).__name__} ({error})"
        ) from error
    return _finish(model, rows[:most], "tokens", limit, notes)


def calibration_prompts(
    model: HookedModel, given: Any, max_tokens: int, seed: int = 0, prepend_bos: bool | None = None
) -> Prompts:
    """Return the user's calibration text as prompts, in any form that `make_prompts` takes.

    Raises:
        TypeError, ValueError: as `make_prompts`; the message begins with "calibration".
        FileNotFoundError: a file that does not exist.
    """
    try:
        return make_prompts(model, given, max_tokens=max_tokens, seed=seed, prepend_bos=prepend_bos)
    except (ValueError, TypeError) as error:
        raise type(error)(f"calibration: {error}") from error


def of_entries(
    model: HookedModel,
    found: Iterable[Entry],
    source: str,
    *,
    max_tokens: int = MAX_TOKENS,
    prepend_bos: bool | None = None,
    notes: tuple[str, ...] = (),
) -> Prompts:
    """Return prompts for `model` from texts and lists of token ids.

    Entries that are empty, that the tokenizer fails on or that hold ids outside the vocabulary are skipped: `skipped`
    says why, and `tokens` is empty if none is left.

    Raises:
        ValueError: there are no entries, or texts for a model without a tokenizer.
    """
    rows: list[Tensor] = []
    skipped: list[tuple[int, str]] = []
    for number, entry in enumerate(found):
        try:
            row = (
                encode(model, entry, prepend_bos=prepend_bos)
                if isinstance(entry, str)
                else torch.tensor(entry, dtype=torch.long)
            )
            _check_row(row, vocabulary_size(model))
        except ValueError as error:
            if isinstance(entry, str) and tokenizer_of(model) is None:
                raise
            skipped.append((number, str(error)))
        else:
            rows.append(row)
    limit = min(max_tokens, context_length(model))
    if skipped and not rows:
        return Prompts((), (), source, notes, namer(model), (), tuple(skipped))
    return replace(_finish(model, rows, source, limit, notes), skipped=tuple(skipped))


def _text_notes(text: str) -> tuple[str, ...]:
    """Raise if a text looks like the name of a file or "sampled"; return a note if it may be one."""
    if text == SAMPLED:
        raise ValueError(
            "'sampled' would be the text \"sampled\": pass ln_probe.sampled_prompts() for sequences of the model's "
            "own, or ['sampled'] for the text"
        )
    try:
        there = Path(text).is_file()
    except (OSError, ValueError):  # no possible path
        there = False
    if there:
        raise ValueError(
            f"{text!r} would be a text, and a file of that name exists: pass pathlib.Path({text!r}) to read it, "
            f"or [{text!r}] for the text"
        )
    if Path(text).suffix in _SUFFIXES and not any(c.isspace() for c in text):
        return (f"{text!r} was taken as a text: there is no file of that name",)
    return ()


_SUFFIXES = (".txt", ".jsonl", ".json", ".npy")


def _finish(
    model: HookedModel, rows: Sequence[Tensor], source: str, limit: int, notes: tuple[str, ...] = ()
) -> Prompts:
    if not rows:
        raise ValueError(f"no prompts ({source} is empty): give at least one")
    for number, row in enumerate(rows):
        if not len(row):
            raise ValueError(f"prompt {number} has no tokens")
        try:
            _check_row(row, vocabulary_size(model))
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from error
    given = tuple(map(len, rows))
    cut = tuple(row[:limit] for row in rows)
    name_of = namer(model)
    names = {i: name_of(i) for i in torch.cat(cut).unique().tolist()}
    strings = tuple(tuple(names[i] for i in row.tolist()) for row in cut)
    if long := sum(length > limit for length in given):
        longest = f"the longest had {max(given)}; context {context_length(model)}"
        notes = (*notes, f"{long} of {len(rows)} prompts were cut to {limit} tokens ({longest})")
    total = sum(map(len, cut))
    token, count = commonest(cut)
    if count > COMMONEST_SHARE * total and total >= _FEW_TOKENS:  # then a report is about that token
        notes = (
            *notes,
            f"the token {name_of(token)!r} makes up {count / total:.0%} of the prompts: what is measured describes it "
            "more than anything else",
        )
    return Prompts(cut, strings, source, notes, name_of, given)


def _check_row(row: Int[Tensor, " _"], size: int) -> None:
    """Raise ValueError if a prompt is empty or holds an id outside the vocabulary."""
    if not len(row):
        raise ValueError("it has no tokens")
    wrong = row[(row < 0) | (row >= size)]
    if len(wrong):
        raise ValueError(f"token id {int(wrong[0])} is outside the vocabulary of {size} (0 … {size - 1})")


def namer(model: HookedModel) -> Callable[[int], str]:
    """Return a function from a token id to its string: the vocabulary file's, the tokenizer's, or the id itself."""
    tokenizer = tokenizer_of(model)
    if (names := vars(model).get("token_names")) is not None:
        return lambda i: encodable(names.get(i, str(i)))
    return str if tokenizer is None else lambda i: encodable(str(tokenizer.decode([i])))


def _sample_note(rows: Sequence[Int[Tensor, " _"]], ends: Collection[int]) -> str:
    lengths = sorted(map(len, rows))
    ended = sum(int(row[-1]) in ends for row in rows)
    how = f"{lengths[0]} to {lengths[-1]}" if lengths[0] < lengths[-1] else f"{lengths[0]}"
    until = f"{ended} of them up to an end token" if ends else "no end token is known"
    return f"{len(rows)} sequences of {how} tokens ({until})"


# Where a JSON object holds the vocabulary beside other things.
_INSIDE = ("token2id", "vocab", "model", "token_to_id", "stoi", "id2token", "itos")


def read_vocabulary(path: str | Path) -> dict[int, str]:
    """Read token strings by id from a file.

    Args:
        path: a `.json` ({token: id}, {id: token}, a list, or one of these inside an object, as in tokenizer.json), or a
            text file with a token a line.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds no vocabulary, or two tokens of one id.
    """
    path = Path(path)
    try:
        found = _names(read_json(path)) if path.suffix == ".json" else dict(enumerate(read_text(path).splitlines()))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no vocabulary file {quoted(str(path), 200)}") from error
    except (OSError, FileError) as error:
        why = getattr(error, "strerror", None) or str(error).removeprefix(f"{path}: ")
        raise ValueError(f"{path} is not a readable vocabulary: {why}") from error
    if not found:
        raise ValueError(
            f"{path} holds no vocabulary: it takes JSON ({{token: id}}, {{id: token}} or a list) or a text file with a "
            "token a line"
        )
    return found


def _names(held: Any) -> dict[int, str]:
    if isinstance(held, list) and all(isinstance(t, str) for t in held):
        return dict(enumerate(held))
    if not isinstance(held, Mapping):
        return {}
    if held and all(isinstance(i, int) and not isinstance(i, bool) for i in held.values()):
        found = {i: str(t) for t, i in held.items()}
        if len(found) < len(held):
            raise ValueError("the vocabulary gives two tokens the same id")
        return found
    if held and all(isinstance(t, str) and str(i).isdigit() for i, t in held.items()):
        return {int(i): t for i, t in held.items()}
    return next((names for key in _INSIDE if key in held and (names := _names(held[key]))), {})


def name_tokens(model: HookedModel, path: str | Path) -> None:
    """Give a model's tokens the names of a file, for reports and for the end tokens that sampling stops at.

    Raises:
        FileNotFoundError, ValueError: as `read_vocabulary`; or it names tokens that the model does not have.
    """
    names = read_vocabulary(path)
    beyond = [i for i in names if not 0 <= i < vocabulary_size(model)]
    if beyond:
        raise ValueError(
            f"{path} names token {beyond[0]}, and the model has 0 … {vocabulary_size(model) - 1}: another model's file?"
        )
    vars(model)["token_names"] = names


@contextmanager
def tokens_named(model: HookedModel, path: str | Path | None) -> Iterator[None]:
    """`name_tokens` while this lasts; None: the names that there are."""
    before = vars(model).get("token_names")
    try:
        if path is not None:
            name_tokens(model, path)
        yield
    finally:
        vars(model).pop("token_names", None)
        if before is not None:
            vars(model)["token_names"] = before


def naming_notes(model: HookedModel) -> list[str]:
    """Return notes on names that came from a file: how many are missing, and what they replace."""
    names, size = vars(model).get("token_names", {}), vocabulary_size(model)
    found = []
    if len(names) < size:
        found.append(
            f"the vocabulary file names {len(names)} of the model's {size} tokens: the other {size - len(names)} stand "
            "as their ids"
        )
    if tokenizer_of(model) is not None:
        found.append(
            "tokens have the names of the vocabulary file, not of the model's tokenizer, which still cuts texts into "
            "tokens"
        )
    return found
