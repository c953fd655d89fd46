"""Measure a forward pass one layer at a time.

`stream` runs one prompt and gives every norm's input and output and every attention layer's input and pattern to
callbacks during the pass; `streaming` does so for a pass of several prompts that the caller runs. At most one layer is
in memory at once, so peak memory stays near that of a bare forward pass (a full activation cache of GPT-2 small at 512
tokens takes 986 MB instead).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ln_probe.hooks.model import Hook, HookedModel, attentions, hooks_on, run, tensors_in, with_float64
from ln_probe.hooks.norm import Norm, is_heads_first

# What attention layers that see every key before a query are called (HookedTransformer and GPT-Neo; the layer
# types of newer Hugging Face configs).
_GLOBAL = ("global", "full_attention")
TABLES = ("hook_cos", "hook_sin")  # hook points that show rotary tables


@lru_cache(maxsize=16)
def visible_keys(
    queries: int, keys: int, *, causal: bool = True, window: int | None = None, device: torch.device | None = None
) -> Bool[Tensor, "query key"]:
    """Return what each of the last `queries` of `keys` positions sees, cached: do not change it.

    Args:
        causal: only keys at or before the query.
        window: only the last `window` of these, the query's own included; None: all.
    """
    every = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        every = every.tril(keys - queries)
    return every if window is None else every.triu(keys - queries - window + 1)


def configs_of(attn: nn.Module) -> list[Any]:
    """Return the configurations of an attention layer and of the layer that a bridge wraps."""
    owners = (attn, getattr(attn, "original_component", None))
    configs = (getattr(owner, name, None) for owner in owners for name in ("cfg", "config"))
    return [config for config in configs if config is not None]


def _declared_windows(attn: nn.Module) -> list[int]:
    """Return the windows that a layer's settings name, the smallest first."""
    owners = (attn, getattr(attn, "original_component", None))
    kinds = (getattr(owner, name, None) for owner in owners for name in ("attn_type", "attention_type", "layer_type"))
    sees_all = any(kind in _GLOBAL for kind in kinds if isinstance(kind, str))
    if sees_all or any(getattr(owner, "is_sliding", None) is False for owner in owners):
        return []
    holders = (*owners, *configs_of(attn))
    windows = [getattr(holder, name, None) for holder in holders for name in ("sliding_window", "window_size")]
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

    @cached_property
    def causal(self) -> bool:
        """Whether the first query paid no attention to later keys, which are all but its own."""
        return not bool(self.pattern[:, 0, 1:].any())

    @cached_property
    def window(self) -> int | None:
        """How many keys a query sees at most, its own included; None where no window limits it in this prompt."""
        windows = (w for w in _declared_windows(self.attn) if w < len(self.x))
        return next((w for w in windows if not bool(self.pattern.tril(-w).any())), None)


# Callbacks: of a norm, with the number of the prompt, its input and output; of attention, with the prompt's number.
OnNorm = Callable[[int, Norm, Float[Tensor, "pos d"], Float[Tensor, "pos d"]], None]
OnAttention = Callable[[int, AttentionInput], None]


def _check_finite(norm: Norm, value: Float[Tensor, "rows d"], what: str, length: int) -> None:
    # A sum with NaN or infinity in it is not finite; checking every entry takes ten times as long.
    if not torch.isfinite(value.sum(dtype=torch.float32)) and not torch.isfinite(value).all():
        row = int((~torch.isfinite(value)).any(-1).nonzero()[0])  # by position, each with its heads
        raise ActivationError(
            f"{norm.name}: its {what} holds NaN or infinite values (first at position {row * length // len(value)}); "
            "try dtype='float32', or check the checkpoint's weights"
        )


def _by_prompt(norm: Norm, value: Tensor, batch: int, length: int) -> Float[Tensor, "batch rows d"]:
    """Return the rows of each prompt, position 0 first: norms inside a bridge's attention see [batch head pos d_head],
    and some see all of it in one line."""
    if value.ndim == 4 and is_heads_first(norm, value, length):
        value = value.transpose(1, 2)
    return value.reshape(batch, -1, norm.d)  # position by position, each with its heads


def rotary_tables(points: Mapping[str, Tensor], prompt: int, length: int) -> tuple[Tensor, Tensor] | None:
    """Return the rotary tables of one prompt, where points showed them (for all prompts at once, or for each)."""
    if not all(name in points for name in TABLES):
        return None
    cos, sin = (points[name][min(prompt, len(points[name]) - 1), :length] for name in TABLES)
    return with_float64(cos), with_float64(sin)


