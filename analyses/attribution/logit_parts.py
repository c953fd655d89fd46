"""Where does this logit come from? Every part's share of it, through the final norm, exactly.

    logit = Σ_p w·gain·P x_p / sigma + w·bias + b_U            at the token's own sigma

(`docs/attribution.md`; in folded models direct logit attribution: Elhage et al. 2021, Wang et al. 2023.) Each part's
share is told apart into what it would give without projection, w·gain·x_p / sigma, and what projection takes off,
-w·gain·1·mean(x_p) / sigma.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from ln_probe.analyses.attribution.asked import (
    MEAN,
    AttributionError,
    Direction,
    Tokens,
    direction,
    outputs,
    place,
    prompt,
    soft_cap,
    token_ids,
)
from ln_probe.analyses.attribution.bars import TOP, Bar, draw, largest
from ln_probe.hooks.capture import CachedPrompt, is_cache
from ln_probe.hooks.components import END, Part, Record, Split, Writers, find_wiring, record, weight
from ln_probe.hooks.default_tokens import tokenizer_of
from ln_probe.hooks.model import HookedModel, check_model, evaluating, logit_factor, missing_head, n_layers
from ln_probe.hooks.norm import Site
from ln_probe.hooks.sites import find_sites

COLUMNS = ("part", "kind", "layer", "index", "contribution", "without_projection", "projection", "bias")
TERMS = COLUMNS[5:]


@dataclass(frozen=True, eq=False)
class LogitAttribution:
    """A logit (or a difference of logits) as a sum over parts.

    Attributes:
        table: a row per part: `part`, `kind`, `layer`, `index` (head or neuron; -1), `contribution`, and the three it
            is the sum of: `without_projection`, `projection` (what projection takes off), `bias`.
        total: what they add up to, b_U included: the logit.
        own: the model's own, from its forward pass (from a cache: of the norm's output that it holds).
        scale: what the error is relative to: the largest |logit| at that position.
        bound: relative error that rounding explains in the model's format: 1e-5 in float32, 1e-11 in float64, four
            units of relative precision in half precision (0.03 in bfloat16, 0.004 in float16).
        label: what was asked for, in words.
        sigma: what the final norm divided by; NaN if the model has none.
        soft_cap: cap of the model's logits: the sum is of the logit before it; 0 if there is none.
    """

    table: pd.DataFrame
    total: float
    own: float
    scale: float
    bound: float
    label: str
    sigma: float
    soft_cap: float = 0.0

    def to_torch(self) -> Float64[Tensor, "part term"]:
        """`without_projection`, `projection` and `bias` of every row of the table."""
        return torch.tensor(self.table[list(TERMS)].to_numpy(dtype=float))

    @property
    def error(self) -> float:
        """|total − own| relative to `scale`."""
        return abs(self.total - self.own) / self.scale

    def check(self) -> LogitAttribution:
        """This, if the parts add up to the model's own logit.

        Raises:
            AttributionError: they do not; says by how much.
        """
        summed = float(self.table["contribution"].sum())
        if not (self.error <= self.bound and math.isclose(summed, self.total, abs_tol=self.bound * self.scale)):
            raise AttributionError(
                f"the parts add up to {summed:.6g}, and the model's own {self.label} is {self.own:.6g}: "
                f"{abs(summed - self.own) / self.scale:.1e} of the largest logit apart (rounding explains "
                f"{self.bound:.0e}). Does something after the final norm change its logits?"
            )
        return self

    def top(self, k: int = TOP) -> pd.DataFrame:
        """The k rows with the largest contributions, either way."""
        order = self.table["contribution"].abs().sort_values(ascending=False, kind="stable").index
        return self.table.loc[order[:k]]

    def __repr__(self) -> str:
        return f"LogitAttribution({self.label}: {self.total:.4f}, {len(self.table)} parts)"

    def _repr_html_(self) -> str:
        rows = self.table.itertuples()
        bars = largest([Bar(r.part, r.contribution, r.without_projection + r.bias) for r in rows])  # type: ignore
        note = "Bars add up to it, b_U included. The tick: what the part would give without projection."
        if self.soft_cap:
            note += f" The logit is meant before its soft cap of {self.soft_cap:g}."
        return str(draw(bars, f"{self.label}: {self.total:.4f}", note))


def attribute_logits(
    model: object,
    tokens: object,
    position: SupportsIndex = -1,
    target: Tokens | None = None,
    against: Tokens | None = None,
    *,
    neurons: bool | Sequence[int] = False,
) -> LogitAttribution:
    """Where a logit comes from: every part's share, exactly, through the final norm.

    Args:
        model: HookedTransformer, TransformerBridge or lab model; raw, folded or centred; with or without a final norm.
        tokens: one prompt (text, ids [pos] or [1 pos]), or an `ActivationCache` of this model on one prompt.
        position: whose prediction; negative from the end.
        target: a token (id or text), or several, whose mean logit is meant; None: the model's own first choice.
        against: what is subtracted: a token or several likewise, "mean" (the mean logit of the vocabulary), or None.
        neurons: MLPs neuron by neuron: True for all layers, or a list of layers. (Not from a cache.)

    Raises:
        TypeError: not a TransformerLens model.
        AttributionError: an unknown token, a position out of range, a prompt that cannot be run, a head that was not in
            the checkpoint.
        SplitError: the parts do not add up to what the final norm reads (a writer that is not known, a cache of
            another, folded or centred model): names the place and how much is missing.
    """
    hooked = check_model(model)
    if reason := missing_head(hooked):
        raise AttributionError(f"logits of this model cannot be attributed: {reason}")
    with evaluating(hooked):
        sites = find_sites(hooked)
        wiring = find_wiring(hooked, sites)
        final = next((s for s in reversed(sites) if "unembed" in s.reads.split("+")), None)
        where = END if final is None else final.name
        wiring.at(where)  # raises before the prompt runs
        layers = _layers(hooked, neurons)
        seen: Record
        cap = 0.0
        if is_cache(tokens):
            if layers:
                raise AttributionError("neurons are not read from a cache: pass tokens")
            cached = CachedPrompt(hooked, tokens)
            at = place(position, cached.length())
            seen = cached.record([at], sites, wiring, where)
            own = _logits_of_cache(hooked, cached, final, where, at, seen)
            own *= logit_factor(hooked)
            cap = soft_cap(hooked)  # these logits are made before it
        else:
            ids = prompt(hooked, tokens)
            at = place(position, len(ids))
            seen = record(hooked, ids, [at], sites, neurons=layers)
            assert seen.logits is not None
            own, cap = _uncapped(hooked, seen.logits[0].double(), seen)
        factor = _factor(hooked, own, seen)
    split = Split(Writers(hooked), wiring, sites, seen)
    split.check(where)
    chosen = [int(own[: outputs(hooked)].argmax())] if target is None else token_ids(hooked, target)
    other: Any = against
    if against is not None and not (isinstance(against, str) and against == MEAN):
        other = token_ids(hooked, against)
    asked = direction(hooked, chosen, other, _names(hooked))
    asked = replace(asked, vector=factor * asked.vector, bias=factor * asked.bias)
    table, total, sigma = _table(split, final, where, asked)
    from_model = float(logit_asked(hooked, own, chosen, other))
    bound, scale = wiring.bound(where, seen.dtype), max(float(own.abs().max()), 1e-300)
    return LogitAttribution(table, total, from_model, scale, bound, asked.label, sigma, cap)


def logit_asked(
    model: HookedModel, logits: Float64[Tensor, " d_vocab"] | Tensor, target: Tokens | None, against: Tokens | None
) -> Tensor:
    """The logit, or the difference, that `target` and `against` mean, with its graph."""
    chosen = [int(logits[: outputs(model)].argmax())] if target is None else token_ids(model, target)
    found = logits[chosen].mean()
    if against is None:
        return found
    if isinstance(against, str) and against == MEAN:
        return found - logits[: outputs(model)].mean()
    return found - logits[token_ids(model, against)].mean()


def _layers(model: HookedModel, neurons: bool | Sequence[int]) -> list[int]:
    if isinstance(neurons, bool):
        return list(range(n_layers(model))) if neurons else []
    return [place(layer, n_layers(model), "layer", "the model", "layers") for layer in neurons]


def _names(model: HookedModel) -> Callable[[int], str] | None:
    """The text of a token by its id; None without a tokenizer."""
    tokenizer: Any = tokenizer_of(model)
    if tokenizer is None or not hasattr(tokenizer, "decode"):
        return None
    return lambda i: str(tokenizer.decode([i]))


def _uncapped(
    model: HookedModel, logits: Float64[Tensor, " d_vocab"], seen: Record
) -> tuple[Float64[Tensor, " d_vocab"], float]:
    """Logits before their soft cap, and the cap; as they are, and 0, if the model is seen not to have one."""
    cap, W_U, b_U = soft_cap(model), weight(model, "W_U"), weight(model, "b_U")
    if not cap or W_U is None:
        return logits, 0.0
    plain = (seen.inputs[END][0].to(W_U) @ W_U).double().cpu()
    plain = plain if b_U is None else plain + b_U.double().cpu()
    squashed = cap * (plain / cap).tanh()
    if float((logits - plain).abs().max()) <= float((logits - squashed).abs().max()):
        return logits, 0.0
    return cap * (logits / cap).clamp(-1.0, 1.0).atanh(), cap


def _factor(model: HookedModel, logits: Float64[Tensor, " d_vocab"], seen: Record) -> float:
    """What the model multiplies W_U's logits by: what its config says, where the logits are seen to have it."""
    factor, W_U, b_U = logit_factor(model), weight(model, "W_U"), weight(model, "b_U")
    if factor == 1.0 or W_U is None or END not in seen.inputs:
        return factor
    plain = (seen.inputs[END][0].to(W_U) @ W_U).double().cpu()
    plain = plain if b_U is None else plain + b_U.double().cpu()
    return factor if float((logits - factor * plain).abs().max()) < float((logits - plain).abs().max()) else 1.0


