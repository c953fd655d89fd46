"""Inputs on which users of other libraries reported faults, with values that are computed here by hand."""

from __future__ import annotations

import dataclasses
import html
import io
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import bridge_of, hugging_face, make_hooked
from faulty import word_tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import ln_probe
from ln_probe.analyses.attribution import Features
from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.exhibits import AttentionRecorder
from ln_probe.hooks import find_norms, linearized, without
from ln_probe.hooks.constants import bundled_constants
from ln_probe.hooks.model import facts_of
from ln_probe.hooks.norm import NormError
from ln_probe.hooks.norm_edits import InterventionError, LostEditError
from ln_probe.hooks.task import default_tokens
from ln_probe.page import figures

IDS = torch.arange(3, 15)[None]


def gradient_of(arch: str, context: Any, *, reentrant: bool | None = None, as_bridge: bool = False) -> Tensor:
    """Return the gradient of the loss inside a block by all parameters; `reentrant`: None without checkpointing."""
    original = hugging_face(arch).train()
    for module in original.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if reentrant is not None:
        original.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        original.enable_input_require_grads()
    model = bridge_of(original).train() if as_bridge else original
    with context(model):
        (model(IDS, return_type="loss") if as_bridge else model(IDS, labels=IDS, use_cache=False).loss).backward()
    return torch.cat([p.grad.flatten() for p in original.parameters() if p.grad is not None])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(("arch", "as_bridge"), [("llama", False), ("gpt2", True)])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_gradients_with_checkpointing_are_those_without(arch: str, as_bridge: bool, reentrant: bool) -> None:
    """`backward()` runs the blocks again (pyvene #242): position 0 must have its own constant in that run, too."""
    for context in (lambda m: without(m, "scaling", sites="all", tokens=IDS), linearized):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*backward")
            expected = gradient_of(arch, context, as_bridge=as_bridge)
        with pytest.warns(UserWarning, match="call backward"):
            gradient = gradient_of(arch, context, reentrant=reentrant, as_bridge=as_bridge)
        assert torch.allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_constants_follow_weights_that_change_through_data() -> None:
    """PyTorch counts no edits of `.data` (old optimizers, averaged weights)."""
    model = ln_probe.load_model("lm-layernorm", device="cpu")
    facts = facts_of(model)
    with without(model, "scaling") as before, torch.no_grad():
        assert bundled_constants(facts, model.parameters())
    model.embed.W_E.data.mul_(2) if hasattr(model.embed, "W_E") else model.embed.weight.data.mul_(2)
    with without(model, "scaling") as edit:
        pass
    streams = (model.run_with_cache(row[None])[1]["blocks.0.hook_resid_pre"] for row in default_tokens(facts))
    x = torch.cat([stream[0, 1:] for stream in streams])
    sigma = (x.double().var(-1, correction=0) + 1e-5).sqrt().mean()
    assert edit.divisors["blocks.0.ln1"].rest == pytest.approx(float(sigma), rel=1e-6)
    assert edit.divisors != before.divisors
    assert not bundled_constants(facts, model.parameters()), "they were fitted to other weights"


def test_a_norm_that_two_blocks_share() -> None:
    """A bridge has one, with a constant, for each run; the model's own would get one edit (TransformerLens #1470)."""
    original = hugging_face("gpt2")
    original.transformer.h[1].ln_1 = original.transformer.h[0].ln_1
    inputs: list[Tensor] = []
    handle = original.transformer.h[0].ln_1.register_forward_pre_hook(lambda _, args: inputs.append(args[0].double()))
    with torch.no_grad():
        original(IDS)
    handle.remove()
    for edit in (lambda: without(original, "scaling", tokens=IDS), lambda: linearized(original)):
        with pytest.raises(InterventionError, match=r"blocks\.0\.ln1, blocks\.1\.ln1"), edit():
            pass
    with without(bridge_of(original), "scaling", tokens=IDS) as done:
        constants = [constant.rest for constant in done.divisors.values()]
    assert constants == pytest.approx([float((x.var(-1, correction=0) + 1e-5).sqrt()[0, 1:].mean()) for x in inputs])


