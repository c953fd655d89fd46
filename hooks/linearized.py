"""Every norm with its sigma held, so that gradients are those of a linear map.

    with linearized(model):                                      # forward unchanged, bit for bit
        logit = model(tokens)[0, -1, answer]
        logit.backward()
    with linearized(model, sigma=linearized.sigmas(model, other)):    # every norm divides by another run's sigmas
        ...
    model.run_with_hooks(tokens, fwd_hooks=linearized.fwd_hooks(model))

A norm's own gradient lets sigma answer to every part of its input, which first-order attribution (attribution patching:
Syed, Rager & Conmy 2023; LRP for transformers: Ali et al. 2022; transcoder circuits: Dunefsky et al. 2024) does not
want: there sigma is a constant, and a gradient times a part is exactly what that part gives through the norm.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.hooks.edits import InterventionError, LinearEdit, LostEditError, edits_on, fitted, quiet, suspended
from ln_probe.hooks.in_memory import is_hugging_face, original_sites
from ln_probe.hooks.interventions import prove
from ln_probe.hooks.model import HookedModel, at_least_float32, check_model, device_of, dtype_of, hooks_on, run
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import token_batch
from ln_probe.hooks.sites import ModelFacts, facts_of

OWN = "own"
# Relative difference of gradients that rounding explains, through one norm and in the model's own format: at most 1e-7
# in float32 on tiny models of eight architectures; a gradient that goes through sigma differs by order 1.
_SAME_GRADIENT = {torch.float64: 1e-9, torch.float32: 1e-3}
_SAME_GRADIENT_HALF = 5e-2

Sigma = str | Mapping[str, Float[Tensor, "*_"]]


class _Linearized:
    """`linearized(model)` as a context, `linearized.fwd_hooks(model)` as hooks, `linearized.sigmas(model, tokens)`.

    Example:
        >>> with ln_probe.hooks.linearized(model):  # a gradient that is additive over the components of the stream
        ...     model(tokens)[0, -1, 7].backward()
        >>> ln_probe.hooks.linearized.sigmas(model, tokens)["ln_final"].shape == tokens.shape
        True
    """

    @contextmanager
    def __call__(self, model: object, sigma: Sigma = OWN) -> Iterator[tuple[str, ...]]:
        """Hold sigma at every norm inside a `with` block, so that each norm is a linear map.

        With the norms' own sigmas the forward pass is unchanged, bit for bit. `without` nests with it in either order:
        an edited norm keeps its edit, and what it still divides by is held. Gradients reach gains and biases.

        Args:
            model: HookedTransformer, TransformerBridge, lab model, or a Hugging Face model in memory.
            sigma: "own", each token's own sigma, detached; or sigma per token from another run by the norm's name,
                [pos] or [batch pos] (with heads, as the norm sees them, for norms inside attention), as `sigmas`
                gives; norms it does not name keep their own.

        Yields:
            The names of the norms.

        Raises:
            TypeError: not a TransformerLens model.
            InterventionError: no norm; linearized already; an unknown name or a sigma that is not positive; at a
                forward pass, a sigma for another number of tokens.
            LostEditError: at some norm the edit does not reach the output, or the gradient is not that of the linear
                map (both tried out on entering); names it.
        """
        hooked = check_model(model)
        facts, given = _proved(hooked, sigma)
        sites = facts.norms()
        edits = [LinearEdit(s) for s in sites]
        with ExitStack() as stack:
            with suspended(hooked), quiet(hooked):  # (other edits, not these)
                for edit in edits:
                    edit.install(hooked, stack)
                _prove_gradients(facts, "in place of the forward")
            if is_hugging_face(model):
                stack.close()
                sites = original_sites(model, sites)
                _refuse_twice(sites)
                edits = [LinearEdit(site) for site in sites]
                for edit in edits:
                    edit.install(cast(Any, model), stack)
            for edit in edits:
                edit.given = given.get(edit.site.name)
            yield tuple(s.name for s in sites)

    def fwd_hooks(self, model: object, sigma: Sigma = OWN) -> list[tuple[str, Any]]:
        """The same as hooks on the norms' `hook_scale`, for `run_with_hooks(fwd_hooks=…)` and `model.hooks(…)`.

        Bridges recompute a norm whose scale is replaced, so the forward pass moves by rounding (up to 5e-6) there.

        Raises:
            TypeError, InterventionError, LostEditError: as above.
        """
        hooked = check_model(model)
        facts, given = _proved(hooked, sigma)
        sites = facts.norms()
        holding = cast(Any, hooked).hooks(fwd_hooks=_points(sites, {}))
        with suspended(hooked), quiet(hooked), warnings.catch_warnings(), holding:
            warnings.simplefilter("ignore")  # a bridge warns that it recomputes the norm: that is what is tried out
            _prove_gradients(facts, "by hooks")
        return _points(sites, given)

    def sigmas(self, model: object, tokens: Int[Tensor, "*_"]) -> dict[str, Float[Tensor, "*_"]]:
        """Return the sigma of every norm at every token, by the norm's name; one forward pass.

        Args:
            model: any hooked model.
            tokens: [pos] or [batch pos].

        Raises:
            TypeError, ValueError: not whole numbers, other axes, empty, outside the vocabulary, beyond the context.
            InterventionError: the model has no norm, or is linearized already.
        """
        hooked = check_model(model)
        batch = token_batch(hooked, tokens)
        sigmas: dict[str, Tensor] = {}

        def keep(site: Site, _m: Any, args: Any, _kwargs: Any, _output: Any) -> None:
            sigmas.setdefault(site.name, site.sigma(at_least_float32(args[0].detach()))[..., 0])

        with hooks_on([(site.module, partial(keep, site)) for site in _norms(facts_of(hooked))]):
            run(hooked, batch)
        return sigmas


linearized = _Linearized()


def _norms(facts: ModelFacts) -> list[Site]:
    sites = facts.norms()
    if not sites:
        raise InterventionError("the model has no normalization: it is linear there already")
    _refuse_twice(sites)
    return sites


def _refuse_twice(sites: Sequence[Site]) -> None:
    if twice := [s for s in sites if any(isinstance(edit, LinearEdit) for edit in edits_on(s.module))]:
        raise InterventionError(f"{twice[0].name} is linearized already: leave that `with` block first")


def _proved(model: HookedModel, sigma: Sigma) -> tuple[ModelFacts, dict[str, Tensor]]:
    """The facts of a model at whose norms an edit reaches the output, and the sigmas that were given for some."""
    with suspended(model), quiet(model):
        facts = facts_of(model)
        sites = _norms(facts)
        given = _given(sites, sigma)
        prove(facts, sites)
    return facts, given


def _given(sites: Sequence[Site], sigma: Sigma) -> dict[str, Tensor]:
    if isinstance(sigma, str) and sigma == OWN:
        return {}
    if not isinstance(sigma, Mapping):
        raise InterventionError(f"sigma must be {OWN!r} or a mapping from names of norms, got {sigma!r}")
    names = [s.name for s in sites]
    given = {}
    for name, value in sigma.items():
        if name not in names:
            raise InterventionError(f"sigma is given for {name!r}, which is no norm of this model: {', '.join(names)}")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise InterventionError(f"sigma of {name} must be a tensor with a number per token, got {value!r}")
        if not bool(((value > 0) & torch.isfinite(value)).all()):
            least = float(value.min())
            raise InterventionError(f"sigma of {name} must be positive and finite everywhere, its least is {least:g}")
        given[name] = value.detach()
    return given


def _hold(site: Site, given: Tensor | None, scale: Tensor, hook: Any) -> Tensor:
    if given is None:
        return scale.detach()
    return fitted(site, given, scale.expand(*scale.shape[:-1], site.d)).to(scale)


def _points(sites: Sequence[Site], given: Mapping[str, Tensor]) -> list[tuple[str, Any]]:
    return [(f"{s.name}.hook_scale", partial(_hold, s, given.get(s.name))) for s in sites]


def _prove_gradients(facts: ModelFacts, how: str) -> None:
    """Each norm alone, its own sigma held: the gradient of its output must be that of the linear map.

    `how`: the way in which sigma is held, for `facts` to know it by.

    Raises:
        LostEditError: it is not; names the norm.
    """
    if (proved := ("linear gradients", how)) in facts.tried:
        return
    dtype, device = dtype_of(facts.model), device_of(facts.model)
    for site in facts.norms():
        generator = torch.Generator().manual_seed(0)
        x, g = (torch.randn(1, 2, site.d, generator=generator, dtype=torch.float64).to(device, dtype) for _ in range(2))
        x.requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad((site.module(x) * g).sum(), x)
        gain = g if site.gain is None else g * site.gain.detach().to(g)
        expected = site.project(gain) / site.sigma(x.detach())
        off = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-300))
        if not off <= _SAME_GRADIENT.get(dtype, _SAME_GRADIENT_HALF):  # (NaN is not)
            raise LostEditError(
                f"{site.name}: holding sigma was lost: the gradient through this norm differs by {off:.1e} from that "
                "of the linear map (a compiled module, or another hook on it that changes its output?)"
            )
    facts.tried[proved] = True
