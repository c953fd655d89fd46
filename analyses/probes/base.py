"""What a probe is.

A probe declares its tables and what it needs to see; `start` gives an observer that watches prompts and makes a *piece*
of them; `finish` makes tables of the pieces of all prompts, which it gets in their order. Pieces can be written to disk
and read back, so that prompts can be divided among processes: a probe never learns where it runs. `protocol` has an
example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ln_probe.analyses.constants import Calibration
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.schema import Part, Table
from ln_probe.hooks.model import HookedModel
from ln_probe.hooks.norm import Site
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.variants import SCALING_FROZEN

# Ranks of findings. An effect: significant, and larger than a named threshold. Described: what the prompts show,
# without a claim beyond them. No effect: looked for and not seen, or nothing by construction.
EFFECT, DESCRIBED, NO_EFFECT, LAST = 10, 50, 90, 100


__all__ = [
    "Context",
    "Cost",
    "Failure",
    "Finding",
    "Marks",
    "Needs",
    "Observer",
    "Picture",
    "Piece",
    "Probe",
    "ProbeError",
    "ProbeResults",
    "Shape",
    "View",
    "whole",
]


@dataclass(frozen=True)
class Needs:
    """What a probe has to see; without anything but the calibration it sees no prompt.

    Attributes:
        norms: inputs and outputs of every norm (`Observer.norm`).
        attention: every attention layer that reads a norm (`Observer.attention`).
        variants: that it makes keys and attention under every variant: much memory, given back after each layer.
        output: every prompt itself, to run the model on it as it likes (`Observer.prompt`).
        calibration: constants, query radii and the norms' statistics; observers of prompts have it too.
    """

    norms: bool = False
    attention: bool = False
    variants: bool = False
    output: bool = False
    calibration: bool = False

    @property
    def prompts(self) -> bool:
        return self.norms or self.attention or self.output

    @property
    def nothing(self) -> bool:
        """The model's weights are enough: measured once, independent of the prompts."""
        return not (self.prompts or self.calibration)


@dataclass(frozen=True, eq=False)
class View:
    """What a probe may look at.

    Attributes:
        model: in evaluation mode.
        sites: its norms; calibrated: those of them that belong to the measured layers.
        layers: measured; heads: likewise, None: all.
        calibration: of the first pass; None for a probe that needs nothing but weights.
        name_of: the string of a token id.
        meaningless: why nothing that is computed from the model's outputs or its head means anything; empty if it does.
        objective: the loss: of the next token, or the user's.
    """

    model: HookedModel
    sites: Sequence[Site]
    layers: Sequence[int]
    heads: Sequence[int] | None
    calibration: Calibration | None
    name_of: Callable[[int], str]
    meaningless: str = ""
    objective: Objective = field(default_factory=Objective)

    @property
    def calibrated(self) -> list[Site]:
        return [s for s in self.sites if self.calibration is not None and s.name in self.calibration.constants.sites]


