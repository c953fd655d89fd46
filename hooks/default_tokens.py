"""What a model is run on when the user does not say: its own held-out text, bundled passages, or its own samples.

In two parts that have no prompt in common: *measured*, on which effects are measured, and *calibration*.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ln_probe.hooks.model import (
    HookedModel,
    context_length,
    device_of,
    dtype_of,
    evaluating,
    missing_head,
    run,
    vocabulary_size,
    world,
)

MAX_TOKENS = 512  # longer texts are cut
CALIBRATION, MEASURED = "calibration", "measured"
# Sequences that are sampled of each part: as many as there are bundled passages.
SAMPLED_SEQUENCES = {CALIBRATION: 16, MEASURED: 32}
SAMPLED_TOKENS = 128  # per sequence, at most: without a key-value cache their cost grows with the square
# Sequences that end early are topped up until each part has so many tokens; a model that always ends at once would
# otherwise be drawn from for ever, so the number of sequences is limited (in multiples of SAMPLED_SEQUENCES).
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

    `prepend_bos`: whether to begin with that first token, regardless of how the model was trained.

    Raises:
        ValueError: the model has no tokenizer, its tokenizer no first token to put there, or the text is empty or one
            that the tokenizer fails on.
    """
    tokenizer = tokenizer_of(model)
    if tokenizer is None:
        raise ValueError(
            "this model has no tokenizer, so text cannot be turned into tokens: pass token ids (a LongTensor "
            "[batch pos], a list of ids for each prompt, a .npy or .jsonl file), or prompts=ln_probe.sampled_prompts()"
        )
    if not text.strip():
        raise ValueError(f"an empty prompt ({text!r}): every prompt needs some text")
    ids = _ids(tokenizer, text)
    first = getattr(tokenizer, "bos_token_id", None)
    wanted = bool(getattr(model.cfg, "default_prepend_bos", True)) if prepend_bos is None else prepend_bos
    if prepend_bos and first is None:
        raise ValueError("prepend_bos=True, but this model's tokenizer has no first token (bos_token_id): leave it out")
    if first is not None and ids[:1] != [first] and wanted:
        ids = [int(first), *ids]
    elif prepend_bos is False and first is not None and ids[:1] == [first] and len(ids) > 1:
        ids = ids[1:]
    return torch.tensor(ids)


def _ids(tokenizer: Any, text: str) -> list[int]:
    """A text's token ids; ValueError if it is no text, or the tokenizer fails on it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ord(text[error.start])
        raise ValueError(f"it holds half of a surrogate pair (U+{half:04X}), which is no character") from error
    try:
        return [int(i) for i in tokenizer(text)["input_ids"]]
    except BaseException as error:
        check_contained(error)
        raise ValueError(f"the tokenizer fails on it ({type(error).__name__}: {error})") from error


def check_contained(error: BaseException) -> None:
    """Raise an error again if it is meant to end the process.

    A tokenizer written in Rust raises PanicException, which is no Exception and ends nothing but its own work.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
        raise error


# How vocabulary files call them, in lower case.
_SPECIAL_NAMES = {
    "eos": ("<eos>", "</s>", "<|endoftext|>", "[eos]", "<end>"),
    "bos": ("<bos>", "<s>", "[bos]"),
    "pad": ("<pad>", "[pad]"),
}


def special_tokens(model: HookedModel, kind: str) -> list[int]:
    """Ids of the model's "eos", "bos" or "pad" tokens, as its tokenizer and its Hugging Face configuration have them.

    A model without its original (a HookedTransformer) is asked for the `special_token_ids` that `load_model` leaves on
    it. Ids outside the vocabulary are left out (GPT-2's default configuration names 50256 for any vocabulary).
    """
    original = getattr(model, "original_model", None)
    holders = (tokenizer_of(model), getattr(original, "config", None), getattr(original, "generation_config", None))
    values = [getattr(holder, f"{kind}_token_id", None) for holder in holders]
    left = getattr(model, "__dict__", {})
    values.append(left.get("special_token_ids", {}).get(kind))
    values.append([i for i, name in left.get("token_names", {}).items() if name.lower() in _SPECIAL_NAMES[kind]])
    ids = [i for value in values for i in (value if isinstance(value, list | tuple) else [value])]
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocabulary_size(model)))


class UnsampledError(ValueError):
    """A model that no sequences can be sampled from (says why, and what to give instead)."""


class _CacheError(Exception):
    """Generation with a key-value cache does not give the logits of whole passes."""


# Largest difference between a drawn token's log-probability with a key-value cache and in a whole pass, relative to
# the largest logit. Measured on tiny random models: up to 4e-6 in float32, 2e-2 in bfloat16; where a cache is wrong
# (positions or ALiBi's distances counted from the last token alone) it is 0.1 and more.
CACHE_BOUND = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}


