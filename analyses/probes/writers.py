"""The probe `writers`: which parts of the model set each norm's sigma, and which write on the ones-vector.

For every norm and part p of its input x = Σ_p x_p (`docs/attribution.md`):

    share_p   <P x_p, P x> / |P x|²                               the shares of a token add up to 1
    change_p  sqrt((|P(x - x_p)|²/d + eps) / (|P x|²/d + eps)) - 1   exact: what a rerun without p at that norm gives
    mu_p      mean(x_p)                                            what projection takes off of it

A forward pass, and a matrix product for each earlier attention layer at each norm: parts are never made as vectors
(unless a norm stands in the stream), so nothing is kept but z and what MLPs wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from ln_probe.analyses.probes.protocol import Context, Cost, Found, Needs, Observer, Piece, Probe, Shape, View
from ln_probe.analyses.tables import WRITERS
from ln_probe.hooks.capture import return_free_memory
from ln_probe.hooks.components import Part, Source, SplitError, Writers, find_wiring, flat, outside_attention, watched
from ln_probe.hooks.model import run
from ln_probe.hooks.norm import Site

PROMPTS = 8  # of the default ones: a table of means over some thousand tokens, at two passes a prompt
# |sum of a token's shares - 1| that rounding explains. Dot products with heads are of the model's own precision, and
# parts can be many times longer than their sum; a part that is missing leaves a share of its own (1e-2 or more).
# Measured, as means over tokens: at most 2e-8 on tiny float32 models of eight architectures.
SHARES_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
SHARES_CLOSE_HALF = 0.2  # the stream itself is rounded at every write
_MEASURES = ("share", "sigma_change", "mu", "mu_share")
_PASSES = 2.0  # what a prompt costs (`bench/attribution.py`)


class WritersProbe(Probe):
    name = "writers"
    summary = "which parts set sigma, and which write on the ones-vector"
    tables = (WRITERS,)
    needs = Needs(output=True)
    interleaved = True
    prompts = PROMPTS

    def start(self, view: View) -> Observer:
        return _Watching(view)

    def finish(self, pieces: Sequence[Piece], context: Context) -> Found:
        rows: list[dict[str, Any]] = next((p.info["rows"] for p in pieces if p.info.get("rows")), [])
        notes = tuple(dict.fromkeys(note for p in pieces for note in p.notes))
        if not rows:
            return Found({WRITERS.name: WRITERS.empty()}, notes)
        sums = np.sum([p.arrays["sums"] for p in pieces if p.info.get("rows")], axis=0)  # [row place measure]
        counts = np.sum([p.arrays["counts"] for p in pieces if p.info.get("rows")], axis=0)  # [place]
        with np.errstate(invalid="ignore"):
            means = sums / counts[None, :, None]
        made = []
        for row, values in zip(rows, means, strict=True):
            everywhere = dict(zip(_MEASURES, values[0].tolist(), strict=True))
            tail = {f"{m}_tail": v for m, v in zip(_MEASURES, values[1].tolist(), strict=True)}
            made.append({**row, "tokens": int(counts[0]), **everywhere, **tail})
        return Found({WRITERS.name: WRITERS.frame(made)}, notes)

    def cost(self, shape: Shape) -> Cost:
        return Cost(passes=_PASSES)


class _Watching(Observer):
    def __init__(self, view: View) -> None:
        self.model = view.model
        wanted = {s.name for s in view.calibrated}
        self.sites = [s for s in outside_attention(view.sites) if s.name in wanted]
        self.wiring = find_wiring(view.model, view.sites)
        self.by_name = {s.name: s for s in outside_attention(view.sites)}
        # norms whose output stands in the stream (post-norms): their inputs are needed later
        self.within = {s.site for expression in self.wiring.reads.values() for s in expression if s.kind == "norm"}
        self.writers = Writers(view.model)
        self.open = {n: why for n, why in self.wiring.open.items() if n in wanted}
        self.rows: dict[tuple[str, Part], int] = {}
        self.sums: list[Float64[np.ndarray, "place measure"]] = []
        self.counts = np.zeros(2)
        self._grams: dict[int, Tensor] = {}

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        under_way = _Prompt(self, len(tokens))
        with ExitStack() as stack:
            for source, module in watched(self.model):
                stack.callback(module.register_forward_hook(under_way.on_write(source)).remove)
            for site in self.by_name.values():
                stack.callback(site.module.register_forward_pre_hook(under_way.on_norm(site)).remove)
            run(self.model, tokens[None])
        del under_way
        return_free_memory()
        self.counts += [len(tokens), len(tokens) - 1]

    def add(self, site: Site, parts: Sequence[Part], values: Float64[Tensor, "pos part measure"]) -> None:
        """Take in a norm's measures of one prompt."""
        both = np.stack([values.sum(0).numpy(), values[1:].sum(0).numpy()], axis=1)  # [part place measure]
        for part, found in zip(parts, both, strict=True):
            at = self.rows.setdefault((site.name, part), len(self.sums))
            if at == len(self.sums):
                self.sums.append(np.zeros_like(found))
            self.sums[at] = self.sums[at] + found

    def gram(self, layer: int, W: Float[Tensor, "head d_head d_model"]) -> Float64[Tensor, "head d_head d_head_again"]:
        """W_O W_Oᵀ of every head: |z W_O|² = z (W_O W_Oᵀ) zᵀ, in d_head² instead of d_head·d_model."""
        if layer not in self._grams:
            wide = W.double()
            self._grams[layer] = wide @ wide.transpose(-1, -2)
        return self._grams[layer]

    def piece(self) -> Piece:
        rows = []
        for site, part in self.rows:
            at = self.by_name[site]
            rows.append(
                {
                    "site": site,
                    "layer": at.layer,
                    "part": part.name,
                    "kind": part.kind,
                    "part_layer": part.layer,
                    "index": part.index,
                }
            )
        notes = tuple(f"the writers of {site} were not measured: {why}" for site, why in self.open.items())
        if not rows:
            return Piece(notes=notes)
        return Piece({"sums": np.stack(self.sums), "counts": self.counts}, {}, {"rows": rows}, notes)


