"""Edit norms: an edited norm computes in place of the module's own forward, through the module's own hook points.

`EditedNorm` takes the place of a norm's forward while an edit of it lasts. It calls `hook_in`, `hook_scale`,
`hook_normalized` and `hook_out` (where the norm has them) once each, on the edited values; what their hooks return is
used downstream, and gradients flow through them. `PartEdit` replaces what one projection of attention (queries, keys or
values) reads; `head_edits` has the edit that single heads see. Under both the norm's own points show the intact norm.
`LinearEdit` holds sigma, so that the norm is linear in its input and gradients are Jᵀg = P(gain·g) / sigma.
"""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ln_probe.hooks.in_memory import is_hugging_face
from ln_probe.hooks.model import HookedModel, at_least_float32, attentions, blocks, hooks_on, tensors_in
from ln_probe.hooks.norm import Site, is_heads_first

_READ = ("hidden_states", "resid_pre", "input_ids", "inputs_embeds", "input", "x")
# What attention is handed to keep keys and values in, by the name of its argument: HookedTransformer's, Hugging Face's.
CACHES = ("past_kv_cache_entry", "past_kv_cache", "past_key_values", "past_key_value", "layer_past")


class Positions:
    """Which vectors that pass through a norm belong to position 0: attention sinks live there, so it is kept apart.

    A norm is handed tensors, not positions. While `watch` lasts, hooks on the model and its blocks note where each
    forward pass begins: at position 0, behind a cache of earlier tokens (`generate`), or behind padding on the left.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.offset = 0  # tokens that came in earlier passes
        self.shape: tuple[int, int] | None = None  # batch and positions of the pass
        self.padded: Tensor | None = None  # padding in front of each row of the batch

    def first(self, site: Site, x: Float[Tensor, "*batch d"]) -> Bool[Tensor, "*batch 1"]:
        """Which vectors of a norm's input belong to position 0.

        Inputs are [batch pos d], [batch pos head d], [batch head pos d] (a norm of queries or keys inside a bridge's
        attention) or flattened from those.
        """
        if x.ndim == 3:
            batch, length = x.shape[:2]
        elif self.shape is not None:
            batch, length = self.shape
        else:
            batch, length = (1, x.shape[0]) if x.ndim == 2 else x.shape[:2]
        start = torch.zeros(batch, dtype=torch.long) if self.padded is None else self.padded[:batch].cpu()
        first = torch.arange(self.offset, self.offset + length)[None] == start[:, None]
        if x.ndim == 4:
            first = first[:, None, :, None] if is_heads_first(site, x, length) else first[:, :, None, None]
        elif x.ndim == 3:
            first = first[:, :, None]
        else:
            first = first.flatten().repeat_interleave(max(1, x.shape[0] // max(1, first.numel())))[:, None]
        return first.to(x.device).expand(*x.shape[:-1], 1)

    @contextmanager
    def watch(self, model: HookedModel | nn.Module) -> Iterator[None]:
        """While it lasts, note where every forward pass begins."""
        inner = getattr(model, "base_model" if is_hugging_face(model) else "original_model", None)
        whole = {id(m): m for m in (model, inner) if isinstance(m, nn.Module)}
        at = [(module, None) for module in whole.values()] + [(b, layer) for layer, b in enumerate(blocks(model))]
        with hooks_on(before=[(module, partial(self._begin, layer)) for module, layer in at]):
            try:
                yield
            finally:
                self._reset()

    def _begin(self, layer: int | None, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1:
            kwargs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
        given = (*args, *(kwargs.get(n) for n in _READ))
        read = next((v for v in given if isinstance(v, Tensor) and v.ndim >= 2), None)
        if read is not None:
            self.shape = int(read.shape[0]), int(read.shape[1])
        if layer is None:  # the whole model: a new pass
            self.offset, self.padded = 0, None
        caches = [kwargs[n] for n in CACHES if kwargs.get(n) is not None]
        if caches:
            self.offset = cached_tokens(caches[0], layer)
        elif layer is not None and "past_kv_cache_entry" in kwargs:
            self.offset = 0
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.padded = (mask != 0).long().argmax(-1)


def cached_tokens(cache: Any, layer: int | None) -> int:
    """How many tokens a cache holds: TransformerLens's entry or list of entries, or Hugging Face's."""
    if isinstance(keys := getattr(cache, "past_keys", None), Tensor):
        return int(keys.shape[1])
    if callable(length := getattr(cache, "get_seq_length", None)):
        return int(length() if layer is None else length(layer))
    try:
        return cached_tokens(cache[0], layer)
    except (TypeError, IndexError, KeyError):
        return 0


# From a norm's input and output to another output.
Change = Callable[[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]], Float[Tensor, "*batch d"]]

# What reads a norm in attention, in the order in which HookedTransformer calls the norm for them; and how the inputs of
# an attention module and the projections of a bridge's are called.
PARTS = ("queries", "keys", "values")
INPUTS = {"queries": "query_input", "keys": "key_input", "values": "value_input"}
_PROJECTION = {"queries": "q", "keys": "k", "values": "v"}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
HANDLES = ("fwd_hooks", "bwd_hooks")  # where a hook point keeps its handles


class InterventionError(ValueError):
    """An intervention that cannot be made, or that would be made twice."""


class LostEditError(InterventionError):
    """An edit that does not reach what the model computes (names the site)."""


@contextmanager
def silent(module: nn.Module, keep: Callable[[nn.Module, int], bool] = lambda _point, _key: False) -> Iterator[None]:
    """No hook is called at the hook points in a module while it lasts, but those that `keep` keeps, by number.

    Hooks that are added inside work, and stay. Dictionaries and handles of hooks remain those that they were.
    """
    taken = []
    for point in module.modules():
        if hasattr(point, HANDLES[0]) and any(getattr(point, store) for store in HOOKS):
            before = {store: list(getattr(point, store).items()) for store in HOOKS}
            handles = {name: list(getattr(point, name)) for name in HANDLES}
            taken.append((point, before, handles))
            for store in HOOKS:
                kept = [(k, h if keep(point, k) else _nothing) for k, h in before[store]]
                # A norm of the laboratory computes in another order where there are no hooks, so that rounding differs.
                refill(
                    getattr(point, store),
                    kept if store == "_forward_hooks" else [e for e in kept if e[1] is not _nothing],
                )
            for name in HANDLES:
                setattr(point, name, [h for h in handles[name] if keep(point, h.hook.id)])
    try:
        yield
    finally:
        for point, before, handles in taken:
            for store, hooks in before.items():
                known = {key for key, _ in hooks}
                refill(
                    getattr(point, store), hooks + [(k, h) for k, h in getattr(point, store).items() if k not in known]
                )
            for name, known_handles in handles.items():
                setattr(point, name, known_handles + [h for h in getattr(point, name) if h not in known_handles])


def _nothing(*_: object) -> None:
    """A hook that does nothing."""


def sounding(store: Mapping[int, Any]) -> list[tuple[int, int]]:
    """The numbers and identities of the hooks in a dictionary that are not switched off by `silent`."""
    return [(key, id(hook)) for key, hook in store.items() if hook is not _nothing]


def refill(store: dict[int, Any], hooks: Sequence[tuple[int, Any]]) -> None:
    """Give a dictionary of hooks other entries; not by its own methods, which note what is added (`sealing`)."""
    OrderedDict.clear(store)
    for key, hook in hooks:
        OrderedDict.__setitem__(store, key, hook)


class Edit:
    """A change of what one norm computes.

    Attributes:
        site: the norm.
        label: what it does, for messages.
        suspended: while True the norm is left alone.
        calls: how often the norm ran under it.
        positions: what `change` asks where position 0 is; None if it does not ask.
    """

    # Whether everything that reads the norm sees the edit; otherwise the norm's own output stays (`keep`).
    whole = True
    divides = True  # whether it divides by what `hook_scale` shows

    def __init__(self, site: Site, change: Change, label: str, positions: Positions | None = None) -> None:
        self.site, self.change, self.label, self.positions = site, change, label, positions
        self.suspended = False
        self.calls = 0

    def divisor(self, x: Float[Tensor, "*batch d"], sigma: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch 1"]:
        """What the edited norm divides by, for `hook_scale`; `sigma` is what the norm would divide by otherwise."""
        return sigma

    def normalized(self, x: Float[Tensor, "*batch d"], used: Float[Tensor, "*batch 1"]) -> Float[Tensor, "*batch d"]:
        """The edited norm before gain and bias, for `hook_normalized`; `used`: what `hook_scale` returned."""
        return self.site.project(x) / used

    def after(self, x: Float[Tensor, "*batch d"], y: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        """What is still to be done to the output once gain and bias are applied."""
        return self.change(x, y)

    def keep(self, x: Tensor, shown: Tensor, intact: Tensor) -> None:
        """Take an input of the norm, its output, and its output without hooks (edits that only some readers see)."""

    def install(self, model: HookedModel | nn.Module, stack: ExitStack) -> None:
        """Put the edit on; `stack` takes it off."""
        stack.callback(EditedNorm.add(self))

    def finish(self) -> None:
        """Raise LostEditError if what was computed was not read; called when the `with` block ends without an error."""


class EditedNorm:
    """The forward of a norm's module while edits of it last.

    Attributes:
        site: the norm.
        edits: in the order in which they were added.
    """

    def __init__(self, site: Site) -> None:
        self.site, self.edits = site, list[Edit]()
        self.before = site.module.__dict__.get("forward")
        self._warned = False

    @classmethod
    def add(cls, edit: Edit) -> Callable[[], None]:
        """Add an edit to what its norm is under; returns what removes it again."""
        entries = edit.site.module.__dict__  # not by setattr, which a bridge passes to what it wraps
        there = entries.get("forward")
        self = entries["forward"] = there if isinstance(there, cls) else cls(edit.site)
        self.edits.append(edit)

        def remove() -> None:
            self.edits.remove(edit)
            if not self.edits and entries.get("forward") is self:
                set_forward(edit.site.module, self.before)

        return remove

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        active = [e for e in self.edits if not e.suspended]
        if not active:
            return self._intact(*args, **kwargs)
        linear = next((e for e in active if isinstance(e, LinearEdit)), None)
        edit = next((e for e in active if e.whole and e is not linear), None)
        x, shown, unhooked = self._edited(linear, edit, args, kwargs)
        for each in active:
            each.calls += 1
            each.keep(x, shown, unhooked)
        return shown

    def __reduce_ex__(self, _protocol: Any) -> Any:
        """Refuse a copy of the model (copy.deepcopy, pickle, torch.save): nothing would end the edit in it.

        Raises:
            InterventionError: always.
        """
        raise InterventionError(
            f"{self.site.name} is under an intervention ({self.edits[0].label if self.edits else 'ended'}), and a copy "
            "of the model would stay under it for good: copy or save the model outside the `with` block (its "
            "state_dict can be taken inside)"
        )

    def _intact(self, *args: Any, **kwargs: Any) -> Any:
        module = self.site.module
        return type(module).forward(module, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)

    def _edited(
        self, linear: LinearEdit | None, edit: Edit | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The norm's input, its output as the model goes on with it, and its output without any hooks."""
        points = {n: p for n, p in self.site.module.named_children() if hasattr(p, "fwd_hooks")}
        hooked = any(getattr(p, store) for p in points.values() for store in HOOKS)
        x = tensors_in(args, kwargs)[0]
        if hooked and "hook_in" in points:
            given, x = x, points["hook_in"](x)
            args = tuple(x if value is given else value for value in args)
            kwargs = {name: x if value is given else value for name, value in kwargs.items()}
        with silent(self.site.module) if hooked else nullcontext():
            y = self._intact(*args, **kwargs)
        out = y if linear is None else linear.change(x, y)
        out = out if edit is None else edit.change(x, out)
        if not hooked:
            return x, out, out
        shown = self._through(points, linear, edit, x, out)
        return x, _passed(points["hook_out"], shown)[0] if "hook_out" in points else shown, out

    def _through(
        self, points: Mapping[str, nn.Module], linear: LinearEdit | None, edit: Edit | None, x: Tensor, out: Tensor
    ) -> Tensor:
        """The output through `hook_scale` and `hook_normalized`; where their hooks change nothing, it is `out`."""
        formula = edit or Edit(self.site, lambda _x, y: y, "intact")
        wide = at_least_float32(x)
        sigma = self.site.sigma(wide) if linear is None else linear.sigma(x).to(wide)
        divisor, point = formula.divisor(wide, sigma), points["hook_scale"]
        if torch.is_grad_enabled() and point._backward_hooks and not divisor.requires_grad and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.site.name}.hook_scale: what this norm divides by is held, so it has no gradient and the "
                "backward hook there is not called",
                stacklevel=2,
            )
        used, same_scale = _passed(point, divisor)
        if not (same_scale or formula.divides):
            raise LostEditError(
                f"{self.site.name}: a hook at hook_scale changes what this norm divides by, and {formula.label} does "
                "not divide by it: remove the hook, or put it at hook_normalized"
            )
        normalized, same = _passed(points["hook_normalized"], formula.normalized(wide, used))
        through = formula.after(x, self.site.affine(normalized, live=True).to(out.dtype))
        if not (same and same_scale):
            return through
        if not through.requires_grad:
            return out
        # The value is that of `out`, bit for bit; the gradient goes through the hook points.
        return (through - through.detach()) + out.detach()


