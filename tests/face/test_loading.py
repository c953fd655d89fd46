"""What `load_model` loads is the model that Hugging Face computes, in every class that takes it; others are refused."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import cases, hugging_face
from faulty import word_tokenizer
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.hooks.model import missing_head, ordinary_tokens
from ln_probe.loading import convert
from ln_probe.loading.convert import CLASS_OF_WORLD, has_hooked_transformer
from ln_probe.loading.source import sha256_of_files
from ln_probe.models import load_model, source_of

pytestmark = [pytest.mark.lens, pytest.mark.usefixtures("no_network")]

HAS_HOOKED = has_hooked_transformer()
needs_hooked = pytest.mark.skipif(not HAS_HOOKED, reason="this TransformerLens has no HookedTransformer")
WORLDS: list[Any] = ["hooked", "bridge"] if HAS_HOOKED else ["bridge"]
WIDE: dict[str, Any] = {"head_dim": 16}  # heads wider than d_model / heads
TOKENS = torch.randint(3, 50, (2, 30), generator=torch.Generator().manual_seed(7))
Change = Callable[[Path], object]  # what is done to a sound folder

# Options of architectures (tests/architectures.py) that decide how a model is converted.
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}
EITHER: dict[str, dict[str, Any]] = {
    "gpt2": {}, "neox": THETA, "neox-sequential": {}, "opt": {}, "neo": {"window_size": 8},
    "llama": {"rope_theta": 500.0}, "mistral": {}, "qwen2": {}, "qwen3": WIDE,
}  # fmt: skip
BRIDGED: dict[str, dict[str, Any]] = {  # those that HookedTransformer cannot hold
    "gpt2-narrow-mlp": {}, "neo": {"intermediate_size": 80}, "llama-wide-heads": {}, "llama-biases": {},
    "llama3-rope": {}, "gemma": WIDE, "gemma2": WIDE | {"num_key_value_heads": 2, "sliding_window": 8}, "olmo2": {},
    "bert": {},
}  # fmt: skip
CASES = [*((arch, options, WORLDS) for arch, options in EITHER.items()),
         *((arch, options, ["bridge"]) for arch, options in BRIDGED.items())]  # fmt: skip
QUICK = ("gpt2", "neox", "neo", "llama", "mistral", "qwen3", "gemma2", "bert")


def saved(folder: Path, architecture: str, **options: Any) -> Any:
    """A Hugging Face model, written to a folder."""
    model = hugging_face(architecture, **options)
    model.save_pretrained(folder)
    return model


def assert_faithful(model: Any) -> None:
    assert source_of(model).logits_max_difference < 1e-5


@pytest.mark.parametrize(
    ("architecture", "options", "worlds"),
    cases(*(case for case in CASES if case[0] in QUICK), slow=[case for case in CASES if case[0] not in QUICK]),
    ids=str,
)
def test_logits_are_those_of_hugging_face(
    architecture: str, options: dict[str, Any], worlds: list[Any], tmp_path: Path
) -> None:
    original = saved(tmp_path, architecture, **options)
    with torch.no_grad():
        expected = original(TOKENS).logits
    for world in worlds:
        model: Any = load_model(tmp_path, device="cpu", world=world)
        with torch.no_grad():
            logits = model(TOKENS, return_type="logits")
        # float32: 1e-5 of the largest logit (measured: 2.1e-6)
        assert float((logits - expected).abs().max()) < 1e-5 * float(expected.abs().max()), world
        assert source_of(model).world == CLASS_OF_WORLD[world]
        assert_faithful(model)
        assert not model.training
        assert model.tokenizer is None


@needs_hooked
@pytest.mark.parametrize("architecture", BRIDGED)
def test_hooked_transformer_is_refused_where_it_would_be_wrong(architecture: str, tmp_path: Path) -> None:
    saved(tmp_path, architecture, **BRIDGED[architecture])
    with pytest.raises(ValueError, match="HookedTransformer"):
        load_model(tmp_path, device="cpu", world="hooked")
    if architecture in ("gpt2-narrow-mlp", "gemma"):
        source = source_of(load_model(tmp_path, device="cpu"))
        assert source.world == "TransformerBridge"
        assert any(note.startswith("TransformerBridge, not HookedTransformer: ") for note in source.notes)


@pytest.mark.skipif(HAS_HOOKED, reason="this TransformerLens has HookedTransformer")
def test_hooked_transformer_is_refused_where_there_is_none(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    with pytest.raises(ValueError, match="no HookedTransformer"):
        load_model(tmp_path, device="cpu", world="hooked")


@pytest.mark.parametrize("world", WORLDS)
def test_a_wrong_conversion_is_refused(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the bridge takes the place of a wrong HookedTransformer, with a note."""
    right = getattr(convert, f"to_{world}")

    def wrong(*args: Any, **options: Any) -> Any:
        model: Any = right(*args, **options)
        next(p for n, p in model.named_parameters() if "ln_f" in n).data *= 1.001
        return model

    monkeypatch.setattr(convert, f"to_{world}", wrong)
    saved(tmp_path, "gpt2")
    with pytest.raises(ValueError, match="faithfully"):
        load_model(tmp_path, device="cpu", world=world)
    if world == "hooked":
        source = source_of(load_model(tmp_path, device="cpu"))
        assert source.world == "TransformerBridge"
        assert any("off the original's" in note for note in source.notes)


