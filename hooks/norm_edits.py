"""The hooks behind `without` and `linearized`: permanent TransformerLens hooks at a norm's hook points.

`NormEdit` removes terms of a norm at `hook_scale` and `hook_normalized`, `Held` holds its sigma; `heads` has those that
some readers alone see. `installed` puts edits on a model. Hooks of users see the edited values, and what they return is
used.

`lost_edits` proves by one pass that edits reach the output; every later pass checks that the hooks were called.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ln_probe.hooks.model import (
    HookedModel,
    at_least_float32,
    blocks,
    child_of,
    device_of,
    edits_on,
    evaluating,
    hooks_on,
    is_hugging_face,
    modules_of,
    probe_tokens,
    register_edit,
    tensors_in,
    unedited,
)
from ln_probe.hooks.norm import VARIANTS, Norm, is_heads_first
from ln_probe.hooks.norms import structure_of

# Settings of a model that change how attention reads its norm.
_FLAGS = ("use_split_qkv_input", "use_attn_in", "use_hook_mlp_in", "use_attn_result")
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
    """Which vectors of a norm belong to position 0: attention sinks live there, so it has a constant of its own.

    A norm is handed tensors, not positions. While `watch` lasts, hooks on the model and its blocks note where each
    forward pass begins: at position 0, behind a cache of earlier tokens (`generate`), or behind padding on the left. A
    norm that is called outside a pass, or in a pass that starts at a later layer, has no vector of position 0.
    """

    def __init__(self) -> None:
        self.depth = 0  # calls of the model that are running, one inside the other
        self.direct = False  # whether its `forward` is running without a call of the model (HookedTransformer.generate)
        self.whole = True  # whether the running pass goes through all layers
        self.known = False  # whether it says where its vectors are
        self.check: Callable[[], None] = lambda: None  # called at the start of a pass
        self.offset = 0  # tokens that came in earlier passes
        self.shape: tuple[int, int] | None = None  # batch and positions of the pass
        self.padding: Tensor | None = None  # in front of each row of the batch

    def first(self, norm: Norm, x: Float[Tensor, "*batch d"]) -> Bool[Tensor, "*batch 1"]:
        """Return which vectors of a norm's input belong to position 0.

        Inputs are [batch pos d], [batch pos head d], [batch head pos d] (a norm of queries or keys inside a bridge's
        attention) or flattened from those.
        """
        if not ((self.depth and self.known) or self.direct) or self.shape is None:
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

    @contextmanager
    def watch(self, model: HookedModel | nn.Module) -> Iterator[None]:
        """While it lasts, note where every forward pass begins."""
        inner = getattr(model, "base_model" if is_hugging_face(model) else "original_model", None)
        whole = {id(m): m for m in (model, inner) if isinstance(m, nn.Module)}.values()
        at = [(module, None) for module in whole] + [(b, layer) for layer, b in enumerate(blocks(model))]
        with hooks_on(before=[(module, partial(self._begin, layer)) for module, layer in at]), ExitStack() as stack:
            for module in whole:
                stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
            if (reader := child_of(model, "unembed")) is not None:
                stack.callback(reader.register_forward_hook(self._end_direct).remove)
            yield

    def _end(self, *_: object) -> None:
        self.depth -= 1

    def _end_direct(self, *_: object) -> None:
        self.direct = False

    def _start(self, *, whole: bool, known: bool) -> None:
        """Note that a pass starts."""
        self.direct = self.depth == 0
        self.whole, self.known = whole, known
        self.offset, self.padding = 0, None
        self.check()

    def _begin(self, layer: int | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1:
            kwargs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        given = (*args, *(kwargs.get(n) for n in _READ))
        read = next((v for v in given if isinstance(v, Tensor) and v.ndim >= 2), None)
        if read is not None:
            self.shape = int(read.shape[0]), int(read.shape[1])
        self.depth += layer is None
        if layer is None and self.depth == 1:
            later = kwargs.get("start_at_layer") is not None
            known = not later or kwargs.get("tokens") is not None
            self._start(whole=not later and kwargs.get("stop_at_layer") is None, known=known)
        elif layer == 0 and self.depth == 0:
            self._start(whole=False, known=True)
        caches = [kwargs[n] for n in CACHES if kwargs.get(n) is not None]
        if caches:
            self.offset = cached_tokens(caches[0], layer)
        elif layer is not None and "past_kv_cache_entry" in kwargs:
            self.offset = 0
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.padding = (mask != 0).long().argmax(-1)


def cached_tokens(cache: Any, layer: int | None) -> int:
    """Return how many tokens a cache holds: TransformerLens's entry or list of entries, or Hugging Face's."""
    if isinstance(keys := getattr(cache, "past_keys", None), Tensor):
        return int(keys.shape[1])
    if callable(length := getattr(cache, "get_seq_length", None)):
        return int(length() if layer is None else length(layer))
    try:
        return cached_tokens(cache[0], layer)
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
        module, points = self.norm.module, dict(self.norm.module.named_children())
        stack.callback(module.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
        stack.callback(module.register_forward_hook(self._end).remove)
        if "hook_in" in points:
            self._add(points["hook_in"], self._record_input, False, stack)
        for name, hook, before in self.hooks():
            self._add(points[name], hook, before, stack)
        register_edit(module, self, stack)

    def _add(self, point: Any, hook: Callable[..., Any], before: bool, stack: ExitStack) -> None:
        """Add a permanent hook to a hook point, before or after those of users."""
        handle = add_hook(point, hook, stack, prepend=before)
        self._ordered.append((point, handle.hook.id, before))

    def _begin(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note the norm's input, and bring the hooks into their order: hooks of users were added since."""
        if self.suspended:
            return
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
        """Refuse a copy of the model (copy.deepcopy, pickle, torch.save): nothing would end the edit in it.

        Raises:
            InterventionError: always.
        """
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
        adds = [VARIANTS[variant].takes_projection(norm) for variant in variants]
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

    @property
    def freezes(self) -> bool:
        """Whether a constant replaces sigma in some row."""
        return self.constants is not None

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

        if self.adds_mean is not None:
            yield "hook_in", self._record_input
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
        frozen = any(isinstance(edit, NormEdit) and edit.freezes for edit in edits_on(self.norm.module))
        if self.given is None or frozen:
            return scale.detach().clone()
        return sigma_per_token(self.norm, self.given, self.x).to(scale).clone()


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
    """A change of the output of a norm without hook points, inside a Hugging Face model in memory."""

    def __init__(self, norm: Norm, edit: NormEdit | Held) -> None:
        super().__init__(norm, edit.label)
        self.edit, self.holds = edit, edit.holds

    def install(self, model: HookedModel, stack: ExitStack) -> None:
        self.edit.positions = self.positions
        stack.callback(self.norm.module.register_forward_hook(self._change, with_kwargs=True).remove)
        register_edit(self.norm.module, self, stack)

    def _change(self, _module: nn.Module, args: Any, kwargs: Any, y: Tensor) -> Tensor:
        if self.suspended:
            return y
        x, self.calls = tensors_in(args, kwargs)[0], self.calls + 1
        linear = next((e.edit for e in edits_on(self.norm.module) if e.holds and isinstance(e, OutputEdit)), None)
        sigma = linear.sigma(x) if isinstance(linear, Held) else None
        if isinstance(self.edit, Held):
            others = [e for e in edits_on(self.norm.module) if not e.holds]
            return y if others else _held_output(self.norm, self.edit, x, y)
        return edited_output(self.norm, self.edit, x, y, sigma)


