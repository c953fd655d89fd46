"""Prompts from files and data sets: streamed, the same however they are stored, divided without loss."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ln_probe.batch.shards import divide, read_shard
from ln_probe.prompt_sources import DatasetName, check_source, entries

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


def test_paragraphs_are_split_at_empty_lines(tmp_path: Path) -> None:
    text = "one\ntwo  three\n\n\n  \nfour\n\tfive\n\nsix"
    (tmp_path / "a.txt").write_text(text)
    assert list(entries(tmp_path / "a.txt")) == [" ".join(p.split()) for p in text.split("\n\n") if p.strip()]


def test_token_ids(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4]]})
    table.save_to_disk(tmp_path / "ids")
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


def test_names_of_data_sets() -> None:
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
        parts = [read_shard(home / "corpus" / corpus.name, corpus, k) for k in range(corpus.shards)]
        assert [p for part in parts for p in part] == prompts
        assert all(len(part) == size for part in parts[:-1])
        assert 0 < len(parts[-1]) <= size
        hashes.add(corpus.sha256)
        assert divide(str(file), home / "corpus", size) == corpus
    assert len(hashes) == 1, "the hash of the prompts depends on how they are divided"


@pytest.mark.parametrize(("count", "each"), [(1, 1), (4, 1), (9, 2), (31, 4), (32, 4), (100, 4)])
def test_few_prompts_are_divided_too(tmp_path: Path, count: int, each: int) -> None:
    """So that there is something to do for every worker."""
    file = tmp_path / "some.jsonl"
    file.write_text("".join(json.dumps({"text": f"{k}"}) + "\n" for k in range(count)))
    corpus = divide(str(file), tmp_path / "shards")
    assert (corpus.count, corpus.per_shard, corpus.shards) == (count, each, -(-count // each))
    read = [e for k in range(corpus.shards) for e in read_shard(tmp_path / "shards" / corpus.name, corpus, k)]
    assert read == [str(k) for k in range(count)]


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
