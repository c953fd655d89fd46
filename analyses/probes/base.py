"""What a probe is.

A probe declares its tables and what it has to see. `Probe.start` returns an observer, which watches prompts and makes
the tables when all of them have been seen.

Example:
    >>> from ln_probe.analyses.probes.base import Finding, Needs, Observer, Picture, Probe, ProbeResults, Run
    >>> from ln_probe.analyses.schema import declare
    >>> from ln_probe.page.figures import Figure
    >>> LENGTHS = declare("lengths", "Lengths", "A row per norm.", ("site",), '''
    ...     site (text): the norm
    ...     longest (float, L2 norm): length of the longest input
    ... ''')
    >>> class Watching(Observer):
    ...     def __init__(self):
    ...         self.longest = {}
    ...     def norm(self, prompt, site, x, y):  # x, y: the norm's input and output [pos d]
    ...         self.longest[site.name] = max(float(x.norm(dim=-1).max()), self.longest.get(site.name, 0.0))
    ...     def finish(self):
    ...         rows = [{"site": site, "longest": length} for site, length in self.longest.items()]
    ...         return ProbeResults({"lengths": LENGTHS.frame(rows)}, ["lengths: of all prompts"])
    >>> def draw(report):
    ...     "The longest vector that each norm reads."
    ...     figure = Figure()
    ...     figure.subplots().plot(report.tables["lengths"]["longest"])
    ...     return figure
    >>> class Lengths(Probe):
    ...     name, summary, tables, needs = "lengths", "how long vectors are", (LENGTHS,), Needs(norms=True)
    ...     def start(self, run: Run):
    ...         return Watching()
    ...     def findings(self, tables, provenance):
    ...         return [Finding(f"The longest vector has length {tables['lengths']['longest'].max():.3g}.", "drawn")]
    ...     def pictures(self):
    ...         return [Picture("drawn", "Longest vectors", draw, "lengths", "longest")]
    >>> report = ln_probe.analyze(model, tokens, probes=[Lengths()])
    >>> report.tables["lengths"]
    >>> report.failures  # a `Failure` for each probe that raised (a probe of keys may give `Marks`, for pictures)
    ()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes.attention_layer import AttentionLayer
from ln_probe.analyses.probes.norm_statistics import NormStatistics
from ln_probe.analyses.schema import Table
from ln_probe.hooks.model import HookedModel
from ln_probe.hooks.norm import SCALING_FROZEN, Norm
from ln_probe.hooks.objective import Objective

# Ranks of findings. An effect: significant, and larger than a named threshold. Described: what the prompts show,
# without a claim beyond them. No effect: looked for and not seen, or nothing by construction.
EFFECT, DESCRIBED, NO_EFFECT, LAST = 10, 50, 90, 100

__all__ = [
    "Failure",
    "Finding",
    "Marks",
    "Needs",
    "Observer",
    "Picture",
    "Probe",
    "ProbeError",
    "ProbeResults",
    "Run",
]


@dataclass(frozen=True)
class Needs:
    """What a probe has to see; without any of it, it sees no prompt.

    Attributes:
        norms: inputs and outputs of every norm (`Observer.norm`).
        attention: every attention layer that reads a norm (`Observer.attention`).
        output: every prompt itself, to run the model on it (`Observer.prompt`).
    """

    norms: bool = False
    attention: bool = False
    output: bool = False


@dataclass(frozen=True, eq=False)
class Run:
    """One measurement of a model: all that a probe gets.

    Attributes:
        model: in evaluation mode.
        norms: its norms, in the order of the forward pass.
        constants: what replaces each norm's sigma on each prompt.
        layers: the measured ones.
        heads: the measured ones; None: all.
        loss: of the next token, or the user's.
        prompts: token ids of each prompt.
        strings: token strings of each prompt.
        statistics: running sums over all prompts, of each norm of the measured layers.
        seed: of resamples.
        strata: what each prompt is a sample of (its book); empty: there is one stratum.
    """

    model: HookedModel
    norms: Sequence[Norm]
    constants: Constants
    layers: Sequence[int]
    heads: Sequence[int] | None
    loss: Objective = field(default_factory=Objective)
    prompts: Sequence[Int[Tensor, " _"]] = ()
    strings: Sequence[Sequence[str]] = ()
    statistics: Sequence[NormStatistics] = ()
    seed: int = 0
    strata: Sequence[str] = ()

    @property
    def measured_norms(self) -> list[Norm]:
        """The norms of the measured layers."""
        return [norm for norm in self.norms if norm.name in self.constants.sites]

    @property
    def notes_on_projection(self) -> tuple[str, ...]:
        """What a reader of numbers without projection has to know; nothing where no norm projects."""
        return (LONGER_OUTPUT,) if any(norm.projects for norm in self.norms) else ()


@dataclass(frozen=True, eq=False)
class Marks:
    """Measures of every key of some prompts at one layer under one variant, for pictures of attention."""

    layer: int
    variant: str
    prompts: Int[np.ndarray, " prompt"]
    lengths: Int[np.ndarray, " prompt"]
    measures: Mapping[str, Shaped[np.ndarray, "head key"]]


@dataclass(frozen=True, eq=False)
class ProbeResults:
    """What a probe measured.

    Attributes:
        tables: frames by table name; where several probes fill one table, a frame has the table's key and some of its
            columns.
        notes: sentences that a reader has to know.
        provenance: how it was measured, as plain JSON; the report has it under the probe's name.
        marks: of keys, in pictures of attention.
    """

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    notes: Sequence[str] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    marks: Sequence[Marks] = ()


class Observer:
    """Watches prompts and makes a probe's tables. Only what the probe needs is called.

    Prompts come in their order, but several may be under way at once (`batch_size`): a layer of each, then the next.
    """

    def norm(self, prompt: int, site: Norm, x: Float[Tensor, "pos d"], y: Float[Tensor, "pos d"]) -> None:
        """Take in a norm's input and output (norms inside attention: flattened over heads)."""

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        """Take in an attention layer that reads a norm."""

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        """Take in a prompt, when its forward pass is over."""

    def end(self, prompt: int) -> None:
        """Finish a prompt: all of it has been seen."""

    def finish(self) -> ProbeResults:
        """Return the tables of all prompts that were watched."""
        return ProbeResults()


