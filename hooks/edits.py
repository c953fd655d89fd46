"""Edit a running model: remove a term of its norms, or hold what they divide by.

    with without(model, "scaling", sites="attention"):
        loss = model(tokens, return_type="loss")
    with linearized(model):                                           # every norm is a linear map
        model(tokens)[0, -1, answer].backward()
    with linearized(model, sigma=linearized.sigmas(model, other)):    # every norm divides by another run's sigmas
        ...

Freezing scale: Heimersheim 2024, "You can remove GPT2's LayerNorm by fine-tuning"; projection and scaling as terms:
Brody, Alon & Yahav 2023. A norm's own gradient lets sigma answer to every part of its input, which first-order
attribution (attribution patching: Syed, Rager & Conmy 2023; LRP for transformers: Ali et al. 2022; transcoder circuits:
Dunefsky et al. 2024) does not want: with sigma held, a gradient times a part is what that part gives through the norm.

Every pass inside runs on the edited model (a loss, `generate`, `run_with_cache`, `run_with_hooks`); afterwards the
model is unchanged, bit for bit. The hooks are in `norm_edits`.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.hooks.constants import (
    FROZEN,
    OPTIMAL,
    SCALES,
    Constant,
    bundled_constants,
    default_means,
    fit,
    given_constants,
    mean_sigmas,
    some,
)
from ln_probe.hooks.model import (
    HookedModel,
    OneLine,
    active_dropout,
    at_least_float32,
    check_model,
    edits_on,
    evaluating,
    head_count,
    hooks_on,
    is_hugging_face,
    n_layers,
    original_module,
    queries_per_key,
    run,
    tensors_in,
    unedited,
    whole_number,
)
from ln_probe.hooks.norm import SCALING_FROZEN, VARIANT_WITHOUT, VARIANTS, Norm
from ln_probe.hooks.norm_edits import (
    Edit,
    HeadEdit,
    Held,
    InterventionError,
    NormEdit,
    OutputEdit,
    Readers,
    installed,
    prove,
    sigma_per_token,
)
from ln_probe.hooks.norms import Structure, norms_of, structure_of
from ln_probe.hooks.stream import ActivationError
from ln_probe.hooks.task import Rows, check_tokens, default_tokens, unpadded

GROUPS = ("attention", "mlp", "final", "all")
_READER_OF_GROUP = {"attention": "attention", "mlp": "mlp", "final": "unembed"}
PARTS = {"queries": "q", "keys": "k", "values": "v"}  # of attention, and the letters of their hook points
OWN = "own"  # each token's own sigma


class NoOpWarning(UserWarning):
    """An intervention that changes nothing, because no norm has the term."""


@dataclass(frozen=True, repr=False)
class Intervention(OneLine):
    """What `without` does while it lasts.

    Attributes:
        variant: "no_scaling", "no_projection" or "both_removed".
        sites: names of the norms that are edited.
        divisors: the constants at position 0 and elsewhere, by norm; empty where scaling stays.
        no_ops: norms at which the edit changes nothing, because they do not have the term, and why.

    Example:
        >>> with ln_probe.hooks.without(model, "projection", sites="all") as edit:
        ...     edit.sites[:2], edit.no_ops
    """

    variant: str
    sites: tuple[str, ...]
    divisors: Mapping[str, Constant]
    no_ops: Mapping[str, str]


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

    Contexts over different norms nest, in any order, and amount to one context over all of them. Hooks at a norm's
    hook points see the edited values, and what they return is used. With `only` or `heads` they see and change the
    intact norm, which the other readers use. Gradients reach the gains and biases of edited norms. Call `backward()`
    inside the block where the model uses gradient checkpointing.

    Args:
        model: HookedTransformer, TransformerBridge, lab model, or a Hugging Face model in memory.
        what: "projection" (x / sigma instead of Px / sigma), "scaling" (Px / c) or "both" (x / c).
        sites: the norms that attention reads ("attention"), that an MLP reads ("mlp"), that the unembedding reads
            ("final"), every norm ("all", norms inside attention included), or names: "blocks.0.ln1", that of a hook
            point of it, or "ln1" for every block's.
        scale: the constant c that replaces sigma. "frozen": two numbers per norm, its mean sigma at position 0 and
            over the other calibration tokens, in the unedited model. "uniform": the second of them everywhere.
            "optimal": the two numbers per norm that minimize the model's next-token loss with all these norms edited
            together; a bundled model brings them for "attention" and "all", otherwise they are fitted on entering,
            which takes minutes (pass `divisors` of what this yields to use them again). A mapping from names of norms:
            constants measured before, such as `report.constants.of(i)`. A number: that number everywhere (a change of
            the loss then mixes the loss of scaling with a change of size).
        tokens: tokens that the first three are measured or fitted on, [batch pos], or a list of rows of their own
            lengths. None: the prompts that `analyze` measures by default.
        only: "queries", "keys" or "values": edit what that projection of attention reads, and leave the others.
        heads: (layer, head) pairs: only these heads' queries, keys and values come from the edited norm; `sites` is
            left at "attention", and means the norms that these blocks' attention reads. Query heads that share a key
            are edited together.

    Yields:
        An `Intervention`: the edited norms and their constants.

    Raises:
        TypeError: not a TransformerLens or Hugging Face model, or tokens that are neither a tensor nor a list of rows.
        ValueError, ActivationError: unusable tokens; activations that are not finite.
        InterventionError: an unknown term, norm or scale; no norm to edit; a norm that is under an intervention
            already; heads that cannot be edited alone; loss-optimal constants for some readers alone, or of a loss
            that the model does not have or that has no gradient.
        LostEditError: an edit does not reach the model's output; names the norm.

    Warns:
        NoOpWarning: the edit changes nothing at a norm that does not have the term (projection, an RMSNorm).
        UserWarning: dropout is on, so that every pass differs; a fit of loss-optimal constants did not converge; a pass
            with gradient checkpointing, which runs again, without the edit, in a `backward()` after the block.

    Example:
        >>> with ln_probe.hooks.without(model, "scaling", sites="attention") as edit:
        ...     loss = model(tokens, return_type="loss")
        >>> edit.divisors["blocks.1.ln1"]
    """
    if isinstance(scale, str) and scale == OPTIMAL and (only is not None or heads is not None):
        raise InterventionError('scale="optimal" is fitted for all readers of a norm: leave out only and heads')
    choice = _choice(model, what, sites, only, heads)
    target, originals = _targets(model, choice.model, choice.norms)
    if choice.readers is not None and target is not choice.model:
        raise InterventionError("only and heads are not for a Hugging Face model in memory: ln_probe.load_model it")
    _refuse_twice(originals)
    constants = _constants(choice, scale, tokens)
    no_ops = {n.name: reason for n in choice.norms if (reason := no_op(n, choice.variant))}
    _warn(what, choice, no_ops)
    edits, pairs = list[Edit](), {name: constant.pair for name, constant in constants.items()}
    for norm in (norm for norm in originals if norm.name not in no_ops):
        edit = NormEdit.of(norm, choice.variant, pairs.get(norm.name), f"without {what!r}")
        if choice.readers is None:
            edits.append(edit if target is choice.model else OutputEdit(edit))
        else:
            edits.append(HeadEdit(choice.readers, edit))
    with installed(target, edits):
        yield Intervention(choice.variant, tuple(n.name for n in choice.norms), constants, no_ops)


