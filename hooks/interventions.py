"""Switch a term of LayerNorm off in a running model, and prove that the edit took.

    with without(model, "scaling", sites="attention"):
        loss = model(tokens, return_type="loss")

Whatever runs inside (a forward pass, a loss, `generate`, `run_with_cache`, `run_with_hooks`) runs on the edited model;
afterwards the model is what it was, bit for bit. Removing scale at frozen size: Heimersheim 2024, "You can remove
GPT2's LayerNorm by fine-tuning"; projection and scaling as terms: Brody, Alon & Yahav 2023.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jaxtyping import Int
from torch import Tensor

from ln_probe.hooks.default_tokens import default_tokens
from ln_probe.hooks.edits import Edit, InterventionError, KeyEdit, LostEditError, edits_on, installed, suspended
from ln_probe.hooks.exclusive import exclusive
from ln_probe.hooks.frozen_scale import check_tokens, mean_sigmas
from ln_probe.hooks.model import HookedModel, active_dropout, check_model
from ln_probe.hooks.sentinel import ignored_means, prove
from ln_probe.hooks.sites import Site, Survey, class_of, known, survey
from ln_probe.hooks.variants import VARIANT_WITHOUT, changed_output, no_op, takes_projection, takes_scaling

__all__ = [
    "FROZEN",
    "GROUPS",
    "Intervention",
    "InterventionError",
    "LostEditError",
    "NoOpWarning",
    "make_edit",
    "members",
    "why_nothing",
    "without",
]

FROZEN = "frozen"
GROUPS = ("attention", "mlp", "final", "all")
_READER_OF_GROUP = {"attention": "attention", "mlp": "mlp", "final": "unembed"}


class NoOpWarning(UserWarning):
    """An intervention that changes nothing by construction."""


@dataclass(frozen=True)
class Intervention:
    """What `without` does while it lasts.

    Attributes:
        variant: "no_scaling", "no_projection" or "neither".
        sites: names of the norms that are edited.
        divisors: what stands for sigma, by site; empty where scaling stays.
        matched: whether those divisors are the sites' own mean sigmas (False for a number the user gave: then a
            change of the loss mixes the loss of scaling with a change of size).
        no_ops: sites at which the edit changes nothing by construction, and why.
        only_keys: whether queries and values still see the intact norm.
    """

    variant: str
    sites: tuple[str, ...]
    divisors: Mapping[str, float]
    matched: bool
    no_ops: Mapping[str, str]
    only_keys: bool


@contextmanager
def without(
    model: object,
    what: str,
    *,
    sites: str | Sequence[str] = "attention",
    scale: str | float | Mapping[str, float] = FROZEN,
    tokens: Int[Tensor, "batch pos"] | None = None,
    only_keys: bool = False,
) -> Iterator[Intervention]:
    """The model without projection, scaling or both at some norms, while the `with` block lasts.

    Contexts over different sites nest, in any order, and amount to one context over all of them. Hook points inside an
    edited norm (`hook_scale`, `hook_normalized`, a bridge's `hook_out`) still show what the intact norm computes;
    everything after it shows the edited model. In gradients the gains and biases of edited norms count as constants.

    Args:
        model: HookedTransformer, TransformerBridge or lab model.
        what: "projection" (x / sigma instead of Px / sigma), "scaling" (Px / c) or "both" (x / c).
        sites: the norms that attention reads ("attention"), that an MLP reads ("mlp"), that the unembedding reads
            ("final"), every norm ("all", norms inside attention included), or names.
        scale: c, what is divided by instead of sigma. "frozen": each site's mean sigma over calibration tokens other
            than position 0, in the unedited model; a mapping from site names: such means measured before, as in a
            report's `provenance["constants"]`; a number: that number everywhere (`matched` is then False).
        tokens: calibration tokens of a frozen scale, [batch pos]. None: the bundled texts, or where the model has no
            tokenizer sequences sampled from it (seed 0): the tokens that `analyze` takes without prompts.
        only_keys: edit what the key projection reads, and leave queries and values as they are.

    Yields:
        What is done, with the divisors.

    Raises:
        TypeError: not a TransformerLens model, or tokens that are no tensor.
        InterventionError: an unknown term, site or scale; no norm to edit; a site that is under an intervention
            already; keys that cannot be edited alone.
        LostEditError: an edit does not reach the model's output (tried out on entering); names the site.

    Warns:
        NoOpWarning: the edit changes nothing by construction (no projection in an RMSNorm, a centred stream, folded
            weights that ignore the mean).
        UserWarning: dropout is on, so that every pass differs.
    """
    if what not in VARIANT_WITHOUT:
        raise InterventionError(f"unknown term {what!r}: choose from {', '.join(map(repr, VARIANT_WITHOUT))}")
    hooked = check_model(model)
    variant = VARIANT_WITHOUT[what]
    label = f"without {what!r}"
    with exclusive(hooked), suspended(hooked):
        found = survey(hooked)
        chosen = choose(known(found), sites)
        _refuse_twice(chosen)
        if only_keys:
            _refuse_other_readers(chosen)
        prove(hooked, chosen, only_keys=only_keys)
        no_ops = why_nothing(hooked, chosen, variant)
        divisors = _divisors(hooked, [s for s in chosen if takes_scaling(s, variant)], scale, tokens)
    _warn(hooked, what, chosen, no_ops, _left_out(found, sites))
    edits = [make_edit(s, variant, divisors.get(s.name), label=label, only_keys=only_keys) for s in chosen]
    matched = not divisors or scale == FROZEN or isinstance(scale, Mapping)
    with exclusive(hooked), installed(hooked, edits):  # a thread that wants the model meanwhile waits
        yield Intervention(variant, tuple(s.name for s in chosen), divisors, matched, no_ops, only_keys)


def _left_out(found: Survey, sites: str | Sequence[str]) -> list[Site]:
    """What a group would hold if it were a norm."""
    return members(found.unknown, sites) if isinstance(sites, str) and sites in GROUPS else []


def make_edit(site: Site, variant: str, divisor: float | None, *, label: str = "", only_keys: bool = False) -> Edit:
    """The edit that gives one norm a variant; `divisor` is needed where the variant takes its scaling."""

    def change(x: Tensor, y: Tensor) -> Tensor:
        return changed_output(site, variant, x, y, divisor)

    return (KeyEdit if only_keys else Edit)(site, change, label or variant)


def members(found: Sequence[Site], group: str) -> list[Site]:
    """The sites of a group (one of GROUPS)."""
    return [s for s in found if group == "all" or _READER_OF_GROUP[group] in s.reads.split("+")]


def why_nothing(model: HookedModel, sites: Sequence[Site], variant: str) -> dict[str, str]:
    """Sites at which a variant changes nothing by construction, and why; costs short passes where projection goes."""
    reasons = {s.name: reason for s in sites if (reason := no_op(s, variant))}
    rest = [s for s in sites if s.name not in reasons and takes_projection(s, variant)]
    rest = [s for s in rest if not takes_scaling(s, variant)]
    kinds = {s.name: s.kind for s in rest}
    return reasons | {name: f"{kinds[name]}: {reason}" for name, reason in ignored_means(model, rest).items()}


def choose(found: Sequence[Site], sites: str | Sequence[str]) -> list[Site]:
    """The sites that a user asked for, in the order of the forward pass.

    Raises:
        InterventionError: no norms, an empty group, an unknown name (the nearest are suggested), a name given twice.
    """
    if not found:
        raise InterventionError("the model has no normalization: there is no projection or scaling to take away")
    if isinstance(sites, str) and sites in GROUPS:
        if chosen := members(found, sites):
            return chosen
        reads = ", ".join(sorted({s.reads for s in found}))
        raise InterventionError(
            f"no norm of this model belongs to sites={sites!r} (its norms are read by: {reads}); give names instead: "
            f"{_some([s.name for s in found])}"
        )
    names = [sites] if isinstance(sites, str) else list(sites)
    if not names:
        raise InterventionError(
            f"an empty list of sites leaves nothing to edit: give names, or one of {', '.join(GROUPS)}"
        )
    known = {s.name: s for s in found}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), [*known, *GROUPS], n=3, cutoff=0.3)
            raise InterventionError(
                f"no norm called {name!r}; the nearest names are {', '.join(map(repr, near))}"
                if near
                else f"no norm called {name!r}; there are {_some(list(known))}"
            )
        if names.count(name) > 1:
            raise InterventionError(f"{name!r} is given twice")
    return [s for s in found if s.name in names]


def _some(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f", … ({len(names)} in all)" if len(names) > most else "")


def _refuse_twice(chosen: Sequence[Site]) -> None:
    for site in chosen:
        if there := edits_on(site.module):
            raise InterventionError(
                f"{site.name} is already under an intervention ({there[0].label}): leave that `with` block first, or "
                "choose other sites"
            )


def _refuse_other_readers(chosen: Sequence[Site]) -> None:
    for site in chosen:
        if "attention" not in site.reads.split("+"):
            raise InterventionError(
                f"only_keys=True needs norms that attention reads, and {site.name} is read by: {site.reads}"
            )


def _divisors(
    model: HookedModel,
    sites: Sequence[Site],
    scale: str | float | Mapping[str, float],
    tokens: Int[Tensor, "batch pos"] | None,
) -> dict[str, float]:
    """What each of these sites divides by instead of its sigma."""
    if isinstance(scale, str) and scale != FROZEN:
        raise InterventionError(f"scale must be {FROZEN!r}, a positive number or a mapping, got {scale!r}")
    given = None if tokens is None else check_tokens(model, tokens)
    if given is not None and scale != FROZEN:
        raise InterventionError(f"tokens are for scale={FROZEN!r}: with another scale there is nothing to calibrate")
    if isinstance(scale, str):
        found = mean_sigmas(model, sites, default_tokens(model) if given is None else given) if sites else {}
    elif isinstance(scale, Mapping):
        missing = [s.name for s in sites if s.name not in scale]
        if missing:
            raise InterventionError(f"scale has no entry for {_some(missing)}")
        found = {s.name: float(scale[s.name]) for s in sites}
    else:
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise InterventionError(f"scale must be {FROZEN!r}, a positive number or a mapping, got {scale!r}")
        found = {s.name: float(scale) for s in sites}
        if not (scale > 0 and math.isfinite(scale)):
            raise InterventionError(f"scale must be a positive finite number, got {scale!r}")
    for name, value in found.items():
        if not (value > 0 and math.isfinite(value)):
            raise InterventionError(f"{name}: its divisor must be a positive finite number, got {value!r}")
    return found


def _warn(
    model: HookedModel, what: str, chosen: Sequence[Site], no_ops: Mapping[str, str], left: Sequence[Site]
) -> None:
    if left:
        warnings.warn(
            f"{_some([s.name for s in left])} stands where a norm would and is none that ln_probe knows "
            f"({class_of(left[0].module)}): the group leaves it out",
            stacklevel=4,
        )
    if no_ops:
        reasons = "; ".join(sorted(set(no_ops.values())))
        where = "every site" if len(no_ops) == len(chosen) else _some(list(no_ops))
        warnings.warn(
            f"without {what!r} changes nothing at {where}, by construction ({reasons})", NoOpWarning, stacklevel=4
        )
    if dropout := active_dropout(model):
        warnings.warn(
            f"the model is in training mode: dropout (at {dropout}) makes every pass differ; model.eval() switches it "
            "off",
            stacklevel=4,
        )
