"""Loss-optimal constants: gradients, the fit, halves, and `without(scale="optimal")`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ln_probe.analyses.lab.arithmetic import Precision, fixed_precision
from ln_probe.hooks import optimal_constants, without
from ln_probe.hooks.default_tokens import bundled_prompts
from ln_probe.hooks.edits import InterventionError
from ln_probe.hooks.interventions import members
from ln_probe.hooks.norm import Site
from ln_probe.hooks.objective import Objective, ObjectiveError
from ln_probe.hooks.optimal_constants import (
    GRADIENT,
    REACH,
    Descent,
    Fit,
    GradientError,
    Halves,
    Shipped,
    _descend,
    fit,
    fit_halves,
    loss_and_gradients,
)
from ln_probe.hooks.scales import Constant, mean_sigmas
from ln_probe.hooks.sites import find_sites
from ln_probe.models import bundled_folder, bundled_models, load_model, shipped_constants
from ln_probe.prompts import summary

TOKENS = torch.arange(1, 21).view(2, 10)
HOOKED = {
    "hooked": {},
    "hooked rms": {"normalization_type": "RMS", "gated_mlp": True, "act_fn": "silu"},
    "hooked parallel": {"positional_embedding_type": "rotary", "rotary_dim": 4, "parallel_attn_mlp": True},
}
MODELS = ("gpt2", "neox", "llama", *HOOKED, "lab")


def model_of(name: str, request: pytest.FixtureRequest, dtype: torch.dtype = torch.float64) -> Any:
    if name == "lab":
        return request.getfixturevalue("make_lab")().to(dtype)
    if name in HOOKED:
        return request.getfixturevalue("make_hooked")(**HOOKED[name], dtype=dtype)
    return request.getfixturevalue("make_bridge")(name, dtype)


def loss_by_hand(model: Any, sites: list[Site], constants: dict[str, Constant], variant: str) -> float:
    """The summed loss of TOKENS with constants put in by plain hooks."""

    def hook(site: Site) -> Any:
        def edited(_m: Any, args: Any, _y: Any) -> torch.Tensor:
            rows = torch.full_like(args[0][..., :1], constants[site.name].rest)
            rows[:, 0] = constants[site.name].first
            return site.affine(site.normalize(args[0], keep_mean=variant == "both_removed", divisor=rows))

        return edited

    with ExitStack() as stack, torch.no_grad():
        for site in sites:
            stack.callback(site.module.register_forward_hook(hook(site)).remove)
        return float(Objective().sums(model(TOKENS, return_type="logits"), TOKENS).sum())


@pytest.mark.parametrize("variant", ["no_scaling", "both_removed"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_finite_differences(
    name: str, variant: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Hugging Face's Llama computes attention in float32 inside a float64 model: differences would measure its rounding.
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda scores, dim=None, dtype=None, **_: softmax(scores, dim))
    model = model_of(name, request)
    sites = find_sites(model)
    constants = mean_sigmas(model, sites, list(TOKENS))
    loss, gradients = loss_and_gradients(model, sites, TOKENS, constants, variant=variant)
    assert loss == pytest.approx(loss_by_hand(model, sites, constants, variant), rel=1e-12)
    assert set(gradients) == {s.name for s in sites}
    for site in sites:
        for place, field in enumerate(("first", "rest")):
            at = constants[site.name]
            step = 1e-5 * getattr(at, field)
            moved = (replace(at, **{field: getattr(at, field) + h}) for h in (step, -step))
            up, down = (loss_by_hand(model, sites, constants | {site.name: c}, variant) for c in moved)
            assert gradients[site.name][place] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7)


def test_gradients_of_a_batch_are_the_sums_of_its_prompts(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("llama", torch.float64)
    sites = find_sites(model)
    constants = mean_sigmas(model, sites, list(TOKENS))
    together = loss_and_gradients(model, sites, TOKENS, constants)
    alone = [loss_and_gradients(model, sites, row, constants) for row in TOKENS]
    assert together[0] == pytest.approx(sum(loss for loss, _ in alone), rel=1e-12)
    for name, pair in together[1].items():
        for place, value in enumerate(pair):
            assert value == pytest.approx(sum(g[name][place] for _, g in alone), rel=1e-9, abs=1e-12)


def test_only_the_edited_norms_have_gradients(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2", torch.float64)
    sites = [s for s in find_sites(model) if s.reads == "attention"]
    constants = mean_sigmas(model, sites, list(TOKENS))
    _, gradients = loss_and_gradients(model, sites, TOKENS[0], constants)
    assert set(gradients) == {"blocks.0.ln1", "blocks.1.ln1"}


def test_a_loss_of_the_users(make_bridge: Callable[..., Any]) -> None:
    """Its gradient is that of the user's function: here minus the next-token loss."""

    def negative(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return -Objective().sums(logits, tokens)

    model = make_bridge("gpt2", torch.float64)
    sites = find_sites(model)
    constants = mean_sigmas(model, sites, list(TOKENS))
    loss, gradients = loss_and_gradients(model, sites, TOKENS[0], constants)
    other, negated = loss_and_gradients(model, sites, TOKENS[0], constants, objective=Objective.of(negative))
    assert other == -loss
    assert negated == {name: (-first, -rest) for name, (first, rest) in gradients.items()}


@pytest.mark.parametrize("name", ["gpt2", "hooked", "lab"])
def test_neither_hooks_nor_gradients_stay(name: str, request: pytest.FixtureRequest) -> None:
    model = model_of(name, request, torch.float32).train()
    sites = find_sites(model)
    for number, (_, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(number % 2 == 0)
    wanted = [p.requires_grad for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with torch.no_grad():
        loss_and_gradients(model, sites, TOKENS, mean_sigmas(model, sites, list(TOKENS)))
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def test_the_loss_of_one_token_is_0(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    sites = find_sites(model)
    loss, gradients = loss_and_gradients(model, sites, TOKENS[0, :1], dict.fromkeys([s.name for s in sites], ONE))
    assert loss == 0.0
    assert set(gradients.values()) == {(0.0, 0.0)}


ONE = Constant(1.0, 1.0)


@pytest.fixture
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights make rough losses, which take hundreds of evaluations; what a fit gives holds after any number."""
    monkeypatch.setattr(optimal_constants, "MOST_EVALUATIONS", 4)


def test_a_model_that_rounds_has_no_gradient(make_lab: Callable[..., Any]) -> None:
    model, grid = make_lab().double(), Precision(20, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(grid.round(parameter))
    sites = find_sites(model)
    constants = dict.fromkeys([s.name for s in sites], ONE)
    message = r"^blocks\.0\.ln1: its constant changes the loss, but the gradient .* is 0 there.* rounds its activations"
    with fixed_precision(model, grid), pytest.raises(GradientError, match=message):
        loss_and_gradients(model, sites, TOKENS, constants)


def test_a_norm_that_nothing_reads_has_gradient_0(make_bridge: Callable[..., Any]) -> None:
    """An MLP whose output matrix is 0, as some models start: no error, and the other norms have their gradients."""
    model = make_bridge("gpt2")
    with torch.no_grad():
        model.original_model.transformer.h[1].mlp.c_proj.weight.zero_()
    sites = find_sites(model)
    _, gradients = loss_and_gradients(model, sites, TOKENS, mean_sigmas(model, sites, list(TOKENS)))
    assert [name for name, pair in gradients.items() if pair == (0.0, 0.0)] == ["blocks.1.ln2"]


def test_a_loss_without_a_gradient_says_so(make_bridge: Callable[..., Any]) -> None:
    def accuracy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return -(logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean(-1)

    model = make_bridge("gpt2")
    sites = find_sites(model)
    constants = dict.fromkeys([s.name for s in sites], ONE)
    with pytest.raises(GradientError, match=r"accuracy has no gradient, .* or the loss is a step function"):
        loss_and_gradients(model, sites, TOKENS[0], constants, objective=Objective.of(accuracy))


def test_what_gradients_need(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    sites = find_sites(model)
    with pytest.raises(ValueError, match=r"constants has no entry for blocks\.0\.ln1, blocks\.0\.ln2"):
        loss_and_gradients(model, sites, TOKENS[0], {})
    with pytest.raises(ValueError, match=r"variant 'no_projection' replaces the sigma of none of these 5 norms"):
        loss_and_gradients(model, sites, TOKENS[0], {}, variant="no_projection")
    with pytest.raises(ObjectiveError, match="must return a tensor"):
        loss_and_gradients(
            model, sites, TOKENS[0], dict.fromkeys([s.name for s in sites], ONE), objective=Objective.of(lambda *_: 1.0)
        )


def test_the_fit_of_a_quadratic_loss_is_known(make_lab: Callable[..., Any]) -> None:
    """A model with one norm, before the unembedding, and the squared distance to the intact logits as the loss.

    With z_t the projected vector at position t, read through gain and unembedding, the intact logits are z_t / sigma_t
    + b and the edited ones z_t / c + b. The loss sum_t |z_t|² (1/c - 1/sigma_t)² is quadratic in 1/c, and smallest at
    1/c = sum_t |z_t|²/sigma_t / sum_t |z_t|²: the best constant is a weighted harmonic mean of the sigmas. Position 0
    and the others do not interact.
    """
    model = make_lab(norm=None, norm_mlp=None, n_layers=1).double()
    (site,) = find_sites(model)
    logits: dict[int, torch.Tensor] = {}
    sigma: dict[int, torch.Tensor] = {}
    size: dict[int, torch.Tensor] = {}

    def keep(_m: Any, args: Any, _y: Any) -> None:
        x = args[0]
        sigma[int(row[0])] = site.sigma(x)[0, :, 0]
        size[int(row[0])] = (site.project(x) * site.gain @ model.W_U).pow(2).sum(-1)[0]

    for row in TOKENS:
        handle = site.module.register_forward_hook(keep)
        with torch.no_grad():
            logits[int(row[0])] = model(row[None])[0]
        handle.remove()

    def distance(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        wanted = torch.stack([logits[int(row[0])] for row in tokens])
        return (output - wanted).pow(2).sum((1, 2))

    sigmas, sizes = (torch.stack(list(of.values())) for of in (sigma, size))
    best = [float(s.sum() / (s / t).sum()) for s, t in ((sizes[:, 0], sigmas[:, 0]), (sizes[:, 1:], sigmas[:, 1:]))]
    start = mean_sigmas(model, [site], list(TOKENS))
    found = fit(model, [site], list(TOKENS), start=start, objective=Objective.of(distance))
    assert found.converged
    for descent in found.descents:
        assert descent.constants[site.name].first == pytest.approx(best[0], rel=1e-4)
        assert descent.constants[site.name].rest == pytest.approx(best[1], rel=1e-4)
    assert abs(start[site.name].rest / best[1] - 1) > 0.01


@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("name", ["gpt2", "llama", "hooked", "lab"])
def test_the_fitted_loss_is_not_above_the_starts(name: str, request: pytest.FixtureRequest) -> None:
    model = model_of(name, request, torch.float32)
    sites = [s for s in find_sites(model) if s.reads == "attention"]
    start = mean_sigmas(model, sites, list(TOKENS))
    found = fit(model, sites, list(TOKENS), start=start)
    assert [d.start for d in found.descents] == ["mean", "doubled"]
    for descent in found.descents:
        assert descent.loss < descent.loss_start
        assert descent.converged == (descent.gradient <= GRADIENT)
        assert descent.evaluations > 1
        _, slopes = loss_and_gradients(model, sites, TOKENS, descent.constants)
        pairs = [(slopes[n], (c.first, c.rest)) for n, c in descent.constants.items()]
        by_logarithms = [
            d * c / 18 for derivatives, constants in pairs for d, c in zip(derivatives, constants, strict=True)
        ]
        assert descent.gradient == pytest.approx(max(map(abs, by_logarithms)), rel=1e-3)
    assert found.best.loss == pytest.approx(min(d.loss for d in found.descents), abs=1e-5)
    assert found.descents[0].loss_start == pytest.approx(loss_by_hand(model, sites, start, "no_scaling") / 18, rel=1e-5)
    assert found.best.loss == pytest.approx(loss_by_hand(model, sites, found.constants, "no_scaling") / 18, rel=1e-5)
    assert list(found.table["start"]) == ["mean", "doubled"]
    assert "constants" not in found.table


def test_of_two_descents_to_one_optimum_the_one_that_converged_is_best() -> None:
    stuck = Descent("mean", 9, 2.0, 1.0, 2e-4, False, "no step lowers the loss by 1e-06", {"ln": ONE})
    converged = replace(stuck, start="doubled", loss=1.0 + 5e-6, gradient=5e-5, converged=True)
    assert Fit((stuck, converged)).best is converged
    assert Fit((stuck, replace(converged, loss=1.0 + 2e-5))).best is stuck
    assert not Fit((stuck, replace(converged, loss=1.0 + 2e-5))).converged
    assert Fit((converged, replace(converged, loss=0.9))).best.loss == 0.9


@pytest.mark.usefixtures("few_evaluations")
def test_halves_are_fitted_on_their_own_groups(make_lab: Callable[..., Any]) -> None:
    model = make_lab()
    sites = [s for s in find_sites(model) if s.reads == "attention"]
    prompts = list(torch.arange(1, 41).view(4, 10))
    start = mean_sigmas(model, sites, prompts)
    halves = fit_halves(model, sites, prompts, ["a", "b", "a", "c"], start=start)
    assert halves.half == (0, 1, 0, 0)
    first, second = (fit(model, sites, rows, start=start) for rows in ([prompts[i] for i in (0, 2, 3)], [prompts[1]]))
    assert halves.fits == (first, second)
    assert halves.of(0) == halves.of(3) == second.constants
    assert halves.of(1) == first.constants
    columns = ["start", "evaluations", "loss_start", "loss", "gradient", "converged", "reason", "half"]
    assert list(halves.table) == columns
    assert list(halves.table["half"]) == [0, 0, 1, 1]
    assert Halves.of_json(json.loads(json.dumps(halves.to_json()))) == halves
    assert Fit.of_json(json.loads(json.dumps(first.to_json()))) == first


def test_json_that_is_no_fit() -> None:
    with pytest.raises(ValueError, match=r"^not a fit of constants as to_json writes it \(no 'constants'\): fit them"):
        Fit.of_json([{"start": "mean"}])
    with pytest.raises(ValueError, match=r"^not halves as to_json writes them \(no 'fits'\): fit them again"):
        Halves.of_json({"half": "01"})
    with pytest.raises(
        ValueError, match=r"^not constants as bench/optimal.py writes them \(no 'groups'\): run it again"
    ):
        Shipped.of_json({"weights_sha256": "", "prompts_sha256": ""})


def test_a_loss_that_overflows_shortens_the_step() -> None:
    """sqrt(1 + (20 (x - 1))²) is nearly linear far from its minimum, so a quasi-Newton step overshoots it."""
    beyond = []

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        if x[0] > 1.5:
            beyond.append(x[0])
            return math.inf, np.full(2, math.nan)
        height = math.hypot(1.0, 20 * (x[0] - 1))
        return height, np.array([400 * (x[0] - 1) / height, 0.0])

    found = _descend(["a"], "mean", loss, np.array([-1.4, 0.0]), np.array([[-4.0, 4.0]] * 2))
    assert beyond
    assert found.converged
    assert found.loss == pytest.approx(1.0)
    assert found.reason == "no derivative above 0.0001"


def test_a_constant_that_has_no_best_value_stays_at_its_bound() -> None:
    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.exp(-x[0]) + x[1] ** 2), np.array([-np.exp(-x[0]), 2 * x[1]])

    found = _descend(["a.ln"], "mean", loss, np.array([0.0, 1.0]), np.array([[-4.0, 4.0], [-4.0, 4.0]]))
    assert found.constants["a.ln"].first == pytest.approx(math.exp(4.0))
    assert found.converged
    assert found.reason == f"no derivative above 0.0001; at {REACH:g} times or a {REACH:g}th of the mean: a.ln"


def test_a_start_without_a_finite_loss() -> None:
    with pytest.raises(ValueError, match=r"the loss is inf with the constants of the start 'mean': check .*float32"):
        _descend(["a"], "mean", lambda x: (math.inf, x), np.zeros(2), np.array([[-4.0, 4.0]] * 2))


def test_what_a_fit_needs(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    sites, prompts = find_sites(model), list(TOKENS)
    start = dict.fromkeys([s.name for s in sites], ONE)
    with pytest.raises(ValueError, match=r"start has no entry for ln_final"):
        fit(model, sites, prompts, start={n: c for n, c in start.items() if n != "ln_final"})
    with pytest.raises(ValueError, match=r"start: the constants of ln_final must be positive, got .*-1"):
        fit(model, sites, prompts, start=start | {"ln_final": Constant(1.0, -1.0)})
    with pytest.raises(ValueError, match=r"none of these 2 prompts has a loss: give prompts of at least two tokens"):
        fit(model, sites, [prompts[0][:1], prompts[1][:0]], start=start)
    with pytest.raises(ValueError, match=r"groups must name a group for each of the 2 prompts, got 1"):
        fit_halves(model, sites, prompts, [0], start=start)
    with pytest.raises(ValueError, match=r"1 group cannot be divided, give at least two"):
        fit_halves(model, sites, prompts, [0, 0], start=start)
    bert = make_bridge("bert")
    with pytest.raises(ValueError, match=r"there is no loss to minimize: attention is bidirectional"):
        fit(bert, find_sites(bert), prompts, start={})


@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("name", ["gpt2", "hooked", "lab"])
def test_without_scaling_at_optimal_constants(name: str, request: pytest.FixtureRequest) -> None:
    model = model_of(name, request, torch.float32)
    sites = [s for s in find_sites(model) if s.reads == "attention"]
    losses = {}
    for scale in ("frozen", "optimal"):
        with torch.no_grad(), without(model, "scaling", scale=scale, tokens=TOKENS) as done:
            losses[scale] = float(Objective().sums(model(TOKENS, return_type="logits"), TOKENS).sum())
    assert losses["optimal"] < losses["frozen"]
    assert done.divisors == fit(model, sites, list(TOKENS), start=mean_sigmas(model, sites, list(TOKENS))).constants
    assert done.matched


@pytest.mark.usefixtures("few_evaluations")
def test_constants_that_the_model_brings_are_used(make_lab: Callable[..., Any]) -> None:
    model = make_lab()
    own = {s.name: Constant(2.0, 3.0) for s in find_sites(model) if s.reads == "attention"}
    vars(model)["optimal_constants"] = {"attention": own}
    with without(model, "scaling", scale="optimal") as done:
        assert done.divisors == own
    with without(model, "scaling", sites=list(own), scale="optimal") as done:
        assert done.divisors == own
    with without(model, "scaling", scale="optimal", tokens=TOKENS) as done:  # fitted on these
        assert done.divisors != own
    with without(model, "projection", scale="optimal") as done:
        assert done.divisors == {}


def test_optimal_constants_that_cannot_be_had(make_bridge: Callable[..., Any]) -> None:
    model = make_bridge("gpt2")
    message = r'scale="optimal" is fitted with norms edited for everything that reads them: leave out only and heads'
    for options in ({"only": "keys"}, {"heads": [(0, 0)]}):
        with pytest.raises(InterventionError, match=message), without(model, "scaling", scale="optimal", **options):
            pass
    with (
        pytest.raises(InterventionError, match=r"there is no loss to minimize: attention is bidirectional"),
        without(make_bridge("bert"), "scaling", scale="optimal", tokens=TOKENS),
    ):
        pass


def test_bundled_models_bring_constants_for_their_weights() -> None:
    """Every bundled model with norms that scale; a model that was trained again needs `bench/optimal.py` again."""
    for name in bundled_models():
        folder, model = bundled_folder(name), load_model(name)
        sites = find_sites(model)
        wanted = {g: {s.name for s in members(sites, g) if s.scales} for g in ("attention", "all")}
        wanted = {g: names for g, names in wanted.items() if names}
        shipped = shipped_constants(folder)
        assert (shipped is None) == (not wanted)
        own = {g: set(constants) for g, constants in vars(model).get("optimal_constants", {}).items()}
        assert own == wanted, f"{name}: run bench/optimal.py"
        if shipped is None:
            continue
        assert shipped.weights_sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        prompts = bundled_prompts(model)
        assert prompts is not None
        assert shipped.prompts_sha256 == summary("", prompts.measured)["sha256"]
        assert shipped == vars(model)["shipped_constants"]
        for halves in shipped.halves.values():
            assert halves.half == (0, 1) * 32
            assert all(found.converged for found in halves.fits)
        assert all(found.converged for found in shipped.every.values())


@pytest.mark.slow
def test_two_starts_of_a_trained_model_end_at_one_point() -> None:
    """lm-layernorm's attention: within 1e-5 nats/token, and every constant within 2 %."""
    model = load_model("lm-layernorm")
    prompts = bundled_prompts(model)
    assert prompts is not None
    rows = list(prompts.measured[::4])
    sites = [s for s in find_sites(model) if s.reads == "attention"]
    start = mean_sigmas(model, sites, rows)
    found = fit(model, sites, rows, start=start)
    mean, doubled = found.descents
    assert mean.converged
    assert doubled.converged
    assert abs(mean.loss - doubled.loss) < 1e-5
    for name in mean.constants:
        assert mean.constants[name].rest == pytest.approx(doubled.constants[name].rest, rel=0.02)
        assert mean.constants[name].first == pytest.approx(doubled.constants[name].first, rel=0.02)
    assert mean.loss < mean.loss_start - 0.02
