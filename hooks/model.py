"""What ln_probe needs of a model.

`HookedTransformer` (TransformerLens 3.9), `TransformerBridge` (3.9 and 4.x) and the laboratory's models all provide it;
no model class is imported here.
"""

from __future__ import annotations

import copy
import math
import operator
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@runtime_checkable  # (tests check annotations as the code runs)
class HookedModel(Protocol):
    """A TransformerLens model: hook points by name, a config, blocks in a row."""

    cfg: Any
    blocks: Any

    @property
    def hook_dict(self) -> dict[str, Any]: ...
    def modules(self) -> Iterator[nn.Module]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any: ...


_MEASURABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_model(model: object) -> HookedModel:
    """Return a model that hooks can be put on and whose weights can be measured.

    For a Hugging Face model in memory it is a bridge (`wrapped`): it shares the weights, edits of it reach it alone.

    Raises:
        TypeError: it is something else (says what, and what to pass).
        ValueError: its weights are quantized, or have no values (meta device).
    """
    if isinstance(model, str):
        raise TypeError(f"{model!r} is no model: load it first, ln_probe.load_model({model!r})")
    for name, parameter in model.named_parameters() if isinstance(model, nn.Module) else ():
        if parameter.dtype not in _MEASURABLE or parameter.is_meta:
            where = "on the meta device" if parameter.is_meta else f"quantized ({parameter.dtype})"
            raise ValueError(f"{plain_path(name)} is {where}: load the weights in float32, bfloat16 or float16")
    if isinstance(model, hugging_face_classes()):
        return cast(HookedModel, wrapped(model))
    # (A bridge gathers its `hook_dict` anew each time: it is asked for the attribute, not for its value.)
    hookable = hasattr(type(model), "hook_dict") or "hook_dict" in getattr(model, "__dict__", ())
    if not (isinstance(model, nn.Module) and hookable and hasattr(model, "cfg")):
        raise TypeError(
            f"{type(model).__name__} is not a TransformerLens model: pass a HookedTransformer, a TransformerBridge, "
            "a lab model or a Hugging Face model"
        )
    return cast(HookedModel, model)


def plain_path(path: str) -> str:
    """Return the path of a module or parameter without the names that a bridge inserts for what it wraps."""
    return path.replace("_original_component.", "")


def attentions(blocks: Iterable[nn.Module]) -> dict[int, nn.Module]:
    """Return the attention modules of blocks, by layer; blocks without attention are left out."""
    each = ((layer, getattr(block, "attn", None)) for layer, block in enumerate(blocks))
    return {layer: attn for layer, attn in each if isinstance(attn, nn.Module)}


def z_point(attn: nn.Module) -> nn.Module:
    """Return the hook point of the heads' outputs in attention; ValueError if it has none."""
    if (point := child_of(attn, "hook_z")) is None:
        raise ValueError("attention has no hook_z, so its heads cannot be edited one by one")
    return point


def head_count(attn: nn.Module, cfg: Any) -> int:
    """Return the number of query heads of an attention layer; `cfg`: of the model."""
    weights = getattr(attn, "W_Q", None)
    return int(weights.shape[0]) if isinstance(weights, Tensor) else int(cfg.n_heads)


def by_head(z: Float[Tensor, "batch pos *heads"], heads: int) -> Float[Tensor, "batch pos head d_head"]:
    """Return what a hook point of heads shows with an axis for them: bridges show it flat."""
    return z if z.ndim == 4 else z.unflatten(-1, (heads, -1))


def device_of(parameters: Iterable[Tensor]) -> torch.device:
    """Return the device of a model's first parameter; the CPU where it has none."""
    return next((p.device for p in parameters), torch.device("cpu"))


def dtype_of(parameters: Iterable[Tensor]) -> torch.dtype:
    """Return the format of a model's floating-point parameters; float32 where it has none."""
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return 16-bit values as float32: the sigma of a 16-bit vector would be rounded to three digits."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


WITHOUT_FLOAT64 = {"mps"}  # kinds of devices


