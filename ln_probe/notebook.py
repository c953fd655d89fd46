"""A notebook widget that runs a model live: type a text, switch terms of its norms off, see what changes."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from ln_probe.analyses.arguments import check_text
from ln_probe.analyses.text import shortened, visible
from ln_probe.exhibits import to_bytes
from ln_probe.hooks import find_sites, without
from ln_probe.hooks.interventions import NoOpWarning
from ln_probe.hooks.model import check_model, missing_head
from ln_probe.page import own_script
from ln_probe.prompts import make_prompts, namer
from ln_probe.seal import hooked_model

MOST_TOKENS = 64  # a pattern of more has cells too small to see
TOP = 6  # likeliest next tokens listed, of the intact and of the edited model
_PATTERN = re.compile(r"blocks\.(\d+)\.attn\.hook_pattern")
_INSTALL = "the widget needs anywidget, which is not installed: pip install 'ln-probe[notebook]'"


@dataclass(frozen=True, eq=False)
class Pass:
    """One pass of a model over a text.

    Attributes:
        patterns: attention as `ln_probe.exhibits.to_bytes` stores it, of the layers that have any.
        layers: their block indices.
        log_probs: of every token, behind each position.
        loss: mean next-token loss in nats/token; NaN with one token.
    """

    patterns: UInt8[np.ndarray, "layer head query key"]
    layers: tuple[int, ...]
    log_probs: Float[Tensor, "pos vocab"]
    loss: float


@dataclass(eq=False)
class LiveModel:
    """A model, its norms by layer, and the constants that replace their sigmas; what the widget runs.

    Attributes:
        groups: names of norms by what a switch is called: "layer 0", …, "final norm".
        constants: by name of norm, from the model's default prompts; empty where none scales.
    """

    model: Any
    groups: dict[str, list[str]] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.hooked = check_model(self.model)
        if why := missing_head(self.hooked):
            raise ValueError(f"the widget shows next-token predictions, which this model has not: {why}")
        for site in find_sites(self.model):
            name = f"layer {site.layer}" if site.layer < self.hooked.cfg.n_layers else "final norm"
            self.groups.setdefault(name, []).append(site.name)
        if self.groups:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NoOpWarning)
                with without(self.hooked, "scaling", sites="all") as done:
                    self.constants = done.divisors
                # What entering finds out about the norms is kept on the model, so that the first switch is fast too.
                with without(self.hooked, "projection", sites="all"):
                    pass

    def tokens(self, text: str) -> tuple[Int[Tensor, " pos"], list[str]]:
        """Return the ids and strings of a text's first MOST_TOKENS tokens.

        Raises:
            ValueError: a text without tokens, or a model without a tokenizer.
        """
        ids = make_prompts(self.hooked, [text], max_tokens=MOST_TOKENS).tokens[0]
        name = namer(self.hooked)
        return ids, [shortened(visible(name(i)), 30) for i in ids.tolist()]

    def run(
        self, ids: Int[Tensor, " pos"], scaling: Collection[str] = (), projection: Collection[str] = ()
    ) -> tuple[Pass, dict[str, str]]:
        """Run the model with scaling frozen and projection removed in groups of norms.

        Args:
            ids: token ids.
            scaling, projection: names of groups.

        Returns:
            The pass, and why an edit changes nothing at some norms.
        """
        no_ops: dict[str, str] = {}
        terms = {"both": set(scaling) & set(projection)}
        terms |= {"scaling": set(scaling) - terms["both"], "projection": set(projection) - terms["both"]}
        with ExitStack() as stack, warnings.catch_warnings():
            warnings.simplefilter("ignore", NoOpWarning)
            for what, chosen in terms.items():
                if sites := [s for name, names in self.groups.items() if name in chosen for s in names]:
                    scale = {s: self.constants.get(s, 1.0) for s in sites}
                    no_ops |= stack.enter_context(without(self.hooked, what, sites=sites, scale=scale)).no_ops
            return self._pass(ids), no_ops

    def _pass(self, ids: Int[Tensor, " pos"]) -> Pass:
        seen: dict[int, np.ndarray] = {}

        def keep(value: Tensor, hook: Any) -> None:
            if found := _PATTERN.fullmatch(str(hook.name)):
                seen[int(found[1])] = to_bytes(value[0].float().cpu().numpy())

        hooks = [(lambda name: _PATTERN.fullmatch(name) is not None, keep)]
        with torch.no_grad():
            logits = cast(Any, self.hooked).run_with_hooks(ids[None], return_type="logits", fwd_hooks=hooks)
        log_probs = logits[0].float().cpu().log_softmax(-1)
        right = log_probs[:-1].gather(1, ids[1:, None].cpu())
        layers = tuple(sorted(seen))
        patterns = np.stack([seen[layer] for layer in layers]) if layers else np.zeros((0, 0, 0, 0), np.uint8)
        return Pass(patterns, layers, log_probs, float(-right.mean()) if len(right) else float("nan"))


def next_tokens(intact: Pass, edited: Pass, position: int, name: Any) -> list[tuple[str, float, float]]:
    """Return the likeliest tokens behind a position: each with its probability, intact and edited."""
    before, after = (p.log_probs[position] for p in (intact, edited))
    ids = dict.fromkeys(i for row in (before, after) for i in row.topk(min(TOP, len(row))).indices.tolist())
    found = [(shortened(visible(name(i)), 30), float(before[i].exp()), float(after[i].exp())) for i in ids]
    return sorted(found, key=lambda row: -max(row[1:]))


def explore(model: object, text: str = "The ships came home.", *, tokenizer: Any = None) -> Any:
    """Show a widget in which a model runs live: type a text and switch terms of its norms off, layer by layer.

    It shows attention of any head, the loss and the next-token distribution, of the intact model and with scaling
    frozen (mean constants of the model's default prompts) or projection removed where switches say so
    (`ln_probe.hooks.without`). The model is unchanged afterwards.

    Args:
        model: HookedTransformer, TransformerBridge or lab model with a tokenizer, or a Hugging Face model in memory.
        text: the text at the beginning; its first MOST_TOKENS tokens are used.
        tokenizer: of a Hugging Face model.

    Returns:
        An anywidget. Its traits `text`, `scaling`, `projection` (names of groups, as in `.groups`), `layer`, `head` and
        `position` can be set from Python.

    Raises:
        ImportError: anywidget is not installed (`pip install 'ln-probe[notebook]'`).
        TypeError: not a TransformerLens model, or a text that is none.
        ValueError: a model without a tokenizer or without next-token predictions, or a text without tokens.

    Example:
        >>> widget = ln_probe.explore(model, "In the beginning")
        >>> widget.scaling = ["layer 0"]
    """
    check_text("text", text)
    made = _widget_class()
    live = LiveModel(hooked_model(model, tokenizer)[0])
    live.tokens(text)
    return made(live, text)


@cache
def _widget_class() -> Any:
    """Define the widget, where anywidget is installed."""
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise ImportError(_INSTALL) from error

    class Explorer(anywidget.AnyWidget):
        """A live model in a notebook; see `explore`."""

        _esm = own_script("shades.js", "panel.js", "widget.js")
        _css = own_script("widget.css")
        text = traitlets.Unicode().tag(sync=True)
        groups: Any = traitlets.List().tag(sync=True)
        scaling: Any = traitlets.List().tag(sync=True)
        projection: Any = traitlets.List().tag(sync=True)
        layer = traitlets.Int(0).tag(sync=True)
        head = traitlets.Int(0).tag(sync=True)
        position = traitlets.Int(-1).tag(sync=True)
        intact = traitlets.Dict().tag(sync=True)
        edited = traitlets.Dict().tag(sync=True)
        following: Any = traitlets.List().tag(sync=True)
        problem = traitlets.Unicode().tag(sync=True)

        def __init__(self, live: LiveModel, text: str) -> None:
            self._live, self._passes = live, ()
            super().__init__(text=text, groups=list(live.groups))
            self.observe(self._typed, "text")
            self.observe(self._switched, ["scaling", "projection"])
            self.observe(self._pointed, "position")
            self._typed()

        def _typed(self, _change: object = None) -> None:
            try:
                self._ids, names = self._live.tokens(self.text)
            except ValueError as error:
                self.problem = str(error)
                return
            self._intact, _ = self._live.run(self._ids)
            self._edited = self._intact
            self.intact = _sent(self._intact) | {"tokens": names}
            self.position = len(names) - 1
            self._switched()

        def _switched(self, _change: object = None) -> None:
            began = time.perf_counter()
            if unknown := [g for g in (*self.scaling, *self.projection) if g not in self._live.groups]:
                self.problem = f"no norms are called {unknown[0]!r}: there are {', '.join(self._live.groups)}"
                return
            self._edited, no_ops = self._live.run(self._ids, self.scaling, self.projection)
            notes = "; ".join(f"{site}: {why}" for site, why in no_ops.items())
            milliseconds = round(1000 * (time.perf_counter() - began))
            self.edited = _sent(self._edited) | {"notes": notes, "milliseconds": milliseconds}
            self._pointed()

        def _pointed(self, _change: object = None) -> None:
            if not -len(self._ids) <= self.position < len(self._ids):
                self.problem = f"position {self.position} is not in a text of {len(self._ids)} tokens"
                return
            name = namer(self._live.hooked)
            rows: Sequence[Any] = next_tokens(self._intact, self._edited, self.position, name)
            self.following = [list(row) for row in rows]
            self.problem = ""

    return Explorer


def _sent(found: Pass) -> dict[str, Any]:
    """Return a pass as the widget's script reads it."""
    loss = found.loss if np.isfinite(found.loss) else None
    heads = found.patterns.shape[1]
    return {"patterns": found.patterns.tobytes(), "layers": list(found.layers), "heads": heads, "loss": loss}
