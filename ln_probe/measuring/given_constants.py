"""Constants that do not come from the measured prompts: calibration text, or what stands in for other prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

from ln_probe.analyses.constants import CALIBRATION, OWN_MEANS, Constants
from ln_probe.analyses.machinery.files import read_text, sha256_of_file
from ln_probe.hooks.default_tokens import CALIBRATION as CALIBRATION_PART
from ln_probe.hooks.default_tokens import bundled_prompts, bundled_texts, encode, tokenizer_of
from ln_probe.hooks.frozen_scale import mean_sigmas
from ln_probe.hooks.model import HookedModel, context_length
from ln_probe.hooks.sites import Site
from ln_probe.prompting.prompts import Prompts, make_prompts, summary


def calibration_prompts(
    model: HookedModel, given: Any, max_tokens: int, seed: int = 0, prepend_bos: bool | None = None
) -> Prompts:
    """The user's calibration text as token ids.

    Raises:
        ValueError: ids outside the model's vocabulary, no prompts, or an empty one; the message begins with
            "calibration".
    """
    try:
        return make_prompts(model, given, max_tokens=max_tokens, seed=seed, prepend_bos=prepend_bos)
    except (ValueError, TypeError) as error:
        raise type(error)(f"calibration: {error}") from error


def read_groups(path: str | Path) -> list[str]:
    """The group labels of a file, a line for each prompt.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no label.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"no groups file {str(path)!r}")
    labels = read_text(path).splitlines()
    if not labels or not all(label.strip() for label in labels):
        empty = next((n for n, label in enumerate(labels, start=1) if not label.strip()), 1)
        raise ValueError(f"{path}: line {empty} holds no label; write one label a line, a line for each prompt")
    return labels


def check_unchanged(path: str, sha256: str | None) -> None:
    """Raise ValueError if a file is not what it was when the run was planned."""
    if sha256_of_file(Path(path)) != sha256:
        raise ValueError(f"{path} changed after the run began: start the run again")


def given_constants(
    model: HookedModel,
    sites: Sequence[Site],
    measured: Constants,
    rows: Sequence[bytes],
    calibration: Prompts | None,
) -> tuple[Constants, dict[str, Any], tuple[str, ...]]:
    """Where the constants come from: `calibration`; else the other prompts; where there is one group only, the model's
    calibration windows, the bundled passages or the prompts' own means.

    Args:
        measured: leave-one-out constants of the measured prompts; rows: their token ids as bytes.
        calibration: the user's text.

    Returns:
        the constants, what provenance says of the calibration prompts, and notes.

    Raises:
        ValueError: calibration text that holds the measured prompts alone, or no prompt of two tokens.
    """
    if calibration is not None:
        notes = _overlap(rows, calibration)
        return _from(model, sites, measured, calibration.tokens, f"{CALIBRATION} ({calibration.source})", notes)
    if measured.group_count > 1 or not measured.group_count or not sites:
        return measured, {}, ()
    limit = context_length(model)
    own = bundled_prompts(model)
    if own is not None:
        other, source = list(own.calibration), f"{CALIBRATION} ({own.source})"
    elif tokenizer_of(model) is not None:
        other, source = [encode(model, text) for text in bundled_texts(CALIBRATION_PART)], f"{CALIBRATION} (bundled)"
    else:
        note = (
            "there is one group of prompts and no other text, so the constants are the means of these prompts "
            "themselves: give more prompts, or calibration="
        )
        return replace(measured, source=OWN_MEANS), {}, (note,)
    note = f"there is one group of prompts only, so the constants are {source}: give more prompts, or calibration="
    return _from(model, sites, measured, [row[:limit] for row in other], source, (note,))


def _from(
    model: HookedModel,
    sites: Sequence[Site],
    measured: Constants,
    other: Sequence[Int[Tensor, " _"]],
    source: str,
    notes: tuple[str, ...],
) -> tuple[Constants, dict[str, Any], tuple[str, ...]]:
    found = mean_sigmas(model, sites, other)
    return replace(measured, source=source, given=found), summary(source, other), notes


def _overlap(rows: Sequence[bytes], calibration: Prompts) -> tuple[str, ...]:
    """A note on prompts that are in the calibration text too."""
    if max(map(len, calibration.tokens)) < 2:
        raise ValueError(
            f"calibration: its {len(calibration.tokens)} prompts have one token each, and constants are means over "
            "positions: give at least two tokens"
        )
    there = {row.numpy().astype(np.int64).tobytes() for row in calibration.tokens}
    same = sum(row in there for row in rows)
    if same == len(rows) and there == set(rows):
        raise ValueError(
            f"calibration: these are the {len(rows)} prompts that are measured: leave it out (the constants of a "
            "prompt are then means over the others), or give other text"
        )
    if not same:
        return ()
    return (
        f"{same} of {len(rows)} prompts are in the calibration text too: their own sigma is part of their constants",
    )