def with_float64(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return a tensor where float64 exists: on the CPU, if its device has no such format."""
    return x.cpu() if x.device.type in WITHOUT_FLOAT64 else x


# What a bridge raises where an architecture has no such weight.
ABSENT = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def live_weight(owner: object, name: str) -> Tensor | None:
    """Return a weight, which gradients reach, by its TransformerLens name; None where the module has none."""
    try:
        value = getattr(owner, name, None)
    except ABSENT:
        return None
    return value if isinstance(value, Tensor) else None


def weight_of(owner: object, name: str) -> Tensor | None:
    """Return a weight by its TransformerLens name; None where the module has none."""
    return None if (value := live_weight(owner, name)) is None else value.detach()


def child_of(owner: object, *path: str) -> nn.Module | None:
    """Return the module at a path of attributes; None where there is none."""
    for name in path:
        try:
            owner = getattr(owner, name, None)
        except ABSENT:
            return None
    return owner if isinstance(owner, nn.Module) else None


def before_projection(model: object, w: Float[Tensor, "row d_embed"]) -> Float[Tensor, "row d_model"]:
    """Return columns of W_U as readings of the stream, through OPT-350m's `project_out` between them."""
    projection = weight_of(child_of(model, "project_out"), "weight")
    return w if projection is None else w @ projection.to(w)


def flat(output: Any, length: int, batch: int = 1) -> Float[Tensor, "row wide"]:
    """Return a module's output as rows: the positions of one prompt after the other."""
    value: Tensor = output[0] if isinstance(output, tuple) else output
    value = value.detach()
    if batch > 1 and (value.shape[:2] == (1, length) or (value.ndim == 2 and len(value) == length)):
        value = value.reshape(1, length, -1).expand(batch, -1, -1)  # a bridge shows positions once for all prompts
    return value.reshape(batch * length, -1)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the floating-point tensors among the arguments of a module's call."""
    return [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]


Hook = tuple[nn.Module, Callable[..., Any]]


@contextmanager
def hooks_on(after: Iterable[Hook] = (), before: Iterable[Hook] = ()) -> Iterator[None]:
    """Put forward hooks (`after`) and forward pre-hooks (`before`) on modules inside a `with` block.

    Hooks get (module, args, kwargs, output), pre-hooks (module, args, kwargs).
    """
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module, hook in before]
    handles += [module.register_forward_hook(hook, with_kwargs=True) for module, hook in after]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# The edits that modules are under (`hooks.edits`).
_EDITS: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()


def edits_on(module: nn.Module) -> list[Any]:
    """Return the edits that a norm's module is under."""
    return list(_EDITS.get(module, ()))


def register_edit(module: nn.Module, edit: Any, stack: ExitStack) -> None:
    """Note that a module is under an edit until `stack` is closed."""
    edits = _EDITS.setdefault(module, [])
    edits.append(edit)
    stack.callback(edits.remove, edit)


@contextmanager
def unedited(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run a model's modules without edits, and without users' hooks at hook points: for tokens of ours."""
    below = set(modules)
    edits = [edit for module, each in _EDITS.items() if module in below for edit in each if not edit.suspended]
    names = ("_forward_hooks", "_backward_hooks", "fwd_hooks", "bwd_hooks")
    points = [vars(m) for m in below if vars(m).get("fwd_hooks") or vars(m).get("bwd_hooks")]
    before = [(point, {name: point[name] for name in names}) for point in points]
    try:
        for edit in edits:
            edit.suspended = True
        for point, stores in before:
            point.update({name: type(store)() for name, store in stores.items()})
        yield
    finally:
        for point, stores in before:
            point.update(stores)
        for edit in edits:
            edit.suspended = False


def context_of_config(config: object) -> int | None:
    """Return the number of positions that a Hugging Face config names; None if it names none (BLOOM)."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len")
    values = (getattr(config, name, None) for name in names)
    return next((int(v) for v in values if isinstance(v, int) and v > 0), None)


@dataclass(frozen=True, eq=False)
class Facts:
    """What prompts and losses depend on in a model, as it is now; no reference to it.

    Attributes:
        tokenizer: None: the model has none.
        vocabulary: how many tokens there are.
        context: the largest number of positions.
        prepend_bos: whether it was trained on texts that begin with the tokenizer's first token.
        special: ids of its "eos", "bos" and "pad" tokens.
        missing_head: why its logits mean nothing (its head was not in the checkpoint); empty: they do.
        bundled_prompts, bundled_constants: what a bundled model brings; of others None, empty.
    """

    tokenizer: Any
    vocabulary: int
    context: int
    prepend_bos: bool
    special: Mapping[str, list[int]]
    missing_head: str
    bundled_prompts: Any
    bundled_constants: Mapping[str, Any]