@dataclass(frozen=True, eq=False)
class Piece:
    """What a probe keeps of some prompts: arrays and tables by name, plain JSON, and what a reader has to know."""

    arrays: Mapping[str, Shaped[np.ndarray, " ..."]] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Observer:
    """Watches prompts and makes a piece of them. Only what the probe needs is called.

    Prompts come in their order, but several may be under way at once (`batch_size`): a layer of each, then the next.
    With a model on a GPU an observer that looks at attention does so in another thread, one call after the other,
    while the model goes on; what it is given stays as it is.
    """

    def norm(self, prompt: int, site: Site, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        """A norm's input and output (norms inside attention: flattened over heads)."""

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        """An attention layer that reads a norm."""

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        """A prompt, when its forward pass is over."""

    def end(self, prompt: int) -> None:
        """All of this prompt has been seen."""

    def piece(self) -> Piece:
        """The record of all prompts that were watched."""
        return Piece()


@dataclass(frozen=True, eq=False)
class Context:
    """What `finish` knows in addition to the pieces.

    Attributes:
        calibration: of the model.
        layers: measured; None: all.
        token: the string at (prompt, position).
        keys: "hardest" or "all" rows of tables about keys; seed: of samples.
    """

    calibration: Calibration
    layers: Sequence[int] | None
    token: Callable[[int, int], str]
    keys: str = "hardest"
    seed: int = 0


@dataclass(frozen=True, eq=False)
class ProbeResults:
    """The result of all pieces: frames by table name, and sentences that a reader has to know."""

    tables: Mapping[str, Any]  # frames; whether they are is asked, with everything else, when they are checked
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A sentence computed from tables, and the picture of the page that shows it.

    The smallest `rank` is first, and of the same rank the largest `size`: the effect in share of its baseline (the
    unedited loss, the whole of attention, the greatest entropy).
    """

    text: str
    picture: str = ""
    rank: int = LAST
    size: float = 0.0


@dataclass(frozen=True)
class Picture:
    """A picture of the page: drawn if `column` of `table` has a value; `draw` gets the report.

    The first line of `draw`'s docstring is the caption.
    """

    id: str
    title: str
    draw: Callable[[Any], Any]
    table: str
    column: str


@dataclass(frozen=True, eq=False)
class Marks:
    """What was found about every key of some prompts at one layer under one variant, for pictures of attention."""

    layer: int
    variant: str
    prompts: Int[np.ndarray, " prompt"]
    lengths: Int[np.ndarray, " prompt"]
    measures: Mapping[str, Shaped[np.ndarray, "head key"]]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and its prompts before the model is loaded; NaN where they are not known.

    Attributes:
        layers, heads: that are measured, and of each layer.
        lengths: of the prompts, in tokens.
        vocabulary, width: number of tokens, and d_model.
    """

    layers: float
    heads: float
    lengths: tuple[float, ...]
    vocabulary: float = math.nan
    width: float = math.nan


@dataclass(frozen=True)
class Cost:
    """Of one probe on one model: seconds of one core beside forward passes, forward passes, bytes of its pieces, and
    bytes of memory in addition to the model's weights."""

    seconds: float = 0.0
    passes: float = 0.0
    disk_bytes: float = 0.0
    memory_bytes: float = 0.0


class Probe:
    """One thing to find out about a model.

    Attributes:
        name: how it is asked for; a word of letters, digits and _.
        summary: one line.
        tables: what it fills: whole tables, or parts of a table that it shares with another probe.
        needs: what it has to see.
        prompts: how many of the default prompts it takes; None: all. Prompts that the user gives are all taken.
        thresholds: constants that its tables depend on, for the provenance.
        samples_keys: whether it measures the keys that `Calibration.sample` names, where that is not all; its cost
            then decides whether they are.
        interleaved: whether its observers bear several prompts under way at once; if one of them does not, prompts go
            one after another unless the user gives a batch size.
        absent: what a page says was not found out where the probe did not run; empty: nothing.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    tables: ClassVar[tuple[Table | Part, ...]]
    needs: ClassVar[Needs] = Needs()
    prompts: ClassVar[int | None] = None
    thresholds: ClassVar[Mapping[str, float]] = {}
    samples_keys: ClassVar[bool] = False
    interleaved: ClassVar[bool] = False
    absent: ClassVar[str] = ""

    def start(self, view: View) -> Observer:
        """An observer of the prompts; called once for every part of them, and once for weights alone."""
        return Observer()

    def finish(self, pieces: Sequence[Piece], context: Context) -> ProbeResults:
        """The tables. By default those of the pieces, one below the other."""
        frames = tables_of(pieces)
        return ProbeResults({t.name: frames[t.name] for t in whole(self.tables) if t.name in frames}, notes_of(pieces))

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> Sequence[Finding]:
        """What the tables say, in plain sentences; `tables` are the report's, any of which can be empty."""
        return ()

    def pictures(self) -> Sequence[Picture]:
        """Pictures of the page that are about its tables."""
        return ()

    def marks(self, pieces: Sequence[Piece]) -> Iterable[Marks]:
        """Of keys, in pictures of attention."""
        return ()

    def cost(self, shape: Shape) -> Cost:
        """A rough estimate."""
        return Cost()


def tables_of(pieces: Sequence[Piece]) -> dict[str, pd.DataFrame]:
    """The tables of all pieces by name, one below the other."""
    names = dict.fromkeys(name for p in pieces for name in p.tables)
    return {n: pd.concat([p.tables[n] for p in pieces if n in p.tables], ignore_index=True) for n in names}


def notes_of(pieces: Sequence[Piece]) -> tuple[str, ...]:
    """The notes of all pieces, each once."""
    return tuple(dict.fromkeys(note for p in pieces for note in p.notes))


def whole(declared: Iterable[Table | Part]) -> list[Table]:
    """The tables that are declared, or of which parts are."""
    return [t.table if isinstance(t, Part) else t for t in declared]


class ProbeError(ValueError):
    """Something is wrong with a probe: names it and the package it comes from."""


@dataclass(frozen=True)
class Failure:
    """Why a probe has no results in this report."""

    probe: str
    package: str
    error: str

    @classmethod
    def of(cls, probe: str, package: str, error: BaseException) -> Failure:
        return cls(probe, package, f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        return f"the probe {self.probe!r} of {self.package} failed: {self.error}"


# ------------------------------------------------------------------------------------------- findings of several probes

NOTEWORTHY = 0.01  # a change of less than a hundredth, in share of attention or of entropy, is not pointed out

LONGER_OUTPUT = (
    "without the projection a norm's output is 1 / sqrt(1 - mean_share) times as long: part of what no_projection "
    "costs may be that length"
)


def asked_layers(provenance: Mapping[str, Any]) -> list[int] | None:
    """The layers that an analysis was asked for, in order; None: all of them."""
    asked = provenance.get("arguments", {}).get("layers")
    return None if asked is None else sorted(set(asked))


def in_layers(provenance: Mapping[str, Any]) -> str:
    """Where, to stand behind "every norm" and the like: " in layer 2", " in layers 0, 1"; nothing if all were asked."""
    asked = asked_layers(provenance)
    return "" if asked is None else f" in layer{'' if len(asked) == 1 else 's'} {', '.join(map(str, asked))}"


def among_heads(provenance: Mapping[str, Any]) -> str:
    """Of which heads a figure speaks: " (heads 0, 1 alone)"; nothing if all were asked."""
    asked = provenance.get("arguments", {}).get("heads")
    every = sorted(set(asked or ()))
    return f" (head{'' if len(every) == 1 else 's'} {', '.join(map(str, every))} alone)" if every else ""


def even_share(heads: pd.DataFrame) -> float:
    """Attention that each key of a prompt of average length would get if all got the same, by a `heads` table: of the
    prompts that its keys come from. NaN if it does not say how many."""
    if not {"prompts", "keys_all"} <= set(heads) or not (keys := heads["keys_all"].sum()) > 0:
        return math.nan
    return float(heads["prompts"].sum(min_count=1) / keys)


def largest(rows: pd.DataFrame, values: pd.Series) -> pd.Series:
    """The row at which `values` is largest."""
    return rows.iloc[int(np.nanargmax(values.to_numpy(float)))]


def of_variant(heads: pd.DataFrame, variant: str, space: str = "head") -> pd.DataFrame:
    return heads[(heads["space"] == space) & (heads["variant"] == variant)]


def medians(heads: pd.DataFrame, column: str) -> tuple[float, float]:
    """The median head's value, intact and without scaling; the second is NaN where that changes nothing."""
    if not len(heads):
        return math.nan, math.nan
    frozen = of_variant(heads, SCALING_FROZEN.name)
    changes_nothing = len(frozen) > 0 and bool((frozen["no_op"] != "").all())
    return (
        float(of_variant(heads, "intact")[column].median()),
        math.nan if changes_nothing else float(frozen[column].median()),
    )


def by_layer(heads: pd.DataFrame, column: str) -> tuple[pd.Series, pd.Series]:
    """The median head's value in each layer, intact and without scaling, where both are known."""
    if not len(heads):
        return pd.Series(dtype=float), pd.Series(dtype=float)
    both = [of_variant(heads, v).groupby("layer")[column].median() for v in ("intact", SCALING_FROZEN.name)]
    known = pd.concat(both, axis=1, keys=("intact", "frozen")).dropna()
    return known["intact"], known["frozen"]