def sample(
    model: HookedModel,
    *,
    limit: int,
    seed: int,
    split: str = MEASURED,
    ends: Collection[int] | None = None,
    count: int | None = None,
) -> list[Int[Tensor, " _"]]:
    """Sample sequences from the model at temperature 1, each up to and with an end token.

    They begin with the model's first token if it has one, otherwise with a token drawn evenly from the vocabulary (no
    end token and no padding). More are drawn until there are enough sequences and enough tokens. A key-value cache is
    used where its logits prove to be those of whole passes.

    Args:
        limit: longest sequence, in tokens; never more than the model's context and SAMPLED_TOKENS.
        seed: of the draws.
        split: which part (they are drawn independently).
        ends: ids of end tokens; None: the model's own.
        count: this many sequences, however short; None: as many as it takes.

    Raises:
        UnsampledError: the model's outputs are not the next token's logits: there are more or fewer of them than tokens
            (a classifier), or its head was not in the checkpoint.
        ValueError: the model's logits are not finite.

    Warns:
        UserWarning: the model's key-value cache gives other logits than whole passes, so it is not used.
    """
    if reason := missing_head(model):
        raise UnsampledError(f"{reason}, so no sequences can be sampled from it: {_GIVE_TOKENS}")

    def drawn(*, cached: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed + (_OTHER_SEED if split == CALIBRATION else 0))
        stops = set(special_tokens(model, "eos") if ends is None else ends)
        wanted = SAMPLED_SEQUENCES[split] if count is None else count
        tokens = SAMPLED_LEAST_TOKENS[split] if count is None else 0
        length = min(limit, context_length(model), SAMPLED_TOKENS)
        rows: list[Tensor] = []
        for _ in range(SAMPLED_ROUNDS):
            rows += _drawn(model, wanted, length, stops, generator, cached=cached)
            if sum(map(len, rows)) >= min(tokens, wanted * length):
                break
        return rows

    with evaluating(model):
        try:
            return drawn(cached=True)
        except _CacheError as error:
            warnings.warn(
                f"sequences are sampled without a key-value cache, which is slower: {error}",
                stacklevel=2,
            )
            return drawn(cached=False)


_GIVE_TOKENS = "give token ids (prompts= of analyze, tokens= of without)"


def _drawn(
    model: HookedModel, count: int, length: int, stops: set[int], generator: torch.Generator, *, cached: bool
) -> list[Int[Tensor, " _"]]:
    """Some sequences, drawn side by side; those that have ended are not run further.

    They come in the order in which they were begun: the first few of them are as long as any.

    Raises:
        _CacheError: they were drawn with a key-value cache from other logits than those of whole passes.
    """
    size = vocabulary_size(model)
    first = special_tokens(model, "bos")
    if first and first[0] not in stops:
        rows = torch.full((count, 1), first[0])
    else:
        allowed = [i for i in range(size) if i not in {*stops, *special_tokens(model, "pad")}] or list(range(size))
        rows = torch.tensor(allowed)[torch.randint(len(allowed), (count, 1), generator=generator)]
    complete: dict[int, tuple[Tensor, Tensor]] = {}  # sequences and the log-probabilities of their tokens, by number
    alive = torch.arange(count)
    log_probs = torch.zeros(count, 0)  # of the tokens that were drawn
    next_logits = NextLogits(model, cached=cached)

    def end(which: Tensor) -> None:
        complete.update(zip(alive[which].tolist(), zip(rows[which], log_probs[which], strict=True), strict=True))

    while len(rows) and rows.shape[1] < length:
        logits = next_logits(rows).float().cpu()
        if not torch.isfinite(logits).all():
            if next_logits.cached:
                raise _CacheError("with one, this model's logits are NaN or infinite")
            raise ValueError("the model's logits are NaN or infinite: its weights or its precision are damaged")
        tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        log_probs = torch.cat([log_probs, logits.log_softmax(-1).gather(1, tokens)], dim=1)
        rows = torch.cat([rows, tokens], dim=1)
        ended = torch.tensor([int(row[-1]) in stops for row in rows])
        end(ended)
        alive, rows, log_probs = alive[~ended], rows[~ended], log_probs[~ended]
        next_logits.keep(~ended)
    end(torch.ones(len(rows), dtype=torch.bool))
    if next_logits.cached:
        # Of the longest rows the last one: whenever a row before it ended, its place in the cache changed.
        _check_cache(model, *complete[max(complete, key=lambda number: (len(complete[number][0]), number))])
    return [complete[number][0] for number in range(count)]


def _check_cache(model: HookedModel, row: Int[Tensor, " pos"], log_probs: Float[Tensor, " later"]) -> None:
    """Compare the log-probabilities with which a sequence was drawn with those of one whole pass over it.

    Raises:
        _CacheError: they differ by more than rounding explains.
    """
    if not len(log_probs):
        return
    logits = run(model, row[None], return_type="logits")[0, :-1].float().cpu()
    expected = logits.log_softmax(-1).gather(1, row[1:, None])[:, 0]
    difference = float((log_probs - expected).abs().max())
    if not difference <= CACHE_BOUND[dtype_of(model)] * max(1.0, float(logits.abs().max())):
        raise _CacheError(
            f"with one, this model gives other logits than in whole passes (the log-probability of a token differs by "
            f"{difference:.2g} nats)"
        )


