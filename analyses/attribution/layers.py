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

from ln_probe.analyses.attribution.logits import LogitAttribution, attribute_logits, logit_asked
from ln_probe.analyses.attribution.shared import (
    AttributionError,
    Bar,
    Tokens,
    draw,
    largest,
    place,
    prompt,
)
from ln_probe.hooks.components import (
    Part,
    Source,
    Writers,
    bias_part,
    head_part,
    watched,
    whole_part,
)
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
)

LAYER_COLUMNS = ("part", "kind", "layer", "index", "direct", "mediated", "effect")
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
        return str(draw(largest(bars), f"{self.label}: {self.total:.4f}", note))


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
        asked = logit_asked(hooked, logits, target, against)
        found = seen.effects(asked)
    total = float(asked.detach())
    rows = direct.table.set_index("part")["contribution"]
    table = [
        (p.name, p.kind, p.layer, p.index, float(rows.get(p.name, 0.0)), v - float(rows.get(p.name, 0.0)), v)
        for p, v in found.items()
    ]
    remainders = pd.DataFrame(
        [(layer, value, total - value) for layer, value in seen.first_order.items()],
        columns=["layer", "first_order", "remainder"],
    )
    return LayersAttribution(pd.DataFrame(table, columns=list(LAYER_COLUMNS)), remainders, total, direct.label)


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
        self.written: dict[Source, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}  # of attention layers, biases included
        self.streams: dict[int, Tensor] = {}
        self.queries: dict[int, Tensor] = {}
        self.first_order: dict[int, float] = {}

    def hooks(self) -> AbstractContextManager[None]:
        after = [(m, self._keep(self.written, source, leaf=source.layer < 0)) for source, m in watched(self.model)]
        for layer, attn in attentions(self.model).items():
            after.append((attention_output(attn), self._keep(self.outputs, layer)))
            for name, hook in (("hook_pattern", _detached), ("hook_q", self._keep(self.queries, layer))):
                if (point := child_of(attn, name)) is not None:
                    after.append((point, hook))
        return hooks_on(after, [(block, self._stream(layer)) for layer, block in enumerate(blocks(self.model))])

    def _keep(self, into: dict[Any, Tensor], key: Any, *, leaf: bool = False) -> Any:
        def hook(_m: nn.Module, _args: Any, _kwargs: Any, output: Any) -> Any:
            value = output[0] if isinstance(output, tuple) else output
            if key in into:
                return None
            if leaf:  # so that there is a gradient where parameters are frozen
                value = value.detach().requires_grad_()
            into[key] = value
            return value if leaf else None

        return hook

    def _stream(self, layer: int) -> Any:
        def hook(_m: nn.Module, args: Any, _kwargs: Any) -> None:
            self.streams[layer] = args[0]

        return hook

    def effects(self, asked: Tensor) -> dict[Part, float]:
        """Of every part: its gradient times itself, summed over positions.

        Raises:
            AttributionError: patterns are not held.
        """
        places: list[tuple[dict[Any, Tensor], Any]] = [
            (kept, key) for kept in (self.written, self.outputs, self.streams, self.queries) for key in kept
        ]
        every = torch.autograd.grad(asked, [kept[key] for kept, key in places], allow_unused=True)
        gradients = [torch.zeros_like(k[n]) if g is None else g for g, (k, n) in zip(every, places, strict=True)]
        by = {(id(kept), key): g for g, (kept, key) in zip(gradients, places, strict=True)}

        def product(kept: dict[Any, Tensor], key: Any) -> float:
            return float((by[id(kept), key].double() * kept[key].detach().double()).sum())

        size = max(abs(float(asked.detach())), 1e-300)
        for layer in self.queries:
            largest_gradient = float(by[id(self.queries), layer].abs().max())
            if largest_gradient * float(self.queries[layer].detach().abs().max()) > _HELD * size:
                raise AttributionError(
                    f"the attention pattern of layer {layer} cannot be held: this world shows it after it was used. "
                    "Load the model as a HookedTransformer (TransformerLens 3.9), or use attribute_logits"
                )
        self.first_order = {layer: product(self.streams, layer) for layer in self.streams}
        found: dict[Part, float] = {}
        for source, value in self.written.items():
            gradient, bias = by[id(self.written), source].double(), self.writers.bias(source, value.detach().double())
            flat_value, flat_gradient = (t.detach().double().reshape(self.length, -1) for t in (value, gradient))
            if source.kind == "attn":
                z, g = (self.writers.split(source.layer, t) for t in (flat_value, flat_gradient))
                each = einsum(z, g, "pos head k, pos head k -> head")
                found |= {head_part(source.layer, h): float(v) for h, v in enumerate(each)}
                if bias is not None:
                    lift = by[id(self.outputs), source.layer].double().reshape(self.length, -1)
                    found[bias_part(source)] = float((lift @ bias).sum())
                continue
            own = 0.0 if bias is None else float((flat_gradient @ bias).sum())
            found[whole_part(source)] = float((flat_value * flat_gradient).sum()) - own
            if bias is not None:
                found[bias_part(source)] = own
        return found


def _detached(_m: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> Tensor:
    return output.detach()
