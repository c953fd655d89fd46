"""What a user can get wrong, or a folder can hold: each answered with what was wrong and what to do."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, PreTrainedTokenizerFast

from ln_probe.loading.provenance import sha256_of_files
from ln_probe.models import bundled_models, load_model, source_of

GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 32, "vocab_size": 50}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound GPT-2 folder, to be damaged."""
    torch.manual_seed(0)
    path = tmp_path / "model"
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a local model asked for the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def to_pickle(folder: Path, name: str = "pytorch_model.bin") -> dict[str, torch.Tensor]:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / name)
    return state


def test_what_is_recorded(folder: Path) -> None:
    model = load_model(folder, device="cpu")
    source = source_of(model)
    assert source.name == str(folder)
    assert source.kind == "folder"
    assert (source.revision, source.commit) == (None, None)
    assert source.weights_sha256 == sha256_of_files([folder / "model.safetensors"])
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


def test_the_hash_of_several_files_is_that_of_their_sha256sum_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"abc")
    # sha256sum a b | sha256sum
    expected = "bf6e2103d6cbead28abb7d3fec372bc25d03a35b1647e83e090248eb08d0adae"
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_of_files([tmp_path / "a"]) == empty
    both = sha256_of_files([tmp_path / "b", tmp_path / "a"])
    assert both == sha256_of_files([tmp_path / "a", tmp_path / "b"])
    assert both == expected


def test_loading_leaves_the_process_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub import constants

    root, library = logging.getLogger(), logging.getLogger("transformers")
    before = (
        dict(os.environ),
        constants.HF_HUB_OFFLINE,
        list(root.handlers),
        root.level,
        list(root.filters),
        library.level,
        list(warnings.filters),
        sys.stdout,
        sys.stderr,
        torch.get_rng_state().tolist(),
        os.getcwd(),
    )
    load_model(folder, device="cpu")
    after = (
        dict(os.environ),
        constants.HF_HUB_OFFLINE,
        list(root.handlers),
        root.level,
        list(root.filters),
        library.level,
        list(warnings.filters),
        sys.stdout,
        sys.stderr,
        torch.get_rng_state().tolist(),
        os.getcwd(),
    )
    assert before == after
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, r"dtype must be one of float32, float64, bfloat16, float16, got 'int8'\."),
        ({"device": "gpu"}, r"device must be 'cpu', 'cuda', 'cuda:0', 'mps', …, got 'gpu'\."),
        ({"device": "cuda:99"}, r"device 'cuda:99' is not there: .* Use device='cpu'\."),
        ({"device": "meta"}, r"device must be 'cpu', 'cuda' or 'mps', got 'meta'\."),
        ({"world": "hooks"}, r"world must be 'hooked', 'bridge' or None, got 'hooks'\."),
        ({"revision": "step1000"}, r"revision='step1000' was given for .*, which is a local folder"),
    ],
)
def test_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(folder, **({"device": "cpu"} | options))


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "a/b/c", "model.gguf"])
def test_a_path_that_does_not_exist(path: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist \(looked at .*\)\. Check the path\."):
        load_model(path)


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name(name: str) -> None:
    with pytest.raises(ValueError, match="the model's name is empty"):
        load_model(name)


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0byte", "né", "-rf", "owner/", "a b"])
def test_a_name_that_is_nothing(name: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=r"No model is called|does not exist"):
        load_model(name)


def test_importing_the_loader_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "transformer_lens", "numpy", "safetensors")
    code = f"import sys, ln_probe.models; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_config_cannot_name_another_weight_file(folder: Path) -> None:
    other = load_file(folder / "model.safetensors")
    other["transformer.ln_f.weight"] += 1
    save_file(other, folder / "other.safetensors", metadata={"format": "pt"})
    change_config(folder, transformers_weights="other.safetensors")
    model: Any = load_model(folder, device="cpu", world="bridge")
    assert source_of(model).weights_sha256 == sha256_of_files([folder / "model.safetensors"])
    assert torch.equal(model.ln_final.weight, torch.ones(32))


def test_a_file_that_is_not_a_model(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"is a file, and only a \.gguf file is a whole model\. Give the folder"):
        load_model(folder / "model.safetensors")


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "generation_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json.*\(found: model\.safetensors\)"):
        load_model(folder)


