"""What a model is run on when nobody says what: the bundled passages, or sequences sampled from the model itself.

In two parts that have no prompt in common: *calibration*, from which constants come, and *measured*, on which effects
are measured.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ln_probe.hooks.model import HookedModel, context_length, device_of, evaluating, run, vocabulary_size, world

MAX_TOKENS = 512  # longer texts are cut
CALIBRATION, MEASURED = "calibration", "measured"
# Sequences that are sampled of each part: as many as there are bundled passages.
SAMPLED_SEQUENCES = {CALIBRATION: 16, MEASURED: 32}
SAMPLED_TOKENS = 128  # per sequence, at most: without a key-value cache their cost grows with the square
# Sequences that end early are topped up until each part has so many tokens; a model that always ends at once would
# otherwise be drawn from for ever, hence the limit on sequences (in multiples of SAMPLED_SEQUENCES).
SAMPLED_LEAST_TOKENS = {CALIBRATION: 256, MEASURED: 512}
SAMPLED_ROUNDS = 4
# Sampled prompts, and prompts of the user's, of which one token makes up more than this say more about that token than
# about the model (CAPP-GPT's sequences were 77-98 % end tokens before they stopped there).
COMMONEST_SHARE = 0.3
# What is added to the seed of calibration sequences, so that they are others than the measured ones'.
_OTHER_SEED = 2**40


@dataclass(frozen=True)
class Passage:
    """A bundled prompt, written for this project."""

    split: str
    kind: str
    text: str


@cache
def passages() -> tuple[Passage, ...]:
    """All bundled prompts, the measured ones first."""
    lines = resources.files("ln_probe").joinpath("data/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(Passage(**json.loads(line)) for line in lines)


def bundled_texts(split: str = MEASURED) -> list[str]:
    """The texts of one part of the bundled prompts."""
    return [p.text for p in passages() if p.split == split]


def tokenizer_of(model: HookedModel) -> Any:
    """The model's tokenizer, or None."""
    return getattr(model, "tokenizer", None)


def encode(model: HookedModel, text: str, *, prepend_bos: bool | None = None) -> Int[Tensor, " pos"]:
    """Token ids of one text, behind the tokenizer's first token where the model was trained with one.

    `prepend_bos`: whether that first token stands there, whatever the model was trained with.

    Raises:
        ValueError: the model has no tokenizer, its tokenizer no first token to put there, or the text is empty.
    """
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise ValueError(
            "this model has no tokenizer, so text cannot be turned into tokens: pass token ids (a LongTensor "
            "[batch pos], a list of ids for each prompt, a .npy or .jsonl file), or prompts=ln_probe.sampled()"
        )
    if not text.strip():
        raise ValueError(f"an empty prompt ({text!r}): every prompt needs some text")
    ids = [int(i) for i in tokenizer(text)["input_ids"]]
    first = getattr(tokenizer, "bos_token_id", None)
    wanted = bool(getattr(model.cfg, "default_prepend_bos", True)) if prepend_bos is None else prepend_bos
    if prepend_bos and first is None:
        raise ValueError("prepend_bos=True, but this model's tokenizer has no first token (bos_token_id): leave it out")
    if first is not None and ids[:1] != [first] and wanted:
        ids = [int(first), *ids]
    elif prepend_bos is False and first is not None and ids[:1] == [first] and len(ids) > 1:
        ids = ids[1:]
    return torch.tensor(ids)


# How vocabulary files call them, in lower case.
_SPECIAL_NAMES = {
    "eos": ("<eos>", "</s>", "<|endoftext|>", "[eos]", "<end>"),
    "bos": ("<bos>", "<s>", "[bos]"),
    "pad": ("<pad>", "[pad]"),
}


