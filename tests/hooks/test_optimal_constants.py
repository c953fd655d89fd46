"""Loss-optimal constants: gradients, the fit, halves, and `without(scale="optimal")`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from architectures import make_bridge, make_hooked
from small_models import lab

from ln_probe.hooks import optimal_constants, without
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
    fit,
    fit_halves,
    loss_and_gradients,
)
from ln_probe.hooks.scales import Constant, mean_sigmas
from ln_probe.hooks.sites import find_sites
from ln_probe.hooks.text import bundled_prompts
from ln_probe.models import bundled_folder, bundled_models, load_model, shipped_constants
from ln_probe.prompts import summary

TOKENS = torch.arange(1, 21).view(2, 10)
ONE = Constant(1.0, 1.0)
PARALLEL = {"positional_embedding_type": "rotary", "rotary_dim": 4, "parallel_attn_mlp": True}


def model_of(name: str, dtype: torch.dtype = torch.float64) -> Any:
    if name == "lab":
        return lab().to(dtype)
    if name == "hooked":
        return make_hooked(**PARALLEL, dtype=dtype)
    return make_bridge(name, dtype)


def measured(model: Any, reads: str = "") -> tuple[list[Site], dict[str, Constant]]:
    """The norms of a model (or those with one reader), and their mean sigmas on TOKENS."""
    sites = [s for s in find_sites(model) if reads in ("", s.reads)]
    return sites, mean_sigmas(model, sites, list(TOKENS))


def loss_by_hand(model: Any, sites: list[Site], constants: dict[str, Constant], variant: str = "no_scaling") -> float:
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


@pytest.mark.parametrize(
    ("name", "variant"), [("neox", "both_removed"), ("llama", "no_scaling"), ("hooked", "no_scaling")]
)
def test_gradients_are_finite_differences(name: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hugging Face's Llama computes attention in float32 inside a float64 model: differences would measure its rounding.
    softmax = F.softmax
    monkeypatch.setattr(F, "softmax", lambda scores, dim=None, dtype=None, **_: softmax(scores, dim))
    model = model_of(name)
    sites, constants = measured(model)
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


def test_gradients_of_prompts_norms_and_losses() -> None:
    """Of a batch the sums of its prompts; of the edited norms alone; of a user's loss, of one token, of an MLP whose
    output matrix is 0, as some models start (the other norms have theirs)."""

    def negative(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return -Objective().sums(logits, tokens)

    model = make_bridge("gpt2", torch.float64)
    sites, constants = measured(model)
    together = loss_and_gradients(model, sites, TOKENS, constants)
    alone = [loss_and_gradients(model, sites, row, constants) for row in TOKENS]
    assert together[0] == pytest.approx(sum(loss for loss, _ in alone), rel=1e-12)
    for name, pair in together[1].items():
        for place, value in enumerate(pair):
            assert value == pytest.approx(sum(g[name][place] for _, g in alone), rel=1e-9, abs=1e-12)
    other, negated = loss_and_gradients(model, sites, TOKENS[0], constants, objective=Objective.of(negative))
    assert other == -alone[0][0]
    assert negated == {name: (-first, -rest) for name, (first, rest) in alone[0][1].items()}
    some, known = measured(model, "attention")
    assert set(loss_and_gradients(model, some, TOKENS[0], known)[1]) == {"blocks.0.ln1", "blocks.1.ln1"}
    loss, gradients = loss_and_gradients(model, sites, TOKENS[0, :1], constants)
    assert (loss, set(gradients.values())) == (0.0, {(0.0, 0.0)})
    with torch.no_grad():
        model.original_model.transformer.h[1].mlp.c_proj.weight.zero_()
    _, gradients = loss_and_gradients(model, sites, TOKENS, constants)
    assert [name for name, pair in gradients.items() if pair == (0.0, 0.0)] == ["blocks.1.ln2"]


@pytest.mark.parametrize("name", ["gpt2", "hooked"])
def test_neither_hooks_nor_gradients_stay(name: str) -> None:
    model = model_of(name, torch.float32).train()
    sites, constants = measured(model)
    for number, (_, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(number % 2 == 0)
    wanted = [p.requires_grad for p in model.parameters()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with torch.no_grad():
        loss_and_gradients(model, sites, TOKENS, constants)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def accuracy(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return -(logits[:, :-1].argmax(-1) == tokens[:, 1:]).double().mean(-1)


def test_what_gradients_and_fits_need() -> None:
    model, bert = make_bridge("gpt2"), make_bridge("bert")
    sites, prompts = find_sites(model), list(TOKENS)
    start = dict.fromkeys([s.name for s in sites], ONE)
    no_gradient, rows = Objective.of(accuracy), (model, sites, TOKENS[0])
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (ValueError, r"constants has no entry for blocks\.0\.ln1, blocks", lambda: loss_and_gradients(*rows, {})),
        (ValueError, r"variant 'no_projection' replaces the sigma of none of these 5 norms",
         lambda: loss_and_gradients(*rows, {}, variant="no_projection")),
        (ObjectiveError, "must return a tensor",
         lambda: loss_and_gradients(*rows, start, objective=Objective.of(lambda *_: 1.0))),
        (GradientError, "accuracy has no gradient, .* or the loss is a step function",
         lambda: loss_and_gradients(*rows, start, objective=no_gradient)),
        (ValueError, "start has no entry for ln_final",
         lambda: fit(model, sites, prompts, start={n: c for n, c in start.items() if n != "ln_final"})),
        (ValueError, r"start: the constants of ln_final must be positive, got .*-1",
         lambda: fit(model, sites, prompts, start=start | {"ln_final": Constant(1.0, -1.0)})),
        (ValueError, "none of these 2 prompts has a loss: give prompts of at least two tokens",
         lambda: fit(model, sites, [prompts[0][:1], prompts[1][:0]], start=start)),
        (ValueError, "groups must name a group for each of the 2 prompts, got 1",
         lambda: fit_halves(model, sites, prompts, [0], start=start)),
        (ValueError, "1 group cannot be divided, give at least two",
         lambda: fit_halves(model, sites, prompts, [0, 0], start=start)),
        (ValueError, "there is no loss to minimize: attention is bidirectional",
         lambda: fit(bert, find_sites(bert), prompts, start={})),
        (ValueError, r"^not a fit of constants as to_json writes it \(no 'constants'\): fit them",
         lambda: Fit.of_json([{"start": "mean"}])),
        (ValueError, r"^not halves as to_json writes them \(no 'fits'\): fit them again",
         lambda: Halves.of_json({"half": "01"})),
        (ValueError, r"^not constants as bench/optimal.py writes them \(no 'groups'\): run it again",
         lambda: Shipped.of_json({"weights_sha256": "", "prompts_sha256": ""})),
    ]  # fmt: skip
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()


@pytest.fixture
def one_norm() -> tuple[Any, Site, list[torch.Tensor], torch.Tensor]:
    """A model with one norm, before the unembedding; logits of TOKENS, and sigma at each, of the intact model."""
    model = lab(norm=None, norm_mlp=None, n_layers=1).double()
    (site,) = find_sites(model)
    with torch.no_grad():
        site.bias.zero_()  # type: ignore[union-attr]
        model.unembed.b_U.zero_()
        logits, cache = model.run_with_cache(TOKENS)
    return model, site, list(logits), site.sigma(cache["blocks.0.hook_resid_post"])[..., 0]


def test_the_fit_of_a_quadratic_loss_is_known(one_norm: Any) -> None:
    """A model with one norm, before the unembedding, and the squared distance to the intact logits as the loss.

    With z_t the projected vector at position t, read through gain and unembedding, the intact logits are z_t / sigma_t
    and the edited ones z_t / c. The loss sum_t |z_t|² (1/c - 1/sigma_t)² is quadratic in 1/c, and smallest at
    1/c = sum_t |z_t|²/sigma_t / sum_t |z_t|²: the best constant is a weighted harmonic mean of the sigmas. Position 0
    and the others do not interact.
    """
    model, site, logits, sigma = one_norm
    size = torch.stack([row.pow(2).sum(-1) for row in logits]) * sigma**2

    def distance(output: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        wanted = torch.stack([logits[int(row[0]) // 10] for row in tokens])
        return (output - wanted).pow(2).sum((1, 2))

    best = [float(s.sum() / (s / t).sum()) for s, t in ((size[:, 0], sigma[:, 0]), (size[:, 1:], sigma[:, 1:]))]
    start = mean_sigmas(model, [site], list(TOKENS))
    found = fit(model, [site], list(TOKENS), start=start, objective=Objective.of(distance))
    assert found.converged
    for descent in found.descents:
        assert descent.constants[site.name].first == pytest.approx(best[0], rel=1e-4)
        assert descent.constants[site.name].rest == pytest.approx(best[1], rel=1e-4)
    assert abs(start[site.name].rest / best[1] - 1) > 0.01


def test_steps_that_overflow_are_shortened_and_constants_without_a_best_value_stay_at_their_bound(
    one_norm: Any,
) -> None:
    model, site, logits, sigma = one_norm
    start = mean_sigmas(model, [site], list(TOKENS[:1]))
    beyond: list[float] = []

    def fitted(function: Callable[[torch.Tensor], torch.Tensor]) -> Fit:
        """For a loss of x, the logarithm of the constant behind position 0 in units of the mean sigma."""

        def loss(output: torch.Tensor, _tokens: torch.Tensor) -> torch.Tensor:
            constant = sigma[0, -1] * logits[0][-1].norm() / output[:, -1].norm(dim=-1)
            return function((constant / start[site.name].rest).log())

        return fit(model, [site], list(TOKENS[:1]), start=start, objective=Objective.of(loss))

    def steep(x: torch.Tensor) -> torch.Tensor:
        """Nearly linear far from its minimum, so that a quasi-Newton step overshoots it."""
        if float(x) > 2.9:
            beyond.append(float(x))
            return x * math.inf
        return torch.hypot(torch.ones_like(x), 20 * (x - 2.4))

    found = fitted(steep)
    assert beyond
    assert all(d.converged for d in found.descents)
    assert found.best.loss == pytest.approx(1.0)
    assert found.best.reason == "no derivative above 0.0001"
    (mean, _) = fitted(lambda x: (-x).exp()).descents
    assert mean.constants[site.name].rest == pytest.approx(start[site.name].rest * REACH)
    assert mean.converged
    assert mean.reason == f"no derivative above 0.0001; at {REACH:g} times or a {REACH:g}th of the mean: {site.name}"
    with pytest.raises(ValueError, match=r"the loss is inf with the constants of the start 'mean': check .*float32"):
        fitted(lambda x: x.exp() * math.inf)


@pytest.fixture
def few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights make rough losses, which take hundreds of evaluations; what a fit gives holds after any number."""
    monkeypatch.setattr(optimal_constants, "MOST_EVALUATIONS", 4)