@contextmanager
def streaming(
    attentions: Mapping[int, nn.Module],
    tokens: Int[Tensor, "batch pos"],
    norms: Sequence[Norm],
    on_norm: OnNorm | None = None,
    on_attention: OnAttention | None = None,
    layers: Collection[int] | None = None,
) -> Iterator[None]:
    """Call back at every norm and attention layer of the one pass that runs inside the `with` block.

    Callbacks come a layer at a time: of all prompts in their order, then of the next layer.

    Args:
        attentions: the model's attention layers (`model.attentions`).
        tokens: of the pass.
        norms: the model's norms (`find_norms`), and identities where they are wanted.
        on_norm: gets the number of a prompt, a norm, and its input and output, once per pass, however often the norm is
            called. Norms inside attention come flattened over heads, [pos·head d_head].
        on_attention: gets the number of a prompt and an `AttentionInput` when a layer's attention has run.
        layers: attention layers wanted; None means all.

    Raises:
        ActivationError: a norm's input or output is not finite.
    """
    batch, length = tokens.shape
    attended = {} if on_attention is None else attentions
    wanted = [layer for layer in attended if layers is None or layer in layers]
    norm_of = {layer: norm for norm in norms for layer in norm.attention_layers if layer in wanted}
    # By layer, while it runs: the input and output of the norm that it reads, and values of its hook points.
    running: dict[int, tuple[Tensor, Tensor, dict[str, Tensor]]] = {}
    norms_seen: set[str] = set()

    def after_norm(norm: Norm, _m: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if norm.name in norms_seen:  # (HookedTransformer calls a norm for queries, keys and values)
            return
        norms_seen.add(norm.name)
        x, y = tensors_in(args, kwargs)[0].detach(), output.detach()
        if x.ndim == 4 and norm.reads not in ("query", "key"):  # an input for each head: all the same
            x, y = x[:, :, 0], y[:, :, 0]
        xs, ys = _by_prompt(norm, x, batch, length), _by_prompt(norm, y, batch, length)
        for prompt in range(batch):
            _check_finite(norm, xs[prompt], "input", length)
            _check_finite(norm, ys[prompt], "output", length)
            if on_norm is not None:
                on_norm(prompt, norm, xs[prompt], ys[prompt])
        running.update({layer: (xs, ys, {}) for layer in norm.attention_layers if layer in norm_of})

    def before_attention(layer: int, norm: Norm, _m: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = (t.detach() for t in tensors_in(args, kwargs) if t.shape[-1:] == (norm.d,) and t.ndim in (3, 4))
        if (x := next(inputs, None)) is not None:
            x = x if x.ndim == 3 else x[:, :, 0]  # an input for each head: all the same
            for prompt in x:
                _check_finite(norm, prompt, "input", length)
            running[layer] = x, x, {}

    def after_point(layer: int, name: str, _m: nn.Module, _args: Any, _kwargs: Any, output: Tensor) -> None:
        if layer in running:
            running[layer][2][name] = output.detach()

    def after_attention(layer: int, attn: nn.Module, _args: Any, _kwargs: Any, _output: Any) -> None:
        if layer not in running or on_attention is None:
            return
        xs, ys, points = running.pop(layer)
        for prompt, pattern in enumerate(points.get("hook_pattern", ())):
            x, y, pattern = (with_float64(value) for value in (xs[prompt], ys[prompt], pattern))
            cos_sin = rotary_tables(points, prompt, length)
            seen = AttentionInput(layer, x, y, pattern, cos_sin, attn, norm_of[layer])
            on_attention(prompt, seen)

    after: list[Hook] = [(norm.module, partial(after_norm, norm)) for norm in norms if not norm.is_identity]
    before: list[Hook] = []
    for layer, norm in norm_of.items():
        attn = attended[layer]
        if norm.is_identity:  # there is no norm's module: the input of attention is read
            before.append((attn, partial(before_attention, layer, norm)))
        points = [(name, child) for name, child in attn.named_children() if name in ("hook_pattern", *TABLES)]
        after += [(point, partial(after_point, layer, name)) for name, point in points]
        after.append((attn, partial(after_attention, layer)))
    with hooks_on(after, before):
        yield


def stream(
    model: HookedModel,
    tokens: Int[Tensor, " pos"],
    norms: Sequence[Norm],
    *,
    on_norm: Callable[[Norm, Float[Tensor, "pos d"], Float[Tensor, "pos d"]], None] | None = None,
    on_attention: Callable[[AttentionInput], None] | None = None,
    layers: Collection[int] | None = None,
) -> None:
    """Run one prompt and call back as `streaming` does, without the number of a prompt."""
    by_norm = None if on_norm is None else lambda _, *seen: on_norm(*seen)
    by_layer = None if on_attention is None else lambda _, seen: on_attention(seen)
    with streaming(attentions(model.blocks), tokens[None], norms, by_norm, by_layer, layers):
        run(model, tokens[None])
