"""Every form that prompts may take, and every way in which they may be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ln_probe.hooks.default_tokens import SAMPLED_PROMPTS, bundled_texts
from ln_probe.prompting.inputs import sampled
from ln_probe.prompting.prompts import make_prompts


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
    made = make_prompts(speaking, ["abc", "x" * 100])
    assert [len(row) for row in made.tokens] == [4, 32]
    assert made.notes == ("1 of 2 prompts were cut to 32 tokens (the longest had 101; context 32)",)
    assert [len(row) for row in make_prompts(speaking, ["abcdef"], max_tokens=3).tokens] == [3]


def test_bundled_is_the_default(speaking: Any) -> None:
    made = make_prompts(speaking, max_tokens=20)
    assert made.source == "bundled"
    assert len(made.tokens) == len(bundled_texts()) >= 4


def test_without_a_tokenizer_the_model_speaks_for_itself(model: Any) -> None:
    made = make_prompts(model, max_tokens=12)
    assert made.source == "sampled"
    assert [len(row) for row in made.tokens] == [12] * SAMPLED_PROMPTS
    assert "no tokenizer, so prompts were sampled from the model itself: 4 sequences of 12 tokens" in made.notes[0]
    again = make_prompts(model, sampled(), max_tokens=12)
    assert again.summary["sha256"] == made.summary["sha256"]
    assert make_prompts(model, sampled(), max_tokens=12, seed=1).summary["sha256"] != made.summary["sha256"]
    logits = model(made.tokens[0][None])  # sampled from the model: likelier than chance on average
    surprise = -logits[0, :-1].log_softmax(-1).gather(-1, made.tokens[0][1:, None]).mean()
    assert float(surprise) < np.log(50)


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
