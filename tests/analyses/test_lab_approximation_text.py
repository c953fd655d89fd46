"""Transformers with logarithmic relative positions on text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from lab_runs import ran

from ln_probe.analyses.lab.approximation import approximation_text
from ln_probe.analyses.lab.approximation.approximation_text import RelativeTextConfig
from ln_probe.analyses.lab.train import TrainConfig


@pytest.mark.parametrize("dot_product", [True, False])
def test_attention_is_its_definition(dot_product: bool) -> None:
    torch.manual_seed(0)
    model = RelativeTextConfig(2, 4, 50, 12, d_model=16, dot_product=dot_product).build().double()
    attention = model.blocks[1].attn
    with torch.no_grad():
        attention.log_slope.normal_()
        if dot_product:
            attention.W_Q.normal_()
            attention.W_K.normal_()
    tokens = torch.randint(50, (3, 12))
    logits, cache = model.run_with_cache(tokens)
    torch.testing.assert_close(model(tokens), logits, rtol=1e-10, atol=1e-10)  # the fused path
    q, k = cache["blocks.1.attn.hook_q"], cache["blocks.1.attn.hook_k"]
    scores = torch.full((3, 4, 12, 12), -math.inf, dtype=torch.float64)
    for head in range(4):
        for t in range(12):
            for s in range(t + 1):
                dot = (q[:, t, head] * k[:, s, head]).sum(-1) / 2 if dot_product else 0.0
                scores[:, head, t, s] = dot - attention.log_slope[head].exp().item() * math.log(1 + t - s)
    torch.testing.assert_close(cache["blocks.1.attn.hook_pattern"], scores.softmax(-1), rtol=1e-9, atol=1e-12)


def test_without_the_dot_product_attention_does_not_depend_on_the_text() -> None:
    model = RelativeTextConfig(1, 2, 50, 12, d_model=16, dot_product=False).build()
    patterns = [model.run_with_cache(torch.randint(50, (1, 12)))[1]["blocks.0.attn.hook_pattern"] for _ in range(2)]
    assert torch.equal(*patterns)
    trained = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
    assert "log_slope" in trained
    assert not trained & {"W_Q", "W_K", "b_Q", "b_K"}


def test_a_run_from_end_to_end(prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(approximation_text, "D_VOCAB", 300)
    monkeypatch.setattr(approximation_text, "N_CTX", 16)
    monkeypatch.setattr(
        approximation_text,
        "training",
        lambda quick, seed: TrainConfig(steps=4, batch=2, seed=seed, evaluate_every=4, state_every=2),
    )
    results = ran("approximation_text", out := tmp_path / "out", texts=(prose,))
    assert len(results.summary) == len(approximation_text.grid(quick=True))
    assert (results.summary["seeds"] == 2).all()
    assert any("with the dot product" in sentence for sentence in results.conclusions)
    assert any("4 layers of 1 head minus 1 layer of 16 heads" in sentence for sentence in results.conclusions)
    pooled = results.tables["dot_product"].query("layers == 0")
    losses = results.tables["losses"].query(
        "layers == 1 and heads == 4"
    )  # the only size that the quick grid has both of
    by = losses.groupby("dot_product")["value"].mean()
    assert pooled["mean"].tolist() == pytest.approx([by[True] - by[False]])
    assert (out / "dot_product.csv").exists()
