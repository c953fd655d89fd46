"""What a probe is: it declares its tables and what it must see, and its observer makes the tables.

Example:
    >>> from ln_probe.analyses.probes.base import Finding, Needs, Observer, Probe, ProbeResults
    >>> from ln_probe.analyses.schema import Table
    >>> LENGTHS = Table("lengths", "Lengths", "A row per norm.", ("site",), {
    ...     "site": ("text", "the norm"),
    ...     "longest": ("L2 norm", "length of the longest input"),
    ... })
    >>> class Longest(Observer):
    ...     def __init__(self):
    ...         self.rows = []
    ...     def norm(self, prompt, site, x, y):  # x, y: the norm's input and output [pos d]
    ...         self.rows.append({"site": site.name, "longest": float(x.norm(dim=-1).max())})
    ...     def finish(self):
    ...         frame = LENGTHS.frame(self.rows).groupby("site", as_index=False, sort=False).max()
    ...         return ProbeResults({"lengths": frame}, ["lengths: of all prompts"])
    >>> class Lengths(Probe):
    ...     name, summary, tables, needs = "lengths", "how long vectors are", (LENGTHS,), Needs(norms=True)
    ...     def start(self, run):
    ...         return Longest()
    ...     def findings(self, tables, provenance):
    ...         return [Finding("lengths", f"The longest vector has length {tables['lengths']['longest'].max():.3g}.")]
    >>> report = ln_probe.analyze(model, tokens, probes=[Lengths()])
    >>> report.tables["lengths"]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.analyses.constants import Constants
from ln_probe.analyses.probes import BUILT_IN, tables
from ln_probe.analyses.schema import Table
from ln_probe.hooks.model import HookedModel
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.task import Objective

if TYPE_CHECKING:
    from ln_probe.analyses.probes.decomposition import NormStatistics
    from ln_probe.analyses.probes.uniformity import AttentionLayer

__all__ = ["Failure", "Finding", "Needs", "Observer", "Picture", "Probe", "ProbeError", "ProbeResults", "Run"]


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
        strata: what each prompt is a sample of, by name (its book, or its group); empty: unknown.
        obstacle: why no loss of the model means anything; empty: it does.
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
    obstacle: str = ""

    @property
    def measured_norms(self) -> list[Norm]:
        """The norms of the measured layers."""
        return [norm for norm in self.norms if norm.name in self.constants.sites]


@dataclass(frozen=True, eq=False)
class ProbeResults:
    """What a probe measured.

    Attributes:
        tables: frames by table name; where several probes fill a table, a frame has its key and some of its
            columns.
        notes: sentences that a reader has to know.
        provenance: how it was measured, as plain JSON; the report has it under the probe's name.
        token_losses: a row per predicted token (`causal`): see `Report.tokens`.
    """

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    notes: Sequence[str] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)
    token_losses: pd.DataFrame | None = None


class Observer:
    """Watches prompts and makes a probe's tables. Only what the probe needs is called.

    Prompts come in their order, several at once with `batch_size`: a layer of each, then the next.
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
    """The answer to one question, computed from tables.

    Attributes:
        question: "loss", "heads", "keys", "sinks" or "uniform"; of a user's probe, any name.
        text: a sentence or two.
    """

    question: str
    text: str


@dataclass(frozen=True)
class Picture:
    """A picture of the page: `draw` gets the report, and the first line of its docstring is the caption."""

    id: str
    title: str
    draw: Callable[[Any], Any]


class Probe:
    """One question about a model: give an object of a subclass to `analyze(probes=[…])`.

    Attributes:
        name: letters, digits and _.
        summary: one line.
        tables: what it fills.
        needs: what it has to see.
        prompts: how many of the default prompts it takes; None: all. All of a user's prompts are taken.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    tables: ClassVar[tuple[Table, ...]]
    needs: ClassVar[Needs] = Needs()
    prompts: ClassVar[int | None] = None

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

    def __str__(self) -> str:
        return f"the probe {self.probe!r} failed: {self.error}"


class ProbeObserver:
    """A probe's observer; its first exception ends its part, and no other's.

    Args:
        limit: how many of the first prompts it takes; None: all.
    """

    def __init__(self, probe: Probe, run: Run, limit: int | None) -> None:
        self.probe, self.limit, self.seconds = probe, limit, 0.0
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
        started = time.thread_time()  # other threads of the process may slow this one down
        try:
            return work(*given)
        except Exception as error:
            self.failure = Failure(self.probe.name, f"{type(error).__name__}: {error}")
        finally:
            self.seconds += time.thread_time() - started


def find(name: str) -> Probe:
    """Return the built-in probe of that name; ProbeError if there is none."""
    if name not in BUILT_IN:
        raise ProbeError(f"there is no probe {name!r}: give some of {', '.join(BUILT_IN)}, or a Probe object")
    probe: Probe = getattr(import_module(f"ln_probe.analyses.probes.{name}"), BUILT_IN[name][0])()
    return probe


def chosen(probes: Any) -> tuple[Probe, ...]:
    """Return the probes that were asked for, by name or as objects, in the order of the list.

    Raises:
        ProbeError: one does not exist, lacks an attribute, or has the name or the table of another.
    """
    probes = [probes] if isinstance(probes, str | Probe) else probes
    if not isinstance(probes, Iterable) or not list(probes):
        raise ProbeError(f"probes must be a list of {', '.join(BUILT_IN)}, or of Probe objects, got {probes!r}")
    by_name: dict[str, Probe] = {}
    for each in probes:
        probe = find(each) if isinstance(each, str) else each
        _check(probe)
        if type(by_name.setdefault(probe.name, probe)) is not type(probe):
            raise ProbeError(f"two probes are called {probe.name!r}: rename one")
        by_name[probe.name] = probe
    order = [*(name for name in BUILT_IN if name in by_name), *(name for name in by_name if name not in BUILT_IN)]
    return tuple(by_name[name] for name in order)


def _check(probe: Any) -> None:
    """Raise ProbeError if a probe lacks a declaration, or has the name or a table of a built-in one."""
    if not isinstance(probe, Probe):
        raise ProbeError(f"a probe is a name or a Probe object, got {type(probe).__name__}")
    who = f"the probe {getattr(probe, 'name', '?')!r} of {type(probe).__module__}"
    for attribute, kind in (("name", str), ("summary", str), ("tables", tuple), ("needs", Needs)):
        if not isinstance(getattr(probe, attribute, None), kind):
            raise ProbeError(f"{who} needs a {attribute} ({kind.__name__})")
    if not probe.name.isidentifier() or not all(isinstance(table, Table) for table in probe.tables):
        raise ProbeError(f"{who}: its name is made of letters, digits and _, its tables are declared as Table")
    is_own = probe.name in BUILT_IN and type(probe) is type(find(probe.name))
    reserved = {*BUILT_IN, tables.SUMMARY.name, *(table.name for table in tables.TABLES)}
    if not is_own and (used := reserved & {probe.name, *(table.name for table in probe.tables)}):
        raise ProbeError(f"{who} has the name of a probe or table of ln_probe, {min(used)!r}: rename it")