@dataclass(frozen=True, eq=False)
class _Choice:
    """The norms of a hooked model that are edited.

    Attributes:
        every: the model's norms.
        norms: those that are edited.
        readers: who alone sees the edit; None: everything that reads them.
    """

    model: HookedModel
    structure: Structure
    variant: str
    every: list[Norm]
    norms: list[Norm]
    readers: Readers | None


def _choice(
    model: object,
    what: object,
    sites: str | Sequence[str],
    only: str | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
) -> _Choice:
    """Return what the arguments of `without` say.

    Raises:
        TypeError, InterventionError, LostEditError: as `without`.
    """
    if not isinstance(what, str) or what not in VARIANT_WITHOUT:
        raise InterventionError(f"unknown term {what!r}: choose from {', '.join(map(repr, VARIANT_WITHOUT))}")
    hooked, variant = check_model(model), VARIANT_WITHOUT[what]
    structure = structure_of(hooked)
    every = norms_of(hooked, structure)
    readers = _readers(hooked, every, sites, only, heads)
    norms = choose(every, sites if readers is None else list(readers.heads))
    if readers is None:
        prove(hooked, [norm for norm in norms if VARIANTS[variant].effect(norm)], structure)
    else:
        readers.check(hooked)
    return _Choice(hooked, structure, variant, every, norms, readers)


