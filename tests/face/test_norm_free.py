"""A norm-free GPT-2, as such checkpoints are released, beside the same with norms: report and comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ln_probe
from ln_probe.analyses.probes.statistics import PROMPTS_NEEDED

COLUMNS = ["margin_median", "attainable_median", "attainable_last_median", "pattern_max_median", "entropy_ratio",
           "score_spread", "unselectable"]  # fmt: skip


def norm_free(make_bridge: Callable[..., Any]) -> Any:
    """eps 1e12 and gains times 1e6: Px, divided by nothing that depends on x."""
    model = make_bridge("gpt2", layer_norm_epsilon=1e12)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln_" in name and name.endswith("weight"):
                parameter.mul_(1e6)
    return model


@pytest.mark.slow
def test_a_norm_free_model_beside_one_with_norms(make_bridge: Callable[..., Any]) -> None:
    prompts = torch.randint(50, (32, 10), generator=torch.Generator().manual_seed(0))
    reports = [ln_probe.analyze(m, prompts, progress=False) for m in (make_bridge("gpt2"), norm_free(make_bridge))]
    free = reports[1]
    assert not free.failures
    assert any(
        f.startswith("A norm-free model: none of its 5 norms scales (5 subtract the mean") for f in free.findings()
    )
    assert not any(f.startswith("A norm-free model") for f in reports[0].findings())
    effects = free.tables["head_effects"].set_index("variant")
    assert (effects.loc["no_scaling", "delta_loss"] == 0).all(), "there is no scaling to take away"
    assert (effects.loc["no_projection", "delta_loss"] != 0).all()
    assert np.isfinite(effects[["delta_loss", "estimate"]]).all(axis=None)
    both = ln_probe.compare(reports, ["with norms", "norm-free"])
    heads = both.heads.xs("head", level="space")
    for column in COLUMNS:
        assert np.isfinite(heads[column].astype(float)).all(axis=None), column
    paired = both.paired[both.paired["variant"] == "no_projection"]
    assert len(paired)
    assert np.isfinite(paired["difference"]).all()
    enough = paired["prompts"] >= PROMPTS_NEEDED  # groups; single norms are measured on fewer, and have no interval
    assert 0 < enough.sum() < len(paired)
    assert (np.isfinite(paired[["low", "high"]]).all(axis=1) == enough).all()
    assert (paired["prompts"] >= 12).all()
    assert len(free.by_head()) == 8
    assert "<svg" in free._repr_html_()


def test_it_is_named(make_bridge: Callable[..., Any]) -> None:
    report = ln_probe.analyze(
        norm_free(make_bridge), torch.arange(1, 13)[None], probes=("decomposition",), progress=False
    )
    assert any(f.startswith("A norm-free model: none of its 5 norms scales") for f in report.findings())
