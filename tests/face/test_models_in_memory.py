"""A plain Hugging Face model as `analyze` takes it: reports as of its folder, columns as of its own attention."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from architectures import cases, hugging_face, make_bridge, make_hooked, norm_free
from faulty import word_tokenizer
from small_models import DyT

import ln_probe
from ln_probe.analyses.probes.tables import TABLES
from ln_probe.guard import ModelStateError
from ln_probe.hooks import find_norms, linearized, without
from ln_probe.hooks.norm import UnknownNormError
from ln_probe.hooks.norm_edits import InterventionError
from ln_probe.loading.convert import has_hooked_transformer

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
    model.config._name_or_path = "mine" * (arch == "gpt2")
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
    assert about["name"] == ("mine" if arch == "gpt2" else about["architecture"])
    kind = [about[key] for key in ("kind", "architecture", "world")]
    assert kind == ["memory", type(model).__name__, "TransformerBridge"]
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
    assert report.provenance["calibration"]["count"] > 1, "one prompt is measured with constants of other text"
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
            output = one(tokens)
            one.zero_grad()
            getattr(output, "logits", output)[0, -1, 5].backward()
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


LENGTH = 23
PROMPTS = torch.randint(3, 50, (1, LENGTH), generator=torch.Generator().manual_seed(11))
GEOMETRY = ("selectability", "uniformity")
BOUND = 1e-6  # in float64, where no model rounds

# name: (architecture in conftest, further options, window of each layer, worlds besides the bridge)
CASES: dict[str, tuple[str, dict[str, Any], list[int | None], bool]] = {
    "gpt_neo_local": ("neo", {"window_size": 8}, [None, 8], True),
    "mistral": ("mistral", {"sliding_window": 8}, [8, 8], True),
    "gemma3": ("gemma3", {"sliding_window": 8}, [8, None], False),
    "gptj": ("gptj", {}, [None, None], False),
    "mpt": ("mpt", {}, [None, None], False),
    "mpt_6_heads": ("mpt", {"d_model": 48, "n_heads": 6}, [None, None], False),
    "bloom": ("bloom", {}, [None, None], False),
    "bloom_6_heads": ("bloom", {"hidden_size": 48, "n_head": 6}, [None, None], False),
    "gpt2_norm_free": ("gpt2", {}, [None, None], True),
    "gpt2": ("gpt2", {}, [None, None], True),
    "neox": ("neox", {}, [None, None], True),
    "opt": ("opt", {}, [None, None], True),
    "llama": ("llama", {}, [None, None], True),
    "gemma": ("gemma", {}, [None, None], False),
    "qwen3": ("qwen3", {}, [None, None], True),
    "olmo2": ("olmo2", {}, [None, None], False),
    "bert": ("bert", {}, [None, None], False),
}
WORLDS = ["bridge", "hooked"] if has_hooked_transformer() else ["bridge"]


def attentions(model: Any, tokens: torch.Tensor = PROMPTS) -> list[np.ndarray]:
    """The pattern of every layer [head query key], by Hugging Face alone."""
    with torch.no_grad():
        return [a[0].double().numpy() for a in model(tokens, output_attentions=True).attentions]


def expected(pattern: np.ndarray, window: int | None, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Entropy ratio of each head and largest weight of each key, by definition."""
    entropies, queries = np.zeros(len(pattern)), range(1 if causal else 0, pattern.shape[1])
    for t in queries:
        first, last = max(0, t - (window or LENGTH) + 1), t if causal else LENGTH - 1
        seen = pattern[:, t, first : last + 1]
        np.testing.assert_allclose(seen.sum(-1), 1, atol=1e-5, err_msg="the window in this test is wrong")
        logs = np.log(np.where(seen > 0, seen, 1.0))
        entropies += -(seen * logs).sum(-1) / np.log(last - first + 1)
    return entropies / len(queries), pattern[:, list(queries)].max(1)


