"""Text tasks, logits in pieces, language models of the published shape, and seeds of the bundled models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ln_probe.analyses.lab import text_task
from ln_probe.analyses.lab.language_model.published import (
    FULL,
    Size,
    published_model,
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


def test_the_end_of_every_text_is_held_out(prose: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another “text”, 4000 letters long. " * 120)
    files = [prose, tmp_path / "other.txt"]
    text = text_task.TextTask(files, 300, 16)
    cut = [int(0.95 * len(file.read_text())) for file in files]
    parts = [(file.read_text()[:at], file.read_text()[at:]) for file, at in zip(files, cut, strict=True)]
    for number, tokens in enumerate((text.train_tokens, text.valid_tokens)):
        assert text.tokenizer.decode(tokens.tolist()) == "".join(part[number] for part in parts)
    assert text.boundary == 0
    assert text.tokenizer.get_vocab_size() == 300
    batch = text.batch(3, 50, 1)
    assert batch.shape == (50, 16)
    assert (batch[:, 0] == 0).all()
    windows = text.train_tokens.unfold(0, 15, 1)
    assert all(bool((windows == row).all(1).any()) for row in batch[:, 1:])
    assert torch.equal(text.batch(3, 50, 1), batch)
    assert not torch.equal(text.batch(4, 50, 1), batch)
    assert not torch.equal(text.batch(3, 50, 2), batch)