def test_a_config_that_is_not_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON: .*char"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, expected an object with a model_type"):
        load_model(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "tf_model.h5")
    expected = (
        r"no weights\. Looked for: model\.safetensors, model\.safetensors\.index\.json, pytorch_model\.bin, "
        r"pytorch_model\.bin\.index\.json, \*\.pt, \*\.pth \(found: config\.json, .*tf_model\.h5\)\."
    )
    with pytest.raises(FileNotFoundError, match=expected):
        load_model(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_weight_file(folder: Path, keep: float) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    end = int(keep * len(data)) if isinstance(keep, float) else keep
    file.write_bytes(data[:end])
    with pytest.raises(ValueError, match=r"model\.safetensors( \(\d+ bytes\) is truncated or corrupt: | is empty)"):
        load_model(folder)


def test_a_git_lfs_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ValueError, match=r"Git LFS pointer of \d+ bytes, not the weights: run `git lfs pull`"):
        load_model(folder)


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_weights_that_are_not_numbers(folder: Path, value: float, word: str) -> None:
    state = load_file(folder / "model.safetensors")
    state["transformer.h.0.ln_1.weight"][3] = value
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    expected = (
        rf"weight transformer\.h\.0\.ln_1\.weight of shape \(32,\) holds 1 {word} entry in float32\. The "
        "file is damaged or the training diverged"
    )
    with pytest.raises(ValueError, match=expected):
        load_model(folder, device="cpu")