def _passed(point: nn.Module, given: Tensor) -> tuple[Tensor, bool]:
    """What the hooks of a point make of a tensor, and whether that is what they were given."""
    if not any(getattr(point, store) for store in HOOKS):
        return given, True
    before = given.detach()
    out = point(given.clone())  # a hook may write to what it is given
    return out, out.shape == before.shape and bool(torch.equal(out.detach(), before))


class PartEdit(Edit):
    """An edit that one projection of attention that reads this norm sees alone.

    Attributes:
        part: one of PARTS.
        waiting: outputs of the norm, and what the projection should read instead of each.
        reader: the attention module whose projection did; None until then.
    """

    whole = False

    def __init__(self, edit: Edit, part: str = "keys") -> None:
        super().__init__(edit.site, edit.change, edit.label, edit.positions)
        self.part = part
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.reader: nn.Module | None = None
        self.adds_positions = False

    def keep(self, x: Tensor, shown: Tensor, intact: Tensor) -> None:
        self.waiting.append((shown, self.change(x, intact)))

    def install(self, model: HookedModel | nn.Module, stack: ExitStack) -> None:
        super().install(model, stack)
        positions = getattr(getattr(model, "cfg", None), "positional_embedding_type", "")
        self.adds_positions = positions == "shortformer" and self.part != "values"
        for attn in attentions(model).values():
            # HookedTransformer and lab models name the input; a bridge has a module for each projection.
            named = INPUTS[self.part] in inspect.signature(attn.forward).parameters
            module = attn if named else dict(attn.named_children()).get(_PROJECTION[self.part])
            if module is None:
                raise InterventionError(
                    f"{type(attn).__name__} has no separate projection of {self.part}, so only={self.part!r} cannot be "
                    "had for this architecture: edit the whole norm with only=None"
                )
            hook = partial(self._replace, attn, named)
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            stack.callback(attn.register_forward_hook(self.finish).remove)

    def _replace(self, attn: nn.Module, named: bool, _m: nn.Module, args: Any, kwargs: Any) -> Any:
        """A pre-hook that replaces what this part is projected from."""
        name = INPUTS[self.part]
        new = self._instead(attn, kwargs.get(name, args[0] if args else None))
        if new is None:
            return None
        return (args, {**kwargs, name: new}) if named else ((new, *args[1:]), kwargs)

    def _instead(self, attn: nn.Module, read: object) -> Tensor | None:
        """What the projection in `attn` should read instead of `read`, if that is this norm's output."""
        if not isinstance(read, Tensor):
            return None
        # HookedTransformer calls the norm for queries, keys and values in this order.
        own = self.waiting[-3:][PARTS.index(self.part) :][:1] if len(self.waiting) >= len(PARTS) else []
        for output, changed in (*own, *reversed(self.waiting)):
            if output.shape == read.shape and torch.equal(output, read):
                self.waiting.clear()
                self.reader = attn
                return changed
        return None

    def finish(self, attn: nn.Module | None = None, *_: object) -> None:
        """Raise LostEditError if a changed output was not read, by this attention layer or (None) by any."""
        if self.waiting and self.reader is attn:
            why = (
                f"{self.part} are made of more than this norm's output (positional_embedding_type='shortformer' adds "
                "position embeddings to it):"
                if self.adds_positions
                else f"no projection of {self.part} read this norm's output as it is (split or repeated per head on "
                "the way?): switch use_split_qkv_input and use_attn_in off, or"
            )
            raise LostEditError(
                f"{self.site.name}: the edit for {self.part} alone was lost, because {why} edit the whole norm with "
                "only=None"
            )


