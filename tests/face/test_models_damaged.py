"""What a checkpoint's folder can hold that is damaged, missing or dangerous: each answered with what to do."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import lab_model, soon
from safetensors.torch import load_file, save_file

from ln_probe.loading.folder import check_header
from ln_probe.loading.provenance import hashes, sha256_of_hashes
from ln_probe.models import load_model, source_of

pytestmark = pytest.mark.usefixtures("no_network")

Change = Callable[[Path], object]  # what is done to a sound folder
NORM = "transformer.h.0.ln_1.weight"
NESTED = "[" * 100_000


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def file(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def index(content: Any) -> Change:
    """An index of weight files in the place of the weights."""
    text = content if isinstance(content, str) else json.dumps(content)
    return both(no_weights, file("model.safetensors.index.json", text))


def cut(keep: float) -> Change:
    """So many bytes of the weights, or this part of them, are left."""

    def change(folder: Path) -> None:
        data = (folder / "model.safetensors").read_bytes()
        file("model.safetensors", data[: int(keep * len(data)) if isinstance(keep, float) else keep])(folder)

    return change


def weights(edit: Callable[[dict[str, torch.Tensor]], object], name: str = "model.safetensors") -> Change:
    def change(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / name, metadata={"format": "pt"})

    return change


def entry(value: float) -> Change:
    return weights(lambda state: state[NORM].__setitem__(3, value))


def pickled(make: Callable[[dict[str, Any]], Any] = dict, name: str = "pytorch_model.bin") -> Change:
    """The weights as a pickle of what is made of them."""

    def change(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        no_weights(folder)
        torch.save(make(state), folder / name)

    return change


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


NO_MODEL = r"config\.json and the weights do not make a GPT2LMHeadModel"
CUT = r"model\.safetensors( \(\d+ bytes\) is truncated or corrupt: | is empty)"
NOT_FINITE = (
    r"weight transformer\.h\.0\.ln_1\.weight of shape \(32,\) holds 1 {} entry in float32\. The "
    "file is damaged or the training diverged"
)
NO_WEIGHTS = (
    r"no weights\. Looked for: model\.safetensors, model\.safetensors\.index\.json, pytorch_model\.bin, "
    r"pytorch_model\.bin\.index\.json, \*\.pt, \*\.pth \(found: config\.json, .*tf_model\.h5\)\."
)
TWO = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
OUTSIDE = "which is not a file in its own"
NO_INDEX = "is not an index of weight files"
F16: dict[str, Any] = {"dtype": "float16"}
PICKLE: dict[str, Any] = {"allow_pickle": True}


@pytest.mark.parametrize(("change", "said", "options"), [
    (file("config.json", '{"model_type": '), r"config\.json is not valid JSON: .*char", {}),
    (file("config.json", "[]"), "holds a list, expected an object with a model_type", {}),
    (file("config.json", NESTED), "nested deeper than 64 levels", {}),
    (file("config.json", '{"vocab_size": ' + "9" * 5000 + "}"), "a whole number has too many digits", {}),
    (config(n_layer=10**499), "n_layer = a number of", {}),
    (config(n_layer=10**9), "says n_layer = 1000000000, and no model has more than 10000", {}),
    (config(n_layer=9000), r"says n_layer = 9000, and the weights are \d+ tensors", {}),
    (config(num_labels=10**8), "says num_labels = 100000000, and no model has more than 100000", {}),
    (config(bos_token_id=4 * 10**9), "says bos_token_id = 4000000000, and no model has more than 16777216", {}),
    (config(text_config={"num_experts": 10**9}), "says num_experts = 1000000000", {}),
    *((config(**{key: value}), NO_MODEL, {}) for key, value in
      (("n_head", 5), ("n_layer", "two"), ("activation_function", "no_such"), ("n_embd", 48))),
    (config(model_type="vit", architectures=["ViTForImageClassification"]),
     r"architecture 'ViTForImageClassification' is not supported\. Tested: .*GPT2LMHeadModel.* more: ", {}),
    (config(model_type="transmogrifier", architectures=["TransmogrifierForCausalLM"]),
     "model_type 'transmogrifier' is not supported", {}),
    (config(quantization_config={"quant_method": "gptq", "bits": 4}),
     r"holds quantized weights \(quantization_config in config\.json, method 'gptq'", {}),
    (file("adapter_config.json", '{"base_model_name_or_path": "/somewhere/else"}'),
     r"holds a PEFT adapter .* Merge it into its base model", {}),
    *((cut(keep), CUT, {}) for keep in (0, 4, 0.5)),
    (file("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
     r"Git LFS pointer of \d+ bytes, not the weights: run `git lfs pull`", {}),
    (entry(float("nan")), NOT_FINITE.format("NaN"), {}),
    (entry(float("inf")), NOT_FINITE.format("infinite"), {}),
    (entry(1e6), r"1 infinite entry in float16 \(float16 ends at 65504: try float32", F16),
    (weights(lambda state: state["transformer.ln_f.weight"].mul_(6e4)),
     r"the original's own logits are not finite in float16 on \d+ ordinary tokens\. Load it in float32", F16),
    (weights(lambda state: state.pop("transformer.h.0.attn.c_attn.weight")),
     r"lacks 1 weights of a GPT2LMHeadModel: transformer\.h\.0\.attn\.c_attn\.weight", {}),
    *((index({"metadata": {}, "weight_map": {"transformer.wte.weight": name}}), OUTSIDE + " folder: refused", {})
      for name in ("../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", 3)),
    (index({"weight_map": {"a": "x" * 5000}}), OUTSIDE, {}),
    (index("{}"), NO_INDEX, {}),
    (index(NESTED), NO_INDEX, {}),
    (pickled(lambda state: [torch.ones(2)]), "holds a list, expected a state dict", PICKLE),
])  # fmt: skip
def test_what_cannot_be_loaded_is_said(folder: Path, change: Change, said: str, options: dict[str, Any]) -> None:
    (folder.parent / "outside.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    change(folder)
    with soon(), pytest.raises(ValueError, match=said):
        load_model(folder, device="cpu", **options)


@pytest.mark.parametrize(("change", "said"), [
    (lambda folder: [(folder / name).unlink() for name in ("config.json", "generation_config.json")],
     r"has no config\.json.*\(found: model\.safetensors\)"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "tf_model.h5"), NO_WEIGHTS),
    (index(TWO), r"lacks 2 of the 2 weight files .*: model-1\.safetensors, model-2"),
])  # fmt: skip
def test_what_is_missing_is_named(folder: Path, change: Change, said: str) -> None:
    change(folder)
    with pytest.raises(FileNotFoundError, match=said):
        load_model(folder)


def test_a_file_that_is_not_a_model(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"is a file, and only a \.gguf file is a whole model\. Give the folder"):
        load_model(folder / "model.safetensors")


def test_a_config_cannot_name_another_weight_file(folder: Path) -> None:
    weights(lambda state: state["transformer.ln_f.weight"].add_(1), "other.safetensors")(folder)
    config(transformers_weights="other.safetensors")(folder)
    model: Any = load_model(folder, device="cpu", world="bridge")
    assert source_of(model).weights_sha256 == sha256_of_hashes(hashes([folder / "model.safetensors"]))
    assert torch.equal(model.ln_final.weight, torch.ones(32))


def test_more_weights_than_the_config_says_are_noted(folder: Path) -> None:
    weights(lambda state: state.update({"transformer.h.7.ln_1.weight": torch.ones(32)}))(folder)
    notes = source_of(load_model(folder, device="cpu")).notes
    assert "weights in the file that a GPT2LMHeadModel has no place for: transformer.h.7.ln_1.weight" in notes


def test_a_folder_that_brings_its_own_code_is_not_run(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\n")
    code = {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}
    config(model_type="own", auto_map=code)(folder)
    with pytest.raises(ValueError, match=r"needs custom Python code to run \(auto_map in config\.json"):
        load_model(folder)
    config(model_type="gpt2")(folder)  # a type that transformers knows is loaded with transformers' own class
    load_model(folder, device="cpu")
    assert not marker.exists()


# ----------------------------------------------------------------------------------------------------------- pickles


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "checkpoint.pth"])
def test_a_pickle_is_read_only_on_request(folder: Path, name: str) -> None:
    pickled(name=name)(folder)
    for other in ("optimizer.pt", "training_args.bin"):
        torch.save({"step": 3}, folder / other)
    expected = rf"holds its weights only as a pickle \({name}\)\. A pickle can run code .* allow_pickle=True"
    with pytest.raises(ValueError, match=expected):
        load_model(folder, device="cpu")
    source = source_of(load_model(folder, device="cpu", allow_pickle=True))
    assert source.weights_sha256 == sha256_of_hashes(hashes([folder / name]))
    assert source.logits_max_difference < 1e-5


def test_sharded_pickles(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    no_weights(folder)
    names = sorted(state)
    shards = {"pytorch_model-1.bin": names[:3], "pytorch_model-2.bin": names[3:]}
    for shard, part in shards.items():
        torch.save({name: state[name] for name in part}, folder / shard)
    weight_map = {name: shard for shard, part in shards.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    source = source_of(load_model(folder, device="cpu", allow_pickle=True))
    assert source.weights_sha256 == sha256_of_hashes(hashes([folder / shard for shard in shards]))


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize("writer", ["torch", "pickle"])
def test_a_pickle_cannot_run_code(folder: Path, writer: str) -> None:
    marker = folder / "ran"
    pickled(lambda state: state | {"extra": _Payload(marker)})(folder)
    if writer == "pickle":
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"extra": _Payload(marker)}))
    with pytest.raises(ValueError, match="was not read: it is corrupt, or holds more than tensors"):
        load_model(folder, device="cpu", allow_pickle=True)
    assert not marker.exists()


def test_safetensors_go_before_pickles(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    hash_of_safetensors = sha256_of_hashes(hashes([folder / "model.safetensors"]))
    assert source_of(load_model(folder, device="cpu")).weights_sha256 == hash_of_safetensors


# -------------------------------------------------------------------------------------------------------------- GGUF


def gguf(*values: tuple[str, int, bytes], tensors: int = 0, count: int | None = None, version: int = 3) -> bytes:
    """A GGUF header: names, types and bytes of values."""
    made = b"GGUF" + struct.pack("<IQQ", version, tensors, len(values) if count is None else count)
    for name, kind, content in values:
        made += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + content
    return made + b"\0" * 64


U32, STRING, ARRAY = 4, 8, 9
NO_GGUF = r"model\.gguf (could not be unpacked|is not a GGUF file)"


@pytest.mark.parametrize(("content", "said"), [
    *((content, NO_GGUF) for content in (b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64, b"PK\x03\x04 zip")),
    (gguf(("llama.block_count", U32, struct.pack("<I", 2**31))), "says llama.block_count = 2147483648"),
    (gguf(("llama.block_count", U32, struct.pack("<I", 40))), "the weights are 0 tensors"),
    (gguf(tensors=2**60), "it counts 1152921504606846976 tensors, in"),
    (gguf(count=2**60), "it counts 1152921504606846976 entries at byte 16"),
    (gguf(("a", STRING, struct.pack("<Q", 2**63))), "it counts 9223372036854775808 entries"),
    (gguf(("a", ARRAY, struct.pack("<IQ", U32, 2**40))), "it counts 1099511627776 entries"),
    (gguf(("a", ARRAY, struct.pack("<IQIQIQ", 9, 1, 9, 1, 9, 1))), "is of no type that there is"),
    (gguf(version=99), "its version is 99, known are 2, 3"),
    (gguf()[:10], "in the middle of its header"),
])  # fmt: skip
def test_c07_a_damaged_gguf_file(content: bytes, said: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(content)
    with soon(), pytest.raises(ValueError, match=said):
        load_model(tmp_path / "model.gguf")


def test_a_real_gguf_header_is_read(smollm2: Path) -> None:
    check_header(smollm2)


# ---------------------------------------------------------------------------------------------------------- lab runs


def test_c05_c07_lab_runs_that_cannot_be_loaded(tmp_path: Path) -> None:
    run = lab_model(tmp_path / "run")
    tensors = load_file(run / "model.safetensors")
    save_file(tensors, run / "model.safetensors")  # nothing says what it belonged to
    about = json.loads((run / "lab.json").read_text())["model"]
    for changes, said in (
        ({"n_layers": 10**9}, "n_layers must be a whole number between 1 and 10000, got 1000000000"),
        ({"n_layers": 9000}, r"says 9000 layers, and the weights are \d+ tensors"),
        ({"d_model": 2 * 10**6}, "does not fit .*lab.json: .* is of shape"),
        ({"d_vocab": 10**12}, "d_vocab must be a whole number between 1 and 16777216, got 1000000000000"),
        ({"n_layers": "many"}, "does not describe a lab model"),
    ):
        (run / "lab.json").write_text(json.dumps({"model": about | changes}))
        with soon(), pytest.raises(ValueError, match=said):
            load_model(run)
    (run / "lab.json").write_text(json.dumps({"model": about}))
    tensors["ln_final.w"][2] = float("nan")
    save_file(tensors, run / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: ln_final\.w holds 1 numbers that are NaN or infinite"):
        load_model(run)