def facts_of(model: HookedModel) -> Facts:
    """Return the facts of a model, from its configurations, its tokenizer and its loader.

    Special tokens outside the vocabulary do not count (GPT-2's default configuration names 50256 for
    any vocabulary).
    """
    cfg, original, loader = model.cfg, getattr(model, "original_model", None), vars(model)
    tokenizer, config = getattr(model, "tokenizer", None), getattr(original, "config", None)
    vocabulary, special = int(cfg.d_vocab), dict[str, list[int]]()
    for kind in ("eos", "bos", "pad"):
        holders = (tokenizer, config, getattr(original, "generation_config", None))
        values = [getattr(holder, f"{kind}_token_id", None) for holder in holders]
        values.append(loader.get("special_token_ids", {}).get(kind))
        ids = [i for value in values for i in (value if isinstance(value, list | tuple) else [value])]
        special[kind] = list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocabulary))
    return Facts(
        tokenizer,
        vocabulary,
        context_of_config(config) or int(cfg.n_ctx),
        getattr(cfg, "default_prepend_bos", True),
        special,
        str(loader.get("missing_head", "")),
        loader.get("bundled_prompts"),
        loader.get("shipped_constants", {}),
    )


def outputs(model: HookedModel) -> int:
    """Return how many tokens have a logit."""
    W_U = weight_of(model, "W_U")
    return int(model.cfg.d_vocab) if W_U is None else int(W_U.shape[1])


def probe_tokens(vocabulary: int, length: int) -> Int[Tensor, " pos"]:
    """Return token ids spread evenly over the vocabulary."""
    return torch.linspace(1, vocabulary - 1, length).long()


def run(model: HookedModel, tokens: Int[Tensor, "batch pos"], return_type: str | None = None) -> Any:
    """Run a forward pass without gradients."""
    with torch.no_grad():
        return model(tokens.to(device_of(model.parameters())), return_type=return_type)


@contextmanager
def evaluating(model: HookedModel | nn.Module) -> Iterator[None]:
    """Turn dropout off while it lasts; every module has its own mode afterwards."""
    parts = (model, getattr(model, "original_model", None))  # (of which a bridge is no parent)
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def logit_factor(model: HookedModel) -> float:
    """Return the factor of a model's logits in its config (Granite divides by `logits_scaling`)."""
    holders = (model, getattr(model, "original_model", None))
    configs = [*(getattr(holder, "config", None) for holder in holders), model.cfg]
    factor = 1.0
    for name, power in (("logit_scale", 1.0), ("lm_head_multiplier", 1.0), ("logits_scaling", -1.0)):
        values = (getattr(config, name, None) for config in configs)
        value = next((v for v in values if isinstance(v, int | float) and v > 0), 1.0)
        factor *= float(value) ** power
    return factor


# ------------------------------------------------ Hugging Face models in memory

# Largest difference of logits between an original and its TransformerLens model, relative to the largest logit.
# Rounding makes 1e-6 (1e-5 where scores are large), a wrong rotary base or mask 1e-3 and more. In half precision only
# gross errors are seen.
SAME_LOGITS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_COMPARED = 48  # tokens: enough for a wrong rotary base, mask or position table to show
_LONGEST_WINDOW = 304  # of local attention that is exercised beyond its window


def hugging_face_classes() -> tuple[Any, ...]:
    """Return the class of Hugging Face models, once transformers is imported."""
    transformers = sys.modules.get("transformers")
    return () if transformers is None else (transformers.PreTrainedModel,)


# The bridge around each Hugging Face model.
_WRAPPED: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def wrapped(model: Any) -> nn.Module:
    """Return a bridge around a copy of a Hugging Face model that shares its parameters, with the model's own logits.

    It is built at each call, unless the model is under an edit.

    Raises:
        ValueError: TransformerLens has no bridge for it, or a bridge with other logits (names the first module).
    """
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    if any(edits_on(module) for module in model.modules()):
        return _WRAPPED[model]
    copied = same_weights(model).eval()
    complete_token_ids(copied.config)
    copied.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
    name = type(model).__name__
    dtype, device = dtype_of(model.parameters()), device_of(model.parameters())
    options: dict[str, Any] = {"dtype": dtype, "device": device, "model_name": "local"}
    try:
        bridge = build_bridge_from_module(copied, name, hf_config=copied.config, **options)
        own, others, _ = _outputs(model, model), _outputs(bridge, copied), bridge.blocks
    except Exception as error:
        raise ValueError(f"TransformerLens has no bridge for {name} with blocks that run ({error})") from error
    difference, bound = relative_difference(others[""], own[""]), SAME_LOGITS[dtype]
    if not difference <= bound:
        common = [path for path in own if path in others]
        place = next(path for path in common if not relative_difference(others[path], own[path]) <= bound)
        raise ValueError(
            f"TransformerLens's bridge computes other logits than this {name} (by {difference:.1e} of the largest), "
            f"first in {place}: pass a TransformerLens model that computes yours"
        )
    bridge.__dict__["logits_difference"] = difference
    _WRAPPED[model] = bridge.train(model.training)
    return _WRAPPED[model]


