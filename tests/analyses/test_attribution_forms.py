"""Attribution in every form of model: sums are the model's own, and a batch is what its prompts are alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_models import lab

import ln_probe
from ln_probe.analyses.attribution import (
    LogitAttributions,
    ScoreAttributions,
    attribute_logits,
    attribute_scores,
)

RAGGED = [torch.arange(3, 13), torch.arange(7, 13), torch.arange(5, 15)]
ROTARY = {"positional_embedding_type": "rotary", "rotary_dim": 8}
HOOKED = {
    "hooked": {},
    "hooked folded": {},
    "hooked rms rotary": {"normalization_type": "RMS", "gated_mlp": True, "n_key_value_heads": 2, **ROTARY},
    "hooked qk-norm": {"use_qk_norm": True, **ROTARY},
    "hooked soft cap": {"attn_scores_soft_cap": 3.0},
}
BRIDGED = ("gpt2", "gpt2 folded", "neox", "llama", "gemma2", "olmo2", "gpt-oss", "granite", "bloom", "opt", "opt-350m")
CHECKPOINTS = ("lm-layernorm", "mgm", "capp", "post-norm")
QUICK = ("hooked", "gpt2 folded", "olmo2", "gpt-oss", "gemma2")
FORMS = [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in (*HOOKED, *BRIDGED, *CHECKPOINTS)]
ONLY_FLOAT32 = ("gpt-oss", "lm-layernorm", "mgm", "capp")  # its experts, or a checkpoint that is float32


@pytest.fixture
def form(
    make_bridge: Callable[..., Any], make_folded: Callable[..., Any], make_hooked: Callable[..., Any], request: Any
) -> Callable[[str, torch.dtype], Any]:
    def made(name: str, dtype: torch.dtype) -> Any:
        if name in HOOKED:
            model = make_hooked(**HOOKED[name], dtype=dtype)
            if name.endswith("folded"):
                model.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=False)
            return model
        if name in ("mgm", "capp"):
            path: Path = request.getfixturevalue(name)
            return ln_probe.load_model(path, allow_pickle=True)
        if name == "post-norm":
            return lab(norm_order="post", norm_final=None).to(dtype)
        if name == "lm-layernorm":
            return ln_probe.load_model(name)
        if name.endswith(" folded"):
            return make_folded(name.removesuffix(" folded"), dtype, centre=True)
        return make_bridge(name, dtype)

    return made


@pytest.mark.filterwarnings("ignore::ln_probe.hooks.interventions.NoOpWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FORMS)
def test_sums_and_batches(name: str, dtype: torch.dtype, form: Callable[[str, torch.dtype], Any]) -> None:
    if dtype == torch.float64 and name in ONLY_FLOAT32:
        pytest.skip("float32 alone")
    model = form(name, dtype)
    logits = attribute_logits(model, RAGGED, against="mean").check()
    assert isinstance(logits, LogitAttributions)
    for queries, keys, against in ((-2, None, "mean"), (None, 1, None), (None, None, 0)):
        scores = attribute_scores(model, RAGGED, 1, 2, queries, keys, against).check()
        assert isinstance(scores, ScoreAttributions)
        assert scores.error <= scores.bound
        for b, row in enumerate(RAGGED):
            q, k = len(row) - 2, 1
            one = attribute_scores(model, row, 1, 2, q, k, against).check()
            at = k if keys is None and queries is not None else q
            there = (b, q, k) if queries is None and keys is None else (b, at)
            assert float(scores.total[there]) == pytest.approx(one.total, abs=1e-6 * one.scale)
            assert float(scores.own[there]) == pytest.approx(one.own, abs=1e-6 * one.scale)
            alone = one.table[one.table["side"] == scores.side]["contribution"].to_numpy()
            assert scores.values[(slice(None), *there)].numpy() == pytest.approx(alone, abs=1e-6 * one.scale)
            hidden = scores.total[b].isnan()
            assert int((~hidden).sum()) == len(scores.table.query(f"batch == {b}")) // len(scores.components)
            assert hidden.any()  # later keys or queries, or places behind the end of a prompt
            with torch.no_grad():
                seen: list[torch.Tensor] = []
                handle = model.blocks[1].attn.hook_pattern.register_forward_hook(
                    lambda _m, _a, out, seen=seen: seen.append(out.detach()[0].double())
                )
                model(row[None])
                handle.remove()
            assert one.weight == pytest.approx(float(seen[0][2, q, k]), rel=1e-4)
    if dtype == torch.float64 and logits.bound < 1e-6:
        assert logits.error <= 1e-10
        assert scores.error <= 1e-10 or scores.bound > 1e-6
    if not logits.soft_cap:
        for b, row in enumerate(RAGGED):
            with torch.no_grad():
                own = model(row[None])[0].double()
            expected = own[range(len(row) - 1), row[1:]] - own[:-1].mean(1)
            off = (logits.total[b, : len(row) - 1] - expected).abs() / own[:-1].abs().amax(1)
            assert float(off.max()) <= 1e-5


def test_pattern_is_the_softmax_of_capped_scores_and_a_sink(make_bridge: Callable[..., Any]) -> None:
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
