"""Text tasks, logits in pieces, language models of the published shape, and seeds of the bundled models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from ln_probe.analyses.lab import text_task
from ln_probe.analyses.lab.experiments import Request
from ln_probe.analyses.lab.language_model import published_language_model
from ln_probe.analyses.lab.language_model.bundled_seeds import (
    ALL_LAYERS,
    COSTS,
    FROZEN,
    KEYS,
    _keys,
    contrasts,
    costs,
    findings,
    text,
    unselectable,
)
from ln_probe.analyses.lab.language_model.published_language_model import (
    BEFORE,
    FRACTION,
    FULL,
    HEAD,
    LOSS,
    NORMALIZED,
    Size,
    key_places,
    make_runs,
    published_model,
    run,
    unselectable_keys,
)
from ln_probe.analyses.lab.norms import NORM_KINDS, SCALES, calibrate
from ln_probe.analyses.lab.run_folder import load_run
from ln_probe.analyses.lab.text_task import TextTask, piecewise_loss, read_tokenizer, train_tokenizer
from ln_probe.analyses.lab.transformer import LabConfig

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
    bad = tmp_path / "bad"
    bad.mkdir()
    with pytest.raises(ValueError, match=r"bad holds no tokenizer\.json: give a folder with a fast tokenizer"):
        read_tokenizer(bad, 300)
    (bad / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"bad holds a tokenizer\.json that cannot be read: give a folder"):
        read_tokenizer(bad, 300)


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
    other = tmp_path / "other.txt"
    other.write_text(prose.read_text()[:-400])
    with pytest.raises(FileExistsError, match=r"holds another run \(not the same: data"):
        run(replace(request, texts=(other,), collect=True))
    run(request)  # from what is there
    divisors = {
        float(m.blocks[0].ln1.divisor)
        for m in (load_run(r.folder) for r in make_runs(request, SIZE))
        if m.blocks[0].ln1.divisor is not None
    }
    assert 1.0 in divisors
    assert len(divisors) == 3


@pytest.mark.parametrize("norm", NORM_KINDS)
def test_keys_of_a_constant_divisor(norm: str) -> None:
    """With each token's own scale they are the model's; only norms that scale are measured frozen."""
    torch.manual_seed(0)
    model = LabConfig(2, 8, 4, 11, 16, norm=norm).build()
    tokens = torch.randint(11, (3, 16))
    with calibrate(model), torch.no_grad():
        model(tokens)
    _, cache = model.run_with_cache(tokens)
    for layer, block in enumerate(model.blocks):
        at = f"blocks.{layer}"
        made = _keys(block, cache[f"{at}.hook_resid_pre"], cache[f"{at}.ln1.hook_scale"])
        torch.testing.assert_close(made, cache[f"{at}.attn.hook_k"])
    found = list(unselectable(model, tokens))
    assert [(layer, measure) for layer, measure, _ in found] == [
        (layer, measure) for layer in (0, 1) for measure in ((FRACTION, FROZEN) if norm in SCALES else (FRACTION,))
    ]
    assert all(0 < share < 1 for _, _, share in found)


def test_what_the_terms_cost() -> None:
    """With each site's constants put in by hand; a model that does not project loses nothing without projection."""
    torch.manual_seed(0)
    made = LabConfig(2, 8, 4, 11, 16, norm="scaling_only", norm_mlp="scaling_only", norm_final="scaling_only")
    model = made.build()
    tokens, others = torch.randint(11, (5, 16)), torch.randint(11, (5, 16))
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.3 * torch.randn_like(weights)
    found = {measure: (layer, cost) for layer, measure, cost in costs(model, tokens, others)}
    assert found[COSTS["projection"]] == (ALL_LAYERS, 0)
    _, cache = model.run_with_cache(others)
    frozen = {
        name: torch.cat([sigma[:, :1].mean(0), sigma[:, 1:].mean().expand(15, 1)])
        for name, sigma in cache.items()
        if name.endswith("hook_scale")
    }
    hooks = [(name, lambda sigma, hook: frozen[hook.name].expand_as(sigma)) for name in frozen]
    with torch.no_grad():
        by_hand = model.run_with_hooks(tokens, return_type="loss", fwd_hooks=hooks) - model(tokens, return_type="loss")
    assert found[COSTS["scaling"]] == (ALL_LAYERS, pytest.approx(float(by_hand), abs=1e-6))
    assert abs(by_hand) > 1e-3


def test_other_text_than_the_shipped(tmp_path: Path) -> None:
    """Seed 0 is the checkpoint that ships: its tokens mean nothing to another tokenizer."""
    file = tmp_path / "other.txt"
    file.write_text("".join(f"{i} green bottles hanging on the wall, " for i in range(9000)))
    request = Request(tmp_path, (0, 1), texts=(file,))
    with pytest.raises(ValueError, match=r"trained on kjv\.txt \(262804ea\), .*, got other\.txt \("):
        text(request)
    assert text(replace(request, quick=True)).d_vocab == 1024


def test_contrasts_are_within_seeds() -> None:
    lost = {"layernorm": 3.9, "scaling_only": 3.8, "projection_only": 3.5, "none": 3.4}
    rows = [(norm, ALL_LAYERS, LOSS, seed, loss + 0.1 * seed) for norm, loss in lost.items() for seed in range(3)]
    rows += [
        (norm, layer, FRACTION, seed, 0.1 + 0.02 * layer) for norm in lost for layer in range(4) for seed in range(3)
    ]
    values = pd.DataFrame(rows, columns=[*KEYS, "seed", "value"])
    results = findings(values)
    table = results.tables["contrasts"].set_index(["measure", "contrast"])
    assert table.loc[(LOSS, "scaling, with projection"), "mean"] == pytest.approx(0.4)
    assert table.loc[(LOSS, "projection, with scaling"), "mean"] == pytest.approx(0.1)
    assert table.loc[(FRACTION, "scaling, without projection"), "p_holm"] == 1
    means = results.summary.set_index(KEYS)["mean"]
    assert means["none", ALL_LAYERS, FRACTION] == pytest.approx(0.13)
    assert len(results.tables["seeds"]) == len(values)
    assert contrasts(values[values["norm"] == "none"]).empty
