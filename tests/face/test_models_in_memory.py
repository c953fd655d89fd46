"""A plain Hugging Face model as `analyze` takes it: the same report as of its folder, the user's model as it was."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from architectures import cases, hugging_face, make_bridge
from faulty import word_tokenizer

import ln_probe
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.guard import ModelStateError
from ln_probe.hooks import find_norms, linearized, without
from ln_probe.hooks.norm_edits import InterventionError

pytestmark = pytest.mark.lens

TOKENS = torch.arange(3, 21)[None]


def state(model: torch.nn.Module) -> dict[str, Any]:
    """All that a user can see of a model."""
    return {
        "weights": {n: (p.data_ptr(), p.requires_grad, p.tolist()) for n, p in model.named_parameters()},
        "buffers": {n: b.tolist() for n, b in model.named_buffers()},
        "modules": {n: (id(m), type(m), m.training, len(m._forward_hooks)) for n, m in model.named_modules()},
        "config": copy.deepcopy(model.config.to_dict()),
        "attention": model.config._attn_implementation,
    }


@pytest.mark.parametrize("arch", cases("gpt2", slow=["llama", "neox", "opt", "bloom", "gemma3", "bert"]))
def test_it_is_measured_and_handed_back_unchanged(arch: str, tmp_path: Path) -> None:
    model = hugging_face(arch)
    model.save_pretrained(tmp_path)
    if arch != "bloom":
        model.config._attn_implementation = "sdpa"
    with torch.no_grad():
        logits = model(TOKENS).logits
    model.train()
    next(model.parameters()).requires_grad_(False)
    before = state(model)
    how: dict[str, Any] = {"progress": False, "probes": ("decomposition", "selectability", "uniformity")}
    report = ln_probe.analyze(model, TOKENS, **how)
    assert state(model) == before
    with torch.no_grad():
        assert torch.equal(model.eval()(TOKENS).logits, logits)
    about = report.provenance["model"]
    assert [about[k] for k in ("kind", "architecture", "world")] == [
        "memory",
        type(model).__name__,
        "TransformerBridge",
    ]
    assert any("head" in note for note in about["notes"])
    assert about["logits_max_difference"] < 1e-5
    assert any("evaluation mode" in note for note in report.notes)
    other = ln_probe.analyze(ln_probe.load_model(tmp_path, device="cpu", world="bridge"), TOKENS, **how)
    for table in (t.name for t in TABLES):
        assert report.tables[table].equals(other.tables[table]), table


def test_texts_need_its_tokenizer() -> None:
    tokenizer = word_tokenizer(["[UNK]", "<s>", "</s>", "the", "lamp", "was", "lit"])
    model = hugging_face("gpt2")
    how: dict[str, Any] = {"progress": False, "probes": "selectability"}
    report = ln_probe.analyze(model, "the lamp was lit", tokenizer=tokenizer, **how)
    tokens = report.keys.query("layer == 0 and head == 0 and variant == 'intact'").sort_values("position")["token"]
    assert [t.strip() for t in tokens] == ["<s>", "the", "lamp", "was", "lit"]
    with pytest.raises(ValueError, match="no tokenizer"):
        ln_probe.analyze(model, "the lamp was lit", **how)


def test_models_that_are_refused() -> None:
    """Without a head, of no bridge, or without norms: TransformerLens's bridge would compute LayerNorms."""
    shape = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 32, "vocab_size": 50}
    without_norms = hugging_face("gpt2")
    for block in without_norms.transformer.h:
        block.ln_1 = torch.nn.Identity()
    for model, options, word in (
        (transformers.GPT2Model(transformers.GPT2Config(**shape)), {}, "GPT2Model"),
        (transformers.CTRLLMHeadModel(transformers.CTRLConfig(dff=64, **shape)), {}, "CTRLLMHeadModel"),
        (without_norms, {}, "bridge"),
        (make_bridge("gpt2"), {"tokenizer": object()}, "tokenizer="),
    ):
        with pytest.raises(ValueError, match=word):
            ln_probe.analyze(model, TOKENS, progress=False, **options)


