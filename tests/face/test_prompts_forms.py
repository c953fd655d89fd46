"""Every form of prompts that a TransformerLens user may have, and what is said of those that cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ln_probe
from ln_probe.prompts import make_prompts

ROWS = [[5, 6, 7, 8], [9, 10]]
PAD, END = 0, 2


class Words:
    """A tokenizer of single letters, with id 1 first and padding."""

    bos_token_id, eos_token_id, pad_token_id = 1, END, PAD

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(c) % 40 for c in text]}

    def decode(self, ids: list[int]) -> str:
        return f"<{ids[0]}>"


@pytest.fixture
def model(make_bridge: Callable[..., Any]) -> Any:
    return make_bridge("gpt2")


@pytest.fixture
def speaking(model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(model, "tokenizer", Words(), raising=False)
    monkeypatch.setattr(model.cfg, "default_prepend_bos", True, raising=False)
    return model


def tokens(model: Any, prompts: Any, **how: Any) -> list[list[int]]:
    return [row.tolist() for row in make_prompts(model, prompts, **how).tokens]


def test_b09_a_string_is_a_text(speaking: Any) -> None:
    made = make_prompts(speaking, "The cat")
    assert ([len(r) for r in made.tokens], made.source, made.notes) == ([8], "texts", ())
    assert tokens(speaking, "The cat") == tokens(speaking, ["The cat"])


@pytest.mark.parametrize("given", [
    [5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), np.array([5, 6, 7], np.int32), [np.int64(5), torch.tensor(6), 7],
    [[5, 6, 7]], torch.tensor([[5, 6, 7]]), np.array([[5, 6, 7]], np.uint8), [torch.tensor([5, 6, 7])],
], ids=repr)  # fmt: skip
def test_b09_one_prompt_of_ids_in_any_form(given: Any, model: Any) -> None:
    assert tokens(model, given) == [[5, 6, 7]]


@pytest.mark.parametrize("given", [
    ROWS, tuple(map(tuple, ROWS)), [torch.tensor(r) for r in ROWS], [np.array(r) for r in ROWS],
    np.array([np.array(r) for r in ROWS], dtype=object),
], ids=["lists", "tuples", "tensors", "arrays", "object array"])  # fmt: skip
def test_b09_ragged_prompts(given: Any, model: Any) -> None:
    assert tokens(model, given) == ROWS


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", [torch.tensor, np.array, list])
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
    monkeypatch.setattr(Words, "pad_token_id", END)
    made = make_prompts(speaking, torch.tensor([[5, 6, 7, 8], [9, 10, END, END]]))
    assert [len(r) for r in made.tokens] == [4, 4]
    assert made.notes[0].startswith("1 of 2 prompts end in token 2, which pads and ends texts alike, so it was kept")


def test_a_padded_prompt_gives_the_tables_of_the_bare_one(speaking: Any) -> None:
    how: dict[str, Any] = {"progress": False, "probes": ("selectability",), "keys": "all", "layers": [1]}
    bare = ln_probe.analyze(speaking, [[9, 10, 11]], **how)
    padded = ln_probe.analyze(
        speaking, {"input_ids": torch.tensor([[9, 10, 11, 7]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}, **how
    )
    assert bare.keys.equals(padded.keys)
    assert bare.provenance["prompts"] == padded.provenance["prompts"]


def test_the_first_token_can_be_asked_for_or_left_out(speaking: Any) -> None:
    assert [r[0] == 1 for r in tokens(speaking, "abc", prepend_bos=True)] == [True]
    assert tokens(speaking, "abc", prepend_bos=False) == [tokens(speaking, "abc")[0][1:]]
    said = make_prompts(speaking, "abc", prepend_bos=False).notes
    assert said == ("texts begin without the tokenizer's first token (prepend_bos=False)",)
    with pytest.raises(ValueError, match="prepend_bos=True is about texts: token ids are taken as they are"):
        make_prompts(speaking, ROWS, prepend_bos=True)


def test_sampled_sequences(model: Any) -> None:
    made = make_prompts(model, ln_probe.sampled(2), max_tokens=6)
    assert ([len(r) for r in made.tokens], made.source) == ([6, 6], "sampled")
    for wrong, error in ((0, ValueError), (2.0, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"sampled\(count\) takes"):
            ln_probe.sampled(wrong)


def test_b09_layers_count_from_the_end(model: Any) -> None:
    how: dict[str, Any] = {"progress": False, "probes": ("selectability",), "heads": [0]}
    last = ln_probe.analyze(model, ROWS, layers=[-1], **how)
    assert set(last.heads["layer"]) == {1}
    assert last.provenance["arguments"]["layers"] == [1]
    with pytest.raises(ValueError, match="no layer -3: the model has layers 0 … 1"):
        ln_probe.analyze(model, ROWS, layers=[-3], **how)


def test_names_of_files_and_words_are_not_texts(speaking: Any, tmp_path: Path) -> None:
    there = tmp_path / "p.txt"
    there.write_text("one\n\ntwo\n")
    with pytest.raises(
        ValueError, match=r"would be a text, and a file of that name exists: pass pathlib\.Path\('.*p\.txt'\)"
    ):
        make_prompts(speaking, str(there))
    assert len(make_prompts(speaking, there).tokens) == 2
    assert len(make_prompts(speaking, [str(there)]).tokens) == 1
    with pytest.raises(ValueError, match=r"pass ln_probe\.sampled\(\) for sequences of the model's own"):
        make_prompts(speaking, "sampled")
    assert make_prompts(speaking, "missing.txt").notes == (
        "'missing.txt' was taken as a text: there is no file of that name",
    )


BAD_MASK = {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]}


@pytest.mark.parametrize(("given", "error", "said"), [
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
    ([[5, 99]], ValueError, "prompt 0: token id 99 is outside the vocabulary of 50"),
    (7, TypeError, r"got int \(prompts: token ids must be whole numbers"),
    ({"text": "abc"}, ValueError, 'needs "input_ids"; this one has text'),
    (BAD_MASK, ValueError, "attention_mask of prompt 0 hides position 1 between tokens that it shows"),
    (BAD_MASK | {"attention_mask": [[0, 0, 0]]}, ValueError, "attention_mask of prompt 0 hides all of its tokens"),
    (BAD_MASK | {"attention_mask": [[1, 1, 3]]}, ValueError, "attention_mask of prompt 0 holds 3: 0 and 1 only"),
    (BAD_MASK | {"attention_mask": [[1, 1]]}, ValueError, r"attention_mask does not fit input_ids \(other lengths\)"),
], ids=str)  # fmt: skip
def test_what_cannot_be_used_is_said(given: Any, error: type[Exception], said: str, speaking: Any) -> None:
    with pytest.raises(error, match=said):
        make_prompts(speaking, given)


def test_b09_an_activation_cache_is_no_prompt(model: Any) -> None:
    _, cache = model.run_with_cache(torch.tensor([[5, 6, 7]]))
    with pytest.raises(TypeError, match=r"an ActivationCache holds what one pass computed, .*: pass the tokens"):
        make_prompts(model, cache)


def test_b09_what_load_models_docstring_points_to_is_there(model: Any) -> None:
    assert "ln_probe.source_of(model)" in str(ln_probe.load_model.__doc__)
    assert ln_probe.source_of(model).kind == "object"


def test_names_that_are_missing_or_replace_others_are_noted(model: Any, speaking: Any, tmp_path: Path) -> None:
    """Two names for a model of more tokens, and names beside a tokenizer, were taken without a word."""
    (tmp_path / "names.txt").write_text("a\nb\n")
    size = model.cfg.d_vocab
    report = ln_probe.analyze(speaking, ROWS, probes=["decomposition"], vocab=tmp_path / "names.txt", progress=False)
    missing = f"the vocabulary file names 2 of the model's {size} tokens: the other {size - 2} stand as their ids"
    assert missing in report.notes
    assert any(n.startswith("tokens have the names of the vocabulary file, not of the model's") for n in report.notes)
    (tmp_path / "all.txt").write_text("".join(f"t{i}\n" for i in range(size)))
    model.tokenizer = None
    report = ln_probe.analyze(model, ROWS, probes=["decomposition"], vocab=tmp_path / "all.txt", progress=False)
    assert not [n for n in report.notes if "vocabulary file" in n]