def _targets(given: object, hooked: HookedModel, norms: Sequence[Norm]) -> tuple[HookedModel, Sequence[Norm]]:
    """Return what to edit: a hooked model and its norms, or a Hugging Face model in memory and its own."""
    if not is_hugging_face(given):
        return hooked, norms
    owner = {n.name: original_module(cast(nn.Module, given), n.module) for n in norms_of(hooked)}
    for norm in norms:
        if len(names := [name for name, module in owner.items() if module is owner[norm.name]]) > 1:
            raise InterventionError(f"{some(names)} are one module, which runs more than once in a pass: edit a bridge")
    return cast(HookedModel, given), [replace(n, module=owner[n.name]) for n in norms]


def no_op(norm: Norm, variant: str) -> str:
    """Return why a variant changes nothing at a norm, which does not have the terms; empty if it may."""
    chosen = VARIANTS[variant]
    if not chosen.removes or chosen.effect(norm):
        return ""
    reasons = {"projection": "it has no projection", "scaling": "it does not scale"}
    return f"{norm.kind}: " + " and ".join(
        reasons[term] for term in ("projection", "scaling") if term in chosen.removes
    )


def members(norms: Sequence[Norm], group: str) -> list[Norm]:
    """Return the norms of a group (one of GROUPS)."""
    return [n for n in norms if group == "all" or _READER_OF_GROUP[group] in n.reads.split("+")]


def choose(norms: Sequence[Norm], sites: str | Sequence[str]) -> list[Norm]:
    """Return the norms that a user asked for, in the order of the forward pass.

    Raises:
        InterventionError: no norms, an empty group, an unknown name (the nearest are suggested) or one given twice.
    """
    if not norms:
        raise InterventionError("the model has no normalization: there is no projection or scaling to remove")
    if isinstance(sites, str) and sites in GROUPS:
        if not (chosen := members(norms, sites)):
            raise InterventionError(f"no norm belongs to sites={sites!r}; give names: {some([n.name for n in norms])}")
        return chosen
    if not isinstance(sites, str | Sequence) or not len(sites):
        raise InterventionError(f"sites must be one of {', '.join(GROUPS)} or names of norms, got {sites!r}")
    known, given = {n.name: n for n in norms}, [sites] if isinstance(sites, str) else list(sites)
    names = [name for one in given for name in _norm_names(one, known)]
    for name in names:
        if not isinstance(name, str) or name not in known:
            near = difflib.get_close_matches(str(name), [*known, *GROUPS], n=3, cutoff=0.3) or list(known)
            raise InterventionError(f"no norm called {name!r}; there are {some(near)} (give a group alone)")
    if len(set(names)) < len(names):
        raise InterventionError(f"a name is given twice: {some(names)}")
    return [n for n in norms if n.name in names]


def _norm_names(given: Any, known: Mapping[str, Norm]) -> list[Any]:
    """Return the norms of a name, of a hook point (`blocks.0.ln1.hook_scale`) or of a last part (`ln1`)."""
    if not isinstance(given, str) or given in known:
        return [given]
    owner = given.rpartition(".hook_")[0]
    return [owner] if owner in known else [name for name in known if name.endswith(f".{given}")] or [given]


def _refuse_twice(norms: Sequence[Norm], *, holds: bool = False) -> None:
    """Raise InterventionError if a norm is under an edit of this kind already."""
    for norm in norms:
        if active := [edit for edit in edits_on(norm.module) if edit.holds == holds]:
            raise InterventionError(f"{norm.name} is already under {active[0].label}: leave that `with` block first")


