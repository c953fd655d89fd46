"""What attribution of any model has to add up to: the model's own logits, and the log ratios of its own attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ln_probe.analyses.attribution import attribute_logits, attribute_scores
from ln_probe.analyses.attribution.logits import TERMS
from ln_probe.hooks import find_norms, without

TOKENS = torch.arange(2, 12)  # (1 is OPT's padding)
HEAD = {"layer": 1, "head": 2, "query": 7}


def assert_adds_up(model: Any, bound: float, *, at: int = 6) -> None:
    """Sums equal logit − b_U, and projection's column what taking projection away from the final norm changes."""
    found = attribute_logits(model, TOKENS, at, target=3)
    cap = found.soft_cap

    def uncapped() -> torch.Tensor:
        with torch.no_grad():
            logits = model(TOKENS[None])[0, at].double()
        return cap * (logits / cap).atanh() if cap else logits

    logits = uncapped()
    parts = found.table[found.table["kind"] != "unembedding bias"]
    bias = float(found.table["contribution"].sum() - parts["contribution"].sum())
    assert found.check() is found
    assert abs(parts["contribution"].sum() - (float(logits[3]) - bias)) <= bound * float(logits.abs().max())
    assert found.own == pytest.approx(float(logits[3]), rel=1e-12)
    assert found.terms.shape == (len(found.table), 3, 1, 1)
    assert np.allclose(found.table[list(TERMS)].sum(axis=1), found.table["contribution"], rtol=1e-12, atol=1e-13)
    final = [s.name for s in find_norms(model) if s.reads == "unembed"]
    if not final:
        assert (found.table["projection"] == 0).all()
        return
    with without(model, "projection", sites=final):
        taken = float(logits[3] - uncapped()[3])
    assert abs(found.table["projection"].sum() - taken) <= 2 * bound * float(logits.abs().max())


def pattern_of(model: Any, layer: int, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    """The model's own attention, [head query key], in float64."""
    seen: list[torch.Tensor] = []
    point = model.blocks[layer].attn.hook_pattern
    handle = point.register_forward_hook(lambda _m, _a, out: seen.append(out.detach()[0].double()))
    with torch.no_grad():
        model(tokens[None])
    handle.remove()
    return seen[0]


def assert_rebuilt(model: Any, bound: float) -> None:
    """Score differences are the log ratios of the attention that the model paid, which is another way to them."""
    log = pattern_of(model, 1)[2, 7].log()
    seen = log[torch.isfinite(log)]
    one = attribute_scores(model, TOKENS, **HEAD, key=3, against=5).check()
    assert abs(one.total - float(log[3] - log[5])) <= bound * max(1.0, one.scale)
    mean = attribute_scores(model, TOKENS, **HEAD, key=-7, against="mean").check()
    assert abs(mean.total - float(log[3] - seen.mean())) <= bound * max(1.0, one.scale)
    alone, other = (attribute_scores(model, TOKENS, **HEAD, key=k).check() for k in (3, 5))
    assert np.allclose(one.pairs, alone.pairs - other.pairs, atol=1e-9)
    assert one.pairs.to_numpy().sum() == pytest.approx(one.total, abs=1e-9)
    for _, rows in one.table.groupby("side"):
        assert rows["contribution"].sum() == pytest.approx(one.total, abs=1e-9)
    assert one.weight == pytest.approx(float(log[3].exp()), rel=1e-4)
