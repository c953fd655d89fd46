"""Attribution in every form of model: sums are the model's own, and a batch is what its prompts are alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import cases, make_bridge, make_folded, make_hooked
from attribution_checks import assert_adds_up, assert_rebuilt, pattern_of
from small_models import lab

import ln_probe
from ln_probe.analyses.attribution import LogitAttribution, ScoreAttribution, attribute_logits, attribute_scores

pytestmark = [pytest.mark.lens, pytest.mark.filterwarnings("ignore::ln_probe.hooks.edits.NoOpWarning")]

RAGGED = [torch.arange(3, 13), torch.arange(7, 13), torch.arange(5, 15)]
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 8}
LAYERNORM = {
    "hooked": {},
    "hooked parallel": {**ROTARY, "parallel_attn_mlp": True},  # NeoX
    "hooked attention only": {"attn_only": True},
}
RMS = {"normalization_type": "RMS", "gated_mlp": True}
HOOKED = LAYERNORM | {
    "hooked rms rotary": {**RMS, "n_key_value_heads": 2, "final_rms": True, **ROTARY},  # Llama
    "hooked qk-norm": {"use_qk_norm": True, **ROTARY},
    "hooked rms qk-norm": {**RMS, "use_qk_norm": True, **ROTARY},  # Qwen3
    "hooked before and after": {**RMS, "use_normalization_before_and_after": True},  # Gemma 2
    "hooked without norms": {"normalization_type": None},
    "hooked soft cap": {"attn_scores_soft_cap": 3.0},
}
LAB = {
    "lab": {},
    "lab post-norm": {"norm_order": "post"},
    "lab post-norm alone": {"norm_order": "post", "norm_final": None},
    "lab scaling": {"norm_final": "scaling_only", "radius": 2.0, "positions": "sinusoidal"},
    "lab projection": {"norm_final": "projection_only", "positions": "none"},
    "lab untied": {"norm_final": "none", "tied": False, "positions": "rotary"},
    "lab without norms": {"norm": None, "norm_mlp": None, "norm_final": None},
    "lab without biases": {"bias_out": False, "bias_mlp": False, "bias_unembed": False, "affine_others": False},
    "lab attention without norms": {"norm": None},
    "lab rotary": {"positions": "rotary", "norm": "scaling_only"},
}
BRIDGED = ("gpt2", "gpt2 folded", "neox", "llama", "gemma2", "olmo2", "gpt-oss", "granite", "bloom", "opt", "opt-350m")
CHECKPOINTS = ("lm-layernorm", "mgm", "capp", "lab post-norm alone")
WHOLE = ("hooked", "hooked folded", "hooked rms rotary", "hooked qk-norm", "hooked soft cap", *BRIDGED, *CHECKPOINTS)
QUICK = ("hooked", "gpt2 folded", "olmo2", "gpt-oss", "gemma2")
FORMS = cases(*QUICK, slow=[name for name in WHOLE if name not in QUICK])
ONLY_FLOAT32 = ("gpt-oss", "lm-layernorm", "mgm", "capp")  # its experts, or a checkpoint that is float32
FLOAT32, FLOAT64 = torch.float32, torch.float64
Form = Callable[[str, torch.dtype], Any]
PROCESSED = ("neox", "llama", "qwen3", "opt", "gemma", "gemma2", "olmo2", "bloom")
STATES = ("", " uncentred", " folded")  # " uncentred": folded, with weights that write not centred
# Hugging Face's RMSNorms compute in float32 in a float64 model, HookedTransformer's do not.
ADDED_UP = cases(
    *((f"gpt2{state}", FLOAT32) for state in STATES),
    *((arch, FLOAT64) for arch in ("neox folded", "opt", "bloom folded")),
    *((name, FLOAT64) for name in (*HOOKED, *LAB)),
    *((name + state, FLOAT64) for name in LAYERNORM for state in STATES[1:]),
    slow=[(arch + state, FLOAT32) for arch in PROCESSED for state in STATES],
)
REBUILT = cases(
    *((name, FLOAT32, 1e-5) for name in ("gpt2", "llama", "gpt2 folded", "llama folded")),
    *((name, FLOAT64, 1e-7) for name in ("lab", "lab rotary", "lab post-norm alone")),  # rotary tables are float32
    *((name, FLOAT64, 1e-7) for name in ("hooked", "hooked qk-norm")),
    ("lab attention without norms", FLOAT64, 1e-5),
    slow=[(arch, FLOAT32, 1e-5) for arch in ("neox", "qwen3", "opt", "gemma", "bloom", "bert")],
)


@pytest.fixture
def form(request: Any) -> Form:
    def made(name: str, dtype: torch.dtype) -> Any:
        state = next((end for end in STATES[1:] if name.endswith(end)), "")
        base, centre = name.removesuffix(state), state == " folded"
        if base in HOOKED:
            model = make_hooked(**HOOKED[base], dtype=dtype)
            if state:
                model.process_weights_(fold_ln=True, center_writing_weights=centre, center_unembed=False)
            return model
        if base in ("mgm", "capp"):
            return ln_probe.load_model(request.getfixturevalue(base), allow_pickle=True)
        if base in LAB:
            return lab(**LAB[base]).to(dtype)
        if base == "lm-layernorm":
            return ln_probe.load_model(base)
        return make_folded(base, dtype, centre=centre) if state else make_bridge(base, dtype)

    return made


@pytest.mark.parametrize(("name", "dtype"), ADDED_UP)
def test_parts_add_up_to_the_logit(name: str, dtype: torch.dtype, form: Form) -> None:
    assert_adds_up(form(name, dtype), 1e-5 if dtype == FLOAT32 else 1e-10)


@pytest.mark.parametrize(("name", "dtype", "bound"), REBUILT)
def test_pairs_add_up_to_the_score(name: str, dtype: torch.dtype, bound: float, form: Form) -> None:
    assert_rebuilt(form(name, dtype), bound)


@pytest.mark.parametrize("name", FORMS)
def test_sums_and_batches(name: str, form: Form) -> None:
    dtype = FLOAT32 if name in ONLY_FLOAT32 else FLOAT64
    model = form(name, dtype)
    logits = attribute_logits(model, RAGGED, against="mean").check()
    assert isinstance(logits, LogitAttribution)
    assert logits.values.shape == (len(logits.components), 3, 10)
    for b, row in enumerate(RAGGED):
        last = len(row) - 1
        assert logits.values[:, b, last:].isnan().all()  # no token follows, or no position
        single = attribute_logits(model, row, last - 1, int(row[last]), "mean").check()
        assert torch.allclose(logits.terms[:, :, b, last - 1], single.terms[:, :, 0, 0], atol=1e-6 * single.scale)
    for queries, keys, against in ((-2, None, "mean"), (None, 1, None), (None, None, 0)):
        scores = attribute_scores(model, RAGGED, 1, 2, queries, keys, against).check()
        assert isinstance(scores, ScoreAttribution)
        assert scores.error <= scores.bound
        for b, row in enumerate(RAGGED):
            q, k = len(row) - 2, 1
            one = attribute_scores(model, row, 1, 2, q, k, against).check()
            there = {(-2, None): (b, k), (None, 1): (b, q), (None, None): (b, q, k)}[queries, keys]
            assert float(scores.total[there]) == pytest.approx(one.total, abs=1e-6 * one.scale)
            assert float(scores.own[there]) == pytest.approx(one.own, abs=1e-6 * one.scale)
            alone = one.table[one.table["side"] == "key"]["contribution"].to_numpy()
            assert scores.values[(slice(None), *there)].numpy() == pytest.approx(alone, abs=1e-6 * one.scale)
            hidden = scores.total[b].isnan()
            assert int((~hidden).sum()) == len(scores.table.query(f"batch == {b}")) // len(scores.components)
            assert hidden.any()  # later keys or queries, or places behind the end of a prompt
            assert one.weight == pytest.approx(float(pattern_of(model, 1, row)[2, q, k]), rel=1e-4)
    if dtype == torch.float64 and logits.bound < 1e-6:
        assert logits.error <= 1e-10
        assert scores.error <= 1e-10 or scores.bound > 1e-6
    if not logits.soft_cap:
        for b, row in enumerate(RAGGED):
            own = model(row[None])[0].detach().double()
            expected = own[range(len(row) - 1), row[1:]] - own[:-1].mean(1)
            off = (logits.total[b, : len(row) - 1] - expected).abs() / own[:-1].abs().amax(1)
            assert float(off.max()) <= 1e-5


def test_pattern_is_the_softmax_of_capped_scores_and_a_sink() -> None:
    """What attribution sums to is what the model's own attention was made of."""
    for arch in ("gemma2", "gpt-oss"):
        model = make_bridge(arch)
        found = attribute_scores(model, RAGGED[0], 1, 2, query=5).check()
        scores = found.total[0, :6]
        if arch == "gemma2":
            assert found.soft_cap == 50.0
            scores = 50.0 * (scores / 50.0).tanh()
        else:
            sink = model.blocks[1].attn.original_component.sinks[2].detach().double()
            scores = torch.cat([scores, sink[None]])
        assert torch.allclose(scores.softmax(0)[:6], found.weight[0, :6], atol=1e-6)