def _constants(
    choice: _Choice, scale: str | float | Tensor | Mapping[str, object], tokens: Rows | None
) -> dict[str, Constant]:
    """Return what each of these norms that scales divides by instead of its sigma.

    Raises:
        InterventionError: an unknown scale, tokens that are not used, or constants that are missing or not positive.
    """
    model, variant, names = choice.model, VARIANTS[choice.variant], [n.name for n in choice.every]
    frozen = [n for n in choice.norms if variant.takes_scaling(n)]
    if isinstance(scale, Mapping) and (unknown := [n for n in scale if n not in names]):
        raise InterventionError(f"scale is given for {unknown[0]!r}, which is no norm of this model: {some(names)}")
    rows = None if tokens is None else check_tokens(model, tokens)
    if rows is not None:
        rows, notes = unpadded(model, rows)
        for note in notes:
            warnings.warn(f"tokens: {note}", stacklevel=4)
    if rows is not None and max(map(len, rows)) < 2:
        raise ValueError("tokens hold no position besides 0: give at least two positions")
    try:
        if not (isinstance(scale, str) and scale in SCALES):
            if rows is not None:
                raise ValueError(f"tokens are for scale={', '.join(map(repr, SCALES))}: leave them out")
            return given_constants(scale, [n.name for n in frozen])
        if not frozen:
            return {}
        if scale == OPTIMAL and rows is None and choice.variant == SCALING_FROZEN.name:
            groups: Mapping[str, dict[str, Constant]] = bundled_constants(model).get("every", {})
            if own := next((c for c in groups.values() if set(c) == {n.name for n in frozen}), None):
                return dict(own)
        if rows is None:
            means = default_means(model, choice.every, choice.structure)
        else:
            with unedited(model):
                means = mean_sigmas(model, frozen, rows)
        if scale != OPTIMAL:
            return {n.name: means[n.name] if scale == FROZEN else means[n.name].uniform for n in frozen}
        with unedited(model):
            prompts = default_tokens(model) if rows is None else rows
            return fit(model, choice.norms, prompts, start=means, variant=choice.variant)
    except ActivationError:
        raise
    except ValueError as error:
        raise InterventionError(str(error)) from None


def _warn(what: str, choice: _Choice, no_ops: Mapping[str, str]) -> None:
    if no_ops:
        where = "every norm" if len(no_ops) == len(choice.norms) else some(list(no_ops))
        reasons = "; ".join(sorted(set(no_ops.values())))
        warnings.warn(f"without {what!r} changes nothing at {where} ({reasons})", NoOpWarning, stacklevel=4)
    if dropout := active_dropout(choice.structure.modules):
        warnings.warn(f"dropout is on (in {dropout}), so every pass differs: model.eval()", stacklevel=4)


def _readers(
    model: HookedModel,
    norms: Sequence[Norm],
    sites: str | Sequence[str],
    only: str | None,
    heads: Sequence[tuple[int, int]] | None,
) -> Readers | None:
    """Return who sees an edit, from the arguments of `without`; None: everything that reads the norms.

    Raises:
        InterventionError: unknown readers, norms that attention does not read, heads that cannot be edited alone.
    """
    if heads is not None:
        if sites != "attention" or only is not None:
            raise InterventionError("heads says which norms are edited, and for whom: leave out sites and only")
        return Readers("qkv", _by_norm(model, norms, heads))
    if only is None:
        return None
    if only not in PARTS:
        raise InterventionError(f"only must be one of {', '.join(map(repr, PARTS))}, got {only!r}")
    chosen = choose(norms, sites)
    if wrong := [n for n in chosen if "attention" not in n.reads.split("+")]:
        raise InterventionError(f"only={only!r} is for norms that attention reads: {wrong[0].name} is none")
    return Readers(PARTS[only], {n.name: dict.fromkeys(n.attention_layers) for n in chosen})


