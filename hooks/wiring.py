"""Of what every norm's input is a sum, found by what a short pass shows.

    blocks.1.ln1   reads  embed + pos_embed + blocks.0.attn + blocks.0.mlp          (pre-norm, sequential)
    blocks.0.ln2   reads  embed                                                     (parallel attention and MLP)
    blocks.0.ln2   reads  embed + norm(blocks.0.ln1_post)                           (a norm of what attention writes)
    blocks.0.ln2   reads  norm(blocks.0.ln1) + blocks.0.mlp                         (post-norm blocks)

Nothing is taken from a config: at each place the stream is the one at an earlier place plus recent writes, by least
squares over a few tokens, and what does not come out to rounding is not believed. Factors (Gemma's scaled embeddings,
scaled residual branches) come out with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, blocks, context_length, device_of, run, vocabulary_size
from ln_probe.hooks.site import Site
from ln_probe.hooks.writes import Source, SplitError, Writers, flat, watched

TOKENS = 8  # of the short pass: with d_model 8 still 64 equations for some ten unknowns
# Left over of a sum, relative to its largest summand: at most 3e-7 in float32 on tiny models of nine architectures; a
# summand that is missing left 1e-2 to 3e-1 (a writer that is not known, BERT's head).
CLOSES = {torch.float64: 1e-11, torch.float32: 1e-5}
HALF_ROUNDINGS = 4  # 16-bit formats round the stream at every write; the errors of deep models partly cancel
_SNAP = 1e-4  # a fitted factor this near to 0 or 1 is 0 or 1 …
_SNAP_HALF = 2e-2  # … and in 16-bit formats, whose rounding is fitted as well
_PLACES = 4  # earlier places that a stream can be continued from

Expression = Mapping[Source, float]
END = "the end of the stream"


def closes_below(dtype: torch.dtype) -> float:
    """Relative remainder of a sum that rounding in this format explains."""
    return CLOSES.get(dtype, HALF_ROUNDINGS * torch.finfo(dtype).eps)


@dataclass(frozen=True, eq=False)
class Wiring:
    """What is read where.

    Attributes:
        reads: of each norm outside attention, and of END, the sources of its input with their factors.
        open: places where the sum does not close: how much is left over, and since where, in words.
        single: norms of a float64 model that compute in float32 (Hugging Face's RMSNorms do): what has passed one is
            exact to float32 only.
    """

    reads: Mapping[str, Expression]
    open: Mapping[str, str]
    single: frozenset[str] = frozenset()

    def at(self, place: str) -> Expression:
        """The sources of what is read there.

        Raises:
            SplitError: they are not known.
        """
        if place in self.open:
            raise SplitError(self.open[place])
        if place not in self.reads:
            raise SplitError(f"{place} is no norm of the residual stream: there are {', '.join(self.reads)}")
        return self.reads[place]

    def bound(self, place: str, dtype: torch.dtype) -> float:
        """Relative error that rounding explains of what is read at `place` and of the norm there."""
        passed = {place, *self.norms_within(place)}
        return closes_below(torch.float32 if dtype == torch.float64 and passed & self.single else dtype)

    def norms_within(self, place: str) -> list[str]:
        """The norms in the stream (post-norms) that what is read there has passed, in the order of the pass."""
        found: dict[str, None] = {}
        for source in self.at(place):
            if source.kind == "norm":
                found |= dict.fromkeys(self.norms_within(source.site))
                found[source.site] = None
        return list(found)


@dataclass(frozen=True, eq=False)
class _Place:
    name: str
    expression: dict[Source, float]
    value: Tensor
    writes: int = 0  # that had been seen by then
    norms: int = 0


class _Search:
    """The places of one pass, in their order."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.limit = closes_below(dtype)
        self.snap = _SNAP if dtype in CLOSES else _SNAP_HALF
        self.forgotten = [0, 0]  # writes and norms
        self.writes: list[tuple[Source, Tensor]] = []
        self.norms: list[tuple[Source, Tensor]] = []
        self.places: list[_Place] = []
        self.open: dict[str, str] = {}

    def forget_before(self, layer: int) -> None:
        writes, norms = len(self.writes), len(self.norms)
        self.writes = [(s, v) for s, v in self.writes if s.layer >= layer - 1 or not self.places]
        self.norms = [(s, v) for s, v in self.norms if s.layer >= layer - 1]
        self.forgotten[0] += writes - len(self.writes)
        self.forgotten[1] += norms - len(self.norms)

    def see(self, name: str, value: Tensor) -> dict[Source, float] | None:
        if (plain := self._plain(value)) is not None:
            self._put(name, plain, value)
            return plain
        best = 1.0
        for known in (self.writes, [*self.writes, *self.norms]):
            for start in (*self.places[: -_PLACES - 1 : -1], _Place("nothing", {}, torch.zeros_like(value))):
                expression, left = self._fit(start, known, value)
                if left <= self.limit:
                    self._put(name, expression, value)
                    return expression
                best = min(best, left)
        since = self.places[-1].name if self.places else "the embeddings"
        self.open[name] = (
            f"what is read at {name} is not the sum of what embeddings, heads, MLPs and norms wrote: {best:.1e} of its "
            f"size is left over (rounding explains {self.limit:.0e}). What is missing was written after {since}, the "
            "last place where the sum closes, by a module that ln_probe does not know"
        )
        return None

    def _put(self, name: str, expression: dict[Source, float], value: Tensor) -> None:
        counts = (gone + len(there) for gone, there in zip(self.forgotten, (self.writes, self.norms), strict=True))
        self.places.append(_Place(name, expression, value, *counts))

    def _plain(self, value: Tensor) -> dict[Source, float] | None:
        """The stream at an earlier place plus all that was written since, or plus what norms put out: what
        nearly every model does, with factors of 1 that no rounding can bend. The nearest of those that close."""
        best, found = self.limit, None
        for start in (*self.places[: -_PLACES - 1 : -1], _Place("nothing", {}, torch.zeros_like(value))):
            since = self.writes[max(0, start.writes - self.forgotten[0]) :]
            normed = self.norms[max(0, start.norms - self.forgotten[1]) :]
            for added in (since, normed[-1:], normed):
                if not added and not start.expression:
                    continue
                made = start.value + sum((v for _, v in added), torch.zeros_like(value))
                largest = max(float(t.abs().max()) for t in (start.value, value, *(v for _, v in added)))
                left = float((value - made).abs().max()) / max(largest, 1e-300)
                if left <= best:
                    best, found = left, dict(start.expression)
                    for source, _ in added:
                        found[source] = found.get(source, 0.0) + 1.0
        return found

    def _fit(
        self, start: _Place, known: Sequence[tuple[Source, Tensor]], value: Tensor
    ) -> tuple[dict[Source, float], float]:
        """`value` as `start` plus a combination of what is known; and what is left over, relatively."""
        rest = (value - start.value).flatten()
        found: dict[Source, float] = dict(start.expression)
        if known:
            columns = torch.stack([v.flatten() for _, v in known], dim=1)
            size = columns.norm(dim=0).clamp_min(1e-300)
            # (the pivoted solver: a column of zeros, or one twice, gets the factor 0 instead of an error)
            factors = torch.linalg.lstsq(columns / size, rest[:, None], driver="gelsd").solution[:, 0] / size
            factors = torch.where(size > 1e-290, factors, torch.zeros_like(factors))
            near = factors.round().clamp(-1, 1)
            factors = torch.where((factors - near).abs() < self.snap, near, factors)
            for (source, _), factor in zip(known, factors.tolist(), strict=True):
                found[source] = found.get(source, 0.0) + factor
            rest = rest - columns @ factors
            largest = max(float(start.value.abs().max()), float((columns * factors).abs().max()))
        else:
            largest = float(start.value.abs().max())
        largest = max(largest, float(value.abs().max()), 1e-300)
        return {s: f for s, f in found.items() if abs(f) > self.snap}, float(rest.abs().max()) / largest


def find_wiring(model: HookedModel, sites: Sequence[Site]) -> Wiring:
    """Of what every norm's input is a sum; costs one forward pass over eight tokens.

    Args:
        model: any hooked model, in evaluation mode.
        sites: its norms (`find_sites`).
    """
    length = min(TOKENS, context_length(model))
    dtype = next((p.dtype for _, p in model.named_parameters() if p.is_floating_point()), torch.float32)
    search, writers = _Search(dtype), Writers(model)
    reads: dict[str, Expression] = {}
    done: set[int] = set()
    single: set[str] = set()

    def first(hook: Any) -> Any:
        """Once a pass: HookedTransformer calls a norm for queries, keys and values."""

        def once(module: nn.Module, *rest: Any) -> None:
            if id(module) not in done:
                done.add(id(module))
                hook(*rest)

        return once

    def on_write(source: Source) -> Any:
        def hook(_args: Any, output: Any) -> None:
            try:
                made = writers.written(source, flat(output, length).double())
            except (SplitError, RuntimeError):  # a layer without W_O: whatever reads it stays open, and says so
                return
            if made.shape[-1] == writers.d_model:
                search.writes.append((source, made))

        return first(hook)

    def on_norm(site: Site) -> Any:
        def hook(args: Any, output: Tensor) -> None:
            x, y = (flat(t, length)[:, : site.d].double() for t in (args[0], output))  # (of the first head)
            if (expression := search.see(site.name, x)) is not None:
                reads[site.name] = expression
            search.norms.append((Source("norm", site.layer, site.name), y))
            off = float((site.affine(site.normalize(x)) - y).abs().max() / y.abs().max().clamp_min(1e-300))
            if dtype == torch.float64 and off > CLOSES[dtype]:
                single.add(site.name)
                search.limit = CLOSES[torch.float32]  # from here on the stream may have passed it

        return first(hook)

    def on_block(layer: int) -> Any:
        def hook(args: Any, kwargs: Any) -> None:
            x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())
            search.forget_before(layer)
            search.see(f"blocks.{layer}", flat(x, length).double())

        return first(hook)

    def at_the_end(args: Any, kwargs: Any) -> None:
        x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point())
        if x.shape[-1] != writers.d_model:
            search.open[END] = (
                f"what the unembedding reads is {x.shape[-1]} wide, and the residual stream {writers.d_model}: a "
                "projection stands between them (as in OPT-350m), so what is written to the stream is no part of a "
                "logit"
            )
            return
        expression = search.see(END, flat(x, length).double())
        if expression is not None:
            reads[END] = expression

    tokens = torch.linspace(1, vocabulary_size(model) - 1, length).long()[None].to(device_of(model))
    with ExitStack() as stack:
        for source, module in watched(model):
            stack.callback(module.register_forward_hook(on_write(source)).remove)
        for site in sites:
            if site.reads not in ("query", "key") and site.d == writers.d_model:
                stack.callback(site.module.register_forward_hook(on_norm(site)).remove)
        for layer, block in enumerate(blocks(model)):
            stack.callback(block.register_forward_pre_hook(on_block(layer), with_kwargs=True).remove)
        unembed = getattr(model, "unembed", None)
        if isinstance(unembed, nn.Module):
            stack.callback(unembed.register_forward_pre_hook(first(at_the_end), with_kwargs=True).remove)
        run(model, tokens, return_type="logits")
    return Wiring(reads, search.open, frozenset(single))


def summed(
    expression: Expression, values: Mapping[Source, Float64[Tensor, "row d_model"]]
) -> tuple[Float64[Tensor, "row d_model"], Float64[Tensor, "row d_model"]]:
    """The sum of the sources' values, and the sum of their absolute values (what rounding is relative to)."""
    terms = [factor * values[source] for source, factor in expression.items()]
    return torch.stack(terms).sum(0), torch.stack([t.abs() for t in terms]).sum(0)