def special_tokens(model: HookedModel, kind: str) -> list[int]:
    """Ids of the model's "eos", "bos" or "pad" tokens, as its tokenizer and its Hugging Face configuration have them.

    A model without its original (a HookedTransformer) is asked for the `special_token_ids` that `load_model` leaves on
    it. Ids outside the vocabulary are left out (GPT-2's default configuration names 50256 whatever the vocabulary).
    """
    original = getattr(model, "original_model", None)
    holders = (tokenizer_of(model), getattr(original, "config", None), getattr(original, "generation_config", None))
    values = [getattr(holder, f"{kind}_token_id", None) for holder in holders]
    left = getattr(model, "__dict__", {})
    values.append(left.get("special_token_ids", {}).get(kind))
    values.append([i for i, name in left.get("token_names", {}).items() if name.lower() in _SPECIAL_NAMES[kind]])
    found: list[int] = []
    for value in values:
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, int) and 0 <= each < vocabulary_size(model) and each not in found:
                found.append(each)
    return found


def sample(
    model: HookedModel,
    *,
    limit: int,
    seed: int,
    split: str = MEASURED,
    ends: Collection[int] | None = None,
    count: int | None = None,
) -> list[Int[Tensor, " _"]]:
    """Sequences of the model's own, at temperature 1, each up to and with an end token.

    They begin with the model's first token if it has one, otherwise with a token drawn evenly from the vocabulary (no
    end token and no padding). More are drawn until there are enough sequences and enough tokens.

    Args:
        limit: longest sequence, in tokens.
        seed: of the draws.
        split: which part (they are drawn independently).
        ends: ids of end tokens; None: the model's own.
        count: this many sequences, however short; None: as many as it takes.

    Raises:
        ValueError: the model's logits are not finite.
    """
    stops = set(special_tokens(model, "eos") if ends is None else ends)
    generator = torch.Generator().manual_seed(seed + (_OTHER_SEED if split == CALIBRATION else 0))
    wanted = SAMPLED_SEQUENCES[split] if count is None else count
    tokens = SAMPLED_LEAST_TOKENS[split] if count is None else 0
    found: list[Tensor] = []
    with evaluating(model):
        for _ in range(SAMPLED_ROUNDS):
            found += _drawn(model, wanted, min(limit, SAMPLED_TOKENS), stops, generator)
            if sum(map(len, found)) >= min(tokens, wanted * limit):
                break
    return found


def _drawn(
    model: HookedModel, count: int, length: int, stops: set[int], generator: torch.Generator
) -> list[Int[Tensor, " _"]]:
    """Some sequences, drawn side by side; those that have ended are not run further.

    They come in the order in which they were begun: the first few of them are as long as any.
    """
    size = vocabulary_size(model)
    first = special_tokens(model, "bos")
    if first and first[0] not in stops:
        rows = torch.full((count, 1), first[0])
    else:
        allowed = [i for i in range(size) if i not in {*stops, *special_tokens(model, "pad")}] or list(range(size))
        rows = torch.tensor(allowed)[torch.randint(len(allowed), (count, 1), generator=generator)]
    drawn: dict[int, Tensor] = {}
    alive = torch.arange(count)
    next_logits = _Generating(model)
    while len(rows) and rows.shape[1] < length:
        logits = next_logits(rows)[:, :size].float().cpu()
        if not torch.isfinite(logits).all():
            raise ValueError("the model's logits are NaN or infinite: its weights or its precision are damaged")
        rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        ended = torch.tensor([int(row[-1]) in stops for row in rows])
        drawn |= zip(alive[ended].tolist(), rows[ended], strict=True)
        alive, rows = alive[~ended], rows[~ended]
        next_logits.keep(~ended)
    drawn |= zip(alive.tolist(), rows, strict=True)
    return [drawn[number] for number in range(count)]


