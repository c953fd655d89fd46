"""The strings of tokens for a model without a tokenizer, from a file that came with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ln_probe.analyses.machinery.files import FileError, read_json, read_text
from ln_probe.analyses.wording import quoted
from ln_probe.hooks.default_tokens import tokenizer_of
from ln_probe.hooks.model import HookedModel, vocabulary_size

# Where a JSON object holds the vocabulary beside other things.
_INSIDE = ("token2id", "vocab", "model", "token_to_id", "stoi", "id2token", "itos")


def read_vocabulary(path: str | Path) -> dict[int, str]:
    """Token strings by id, from a `.json` ({token: id}, {id: token}, a list, or one of these inside an object, as in
    tokenizer.json) or a text file with a token a line.

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


def naming_notes(model: HookedModel) -> list[str]:
    """What a reader has to know about names that came from a file: how many are missing, and what they replace."""
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
