"""What a user can type, what is recorded of a loaded model, and the tokenizer beside it."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import hugging_face
from faulty import word_tokenizer

from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.loading.provenance import hashes, sha256_of_hashes
from ln_probe.models import bundled_models, load_model, source_of

pytestmark = pytest.mark.usefixtures("no_network")


def test_what_is_recorded_and_that_the_process_is_left_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = process()
    model = load_model(folder, device="cpu")
    assert process() == before
    assert capsys.readouterr() == ("", "")
    source = source_of(model)
    assert source.name == str(folder)
    assert source.kind == "folder"
    assert (source.revision, source.commit) == (None, None)
    assert source.weights_sha256 == sha256_of_hashes(hashes([folder / "model.safetensors"]))
    assert source.architecture == "GPT2LMHeadModel"
    assert source.dtype == "float32"
    assert source.processing == ()
    assert "no tokenizer: the folder holds no tokenizer files; prompts must be token ids" in source.notes


def test_a_model_we_did_not_load_is_described_from_its_structure() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).bfloat16()
    source = source_of(model)
    assert (source.name, source.kind, source.world) == ("Sequential", "object", "Sequential")
    assert source.dtype == "bfloat16"
    assert source.logits_max_difference is None
    assert source_of(model).weights_sha256 == source.weights_sha256
    with torch.no_grad():
        model[0].bias[0] += 1
    assert source_of(model).weights_sha256 != source.weights_sha256


def test_a_class_is_no_model() -> None:
    with pytest.raises(TypeError, match="source_of takes a model, got the class Linear"):
        source_of(torch.nn.Linear)  # type: ignore[arg-type]


def test_the_hash_of_several_files_is_that_of_their_sha256sum_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"abc")
    # sha256sum a b | sha256sum
    expected = "bf6e2103d6cbead28abb7d3fec372bc25d03a35b1647e83e090248eb08d0adae"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_of_hashes(hashes([tmp_path / "a"])) == empty
    both = sha256_of_hashes(hashes([tmp_path / "b", tmp_path / "a"]))
    assert both == sha256_of_hashes(hashes([tmp_path / "a", tmp_path / "b"]))
    assert both == expected


def process() -> list[Any]:
    """What loading may not change."""
    from huggingface_hub import constants

    root, library = logging.getLogger(), logging.getLogger("transformers")
    about_logs = [list(root.handlers), root.level, list(root.filters), library.level, list(warnings.filters)]
    here = [sys.stdout, sys.stderr, os.getcwd()]
    return [dict(os.environ), constants.HF_HUB_OFFLINE, about_logs, here, torch.get_rng_state().tolist()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, r"dtype must be one of float32, float64, bfloat16, float16, got 'int8'\."),
        ({"dtype": ""}, r"dtype must be one of float32, float64, bfloat16, float16, got ''\."),
        ({"fold_ln": "no"}, "fold_ln must be True or False, got 'no'"),
        ({"allow_pickle": "no"}, "allow_pickle must be True or False, got 'no'"),
        ({"device": "gpu"}, r"device must be 'cpu', 'cuda', 'cuda:0', …, got 'gpu'\."),
        ({"device": "cuda:99"}, r"device 'cuda:99' is not there: .* Use device='cpu'\."),
        ({"device": "meta"}, r"device must be 'cpu' or 'cuda', got 'meta'\."),
        ({"world": "hooks"}, r"world must be 'hooked', 'bridge' or None, got 'hooks'\."),
        ({"revision": "step1000"}, r"revision='step1000' was given for .*, which is a local folder"),
    ],
)
def test_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        load_model(folder, **({"device": "cpu"} | options))


AWAY = r"does not exist \(full path .*\)\. Check the path\."
NOTHING = "No model is called|does not exist|is no model's name"


@pytest.mark.parametrize(("name", "said"), [
    *((path, AWAY) for path in ("./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "model.gguf")),
    *((name, NOTHING) for name in ("nul\0byte", "né", "-rf", "owner/", "a b")),
    ("", "the model's name is empty"),
    (None, "name must be a model's name or path, got None"),
    (torch.nn.Linear(1, 1), "name must be a model's name or path, got a Linear"),
    ("lm-layernorm@step3", r"In Python a revision is given apart: load_model\('lm-layernorm', revision='step3'\)"),
])  # fmt: skip
def test_a_name_that_is_nothing(name: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=said):
        load_model(name)


def test_bundled_names_are_the_folders_that_hold_a_lab_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ln_probe import models

    monkeypatch.setattr(models, "_bundled_home", lambda: tmp_path / "none")
    assert bundled_models() == []
    monkeypatch.setattr(models, "_bundled_home", lambda: tmp_path)
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lab.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert bundled_models() == ["a", "b"]


def test_a_lab_run_is_loaded_by_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Path, int | None]] = []

    def load_run(path: Path, step: int | None) -> torch.nn.Module:
        asked.append((path, step))
        return LabConfig(n_layers=1, d_model=4, n_heads=1, d_vocab=5, n_ctx=4, norm_order="post").build()

    monkeypatch.setattr("ln_probe.analyses.lab.run_folder.load_run", load_run)
    steps = [f"checkpoints/step-{step:07d}.safetensors" for step in (7, 40)]
    for name in ("lab.json", "model.safetensors", *steps):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    source = source_of(load_model(tmp_path, device="cpu", dtype="float64"))
    assert (source.kind, source.world, source.dtype, source.revision) == ("lab", "lab", "float64", None)
    assert source_of(load_model(tmp_path, device="cpu", revision="step40")).revision == "step40"
    load_model(tmp_path, device="cpu", revision=7)
    assert asked == [(tmp_path, None), (tmp_path, 40), (tmp_path, 7)]
    with pytest.raises(ValueError, match=r"revision of a lab run is a training step .*, got 'main'"):
        load_model(tmp_path, device="cpu", revision="main")
    for asked_for in ({"fold_ln": True}, {"world": "bridge"}):
        with pytest.raises(ValueError, match=r"only be used as it was trained: .* which has its norms before .* Leave"):
            load_model(tmp_path, device="cpu", **asked_for)


# -------------------------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("world", [None, "bridge"])
def test_a_tokenizer_without_marks_gets_none_that_the_model_does_not_know(folder: Path, world: Any) -> None:
    word_tokenizer([f"w{i}" for i in range(50)], marks=False).save_pretrained(folder)
    model: Any = load_model(folder, device="cpu", world=world)
    note = "the tokenizer has no begin or end mark: none is put before a text by default"
    assert note in source_of(model).notes
    assert model.to_tokens("w3 w4").tolist() == [[3, 4]]
    tokens = model.to_tokens(["w3 w4", "w5"])
    assert tokens.max() < 50
    assert torch.isfinite(model(tokens, return_type="logits")).all()


def test_a_tokenizer_is_loaded_and_one_larger_than_the_vocabulary_is_noted(folder: Path) -> None:
    word_tokenizer(["?", "<s>", "</s>", *(f"w{i}" for i in range(60))]).save_pretrained(folder)
    model: Any = load_model(folder, device="cpu")
    assert model.tokenizer.name_or_path == str(folder)
    assert model.to_tokens("w0 w1 w2", prepend_bos=False).tolist()[0][-3:] == [3, 4, 5]
    notes = source_of(model).notes
    assert "the tokenizer knows 63 tokens, the model 50: some texts give ids out of range" in notes
    assert not any("no tokenizer" in note for note in notes)


def test_c07_a_tokenizer_with_an_id_of_four_billion(folder: Path) -> None:
    word_tokenizer(["a", "b", "c"]).save_pretrained(folder)
    path = folder / "tokenizer.json"
    text = json.loads(path.read_text())
    text["model"]["vocab"]["b"] = 4_000_000_000
    path.write_text(json.dumps(text))
    notes = source_of(load_model(folder, device="cpu")).notes
    assert any("gives the token id 4000000000, and no vocabulary has one" in note for note in notes)


def test_no_tokenizer_is_invented_for_llama(tmp_path: Path) -> None:
    hugging_face("llama").save_pretrained(tmp_path)
    for world in (None, "bridge"):
        model: Any = load_model(tmp_path, device="cpu", world=world)  # type: ignore[arg-type]
        assert model.tokenizer is None
