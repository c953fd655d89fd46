"""What was measured at every (layer, space, variant) over the keys or the prompts, as pieces that can be joined.

Arrays stand prompt after prompt. Prompts measured in several pieces are joined in their order before anything is summed
or any quantile taken, so tables do not depend on how the prompts were divided. One (layer, space) is in memory at a
time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Int64, Shaped

from ln_probe.analyses.probes.protocol import Piece
from ln_probe.hooks.variants import VARIANTS

NORMALIZED, HEAD = "normalized", "head"
# Of the default prompts, what probes of keys take: each prompt has a key a token in every head, and the geometry of one
# prompt costs some hundred forward passes, so 4 of them say enough about keys.
GEOMETRY_PROMPTS = 4


@dataclass(frozen=True, eq=False)
class KeyRows:
    """What was measured at one (layer, space, variant).

    Attributes:
        heads: the heads measured, a row each in the arrays; (-1,) in normalized space.
        dim: dimension of the space the keys lie in.
        theorem: why none of them can be unselectable however many they are; empty if one can.
        no_op: why the variant changes nothing; empty if it does.
        prompts, lengths: number of every prompt, and how many keys it has.
        measured: how many of these were measured, where only a sample was.
        measures: by name; a column per key, or per prompt.
    """

    layer: int
    space: str
    variant: str
    heads: tuple[int, ...]
    dim: int
    theorem: str
    no_op: str
    prompts: Int64[np.ndarray, " prompt"]
    lengths: Int64[np.ndarray, " prompt"]
    measured: Int64[np.ndarray, " prompt"] = field(default_factory=lambda: np.empty(0, np.int64))
    measures: Mapping[str, Shaped[np.ndarray, "head column"]] = field(default_factory=dict)

    @property
    def sampled(self) -> bool:
        """Whether columns are of some keys only: which, says the measure `position`."""
        return "position" in self.measures

    @property
    def columns(self) -> Int64[np.ndarray, " prompt"]:
        """How many keys of each prompt were measured."""
        return self.measured if self.sampled else self.lengths


Block = Mapping[str, KeyRows]  # of one (layer, space), by variant


@dataclass
class _Group:
    about: KeyRows
    prompts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    measures: dict[str, list[np.ndarray]] = field(default_factory=dict)


class Collected:
    """Takes in measures prompt by prompt; a piece at the end."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str, str], _Group] = {}

    def add(
        self,
        about: tuple[int, str, str],
        prompt: int,
        length: int,
        measures: Mapping[str, Shaped[np.ndarray, "head column"]],
        *,
        heads: Sequence[int],
        dim: int,
        no_op: str,
        theorem: str = "",
    ) -> None:
        """One prompt's measures at a (layer, space, variant); the rest as in `KeyRows`."""
        nothing = np.empty(0, np.int64)
        group = self._groups.setdefault(
            about, _Group(KeyRows(*about, tuple(heads), dim, theorem, no_op, nothing, nothing))
        )
        group.prompts.append(prompt)
        group.lengths.append(length)
        group.measured.append(next((a.shape[1] for a in map(np.asarray, measures.values())), 0))
        for name, values in measures.items():
            group.measures.setdefault(name, []).append(np.asarray(values))

    def piece(self) -> Piece:
        """All of it, as `blocks` reads it."""
        arrays: dict[str, np.ndarray] = {}
        rows = []
        for group in self._groups.values():
            r = group.about
            place = f"{r.space}/{r.layer}/{r.variant}"
            arrays[f"{place}/prompts"] = np.array(group.prompts, np.int64)
            arrays[f"{place}/lengths"] = np.array(group.lengths, np.int64)
            arrays[f"{place}/measured"] = np.array(group.measured, np.int64)
            arrays |= {f"{place}/{m}": np.concatenate(parts, axis=1) for m, parts in group.measures.items()}
            rows.append(
                {
                    "layer": r.layer,
                    "space": r.space,
                    "variant": r.variant,
                    "heads": list(r.heads),
                    "dim": r.dim,
                    "theorem": r.theorem,
                    "no_op": r.no_op,
                    "measures": list(group.measures),
                }
            )
        return Piece(arrays, info={"rows": rows})


def blocks(pieces: Sequence[Piece]) -> Iterator[Block]:
    """What the pieces hold, a (layer, space) at a time, in the order of the tables."""
    held = [({(r["layer"], r["space"], r["variant"]): r for r in piece.info["rows"]}, piece) for piece in pieces]
    places = sorted({(layer, space) for rows, _ in held for layer, space, _ in rows}, key=lambda p: order(*p))
    for layer, space in places:
        block: dict[str, KeyRows] = {}
        for variant in VARIANTS:
            parts = [_read(rows[found], piece) for rows, piece in held if (found := (layer, space, variant)) in rows]
            if parts:
                block[variant] = join(parts)
        yield block


def _read(row: Mapping[str, object], piece: Piece) -> KeyRows:
    about = {k: v for k, v in row.items() if k not in ("heads", "measures")}
    place = f"{row['space']}/{row['layer']}/{row['variant']}"
    return KeyRows(
        **about,  # type: ignore[arg-type]
        heads=tuple(row["heads"]),  # type: ignore[arg-type]
        prompts=piece.arrays[f"{place}/prompts"],
        lengths=piece.arrays[f"{place}/lengths"],
        measured=piece.arrays[f"{place}/measured"],
        measures={m: piece.arrays[f"{place}/{m}"] for m in row["measures"]},  # type: ignore[attr-defined]
    )


def join(parts: Sequence[KeyRows]) -> KeyRows:
    """One after another: the same (layer, space, variant) measured on several pieces of the prompts."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    return replace(
        first,
        prompts=np.concatenate([p.prompts for p in parts]),
        lengths=np.concatenate([p.lengths for p in parts]),
        measured=np.concatenate([p.measured for p in parts]),
        measures={m: np.concatenate([p.measures[m] for p in parts], axis=1) for m in first.measures},
    )


def order(layer: int, space: str) -> tuple[bool, int]:
    """Where a (layer, space) stands in the tables."""
    return space != NORMALIZED, layer


def head_rows(block: Block) -> Iterable[tuple[KeyRows, int, int]]:
    """Every row of the `heads` table that a block makes: its measures, the row in them, and the head."""
    for rows in block.values():
        for row, head in enumerate(rows.heads):
            yield rows, row, head
