"""Compare a folded or centred model with the raw one.

Folding and centring must change weights and nothing else: log-probabilities stay, and so does what every norm computes
before gain and bias (TransformerLens, `ProcessWeights`). Known failures: a square W_in (d_mlp == d_model) is folded the
wrong way round; centring changes a model with RMSNorm.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.hooks.capture import stream
from ln_probe.hooks.edits import quiet
from ln_probe.hooks.model import (
    HookedModel,
    OneLine,
    check_model,
    context_length,
    dtype_of,
    evaluating,
    run,
    vocabulary_size,
)
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import token_batch
from ln_probe.hooks.sites import find_sites

# Largest difference that processing explains, relative to the largest value: it rounds the weights themselves anew
# (measured: up to 2.5e-6 in float32 and 8.2e-2 in bfloat16; a fold that goes wrong: 5.3e-1).
PROCESSING_BOUND = {
    torch.float64: 1e-5,
    torch.float32: 1e-4,
    torch.bfloat16: 1.5e-1,
    torch.float16: 4e-2,
}
PROBE_TOKENS = 48


class NotEquivalentError(ValueError):
    """The processed model is another function than the raw one (says by how much, and from which norm on)."""


@dataclass(frozen=True, repr=False)
class Equivalence(OneLine):
    """How far two models that should be the same function are apart, on one prompt.

    Attributes:
        log_prob_difference: max |Δ log-probability|, nats.
        logits_difference: max |Δ logits less their mean|, relative to the largest: what `bound` is for.
        normalized_difference: by norm, in the order of the pass: max |Δ normalized| relative to the largest.
        bound: what the format's rounding explains.
        parts_at: the first norm beyond the bound; empty if there is none.

    Example:
        >>> same = ln_probe.hooks.check_equivalent(model, model)
        >>> same.holds, same.parts_at
        (True, '')
    """

    log_prob_difference: float
    logits_difference: float
    normalized_difference: Mapping[str, float]
    bound: float
    parts_at: str

    @property
    def holds(self) -> bool:
        return self.logits_difference <= self.bound


def check_equivalent(raw: object, processed: object, tokens: Int[Tensor, "*one pos"] | None = None) -> Equivalence:
    """Compare a folded or centred model with the raw one, on one prompt; raise if they are not the same function.

    Args:
        raw: the model as trained.
        processed: the same model folded, centred or both, in either TransformerLens world.
        tokens: a prompt, [pos] or [1 pos]; by default 48 seeded random tokens, which your hooks do not see.

    Raises:
        NotEquivalentError: log-probabilities differ by more than rounding; names the first norm whose normalized
            vectors do, and the cause where it is a known one.
        ValueError: the two models do not share a vocabulary; several prompts; not token ids, empty, outside the
            vocabulary, or longer than a context.
        TypeError: not TransformerLens models, or tokens that are none.

    Example:
        >>> folded = ln_probe.load_model("lm-layernorm", fold_ln=True)
        >>> ln_probe.hooks.check_equivalent(model, folded).log_prob_difference < 1e-3
        True
    """
    one, two = check_model(raw), check_model(processed)
    if vocabulary_size(one) != vocabulary_size(two):
        raise ValueError(
            f"the models have vocabularies of {vocabulary_size(one)} and {vocabulary_size(two)} tokens: they are not "
            "the raw and the processed form of one model"
        )
    if seeded := tokens is None:
        length = min(PROBE_TOKENS, context_length(one), context_length(two))
        tokens = torch.randint(vocabulary_size(one), (length,), generator=torch.Generator().manual_seed(0))
    batches = [token_batch(m, tokens) for m in (one, two)]
    if len(batches[0]) != 1:
        raise ValueError(f"tokens must be one prompt, [pos] or [1 pos], got shape {tuple(batches[0].shape)}")
    prompt = batches[0][0]
    (raw_logits, before), (logits, after) = (_logits_and_normalized(m, prompt, seeded) for m in (one, two))
    bound = max(PROCESSING_BOUND[dtype_of(m)] for m in (one, two))
    by_site = {name: relative_difference(after[name], before[name]) for name in before if name in after}
    equivalence = Equivalence(
        log_prob_difference=float((raw_logits.log_softmax(-1) - logits.log_softmax(-1)).abs().max()),
        logits_difference=relative_difference(centred(logits), centred(raw_logits)),
        normalized_difference=by_site,
        bound=bound,
        parts_at=next((name for name, difference in by_site.items() if not difference <= bound), ""),
    )
    if not equivalence.holds:
        raise NotEquivalentError(_explain(equivalence, one.cfg, two.cfg))
    return equivalence


def relative_difference(values: Float[Tensor, "*shape"], reference: Float[Tensor, "*shape"]) -> float:
    """Largest absolute difference over the largest absolute reference; infinite if shapes differ or NaN."""
    if values.shape != reference.shape:
        return float("inf")
    scale = float(reference.abs().max())
    difference = float((values - reference).abs().max())
    if difference != difference or scale != scale:
        return float("inf")
    return difference / scale if scale > 0 else difference


def centred(logits: Float[Tensor, "*batch d_vocab"]) -> Float[Tensor, "*batch d_vocab"]:
    """Logits minus their mean over the vocabulary, as with a centred unembedding."""
    return logits - logits.mean(-1, keepdim=True)


def _logits_and_normalized(
    model: HookedModel, tokens: Int[Tensor, " pos"], hidden: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits of a prompt, and what each norm makes of its input before gain and bias; float64.

    `hidden`: from the user's hooks.
    """
    normalized: dict[str, Tensor] = {}

    def keep(site: Site, x: Tensor, _y: Tensor) -> None:
        normalized[site.name] = site.normalize(x.double()).cpu()

    with evaluating(model), quiet(model) if hidden else nullcontext():
        stream(model, tokens, find_sites(model), on_norm=keep)
        logits = run(model, tokens[None], return_type="logits")[0]
    return logits.double().cpu(), normalized


def _explain(found: Equivalence, raw: object, processed: object) -> str:
    text = (
        f"the processed model is not the raw one: log-probabilities differ by up to {found.log_prob_difference:.2g} "
        f"nats (logits less their mean by {found.logits_difference:.1e} of the largest, bound {found.bound:.0e})"
    )
    if not found.parts_at:
        return f"{text}. All norms see the same: what follows the last one is wrong, the unembedding"
    sites = list(found.normalized_difference)
    place, width = sites.index(found.parts_at), getattr(raw, "d_model", None)
    text += f". They part before {found.parts_at}" + (f", after {sites[place - 1]}" if place else ", its first norm")
    if width is not None and width in [getattr(cfg, "d_mlp", None) for cfg in (raw, processed)]:
        text += f". d_mlp == d_model == {width}: a square W_in is folded or centred the wrong way round, "
        text += "load this model unfolded"
    elif getattr(processed, "normalization_type", None) in ("RMS", "RMSPre"):
        text += ". Centring changes a model with RMSNorm, which sees the mean"
    return text
