"""Proof that an edit takes: a strong perturbation, sent through the edit's own mechanism, must move the model's output.

Edits of a norm can be lost without a message: a bridge's norm may ignore what its hook points return, attention may
normalize on its own (`use_split_qkv_input`), a compiled model may not call the module at all. So each site is tried
once before an intervention is believed: one row of a batch per site, perturbed at that site only, compared with rows
that are not perturbed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.edits import Change, Edit, InterventionError, LostEditError, PartEdit, installed
from ln_probe.hooks.model import HookedModel, context_length, evaluating, run, vocabulary_size
from ln_probe.hooks.sites import Site
from ln_probe.hooks.variants import MEAN_IGNORED, ignored_below

TOKENS = 4  # a row: enough for keys to matter, which they do not for a single token
SITES_AT_ONCE = 30  # rows a pass: bounds its logits to 32·4·vocabulary
# Size of the perturbation, in RMS of the norm's output. Strong, so that one layer of a deep model in a 16-bit format
# is seen through the rounding of all others; inf or NaN further on count as moved.
STRENGTH = 10.0
# Rows that are not perturbed may differ by rounding (matrix products depend on the row's place): what counts as moved
# is ten times what they differ by, and four units in the last place of the largest logit.
NOISE_FACTOR, UNITS = 10.0, 4.0


def prove(model: HookedModel, sites: Sequence[Site], *, make: Callable[..., Edit] = Edit) -> None:
    """Check that an edit of each site reaches the model's output; costs a short forward pass per 30 sites.

    `make`: the kind of edit, of (site, change, label, positions).

    Raises:
        LostEditError: it does not; names the site.
        InterventionError: an edit of that kind cannot be made in this architecture.
    """
    lost = lost_edits(model, sites, make=make)
    if lost:
        more = f" (and at {len(lost) - 1} more sites)" if len(lost) > 1 else ""
        raise LostEditError(next(iter(lost.values())) + more)


def lost_edits(model: HookedModel, sites: Sequence[Site], *, make: Callable[..., Edit] = Edit) -> dict[str, str]:
    """Sites at which an edit does not reach the model's output, and what is known about why."""
    found: dict[str, str] = {}
    with evaluating(model):
        for at in range(0, len(sites), SITES_AT_ONCE):
            found |= _try(model, sites[at : at + SITES_AT_ONCE], make)
    return found


def ignored_means(model: HookedModel, sites: Sequence[Site]) -> dict[str, str]:
    """Sites whose readers do not see the mean that a norm without projection leaves in, and how that is known.

    TransformerLens centres the weights that read a norm when it folds the norm into them (`fold_ln`): in such a model
    taking projection away changes nothing, although the norm's output changes.
    """
    found = {}
    sites = [s for s in sites if s.projects]
    limit = ignored_below(_dtype(model))
    with evaluating(model):
        for at in range(0, len(sites), SITES_AT_ONCE):
            some = sites[at : at + SITES_AT_ONCE]
            noise, shift = (
                _moves(_perturbed(model, [Edit(s, c, "sentinel") for s, c in zip(some, changes, strict=True)]))
                for changes in (
                    [_perturbation(s, i, len(some) + 2) for i, s in enumerate(some, start=1)],
                    [_perturbation(s, i, len(some) + 2, along=_gain(s)) for i, s in enumerate(some, start=1)],
                )
            )
            for row, site in enumerate(some, start=1):
                if float(shift[row]) <= limit * float(noise[row]):
                    found[site.name] = MEAN_IGNORED
    return found


def _gain(site: Site) -> Tensor:
    return torch.ones(site.d, dtype=torch.float64) if site.gain is None else site.gain.double().cpu()


def _perturbed(model: HookedModel, edits: Sequence[Edit]) -> Float[Tensor, "row values"]:
    """Logits of a batch with a row for each edit, between two rows that no edit touches."""
    tokens = torch.linspace(1, vocabulary_size(model) - 1, min(TOKENS, context_length(model))).long()
    with installed(model, edits):
        logits: Tensor = run(model, tokens.expand(len(edits) + 2, -1), return_type="logits")
    return logits.double().flatten(1)


def _moves(logits: Float[Tensor, "row values"]) -> Float[Tensor, " row"]:
    return (logits - logits[0]).abs().amax(-1)


def _try(model: HookedModel, sites: Sequence[Site], make: Callable[..., Edit]) -> dict[str, str]:
    rows = len(sites) + 2
    moved: dict[str, bool] = {}
    edits = [make(s, _perturbation(s, i, rows, moved), "sentinel") for i, s in enumerate(sites, start=1)]
    try:
        logits = _perturbed(model, edits)
    except LostEditError as error:
        unread = [e.site for e in edits if isinstance(e, PartEdit) and e.waiting]
        if not unread:
            raise
        return {s.name: str(error).replace(unread[0].name, s.name) for s in unread}
    change = _moves(logits)
    rounding = UNITS * torch.finfo(_dtype(model)).eps * float(logits[0].abs().max())
    threshold = max(NOISE_FACTOR * float(change[-1]), rounding)
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


def _dtype(model: HookedModel) -> torch.dtype:
    return next((p.dtype for _, p in model.named_parameters() if p.is_floating_point()), torch.float32)


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
