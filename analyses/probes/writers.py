"""The probes `writers` and `attribution`: which parts of the model set each norm's sigma, and which write the logits.

`writers`, for every norm and part p of its input x = Σ_p x_p (`docs/attribution.md`):

    share_p   <P x_p, P x> / |P x|²                               the shares of a token add up to 1
    change_p  sqrt((|P(x - x_p)|²/d + eps) / (|P x|²/d + eps)) - 1   exact: what a rerun without p at that norm gives
    mu_p      mean(x_p)                                            what projection takes off of it

It costs a forward pass, and a matrix product for each earlier attention layer at each norm: parts are never made as
vectors (unless a norm stands in the stream), so nothing is kept but z and what MLPs wrote.

`attribution` reads the logit of the token that came next, minus the mean logit of the vocabulary (a softmax does not
see the mean), and gives every part's share of it through the final norm, exactly, as means over positions
(`ln_probe.attribute_logits` does the same for one position).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import einsum, rearrange
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from ln_probe.analyses.attribution.logits import factor_seen
from ln_probe.analyses.probes.base import (
    Context,
    Cost,
    Needs,
    Observer,
    Piece,
    Probe,
    ProbeResults,
    Shape,
    View,
    notes_of,
)
from ln_probe.analyses.probes.columns import ATTRIBUTION, WRITERS
from ln_probe.analyses.schema import Table
from ln_probe.hooks.capture import record
from ln_probe.hooks.components import (
    END,
    Part,
    Source,
    Split,
    SplitError,
    bias_part,
    find_wiring,
    head_part,
    outside_attention,
    watched,
    whole_part,
)
from ln_probe.hooks.model import at_least_float32, before_projection, flat, hooks_on, outputs, run, weight_of
from ln_probe.hooks.norm import Site, bias_of, gain_of

PROMPTS = 8  # of the default ones: a table of means over some thousand tokens, at two passes a prompt
# |sum of a token's shares - 1| that rounding explains. Dot products with heads are of the model's own precision, and
# parts can be many times longer than their sum; a component that is missing leaves a share of 1e-2 or more.
# Measured, as means over tokens: at most 2e-8 on tiny float32 models of eight architectures.
SHARES_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3}
SHARES_CLOSE_HALF = 0.2  # the stream itself is rounded at every write
_MEASURES = ("share", "sigma_change", "mu", "mu_share")
_PASSES = 2.0  # what a prompt costs (`bench/attribution.py`)


class WritersProbe(Probe):
    name = "writers"
    summary = "components that set sigma, and that write along the all-ones direction"
    tables = (WRITERS,)
    needs = Needs(output=True)
    interleaved = True
    prompts = PROMPTS

    def start(self, view: View) -> Observer:
        return _Watching(view)

    def finish(self, pieces: Sequence[Piece], context: Context) -> ProbeResults:
        return _averaged(pieces, WRITERS, (*_MEASURES, *(f"{m}_tail" for m in _MEASURES)))

    def cost(self, shape: Shape) -> Cost:
        return Cost(passes=_PASSES)


def _averaged(pieces: Sequence[Piece], table: Table, measures: Sequence[str]) -> ProbeResults:
    """The table of parts and the means of their measures over the positions of all pieces."""
    measured, made = [p for p in pieces if p.info.get("rows")], []
    if measured:
        sums, counts = (np.sum([p.arrays[name] for p in measured], axis=0) for name in ("sums", "counts"))
        with np.errstate(invalid="ignore"):
            means = sums / counts[..., None]
        for row, values in zip(measured[0].info["rows"], means, strict=True):
            made.append({**row, "tokens": int(counts[0]), **dict(zip(measures, values.ravel().tolist(), strict=True))})
    return ProbeResults({table.name: table.frame(made)}, notes_of(pieces))


class _Watching(Observer):
    def __init__(self, view: View) -> None:
        self.model = view.model
        wanted = {s.name for s in view.calibrated}
        self.sites = [s for s in outside_attention(view.sites) if s.name in wanted]
        self.wiring = find_wiring(view.model, view.sites)
        self.by_name = {s.name: s for s in outside_attention(view.sites)}
        # norms whose output stands in the stream (post-norms): their inputs are needed later
        self.within = {s.site for expression in self.wiring.reads.values() for s in expression if s.kind == "norm"}
        self.writers = self.wiring.writers
        self.open = {n: why for n, why in self.wiring.open.items() if n in wanted}
        self.sums: dict[tuple[str, Part], Float64[np.ndarray, "place measure"]] = {}  # by norm and part
        self.counts = np.zeros(2)
        self._grams: dict[int, Tensor] = {}

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        under_way = _Prompt(self, len(tokens))
        after = [(module, partial(under_way.on_write, source)) for source, module in watched(self.model)]
        before = [(site.module, partial(under_way.on_norm, site)) for site in self.by_name.values()]
        with hooks_on(after, before):
            run(self.model, tokens[None])
        self.counts += [len(tokens), len(tokens) - 1]

    def add(self, site: Site, parts: Sequence[Part], values: Float64[Tensor, "pos part measure"]) -> None:
        """Take in a norm's measures of one prompt."""
        both = np.stack([values.sum(0).numpy(), values[1:].sum(0).numpy()], axis=1)  # [part place measure]
        for part, found in zip(parts, both, strict=True):
            self.sums[site.name, part] = self.sums.get((site.name, part), 0.0) + found

    def gram(self, layer: int, W: Float[Tensor, "head d_head d_model"]) -> Float64[Tensor, "head d_head d_head_again"]:
        """W_O W_Oᵀ of every head: |z W_O|² = z (W_O W_Oᵀ) zᵀ, in d_head² instead of d_head·d_model."""
        if layer not in self._grams:
            wide = W.double()
            self._grams[layer] = wide @ wide.transpose(-1, -2)
        return self._grams[layer]

    def piece(self) -> Piece:
        rows = [{"site": s, "layer": self.by_name[s].layer} | _columns_of(part) for s, part in self.sums]
        notes = tuple(f"the writers of {site} were not measured: {why}" for site, why in self.open.items())
        if not rows:
            return Piece(notes=notes)
        return Piece({"sums": np.stack([*self.sums.values()]), "counts": self.counts}, {}, {"rows": rows}, notes)


