"""Relative positions: by definition, targets by hand, least squares twice, rates, on text, adaptive memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lab_runs import by_definition

from ln_probe.analyses.lab.approximation import relative as targets
from ln_probe.analyses.lab.approximation.text_models import RelativeTextConfig
from ln_probe.analyses.lab.norms import NORM_KINDS, calibrate


def random_inputs(size: int, length: int = targets.LENGTH, seed: int = 0) -> torch.Tensor:
    return 2.0 * torch.randint(2, (size, length), generator=torch.Generator().manual_seed(seed)).double() - 1


@settings(max_examples=40, deadline=None)
@given(
    kernel=st.sampled_from(("log", "linear", "t5", "table")),
    dot_product=st.booleans(),
    norm=st.sampled_from(NORM_KINDS),
    order=st.sampled_from(("pre", "post")),
    heads=st.integers(1, 4),
    width=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_the_model_is_its_definition(
    kernel: str, dot_product: bool, norm: str, order: str, heads: int, width: int, seed: int
) -> None:
    torch.manual_seed(seed)
    model = targets.RelativeConfig(20, heads, width, kernel, dot_product, norm, order).build().double()
    if kernel == "table":
        torch.nn.init.normal_(model.bias)
    x = random_inputs(6, 20, seed)
    with calibrate(model):
        model(x)
    torch.testing.assert_close(model(x), by_definition(model, x), rtol=1e-10, atol=1e-10)


def test_targets_by_hand() -> None:
    x = random_inputs(3)
    s = np.arange(1, targets.LENGTH + 1)
    rows = x.numpy()
    with np.errstate(divide="ignore"):
        power = np.where(s < 1000, (1000.0 - s) ** -0.5, 0)
    np.testing.assert_allclose(targets.evaluate("4a", x), rows @ power, atol=1e-12)
    np.testing.assert_allclose(targets.evaluate("4b", x), rows @ np.exp(-5.0 * (1000 - s)), atol=1e-12)
    np.testing.assert_allclose(targets.evaluate("2b", x), rows[:, 47] + rows[:, 55] + rows[:, 98], atol=1e-12)
    only = x.clone()
    only[:, 98] *= -1
    assert not torch.equal(targets.evaluate("2a", x), targets.evaluate("2a", only))
    only[:, 98] *= -1
    only[:, 99] *= -1
    for target in ("1b", "2a", "2b"):
        assert torch.equal(targets.evaluate(target, x), targets.evaluate(target, only))


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
    trained = {name.rsplit(".", 1)[-1] for name, _ in model.named_parameters()}
    assert ({"W_Q", "W_K", "b_Q", "b_K"} & trained != set()) == dot_product


def adaptive_by_hand(grain: float = 1e-7) -> targets.RelativeTransformer:
    """Two heads with the dot product and no FFN whose error is near 0, in float64.

    Args:
        grain: of a head's weight on all lags but its own together.
    """
    model = targets.RelativeConfig(targets.LENGTH, 2, 0, "table", True).build().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed[0, 0], model.embed[1, 0] = -1.0, 1.0  # the input itself, in one dimension of the stream
        model.embed[:, 1] = 1.0
        for head, (place, used_for) in enumerate(((targets.IF_PLUS, 1.0), (targets.IF_MINUS, -1.0))):
            model.bias[head] = np.log(grain / targets.LENGTH)
            model.bias[head, targets.LENGTH - place] = 0.0
            # The score of a token: 0 where the head is used, else large for +1s and as small for -1s.
            model.W_Q[head, 0, 0], model.W_Q[head, 1, 0] = -used_for, 1.0
            model.W_K[head, 0, 0] = -np.log(grain) * np.sqrt(targets.D_HEAD)
            model.W_V[head, 0, 0] = model.W_O[head, 0, 2] = 1.0
        model.out.weight[0, 2] = 1.0  # the sum of both: one of them is 1
        model.out.bias[0] = -1.0
    return model


def test_two_heads_with_the_dot_product_do_it_by_hand() -> None:
    model, x = adaptive_by_hand(), random_inputs(4096, seed=3)
    with torch.no_grad():
        assert float((model(x) - targets.evaluate("adaptive", x)).pow(2).mean()) < 1e-10
        torch.testing.assert_close(model(x[:16]), by_definition(model, x[:16]), rtol=0, atol=1e-10)
        assert 1e-10 < float((adaptive_by_hand(1e-2)(x) - targets.evaluate("adaptive", x)).pow(2).mean()) < 1e-2