def _by_norm(
    model: HookedModel, norms: Sequence[Norm], heads: Sequence[tuple[int, int]]
) -> dict[str, dict[int, tuple[int, ...] | None]]:
    """Return those heads by block, by the norm that their attention reads."""
    by_layer: dict[int, set[int]] = {}
    try:
        pairs = [(whole_number(layer, "a layer"), whole_number(head, "a head")) for layer, head in heads]
    except (TypeError, ValueError):
        pairs = []
    if not pairs:
        raise InterventionError(f"heads must be a list of (layer, head) pairs, not empty, got {heads!r}")
    for layer, head in pairs:
        if not 0 <= layer < n_layers(model):
            raise InterventionError(f"heads: there is no layer {layer}; the layers are 0 to {n_layers(model) - 1}")
        if not 0 <= head < head_count(model, layer):
            raise InterventionError(f"heads: layer {layer} has the heads 0 to {head_count(model, layer) - 1}")
        by_layer.setdefault(layer, set()).add(head)
    by_norm: dict[str, dict[int, tuple[int, ...] | None]] = {}
    for layer, chosen in by_layer.items():
        norm = next((n for n in norms if layer in n.attention_layers), None)
        if norm is None:
            raise InterventionError(f"heads: the attention of layer {layer} reads no norm")
        group = queries_per_key(model, layer)
        for key in {head // group for head in chosen}:
            together = range(key * group, (key + 1) * group)
            if not chosen.issuperset(together):
                raise InterventionError(f"heads {together[0]} to {together[-1]} of layer {layer} share a key: give all")
        by_norm.setdefault(norm.name, {})[layer] = tuple(sorted(chosen))
    return by_norm


# ---------------------------------------------------------------------------------------- linearized

Sigma = str | Mapping[str, Float[Tensor, "*_"]]


class _Linearized:
    """`linearized(model)` as a context, and `linearized.sigmas(model, tokens)`.

    Example:
        >>> with ln_probe.hooks.linearized(model):  # a gradient that is additive over the components of the stream
        ...     model(tokens)[0, -1, 7].backward()
        >>> ln_probe.hooks.linearized.sigmas(model, tokens)["ln_final"].shape == tokens.shape
        True
    """

    @contextmanager
    def __call__(self, model: object, sigma: Sigma = OWN) -> Iterator[tuple[str, ...]]:
        """Hold sigma at every norm inside a `with` block, so that each norm is a linear map.

        With the norms' own sigmas the forward pass is unchanged, but for rounding (a bridge recomputes a norm whose
        scale is replaced: up to 5e-6). `without` nests with it in either order: an edited norm keeps its edit, and what
        it still divides by is held. Gradients reach gains and biases.

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
            LostEditError: at some norm the edit does not reach the output; names it.
        """
        hooked = check_model(model)
        norms, linear, given = _linear_norms(hooked, sigma)
        target, originals = _targets(model, hooked, linear)
        _refuse_twice(originals, holds=True)
        edits = [Held(norm, given.get(norm.name)) for norm in originals]
        with installed(target, edits if target is hooked else [OutputEdit(edit) for edit in edits]):
            yield tuple(n.name for n in norms)

    def sigmas(self, model: object, tokens: Int[Tensor, "*_"]) -> dict[str, Float[Tensor, "*_"]]:
        """Return the sigma of every norm at every token, by the norm's name; one forward pass in evaluation mode.

        Args:
            model: any hooked model.
            tokens: [pos] or [batch pos].

        Raises:
            TypeError, ValueError: not whole numbers, other axes, empty, outside the vocabulary, beyond the context.
            InterventionError: the model has no norm.
        """
        hooked = check_model(model)
        rows, norms = check_tokens(hooked, tokens), _all_norms(hooked)
        if len({len(row) for row in rows}) > 1:
            raise ValueError("tokens must be rows of one length")
        sigmas: dict[str, Tensor] = {}

        def record(norm: Norm, _m: Any, args: Any, kwargs: Any, _output: Any) -> None:
            x = tensors_in(args, kwargs)[0].detach()
            sigmas.setdefault(norm.name, norm.sigma(at_least_float32(x))[..., 0])

        with evaluating(hooked), hooks_on([(n.module, partial(record, n)) for n in norms]):
            run(hooked, torch.stack(rows))
        return sigmas


linearized = _Linearized()


# ---------------------------------------------------------------------------------------- the same as hooks

FwdHooks = list[tuple[str, Callable[..., Any]]]


def linearized_hooks(model: object, sigma: Sigma = OWN) -> FwdHooks:
    """Return `linearized` as hooks on the norms' `hook_scale`, for `run_with_hooks(fwd_hooks=…)` and `model.hooks(…)`.

    Args:
        model, sigma: as for `linearized`.

    Raises:
        TypeError, InterventionError, LostEditError: as `linearized`.

    Example:
        >>> model.run_with_hooks(tokens, fwd_hooks=ln_probe.hooks.linearized_hooks(model))
    """
    _, linear, given = _linear_norms(check_model(model), sigma)

    def hold(norm: Norm, scale: Tensor, hook: Any) -> Tensor:
        if norm.name not in given:
            return scale.detach()
        return sigma_per_token(norm, given[norm.name], scale.expand(*scale.shape[:-1], norm.d)).to(scale)

    return [(f"{norm.name}.hook_scale", partial(hold, norm)) for norm in linear]


def edit_hooks(
    model: object,
    what: str,
    *,
    sites: str | Sequence[str] = "attention",
    scale: str | float | Tensor | Mapping[str, object] = FROZEN,
    tokens: Rows | None = None,
) -> FwdHooks:
    """Return `without` as hooks, for `run_with_hooks(fwd_hooks=…)` and `model.hooks(…)`.

    A pass must begin at position 0 (no cache, no padding on the left). Without projection the norms need a `hook_in`,
    as a bridge's and the laboratory's have it.

    Args:
        model, what, sites, scale, tokens: as for `without`.

    Raises:
        TypeError, ValueError, InterventionError, LostEditError: as `without`; a norm without `hook_in`; a norm of
            queries or keys.

    Example:
        >>> model.run_with_hooks(tokens, fwd_hooks=ln_probe.hooks.edit_hooks(model, "scaling", scale=1.0))
    """
    choice = _choice(model, what, sites)
    pairs = {name: constant.pair for name, constant in _constants(choice, scale, tokens).items()}
    hooks: FwdHooks = []
    for norm in (norm for norm in choice.norms if not no_op(norm, choice.variant)):
        edit = NormEdit.of(norm, choice.variant, pairs.get(norm.name))
        if edit.adds_mean is not None and "hook_in" not in norm.module._modules:
            raise InterventionError(f"{norm.name} has no hook_in, which its mean is read from: use `without`")
        if norm.reads in ("query", "key"):  # its vectors are of heads, in an order that a hook point does not tell
            raise InterventionError(f"{norm.name} normalizes queries or keys inside attention: use `without`")
        edit.positions.direct = True  # every pass begins at position 0
        hooks += [(f"{norm.name}.{point}", hook) for point, hook in edit.plain_hooks()]
    return hooks


def _all_norms(model: HookedModel, structure: Structure | None = None) -> list[Norm]:
    if not (norms := norms_of(model, structure)):
        raise InterventionError("the model has no normalization: it is linear there already")
    return norms


def _linear_norms(model: HookedModel, sigma: Sigma) -> tuple[list[Norm], list[Norm], dict[str, Tensor]]:
    """Return the model's norms, those whose sigma is held, and the sigmas of another run by name.

    Raises:
        InterventionError, LostEditError: as `linearized`.
    """
    structure = structure_of(model)
    norms, given = _all_norms(model, structure), dict[str, Tensor]()
    if not (isinstance(sigma, str) and sigma == OWN):
        if not isinstance(sigma, Mapping):
            raise InterventionError(f"sigma must be {OWN!r} or a mapping from names of norms, got {sigma!r}")
        names = [n.name for n in norms]
        for name, value in sigma.items():
            if name not in names:
                raise InterventionError(f"sigma is given for {name!r}, which is no norm of this model: {some(names)}")
            if not isinstance(value, Tensor) or not value.is_floating_point():
                raise InterventionError(f"sigma of {name} must be a tensor with a number per token, got {value!r}")
            if not bool(((value > 0) & torch.isfinite(value)).all()):
                raise InterventionError(f"sigma of {name} must be positive and finite everywhere")
            given[name] = value.detach()
    linear = [norm for norm in norms if norm.scales or norm.name in given]
    prove(model, linear, structure)
    return norms, linear, given
