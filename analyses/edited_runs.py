"""What a model loses when projection, scaling or both are taken away: the loss, the predictions, the attention.

Every norm alone, and every group of them (what attention reads, what MLPs read, the final norm, all), is run under the
four variants with scale frozen at the site's mean sigma (`ln_probe.hooks.without`). On each prompt, against the
unedited model:

    delta_loss       change of the mean next-token loss, nats
    kl               KL(unedited ‖ edited) of the next-token distributions, mean over positions, nats
    top1_agreement   share of positions with the same most likely token
    entropy_change   change of attention entropy over log(visible keys), mean over layers, heads and queries
    delta_loss_tail  delta_loss of `no_scaling` if position 0 keeps its own sigma: a frozen scale makes an attention
                     sink's vectors longer by as much as its sigma is larger (SmolLM2-135M, layer 16: +32.1 nats with
                     position 0, +0.003 without)

A prompt is held at a time, with its logits once for the unedited model and once for the edit at hand. What lies before
the first edited norm is not computed again: blocks before it return what they returned in the unedited pass.

Loss under a frozen scale: Heimersheim 2024; Baroni et al. 2025, "Transformers Don't Need LayerNorm at Inference Time".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.analyses.attention_spread import entropy_ratio
from ln_probe.hooks.edits import Change, LostEditError, installed
from ln_probe.hooks.interventions import GROUPS, make_edit, members, why_nothing
from ln_probe.hooks.masks import window_of
from ln_probe.hooks.model import HookedModel, blocks, evaluating, run, vocabulary_size
from ln_probe.hooks.sentinel import lost_edits
from ln_probe.hooks.sites import Site
from ln_probe.hooks.variants import VARIANTS, takes_projection, takes_scaling

MEASURES = ("nll", "nll_tail", "predicted", "kl", "agree", "positions", "entropy", "queries")
PROMPT_COLUMNS = ("prompt", "sites", "variant", *MEASURES, "divisor", "matched", "no_op")

_POSITIONS = 64  # whose distributions are compared at once: bounds memory at 64·vocabulary

# (site, scaling goes, projection goes): two variants that do the same to every norm are one computation.
_Signature = tuple[tuple[str, bool, bool], ...]


@dataclass(frozen=True)
class _Row:
    sites: str
    variant: str
    members: tuple[Site, ...]

    @property
    def signature(self) -> _Signature:
        """What is really taken away; empty if that is nothing, so that the unedited model is its own answer."""
        found = ((s.name, takes_scaling(s, self.variant), takes_projection(s, self.variant)) for s in self.members)
        return tuple(f for f in found if f[1] or f[2])


@dataclass
class _Unedited:
    """One prompt in the unedited model."""

    logits: Float[Tensor, "pos vocab"]
    log_probs: Float[Tensor, "pos vocab"]
    outputs: list[Any]
    entropy: dict[int, tuple[float, float]]


class EditedRuns:
    """What the causal table of one model is made of: `measure` a prompt at a time.

    Args:
        model: any hooked model.
        sites: its norms (those of some layers alone: groups then hold only these).
        constants: what replaces sigma, by site.
        matched: whether the constants are the sites' own mean sigmas.
        meaningless: why nothing that is computed from logits means anything; empty if it does.
    """

    def __init__(
        self,
        model: HookedModel,
        sites: Sequence[Site],
        constants: Mapping[str, float],
        *,
        matched: bool = True,
        meaningless: str = "",
    ) -> None:
        self.model, self.constants, self.matched, self.meaningless = model, constants, matched, meaningless
        self.lost = lost_edits(model, sites)
        self.nothing = {variant: why_nothing(model, sites, variant) for variant in VARIANTS}
        groups = [(g, tuple(members(sites, g))) for g in GROUPS]
        chosen = [(g, found) for g, found in groups if found] + [(s.name, (s,)) for s in sites]
        self.rows = [_Row(name, variant, found) for name, found in chosen for variant in VARIANTS]
        self.sites = {s.name: s for s in sites}
        self.causal: bool | None = None  # known after the first pass over more than one token
        self.outputs = vocabulary_size(model)
        self.starts: dict[str, int] = {}
        self._layers: list[Any] = [getattr(block, "attn", None) for block in blocks(model)]
        self.attentions = [
            (layer, pattern)
            for layer, block in enumerate(blocks(model))
            if (pattern := dict(_children(getattr(block, "attn", None))).get("hook_pattern")) is not None
        ]

    @property
    def no_loss(self) -> str:
        """Why the model has no next-token loss; empty if it has one. Known after the first prompt."""
        if self.causal is False:
            return "attention is bidirectional, so the model sees the tokens that a next-token loss asks for"
        if self.outputs < vocabulary_size(self.model):
            return (
                f"the model has {self.outputs} outputs for {vocabulary_size(self.model)} tokens, so no next-token loss"
            )
        return ""

    def measure(self, prompt: int, tokens: Int[Tensor, " pos"]) -> pd.DataFrame:
        """Sums over one prompt, a row per (sites, variant); columns PROMPT_COLUMNS. NaN where nothing can be said.

        What it gives depends on the prompt alone, so that prompts can be measured in any order, or elsewhere.
        """
        with evaluating(self.model), torch.no_grad():
            unedited = self._unedited(tokens)
            found: dict[_Signature, dict[str, float]] = {}
            about = {row: self._about(row) for row in self.rows}
            rows: list[dict[str, Any]] = []
            for row in self.rows:
                key = row.signature
                if key not in found:
                    lost = any(s.name in self.lost for s in row.members) and bool(key)
                    found[key] = dict.fromkeys(MEASURES, math.nan) if lost else self._effect(row, tokens, unedited)
                rows.append({"prompt": prompt, "sites": row.sites, "variant": row.variant} | found[key] | about[row])
        return pd.DataFrame(rows, columns=list(PROMPT_COLUMNS))

    def _about(self, row: _Row) -> dict[str, Any]:
        """What is known of a row without running it; `no_op`: why nothing changes at any member, empty if it does."""
        reasons = [self.nothing[row.variant].get(s.name, "") for s in row.members]
        alone = row.members[0] if len(row.members) == 1 else None
        return {
            "divisor": self.constants[alone.name] if alone and takes_scaling(alone, row.variant) else math.nan,
            "matched": self.matched,
            "no_op": "; ".join(sorted(set(reasons))) if all(reasons) else "",
        }

    def notes(self) -> list[str]:
        """What a reader has to know about this model; complete once a prompt was measured."""
        said = [f"causal: {reason}" for reason in self.lost.values()]
        if any("ignores the mean" in reason for reason in self.nothing["no_projection"].values()):
            said.append(
                "causal: the weights that read these norms are centred (folding the norms does that), so a model "
                "without projection is the same by construction: load it unfolded to learn what projection does"
            )
        if self.meaningless:
            said.append(f"causal: losses, KL and top-1 agreement are left out: {self.meaningless}")
        elif self.no_loss:
            said.append(f"causal: losses are left out: {self.no_loss}")
        return said

    def _unedited(self, tokens: Int[Tensor, " pos"]) -> _Unedited:
        entropy: dict[int, tuple[float, float]] = {}
        outputs: list[Any] = []
        running = 0  # blocks that have started
        starts: dict[str, int] = {}

        def started(_m: nn.Module, _args: Any) -> None:
            nonlocal running
            running += 1

        def done(_m: nn.Module, _args: Any, output: Any) -> None:
            outputs.append(output)

        def norm(name: str) -> Callable[..., None]:
            def hook(_m: nn.Module, _args: Any, _output: Any) -> None:
                inside = len(outputs) < running
                starts.setdefault(name, running - 1 if inside else running)

            return hook

        with ExitStack() as stack:
            for block in blocks(self.model):
                stack.callback(block.register_forward_pre_hook(started).remove)
                stack.callback(block.register_forward_hook(done).remove)
            for site in self.sites.values():
                stack.callback(site.module.register_forward_hook(norm(site.name)).remove)
            stack.enter_context(self._watching(entropy))
            logits = self._logits(tokens)
        self.starts = starts
        if len(outputs) != len(blocks(self.model)):  # blocks that run twice, or not at all, cannot be passed over
            outputs = []
        self.outputs = int(logits.shape[-1])
        return _Unedited(logits, logits.log_softmax(-1), outputs, entropy)

    def _effect(self, row: _Row, tokens: Int[Tensor, " pos"], unedited: _Unedited) -> dict[str, float]:
        """The sums of one row on one prompt."""
        if not row.signature:
            found = self._compare(tokens, unedited, unedited.logits, unedited.entropy)
            return found | {"nll_tail": found["nll"]}
        logits, entropy = self._edited(row, tokens, unedited)
        found = self._compare(tokens, unedited, logits, entropy)
        tail = math.nan
        if row.variant == "no_scaling" and not self.no_loss:
            tail = self._nll(tokens, self._edited(row, tokens, unedited, keep_first=True)[0])
        return found | {"nll_tail": tail}

    def _edited(
        self, row: _Row, tokens: Int[Tensor, " pos"], unedited: _Unedited, *, keep_first: bool = False
    ) -> tuple[Float[Tensor, "pos vocab"], dict[int, tuple[float, float]]]:
        """Logits and entropies of one prompt under the row's edit, position 0 left intact if `keep_first`."""
        start = min(self.starts.get(s.name, 0) for s in row.members) if unedited.outputs else 0
        entropy = {layer: sums for layer, sums in unedited.entropy.items() if layer < start}
        edits = [make_edit(s, row.variant, self.constants.get(s.name)) for s in row.members]
        for edit in edits if keep_first else ():
            edit.change = _keeping_first(edit.site, edit.change, len(tokens))
        with (
            _passed_over(blocks(self.model)[:start], unedited.outputs),
            installed(self.model, edits),
            self._watching(entropy),
        ):
            logits = self._logits(tokens)
        if idle := next((e for e in edits if not e.calls), None):
            raise LostEditError(f"{idle.site.name}: the edit was lost, because its block was passed over")
        return logits, entropy

    def _logits(self, tokens: Int[Tensor, " pos"]) -> Float[Tensor, "pos vocab"]:
        logits: Tensor = run(self.model, tokens[None], return_type="logits")[0].detach()
        return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()

    @contextmanager
    def _watching(self, entropy: dict[int, tuple[float, float]]) -> Iterator[None]:
        """Sum and count of entropy ratios over heads and queries, by layer, of what attention pays meanwhile."""

        def hook(layer: int) -> Callable[..., None]:
            def add(_m: nn.Module, _args: Any, pattern: Tensor) -> None:
                paid = pattern.detach()[0]
                ratios = self._entropies(paid, window_of(self._layers[layer], paid))
                entropy[layer] = float(ratios.sum()), float(ratios.numel())

            return add

        with ExitStack() as stack:
            for layer, module in self.attentions:
                stack.callback(module.register_forward_hook(hook(layer)).remove)
            yield

    def _entropies(self, pattern: Float[Tensor, "head query key"], window: int | None) -> Float[Tensor, "head later"]:
        """Of queries that had a choice: all but the first, or all in a bidirectional model."""
        wide = pattern if pattern.dtype in (torch.float32, torch.float64) else pattern.float()
        if self.causal is None or self.causal:
            if self.causal is None and len(pattern[0]) > 1:
                self.causal = not bool(pattern.triu(1).any())
            if self.causal is not False:
                return entropy_ratio(wide, window=window)[:, 1:]
        entropy: Tensor = torch.special.entr(wide).sum(-1) / math.log(pattern.shape[-1])
        return entropy

    def _compare(
        self, tokens: Int[Tensor, " pos"], unedited: _Unedited, logits: Tensor, entropy: dict[int, tuple[float, float]]
    ) -> dict[str, float]:
        sums = {"kl": 0.0, "agree": 0.0}
        for at in range(0, len(logits), _POSITIONS):
            rows = slice(at, at + _POSITIONS)
            p, q = unedited.log_probs[rows], logits[rows].log_softmax(-1)
            finite = bool(torch.isfinite(q).all())
            sums["kl"] += float((p.exp() * (p - q)).sum(dtype=torch.float64)) if finite else math.nan
            same = unedited.logits[rows].argmax(-1) == logits[rows].argmax(-1)
            sums["agree"] += float(same.sum()) if finite else math.nan
        if self.meaningless:
            sums["kl"] = sums["agree"] = math.nan
        total, queries = (sum(e[i] for e in entropy.values()) for i in (0, 1))
        return sums | {
            "nll": self._nll(tokens, logits), "predicted": float(len(tokens) - 1), "positions": float(len(logits)),
            "entropy": total if queries else math.nan, "queries": queries,
        }  # fmt: skip

    def _nll(self, tokens: Int[Tensor, " pos"], logits: Float[Tensor, "pos vocab"]) -> float:
        """Sum over tokens of the next-token loss, nats; NaN if the model has none."""
        if self.no_loss or self.meaningless:
            return math.nan
        after = tokens[1:].to(logits.device)
        total = 0.0
        for rows, wanted in zip(logits[:-1].split(_POSITIONS), after.split(_POSITIONS), strict=True):
            total += float(F.cross_entropy(rows, wanted, reduction="none").sum(dtype=torch.float64))
        return total


