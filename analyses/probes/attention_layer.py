"""One attention layer during one prompt, as probes look at it: what several of them need is computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ln_probe.analyses.constants import Calibration
from ln_probe.analyses.geometry.positions import QuerySets
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.capture import AttentionInput
from ln_probe.hooks.norm import Site
from ln_probe.hooks.scales import Constant
from ln_probe.hooks.variants import MEAN_IGNORED, PROJECTION_REMOVED, VARIANTS, no_op, normalized


def scores(
    q: Float[Tensor, "query head d_head"],
    k: Float[Tensor, "key head d_head"],
    divisor: float,
    bias: Float[Tensor, "head key"] | None = None,
) -> Float[Tensor, "head query key"]:
    """q·k / divisor, and a bias per key, in nats."""
    found = torch.einsum("qhd,khd->hqk", q, k) / divisor
    return found if bias is None else found + bias[:, None]


class AttentionLayer:
    """Keys, queries and attention of one layer on one prompt, under every variant of the norm before it.

    The queries of all variants are the intact model's. Everything is computed when it is first asked for, and kept only
    while the layer is measured.

    Args:
        seen: what the pass shows of the layer.
        read: its maps, when they are first wanted; None if its scores are of a kind that is not supported (no head
            space then).
        calibration: of the model.
        prompt: the prompt's number: its constants replace sigma.
        wanted: heads that are measured; None: all.
    """

    def __init__(
        self,
        seen: AttentionInput,
        read: Callable[[], Heads | None],
        calibration: Calibration,
        prompt: int,
        wanted: Sequence[int] | None = None,
    ) -> None:
        self.seen, self._read, self.calibration, self.wanted = seen, read, calibration, wanted
        self.prompt = prompt
        self._keys: dict[str, Tensor] = {}
        self.shared: dict[tuple[str, str], Any] = {}  # what several probes use, by measure and variant
        self._ellipsoids: dict[int, tuple[Tensor, Tensor] | None] = {}
        self._sets: dict[tuple[str, int], tuple[np.ndarray, np.ndarray] | None] = {}  # by kind and position

    @cached_property
    def heads(self) -> Heads | None:
        """The layer's maps; None if its scores are of a kind that is not supported."""
        return self._read()

    @property
    def layer(self) -> int:
        return self.seen.layer

    @property
    def site(self) -> Site:
        """The norm that attention reads, or its replacement."""
        return self.seen.site

    @property
    def length(self) -> int:
        """Positions of the prompt."""
        return len(self.seen.x)

    @cached_property
    def chosen(self) -> list[int]:
        """The measured heads; empty without head space."""
        if self.heads is None:
            return []
        every = range(self.heads.n_heads)
        return list(every) if self.wanted is None else [h for h in self.wanted if h in every]

    @cached_property
    def constant(self) -> Constant:
        """What replaces the norm's sigma on this prompt."""
        return self.calibration.constants.of(self.prompt)[self.site.name]

    @cached_property
    def outputs(self) -> dict[str, Float[Tensor, "pos d_model"]]:
        """The norm's output before gain and bias, by variant, float64."""
        return variant_outputs(self.site, self.seen.x, 1.0 if self.site.stands_in else self.constant)

    @cached_property
    def key_sets(self) -> list[slice]:
        """The sets of keys that are judged together: each all that a query at its last position sees.

        One, of all keys; with a window, the sets of the last query and of those a whole window before it, and so on,
        so that every key is in one set and every set is one that a query really sees.
        """
        window = self.seen.window or self.length
        ends = range(self.length, 0, -window)
        return [slice(max(0, end - window), end) for end in reversed(ends)]

    @property
    def grows(self) -> bool:
        """Whether what a query sees only grows with its position, so that there is a first position at which a key can
        no longer be selected: with a causal mask, and no window that keys fall out of."""
        return self.seen.causal and self.seen.window is None

    def reachable(self, position: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Center and axes of the chosen heads' reachable queries at a position; None if they are unbounded."""
        if ("reachable", position) not in self._sets:
            found = self.ellipsoid(position)
            self._sets["reachable", position] = None if found is None else self._of_chosen(*found)
        return self._sets["reachable", position]

    def directions(self, position: int) -> tuple[np.ndarray, np.ndarray]:
        """Center and directions of the chosen heads' queries at a position, regardless of their length."""
        assert self.heads is not None
        if ("any", position) not in self._sets:
            self._sets["any", position] = self._of_chosen(*self.heads.query_directions(self.site, position))
        found = self._sets["any", position]
        assert found is not None
        return found

    def empirical(self, position: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Center and axes of the chosen heads' queries that occurred, as they are at a position; None if calibration
        saw none."""
        if self.heads is None or self.layer not in self.calibration.empirical:
            return None
        if ("empirical", position) not in self._sets:
            center, axes = (torch.from_numpy(part) for part in self.calibration.empirical[self.layer])
            self._sets["empirical", position] = self._of_chosen(*self.heads.turned(center, axes, position))
        return self._sets["empirical", position]

    def observed(self, row: int) -> QuerySets | None:
        """The observed queries of a chosen head (by its place among them), as a function of positions.

        The reachable set shrunk about its center by rho; where nothing bounds queries the empirical set. None if
        calibration saw none. Without rotary positions there is one set for all positions.
        """
        assert self.heads is not None
        heads, head = self.heads, self.chosen[row]
        reached = heads.reached(self.site)
        if reached is not None and self.layer in self.calibration.radii:
            shrunk = float(self.calibration.radii[self.layer][head]) / heads.divisor
            center, axes = reached.center[head] / heads.divisor, reached.axes[head] * shrunk
        elif reached is None and self.layer in self.calibration.empirical:
            center, axes = (torch.from_numpy(part[head]) for part in self.calibration.empirical[self.layer])
        else:
            return None

        def at(positions: Int64[np.ndarray, " set"]) -> tuple[np.ndarray, np.ndarray]:
            turned = heads.turned_to(center, axes, torch.from_numpy(positions))
            return turned[0].numpy(), turned[1].numpy()

        return at

    def _of_chosen(self, center: Tensor, axes: Tensor) -> tuple[np.ndarray, np.ndarray]:
        return center[self.chosen].numpy(), axes[self.chosen].numpy()

    def drawn(self, prompt: int, head: int) -> Int64[np.ndarray, " drawn"] | None:
        """The keys of a head (-1: at the norm's output) that are measured; None: all."""
        sample = self.calibration.sample
        return None if sample is None else sample.positions(prompt, self.layer, head, self.length)

    @cached_property
    def key_bias(self) -> Float[np.ndarray, "head key"] | None:
        """What is added to the scores of each key in the chosen heads, nats; None: nothing."""
        assert self.heads is not None
        bias = self.heads.bias(self.length)
        return None if bias is None else bias[self.chosen].cpu().numpy()

    def no_op(self, variant: str) -> str:
        """Why a variant changes no key of head space by construction; empty if it does change some."""
        return no_op(self.site, variant) or (self._mean_ignored if variant == PROJECTION_REMOVED.name else "")

    def keys(self, variant: str) -> Float[Tensor, "key head d_head"]:
        """Keys as attention would see them under a variant, of all heads."""
        if variant not in self._keys:
            assert self.heads is not None
            self._keys[variant] = self.heads.keys(self.site.affine(self.outputs[variant]))
        return self._keys[variant]

    def pattern(self, variant: str) -> Float[Tensor, "head query key"] | None:
        """What all heads would pay to the keys of a variant; None if it changes nothing by construction."""
        assert self.heads is not None
        return None if self.no_op(variant) else self.heads.pattern(self.queries[0], self.keys(variant))

    @cached_property
    def _intact(self) -> Float[Tensor, "pos d_model"]:
        return self.site.affine(self.outputs["intact"])

    @cached_property
    def queries(self) -> tuple[Float[Tensor, "pos head d_head"], Float[Tensor, "pos head d_head"]]:
        """The intact model's queries of all heads, as attention sees them and before rotary positions."""
        assert self.heads is not None
        plain = self.heads.queries(self._intact, rotate=False)
        return plain if self.heads.rotary is None else self.heads.queries(self._intact), plain

    def ellipsoid(self, position: int) -> tuple[Tensor, Tensor] | None:
        """Center and axes of all heads' reachable queries at a position; None if they are unbounded."""
        assert self.heads is not None
        if position not in self._ellipsoids:
            self._ellipsoids[position] = self.heads.query_ellipsoid(self.site, position)
        return self._ellipsoids[position]

    @cached_property
    def _mean_ignored(self) -> str:
        assert self.heads is not None
        ignores = self.heads.keys_ignore_mean(self.site, self.seen.y.dtype)
        return f"{self.site.kind}: {MEAN_IGNORED}" if ignores else ""


def variant_outputs(
    site: Site, x: Float[Tensor, "pos d"], constant: Constant | float
) -> dict[str, Float[Tensor, "pos d"]]:
    """The norm's output before gain and bias under each variant, float64.

    Args:
        site: the norm.
        x: its inputs on one prompt.
        constant: c, the divisor that replaces sigma at position 0 and elsewhere.

    Raises:
        ValueError: the constant is not a positive number.
    """
    c = Constant.of(constant)
    if not (c.first > 0 and c.rest > 0):
        wrong = c.first if not c.first > 0 else c.rest
        raise ValueError(f"{site.name}: the constant that replaces sigma must be positive, got {wrong}")
    rows = c.rows(len(x)).to(x.device)
    return {variant: normalized(site, variant, x.double(), rows) for variant in VARIANTS}
