"""Remove a term of LayerNorm from a running model.

    with without(model, "scaling", sites="attention"):
        loss = model(tokens, return_type="loss")

Every pass inside (a loss, `generate`, `run_with_cache`, `run_with_hooks`) runs on the edited model; afterwards the
model is unchanged, bit for bit. Freezing scale: Heimersheim 2024, "You can remove GPT2's LayerNorm by fine-tuning";
projection and scaling as terms: Brody, Alon & Yahav 2023.

Edits of a norm can be lost without a message: attention may normalize on its own (`use_split_qkv_input` on a bridge), a
compiled model may not call the module at all. So `prove` tests each site first.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.hooks.capture import ActivationError
from ln_probe.hooks.edits import (
    PARTS,
    Change,
    Edit,
    InterventionError,
    LinearEdit,
    LostEditError,
    PartEdit,
    Positions,
    edits_on,
    installed,
    quiet,
    suspended,
)
from ln_probe.hooks.head_edits import HeadEdit, head_count
from ln_probe.hooks.in_memory import is_hugging_face, original_sites
from ln_probe.hooks.model import (
    HookedModel,
    OneLine,
    active_dropout,
    check_model,
    dtype_of,
    evaluating,
    n_layers,
    probe_tokens,
    run,
    whole_number,
)
from ln_probe.hooks.norm import Site, gain_of
from ln_probe.hooks.optimal_constants import fit
from ln_probe.hooks.scales import (
    FROZEN,
    OPTIMAL,
    SCALES,
    Constant,
    announced,
    check_tokens,
    divisors_of,
    mean_sigmas,
    some,
)
from ln_probe.hooks.sites import ModelFacts, class_of, facts_of_checked
from ln_probe.hooks.text import bundled_prompts, default_tokens, tokenizer_of
from ln_probe.hooks.variants import (
    MEAN_IGNORED,
    VARIANT_WITHOUT,
    VARIANTS,
    VariantEdit,
    ignored_below,
    no_op,
)

Rows = Int[Tensor, "batch pos"] | Sequence[Sequence[int] | Int[Tensor, " _"]]
GROUPS = ("attention", "mlp", "final", "all")
_READER_OF_GROUP = {"attention": "attention", "mlp": "mlp", "final": "unembed"}


class NoOpWarning(UserWarning):
    """An intervention that changes nothing by construction."""


@dataclass(frozen=True, repr=False)
class Intervention(OneLine):
    """What `without` does while it lasts.

    Attributes:
        variant: "no_scaling", "no_projection" or "both_removed".
        sites: names of the norms that are edited.
        divisors: the constants at position 0 and elsewhere, by site; empty where scaling stays.
        matched: whether those divisors are the sites' own sigmas (False for a number the user gave: then a change of
            the loss mixes the loss of scaling with a change of size).
        no_ops: sites at which the edit changes nothing by construction, and why.
        only: the part of attention that sees the edited norm ("queries", "keys" or "values"); None: everything does.
        heads: the (layer, head) that alone see the edited norms; None: everything that reads them.

    Example:
        >>> with ln_probe.hooks.without(model, "projection", sites="all") as done:
        ...     done.sites[:2], done.no_ops
    """

    variant: str
    sites: tuple[str, ...]
    divisors: Mapping[str, Constant]
    matched: bool
    no_ops: Mapping[str, str]
    only: str | None
    heads: tuple[tuple[int, int], ...] | None = None


@contextmanager
def without(
    model: object,
    what: str,
    *,
    sites: str | Sequence[str] = "attention",
    scale: str | float | Tensor | Mapping[str, object] = FROZEN,
    tokens: Rows | None = None,
    only: str | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
) -> Iterator[Intervention]:
    """Remove projection, scaling or both from some norms of the model inside a `with` block.

    Contexts over different sites nest, in any order, and amount to one context over all of them. An edited norm
    computes through its own hook points (a bridge's `hook_in`, `hook_scale`, `hook_normalized`, a bridge's `hook_out`):
    hooks there see the edited values, and what they return is used. With `only` or `heads` they see and change the
    intact norm, which the other readers use. Gradients reach the gains and biases of edited norms, which are those that
    the modules have at the time of the pass.

    Args:
        model: HookedTransformer, TransformerBridge, lab model, or a Hugging Face model in memory.
        what: "projection" (x / sigma instead of Px / sigma), "scaling" (Px / c) or "both" (x / c).
        sites: the norms that attention reads ("attention"), that an MLP reads ("mlp"), that the unembedding reads
            ("final"), every norm ("all", norms inside attention included), or names.
        scale: the constant c that replaces sigma. "frozen": two numbers per norm, its mean sigma at position 0 and
            over the other calibration tokens, in the unedited model. "uniform": the second of them everywhere.
            "optimal": the two numbers per norm that minimize the model's next-token loss with all these norms edited
            together; a bundled model brings them for "attention" and "all", otherwise they are fitted on entering,
            which takes minutes (pass `divisors` of what this yields to use them again). A mapping from site names:
            constants measured before, such as `report.constants.of(i)`. A number: that number everywhere (`matched`
            is then False).
        tokens: tokens that the first three are measured or fitted on, [batch pos], or a list of rows of their own
            lengths. None: the prompts that `analyze` measures by default (a bundled model's held-out text, or the
            bundled passages; a model without a tokenizer needs them).
        only: "queries", "keys" or "values": edit what that projection of attention reads, and leave the others.
        heads: (layer, head) pairs: only these heads' queries, keys and values come from the edited norm; `sites` is
            left at "attention", and means the norms that these blocks' attention reads. `hook_q`, `hook_k`, `hook_v`
            and `hook_z` show the combined values; where grouped queries of one key are edited in part, hook points
            inside that attention are called twice. A key-value cache cannot be used at the same time.

    Yields:
        An `Intervention`: the edited sites and their constants.

    Raises:
        TypeError: not a TransformerLens or Hugging Face model, or tokens that are neither a tensor nor a list of rows.
        ValueError, ActivationError: unusable tokens; activations that are not finite.
        InterventionError: an unknown term, site or scale; no norm to edit; a site that is under an intervention
            already; a part of attention that cannot be edited alone; loss-optimal constants for some readers alone, or
            of a loss that the model does not have or that has no gradient.
        LostEditError: an edit does not reach the model's output (tried out on entering); names the site.

    Warns:
        NoOpWarning: the edit changes nothing by construction (no projection in an RMSNorm, a centred stream, folded
            weights that ignore the mean).
        UserWarning: dropout is on, so that every pass differs; a fit of loss-optimal constants did not converge.

    Example:
        >>> with ln_probe.hooks.without(model, "scaling", sites="attention") as done:
        ...     loss = model(tokens, return_type="loss")
        >>> done.divisors["blocks.1.ln1"]
    """
    if not isinstance(what, str) or what not in VARIANT_WITHOUT:
        raise InterventionError(f"unknown term {what!r}: choose from {', '.join(map(repr, VARIANT_WITHOUT))}")
    hooked = check_model(model)
    fitted = isinstance(scale, str) and scale == OPTIMAL
    if fitted and (only is not None or heads is not None):
        raise InterventionError(
            'scale="optimal" is fitted with norms edited for everything that reads them: leave out only and heads, or '
            "pass constants by site name"
        )
    variant = VARIANT_WITHOUT[what]
    with suspended(hooked), quiet(hooked):
        facts = facts_of_checked(hooked)
        norms = facts.norms()
        by_site = None if heads is None else _of_heads(hooked, norms, heads, sites, only)
        chosen = choose(norms, sites if by_site is None else list(by_site))
        _refuse_twice(chosen)
        if only is not None:
            _refuse_other_readers(chosen, only)
        make: Callable[[Edit], Edit] = _whole
        if by_site is not None:
            make = partial(HeadEdit, by_site)
        elif only is not None:
            make = partial(PartEdit, part=only)
        readers = only if heads is None else tuple((int(layer), int(head)) for layer, head in heads)
        prove(facts, chosen, make=make, readers=readers)
        no_ops = why_nothing(facts, chosen, variant)
        with announced("fitting loss-optimal constants: minutes" if fitted else "measuring the constants of norms"):
            divisors = _divisors(facts, chosen, variant, scale, tokens)
    left_out = members(facts.unknown, sites) if isinstance(sites, str) and sites in GROUPS else []
    _warn(hooked, what, chosen, no_ops, left_out)
    positions = Positions()
    target: HookedModel | nn.Module = hooked
    if is_hugging_face(model):
        target = cast(nn.Module, model)
        if readers is not None:
            raise InterventionError(
                "only and heads need hook points inside attention, which a Hugging Face model in memory has not: save "
                "it, and load it with ln_probe.load_model"
            )
        chosen = original_sites(model, chosen)
        _refuse_twice(chosen)
    label = f"without {what!r}"
    edits = [make(VariantEdit(s, variant, divisors.get(s.name), positions, label=label)) for s in chosen]
    matched = not divisors or isinstance(scale, str | Mapping)
    pairs = None if isinstance(readers, str) else readers
    with installed(target, edits):
        yield Intervention(variant, tuple(s.name for s in chosen), divisors, matched, no_ops, only, pairs)


def _of_heads(
    model: HookedModel,
    found: Sequence[Site],
    heads: Sequence[tuple[int, int]],
    sites: str | Sequence[str],
    only: str | None,
) -> dict[str, dict[int, list[int]]]:
    """Those heads by block, by the norm that their attention reads.

    Raises:
        InterventionError: no heads, a head that is not there or is given twice, an attention that reads no norm, or
            what does not go with single heads.
    """
    if sites != "attention" or only is not None:
        said = f"sites={sites!r}" if only is None else f"only={only!r}"
        raise InterventionError(f"heads says which norms are edited, and for whom: leave out {said}")
    if not isinstance(heads, Sized):
        raise InterventionError(f"heads must be a list of (layer, head) pairs, got {heads!r}")
    if not len(heads):
        raise InterventionError("an empty list of heads leaves nothing to edit: give (layer, head) pairs")
    by_site: dict[str, dict[int, list[int]]] = {}
    layers = n_layers(model)
    for pair in heads:
        try:
            layer, head = (whole_number(i, "heads") for i in pair)
        except (TypeError, ValueError):
            raise InterventionError(f"heads must be (layer, head) pairs of whole numbers, got {pair!r}") from None
        if not 0 <= layer < layers:
            raise InterventionError(f"heads: there is no layer {layer}; this model has layers 0 to {layers - 1}")
        count = head_count(model, layer)
        if not 0 <= head < count:
            raise InterventionError(f"heads: layer {layer} has no head {head}; it has heads 0 to {count - 1}")
        site = next((s for s in found if layer in s.attention_layers), None)
        if site is None:
            raise InterventionError(
                f"heads: the attention of layer {layer} reads no norm, so nothing can be taken away"
            )
        mine = by_site.setdefault(site.name, {}).setdefault(layer, [])
        if head in mine:
            raise InterventionError(f"heads: ({layer}, {head}) is given twice")
        mine.append(head)
    return by_site


def members(found: Sequence[Site], group: str) -> list[Site]:
    """The sites of a group (one of GROUPS)."""
    return [s for s in found if group == "all" or _READER_OF_GROUP[group] in s.reads.split("+")]


def why_nothing(facts: ModelFacts, sites: Sequence[Site], variant: str) -> dict[str, str]:
    """Sites at which a variant changes nothing by construction, and why; costs short passes where projection goes, the
    first time."""
    reasons = {s.name: reason for s in sites if (reason := no_op(s, variant))}
    chosen = VARIANTS[variant]
    rest = [s for s in sites if s.name not in reasons and chosen.takes_projection(s) and not chosen.takes_scaling(s)]
    ignored = _ignored_means(facts, rest)
    return reasons | {s.name: f"{s.kind}: {MEAN_IGNORED}" for s in rest if s.name in ignored}


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
            f"{some([s.name for s in found])}"
        )
    if not isinstance(sites, str | Iterable):
        raise InterventionError(f"sites must be one of {', '.join(GROUPS)} or names of norms, got {sites!r}")
    names = [sites] if isinstance(sites, str) else list(sites)
    if not names:
        raise InterventionError(
            f"an empty list of sites leaves nothing to edit: give names, or one of {', '.join(GROUPS)}"
        )
    known = {s.name: s for s in found}
    for name in names:
        if isinstance(name, str) and name in GROUPS:
            raise InterventionError(f"{name!r} is a group of norms: give it alone, sites={name!r}")
        if not isinstance(name, str) or name not in known:
            near = difflib.get_close_matches(str(name), [*known, *GROUPS], n=3, cutoff=0.3)
            raise InterventionError(
                f"no norm called {name!r}; the nearest names are {', '.join(map(repr, near))}"
                if near
                else f"no norm called {name!r}; there are {some(list(known))}"
            )
        if names.count(name) > 1:
            raise InterventionError(f"{name!r} is given twice")
    return [s for s in found if s.name in names]


def _refuse_twice(chosen: Sequence[Site]) -> None:
    for site in chosen:
        if there := [e for e in edits_on(site.module) if not isinstance(e, LinearEdit)]:
            raise InterventionError(
                f"{site.name} is already under an intervention ({there[0].label}): leave that `with` block first, or "
                "choose other sites"
            )


def _refuse_other_readers(chosen: Sequence[Site], only: str) -> None:
    if only not in PARTS:
        raise InterventionError(f"only must be one of {', '.join(map(repr, PARTS))}, got {only!r}")
    for site in chosen:
        if "attention" not in site.reads.split("+"):
            raise InterventionError(
                f"only={only!r} needs norms that attention reads, and {site.name} is read by: {site.reads}"
            )


def _divisors(
    facts: ModelFacts,
    chosen: Sequence[Site],
    variant: str,
    scale: str | float | Tensor | Mapping[str, object],
    tokens: Rows | None,
) -> Mapping[str, Constant]:
    """What each of these sites that scales divides by instead of its sigma."""
    model = facts.model
    sites = [s for s in chosen if VARIANTS[variant].takes_scaling(s)]
    given = None if tokens is None else check_tokens(model, tokens)
    if given is not None and not (isinstance(scale, str) and scale in SCALES):
        named = ", ".join(map(repr, SCALES))
        raise InterventionError(f"tokens are for scale={named}: with another scale there is nothing to calibrate")
    names = [s.name for s in facts.sites]
    if isinstance(scale, Mapping) and (unknown := [n for n in scale if n not in names]):
        raise InterventionError(f"scale is given for {unknown[0]!r}, which is no norm of this model: {some(names)}")

    def sigmas() -> dict[str, Constant]:
        return _default_sigmas(facts, sites) if given is None else mean_sigmas(model, sites, given)

    try:
        if isinstance(scale, str) and scale == OPTIMAL:
            return _optimal(model, chosen, sites, variant, given) if sites else {}
        return divisors_of(scale, [s.name for s in sites], sigmas)
    except ActivationError:
        raise
    except ValueError as error:
        raise InterventionError(str(error)) from None


def _default_sigmas(facts: ModelFacts, sites: Sequence[Site]) -> dict[str, Constant]:
    """The mean sigmas of norms over the model's default prompts; those of all norms are measured, the first time."""
    model = facts.model
    origin = tokenizer_of(model), bundled_prompts(model)  # what the default prompts are made of
    kept = facts.tried.get(("default sigmas",))
    if kept is None or any(one is not two for one, two in zip(kept[0], origin, strict=True)):
        kept = origin, mean_sigmas(model, facts.sites, default_tokens(model))
        facts.tried["default sigmas",] = kept
    known: dict[str, Constant] = kept[1]
    return {s.name: known[s.name] for s in sites}


