"""What freezing scaling costs where the answer is known beforehand: 0 by construction, or a formula.

The formula is that of a model without blocks. Token x is embedded as s_x u, where the entries of u are 1 and -1 by
turns: its mean is 0 and its root mean square 1. So projection changes nothing, and the final norm's sigma is
sqrt(s_x² + eps). With gain 1, bias 0 and a_v u / d for token v's row of the unembedding, the logit of v after x is
a_v h, where h = s_x / sigma intact and h = s_x / c with the constant c. The loss of the next token v is then

    loss(h, v) = log sum_w exp((a_w - a_v) h)

and the loss increase of a prompt x_0 … x_n is the mean over t < n of loss(s_t / c_t, x_(t+1)) - loss(s_t / sigma_t,
x_(t+1)), where c_0 is the constant of position 0 and all other c_t are the constant of the other positions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import ln_probe
from ln_probe.analyses.probes.causal import Causal
from ln_probe.hooks import find_sites, without
from ln_probe.hooks.interventions import NoOpWarning
from ln_probe.hooks.model import run
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.scales import mean_sigmas

SIZES = (0.5, 1.0, 3.0, 8.0)  # s of each token
LOGITS = (1.5, -1.0, 0.25, 0.5)  # a of each token
EPS, D = 1e-5, 6
# Two prompts are equal, so that neither may have a part in the other's constants.
PROMPTS = [[0, 1, 2, 3], [3, 2, 0], [0, 1, 2, 3], [1, 1, 3, 0, 2]]


@pytest.fixture(scope="module")
def headline() -> Any:
    """`bench/headline.py`, imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[2] / "bench")
        return importlib.import_module("headline")