@pytest.mark.parametrize(("arch", "path"), [
    ("hooked", "blocks"), ("gpt2", "transformer.h"), ("llama", "model.layers"), ("neox", "gpt_neox.layers"),
])  # fmt: skip
def test_a_block_that_runs_twice_is_refused_by_name(arch: str, path: str) -> None:
    """As layers are shared in ALBERT. (One cache of both would hold too many keys.)"""
    model = make_hooked() if arch == "hooked" else hugging_face(arch, use_cache=False)
    layers = model.get_submodule(path)
    layers[1] = layers[0]
    for call in (find_norms, linearized.sigmas, ln_probe.attribute_logits, ln_probe.analyze):
        with pytest.raises(NormError, match=r"blocks\.[01]\.ln1 runs more than once"):
            call(model, *([IDS] if call is not find_norms else []))


@pytest.mark.parametrize(("arch", "place", "width", "name"), [
    ("llama", "model.layers.0.mlp.act_fn", 80, "blocks.0.mlp.act_fn.1"),  # as NormFormer has it
    ("gpt2", "transformer.h.0.mlp.act", 128, "blocks.0.mlp.act.1"),
    ("stablelm-parallel", "", 0, "blocks.0.self_attn.q_layernorm"),
])  # fmt: skip
def test_norms_without_hook_points_are_named(arch: str, place: str, width: int, name: str) -> None:
    original = hugging_face(arch)
    if place:
        original.set_submodule(place, torch.nn.Sequential(torch.nn.SiLU(), torch.nn.LayerNorm(width)))
    for edit in (lambda: without(original, "scaling", sites="all", scale=1.0), lambda: linearized(original)):
        with pytest.warns(UserWarning, match=name), edit():
            pass
    report = ln_probe.analyze(original, IDS, probes=["causal"], progress=False)
    assert any(name in note for note in report.notes)


class Adapter(torch.nn.Linear):
    """A LoRA that is not merged: its `weight` is not all that it computes (PEFT)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x.sum(-1, keepdim=True)


@pytest.mark.parametrize(("arch", "letter"), [("llama", "k"), ("qwen3", "v")])
def test_single_readers_with_an_adapter_are_refused(arch: str, letter: str) -> None:
    original = hugging_face(arch)
    setattr(original.model.layers[1].self_attn, f"{letter}_proj", Adapter(32, 16, bias=False))
    model = bridge_of(original)
    readers, refused = {"k": "keys", "v": "values"}[letter], f"more than W_{letter.upper()}"
    with without(model, "scaling", only=readers, scale=2.0), pytest.raises(LostEditError, match=refused):
        model(IDS)


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(64)])
def test_a_dictionary_in_training_mode_is_that_of_evaluation(layer: torch.nn.Module) -> None:
    x, W = torch.randn(5, 32), torch.randn(64, 32)
    sae: Any = torch.nn.Sequential(torch.nn.Linear(32, 64), layer)
    sae.W_dec, sae.encode, sae.decode = W, lambda x: sae(x).relu(), lambda active: active @ W
    active = Features.of(sae, {"blocks.0.hook_resid_pre": x}, "blocks.0.hook_resid_pre").activations
    assert sae.training
    assert torch.equal(active, sae.eval().encode(x))
    sae.encode = lambda x: torch.nn.functional.dropout(x @ W.T)
    with pytest.raises(AttributionError, match="two ways"):
        Features.of(sae, {"blocks.0.hook_resid_pre": x}, "blocks.0.hook_resid_pre")


def test_a_head_that_writes_nothing_has_no_effect() -> None:
    """Float32 sums of losses round in one direction (pytorch #113708)."""
    original = hugging_face("gpt2", vocab_size=4000)
    with torch.no_grad():
        original.transformer.wte.weight.mul_(3)
        original.transformer.h[1].attn.c_proj.weight[8:16] = 0
    prompts = torch.randint(4000, (20, 16), generator=torch.Generator().manual_seed(0))
    model = bridge_of(original)
    report = ln_probe.analyze(model, prompts, probes=["head_effects"], layers=[1], heads=[1], progress=False)
    row = report.tables["head_effects"].iloc[0]
    assert row.p == 1.0
    assert row.delta_loss == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize(("arch", "option"), [("mistral", "sliding_window"), ("neo", "window_size")])
def test_a_window_of_one_key(arch: str, option: str) -> None:
    """Every query sees itself alone, so that nothing is known of other keys; losses are those of the model."""
    original = hugging_face(arch, **{option: 1})
    with torch.no_grad():
        loss = float(original(IDS, labels=IDS).loss)
    report = ln_probe.analyze(bridge_of(original), IDS, progress=False)
    assert not report.failures
    assert 1 in {*report.keys["n"]}
    assert (report.causal.loss - report.causal.delta_loss).to_numpy() == pytest.approx(loss, rel=1e-5)


def test_an_error_in_a_picture_loses_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a picture")

    monkeypatch.setattr(AttentionRecorder, "attention", fail)
    monkeypatch.setattr(figures, "norms_over_depth", fail)
    report = ln_probe.analyze(bridge_of(hugging_face("gpt2")), IDS, progress=False)
    assert any("ZeroDivisionError" in note for note in report.exhibits.notes)
    tables = ln_probe.load_report(report.save(tmp_path)).tables
    assert all(tables[name].equals(table) for name, table in report.tables.items())
    assert "'depth' failed: ZeroDivisionError" in html.unescape((tmp_path / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words w3 to w49; it begins every text with <s>, as Llama's."""
    words = word_tokenizer(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, 50))], pattern="<s>")
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    words.pad_token, words.padding_side = "<pad>", "left"
    return words


