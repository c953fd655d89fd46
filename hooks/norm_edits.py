"""The hooks behind `without` and `linearized`: permanent TransformerLens hooks at a norm's hook points.

`NormEdit` removes terms of a norm at `hook_scale` and `hook_normalized`, `LinearEdit` holds its sigma. `HeadEdit`
replaces columns of `hook_q`, `hook_k` and `hook_v`, for an edit that only some readers see. `installed` puts edits on
a model. Hooks of users see the values of `NormEdit`, and what they return is used. Every pass checks that hooks of the
edits were called. Modules of a Hugging Face model in memory have no hook points: their outputs are replaced.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ln_probe.hooks.model import (
    SAME_LOGITS,
    HookedModel,
    at_least_float32,
    child_of,
    edits_on,
    head_count,
    hooks_on,
    hugging_face_classes,
    live_weight,
    register_edit,
    relative_difference,
    tensors_in,
    z_point,
)
from ln_probe.hooks.norm import VARIANTS, Norm, affine, bias_of, gain_of, is_heads_first

# Settings of a model that change how attention reads its norm.
_FLAGS = ("use_split_qkv_input", "use_attn_in")
_INPUTS = ("input", "input_ids", "inputs_embeds", "hidden_states")
# Arguments of attention to keep keys and values in: Hugging Face's, HookedTransformer's.
_CACHES = ("past_key_values", "layer_past", "past_kv_cache_entry")
# What a bridge says when a hook changes what a norm divides by: here that is what is asked for.
_BRIDGE_RECOMPUTES = "(A forward hook edited|Backward hooks on) hook_scale/hook_normalized"


class InterventionError(ValueError):
    """An intervention that cannot be made, or that would be made twice."""


class LostEditError(InterventionError):
    """An edit that does not reach what the model computes (names the norm)."""


# -------------------------------------------------------------------- positions


class Positions:
    """Which vectors of a norm belong to position 0, which has a constant of its own.

    A norm is given tensors, not positions. `installed` has the model and its first block tell where each forward pass
    begins: at position 0, behind a cache of earlier tokens (`generate`), or behind padding on the left. A norm that is
    called outside a pass, on a part of it, or in a pass that starts at a later layer, has no vector of position 0.
    """

    def __init__(self) -> None:
        self.depth = 0  # calls of the model that are running, one inside the other
        self.is_running = self.is_whole = False  # a pass runs; through all layers
        self.offset = 0  # tokens that came in earlier passes
        self.shape: tuple[int, ...] = ()  # batch and positions of the pass
        self.padding: Tensor | None = None  # in front of each row of the batch
        self.restarts: Tensor | None = None  # where position_ids begin again in a row of several texts

    def begin(self, shape: tuple[int, ...] = ()) -> None:
        """Note that a pass begins, at position 0 if nothing else is said."""
        self.is_running, self.is_whole = True, False
        self.shape, self.offset, self.padding, self.restarts = shape, 0, None, None

    def first(self, norm: Norm, x: Float[Tensor, "*batch d"]) -> Bool[Tensor, "*batch 1"]:
        """Return which vectors of a norm's input belong to position 0.

        Inputs are [batch pos d], [batch pos head d], [batch head pos d] (a norm of queries or keys inside a bridge's
        attention) or flattened from those.
        """
        shape = x.shape[:2] if x.ndim == 3 else self.shape
        if not shape or self.shape not in ((), shape) or not (self.is_running or _is_checkpointed()):
            return torch.zeros((*x.shape[:-1], 1), dtype=torch.bool, device=x.device)
        batch, length = shape
        start = 0 if self.padding is None else self.padding[:batch, None].to(x.device)
        positions = torch.arange(self.offset, self.offset + length, device=x.device)
        first = (positions[None] == start).expand(batch, -1)
        if self.restarts is not None:
            first = first | self.restarts[:batch].to(x.device)
        if x.ndim == 4:
            first = first[:, None, :, None] if is_heads_first(norm, x, length) else first[:, :, None, None]
        elif x.ndim == 3:
            first = first[:, :, None]
        else:
            heads = max(1, x.shape[0] // max(1, first.numel()))
            first = first.flatten().repeat_interleave(heads)[:, None]
        return first.expand(*x.shape[:-1], 1)

    def enter(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_block: bool) -> bool:
        """Note what a call of the model or its first block says; return whether a pass begins."""
        if is_block and not self.depth and _is_checkpointed():
            return False  # (the positions are those of the pass that runs again)
        self.depth += not is_block
        # The outermost call of the model; or block 0, where HookedTransformer.generate has called `forward` alone.
        begins = self.depth == 0 if is_block else self.depth == 1
        if begins:
            self.begin()
            self.is_running = kwargs.get("start_at_layer") is None
            self.is_whole = not is_block and self.is_running and kwargs.get("stop_at_layer") is None
        inputs = (*args[:1], *(kwargs.get(name) for name in _INPUTS))
        if (x := next((v for v in inputs if isinstance(v, Tensor) and v.ndim >= 2), None)) is not None:
            self.shape = tuple(x.shape[:2])
        ids = kwargs.get("position_ids")
        if isinstance(ids, Tensor) and ids.ndim == 2:
            self.restarts = F.pad(ids[:, 1:] <= ids[:, :-1], (1, 0))
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.padding = (mask != 0).long().argmax(-1)
        cache, entry = kwargs.get("past_key_values"), kwargs.get("past_kv_cache_entry")
        if not is_block and cache is not None:
            self.offset = int(cache.get_seq_length())
        elif entry is not None:
            self.offset = int(entry.past_keys.shape[1])
        return begins

    def leave(self, calls: int) -> None:
        """Note the end of a pass: of one call of the model, or (calls=0) of `forward` alone, at the unembedding."""
        self.depth -= calls
        self.is_running = self.depth > 0


def _is_checkpointed() -> bool:
    """Return whether torch.utils.checkpoint has called what is running."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


