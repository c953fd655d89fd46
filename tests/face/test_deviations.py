"""Where something else than asked is measured, the command says what and ends with 1; with --strict the model fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from architectures import hugging_face
from faulty import command, ends, report, tables, without_pages, word_tokenizer, write_prompts

import ln_probe
from ln_probe.batch.results import FAILED
from ln_probe.batch.run import CALIBRATION, Run, Unit
from ln_probe.batch.suite import Target
from ln_probe.batch.worker import Worker
from ln_probe.hooks.default_tokens import encode
from ln_probe.prompts import skip_note

WORDS = ["?", "<s>", "</s>", "the", "norm", "projects", "keys", "scale"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_pages(monkeypatch)
    monkeypatch.setenv("RUST_BACKTRACE", "0")


def with_tokenizer(folder: Path, pattern: str = "") -> Path:
    """A word-level tokenizer beside the weights; `pattern`: what a text is split at first."""
    word_tokenizer(WORDS, pattern=pattern).save_pretrained(folder)
    return folder


PANIC = "(a+)+b"  # on forty a's, the library that it is matched by gives up, in Rust's way
PANICS = "a" * 40


# ------------------------------------------------------------------------------------------------------ the tokenizer


def test_a18_a_tokenizer_that_does_not_load(folder: Path, tmp_path: Path) -> None:
    with_tokenizer(folder)
    file = folder / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:-40])
    line = [folder, "--max-prompts", 2, "--max-tokens", 6, "--out", tmp_path / "out"]
    printed, _ = ends(1, report, *line, "--json")
    (why,) = json.loads(printed)["models"][0]["deviations"]
    assert why.startswith("no tokenizer: the folder's could not be read (")
    made = ln_probe.load_report(tmp_path / "out" / "model")
    assert made.deviations == (why,)
    assert why in made.provenance["model"]["notes"]
    code, _, said = report(*line)
    assert (code, "already done" in said, f"{folder}: not all as asked: {why}" in said) == (1, True, True)
    _, said = ends(1, report, *line, "--strict")
    assert f"{folder}: failed: {why} (--strict: nothing else than asked is measured)" in said
    _, said = ends(1, report, *line[:-1], tmp_path / "strict", "--strict")
    assert "(--strict: nothing else than asked is measured)" in said
    assert tables(tmp_path / "strict") == {}


def test_a18_a_folder_without_a_tokenizer_is_as_asked(folder: Path, tmp_path: Path) -> None:
    line = [folder, "--max-prompts", 2, "--max-tokens", 6, "--out", tmp_path / "out"]
    printed, said = ends(0, report, *line, "--strict", "--json")
    assert json.loads(printed)["models"][0]["deviations"] == []
    assert "not all as asked" not in said
    assert ln_probe.load_report(tmp_path / "out" / "model").deviations == ()


def test_b08_a_tokenizer_that_panics(folder: Path, tmp_path: Path) -> None:
    """A PanicException is no Exception: it ended the worker with a traceback."""
    with_tokenizer(folder, PANIC)
    model: Any = ln_probe.load_model(folder, device="cpu", world="bridge")
    with pytest.raises(ValueError, match=r"the tokenizer fails on it \(PanicException: "):
        encode(model, PANICS)
    prompts = write_prompts(tmp_path / "p.jsonl", ["the norm projects", PANICS, "keys scale"])
    _, said = ends(1, report, folder, "--prompts", prompts, "--out", tmp_path / "out")
    assert "1 of 3 prompts were skipped (prompt 1: the tokenizer fails on it (PanicException: " in said
    assert len(ln_probe.load_report(tmp_path / "out" / "model").layernorms)


def test_b08_only_what_ends_the_process_passes_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As Rust's."""

    run: Any = object.__new__(Run)
    target, unit = Target("m", None, "m"), Unit(CALIBRATION)
    for error in (PanicException("gave up"), KeyboardInterrupt(), SystemExit(3)):
        worker = Worker(run, 1)

        def raises(*_: Any, error: BaseException = error) -> Any:
            raise error

        monkeypatch.setattr(worker, "_do", raises)
        if isinstance(error, PanicException):
            outcome = worker.do(target, unit)
            assert (outcome.state, outcome.error) == (FAILED, "PanicException: gave up")
        else:
            with pytest.raises(type(error)):
                worker.do(target, unit)


# -------------------------------------------------------------------------------------------------------- the layers


@pytest.mark.slow
def test_a18_layers_left_over_in_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    hugging_face("gpt2", n_layer=2).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_layer": 1}))
    why = "config.json says 1 layers, and the weights hold 2: the model was built without layers 1 to 1"
    assert ln_probe.source_of(ln_probe.load_model(folder, device="cpu")).deviations == (why,)
    line = [folder, "--max-prompts", 2, "--max-tokens", 6]
    _, said = ends(1, report, *line, "--out", tmp_path / "out")
    assert f"{folder}: not all as asked: {why}" in said
    _, said = ends(1, report, *line, "--out", tmp_path / "strict", "--strict")
    assert f"failed: ValueError: {why} (--strict" in said
    printed, _ = ends(1, report, *line, "--out", tmp_path / "slices", "--unit", "1/1", "--json")
    assert json.loads(printed)["deviations"][0]["deviations"] == [why]
    _, said = ends(1, command, "merge", tmp_path / "slices", "--workers", 0)
    assert f"{folder}: not all as asked: {why}" in said


