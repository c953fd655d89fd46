"""Which keys of a prompt a query can select, by what margin and with how much attention, per head and per variant.

Two spaces. `normalized`: the norm's output before gain and bias (the paper's claim is about it; one row per layer,
head = -1). `head`: keys as attention sees them, after gain, bias, W_K, b_K, any QK-norm and rotary positions; margins
there are distances after multiplying keys by the axes A of the reachable query ellipsoid, so they are in nats and the
same for every equivalent model. The queries of all variants are the intact model's.

Definitions: README, "What is measured". Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the
convex hull of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ln_probe.analyses import uniformity
from ln_probe.analyses.geometry.verdicts import NAMES
from ln_probe.analyses.hull import KeyGeometry, attainable_attention, key_geometry
from ln_probe.analyses.key_tables import HEAD, NORMALIZED, UNIFORM, KeyRows
from ln_probe.analyses.uniformity import Uniformity
from ln_probe.analyses.variants import no_op, variant_outputs
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.capture import AttentionInput
from ln_probe.hooks.sites import Site
from ln_probe.hooks.variants import MEAN_IGNORED

QUERY_RADIUS_QUANTILE = 0.95  # of |A⁺(q - c)| over the queries that occurred: rho of the observed set


@dataclass
class _Group:
    """Everything of one (layer, space, variant), prompt by prompt: [head key] arrays, [head measure] uniformity."""

    site: Site
    dim: int
    no_op: str
    heads: tuple[int, ...]
    prompts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    measures: dict[str, list[np.ndarray]] = field(default_factory=dict)
    uniform: list[np.ndarray] = field(default_factory=list)


class Selectability:
    """Accumulates prompts, layer by layer; `rows` at the end, of which `key_tables` makes tables.

    Args:
        constants: c of each site, by name (mean sigma without position 0).
        radii: rho per layer, [head] each: how far into the reachable ball the observed queries go.
        uniform: also measure uniformity (entropy, angle, spread).
        select: measure selectability (verdicts, margins).
        heads: heads wanted; None means all.
    """

    def __init__(
        self,
        constants: Mapping[str, float],
        radii: Mapping[int, Float64[np.ndarray, " head"]],
        *,
        select: bool = True,
        uniform: bool = True,
        heads: Sequence[int] | None = None,
    ) -> None:
        self.constants, self.radii = constants, radii
        self.select, self.uniform, self.heads = select, uniform, heads
        self._groups: dict[tuple[int, str, str], _Group] = {}

    def add(self, prompt: int, seen: AttentionInput, heads: Heads | None) -> None:
        """Take in one prompt at one attention layer, and the heads of it (None: not supported)."""
        outputs = variant_outputs(seen.site, seen.x, self.constants[seen.site.name])
        if self.select:
            self._add_normalized(prompt, seen, outputs)
        if heads is not None:
            self._add_heads(prompt, seen, outputs, heads)

    def rows(self) -> list[KeyRows]:
        """All that was measured, the prompts of a (layer, space, variant) side by side."""
        return [
            KeyRows(
                layer=layer,
                space=space,
                variant=variant,
                heads=group.heads,
                dim=group.dim,
                theorem=_theorem(group.site, space, variant),
                no_op=group.no_op,
                prompts=np.array(group.prompts, np.int64),
                lengths=np.array(group.lengths, np.int64),
                measures={m: np.concatenate(parts, axis=1) for m, parts in group.measures.items()},
                uniform=np.stack(group.uniform) if group.uniform else None,
            )
            for (layer, space, variant), group in self._groups.items()
        ]

    def _group(
        self, prompt: int, length: int, where: tuple[int, str, str], site: Site, dim: int, no_op: str,
        heads: Sequence[int],
    ) -> _Group:  # fmt: skip
        group = self._groups.setdefault(where, _Group(site, dim, no_op, tuple(heads)))
        group.prompts.append(prompt)
        group.lengths.append(length)
        return group

    def _add_normalized(self, prompt: int, seen: AttentionInput, outputs: dict[str, Tensor]) -> None:
        site = seen.site
        dim = site.d - 1 if site.projects else site.d
        known: dict[str, KeyGeometry] = {}
        for variant, keys in outputs.items():
            nothing = no_op(site, variant)
            same = "intact" if nothing else variant
            if same not in known:
                known[same] = key_geometry(keys.cpu().numpy()[None], causal=seen.causal)
            group = self._group(prompt, len(seen.x), (seen.layer, NORMALIZED, variant), site, dim, nothing, (-1,))
            self._keep(group, known[same], None)

    def _add_heads(self, prompt: int, seen: AttentionInput, outputs: dict[str, Tensor], heads: Heads) -> None:
        site = seen.site
        chosen = list(range(heads.n_heads)) if self.heads is None else [h for h in self.heads if h < heads.n_heads]
        y = site.affine(outputs["intact"])
        q, q_plain = heads.queries(y), heads.queries(y, rotate=False)
        ellipsoid = heads.query_ellipsoid(site, len(y) - 1)
        axes = None if ellipsoid is None else ellipsoid[1]
        query_set = None if ellipsoid is None else (ellipsoid[0][chosen].numpy(), ellipsoid[1][chosen].numpy())
        known: dict[str, tuple[KeyGeometry | None, Uniformity, np.ndarray, np.ndarray | None]] = {}
        ignored = f"{site.kind}: {MEAN_IGNORED}" if heads.keys_ignore_mean(site, seen.y.dtype) else ""
        for variant, normalized in outputs.items():
            nothing = no_op(site, variant) or (ignored if variant == "no_projection" else "")
            same = "intact" if nothing else variant
            if same not in known:
                k = heads.keys(site.affine(normalized))
                uniform, weights = uniformity.measure(heads, site, q, k, axes, q_plain)
                geometry = observed = None
                if self.select:
                    keys = k.permute(1, 0, 2)[chosen].cpu().numpy()
                    # Without a bound on queries there are no nats to give a margin in.
                    geometry = key_geometry(
                        keys, query_set=query_set, causal=heads.causal, margins=query_set is not None
                    )
                    if query_set is not None and heads.layer in self.radii:
                        rho = self.radii[heads.layer][chosen][:, None, None]
                        smaller = query_set[0], query_set[1] * rho
                        observed, _ = attainable_attention(keys, smaller, starts=geometry.attainable_at)
                known[same] = geometry, uniform, weights[chosen].numpy(), observed
            geometry, uniform, most, observed = known[same]
            group = self._group(
                prompt, len(y), (heads.layer, HEAD, variant), site, heads.W_K.shape[-1], nothing, chosen
            )
            if self.uniform:
                group.uniform.append(np.stack([getattr(uniform, name)[chosen].numpy() for name in UNIFORM], axis=-1))
            if geometry is not None:
                self._keep(group, geometry, most, observed)

    def _keep(
        self, group: _Group, geometry: KeyGeometry, most: np.ndarray | None, observed: np.ndarray | None = None
    ) -> None:
        nothing = np.full(geometry.verdict.shape, np.nan)
        found = {
            "verdict": (geometry.verdict[..., None] == NAMES).argmax(-1).astype(np.int8),
            "margin_lower": geometry.margin_lower,
            "margin_upper": geometry.margin_upper,
            "attainable": nothing if observed is None else observed,
            # The observed set lies in the reachable one: a weight found there counts here too.
            "attainable_reachable": np.fmax(geometry.attainable, nothing if observed is None else observed),
            "pattern_max": nothing if most is None else most,
            "first_unselectable_at": nothing if (at := geometry.first_unselectable_at) is None else at,
        }
        for name, values in found.items():
            group.measures.setdefault(name, []).append(np.asarray(values))


def observed_radius(heads: Heads, site: Site, y: Float[Tensor, "pos d_model"]) -> Float[Tensor, "pos head"] | None:
    """|A⁺(q - c)| of the queries of one prompt, before rotary positions: 1 on the edge of the reachable ellipsoid.

    None if the norm does not scale (the reachable set is unbounded).
    """
    plain = replace(heads, rotary=None)
    ellipsoid = plain.query_ellipsoid(site, 0)
    if ellipsoid is None:
        return None
    center, axes = ellipsoid
    q = plain.queries(y).cpu() / heads.divisor
    inverse = torch.linalg.pinv(axes)
    distance: Tensor = torch.einsum("had,phd->pha", inverse, q - center).norm(dim=-1)
    return distance


def _theorem(site: Site, space: str, variant: str) -> str:
    """Why keys of this kind can never be unselectable; empty if they can."""
    if space == NORMALIZED and site.scales and (variant == "intact" or no_op(site, variant)):
        return "normalized keys lie on a sphere" + ("" if site.eps == 0 else " (up to eps)")
    return ""
