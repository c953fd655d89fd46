"""The headline alone, and losses of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ln_probe
from ln_probe.hooks.objective import Objective, ObjectiveError

TOKENS = torch.randint(1, 50, (6, 12), generator=torch.Generator().manual_seed(0))


def next_token(output: Tensor, tokens: Tensor) -> Tensor:
    losses = F.cross_entropy(output[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(-1)


def of_the_last_position(output: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(output[:, -1], tokens[:, 0] % output.shape[-1], reduction="none")


def drifting(output: Tensor, tokens: Tensor) -> Tensor:
    return torch.rand(len(tokens))


def test_the_headline_is_the_number_of_the_report(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    cost = ln_probe.freezing_cost(model, TOKENS)
    report = ln_probe.analyze(model, TOKENS, probes=["causal"], progress=False)
    rows = report.causal.set_index(["sites", "variant"])
    row = rows.loc[("all", "no_scaling")]
    assert cost.estimate == pytest.approx(float(row["delta_loss"]), abs=1e-6)
    assert np.isnan(cost.low)
    assert cost.loss == pytest.approx(float(row["loss"] - row["delta_loss"]), abs=1e-6)
    assert repr(cost) == report.findings()[0]
    assert cost.constants.of(2) == report.constants.of(2) == ln_probe.constants(model, TOKENS).of(2)
    assert set(cost.table["family"]) == {"", "primary"}


def test_a_model_without_a_next_token_loss_is_told_so(make_bridge: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"freezing_cost is not applicable: .*attention is bidirectional.*give loss="):
        ln_probe.freezing_cost(make_bridge("bert"), TOKENS)


@pytest.mark.slow
def test_a_loss_of_the_users_gives_the_default_numbers_where_it_is_the_default(make_bridge: Callable[..., Any]) -> None:
    """Prompts of one length weigh the same under both."""
    model = make_bridge("gpt2", torch.float64)
    own, theirs = (
        ln_probe.analyze(model, TOKENS, probes=["causal", "head_effects"], progress=False, loss=loss)
        for loss in (None, next_token)
    )
    columns = ["loss", "delta_loss", "delta_loss_uniform", "kl", "entropy_change"]
    for column in columns:
        np.testing.assert_allclose(own.causal[column], theirs.causal[column], atol=1e-9)
    for column in ("delta_loss", "estimate"):
        np.testing.assert_allclose(own.head_effects[column], theirs.head_effects[column], atol=1e-9)
    assert theirs.provenance["loss"]["name"].endswith("test_headline:next_token")
    assert (theirs.causal_prompts["predicted"] == 1).all()


@pytest.mark.slow
def test_a_classifier_is_measured_with_its_own_loss(make_hooked: Callable[..., Any]) -> None:
    """Its outputs are no logits of tokens, so there is no KL; without a loss the answer is that there is none."""
    model = make_hooked(d_vocab_out=3)
    report = ln_probe.analyze(
        model, TOKENS, probes=["causal", "head_effects"], progress=False, loss=of_the_last_position
    )
    row = report.causal.set_index(["sites", "variant"]).loc[("all", "no_scaling")]
    with torch.no_grad():
        losses = of_the_last_position(model(TOKENS), TOKENS)
        edited = []
        for prompt, tokens in enumerate(TOKENS):
            with ln_probe.hooks.without(model, "scaling", sites="all", scale=report.constants.of(prompt)):
                edited.append(float(of_the_last_position(model(tokens[None]), tokens[None])))
    assert row["loss"] == pytest.approx(np.mean(edited), abs=1e-5)
    assert row["delta_loss"] == pytest.approx(np.mean(edited) - float(losses.mean()), abs=1e-5)
    assert np.isnan(row["kl"])
    assert report.head_effects["delta_loss"].notna().all()
    assert "units of" in report.findings()[0]
    bare = ln_probe.analyze(model, TOKENS, probes=["causal"], progress=False)
    assert bare.causal["loss"].isna().all()
    assert any("not applicable: the model has 3 outputs for 50 tokens" in n and "give loss=" in n for n in bare.notes)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda output, tokens: output.mean(), r"must return floating-point numbers \[1\].* got float32 \[\]"),
        (lambda output, tokens: 3.0, r"must return a tensor \[batch\].*got float"),
        (lambda output, tokens: torch.full((len(tokens),), float("nan")), "returned nan on the first prompt"),
        (drifting, r"returned 0\.\d+ and then 0\.\d+ on the same output: make it deterministic"),
        (3, r"loss must be a function of \(output, tokens\).* got int"),
        ("nowhere_to_be_found:loss", "cannot be imported .*is the module on the Python path"),
        ("loss", "loss must be written module:function, got 'loss'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(loss: Any, message: str, make_bridge: Callable[..., Any]) -> None:
    with pytest.raises(ObjectiveError, match=message):
        ln_probe.freezing_cost(make_bridge("gpt2"), TOKENS, loss=loss)


def test_a_loss_without_a_gradient_has_intervals_over_prompts_alone(make_bridge: Callable[..., Any]) -> None:
    def errors(output: Tensor, tokens: Tensor) -> Tensor:
        return (output[:, :-1].argmax(-1) != tokens[:, 1:]).double().mean(-1)

    report = ln_probe.analyze(make_bridge("gpt2"), TOKENS, probes=["causal"], progress=False, loss=errors)
    assert any(n.startswith("causal: intervals do not include the choice of constants: ") for n in report.notes)
    assert report.causal["delta_loss"].notna().all()


def test_an_objective_is_named_after_its_function() -> None:
    assert Objective.of(next_token).name.endswith("test_headline:next_token")
    assert Objective.of("torch:numel").name == "torch:numel"
    assert Objective.of(None).unit == "nats/token"
