"""Edit a running model: remove a term of its norms, or hold what they divide by.

Freezing scale: Heimersheim 2024, "You can remove GPT2's LayerNorm by fine-tuning"; projection and scaling as terms:
Brody, Alon & Yahav 2023. With sigma held, a gradient times a part of the input is what that part gives through the
norm, as first-order attribution wants it (attribution patching: Syed, Rager & Conmy 2023; LRP for transformers: Ali et
al. 2022; transcoder circuits: Dunefsky et al. 2024).

Every pass inside runs on the edited model (a loss, `generate`, `run_with_cache`, `run_with_hooks`); afterwards the
model is unchanged, bit for bit. The hooks are in `norm_edits`.
"""

from __future__ import annotations

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
    at_least_float32,
    attentions,
    check_model,
    edits_on,
    evaluating,
    facts_of,
    head_count,
    hooks_on,
    hugging_face_classes,
    run,
    tensors_in,
    unedited,
)
from ln_probe.hooks.norm import SCALING_FROZEN, VARIANT_WITHOUT, VARIANTS, Norm, is_heads_first
from ln_probe.hooks.norm_edits import Edit, HeadEdit, InterventionError, LinearEdit, LostEditError, NormEdit, installed
from ln_probe.hooks.norms import Structure, structure_of
from ln_probe.hooks.task import Rows, check_tokens, default_tokens, unpadded_rows

GROUPS = ("attention", "mlp", "final", "all")
_READER_OF_GROUP = {"attention": "attention", "mlp": "mlp", "final": "unembed"}
Heads = Mapping[str, Mapping[int, Sequence[int] | None]]  # by the norm's name and block; None: all
PARTS = {"queries": "q", "keys": "k", "values": "v"}
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
        no_ops: names of the norms at which the edit changes nothing, because they do not have the term.

    Example:
        >>> with ln_probe.hooks.without(model, "projection", sites="all") as edit:
        ...     edit.sites[:2], edit.no_ops
    """

    variant: str
    sites: tuple[str, ...]
    divisors: Mapping[str, Constant]
    no_ops: tuple[str, ...]


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

    Contexts over different norms nest and act as one over all of them. Hooks at a norm's hook points see
    the edited values, and what they return is used. With `only` or `heads` they see and change the intact norm, which
    the other readers use. Gradients reach the gains and biases of edited norms.

    Args:
        model: HookedTransformer, TransformerBridge, lab model, or a Hugging Face model in memory.
        what: "projection" (x / sigma instead of Px / sigma), "scaling" (Px / c) or "both" (x / c).
        sites: norms by what reads them ("attention", "mlp", or "final": the unembedding), every norm ("all", with those
            inside attention), or names: "blocks.0.ln1", that of a hook point of it, or "ln1" for every block's.
        scale: the constant c that replaces sigma.
            "frozen": a norm's mean sigmas in the unedited model, one for position 0 and one for all others.
            "uniform": the second of them everywhere.
            "optimal": the two numbers per norm that minimize the next-token loss with all these norms edited. Fitting
            takes minutes; a bundled model brings them for "attention" and "all".
            A mapping from names of norms to constants, such as `divisors` of what this yields.
            A number: that number everywhere; a change of the loss is then due to a change of size, too.
        tokens: what constants are measured on, [batch pos] or a list of rows. None: the default prompts of `analyze`.
        only: "queries", "keys" or "values": edit what this projection of attention reads, and leave the others.
        heads: (layer, head) pairs: edit what these heads read, and leave the others; `sites` is left out. Query heads
            that share a key are edited together.

    Yields:
        An `Intervention`: the edited norms and their constants.

    Raises:
        TypeError, ValueError: no such model; unusable tokens or constants; activations that are not finite.
        InterventionError: an unknown term or norm; a norm that is edited already; heads that cannot be edited alone.
        LostEditError: an edit does not reach the model's output; names the norm.

    Warns:
        NoOpWarning: the edit changes nothing at a norm that does not have the term (projection, an RMSNorm).
        UserWarning: "all" leaves out norms without hook points; dropout is on; a fit did not converge; gradient
            checkpointing is on, with which `backward()` must be called inside the block.

    Example:
        >>> with ln_probe.hooks.without(model, "scaling", sites="attention") as edit:
        ...     loss = model(tokens, return_type="loss")
        >>> edit.divisors["blocks.1.ln1"]
    """
    is_optimal = isinstance(scale, str) and scale == OPTIMAL
    if is_optimal and (only is not None or heads is not None):
        raise InterventionError('scale="optimal" is fitted for all readers of a norm: leave out only and heads')
    choice = _choice(model, what, sites, only, heads)
    norms = _own_norms(model, choice)
    if choice.heads is not None and isinstance(model, hugging_face_classes()):
        raise InterventionError("only and heads are not for a Hugging Face model in memory: ln_probe.load_model it")
    _refuse_twice(norms, linear=False)
    constants = _constants(choice, scale, tokens)
    edited = [norm for norm in norms if VARIANTS[choice.variant].effect(norm)]
    no_ops = tuple(norm.name for norm in norms if norm not in edited)
    if no_ops:
        where = some(no_ops) if edited else "every norm"
        warnings.warn(f"without {what!r} changes nothing at {where}: there is no such term", NoOpWarning, stacklevel=3)
    dropouts = (module for module in choice.structure.modules if isinstance(module, nn.Dropout))
    if any(module.training and module.p > 0 for module in dropouts):
        warnings.warn("dropout is on, so every pass differs: model.eval()", stacklevel=3)
    edits: list[Edit] = []
    for norm in edited:
        pair = constants[norm.name].pair if norm.name in constants else None
        edit = NormEdit.of(norm, choice.variant, pair, f"without {what!r}")
        if choice.heads is not None:
            layers, cfg = attentions(choice.model.blocks), choice.model.cfg
            edit = HeadEdit(edit, choice.letters, choice.heads[norm.name], layers, cfg)
        edits.append(edit)
    with installed(cast(nn.Module, model), edits):
        yield Intervention(choice.variant, tuple(norm.name for norm in norms), constants, no_ops)


