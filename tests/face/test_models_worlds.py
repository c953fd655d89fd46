"""Every architecture, in every world that takes it, is the model that Hugging Face computes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import cases, hugging_face

import ln_probe
from ln_probe.hooks.model import device_obstacle
from ln_probe.hooks.objective import Objective
from ln_probe.loading import verify
from ln_probe.loading.convert import CLASS_OF_WORLD, has_hooked_transformer
from ln_probe.models import load_model, source_of

pytestmark = pytest.mark.usefixtures("no_network")

HAS_HOOKED = has_hooked_transformer()
needs_hooked = pytest.mark.skipif(not HAS_HOOKED, reason="this TransformerLens has no HookedTransformer")
WORLDS = ["hooked", "bridge"] if HAS_HOOKED else ["bridge"]
WIDE: dict[str, Any] = {"head_dim": 16}  # heads wider than d_model / heads
TOKENS = torch.randint(3, 50, (2, 30), generator=torch.Generator().manual_seed(7))

# name: (one of ARCHITECTURES, further options, whether HookedTransformer can hold it)
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gpt2": ("gpt2", {}, True),
    "gpt2_n_inner": ("gpt2-narrow-mlp", {}, False),
    "neox": ("neox", {}, True),
    "neox_theta": (
        "neox", {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5}}, True
    ),
    "neox_sequential": ("neox-sequential", {}, True),
    "neox_no_attention_bias": ("neox-no-bias", {}, True),
    "opt": ("opt", {}, True),
    "gpt_neo": ("neo", {"window_size": 8}, True),
    "gpt_neo_intermediate": ("neo", {"intermediate_size": 80}, False),
    "llama_gqa": ("llama", {"rope_theta": 500.0}, True),
    "llama_head_dim": ("llama-wide-heads", {}, False),
    "llama_bias": ("llama-biases", {}, False),
    "llama_rope_scaling": ("llama3-rope", {}, False),
    "mistral_window": ("mistral", {}, True),
    "qwen2": ("qwen2", {}, True),
    "qwen3": ("qwen3", WIDE, True),
    "gemma": ("gemma", WIDE, False),
    "gemma2": ("gemma2", WIDE | {"num_key_value_heads": 2, "sliding_window": 8}, False),
    "olmo2": ("olmo2", {}, False),
    "bert": ("bert", {}, False),
}  # fmt: skip


def saved(folder: Path, case: str, **options: Any) -> Any:
    """A Hugging Face model of a case, written to a folder."""
    arch, more, _ = CASES[case]
    model = hugging_face(arch, **(more | options))
    model.save_pretrained(folder)
    return model


def worlds_of(case: str) -> list[str]:
    return WORLDS if CASES[case][2] else ["bridge"]


def assert_faithful(model: Any) -> None:
    difference = source_of(model).logits_max_difference
    assert difference < 1e-5


QUICK = (
    "gpt2",
    "neox",
    "gpt_neo",
    "llama_gqa",
    "mistral_window",
    "qwen3",
    "gemma2",
    "bert",
)  # as different as they are


@pytest.mark.parametrize("case", cases(*QUICK, slow=[case for case in CASES if case not in QUICK]))
def test_logits_are_those_of_hugging_face(case: str, tmp_path: Path) -> None:
    original = saved(tmp_path, case)
    with torch.no_grad():
        expected = original(TOKENS).logits
    for world in worlds_of(case):
        model: Any = load_model(tmp_path, device="cpu", world=world)  # type: ignore[arg-type]
        with torch.no_grad():
            logits = model(TOKENS, return_type="logits")
        # float32: 1e-5 of the largest logit (measured: 2.1e-6)
        assert float((logits - expected).abs().max()) < 1e-5 * float(expected.abs().max()), world
        assert source_of(model).world == CLASS_OF_WORLD[world]  # type: ignore[index]
        assert_faithful(model)
        assert not model.training
        assert model.tokenizer is None


@needs_hooked
@pytest.mark.parametrize("case", [case for case, (_, _, hooked) in CASES.items() if not hooked])
def test_hooked_transformer_is_refused_where_it_would_be_wrong(case: str, tmp_path: Path) -> None:
    saved(tmp_path, case)
    with pytest.raises(ValueError, match=r"cannot be a HookedTransformer: .* Use world='bridge'\."):
        load_model(tmp_path, device="cpu", world="hooked")
    if case == "gpt2_n_inner":
        source = source_of(load_model(tmp_path, device="cpu"))
        assert source.world == "TransformerBridge"
        assert any(note.startswith("TransformerBridge, not HookedTransformer: ") for note in source.notes)


@pytest.mark.skipif(HAS_HOOKED, reason="this TransformerLens has HookedTransformer")
def test_hooked_transformer_is_refused_where_there_is_none(tmp_path: Path) -> None:
    saved(tmp_path, "gpt2")
    with pytest.raises(ValueError, match="this version of TransformerLens has no HookedTransformer"):
        load_model(tmp_path, device="cpu", world="hooked")


@needs_hooked
@pytest.mark.parametrize("trap", cases("llama-7b", "Mixed Llama Folder", slow=["gemma-2-9b", "bert", "t5"]))
def test_the_name_of_a_folder_does_not_decide_what_is_loaded(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of the model's own nor that of the temporary ones."""
    folder, elsewhere = tmp_path / trap / "gpt2", tmp_path / "bert" / "llama"
    elsewhere.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
    saved(folder, "gpt2")
    source = source_of(load_model(folder, device="cpu"))
    assert (source.world, source.architecture) == ("HookedTransformer", "GPT2LMHeadModel")


