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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import ln_probe
from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.hooks.model import context_of_config, facts_of
from ln_probe.loading import convert, pretrained
from ln_probe.loading.convert import CLASS_OF_WORLD, has_hooked_transformer
from ln_probe.loading.source import sha256_of_files
from ln_probe.models import device_named, load_model, source_of

pytestmark = [pytest.mark.lens, pytest.mark.usefixtures("no_network")]

WORLDS: list[Any] = ["hooked", "bridge"] if has_hooked_transformer() else ["bridge"]
BRIDGE: list[Any] = ["bridge"]  # HookedTransformer cannot hold these
WIDE: dict[str, Any] = {"head_dim": 16}  # heads wider than d_model / heads
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}
TOKENS = torch.randint(3, 50, (2, 30), generator=torch.Generator().manual_seed(7))
NO_MODEL = "do not make a GPT2LMHeadModel"
Change = Callable[[Path], object]  # what is done to a sound folder


def assert_faithful(model: Any) -> None:
    assert source_of(model).logits_max_difference < 1e-5


# Architectures (tests/architectures.py) with the options that decide how a model is converted.
@pytest.mark.parametrize(("architecture", "options", "worlds"), cases(
    ("gpt2", {}, WORLDS),
    ("neox", THETA, WORLDS),
    ("neo", {"window_size": 8}, WORLDS),
    ("llama", {"rope_theta": 500.0, "eos_token_id": [2, 5, 9]}, WORLDS),  # Llama 3 Instruct: a list
    ("mistral", {}, WORLDS),
    ("qwen3", WIDE, WORLDS),
    ("neo", {"intermediate_size": 80}, BRIDGE),
    ("gpt2-narrow-mlp", {}, BRIDGE),
    ("llama3-rope", {}, BRIDGE),
    ("gemma2", WIDE | {"num_key_value_heads": 2, "sliding_window": 8}, BRIDGE),
    ("bert", {}, BRIDGE),
    slow=[
        *((name, {}, WORLDS) for name in ("neox-sequential", "opt", "qwen2")),
        *((name, {}, BRIDGE) for name in ("llama-wide-heads", "llama-biases", "olmo2")),
        ("gemma", WIDE, BRIDGE),
    ],
), ids=str)  # fmt: skip
def test_logits_are_those_of_hugging_face(
    architecture: str, options: dict[str, Any], worlds: list[Any], tmp_path: Path
) -> None:
    original = hugging_face(architecture, **options)
    original.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = original(TOKENS).logits
    for world in [*worlds, None]:
        model: Any = load_model(tmp_path, device="cpu", world=world)
        with torch.no_grad():
            logits = model(TOKENS, return_type="logits")
        # float32: 1e-5 of the largest logit (measured: 2.1e-6)
        assert float((logits - expected).abs().max()) < 1e-5 * float(expected.abs().max()), world
        assert source_of(model).world == CLASS_OF_WORLD[world or worlds[0]]
        assert_faithful(model)
        assert (model.training, model.tokenizer) == (False, None)
        assert facts_of(model).context == context_of_config(original.config)
    assert any("not HookedTransformer" in n for n in source_of(model).notes) == (worlds != WORLDS)
    if "hooked" not in worlds:
        with pytest.raises(ValueError, match="HookedTransformer"):
            load_model(tmp_path, device="cpu", world="hooked")


