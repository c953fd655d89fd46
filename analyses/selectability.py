"""Which keys of a prompt a query can select, by what margin and with how much attention, per head and per variant.

Two spaces. `normalized`: the norm's output before gain and bias (the paper's claim is about it; one row per layer,
head = -1). `head`: keys as attention sees them, after gain, bias, W_K, b_K, any QK-norm and rotary positions; margins
there are distances after multiplying keys by the axes A of the reachable query ellipsoid, so they are in nats and the
same for every equivalent model. The queries of all variants are the intact model's.

Definitions: README, "What is measured". Theorem 1 of Brody, Alon & Yahav 2023: a key is unselectable iff it lies in the
convex hull of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.analyses import uniformity
from ln_probe.analyses.geometry.attainable import attainable_attention
from ln_probe.analyses.hull import KeyGeometry, key_geometry
from ln_probe.analyses.uniformity import Uniformity
from ln_probe.analyses.variants import VARIANTS, no_op, variant_outputs
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.capture import AttentionInput
from ln_probe.hooks.sites import Site

HEAD_COLUMNS = (
    "layer", "head", "space", "variant", "keys", "unselectable", "duplicate", "undecided", "unselectable_fraction",
    "margin_median", "margin_p05", "attainable_median", "attainable_p05", "attainable_reachable_median",
    "pattern_max_median", "query_radius", "entropy_ratio", "uniform_angle_deg", "score_spread",
    "score_spread_floor", "by_theorem", "no_op",
)  # fmt: skip
KEY_COLUMNS = (
    "layer", "head", "space", "variant", "prompt", "position", "token", "verdict", "margin_lower", "margin_upper",
    "attainable", "attainable_reachable", "pattern_max", "first_unselectable_at",
)  # fmt: skip
_MEASURES = (
    "verdict", "margin_lower", "margin_upper", "attainable", "attainable_reachable", "pattern_max",
    "first_unselectable_at",
)  # fmt: skip
NORMALIZED, HEAD = "normalized", "head"

# Rows of the `keys` table per (layer, head, space): the union over variants of this many hardest keys of each, and
# this many drawn at random. Every key chosen is shown under all four variants, so that they can be compared.
HARDEST_PER_VARIANT = 3
SAMPLED = 5
QUERY_RADIUS_QUANTILE = 0.95  # of |A⁺(q - c)| over the queries that occurred: rho of the observed set


@dataclass
class _Group:
    """Everything of one (layer, space, variant): arrays [head pos] per prompt, uniformity per prompt."""

    site: Site
    dim: int
    prompts: list[int] = field(default_factory=list)
    measures: dict[str, list[np.ndarray]] = field(default_factory=lambda: {m: [] for m in _MEASURES})
    uniform: list[tuple[int, Uniformity]] = field(default_factory=list)


class Selectability:
    """Accumulates prompts, layer by layer; the tables at the end.

    Args:
        constants: c of each site, by name (mean sigma without position 0).
        radii: rho per layer, [head] each: how far into the reachable ball the observed queries go.
        uniform: also measure uniformity (entropy, angle, spread).
        select: measure selectability (verdicts, margins).
        heads: heads wanted; None means all.
    """

    def __init__(
        self,
        constants: dict[str, float],
        radii: dict[int, Float[Tensor, head]],
        *,
        select: bool = True,
        uniform: bool = True,
        heads: Sequence[int] | None = None,
    ) -> None:
        self.constants, self.radii = constants, radii
        self.select, self.uniform, self.heads = select, uniform, heads
        self.groups: dict[tuple[int, str, str], _Group] = {}

    def add(self, prompt: int, seen: AttentionInput, heads: Heads | None) -> None:
        """Take in one prompt at one attention layer, and the heads of it (None: not supported)."""
        outputs = variant_outputs(seen.site, seen.x, self.constants[seen.site.name])
        if self.select:
            self._add_normalized(prompt, seen, outputs)
        if heads is not None:
            self._add_heads(prompt, seen.site, outputs, heads)

    def _group(self, layer: int, site: Site, space: str, variant: str, dim: int) -> _Group:
        return self.groups.setdefault((layer, space, variant), _Group(site, dim))

    def _add_normalized(self, prompt: int, seen: AttentionInput, outputs: dict[str, Tensor]) -> None:
        site = seen.site
        dim = site.d - 1 if site.projects else site.d
        known: dict[str, KeyGeometry] = {}
        for variant, keys in outputs.items():
            same = "intact" if no_op(site, variant) else variant
            if same not in known:
                known[same] = key_geometry(keys.cpu().numpy()[None], causal=seen.causal)
            group = self._group(seen.layer, site, NORMALIZED, variant, dim)
            group.prompts.append(prompt)
            self._keep(group, known[same], None)

    def _add_heads(self, prompt: int, site: Site, outputs: dict[str, Tensor], heads: Heads) -> None:
        chosen = list(range(heads.n_heads)) if self.heads is None else [h for h in self.heads if h < heads.n_heads]
        y = site.affine(outputs["intact"])
        q, q_plain = heads.queries(y), heads.queries(y, rotate=False)
        ellipsoid = heads.query_ellipsoid(site, len(y) - 1)
        axes = None if ellipsoid is None else ellipsoid[1]
        query_set = None if ellipsoid is None else (ellipsoid[0][chosen].numpy(), ellipsoid[1][chosen].numpy())
        known: dict[str, tuple[KeyGeometry | None, Uniformity, np.ndarray, np.ndarray | None]] = {}
        for variant, normalized in outputs.items():
            same = "intact" if no_op(site, variant) else variant
            if same not in known:
                k = heads.keys(site.affine(normalized))
                uniform, paid = uniformity.measure(heads, site, q, k, axes, q_plain)
                geometry = observed = None
                if self.select:
                    keys = k.permute(1, 0, 2)[chosen].cpu().numpy()
                    # Without a bound on queries there are no nats to give a margin in.
                    geometry = key_geometry(
                        keys, query_set=query_set, causal=heads.causal, margins=query_set is not None
                    )
                    if query_set is not None and heads.layer in self.radii:
                        rho = self.radii[heads.layer][chosen].numpy()[:, None, None]
                        observed, _ = attainable_attention(keys, (query_set[0], query_set[1] * rho))
                known[same] = geometry, uniform, paid[chosen].numpy(), observed
            geometry, uniform, most, observed = known[same]
            group = self._group(heads.layer, site, HEAD, variant, heads.W_K.shape[-1])
            group.prompts.append(prompt)
            if self.uniform:
                group.uniform.append((max(0, len(y) - 1), uniform))
            if geometry is not None:
                self._keep(group, geometry, most, observed)

    def _keep(
        self, group: _Group, geometry: KeyGeometry, most: np.ndarray | None, observed: np.ndarray | None = None
    ) -> None:
        nothing = np.full(geometry.verdict.shape, np.nan)
        found = {
            "verdict": geometry.verdict,
            "margin_lower": geometry.margin_lower,
            "margin_upper": geometry.margin_upper,
            "attainable": nothing if observed is None else observed,
            # The observed set lies in the reachable one: a weight found there counts here too.
            "attainable_reachable": np.fmax(geometry.attainable, nothing if observed is None else observed),
            "pattern_max": nothing if most is None else most,
            "first_unselectable_at": nothing if (at := geometry.first_unselectable_at) is None else at,
        }
        for name, values in found.items():
            group.measures[name].append(np.asarray(values))

    # ---------------------------------------------------------------------------------------------------- tables

    def _head_numbers(self, group: _Group) -> list[int]:
        if not group.measures["verdict"]:
            count = len(group.uniform[0][1].entropy_ratio) if group.uniform else 0
            return list(range(count)) if self.heads is None else [h for h in self.heads if h < count]
        count = len(group.measures["verdict"][0])
        return list(range(count)) if self.heads is None else list(self.heads)[:count]

    def heads_table(self) -> pd.DataFrame:
        """A row per (layer, head, space, variant)."""
        rows = []
        for (layer, space, variant), group in sorted(self.groups.items(), key=_order):
            numbers = [-1] if space == NORMALIZED else self._head_numbers(group)
            joined = {m: np.concatenate(v, axis=1) if v else None for m, v in group.measures.items()}
            longest = max((v.shape[1] for v in group.measures["verdict"]), default=0)
            for row, head in enumerate(numbers):
                values = {m: None if v is None else v[row] for m, v in joined.items()}
                rows.append(
                    {"layer": layer, "head": head, "space": space, "variant": variant}
                    | _summary(values)
                    | self._uniform_summary(group, head)
                    | {
                        "query_radius": self._radius(layer, head),
                        "by_theorem": _by_theorem(group, space, variant, longest),
                        "no_op": no_op(group.site, variant),
                    }
                )
        return pd.DataFrame(rows, columns=list(HEAD_COLUMNS))

    def _radius(self, layer: int, head: int) -> float:
        return float(self.radii[layer][head]) if head >= 0 and layer in self.radii else math.nan

    def _uniform_summary(self, group: _Group, head: int) -> dict[str, float]:
        names = ("entropy_ratio", "uniform_angle_deg", "score_spread", "score_spread_floor")
        weights = np.array([w for w, _ in group.uniform], float)
        if head < 0 or not len(weights) or not weights.sum():
            return dict.fromkeys(names, math.nan)
        found = {}
        for name in names:  # a prompt counts with the queries it had; a single-token prompt with none
            values = np.array([float(getattr(u, name)[head]) for _, u in group.uniform])
            found[name] = float(np.average(values[weights > 0], weights=weights[weights > 0]))
        return found

    def keys_table(self, tokens: Sequence[Sequence[str]], *, every: bool, seed: int) -> pd.DataFrame:
        """A row per chosen key under each variant; all keys if `every`.

        Args:
            tokens: token strings by prompt and position.
            every: keep every key instead of the hardest and a sample.
            seed: of the sample.
        """
        frames = []
        layers = sorted({(layer, space) for layer, space, _ in self.groups}, key=lambda k: (k[1] != NORMALIZED, k))
        for layer, space in layers:
            groups = {v: self.groups[layer, space, v] for v in VARIANTS if (layer, space, v) in self.groups}
            first = next(iter(groups.values()))
            if not first.measures["verdict"]:
                continue
            lengths = [v.shape[1] for v in first.measures["verdict"]]
            prompt = np.repeat(first.prompts, lengths)
            position = np.concatenate([np.arange(n) for n in lengths])
            names = np.array([tokens[p][i] for p, i in zip(prompt, position, strict=True)], object)
            joined = {v: {m: np.concatenate(a, axis=1) for m, a in g.measures.items()} for v, g in groups.items()}
            numbers = [-1] if space == NORMALIZED else self._head_numbers(first)
            for row, head in enumerate(numbers):
                here = {v: {m: a[row] for m, a in found.items()} for v, found in joined.items()}
                rng = np.random.default_rng([seed, layer, head + 1])
                picked = np.arange(len(prompt)) if every else _pick(here, rng)
                for variant, found in here.items():
                    frame = pd.DataFrame({m: a[picked] for m, a in found.items()})
                    frame = frame.assign(
                        layer=layer, head=head, space=space, variant=variant, prompt=prompt[picked],
                        position=position[picked], token=names[picked],
                    )  # fmt: skip
                    frames.append(frame[list(KEY_COLUMNS)])
        if not frames:
            return pd.DataFrame(columns=list(KEY_COLUMNS))
        return pd.concat(frames, ignore_index=True)


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


def _order(item: tuple[tuple[int, str, str], _Group]) -> tuple[bool, int, int]:
    (layer, space, variant), _ = item
    return space != NORMALIZED, layer, VARIANTS.index(variant)


def _summary(values: dict[str, np.ndarray | None]) -> dict[str, float]:
    verdict = values["verdict"]
    if verdict is None:
        numbers = dict.fromkeys(("keys", "unselectable", "duplicate", "undecided", "unselectable_fraction"), math.nan)
    else:
        counts = {v: int((verdict == v).sum()) for v in ("unselectable", "duplicate", "undecided")}
        numbers = {
            "keys": len(verdict),
            **counts,
            "unselectable_fraction": counts["unselectable"] / len(verdict),
        }
    middle: np.ndarray | None = None
    if values["margin_lower"] is not None and values["margin_upper"] is not None:
        middle = (values["margin_lower"] + values["margin_upper"]) / 2
    return numbers | {
        "margin_median": _quantile(middle, 0.5),
        "margin_p05": _quantile(middle, 0.05),
        "attainable_median": _quantile(values["attainable"], 0.5),
        "attainable_p05": _quantile(values["attainable"], 0.05),
        "attainable_reachable_median": _quantile(values["attainable_reachable"], 0.5),
        "pattern_max_median": _quantile(values["pattern_max"], 0.5),
    }


def _quantile(values: np.ndarray | None, q: float) -> float:
    kept = np.empty(0) if values is None else values[~np.isnan(values)]
    return float(np.quantile(kept, q)) if len(kept) else math.nan


def _by_theorem(group: _Group, space: str, variant: str, longest: int) -> str:
    """Why no key can be unselectable here whatever the model has learned; empty if it is a finding."""
    if 0 < longest <= group.dim + 1:
        return f"at most {longest} keys in {group.dim} dimensions"
    site = group.site
    if space == NORMALIZED and site.scales and (variant == "intact" or no_op(site, variant)):
        return "normalized keys lie on a sphere" + ("" if site.eps == 0 else " (up to eps)")
    return ""


def _hardness(found: dict[str, np.ndarray]) -> np.ndarray:
    """Smaller is harder: attainable attention where it is known, else the margin; unselectable before the rest."""
    value = np.where(np.isnan(found["attainable"]), found["margin_upper"], found["attainable"])
    value = np.where(np.isnan(value), np.inf, value)
    return np.where(np.isin(found["verdict"], ["unselectable", "duplicate"]), -1.0 + 1e-9 * value, value)


def _pick(here: dict[str, dict[str, np.ndarray]], rng: np.random.Generator) -> np.ndarray:
    chosen: set[int] = set()
    for found in here.values():
        chosen |= set(np.argsort(_hardness(found), kind="stable")[:HARDEST_PER_VARIANT].tolist())
    count = len(next(iter(here.values()))["verdict"])
    chosen |= set(rng.choice(count, size=min(SAMPLED, count), replace=False).tolist())
    return np.array(sorted(chosen))
