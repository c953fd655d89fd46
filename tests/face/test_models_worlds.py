"""Every architecture, in every world that takes it, is the model that Hugging Face computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

import ln_probe
from ln_probe.hooks.objective import Objective
from ln_probe.loading import verify
from ln_probe.models import load_model, source_of

try:
    from transformer_lens import HookedTransformer  # noqa: F401

    HAS_HOOKED = True
except ImportError:
    HAS_HOOKED = False

needs_hooked = pytest.mark.skipif(not HAS_HOOKED, reason="this TransformerLens has no HookedTransformer")

SMALL = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "vocab_size": 97}
NEO = {
    "hidden_size": 32,
    "num_heads": 4,
    "num_layers": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 8,
}
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name: (config class, its arguments, whether HookedTransformer can hold it)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt2": ("GPT2Config", GPT2, True),
    "gpt2_n_inner": ("GPT2Config", GPT2 | {"n_inner": 48}, False),
    "neox": ("GPTNeoXConfig", SMALL | {"rotary_pct": 0.25}, True),
    "neox_theta": (
        "GPTNeoXConfig",
        SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}},
        True,
    ),
    "neox_sequential": ("GPTNeoXConfig", SMALL | {"use_parallel_residual": False}, True),
    "neox_no_attention_bias": ("GPTNeoXConfig", SMALL | {"attention_bias": False}, True),
    "opt": ("OPTConfig", SMALL | OPT, True),
    "gpt_neo": ("GPTNeoConfig", NEO, True),
    "gpt_neo_intermediate": ("GPTNeoConfig", NEO | {"intermediate_size": 80}, False),
    "llama_gqa": ("LlamaConfig", SMALL | {"num_key_value_heads": 2, "rope_theta": 500.0}, True),
    "llama_head_dim": ("LlamaConfig", SMALL | {"head_dim": 16}, False),
    "llama_bias": ("LlamaConfig", SMALL | {"attention_bias": True, "mlp_bias": True}, False),
    "llama_rope_scaling": ("LlamaConfig", SMALL | {"rope_parameters": LLAMA3_ROPE}, False),
    "mistral_window": ("MistralConfig", SMALL | {"num_key_value_heads": 2, "sliding_window": 8}, True),
    "qwen2": ("Qwen2Config", SMALL | {"num_key_value_heads": 2}, True),
    "qwen3": ("Qwen3Config", SMALL | {"num_key_value_heads": 2, "head_dim": 16}, True),
    "gemma": ("GemmaConfig", SMALL | {"num_key_value_heads": 1, "head_dim": 16}, False),
    "gemma2": (
        "Gemma2Config",
        SMALL | {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
        False,
    ),
    "olmo2": ("Olmo2Config", SMALL, False),
    "bert": ("BertConfig", SMALL, False),
}


def write_folder(
    folder: Path, config_class: str, options: dict[str, Any], *, std: float = 0.3, **how: Any
) -> transformers.PreTrainedModel:
    """Write a Hugging Face folder with random weights, biases and gains; return the model itself."""
    config = getattr(transformers, config_class)(**options)
    config._attn_implementation = "eager"  # the other kernels leave soft caps out in transformers' earlier versions
    mapping = MODEL_FOR_MASKED_LM_MAPPING if config.model_type == "bert" else MODEL_FOR_CAUSAL_LM_MAPPING
    torch.manual_seed(0)
    model = mapping[type(config)](config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, std=std)
        if parameter.dim() == 1 and name.endswith("weight") and "gemma" not in config.model_type:
            parameter.data += 1
    model.save_pretrained(folder, **how)
    return model


def worlds_of(case: str) -> list[str]:
    return ["hooked", "bridge"] if CASES[case][2] and HAS_HOOKED else ["bridge"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a local model asked for the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_hugging_face(case: str, tmp_path: Path) -> None:
    config_class, options, _ = CASES[case]
    original = write_folder(tmp_path, config_class, options)
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = original(tokens).logits
    for world in worlds_of(case):
        model = load_model(tmp_path, device="cpu", world=world)
        with torch.no_grad():
            logits = model(tokens, return_type="logits")
        # float32: 1e-5 of the largest logit (measured: 2.1e-6)
        assert float((logits - expected).abs().max()) < 1e-5 * float(expected.abs().max()), world
        source = source_of(model)
        assert source.world == {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}[world]
        assert source.logits_max_difference is not None
        assert source.logits_max_difference < 1e-5
        assert not model.training
        assert model.tokenizer is None


@needs_hooked
@pytest.mark.parametrize("case", [case for case, (_, _, hooked) in CASES.items() if not hooked])
def test_hooked_transformer_is_refused_where_it_would_be_wrong(case: str, tmp_path: Path) -> None:
    config_class, options, _ = CASES[case]
    write_folder(tmp_path, config_class, options)
    with pytest.raises(ValueError, match=r"cannot be a HookedTransformer: .* Use world='bridge'\."):
        load_model(tmp_path, device="cpu", world="hooked")
    source = source_of(load_model(tmp_path, device="cpu"))
    assert source.world == "TransformerBridge"
    assert any(note.startswith("TransformerBridge, not HookedTransformer: ") for note in source.notes)


@pytest.mark.skipif(HAS_HOOKED, reason="this TransformerLens has HookedTransformer")
def test_hooked_transformer_is_refused_where_there_is_none(tmp_path: Path) -> None:
    write_folder(tmp_path, "GPT2Config", GPT2)
    with pytest.raises(ValueError, match="this version of TransformerLens has no HookedTransformer"):
        load_model(tmp_path, device="cpu", world="hooked")


@needs_hooked
@pytest.mark.parametrize("trap", ["llama-7b", "gemma-2-9b", "bert", "t5", "Mixed Llama Folder"])
def test_a_folders_name_does_not_decide_what_is_loaded(trap: str, tmp_path: Path) -> None:
    folder = tmp_path / trap / "gpt2"
    write_folder(folder, "GPT2Config", GPT2)
    source = source_of(load_model(folder, device="cpu"))
    assert (source.world, source.architecture) == ("HookedTransformer", "GPT2LMHeadModel")


@needs_hooked
def test_a_temporary_folder_with_a_loaded_name_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    elsewhere = tmp_path / "bert" / "llama"
    elsewhere.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    write_folder(tmp_path / "model", "GPT2Config", GPT2)
    assert source_of(load_model(tmp_path / "model", device="cpu", world="hooked")).world == "HookedTransformer"


@needs_hooked
def test_a_wrong_conversion_falls_back_to_the_bridge_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = verify.to_hooked

    def wrong(*args: Any, **options: Any) -> Any:
        model: Any = right(*args, **options)
        model.ln_final.w.data *= 1.001
        return model

    monkeypatch.setattr(verify, "to_hooked", wrong)
    write_folder(tmp_path, "GPT2Config", GPT2)
    source = source_of(load_model(tmp_path, device="cpu"))
    assert source.world == "TransformerBridge"
    assert any("of the largest off the original's (bound 1e-05)" in note for note in source.notes)
    with pytest.raises(ValueError, match="could not be loaded faithfully as HookedTransformer"):
        load_model(tmp_path, device="cpu", world="hooked")


ALL_PROCESSING = {
    "fold_ln": True,
    "center_writing_weights": True,
    "center_unembed": True,
    "fold_value_biases": True,
}


@pytest.mark.parametrize(
    "case",
    [
        *("gpt2", "neox", "llama_gqa", "gemma"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("opt", "gpt_neo", "qwen3", "gemma2")),
    ],
)
def test_a_folded_model_has_the_log_probabilities_of_the_raw_one(case: str, tmp_path: Path) -> None:
    config_class, options, _ = CASES[case]
    original = write_folder(tmp_path, config_class, options)
    tokens = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = original(tokens).logits.log_softmax(-1)
    everything = dict(ALL_PROCESSING)
    if case not in ("gpt2", "neox", "opt", "gpt_neo"):
        del everything["center_writing_weights"]
        with pytest.raises(ValueError, match=r"center_writing_weights is for LayerNorm, .* is 'RMS'"):
            load_model(tmp_path, device="cpu", center_writing_weights=True)
    for world in worlds_of(case):
        for flags in ({"fold_ln": True}, everything):
            model = load_model(tmp_path, device="cpu", world=world, **flags)
            with torch.no_grad():
                logits = model(tokens, return_type="logits").log_softmax(-1)
            assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max()), (world, flags)
            assert source_of(model).processing == tuple(flags)
            if case == "gpt2":
                assert _gain_is_folded(model)


def _gain_is_folded(model: Any) -> bool:
    norm = model.blocks[0].ln1
    return type(norm).__name__ == "LayerNormPre" or bool(torch.allclose(norm.weight, torch.ones(())))


@pytest.mark.parametrize("world", ["hooked", "bridge"] if HAS_HOOKED else ["bridge"])
def test_a_fold_that_changes_the_model_is_refused(world: str, tmp_path: Path) -> None:
    """An MLP as wide as the residual stream: TransformerLens guesses which way round its matrix stands."""
    write_folder(tmp_path, "OPTConfig", SMALL | OPT | {"ffn_dim": 32})
    load_model(tmp_path, device="cpu", world=world)
    try:
        source = source_of(load_model(tmp_path, device="cpu", world=world, fold_ln=True))
    except ValueError as error:
        message = str(error)
        assert "after fold_ln the model is no longer the same" in message
        assert "Load it without" in message
    else:  # a TransformerLens that folds it rightly is welcome
        assert any("agree to" in note for note in source.notes)


def test_norms_that_are_not_folded_are_said_to_be_so(tmp_path: Path) -> None:
    write_folder(tmp_path, "Olmo2Config", SMALL)
    source = source_of(load_model(tmp_path, device="cpu", fold_ln=True))
    assert "fold_ln changed nothing: not done for this architecture" in source.notes


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["gpt2", "neox", "llama_gqa"])
def test_other_formats(case: str, dtype: str, tmp_path: Path) -> None:
    config_class, options, _ = CASES[case]
    write_folder(tmp_path, config_class, options)
    for world in worlds_of(case):
        model = load_model(tmp_path, device="cpu", dtype=dtype, world=world)
        source = source_of(model)
        assert source.dtype == dtype
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
        assert source.logits_max_difference is not None


def test_sharded_safetensors(tmp_path: Path) -> None:
    write_folder(tmp_path, "GPT2Config", GPT2, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    source = source_of(load_model(tmp_path, device="cpu"))
    assert source.weights_sha256 is not None
    assert source.logits_max_difference is not None
    assert source.logits_max_difference < 1e-5


def test_a_headless_bert_says_that_its_logits_are_meaningless(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SMALL)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    first, second = (load_model(tmp_path, device="cpu") for _ in range(2))
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers were used up"
    source = source_of(first)
    assert source.architecture == "BertForMaskedLM"
    assert any("logits and losses of this model are meaningless" in note for note in source.notes)
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(first(tokens), second(tokens)), "the random head differs between loads"


def assert_the_head_is_not_measured(folder: Path) -> None:
    """Neither logits nor a norm of the head; what happens inside the blocks is."""
    model = load_model(folder, device="cpu")
    (note,) = (n for n in source_of(model).notes if n.startswith("the folder holds no language-model head: "))
    assert note.endswith(
        "logits and losses of this model are meaningless; what happens inside its blocks is not affected"
    )
    probes = ("decomposition", "causal", "head_effects", "unembedding", "attribution")
    tokens = torch.arange(3, 20)[None]
    report = ln_probe.analyze(model, tokens, probes=probes, progress=False)
    assert report.tables["causal"][["loss", "delta_loss", "kl", "top1_agreement"]].isna().all(axis=None)
    for table in ("unembedding", "head_effects", "attribution"):
        assert not len(report.tables[table]), table
    assert any(n == f"the unembedding was not measured: {note}" for n in report.notes)
    assert "blocks.0.ln1" in set(report.tables["layernorms"]["site"])
    assert not any("most likely" in finding for finding in report.findings())
    with pytest.raises(ValueError, match="logits of this model cannot be attributed: the folder holds no"):
        ln_probe.attribute_logits(model, tokens, -1)
    with pytest.raises(ValueError, match="no sequences can be sampled from it: give token ids"):
        ln_probe.analyze(model, progress=False)
    with pytest.raises(ValueError, match=r"freezing_cost is not applicable: causal: .*: the folder holds no"):
        ln_probe.freezing_cost(model, tokens)
    for loss in (None, lambda output, _tokens: output.mean((1, 2))):
        assert Objective.of(loss).obstacle(model) == note
    alone = ln_probe.analyze(model, tokens, probes=("unembedding",), progress=False)
    assert not len(alone.tables["unembedding"])


@pytest.mark.slow
def test_the_head_of_a_bert_model_is_not_measured(tmp_path: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**SMALL), add_pooling_layer=False).save_pretrained(tmp_path)
    assert_the_head_is_not_measured(tmp_path)
    report = ln_probe.analyze(load_model(tmp_path, device="cpu"), torch.arange(3, 20)[None], progress=False)
    assert "ln_final" not in set(report.tables["layernorms"]["site"])
    assert "ln_final was not measured: it belongs to the head, which was drawn at random" in report.notes
    assert not set(report.tables["causal"]["sites"]) & {"ln_final", "final"}


@pytest.mark.parametrize("kind", ["GPT2ForSequenceClassification", "GPTNeoXForSequenceClassification"])
def test_the_head_of_a_classifier_is_not_taken_for_another(kind: str, tmp_path: Path) -> None:
    """GPT-2's embedding would be taken for its head, NeoX's head be drawn at random."""
    config = getattr(transformers, f"{kind.removesuffix('ForSequenceClassification')}Config")
    getattr(transformers, kind)(config(**(GPT2 if "GPT2" in kind else SMALL))).save_pretrained(tmp_path)
    assert_the_head_is_not_measured(tmp_path)


def test_a_head_for_several_tasks_is_a_head(tmp_path: Path) -> None:
    transformers.BertForPreTraining(transformers.BertConfig(**SMALL)).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert not any("meaningless" in note for note in source_of(model).notes)
    assert len(
        ln_probe.analyze(model, torch.arange(3, 20)[None], probes=("unembedding",), progress=False).tables[
            "unembedding"
        ]
    )


def test_a_headless_gpt2_gets_its_tied_head(tmp_path: Path) -> None:
    transformers.GPT2Model(transformers.GPT2Config(**GPT2)).save_pretrained(tmp_path)
    source = source_of(load_model(tmp_path, device="cpu"))
    assert source.architecture == "GPT2LMHeadModel"
    assert "config.json names GPT2Model; loaded as GPT2LMHeadModel" in source.notes
    assert not any("meaningless" in note for note in source.notes)


SHARED = Path(os.environ.get("LN_PROBE_SHARED", Path(__file__).parents[2] / "../shared"))


@pytest.mark.skipif(not (SHARED / "checkpoints/capp_gpt").is_dir(), reason="needs LN_PROBE_SHARED (CAPP-GPT)")
def test_a_real_checkpoint() -> None:
    for world in worlds_of("gpt2"):
        source = source_of(load_model(SHARED / "checkpoints/capp_gpt", device="cpu", world=world))
        assert source.logits_max_difference is not None
        assert source.logits_max_difference < 1e-5


MGM = os.environ.get("LN_PROBE_MGM")


@pytest.mark.skipif(not MGM, reason="needs LN_PROBE_MGM: the folder of the MGM checkpoint")
def test_a_real_pickled_checkpoint() -> None:
    assert MGM is not None
    with pytest.raises(ValueError, match="allow_pickle=True"):
        load_model(MGM, device="cpu")
    for world in worlds_of("gpt2"):
        source = source_of(load_model(MGM, device="cpu", allow_pickle=True, world=world))
        assert source.logits_max_difference is not None
        assert source.logits_max_difference < 1e-5


GGUF = os.environ.get("LN_PROBE_GGUF")


@pytest.mark.slow
@pytest.mark.skipif(not GGUF, reason="needs LN_PROBE_GGUF: the path of SmolLM2's .gguf file")
def test_a_real_gguf_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert GGUF is not None
    model = load_model(GGUF, device="cpu")
    source = source_of(model)
    assert (source.kind, source.architecture) == ("gguf", "LlamaForCausalLM")
    assert source.logits_max_difference is not None
    assert source.logits_max_difference < 1e-5
    logits = model("The capital of France is", return_type="logits")
    assert model.tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert capsys.readouterr() == ("", "")