def wrong_columns(
    report: ln_probe.Report, patterns: list[np.ndarray], windows: list[int | None], causal: bool = True
) -> list[tuple[str, int]]:
    """Return the columns, with the layer, that are not what the patterns define."""
    wrong = []
    for layer, (pattern, window) in enumerate(zip(patterns, windows, strict=True)):
        entropy, most = expected(pattern, window, causal)
        place = f"layer == {layer} and variant == 'intact'"
        rows = report.heads.query(place).sort_values("head")
        if not np.allclose(rows["entropy_ratio"], entropy, atol=BOUND, rtol=0):
            wrong.append(("entropy_ratio", layer))
        keys = report.keys.query(place).sort_values(["head", "position"])
        if not np.allclose(keys["pattern_max"].to_numpy().reshape(most.shape), most, atol=BOUND, rtol=0):
            wrong.append(("pattern_max", layer))
        if (keys["n"] > (window or LENGTH)).any():
            wrong.append(("n", layer))
    return wrong


EVERY = [(case, world) for case, (*_, hooked) in CASES.items() for world in (WORLDS if hooked else ["bridge"])]
QUICK = [(case, "bridge") for case in ("mistral", "gemma3", "gptj", "bloom_6_heads", "bert")]
QUICK += [(case, WORLDS[-1]) for case in ("gpt_neo_local", "gpt2_norm_free", "llama")]


@pytest.mark.parametrize(("case", "world"), cases(*QUICK, slow=[pair for pair in EVERY if pair not in QUICK]))
def test_columns_are_those_of_hugging_face(case: str, world: str, tmp_path: Path) -> None:
    arch, options, windows, _ = CASES[case]
    original = norm_free(torch.float64) if case == "gpt2_norm_free" else hugging_face(arch, torch.float64, **options)
    original.save_pretrained(tmp_path)
    model = ln_probe.load_model(tmp_path, dtype="float64", device="cpu", world=world)  # type: ignore[arg-type]
    report = ln_probe.analyze(model, PROMPTS, progress=False, probes=GEOMETRY)
    assert not [n for n in report.notes if "head space" in n]
    assert not wrong_columns(report, attentions(original), windows, causal=arch != "bert")


def test_norms_of_another_formula_are_refused() -> None:
    model = hugging_face("neox", torch.float64)
    for block in model.gpt_neox.layers:
        block.input_layernorm = DyT(block.input_layernorm, 0.6)
        block.post_attention_layernorm = DyT(block.post_attention_layernorm, 0.6)
    model.gpt_neox.final_layer_norm = DyT(model.gpt_neox.final_layer_norm, 0.6)
    with pytest.raises(UnknownNormError, match=r"blocks\.0\.ln1"):
        ln_probe.analyze(model, PROMPTS, progress=False, probes=["decomposition"])


@pytest.mark.skipif(not has_hooked_transformer(), reason="this TransformerLens has no HookedTransformer")
@pytest.mark.parametrize("options", [
    {"use_local_attn": True, "window_size": 6, "attn_types": ["global", "local"]},
    {"positional_embedding_type": "alibi"},
    {"positional_embedding_type": "rotary", "rotary_dim": 8, "rotary_adjacent_pairs": True},
    {"normalization_type": None},
    {"normalization_type": "LNPre", "use_attn_scale": False},
    {"use_qk_norm": True, "normalization_type": "RMS", "n_key_value_heads": 2},
], ids=str)  # fmt: skip
def test_columns_are_those_of_hooked_transformers(options: dict[str, Any]) -> None:
    model = make_hooked(**options, dtype=torch.float64)
    _, cache = model.run_with_cache(PROMPTS)
    patterns = [cache[f"blocks.{i}.attn.hook_pattern"][0].double().numpy() for i in range(2)]
    report = ln_probe.analyze(model, PROMPTS, progress=False, probes=GEOMETRY)
    assert not wrong_columns(report, patterns, [None, 6] if "window_size" in options else [None, None])