def _optimal(
    model: HookedModel,
    chosen: Sequence[Site],
    frozen: Sequence[Site],
    variant: str,
    given: Sequence[Int[Tensor, " _"]] | None,
) -> dict[str, Constant]:
    """The loss-optimal constants that the model brings for these norms, or those of a fit."""
    if given is None and variant == VARIANT_WITHOUT["scaling"]:
        shipped: Mapping[str, Mapping[str, Constant]] = vars(model).get("optimal_constants", {})
        if (mine := next((c for c in shipped.values() if set(c) == {s.name for s in frozen}), None)) is not None:
            return dict(mine)
    prompts = default_tokens(model) if given is None else given
    found = fit(model, chosen, prompts, start=mean_sigmas(model, frozen, prompts), variant=variant)
    if not found.converged:
        warnings.warn(f"the fit of loss-optimal constants did not converge: {found.best.reason}", stacklevel=5)
    return found.constants


def _warn(
    model: HookedModel, what: str, chosen: Sequence[Site], no_ops: Mapping[str, str], left: Sequence[Site]
) -> None:
    if left:
        warnings.warn(
            f"{some([s.name for s in left])} stands where a norm would and is none that ln_probe knows "
            f"({class_of(left[0].module)}): the group leaves it out",
            stacklevel=4,
        )
    if no_ops:
        reasons = "; ".join(sorted(set(no_ops.values())))
        where = "every site" if len(no_ops) == len(chosen) else some(list(no_ops))
        warnings.warn(
            f"without {what!r} changes nothing at {where}, by construction ({reasons})", NoOpWarning, stacklevel=4
        )
    if dropout := active_dropout(model):
        warnings.warn(
            f"the model is in training mode: dropout (at {dropout}) makes every pass differ; model.eval() switches it "
            "off",
            stacklevel=4,
        )


