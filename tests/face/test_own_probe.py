"""Probes of the user: their tables, findings and pictures are in the report, and their failures end no other probe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from small_models import lab

import ln_probe
from ln_probe.analyses.probes.base import Finding, Needs, Observer, Picture, Probe, ProbeError, ProbeResults, Run
from ln_probe.analyses.probes.tables import CAUSAL
from ln_probe.analyses.schema import Table
from ln_probe.measure import ProbeFailedWarning
from ln_probe.page.figures import Figure

TOKENS = torch.arange(1, 25).reshape(3, 8)
LENGTHS = Table(
    "lengths",
    "Lengths",
    "A row per norm.",
    ("site",),
    {"site": ("text", "the norm"), "longest": ("L2 norm", "length of the longest input")},
)


class Watching(Observer):
    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def norm(self, _prompt: int, site: Any, x: Any, _y: Any) -> None:
        self.longest[site.name] = max(float(x.norm(dim=-1).max()), self.longest.get(site.name, 0.0))

    def finish(self) -> ProbeResults:
        rows = [{"site": site, "longest": length} for site, length in self.longest.items()]
        return ProbeResults({"lengths": LENGTHS.frame(rows)}, ["lengths: of all prompts"])


def draw(report: Any) -> Figure:
    """The longest vector that each norm reads."""
    figure = Figure()
    figure.subplots().plot(report.tables["lengths"]["longest"])
    return figure


class Lengths(Probe):
    name, summary, tables, needs = "lengths", "how long vectors are", (LENGTHS,), Needs(norms=True)

    def start(self, run: Run) -> Observer:
        return Watching()

    def findings(self, tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[Finding]:
        return [Finding("lengths", f"The longest vector has length {tables['lengths']['longest'].max():.6g}.")]

    def pictures(self) -> list[Picture]:
        return [Picture("drawn", "Longest vectors", draw)]


def test_an_own_probe_beside_built_in_ones(tmp_path: Path) -> None:
    model = lab()
    report = ln_probe.analyze(model, TOKENS, probes=["decomposition", Lengths()], progress=False)
    _, cache = model.run_with_cache(TOKENS)
    table = report.tables["lengths"].set_index("site")["longest"]
    own = cache["blocks.1.hook_resid_mid"].norm(dim=-1).max()
    assert table["blocks.1.ln2"] == pytest.approx(float(own), rel=1e-5)
    assert f"{table.max():.6g}" in str(report.findings())
    assert any(note.startswith("lengths") for note in report.notes)
    assert len(report.layernorms)
    page = report.to_html(tmp_path / "page.html").read_text()
    assert "Longest vectors" in page
    loaded = ln_probe.load_report(report.save(tmp_path / "report"))
    pd.testing.assert_frame_equal(loaded.tables["lengths"], report.tables["lengths"])
    assert loaded.declared["lengths"] == LENGTHS


@pytest.mark.parametrize("change", [
    {"start": lambda self, run: 1 / 0},
    {"start": lambda self, run: type("Bad", (Observer,), {"norm": lambda *_: 1 / 0})()},
    {"start": lambda self, run: type("Bad", (Observer,), {"finish": lambda _: {"lengths": LENGTHS.empty()}})()},
    {"start": lambda self, run: type("Bad", (Observer,), {"finish": lambda _: ProbeResults({"other": 1})})()},
    {"start": lambda self, run: type("Bad", (Observer,), {
        "finish": lambda _: ProbeResults({"lengths": pd.DataFrame({"site": ["a"], "longest": ["b"]})})})()},
])  # fmt: skip
def test_a_probe_that_fails_ends_no_other(change: dict[str, Any]) -> None:
    bad = type("Bad", (Lengths,), change)()
    with pytest.warns(ProbeFailedWarning, match="lengths"):
        report = ln_probe.analyze(lab(), TOKENS, probes=["decomposition", bad], progress=False)
    assert [failure.probe for failure in report.failures] == ["lengths"]
    assert not len(report.tables["lengths"])
    assert len(report.layernorms)
    with pytest.warns(ProbeFailedWarning), pytest.raises(ProbeError, match="lengths"):
        ln_probe.analyze(lab(), TOKENS, probes=[bad], progress=False)


@pytest.mark.parametrize("make", [
    lambda: type("X", (Lengths,), {"name": "not a name"})(),
    lambda: type("X", (Lengths,), {"name": "causal"})(),
    lambda: type("X", (Lengths,), {"tables": (CAUSAL,)})(),
    lambda: type("X", (Lengths,), {"tables": ("lengths",)})(),
    lambda: type("X", (Lengths,), {"needs": None})(),
    lambda: 3,
    lambda: Lengths,
])  # fmt: skip
def test_probes_that_cannot_be_used(make: Callable[[], Any]) -> None:
    with pytest.raises(ProbeError):
        ln_probe.analyze(lab(), TOKENS, probes=[make()], progress=False)


def test_unknown_names() -> None:
    for probes in ("casual", ["casual"], [], ["unembedding"]):
        with pytest.raises(ValueError, match=r"list of|no probe"):
            ln_probe.analyze(lab(), TOKENS, probes=probes, progress=False)


def test_two_probes_of_one_name() -> None:
    other = type("Other", (Lengths,), {})()
    with pytest.raises(ProbeError, match="lengths"):
        ln_probe.analyze(lab(), TOKENS, probes=[Lengths(), other], progress=False)


def test_a_probe_says_and_draws_nothing_unless_it_is_written() -> None:
    assert (Probe().findings({}, {}), Probe().pictures()) == ((), ())
    empty = type("Empty", (Probe,), {"name": "empty", "summary": "nothing", "tables": (LENGTHS,)})()
    report = ln_probe.analyze(lab(), TOKENS, probes=[empty], progress=False)
    assert report.tables["lengths"].empty
    assert not report.failures