# ------------------------------------------------------------ edits of one norm


class Edit:
    """Hooks that change what one norm computes, or what some of its readers get."""

    def __init__(self, norm: Norm, label: str) -> None:
        self.norm, self.label = norm, label  # (the label is for messages)
        self.positions = Positions()  # of the pass that is running
        self.x = torch.zeros(0)  # the input of the norm's running call
        self.calls, self.least_calls = 0, 1  # in this pass, and in a whole one that applies it
        self.suspended = False  # whether the model runs without it (`unedited`)
        self._order: list[tuple[nn.Module, int, bool]] = []

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield hook points of the norm, and what to call there before hooks of users."""
        raise NotImplementedError

    def plain_hooks(self, record_at: str = "hook_scale") -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield the hook points and hooks for passes that begin at position 0, without `installed`."""

        def record(x: Tensor, hook: Any) -> None:
            self.x = x
            self.positions.begin(tuple(x.shape[:2]))

        yield record_at, record
        yield from self.hooks()

    def install(self, stack: ExitStack) -> None:
        """Put the hooks on; `stack` takes them off, whatever else has happened to the hook points."""
        module, points = self.norm.module, self.norm.module._modules
        if "hook_scale" in points:
            stack.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            if "hook_in" in points:
                self._add(points["hook_in"], self._record_input, stack, is_first=False)
            for name, hook in self.hooks():
                self._add(points[name], hook, stack)
        else:
            stack.callback(module.register_forward_hook(self._replace_output, with_kwargs=True).remove)
        register_edit(module, self, stack)

    def _add(self, point: Any, hook: Callable[..., Any], stack: ExitStack, *, is_first: bool = True) -> None:
        """Add a permanent hook to a hook point, before or after those of users; `stack` removes it."""
        point.add_hook(hook, is_permanent=True, prepend=is_first)
        handle = point.fwd_hooks[0 if is_first else -1]
        self._order.append((point, handle.hook.id, is_first))

        def remove() -> None:
            handle.hook.remove()
            point.fwd_hooks = [each for each in point.fwd_hooks if each is not handle]

        stack.callback(remove)

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the norm's input. Users may have added hooks: the edit's run last at `hook_in`, first elsewhere."""
        if self.suspended:
            return
        self.x = tensors_in(args, kwargs)[0]
        for point, key, is_first in self._order:
            if key not in point._forward_hooks:
                raise self.lost("its hook was removed inside the block")
            cast(Any, point._forward_hooks).move_to_end(key, last=not is_first)

    def _record_input(self, x: Tensor, hook: Any) -> None:
        self.x = x.reshape(self.x.shape)  # (hook points of some bridges show it in another shape)

    def _replace_output(self, module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        if self.suspended:
            return y
        self.x, self.calls = tensors_in(args, kwargs)[0], self.calls + 1
        removal, linear = edit_on(module, NormEdit), edit_on(module, LinearEdit)
        if linear is not None and removal is None:
            return linear.output(self.x, y)
        if removal is not self:
            return y
        return removal.output(self.x, None if linear is None else linear.sigma(self.x))

    def lost(self, reason: str) -> LostEditError:
        """Return the error of a pass in which this edit does not arrive."""
        return LostEditError(f"{self.norm.name}: {self.label} was lost: {reason}")

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse a copy of the model (copy.deepcopy, torch.save), in which nothing would end the edit."""
        raise InterventionError(f"{self.norm.name} is under {self.label}: copy the model outside the block")