def set_forward(module: nn.Module, forward: Any) -> None:
    """Give an instance its own forward, or (None) that of its class; not by setattr, which a bridge passes on."""
    module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward


def edits_on(module: nn.Module) -> list[Edit]:
    """The edits that a norm's module is under."""
    forward = module.__dict__.get("forward")
    return list(forward.edits) if isinstance(forward, EditedNorm) else []


def own_forward(module: nn.Module) -> Any:
    """The forward of its own that a module has, edits apart; None where it has that of its class."""
    forward = module.__dict__.get("forward")
    return forward.before if isinstance(forward, EditedNorm) else forward


@contextmanager
def quiet(model: HookedModel | nn.Module) -> Iterator[None]:
    """Without the user's hooks at hook points while it lasts: short passes over tokens of ours run on the model itself.

    Permanent hooks stay, those that TransformerLens and ln_probe put there, and those that a measurement keeps.
    """
    if getattr(cast(nn.Module, model)._forward_hooks, "cover", None) is not None:  # (`sealing` has the others off)
        yield
        return

    def belongs(point: nn.Module, key: int) -> bool:
        permanent = any(h.is_permanent for name in HANDLES for h in getattr(point, name) if h.hook.id == key)
        users = user_hooks(point)
        there = {k: hook for store in HOOKS for k, hook in getattr(point, store).items()} | users
        # (of hooks that were added by name, those of `add_caching_hooks` are the user's too)
        lens = "transformer_lens.model_bridge." if key in users else "transformer_lens."
        return permanent or home_of(there.get(key)).startswith(("ln_probe.", lens))

    with silent(cast(nn.Module, model), belongs):
        yield