@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("name", ["llama", "lab"])
def test_the_fitted_loss_is_not_above_the_starts(name: str) -> None:
    model = model_of(name, torch.float32)
    sites, start = measured(model, "attention")
    found = fit(model, sites, list(TOKENS), start=start)
    assert [d.start for d in found.descents] == ["mean", "doubled"]
    for descent in found.descents:
        assert descent.loss < descent.loss_start
        assert descent.converged == (descent.gradient <= GRADIENT)
        assert descent.evaluations > 1
        _, slopes = loss_and_gradients(model, sites, TOKENS, descent.constants)
        pairs = [(slopes[n], (c.first, c.rest)) for n, c in descent.constants.items()]
        by_logarithms = [d * c / 18 for ds, cs in pairs for d, c in zip(ds, cs, strict=True)]
        assert descent.gradient == pytest.approx(max(map(abs, by_logarithms)), rel=1e-3)
    assert found.best.loss == pytest.approx(min(d.loss for d in found.descents), abs=1e-5)
    assert found.descents[0].loss_start == pytest.approx(loss_by_hand(model, sites, start) / 18, rel=1e-5)
    assert found.best.loss == pytest.approx(loss_by_hand(model, sites, found.constants) / 18, rel=1e-5)
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
def test_halves_are_fitted_on_their_own_groups() -> None:
    model = lab()
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