class _Prompt:
    """One forward pass under way."""

    def __init__(self, of: _Watching, length: int) -> None:
        self.of, self.length = of, length
        self.seen: dict[Source, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.done: set[str] = set()
        self.means: dict[Source, tuple[list[Part], Tensor, Tensor]] = {}  # parts, their means and squared lengths

    def on_write(self, source: Source) -> Any:
        def hook(_m: nn.Module, _args: Any, output: Any) -> None:
            if source not in self.seen:
                value = flat(output, self.length)
                self.seen[source] = value if value.dtype in (torch.float32, torch.float64) else value.float()

        return hook

    def on_norm(self, site: Site) -> Any:
        def hook(_m: nn.Module, args: Any) -> None:
            if site.name not in self.done:  # HookedTransformer calls a norm for queries, keys and values
                self.done.add(site.name)
                x = flat(args[0], self.length)[:, : site.d]  # (of the first head, where each has an input of its own)
                self.inputs[site.name] = x if x.dtype in (torch.float32, torch.float64) else x.float()
                if site in self.of.sites and site.name not in self.of.wiring.open:
                    self._measure(site, x.dtype)
                if site.name not in self.of.within:
                    del self.inputs[site.name]  # nobody reads what this norm puts into the stream

        return hook

    def _measure(self, site: Site, dtype: torch.dtype) -> None:
        x = self.inputs[site.name]
        kept = site.project(x)
        parts: list[Part] = []
        dots, means, squares = [], [], []
        for source, factor in self.of.wiring.at(site.name).items():
            found = self._image(source, kept) if source.kind == "norm" else self._raw(source, kept)
            parts += found[0]
            dots.append(found[1] * factor)
            means.append(found[2] * factor)
            squares.append(found[3] * factor**2)
        dot, mean, square = (torch.cat(t, 1).cpu() for t in (dots, means, squares))  # [pos part]
        whole = kept.double().pow(2).sum(-1, keepdim=True).cpu()
        share = dot / whole.clamp_min(1e-300)
        off = float((share.sum(1) - 1).abs().max())
        if not off <= SHARES_CLOSE.get(dtype, SHARES_CLOSE_HALF):
            raise SplitError(f"{site.name}: the shares of its parts add up to 1 only within {off:.1e}")
        if site.projects:
            square = square - site.d * mean.pow(2)
        change = torch.full_like(share, torch.nan)
        if site.scales:
            left = (whole - 2 * dot + square).clamp_min(0.0) / site.d + site.eps
            change = (left / (whole / site.d + site.eps)).sqrt() - 1
        of_means = mean.abs() / mean.abs().sum(1, keepdim=True).clamp_min(1e-300)
        self.of.add(site, parts, torch.stack([share, change, mean, of_means], -1))

    def _raw(self, source: Source, kept: Tensor) -> tuple[list[Part], Tensor, Tensor, Tensor]:
        """Parts of a source; their dot products with `kept`, means and squared lengths, [pos part] in float64."""
        seen, bias = self.seen[source], self.of.writers.bias(source, self.seen[source])
        first = source not in self.means
        if source.kind == "attn":
            W = self.of.writers.heads(source.layer, seen)
            z = self.of.writers.split(source.layer, seen)
            pulled = rearrange(kept @ rearrange(W, "head k d -> d (head k)"), "pos (head k) -> pos head k", head=len(W))
            dot = (pulled * z).sum(-1, dtype=torch.float64)
            if first:
                wide = z.double()
                mean = einsum(wide, W.double().mean(-1), "pos head k, head k -> pos head")
                turned = einsum(wide, self.of.gram(source.layer, W), "pos head k, head k l -> pos head l")
                names = [Part(f"L{source.layer}H{h}", "head", source.layer, h) for h in range(len(W))]
                self.means[source] = (names, mean, (turned * wide).sum(-1))
        else:
            out = seen.double() if bias is None else seen.double() - bias.double()
            dot = (kept.double() * out).sum(-1, keepdim=True)
            if first:
                kind = {"mlp": "mlp", "pos_embed": "position"}.get(source.kind, "embedding")
                name = source.kind if source.layer < 0 else f"L{source.layer} mlp"
                part = Part(name, kind, source.layer)
                self.means[source] = ([part], out.mean(-1, keepdim=True), out.pow(2).sum(-1, keepdim=True))
        names, mean, square = self.means[source]
        if bias is not None:
            names = [
                *names,
                Part(f"L{source.layer} {'b_O' if source.kind == 'attn' else 'b_out'}", "bias", source.layer),
            ]
            fixed, rows = bias.double(), (self.length, 1)
            dot = torch.cat([dot, (kept.double() @ fixed)[:, None]], 1)
            mean = torch.cat([mean, fixed.mean().expand(rows)], 1)
            square = torch.cat([square, fixed.pow(2).sum().expand(rows)], 1)
        return names, dot, mean, square

    def _image(self, source: Source, kept: Tensor) -> tuple[list[Part], Tensor, Tensor, Tensor]:
        """The same of what a norm in the stream made of its parts, at its own sigma."""
        found = self._vectors(source)
        vectors = torch.stack(list(found.values()), 1)  # [pos part d_model]
        dot = einsum(kept.double(), vectors, "pos d, pos part d -> pos part")
        return list(found), dot, vectors.mean(-1), vectors.pow(2).sum(-1)

    def _vectors(self, source: Source) -> dict[Part, Float64[Tensor, "pos d_model"]]:
        if source.kind != "norm":
            return self._plain_vectors(source)
        site = self.of.by_name[source.site]
        sigma = site.sigma(self.inputs[site.name].double())
        gain: Tensor | float = 1.0 if site.gain is None else site.gain.detach().double()
        made: dict[Part, Tensor] = {}
        for inner, factor in self.of.wiring.at(site.name).items():
            for part, vector in self._vectors(inner).items():
                image = factor * gain * site.project(vector) / sigma
                made[part] = made[part] + image if part in made else image
        if site.bias is not None:
            part = Part(f"{site.name} bias", "norm bias", site.layer)
            made[part] = site.bias.detach().double().expand(self.length, -1)
        return made

    def _plain_vectors(self, source: Source) -> dict[Part, Float64[Tensor, "pos d_model"]]:
        seen = self.seen[source].double()
        bias = self.of.writers.bias(source, seen)
        rest = (
            {}
            if bias is None
            else {
                Part(
                    f"L{source.layer} {'b_O' if source.kind == 'attn' else 'b_out'}", "bias", source.layer
                ): bias.expand(self.length, -1)
            }
        )
        if source.kind == "attn":
            W, z = self.of.writers.heads(source.layer, seen), self.of.writers.split(source.layer, seen)
            vectors = einsum(z, W, "pos head k, head k d -> head pos d")
            return {Part(f"L{source.layer}H{h}", "head", source.layer, h): v for h, v in enumerate(vectors)} | rest
        kind = {"mlp": "mlp", "pos_embed": "position"}.get(source.kind, "embedding")
        name = source.kind if source.layer < 0 else f"L{source.layer} mlp"
        return {Part(name, kind, source.layer): seen if bias is None else seen - bias} | rest