@dataclass(frozen=True, eq=False)
class _Choice:
    """Which norms are edited, and which readers and heads see it."""

    model: HookedModel
    structure: Structure
    variant: str
    norms: list[Norm]  # that are edited
    letters: str = "qkv"  # of the hook points of the readers that alone see the edit
    heads: Heads | None = None  # that alone see the edit; None: everything that reads the norms


def _choice(
    model: object,
    what: object,
    sites: str | Sequence[str],
    only: str | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
) -> _Choice:
    """Return what the arguments of `without` say."""
    if not isinstance(what, str) or what not in VARIANT_WITHOUT:
        raise InterventionError(f"unknown term {what!r}: give one of {', '.join(VARIANT_WITHOUT)}")
    hooked, variant = check_model(model), VARIANT_WITHOUT[what]
    structure = structure_of(hooked)
    readers = _readers(hooked, structure.norms, sites, only, heads)
    norms = choose(structure.norms, sites if readers is None else list(readers))
    if sites == "all":
        _warn_of_unhooked(structure)
    if readers is None and (lost := structure.lost_at([n for n in norms if VARIANTS[variant].effect(n)])):
        raise LostEditError(next(iter(lost.values())))
    return _Choice(hooked, structure, variant, norms, PARTS.get(only or "", "qkv"), readers)


def _own_norms(given: Any, choice: _Choice) -> Sequence[Norm]:
    """Return the norms with the modules to edit: a Hugging Face model's own, not those of its bridge."""
    if not isinstance(given, hugging_face_classes()):
        return choice.norms
    paths = {module: path for path, module in cast(Any, choice.model).original_model.named_modules()}
    own = {norm.name: paths[cast(Any, norm.module).original_component] for norm in choice.structure.norms}
    own = {name: given.get_submodule(path.replace("._original_component", "")) for name, path in own.items()}
    for norm in choice.norms:
        if len(names := [name for name, module in own.items() if module is own[norm.name]]) > 1:
            raise InterventionError(f"{some(names)} are one module, which runs more than once: edit a bridge")
    return [replace(norm, module=own[norm.name]) for norm in choice.norms]