def _held_output(norm: Norm, edit: Held, x: Tensor, y: Tensor) -> Tensor:
    wide = at_least_float32(x)
    linear = norm.affine(norm.project(wide) / edit.sigma(wide), live=True).to(y.dtype)
    # 0 + y is y, bit for bit, and its gradient is that of `linear`
    return linear if edit.given is not None else (linear - linear.detach()) + y.detach()


def edited_output(
    norm: Norm,
    edit: NormEdit,
    x: Float[Tensor, "*batch d"],
    y: Float[Tensor, "*batch d"] | None = None,
    sigma: Tensor | None = None,
) -> Float[Tensor, "*batch d"]:
    """Return the norm's output under an edit of all rows alike; 16-bit formats are computed in float32.

    Args:
        x: its input.
        y: its own output, to which only what is removed is added where scaling stays; None: all is computed of x.
        sigma: what is divided by where scaling stays, if it is held (`linearized`); None: that of x.
    """
    wide, edit.x = at_least_float32(x), x
    if edit.constants is not None or y is None:
        divisor = sigma if edit.constants is None else edit.divisor(wide)
        made = norm.affine(norm.normalize(wide, keep_mean=edit.adds_mean is not None, divisor=divisor), live=True)
        return made.to(x.dtype if y is None else y.dtype)
    if edit.adds_mean is None:
        return y
    back = wide.mean(-1, keepdim=True) / (norm.sigma(wide) if sigma is None else sigma.to(wide))
    back = back if (gain := norm.live_gain()) is None else back * gain.to(back)
    return (y.to(back.dtype) + back).to(y.dtype)