@dataclass(frozen=True)
class Finding:
    """A sentence computed from tables, and the picture of the page that shows it.

    The smallest `rank` is first, and of the same rank the largest `size`: the effect in share of its baseline (the
    intact loss, the whole of attention, the greatest entropy).
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


class Probe:
    """One question about a model: give an object of a subclass to `analyze(probes=[…])`.

    Attributes:
        name: letters, digits and _.
        summary: one line.
        tables: what it fills.
        needs: what it has to see.
        prompts: how many of the default prompts it takes; None: all. Prompts that the user gives are all taken.
        thresholds: constants that its tables depend on, for the provenance.
        interleaved: whether its observers bear several prompts under way at once; if one of them does not, prompts go
            one after another unless the user gives a batch size.
        absent: what a page names as not measured where the probe did not run; empty: nothing.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    tables: ClassVar[tuple[Table, ...]]
    needs: ClassVar[Needs] = Needs()
    prompts: ClassVar[int | None] = None
    thresholds: ClassVar[Mapping[str, float]] = {}
    interleaved: ClassVar[bool] = False
    absent: ClassVar[str] = ""

    def start(self, run: Run) -> Observer:
        """Return an observer of the prompts of one model."""
        return Observer()

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> Sequence[Finding]:
        """Return plain sentences computed from a report's tables, any of which can be empty."""
        return ()

    def pictures(self) -> Sequence[Picture]:
        """Return pictures of the page that are about the probe's tables."""
        return ()


class ProbeError(ValueError):
    """A probe cannot be used: names it."""


@dataclass(frozen=True)
class Failure:
    """Why a probe has no results in this report."""

    probe: str
    error: str

    @classmethod
    def of(cls, probe: str, error: BaseException) -> Failure:
        return cls(probe, f"{type(error).__name__}: {error}")

    def __str__(self) -> str:
        return f"the probe {self.probe!r} failed: {self.error}"


class ProbeObserver:
    """A probe's observer; its first exception ends its part, and no other's.

    Args:
        limit: how many of the first prompts it takes; None: all.
    """

    def __init__(self, probe: Probe, run: Run, limit: int | None) -> None:
        self.probe, self.limit = probe, limit
        self.failure: Failure | None = None
        self._observer = self._guard(probe.start, run)

    def takes(self, prompt: int) -> bool:
        """Return whether the probe measures a prompt."""
        return self.limit is None or prompt < self.limit

    def call(self, event: str, *given: object) -> Any:
        """Call a method of the observer, unless it has failed."""
        return None if self.failure is not None else self._guard(getattr(self._observer, event), *given)

    def results(self) -> ProbeResults | Failure:
        """Return the probe's results, or why there are none."""
        results = self.call("finish")
        return results if self.failure is None else self.failure

    def _guard(self, work: Callable[..., Any], *given: object) -> Any:
        try:
            return work(*given)
        except Exception as error:
            self.failure = Failure.of(self.probe.name, error)


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
    """Return uniform attention over a prompt of average length: 1 over the mean number of keys in a `heads` table.

    NaN if the table does not say how many keys there are.
    """
    if not {"prompts", "keys"} <= set(heads) or not (keys := heads["keys"].sum()) > 0:
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