def test_several_end_tokens(tmp_path: Path) -> None:
    """Llama 3 Instruct: eos_token_id is a list."""
    original = saved(tmp_path, "llama", eos_token_id=[2, 5, 9], bos_token_id=1, pad_token_id=0)
    assert_faithful(load_model(tmp_path, device="cpu"))
    tokens = ordinary_tokens(original.config, torch.device("cpu"))
    assert not {0, 1, 2, 5, 9} & set(tokens[0].tolist())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_formats(dtype: Any, tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    for world in WORLDS:
        model: Any = load_model(tmp_path, device="cpu", dtype=dtype, world=world)
        assert source_of(model).dtype == dtype
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
        assert source_of(model).logits_max_difference is not None


def test_sharded_weights(tmp_path: Path) -> None:
    hugging_face("gpt2").save_pretrained(tmp_path, max_shard_size="40KB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    model = load_model(tmp_path, device="cpu")
    assert source_of(model).weights_sha256 == sha256_of_files(shards)
    assert_faithful(model)
    shards[0].unlink()
    with pytest.raises(FileNotFoundError, match=shards[0].name):
        load_model(tmp_path, device="cpu")


def test_a_head_that_is_not_in_the_folder_makes_logits_meaningless(tmp_path: Path) -> None:
    """Drawn at random (BertModel), or the embedding in its place (a classifier); a tied head is in the folder."""
    transformers.BertModel(hugging_face("bert").config, add_pooling_layer=False).save_pretrained(tmp_path / "body")
    transformers.GPT2ForSequenceClassification(hugging_face("gpt2").config).save_pretrained(tmp_path / "classifier")
    transformers.GPT2Model(hugging_face("gpt2").config).save_pretrained(tmp_path / "tied")
    before = torch.get_rng_state()
    first, second = (load_model(tmp_path / "body", device="cpu") for _ in range(2))
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers were used up"
    assert torch.equal(first(TOKENS), second(TOKENS)), "the random head differs between loads"
    for model in (first, load_model(tmp_path / "classifier", device="cpu")):
        (note,) = (n for n in source_of(model).notes if "meaningless" in n)
        assert missing_head(model) == note
    tied = source_of(load_model(tmp_path / "tied", device="cpu"))
    assert (tied.architecture, any("meaningless" in n for n in tied.notes)) == ("GPT2LMHeadModel", False)


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def file(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def entry(value: float) -> Change:
    return weights(lambda state: state["transformer.h.0.ln_1.weight"].__setitem__(3, value))


NO_MODEL = "do not make a GPT2LMHeadModel"


@pytest.mark.parametrize(("change", "error", "word"), [
    (file("config.json", '{"model_type": '), ValueError, "JSON"),
    (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, "config.json"),
    (config(n_head=5), ValueError, NO_MODEL),
    (config(n_embd=48), ValueError, NO_MODEL),
    (config(model_type="vit", architectures=["ViTForImageClassification"]), ValueError, "not supported"),
    (config(model_type="transmogrifier"), ValueError, "not supported"),
    (config(model_type="own", auto_map={"AutoConfig": "modeling.C"}), ValueError, "custom"),
    (config(quantization_config={"quant_method": "gptq"}), ValueError, "quantized"),
    (file("adapter_config.json", "{}"), ValueError, "adapter"),
    (lambda folder: os.truncate(folder / "model.safetensors", 0), ValueError, NO_MODEL),
    (lambda folder: os.truncate(folder / "model.safetensors", 9999), ValueError, NO_MODEL),
    (entry(float("nan")), ValueError, r"ln_1\.weight"),
    (entry(float("inf")), ValueError, r"ln_1\.weight"),
    (weights(lambda state: state.pop("transformer.h.0.attn.c_attn.weight")), ValueError, "lacks"),
    (lambda folder: (folder / "model.safetensors").unlink(), FileNotFoundError, "weights"),
    (file("pytorch_model.bin.index.json", "{}"), None, ""),  # safetensors go first
    (lambda folder: (folder / "model.safetensors").rename(folder / "model.safetensors.index.json"), ValueError, "JSON"),
])  # fmt: skip
def test_a_broken_folder_is_one_clear_error(folder: Path, change: Change, error: Any, word: str) -> None:
    change(folder)
    if error is None:
        assert_faithful(load_model(folder, device="cpu"))
        return
    with pytest.raises(error, match=word) as raised:
        load_model(folder, device="cpu")
    assert str(raised.value).count("\n") <= 1
    assert not str(raised.value).endswith("None")


def test_a_format_that_overflows_is_refused(folder: Path) -> None:
    weights(lambda state: state["transformer.ln_f.weight"].mul_(6e4))(folder)
    with pytest.raises(ValueError, match="finite"):
        load_model(folder, device="cpu", dtype="float16")


def test_a_folder_that_brings_its_own_code_is_not_run(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config(auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"})(folder)
    load_model(folder, device="cpu")  # a type that transformers knows is loaded with transformers' own class
    assert not marker.exists()


def test_more_weights_than_the_config_says_are_noted(folder: Path) -> None:
    weights(lambda state: state.update({"transformer.h.7.ln_1.weight": torch.ones(32)}))(folder)
    assert any("transformer.h.7.ln_1.weight" in note for note in source_of(load_model(folder, device="cpu")).notes)


class _Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


def test_a_pickle_is_read_on_request_and_runs_no_code(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    path, marker = folder / "pytorch_model.bin", folder / "ran"
    torch.save(state, path)
    with pytest.raises(ValueError, match="allow_pickle"):
        load_model(folder, device="cpu")
    model = load_model(folder, device="cpu", allow_pickle=True)
    assert source_of(model).weights_sha256 == sha256_of_files([path])
    assert_faithful(model)
    torch.save(state | {"extra": _Payload(marker)}, path)
    for content in (path.read_bytes(), pickle.dumps({"extra": _Payload(marker)})):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=NO_MODEL):
            load_model(folder, device="cpu", allow_pickle=True)
        assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_a_damaged_gguf_file(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="unpacked"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(("options", "word"), [
    ({"dtype": "int8"}, "float64"),
    ({"dtype": ""}, "float64"),
    ({"allow_pickle": "no"}, "allow_pickle"),
    ({"device": "gpu"}, "'gpu'"),
    ({"device": "cuda:99"}, "'cuda:99'"),
    ({"device": "meta"}, "not there"),
    ({"world": "lab"}, "lab runs"),
    ({"world": "hooks"}, "'bridge'"),
    ({"revision": "step1000"}, "revisions"),
])  # fmt: skip
def test_options(folder: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises((ValueError, TypeError), match=word):
        load_model(folder, **({"device": "cpu"} | options))


@pytest.mark.parametrize(("name", "error", "word"), [
    *((path, FileNotFoundError, "exist") for path in ("./nowhere", "/nowhere/at/all", "~/nowhere", "a/b/c", "m.gguf")),
    *((name, ValueError, "no model") for name in ("nul\0byte", "né", "-rf", "a b", "x" * 5000)),
    ("", ValueError, "empty"),
    (None, TypeError, "None"),
    (torch.nn.Linear(1, 1), TypeError, "Linear"),
    (Path(__file__), ValueError, "gguf"),
], ids=ascii)  # fmt: skip
def test_a_name_that_is_no_model(name: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        load_model(name)
    with pytest.raises(ValueError, match="another"):
        load_model("lm-layernorm@1000", revision=500)


def test_what_is_recorded_and_that_the_process_is_left_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def process() -> list[Any]:
        logs = list(logging.getLogger().handlers), logging.root.manager.disable, list(warnings.filters)
        return [dict(os.environ), constants.HF_HUB_OFFLINE, logs, os.getcwd(), torch.get_rng_state().tolist()]

    before = process()
    model = load_model(folder, device="cpu")
    assert process() == before
    assert capsys.readouterr() == ("", "")
    source = source_of(model)
    assert (source.name, source.kind, source.revision, source.commit) == (str(folder), "folder", None, None)
    assert source.weights_sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (source.architecture, source.dtype) == ("GPT2LMHeadModel", "float32")
    assert any("no tokenizer" in note for note in source.notes)


def test_a_model_we_did_not_load_is_described_from_its_structure() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).bfloat16()
    source = source_of(model)
    assert (source.name, source.kind, source.world, source.dtype) == ("Sequential", "object", "Sequential", "bfloat16")
    assert source.logits_max_difference is None
    assert source_of(model).weights_sha256 == source.weights_sha256
    with torch.no_grad():
        model[0].bias[0] += 1
    assert source_of(model).weights_sha256 != source.weights_sha256
    with pytest.raises(TypeError, match="Linear"):
        source_of(torch.nn.Linear)  # type: ignore[arg-type]


def test_the_hash_of_several_files_is_that_of_their_sha256sum_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"abc")
    # sha256sum a b | sha256sum
    expected = "bf6e2103d6cbead28abb7d3fec372bc25d03a35b1647e83e090248eb08d0adae"
    assert sha256_of_files([tmp_path / "b", tmp_path / "a"]) == expected
    assert sha256_of_files([tmp_path / "a"]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_lab_run_is_loaded_by_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[Path, int | None]] = []

    def load_run(path: Path, step: int | None) -> torch.nn.Module:
        requests.append((path, step))
        return LabConfig(n_layers=1, d_model=4, n_heads=1, d_vocab=5, n_ctx=4, norm_order="post").build()

    monkeypatch.setattr("ln_probe.analyses.lab.train.load_run", load_run)
    (tmp_path / "lab.json").write_text("{}")
    source = source_of(load_model(tmp_path, device="cpu", dtype="float64"))
    assert (source.kind, source.world, source.dtype, source.revision) == ("lab", "lab", "float64", None)
    assert source_of(load_model(f"{tmp_path}@step40", device="cpu")).revision == "step40"
    load_model(tmp_path, device="cpu", revision=7)
    assert requests == [(tmp_path, None), (tmp_path, 40), (tmp_path, 7)]
    with pytest.raises(ValueError, match="training step"):
        load_model(tmp_path, device="cpu", revision="main")
    with pytest.raises(ValueError, match="as it was trained"):
        load_model(tmp_path, device="cpu", world="bridge")


@pytest.mark.parametrize("world", [None, "bridge"])
def test_a_tokenizer_without_marks_gets_none_that_the_model_does_not_know(folder: Path, world: Any) -> None:
    word_tokenizer([f"w{i}" for i in range(50)], marks=False).save_pretrained(folder)
    model: Any = load_model(folder, device="cpu", world=world)
    assert any("no begin or end mark" in note for note in source_of(model).notes)
    assert model.to_tokens("w3 w4").tolist() == [[3, 4]]
    tokens = model.to_tokens(["w3 w4", "w5"])
    assert tokens.max() < 50
    assert torch.isfinite(model(tokens, return_type="logits")).all()


def test_tokenizers_that_do_not_fit_or_cannot_be_read_are_noted(folder: Path) -> None:
    word_tokenizer(["?", "<s>", "</s>", *(f"w{i}" for i in range(60))]).save_pretrained(folder)
    model: Any = load_model(folder, device="cpu")
    assert model.tokenizer.name_or_path == str(folder)
    assert model.to_tokens("w0 w1 w2", prepend_bos=False).tolist()[0][-3:] == [3, 4, 5]
    (folder / "tokenizer.json").write_text("{")
    model = load_model(folder, device="cpu")
    assert model.tokenizer is None
    assert any("could not be read" in note for note in source_of(model).notes)


def test_a_real_pickled_checkpoint(mgm: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        load_model(mgm, device="cpu")
    for world in WORLDS:
        assert_faithful(load_model(mgm, device="cpu", allow_pickle=True, world=world))


@pytest.mark.slow
def test_a_real_gguf_file(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = load_model(smollm2, device="cpu")
    source = source_of(model)
    assert (source.kind, source.architecture) == ("gguf", "LlamaForCausalLM")
    assert_faithful(model)
    logits = model("The capital of France is", return_type="logits")
    assert model.tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert capsys.readouterr() == ("", "")