def members(norms: Sequence[Norm], group: str) -> list[Norm]:
    """Return the norms of a group (one of GROUPS)."""
    return [n for n in norms if group == "all" or _READER_OF_GROUP[group] in n.reads.split("+")]


def choose(norms: Sequence[Norm], sites: str | Sequence[str]) -> list[Norm]:
    """Return the norms that a user asked for, in the order of the forward pass.

    Raises:
        InterventionError: no norms, an empty group, or an unknown name.
    """
    if not norms:
        raise InterventionError("the model has no normalization: there is no term to remove")
    groups, names = ", ".join(GROUPS), some([norm.name for norm in norms])
    if isinstance(sites, str) and sites in GROUPS:
        if not (chosen := members(norms, sites)):
            raise InterventionError(f"no norm belongs to sites={sites!r}; give names: {names}")
        return chosen
    if not isinstance(sites, str | Sequence) or not len(sites):
        raise InterventionError(f"sites must be one of {groups} or names of norms, got {sites!r}")
    chosen = []
    for given in [sites] if isinstance(sites, str) else sites:
        own = (given, str(given).rpartition(".hook_")[0])
        named = [n for n in norms if n.name in own or n.name.endswith(f".{given}")]
        if not named:
            raise InterventionError(f"no norm called {given!r}: give one group ({groups}) or names ({names})")
        chosen += named
    return [n for n in norms if n in chosen]


def _refuse_twice(norms: Sequence[Norm], *, linear: bool) -> None:
    """Raise InterventionError if a norm is under an edit of this kind already."""
    for norm in norms:
        if active := [edit for edit in edits_on(norm.module) if isinstance(edit, LinearEdit) == linear]:
            raise InterventionError(f"{norm.name} is already under {active[0].label}: leave that block first")


def _constants(
    choice: _Choice, scale: str | float | Tensor | Mapping[str, object], tokens: Rows | None
) -> Mapping[str, Constant]:
    """Return what each of these norms that scales divides by instead of its sigma."""
    model, names = choice.model, [norm.name for norm in choice.structure.norms]
    frozen = [norm for norm in choice.norms if "scaling" in VARIANTS[choice.variant].effect(norm)]
    if isinstance(scale, Mapping) and (unknown := [name for name in scale if name not in names]):
        raise InterventionError(f"scale is given for {unknown[0]!r}, which is none of the norms {some(names)}")
    facts = facts_of(model)
    rows = [] if tokens is None else unpadded_rows(facts, tokens)
    if rows and max(map(len, rows)) < 2:
        raise ValueError("tokens hold no position besides 0: give at least two positions")
    if not (isinstance(scale, str) and scale in SCALES):
        return given_constants(scale, [norm.name for norm in frozen])
    if scale == OPTIMAL and not rows and choice.variant == SCALING_FROZEN.name:
        groups: Mapping[str, Mapping[str, Constant]] = bundled_constants(facts, model.parameters()).get("every", {})
        if own := next((c for c in groups.values() if set(c) == {norm.name for norm in frozen}), None):
            return own
    if not frozen:
        return {}
    with unedited(choice.structure.modules):
        means = mean_sigmas(model, frozen, rows) if rows else default_means(model, choice.structure)
        if scale == OPTIMAL:
            return fit(model, choice.norms, rows or default_tokens(facts), start=means, variant=choice.variant)
    return {n.name: means[n.name] if scale == FROZEN else means[n.name].uniform for n in frozen}


def _warn_of_unhooked(structure: Structure) -> None:
    if structure.unhooked:
        warnings.warn(f"norms without hook points are not edited: {some(structure.unhooked)}", stacklevel=5)


