"""User's hooks at a norm's hook points, under every edit, against a model whose norms are edited by hand.

`outcome` tries one case: "equal" where logits, what the hook saw and the gradient are those of the model edited by
hand in plain torch; "refused" where an error says that it cannot be had; "lost" where the numbers differ.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from architectures import VOCAB, hugging_face
from torch import Tensor

from ln_probe.hooks import find_sites, linearized, without
from ln_probe.hooks.edits import InterventionError
from ln_probe.hooks.norm import Site
from ln_probe.loading.convert import has_hooked_transformer

POINTS = ("hook_in", "hook_scale", "hook_normalized", "hook_out")
MODES = ("read", "edit", "in place", "backward")
ORDERS = ("hook first", "edit first")
CONSTANT = 2.0
TOKENS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
SAME = 1e-8  # in float64, relative to the largest; models with tables in float32 agree to 1e-6


@dataclass(frozen=True)
class Formula:
    """What an edited norm computes.

    Attributes:
        project, constant, held: whether it projects, divides by CONSTANT, and holds its sigma.
        given: whether sigma is that of another run.
    """

    project: bool = True
    constant: bool = False
    held: bool = False
    given: bool = False


EDITS: dict[str, Formula] = {
    "scaling": Formula(constant=True),
    "projection": Formula(project=False),
    "both": Formula(project=False, constant=True),
    "linearized": Formula(held=True),
    "linearized, given": Formula(held=True, given=True),
    "projection in linearized": Formula(project=False, held=True),
    "linearized in scaling": Formula(constant=True, held=True),
    "linearized in projection": Formula(project=False, held=True),
}


@contextmanager
def edited(model: Any, name: str, site: str, sigmas: dict[str, Tensor]) -> Iterator[None]:
    """The model under one of EDITS, by ln_probe."""
    with ExitStack() as stack:
        for part in reversed(name.split(" in ")):
            if part.startswith("linearized"):
                stack.enter_context(linearized(model, sigma=sigmas) if "given" in part else linearized(model))
            else:
                stack.enter_context(without(model, part, sites=[site], scale=CONSTANT))
        yield


@dataclass
class Trace:
    """What one run gave."""

    logits: Tensor | None = None
    seen: list[Tensor] = field(default_factory=list)
    gradient: list[Tensor] = field(default_factory=list)


def change(value: Tensor) -> Tensor:
    return value * 1.5 + 0.25


def by_hand(model: Any, site: Site, formula: Formula, sigma: Tensor, point: str, mode: str, every: list[Site]) -> Trace:
    """The run of a copy whose norm is a plain function, with the user's function written into it."""
    trace = Trace()

    def at(name: str, value: Tensor) -> Tensor:
        if name != point:
            return value
        trace.seen.append(value.detach().clone())
        if mode == "backward" and value.requires_grad:
            value = value * 1.0
            value.register_hook(lambda g: trace.gradient.append(g.clone()))
        return change(value) if mode in ("edit", "in place") else value

    def norm(one: Site, mine: bool) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
            here = at if mine else lambda _name, value: value
            x = here("hook_in", x)
            centred = x - x.mean(-1, keepdim=True) if one.kind == "layernorm" else x
            own = (centred.pow(2).mean(-1, keepdim=True) + one.eps).sqrt()
            rule = formula if mine else Formula(held=formula.held)
            if rule.constant:
                own = torch.full_like(own, CONSTANT)
            elif rule.given:
                own = sigma.view_as(own) if sigma.numel() == own.numel() else sigma[..., None].expand_as(own)
            elif rule.held:
                own = own.detach()
            y = here("hook_normalized", (centred if rule.project else x) / here("hook_scale", own))
            y = y if one.gain is None else y * one.gain
            return here("hook_out", y if one.bias is None else y + one.bias)

        return forward

    for one in every:
        if one is site or formula.held:
            one.module.__dict__["forward"] = norm(one, one is site)
    try:
        trace.logits = model(TOKENS)
        if mode == "backward":
            trace.logits[0, -1, 5].backward()
    finally:
        for one in every:
            one.module.__dict__.pop("forward", None)
    return trace


