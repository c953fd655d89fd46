"""Edits that share a pass give what each gives alone, in every world, with the model's logits and with our own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from architectures import cases, make_bridge

from ln_probe.analyses.probes import shared_passes
from ln_probe.analyses.probes.edited_runs import EditedRuns
from ln_probe.hooks.constants import Constant, mean_sigmas
from ln_probe.hooks.edits import without
from ln_probe.hooks.norms import find_norms

TOKENS = torch.tensor([5, 7, 7, 3, 11, 2, 19, 23])
SUMS = ["nll", "nll_uniform", "nll_optimal", "kl", "agree", "entropy"]


def measured(model: Any) -> pd.DataFrame:
    sites = find_norms(model)
    constants = mean_sigmas(model, sites, [TOKENS])
    best = {name: Constant(1.1 * c.first, 0.9 * c.rest) for name, c in constants.items()}
    return EditedRuns(model, sites, constants, optimal=lambda _group, _prompt: best).measure(0, TOKENS)


@pytest.mark.parametrize("arch", cases("gpt2", "qwen3", slow=["neox", "opt"]))
def test_together_as_alone(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_bridge(arch, torch.float32)
    together = measured(model)
    monkeypatch.setattr(shared_passes, "TOKENS_AT_ONCE", 1)
    alone = measured(model)
    for name in SUMS:
        scale = np.abs(alone["nll"]).max() if name.startswith(("nll", "kl")) else 1.0
        np.testing.assert_allclose(together[name], alone[name], rtol=1e-6, atol=1e-6 * scale)
    assert (together["agree"] == alone["agree"]).all()


def test_agreement_counts_the_intact_models_favorites() -> None:
    model = make_bridge("gpt2", torch.float64)
    rows, constants = measured(model).set_index(["sites", "variant"]), mean_sigmas(model, find_norms(model), [TOKENS])
    intact = model(TOKENS[None], return_type="logits")[0].argmax(-1)
    for variant, term in (("no_scaling", "scaling"), ("both_removed", "both")):
        with without(model, term, sites="all", scale=constants):
            edited = model(TOKENS[None], return_type="logits")[0].argmax(-1)
        same = int((edited == intact).sum())
        assert rows.loc[("all", variant), "agree"] == same < len(TOKENS)
    assert rows.loc[("all", "intact"), "agree"] == len(TOKENS)


@pytest.mark.parametrize("arch", ["gpt2", "llama", "gemma2"])
def test_logits_made_here_are_the_models(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few columns of the vocabulary at a time, against whole logits; Gemma 2 caps its own, so those are taken."""
    model = make_bridge(arch, torch.float64)
    monkeypatch.setattr(shared_passes, "_NARROWEST", 7)
    monkeypatch.setattr(shared_passes, "_LOGITS", 1)
    found: list[bool] = []
    making = shared_passes.find_unembedding
    monkeypatch.setattr(
        shared_passes, "find_unembedding", lambda *args: (found.append((made := making(*args)) is not None), made)[1]
    )
    ours = measured(model)
    assert found == [arch != "gemma2"]
    monkeypatch.setattr(shared_passes, "find_unembedding", lambda *_: None)
    theirs = measured(model)
    for name in SUMS:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-9, atol=1e-11)


def test_sixteen_bits_are_taken_as_they_are() -> None:
    model = make_bridge("gpt2", torch.bfloat16)
    rows = measured(model).set_index(["sites", "variant"])
    with torch.no_grad():
        logits = model(TOKENS[None], return_type="logits")[0].float()
    loss = float(torch.nn.functional.cross_entropy(logits[:-1], TOKENS[1:], reduction="sum"))
    assert float(rows.loc[("all", "intact"), "nll"]) == pytest.approx(loss, rel=1e-6)  # type: ignore[arg-type]
    assert rows["kl"].notna().all()