class NextLogits:
    """Logits of the token that comes next, of some rows that grow by a token a call.

    Attributes:
        cached: whether a key-value cache is used, which a bridge's original or a HookedTransformer may have.
    """

    def __init__(self, model: HookedModel, *, cached: bool = True) -> None:
        self.model = model
        self.hooked = world(model) == "HookedTransformer"
        self.original = getattr(model, "original_model", None)
        takes = inspect.signature(self.original.forward).parameters if self.original is not None else {}
        self.cached = cached and (self.hooked or {"past_key_values", "use_cache"} <= set(takes))
        self.cache: Any = None

    def __call__(self, rows: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch vocab"]:
        """Return the logits of what follows each row.

        Raises:
            UnsampledError: the model does not give a logit for each token.
            _CacheError: the model fails with its cache.
        """
        ids = rows.to(device_of(self.model))
        logits: Any = None
        if self.cached:
            with _cache_errors():
                logits = self._with_cache(ids)
        if logits is None:
            logits = run(self.model, ids, return_type="logits")
        size = vocabulary_size(self.model)
        if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[-1] != size:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UnsampledError(
                f"the model's outputs are no logits of its {size} tokens (expected [batch pos {size}], got {shape}), "
                f"so no sequences can be sampled from it: {_GIVE_TOKENS}"
            )
        last: Tensor = logits[:, -1]
        return last

    def _with_cache(self, ids: Int[Tensor, "batch pos"]) -> Any:
        """The model's outputs for the last token of each row; None where its cache turns out not to be one."""
        new = ids if self.cache is None else ids[:, -1:]
        with torch.no_grad():
            if self.hooked:
                from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

                if self.cache is None:
                    self.cache = TransformerLensKeyValueCache.init_cache(
                        self.model.cfg, device_of(self.model), len(ids)
                    )
                return self.model(new, past_kv_cache=self.cache, attention_mask=torch.ones_like(new))
            assert self.original is not None, "a bridge without an original is run whole"
            output = self.original(new, past_key_values=self.cache, use_cache=True)
        self.cache = getattr(output, "past_key_values", None)
        if not hasattr(self.cache, "batch_select_indices"):  # not a causal decoder
            self.cached, self.cache = False, None
            return None
        return output.logits

    def keep(self, rows: Bool[Tensor, " batch"]) -> None:
        """Go on with these rows alone."""
        if self.cache is None or bool(rows.all()):
            return
        kept = rows.nonzero()[:, 0].to(device_of(self.model))
        with _cache_errors():
            if not self.hooked:
                self.cache.batch_select_indices(kept)
                return
            self.cache.previous_attention_mask = self.cache.previous_attention_mask[kept]
            for entry in self.cache.entries:
                entry.past_keys, entry.past_values = entry.past_keys[kept], entry.past_values[kept]


@contextmanager
def _cache_errors() -> Iterator[None]:
    """Turn any error of a key-value cache into `_CacheError`: whole passes need no cache."""
    try:
        yield
    except Exception as error:
        raise _CacheError(f"with one, this model raises {type(error).__name__}: {error}") from error


@dataclass(frozen=True, eq=False)
class BundledPrompts:
    """Prompts that a bundled model brings: held-out text of the kind that it was trained on.

    Attributes:
        measured, calibration: token ids of each prompt.
        source: what provenance and pages call them.
    """

    measured: tuple[Int[Tensor, " _"], ...]
    calibration: tuple[Int[Tensor, " _"], ...]
    source: str


def bundled_prompts(model: HookedModel) -> BundledPrompts | None:
    """The prompts that the loader left on a bundled model; None for other models."""
    found = getattr(model, "__dict__", {}).get("bundled_prompts")
    return found if isinstance(found, BundledPrompts) else None


def default_tokens(model: HookedModel, split: str = MEASURED) -> list[Int[Tensor, " _"]]:
    """One part of a bundled model's own prompts, of the bundled texts, or of sequences sampled from the model if it has
    no tokenizer."""
    limit = min(MAX_TOKENS, context_length(model))
    if (own := bundled_prompts(model)) is not None:
        return [row[:limit] for row in (own.measured if split == MEASURED else own.calibration)]
    if tokenizer_of(model) is None:
        return sample(model, limit=limit, seed=0, split=split)
    return [encode(model, text)[:limit] for text in bundled_texts(split)]


def commonest(rows: Iterable[Sequence[int] | Int[Tensor, " _"]]) -> tuple[int, int]:
    """The commonest token of some prompts, the smallest id of equally common ones, and how often it occurs."""
    counts = Counter(int(i) for row in rows for i in row)
    return min(counts.items(), key=lambda item: (-item[1], item[0]))
