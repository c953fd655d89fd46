"""Measure a forward pass one layer at a time, and read prompts out of activation caches.

`stream` runs one prompt and gives every norm's input and output and every attention layer's input and pattern to
callbacks during the pass. At most one layer is in memory at once, so peak memory stays near that of a bare forward pass
(a full activation cache of GPT-2 small at 512 tokens takes 986 MB instead). `stream_together` runs several prompts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ln_probe.hooks.components import (
    END,
    Record,
    SplitError,
    Wiring,
    record,
    watched,
)
from ln_probe.hooks.model import (
    Hook,
    HookedModel,
    attentions,
    child_of,
    flat,
    hooks_on,
    n_layers,
    run,
    tensors_in,
)
from ln_probe.hooks.norm import Norm, is_heads_first

# How attention layers call themselves when they see every key before a query (HookedTransformer and GPT-Neo; the layer
# types of newer Hugging Face configs).
_GLOBAL = ("global", "full_attention")


@functools.lru_cache(maxsize=16)
def visible_keys(
    queries: int, keys: int, *, causal: bool = True, window: int | None = None, device: torch.device | None = None
) -> Bool[Tensor, "query key"]:
    """What each of the last `queries` of `keys` positions sees; not to be changed, since it is kept.

    Args:
        causal: only keys at or before the query.
        window: of these only the last `window`, the query's own among them; None: all.
    """
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        every = every.tril(keys - queries)
    return every if window is None else every.triu(keys - queries - window + 1)


_TABLES = ("hook_cos", "hook_sin")  # hook points that show rotary tables


def is_causal(pattern: Float[Tensor, "head query key"]) -> bool:
    """Return whether no query pays attention to a later key: the first one, which has nothing else to look at."""
    return not bool(pattern[:, 0, 1:].any())


def window_of(attn: nn.Module, pattern: Float[Tensor, "head query key"]) -> int | None:
    """How many keys a query of this layer sees at most, itself included; None if every key before it, or if the prompt
    of this pattern fits into the window and does not show it."""
    length = pattern.shape[-1]
    for window in _declared(attn):
        if window >= length:
            return None
        if not bool(pattern.tril(-window).any()):
            return window
    return None


def _declared(attn: Any) -> list[int]:
    """Windows that a layer may have, by its own word first."""
    owners = [o for o in (getattr(attn, "original_component", None), attn) if o is not None]
    for owner in owners:
        kinds = (getattr(owner, name, None) for name in ("attn_type", "attention_type", "layer_type"))
        if any(kind in _GLOBAL for kind in kinds if isinstance(kind, str)):
            return []
        if getattr(owner, "is_sliding", None) is False:
            return []
    configs = [c for o in owners for c in (getattr(o, "cfg", None), getattr(o, "config", None)) if c is not None]
    windows = [getattr(o, name, None) for o in (*owners, *configs) for name in ("sliding_window", "window_size")]
    return sorted({w for w in windows if isinstance(w, int) and not isinstance(w, bool) and w > 0})


class ActivationError(ValueError):
    """NaN or infinite values in a forward pass (names the site)."""


@dataclass(frozen=True, eq=False)
class AttentionInput:
    """One attention layer during one prompt.

    Attributes:
        layer: block index.
        x: input of the norm that attention reads, [pos d_model]; of an identity, what attention reads.
        y: that norm's output, [pos d_model]: what attention reads.
        pattern: attention paid, [head query key].
        cos_sin: rotary tables [pos rotary_dim] each where the pass showed them (bridge), else None.
        attn: the attention module.
        norm: the norm that it reads, or the identity where it reads the stream.
    """

    layer: int
    x: Float[Tensor, "pos d_model"]
    y: Float[Tensor, "pos d_model"]
    pattern: Float[Tensor, "head query key"]
    cos_sin: tuple[Tensor, Tensor] | None
    attn: nn.Module
    norm: Norm

    @functools.cached_property
    def causal(self) -> bool:
        """Whether no query paid attention to a later key."""
        return is_causal(self.pattern)

    @functools.cached_property
    def window(self) -> int | None:
        """How many keys a query sees at most, its own included; None: every key before it, or all."""
        return window_of(self.attn, self.pattern)


# From the number of a prompt, a norm, its input and its output; and from the number of a prompt and a layer.
OnNorm = Callable[[int, Norm, Float[Tensor, "pos d"], Float[Tensor, "pos d"]], None]
OnAttention = Callable[[int, AttentionInput], None]


def _check_finite(norm: Norm, value: Float[Tensor, "rows d"], what: str, length: int) -> None:
    # A sum with NaN or infinity in it is not finite; looking at every entry takes ten times as long.
    if not torch.isfinite(value.sum(dtype=torch.float32)) and not torch.isfinite(value).all():
        row = int((~torch.isfinite(value)).any(-1).nonzero()[0])  # of a position, heads stand together
        at = row * length // len(value)
        raise ActivationError(
            f"{norm.name}: its {what} holds NaN or infinite values (first at position {at}); the model's weights "
            "or precision are the likely cause: try dtype='float32', or check the checkpoint"
        )


def _by_prompt(norm: Norm, value: Tensor, batch: int, length: int) -> Float[Tensor, "batch rows d"]:
    """Return the rows of each prompt, position 0 first: norms inside a bridge's attention see [batch head pos d_head],
    and some see all of it in one line."""
    if value.ndim == 4 and is_heads_first(norm, value, length):
        value = value.transpose(1, 2)
    return value.reshape(batch, -1, norm.d)  # heads of a position stand together


class _Pass:
    """One forward pass: what the layer that is running has shown, and the callbacks."""

    def __init__(
        self,
        model: HookedModel,
        norms: Sequence[Norm],
        shape: tuple[int, int],
        on_norm: OnNorm | None,
        on_attention: OnAttention | None,
        layers: Collection[int] | None,
    ) -> None:
        self.shape, self.on_norm, self.on_attention = shape, on_norm, on_attention
        self.norm_of = {layer: n for n in norms for layer in n.attention_layers}
        # Of the layer that is running, the input and output of the norm that it reads; and what its points showed.
        self.running: dict[int, tuple[Tensor, Tensor, dict[str, Tensor]]] = {}
        self.done: set[str] = set()
        # Where attention reads the stream itself there is no norm's module: the input of attention is read.
        self.after: list[Hook] = [(n.module, partial(self._norm, n)) for n in norms if not n.is_identity]
        self.before: list[Hook] = []
        self.attentions = attentions(model) if on_attention is not None else {}
        if layers is not None:
            self.attentions = {layer: attn for layer, attn in self.attentions.items() if layer in layers}
        for layer, attn in self.attentions.items():
            norm = self.norm_of.get(layer)
            if norm is not None and norm.is_identity:
                self.before.append((attn, partial(self._stream, layer, norm)))
            children = dict(attn.named_children())
            shown = [name for name in ("hook_pattern", *_TABLES) if name in children]
            self.after += [(children[name], partial(self._show, layer, name)) for name in shown]
            self.after.append((attn, partial(self._attention, layer)))

    def _norm(self, norm: Norm, _m: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if norm.name in self.done:
            return
        self.done.add(norm.name)
        x, y = tensors_in(args, kwargs)[0].detach(), output.detach()
        if x.ndim == 4 and norm.reads not in ("query", "key"):  # an input for each head: all the same
            x, y = x[:, :, 0], y[:, :, 0]
        xs, ys = _by_prompt(norm, x, *self.shape), _by_prompt(norm, y, *self.shape)
        for prompt in range(len(xs)):
            _check_finite(norm, xs[prompt], "input", self.shape[1])
            _check_finite(norm, ys[prompt], "output", self.shape[1])
            if self.on_norm is not None:
                self.on_norm(prompt, norm, xs[prompt], ys[prompt])
        self.running |= {layer: (xs, ys, {}) for layer in norm.attention_layers if layer in self.attentions}

    def _stream(self, layer: int, norm: Norm, _m: nn.Module, args: Any, kwargs: Any) -> None:
        given = (t.detach() for t in tensors_in(args, kwargs) if t.shape[-1:] == (norm.d,) and t.ndim in (3, 4))
        if (x := next(given, None)) is not None:
            # (of the first head, where each has its own input: `use_split_qkv_input`)
            x = x if x.ndim == 3 else x[:, :, 0]
            for prompt in x:
                _check_finite(norm, prompt, "input", len(prompt))
            self.running[layer] = x, x, {}

    def _show(self, layer: int, name: str, _m: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> None:
        if layer in self.running:
            self.running[layer][2][name] = output.detach()

    def _attention(self, layer: int, attn: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        if layer not in self.running:
            return
        xs, ys, seen = self.running.pop(layer)
        if "hook_pattern" not in seen or self.on_attention is None:
            return
        for prompt in range(len(xs)):
            pattern, cos_sin = seen["hook_pattern"][prompt], _tables_of(seen, prompt, self.shape[1])
            look = AttentionInput(layer, xs[prompt], ys[prompt], pattern, cos_sin, attn, self.norm_of[layer])
            self.on_attention(prompt, look)


def _tables_of(shown: Mapping[str, Tensor], prompt: int, length: int) -> tuple[Tensor, Tensor] | None:
    """Return the rotary tables of one prompt, where they were shown (for all prompts at once, or for each)."""
    if not all(name in shown for name in _TABLES):
        return None
    cos, sin = (shown[name][min(prompt, len(shown[name]) - 1), :length] for name in _TABLES)
    return cos, sin


def stream(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    norms: Sequence[Norm],
    *,
    on_norm: Callable[[Norm, Float[Tensor, "pos d"], Float[Tensor, "pos d"]], None] | None = None,
    on_attention: Callable[[AttentionInput], None] | None = None,
    layers: Collection[int] | None = None,
) -> None:
    """Run one prompt: `stream_together`, but the callbacks get no number of a prompt."""
    stream_together(
        model,
        tokens[None],
        norms,
        on_norm=None if on_norm is None else lambda _, *seen: on_norm(*seen),
        on_attention=None if on_attention is None else lambda _, seen: on_attention(seen),
        layers=layers,
    )


def stream_together(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    norms: Sequence[Norm],
    *,
    on_norm: OnNorm | None = None,
    on_attention: OnAttention | None = None,
    layers: Collection[int] | None = None,
) -> None:
    """Run several prompts of equal length in one pass, with callbacks at every norm and attention layer.

    Callbacks come a layer at a time: of all prompts in their order, then of the next layer.

    Args:
        model: any hooked model.
        tokens: of each prompt.
        norms: the model's norms (`find_norms`), and identities where they are wanted (`attention_inputs`).
        on_norm: gets the number of a prompt, a norm, and its input and output, once per pass, however often the norm is
            called. Norms inside attention come flattened over heads, [pos·head d_head].
        on_attention: gets the number of a prompt and an `AttentionInput` when a layer's attention has run.
        layers: attention layers wanted; None means all.

    Raises:
        ActivationError: a norm's input or output is not finite.
    """
    watch = _Pass(model, norms, (int(tokens.shape[0]), int(tokens.shape[1])), on_norm, on_attention, layers)
    with hooks_on(watch.after, watch.before):
        run(model, tokens)


def record_attention(
    model: HookedModel,
    tokens: Int[Tensor, "batch pos"],
    norms: Sequence[Norm],
    read: Mapping[int, Norm],
    points: Mapping[str, nn.Module],
) -> tuple[Record, dict[int, list[AttentionInput]]]:
    """One forward pass: `record` at every position, and what attention of some layers did in each prompt; `read`: the
    layers, and the norm that each reads."""
    attended: dict[int, list[AttentionInput]] = {layer: [] for layer in read}
    asked, shape = list(dict.fromkeys(read.values())), (int(tokens.shape[0]), int(tokens.shape[1]))
    watch = _Pass(model, asked, shape, None, lambda _, seen: attended[seen.layer].append(seen), list(read))
    with hooks_on(watch.after, watch.before):
        recorded = record(model, tokens, range(tokens.numel()), norms, points=points, logits=False)
    return recorded, attended


# ---------------------------------------------------------------------------------------- activation caches


def is_cache(given: object) -> bool:
    """Return whether something is a cache of activations by name (an ActivationCache or a dict)."""
    return isinstance(given, Mapping) or (hasattr(given, "cache_dict") and hasattr(given, "keys"))


class CachedPrompts:
    """The prompts of an activation cache that was taken without a `names_filter`.

    Raises:
        SplitError: it is of another model.
    """

    def __init__(self, model: HookedModel, cache: Any) -> None:
        if getattr(cache, "model", model) is not model:
            raise SplitError("the cache is of another model, which writes other parts: run this model, or pass tokens")
        batched = bool(getattr(cache, "has_batch_dim", True))
        values = ((name, value.detach()) for name, value in cache.items() if isinstance(value, Tensor))
        self.model = model
        self._values = {name: value if batched else value[None] for name, value in values}

    def _value(self, *names: str) -> Float[Tensor, "batch pos *wide"]:
        """Return the first of these activations that is in the cache."""
        if (name := next((n for n in names if n in self._values), None)) is None:
            raise SplitError(f"the cache lacks {names[0]!r}: take the cache without a names_filter, or pass tokens")
        return self._values[name]

    def _rows(self, *names: str) -> Float[Tensor, "row wide"]:
        batch, length = self.shape()
        return flat(self._value(*names), length, batch)

    def rows(self, name: str) -> Float[Tensor, "row wide"] | None:
        """Return an activation, a row per position of one prompt after the other; None if the cache lacks it."""
        return self._rows(name) if name in self._values else None

    def shape(self) -> tuple[int, int]:
        """Return how many prompts there are, and positions of each.

        Raises:
            SplitError: the cache does not hold the embeddings.
        """
        value = self._value("embed.hook_out", "hook_embed")
        return len(value), int(value.shape[1])

    def record(self, positions: Sequence[int], wiring: Wiring, place: str, points: Collection[str] = ()) -> Record:
        """Return what is needed to divide what is read at `place` among its parts, as `components.record` does.

        Raises:
            SplitError: the cache lacks something, by name.
        """
        rows, passed = torch.tensor(positions), (*wiring.norms_within(place), place)
        wanted = {source for at in passed for source in wiring.at(at)}
        seen = {}
        for source, module in watched(self.model):
            if source in wanted:  # (an MLP without an output map is no hook point)
                name = str(module.name) if hasattr(module, "fwd_hooks") else f"blocks.{source.layer}.mlp.hook_out"
                seen[source] = self._rows(name, f"blocks.{source.layer}.hook_mlp_out")[rows].cpu()
        inputs = {name: self._input(name)[rows].cpu() for name in passed}
        shown = {name: self._rows(name)[rows].cpu() for name in points}
        return Record(seen, inputs, {}, None, next(iter(inputs.values())).dtype, shown)

    def attention(self, norm: Norm, layer: int, place: str) -> list[AttentionInput]:
        """Return what the attention of a layer did in each prompt; `place`: what `norm` reads.

        Raises:
            SplitError: the cache lacks something, by name.
        """
        (batch, length), attn = self.shape(), f"blocks.{layer}.attn"
        x, pattern = self._input(place), self._value(f"{attn}.hook_pattern")
        y = x if norm.is_identity else norm.affine(self._rows(f"{norm.name}.hook_normalized"))
        names = {n: [m for m in (f"{attn}.{n}", f"rotary_emb.{n}") if m in self._values] for n in _TABLES}
        shown = {n: self._value(*present) for n, present in names.items() if present}
        xs, ys, module = x.view(batch, length, -1), y.view(batch, length, -1), attentions(self.model)[layer]
        return [
            AttentionInput(layer, xs[i], ys[i], pattern[i], _tables_of(shown, i, length), module, norm)
            for i in range(batch)
        ]

    def _input(self, place: str) -> Float[Tensor, "row wide"]:
        """Return what is read at a place."""
        last, (block, _, leaf) = f"blocks.{n_layers(self.model) - 1}.hook_resid_post", place.rpartition(".")
        if place == END:
            reader = "unembed" if child_of(self.model, "project_out") is None else "project_out"
            return self._rows(f"{reader}.hook_in", last)
        residual = {"ln1": "hook_resid_pre", "ln2": "hook_resid_mid"}.get(leaf)  # of a HookedTransformer
        return self._rows(f"{place}.hook_in", f"{block}.{residual}" if block else last)