@contextmanager
def installed(model: HookedModel | nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """Run the model under these edits; on leaving, it is as it was, also after an exception.

    Raises:
        LostEditError: at a pass in which a hook of an edit was not called.
    """
    positions, flags = Positions(), _flags(model)
    for edit in edits:
        edit.positions = positions

    def check() -> None:
        if any(edit.suspended for edit in edits):
            return
        for edit in edits:
            edit.calls = 0
        if (now := _flags(model)) != flags:
            changed = next(name for name in _FLAGS if now[name] != flags[name])
            raise LostEditError(f"cfg.{changed} was changed inside the block: set it before entering")

    def end(*_: object) -> None:
        idle = [edit for edit in edits if not (edit.calls or edit.suspended)]
        if positions.depth == 1 and positions.whole and idle:
            raise LostEditError(f"{idle[0].norm.name}: {idle[0].label} was lost: a pass does not run this norm")

    with _bridge_may_recompute(), ExitStack() as stack:
        positions.check = check
        stack.enter_context(positions.watch(model))
        # Before the hook of `positions` that ends the pass.
        stack.callback(model.register_forward_hook(end, prepend=True).remove)  # type: ignore[union-attr]
        for edit in edits:
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


# ---------------------------------------------------------------------------------------- proof that edits arrive


class Leaf(Edit):
    """A leaf that is added to one norm before gain and bias, to see whether a gradient arrives there."""

    def __init__(self, norm: Norm) -> None:
        super().__init__(norm, "the edit")
        self.leaves: list[Tensor] = []

    def hooks(self) -> Iterator[tuple[str, Callable[..., Any], bool]]:
        yield "hook_normalized", self.add, True

    def add(self, value: Tensor, hook: Any = None) -> Tensor:
        """Return the value with a leaf of zeros added to it."""
        self._changed = True
        self.leaves.append(torch.zeros_like(value, requires_grad=True))
        return value + self.leaves[-1]


def lost_edits(
    model: HookedModel,
    norms: Sequence[Norm],
    *,
    make: Callable[[Leaf], Edit] | None = None,
    kind: object = None,
) -> dict[str, str]:
    """Return the norms at which an edit does not reach the model's output, each with the probable cause.

    Costs one forward and one backward pass over two tokens, the first time.

    Args:
        model: any hooked model.
        norms: some of its norms.
        make: makes the edit that some readers alone see of a leaf; None: all readers see it.
        kind: of these readers, which what is found is kept for; None: all readers.
    """
    proved = structure_of(model).proved.setdefault(kind, set())
    left = [norm for norm in norms if norm.name not in proved]
    if not left:
        return {}
    leaves = [Leaf(norm) for norm in left]
    edits = [leaf if make is None else make(leaf) for leaf in leaves]
    tokens = probe_tokens(model, 2)[None].to(device_of(model))
    with torch.inference_mode(False), torch.enable_grad(), evaluating(model), unedited(model):
        try:
            with installed(model, edits):
                logits: Tensor = model(tokens, return_type="logits")
            weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits)
            every = [each for leaf in leaves for each in leaf.leaves]
            gradients = torch.autograd.grad((logits * weights).sum(), every, allow_unused=True)
        except LostEditError as error:
            return {norm.name: str(error) for norm in left}
        except RuntimeError as error:
            reason = f"the edit was lost: no gradient goes through the model ({error})"
            return {norm.name: f"{norm.name}: {reason}" for norm in left}
        finally:
            _detach(model)
    by_leaf = {id(each): g for each, g in zip(every, gradients, strict=True)}
    arrived = {
        leaf.norm.name
        for leaf in leaves
        if any((g := by_leaf[id(one)]) is not None and bool(g.any()) for one in leaf.leaves)
    }
    proved |= arrived
    reason = "what comes after it does not read its output, or ignores it (weights that are zero)"
    return {n.name: f"{n.name}: the edit was lost: {reason}" for n in left if n.name not in arrived}


def _detach(model: HookedModel) -> None:
    """Detach what a pass with gradients left on modules (a bridge's attention): a model with it cannot be copied."""
    for module in modules_of(model):
        graph = {k: v for k, v in vars(module).items() if isinstance(v, Tensor) and v.grad_fn is not None}
        vars(module).update({name: value.detach() for name, value in graph.items()})


def prove(
    model: HookedModel, norms: Sequence[Norm], *, make: Callable[[Leaf], Edit] | None = None, kind: object = None
) -> None:
    """Raise LostEditError if an edit of one of these norms does not reach the output (`lost_edits`)."""
    if lost := lost_edits(model, norms, make=make, kind=kind):
        more = f" (and at {len(lost) - 1} more norms)" if len(lost) > 1 else ""
        raise LostEditError(next(iter(lost.values())) + more)