# ------------------------------------------------------------------------------------------------------- the prompts

ENTRIES: list[Any] = ["the norm", "", "half \ud800", "projects keys", [3, 4, 60], [5, 6, 7], [], "scale the keys", " "]
SKIPPED = (1, 2, 4, 6, 8)
NOTE = (
    "5 of 9 prompts were skipped (prompt 1: an empty prompt (''): every prompt needs some text; prompt 2: it holds "
    "half of a surrogate pair (U+D800), which is no character; prompt 4: token id 60 is outside the vocabulary of 50 "
    "(0 … 49); prompt 6: it has no tokens; prompt 8: an empty prompt (' '): every prompt needs some text)"
)


@pytest.mark.slow
def test_b06_one_prompt_that_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    """It failed the whole model after loading; now the others give the tables that they would give alone."""
    with_tokenizer(folder)
    whole = write_prompts(tmp_path / "all.jsonl", ENTRIES)
    labels = tmp_path / "labels.txt"  # skipped prompts have one too
    labels.write_text("".join(f"{number}\n" for number in range(len(ENTRIES))))
    good = write_prompts(tmp_path / "good.jsonl", [e for i, e in enumerate(ENTRIES) if i not in SKIPPED])
    expected = None
    for shard in (2, 9):
        out = tmp_path / str(shard)
        asked = ("--prompts", whole, "--groups", labels, "--shard", shard)
        printed, _ = ends(1, report, folder, *asked, "--out", out, "--json")
        assert json.loads(printed)["models"][0]["deviations"] == [NOTE]
        made = ln_probe.load_report(out / "model")
        assert made.provenance["prompts"]["count"] == 4
        assert NOTE in made.notes
        expected = expected or tables(out)
        assert tables(out) == expected, "the tables depend on the shards"
    assert report(folder, "--prompts", good, "--out", tmp_path / "good")[0] == 0
    assert {k: v for k, v in tables(tmp_path / "good").items() if k.endswith("parquet")} == {
        k: v for k, v in (expected or {}).items() if k.endswith("parquet")
    }
    _, said = ends(1, report, folder, "--prompts", whole, "--out", tmp_path / "strict", "--strict")
    assert f"failed: ValueError: {NOTE} (--strict" in said


def test_b06_no_prompt_that_can_be_used(folder: Path, tmp_path: Path) -> None:
    with_tokenizer(folder)
    _, said = ends(
        1, report, folder, "--prompts", write_prompts(tmp_path / "p.jsonl", ["", " "]), "--out", tmp_path / "out"
    )
    assert (
        "none of 2 prompts can be used (prompt 0: an empty prompt (''): every prompt needs some text; prompt 1" in said
    )


def test_b06_lists_of_texts_in_analyze(folder: Path, tmp_path: Path) -> None:
    with_tokenizer(folder)
    model: Any = ln_probe.load_model(folder, device="cpu", world="bridge")
    texts = ["the norm", "", "projects keys", "\udfff"]
    probes = ("decomposition", "uniformity")
    with pytest.warns(UserWarning, match=r"2 of 4 prompts were skipped \(prompt 1: an empty prompt .*; prompt 3: it"):
        made = ln_probe.analyze(model, texts, probes=probes, groups=["a", "a", "b", "b"], progress=False)
    assert made.constants.groups.tolist() == [0, 1], "labels of skipped prompts are left out"
    alone = ln_probe.analyze(model, [texts[0], texts[2]], probes=probes, progress=False)
    for name in ("layernorms", "heads"):
        assert made.tables[name].equals(alone.tables[name])
    (note,) = made.deviations
    assert note.startswith("2 of 4 prompts were skipped")
    assert note in made.notes
    assert alone.deviations == ()
    made.save(tmp_path / "r")
    assert ln_probe.load_report(tmp_path / "r").deviations == made.deviations


def test_a_model_without_a_tokenizer_and_texts(folder: Path, tmp_path: Path) -> None:
    """No text can be used, for one reason: that is said, and not once for each."""
    prompts = write_prompts(tmp_path / "p.jsonl", ["the norm", "projects"])
    _, said = ends(1, report, folder, "--prompts", prompts, "--out", tmp_path / "out")
    assert "this model has no tokenizer, so text cannot be turned into tokens" in said
    assert "skipped" not in said


def test_skipped_prompts_are_named() -> None:
    many = [(n, "an empty prompt" + "x" * 500) for n in range(9)]
    note = skip_note(many, 1)
    assert note.startswith("9 of 10 prompts were skipped (prompt 0: an empty prompt")
    assert note.endswith("; and 4 more)")
    assert len(note) < 1300
