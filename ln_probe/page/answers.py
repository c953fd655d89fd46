"""The questions that a page answers first: one sentence of a probe's findings each, and a link to what shows it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from ln_probe.analyses.probes.registry import DEFAULT, chosen
from ln_probe.analyses.text import percent
from ln_probe.page.heads import by_head, linked
from ln_probe.report import Report, ranked_findings

MOST = 5
# By probe, in the order of the page.
QUESTIONS = {
    "causal": "Does the loss need scaling and projection?",
    "head_effects": "Which heads depend on scaling?",
    "sinks": "Is there an attention sink, and do the norms make it?",
    "selectability": "Which keys can no query select?",
    "unembedding": "Which tokens can never be predicted?",
}
_SENTENCE = re.compile(r"(?<=[a-z0-9)\]%])\. (?=[A-Z0-9])")


@dataclass(frozen=True)
class Answer:
    """A question (empty: none), a sentence, and the id and title of the part of the page that shows more."""

    question: str
    text: Markup
    picture: str
    title: str


def answers(report: Report, titles: Mapping[str, str]) -> list[Answer]:
    """Return at most MOST answers; the findings of highest rank where no probe with a question ran.

    `titles` are those of the parts of the page, by id.
    """
    found = []
    for probe in chosen(DEFAULT):
        mine = sorted(probe.findings(report.tables, report.provenance), key=lambda f: (f.rank, -f.size))
        if probe.name in QUESTIONS and mine:
            best = mine[0]
            text, picture = _SENTENCE.split(best.text)[0].removesuffix(".") + ".", best.picture
            if probe.name == "sinks":
                text = " ".join([text, *_change(report)])
            found.append((list(QUESTIONS).index(probe.name), QUESTIONS[probe.name], text, picture))
    found.sort()
    if not found:
        found = [(0, "", f.text, f.picture) for f in ranked_findings(report)]
    return [
        Answer(question, linked(text, report.exhibits), picture, titles.get(picture, ""))
        for _, question, text, picture in found[:MOST]
    ]


def _change(report: Report) -> Iterator[str]:
    """What freezing scaling for the keys does to the attention to position 0, and in which head most."""
    table = by_head(report).dropna(subset=["first_attention", "first_change"])
    if not len(table):
        return
    before, change = float(table["first_attention"].mean()), float(table["first_change"].mean())
    most = table.iloc[int(table["first_change"].abs().to_numpy().argmax())]
    yield (
        f"Freezing scaling for the keys changes the attention to position 0 from {percent(before)} by "
        f"{_points(change)} (mean over {len(table)} heads), most in L{most['layer']:.0f}H{most['head']:.0f} "
        f"({_points(float(most['first_change']))})."
    )


def _points(change: float) -> str:
    """Return a change of a share in percentage points, two digits."""
    if abs(change) < 5e-5:
        return "less than 0.01 percentage points"
    return f"{float(f'{100 * change:.2g}'):+g} percentage points"