def _logits_of_cache(
    model: HookedModel, cached: CachedPrompt, final: Site | None, where: str, at: int, seen: Record
) -> Float64[Tensor, " d_vocab"]:
    """Logits from the norm's output that the cache holds: another way than through its input's parts."""
    y = None if final is None else cached.normalized(where, at)
    x = seen.inputs[where][0].double()
    out = x if final is None else final.affine(final.normalize(x) if y is None else y).cpu()
    W_U, b_U = weight(model, "W_U"), weight(model, "b_U")
    assert W_U is not None
    logits = out.to(W_U) @ W_U if W_U.dtype == torch.float64 else (out.float().to(W_U) @ W_U).double()
    return (logits if b_U is None else logits + b_U).double().cpu()


def _table(split: Split, final: Site | None, where: str, asked: Direction) -> tuple[pd.DataFrame, float, float]:
    w = asked.vector
    gain = w if final is None or final.gain is None else w * final.gain.detach().cpu().double()
    sigma = 1.0 if final is None else float(split.sigma(where)[0, 0])
    projects = final is not None and final.projects
    readings = torch.stack([gain / sigma, torch.full_like(gain, 1.0 / len(gain))])
    found = split.read(where, readings[None])
    taken = float(gain.sum()) / sigma if projects else 0.0
    rows = [_row(part, float(values[0, 0]), 0.0 - float(values[0, 1]) * taken, 0.0) for part, values in found.items()]
    if final is not None and final.bias is not None:
        bias = float(w @ final.bias.detach().cpu().double())
        rows.append(_row(Part(f"{final.name} bias", "norm bias", final.layer), 0.0, 0.0, bias))
    rows.append(_row(Part("b_U", "unembedding bias"), 0.0, 0.0, asked.bias))
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    return table, math.fsum(table["contribution"]), math.nan if final is None else sigma


def _row(part: Part, without: float, taken: float, bias: float) -> Mapping[str, object]:
    return {
        "part": part.name,
        "kind": part.kind,
        "layer": part.layer,
        "index": part.index,
        "contribution": without + taken + bias,
        "without_projection": without,
        "projection": taken,
        "bias": bias,
    }
