"""User's hooks at a norm's hook points, under every edit, against a model whose norms are edited by hand.

`outcome` tries one case: "equal" where logits, what the hook saw and the gradient are those of the model edited by
hand in plain torch; "refused" where an error says that it cannot be had; "lost" where the numbers differ. "allowed" is
the one difference that is documented: a backward hook at a norm's `hook_in` does not see the gradient that comes
through the mean (projection removed), or through the readers that alone see an edit.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from architectures import VOCAB, hooked_transformer, make_bridge, with_noise
from torch import Tensor

from ln_probe.analyses.lab.transformer import LabConfig
from ln_probe.hooks import InterventionError, find_norms, linearized, without
from ln_probe.hooks.norm import Norm
from ln_probe.loading.convert import World, has_hooked_transformer
from ln_probe.loading.convert import lab_model as into_transformer_lens
from ln_probe.loading.source import source_of

POINTS = ("hook_in", "hook_scale", "hook_normalized", "hook_out")
MODES = ("read", "edit", "backward")
ORDERS = ("hook first", "edit first")
CONSTANT = 2.0
LAYER = 1  # whose attention reads the norm that is edited
TOKENS = torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(3))
# Logits, what hooks see and gradients agree to this, relative to the largest, in models that compute in float64
# throughout; the others' rotary tables, norms or attention are in float32 for any format of the model.
IN_FLOAT64 = ("hooked", "lab", "lab-hooked", "gpt2", "opt", "neo", "bloom", "bert")
SAME, SAME_IN_FLOAT32 = 1e-10, 1e-5


@dataclass(frozen=True)
class Formula:
    """What an edited norm computes.

    Attributes:
        project, constant, held: whether it projects, divides by CONSTANT, and holds its sigma.
        given: whether sigma is that of another run.
        readers: of which queries, keys and values the edit is: "heads" (of `some_heads`), "keys"; "" for all that
            reads the norm.
    """

    project: bool = True
    constant: bool = False
    held: bool = False
    given: bool = False
    readers: str = ""


EDITS: dict[str, Formula] = {
    "scaling": Formula(constant=True),
    "projection": Formula(project=False),
    "both": Formula(project=False, constant=True),
    "linearized": Formula(held=True),
    "linearized, given": Formula(held=True, given=True),
    "projection in linearized": Formula(project=False, held=True),
    "linearized in scaling": Formula(constant=True, held=True),
    "linearized in projection": Formula(project=False, held=True),
    "scaling, heads": Formula(constant=True, readers="heads"),
    "projection, heads": Formula(project=False, readers="heads"),
    "scaling, keys": Formula(constant=True, readers="keys"),
}


def some_heads(model: Any) -> range:
    """The first query heads of a block: two, or as many as share a key."""
    shared = getattr(model.cfg, "n_key_value_heads", None) or model.cfg.n_heads
    return range(max(2, model.cfg.n_heads // shared))


@contextmanager
def edited(model: Any, name: str, site: str, sigmas: dict[str, Tensor]) -> Iterator[None]:
    """The model under one of EDITS, by ln_probe."""
    with ExitStack() as stack:
        for part in reversed(name.split(" in ")):
            what, _, readers = part.partition(", ")
            if what == "linearized":
                stack.enter_context(linearized(model, sigma=sigmas) if readers == "given" else linearized(model))
            elif readers == "heads":
                stack.enter_context(without(model, what, heads=[(LAYER, h) for h in some_heads(model)], scale=CONSTANT))
            else:
                only = {"only": "keys"} if readers else {}
                stack.enter_context(without(model, what, sites=[site], scale=CONSTANT, **only))
        yield


@dataclass
class Trace:
    """What one run gave."""

    logits: Tensor | None = None
    seen: list[Tensor] = field(default_factory=list)
    gradient: list[Tensor] = field(default_factory=list)


def change(value: Tensor) -> Tensor:
    return value * 1.5 + 0.25


Run = Callable[[Any], Tensor]


def logits(model: Any) -> Tensor:
    result: Tensor = model(TOKENS)
    return result


def by_hand(
    model: Any, site: Norm, formula: Formula, sigma: Tensor, point: str, mode: str, every: list[Norm], run: Run = logits
) -> Trace:
    """The run of the model whose norm is a plain function, with the user's function written into it.

    Where only some readers see the edit, the function is written into the intact norm, which the others read, and the
    edited norm of the same input is multiplied by these readers' weights.
    """
    trace, read = Trace(), list[Tensor]()

    def at(name: str, value: Tensor) -> Tensor:
        if name != point:
            return value
        trace.seen.append(value.detach().clone())
        if mode == "backward" and value.requires_grad:
            value = value * 1.0
            value.register_hook(lambda g: trace.gradient.append(g.clone()))
        return change(value) if mode == "edit" else value

    def norm(one: Norm, mine: bool) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
            here = at if mine else lambda _name, value: value
            x = here("hook_in", x)
            if mine and formula.readers:
                read.append(computed(one, formula, x, lambda _name, value: value))
                return computed(one, Formula(), x, here)
            return computed(one, formula if mine else Formula(held=formula.held), x, here)

        def computed(one: Norm, rule: Formula, x: Tensor, here: Callable[[str, Tensor], Tensor]) -> Tensor:
            centred = x - x.mean(-1, keepdim=True) if one.kind == "layernorm" else x
            own = (centred.pow(2).mean(-1, keepdim=True) + one.eps).sqrt()
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

    def combined(letter: str) -> Callable[[Tensor], Tensor]:
        attn = model.blocks[LAYER].attn

        def forward(given: Tensor) -> Tensor:
            weights, bias = getattr(attn, f"W_{letter.upper()}"), getattr(attn, f"b_{letter.upper()}", None)
            own = given if given.ndim == 4 else given.unflatten(-1, (-1, weights.shape[-1]))
            heads = own.shape[2]  # of keys and values fewer than of queries, where these share them
            step = len(weights) // heads
            # HookedTransformer calls a norm for queries, keys and values in turn, all on the same input.
            edited = read[len(read) // 2] if formula.readers == "keys" else read[-1]
            other = torch.einsum("bpd,hde->bphe", edited, weights[::step]) + (0 if bias is None else bias[::step])
            if formula.readers == "keys":
                return other.reshape(given.shape)
            some = {head * heads // int(model.cfg.n_heads) for head in some_heads(model)}
            chosen = torch.tensor([head in some for head in range(heads)])[:, None]
            return torch.where(chosen, other, own).reshape(given.shape)

        return forward

    patched = {one.module: norm(one, one is site) for one in every if one is site or formula.held}
    for letter in {"heads": "qkv", "keys": "k"}.get(formula.readers, ""):
        patched[model.hook_dict[f"blocks.{LAYER}.attn.hook_{letter}"]] = combined(letter)
    for module, forward in patched.items():
        module.__dict__["forward"] = forward
    try:
        trace.logits = run(model)
        if mode == "backward":
            trace.logits[0, -1, 5].backward()
    finally:
        for module in patched:
            module.__dict__.pop("forward", None)
    return trace


def by_ln_probe(
    model: Any, site: Norm, name: str, sigmas: dict[str, Tensor], point: str, mode: str, order: str
) -> Trace:
    trace = Trace()

    def hook(value: Tensor, hook: Any) -> Tensor | None:
        trace.seen.append(value.detach().clone())
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
        trace.logits = model(TOKENS)
        if mode == "backward":
            trace.logits[0, -1, 5].backward()
    return trace


def outcome(
    model: Any, site: Norm, every: list[Norm], name: str, point: str, mode: str, order: str, same: float
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
    if point == "hook_in" and mode == "backward" and (formula.readers or not formula.project):
        return "allowed"
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


def bridge(architecture: str) -> Any:
    """A bridge around a model of an architecture, in float64."""
    return make_bridge(architecture, torch.float64)


def hooked() -> Any:
    """A small HookedTransformer in float64; None where TransformerLens has none."""
    return hooked_transformer(dtype=torch.float64) if has_hooked_transformer() else None


def lab(world: World = "bridge") -> Any:
    """A small lab model whose norms before attention only scale, as `load_model` gives it, in float64.

    None where TransformerLens has no such class.
    """
    if world == "hooked" and not has_hooked_transformer():
        return None
    torch.manual_seed(0)
    shape = LabConfig(n_layers=2, d_model=32, n_heads=4, d_vocab=VOCAB, n_ctx=32, norm="scaling_only", tied=False)
    model = with_noise(shape.build().double(), torch.float64)
    return into_transformer_lens(model, replace(source_of(model), dtype="float64"), world)


def cases(site: Norm) -> Iterator[tuple[str, str, str, str]]:
    """Every (edit, point, mode, order) that can be asked of a norm."""
    there = dict(site.module.named_children())
    for name, point, mode, order in itertools.product(EDITS, POINTS, MODES, ORDERS):
        if point in there and (site.kind == "layernorm" or "projection" not in name):
            yield name, point, mode, order


def tolerance(name: str) -> float:
    return SAME if name in IN_FLOAT64 else SAME_IN_FLOAT32


def every_outcome(model: Any, same: float) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each case of one model at the norm that attention of its second block reads, and what it comes to."""
    every = find_norms(model)
    site = next(s for s in every if LAYER in s.attention_layers)
    for case in cases(site):
        yield case, outcome(model, site, every, *case, same)
