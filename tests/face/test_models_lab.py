"""Lab models are TransformerLens models where TransformerLens has a class that can hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ln_probe import bundled_models, load_model, source_of
from ln_probe.analyses.lab.run_folder import load_run
from ln_probe.hooks import find_sites
from ln_probe.loading.convert import has_hooked_transformer
from ln_probe.models import bundled_folder

WORLDS = [
    pytest.param("hooked", marks=pytest.mark.skipif(not has_hooked_transformer(), reason="needs TransformerLens 3")),
    "bridge",
]
TEXT = "In the beginning God created the heaven and the earth."


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model_is_a_transformer_lens_model(name: str, world: Any) -> None:
    model: Any = load_model(name, world=world)
    trained = load_run(bundled_folder(name))
    tokens = model.to_tokens(TEXT)
    torch.testing.assert_close(model(tokens), trained(tokens), atol=1e-4, rtol=0)
    assert source_of(model).world == {"hooked": "HookedTransformer", "bridge": "TransformerBridge"}[world]
    assert "".join(model.to_str_tokens(TEXT)) == TEXT
    assert model.W_Q.shape == (4, 16, 128, 8)
    _, cache = model.run_with_cache(tokens)
    assert cache["blocks.0.attn.hook_pattern"].shape == (1, 16, tokens.shape[1], tokens.shape[1])
    said = model.generate(tokens, max_new_tokens=4, do_sample=False, verbose=False)
    with torch.no_grad():
        expected = tokens
        for _ in range(4):
            expected = torch.cat([expected, trained(expected)[:, -1:].argmax(-1)], dim=1)
    assert said.tolist() == expected.tolist()
    kinds = {site.name: site.kind for site in find_sites(model)}
    assert kinds == {site.name: site.kind for site in find_sites(trained)}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["lm-projection_only", "lm-none"])
def test_a_norm_without_scaling_stays_one(name: str, world: Any) -> None:
    """A bridge's own component would divide by sigma, whatever it wraps; and folding leaves such a model alone."""
    model: Any = load_model(name, world=world)
    norm = model.blocks[0].ln1
    x = torch.randn(1, 3, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        zero = norm(torch.zeros_like(x))
        torch.testing.assert_close(norm(2 * x) - zero, 2 * (norm(x) - zero))  # linear but for its bias
        shift = norm(x + 1) - norm(x)
    assert bool((shift.abs() < 1e-5).all()) == (name == "lm-projection_only")
    tokens = model.to_tokens(TEXT)
    with torch.no_grad():
        before = model(tokens).log_softmax(-1)
        if world == "hooked":
            model.process_weights_()
        else:
            model.enable_compatibility_mode(disable_warnings=True)
        torch.testing.assert_close(model(tokens).log_softmax(-1), before, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match=rf"{name} has norms that are not LayerNorm \(blocks.0.ln1 …\), and only"):
        load_model(name, world=world, fold_ln=True)
