"""Every form of prompts that a user may have: texts, ids, files and data sets, divided without loss; and what is said
of those that cannot be used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from architectures import make_bridge, make_hooked
from hypothesis import given, settings
from hypothesis import strategies as st

import ln_probe
from ln_probe.batch.shards import divide, read_corpus
from ln_probe.hooks import default_tokens
from ln_probe.hooks.default_tokens import (
    CALIBRATION,
    MEASURED,
    SAMPLED_LEAST_TOKENS,
    SAMPLED_SEQUENCES,
    NextLogits,
    bundled_texts,
    passages,
    sample,
    special_tokens,
)
from ln_probe.prompt_sources import DatasetName, check_source, entries, sampled_prompts
from ln_probe.prompts import make_prompts, name_tokens, read_vocabulary

ROWS = [[5, 6, 7, 8], [9, 10]]
PAD, END = 0, 2


class Letters:
    """A tokenizer of single letters, with id 1 first and padding."""

    bos_token_id, eos_token_id, pad_token_id = 1, END, PAD

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 40 for c in text]}

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


@pytest.fixture
def model() -> Any:
    return make_bridge("gpt2")


@pytest.fixture
def speaking(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(model, "tokenizer", Letters(), raising=False)
    monkeypatch.setattr(model.cfg, "default_prepend_bos", True, raising=False)
    return model


def tokens(model: Any, prompts: Any, **how: Any) -> list[list[int]]:
    return [row.tolist() for row in make_prompts(model, prompts, **how).tokens]


# ------------------------------------------------------------------------------------------------------------- texts


def test_b09_texts_get_the_first_token(speaking: Any) -> None:
    made = make_prompts(speaking, ["abc", "hello there"])
    assert [row[0].item() for row in made.tokens] == [1, 1]
    assert [len(row) for row in made.tokens] == [4, 12]
    assert made.strings[0][0] == "<1>"
    assert (made.source, made.notes) == ("texts", ())
    assert tokens(speaking, "The cat") == tokens(speaking, ["The cat"])
    assert tokens(speaking, "abc", prepend_bos=True) == tokens(speaking, "abc")
    assert tokens(speaking, "abc", prepend_bos=False) == [tokens(speaking, "abc")[0][1:]]
    said = make_prompts(speaking, "abc", prepend_bos=False).notes
    assert said == ("texts begin without the tokenizer's first token (prepend_bos=False)",)
    with pytest.raises(ValueError, match="prepend_bos=True is about texts: token ids are taken as they are"):
        make_prompts(speaking, ROWS, prepend_bos=True)


def test_long_prompts_are_cut_and_it_is_said(speaking: Any) -> None:
    made = make_prompts(speaking, ["abc", "abcdefghij" * 10])
    assert [len(row) for row in made.tokens] == [4, 32]
    assert made.notes == ("1 of 2 prompts were cut to 32 tokens (the longest had 101; context 32)",)
    assert [len(row) for row in make_prompts(speaking, ["abcdef"], max_tokens=3).tokens] == [3]


def test_one_token_everywhere_is_warned_of(speaking: Any) -> None:
    token = 3 + ord("P") % 40
    said = f"the token '<{token}>' makes up 96% of the prompts: what is measured describes it more than anything else"
    assert make_prompts(speaking, ["P" * 24]).notes == (said,)
    assert make_prompts(speaking, ["PPP"]).notes == ()  # too short to say


def test_files_and_names_of_files_and_words_are_not_texts(speaking: Any, tmp_path: Path) -> None:
    there = tmp_path / "p.txt"
    there.write_text("one\n\ntwo\n")
    expected = r"would be a text, and a file of that name exists: pass pathlib\.Path\('.*p\.txt'\)"
    with pytest.raises(ValueError, match=expected):
        make_prompts(speaking, str(there))
    assert len(make_prompts(speaking, there).tokens) == 2
    assert len(make_prompts(speaking, [str(there)]).tokens) == 1
    with pytest.raises(ValueError, match=r"pass ln_probe\.sampled_prompts\(\) for sequences of the model's own"):
        make_prompts(speaking, "sampled")
    taken = ("'missing.txt' was taken as a text: there is no file of that name",)
    assert make_prompts(speaking, "missing.txt").notes == taken
    entries = [{"text": "abc"}, {"tokens": [5, 6, 7, 8, 9]}]
    (tmp_path / "p.jsonl").write_text("\n\n".join(map(json.dumps, entries)))
    made = make_prompts(speaking, tmp_path / "p.jsonl")
    assert ([len(r) for r in made.tokens], made.source) == ([4, 5], "p.jsonl")


# --------------------------------------------------------------------------------------------------------- token ids


ONE = [[5, 6, 7]]


@pytest.mark.parametrize(("expected", "forms"), [
    (ONE, ([5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), np.array([5, 6, 7], np.int32),
           [np.int64(5), torch.tensor(6), 7], ONE, torch.tensor(ONE), np.array(ONE, np.uint8), [torch.tensor(ONE[0])])),
    (ROWS, (ROWS, tuple(map(tuple, ROWS)), [torch.tensor(r) for r in ROWS], [np.array(r) for r in ROWS],
            np.array([np.array(r) for r in ROWS], dtype=object))),
], ids=["one prompt", "ragged"])  # fmt: skip
def test_b09_ids_in_any_form(expected: list[list[int]], forms: tuple[Any, ...], model: Any) -> None:
    for form in forms:
        assert tokens(model, form) == expected, repr(form)


@pytest.mark.parametrize(("side", "kind"), [("right", torch.tensor), ("left", np.array), ("right", list)])
def test_what_a_tokenizer_returns_is_respected(side: str, kind: Any, speaking: Any) -> None:
    pads = [[], [PAD, PAD]]
    ids = [r + p if side == "right" else p + r for r, p in zip(ROWS, pads, strict=True)]
    mask = [[int(i != PAD) for i in r] for r in ids]
    made = make_prompts(speaking, {"input_ids": kind(ids), "attention_mask": kind(mask), "token_type_ids": kind(mask)})
    assert [r.tolist() for r in made.tokens] == ROWS
    assert made.notes == ("padding was left out of 1 of 2 prompts, as their attention_mask says",)


def test_padding_that_can_be_told_is_left_out(speaking: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = torch.tensor([[5, 6, 7, 8], [9, 10, PAD, PAD]])
    made = make_prompts(speaking, padded)
    assert [r.tolist() for r in made.tokens] == ROWS
    assert made.notes == ("padding (token 0) was left out at the end of 1 of 2 prompts",)
    assert tokens(speaking, padded[1:]) == [[9, 10, PAD, PAD]], "of one row nobody can tell"
    monkeypatch.setattr(Letters, "pad_token_id", END)
    made = make_prompts(speaking, torch.tensor([[5, 6, 7, 8], [9, 10, END, END]]))
    assert [len(r) for r in made.tokens] == [4, 4]
    assert made.notes[0].startswith("1 of 2 prompts end in token 2, which pads and ends texts alike, so it was kept")


def test_b09_layers_count_from_the_end(model: Any) -> None:
    how: dict[str, Any] = {"progress": False, "probes": ("selectability",), "heads": [0]}
    last = ln_probe.analyze(model, ROWS, layers=[-1], **how)
    assert set(last.heads["layer"]) == {1}
    assert last.provenance["arguments"]["layers"] == [1]
    with pytest.raises(ValueError, match="no layer -3: the model has layers 0 … 1"):
        ln_probe.analyze(model, ROWS, layers=[-3], **how)


# ------------------------------------------------------------------------------------- without prompts of the user's


def test_bundled_passages_are_the_default_many_and_varied(speaking: Any) -> None:
    made = make_prompts(speaking, max_tokens=20)
    assert made.source == "bundled"
    assert len(made.tokens) == len(bundled_texts()) == 32
    texts = [p.text for p in passages()]
    assert len(texts) == len(set(texts)) >= 48
    assert len(bundled_texts(CALIBRATION)) == 16
    assert not set(bundled_texts(CALIBRATION)) & set(bundled_texts(MEASURED))
    kinds = {p.kind for p in passages() if p.split == MEASURED}
    assert {"prose", "dialogue", "code", "list", "numbers", "German", "French", "Spanish", "Dutch", "Latin"} <= kinds
    assert all(40 <= len(t.split()) <= 130 or k == "code" for t, k in ((p.text, p.kind) for p in passages()))


def test_without_a_tokenizer_the_model_speaks_for_itself(model: Any) -> None:
    made = make_prompts(model, max_tokens=12)
    assert made.source == "sampled"
    assert len(made.tokens) >= SAMPLED_SEQUENCES[MEASURED] == 32
    assert max(map(len, made.tokens)) == 12
    said = rf"no tokenizer, so prompts were sampled from the model itself: {len(made.tokens)} sequences of"
    assert re.search(rf"{said} .*12 tokens \(.*\), temperature 1, seed 0$", made.notes[0])
    again = make_prompts(model, sampled_prompts(), max_tokens=12)
    assert again.summary["sha256"] == made.summary["sha256"]
    assert make_prompts(model, sampled_prompts(), max_tokens=12, seed=1).summary["sha256"] != made.summary["sha256"]
    surprise = []  # sampled from the model: likelier than chance on average
    for row in made.tokens:
        logits = model(row[None])
        surprise.append(float(-logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None]).mean()))
    assert np.mean(surprise) < np.log(50)
    few = make_prompts(model, sampled_prompts(2), max_tokens=6)
    assert ([len(r) for r in few.tokens], few.source) == ([6, 6], "sampled")
    for wrong, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"sampled_prompts\(count\) takes"):
            sampled_prompts(wrong)


def test_d1_sampled_sequences_stop_at_the_end_and_begin_at_the_beginning(model: Any) -> None:
    """Up to and with an end token; enough of them and enough tokens; the two parts differ."""
    ends = list(range(25))  # half of the vocabulary, so that sequences are short
    rows = sample(model, limit=30, seed=0, ends=ends)
    assert all(not set(row[:-1].tolist()) & set(ends) for row in rows)
    assert any(len(row) < 6 and int(row[-1]) in ends for row in rows)
    assert len(rows) >= 2 * SAMPLED_SEQUENCES[MEASURED]  # one round has too few tokens
    assert len(rows) % SAMPLED_SEQUENCES[MEASURED] == 0
    other = sample(model, limit=30, seed=0, ends=ends, split=CALIBRATION)
    assert not {tuple(r.tolist()) for r in rows if len(r) > 4} & {tuple(r.tolist()) for r in other}
    assert sum(map(len, sample(model, limit=30, seed=0, ends=[]))) >= SAMPLED_LEAST_TOKENS[MEASURED]
    model.original_model.config.bos_token_id, model.original_model.config.eos_token_id = 7, [3, 50256]
    assert special_tokens(model, "eos") == [3]
    assert all(int(row[0]) == 7 for row in sample(model, limit=9, seed=0))


def test_the_first_sampled_sequences_are_as_long_as_any(model: Any) -> None:
    """They come as they were begun, not as they ended: the probes that take a few of them take no short ones."""
    rows = sample(model, limit=30, seed=0, ends=list(range(10)), count=400)
    lengths = np.array([len(row) for row in rows], float)
    assert lengths.std() > 2
    assert abs(np.corrcoef(np.arange(400), lengths)[0, 1]) < 0.2  # in order of length it is 0.9
    model.original_model.config.bos_token_id = 7
    alone = sample(model, limit=30, seed=0, ends=[], count=6)  # none ends: draws are those of the rows
    assert [r[:1].tolist() for r in alone] == [[7]] * 6


@pytest.mark.parametrize("world", ["bridge", "hooked"])
def test_sampling_with_a_cache_is_sampling(world: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model if world == "bridge" else make_hooked()
    kept = sample(model, limit=12, seed=3, ends=[1, 2, 3, 4, 5])
    monkeypatch.setattr(default_tokens, "NextLogits", lambda model, cached: NextLogits(model, cached=False))
    whole = sample(model, limit=12, seed=3, ends=[1, 2, 3, 4, 5])
    assert [r.tolist() for r in kept] == [r.tolist() for r in whole]


# --------------------------------------------------------------------------------------------- what cannot be used

BAD_MASK = {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}


@pytest.mark.parametrize(("given", "error", "said"), [
    ([], ValueError, r"no prompts \(texts is empty\): give at least one"),
    (["  "], ValueError, r"an empty prompt \('  '\): every prompt needs some text"),
    ("\ud800", ValueError, "half of a surrogate pair"),
    (torch.tensor([[3, 99]]), ValueError, r"prompt 0: token id 99 is outside the vocabulary of 50 \(0 … 49\)"),
    ([[1, 2], [60]], ValueError, "prompt 1: token id 60 is outside the vocabulary"),
    (torch.tensor([[3, -1]]), ValueError, "prompt 0: token id -1 is outside"),
    (torch.zeros(1, 0, dtype=torch.long), ValueError, "prompt 0 has no tokens"),
    (torch.zeros(0, 4, dtype=torch.long), ValueError, "no prompts"),
    (Path("missing.txt"), FileNotFoundError, r"no prompts file 'missing\.txt'$"),
    (torch.zeros(2, 3), ValueError, r"prompts: token ids must be whole numbers: .*; got float32 \[2, 3\]"),
    (torch.zeros(2, 3, 4, dtype=torch.long), ValueError, r"got int64 \[2, 3, 4\]"),
    (torch.tensor(3), ValueError, r"got int64 \[\]"),
    (torch.ones(1, 3, dtype=torch.bool), ValueError, r"got bool \[1, 3\]"),
    ([[5, True]], ValueError, r"prompts, prompt 0: token ids must be whole numbers: .*; got True"),
    ([[5, 6], [7.0]], ValueError, r"prompts, prompt 1: .*; got 7\.0"),
    ([[5, 6], "abc"], TypeError, r"prompts must be a text, .*got list \(prompts, prompt 1: .*; got str\)"),
    ([["abc"]], ValueError, r"prompts, prompt 0: .*; got 'abc'"),
    ([[[5, 6]]], ValueError, r"prompts, prompt 0: .*; got \[5, 6\]"),
    ([[5, 10**30]], ValueError, r"token id 10+ is no id of any vocabulary"),
    (["a", None], TypeError, r"prompts, prompt 1: a list of texts holds texts only; got None"),
    ({}, ValueError, 'needs "input_ids"; this one has nothing'),
    (7, TypeError, r"got int \(prompts: token ids must be whole numbers"),
    ({"text": "abc"}, ValueError, 'needs "input_ids"; this one has text'),
    (BAD_MASK, ValueError, "attention_mask of prompt 0 hides position 1 between tokens that it shows"),
    (BAD_MASK | {"attention_mask": [[0, 0, 0]]}, ValueError, "attention_mask of prompt 0 hides all of its tokens"),
    (BAD_MASK | {"attention_mask": [[1, 1, 3]]}, ValueError, "attention_mask of prompt 0 holds 3: 0 and 1 only"),
    (BAD_MASK | {"attention_mask": [[1, 1]]}, ValueError, r"attention_mask does not fit input_ids \(other lengths\)"),
], ids=ascii)  # fmt: skip
def test_what_cannot_be_used_is_said(given: Any, error: type[Exception], said: str, speaking: Any) -> None:
    with pytest.raises(error, match=said):
        make_prompts(speaking, given)


@pytest.mark.parametrize(("options", "said"), [
    ({"max_tokens": "x"}, "max_tokens must be a whole number, 1 or more, got 'x'"),
    ({"most": 0}, "most must be a whole number, 1 or more, got 0"),
    ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
    ({"prepend_bos": "no"}, "prepend_bos must be True or False, got 'no'"),
    ({"model": 3}, "int is not a TransformerLens model"),
])  # fmt: skip
def test_options_that_cannot_be_used_are_said(options: dict[str, Any], said: str, speaking: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        make_prompts(**({"model": speaking, "prompts": None} | options))


def test_b09_an_activation_cache_is_no_prompt(model: Any) -> None:
    _, cache = model.run_with_cache(torch.tensor([[5, 6, 7]]))
    with pytest.raises(TypeError, match=r"an ActivationCache holds what one pass computed, .*: pass the tokens"):
        make_prompts(model, cache)


# ----------------------------------------------------------------------------------------------------- vocabularies


@pytest.mark.parametrize(("name", "content"), [
    ("a.json", '{"the": 0, "cat": 1, "<EOS>": 2}'),
    ("b.json", '{"0": "the", "1": "cat", "2": "<EOS>"}'),
    ("c.json", '["the", "cat", "<EOS>"]'),
    ("d.json", '{"version": "1.0", "model": {"type": "BPE", "vocab": {"the": 0, "cat": 1, "<EOS>": 2}}}'),
    ("e.txt", "the\ncat\n<EOS>\n"),
])  # fmt: skip
def test_vocabulary_files(name: str, content: str, tmp_path: Path, model: Any) -> None:
    (tmp_path / name).write_text(content)
    assert read_vocabulary(tmp_path / name) == {0: "the", 1: "cat", 2: "<EOS>"}
    name_tokens(model, tmp_path / name)
    made = make_prompts(model, torch.tensor([[0, 1, 2, 7]]))
    assert made.strings == (("the", "cat", "<EOS>", "7"),)
    assert special_tokens(model, "eos") == [2]
    assert made.summary["begin"] == ["the cat <EOS> 7 "]


@pytest.mark.parametrize(("read", "name", "content", "said"), [
    (make_prompts, "a.jsonl", b'{"text": "abc"}\n{"text": ', r"a\.jsonl, line 2: not JSON"),
    (make_prompts, "b.jsonl", b'{"words": "abc"}', r'b\.jsonl, line 1: needs a "text" or a "tokens" field$'),
    (make_prompts, "b.jsonl", b'{"text": "a", "tokens": [1]}', r'a "tokens" field, and has both: leave one out'),
    (make_prompts, "b.jsonl", b'{"text": 3, "tokens": null}', r'b\.jsonl, line 1: "text" must be a text, got 3'),
    (make_prompts, "b.jsonl", b'{"tokens": "abc"}', r"""line 1: "tokens" must be a list of token ids, got 'abc'"""),
    (make_prompts, "c.txt", b"\xff\xfe\x00", r"c\.txt is not a readable UTF-8 text file"),
    (make_prompts, "d.npy", b"not numpy", r"d\.npy is not a plain \.npy file of token ids: it has another format"),
    (make_prompts, "e.txt", b"\n\n", "no prompts"),
    (name_tokens, "a.json", b"{", "is not a readable vocabulary: not JSON"),
    (name_tokens, "b.json", b'{"x": 1.5}', "holds no vocabulary: it takes JSON"),
    (name_tokens, "c.json", b'{"x": 1, "y": 1}', "gives two tokens the same id"),
    (name_tokens, "d.json", b'{"x": 50}', r"names token 50, and the model has 0 … 49: another model's file\?"),
    (name_tokens, "missing.txt", None, "no vocabulary file"),
])  # fmt: skip
def test_bad_files(read: Any, name: str, content: bytes | None, said: str, speaking: Any, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        read(speaking, tmp_path / name)


def test_names_that_are_missing_or_replace_others_are_noted(model: Any, speaking: Any, tmp_path: Path) -> None:
    """Two names for a model of more tokens, and names beside a tokenizer, were taken without a word."""
    size = model.cfg.d_vocab

    def notes_with(names: str) -> tuple[str, ...]:
        (tmp_path / "names.txt").write_text(names)
        how: dict[str, Any] = {"probes": ["decomposition"], "vocab": tmp_path / "names.txt", "progress": False}
        return ln_probe.analyze(model, ROWS, **how).notes

    notes = notes_with("a\nb\n")
    missing = f"the vocabulary file names 2 of the model's {size} tokens: the other {size - 2} stand as their ids"
    assert missing in notes
    assert make_prompts(model, ROWS).strings[0][0] == "<5>", "the names are those of one call"
    assert any(n.startswith("tokens have the names of the vocabulary file, not of the model's") for n in notes)
    model.tokenizer = None
    assert not [n for n in notes_with("".join(f"t{i}\n" for i in range(size))) if "vocabulary file" in n]


TEXTS = ["one two", "three\u2028four", "fünf 🙂 </s>", "six"]


def test_every_form_gives_the_same_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t, "id": 3}) + "\n\n" for t in TEXTS))
    table = datasets.Dataset.from_dict({"text": ["", *TEXTS], "line": list(range(5))})  # WikiText has empty lines
    table.save_to_disk(tmp_path / "saved set")
    datasets.DatasetDict({"train": table, "test": table.select([0, 1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "plain").mkdir()
    table.to_parquet(tmp_path / "plain" / "train.parquet")
    for given_, expected in (
        (tmp_path / "a.jsonl", TEXTS),
        (tmp_path / "saved set", TEXTS),
        (tmp_path / "splits", TEXTS),
        (f"{tmp_path / 'splits'}?split=test", TEXTS[:1]),
        (f"{tmp_path / 'plain'}?split=train&field=text", TEXTS),
    ):
        assert list(entries(given_)) == expected, given_
    text = "one\ntwo  three\n\n\n  \nfour\n\tfive\n\nsix"
    (tmp_path / "a.txt").write_text(text)
    assert list(entries(tmp_path / "a.txt")) == [" ".join(p.split()) for p in text.split("\n\n") if p.strip()]
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]]}).save_to_disk(tmp_path / "ids")
    assert list(entries(f"{tmp_path / 'ids'}?field=input_ids")) == [[1, 2, 3], [4]]
    np.save(tmp_path / "a.npy", np.array([5, 6], np.uint16))
    assert list(entries(tmp_path / "a.npy")) == [[5, 6]]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"content": ["a"]}).save_to_disk(tmp_path / "set")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "splits")
    (tmp_path / "f.jsonl").write_text('{"tokens": [1.5]}\n')
    (tmp_path / "r.jsonl").write_text('{"tokens": [[1], [2, 3]]}\n')
    np.save(tmp_path / "f.npy", np.ones((2, 3)))
    (tmp_path / "empty.txt").write_text("\n\n")
    for given_, said in (
        (tmp_path / "set", r"no field 'text'; it has content: add \?field="),
        (f"{tmp_path / 'splits'}?split=test", r"has no split 'test'; it has train: add \?split="),
        (tmp_path / "f.jsonl", r"f\.jsonl, line 1: token ids must be whole numbers, one list a prompt, got float64"),
        (tmp_path / "r.jsonl", r"r\.jsonl, line 1: token ids must be"),
        (tmp_path / "f.npy", r"f\.npy: token ids must be whole numbers \[batch pos\], got float64 \[2, 3\]"),
        ("hf:?split=train", "a data set is hf:NAME or a folder"),
    ):
        with pytest.raises(ValueError, match=said):
            list(entries(given_))
    with pytest.raises(ValueError, match=r"no prompts \(.*empty\.txt is empty\): give at least one"):
        divide(str(tmp_path / "empty.txt"), tmp_path / "shards", 2)
    with pytest.raises(FileNotFoundError, match=r"no prompts file 'nothing\.txt'"):
        check_source("nothing.txt")
    with pytest.raises(ConnectionError, match=r"data set nobody/nothing is not on this machine and cannot be fetched"):
        list(entries("hf:nobody/nothing"))
    found = DatasetName.parse("hf:owner/name?config=raw&split=test&field=body")
    assert found == DatasetName("owner/name", "raw", "test", "body")
    with pytest.raises(ValueError, match="there is no option 'colour'"):
        DatasetName.parse("hf:owner/name?colour=red")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.text(min_size=1), st.lists(st.integers(0, 99), min_size=1)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_shards_hold_every_prompt_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str | list[int]], one: int, two: int
) -> None:
    home = tmp_path_factory.mktemp("shards")
    file = home / "all.jsonl"
    file.write_text("".join(json.dumps({"text" if isinstance(p, str) else "tokens": p}) + "\n" for p in prompts))
    hashes = set()
    for size in (one, two):
        corpus = divide(str(file), home / "corpus", size)
        assert corpus.count == len(prompts)
        assert list(read_corpus(home / "corpus" / corpus.name, corpus)) == prompts
        parts = [corpus.numbers(k, corpus.count) for k in range(corpus.shards)]
        assert [p for part in parts for p in part] == list(range(len(prompts)))
        assert all(len(part) == size for part in parts[:-1])
        assert 0 < len(parts[-1]) <= size
        hashes.add(corpus.sha256)
        assert divide(str(file), home / "corpus", size) == corpus
    assert len(hashes) == 1, "the hash of the prompts depends on how they are divided"


def test_few_prompts_are_divided_too(tmp_path: Path) -> None:
    """So that there is something to do for every worker."""
    for count, each in ((1, 1), (4, 1), (9, 2), (31, 4), (32, 4), (100, 4)):
        file = tmp_path / "some.jsonl"
        file.write_text("".join(json.dumps({"text": f"{k}"}) + "\n" for k in range(count)))
        corpus = divide(str(file), tmp_path / "shards")
        assert (corpus.count, corpus.per_shard, corpus.shards) == (count, each, -(-count // each))
        assert list(read_corpus(tmp_path / "shards" / corpus.name, corpus)) == [str(k) for k in range(count)]


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one\n\ntwo")
    before = divide(str(file), tmp_path / "corpus", 1)
    file.write_text("one\n\ntwo and a half")
    after = divide(str(file), tmp_path / "corpus", 1)
    assert before.sha256 != after.sha256
    assert before.name == after.name
    held = tmp_path / "corpus" / after.name
    held.write_text("damaged")
    assert divide(str(file), tmp_path / "corpus", 1) == after
    assert list(entries(held)) == ["one", "two and a half"]
    assert divide(str(file), tmp_path / "corpus", 1, limit=1).count == 1


def test_a_text_with_its_number_of_tokens_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "counts.jsonl").write_text('{"text": "the ships", "tokens": 512}\n')
    assert list(entries(tmp_path / "counts.jsonl")) == ["the ships"]