def by_ln_probe(
    model: Any, site: Site, name: str, sigmas: dict[str, Tensor], point: str, mode: str, order: str
) -> Trace:
    trace = Trace()

    def hook(value: Tensor, hook: Any) -> Tensor | None:
        trace.seen.append(value.detach().clone())
        if mode == "in place":
            with torch.no_grad():
                value.copy_(change(value))
        return change(value) if mode == "edit" else None

    def back(gradient: Tensor, hook: Any) -> None:
        trace.gradient.append(gradient.clone())

    place = f"{site.name}.{point}"
    hooks: dict[str, Any] = {"fwd_hooks": [(place, hook)]}
    if mode == "backward":
        hooks["bwd_hooks"] = [(place, back)]
    with ExitStack() as stack:
        first, second = model.hooks(**hooks), edited(model, name, site.name, sigmas)
        for context in (first, second) if order == "hook first" else (second, first):
            stack.enter_context(context)
        trace.seen.clear()
        with torch.set_grad_enabled(mode != "in place"):
            trace.logits = model(TOKENS)
        if mode == "backward":
            trace.logits[0, -1, 5].backward()
    return trace


def outcome(
    model: Any, site: Site, every: list[Site], name: str, point: str, mode: str, order: str, same: float
) -> str:
    """ "equal", "refused: why", or "lost: what differs"."""
    sigmas = linearized.sigmas(model, TOKENS.flip(1)) if "given" in name else {}
    given = {site.name: sigmas[site.name]} if sigmas else {}
    formula = EDITS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            got = by_ln_probe(model, site, name, given, point, mode, order)
        except InterventionError as error:
            return f"refused: {error}"
        want = by_hand(model, site, formula, given.get(site.name, torch.ones(1)), point, mode, every)
    assert got.logits is not None
    assert want.logits is not None
    if not close(got.logits, want.logits, same):
        return f"lost: logits by {distance(got.logits, want.logits):.1e}"
    if len(got.seen) != len(want.seen):
        return f"lost: the hook was called {len(got.seen)} times, not {len(want.seen)}"
    if not all(close(a, b, same) for a, b in zip(got.seen, want.seen, strict=True)):
        return "lost: the hook saw other values"
    # A constant divisor has no gradient: nothing is called on either side.
    if len(got.gradient) != len(want.gradient):
        return f"lost: {len(got.gradient)} backward calls, not {len(want.gradient)}"
    if not all(close(a, b, same) for a, b in zip(got.gradient, want.gradient, strict=True)):
        return "lost: another gradient"
    return "equal"


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.detach() - b.detach()).abs().max() / b.detach().abs().max().clamp_min(1e-12))


def close(a: Tensor, b: Tensor, same: float) -> bool:
    return a.shape == b.shape and distance(a, b) <= same


def subjects(architecture: str) -> Iterator[tuple[str, Any]]:
    """The architecture in every model class that the installed TransformerLens has, in float64."""
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    hf = hugging_face(architecture).double().eval()
    options = {"hf_config": hf.config, "tokenizer": None, "model_name": "tiny"}
    bridge: Any = build_bridge_from_module(copy.deepcopy(hf), type(hf).__name__, **options)
    yield "bridge", bridge


def hooked() -> Any:
    """A small HookedTransformer in float64; None where TransformerLens has none."""
    if not has_hooked_transformer():
        return None
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    torch.manual_seed(0)
    config = HookedTransformerConfig(
        n_layers=2, d_model=32, n_heads=4, d_head=8, d_mlp=80, d_vocab=VOCAB, n_ctx=32, act_fn="gelu",
        normalization_type="LN", default_prepend_bos=False, device="cpu", dtype=torch.float64,
    )  # fmt: skip
    model: Any = HookedTransformer(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + noise if name.endswith(".w") else noise)
    return model


def cases(site: Site) -> Iterator[tuple[str, str, str, str]]:
    """Every (edit, point, mode, order) that can be asked of a norm."""
    there = dict(site.module.named_children())
    for case in itertools.product(EDITS, POINTS, MODES, ORDERS):
        name, point, mode, _ = case
        if point not in there or (site.kind != "layernorm" and "projection" in name):
            continue
        if point == "hook_in" and mode == "in place":  # that writes to the stream itself, which other readers see
            continue
        yield case


def every_outcome(model: Any, reads: str = "attention", same: float = SAME) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each case of one model at a norm in its second block, and what it comes to."""
    every = find_sites(model)
    site = next(s for s in every if s.layer == 1 and reads in s.reads)
    for case in cases(site):
        yield case, outcome(model, site, every, *case, same)