def user_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The functions that TransformerLens wrapped at a hook point, by torch's number of the wrapper."""
    handles = [h for name in HANDLES for h in getattr(module, name, ())]
    return {h.hook.id: h.user_hook for h in handles if getattr(h, "user_hook", None) is not None}


def unwrapped(function: Any) -> Any:
    """A function without what `partial` or a binding to an object adds."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__func__", function)


def home_of(function: Any) -> str:
    """The module that a function comes from."""
    function = unwrapped(function)
    return str(getattr(function, "__module__", None) or type(function).__module__)


@contextmanager
def suspended(model: HookedModel | nn.Module) -> Iterator[None]:
    """Without any edit, while it lasts: to look at the unedited model from inside an intervention."""
    asleep = [e for _, module in model.named_modules() for e in edits_on(module) if not e.suspended]
    for edit in asleep:
        edit.suspended = True
    try:
        yield
    finally:
        for edit in asleep:
            edit.suspended = False


@contextmanager
def installed(model: HookedModel | nn.Module, edits: Sequence[Edit]) -> Iterator[None]:
    """The model under these edits; on leaving, as it was, also after an exception.

    Raises:
        InterventionError: a part of attention cannot be reached alone.
        LostEditError: on leaving, if no projection read an edit that was computed.
    """
    with ExitStack() as stack:
        for positions in {id(e.positions): e.positions for e in edits if e.positions is not None}.values():
            stack.enter_context(positions.watch(model))
        for edit in edits:
            edit.install(model, stack)
        yield
        for edit in edits:
            edit.finish()


class LinearEdit(Edit):
    """A forward hook under which a norm is linear. It stands before other edits of the norm, which see its output."""

    def __init__(self, site: Site) -> None:
        super().__init__(site, self._linear, "linearized")
        self.given: Tensor | None = None  # the sigma of another run; None: its own

    def sigma(self, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
        """The sigma that is held on these inputs."""
        if self.given is None:
            return self.site.sigma(at_least_float32(x.detach()))
        return fitted(self.site, self.given, x).to(at_least_float32(x))

    def _linear(self, x: Tensor, y: Tensor) -> Tensor:
        wide = at_least_float32(x)
        linear = self.site.affine(self.site.project(wide) / self.sigma(wide), live=True).to(y.dtype)
        if self.given is not None:
            return linear
        # 0 + y is y, bit for bit, and its gradient is that of `linear`
        return (linear - linear.detach()) + y.detach()


def fitted(site: Site, given: Tensor, x: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch 1"]:
    """A sigma per token of another run, laid out as the norm's input is.

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
        f"{site.name}: sigma was given for tokens {list(given.shape)}, and the norm's input is {list(x.shape)}: "
        "record it on as many tokens (ln_probe.hooks.linearized.sigmas)"
    )


def held(module: nn.Module) -> LinearEdit | None:
    """The linearization that a norm's module is under, if any."""
    return next((e for e in edits_on(module) if isinstance(e, LinearEdit) and not e.suspended), None)