@pytest.fixture(scope="module")
def formula_model() -> Any:
    """The model of the formula, float64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from ln_probe.loading.verify import bridged

    config = GPT2Config(
        n_embd=D, n_head=1, n_layer=0, n_positions=8, vocab_size=len(SIZES), layer_norm_epsilon=EPS,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double().eval()
    u = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(D // 2)
    with torch.no_grad():
        model.transformer.wpe.weight.zero_()
        model.transformer.wte.weight.copy_(torch.tensor(SIZES, dtype=torch.float64)[:, None] * u)
        model.lm_head.weight.copy_(torch.tensor(LOGITS, dtype=torch.float64)[:, None] * u / D)
    return bridged(model)


def sigma(token: int) -> float:
    return math.sqrt(SIZES[token] ** 2 + EPS)


def loss_by_formula(h: float, token: int) -> float:
    return math.log(sum(math.exp((a - LOGITS[token]) * h) for a in LOGITS))


def increase_by_formula(prompt: list[int], first: float, rest: float) -> float:
    """The sum over the tokens that are predicted."""
    total = 0.0
    for place, (token, following) in enumerate(pairwise(prompt)):
        constant = rest if place else first
        total += loss_by_formula(SIZES[token] / constant, following)
        total -= loss_by_formula(SIZES[token] / sigma(token), following)
    return total


def constants_by_formula(prompts: list[list[int]]) -> dict[str, float]:
    rest = [sigma(token) for prompt in prompts for token in prompt[1:]]
    return {"first": sum(sigma(p[0]) for p in prompts) / len(prompts), "rest": sum(rest) / len(rest)}


def loss_sum(model: Any, prompt: list[int]) -> float:
    row = torch.tensor([prompt])
    return float(Objective().sums(run(model, row, return_type="logits"), row)[0])


def test_the_intact_loss_is_the_formulas(formula_model: Any) -> None:
    for prompt in PROMPTS:
        by_formula = sum(loss_by_formula(SIZES[x] / sigma(x), v) for x, v in pairwise(prompt))
        assert loss_sum(formula_model, prompt) == pytest.approx(by_formula, abs=1e-12)


def test_constants_are_the_formulas(formula_model: Any) -> None:
    found = mean_sigmas(formula_model, find_sites(formula_model), [torch.tensor(p) for p in PROMPTS])
    assert found["ln_final"].plain == pytest.approx(constants_by_formula(PROMPTS), rel=1e-12)


@pytest.mark.parametrize(("first", "rest"), [(0.7, 2.0), (5.0, 0.25), (1.0, 1.0)])
@pytest.mark.parametrize("sites", ["final", "all"])
def test_the_increase_with_given_constants_is_the_formulas(
    formula_model: Any, sites: str, first: float, rest: float
) -> None:
    for prompt in PROMPTS:
        with without(formula_model, "scaling", sites=sites, scale={"ln_final": {"first": first, "rest": rest}}):
            frozen = loss_sum(formula_model, prompt)
        increase = frozen - loss_sum(formula_model, prompt)
        assert increase == pytest.approx(increase_by_formula(prompt, first, rest), abs=1e-12)
        assert abs(increase) > 1e-2


def test_leave_one_out_constants_and_the_increase_with_them_are_the_formulas(formula_model: Any, headline: Any) -> None:
    rows = [torch.tensor(p) for p in PROMPTS]
    constants = headline.leave_one_out(formula_model, find_sites(formula_model), rows)
    expected = [constants_by_formula([other for other in PROMPTS if other != prompt]) for prompt in PROMPTS]
    assert expected[0] == expected[2] != expected[1]
    for of_prompt, by_formula in zip(constants, expected, strict=True):
        assert of_prompt["ln_final"] == pytest.approx(by_formula, rel=1e-12)
    objective = Objective()
    change = headline.frozen(formula_model, rows, objective, "all", constants)
    change = change - headline.losses(formula_model, rows, objective)
    by_hand = [increase_by_formula(p, e["first"], e["rest"]) for p, e in zip(PROMPTS, expected, strict=True)]
    assert change == pytest.approx(by_hand, abs=1e-12)


def test_one_group_of_prompts_has_no_leave_one_out_constants(formula_model: Any, headline: Any) -> None:
    rows = [torch.tensor(p) for p in ([0, 1, 2], [0, 1, 2], [3])]
    with pytest.raises(ValueError, match="no other prompt of at least two tokens"):
        headline.leave_one_out(formula_model, find_sites(formula_model), rows)


# Hugging Face's Llama computes its norms in float32, whatever the precision of the weights.
@pytest.mark.parametrize(("arch", "rounding"), [("gpt2", 1e-12), ("neox", 1e-12), ("opt", 1e-12), ("llama", 2e-6)])
@pytest.mark.parametrize("sites", ["attention", "all"])
def test_every_tokens_own_sigma_as_constant_changes_nothing(
    make_bridge: Callable[..., Any], arch: str, rounding: float, sites: str
) -> None:
    """In a prompt of two tokens the two constants are the two tokens' own sigmas."""
    model = make_bridge(arch, torch.float64)
    prompt, other = [7, 3], [11, 40]
    own, others = (mean_sigmas(model, find_sites(model), [torch.tensor(row)]) for row in (prompt, other))
    intact = loss_sum(model, prompt)
    for constants, least, most in ((own, 0.0, rounding), (others, 1e-4, math.inf)):
        scale = {name: constant.plain for name, constant in constants.items()}
        with without(model, "scaling", sites=sites, scale=scale):
            assert least <= abs(loss_sum(model, prompt) - intact) <= most


def test_scaling_frozen_is_exactly_nothing_where_no_norm_scales() -> None:
    model = ln_probe.load_model("lm-projection_only")
    tokens = torch.arange(1, 33).view(2, 16)
    intact = run(model, tokens, return_type="logits")
    attention = [s.name for s in find_sites(model) if "attention" in s.reads.split("+")]
    with (
        pytest.warns(NoOpWarning, match="changes nothing at every site"),
        without(model, "scaling", sites="attention", scale=dict.fromkeys(attention, 0.1)),
    ):
        assert torch.equal(run(model, tokens, return_type="logits"), intact)
    table = ln_probe.analyze(model, prompts=tokens, probes=[Causal(0, uniform=False)], progress=False).causal
    row = table[(table["sites"] == "attention") & (table["variant"] == "no_scaling")].iloc[0]
    assert row["delta_loss"] == 0.0
    assert row["no_op"]
    other = table[(table["sites"] == "mlp") & (table["variant"] == "no_scaling")].iloc[0]
    assert abs(other["delta_loss"]) > 1e-3