def test_every_entry_point_compares_the_model_as_it_is_now() -> None:
    """The bridge reads a factor and an eps from the configuration; where a module has another, that module is named."""
    model = hugging_face("gpt2", scale_attn_weights=False)
    for call in (ln_probe.analyze, ln_probe.freezing_cost, ln_probe.attribute_logits, find_norms):
        with pytest.raises(ValueError, match=r"first in transformer\.h\.0\.attn"):
            call(model, TOKENS) if call is not find_norms else call(model)
    model = hugging_face("llama").eval()
    before = ln_probe.attribute_logits(model, TOKENS, -1, target=7).check().own
    model.model.layers[0].self_attn.scaling *= 2  # after the first call
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    with torch.no_grad():
        own = float(model(TOKENS).logits[0, -1, 7])
    assert abs(own - before) > 1e-3
    assert ln_probe.attribute_logits(model, TOKENS, -1, target=7).check().own == pytest.approx(own, abs=1e-4)
    model.double()
    assert ln_probe.attribute_logits(model, TOKENS, -1, target=7).check().own == pytest.approx(own, abs=1e-4)
    norm = model.model.layers[0].input_layernorm
    norm.variance_epsilon = 0.5
    sigma = (model.get_input_embeddings()(TOKENS).double().pow(2).mean(-1) + 0.5).sqrt()
    with without(model, "scaling", tokens=TOKENS) as edit:
        assert edit.divisors["blocks.0.ln1"].rest == pytest.approx(float(sigma[0, 1:].mean()), rel=1e-5)
    model = hugging_face("gpt2")
    find_norms(model)
    model.transformer.h[0].ln_1.eps = 0.5
    with pytest.raises(ValueError, match="ln_1"), without(model, "scaling", tokens=TOKENS):
        pass


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_edits_of_a_model_in_memory_are_those_of_its_bridge(architecture: str) -> None:
    model, bridge = hugging_face(architecture).eval(), make_bridge(architecture).eval()
    tokens = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        intact = model(tokens).logits
        with without(model, "scaling", sites="all", scale=2.0) as edit:
            edited = model(tokens).logits
            with pytest.raises(ModelStateError, match="without"):
                ln_probe.analyze(model, tokens)
        with without(bridge, "scaling", sites="all", scale=2.0) as same:
            assert (edited - bridge(tokens)).abs().max() < 1e-5
        assert edit == same
        assert (edited - intact).abs().max() > 1e-2
        assert torch.equal(model(tokens).logits, intact)
    slope = []
    for one in (model, bridge):
        with linearized(one):
            logits = one(tokens)
            logits = getattr(logits, "logits", logits)
            one.zero_grad()
            logits[0, -1, 5].backward()
            table = one.get_input_embeddings().weight if one is model else one.W_E
            slope.append(next(p.grad for p in one.parameters() if p.shape == table.shape and p.grad is not None))
    torch.testing.assert_close(slope[0], slope[1], rtol=1e-4, atol=1e-6)
    with pytest.raises(InterventionError, match="heads"):
        without(model, "scaling", scale=2.0, heads=[(0, 0)]).__enter__()


def test_attribution_and_norms_of_a_model_in_memory() -> None:
    score = {"layer": 1, "head": 0, "query": 9, "key": 2}
    for function, more in ((ln_probe.attribute_logits, {}), (ln_probe.attribute_scores, score)):
        one, other = (function(make("gpt2").eval(), TOKENS, **more) for make in (hugging_face, make_bridge))
        pd.testing.assert_frame_equal(one.table, other.table)
    assert [s.name for s in find_norms(hugging_face("gpt2"))] == [s.name for s in find_norms(make_bridge("gpt2"))]
