"""What every part wrote at some positions of one prompt, and how any linear reading of the stream divides among them.

A reading is a vector f: `f · x = Σ_p f · x_p` over the parts p of the stream x. Parts are never made as vectors: f is
pulled back through whatever they passed on their way (a norm in the stream at its own sigma, a head's W_O), which costs
a head d_head numbers instead of d_model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import einsum, reduce
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, run
from ln_probe.hooks.site import Site
from ln_probe.hooks.wiring import END, Wiring, closes_below, summed
from ln_probe.hooks.writes import Part, Source, SplitError, Writers, flat, neurons_of, watched


@dataclass(frozen=True, eq=False)
class Record:
    """What was seen at some positions of one prompt.

    Attributes:
        seen: what each source's module showed (z of attention layers), a row per position.
        inputs: of every norm outside attention, and of the unembedding (END).
        neurons: activations of an MLP's neurons, by layer, where they were asked for.
        logits: of those positions; None if they were not looked at.
        dtype: the format the model computes in.
    """

    seen: Mapping[Source, Float[Tensor, "row _"]]
    inputs: Mapping[str, Float[Tensor, "row _"]]
    neurons: Mapping[int, Float[Tensor, "row _"]]
    logits: Float[Tensor, "row d_vocab"] | None
    dtype: torch.dtype


def record(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    positions: Sequence[int],
    sites: Sequence[Site],
    *,
    neurons: Collection[int] = (),
) -> Record:
    """One forward pass over a prompt, and what it shows at `positions`; `neurons`: layers whose neurons are kept.

    Raises:
        SplitError: a layer's MLP shows no neurons.
    """
    rows, length = torch.tensor(positions), len(tokens)
    seen: dict[Source, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    active: dict[int, Tensor] = {}

    def keep(into: dict[Any, Tensor], key: Any) -> Any:
        def hook(_m: nn.Module, _args: Any, output: Any) -> None:
            if key not in into:
                into[key] = flat(output, length)[rows].cpu()

        return hook

    def keep_input(name: str) -> Any:
        def hook(_m: nn.Module, args: Any, kwargs: Any) -> None:
            x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())
            if name not in inputs:
                inputs[name] = flat(x, length)[rows, : x.shape[-1]].cpu()  # (of the first head)

        return hook

    with ExitStack() as stack:
        for source, module in watched(model):
            stack.callback(module.register_forward_hook(keep(seen, source)).remove)
        for site in outside_attention(sites):
            stack.callback(site.module.register_forward_pre_hook(keep_input(site.name), with_kwargs=True).remove)
        unembed = getattr(model, "unembed", None)
        if isinstance(unembed, nn.Module):
            stack.callback(unembed.register_forward_pre_hook(keep_input(END), with_kwargs=True).remove)
        for layer in neurons:
            if (found := neurons_of(model, layer)) is None:
                raise SplitError(f"the MLP of layer {layer} shows no neurons (hook_post and W_out): ask for whole MLPs")
            stack.callback(found[0].register_forward_hook(keep(active, layer)).remove)
        logits: Tensor = run(model, tokens[None], return_type="logits")
    return Record(seen, inputs, active, logits[0, rows].cpu(), next(iter(inputs.values())).dtype)


def outside_attention(sites: Sequence[Site]) -> list[Site]:
    """The norms of the residual stream: those of queries and keys stand inside attention."""
    return [s for s in sites if s.reads not in ("query", "key")]


@dataclass(frozen=True, eq=False)
class Split:
    """The parts of what one prompt's norms read, in float64 on the CPU.

    Args:
        writers, wiring: of the model.
        sites: its norms.
        record: of the prompt.
    """

    writers: Writers
    wiring: Wiring
    sites: Sequence[Site]
    record: Record
    _weights: dict[int, Tensor] = field(default_factory=dict)

    def rows(self, chosen: Sequence[int]) -> Split:
        """The same at some of the recorded positions."""
        at, seen = list(chosen), self.record
        few = Record(
            {s: v[at] for s, v in seen.seen.items()},
            {n: v[at] for n, v in seen.inputs.items()},
            {n: v[at] for n, v in seen.neurons.items()},
            None if seen.logits is None else seen.logits[at],
            seen.dtype,
        )
        return Split(self.writers, self.wiring, self.sites, few, self._weights)

    def site(self, name: str) -> Site:
        return next(s for s in self.sites if s.name == name)

    def input(self, place: str) -> Float[Tensor, "row d_model"]:
        """The vectors that are read there."""
        return self.record.inputs[place].double()

    def sigma(self, place: str) -> Float[Tensor, "row 1"]:
        """What the norm there divides by, on what it read."""
        return self.site(place).sigma(self.input(place))

    def check(self, place: str) -> float:
        """How much of what is read there is left over when all parts are taken off, relative to the largest summand.

        Raises:
            SplitError: more than rounding explains; names the place, and the norm in the stream before it if the sum
                is wrong there already.
        """
        worst = 0.0
        for at in (*self.wiring.norms_within(place), place):
            values = {s: self._value(s) for s in self.wiring.at(at)}
            made, size = summed(self.wiring.at(at), values)
            left = float((made - self.input(at)).abs().max()) / max(float(size.max()), 1e-300)
            limit = self.wiring.bound(at, self.record.dtype)
            if not left <= limit:
                raise SplitError(
                    f"the parts of what is read at {at} do not add up to it: {left:.1e} of the largest is left over "
                    f"(rounding in {str(self.record.dtype).removeprefix('torch.')} explains {limit:.0e}). Something "
                    "else wrote to the stream: a hook or an edit that was active, or another model's cache"
                )
            worst = max(worst, left)
        return worst

    def _value(self, source: Source) -> Float[Tensor, "row d_model"]:
        if source.kind != "norm":
            return self.writers.written(source, self.record.seen[source].double())
        site, x = self.site(source.site), self.input(source.site)
        return site.affine(site.project(x) / self.sigma(source.site))

    def read(self, place: str, f: Float[Tensor, "row reading d_model"]) -> dict[Part, Float[Tensor, "row reading"]]:
        """f · x_p for every part p of what is read at `place`; they add up to f · x.

        Args:
            place: a norm's name, or END.
            f: what is read, at every recorded position.
        """
        found: dict[Part, Tensor] = {}
        for source, factor in self.wiring.at(place).items():
            for part, value in self._read(source, factor * f).items():
                found[part] = found[part] + value if part in found else value
        return found

    def _read(self, source: Source, f: Tensor) -> dict[Part, Tensor]:
        if source.kind == "norm":
            site = self.site(source.site)
            gain = f if site.gain is None else f * site.gain.detach().cpu().double()
            found = self.read(source.site, site.project(gain) / self.sigma(source.site)[:, None])
            if site.bias is not None:
                bias = site.bias.detach().cpu().double()
                part = Part(f"{site.name} bias", "norm bias", site.layer)
                found = {**found, part: f @ bias}
            return found
        seen = self.record.seen[source].double()
        if source.kind == "attn":
            return self._heads(source, seen, f)
        if source.kind == "mlp":
            return self._mlp(source, seen, f)
        kind = "position" if source.kind == "pos_embed" else "embedding"
        return {Part(source.kind, kind): einsum(seen, f, "row d, row reading d -> row reading")}

    def _heads(self, source: Source, z: Tensor, f: Tensor) -> dict[Part, Tensor]:
        layer = source.layer
        if layer not in self._weights:
            self._weights[layer] = self.writers.heads(layer, z)
        pulled = einsum(f, self._weights[layer], "row reading d, head k d -> row reading head k")
        values = einsum(self.writers.split(layer, z), pulled, "row head k, row reading head k -> head row reading")
        found = {Part(f"L{layer}H{h}", "head", layer, h): v for h, v in enumerate(values)}
        if (bias := self.writers.bias(source, z)) is not None:
            found[Part(f"L{layer} b_O", "bias", layer)] = f @ bias
        return found

    def _mlp(self, source: Source, out: Tensor, f: Tensor) -> dict[Part, Tensor]:
        layer, bias = source.layer, self.writers.bias(source, out)
        found = {}
        if bias is not None:
            found[Part(f"L{layer} b_out", "bias", layer)] = f @ bias
        whole = einsum(out if bias is None else out - bias, f, "row d, row reading d -> row reading")
        if layer not in self.record.neurons:
            return {Part(f"L{layer} mlp", "mlp", layer): whole, **found}
        _, W_out = neurons_of(self.writers.model, layer)  # type: ignore[misc]  # `record` has seen that there are some
        pulled = einsum(f, W_out.cpu().double(), "row reading d, neuron d -> neuron row reading")
        active = self.record.neurons[layer].double()
        values = einsum(active, pulled, "row neuron, neuron row reading -> neuron row reading")
        missing = float((whole - reduce(values, "neuron row reading -> row reading", "sum")).abs().max())
        if missing > closes_below(self.record.dtype) * float(values.abs().sum(0).max().clamp_min(1e-300)):
            raise SplitError(
                f"the neurons of layer {layer} do not add up to what its MLP writes ({missing:.1e} is left over): ask "
                "for whole MLPs"
            )
        return {Part(f"L{layer}N{n}", "neuron", layer, n): v for n, v in enumerate(values)} | found