TOKENS = 4  # a row: enough for keys to matter, which they do not for a single token
SITES_AT_ONCE = 30  # rows a pass: bounds its logits to 32·4·vocabulary
# Size of the perturbation, in RMS of the norm's output. Strong, so that one layer of a deep model in a 16-bit format
# is seen through the rounding of all others; inf or NaN further on count as moved.
STRENGTH = 10.0
# Rows that are not perturbed may differ by rounding (matrix products depend on the row's place): what counts as moved
# is ten times what they differ by, and four units in the last place of the largest logit.
NOISE_FACTOR, UNITS = 10.0, 4.0


def _whole(edit: Edit) -> Edit:
    """An edit that everything that reads the norm sees."""
    return edit


def prove(
    facts: ModelFacts, sites: Sequence[Site], *, make: Callable[[Edit], Edit] = _whole, readers: object = None
) -> None:
    """Check that an edit of each site reaches the model's output; costs a short pass per 30 sites, the first time.

    Args:
        facts: of the model; what was proved is kept there.
        make: makes an edit for some readers alone.
        readers: those, for `facts` to know them by; None: all.

    Raises:
        LostEditError: it does not; names the site.
        InterventionError: an edit of that kind cannot be made in this architecture.
    """
    proved: set[str] = facts.tried.setdefault(("reaches the output", readers), set())
    left = [s for s in sites if s.name not in proved]
    lost = lost_edits(facts.model, left, make=make)
    proved |= {s.name for s in left} - set(lost)
    if lost:
        more = f" (and at {len(lost) - 1} more sites)" if len(lost) > 1 else ""
        if stay := [n for n, p in facts.model.hook_dict.items() if any(h.is_permanent for h in p.fwd_hooks)]:
            more += (
                f"; permanent hooks stay on in this check ({', '.join(stay[:3])}): add them once the edit is entered"
            )
        raise LostEditError(next(iter(lost.values())) + more)