@pytest.mark.parametrize("world", WORLDS)
def test_a_wrong_conversion_is_refused(world: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the bridge takes the place of a wrong HookedTransformer, with a note."""
    right = getattr(convert, f"to_{world}")

    def wrong(*args: Any, **options: Any) -> Any:
        model: Any = right(*args, **options)
        next(p for n, p in model.named_parameters() if "ln_f" in n).data *= 1.001
        return model

    monkeypatch.setattr(convert, f"to_{world}", wrong)
    with pytest.raises(ValueError, match="faithfully"):
        load_model(folder, device="cpu", world=world)
    if world == "hooked":
        source = source_of(load_model(folder, device="cpu"))
        assert source.world == "TransformerBridge"
        assert any("off the original's" in note for note in source.notes)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_formats(dtype: Any, folder: Path) -> None:
    for world in WORLDS:
        model: Any = load_model(folder, device="cpu", dtype=dtype, world=world)
        assert source_of(model).dtype == dtype
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


def config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def file(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def weights(edit: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def change(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def entry(name: str, value: float) -> Change:
    return weights(lambda state: state[name].__setitem__(3, value))


def other_class(name: str, architecture: str, **options: Any) -> Change:
    model = getattr(transformers, name)
    return lambda folder: model(hugging_face(architecture).config, **options).save_pretrained(folder)


def pickled(write: Callable[..., object], *, harmful: bool = True) -> Change:
    def change(folder: Path) -> None:
        class Payload:
            def __reduce__(self) -> tuple[Any, ...]:
                return (open, (str(folder / "ran"), "w"))

        state: dict[str, Any] = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        with (folder / "pytorch_model.bin").open("wb") as out:
            write(state | {"extra": Payload()} if harmful else state, out)

    return change


def own_code(folder: Path) -> None:
    """Of a type that transformers knows, and loads with its own class."""
    (folder / "modeling.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    config(auto_map={"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"})(folder)


def empty_tokenizer(folder: Path) -> None:
    Tokenizer(WordLevel({}, unk_token="?")).save(str(folder / "tokenizer.json"))
    file("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}')(folder)


def in_shards(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="40KB")


QKV, GAIN, INDEX = "transformer.h.0.attn.c_attn.weight", "transformer.h.0.ln_1.weight", "model.safetensors.index.json"
READ = {"allow_pickle": True}


@pytest.mark.parametrize(("change", "options", "error", "word"), [
    (file("config.json", '{"model_type": '), {}, ValueError, "JSON"),
    (without("config.json"), {}, FileNotFoundError, "config.json"),
    (config(n_head=5), {}, ValueError, NO_MODEL),
    (config(n_embd=48), {}, ValueError, NO_MODEL),
    (config(model_type="vit", architectures=["ViTForImageClassification"]), {}, ValueError, "not supported"),
    (config(model_type="transmogrifier"), {}, ValueError, "not supported"),
    (config(model_type="own", auto_map={"AutoConfig": "modeling.C"}), {}, ValueError, "custom"),
    (config(quantization_config={"quant_method": "gptq"}), {}, ValueError, "quantized"),
    (file("adapter_config.json", "{}"), {}, ValueError, "adapter"),
    (lambda folder: os.truncate(folder / "model.safetensors", 0), {}, ValueError, NO_MODEL),
    (lambda folder: os.truncate(folder / "model.safetensors", 9999), {}, ValueError, NO_MODEL),
    (entry(GAIN, float("nan")), {}, ValueError, r"ln_1\.weight"),
    (entry(GAIN, float("inf")), {}, ValueError, r"ln_1\.weight"),
    (entry("transformer.ln_f.weight", 6e4), {"dtype": "float16"}, ValueError, "finite"),
    (weights(lambda state: state.pop(QKV)), {}, ValueError, "lacks"),
    (without("model.safetensors"), {}, FileNotFoundError, "weights"),
    (lambda folder: (folder / "model.safetensors").rename(folder / INDEX), {}, ValueError, "JSON"),
    (lambda folder: (in_shards(folder), next(folder.glob("model-00001*")).unlink()), {}, FileNotFoundError, "00001"),
    (pickled(torch.save, harmful=False), {}, ValueError, "allow_pickle"),
    (pickled(torch.save), READ, ValueError, NO_MODEL),
    (pickled(pickle.dump), READ, ValueError, NO_MODEL),
    # What is loaded has a note.
    (pickled(torch.save, harmful=False), READ, None, "no tokenizer"),
    (in_shards, {}, None, "no tokenizer"),
    (file("pytorch_model.bin.index.json", "{}"), {}, None, "no tokenizer"),  # safetensors go first
    (file("tokenizer.json", "{"), {}, None, "could not be read"),
    (empty_tokenizer, {}, None, "no entries"),
    (own_code, {}, None, "no tokenizer"),
    (weights(lambda state: state.update({"h.7.ln_1.weight": torch.ones(32)})), {}, None, "h.7.ln_1.weight"),
    (other_class("BertModel", "bert", add_pooling_layer=False), {}, None, "meaningless"),  # a head drawn at random
    (other_class("GPT2ForSequenceClassification", "gpt2"), {}, None, "meaningless"),  # the embedding in its place
    (other_class("GPT2Model", "gpt2"), {}, None, "loaded as GPT2LMHeadModel"),  # which is tied
    (config(architectures=[]), {}, None, "loaded as GPT2LMHeadModel"),
])  # fmt: skip
def test_a_folder_is_loaded_faithfully_or_refused_in_a_line(
    folder: Path, change: Change, options: Any, error: Any, word: str
) -> None:
    change(folder)
    if error is not None:
        with pytest.raises(error, match=word) as raised:
            load_model(folder, device="cpu", **options)
        assert str(raised.value).count("\n") <= 1
    else:
        before = torch.get_rng_state()
        first, second = (load_model(folder, device="cpu", **options) for _ in range(2))
        assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers were used up"
        assert torch.equal(first(TOKENS), second(TOKENS)), "a head drawn at random differs between loads"
        assert_faithful(first)
        source = source_of(first)
        assert source.weights_sha256 == sha256_of_files([*folder.glob("*model*.safetensors"), *folder.glob("*.bin")])
        (note,) = (note for note in source.notes if word in note)
        assert facts_of(first).missing_head == (note if word == "meaningless" else "")
        report = ln_probe.analyze(first, TOKENS, probes=["decomposition"], progress=False)
        of_head = [note for note in report.notes if "it belongs to the head" in note]
        assert bool(of_head) == hasattr(getattr(first, "original_model", None), "bert")
        measured = set(report.layernorms["site"])
        assert ("blocks.0.ln1" in measured, "ln_final" in measured) == (True, not of_head)
    assert not (folder / "ran").exists(), "code that came with the model was run"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("marks", "note"), [(["?", "<s>", "</s>"], ""), ([], "no begin or end mark")])
def test_no_text_has_a_token_that_the_model_does_not_know(
    folder: Path, world: Any, marks: list[str], note: str
) -> None:
    """With more words than the embedding has rows, and without marks, for which TransformerLens invents one."""
    word_tokenizer([*marks, *map(str, range(60 if marks else 50))], marks=bool(marks)).save_pretrained(folder)
    model: Any = load_model(folder, device="cpu", world=world)
    assert note in " ".join(source_of(model).notes)
    assert model.tokenizer.name_or_path == str(folder)
    assert model.to_tokens("0 1 2", prepend_bos=False).tolist()[0][-3:] == [len(marks) + i for i in range(3)]
    tokens = model.to_tokens(["3 4", "5"])
    assert tokens.max() < 50
    assert tokens.shape[1] - 2 in ((1, 2) if marks else (0,))
    assert torch.isfinite(model(tokens, return_type="logits")).all()


@pytest.mark.parametrize("content", [b"", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_a_damaged_gguf_file(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="unpacked") as raised:
        load_model(tmp_path / "model.gguf")
    assert str(raised.value).count(str(tmp_path)) == 1


def test_a_gguf_file_without_some_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(*_: Any, output_loading_info: bool = False, **more: Any) -> Any:
        return (model, {"missing_keys": {"w"}}) if output_loading_info else model

    model = hugging_face("gpt2")
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", unpacked)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match="lacks"):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize(("name", "options", "error", "word"), [
    *((path, {}, FileNotFoundError, "exist") for path in ("./nowhere", "/nowhere/at/all", "~/no", "a/b/c", "m.gguf")),
    *((name, {}, ValueError, "no model") for name in ("nul\0byte", "né", "-rf", "a b", "x" * 5000)),
    ("", {}, ValueError, "empty"),
    (None, {}, TypeError, "got None"),
    (torch.nn.Linear(1, 1), {}, TypeError, "Linear"),
    (Path(__file__), {}, ValueError, "gguf"),
    ("lm-layernorm@1000", {"revision": 500}, ValueError, "another"),
    ("folder", {"dtype": "int8"}, ValueError, "float64"),
    ("folder", {"dtype": ""}, ValueError, "float64"),
    ("folder", {"allow_pickle": "no"}, TypeError, "allow_pickle"),
    ("folder", {"device": "gpu"}, ValueError, "'gpu'"),
    ("folder", {"device": "cuda:99"}, ValueError, "'cuda:99'"),
    ("folder", {"device": "meta"}, ValueError, "not there"),
    ("folder", {"device": "cpu:1"}, ValueError, "not there"),
    ("folder", {"world": "lab"}, ValueError, "lab runs"),
    ("folder", {"world": "hooks"}, ValueError, "'bridge'"),
    ("folder", {"revision": "step1000"}, ValueError, "revisions"),
    *((("folder", {"world": "hooked"}, ValueError, "no HookedTransformer"),) if "hooked" not in WORLDS else ()),
], ids=ascii)  # fmt: skip
def test_bad_names_and_options(
    folder: Path, name: Any, options: dict[str, Any], error: type[Exception], word: str
) -> None:
    with pytest.raises(error, match=word):
        load_model(folder if name == "folder" else name, **options)


def test_what_is_recorded_and_that_the_process_is_left_as_it_was(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def process() -> list[Any]:
        logs = list(logging.getLogger().handlers), logging.root.manager.disable, list(warnings.filters)
        return [dict(os.environ), constants.HF_HUB_OFFLINE, logs, os.getcwd(), torch.get_rng_state().tolist()]

    before = process()
    model = load_model(folder, device="cpu")
    with pretrained.isolated():
        assert constants.HF_HUB_OFFLINE
        assert not logging.getLogger("transformers").isEnabledFor(logging.WARNING)
        logging.getLogger().addHandler(logging.NullHandler())
        print("heard by nobody")
    assert process() == before
    assert capsys.readouterr() == ("", "")
    source = source_of(model)
    assert (source.name, source.kind, source.revision, source.commit) == (str(folder), "folder", None, None)
    assert source.weights_sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert (source.architecture, source.dtype) == ("GPT2LMHeadModel", "float32")


def test_a_model_we_did_not_load_is_described_from_its_structure() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).bfloat16()
    source = source_of(model)
    assert (source.name, source.kind, source.world, source.dtype) == ("Sequential", "object", "Sequential", "bfloat16")
    assert source.logits_max_difference is None
    lines = ""
    for name, tensor in sorted(model.state_dict().items()):
        digest = hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()
        lines += f"{name} torch.bfloat16 {tuple(tensor.shape)} {digest}\n"
    assert source.weights_sha256 == hashlib.sha256(lines.encode()).hexdigest()
    with pytest.raises(TypeError, match="Linear"):
        source_of(torch.nn.Linear)  # type: ignore[arg-type]


def test_the_hash_of_several_files_is_that_of_their_sha256sum_lines(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").write_bytes(b"abc")
    # sha256sum a b | sha256sum, and sha256sum a
    two = "bf6e2103d6cbead28abb7d3fec372bc25d03a35b1647e83e090248eb08d0adae"
    assert sha256_of_files([tmp_path / "b", tmp_path / "a"]) == two
    assert sha256_of_files([tmp_path / "a"]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_lab_run_is_loaded_by_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[Path, int | None]] = []

    def load_run(path: Path, step: int | None) -> torch.nn.Module:
        requests.append((path, step))
        return LabConfig(n_layers=1, d_model=4, n_heads=1, d_vocab=5, n_ctx=4, norm_order="post").build()

    monkeypatch.setattr("ln_probe.analyses.lab.train.load_run", load_run)
    (tmp_path / "lab.json").write_text("{}")
    source = source_of(load_model(tmp_path, device="cpu", dtype=torch.float64))
    assert (source.kind, source.world, source.dtype, source.revision) == ("lab", "lab", "float64", None)
    assert source_of(load_model(f"{tmp_path}@step40", device="cpu")).revision == "step40"
    load_model(tmp_path, device="cpu", revision=7)
    assert requests == [(tmp_path, None), (tmp_path, 40), (tmp_path, 7)]
    for options, word in (({"revision": "main"}, "training step"), ({"world": "bridge"}, "as it was trained")):
        with pytest.raises(ValueError, match=word):
            load_model(tmp_path, device="cpu", **options)


def test_a_real_pickled_checkpoint(mgm: Path) -> None:
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


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one GPU: it is the default, and there is no second."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = (None, "cpu", "cuda", "cuda:0", torch.device("cpu"))
    assert [str(device_named(name)) for name in names] == ["cuda", "cpu", "cuda", "cuda:0", "cpu"]
    with pytest.raises(ValueError, match="cuda:1"):
        device_named("cuda:1")
