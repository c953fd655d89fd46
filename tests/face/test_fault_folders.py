"""Any sequence of commands in one folder: every checkpoint its own place, no finished report lost, none unlisted."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ln_probe.batch.run import OtherRunError, Run, claim, is_done, mark_done, reopen
from ln_probe.batch.shards import ShardedCorpus
from ln_probe.batch.suite import Target
from ln_probe.settings import Settings

NAMES = ("a/model", "b/model", "other")
IDENTITIES = ("1" * 64, "2" * 64, "")  # empty: it cannot be loaded

targets = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from(IDENTITIES), st.booleans()),
    min_size=1,
    max_size=3,
    unique_by=lambda t: t[0],
)


class Folder(RuleBasedStateMachine):
    """Commands that give models, some of them not to be found, some not finished; in two ways of measuring."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Path(tempfile.mkdtemp())
        self.reports: dict[str, tuple[str, str]] = {}  # folder: whose report (name, identity) is in it
        self.replaced: set[str] = set()  # of these, those that --fresh has begun to make again, of other weights
        self.way = 0

    def teardown(self) -> None:
        shutil.rmtree(self.out)

    def run_of(self, way: int) -> Run:
        corpus = ShardedCorpus("p.jsonl", "p.jsonl", 1, "0" * 64, 1)
        return Run(self.out, Settings(probes=("decomposition",), max_tokens=8 + way), corpus)

    @rule(given=targets, way=st.integers(0, 1), fresh=st.booleans())
    def command(self, given: list[tuple[str, str, bool]], way: int, fresh: bool) -> None:
        run = self.run_of(way)
        wanted = [Target(n, None, n.rpartition("/")[2], i, error="" if i else "cannot be found") for n, i, _ in given]
        try:
            claimed = claim(run, wanted, fresh=fresh)
        except OtherRunError:
            assert not fresh
            assert way != self.way
            return
        if way != self.way and self.reports:
            assert fresh, "reports made in two ways are in one folder"
            self.reports.clear()
            self.replaced.clear()
        self.way = way
        for target, (name, identity, finished) in zip(claimed.targets, given, strict=True):
            if not identity:
                continue
            before = self.reports.get(target.folder, (name, identity))
            again = fresh or target.folder in self.replaced
            assert before == (name, identity) or (before[0] == name and again), f"{before} is lost"
            if before != (name, identity):
                self.replaced.add(target.folder)
            else:  # the weights that its report is of are back, before others were measured
                self.replaced.discard(target.folder)
            if not finished:
                continue
            self.replaced.discard(target.folder)
            folder = self.out / target.folder
            folder.mkdir(exist_ok=True)
            (folder / "report.json").write_text(json.dumps([name, identity]))
            mark_done(run, target)
            self.reports[target.folder] = name, identity

    @precondition(lambda self: self.reports)
    @rule()
    def the_run_file_is_lost(self) -> None:
        (self.out / ".ln_probe" / "run.json").unlink(missing_ok=True)
        self.replaced.clear()  # what is known of the folder is what is finished in it

    @invariant()
    def reports_are_whole_and_listed(self) -> None:
        for folder, whose in self.reports.items():
            assert json.loads((self.out / folder / "report.json").read_text()) == list(whose)
        there = sorted(p.parent.name for p in self.out.glob("*/report.json"))
        assert there == sorted(self.reports)
        if (self.out / ".ln_probe" / "run.json").exists():
            run, listed = reopen(self.out)
            places = [t.folder for t in listed if not t.error]
            assert len(places) == len(set(places))
            assert {t.folder for t in listed if not t.error and is_done(run, t)[0]} == set(self.reports) - self.replaced


def test_weights_that_come_back_find_their_report() -> None:
    state = Folder()
    try:
        for identity, finished in (("2" * 64, True), ("1" * 64, False), ("2" * 64, False)):
            state.command(given=[("b/model", identity, finished)], way=0, fresh=True)
            state.reports_are_whole_and_listed()
        assert not state.replaced
    finally:
        state.teardown()


TestFolder = Folder.TestCase
TestFolder.settings = settings(max_examples=20, stateful_step_count=8, deadline=None)