def lost_edits(model: HookedModel, sites: Sequence[Site], *, make: Callable[[Edit], Edit] = _whole) -> dict[str, str]:
    """Sites at which an edit does not reach the model's output, each with the probable cause."""
    found: dict[str, str] = {}
    with evaluating(model):
        for at in range(0, len(sites), SITES_AT_ONCE):
            found |= _try(model, sites[at : at + SITES_AT_ONCE], make)
    return found


def _ignored_means(facts: ModelFacts, sites: Sequence[Site]) -> set[str]:
    """Names of sites whose readers do not see the mean that a norm without projection leaves in.

    TransformerLens centres the weights that read a norm when it folds the norm into them (`fold_ln`): in such a model
    taking projection away changes nothing, although the norm's output changes.
    """
    model = facts.model
    ignored: dict[str, bool] = facts.tried.setdefault(("ignores the mean",), {})
    left = [s for s in sites if s.projects and s.name not in ignored]
    limit = ignored_below(dtype_of(model))
    with evaluating(model):
        for at in range(0, len(left), SITES_AT_ONCE):
            rows = list(enumerate(left[at : at + SITES_AT_ONCE], start=1))
            noise, shift = (
                _perturbed(model, [Edit(s, _perturbation(s, i, len(rows) + 2, along=along(s)), "") for i, s in rows])[1]
                for along in (lambda _: None, gain_of)
            )
            ignored |= {s.name: float(shift[row]) <= limit * float(noise[row]) for row, s in rows}
    return {s.name for s in sites if ignored.get(s.name)}


