"""Text tasks, logits in pieces, language models of the published shape, and seeds of the bundled models."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ln_probe.analyses.lab import text_task
from ln_probe.analyses.lab.language_model.published import (
    BEFORE,
    FRACTION,
    FULL,
    HEAD,
    NORMALIZED,
    Size,
    key_places,
    published_model,
    unselectable_keys,
)
from ln_probe.analyses.lab.text_task import piecewise_loss

SIZE = Size(d_vocab=300, n_ctx=24, batch=2, steps=4, valid_windows=4)


def test_the_published_shape() -> None:
    model = published_model("layernorm", None, FULL).build()
    assert model.W_U.shape == (8, 50257)
    names = {name for name, _ in model.named_parameters()}
    assert "blocks.0.ln1.w" not in names
    assert "blocks.0.attn.b_K" not in names
    assert {"blocks.0.attn.b_O", "blocks.0.ln2.w", "ln_final.w"} <= names
    assert model.blocks[0].attn.W_K.shape == (4, 8, 2)
    unscaled = published_model("projection_only", 1.0, SIZE).build()
    x = torch.randn(3, 8)
    torch.testing.assert_close(unscaled.blocks[0].ln1(x), x - x.mean(-1, keepdim=True))


@pytest.mark.parametrize("bias", [True, False])
def test_logits_in_pieces(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_task, "PIECE", 7)
    torch.manual_seed(0)
    model = replace(published_model("layernorm", None, SIZE), bias_unembed=bias).build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    tokens = torch.randint(300, (3, 24))
    whole, parts = model(tokens, return_type="loss"), piecewise_loss(model, tokens)
    assert parts.item() == pytest.approx(whole.item(), rel=1e-12)
    wanted, got = (torch.autograd.grad(loss, list(model.parameters())) for loss in (whole, parts))
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_keys_in_each_space() -> None:
    """By theorem: after LayerNorm on a sphere; in head space two dimensions, where interior keys abound."""
    torch.manual_seed(0)
    model = published_model("layernorm", None, Size(300, 64, 2, 4, embed_std=1.0)).build()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_K.normal_()
    shares = unselectable_keys(model, torch.randint(300, (2, 64)), key_places(range(4)))
    found = {(layer, space): value for layer, space, of, value in shares if of == FRACTION}
    assert len(found) == 12
    assert all(found[layer, NORMALIZED] == 0 for layer in range(4))
    assert all(found[layer, HEAD] > 0.5 for layer in range(4))
    assert 0 < np.mean([found[layer, BEFORE] for layer in range(4)]) < 0.5
