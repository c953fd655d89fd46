"""Every form of prompts that a user may have: texts, ids, files and data sets; and the error of what is none."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from architectures import make_bridge, make_hooked

import ln_probe
from ln_probe.hooks import without
from ln_probe.hooks.task import CALIBRATION, MEASURED, bundled_texts
from ln_probe.prompts import make_prompts, read_prompts, read_token_names

ROWS = [[5, 6, 7, 8], [9, 10]]
PAD, END = 0, 2


class Letters:
    """A tokenizer of single letters, with id 1 first and padding."""

    bos_token_id, eos_token_id, pad_token_id = 1, END, PAD

    def __call__(self, text: str) -> dict[str, list[int]]:
        text.encode()
        return {"input_ids": [3 + ord(c) % 40 for c in text]}

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


@pytest.fixture
def model() -> Any:
    return make_bridge("gpt2")


@pytest.fixture
def reader(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model with a tokenizer."""
    monkeypatch.setattr(model, "tokenizer", Letters(), raising=False)
    monkeypatch.setattr(model.cfg, "default_prepend_bos", True, raising=False)
    return model


def tokens(model: Any, prompts: Any, **how: Any) -> list[list[int]]:
    return [row.tolist() for row in make_prompts(model, prompts, **how).tokens]


def test_texts_get_the_first_token(reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = make_prompts(reader, ["abc", "hello there"])
    assert [row[0].item() for row in prompts.tokens] == [1, 1]
    assert [len(row) for row in prompts.tokens] == [4, 12]
    assert prompts.strings[0][0] == "<1>"
    assert (prompts.source, prompts.notes) == ("texts", ())
    assert tokens(reader, "The cat") == tokens(reader, ["The cat"])
    assert tokens(reader, "abc", prepend_bos=True) == tokens(reader, "abc")
    assert tokens(reader, "abc", prepend_bos=False) == [tokens(reader, "abc")[0][1:]]
    for first, word in ((False, "without"), (True, "with ")):
        assert any(word in note for note in make_prompts(reader, "abc", prepend_bos=first).notes)
    monkeypatch.setattr(Letters, "__call__", lambda *_: {"input_ids": [1, 7, 8]})
    assert (tokens(reader, "ab", prepend_bos=False), tokens(reader, "ab")) == ([[7, 8]], [[1, 7, 8]])
    with pytest.raises(ValueError, match="prepend_bos"):
        make_prompts(reader, ROWS, prepend_bos=True)
    assert make_prompts(reader, prompts) is prompts


def test_long_prompts_are_cut_with_a_note_and_the_first_are_used(reader: Any) -> None:
    prompts = make_prompts(reader, ["abc", "abcdefghij" * 10])
    assert [len(row) for row in prompts.tokens] == [4, 32]
    (note,) = prompts.notes
    assert "1 of 2 prompts were cut to 32 tokens" in note
    assert [len(make_prompts(reader, ["abcdef"], max_tokens=n).tokens[0]) for n in (1, 3)] == [1, 3]
    assert make_prompts(reader, ["abc"], max_tokens=4).notes == ()
    for several in (["abc", "de"], ROWS, torch.tensor([[3, 4], [5, 6]]), {"input_ids": ROWS}):
        assert len(tokens(reader, several, max_prompts=1)) == 1
    assert tokens(reader, None, max_prompts=2) == tokens(reader, None)[:2]


def test_a_text_file_is_read_as_it_stands(reader: Any, tmp_path: Path) -> None:
    """Line breaks and indentation are those of the text as a string; blank lines end a prompt."""
    text = "And the ships came home,\n  and the lamp was lit;\n\tthe door stood  open."
    path = tmp_path / "p.txt"
    path.write_text(text)
    assert list(read_prompts(path)) == [text]
    assert tokens(reader, path) == tokens(reader, [text])
    path.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert list(read_prompts(path)) == [text]
    path.write_text(f"\n\n    indented\nline\n\n  \n{text}\n\n\n")
    assert list(read_prompts(path)) == ["    indented\nline", text]
    assert make_prompts(reader, path).source == "p.txt"


def test_lines_of_json_are_texts_or_ids(reader: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    entries: list[dict[str, Any]] = [{"text": "abc\nde", "id": 3}, {"tokens": [5, 6, 7]}, {"text": "the", "tokens": 5}]
    entries.append({"input_ids": [0, 8, 9], "attention_mask": [0, 1, 1]})  # (`Dataset.to_json` of a tokenized text)
    path.write_text("\n\n".join(map(json.dumps, entries)))
    assert list(read_prompts(path)) == ["abc\nde", [5, 6, 7], "the", [8, 9]]
    assert [len(row) for row in make_prompts(reader, path).tokens] == [7, 3, 4, 2]


@pytest.mark.parametrize(("name", "content", "error", "word"), [
    ("missing.txt", None, FileNotFoundError, "missing"),
    ("p.npy", b"", ValueError, "jsonl"),
    ("p.txt", b"\n\n", ValueError, "empty"),
    ("p.txt", b"\xff\xfe", ValueError, "UTF-8"),
    ("p.jsonl", b'{"text": "a"', ValueError, "line 1"),
    ("p.jsonl", b'\n{"content": "a"}\n', ValueError, "line 2"),
    ("p.jsonl", b'{"tokens": [1.5]}\n', ValueError, "whole"),
    ("p.jsonl", b'{"tokens": [[1], [2, 3]]}\n', ValueError, "whole"),
    ("p.jsonl", b'{"tokens": [99]}\n', ValueError, "vocabulary"),
    ("p.jsonl", b'{"text": "a"}\n{"text": " "}\n', ValueError, "prompt 1"),
])  # fmt: skip
def test_files_that_cannot_be_used(
    name: str, content: bytes | None, error: type[Exception], word: str, reader: Any, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=word):
        make_prompts(reader, tmp_path / name)


def test_a_file_name_is_no_text(reader: Any) -> None:
    with pytest.raises(ValueError, match="Path"):
        make_prompts(reader, "corpus.txt")
    assert len(tokens(reader, ["corpus.txt"])[0]) == 11
    assert len(tokens(reader, "read corpus.txt")) == 1


def test_data_sets_bring_texts_or_ids(reader: Any) -> None:
    texts = datasets.Dataset.from_dict({"text": ["", "abc", " ", "de"], "line": [0, 1, 2, 3]})  # WikiText has blanks
    assert tokens(reader, texts) == tokens(reader, ["abc", "de"])
    assert tokens(reader, datasets.Dataset.from_dict({"input_ids": ROWS})) == ROWS
    masked = {"input_ids": [[*row, PAD] for row in ROWS], "attention_mask": [[1] * len(row) + [0] for row in ROWS]}
    assert tokens(reader, datasets.Dataset.from_dict(masked)) == ROWS
    assert "2 of 2 prompts" in make_prompts(reader, masked).notes[0]
    for other in (datasets.Dataset.from_dict({"content": ["a"]}), datasets.DatasetDict({"train": texts})):
        with pytest.raises(ValueError, match="column"):
            make_prompts(reader, other)


ONE = [[5, 6, 7]]


@pytest.mark.parametrize(("expected", "forms"), [
    (ONE, ([5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), np.array([5, 6, 7], np.int32),
           [np.int64(5), torch.tensor(6), 7], ONE, torch.tensor(ONE), np.array(ONE, np.uint8), [torch.tensor(ONE[0])])),
    (ROWS, (ROWS, tuple(map(tuple, ROWS)), [torch.tensor(r) for r in ROWS], [np.array(r) for r in ROWS],
            np.array([np.array(r) for r in ROWS], dtype=object))),
], ids=["one prompt", "ragged"])  # fmt: skip
def test_ids_in_any_form(expected: list[list[int]], forms: tuple[Any, ...], model: Any) -> None:
    for form in forms:
        assert tokens(model, form) == expected, repr(form)


@pytest.mark.parametrize("padded", [[9, 10, PAD, PAD], [PAD, PAD, 9, 10]])
@pytest.mark.parametrize("kind", [torch.tensor, list])
def test_padding_without_a_mask_is_left_out_at_either_end(
    padded: list[int], kind: Any, reader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = make_prompts(reader, kind([ROWS[0], padded]))
    assert [r.tolist() for r in prompts.tokens] == ROWS
    assert "padding (token 0)" in prompts.notes[0]
    assert tokens(reader, torch.tensor([padded])) == [[9, 10]]
    monkeypatch.setattr(Letters, "pad_token_id", END)  # which ends texts too
    batch = [[END if token == PAD else token for token in row] for row in (ROWS[0], padded)]
    assert tokens(reader, kind(batch)) == ROWS
    with_ends = [[END, *row, END] for row in batch]  # one of it begins and ends every text
    assert tokens(reader, kind(with_ends)) == [[END, *row, END] for row in ROWS]


def test_bundled_passages_are_the_default(reader: Any) -> None:
    prompts = make_prompts(reader, max_tokens=20)
    assert prompts.source == "bundled"
    assert len(prompts.tokens) == len(bundled_texts()) == 32
    assert prompts.tokens[0].equal(make_prompts(reader, bundled_texts()[:1], max_tokens=20).tokens[0])
    assert len(bundled_texts(CALIBRATION)) == 16
    texts = bundled_texts(CALIBRATION) + bundled_texts(MEASURED)
    assert len(texts) == len(set(texts))


@pytest.mark.parametrize("make", [make_bridge, pytest.param(make_hooked, id="hooked")])
def test_a_model_without_a_tokenizer_needs_prompts(make: Any) -> None:
    model = make("gpt2") if make is make_bridge else make()
    for call in (
        lambda: make_prompts(model),
        lambda: ln_probe.analyze(model, progress=False),
        lambda: without(model, "scaling").__enter__(),
        lambda: make_prompts(model, "some text"),
    ):
        with pytest.raises(ValueError, match="no tokenizer") as raised:
            call()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("given", "error", "word"), [
    ([], ValueError, "empty"),
    (["  "], ValueError, "^an empty"),  # (one prompt has no number)
    (["abc", ""], ValueError, "^prompt 1"),
    ("\ud800", ValueError, "tokenizer"),
    (torch.tensor([[3, 99]]), ValueError, "99"),
    ([[1, 2], [60]], ValueError, "prompt 1"),
    (torch.tensor([[3, -1]]), ValueError, "-1"),
    (torch.zeros(1, 0, dtype=torch.long), ValueError, "no tokens"),
    (torch.zeros(0, 4, dtype=torch.long), ValueError, "no prompts"),
    (torch.zeros(2, 3), ValueError, "float32"),
    (torch.zeros(2, 3, 4, dtype=torch.long), ValueError, r"\[2, 3, 4\]"),
    (torch.tensor(3), ValueError, "pos"),
    (torch.ones(1, 3, dtype=torch.bool), ValueError, "bool"),
    ([[5, 6], [7.0]], ValueError, "prompt 1"),
    ([[5, 6], "abc"], TypeError, "'abc'"),
    ([[[5, 6]]], ValueError, "prompt 0"),
    ([[5, 10**30]], ValueError, "prompt 0"),
    (["a", None], TypeError, "alone"),
    (7, TypeError, "int"),
    ({}, ValueError, "input_ids"),
], ids=ascii)  # fmt: skip
def test_what_cannot_be_used_is_an_error(given: Any, error: type[Exception], word: str, reader: Any) -> None:
    with pytest.raises(error, match=word):
        make_prompts(reader, given)


@pytest.mark.parametrize(("mask", "word"), [
    ([[1, 1, 1], [0, 0, 0]], "1: .* all"), ([[1, 1, 1], [1, 0, 1]], "1: .* between"), ([[1, 1]], "lengths"),
])  # fmt: skip
def test_masks_that_cannot_be_used(mask: list[list[int]], word: str, model: Any) -> None:
    with pytest.raises(ValueError, match=word):
        make_prompts(model, {"input_ids": [[5, 6, 7], [7, 8, 9]], "attention_mask": mask})


@pytest.mark.parametrize(("options", "word"), [
    ({"max_tokens": "x"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_prompts": 0}, "max_prompts"),
    ({"prepend_bos": "no"}, "prepend_bos"),
    ({"model": 3}, "int"),
])  # fmt: skip
def test_options_that_cannot_be_used(options: dict[str, Any], word: str, reader: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=word):
        make_prompts(**({"model": reader, "prompts": "abc"} | options))


@pytest.mark.parametrize(("name", "content"), [("v.json", '["the", "cat", "<EOS>"]'), ("v.txt", "the\ncat\n<EOS>\n")])
def test_tokens_have_the_names_of_a_file(name: str, content: str, model: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    names = read_token_names(tmp_path / name)
    assert names == read_token_names(["the", "cat", "<EOS>"]) == {0: "the", 1: "cat", 2: "<EOS>"}
    prompts = make_prompts(model, [[0, 1, 7]], token_names=names)
    assert prompts.strings == (("the", "cat", "7"),)
    assert any("names 3 of the model's 50" in note for note in prompts.notes)
    digest = hashlib.sha256(np.array([3, 0, 1, 7], np.int64).tobytes()).hexdigest()  # a row's length, then its ids
    size = {"count": 1, "tokens": 3, "longest": 3}
    assert prompts.summary == size | {"source": "tokens", "sha256": digest, "begin": ["the cat 7"]}
    assert len(make_prompts(model, [[0, 1]] * 70).summary["begin"]) == 64
    assert make_prompts(model, [[49]], token_names=dict.fromkeys(range(50), "a")).notes == ()
    report = ln_probe.analyze(model, ROWS, probes=["decomposition"], tokenizer=tmp_path / name, progress=False)
    assert report.provenance["arguments"]["tokenizer"] == str(tmp_path / name)


@pytest.mark.parametrize(("name", "content", "error", "word"), [
    ("a.json", "{", ValueError, "read"),
    ("b.json", '{"x": 1.5}', ValueError, "no tokens"),
    ("c.txt", "x\n" * 51, ValueError, "50"),
    ("missing.txt", None, FileNotFoundError, "missing"),
])  # fmt: skip
def test_files_of_token_names_that_cannot_be_used(
    name: str, content: str | None, error: type[Exception], word: str, model: Any, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(error, match=word):
        ln_probe.analyze(model, ROWS, tokenizer=tmp_path / name, progress=False)
