"""Every form that prompts may take, and every way in which they may be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

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
from ln_probe.prompt_sources import sampled
from ln_probe.prompts import make_prompts, name_tokens, read_vocabulary


class Letters:
    """A tokenizer of single letters, with id 1 first."""

    bos_token_id = 1

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(c) % 40 for c in text]}

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


@pytest.fixture
def model(make_bridge: Callable[..., Any]) -> Any:
    return make_bridge("gpt2")


@pytest.fixture
def speaking(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(model, "tokenizer", Letters(), raising=False)
    monkeypatch.setattr(model.cfg, "default_prepend_bos", True, raising=False)
    return model


def test_texts_get_the_first_token(speaking: Any) -> None:
    made = make_prompts(speaking, ["abc", "hello there"])
    assert [row[0].item() for row in made.tokens] == [1, 1]
    assert [len(row) for row in made.tokens] == [4, 12]
    assert made.strings[0][0] == "<1>"
    assert (made.source, made.notes) == ("texts", ())


def test_long_prompts_are_cut_and_it_is_said(speaking: Any) -> None:
    made = make_prompts(speaking, ["abc", "abcdefghij" * 10])
    assert [len(row) for row in made.tokens] == [4, 32]
    assert made.notes == ("1 of 2 prompts were cut to 32 tokens (the longest had 101; context 32)",)
    assert [len(row) for row in make_prompts(speaking, ["abcdef"], max_tokens=3).tokens] == [3]


def test_bundled_is_the_default(speaking: Any) -> None:
    made = make_prompts(speaking, max_tokens=20)
    assert made.source == "bundled"
    assert len(made.tokens) == len(bundled_texts()) == 32


def test_without_a_tokenizer_the_model_speaks_for_itself(model: Any) -> None:
    made = make_prompts(model, max_tokens=12)
    assert made.source == "sampled"
    assert len(made.tokens) >= SAMPLED_SEQUENCES[MEASURED] == 32
    assert max(map(len, made.tokens)) == 12
    said = rf"no tokenizer, so prompts were sampled from the model itself: {len(made.tokens)} sequences of"
    assert re.search(rf"{said} .*12 tokens \(.*\), temperature 1, seed 0$", made.notes[0])
    again = make_prompts(model, sampled(), max_tokens=12)
    assert again.summary["sha256"] == made.summary["sha256"]
    assert make_prompts(model, sampled(), max_tokens=12, seed=1).summary["sha256"] != made.summary["sha256"]
    surprise = []  # sampled from the model: likelier than chance on average
    for row in made.tokens:
        logits = model(row[None])
        surprise.append(float(-logits[0, :-1].log_softmax(-1).gather(-1, row[1:, None]).mean()))
    assert np.mean(surprise) < np.log(50)


def test_bundled_passages_are_many_and_varied() -> None:
    texts = [p.text for p in passages()]
    assert len(texts) == len(set(texts)) >= 48
    assert len(bundled_texts(CALIBRATION)) == 16
    assert not set(bundled_texts(CALIBRATION)) & set(bundled_texts(MEASURED))
    kinds = {p.kind for p in passages() if p.split == MEASURED}
    assert {"prose", "dialogue", "code", "list", "numbers", "German", "French", "Spanish", "Dutch", "Latin"} <= kinds
    assert all(40 <= len(t.split()) <= 130 or k == "code" for t, k in ((p.text, p.kind) for p in passages()))


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
    ends = list(range(10))
    rows = sample(model, limit=30, seed=0, ends=ends, count=400)
    lengths = np.array([len(row) for row in rows], float)
    assert lengths.std() > 2
    assert abs(np.corrcoef(np.arange(400), lengths)[0, 1]) < 0.2  # in order of length it is 0.9
    model.original_model.config.bos_token_id = 7
    alone = sample(model, limit=30, seed=0, ends=[], count=6)  # none ends: draws are those of the rows
    assert [r[:1].tolist() for r in alone] == [[7]] * 6


@pytest.mark.parametrize("world", ["bridge", "hooked"])
def test_sampling_with_a_cache_is_sampling(
    world: str, model: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    model = model if world == "bridge" else request.getfixturevalue("make_hooked")()
    kept = sample(model, limit=12, seed=3, ends=[1, 2, 3, 4, 5])
    monkeypatch.setattr(default_tokens, "NextLogits", lambda model, cached: NextLogits(model, cached=False))
    whole = sample(model, limit=12, seed=3, ends=[1, 2, 3, 4, 5])
    assert [r.tolist() for r in kept] == [r.tolist() for r in whole]


def test_one_token_everywhere_is_warned_of(speaking: Any) -> None:
    token = 2 + ord("P") % 40
    said = f"the token '<{token}>' makes up 96% of the prompts: what is measured describes it more than anything else"
    assert make_prompts(speaking, ["P" * 24]).notes == (said,)
    assert make_prompts(speaking, ["PPP"]).notes == ()  # too short to say


def test_files(speaking: Any, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one two\nthree\n\nfour\n\n\n")
    assert [len(r) for r in make_prompts(speaking, tmp_path / "p.txt").tokens] == [14, 5]
    (tmp_path / "p.jsonl").write_text(
        json.dumps({"text": "abc"}) + "\n\n" + json.dumps({"tokens": [5, 6, 7, 8, 9]}) + "\n"
    )
    assert [len(r) for r in make_prompts(speaking, tmp_path / "p.jsonl").tokens] == [4, 5]
    np.save(tmp_path / "p.npy", np.arange(12).reshape(2, 6))
    made = make_prompts(speaking, tmp_path / "p.npy")
    assert [r.tolist() for r in made.tokens] == [list(range(6)), list(range(6, 12))]
    assert made.source == "p.npy"


@pytest.mark.parametrize(("given", "error", "said"), [
    ([], ValueError, r"no prompts \(texts is empty\): give at least one"),
    (["  "], ValueError, r"an empty prompt \('  '\): every prompt needs some text"),
    (torch.tensor([[3, 99]]), ValueError, r"prompt 0: token id 99 is outside the vocabulary of 50 \(0 … 49\)"),
    (torch.tensor([[3, -1]]), ValueError, "prompt 0: token id -1 is outside"),
    (torch.zeros(1, 0, dtype=torch.long), ValueError, "prompt 0 has no tokens"),
    (torch.zeros(0, 4, dtype=torch.long), ValueError, "no prompts"),
    (Path("missing.txt"), FileNotFoundError, r"no prompts file 'missing\.txt'$"),
])  # fmt: skip
def test_bad_prompts(given: Any, error: type[Exception], said: str, speaking: Any) -> None:
    with pytest.raises(error, match=said):
        make_prompts(speaking, given)


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.jsonl", b'{"text": "abc"}\n{"text": ', r"a\.jsonl, line 2: not JSON"),
    ("b.jsonl", b'{"words": "abc"}', r'b\.jsonl, line 1: needs a "text" or a "tokens" field'),
    ("c.txt", b"\xff\xfe\x00", r"c\.txt is not a readable UTF-8 text file"),
    ("d.npy", b"not numpy", r"d\.npy is not a plain \.npy file of token ids"),
    ("e.txt", b"\n\n", "no prompts"),
])  # fmt: skip
def test_bad_files(name: str, content: bytes, said: str, speaking: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        make_prompts(speaking, tmp_path / name)


def test_text_without_a_tokenizer(model: Any) -> None:
    with pytest.raises(
        ValueError, match="this model has no tokenizer, so text cannot be turned into tokens: pass token ids"
    ):
        make_prompts(model, ["hello"])


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


@pytest.mark.parametrize(("name", "content", "said"), [
    ("a.json", "{", "is not a readable vocabulary: not JSON"),
    ("b.json", '{"x": 1.5}', "holds no vocabulary: it takes JSON"),
    ("c.json", '{"x": 1, "y": 1}', "gives two tokens the same id"),
    ("d.json", '{"x": 50}', r"names token 50, and the model has 0 … 49: another model's file\?"),
    ("missing.txt", None, "no vocabulary file"),
])  # fmt: skip
def test_bad_vocabulary_files(name: str, content: str | None, said: str, tmp_path: Path, model: Any) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        name_tokens(model, tmp_path / name)
