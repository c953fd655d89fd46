"""Data that a report keeps for its pictures: attention patterns with a mark on every key.

A pattern of 512 tokens has 131 thousand weights, and a small model has 144 patterns. So every head is pooled to at most
64 × 64 cells, and only a few heads are kept weight by weight. Weights have 8 bits on a square-root scale: the error is
at most 0.4 % of the attention, and smaller for small weights.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, UInt8

from ln_probe.analyses.probes.columns import SINKS, TOKENS
from ln_probe.analyses.text import encodable
from ln_probe.hooks.model import OneLine

EXHIBITS_FILE = "exhibits.npz"
CELLS = 64  # rows and columns of a pooled pattern: as many as the page's size allows for 144 heads
# Errors raised by reading a truncated or altered .npz file.
_DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError, IndexError, MemoryError, zipfile.BadZipFile, zlib.error)
VERDICTS = ("selectable", "unselectable", "duplicate", "undecided", "not measured")


def to_bytes(weights: Float[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """Store weights in 0–1 as 8 bits of their square root, which keeps small weights distinct and 1 exact."""
    roots = np.sqrt(np.clip(np.nan_to_num(weights), 0.0, 1.0))
    return np.asarray(np.rint(255.0 * roots), np.uint8)


def to_weights(stored: UInt8[np.ndarray, "*shape"]) -> Float[np.ndarray, "*shape"]:
    """Return the weights that `to_bytes` stored."""
    return np.asarray(np.square(stored / 255.0))


def bin_edges(length: int, cells: int = CELLS) -> Int[np.ndarray, " edge"]:
    """Divide `length` positions into at most `cells` bins of nearly equal size; return first positions and the end."""
    count = min(cells, length)
    return np.rint(np.linspace(0, length, count + 1)).astype(np.int64)


def pooled(
    pattern: Float[np.ndarray, "head query key"], edges: Int[np.ndarray, " edge"]
) -> Float[np.ndarray, "head bin bin"]:
    """Sum the attention that an average query of one bin gives to all keys of another; rows still sum to 1."""
    sums = np.add.reduceat(np.add.reduceat(pattern, edges[:-1], axis=2), edges[:-1], axis=1)
    means: np.ndarray = sums / np.diff(edges)[None, :, None]
    return means


@dataclass(frozen=True, eq=False, repr=False)
class PromptAttention(OneLine):
    """Attention of one prompt, in the layers and heads that were kept.

    Attributes:
        prompt: its number among the report's prompts.
        tokens: its token strings.
        layers, heads: block indices and head numbers kept (the axes below).
        edges: first position of each bin, and the number of tokens at the end.
        cells: pooled patterns, as `to_bytes` stores them.
        verdict: index into VERDICTS, of all keys of the prompt and a query at its last position.
        margin: in nats (NaN: unknown or one key).
        attainable: largest attention at the last position from queries of the observed set (NaN: no bound on queries).
        verdict_frozen, attainable_frozen: the same with scaling frozen.
        received: mean attention to the key from the queries after position 0 that see it, as `to_bytes` stores it.
        full: patterns weight by weight of a few (layer, head).
        causal: no weight above the diagonal.
        cells_frozen: `cells` with scaling frozen for the keys alone (queries are the intact model's); zeros in layers
            where nothing changes by construction, or that have no head space. None: not recorded.
        first_change: change of the mean attention to position 0 with scaling frozen for the keys (NaN: as above).
    """

    prompt: int
    tokens: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    edges: Int[np.ndarray, " edge"]
    cells: UInt8[np.ndarray, "layer head bin bin"]
    verdict: UInt8[np.ndarray, "layer head key"]
    margin: Float[np.ndarray, "layer head key"]
    attainable: Float[np.ndarray, "layer head key"]
    verdict_frozen: UInt8[np.ndarray, "layer head key"]
    attainable_frozen: Float[np.ndarray, "layer head key"]
    received: UInt8[np.ndarray, "layer head key"]
    full: Mapping[tuple[int, int], UInt8[np.ndarray, "query key"]] = field(default_factory=dict)
    causal: bool = True
    cells_frozen: UInt8[np.ndarray, "layer head bin bin"] | None = None
    first_change: Float[np.ndarray, "layer head"] | None = None

    @property
    def pooled(self) -> bool:
        """Whether a cell represents more than one token."""
        return len(self.edges) - 1 < len(self.tokens)


@dataclass(frozen=True, eq=False, repr=False)
class Exhibits(OneLine):
    """All data of a report for pictures; `notes` list omissions."""

    attention: tuple[PromptAttention, ...] = ()
    notes: tuple[str, ...] = ()

    def of_prompt(self, prompt: int) -> PromptAttention:
        """Return the data of one prompt.

        Raises:
            ValueError: nothing was (says of which prompts there is something).
        """
        found = next((a for a in self.attention if a.prompt == prompt), None)
        if found is None:
            if not self.attention:
                raise ValueError(
                    "this report keeps no attention: analyze with the probe 'selectability' or 'uniformity' on a model "
                    "whose attention reads a norm"
                )
            kept = ", ".join(str(a.prompt) for a in self.attention)
            raise ValueError(f"no attention was kept of prompt {prompt!r}: there is some of prompts {kept}")
        return found

    def plain(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Return arrays by name, and a JSON-like index that describes them."""
        arrays: dict[str, np.ndarray] = {}
        index: dict[str, Any] = {"attention": [], "notes": list(self.notes)}
        for number, shown in enumerate(self.attention):
            about = {}
            for name in (f.name for f in fields(shown)):
                value = getattr(shown, name)
                if isinstance(value, np.ndarray):
                    arrays[f"{number}.{name}"] = value
                elif name == "full":
                    for (layer, head), pattern in value.items():
                        arrays[f"{number}.full.{layer}.{head}"] = pattern
                else:
                    about[name] = value
            index["attention"].append(about)
        return arrays, index

    @staticmethod
    def of_plain(arrays: Mapping[str, np.ndarray], index: Mapping[str, Any]) -> Exhibits:
        """Rebuild exhibits from the result of `plain`.

        Raises:
            KeyError, TypeError, ValueError, IndexError: they do not belong together.
        """
        prompts: list[dict[str, Any]] = [
            {name: tuple(value) if isinstance(value, list) else value for name, value in about.items()}
            for about in index["attention"]
        ]
        for key, array in arrays.items():
            number, name, *place = key.split(".")
            if place:
                prompts[int(number)].setdefault(name, {})[int(place[0]), int(place[1])] = array
            else:
                prompts[int(number)][name] = array
        return Exhibits(tuple(PromptAttention(**prompt) for prompt in prompts), tuple(index["notes"]))

    def save(self, path: Path) -> None:
        """Write one compressed .npz (plain arrays, no pickles)."""
        arrays, index = self.plain()
        arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
        path.write_bytes(buffer.getvalue())

    @staticmethod
    def load(path: Path) -> Exhibits:
        """Read a file that `save` wrote.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
            return Exhibits.of_plain(arrays, json.loads(arrays.pop("index").tobytes()))
        except _DAMAGE as error:
            raise ValueError(f"{path} is damaged ({error}): analyze the model again") from error


PLACES = ("position 0", "sink", "elsewhere")


def by_token(exhibits: Exhibits, sinks: pd.DataFrame | None = None) -> pd.DataFrame:
    """A row per token and place (`ln_probe.analyses.probes.columns.TOKENS`), the tokens that scaling helps most first.

    Args:
        exhibits: `Report.exhibits`.
        sinks: `Report.sinks`, which says which tokens of which prompts are sinks. None: no token is called one.

    `keys` counts (layer, head, prompt, position); medians are over them. `attainable_change` is the change of the
    median attainable attention when scaling is frozen.

    Example:
        >>> from ln_probe.exhibits import by_token
        >>> by_token(report.exhibits, report.sinks).head(3)
    """
    of_sinks = SINKS.empty() if sinks is None else sinks[sinks["sink"].astype(bool)]
    known = [(int(prompt), int(at)) for prompt, at in of_sinks[["prompt", "position"]].to_numpy()]
    rows = [_keys(shown, {at for prompt, at in known if prompt == shown.prompt}) for shown in exhibits.attention]
    if not rows:
        return TOKENS.empty()
    keys = pd.concat(rows, ignore_index=True)
    grouped = keys.groupby(["token", "place"], sort=False)
    table = grouped.agg(
        keys=("stuck", "size"),
        unselectable=("stuck", "sum"),
        unselectable_no_scaling=("stuck_frozen", "sum"),
        attainable_median=("attainable", "median"),
        attainable_no_scaling_median=("attainable_frozen", "median"),
        margin_median=("margin", "median"),
        received_mean=("received", "mean"),
    ).reset_index()
    for column, measured in (("unselectable", "known"), ("unselectable_no_scaling", "known_frozen")):
        some = grouped[measured].any().to_numpy()
        table[column] = table[column].astype(float).where(some)
    table["attainable_change"] = table["attainable_no_scaling_median"] - table["attainable_median"]
    order = table.assign(rank=table["place"].map(PLACES.index)).sort_values(
        ["rank", "attainable_change", "keys"], ascending=[True, True, False], kind="stable"
    )
    return order[TOKENS.names].reset_index(drop=True)


def _keys(shown: PromptAttention, sinks: Collection[int]) -> pd.DataFrame:
    layers, heads, length = shown.verdict.shape
    received = to_weights(shown.received)
    position = np.broadcast_to(np.arange(length), shown.verdict.shape)
    place = np.where(position == 0, 0, np.where(np.isin(position, sorted(sinks)), 1, 2))
    stuck = [VERDICTS.index("unselectable"), VERDICTS.index("duplicate")]
    unknown = VERDICTS.index("not measured")
    return pd.DataFrame(
        {
            "token": np.tile(np.array([encodable(t) for t in shown.tokens], object), layers * heads),
            "place": np.array(PLACES, object)[place.ravel()],
            "stuck": np.isin(shown.verdict, stuck).ravel(),
            "stuck_frozen": np.isin(shown.verdict_frozen, stuck).ravel(),
            "known": (shown.verdict != unknown).ravel(),
            "known_frozen": (shown.verdict_frozen != unknown).ravel(),
            "attainable": shown.attainable.astype(np.float64).ravel(),
            "attainable_frozen": shown.attainable_frozen.astype(np.float64).ravel(),
            "margin": shown.margin.astype(np.float64).ravel(),
            "received": received.ravel(),
        }
    )
