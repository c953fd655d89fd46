"""How the loss changes when one head alone reads its norm without a term: exactly, and to first order for all heads.

Of one head: its queries, keys and values are made of the edited norm's output, so what it hands on (z) changes; nothing
else does. One pass gives every head's z and edited z and the gradient of the loss at z:

    estimate = sum over positions of <d loss / d z, z_edited - z>

(attribution patching: Nanda 2023; Kramár et al. 2024), and a pass more for each head and term the loss itself. Those
passes run side by side, a row of a batch for each, from the block of the head on: blocks before it return what they
returned in the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn

from ln_probe.analyses.shared_passes import passed_over
from ln_probe.hooks.default_tokens import CALIBRATION, UnsampledError, default_tokens
from ln_probe.hooks.edits import Change, HeadEdit, LostEditError, attention_of, by_head, head_count, z_instead, z_point
from ln_probe.hooks.interventions import lost_edits, why_nothing
from ln_probe.hooks.model import HookedModel, blocks, device_of, evaluating, run, vocabulary_size
from ln_probe.hooks.norm import Site
from ln_probe.hooks.objective import Objective
from ln_probe.hooks.scales import Constant
from ln_probe.hooks.variants import make_edit

EDITED = ("no_scaling", "no_projection", "neither")
COLUMNS = ("prompt", "layer", "head", "variant", "nll", "estimate", "intact", "predicted", "no_op")

# Up to this many (weights of the blocks × heads) every head is run exactly; beyond, the LEADING by their estimates.
# A unit of it costs some 40 multiplications a token (half a pass for each of three terms, and what lies around it):
# 64 heads of lm-layernorm are 5e7 and take 1.3 s of one core for a prompt of 128 tokens, MGM's 64 are 4e8, GPT-2
# small's 144 are 1.2e10.
EXACT_WORK = 1e9
LEADING = 8
CHOOSING = (
    2  # calibration prompts that tell which heads lead: not those that are measured, so nothing is selected twice
)
_LOGITS = 1 << 25  # numbers of logits held at once: 128 MB in float32


@dataclass
class _First:
    """One prompt in the unedited model."""

    outputs: list[Any] = field(default_factory=list)
    z: dict[int, Tensor] = field(default_factory=dict)
    edited: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    gradient: dict[int, Tensor] = field(default_factory=dict)
    nll: float = math.nan


class HeadRuns:
    """Effects of single heads in one model: `measure` a prompt at a time.

    Args:
        model: any hooked model.
        sites: its norms.
        constants: what replaces sigma, by site; or a function that gives this for the number of a prompt
            (`Constants.of`).
        pooled: the constants that leading heads are chosen with; None: `constants`, which are then the same for all.
        layers, heads: looked at (heads None: all).
        exact: (layer, head) that are run exactly; None: as EXACT_WORK says. Empty: estimates alone.
        objective: the loss.
        meaningless: why nothing that is computed from logits means anything; empty if it does.

    Raises:
        ValueError: `exact` names a head that is not there.
    """

    def __init__(
        self,
        model: HookedModel,
        sites: Sequence[Site],
        constants: Mapping[str, Constant] | Callable[[int], Mapping[str, Constant]],
        *,
        layers: Sequence[int],
        pooled: Mapping[str, Constant] | None = None,
        heads: Sequence[int] | None = None,
        exact: Collection[tuple[int, int]] | None = None,
        objective: Objective | None = None,
        meaningless: str = "",
    ) -> None:
        self.model = model
        self.objective = Objective() if objective is None else objective
        self.constants_of = constants if callable(constants) else lambda _prompt: constants
        if pooled is None:
            assert not callable(constants), "constants of each prompt come with pooled ones"
            pooled = constants
        self.constants: Mapping[str, Constant] = pooled  # of the prompt that is measured
        reading = {layer: s for s in sites for layer in s.attention_layers if s.name in pooled}
        self.sites = {layer: reading[layer] for layer in sorted(set(layers) & set(reading))}
        self.heads = {
            layer: [h for h in range(head_count(model, layer)) if heads is None or h in heads] for layer in self.sites
        }
        self.nothing = {v: why_nothing(model, list(self.sites.values()), v) for v in EDITED}
        self.lost: dict[str, str] = {}
        self.silent = meaningless or (self.objective.obstacle(model) if self.sites else "")
        self.exact: frozenset[tuple[int, int]] = frozenset()
        self.asked_for = exact is not None
        if self.sites and not self.silent:
            by_site: dict[str, dict[int, list[int]]] = {}
            for layer, site in self.sites.items():
                by_site.setdefault(site.name, {})[layer] = self.heads[layer]

            def make(site: Site, change: Change, label: str) -> HeadEdit:
                return HeadEdit(site, change, label, heads=by_site[site.name])

            try:
                self.lost = lost_edits(model, list(dict.fromkeys(self.sites.values())), make=make)
            except LostEditError as error:  # of all heads alike: no site is to blame
                self.silent = str(error)
        if self.sites and not self.silent:
            there = {(layer, head) for layer, heads in self.heads.items() for head in heads}
            if exact is not None and (unknown := sorted(set(exact) - there)):
                raise ValueError(f"exact: {unknown[0]} is no (layer, head) that is looked at")
            self.exact = frozenset(self._chosen() if exact is None else exact)

    def _chosen(self) -> list[tuple[int, int]]:
        every = [(layer, head) for layer, heads in self.heads.items() for head in heads]
        weights = sum(p.numel() for block in blocks(self.model) for p in block.parameters())
        if len(every) * weights <= EXACT_WORK:
            return every
        sums: dict[tuple[int, int, str], float] = {}
        try:
            other = default_tokens(self.model, CALIBRATION)[:CHOOSING]
        except UnsampledError:  # no prompts but the measured ones, which must not choose: estimates alone
            return []
        for tokens in other:
            for row in self._measure(0, tokens).to_dict("records"):
                key = (int(row["layer"]), int(row["head"]), str(row["variant"]))
                sums[key] = sums.get(key, 0.0) + float(row["estimate"])
        size = {pair: max(abs(sums.get((*pair, v), 0.0)) for v in EDITED) for pair in every}
        return sorted(every, key=lambda pair: -size[pair])[:LEADING]

    def notes(self) -> list[str]:
        """What a reader has to know about this model."""
        said = [f"head_effects: {reason}" for reason in self.lost.values()]
        if self.silent:
            return [f"head_effects: nothing was measured: {self.silent}"]
        every = sum(map(len, self.heads.values()))
        if self.exact and len(self.exact) < every:
            which = f"those with the largest estimates on {CHOOSING} calibration prompts"
            said.append(
                f"head_effects: {len(self.exact)} of {every} heads were run exactly, "
                f"{'those asked for' if self.asked_for else which}; the others are estimated"
            )
        return said

    def measure(self, prompt: int, tokens: Int[Tensor, " pos"]) -> pd.DataFrame:
        """Sums over one prompt, a row per (layer, head, variant); columns COLUMNS.

        `nll` and `intact`: of the edited and the unedited model; `estimate`: of their difference. What it gives depends
        on the prompt and the constants alone.
        """
        self.constants = self.constants_of(prompt)
        return self._measure(prompt, tokens)

    def _measure(self, prompt: int, tokens: Int[Tensor, " pos"]) -> pd.DataFrame:
        if self.silent or len(tokens) < 2 or not self.sites:
            return pd.DataFrame(columns=list(COLUMNS))
        with evaluating(self.model):
            first = self._first(tokens)
            exact = self._exact(tokens, first)
        rows: list[tuple[Any, ...]] = []
        for layer, site in self.sites.items():
            for variant in EDITED:
                no_op = self.nothing[variant].get(site.name, "")
                change = None if no_op else first.edited[layer, variant] - first.z[layer]
                for head in self.heads[layer]:
                    estimate, nll = 0.0, first.nll
                    if change is not None:
                        estimate = float((first.gradient[layer][:, head] * change[:, head]).sum(dtype=torch.float64))
                        nll = exact.get((layer, head, variant), math.nan)
                    elif (layer, head) not in self.exact:
                        nll = math.nan
                    if site.name in self.lost:
                        estimate = nll = math.nan
                    weight = self.objective.weight(tokens)
                    rows.append((prompt, layer, head, variant, nll, estimate, first.nll, weight, no_op))
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def _first(self, tokens: Int[Tensor, " pos"]) -> _First:
        found = _First()
        read: dict[str, list[tuple[Tensor, Tensor]]] = {}
        inside = False
        shifts: dict[int, Tensor] = {}

        def norm(site: Site, _m: nn.Module, args: Any, kwargs: Any, y: Tensor) -> None:
            if not inside:
                x = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
                read.setdefault(site.name, []).append((x.detach(), y.detach()))

        def attention(layer: int, site: Site, _m: nn.Module, args: Any, kwargs: Any) -> None:
            nonlocal inside
            for variant in EDITED:
                if self.nothing[variant].get(site.name):
                    continue
                inside = True
                try:
                    with torch.no_grad():
                        z = z_instead(self.model, layer, args, kwargs, self._instead(site, variant, read[site.name]))
                finally:
                    inside = False
                if z is None:  # (what `lost_edits` has found out before)
                    raise ValueError(f"{site.name}: the attention of block {layer} does not read this norm's output")
                found.edited[layer, variant] = by_head(z, head_count(self.model, layer))[0]

        def handed_on(layer: int, _m: nn.Module, _args: Any, z: Tensor) -> Tensor | None:
            if inside:
                return None
            shifts[layer] = torch.zeros_like(z, requires_grad=True)
            found.z[layer] = by_head(z.detach(), head_count(self.model, layer))[0]
            return z + shifts[layer]

        def done(_m: nn.Module, _args: Any, output: Any) -> None:
            found.outputs.append(_mapped(Tensor.detach, output))

        with ExitStack() as stack:
            for layer, site in self.sites.items():
                attn, point = attention_of(self.model, layer), z_point(self.model, layer)
                stack.callback(site.module.register_forward_hook(partial(norm, site), with_kwargs=True).remove)
                before = attn.register_forward_pre_hook(partial(attention, layer, site), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(point.register_forward_hook(partial(handed_on, layer)).remove)
            for block in blocks(self.model):
                stack.callback(block.register_forward_hook(done).remove)
            with torch.enable_grad():
                row = tokens[None].to(device_of(self.model))
                loss = self.objective.sums(self.model(row, return_type="logits"), row).sum()
            gradients = torch.autograd.grad(loss, list(shifts.values()))
        found.nll = float(loss.detach())
        for layer, gradient in zip(shifts, gradients, strict=True):
            found.gradient[layer] = by_head(gradient, head_count(self.model, layer))[0]
        if len(found.outputs) != len(blocks(self.model)):  # blocks that run twice, or not at all, cannot be passed over
            found.outputs = []
        return found

    def _instead(self, site: Site, variant: str, read: Sequence[tuple[Tensor, Tensor]]) -> Any:
        def instead(given: Tensor) -> Tensor | None:
            for x, y in reversed(read):
                if given.shape == y.shape and torch.equal(given, y):
                    return make_edit(site, variant, self.constants[site.name]).change(x, y)
            return None

        return instead

    def _exact(self, tokens: Int[Tensor, " pos"], first: _First) -> dict[tuple[int, int, str], float]:
        found: dict[tuple[int, int, str], float] = {}
        at_once = max(1, _LOGITS // (len(tokens) * vocabulary_size(self.model)))
        for layer in self.sites:
            wanted = [
                (h, v)
                for h in self.heads[layer]
                if (layer, h) in self.exact
                for v in EDITED
                if (layer, v) in first.edited
            ]
            for at in range(0, len(wanted), at_once):
                some = wanted[at : at + at_once]
                for (head, variant), nll in zip(some, self._losses(tokens, first, layer, some), strict=True):
                    found[layer, head, variant] = nll
        return found

    def _losses(
        self, tokens: Int[Tensor, " pos"], first: _First, layer: int, rows: Sequence[tuple[int, str]]
    ) -> list[float]:
        """The summed loss of the prompt with one head edited, for each of (head, variant)."""

        def replaced(_m: nn.Module, _args: Any, z: Tensor) -> Tensor:
            out = z.clone(memory_format=torch.contiguous_format)
            heads = by_head(out, head_count(self.model, layer))
            for row, (head, variant) in enumerate(rows):
                heads[row, :, head] = first.edited[layer, variant][:, head]
            return out

        start = layer if first.outputs else 0
        with (
            passed_over(blocks(self.model)[:start], first.outputs, len(rows)),
            _hooked(z_point(self.model, layer), replaced),
        ):
            batch = tokens.expand(len(rows), -1).to(device_of(self.model))
            output = run(self.model, batch, return_type="logits")
        return [float(x) for x in self.objective.sums(output, batch)]


def _hooked(module: nn.Module, hook: Any) -> ExitStack:
    stack = ExitStack()
    stack.callback(module.register_forward_hook(hook).remove)
    return stack


def _mapped(change: Any, output: Any) -> Any:
    """A block's output with every tensor of it changed."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        return type(output)(_mapped(change, part) for part in output)
    return output