def _readers(
    model: HookedModel,
    norms: Sequence[Norm],
    sites: str | Sequence[str],
    only: str | None,
    heads: Sequence[tuple[int, int]] | None,
) -> Heads | None:
    """Return who sees an edit, from the arguments of `without`; None: everything that reads the norms."""
    if heads is not None:
        if sites != "attention" or only is not None:
            raise InterventionError("heads says what is edited: leave out sites and only")
        return _by_norm(model, norms, heads)
    if only is None:
        return None
    if only not in PARTS:
        raise InterventionError(f"only must be one of {', '.join(map(repr, PARTS))}, got {only!r}")
    chosen = choose(norms, sites)
    if wrong := [n for n in chosen if "attention" not in n.reads.split("+")]:
        raise InterventionError(f"only is for norms that attention reads: {wrong[0].name} is none")
    return {norm.name: dict.fromkeys(norm.attention_layers) for norm in chosen}


def _by_norm(
    model: HookedModel, norms: Sequence[Norm], heads: Sequence[tuple[int, int]]
) -> dict[str, dict[int, list[int]]]:
    """Return those heads by the norm that their attention reads, and by block."""
    by_norm: dict[str, dict[int, list[int]]] = {}
    layers = attentions(model.blocks)
    for layer in sorted({layer for layer, _ in heads}):
        chosen = sorted({head for each, head in heads if each == layer})
        count = head_count(layers[layer], model.cfg) if layer in layers else 0
        if wrong := [head for head in chosen if not 0 <= head < count]:
            raise InterventionError(f"heads: there is no head {wrong[0]} in a layer {layer} of this model")
        norm = next((n for n in norms if layer in n.attention_layers), None)
        if norm is None:
            raise InterventionError(f"heads: the attention of layer {layer} reads no norm")
        group = count // int(getattr(model.cfg, "n_key_value_heads", None) or count)  # query heads that share a key
        for first in range(0, count, group):
            if 0 < len({*chosen} & {*range(first, first + group)}) < group:
                raise InterventionError(f"heads {first} to {first + group - 1} of layer {layer} share a key: give all")
        by_norm.setdefault(norm.name, {})[layer] = chosen
    if not by_norm:
        raise InterventionError("heads is empty: give (layer, head) pairs")
    return by_norm


