"""Tokenizers beside a checkpoint: read, missing, broken or larger than the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from ln_probe.models import load_model, source_of

pytestmark = pytest.mark.usefixtures("no_network")


def add_tokenizer(folder: Path, words: list[str]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=words[0], bos_token=words[1], eos_token=words[2]
    )
    wrapped.save_pretrained(folder)


@pytest.mark.parametrize("world", [None, "bridge"])
def test_a_tokenizer_is_loaded_where_there_is_one(folder: Path, world: Any) -> None:
    add_tokenizer(folder, ["?", "<s>", "</s>", "the", "norm", "projects"])
    model: Any = load_model(folder, device="cpu", world=world)
    assert model.tokenizer.name_or_path == str(folder)
    assert model.to_tokens("the norm projects", prepend_bos=False).tolist()[0][-3:] == [3, 4, 5]
    assert not any("no tokenizer" in note for note in source_of(model).notes)


@pytest.mark.parametrize("world", [None, "bridge"])
def test_a_tokenizer_without_marks_gets_none_that_the_model_does_not_know(folder: Path, world: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(50)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    model: Any = load_model(folder, device="cpu", world=world)
    note = "the tokenizer has no begin or end mark: none is put before a text by default"
    assert note in source_of(model).notes
    assert model.to_tokens("w3 w4").tolist() == [[3, 4]]
    tokens = model.to_tokens(["w3 w4", "w5"])
    assert tokens.max() < 50
    assert torch.isfinite(model(tokens, return_type="logits")).all()


def test_a_tokenizer_that_cannot_be_read_is_noted(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    model: Any = load_model(folder, device="cpu")
    assert model.tokenizer is None
    assert any(note.startswith("no tokenizer: the folder's could not be read") for note in source_of(model).notes)


def test_a_tokenizer_larger_than_the_vocabulary_is_noted(folder: Path) -> None:
    add_tokenizer(folder, ["?", "<s>", "</s>", *(f"w{i}" for i in range(60))])
    notes = source_of(load_model(folder, device="cpu")).notes
    assert "the tokenizer knows 63 tokens, the model 50: some texts give ids out of range" in notes


def test_no_tokenizer_is_invented_for_llama(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            num_hidden_layers=1,
            intermediate_size=40,
            vocab_size=50,
            max_position_embeddings=32,
        )
    ).save_pretrained(tmp_path)
    for world in (None, "bridge"):
        model: Any = load_model(tmp_path, device="cpu", world=world)
        assert model.tokenizer is None