class _Prompt:
    """One forward pass under way."""

    def __init__(self, of: _Watching, length: int) -> None:
        self.of, self.length = of, length
        self.seen: dict[Source, Tensor] = {}
        self.inputs: dict[str, Tensor] = {}
        self.done: set[str] = set()
        self.means: dict[Source, tuple[list[Part], Tensor, Tensor]] = {}  # parts, their means and squared lengths

    def on_write(self, source: Source, _m: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        if source not in self.seen:
            self.seen[source] = at_least_float32(flat(output, self.length))

    def on_norm(self, site: Site, _m: nn.Module, args: Any, _kwargs: Any) -> None:
        if site.name in self.done:  # HookedTransformer calls a norm for queries, keys and values
            return
        self.done.add(site.name)
        x = flat(args[0], self.length)[:, : site.d]  # (of the first head, where each has a separate input)
        self.inputs[site.name] = at_least_float32(x)
        if site in self.of.sites and site.name not in self.of.wiring.open:
            self._measure(site, x.dtype)
        if site.name not in self.of.within:
            del self.inputs[site.name]  # what this norm puts into the stream is not read

    def _measure(self, site: Site, dtype: torch.dtype) -> None:
        """Measure every part of a norm's input, which has the format `dtype` in the model.

        Raises:
            SplitError: a token's shares do not add up to 1 within SHARES_CLOSE (16-bit formats: SHARES_CLOSE_HALF).
        """
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
                names = [head_part(source.layer, h) for h in range(len(W))]
                self.means[source] = (names, mean, (turned * wide).sum(-1))
        else:
            out = seen.double() if bias is None else seen.double() - bias.double()
            dot = (kept.double() * out).sum(-1, keepdim=True)
            if first:
                self.means[source] = (
                    [whole_part(source)],
                    out.mean(-1, keepdim=True),
                    out.pow(2).sum(-1, keepdim=True),
                )
        names, mean, square = self.means[source]
        if bias is not None:
            names = [*names, bias_part(source)]
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
        if source.kind == "norm":
            return self._images(self.of.by_name[source.site])
        seen = self.seen[source].double()
        bias = self.of.writers.bias(source, seen)
        rest = {} if bias is None else {bias_part(source): bias.expand(self.length, -1)}
        if source.kind == "attn":
            W, z = self.of.writers.heads(source.layer, seen), self.of.writers.split(source.layer, seen)
            vectors = einsum(z, W, "pos head k, head k d -> head pos d")
            return {head_part(source.layer, h): v for h, v in enumerate(vectors)} | rest
        return {whole_part(source): seen if bias is None else seen - bias} | rest

    def _images(self, site: Site) -> dict[Part, Float64[Tensor, "pos d_model"]]:
        sigma = site.sigma(self.inputs[site.name].double())
        gain = gain_of(site).to(sigma.device)
        made: dict[Part, Tensor] = {}
        for inner, factor in self.of.wiring.at(site.name).items():
            for part, vector in self._vectors(inner).items():
                made[part] = made.get(part, 0.0) + factor * gain * site.project(vector) / sigma
        if site.bias is not None:
            part = Part(f"{site.name} bias", "norm bias", site.layer)
            made[part] = site.bias.detach().double().expand(self.length, -1)
        return made


def _columns_of(part: Part) -> dict[str, object]:
    return {"part": part.name, "kind": part.kind, "part_layer": part.layer, "index": part.index}


# ------------------------------------------------------------------------------------------------ attribution of logits

AT_ONCE = 64  # positions whose readings are held at once
_OF_LOGITS = ("contribution", "magnitude", "without_projection", "projection")


class Attribution(Probe):
    name = "attribution"
    summary = "which parts write the next token's logit, through the final norm"
    tables = (ATTRIBUTION,)
    needs = Needs(output=True)
    interleaved = True
    prompts = PROMPTS

    def start(self, view: View) -> Observer:
        return _WatchingLogits(view)

    def finish(self, pieces: Sequence[Piece], context: Context) -> ProbeResults:
        return _averaged(pieces, ATTRIBUTION, _OF_LOGITS)

    def cost(self, shape: Shape) -> Cost:
        return Cost(passes=_PASSES)


class _WatchingLogits(Observer):
    def __init__(self, view: View) -> None:
        self.view, self.model = view, view.model
        self.why = view.meaningless
        self.final = next((s for s in reversed(view.sites) if "unembed" in s.reads.split("+")), None)
        self.where = END if self.final is None else self.final.name
        self.wiring = find_wiring(view.model, view.sites)
        W_U, b_U = weight_of(view.model, "W_U"), weight_of(view.model, "b_U")
        try:
            self.wiring.at(self.where)
        except SplitError as error:
            self.why = self.why or str(error)
        if W_U is None:
            self.why = self.why or "the model shows no W_U"
        else:
            size = outputs(view.model)
            self.W_U, self.mean = W_U, W_U[:, :size].mean(1, dtype=torch.float64).cpu()
            lift = torch.zeros(W_U.shape[1]) if b_U is None else b_U
            self.b_U, self.mean_b = lift.double().cpu(), float(lift[:size].double().mean())
        self.sums: dict[Part, Float64[np.ndarray, " measure"]] = {}
        self.count = 0

    def prompt(self, prompt: int, tokens: Int[Tensor, " _"]) -> None:
        if self.why or len(tokens) < 2:
            return
        known = list(range(len(tokens) - 1))
        seen = record(self.model, tokens, known, self.view.sites)
        split = Split(self.wiring, seen)
        split.check(self.where)
        assert seen.logits is not None
        factor = factor_seen(self.model, seen.logits[:1].double(), seen)
        for first in range(0, len(known), AT_ONCE):
            some = known[first : first + AT_ONCE]
            self._add(split.rows(some), tokens[[i + 1 for i in some]], factor)
        self.count += len(known)

    def _add(self, split: Split, following: Int[Tensor, " row"], factor: float) -> None:
        w = self.W_U[:, following.to(self.W_U.device)].double().cpu().T - self.mean
        w = factor * before_projection(self.model, w)  # [row d_model]
        final = self.final
        gain = w if final is None else w * gain_of(final)
        sigma = torch.ones(len(w), 1).double() if final is None else split.sigma(self.where)
        f = torch.stack([gain / sigma, torch.full_like(gain, 1.0 / gain.shape[1])], 1)
        taken = gain.sum(1) / sigma[:, 0] if final is not None and final.projects else torch.zeros(len(w)).double()
        for part, values in split.read(self.where, f).items():
            self._sum(part, values[:, 0], -values[:, 1] * taken)
        zeros = torch.zeros(len(w)).double()
        if final is not None and final.bias is not None:
            part = Part(f"{final.name} bias", "norm bias", final.layer)
            self._sum(part, zeros, zeros, w @ bias_of(final))
        self._sum(Part("b_U", "unembedding bias"), zeros, zeros, factor * (self.b_U[following.cpu()] - self.mean_b))

    def _sum(self, part: Part, without: Tensor, taken: Tensor, fixed: Tensor | float = 0.0) -> None:
        whole = without + taken + fixed
        found = torch.stack([whole, whole.abs(), without, taken], 1).sum(0).numpy()
        self.sums[part] = self.sums.get(part, 0.0) + found

    def piece(self) -> Piece:
        if self.why:
            return Piece(notes=(f"attribution of logits was not measured: {self.why}",))
        if not self.sums:
            return Piece()
        rows = [_columns_of(part) for part in self.sums]
        return Piece({"sums": np.stack(list(self.sums.values())), "counts": np.array([self.count])}, {}, {"rows": rows})
