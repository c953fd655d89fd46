"""The hooks behind `without` and `linearized`: permanent TransformerLens hooks at a norm's hook points.

`NormEdit` removes terms of a norm at `hook_scale` and `hook_normalized`, `Held` holds its sigma. `HeadEdit` replaces
columns of `hook_q`, `hook_k` and `hook_v`, for an edit that some readers alone see. `installed` puts edits on a model:
hooks of users see the edited values, what they return is used, and every pass checks that the hooks were called.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ln_probe.hooks.model import (
    ABSENT,
    HookedModel,
    at_least_float32,
    attention_of,
    blocks,
    child_of,
    edits_on,
    head_count,
    hooks_on,
    is_hugging_face,
    register_edit,
    tensors_in,
    z_point,
)
from ln_probe.hooks.norm import VARIANTS, Norm, is_heads_first
from ln_probe.hooks.norms import Structure, structure_of

# Settings of a model that change how attention reads its norm.
_FLAGS = ("use_split_qkv_input", "use_attn_in")
_READ = ("hidden_states", "resid_pre", "input_ids", "inputs_embeds", "input", "x")
# What attention is handed to keep keys and values in, by the name of its argument: HookedTransformer's, Hugging Face's.
CACHES = ("past_kv_cache_entry", "past_kv_cache", "past_key_values", "past_key_value", "layer_past")
# What a bridge says when a hook changes what a norm divides by: here that is what is asked for.
_BRIDGE_RECOMPUTES = "(A forward hook edited|Backward hooks on) hook_scale/hook_normalized"


class InterventionError(ValueError):
    """An intervention that cannot be made, or that would be made twice."""


class LostEditError(InterventionError):
    """An edit that does not reach what the model computes (names the norm)."""


# ---------------------------------------------------------------------------------------- positions


class Positions:
    """Which vectors of a norm belong to position 0, which has a constant of its own.

    A norm is handed tensors, not positions. While `watch` lasts, hooks on the model and its blocks note where each
    forward pass begins: at position 0, behind a cache of earlier tokens (`generate`), or behind padding on the left. A
    norm that is called outside a pass, or in a pass that starts at a later layer, has no vector of position 0.
    """

    def __init__(self) -> None:
        self.depth = 0  # calls of the model that are running, one inside the other
        self.direct = False  # whether its `forward` is running without a call of the model (HookedTransformer.generate)
        self.whole = self.known = False  # whether the pass goes through all layers; says where its vectors are
        self.offset = 0  # tokens that came in earlier passes
        self.shape: tuple[int, int] | None = None  # batch and positions of the pass
        self.is_rerun = self.warned = False  # of gradient checkpointing
        self.padding: Tensor | None = None  # in front of each row of the batch

    def first(self, norm: Norm, x: Float[Tensor, "*batch d"]) -> Bool[Tensor, "*batch 1"]:
        """Return which vectors of a norm's input belong to position 0.

        Inputs are [batch pos d], [batch pos head d], [batch head pos d] (a norm of queries or keys inside a bridge's
        attention) or flattened from those.
        """
        if not (((self.depth or self.is_rerun) and self.known) or self.direct) or self.shape is None:
            return torch.zeros((*x.shape[:-1], 1), dtype=torch.bool, device=x.device)
        batch, length = x.shape[:2] if x.ndim == 3 else self.shape
        start = 0 if self.padding is None else self.padding[:batch, None].to(x.device)
        first = (torch.arange(self.offset, self.offset + length, device=x.device)[None] == start).expand(batch, -1)
        if x.ndim == 4:
            first = first[:, None, :, None] if is_heads_first(norm, x, length) else first[:, :, None, None]
        elif x.ndim == 3:
            first = first[:, :, None]
        else:
            first = first.flatten().repeat_interleave(max(1, x.shape[0] // max(1, first.numel())))[:, None]
        return first.expand(*x.shape[:-1], 1)

    def note_checkpoint(self) -> None:
        """Note whether `backward()` runs a part of the last pass again; warn once that it may."""
        self.is_rerun = False
        if (not self.depth or not self.warned) and _is_checkpointed():
            self.is_rerun = not self.depth
            if not self.warned:
                self.warned = True
                warnings.warn("gradient checkpointing is on: call backward() inside the block", stacklevel=2)

    @contextmanager
    def watch(
        self, model: HookedModel | nn.Module, begin: Callable[[], None], end: Callable[[], None]
    ) -> Iterator[None]:
        """While it lasts, note where every forward pass begins; `begin` is called then, and `end` at the end of a call
        of the model."""
        inner = getattr(model, "base_model" if is_hugging_face(model) else "original_model", None)
        calls = {id(m): m for m in (model, inner) if isinstance(m, nn.Module)}.values()
        at = [(module, None) for module in calls] + [(block, layer) for layer, block in enumerate(blocks(model))]

        def leave(*_: object) -> None:
            self.depth -= 1

        def leave_unembedding(*_: object) -> None:
            self.direct = False

        before = [(module, partial(self._enter, begin, layer)) for module, layer in at]
        with hooks_on(after=[(cast(nn.Module, model), lambda *_: end())], before=before), ExitStack() as stack:
            for module in calls:
                stack.callback(module.register_forward_hook(leave, always_call=True).remove)
            if (reader := child_of(model, "unembed")) is not None:
                stack.callback(reader.register_forward_hook(leave_unembedding).remove)
            yield

    def _enter(
        self, begin: Callable[[], None], layer: int | None, module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        if not self.depth and layer is not None and _is_checkpointed():
            return  # (the positions are those of the pass that runs again)
        if len(args) > 1:
            kwargs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        given = (*args, *(kwargs.get(n) for n in _READ))
        if (read := next((v for v in given if isinstance(v, Tensor) and v.ndim >= 2), None)) is not None:
            self.shape = int(read.shape[0]), int(read.shape[1])
        self.depth += layer is None
        if (layer is None and self.depth == 1) or (layer == 0 and self.depth == 0):
            later, self.direct = kwargs.get("start_at_layer") is not None, self.depth == 0
            self.whole = not (later or self.direct) and kwargs.get("stop_at_layer") is None
            self.known = not later or kwargs.get("tokens") is not None
            self.offset, self.padding = 0, None
            begin()
        if caches := [kwargs[n] for n in CACHES if kwargs.get(n) is not None]:
            self.offset = _cached_tokens(caches[0], layer)
        elif layer is not None and "past_kv_cache_entry" in kwargs:
            self.offset = 0
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.padding = (mask != 0).long().argmax(-1)


def _is_checkpointed() -> bool:
    """Return whether torch.utils.checkpoint has called what is running."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch.utils.checkpoint":
        frame = frame.f_back
    return frame is not None