def intact_loss(model: Any, prompts: Any) -> float:
    row = ln_probe.analyze(model, prompts, probes=["causal"], progress=False).causal.iloc[0]
    return float(row.loss - row.delta_loss)


@pytest.mark.parametrize(("arch", "side"), [("llama", "left"), ("gpt2", "right"), ("gpt2", "left")])
def test_padding_in_any_form_is_no_text(arch: str, side: str, tokenizer: Any) -> None:
    """The loss of each text alone, in float64 (transformers #17444, TransformerLens #369 and #1609)."""
    tokenizer.padding_side = side
    texts, original = ["w5 w9 w12", "w7 w8 w30 w31 w44 w4"], hugging_face(arch).double()
    rows = [torch.tensor([tokenizer(text).input_ids]) for text in texts]
    with torch.no_grad():
        sums = [float(original(row, labels=row).loss) * (row.shape[1] - 1) for row in rows]
        logits = [float(original(row).logits[0, -1, 7]) for row in rows]
    expected = sum(sums) / sum(row.shape[1] - 1 for row in rows)
    model = bridge_of(hugging_face(arch))
    model.tokenizer = tokenizer
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    ids = batch.input_ids
    for prompts in (batch, ids, ids.tolist(), {"input_ids": ids.numpy()}, texts, [f"<s> {text}" for text in texts]):
        assert intact_loss(model, prompts) == pytest.approx(expected, rel=1e-6), prompts
    with pytest.warns(UserWarning, match="padding"), without(model, "scaling", tokens=ids) as padded:
        pass
    with pytest.warns(UserWarning, match="padding"):
        own = ln_probe.attribute_logits(model, ids, -1, target=7).check().own
    assert own.flatten().tolist() == pytest.approx(logits, rel=1e-5)
    with without(model, "scaling", tokens=[row[0] for row in rows]) as alone:
        assert padded.divisors == alone.divisors


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_packed_rows_begin_where_their_positions_do(arch: str) -> None:
    """Several texts in one row (DataCollatorWithFlattening): logits under an edit are those of each text alone."""
    original = hugging_face(arch, use_cache=False)
    texts = [IDS[:, :5], IDS[:, 2:9].flip(1), IDS[:, :4] + 20]
    row, positions = torch.cat(texts, 1), torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    for model in (original, bridge_of(hugging_face(arch, use_cache=False))):
        with torch.no_grad(), without(model, "scaling", sites="all", tokens=IDS):
            outputs = [model(row, position_ids=positions), *map(model, texts)]
        packed, *alone = (getattr(output, "logits", output) for output in outputs)
        assert torch.allclose(packed, torch.cat(alone, 1), atol=1e-4)
    for lengths in ({"position_ids": positions}, {"seq_lengths": [[5, 7, 4]]}):
        with pytest.raises(ValueError, match="several texts"):
            ln_probe.analyze(original, {"input_ids": row, **lengths})


