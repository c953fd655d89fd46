"""Constants that replace sigma: loss-optimal ones against finite differences and a loss whose optimum is known."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import make_bridge, make_hooked
from small_models import lab

from ln_probe.hooks import constants, find_norms, without
from ln_probe.hooks.constants import Constant, GradientError, fit, mean_sigmas, slopes_of
from ln_probe.hooks.edits import members
from ln_probe.hooks.norm import Norm
from ln_probe.hooks.norm_edits import NormEdit, installed
from ln_probe.hooks.task import Objective
from ln_probe.models import bundled_folder, bundled_models, load_model, shipped_constants
from ln_probe.prompts import summary

TOKENS = torch.arange(1, 21).view(2, 10)

pytestmark = pytest.mark.filterwarnings("ignore:the fit of loss-optimal constants did not converge")


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    if name == "hooked":
        return make_hooked(parallel_attn_mlp=True, dtype=dtype)
    return make_bridge(name, dtype)


def measured(model: Any, reads: str = "") -> tuple[list[Norm], dict[str, Constant]]:
    """The norms of a model (or those with one reader), and their mean sigmas on TOKENS."""
    norms = [n for n in find_norms(model) if reads in ("", n.reads)]
    return norms, mean_sigmas(model, norms, list(TOKENS))


def loss_and_slopes(model: Any, norms: Any, tokens: Any, constants: Any, variant: str = "no_scaling") -> Any:
    """The summed loss with constants for the sigmas of norms, and its derivatives by them."""
    leaves = {norm.name: constants[norm.name].pair.requires_grad_() for norm in norms}
    with installed(model, [NormEdit.of(norm, variant, leaves[norm.name]) for norm in norms]):
        loss = Objective().sums(model(tokens, return_type="logits"), tokens).sum()
    return float(loss.detach()), slopes_of(loss, leaves)


def loss_by_hand(model: Any, sites: list[Norm], constants: dict[str, Constant], variant: str = "no_scaling") -> float:
    """The summed loss of TOKENS with constants put in by plain hooks."""

    def hook(site: Norm) -> Any:
        def edited(_m: Any, args: Any, _y: Any) -> torch.Tensor:
            rows = torch.full_like(args[0][..., :1], constants[site.name].rest)
            rows[:, 0] = constants[site.name].first
            return site.affine(site.without(variant, args[0], rows))

        return edited

    with ExitStack() as stack, torch.no_grad():
        for site in sites:
            stack.callback(site.module.register_forward_hook(hook(site)).remove)
        return float(Objective().sums(model(TOKENS, return_type="logits"), TOKENS).sum())


@pytest.mark.parametrize(
    ("name", "variant"), [("neox", "both_removed"), ("llama", "no_scaling"), ("hooked", "no_scaling")]
)
def test_gradients_are_finite_differences(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hugging Face's Llama computes attention in float32 inside a float64 model: differences would measure its rounding.
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda scores, dim=None, dtype=None, **_: softmax(scores, dim))
    model = model_of(name)
    sites, constants = measured(model)
    loss, gradients = loss_and_slopes(model, sites, TOKENS, constants, variant=variant)
    assert loss == pytest.approx(loss_by_hand(model, sites, constants, variant), rel=1e-12)
    assert set(gradients) == {s.name for s in sites}
    for site in sites:
        for place, field in enumerate(("first", "rest")):
            at = constants[site.name]
            step = 1e-5 * getattr(at, field)
            moved = (replace(at, **{field: getattr(at, field) + h}) for h in (step, -step))
            up, down = (loss_by_hand(model, sites, constants | {site.name: c}, variant) for c in moved)
            assert gradients[site.name][place] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7)


@pytest.fixture
def one_norm() -> tuple[Any, Norm, list[torch.Tensor], torch.Tensor]:
    """A model with one norm, before the unembedding; logits of TOKENS, and sigma at each, of the intact model."""
    model = lab(norm=None, norm_mlp=None, n_layers=1).double()
    (site,) = find_norms(model)
    with torch.no_grad():
        site.bias.zero_()  # type: ignore[union-attr]
        model.unembed.b_U.zero_()
        logits, cache = model.run_with_cache(TOKENS)
    return model, site, list(logits), site.sigma(cache["blocks.0.hook_resid_post"])[..., 0]


def test_the_fit_of_a_quadratic_loss_is_known(one_norm: Any) -> None:
    """The loss is the squared distance to the intact logits.

    With z_t the projected vector at position t, read through gain and unembedding, the intact logits are z_t / sigma_t
    and the edited ones z_t / c. The loss sum_t |z_t|² (1/c - 1/sigma_t)² is quadratic in 1/c, and smallest at
    1/c = sum_t |z_t|²/sigma_t / sum_t |z_t|²: a weighted harmonic mean, at position 0 and elsewhere.
    """
    model, site, logits, sigma = one_norm
    size = torch.stack([row.pow(2).sum(-1) for row in logits]) * sigma**2

    def distance(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        wanted = torch.stack([logits[int(row[0]) // 10] for row in tokens])
        return (output - wanted).pow(2).sum((1, 2))

    best = [float(s.sum() / (s / t).sum()) for s, t in ((size[:, 0], sigma[:, 0]), (size[:, 1:], sigma[:, 1:]))]
    start = mean_sigmas(model, [site], list(TOKENS))
    found = fit(model, [site], list(TOKENS), start=start, objective=Objective.of(distance))
    assert found[site.name].first == pytest.approx(best[0], rel=1e-4)
    assert found[site.name].rest == pytest.approx(best[1], rel=1e-4)
    assert abs(start[site.name].rest / best[1] - 1) > 0.01


@pytest.fixture
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights make rough losses, which take hundreds of evaluations; what a fit gives holds after any number."""
    monkeypatch.setattr(constants, "MOST_EVALUATIONS", 4)


