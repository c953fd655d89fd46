"""What to measure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ln_probe.analyses.probes.registry import DEFAULT, entries
from ln_probe.hooks.model import HookedModel, n_layers

KEYS = ("hardest", "all")


@dataclass(frozen=True)
class Settings:
    """What to measure: probes, layers and heads (None: all), rows of the `keys` table, the seed of samples, and a file
    of token strings."""

    probes: tuple[str, ...] = DEFAULT
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    keys: str = "hardest"
    max_tokens: int = 512
    seed: int = 0
    vocab: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.probes, str) or not self.probes:
            raise ValueError(f"unknown probes {self.probes!r}: give a list of {', '.join(entries())}")
        if self.keys not in KEYS:
            raise ValueError(f"keys must be one of {', '.join(KEYS)}, got {self.keys!r}")

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}

    @classmethod
    def of_plain(cls, plain: Mapping[str, Any]) -> Settings:
        """The settings that `plain` was made from; further entries are ignored."""
        values: dict[str, Any] = {f.name: plain[f.name] for f in fields(cls) if f.name in plain}
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**values)

    def check(self, model: HookedModel) -> None:
        """Raise ValueError if the model lacks a layer or a head that is asked for."""
        for what, wanted, count in (
            ("layer", self.layers, n_layers(model)),
            ("head", self.heads, int(getattr(model.cfg, "n_heads", 0))),
        ):
            wrong = [i for i in wanted or () if not 0 <= i < count]
            if wrong:
                raise ValueError(f"no {what} {wrong[0]}: the model has {what}s 0 … {count - 1}")
            if wanted is not None and not len(wanted):
                raise ValueError(f"an empty list of {what}s leaves nothing to analyze: None means all")