@pytest.mark.parametrize(("begin", "end"), [(b"", b"\n"), (b"\xef\xbb\xbf", b"\r\n")])
@pytest.mark.parametrize("name", ["lm-layernorm", "lm-scaling_only"])
def test_a_file_is_read_as_it_is(name: str, begin: bytes, end: bytes, tmp_path: Path) -> None:
    text = "  And the ships came home,\n    and the lamp was lit;\n\tthe door stood open."
    (tmp_path / "påge.txt").write_bytes(begin + (text + "\n").encode().replace(b"\n", end))
    model = ln_probe.load_model(name, device="cpu")
    ids = model.to_tokens(text)
    expected = torch.nn.functional.cross_entropy(model(ids)[0, :-1].detach().double(), ids[0, 1:])
    for prompts in (text, tmp_path / "påge.txt"):
        assert intact_loss(model, prompts) == pytest.approx(float(expected), rel=1e-5)


def test_a_norm_that_writes_over_its_input_is_refused() -> None:
    """After it, its input has RMS 1, whatever it was (nano-vllm #170)."""
    model = hugging_face("llama")
    norm = model.model.norm

    def forward(x: Tensor) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
        return x.div_(scale) * norm.weight

    find_norms(model)
    norm.forward = forward
    with pytest.raises(NormError, match="in place"):
        find_norms(model)


@pytest.mark.parametrize(("correction", "eps"), [(1, 0.0), (0, 0.03)])
def test_a_norm_that_divides_by_nearly_sigma_is_refused(correction: int, eps: float) -> None:
    """An unbiased standard deviation (1.6 % more in 32 dimensions); an eps beside the root (7 % more at RMS 0.4)."""
    model = make_hooked()
    norm = model.ln_final

    def forward(x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normalized = centred / norm.hook_scale(centred.std(-1, correction=correction, keepdim=True) + eps)
        return norm.hook_normalized(normalized) * norm.w + norm.b

    norm.forward = forward
    with pytest.raises(NormError, match="ln_final"):
        find_norms(model)


@pytest.mark.parametrize("encoding", ["cp1252", "cp437", "ascii"])
def test_a_report_can_be_printed_on_any_console(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = ln_probe.analyze(bridge_of(hugging_face("gpt2")), IDS, probes=["decomposition"], progress=False)
    named = dataclasses.replace(report, provenance={**report.provenance, "model": {"name": "\u03c3 \u00d7 \u6587"}})
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    for value in (named, named.constants, ln_probe.attribute_logits(hugging_face("gpt2"), IDS)):
        print(value, repr(value), flush=True)
        assert type(value).__name__ in written.getvalue().decode(encoding)


@pytest.mark.parametrize("arch", ["falcon-40b", "gpt-bigcode-many-keys"])
def test_errors_of_the_library_around_a_model_name_it(arch: str) -> None:
    with pytest.raises(ValueError, match=r"[Bb]ridge"):
        ln_probe.attribute_logits(hugging_face(arch), IDS)


def test_a_model_whose_blocks_have_other_names_is_refused() -> None:
    """Two stacks of blocks that run several times."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    config = transformers.HrmTextConfig(**sizes, num_layers_per_stack=1)
    with pytest.raises(ValueError, match="HrmText"):
        find_norms(transformers.HrmTextForCausalLM(config))


def test_sigmas_of_heads_are_those_of_their_positions() -> None:
    """Of four tokens and four heads: a model in memory gives its QK-norms [pos head], a bridge [head pos]."""
    original = hugging_face("qwen3", num_key_value_heads=4)
    sigmas = linearized.sigmas(original, IDS[:, :4].flip(1))
    logits = []
    for model in (original, bridge_of(hugging_face("qwen3", num_key_value_heads=4))):
        with linearized(model, sigma=sigmas), torch.no_grad():
            output = model(IDS[:, :4])
        logits.append(getattr(output, "logits", output))
    assert torch.allclose(*logits, atol=1e-6)
    inputs: list[Tensor] = []
    original.model.layers[0].self_attn.q_norm.register_forward_pre_hook(lambda _, args: inputs.append(args[0].double()))
    original(IDS[:, :4].flip(1))
    expected = (inputs[0].square().mean(-1) + 1e-6).sqrt()
    assert torch.allclose(sigmas["blocks.0.attn.q_norm"].double(), expected, rtol=1e-5)
