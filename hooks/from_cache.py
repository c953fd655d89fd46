"""What every part wrote, read out of an `ActivationCache` instead of a pass of our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ln_probe.hooks.model import HookedModel, n_layers
from ln_probe.hooks.recorded import Record, outside_attention
from ln_probe.hooks.site import Site
from ln_probe.hooks.wiring import END, Wiring
from ln_probe.hooks.writes import SplitError, watched

REMEDY = "take the cache without a names_filter, or pass tokens instead"


def is_cache(given: object) -> bool:
    """Whether something is a cache of activations by name (an ActivationCache or a dict)."""
    return isinstance(given, Mapping) or (hasattr(given, "cache_dict") and hasattr(given, "keys"))


class CachedPrompt:
    """One prompt of a cache.

    Raises:
        SplitError: it is of another model, or holds several prompts.
    """

    def __init__(self, model: HookedModel, cache: Any) -> None:
        if (of := getattr(cache, "model", model)) is not model:
            raise SplitError(
                f"the cache is of another model ({type(of).__name__} at {id(of):#x}, not {type(model).__name__} at "
                f"{id(model):#x}): a folded or centred copy writes other parts. Run this model, or pass tokens"
            )
        self.model, self._values = model, dict(cache.items())
        self._batched = bool(getattr(cache, "has_batch_dim", True))
        first = next((v for v in self._values.values() if isinstance(v, Tensor) and v.is_floating_point()), None)
        if first is None:
            raise SplitError(f"the cache holds no activations: {REMEDY}")
        if self._batched and len(first) != 1:
            raise SplitError(
                f"the cache holds {len(first)} prompts: attribution is of one; run one, or pass its tokens"
            )

    def _rows(self, names: Sequence[str]) -> Float[Tensor, "pos wide"] | None:
        """The first of these names that is there, a row per position."""
        value = next((self._values[n] for n in names if isinstance(self._values.get(n), Tensor)), None)
        if value is None:
            return None
        value = value.detach()
        found: Tensor = value[0] if self._batched else value
        return found.reshape(found.shape[0], -1)

    def length(self) -> int:
        """Positions of the prompt.

        Raises:
            SplitError: the cache does not hold the embeddings.
        """
        return len(self._needed(["embed.hook_out", "hook_embed", "blocks.0.hook_resid_pre", "blocks.0.hook_in"]))

    def _needed(self, names: Sequence[str]) -> Float[Tensor, "pos wide"]:
        found = self._rows(names)
        if found is None:
            raise SplitError(f"the cache lacks {names[0]!r}: {REMEDY}")
        return found

    def _sources(self, wiring: Wiring, place: str) -> Iterator[tuple[Any, list[str]]]:
        wanted = {s for at in (*wiring.norms_within(place), place) for s in wiring.at(at)}
        post = any(s.name.endswith("ln2_post") for s in self.model_sites)
        for source, module in watched(self.model):
            if source not in wanted:
                continue
            names = [str(module.name)] if getattr(module, "name", None) else []
            if source.kind == "mlp" and not post:  # (behind a post-norm `hook_mlp_out` is the norm's output)
                names.append(f"blocks.{source.layer}.hook_mlp_out")
            yield source, names or [f"blocks.{source.layer}.mlp.hook_out"]

    model_sites: Sequence[Site] = ()

    def record(self, positions: Sequence[int], sites: Sequence[Site], wiring: Wiring, place: str) -> Record:
        """What is needed to divide what is read at `place` among its parts.

        Raises:
            SplitError: the cache lacks something, by name.
        """
        self.model_sites = outside_attention(sites)
        rows = torch.tensor(positions)
        seen = {source: self._needed(names)[rows].cpu() for source, names in self._sources(wiring, place)}
        inputs = {name: self._needed(self._input_of(name))[rows].cpu() for name in (*wiring.norms_within(place), place)}
        return Record(seen, inputs, {}, None, next(iter(inputs.values())).dtype)

    def _input_of(self, place: str) -> list[str]:
        last = f"blocks.{n_layers(self.model) - 1}"
        if place == END:
            return ["unembed.hook_in", f"{last}.hook_resid_post", f"{last}.hook_out"]
        block = place.rsplit(".", 1)[0]
        stream = {"ln1": "hook_resid_pre", "ln2": "hook_resid_mid"}.get(place.rsplit(".", 1)[-1], "")
        found = [f"{place}.hook_in"]
        if any(s.attention_layers and s.layer not in s.attention_layers for s in self.model_sites):
            return found  # norms behind attention and MLP: no point of the stream is what they read
        if block != place and stream:
            found.append(f"{block}.{stream}")
        return found if block != place else [*found, f"{last}.hook_resid_post"]

    def normalized(self, place: str, position: int) -> Float[Tensor, " d"] | None:
        """What the norm there put out before gain and bias, as the pass had it; None if it is not in the cache."""
        found = self._rows([f"{place}.hook_normalized"])
        return None if found is None else found[position].double().cpu()