def _perturbed(model: HookedModel, edits: Sequence[Edit]) -> tuple[float, Float[Tensor, " row"]]:
    """Run a batch with a row for each edit, between two rows that no edit touches: the size of a logit of the first
    row, and the largest difference from it of each row's."""
    tokens = probe_tokens(model, TOKENS).expand(len(edits) + 2, -1)
    with installed(model, edits):
        logits = run(model, tokens, return_type="logits").double().flatten(1)
    return float(logits[0].abs().max()), (logits - logits[0]).abs().amax(-1)


def _try(model: HookedModel, sites: Sequence[Site], make: Callable[[Edit], Edit]) -> dict[str, str]:
    rows = len(sites) + 2
    moved: dict[str, bool] = {}
    edits = [make(Edit(s, _perturbation(s, i, rows, moved), "sentinel")) for i, s in enumerate(sites, start=1)]
    try:
        size, change = _perturbed(model, edits)
    except LostEditError as error:
        unread = [e.site for e in edits if isinstance(e, PartEdit) and e.waiting]
        if not unread:
            raise
        return {s.name: str(error).replace(unread[0].name, s.name) for s in unread}
    threshold = max(NOISE_FACTOR * float(change[-1]), UNITS * torch.finfo(dtype_of(model)).eps * size)
    found = {}
    for row, (site, edit) in enumerate(zip(sites, edits, strict=True), start=1):
        if not edit.calls:
            found[site.name] = (
                f"{site.name}: the edit was lost, because a forward pass does not call this module (was the model "
                "compiled before, or is the norm computed elsewhere?)"
            )
        elif not moved.get(site.name):
            found[site.name] = f"{site.name}: the edit was lost: the norm's output is the same with it and without"
        elif bool(change[row] <= threshold):
            found[site.name] = (
                f"{site.name}: the edit was lost: a perturbation of {STRENGTH:g} times the size of this norm's output "
                f"moves no logit (by {float(change[row]):.1g} at most; rounding: {threshold:.1g}). Either what comes "
                "after does not take this module's output (attention that normalizes on its own, as with "
                "use_split_qkv_input on a bridge), or it ignores it (weights that are zero)"
            )
    return found


def _perturbation(
    site: Site, row: int, rows: int, moved: dict[str, bool] | None = None, *, along: Tensor | None = None
) -> Change:
    """STRENGTH times the output's size on one row of the batch, alike at every call: noise, or `along` a direction."""

    def change(_x: Tensor, y: Tensor) -> Tensor:
        out = y.detach().clone(memory_format=torch.contiguous_format)
        if out.numel() % rows or not out.numel():
            raise InterventionError(
                f"{site.name}: its output {list(y.shape)} does not hold {rows} rows of a batch, so the edit cannot be "
                "tried out"
            )
        mine = out.view(rows, -1)[row]
        size = float(mine.double().pow(2).mean().sqrt())
        size = STRENGTH * (size if size > 0 else 1.0)
        generator = torch.Generator().manual_seed(row)
        if along is None:
            added = torch.randn(mine.numel(), generator=generator, dtype=torch.float64)
        else:  # another multiple at every position
            multiples = torch.randn(mine.numel() // site.d, 1, generator=generator, dtype=torch.float64)
            added = (multiples * along / along.pow(2).mean().sqrt()).flatten()
        mine += (size * added).to(mine)
        if moved is not None:
            moved[site.name] = not torch.equal(out, y)
        return out

    return change
