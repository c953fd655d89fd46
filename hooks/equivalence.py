"""Is a folded or centred model still the same function as the raw one, and if not, where do they part?

Folding and centring change weights and must change nothing else: log-probabilities stay, and so does what every norm
makes of its input before gain and bias (TransformerLens, `ProcessWeights`). Known to go wrong: a square W_in (d_mlp ==
d_model) is folded the wrong way round; a model with RMSNorm is not centred without harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ln_probe.hooks.capture import stream
from ln_probe.hooks.model import OneLine, check_model, context_length, device_of, evaluating, run, vocabulary_size
from ln_probe.hooks.norm import Site
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
    """

    log_prob_difference: float
    logits_difference: float
    normalized_difference: Mapping[str, float]
    bound: float
    parts_at: str

    @property
    def holds(self) -> bool:
        return self.logits_difference <= self.bound


def check_equivalent(raw: object, processed: object, tokens: Int[Tensor, " pos"] | None = None) -> Equivalence:
    """Compare a folded or centred model with the raw one, on one prompt; raise if they are not the same function.

    Args:
        raw: the model as trained.
        processed: the same model folded, centred or both, in either TransformerLens world.
        tokens: a prompt; by default 48 seeded random tokens.

    Raises:
        NotEquivalentError: log-probabilities differ by more than rounding; names the first norm whose normalized
            vectors do, and the cause where it is a known one.
        ValueError: the two models do not share a vocabulary.
        TypeError: not TransformerLens models.
    """
    one, two = check_model(raw), check_model(processed)
    if vocabulary_size(one) != vocabulary_size(two):
        raise ValueError(
            f"the models have vocabularies of {vocabulary_size(one)} and {vocabulary_size(two)} tokens: they are not "
            "the raw and the processed form of one model"
        )
    if tokens is None:
        length = min(PROBE_TOKENS, context_length(one), context_length(two))
        tokens = torch.randint(vocabulary_size(one), (length,), generator=torch.Generator().manual_seed(0))
    before, after = _behaviour(raw, tokens), _behaviour(processed, tokens)
    dtypes = {next(p.dtype for _, p in m.named_parameters()) for m in (one, two)}
    bound = max(PROCESSING_BOUND[t] for t in dtypes)
    shared = [name for name in before.normalized if name in after.normalized]
    by_site = {n: relative_difference(after.normalized[n], before.normalized[n]) for n in shared}
    log_probs = [m.logits.log_softmax(-1) for m in (before, after)]
    found = Equivalence(
        log_prob_difference=float((log_probs[0] - log_probs[1]).abs().max()),
        logits_difference=relative_difference(centred(after.logits), centred(before.logits)),
        normalized_difference=by_site,
        bound=bound,
        parts_at=next((n for n in shared if not by_site[n] <= bound), ""),
    )
    if not found.holds:
        raise NotEquivalentError(_explain(found, shared, one.cfg, two.cfg))
    return found


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
    """Logits less their mean over the vocabulary: what is left when the unembedding is centred."""
    return logits - logits.mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class _Behaviour:
    logits: Float[Tensor, "pos d_vocab"]
    normalized: dict[str, Float[Tensor, "_ _"]]  # rows and length differ from norm to norm


def _behaviour(model: object, tokens: Int[Tensor, " pos"]) -> _Behaviour:
    hooked = check_model(model)
    normalized: dict[str, Tensor] = {}

    def keep(site: Site, x: Tensor, _y: Tensor) -> None:
        normalized[site.name] = site.normalize(x.double()).cpu()

    with evaluating(hooked):
        stream(hooked, tokens, find_sites(hooked), on_norm=keep)
        logits = run(hooked, tokens[None].to(device_of(hooked)), return_type="logits")[0]
    return _Behaviour(logits.double().cpu(), normalized)


def _explain(found: Equivalence, sites: list[str], raw: object, processed: object) -> str:
    text = (
        f"the processed model is not the raw one: log-probabilities differ by up to {found.log_prob_difference:.2g} "
        f"nats (logits less their mean by {found.logits_difference:.1e} of the largest, bound {found.bound:.0e})"
    )
    if not found.parts_at:
        return f"{text}. All norms see the same: what follows the last one is wrong, the unembedding"
    place = sites.index(found.parts_at)
    text += f". They part before {found.parts_at}" + (f", after {sites[place - 1]}" if place else ", its first norm")
    widths = {(getattr(c, "d_model", None), getattr(c, "d_mlp", None)) for c in (raw, processed)}
    if any(d is not None and d == mlp for d, mlp in widths):
        width = next(d for d, mlp in widths if d == mlp)
        text += f". d_mlp == d_model == {width}: a square W_in is folded the wrong way round, load this model unfolded"
    elif getattr(processed, "normalization_type", None) in ("RMS", "RMSPre"):
        text += ". Centring changes a model with RMSNorm, which sees the mean"
    return text
