"""What a model is run on when nobody says what: the bundled texts, or sequences sampled from the model itself."""

from __future__ import annotations

from importlib import resources
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ln_probe.hooks.model import HookedModel, context_length, device_of, evaluating, run, vocabulary_size

MAX_TOKENS = 512  # longer texts are cut
SAMPLED_PROMPTS = 4
SAMPLED_TOKENS = 128  # per sequence: without a key-value cache their cost grows with the square


def bundled_texts() -> list[str]:
    """The prompts that come with the package, one a paragraph."""
    text = resources.files("ln_probe").joinpath("data/prompts.txt").read_text(encoding="utf-8")
    return [" ".join(p.split()) for p in text.split("\n\n") if p.strip()]


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


def sample(model: HookedModel, *, limit: int, seed: int, count: int = SAMPLED_PROMPTS) -> Int[Tensor, "batch pos"]:
    """`count` sequences of the model's own, at temperature 1, each from a first token drawn evenly from the vocabulary.

    Raises:
        ValueError: the model's logits are not finite.
    """
    generator = torch.Generator().manual_seed(seed)
    size = vocabulary_size(model)
    rows = torch.randint(size, (count, 1), generator=generator)
    length = min(limit, SAMPLED_TOKENS)
    with evaluating(model):
        while rows.shape[1] < length:
            logits = run(model, rows.to(device_of(model)), return_type="logits")[:, -1, :size].float().cpu()
            if not torch.isfinite(logits).all():
                raise ValueError("the model's logits are NaN or infinite: its weights or its precision are damaged")
            rows = torch.cat([rows, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
    return rows


def default_tokens(model: HookedModel) -> list[Int[Tensor, " _"]]:
    """The bundled texts, or sequences sampled from the model (seed 0) if it has no tokenizer: as `analyze` has them."""
    limit = min(MAX_TOKENS, context_length(model))
    if tokenizer_of(model) is None:
        return list(sample(model, limit=limit, seed=0))
    return [encode(model, text)[:limit] for text in bundled_texts()]