def _keeping_first(site: Site, change: Change, length: int) -> Change:
    """The same change everywhere but at position 0, for one prompt of this length."""

    def kept(x: Tensor, y: Tensor) -> Tensor:
        out = change(x, y).clone(memory_format=torch.contiguous_format)
        if y.ndim == 4 and site.reads in ("query", "key") and y.shape[2] == length:  # inside a bridge: heads first
            out[:, :, 0] = y[:, :, 0]
        else:
            first = y.numel() // (site.d * length)  # rows of position 0: one, or one a head
            out.view(-1, site.d)[:first] = y.reshape(-1, site.d)[:first]
        return out

    return kept


def _children(module: Any) -> Iterator[tuple[str, nn.Module]]:
    return module.named_children() if isinstance(module, nn.Module) else iter(())


@contextmanager
def _passed_over(skipped: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """While it lasts these blocks compute nothing and return what they returned before."""

    def returning(output: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: output

    own = [block.__dict__.get("forward") for block in skipped]
    for block, output in zip(skipped, outputs, strict=False):
        block.__dict__["forward"] = returning(output)  # not setattr: a bridge hands that on to what it wraps
    try:
        yield
    finally:
        for block, before in zip(skipped, own, strict=True):
            del block.__dict__["forward"]
            if before is not None:
                block.__dict__["forward"] = before