_Edit = TypeVar("_Edit", bound=Edit)


def edit_on(module: nn.Module, kind: type[_Edit]) -> _Edit | None:
    """Return the edit of exactly this class that a norm's module is under."""
    return next((edit for edit in edits_on(module) if type(edit) is kind), None)


class NormEdit(Edit):
    """Remove terms of one norm: in all rows of a batch alike, or in each row its own.

    Args:
        variants: the variant's name of each row, or one for all.
        constants: what replaces sigma, [row, 2] at position 0 and elsewhere (gradients reach it); NaN where sigma
            stays. None: sigma stays in all.
    """

    def __init__(
        self, norm: Norm, variants: Sequence[str], constants: Float[Tensor, "row 2"] | None = None, label: str = ""
    ) -> None:
        super().__init__(norm, label or variants[0])
        self.variants = variants
        adds = ["projection" in VARIANTS[variant].effect(norm) for variant in variants]
        self.adds_mean = torch.tensor(adds, dtype=torch.float64) if any(adds) else None
        self.constants = constants

    @classmethod
    def of(cls, norm: Norm, variant: str, pair: Float[Tensor, " 2"] | None, label: str = "") -> NormEdit:
        """Return the edit that makes a norm a variant, with constants for position 0 and elsewhere."""
        is_frozen = "scaling" in VARIANTS[variant].effect(norm)
        return cls(norm, [variant], pair[None] if is_frozen and pair is not None else None, label)

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield "hook_scale", self._divide
        if self.adds_mean is not None:
            yield "hook_normalized", self._add_mean

    def _divide(self, scale: Tensor, hook: Any) -> Tensor:
        self.calls += 1
        if self.constants is None:
            return scale.clone()  # (a bridge uses what users write into it only if another tensor is returned)
        divisor = self._divisor(scale)
        return torch.where(divisor.isnan(), scale, divisor) if len(self.variants) > 1 else divisor

    def _divisor(self, like: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        assert self.constants is not None
        pairs = _by_row(self.constants.to(like), like)
        return torch.where(self.positions.first(self.norm, self.x), pairs[..., :1], pairs[..., 1:])

    def _add_mean(self, normalized: Tensor, hook: Any) -> Tensor:
        """Add the mean, divided by what Px was divided by.

        Hooks of users may have changed the divisor: it is the least-squares factor between Px and the output.
        """
        assert self.adds_mean is not None
        x = at_least_float32(self.x)
        projected = self.norm.project(x)
        square = projected.pow(2).sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
        back = x.mean(-1, keepdim=True) * (normalized * projected).sum(-1, keepdim=True) / square
        if len(self.variants) > 1:
            back = back * _by_row(self.adds_mean[:, None].to(back), normalized)
        return normalized + back.to(normalized.dtype)

    def output(self, x: Float[Tensor, "*batch d"], sigma: Tensor | None = None) -> Float[Tensor, "*batch d"]:
        """Return the norm's output for an input x, all rows edited alike; 16-bit formats are computed in float32.

        Args:
            x: its input.
            sigma: the divisor where scaling stays; None: the sigma of x.
        """
        norm, wide, self.x = self.norm, at_least_float32(x), x
        constant = None if self.constants is None else self._divisor(wide)
        normalized = norm.without(self.variants[0], wide, constant, sigma)
        return affine(normalized, *norm.gain_and_bias()).to(x.dtype)


def _by_row(values: Float[Tensor, "row n"], like: Tensor) -> Tensor:
    """Return values of each row in a shape that broadcasts to a norm's input, of which a batch of rows may be flat."""
    if len(values) > 1:
        values = values.repeat_interleave(like.shape[0] // len(values), dim=0)
    return values.view(len(values), *[1] * (like.ndim - 2), values.shape[-1])


class LinearEdit(Edit):
    """Hold the sigma of one norm, its own or that of another run, so that it is linear in its input."""

    def __init__(self, norm: Norm, given: Float[Tensor, "*_"] | None = None) -> None:
        super().__init__(norm, "linearized")
        self.given = None if given is None else given.detach()

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        yield "hook_scale", self._hold

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """Return the sigma that is held on these inputs of the norm."""
        if self.given is None:
            return self.norm.sigma(at_least_float32(x.detach()))
        given = self.given.to(at_least_float32(x))
        given = given[None] if given.ndim == x.ndim - 2 else given
        if x.ndim == given.ndim + 1 == 4 and is_heads_first(self.norm, x, given.shape[1]):
            given = given.transpose(1, 2)
        if given.shape in (x.shape[:-1], (1, *x.shape[1:-1])):
            return given.expand(x.shape[:-1])[..., None]
        shapes = f"{list(self.given.shape)}, and the norm's input is {list(x.shape)}"
        raise InterventionError(f"{self.norm.name}: sigma was given for tokens {shapes}")

    def _hold(self, scale: Tensor, hook: Any) -> Tensor:
        self.calls += 1
        removal = edit_on(self.norm.module, NormEdit)
        if self.given is None or (removal is not None and removal.constants is not None):
            return scale.detach().clone()
        return self.sigma(self.x).to(scale).clone()

    def output(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the norm's output, linear in its input x; `y`: the norm's own output."""
        normalized = self.norm.project(at_least_float32(x)) / self.sigma(x)
        linear = affine(normalized, *self.norm.gain_and_bias()).to(y.dtype)
        # 0 + y is y, bit for bit, and its gradient is that of `linear`
        return linear if self.given is not None else (linear - linear.detach()) + y.detach()


# ------------------------------------------------------- for some readers alone


class HeadEdit(NormEdit):
    """Replace columns of queries, keys and values, for an edit of one norm that only some readers see.

    Args:
        edit: what the readers see of the norm.
        letters: of their hook points, "qkv", or one of them.
        heads: of each block; None: all.
        attentions, cfg: the model's attention layers, and its configuration.
    """

    def __init__(
        self,
        edit: NormEdit,
        letters: str,
        heads: Mapping[int, Sequence[int] | None],
        attentions: Mapping[int, nn.Module],
        cfg: Any,
    ) -> None:
        super().__init__(edit.norm, edit.variants, edit.constants, edit.label)
        self.letters, self.heads, self.attentions, self.cfg = letters, heads, attentions, cfg
        self.least_calls = len(self.letters) * len(self.heads)
        self.y = torch.zeros(0)  # what the norm's running call puts out for its other readers

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        return iter(())

    def install(self, stack: ExitStack) -> None:
        super().install(stack)
        stack.callback(self.norm.module.register_forward_hook(self._record_output).remove)
        shortformer = getattr(self.cfg, "positional_embedding_type", "") == "shortformer"
        for layer, heads in self.heads.items():
            attn = self.attentions[layer]
            for letter in self.letters:
                point, weights = child_of(attn, f"hook_{letter}"), live_weight(attn, f"W_{letter.upper()}")
                is_mixed = shortformer and letter != "v"  # (it adds positions to what queries and keys read)
                if point is None or weights is None or weights.ndim < 3 or is_mixed:
                    raise InterventionError(f"block {layer} makes its {letter} of more than one norm's output")
                hook = partial(self._replace, attn, letter, heads, head_count(attn, self.cfg))
                self._add(point, hook, stack)

    def _record_output(self, *hook: Any) -> None:
        self.y = hook[-1]

    def _replace(
        self, attn: nn.Module, letter: str, heads: Sequence[int] | None, queries: int, value: Tensor, hook: Any
    ) -> Tensor:
        """Replace the columns of these heads (None: of all) by those of the edited norm; `queries`: how many heads."""
        self.calls += 1
        W, b = (live_weight(attn, f"{kind}_{letter.upper()}") for kind in "Wb")
        assert W is not None
        out = value if value.ndim == 4 else value.unflatten(-1, (-1, W.shape[-1]))
        own = out.shape[2]  # fewer heads of keys and values than of queries, where these share them
        if self.y.ndim != 3 or self.y.shape[:2] != out.shape[:2]:
            raise self.lost("attention reads it split by head")
        # A bridge shows a shared key's weights once for each of its queries.
        weight = W[:: len(W) // own].transpose(1, 2).flatten(0, 1)
        biases = weight.new_zeros(1, W.shape[-1]) if b is None else b.view(-1, W.shape[-1])
        bias = biases[:: max(1, len(biases) // own)].expand(own, -1).flatten()
        if (columns := self._columns(out.flatten(2), weight, bias)) is None:
            raise self.lost(f"{hook.name} shows more than W_{letter.upper()} of its output: edit the whole norm")
        columns = columns.view_as(out).to(out.dtype)
        if heads is not None:
            is_chosen = torch.zeros(own, dtype=torch.bool, device=out.device)
            is_chosen[[head * own // queries for head in heads]] = True
            columns = torch.where(is_chosen[:, None], columns, out)
        return columns.reshape(value.shape)

    def _columns(
        self, out: Float[Tensor, "batch pos wide"], weight: Float[Tensor, "wide d"], bias: Float[Tensor, " wide"]
    ) -> Float[Tensor, "batch pos wide"] | None:
        """Return what a linear map reads of the edited norm; None where `out` is not what it reads of the intact one.

        With gain g, bias b and intact output y, the edited norm puts out r (y - b) + m g + b, where r and m are
        numbers of each vector. So the map W gives a + r (out - a) + m W g, with a = W b: no product of matrices.
        In 16 bits, for gradients (not through y), and where a user's hook has changed y, W is applied anew.

        That `out` is a product is checked on one random vector (Freivalds 1977).
        """
        norm, x, linear = self.norm, self.x, edit_on(self.norm.module, LinearEdit)
        random = _random_vector(len(weight), weight.dtype, weight.device)
        with torch.no_grad():
            read, shown = random @ weight, out.to(weight.dtype) @ random - bias @ random
        tolerance = SAME_LOGITS[out.dtype]
        is_wide = x.dtype == out.dtype == weight.dtype == at_least_float32(x).dtype
        if is_wide and linear is None and not out.requires_grad:
            gain, shift = gain_of(norm).to(x), bias_of(norm).to(x)
            sigma = norm.sigma(x)
            own = x @ norm.project(gain * read) / sigma[..., 0] + shift @ read
            if relative_difference(own, shown) <= tolerance:
                divisor = sigma if self.constants is None else self._divisor(x)
                columns = torch.lerp(weight @ shift + bias, out, sigma / divisor)
                if self.adds_mean is not None:
                    columns = columns + x.mean(-1, keepdim=True) / divisor * (weight @ gain)
                return columns
        if not relative_difference(self.y.detach().to(weight.dtype) @ read, shown) <= tolerance:
            return None
        edited = self.output(x, None if linear is None else linear.sigma(x)).to(self.y.dtype)
        return F.linear(edited.to(weight.dtype), weight, bias)


@lru_cache(maxsize=16)
def _random_vector(length: int, dtype: torch.dtype, device: torch.device) -> Float[Tensor, " length"]:
    return torch.randn(length, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def z_of(
    attn: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    read: Float[Tensor, "batch pos d"],
    instead: Float[Tensor, "batch pos d"],
) -> Float[Tensor, "batch pos *heads"]:
    """Return the heads' outputs z if attention, called with these arguments, read another tensor.

    Raises:
        ValueError: it does not read the tensor that is to be replaced, or shows no z.
    """

    def replaced(value: Any) -> Any:
        is_read = isinstance(value, Tensor) and value.shape == read.shape and torch.equal(value, read)
        return instead if is_read else value

    args = [replaced(value) for value in args]
    kwargs = {name: None if name in _CACHES else replaced(value) for name, value in kwargs.items()}
    if not any(value is instead for value in (*args, *kwargs.values())):
        raise ValueError("attention does not read the output of its norm")
    outputs: list[Tensor] = []
    with hooks_on([(z_point(attn), lambda *seen: outputs.append(seen[-1]))]):
        attn.forward(*args, **kwargs)
    return outputs[0]


# ------------------------------------------------------------------- on a model


@contextmanager
def installed(model: HookedModel | nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """Run the model under these edits; on leaving, it is as it was, also after an exception.

    A pass in which a hook of an edit was not called raises LostEditError.
    """
    positions, cfg = Positions(), getattr(model, "cfg", None)
    flags = _flags(cfg)

    def begin() -> None:
        active = [edit for edit in edits if not edit.suspended]
        if active and (changed := flags ^ _flags(cfg)):
            raise active[0].lost(f"cfg.{min(changed)} was changed inside the block")
        for edit in active:
            edit.calls = 0

    def before_model(module: nn.Module, args: Any, kwargs: Any) -> None:
        names = inspect.signature(module.forward).parameters
        if positions.enter(args, dict(zip(names, args, strict=False)) | kwargs, is_block=False):
            begin()
        if module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
            warnings.warn("gradient checkpointing is on: call backward() inside the block", stacklevel=2)

    def before_block(_block: nn.Module, args: Any, kwargs: Any) -> None:
        if positions.enter(args, kwargs, is_block=True):
            begin()

    def after_model(*_: object) -> None:
        is_outermost = positions.depth == 1  # (this runs before the depth falls)
        for edit in edits if is_outermost and positions.is_whole else ():
            if edit.calls < edit.least_calls and not edit.suspended:
                raise edit.lost("a pass does not run this norm, or not through its hook points")

    inner = getattr(model, "base_model" if isinstance(model, hugging_face_classes()) else "original_model", None)
    first_block, reader = getattr(model, "blocks", ())[:1], child_of(model, "unembed")
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", _BRIDGE_RECOMPUTES)
        stack.callback(cast(nn.Module, model).register_forward_hook(after_model).remove)
        for module in dict.fromkeys((model, inner)):
            if isinstance(module, nn.Module):
                stack.callback(module.register_forward_pre_hook(before_model, with_kwargs=True).remove)
                handle = module.register_forward_hook(lambda *_: positions.leave(1), always_call=True)
                stack.callback(handle.remove)
        for block in first_block:
            stack.callback(block.register_forward_pre_hook(before_block, with_kwargs=True).remove)
        if reader is not None:
            stack.callback(reader.register_forward_hook(lambda *_: positions.leave(0)).remove)
        for edit in edits:
            edit.positions = positions
            edit.install(stack)
        yield


def _flags(cfg: object) -> set[str]:
    return {name for name in _FLAGS if getattr(cfg, name, False)}