def test_weights_that_float16_cannot_hold(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["transformer.h.0.ln_1.weight"][3] = 1e6
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 infinite entry in float16 \(float16 ends at 65504: try float32"):
        load_model(folder, device="cpu", dtype="float16")


def test_activations_that_float16_cannot_hold(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["transformer.ln_f.weight"] *= 6e4
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    expected = r"the original's own logits are not finite in float16 on \d+ ordinary tokens\. Load it in float32"
    with pytest.raises(ValueError, match=expected):
        load_model(folder, device="cpu", dtype="float16")


def test_weights_that_are_missing(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["transformer.h.0.attn.c_attn.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    expected = r"lacks 1 weights of a GPT2LMHeadModel: transformer\.h\.0\.attn\.c_attn\.weight"
    with pytest.raises(ValueError, match=expected):
        load_model(folder, device="cpu")


def test_weights_of_another_shape(folder: Path) -> None:
    change_config(folder, n_embd=48)
    with pytest.raises(ValueError, match=r"config\.json and the weights do not make a GPT2LMHeadModel"):
        load_model(folder, device="cpu")


def test_more_weights_than_the_config_says_are_noted(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    state["transformer.h.7.ln_1.weight"] = torch.ones(32)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    notes = source_of(load_model(folder, device="cpu")).notes
    expected = "weights in the file that a GPT2LMHeadModel has no place for: transformer.h.7.ln_1.weight"
    assert expected in notes


@pytest.mark.parametrize(
    "changes", [{"n_head": 5}, {"n_layer": "two"}, {"vocab_size": -3}, {"activation_function": "no_such"}]
)
def test_a_config_with_impossible_values(folder: Path, changes: dict[str, Any]) -> None:
    change_config(folder, **changes)
    with pytest.raises(ValueError, match=r"config\.json and the weights do not make a GPT2LMHeadModel"):
        load_model(folder, device="cpu")


def test_an_architecture_that_is_not_supported(folder: Path) -> None:
    change_config(folder, model_type="vit", architectures=["ViTForImageClassification"])
    expected = r"architecture 'ViTForImageClassification' is not supported\. Tested: .*GPT2LMHeadModel.* more: "
    with pytest.raises(ValueError, match=expected):
        load_model(folder)
    change_config(folder, model_type="transmogrifier", architectures=["TransmogrifierForCausalLM"])
    with pytest.raises(ValueError, match="model_type 'transmogrifier' is not supported"):
        load_model(folder)


def test_a_folder_that_brings_its_own_code_is_not_run(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\n")
    change_config(folder, model_type="own", auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"})
    with pytest.raises(ValueError, match=r"needs Python code of its own to run \(auto_map in config\.json"):
        load_model(folder)
    # A type that transformers knows is loaded with transformers' own class.
    change_config(folder, model_type="gpt2")
    load_model(folder, device="cpu")
    assert not marker.exists()


def test_quantized_weights(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(
        ValueError, match=r"holds quantized weights \(quantization_config in config\.json, method 'gptq'"
    ):
        load_model(folder)


def test_an_adapter_is_not_a_model(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "/somewhere/else"}')
    with pytest.raises(ValueError, match=r"holds a PEFT adapter .* Merge it into its base model"):
        load_model(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", 3])
def test_an_index_cannot_point_outside_its_folder(folder: Path, name: object) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"transformer.wte.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="which is not a file in its own folder: refused"):
        load_model(folder)


def test_an_index_whose_files_are_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"lacks 2 of the 2 weight files .*: model-1\.safetensors, model-2"):
        load_model(folder)
    index.write_text("{}")
    with pytest.raises(ValueError, match="is not an index of weight files"):
        load_model(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "checkpoint.pth"])
def test_a_pickle_is_read_only_on_request(folder: Path, name: str) -> None:
    to_pickle(folder, name)
    torch.save({"step": 3}, folder / "optimizer.pt")
    torch.save({"step": 3}, folder / "training_args.bin")
    expected = rf"holds its weights only as a pickle \({name}\)\. A pickle can run code .* allow_pickle=True"
    with pytest.raises(ValueError, match=expected):
        load_model(folder, device="cpu")
    source = source_of(load_model(folder, device="cpu", allow_pickle=True))
    assert source.weights_sha256 == sha256_of_files([folder / name])
    assert source.logits_max_difference is not None
    assert source.logits_max_difference < 1e-5


def test_sharded_pickles(folder: Path) -> None:
    state = to_pickle(folder)
    (folder / "pytorch_model.bin").unlink()
    names = sorted(state)
    shards = {"pytorch_model-1.bin": names[:3], "pytorch_model-2.bin": names[3:]}
    for file, part in shards.items():
        torch.save({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = source_of(load_model(folder, device="cpu", allow_pickle=True))
    assert source.weights_sha256 == sha256_of_files([folder / file for file in shards])


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_cannot_run_code(folder: Path, writer: str) -> None:
    marker = folder / "ran"
    state: dict[str, Any] = to_pickle(folder)
    state["extra"] = _Payload(marker)
    if writer == "torch":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"extra": _Payload(marker)}))
    with pytest.raises(ValueError, match="was not read: it is corrupt, or holds more than tensors"):
        load_model(folder, device="cpu", allow_pickle=True)
    assert not marker.exists()


def test_a_pickle_that_is_not_a_state_dict(folder: Path) -> None:
    to_pickle(folder)
    torch.save([torch.ones(2)], folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="holds a list, expected a state dict"):
        load_model(folder, device="cpu", allow_pickle=True)


def test_safetensors_go_before_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert source_of(load_model(folder, device="cpu")).weights_sha256 == sha256_of_files([folder / "model.safetensors"])


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
    note = "the tokenizer has no begin or end mark of its own: none is put before a text by default"
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


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"PK\x03\x04 zip"])
def test_a_damaged_gguf_file(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf (could not be unpacked|is not a GGUF file)"):
        load_model(file)


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
    import types

    asked: list[tuple[Path, int | None]] = []

    def load_run(path: Path, step: int | None) -> torch.nn.Module:
        asked.append((path, step))
        return torch.nn.Linear(2, 2)

    stand_in = types.ModuleType("ln_probe.analyses.lab.training")
    stand_in.load_run = load_run
    monkeypatch.setitem(sys.modules, "ln_probe.analyses.lab.training", stand_in)
    (tmp_path / "lab.json").write_text("{}")

    source = source_of(load_model(tmp_path, device="cpu", dtype="float64"))
    assert (source.kind, source.world, source.dtype, source.revision) == ("lab", "lab", "float64", None)
    assert source_of(load_model(tmp_path, device="cpu", revision="step40")).revision == "step40"
    load_model(tmp_path, device="cpu", revision="7")
    assert asked == [(tmp_path, None), (tmp_path, 40), (tmp_path, 7)]
    with pytest.raises(ValueError, match=r"revision of a lab run is a training step .*, got 'main'"):
        load_model(tmp_path, device="cpu", revision="main")
    with pytest.raises(ValueError, match="is a lab model, whose weights are only ever used as trained"):
        load_model(tmp_path, device="cpu", fold_ln=True)