# ------------------------------------------------------------------- linearized

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

        With the norms' own sigmas the forward pass is unchanged up to rounding (5e-6 in a bridge). Nested with
        `without`, an edited norm keeps its edit, and what it still divides by is held.

        Args:
            model: HookedTransformer, TransformerBridge, lab model, or a Hugging Face model in memory.
            sigma: "own", each token's own sigma, detached; or sigmas of another run by the norm's name, as `sigmas`
                gives them: [pos] or [batch pos] ([batch pos head] for norms of heads). Other norms hold their own.

        Yields:
            The names of the norms.

        Raises:
            InterventionError: no norm; linearized already; an unknown name; sigmas that are not positive, or are of
                another number of tokens than the pass.
            LostEditError: at some norm the edit does not reach the output; names it.
        """
        choice, given = _linear_norms(model, sigma)
        norms = _own_norms(model, choice)
        _refuse_twice(norms, linear=True)
        with installed(cast(nn.Module, model), [LinearEdit(norm, given.get(norm.name)) for norm in norms]):
            yield tuple(norm.name for norm in choice.structure.norms)

    def sigmas(self, model: object, tokens: Int[Tensor, "*_"]) -> dict[str, Float[Tensor, "*_"]]:
        """Return the sigma of every norm at every token, by the norm's name, from a pass in evaluation mode.

        Args:
            model: as above.
            tokens: [pos] or [batch pos]; a ValueError says what is wrong with them.
        """
        hooked = check_model(model)
        rows, norms = check_tokens(facts_of(hooked), tokens), structure_of(hooked).norms
        if len({len(row) for row in rows}) > 1:
            raise ValueError("tokens must be rows of one length")
        sigmas: dict[str, Tensor] = {}

        def record(norm: Norm, _m: Any, args: Any, kwargs: Any, _output: Any) -> None:
            x = tensors_in(args, kwargs)[0].detach()
            sigma = norm.sigma(at_least_float32(x))[..., 0]
            heads_first = x.ndim == 4 and is_heads_first(norm, x, len(rows[0]))
            sigmas.setdefault(norm.name, sigma.transpose(1, 2) if heads_first else sigma)

        with evaluating(hooked), hooks_on([(n.module, partial(record, n)) for n in norms]):
            run(hooked, torch.stack(rows))
        return sigmas


linearized = _Linearized()


def _linear_norms(model: object, sigma: Sigma) -> tuple[_Choice, Mapping[str, Tensor]]:
    """Return the norms whose sigma is held, and the sigmas of another run by name."""
    hooked = check_model(model)
    structure = structure_of(hooked)
    names = [norm.name for norm in structure.norms]
    if not names:
        raise InterventionError("the model has no normalization: it is linear there already")
    given = {} if isinstance(sigma, str) and sigma == OWN else sigma
    if not isinstance(given, Mapping):
        raise InterventionError(f"sigma must be {OWN!r} or a mapping from names of norms, got {sigma!r}")
    for name, value in given.items():
        if name not in names:
            raise InterventionError(f"sigma is given for {name!r}, which is none of the norms {some(names)}")
        if not isinstance(value, Tensor) or not bool(((value > 0) & torch.isfinite(value)).all()):
            raise InterventionError(f"sigma of {name} must be a tensor of positive numbers, one per token")
    linear = [norm for norm in structure.norms if norm.scales or norm.name in given]
    _warn_of_unhooked(structure)
    if lost := structure.lost_at(linear):
        raise LostEditError(next(iter(lost.values())))
    return _Choice(hooked, structure, "", linear), given


# ------------------------------------------------------------ the same as hooks

FwdHooks = list[tuple[str, Callable[..., Any]]]


def linearized_hooks(model: object, sigma: Sigma = OWN) -> FwdHooks:
    """Return `linearized` as hooks on the norms' `hook_scale`, for `run_with_hooks(fwd_hooks=…)`.

    Args and errors are those of `linearized`.

    Example:
        >>> model.run_with_hooks(tokens, fwd_hooks=ln_probe.hooks.linearized_hooks(model))
    """
    choice, given = _linear_norms(model, sigma)
    edits = [LinearEdit(norm, given.get(norm.name)) for norm in choice.norms]
    return [(f"{edit.norm.name}.{point}", hook) for edit in edits for point, hook in edit.plain_hooks()]


def edit_hooks(
    model: object,
    what: str,
    *,
    sites: str | Sequence[str] = "attention",
    scale: str | float | Tensor | Mapping[str, object] = FROZEN,
    tokens: Rows | None = None,
) -> FwdHooks:
    """Return `without` as hooks, for `run_with_hooks(fwd_hooks=…)`. Args and errors are those of `without`.

    A pass must begin at position 0 (no cache, no padding on the left). Norms of queries and keys are refused, and
    without projection norms that have no `hook_in` (HookedTransformer's).

    Example:
        >>> model.run_with_hooks(tokens, fwd_hooks=ln_probe.hooks.edit_hooks(model, "scaling", scale=1.0))
    """
    choice = _choice(model, what, sites)
    constants = _constants(choice, scale, tokens)
    hooks: FwdHooks = []
    for norm in (norm for norm in choice.norms if VARIANTS[choice.variant].effect(norm)):
        edit = NormEdit.of(norm, choice.variant, constants[norm.name].pair if norm.name in constants else None)
        record_at = "hook_scale" if edit.adds_mean is None else "hook_in"
        if record_at not in norm.module._modules:
            raise InterventionError(f"{norm.name} has no hook_in to read its mean from: use `without`")
        if norm.reads in ("query", "key"):  # (a hook point does not tell the order of heads and positions)
            raise InterventionError(f"{norm.name} normalizes queries or keys inside attention: use `without`")
        hooks += [(f"{norm.name}.{point}", hook) for point, hook in edit.plain_hooks(record_at)]
    return hooks
