"""Numbers in a checkpoint's description, judged before work or memory is spent on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ln_probe.analyses.machinery.files import read_json

# What the libraries loop over, or make a list of: with 1e9 of them, building a model takes hours before it fails. The
# deepest models have some hundreds of layers, the widest some hundreds of experts and heads.
COUNTS_AT_MOST = 10_000
# Classes of a classification head: a dictionary is made of them.
LABELS_AT_MOST = 100_000
# Entries of a vocabulary, and so ids in one: 64 times the largest published.
VOCABULARY_AT_MOST = 2**24

_LAYERS = re.compile(r"n_layers?|num_layers|num_hidden_layers|block_count|((num_)?(en|de)coder_layers)")
_COUNT = re.compile(
    r"(num|n)_(\w+_)?(layers?|blocks?|experts?|heads?|groups)|\w*_layers|(\w+_)?(block|head|expert)_count(_kv)?|depth"
)
_LABELS = "num_labels"
_VOCABULARY = re.compile(r"(.*_token_id|(.*_)?vocab_size)")


def check_numbers(values: Mapping[str, Any], where: str, tensors: int | None = None) -> None:
    """Raise ValueError for a number that no model can have.

    Args:
        values: by name, as in config.json or a GGUF file; objects inside objects too.
        where: the file, for errors.
        tensors: how many the weights are, if that is known: every layer has one at least.
    """
    for name, value in values.items():
        if isinstance(value, Mapping):
            check_numbers(value, where, tensors)
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        limit = _limit(name.rpartition(".")[2])
        if limit is not None and value > limit:
            raise ValueError(
                f"{where} says {name} = {_short(value)}, and no model has more than {limit}: it is damaged."
            )
        if tensors is not None and _LAYERS.fullmatch(name.rpartition(".")[2]) and value > tensors:
            raise ValueError(
                f"{where} says {name} = {value}, and the weights are {tensors} tensors: they do not belong together, "
                "or the file is damaged."
            )


def _limit(name: str) -> int | None:
    if name == _LABELS:
        return LABELS_AT_MOST
    if _VOCABULARY.fullmatch(name):
        return VOCABULARY_AT_MOST
    return COUNTS_AT_MOST if _COUNT.fullmatch(name) or _LAYERS.fullmatch(name) else None


def _short(value: int) -> str:
    return str(value) if value.bit_length() < 100 else f"a number of {value.bit_length()} bits"


def check_tokenizer(file: Path) -> None:
    """Raise ValueError if a tokenizer.json is no JSON, or gives ids that no vocabulary has: they are listed up to."""
    held = read_json(file)
    model = held.get("model") if isinstance(held, Mapping) else None
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    added = held.get("added_tokens") if isinstance(held, Mapping) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else []
    ids += [a.get("id") for a in added if isinstance(a, Mapping)] if isinstance(added, list) else []
    wrong = next((i for i in ids if isinstance(i, int) and i >= VOCABULARY_AT_MOST), None)
    if wrong is not None:
        raise ValueError(f"{file} gives the token id {_short(wrong)}, and no vocabulary has one: it is damaged.")
