"""Text tasks with a tokenizer of the user's, logits in pieces, and the experiment on models of the published shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ln_probe.analyses.lab import text_task
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import published_language_model
from ln_probe.analyses.lab.language_model.published_language_model import (
    BEFORE,
    FRACTION,
    FULL,
    HEAD,
    NORMALIZED,
    Size,
    key_places,
    make_runs,
    published_model,
    run,
    unselectable_keys,
)
from ln_probe.analyses.lab.run_folder import load_run
from ln_probe.analyses.lab.text_task import TextTask, piecewise_loss, read_tokenizer, train_tokenizer

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


def test_a_tokenizer_of_the_users(prose: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    made = train_tokenizer([prose.read_text()], 280)
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path / "tok")
    task = TextTask([prose], 280, 16, tokenizer=tmp_path / "tok", valid_windows=3)
    assert task.tokenizer.encode("the ships").ids == made.encode("the ships").ids
    assert task.held_out(3).shape == (3, 16)
    with pytest.raises(ValueError, match=r"has 280 tokens and a <\|endoftext\|>; wanted: 300 tokens"):
        read_tokenizer(tmp_path / "tok", 300)
    with pytest.raises(FileNotFoundError, match="no tokenizer folder"):
        read_tokenizer(tmp_path / "nothing", 300)


def test_gpt2s_tokenizer(shared: Path) -> None:
    found = read_tokenizer(shared / "tokenizers" / "gpt2", 50257)
    assert found.encode("Hello world").ids == [15496, 995]


def test_keys_in_each_space() -> None:
    """By theorem: after LayerNorm on a sphere; in head space two dimensions, where interior keys abound."""
    torch.manual_seed(0)
    model = published_model("layernorm", None, Size(300, 64, 2, 4, embed_std=1.0)).build()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_K.normal_()
    shares = unselectable_keys(model, torch.randint(300, (2, 64)), key_places(range(4)))
    found = {(layer, space): value for layer, space, value in shares}
    assert len(found) == 12
    assert all(found[layer, NORMALIZED] == 0 for layer in range(4))
    assert all(found[layer, HEAD] > 0.5 for layer in range(4))
    assert 0 < np.mean([found[layer, BEFORE] for layer in range(4)]) < 0.5


@pytest.mark.slow
def test_a_run_of_the_experiment(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_language_model, "TINY", SIZE)
    monkeypatch.setattr(published_language_model, "CONTEXTS", 2)
    request = Request(tmp_path, (0, 1), quick=True, texts=(prose,), progress=False)
    with pytest.raises(ValueError, match=r"holds none of these [0-9]+ runs: leave out --collect"):
        run(Request(tmp_path, (0, 1), quick=True, texts=(prose,), collect=True, progress=False))
    found = run(request)
    assert len({run.folder for run in make_runs(request, SIZE)}) == 6
    summary = found.summary[found.summary["measure"] == FRACTION]
    assert set(summary["seeds"]) == {2}
    assert set(summary["step"]) == {0, 1, 2, 4}
    last = summary[summary["step"] == 4].set_index(["norm", "divisor", "layer", "space"])
    assert last.loc["projection_only", "1", 0, NORMALIZED]["published"] == 0.51
    assert last.loc["layernorm", "-", 3, BEFORE]["published"] == 0.261
    assert summary.loc[summary["step"] < 4, "published"].isna().all()
    assert len(found.conclusions) == 3
    other = tmp_path / "other.txt"
    other.write_text(prose.read_text()[:-400])
    with pytest.raises(FileExistsError, match=r"holds another run \(its data"):
        run(replace(request, texts=(other,), collect=True))
    again = run(request)  # from what is there
    assert again.conclusions == found.conclusions
    divisors = {
        float(m.blocks[0].ln1.divisor)
        for m in (load_run(r.folder) for r in make_runs(request, SIZE))
        if m.blocks[0].ln1.divisor is not None
    }
    assert 1.0 in divisors
    assert len(divisors) == 3