class _Generating:
    """Logits of what comes next; with a key-value cache where a bridge's original or a HookedTransformer has one."""

    def __init__(self, model: HookedModel) -> None:
        self.model = model
        self.hooked = world(model) == "HookedTransformer"
        original = getattr(model, "original_model", None)
        takes = inspect.signature(original.forward).parameters if original is not None else {}
        self.original = original if {"past_key_values", "use_cache"} <= set(takes) else None
        self.cache: Any = None

    def __call__(self, rows: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch vocab"]:
        ids = rows.to(device_of(self.model))
        if self.hooked:
            return self._hooked(ids)
        if self.original is None:
            logits: Tensor = run(self.model, ids, return_type="logits")[:, -1]
            return logits
        with torch.no_grad():
            new = ids if self.cache is None else ids[:, -1:]
            found = self.original(new, past_key_values=self.cache, use_cache=True)
        self.cache = getattr(found, "past_key_values", None)
        if self.cache is None or not hasattr(self.cache, "batch_select_indices"):
            self.original = self.cache = None  # not a causal decoder: whole passes from here on
            return self(rows)
        out: Tensor = found.logits[:, -1]
        return out

    def _hooked(self, ids: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch vocab"]:
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        new = ids if self.cache is None else ids[:, -1:]
        if self.cache is None:
            self.cache = TransformerLensKeyValueCache.init_cache(self.model.cfg, device_of(self.model), len(ids))
        with torch.no_grad():
            logits: Tensor = self.model(new, past_kv_cache=self.cache, attention_mask=torch.ones_like(new))
        return logits[:, -1]

    def keep(self, rows: Bool[Tensor, " batch"]) -> None:
        """Go on with these rows alone."""
        if self.cache is None or bool(rows.all()):
            return
        kept = rows.nonzero()[:, 0].to(device_of(self.model))
        if not self.hooked:
            self.cache.batch_select_indices(kept)
            return
        self.cache.previous_attention_mask = self.cache.previous_attention_mask[kept]
        for entry in self.cache.entries:
            entry.past_keys, entry.past_values = entry.past_keys[kept], entry.past_values[kept]


def default_tokens(
    model: HookedModel, split: str = MEASURED, *, limit: int = MAX_TOKENS, seed: int = 0
) -> list[Int[Tensor, " _"]]:
    """One part of the bundled texts, or of sequences sampled from the model if it has no tokenizer."""
    limit = min(limit, context_length(model))
    if tokenizer_of(model) is None:
        return sample(model, limit=limit, seed=seed, split=split)
    return [encode(model, text)[:limit] for text in bundled_texts(split)]


def calibration_tokens(model: HookedModel) -> list[Int[Tensor, " _"]]:
    """What the constants of a frozen scale are measured on; no prompt of it is measured without being asked for."""
    return default_tokens(model, CALIBRATION)


def begun_like(
    firsts: Sequence[int], rows: list[Int[Tensor, " _"]], special: Iterable[int]
) -> tuple[list[Int[Tensor, " _"]], tuple[str, ...]]:
    """Calibration rows that begin as the measured prompts do, so that the constants of position 0 are of its kind.

    Args:
        firsts: the first token of every measured prompt.
        rows: calibration tokens.
        special: tokens that the model takes for a beginning.

    Returns:
        the rows, with a token in front that all prompts begin with or without one that none does; and what is to be
        said of it.
    """
    if not firsts:
        return rows, ()
    starts = {int(row[0]) for row in rows}
    if len(starts) == 1:
        (start,) = starts
        other = sum(first != start for first in firsts)
        if other == len(firsts) and min(map(len, rows)) > 1:
            return [row[1:] for row in rows], (
                f"no prompt begins with token {start}: the constants of position 0 are of texts without it, too",
            )
        note = f"{other} of {len(firsts)} prompts do not begin with token {start}, as the texts do that the constants "
        return rows, (f"{note}of position 0 come from",) * (other > 0)
    begun = set(firsts)
    if len(begun) == 1 and begun <= set(special):
        return [torch.cat([row.new_tensor(list(begun)), row]) for row in rows], ()
    return rows, ()


def commonest(rows: Iterable[Sequence[int] | Int[Tensor, " _"]], most: int = 12) -> list[tuple[int, int]]:
    """The commonest tokens of some prompts and how often they occur; ties in the order of ids."""
    counts = Counter(int(i) for row in rows for i in row)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