@pytest.mark.usefixtures("few_evaluations")
@pytest.mark.parametrize("name", ["gpt2", "hooked"])
def test_without_scaling_at_optimal_constants(name: str) -> None:
    model = model_of(name, torch.float32)
    sites, start = measured(model, "attention")
    losses = {}
    for scale in ("frozen", "optimal"):
        with torch.no_grad(), without(model, "scaling", scale=scale, tokens=TOKENS) as done:
            losses[scale] = float(Objective().sums(model(TOKENS, return_type="logits"), TOKENS).sum())
    assert losses["optimal"] < losses["frozen"]
    assert done.divisors == fit(model, sites, list(TOKENS), start=start).constants
    assert done.matched


@pytest.mark.usefixtures("few_evaluations")
def test_constants_that_the_model_brings_are_used() -> None:
    model = lab()
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


def test_optimal_constants_that_cannot_be_had() -> None:
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
    """A model that was trained again needs `bench/optimal.py` again."""
    brings = [name for name in bundled_models() if shipped_constants(bundled_folder(name)) is not None]
    assert "lm-layernorm" in brings
    for name in brings:
        folder, shipped = bundled_folder(name), shipped_constants(bundled_folder(name))
        assert shipped.weights_sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(), name
        for halves in shipped.halves.values():
            assert halves.half == (0, 1) * 32
            assert all(found.converged for found in halves.fits)
        assert all(found.converged for found in shipped.every.values())


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("lm-layernorm", "lm-none") else pytest.mark.slow) for n in bundled_models()],
)
def test_the_constants_are_those_of_the_norms_that_scale(name: str) -> None:
    model, shipped = load_model(name), shipped_constants(bundled_folder(name))
    sites = find_sites(model)
    wanted = {g: {s.name for s in members(sites, g) if s.scales} for g in ("attention", "all")}
    wanted = {g: names for g, names in wanted.items() if names}
    own = {g: set(constants) for g, constants in vars(model).get("optimal_constants", {}).items()}
    assert own == wanted, f"{name}: run bench/optimal.py"
    assert (shipped is None) == (not wanted)
    if shipped is not None:
        prompts = bundled_prompts(model)
        assert shipped.prompts_sha256 == summary("", prompts.measured)["sha256"]
        assert shipped == vars(model)["shipped_constants"]


@pytest.mark.slow
def test_two_starts_of_a_trained_model_end_at_one_point() -> None:
    """lm-layernorm's attention: within 1e-5 nats/token, and every constant within 2 %."""
    model = load_model("lm-layernorm")
    prompts = bundled_prompts(model)
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