@pytest.mark.parametrize("world", WORLDS)
def test_b04_a_wrong_conversion_is_refused(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the bridge takes the place of a wrong HookedTransformer, and that is said."""
    right = getattr(verify, f"to_{world}")

    def wrong(*args: Any, **options: Any) -> Any:
        model: Any = right(*args, **options)
        next(p for n, p in model.named_parameters() if "ln_f" in n).data *= 1.0001
        return model

    monkeypatch.setattr(verify, f"to_{world}", wrong)
    saved(tmp_path, "gpt2")
    expected = f"could not be loaded faithfully as {CLASS_OF_WORLD[world]} .* off the original's"
    with pytest.raises(ValueError, match=expected):
        load_model(tmp_path, device="cpu", world=world)
    if world == "hooked":
        source = source_of(load_model(tmp_path, device="cpu"))
        assert source.world == "TransformerBridge"
        assert any("of the largest off the original's (bound 1e-05)" in note for note in source.notes)


def test_b04_a_difference_that_the_original_rounds_itself_is_no_other_model(tmp_path: Path) -> None:
    """Large scores: the loaded model is further from the original than ports of ordinary models, and no further than
    the original is from itself in float64."""
    original = saved(tmp_path, "neox", hidden_size=64, intermediate_size=256, num_hidden_layers=6)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            if "query_key_value" in name:
                parameter.mul_(5)
    original.save_pretrained(tmp_path)
    tokens = verify.probe_tokens(original.config, torch.device("cpu"))
    logits = verify.logits_of(lambda ids: original(ids).logits, tokens)
    own = verify.own_rounding(original, "float32", tokens, logits)
    assert verify.OWN_ROUNDINGS * own > verify.CONVERSION_BOUND["float32"], "the case must be a case"
    source = source_of(load_model(tmp_path, device="cpu"))
    assert source.world == CLASS_OF_WORLD[WORLDS[0]]  # type: ignore[index]
    assert source.logits_max_difference <= verify.OWN_ROUNDINGS * own


@pytest.mark.parametrize("world", WORLDS)
def test_b05_several_end_tokens(world: Any, tmp_path: Path) -> None:
    """Llama 3 Instruct: eos_token_id is a list."""
    original = saved(tmp_path, "llama_gqa", eos_token_id=[2, 5, 9], bos_token_id=1, pad_token_id=0)
    assert_faithful(load_model(tmp_path, device="cpu", world=world))
    tokens = verify.probe_tokens(original.config, torch.device("cpu"))
    assert not {0, 1, 2, 5, 9} & set(tokens[0].tolist())


def test_b06_mps_is_refused_before_anything_is_loaded(folder: Path) -> None:
    expected = r"device 'mps' cannot be used: Apple's MPS computes no float64, .* Use device='cpu'"
    with pytest.raises(ValueError, match=expected):
        load_model(folder, device="mps")
    assert device_obstacle(torch.device("mps"))
    assert not device_obstacle(torch.device("cpu"))


ALL_PROCESSING = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), True)


@pytest.mark.parametrize(
    "case", cases("gpt2", "llama_gqa", "gemma", slow=["neox", "opt", "gpt_neo", "qwen3", "gemma2"])
)
def test_a_folded_model_has_the_log_probabilities_of_the_raw_one(case: str, tmp_path: Path) -> None:
    original = saved(tmp_path, case)
    with torch.no_grad():
        expected = original(TOKENS).logits.log_softmax(-1)
    everything = dict(ALL_PROCESSING)
    if case not in ("gpt2", "neox", "opt", "gpt_neo"):
        del everything["center_writing_weights"]
        with pytest.raises(ValueError, match=r"center_writing_weights is for LayerNorm, .* is 'RMS'"):
            load_model(tmp_path, device="cpu", center_writing_weights=True)
    for world in worlds_of(case):
        for flags in ({"fold_ln": True}, everything):
            model: Any = load_model(tmp_path, device="cpu", world=world, **flags)  # type: ignore[arg-type]
            with torch.no_grad():
                logits = model(TOKENS, return_type="logits").log_softmax(-1)
            assert float((logits - expected).abs().max()) < 1e-4 * float(expected.abs().max()), (world, flags)
            assert source_of(model).processing == tuple(flags)
            norm = model.blocks[0].ln1
            if case == "gpt2":
                assert type(norm).__name__ == "LayerNormPre" or torch.allclose(norm.weight, torch.ones(()))


@pytest.mark.parametrize("world", WORLDS)
def test_a_fold_that_changes_the_model_is_refused(world: Any, tmp_path: Path) -> None:
    """An MLP as wide as the residual stream: TransformerLens guesses which way round its matrix stands."""
    saved(tmp_path, "opt", ffn_dim=32)
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
    saved(tmp_path, "olmo2")
    source = source_of(load_model(tmp_path, device="cpu", fold_ln=True))
    assert "fold_ln changed nothing: not done for this architecture" in source.notes


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", cases("gpt2", slow=["neox", "llama_gqa"]))
def test_other_formats(case: str, dtype: Any, tmp_path: Path) -> None:
    saved(tmp_path, case)
    for world in worlds_of(case):
        model: Any = load_model(tmp_path, device="cpu", dtype=dtype, world=world)  # type: ignore[arg-type]
        assert source_of(model).dtype == dtype
        assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
        assert source_of(model).logits_max_difference is not None


def test_sharded_safetensors(tmp_path: Path) -> None:
    hugging_face("gpt2").save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = load_model(tmp_path, device="cpu")
    assert source_of(model).weights_sha256 is not None
    assert_faithful(model)


# ------------------------------------------------------------------------------------------------- heads of all kinds


def test_a_headless_bert_says_that_its_logits_are_meaningless(tmp_path: Path) -> None:
    transformers.BertModel(hugging_face("bert").config, add_pooling_layer=False).save_pretrained(tmp_path)
    before = torch.get_rng_state()
    first, second = (load_model(tmp_path, device="cpu") for _ in range(2))
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers were used up"
    source = source_of(first)
    assert source.architecture == "BertForMaskedLM"
    assert any("logits and losses of this model are meaningless" in note for note in source.notes)
    tokens = torch.arange(3, 20)[None]
    assert torch.equal(first(tokens), second(tokens)), "the random head differs between loads"


@pytest.mark.slow
def test_the_norm_in_the_head_of_a_bert_model_is_not_measured(tmp_path: Path) -> None:
    transformers.BertModel(hugging_face("bert").config, add_pooling_layer=False).save_pretrained(tmp_path)
    report = ln_probe.analyze(load_model(tmp_path, device="cpu"), torch.arange(3, 20)[None], progress=False)
    assert "ln_final" not in set(report.tables["layernorms"]["site"])
    assert "ln_final was not measured: it belongs to the head, which was drawn at random" in report.notes
    assert not set(report.tables["causal"]["sites"]) & {"ln_final", "final"}


@pytest.mark.parametrize("kind", cases("GPT2ForSequenceClassification", slow=["GPTNeoXForSequenceClassification"]))
def test_the_head_of_a_classifier_is_not_taken_for_another(kind: str, tmp_path: Path) -> None:
    """GPT-2's embedding would be taken for its head, NeoX's head be drawn at random. Neither logits nor a norm of the
    head are measured; what happens inside the blocks is (`laws.py` has the same of every architecture's body)."""
    config = hugging_face("gpt2" if kind.startswith("GPT2") else "neox").config
    getattr(transformers, kind)(config).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    (note,) = (n for n in source_of(model).notes if n.startswith("the folder holds no language-model head: "))
    assert note.endswith(
        "logits and losses of this model are meaningless; what happens inside its blocks is not affected"
    )
    probes = ("decomposition", "causal", "head_effects")
    tokens = torch.arange(3, 20)[None]
    report = ln_probe.analyze(model, tokens, probes=probes, progress=False)
    assert report.tables["causal"][["loss", "delta_loss", "kl", "top1_agreement"]].isna().all(axis=None)
    assert not len(report.tables["head_effects"])
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


def test_a_head_for_several_tasks_is_a_head(tmp_path: Path) -> None:
    transformers.BertForPreTraining(hugging_face("bert").config).save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu")
    assert not any("meaningless" in note for note in source_of(model).notes)


def test_a_headless_gpt2_gets_its_tied_head(tmp_path: Path) -> None:
    transformers.GPT2Model(hugging_face("gpt2").config).save_pretrained(tmp_path)
    source = source_of(load_model(tmp_path, device="cpu"))
    assert source.architecture == "GPT2LMHeadModel"
    assert "config.json names GPT2Model; loaded as GPT2LMHeadModel" in source.notes
    assert not any("meaningless" in note for note in source.notes)


# --------------------------------------------------------------------------------------------------- real checkpoints


def test_a_real_pickled_checkpoint(mgm: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle=True"):
        load_model(mgm, device="cpu")
    for world in WORLDS:
        assert_faithful(load_model(mgm, device="cpu", allow_pickle=True, world=world))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_real_gguf_file(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = load_model(smollm2, device="cpu")
    source = source_of(model)
    assert (source.kind, source.architecture) == ("gguf", "LlamaForCausalLM")
    assert_faithful(model)
    logits = model("The capital of France is", return_type="logits")
    assert model.tokenizer.decode(logits[0, -1].argmax()) == " Paris"
    assert capsys.readouterr() == ("", "")
