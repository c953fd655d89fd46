"""Features of sparse autoencoders and transcoders as components of the residual stream.

A dictionary at a hook point writes Σ_f a_f v_f + bias + error, with activations a and decoder directions v. These rows
replace the components whose sum that hook point shows, and go through the norm as those do (`docs/attribution.md`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from ln_probe.analyses.attribution.shared import AttributionError
from ln_probe.hooks.components import Part, Record, dot
from ln_probe.hooks.model import HookedModel, child_of, evaluating, with_float64

TOP_FEATURES = 20  # named one by one; the rest is one row
CLOSES = 1e-4  # what float32 rounding leaves of a sum over thousands of features, relative to its largest
# A block's hook points in the order of the pass; the last is the first of the next block.
_POINTS = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out", "hook_resid_post")
_POINT = re.compile(rf"blocks\.(\d+)\.({'|'.join(_POINTS)})$")


@dataclass(frozen=True, eq=False)
class Features:
    """A dictionary's features at one hook point of some prompts.

    Attributes:
        hook_name: `blocks.L.hook_resid_pre`, `_mid`, `_post`, `hook_attn_out` or `hook_mlp_out`: where the features
            write.
        directions: the decoder's row of each feature.
        activations: [batch pos feature], or [pos feature] for one prompt: each feature writes its activation times its
            direction.
        bias: what the decoder adds for any activations, the same for every token or of each token; None: nothing.
        skip: what a dictionary writes besides its decoder's output, of each token (a transcoder's skip connection).
        top: features named one by one, those with the largest |activation|·|direction| at the positions asked for.

    Example:
        >>> from types import SimpleNamespace
        >>> from ln_probe.analyses.attribution import Features
        >>> W = torch.randn(256, 128)  # in the place of a trained SAE, `SAE.from_pretrained(…)`
        >>> sae = SimpleNamespace(encode=lambda x: (x @ W.T).relu(), decode=lambda a: a @ W, W_dec=W)
        >>> ids = torch.arange(1, 9)[None]
        >>> _, cache = model.run_with_cache(ids)
        >>> features = Features.of(sae, cache, "blocks.1.hook_resid_pre")
        >>> ln_probe.attribute_logits(model, ids, -1, target=3, features=[features]).top()
    """

    hook_name: str
    directions: Float[Tensor, "feature d_model"]
    activations: Float[Tensor, "*batch pos feature"]
    bias: Float[Tensor, "*token d_model"] | None = None
    skip: Float[Tensor, "*batch pos d_model"] | None = None
    top: int = TOP_FEATURES

    @classmethod
    def of(cls, sae: Any, cache: Any, hook_name: str | None = None, input_name: str | None = None) -> Features:
        """Return the features of a sparse autoencoder or transcoder on cached activations.

        What `decode` returns for the activations decides, not `W_dec` alone: a factor of each token (normalized
        inputs) is in `activations`, a factor of each feature (scaled decoder rows) in `directions`.

        Args:
            sae: any object with `encode`, `decode` and `W_dec` [feature d_model].
            cache: the activations of the prompts (`model.run_with_cache`).
            hook_name: where the features write; None: as the object's `cfg` says.
            input_name: what is encoded, where it is another hook point (a transcoder); None: as `cfg` says.

        Raises:
            AttributionError: the object or the cache lacks something, or the object writes something else.
        """
        for name in ("encode", "decode", "W_dec"):
            if not hasattr(sae, name):
                raise AttributionError(f"{type(sae).__name__} has no {name}: features need encode, decode and W_dec")
        cfg = getattr(sae, "cfg", None)
        holders = (getattr(cfg, "metadata", None), cfg)
        own_input, own_output = (
            next((v for v in (getattr(h, name, None) for h in holders) if v and isinstance(v, str)), None)
            for name in ("hook_name", "hook_name_out")
        )
        reads, writes = input_name or own_input or hook_name, hook_name or own_output or own_input
        if reads is None or writes is None:
            raise AttributionError(f"{type(sae).__name__} does not say its hook point: give hook_name=")
        if reads not in cache:
            raise AttributionError(f"the cache lacks {reads!r}, which {type(sae).__name__} encodes: cache it")
        with torch.no_grad(), evaluating(sae) if isinstance(sae, nn.Module) else nullcontext():
            x = cache[reads]
            active, directions = sae.encode(x).detach(), sae.W_dec.detach()
            if not torch.equal(active, sae.encode(x)):
                raise AttributionError(f"{type(sae).__name__} encodes the same input in two ways: turn its noise off")
            decoded, bias = sae.decode(active), sae.decode(torch.zeros_like(active))
            by_token, by_feature = _factors(sae, active, directions, decoded - bias, bias)
            skip = _skip(sae, x, decoded)
        by_token, by_feature = by_token.to(active), by_feature.to(directions)
        return cls(writes, directions * by_feature, active * by_token, bias=bias.detach(), skip=skip)

    @property
    def layer(self) -> int:
        """The block of the hook point."""
        return int(self.hook_name.split(".")[1])

    @property
    def _name(self) -> str:
        return self.hook_name.split(".")[2]

    def check(self, d_model: int, batch: int, length: int) -> None:
        """Raise AttributionError unless shapes fit the model and the prompts, and all numbers are finite."""
        at = [batch, length][batch == 1 and self.activations.ndim == 2 :]
        size = len(self.directions)
        shapes = {
            "directions": (size, d_model),
            "activations": (*at, size),
            "bias": (d_model,) if self.bias is not None and self.bias.ndim == 1 else (*at, d_model),
            "skip": (*at, d_model),
        }
        for name, shape in shapes.items():
            values: Tensor | None = getattr(self, name)
            if values is not None and (values.shape != shape or not values.isfinite().all()):
                given = list(values.shape)
                raise AttributionError(f"{self.hook_name}: {name} must be finite and {list(shape)}, got {given}")

    def replaces(self, part: Part) -> bool:
        """Return whether a component is part of what the hook point shows."""
        own, when = 4 * self.layer + _POINTS.index(self._name), _when(part)
        return when == own if self._name in ("hook_attn_out", "hook_mlp_out") else when < own

    def chosen(self, rows: Sequence[int]) -> list[int]:
        """Return the features that are named one by one: the largest at these rows."""
        size = _at(self.activations, rows).abs().amax(0) * self.directions.detach().cpu().double().norm(dim=1)
        order = size.argsort(descending=True, stable=True)[: self.top]
        return sorted(int(i) for i in order if size[i] > 0)

    def split(
        self,
        values: dict[Part, Float64[Tensor, "row reading"]],
        f: Float64[Tensor, "row reading d_model"],
        record: Record,
        rows: Sequence[int],
        named: Sequence[int],
        bound: float,
    ) -> dict[Part, Float64[Tensor, "row reading"]]:
        """Return `values` with the components that the hook point shows replaced by features, bias and error.

        `rows` of the activations are those of `record`; the features that are `named` get a row each.
        """
        replaced = [part for part in values if self.replaces(part)]
        if not replaced:
            raise AttributionError(f"{self.hook_name} comes later, or other features replace all of its components")
        each = torch.stack([values[part] for part in replaced])
        whole = dot(record.values[self.hook_name].double(), f)
        missing = float((each.sum(0) - whole).abs().max()) / max(float(each.abs().sum(0).max()), 1e-300)
        if not missing <= bound:
            raise AttributionError(
                f"{self.hook_name} is not the sum of the components before it: {missing:.1e} of it is left over "
                f"(rounding explains {bound:.0e})"
            )
        active = _at(self.activations, rows)
        directions = self.directions.detach().cpu().double()
        pulled = (f @ directions[list(named)].T).permute(2, 0, 1)  # [feature row reading]
        shown = pulled * active[:, list(named)].T[:, :, None]
        written = dot(active @ directions, f)
        layer, at = self.layer, f"L{self.layer} {self._name.removeprefix('hook_')}"  # "L3 resid_pre"
        parts = [Part(f"{at} feature {i}", "feature", layer, i) for i in named]
        new = dict(zip(parts, shown, strict=True))
        new[Part(f"{at} other features", "feature", layer)] = written - shown.sum(0)
        error = each.sum(0) - written
        for kind, vectors in (("decoder bias", self.bias), ("skip", self.skip)):
            if vectors is not None:
                of_rows = _at(vectors[None], [0]) if vectors.ndim == 1 else _at(vectors, rows)
                value = dot(of_rows, f).expand_as(error)
                new[Part(f"{at} {kind}", kind, layer)] = value
                error = error - value
        new[Part(f"{at} reconstruction error", "error", layer)] = error
        return new | {part: value for part, value in values.items() if part not in replaced}


def _at(values: Float[Tensor, "*batch pos _"], rows: Sequence[int]) -> Float64[Tensor, "row _"]:
    """Return values of some tokens, counted through all prompts, on the CPU."""
    return values.detach().flatten(0, -2)[torch.tensor(rows)].cpu().double()


def _factors(
    sae: Any,
    active: Float[Tensor, "*pos feature"],
    directions: Float[Tensor, "feature d_model"],
    written: Float[Tensor, "*pos d_model"],
    bias: Float[Tensor, "*pos d_model"],
) -> tuple[Float64[Tensor, "*pos 1"], Float64[Tensor, "feature 1"]]:
    """Return factors by token and by feature with which rows of W_dec add up to what a dictionary wrote."""
    whole, rows, weights = (with_float64(x).double() for x in (written, directions, active))
    limit = max(CLOSES, 4 * torch.finfo(written.dtype).eps)
    by_token, by_feature = torch.ones_like(whole[..., :1]), torch.ones_like(rows[:, :1])

    def left_over() -> float:
        expected = (weights * by_token) @ (rows * by_feature)
        return float((whole - expected).abs().max() / expected.abs().max().clamp_min(1e-30))

    def single(features: Sequence[int]) -> Float64[Tensor, " pos"]:
        """Return the factor of one feature at each of the first tokens, while no other feature is active."""
        at, of = torch.arange(len(features)), torch.tensor(features)
        alone = torch.zeros_like(active).flatten(0, -2)
        alone[at, of] = size = active.flatten(0, -2)[:, of].abs().amax(0)
        wrote = with_float64((sae.decode(alone.view_as(active)) - bias).flatten(0, -2)[at]).double()
        factor: Tensor = (wrote * rows[of]).sum(-1) / rows[of].square().sum(-1) / with_float64(size).double()
        return factor

    if not left_over() <= limit:
        used = [int(f) for f in active.flatten(0, -2).abs().amax(0).nonzero()[:, 0]]
        count = active[..., 0].numel()
        first = single(used[:1] * count)
        by_token = first.view_as(by_token)
        if not left_over() <= limit:
            for some in (used[i : i + count] for i in range(0, len(used), count)):
                by_feature[some, 0] = single(some) / first[: len(some)]
    if not (left := left_over()) <= limit:
        raise AttributionError(
            f"{type(sae).__name__}.decode is no sum of activations times factors times rows of W_dec "
            f"({left:.1e} is left over): give Features(…) the directions that it writes"
        )
    return by_token, by_feature


def _skip(sae: Any, x: Tensor, decoded: Tensor) -> Tensor | None:
    """Return what a dictionary writes besides what it decodes (a skip connection); None for nothing."""
    weights: Tensor | None = getattr(sae, "W_skip", None)
    has_output = callable(sae) and getattr(type(sae), "forward", None) is not nn.Module.forward
    if not has_output or getattr(sae, "use_error_term", False):
        return None if weights is None else (x @ weights.T).detach()
    if not isinstance(output := sae(x), Tensor) or output.shape != decoded.shape:
        return None
    rest: Tensor = (output - decoded).detach()
    if float(rest.abs().max()) <= max(CLOSES, 4 * torch.finfo(rest.dtype).eps) * float(decoded.abs().max()):
        return None
    if not any("skip" in name.lower() and getattr(sae, name, None) is not None for name in dir(sae)):
        raise AttributionError(f"{type(sae).__name__} gives another output than it decodes, and has no skip connection")
    return rest


def dictionaries(
    model: HookedModel, features: object, lengths: Sequence[int]
) -> tuple[list[Features], dict[str, nn.Module]]:
    """Return the argument `features` as a list, and their hook points by name; AttributionError if it does not fit."""
    given: Any = [] if features is None else features
    given = list(given) if isinstance(given, list | tuple) else [given]
    points = dict[str, nn.Module]()
    for one in given:
        if not isinstance(one, Features):
            raise AttributionError(f"features must be Features.of(sae, cache) or a list of them, got {type(one)}")
        if one.hook_name in points:
            raise AttributionError(f"two dictionaries at {one.hook_name}: give one of them")
        if _POINT.match(one.hook_name) is None:
            raise AttributionError(f"features at {one.hook_name!r}: give blocks.L. with one of {', '.join(_POINTS)}")
        if (point := child_of(model, *one.hook_name.split("."))) is None:
            raise AttributionError(f"the model has {len(model.blocks)} layers, and no hook point {one.hook_name}")
        one.check(int(model.cfg.d_model), len(lengths), max(lengths))
        points[one.hook_name] = point
    return given, points


def _when(part: Part) -> int:
    """Return a component's place in the pass: four steps per block, as in _POINTS; -1 for embeddings."""
    if part.layer < 0 or part.kind in ("embedding", "position"):
        return -1
    point = part.name.removeprefix(f"L{part.layer} ").split(" ")[0]
    if f"hook_{point}" in _POINTS:
        return 4 * part.layer + _POINTS.index(f"hook_{point}")
    of_attention = part.kind == "head" or part.name.endswith(" b_O") or "ln1_post" in part.name
    return 4 * part.layer + _POINTS.index("hook_attn_out" if of_attention else "hook_mlp_out")
