"""What TransformerLens users do: a norm called on its own, folded models, installing, and answers from the recipes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from architectures import folded_in_place, make_bridge, make_hooked

import ln_probe
from ln_probe.hooks import find_norms, without

TOKENS = torch.arange(1, 11)[None]
SCALE = {"first": 0.5, "rest": 3.0}


@pytest.mark.parametrize("what", ["scaling", "both"])
@pytest.mark.parametrize(
    "make", [make_hooked, lambda: make_bridge("gpt2"), lambda: ln_probe.load_model("lm-layernorm")]
)
def test_a_norm_on_a_slice_takes_the_constant_of_later_positions(make: Any, what: str) -> None:
    model = make()
    final = find_norms(model)[-1].name
    with torch.no_grad(), without(model, what, sites=[final], scale={final: SCALE}):
        logits, cache = model.run_with_cache(TOKENS)
        last = cache[f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"][:, -1:]
        torch.testing.assert_close(model.unembed(model.ln_final(last)), logits[:, -1:], rtol=1e-5, atol=1e-5)
        lens = ln_probe.logit_lens(model, TOKENS).check()
    torch.testing.assert_close(lens.values[-1], logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [make_hooked, lambda: make_bridge("gpt2")])
def test_a_folded_model_is_told_what_to_load(make: Any) -> None:
    model = folded_in_place(make(), centre=True)
    report = ln_probe.analyze(model, TOKENS, probes="causal", progress=False)
    assert any("from_pretrained_no_processing" in note and "load_model" in note for note in report.notes)


def test_a_logit_lens_by_hand_is_the_one_of_the_recipe() -> None:
    """TransformerLens issues 1076, 696 and 523: each layer at its own sigma, or all at the last one's."""
    model = make_hooked()
    logits, cache = model.run_with_cache(TOKENS)
    stream = cache.accumulated_resid(layer=-1, apply_ln=False)
    with torch.no_grad():
        own = model.ln_final(stream[-1]) @ model.W_U + model.b_U
        held = cache.apply_ln_to_stack(stream, layer=-1) * model.ln_final.w + model.ln_final.b
    torch.testing.assert_close(ln_probe.logit_lens(model, TOKENS).check().values[-1], own)
    torch.testing.assert_close(own, logits)
    lens = ln_probe.logit_lens(model, TOKENS, scale="final").check()
    torch.testing.assert_close(lens.values, (held @ model.W_U + model.b_U).detach(), rtol=1e-4, atol=1e-4)