@pytest.mark.usefixtures("few_evaluations")
def test_constants_that_the_model_brings_are_used() -> None:
    model = lab()
    own = {s.name: Constant(2.0, 3.0) for s in find_norms(model) if s.reads == "attention"}
    vars(model)["shipped_constants"] = {"every": {"attention": own}}
    with without(model, "scaling", scale="optimal") as done:
        assert done.divisors == own
    with without(model, "scaling", sites=list(own), scale="optimal") as done:
        assert done.divisors == own
    with without(model, "scaling", scale="optimal", tokens=TOKENS) as done:  # fitted on these
        assert done.divisors != own
    with without(model, "projection", scale="optimal") as done:
        assert done.divisors == {}


def test_what_cannot_be_fitted() -> None:
    model = make_bridge("gpt2")
    norms, start = measured(model)
    bert = make_bridge("bert")
    no_gradient = Objective.of(lambda output, tokens: output.detach().sum((1, 2)))
    for error, word, call in (
        (ValueError, "no loss", lambda: fit(bert, find_norms(bert), list(TOKENS), start=start)),
        (ValueError, "no constant", lambda: fit(model, norms, list(TOKENS), start={})),
        (ValueError, "no constant", lambda: fit(model, norms, list(TOKENS), start=start, variant="no_projection")),
        (ValueError, "none of these", lambda: fit(model, norms, [TOKENS[0, :1]], start=start)),
        (GradientError, "gradient", lambda: fit(model, norms, list(TOKENS), start=start, objective=no_gradient)),
    ):
        with pytest.raises(error, match=word):
            call()
    with pytest.raises(ValueError, match="no loss"), without(bert, "scaling", scale="optimal", tokens=TOKENS):
        pass


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("lm-layernorm", "lm-none") else pytest.mark.slow) for n in bundled_models()],
)
def test_bundled_models_bring_constants_for_their_weights(name: str) -> None:
    """Of the norms that scale. A model that was trained again needs `bench/optimal.py` again."""
    model, folder = load_model(name), bundled_folder(name)
    norms, shipped = find_norms(model), shipped_constants(folder)
    wanted = {g: {n.name for n in members(norms, g) if n.scales} for g in ("attention", "all")}
    wanted = {g: names for g, names in wanted.items() if names}
    assert {g: set(c) for g, c in vars(model).get("shipped_constants", {}).get("every", {}).items()} == wanted
    assert (shipped is None) == (not wanted)
    if shipped is not None:
        assert shipped["weights_sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert shipped["prompts_sha256"] == summary("", model.bundled_prompts.measured)["sha256"]
        assert {g: [set(half) for half in both] for g, both in shipped["halves"].items()} == {
            g: [names, names] for g, names in wanted.items()
        }
