"""Edits that some readers of a norm see: single heads, or queries, keys or values.

Columns of `hook_q`, `hook_k` and `hook_v` are replaced by what the edited norm gives there, y W + b. The norm itself
stays intact for its other readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ln_probe.hooks.model import HookedModel, attention_of, child_of, edits_on, head_count, hooks_on, z_point
from ln_probe.hooks.norm_edits import (
    CACHES,
    Edit,
    Held,
    InterventionError,
    Leaf,
    LostEditError,
    NormEdit,
    add_hook,
    edited_output,
)


@dataclass(frozen=True)
class Readers:
    """The readers of some norms that see an edit.

    Attributes:
        letters: of the hook points: "qkv", or one of them.
        heads: the heads by the norm's name and block; None: all heads of the block.
    """

    letters: str
    heads: Mapping[str, Mapping[int, tuple[int, ...] | None]]

    @property
    def kind(self) -> tuple[object, ...]:
        """What tells these readers from others."""
        return self.letters, tuple(sorted((n, tuple(by_layer.items())) for n, by_layer in self.heads.items()))


class HeadEdit(Edit):
    """An edit of one norm that some readers see.

    Args:
        readers: of all edited norms.
        edit: what they see.
    """

    def __init__(self, readers: Readers, edit: NormEdit | Leaf) -> None:
        super().__init__(edit.norm, edit.label)
        self.edit = edit
        self.letters, self.heads = readers.letters, readers.heads[edit.norm.name]
        self.output = torch.zeros(0)  # of the edited norm
        self._replaced: set[str] = set()

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any], bool]]:
        return iter(())

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        super().install(model, stack)
        self.edit.positions = self.positions
        shortformer = getattr(model.cfg, "positional_embedding_type", "") == "shortformer"
        for layer, heads in self.heads.items():
            attn = attention_of(model, layer)
            for letter in self.letters:
                point = child_of(attn, f"hook_{letter}")
                if point is None or _weight(attn, letter) is None or (shortformer and letter != "v"):
                    raise InterventionError(
                        f"block {layer} makes its {letter} of more than one norm's output: edit the whole norm"
                    )
                add_hook(point, partial(self._replace, model, layer, letter, heads), stack, prepend=True)
            stack.callback(attn.register_forward_pre_hook(self._enter).remove)
            stack.callback(attn.register_forward_hook(self._leave).remove)

    def _end(self, *hook: Any) -> None:
        y: Tensor = hook[2]
        if self.suspended:
            return
        self.calls += 1
        if isinstance(self.edit, Leaf):
            self.output = self.edit.add(y)
            return
        linear = next((e for e in edits_on(self.norm.module) if isinstance(e, Held)), None)
        sigma = None if linear is None else linear.sigma(self.x)
        self.output = edited_output(self.norm, self.edit, self.x, sigma=sigma).to(y.dtype)

    def _enter(self, *_: object) -> None:
        self._replaced = set()

    def _leave(self, *_: object) -> None:
        if not self.suspended and self._replaced != set(self.letters):
            raise LostEditError(f"{self.norm.name}: {self.label} was lost: attention ran without its hook points")

    def _replace(
        self, model: HookedModel, layer: int, letter: str, heads: Sequence[int] | None, value: Tensor, hook: Any
    ) -> Tensor:
        """Replace the columns of some heads by those of the edited norm."""
        self._replaced.add(letter)
        attn = attention_of(model, layer)
        W, b = _weight(attn, letter), _weight(attn, letter, bias=True)
        assert W is not None
        out = value if value.ndim == 4 else value.unflatten(-1, (-1, W.shape[-1]))
        if self.output.ndim != 3 or self.output.shape[:2] != out.shape[:2]:
            raise LostEditError(f"{self.norm.name}: {self.label} was lost: attention reads it split by head")
        own = out.shape[2]  # fewer heads of keys and values than of queries, where these share them
        group = head_count(model, layer) // own
        # A bridge shows the weights of a shared key once for each of its queries.
        step = len(W) // own
        columns = torch.einsum("bpd,hde->bphe", self.output.to(W.dtype), W[::step])
        columns = (
            columns if b is None else columns + b.view(-1, W.shape[-1])[:: max(1, b.numel() // W.shape[-1] // own)]
        )
        if heads is not None:
            seen = torch.zeros(own, dtype=torch.bool, device=out.device)
            seen[[head // group for head in heads]] = True
            columns = torch.where(seen[:, None], columns.to(out.dtype), out)
        return columns.to(out.dtype).reshape(value.shape)


def _weight(attn: nn.Module, letter: str, *, bias: bool = False) -> Tensor | None:
    """Return the weight or bias of a projection, which gradients reach; None where there is none."""
    try:
        value = getattr(attn, f"{'b' if bias else 'W'}_{letter.upper()}", None)
    except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    return value if isinstance(value, Tensor) and value.ndim >= (1 if bias else 3) else None


def z_of(
    model: HookedModel,
    layer: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    read: Float[Tensor, "batch pos d"],
    instead: Float[Tensor, "batch pos d"],
) -> Float[Tensor, "batch pos *heads"] | None:
    """Return the heads' outputs of a block if its attention, called with these arguments, read another tensor.

    Args:
        args, kwargs: of attention's call.
        read: the tensor among them that is replaced; `instead`: by this one.

    Returns:
        z; None if attention does not read the tensor.
    """

    def changed(value: Any) -> Any:
        same = isinstance(value, Tensor) and value.shape == read.shape and torch.equal(value, read)
        return instead if same else value

    own, named = tuple(map(changed, args)), {name: changed(value) for name, value in kwargs.items()}
    if all(new is old for new, old in zip((*own, *named.values()), (*args, *kwargs.values()), strict=True)):
        return None
    named.update({name: None for name in CACHES if name in named})  # keys of this call must not be kept
    outputs: list[Tensor] = []
    point = z_point(model, layer)
    with hooks_on([(point, lambda _m, _a, _k, z: outputs.append(z))]):
        attention_of(model, layer).forward(*own, **named)
    return outputs[0] if outputs else None
