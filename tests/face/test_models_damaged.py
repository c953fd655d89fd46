"""What a checkpoint's folder can hold that is damaged, missing or dangerous: each answered with what to do."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ln_probe.loading.provenance import hashes, sha256_of_hashes
from ln_probe.models import load_model, source_of

pytestmark = pytest.mark.usefixtures("no_network")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def to_pickle(folder: Path, name: str = "pytorch_model.bin") -> dict[str, torch.Tensor]:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / name)
    return state


def test_a_config_cannot_name_another_weight_file(folder: Path) -> None:
    other = load_file(folder / "model.safetensors")
    other["transformer.ln_f.weight"] += 1
    save_file(other, folder / "other.safetensors", metadata={"format": "pt"})
    change_config(folder, transformers_weights="other.safetensors")
    model: Any = load_model(folder, device="cpu", world="bridge")
    assert source_of(model).weights_sha256 == sha256_of_hashes(hashes([folder / "model.safetensors"]))
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
    with pytest.raises(ValueError, match=r"needs custom Python code to run \(auto_map in config\.json"):
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
    assert source.weights_sha256 == sha256_of_hashes(hashes([folder / name]))
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
    assert source.weights_sha256 == sha256_of_hashes(hashes([folder / file for file in shards]))


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
    assert source_of(load_model(folder, device="cpu")).weights_sha256 == sha256_of_hashes(
        hashes([folder / "model.safetensors"])
    )


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64, b"PK\x03\x04 zip"])
def test_a_damaged_gguf_file(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf (could not be unpacked|is not a GGUF file)"):
        load_model(file)