def _cached_tokens(cache: Any, layer: int | None) -> int:
    """Return how many tokens a cache holds: TransformerLens's entry or list of entries, or Hugging Face's."""
    if isinstance(keys := getattr(cache, "past_keys", None), Tensor):
        return int(keys.shape[1])
    if callable(length := getattr(cache, "get_seq_length", None)):
        return int(length() if layer is None else length(layer))
    try:
        return _cached_tokens(cache[0], layer)
    except (TypeError, IndexError, KeyError):
        return 0


# ---------------------------------------------------------------------------------------- hooks of one norm


class Edit:
    """Hooks that change what one norm computes, or what some of its readers get of it.

    Attributes:
        norm: the norm.
        label: of the edit, in messages.
        positions: of the pass that is running.
        x: the input of the norm's running call.
        scale: what it divides by, as hooks of users have left it.
        calls: how often the norm has run in this pass.
        suspended: whether the model runs without it (`unedited`).
    """

    holds = False  # whether it only holds what the norm divides by

    def __init__(self, norm: Norm, label: str) -> None:
        self.norm, self.label = norm, label
        self.positions = Positions()
        self.x, self.scale = torch.zeros(0), torch.zeros(0)
        self.calls = 0
        self.suspended = False
        self._changed = False
        self._ordered: list[tuple[nn.Module, int, bool]] = []

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any], bool]]:
        """Yield the hook points of the norm, what to call there, and whether it is called before hooks of users."""
        raise NotImplementedError

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        """Put the hooks on; `stack` takes them off, whatever else has happened to the hook points."""
        module, points = self.norm.module, self.norm.module._modules
        stack.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(self._end).remove)
        for name, hook, before in (("hook_in", self._record_input, False), *self.hooks()):
            if name in points:
                handle = add_hook(points[name], hook, stack, prepend=before)
                self._ordered.append((cast(nn.Module, points[name]), handle.hook.id, before))
        register_edit(module, self, stack)

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the norm's input, and bring the hooks into their order: hooks of users were added since."""
        if self.suspended:
            return
        self.positions.note_checkpoint()
        self.x, self._changed = tensors_in(args, kwargs)[0], False
        for point, key, before in self._ordered:
            if key not in point._forward_hooks:
                raise LostEditError(f"{self.norm.name}: {self.label} was lost: its hook was removed inside the block")
            cast(Any, point._forward_hooks).move_to_end(key, last=not before)

    def _record_input(self, x: Tensor, hook: Any) -> None:
        self.x = x.reshape(self.x.shape)  # (hook points of some bridges show it in another shape)

    def _end(self, *_: object) -> None:
        if not self._changed and not self.suspended:
            raise LostEditError(f"{self.norm.name}: {self.label} was lost: the norm ran without its hook points")
        self.calls += 1

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse a copy of the model (copy.deepcopy, pickle, torch.save): nothing would end the edit in it."""
        raise InterventionError(f"{self.norm.name} is under {self.label}: copy the model outside the `with` block")


def add_hook(point: Any, hook: Callable[..., Any], stack: ExitStack, *, prepend: bool) -> Any:
    """Add a permanent hook to a hook point; `stack` removes it. Returns its handle."""
    point.add_hook(hook, is_permanent=True, prepend=prepend)
    handle = point.fwd_hooks[0 if prepend else -1]

    def remove() -> None:
        handle.hook.remove()
        point.fwd_hooks = [h for h in point.fwd_hooks if h is not handle]

    stack.callback(remove)
    return handle


class NormEdit(Edit):
    """Remove terms of one norm: in all rows of a batch alike, or in each row its own.

    Args:
        norm: the norm.
        variants: the variant's name of each row, or one for all.
        constants: what replaces sigma, [row, 2] at position 0 and elsewhere (gradients reach it); NaN where sigma
            stays. None: sigma stays in all.
        label: of the edit, in messages.
    """

    def __init__(
        self,
        norm: Norm,
        variants: Sequence[str],
        constants: Float[Tensor, "row 2"] | None = None,
        label: str = "",
    ) -> None:
        super().__init__(norm, label or variants[0])
        self.variants = variants
        adds = ["projection" in VARIANTS[variant].effect(norm) for variant in variants]
        self.adds_mean = None if not any(adds) else torch.tensor(adds, dtype=torch.float64)
        self.constants = constants
        self.partly = constants is not None and bool(constants.isnan().any())

    @classmethod
    def of(cls, norm: Norm, variant: str, pair: Float[Tensor, " 2"] | None, label: str = "") -> NormEdit:
        """Return the edit that gives a norm a variant.

        Args:
            pair: the constants at position 0 and elsewhere; not used where scaling stays.
        """
        takes_scaling = VARIANTS[variant].takes_scaling(norm)
        return cls(norm, [variant], None if pair is None or not takes_scaling else pair[None], label)

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any], bool]]:
        yield "hook_scale", self._divide, True
        yield "hook_scale", self._record_scale, False
        yield "hook_normalized", self._add_mean, True

    def plain_hooks(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield the hook points and hooks for a pass that begins at position 0, without `installed`."""

        def divide(scale: Tensor, hook: Any) -> Tensor:
            self.positions.shape = int(scale.shape[0]), int(scale.shape[1])
            if self.adds_mean is None:
                self.x = scale
            return self._divide(scale, hook)

        def record_input(x: Tensor, hook: Any) -> None:
            self.x = x

        if self.adds_mean is not None:
            yield "hook_in", record_input
        yield "hook_scale", divide
        yield "hook_scale", self._record_scale
        yield "hook_normalized", self._add_mean

    def _divide(self, scale: Tensor, hook: Any) -> Tensor:
        self._changed = True
        if self.constants is None:
            return scale.clone()  # (a bridge uses what hooks write to in place only where another tensor is returned)
        divisor = self.divisor(scale)
        return torch.where(divisor.isnan(), scale, divisor) if self.partly else divisor

    def divisor(self, like: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """Return the constants that replace sigma on the norm's input."""
        assert self.constants is not None
        pairs = _by_row(self.constants.to(like), like)
        return torch.where(self.positions.first(self.norm, self.x), pairs[..., :1], pairs[..., 1:])

    def _record_scale(self, scale: Tensor, hook: Any) -> None:
        self.scale = scale

    def _add_mean(self, normalized: Tensor, hook: Any) -> Tensor | None:
        if self.adds_mean is None:
            return None
        x = at_least_float32(self.x)
        if self.norm.module.hook_scale._backward_hooks:  # they see the mean's gradient only through `normalized`
            projected = self.norm.project(x)
            square = projected.pow(2).sum(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
            back = x.mean(-1, keepdim=True) * (normalized * projected).sum(-1, keepdim=True) / square
        else:
            back = x.mean(-1, keepdim=True) / self.scale
        if len(self.adds_mean) > 1:
            back = back * _by_row(self.adds_mean[:, None].to(back), normalized)
        return normalized + back.to(normalized.dtype)

    def output(
        self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"] | None = None, sigma: Tensor | None = None
    ) -> Float[Tensor, "*batch d"]:
        """Return the norm's output if all rows are edited alike; 16-bit formats are computed in float32.

        Args:
            x: its input.
            y: its own output, to which only what is removed is added where scaling stays; None: all is computed of x.
            sigma: what is divided by where scaling stays, if it is held (`linearized`); None: that of x.
        """
        norm, wide, self.x = self.norm, at_least_float32(x), x
        if self.constants is not None or y is None:
            divisor = sigma if self.constants is None else self.divisor(wide)
            edited = norm.affine(norm.normalize(wide, keep_mean=self.adds_mean is not None, divisor=divisor), live=True)
            return edited.to(x.dtype if y is None else y.dtype)
        if self.adds_mean is None:
            return y
        back = wide.mean(-1, keepdim=True) / (norm.sigma(wide) if sigma is None else sigma.to(wide))
        back = back if (gain := norm.live_gain()) is None else back * gain.to(back)
        return (y.to(back.dtype) + back).to(y.dtype)


def _by_row(values: Float[Tensor, "row n"], like: Tensor) -> Tensor:
    """Return values of each row of the batch so that they broadcast to a norm's input, whose first axis is the batch's,
    or flattened from it."""
    if len(values) > 1:
        if like.shape[0] % len(values):
            raise LostEditError(f"an input {list(like.shape)} of a norm does not hold {len(values)} rows of a batch")
        values = values.repeat_interleave(like.shape[0] // len(values), dim=0)
    return values.view(len(values), *[1] * (like.ndim - 2), values.shape[-1])


class Held(Edit):
    """Hold what one norm divides by, so that it is linear in its input.

    Attributes:
        given: the sigma of another run; None: its own.
    """

    holds = True

    def __init__(self, norm: Norm, given: Float[Tensor, "*_"] | None = None) -> None:
        super().__init__(norm, "linearized")
        self.given = given

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any], bool]]:
        yield "hook_scale", self._hold, True

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """Return the sigma that is held on these inputs."""
        if self.given is None:
            return self.norm.sigma(at_least_float32(x.detach()))
        return sigma_per_token(self.norm, self.given, x).to(at_least_float32(x))

    def _hold(self, scale: Tensor, hook: Any) -> Tensor:
        self._changed = True
        frozen = any(isinstance(edit, NormEdit) and edit.constants is not None for edit in edits_on(self.norm.module))
        if self.given is None or frozen:
            return scale.detach().clone()
        return sigma_per_token(self.norm, self.given, self.x).to(scale).clone()

    def output(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """Return the norm's output, linear in its input x; `y`: the norm's own output."""
        wide = at_least_float32(x)
        linear = self.norm.affine(self.norm.project(wide) / self.sigma(wide), live=True).to(y.dtype)
        # 0 + y is y, bit for bit, and its gradient is that of `linear`
        return linear if self.given is not None else (linear - linear.detach()) + y.detach()


def sigma_per_token(norm: Norm, given: Tensor, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
    """Return a sigma per token of another run, laid out as the norm's input is.

    Raises:
        InterventionError: it is for another number of tokens.
    """
    wanted, laid = x.shape[:-1], given.to(x.device)
    # As the norm was given its inputs (also flattened), for every prompt, or for every head of a token.
    whole, by_head = ((laid, None), (laid[None], None)), ((laid[..., None], -1), (laid[None, ..., None], -1))
    for fits, end in (*whole, *(by_head if len(wanted) > 2 else ())):
        if fits.ndim == len(wanted) and fits.shape[0] in (1, wanted[0]) and fits.shape[1:end] == wanted[1:end]:
            expanded: Tensor = fits.expand(wanted)[..., None]
            return expanded
    raise InterventionError(
        f"{norm.name}: sigma was given for tokens {list(given.shape)}, and the norm's input is {list(x.shape)}: "
        "record it on as many tokens (linearized.sigmas)"
    )


class OutputEdit(Edit):
    """An edit of a norm without hook points, inside a Hugging Face model in memory, at the norm's output."""

    def __init__(self, edit: NormEdit | Held) -> None:
        super().__init__(edit.norm, edit.label)
        self.edit, self.holds = edit, edit.holds

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        self.edit.positions = self.positions
        stack.callback(self.norm.module.register_forward_hook(self._change, with_kwargs=True).remove)
        register_edit(self.norm.module, self, stack)

    def _change(self, _module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        if self.suspended:
            return y
        self.positions.note_checkpoint()
        x, self.calls = tensors_in(args, kwargs)[0], self.calls + 1
        edits = [edit.edit for edit in edits_on(self.norm.module)]
        if isinstance(self.edit, Held):
            return y if any(isinstance(edit, NormEdit) for edit in edits) else self.edit.output(x, y)
        linear = next((edit for edit in edits if isinstance(edit, Held)), None)
        return self.edit.output(x, y, None if linear is None else linear.sigma(x))


# ---------------------------------------------------------------------------------------- for some readers alone


@dataclass(frozen=True)
class Readers:
    """The readers of some norms that see an edit.

    Attributes:
        letters: of the hook points: "qkv", or one of them.
        heads: the heads by the norm's name and block; None: all heads of the block.
    """

    letters: str
    heads: Mapping[str, Mapping[int, tuple[int, ...] | None]]

    def check(self, model: HookedModel) -> None:
        """Raise InterventionError if a block's queries, keys or values cannot be replaced."""
        shortformer = getattr(model.cfg, "positional_embedding_type", "") == "shortformer"
        for layer in {layer for by_layer in self.heads.values() for layer in by_layer}:
            for letter in self.letters:
                attn = attention_of(model, layer)
                point, other = child_of(attn, f"hook_{letter}"), shortformer and letter != "v"
                if point is None or _weight(attn, letter) is None or other:
                    raise InterventionError(
                        f"block {layer} makes its {letter} of more than one norm's output: edit the whole norm"
                    )


class HeadEdit(Edit):
    """An edit of one norm that some readers see."""

    def __init__(self, readers: Readers, edit: NormEdit) -> None:
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
        for layer, heads in self.heads.items():
            attn = attention_of(model, layer)
            for letter in self.letters:
                hook = partial(self._replace, model, layer, letter, heads)
                add_hook(child_of(attn, f"hook_{letter}"), hook, stack, prepend=True)
            stack.callback(attn.register_forward_pre_hook(self._enter).remove)
            stack.callback(attn.register_forward_hook(self._leave).remove)

    def _end(self, *hook: Any) -> None:
        y: Tensor = hook[2]
        if self.suspended:
            return
        self.calls += 1
        linear = next((e for e in edits_on(self.norm.module) if isinstance(e, Held)), None)
        sigma = None if linear is None else linear.sigma(self.x)
        self.output = self.edit.output(self.x, sigma=sigma).to(y.dtype)

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
    except ABSENT:
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

    own, named = [changed(value) for value in args], {name: changed(value) for name, value in kwargs.items()}
    if not any(value is instead for value in (*own, *named.values())):
        return None
    named.update({name: None for name in CACHES if name in named})  # keys of this call must not be kept
    outputs: list[Tensor] = []
    with hooks_on([(z_point(model, layer), lambda _m, _a, _k, z: outputs.append(z))]):
        attention_of(model, layer).forward(*own, **named)
    return outputs[0] if outputs else None


# ---------------------------------------------------------------------------------------- on a model


@contextmanager
def installed(model: HookedModel | nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """Run the model under these edits; on leaving, it is as it was, also after an exception.

    Raises:
        LostEditError: at a pass in which a hook of an edit was not called.
    """
    positions, flags = Positions(), _flags(model)

    def begin() -> None:
        if not any(edit.suspended for edit in edits):
            if changed := [name for name, value in _flags(model).items() if value != flags[name]]:
                raise LostEditError(f"cfg.{changed[0]} was changed inside the block: set it before entering")
            for edit in edits:
                edit.calls = 0

    def end() -> None:
        idle = [edit for edit in edits if not (edit.calls or edit.suspended)]
        if positions.depth == 1 and positions.whole and idle:
            raise LostEditError(f"{idle[0].norm.name}: {idle[0].label} was lost: a pass does not run this norm")

    with _bridge_may_recompute(), positions.watch(model, begin, end), ExitStack() as stack:
        for edit in edits:
            edit.positions = positions
            edit.install(cast(HookedModel, model), stack)
        yield


def _flags(model: object) -> dict[str, bool]:
    cfg = getattr(model, "cfg", None)
    return {name: bool(getattr(cfg, name, False)) for name in _FLAGS}


@contextmanager
def _bridge_may_recompute() -> Iterator[None]:
    """Do not show a bridge's warning that it recomputes a norm whose scale is replaced."""
    warnings.filterwarnings("ignore", _BRIDGE_RECOMPUTES)
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


def lost_edits(model: HookedModel, norms: Sequence[Norm], structure: Structure | None = None) -> dict[str, str]:
    """Return the norms at which an edit does not reach the model's output, each with the probable cause.

    Args:
        model: any hooked model.
        norms: some of its norms.
        structure: as `structure_of` has just given it.
    """
    lost = (structure_of(model) if structure is None else structure).lost
    return {norm.name: lost[norm.name] for norm in norms if norm.name in lost}


def prove(model: HookedModel, norms: Sequence[Norm], structure: Structure) -> None:
    """Raise LostEditError if an edit of one of these norms does not reach the output (`lost_edits`)."""
    if lost := lost_edits(model, norms, structure):
        more = f" (and at {len(lost) - 1} more norms)" if len(lost) > 1 else ""
        raise LostEditError(next(iter(lost.values())) + more)
