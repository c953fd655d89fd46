"""Attention patterns for a report's pictures: every head of one prompt, intact and with scaling frozen.

Weights have 8 bits on a square-root scale: the error is at most 0.4 % of the attention, and smaller for small weights.
Of a longer prompt the first TOKENS_SHOWN tokens are kept, and of a large model evenly spaced layers.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, UInt8

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes.uniformity import AttentionLayer
from ln_probe.hooks.model import OneLine
from ln_probe.hooks.norm import SCALING_FROZEN

EXHIBITS_FILE = "exhibits.npz"
TOKENS_SHOWN = 128
# Bytes before compression: GPT-2's 144 heads at 128 tokens, intact and frozen, take 4.7 MB.
BUDGET = 6_000_000
# Errors raised by reading a truncated or altered .npz file.
_DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, MemoryError, zipfile.BadZipFile, zlib.error)


def to_bytes(weights: Float[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """Store weights in 0–1 as 8 bits of their square root, which keeps small weights distinct and 1 exact."""
    roots = np.sqrt(np.clip(np.nan_to_num(weights), 0.0, 1.0))
    return np.asarray(np.rint(255.0 * roots), np.uint8)


@dataclass(frozen=True, eq=False, repr=False)
class PromptAttention(OneLine):
    """Attention of one prompt.

    Attributes:
        prompt: its number among the report's prompts.
        tokens: token strings, of the first TOKENS_SHOWN tokens.
        length: tokens of the whole prompt.
        layers, heads: block indices and head numbers (the axes below).
        causal: no query sees later keys.
        intact: attention weights, as `to_bytes` stores them.
        frozen: the same with scaling frozen for the keys alone (queries are the intact model's): equal where that
            changes nothing by construction, zeros where it is not known.
    """

    prompt: int
    tokens: tuple[str, ...]
    length: int
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    causal: bool
    intact: UInt8[np.ndarray, "layer head query key"]
    frozen: UInt8[np.ndarray, "layer head query key"]


@dataclass(frozen=True, eq=False, repr=False)
class Exhibits(OneLine):
    """The data of a report for pictures; `notes` list omissions.

    Attributes:
        attention: of one prompt.
        token_losses: a row per predicted token: see `Report.tokens`.
    """

    attention: PromptAttention | None = None
    notes: tuple[str, ...] = ()
    token_losses: pd.DataFrame | None = None


@dataclass
class AttentionRecorder:
    """Records the attention of the first prompt, a layer at a time.

    Args:
        tokens: token strings of each prompt.
        layers, heads: the measured ones.
    """

    tokens: Sequence[Sequence[str]]
    layers: Sequence[int]
    heads: Sequence[int]
    prompt: int = 0
    causal: bool = True
    failure: str = ""
    _patterns: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shown = min(len(self.tokens[self.prompt]), TOKENS_SHOWN)
        room = max(1, BUDGET // (2 * max(1, len(self.heads)) * shown**2))
        spaced = np.linspace(0, len(self.layers) - 1, min(room, len(self.layers))).astype(int)
        self.chosen = [self.layers[place] for place in spaced]

    def takes(self, prompt: int) -> bool:
        """Return whether a prompt is shown."""
        return prompt == self.prompt

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        """Record a layer of the prompt that is shown."""
        if attended.layer not in self.chosen:
            return
        intact = attended.seen.pattern.float()
        heads = [head for head in self.heads if head < len(intact)]
        frozen = None if attended.heads is None else attended.pattern(SCALING_FROZEN.name)
        if frozen is None:
            frozen = intact * (attended.heads is not None)
        shown = slice(0, TOKENS_SHOWN)
        self.causal &= attended.seen.causal
        patterns = (to_bytes(pattern[heads, shown, shown].cpu().numpy()) for pattern in (intact, frozen))
        self._patterns[attended.layer] = next(patterns), next(patterns)

    def exhibits(self) -> Exhibits:
        """Return what was recorded."""
        if self.failure or not self._patterns:
            return Exhibits(notes=(self.failure,) * bool(self.failure))
        tokens = self.tokens[self.prompt]
        layers = sorted(self._patterns)
        intact, frozen = (np.stack([self._patterns[layer][i] for layer in layers]) for i in (0, 1))
        notes = []
        if len(tokens) > TOKENS_SHOWN:
            notes.append(f"attention is shown for the first {TOKENS_SHOWN} of the {len(tokens)} tokens of prompt 0")
        if len(self.chosen) < len(self.layers):
            notes.append(f"attention is shown for {len(self.chosen)} of {len(self.layers)} layers")
        shown = PromptAttention(
            self.prompt,
            tuple(tokens[:TOKENS_SHOWN]),
            len(tokens),
            tuple(layers),
            tuple(self.heads)[: intact.shape[1]],
            self.causal,
            intact,
            frozen,
        )
        return Exhibits(shown, tuple(notes))


def save_arrays(path: Path, exhibits: Exhibits, constants: Constants | None) -> None:
    """Write attention and the sums that constants come from into a compressed .npz (plain arrays, no pickles)."""
    arrays: dict[str, np.ndarray] = {}
    index: dict[str, Any] = {"notes": list(exhibits.notes), "attention": None}
    if exhibits.attention is not None:
        about = asdict(exhibits.attention)
        arrays |= {name: about.pop(name) for name in ("intact", "frozen")}
        index["attention"] = about
    if (losses := exhibits.token_losses) is not None:
        index["tokens"] = losses["token"].tolist()
        arrays |= {f"tokens.{name}": losses[name].to_numpy() for name in losses if name != "token"}
    if constants is not None:
        arrays |= {f"constants.{name}": array for name, array in constants.arrays().items()}
    buffer = io.BytesIO()
    arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    path.write_bytes(buffer.getvalue())


def load_arrays(path: Path) -> tuple[Exhibits, dict[str, np.ndarray]]:
    """Return the exhibits and the arrays of the constants that `save_arrays` wrote.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
        index = json.loads(arrays.pop("index").tobytes())
        about, shown = index["attention"], None
        if about is not None:
            about |= {name: tuple(about[name]) for name in ("tokens", "layers", "heads")}
            shown = PromptAttention(**about, intact=arrays["intact"], frozen=arrays["frozen"])
        constants, columns = (
            {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
            for start in ("constants.", "tokens.")
        )
        losses = pd.DataFrame(columns) if columns else None
        if losses is not None:
            losses.insert(2, "token", index["tokens"])
        return Exhibits(shown, tuple(index["notes"]), losses), constants
    except _DAMAGE as error:
        raise ValueError(f"{path} is damaged ({error}): analyze the model again") from error
