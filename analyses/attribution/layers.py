"""What does a part do to a logit through all later layers? Its effect along every path, sigmas and patterns held.

With every norm linear (`linearized`) and every pattern held, only MLPs are nonlinear. The
gradient of a logit with respect to what a part wrote, times what it wrote, is its effect along every path to the logit,
exact in an attention-only model, first-order in MLPs (the linearization behind attribution patching and transcoder
circuits: Nanda 2023, Dunefsky et al. 2024). What MLPs and later biases leave over is stated at each layer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, SupportsIndex

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.analyses.attribution.logits import LogitAttribution, attribute_logits
from ln_probe.analyses.attribution.shared import (
    AttributionError,
    Bar,
    Tokens,
    draw,
    is_mean,
    largest,
    place,
    prompt,
    token_ids,
)
from ln_probe.hooks.components import Part, Source, Writers, bias_part, head_part, watched, whole_part
from ln_probe.hooks.linearized import linearized
from ln_probe.hooks.model import (
    HookedModel,
    attention_output,
    attentions,
    blocks,
    check_model,
    child_of,
    evaluating,
    hooks_on,
    outputs,
)

# |gradient through queries| over the effects' own size that counts as "patterns are held"; where they are, it is 0.
_HELD = 1e-9


@dataclass(frozen=True, eq=False)
class LayersAttribution:
    """What every part does to a logit through all later layers, sigmas and patterns held.

    Attributes:
        table: a row per part: `direct` (through the final norm alone, as `attribute_logits` has it), `mediated`
            (through later heads and MLPs, summed over the positions where it was written), `effect` (both).
        remainders: a row per block: `layer`, `first_order` (the gradient at the stream before it times the stream) and
            `remainder` (logit − first_order: biases written later, and what later MLPs bend).
        total: the logit (or difference).
        label: what was asked for, as text.

    Example:
        >>> from ln_probe.analyses.attribution import attribute_through_layers
        >>> through = attribute_through_layers(model, tokens[0], target=7)
        >>> through.total, through.remainders
    """

    table: pd.DataFrame
    remainders: pd.DataFrame
    total: float
    label: str

    def __repr__(self) -> str:
        return f"LayersAttribution({self.label}: {self.total:.4f}, {len(self.table)} parts)"

    def _repr_html_(self) -> str:
        bars = [Bar(str(r.part), float(r.effect), float(r.direct)) for r in self.table.itertuples()]  # type: ignore
        note = (
            "A bar: the part's effect along every path, sigmas and patterns held. The tick: its direct effect alone. "
            "Bars do not add up (a part acts through later ones). First-order in MLPs: "
            f"{self.remainders['remainder'].iloc[0]:+.3g} of the logit come from biases and bends after the embeddings."
        )
        return draw(largest(bars), f"{self.label}: {self.total:.4f}", note)


def attribute_through_layers(
    model: object,
    tokens: object,
    position: SupportsIndex = -1,
    target: Tokens | None = None,
    against: Tokens | None = None,
) -> LayersAttribution:
    """What every part does to a logit through all later layers, with sigmas and attention patterns held.

    Args:
        model: HookedTransformer, TransformerBridge or lab model.
        tokens: one prompt (text, ids [pos] or [1 pos]).
        position, target, against: as of `attribute_logits`.

    Raises:
        AttributionError, SplitError, LostEditError: as `attribute_logits` and `linearized`; and where this model's
            attention shows its pattern only after it was used, so that it cannot be held.

    Example:
        >>> from ln_probe.analyses.attribution import attribute_through_layers
        >>> attribute_through_layers(model, tokens[0], target=7).table.head(3)
    """
    hooked = check_model(model)
    ids = prompt(hooked, tokens)
    at = place(position, len(ids))
    direct = attribute_logits(hooked, ids, at, target, against)
    assert isinstance(direct, LogitAttribution)
    direct.check()
    seen = _Watched(hooked, len(ids))
    with evaluating(hooked), linearized(hooked), seen.hooks(), torch.enable_grad():
        logits = _without_cap(hooked(ids[None], return_type="logits")[0, at], direct.soft_cap)
        asked = _asked(hooked, logits, target, against)
        found = seen.effects(asked)
    total = float(asked.detach())
    rows = direct.table.set_index("part")["contribution"]
    table = [
        (p.name, p.kind, p.layer, p.index, float(rows.get(p.name, 0.0)), v - float(rows.get(p.name, 0.0)), v)
        for p, v in found.items()
    ]
    columns = ["part", "kind", "layer", "index", "direct", "mediated", "effect"]
    remainders = pd.DataFrame(
        [(layer, value, total - value) for layer, value in seen.first_order.items()],
        columns=["layer", "first_order", "remainder"],
    )
    return LayersAttribution(pd.DataFrame(table, columns=columns), remainders, total, direct.label)


def _asked(
    model: HookedModel, logits: Float[Tensor, " d_vocab"], target: Tokens | None, against: Tokens | None
) -> Tensor:
    """The logit, or the difference, that `target` and `against` mean, with its graph."""
    size = outputs(model)
    found = logits[[int(logits[:size].argmax())] if target is None else token_ids(model, target)].mean()
    if against is None:
        return found
    return found - (logits[:size] if is_mean(against) else logits[token_ids(model, against)]).mean()


def _without_cap(logits: Float[Tensor, " d_vocab"], cap: float) -> Float[Tensor, " d_vocab"]:
    """Logits before the model's soft cap, which is what parts add up to.

    Raises:
        AttributionError: one is rounded to the cap itself, so the logit before it is not known.
    """
    if not cap:
        return logits
    found: Tensor = cap * torch.atanh(logits / cap)
    if not bool(found.isfinite().all()):
        raise AttributionError(
            f"a logit is rounded to the soft cap of {cap:g}: the logit before it is not known. Run the model in float64"
        )
    return found


class _Watched:
    """Keeps what is written with its graph, and holds patterns, under its `hooks`."""

    def __init__(self, model: HookedModel, length: int) -> None:
        self.model, self.length, self.writers = model, length, Writers(model)
        # By source; by ("output", layer), of attention with its biases; by ("query", layer) and by ("stream", layer).
        self.kept: dict[Source | tuple[str, int], Tensor] = {}
        self.first_order: dict[int, float] = {}

    def hooks(self) -> AbstractContextManager[None]:
        after = [(module, self._keep(source, leaf=source.layer < 0)) for source, module in watched(self.model)]
        for layer, attn in attentions(self.model).items():
            after.append((attention_output(attn), self._keep(("output", layer))))
            for name, hook in (("hook_pattern", _detached), ("hook_q", self._keep(("query", layer)))):
                if (point := child_of(attn, name)) is not None:
                    after.append((point, hook))
        before = [(block, self._keep(("stream", layer))) for layer, block in enumerate(blocks(self.model))]
        return hooks_on(after, before)

    def _keep(self, key: Source | tuple[str, int], *, leaf: bool = False) -> Any:
        """A hook that keeps a module's output, or (before it runs) its input, the first time."""

        def hook(_m: nn.Module, args: Any, _kwargs: Any, output: Any = None) -> Any:
            value = args[0] if output is None else output[0] if isinstance(output, tuple) else output
            if key in self.kept:
                return None
            if leaf:  # so that there is a gradient where parameters are frozen
                value = value.detach().requires_grad_()
            self.kept[key] = value
            return value if leaf else None

        return hook

    def effects(self, asked: Tensor) -> dict[Part, float]:
        """Of every part: its gradient times itself, summed over positions.

        Raises:
            AttributionError: patterns are not held.
        """
        found = torch.autograd.grad(asked, list(self.kept.values()), allow_unused=True)
        gradients = {
            key: torch.zeros_like(value) if gradient is None else gradient
            for (key, value), gradient in zip(self.kept.items(), found, strict=True)
        }
        size = max(abs(float(asked.detach())), 1e-300)
        effects: dict[Part, float] = {}
        for key, value in self.kept.items():
            gradient, seen = gradients[key], value.detach()
            if isinstance(key, Source):
                effects |= self._of_source(key, seen.double(), gradient.double(), gradients)
            elif key[0] == "stream":
                self.first_order[key[1]] = float((gradient.double() * seen.double()).sum())
            elif key[0] == "query" and float(gradient.abs().max()) * float(seen.abs().max()) > _HELD * size:
                raise AttributionError(
                    f"the attention pattern of layer {key[1]} cannot be held: this world shows it after it was used. "
                    "Load the model as a HookedTransformer (TransformerLens 3.9), or use attribute_logits"
                )
        return effects

    def _of_source(
        self, source: Source, value: Tensor, gradient: Tensor, gradients: dict[Any, Tensor]
    ) -> dict[Part, float]:
        """The effect of what a source wrote, by part."""
        bias = self.writers.bias(source, value)
        flat_value, flat_gradient = (t.reshape(self.length, -1) for t in (value, gradient))
        if source.kind == "attn":
            z, g = (self.writers.split(source.layer, t) for t in (flat_value, flat_gradient))
            each = einsum(z, g, "pos head k, pos head k -> head")
            found = {head_part(source.layer, h): float(v) for h, v in enumerate(each)}
            if bias is not None:
                lift = gradients["output", source.layer].double().reshape(self.length, -1)
                found[bias_part(source)] = float((lift @ bias).sum())
            return found
        whole = float((flat_value * flat_gradient).sum())
        if bias is None:
            return {whole_part(source): whole}
        of_bias = float((flat_gradient @ bias).sum())
        return {whole_part(source): whole - of_bias, bias_part(source): of_bias}


def _detached(_m: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> Tensor:
    return output.detach()
