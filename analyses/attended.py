"""One attention layer during one prompt, as probes look at it: what several of them need is computed once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from jaxtyping import Float
from torch import Tensor

from ln_probe.analyses import attention_spread
from ln_probe.analyses.attention_spread import Uniformity
from ln_probe.analyses.calibration import Calibration
from ln_probe.analyses.variant_outputs import no_op, variant_outputs
from ln_probe.hooks.attention import Heads
from ln_probe.hooks.capture import AttentionInput
from ln_probe.hooks.sites import Site
from ln_probe.hooks.variants import MEAN_IGNORED


class Attended:
    """Keys, queries and attention of one layer on one prompt, under the four variants of the norm before it.

    The queries of all variants are the intact model's. Everything is computed when it is first asked for, and kept only
    while the layer is looked at.

    Args:
        seen: what the pass shows of the layer.
        heads: its maps; None if its scores are of a kind that is not supported (no head space then).
        calibration: of the model.
        wanted: heads looked at; None: all.
    """

    def __init__(
        self, seen: AttentionInput, heads: Heads | None, calibration: Calibration, wanted: Sequence[int] | None = None
    ) -> None:
        self.seen, self.heads, self.calibration, self.wanted = seen, heads, calibration, wanted
        self._keys: dict[str, Tensor] = {}
        self._spread: dict[str, tuple[Uniformity, np.ndarray]] = {}

    @property
    def layer(self) -> int:
        return self.seen.layer

    @property
    def site(self) -> Site:
        """The norm that attention reads."""
        return self.seen.site

    @property
    def length(self) -> int:
        """Positions of the prompt."""
        return len(self.seen.x)

    @cached_property
    def chosen(self) -> list[int]:
        """The heads looked at; empty without head space."""
        if self.heads is None:
            return []
        every = range(self.heads.n_heads)
        return list(every) if self.wanted is None else [h for h in self.wanted if h in every]

    @cached_property
    def outputs(self) -> dict[str, Float[Tensor, "pos d_model"]]:
        """The norm's output before gain and bias, by variant, float64."""
        return variant_outputs(self.site, self.seen.x, self.calibration.constants[self.site.name])

    @cached_property
    def query_set(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Center and axes of the chosen heads' reachable queries at the last position; None if they are unbounded."""
        if self._ellipsoid is None:
            return None
        center, axes = self._ellipsoid
        return center[self.chosen].numpy(), axes[self.chosen].numpy()

    def no_op(self, variant: str) -> str:
        """Why a variant changes no key of head space by construction; empty if it does change some."""
        ignored = self._mean_ignored if variant == "no_projection" else ""
        return no_op(self.site, variant) or ignored

    def keys(self, variant: str) -> Float[Tensor, "key head d_head"]:
        """Keys as attention would see them under a variant, of all heads."""
        if variant not in self._keys:
            assert self.heads is not None
            self._keys[variant] = self.heads.keys(self.site.affine(self.outputs[variant]))
        return self._keys[variant]

    def spread(self, variant: str) -> tuple[Uniformity, Float[np.ndarray, "head key"]]:
        """How uniformly all heads attend to the keys of a variant, and the largest weight each key gets."""
        if variant not in self._spread:
            assert self.heads is not None
            q, q_plain = self._queries
            axes = None if self._ellipsoid is None else self._ellipsoid[1]
            uniform, most = attention_spread.measure(self.heads, self.site, q, self.keys(variant), axes, q_plain)
            self._spread[variant] = uniform, most.numpy()
        return self._spread[variant]

    @cached_property
    def _intact(self) -> Float[Tensor, "pos d_model"]:
        return self.site.affine(self.outputs["intact"])

    @cached_property
    def _queries(self) -> tuple[Tensor, Tensor]:
        assert self.heads is not None
        return self.heads.queries(self._intact), self.heads.queries(self._intact, rotate=False)

    @cached_property
    def _ellipsoid(self) -> tuple[Tensor, Tensor] | None:
        assert self.heads is not None
        return self.heads.query_ellipsoid(self.site, self.length - 1)

    @cached_property
    def _mean_ignored(self) -> str:
        assert self.heads is not None
        ignores = self.heads.keys_ignore_mean(self.site, self.seen.y.dtype)
        return f"{self.site.kind}: {MEAN_IGNORED}" if ignores else ""