def same_weights(model: nn.Module) -> Any:
    """Return a copy of a model's modules around the very same parameters and buffers."""
    shared = {id(t): t for t in chain(model.parameters(), model.buffers())}
    # What a pass has left on a module with its graph (a bridge's attention pattern) has no copy.
    left = (value for module in model.modules() for value in vars(module).values())
    shared |= {id(t): t.detach() for t in left if isinstance(t, Tensor) and not t.is_leaf}
    return copy.deepcopy(model, dict(shared))


def complete_token_ids(config: Any) -> None:
    """Set the ids of special tokens that a config lacks to None: TransformerLens reads them all."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):
            setattr(config, name, None)


def _outputs(model: Any, inner: nn.Module) -> dict[str, Tensor]:
    """Return the outputs of the modules of `inner` in a pass of a model, by path; its logits as ""."""
    outputs: dict[str, Tensor] = {}

    def record(path: str, *seen: Any) -> None:
        output = getattr(seen[-1], "logits", seen[-1])
        output = output[0] if isinstance(output, tuple) and output else output
        if isinstance(output, Tensor):
            outputs.setdefault(plain_path(path), output.detach())

    after: list[Hook] = []
    for path, module in inner.named_modules():
        if path and not path.endswith("_original_component"):
            after.append((module, partial(record, path)))
    with torch.no_grad(), evaluating(model), hooks_on(after):
        record("", model(ordinary_tokens(inner.config, device_of(inner.parameters()))))
    return outputs


def ordinary_tokens(config: Any, device: torch.device) -> Int[Tensor, "batch pos"]:
    """Return seeded random token ids [1, pos] that fit a Hugging Face config, without special tokens, which can change
    the attention mask."""
    windows = (getattr(config, name, None) for name in ("window_size", "sliding_window"))
    window = next((w for w in windows if isinstance(w, int) and 0 < w < _LONGEST_WINDOW), 0)
    length = min(max(_COMPARED, window + 16), context_of_config(config) or _COMPARED)
    named = (getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos"))
    special = {i for ids in named for i in (ids if isinstance(ids, list | tuple) else [ids])}  # Llama 3: several ends
    ordinary = [i for i in range(min(int(config.vocab_size), 50_000)) if i not in special] or [0]
    picks = torch.randint(len(ordinary), (1, length), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ordinary)[picks].to(device)


def relative_difference(values: Float[Tensor, "*shape"], reference: Float[Tensor, "*shape"]) -> float:
    """Return the largest difference over the largest reference; infinite if shapes differ or values are NaN."""
    if values.shape != reference.shape:
        return math.inf
    difference, scale = float((values - reference).abs().max()), float(reference.abs().max())
    return math.inf if math.isnan(difference) or math.isnan(scale) else difference / (scale or 1.0)


# ---------------------------------------------------------------- small helpers


def whole_number(value: object, what: str, least: int | None = None, error: type[Exception] = ValueError) -> int:
    """Return a whole number of any kind (also an entry of a tensor or an array), but no truth value.

    Raises:
        ValueError (or `error`): something else, or less than `least`.
    """
    number = None
    if not isinstance(value, bool) and getattr(value, "dtype", None) != torch.bool:
        with suppress(TypeError, RuntimeError):
            number = operator.index(value)  # type: ignore[arg-type]
    if number is None or (least is not None and number < least):
        allowed = "" if least is None else f", {least} or more"
        raise error(f"{what} must be a whole number{allowed}, got {value!r}")
    return number


class OneLine:
    """A dataclass (made with `repr=False`) that shows its fields in one line, arrays by their shapes."""

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        shown = ", ".join(f"{name}={_brief(value)}" for name, value in values.items() if not name.startswith("_"))
        text = " ".join(f"{type(self).__name__}({shown})".split())
        return text if len(text) <= 160 else text[:156] + "...)"


def _brief(value: Any) -> str:
    shape = getattr(value, "shape", ())
    return f"<{' x '.join(map(str, shape))}>" if len(shape) else reprlib.repr(value)
