"""What goes wrong with inputs and folders while a batch report is made: the tables are right, or there are none; every
checkpoint has its own place, no finished report is lost, none unlisted."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from faulty import command, disturb, ends, hash_in, lab_model, plain_model, report, tables, without_pages, write_prompts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import ln_probe
from ln_probe.batch import results
from ln_probe.batch.run import OtherRunError, Run, claim, is_done, mark_done, reopen
from ln_probe.batch.shards import ShardedCorpus
from ln_probe.batch.suite import Target
from ln_probe.loading.provenance import ChangedError
from ln_probe.settings import Settings


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.jsonl")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The tables of the lab model `m`, when nothing goes wrong."""
    home = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patched:
        without_pages(patched)
        line = [lab_model(home / "m"), "--prompts", write_prompts(home / "prompts.jsonl"), "--out", home / "out"]
        assert report(*line)[0] == 0
    return tables(home / "out")


def replace_weights(model: Path, other: Path) -> None:
    shutil.copy(other / "model.safetensors", model / "aside")
    (model / "aside").replace(model / "model.safetensors")


# --------------------------------------------------------------------------------------------------------- inputs


@pytest.mark.slow
def test_c01_weights_replaced_during_a_run(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the units done with the old weights; a new worker finds other ones, and no table mixes the two."""
    model, other = plain_model(tmp_path / "m"), plain_model(tmp_path / "n", 1)
    line = [model, "--prompts", prompts, "--shard", 1, "--out", tmp_path / "out"]
    assert report(model, "--prompts", prompts, "--out", tmp_path / "old")[0] == 0
    old = hash_in(tmp_path / "old" / "m")

    def replaced(worker: Any) -> None:
        replace_weights(model, other)
        worker._forget()  # as if it had been killed, and another one had taken its place

    with monkeypatch.context() as patched:
        disturb(patched, 3, replaced)
        code, _, said = report(*line)
    assert code == 1
    assert said.count(f"{model} is not any more what it was when this run began (then {old[:16]}…, now ") == 1
    assert "Run the same command again: it measures the present files" in said
    assert tables(tmp_path / "out") == {}
    assert report(*line)[0] == 0
    assert report(model, "--prompts", prompts, "--out", tmp_path / "new")[0] == 0
    assert tables(tmp_path / "out") == tables(tmp_path / "new") != tables(tmp_path / "old")
    assert hash_in(tmp_path / "out" / "m") == hash_in(tmp_path / "new" / "m") != old


def test_c01_files_that_change_while_they_are_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ln_probe.loading import pretrained

    original = pretrained._ready

    def late(*loaded: Any) -> Any:
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-8, os.SEEK_END)
            file.write(b"\x55" * 8)
        return original(*loaded)

    monkeypatch.setattr(pretrained, "_ready", late)
    with pytest.raises(ChangedError, match=r"model\.safetensors changed while it was being read \(SHA-256 .* before"):
        ln_probe.load_model(folder, device="cpu")


def test_c01_a_loaded_model_is_no_view_of_its_file(folder: Path) -> None:
    """safetensors maps files into memory: weights that are written over in place changed a model being measured."""
    model = ln_probe.load_model(folder, device="cpu", world="bridge")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(2000)
        file.write(b"\x55" * 4000)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["altered", "lost", "another's", "order"])
def test_c02_prompts_that_are_not_what_was_read(
    fault: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: dict[str, bytes]
) -> None:
    line = [lab_model(tmp_path / "m"), "--prompts", prompts, "--shard", 1, "--out", tmp_path / "out"]
    from ln_probe.batch import shards

    right = shards.read_corpus

    def spoiled(file: Path, corpus: Any) -> Any:
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        if fault == "lost":
            file.unlink(missing_ok=True)
        elif fault == "altered":
            file.write_text("".join([lines[0], '{"tokens": [1, 2, 3]}\n', *lines[2:]]))
        elif fault == "another's":
            file.write_text("".join([lines[0], lines[0], *lines[2:]]))
        else:
            file.write_text("".join(lines[::-1]))
        return right(file, corpus)

    with monkeypatch.context() as patched:
        patched.setattr(shards, "read_corpus", spoiled)
        code, _, said = report(*line)
    assert code == 1
    assert "is not what was read from prompts.jsonl when the run began" in said
    assert "run the same command again, which reads the prompts anew" in said
    assert tables(tmp_path / "out") == {}
    assert report(*line)[0] == 0
    assert tables(tmp_path / "out") == undisturbed


@pytest.mark.slow
def test_c02_slices_of_different_prompts_are_not_merged(
    prompts: Path, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Pieces in the place of others, and a piece of another model, or of other prompts, with the right name."""
    line = [lab_model(tmp_path / "m"), "--prompts", prompts, "--shard", 1, "--out", tmp_path / "out"]
    for part in (1, 2):
        assert report(*line, "--unit", f"{part}/2")[0] == 0
    units = sorted((tmp_path / "out" / ".ln_probe" / "units").glob("*/prompts-*.safetensors"))
    whole = units[2].read_bytes()
    held = results.Stored(units[2], key := json.loads(_header(units[2]))["key"])
    for what, said_of in (("model", "model"), ("prompts", "set of prompts")):
        info = held.info | {"inputs": held.info["inputs"] | {what: "f" * 64}}
        results.write(units[2], key, results.Result(held.arrays(""), info=info))
        _, said = ends(1, command, "merge", tmp_path / "out", "--workers", 0)
        assert f"{units[2]} was made of another {said_of} than calibration-00000.safetensors ({what} ffffffff" in said
        assert f"delete the folder {units[2].parent} and run the same command (or its slices) again" in said
        assert tables(tmp_path / "out") == {}
        units[2].write_bytes(whole)
        held = results.Stored(units[2], key)
    shutil.copy(units[0], units[1])
    _, said = ends(1, command, "merge", tmp_path / "out", "--workers", 0)
    assert f"{units[1]} is the result of something else" in said
    assert "1 unit (prompts 1) missing: run its slice again" in said
    for part in (1, 2):
        assert report(*line, "--unit", f"{part}/2")[0] == 0
    ends(0, command, "merge", tmp_path / "out", "--workers", 0)
    assert tables(tmp_path / "out") == undisturbed


def _header(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return str(file.metadata()["ln_probe"])


# ---------------------------------------------------------------------------------------------------------- names


@pytest.mark.slow
def test_c03_two_models_of_one_name(prompts: Path, tmp_path: Path) -> None:
    one, other = lab_model(tmp_path / "a" / "model"), lab_model(tmp_path / "b" / "model", 1)
    out = tmp_path / "out"
    assert report(one, "--prompts", prompts, "--out", out)[0] == 0
    first = tables(out)
    assert report(other, "--prompts", prompts, "--out", out)[0] == 0
    assert sorted(p.name for p in out.glob("*/")) == [".ln_probe", "model", "model-2"]
    assert first.items() <= tables(out).items()
    assert hash_in(out / "model") != hash_in(out / "model-2")
    code, _, said = report(one, other, "--prompts", prompts, "--out", out)
    assert (code, said.count("already done")) == (0, 2)
    # the same place, trained on: the report about what it was stays
    replace_weights(one, lab_model(tmp_path / "c", 2))
    assert report(one, "--prompts", prompts, "--out", out)[0] == 0
    assert first.items() <= tables(out).items()
    assert (out / "model-3" / "report.json").is_file()
    listed = (out / "index.html").read_text()
    assert f"{one} (model)" in listed
    assert f"{one} (model-3)" in listed
    # a folder that is none of ours is not written into
    theirs = out / "mine"
    theirs.mkdir()
    (theirs / "notes.txt").write_text("keep")
    assert report(lab_model(tmp_path / "mine", 3), "--prompts", prompts, "--out", out)[0] == 0
    assert [p.name for p in theirs.iterdir()] == ["notes.txt"]
    assert (out / "mine-2" / "report.json").is_file()


def test_c04_a_name_that_was_mistyped(prompts: Path, tmp_path: Path) -> None:
    model, out = lab_model(tmp_path / "m"), tmp_path / "out"
    _, said = ends(1, report, "lm-nane", "--prompts", prompts, "--out", out)
    assert said.count("No model is called 'lm-nane'") == 1
    assert not out.exists(), "nothing was done, and something was left behind"
    _, said = ends(1, report, "lm-nane", model, "--prompts", prompts, "--out", out)
    assert said.count("No model is called 'lm-nane'") == 1
    printed, _ = ends(0, report, model, "--prompts", prompts, "--out", out, "--json")
    earlier, mine = json.loads(printed)["models"]
    assert (earlier["model"], mine["error"]) == ("lm-nane", None)
    assert earlier["error"].startswith("in an earlier command (20")
    assert "in an earlier command" in (out / "index.html").read_text()


@pytest.mark.slow
def test_c04_fresh_keeps_what_was_made_alike_and_removes_the_rest(prompts: Path, tmp_path: Path) -> None:
    one, other, out = lab_model(tmp_path / "one"), lab_model(tmp_path / "other", 1), tmp_path / "out"
    line = ["--prompts", prompts, "--out", out]
    assert report(one, "lm-nane", *line)[0] == 1
    assert report(other, *line, "--fresh")[0] == 0
    listed = (out / "index.html").read_text()
    assert "one" in listed
    assert "lm-nane" not in listed
    assert (out / "one" / "report.json").is_file()
    _, said = ends(0, report, other, *line, "--max-tokens", 3, "--fresh")
    assert "its report, made in another way, was removed (--fresh)" in said
    assert not (out / "one").exists()
    assert str(one) not in (out / "index.html").read_text()
    assert ln_probe.load_report(out / "other").provenance["arguments"]["max_tokens"] == 3


def test_c04_a_lost_or_damaged_run_file(prompts: Path, tmp_path: Path) -> None:
    model, out = lab_model(tmp_path / "m"), tmp_path / "out"
    line = [model, "--prompts", prompts, "--out", out]
    assert report(*line)[0] == 0
    file = out / ".ln_probe" / "run.json"
    whole = file.read_text()
    for content, why in (
        (whole.replace('"max_tokens": 512', '"max_tokens": 513'), "its content is not what was written"),
        ('{"format": 4', "not JSON"),
        ("{}", "no 'format' in it"),
        ("[]", "list indices"),
        ("[" * 100_000, "nested deeper than 64 levels"),
    ):
        file.write_text(content)
        for way in (line, None):
            code, _, said = report(*way) if way else command("merge", out)
            assert code == 2
            assert f"{file} is damaged" in said
            assert why in said
            assert "delete it and run the same command again (finished reports are kept)" in said
    file.write_text('{"format": 2}')
    assert f"{file} has format 2, this ln_probe writes 5: start anew with --fresh" in report(*line)[2]
    file.unlink()
    _, said = ends(0, report, *line)
    assert "already done" in said
    file.unlink()
    _, said = ends(2, report, *line, "--max-tokens", 5)
    assert "holds reports made in another way (m is one), and nothing says how" in said


def test_c08_what_stands_in_the_way_is_seen_before_the_work(prompts: Path, tmp_path: Path) -> None:
    model, out = lab_model(tmp_path / "m"), tmp_path / "out"
    (out / "index.html").mkdir(parents=True)
    line = [model, "--prompts", prompts, "--out", out]
    _, said = ends(2, report, *line)
    assert f"{out / 'index.html'} is a folder, where a file is to be written" in said
    assert [p.name for p in out.iterdir()] == ["index.html"]
    (out / "index.html").rmdir()
    assert report(*line)[0] == 0
    made = tables(out)
    (out / "index.html").unlink()
    (out / "index.html").mkdir()
    code, _, said = report(*line, "--fresh", "--max-tokens", 3)
    assert (code, "index.html is a folder, where a file is to be written" in said) == (2, True)
    assert tables(out) == made, "a refusal with --fresh removes nothing"


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
