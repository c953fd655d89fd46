"""The probe `uniformity`: how near each head is to uniform attention, and what each term of the norm contributes.

A query attends uniformly iff q·k is the same for all visible keys. With projection, norm outputs are orthogonal to 1
before gain and bias, so any query with gain * (W_K q) ∝ 1 does (Brody, Alon & Yahav 2023, section 3.1). Measured here:
the angle of gain * (W_K q) to 1, and the entropy of attention over log(visible keys).

`AttentionLayer` is one attention layer during one prompt, as probes look at it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ln_probe.analyses.geometry.queries import mean_angle, query_directions, query_ellipsoid, query_radius, random_angle
from ln_probe.analyses.probes.base import Needs, Observer, Probe, ProbeResults, Run
from ln_probe.analyses.probes.tables import HEADS
from ln_probe.hooks.attention import Form, Heads, UnsupportedAttentionError, heads_at_once, read_heads
from ln_probe.hooks.constants import Constant
from ln_probe.hooks.norm import INTACT, VARIANTS, Norm
from ln_probe.hooks.norms import layers_in_words
from ln_probe.hooks.stream import AttentionInput, visible_keys

_T = TypeVar("_T")
# Of the default prompts, what probes of keys take: each has a key a token in every head, and the geometry of one
# prompt costs some hundred forward passes, so 4 of them say enough about keys.
GEOMETRY_PROMPTS = 4
QUERY_RADIUS_QUANTILE = 0.95  # of |A⁺(q - c)| over the queries that occurred: rho of the observed set
# Of one head on one prompt, means over the queries that see more than one key.
MEASURES = ("entropy_ratio", "uniform_angle_deg")


class Uniformity(Probe):
    name = "uniformity"
    summary = "how uniformly heads attend"
    tables = (HEADS,)
    needs = Needs(attention=True)
    prompts = GEOMETRY_PROMPTS

    def start(self, run: Run) -> Observer:
        return _UniformityObserver(run)


class _UniformityObserver(Observer):
    def __init__(self, run: Run) -> None:
        self.run = run
        self.measured: dict[tuple[int, str], list[dict[str, Any]]] = defaultdict(list)
        self.heads: dict[int, list[int]] = {}

    def attention(self, prompt: int, attended: AttentionLayer) -> None:
        if attended.heads is None:
            return
        self.heads[attended.layer] = attended.chosen
        queries = attended.length - (1 if attended.length == 1 or attended.seen.causal else 0)  # that see another key
        for variant in attended.variants:
            of_heads, _ = uniformity_of(attended, variant)
            row = {name: of_heads[name][attended.chosen].numpy() for name in MEASURES}
            self.measured[attended.layer, variant].append({"queries": queries, "keys": attended.length, **row})

    def finish(self) -> ProbeResults:
        rows = []
        for (layer, variant), of_prompts in sorted(self.measured.items(), key=lambda item: item[0][0]):
            keys = sum(measures["keys"] for measures in of_prompts)
            of_prompts = [measures for measures in of_prompts if measures["queries"]]
            weights = [measures["queries"] for measures in of_prompts]
            for place, head in enumerate(self.heads[layer]):
                row: dict[str, Any] = {"layer": layer, "head": head, "variant": variant, "n": keys}
                for name in MEASURES if weights else ():
                    row[name] = float(np.average([m[name][place] for m in of_prompts], weights=weights))
                rows.append(row)
        provenance = {
            "prompts": max(map(len, self.measured.values()), default=0),
            "random_angle_deg": random_angle(int(self.run.model.cfg.d_model), seed=self.run.seed),
        }
        return ProbeResults({HEADS.name: HEADS.frame(rows)} if rows else {}, provenance=provenance)


class LayerMaps:
    """How each attention layer makes its scores: decided in the first pass, read in the second.

    Args:
        norms: of the model.

    Attributes:
        unsupported: why head space is left out, by layer.
        unbounded: layers whose queries have no bound.
        bidirectional: whether some query sees later keys.
    """

    def __init__(self, norms: Sequence[Norm]) -> None:
        self.norms = norms
        self.unsupported: dict[int, str] = {}
        self.unbounded: set[int] = set()
        self.bidirectional = False
        self._forms: dict[int, tuple[int, Form]] = {}  # by layer: length of the longest prompt, form of its scores
        self._known: dict[int, dict[str, Any]] = defaultdict(dict)  # of the weights of each layer (`Heads.known`)
        self._distances: dict[int, list[np.ndarray]] = defaultdict(list)  # of queries from the center

    def observe(self, seen: AttentionInput) -> None:
        """Take in a layer of a prompt in the first pass."""
        self.bidirectional |= not seen.causal
        if seen.layer in self.unsupported:
            return
        try:
            heads = self._heads(seen, checked=False)
            distances = query_radius(heads, seen.norm, seen.y)
        except UnsupportedAttentionError as error:
            self.unsupported[seen.layer] = str(error)
            return
        except RuntimeError as error:  # (of linear algebra, such as a decomposition that does not converge)
            self.unsupported[seen.layer] = f"layer {seen.layer}: {type(error).__name__}: {error}"
            return
        if distances is None:
            self.unbounded.add(seen.layer)
        else:
            self._distances[seen.layer].append(distances.numpy())

    def radii(self) -> dict[int, Float64[np.ndarray, " head"]]:
        """Return how far the observed queries of each head reach, by layer."""
        return {
            layer: np.quantile(np.concatenate(distances), QUERY_RADIUS_QUANTILE, axis=0)
            for layer, distances in self._distances.items()
        }

    def read(self, seen: AttentionInput) -> Heads | None:
        """Return the maps of a layer in the second pass; None if scores of its kind are not supported."""
        return None if seen.layer in self.unsupported else self._heads(seen, checked=True)

    def _heads(self, seen: AttentionInput, *, checked: bool) -> Heads:
        length = len(seen.y)
        longest, form = self._forms.get(seen.layer, (0, None))
        decided = form if longest >= length else None  # to one token any form fits: the longest prompt tells
        heads = read_heads(seen, self.norms, decided if checked else None)
        if decided is None:
            self._forms[seen.layer] = length, (heads.divisor, heads.slopes)
        elif not checked:
            heads = replace(heads, divisor=decided[0], slopes=decided[1])
        return replace(heads, known=self._known[seen.layer])

    def notes(self) -> list[str]:
        """Return what a reader has to know about attention in this model."""
        notes = []
        if self.unbounded:
            notes.append(
                f"nothing bounds the queries of {layers_in_words(sorted(self.unbounded))} (no scaling before them), so "
                "there are no margins and no attainable attention there"
            )
        notes += [f"head space was not measured. {text}" for text in self.unsupported.values()]
        if self.bidirectional:
            notes.append("attention is not causal: every query sees all keys")
        return notes


class AttentionLayer:
    """Keys, queries and attention of one layer on one prompt, under every variant of the norm before it.

    The queries of all variants are the intact model's. Everything is computed on first use, and kept only
    while the layer is measured.

    Args:
        seen: what the pass shows of the layer.
        read: its maps, when first wanted; None if scores of its kind are not supported (no head
            space then).
        constant: what replaces the norm's sigma on this prompt; 1 where attention reads the stream itself.
        radii: how far the observed queries of each head reach, as a share of what the norm allows; None: no bound.
        wanted: heads that are measured; None: all.
    """

    def __init__(
        self,
        seen: AttentionInput,
        read: Callable[[], Heads | None],
        constant: Constant,
        radii: Float64[np.ndarray, " head"] | None,
        wanted: Sequence[int] | None = None,
    ) -> None:
        self.seen, self._read, self.constant, self.radii = seen, read, constant, radii
        self.wanted = wanted
        self._known: dict[tuple[str, str | int], Any] = {}

    def once(self, what: str, of: str | int, make: Callable[[], _T]) -> _T:
        """Return what `make` gives; it is called once for each name and variant or position."""
        if (what, of) not in self._known:
            self._known[what, of] = make()
        value: _T = self._known[what, of]
        return value

    @cached_property
    def heads(self) -> Heads | None:
        """The layer's maps; None if scores of its kind are not supported."""
        return self._read()

    @property
    def maps(self) -> Heads:
        """The layer's maps, where there is head space."""
        assert self.heads is not None
        return self.heads

    @property
    def layer(self) -> int:
        return self.seen.layer

    @property
    def site(self) -> Norm:
        """The norm that attention reads, or the identity where it reads the stream."""
        return self.seen.norm

    @property
    def length(self) -> int:
        """Positions of the prompt."""
        return len(self.seen.x)

    @cached_property
    def chosen(self) -> list[int]:
        """The measured heads."""
        every = range(len(self.seen.pattern))
        return list(every) if self.wanted is None else [h for h in self.wanted if h in every]

    @cached_property
    def outputs(self) -> dict[str, Float[Tensor, "pos d_model"]]:
        """The norm's output before gain and bias, by variant, float64."""
        rows = self.constant.pair[torch.arange(self.length).clamp(max=1), None].to(self.seen.x.device)
        return {variant: self.site.without(variant, self.seen.x.double(), rows) for variant in VARIANTS}

    @cached_property
    def key_sets(self) -> list[slice]:
        """The sets of keys that are judged together: each all that a query at its last position sees.

        One, of all keys; with a window, the sets of the last query and of those a whole window before it, and so on,
        so that every key is in one set and every set is what a query sees.
        """
        window = self.seen.window or self.length
        ends = range(self.length, 0, -window)
        return [slice(max(0, end - window), end) for end in reversed(ends)]

    def reachable(self, position: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Center and axes of the chosen heads' reachable queries at a position; None if they are unbounded."""
        ellipsoid = query_ellipsoid(self.maps, self.site, position)
        return None if ellipsoid is None else self._of_chosen(*ellipsoid)

    def directions(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Center and directions of the chosen heads' queries at a position, regardless of their length."""
        return self._of_chosen(*query_directions(self.maps, self.site, position))

    def _of_chosen(self, center: Tensor, axes: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return center[self.chosen].numpy(), axes[self.chosen].numpy()

    @cached_property
    def key_bias(self) -> Float[np.ndarray, "head key"] | None:
        """What is added to the scores of each key in the chosen heads, nats; None: nothing."""
        bias = self.maps.bias(self.length)
        return None if bias is None else bias[self.chosen].cpu().numpy()

    @cached_property
    def variants(self) -> list[str]:
        """The variants that change keys here, the intact norm first."""
        return [name for name, variant in VARIANTS.items() if name == INTACT.name or variant.effect(self.site)]

    def keys(self, variant: str) -> Float[Tensor, "key head d_head"]:
        """Keys as attention would see them under a variant, of all heads."""
        return self.once("keys", variant, lambda: self.maps.keys(self.site.affine(self.outputs[variant])))

    def pattern(self, variant: str) -> Float[Tensor, "head query key"] | None:
        """Attention of all heads to the keys of a variant; None if it changes nothing by construction."""
        if variant not in self.variants:
            return None
        return self.once("pattern", variant, lambda: self.maps.pattern(self.queries[0], self.keys(variant)))

    @cached_property
    def queries(self) -> tuple[Float[Tensor, "pos head d_head"], Float[Tensor, "pos head d_head"]]:
        """The intact model's queries of all heads, as attention sees them and before rotary positions."""
        intact = self.site.affine(self.outputs["intact"])
        plain = self.maps.queries(intact, rotate=False)
        return plain if self.maps.rotary is None else self.maps.queries(intact), plain


def entropy_ratio(
    pattern: Float[Tensor, "head query key"], *, causal: bool = True, window: int | None = None
) -> Float[Tensor, "head query"]:
    """Entropy of each row of a pattern over the log of the keys it sees; NaN for a row that sees one key."""
    entropy = torch.special.entr(pattern).sum(-1)
    visible = visible_keys(*pattern.shape[-2:], causal=causal, window=window, device=pattern.device)
    count = visible.sum(-1).to(pattern)
    return torch.where(count > 1, entropy / count.log(), math.nan)


def uniformity_of(
    layer: AttentionLayer, variant: str
) -> tuple[dict[str, Float[Tensor, " head"]], Float[np.ndarray, "head key"]]:
    """Return how uniformly all heads attend to the keys of a variant (MEASURES), and the largest weight of each key."""
    return layer.once("uniformity", variant, lambda: _measured(layer, variant))


def _measured(
    layer: AttentionLayer, variant: str
) -> tuple[dict[str, Float[Tensor, " head"]], Float[np.ndarray, "head key"]]:
    """A few heads at a time: scores and patterns of all heads would take more memory than the pass."""
    heads, (q, plain), k = layer.maps, layer.queries, layer.keys(variant)
    measures = {name: torch.full((heads.n_heads,), math.nan, dtype=torch.float64) for name in MEASURES}
    largest = torch.empty(heads.n_heads, len(k), dtype=torch.float64)
    first = 1 if heads.causal else 0
    for some in heads_at_once((heads.n_heads, len(q), len(k))):
        pattern = heads.pattern(q, k, some)
        largest[some] = received(pattern, causal=heads.causal).cpu()
        if len(q) > 1:
            entropy = entropy_ratio(pattern, causal=heads.causal, window=heads.window)
            measures["entropy_ratio"][some] = entropy[:, first:].mean(-1).cpu()
    if len(q) > 1:
        measures["uniform_angle_deg"] = layer.once("angle", "", lambda: mean_angle(heads, layer.site, plain))
    return measures, largest.numpy()


def received(pattern: Float[Tensor, "head query key"], *, causal: bool = True) -> Float[Tensor, "head key"]:
    """The largest weight each key got, from queries at t ≥ max(position, 1) (all, if attention is not causal);
    NaN if there is no such query."""
    rows = pattern.shape[-2]
    if rows < 2:
        return torch.full_like(pattern[:, 0], math.nan)
    return pattern[:, 1 if causal else 0 :].amax(1)  # causal: rows before a key hold zeros
