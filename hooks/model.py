"""What ln_probe needs of a model.

`HookedTransformer` (TransformerLens 3.9), `TransformerBridge` (3.9 and 4.x) and the laboratory's models all provide it;
no model class is imported here.
"""

from __future__ import annotations

import copy
import math
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from functools import partial
from itertools import chain
from typing import Any, Protocol, cast, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


@runtime_checkable
class HookedModel(Protocol):
    """A TransformerLens model: hook points by name, a config, blocks in a row."""

    cfg: Any

    @property
    def hook_dict(self) -> dict[str, Any]: ...
    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Any: ...


def check_model(model: object) -> HookedModel:
    """`model` itself, if it is one that hooks can be put on and whose weights can be measured.

    Of a Hugging Face model in memory it is a bridge that shares the weights (`in_memory.wrapped`): what is measured on
    it is true of the model, and edits of it do not reach the model.

    Raises:
        TypeError: it is something else (says what, and what to pass).
        ValueError: its weights are quantized, have no values (meta device), or are on several devices.
    """
    if isinstance(model, str):
        raise TypeError(
            f"got the string {model!r} where a model is needed: load it first, ln_probe.load_model({model!r})"
        )
    if is_hugging_face(model):
        check_weights(cast(nn.Module, model))
        model = wrapped(model)
    # (A bridge gathers its `hook_dict` anew each time: it is asked for the attribute, not for its value.)
    hookable = hasattr(type(model), "hook_dict") or "hook_dict" in getattr(model, "__dict__", ())
    if not (isinstance(model, nn.Module) and hookable and hasattr(model, "cfg")):
        raise TypeError(
            f"{type(model).__name__} is not a TransformerLens model: pass a HookedTransformer, a TransformerBridge or "
            "a lab model, or a Hugging Face model in memory (ln_probe.load_model loads a name or folder)"
        )
    check_weights(model)
    return cast(HookedModel, model)


_MEASURABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Classes that hold packed integers instead of weights: bitsandbytes (Linear4bit, Linear8bitLt), torch's quantized
# modules, GPTQ (QuantLinear), AWQ (WQLinear), HQQ.
_QUANTIZED = re.compile(r"bitsandbytes|quantized|QuantLinear|Linear[48]bit|WQLinear|HQQLinear")


def check_weights(model: nn.Module) -> None:
    """Raise ValueError if a model's weights cannot be measured: quantized, without values or gradients, or on several
    devices."""
    modules, packed = modules_of(model), ""
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    devices = {p.device: "" for p in parameters}
    for kind in dict.fromkeys(map(type, modules)):
        if _QUANTIZED.search(name := f"{kind.__module__}.{kind.__name__}"):
            path = next(path for path, module in model.named_modules() if type(module) is kind)
            packed = packed or f"{plain_path(path)} is a {name}"
    if any(p.is_inference() for p in parameters):
        name = next(plain_path(path) for path, p in model.named_parameters() if p.is_inference())
        raise ValueError(f"{name} was made in torch.inference_mode, without gradients: load the model outside it")
    measurable = all(p.dtype in _MEASURABLE for p in parameters) and "meta" not in [d.type for d in devices]
    if measurable and not packed and len(devices) <= 1:
        return
    for path, parameter in model.named_parameters():
        if parameter.dtype not in _MEASURABLE:
            packed = packed or f"{plain_path(path)} holds {str(parameter.dtype).removeprefix('torch.')}"
        devices[parameter.device] = devices[parameter.device] or plain_path(path)
    if packed:
        raise ValueError(
            f"the model's weights are quantized ({packed}): norms, keys and margins are measured on floating-point "
            "weights. Load it unquantized (float32, bfloat16, float16; load_model unpacks a .gguf file)"
        )
    for device, name in devices.items():
        if device.type == "meta":
            raise ValueError(f"{name} is on the meta device: the model has no weights to measure. Load it first")
    where = ", ".join(f"{name} on {device}" for device, name in devices.items())
    raise ValueError(f"the model's weights are on several devices ({where}): move it to one")


def modules_of(model: object) -> list[nn.Module]:
    """Return the modules of a model, each once, in an order that depends on its structure alone (ten times as fast as
    `modules()`)."""
    seen: dict[int, nn.Module] = {}
    left = [cast(nn.Module, model)]
    while left:
        module = left.pop()
        if id(module) not in seen:
            seen[id(module)] = module
            left.extend(child for child in module._modules.values() if child is not None)
    return list(seen.values())


def plain_path(path: str) -> str:
    """Return the path of a module or parameter without the names that a bridge inserts for what it wraps."""
    return path.replace("_original_component.", "")


def blocks(model: HookedModel | nn.Module) -> Sequence[nn.Module]:
    return list(getattr(model, "blocks", ()))


def attentions(model: HookedModel | nn.Module) -> dict[int, nn.Module]:
    """Return the attention modules of a model, by layer; blocks without attention are left out."""
    each = ((layer, getattr(block, "attn", None)) for layer, block in enumerate(blocks(model)))
    return {layer: attn for layer, attn in each if isinstance(attn, nn.Module)}


def attention_of(model: HookedModel, layer: int) -> nn.Module:
    """Return the attention module of a block.

    Raises:
        ValueError: it has none.
    """
    if (attn := attentions(model).get(layer)) is None:
        raise ValueError(f"block {layer} has no attention whose heads could be edited")
    return attn


def z_point(model: HookedModel, layer: int) -> nn.Module:
    """Return the hook point of the heads' outputs in a block, [batch pos head d_head] or flat over heads.

    Raises:
        ValueError: there is none.
    """
    point = child_of(attention_of(model, layer), "hook_z")
    if point is None:
        raise ValueError(f"block {layer} has no hook_z, so its heads cannot be edited one by one")
    return point


def head_count(model: HookedModel, layer: int) -> int:
    """Return the number of query heads of a block."""
    weights = getattr(getattr(blocks(model)[layer], "attn", None), "W_Q", None)
    return int(weights.shape[0]) if isinstance(weights, Tensor) else int(model.cfg.n_heads)


def queries_per_key(model: HookedModel, layer: int) -> int:
    """Return how many query heads of a block share a key (grouped queries); 1 without."""
    shared = getattr(model.cfg, "n_key_value_heads", None)
    return max(1, head_count(model, layer) // int(shared)) if shared else 1


def by_head(z: Float[Tensor, "batch pos *heads"], heads: int) -> Float[Tensor, "batch pos head d_head"]:
    """Return what a hook point of heads shows with an axis for them: bridges show it flat."""
    return z if z.ndim == 4 else z.unflatten(-1, (heads, -1))


def n_layers(model: HookedModel) -> int:
    return len(blocks(model))


def device_of(model: HookedModel | nn.Module) -> torch.device:
    return next((p.device for _, p in model.named_parameters()), torch.device("cpu"))


def dtype_of(model: HookedModel | nn.Module) -> torch.dtype:
    """The format of a model's floating-point parameters; float32 where it has none."""
    return next((p.dtype for _, p in model.named_parameters() if p.is_floating_point()), torch.float32)


def at_least_float32(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """16-bit values as float32: the sigma of a 16-bit vector would be rounded to three digits."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def weight_of(owner: object, name: str) -> Tensor | None:
    """A weight by its TransformerLens name; None where the module has none."""
    try:
        value = getattr(owner, name, None)
    except ABSENT:
        return None
    return value.detach() if isinstance(value, Tensor) else None


# What a bridge raises where an architecture has no such weight.
ABSENT = (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


def before_projection(model: object, w: Float[Tensor, "row d_embed"]) -> Float[Tensor, "row d_model"]:
    """Columns of W_U as readings of the residual stream: the same unless a `project_out` comes between (OPT-350m)."""
    projection = weight_of(child_of(model, "project_out"), "weight")
    return w if projection is None else w @ projection.to(w)


def child_of(owner: object, *path: str) -> nn.Module | None:
    """The module at a path of attributes; None where there is none."""
    for name in path:
        try:
            owner = getattr(owner, name, None)
        except ABSENT:
            return None
    return owner if isinstance(owner, nn.Module) else None


def unembedding(model: HookedModel) -> nn.Module | None:
    """The module that reads logits off the end of the stream (of OPT-350m, the projection before the unembedding)."""
    return child_of(model, "project_out") or child_of(model, "unembed")


def flat(output: Any, length: int, batch: int = 1) -> Float[Tensor, "row wide"]:
    """A module's output, a row per position of one prompt after the other, whichever way the world lays it out."""
    value: Tensor = output[0] if isinstance(output, tuple) else output
    value = value.detach()
    if batch > 1 and (value.shape[:2] == (1, length) or (value.ndim == 2 and len(value) == length)):
        value = value.reshape(1, length, -1).expand(batch, -1, -1)  # a bridge shows positions once for all prompts
    return value.reshape(batch * length, -1)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The floating-point tensors among the arguments of a module's call."""
    return [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.is_floating_point()]


Hook = tuple[nn.Module, Callable[..., Any]]


@contextmanager
def hooks_on(after: Iterable[Hook] = (), before: Iterable[Hook] = ()) -> Iterator[None]:
    """Put forward hooks (`after`) and forward pre-hooks (`before`) on modules while the `with` block lasts.

    Hooks get (module, args, kwargs, output), pre-hooks (module, args, kwargs), as PyTorch calls them `with_kwargs`.
    """
    with ExitStack() as stack:
        for module, hook in before:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module, hook in after:
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        yield


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
def unedited(model: HookedModel | nn.Module) -> Iterator[None]:
    """Run without edits and without the hooks of users at hook points: for passes over tokens of ours."""
    modules = modules_of(model)
    own = set(modules)
    edits = [e for module, some in list(_EDITS.items()) if some and module in own for e in some if not e.suspended]
    points = [m for m in modules if vars(m).get("fwd_hooks") or vars(m).get("bwd_hooks")]
    names = ("_forward_hooks", "_backward_hooks", "fwd_hooks", "bwd_hooks")
    before = [(point, {name: vars(point)[name] for name in names}) for point in points]
    try:
        for edit in edits:
            edit.suspended = True
        for point, stores in before:
            vars(point).update({name: type(store)() for name, store in stores.items()})
        yield
    finally:
        for point, stores in before:
            vars(point).update(stores)
        for edit in edits:
            edit.suspended = False


# Names under which Hugging Face configs keep the largest number of positions.
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


def context_of_config(config: object) -> int | None:
    """The largest number of positions that a Hugging Face config names; None if it names none (BLOOM, Mamba)."""
    values = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    return next((int(v) for v in values if isinstance(v, int) and v > 0), None)


def context_length(model: HookedModel) -> int:
    """The largest number of positions that a model takes.

    A bridge is asked through its original's config, because TransformerLens does not read every name there is (MPT's).
    A HookedTransformer is asked for `cfg.n_ctx`, which `load_model` sets from the checkpoint's config.
    """
    own = context_of_config(getattr(getattr(model, "original_model", None), "config", None))
    return int(model.cfg.n_ctx) if own is None else own


def missing_head(model: object) -> str:
    """Why a model's logits mean nothing: its head was not in the checkpoint; empty if it was.

    `load_model` leaves the reason on models that it made of such a checkpoint. Of other models it cannot be known.
    """
    return str(getattr(model, "__dict__", {}).get("missing_head", ""))


def in_missing_head(model: HookedModel, module: nn.Module) -> bool:
    """Whether a module belongs to a head that was not in the checkpoint (BERT's has a norm)."""
    body = getattr(getattr(model, "original_model", None), "base_model", None)
    return bool(missing_head(model)) and isinstance(body, nn.Module) and all(m is not module for m in body.modules())


def vocabulary_size(model: HookedModel) -> int:
    return int(model.cfg.d_vocab)


def outputs(model: HookedModel) -> int:
    """How many tokens have a logit: `d_vocab_out` where a model has it (its outputs may be others than its inputs)."""
    declared = getattr(model.cfg, "d_vocab_out", None)
    size = declared if isinstance(declared, int) and declared > 0 else vocabulary_size(model)
    W_U = weight_of(model, "W_U")
    return size if W_U is None else min(size, int(W_U.shape[1]))


def probe_tokens(model: HookedModel, length: int) -> Int[Tensor, " pos"]:
    """Token ids spread evenly over the vocabulary, for a short pass; at most the context."""
    return torch.linspace(1, vocabulary_size(model) - 1, min(length, context_length(model))).long()


def run(model: HookedModel, tokens: Int[Tensor, "batch pos"], return_type: str | None = None) -> Any:
    """One forward pass without gradients; logits unless `return_type` says otherwise."""
    with torch.no_grad():
        return model(tokens.to(device_of(model)), return_type=return_type)


@contextmanager
def evaluating(model: HookedModel | nn.Module) -> Iterator[None]:
    """Dropout off while it lasts; every module's own mode afterwards."""
    module = cast(nn.Module, model)
    training, modes = module.training, [(m, m.training) for m in modules_of(model)]
    if not any(mode for _, mode in modes):
        yield
        return
    module.eval()
    try:
        yield
    finally:
        module.train(training)
        for part, mode in modes:
            part.training = mode


def _configs(model: HookedModel | nn.Module) -> list[Any]:
    """The Hugging Face configs of a model and of its original, and its TransformerLens config."""
    original = getattr(model, "original_model", None)
    return [getattr(model, "config", None), getattr(original, "config", None), getattr(model, "cfg", None)]


def active_dropout(modules: Iterable[nn.Module | None]) -> str:
    """Return the class of a module whose dropout is on (training mode and a rate above 0); empty if there is none."""
    for module in modules:
        if module is not None and module.training:
            names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else ("attention_dropout", "dropout")
            rates = (getattr(module, name, 0.0) for name in names)
            if any(isinstance(rate, float) and rate > 0 for rate in rates):
                return type(module).__name__
    return ""


def logit_factor(model: HookedModel) -> float:
    """What W_U's logits are multiplied by, as the config says it (Granite divides by `logits_scaling`); 1 if nothing is
    said."""
    factor = 1.0
    for name, power in (("logit_scale", 1.0), ("lm_head_multiplier", 1.0), ("logits_scaling", -1.0)):
        values = (getattr(config, name, None) for config in _configs(model))
        value = next((v for v in values if isinstance(v, int | float) and v > 0), 1.0)
        factor *= float(value) ** power
    return factor


# ---------------------------------------------------------------------------------------- Hugging Face models in memory

# Largest difference of logits, relative to the largest, between an original and its TransformerLens model. Ports of the
# same arithmetic in another order differ by 1e-6 (1e-5 where scores are large), a wrong rotary base or mask by 1e-3 and
# more. In half precision only gross errors are seen.
SAME_LOGITS = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 2e-2}
_COMPARED = 48  # tokens: enough for a wrong rotary base, mask or position table to show
_LONGEST_WINDOW = 304  # of local attention that is exercised beyond its window


def same_weights(model: nn.Module) -> Any:
    """Return a copy of a model's structure around the very same parameters and buffers: it costs next to no memory.

    Changes to the copy's modules (wrapping, hooks, attention kernels) leave the model as it is.
    """
    shared = {id(t): t for t in chain(model.parameters(), model.buffers())}
    # What a pass has left on a module with its graph (a bridge's attention pattern) has no copy.
    left = (value for module in model.modules() for value in vars(module).values())
    shared |= {id(t): t.detach() for t in left if isinstance(t, Tensor) and not t.is_leaf}
    return copy.deepcopy(model, dict(shared))


def complete_biases(model: nn.Module) -> tuple[str, ...]:
    """Give a GPT-NeoX without attention biases zero ones: TransformerLens fails without them."""
    config: Any = model.config
    if config.model_type != "gpt_neox" or config.attention_bias:
        return ()
    for name, module in model.named_modules():
        if name.endswith((".query_key_value", ".attention.dense")) and isinstance(module, nn.Linear):
            module.bias = nn.Parameter(torch.zeros(module.out_features, dtype=module.weight.dtype))
    config.attention_bias = True
    return ("the model has no attention biases: zeros were put in their place",)


def complete_token_ids(config: Any) -> None:
    """Give a config the ids of special tokens that it lacks, as None.

    TransformerLens and some of transformers' own models read them without a default.
    """
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if not hasattr(config, name):
            setattr(config, name, None)


def is_hugging_face(model: object) -> bool:
    """Return whether this is a plain Hugging Face model; imports nothing."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


# The bridge around each Hugging Face model, with what it was made of (`_structure`).
_WRAPPED: WeakKeyDictionary[nn.Module, tuple[Any, nn.Module]] = WeakKeyDictionary()


def wrapped(model: Any) -> nn.Module:
    """Return a bridge around a copy of a Hugging Face model that shares its parameters.

    Its logits are compared with the model's own at each call, and it is made anew where a module or the configuration
    has changed.

    Raises:
        ValueError: TransformerLens has no bridge for the architecture, or the bridge computes other logits (names the
            first module that does).
    """
    structure, bridge = _WRAPPED.get(model, (None, None))
    if bridge is None or structure != _structure(model):
        structure, bridge = _structure(model), _bridge_of(model)
    try:
        difference = _logit_difference(model, bridge)
    except Exception as error:
        raise ValueError(
            f"TransformerLens's bridge cannot run this {type(model).__name__} ({type(error).__name__}: {error})"
        ) from error
    if not difference <= SAME_LOGITS[dtype_of(model)]:
        raise ValueError(
            f"TransformerLens's bridge computes other logits than this {type(model).__name__} ({difference:.1e} of the "
            f"largest), first in {_first_difference(model, bridge)}: pass a TransformerLens model that computes yours"
        )
    bridge.__dict__["logits_difference"] = difference
    _WRAPPED[model] = structure, bridge.train(model.training)
    return bridge


def _structure(model: Any) -> list[Any]:
    """Return what decides the function of a model beside its weights: configuration, modules, attributes and hooks."""
    plain = (bool, int, float, str, type(None))
    modules: list[Any] = []
    for path, module in model.named_modules():
        hooks = [id(hook) for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())]
        values = {name: value for name, value in vars(module).items() if name != "training"}
        facts = {
            n: v if isinstance(v, plain) else id(v) for n, v in values.items() if isinstance(v, plain) or callable(v)
        }
        modules.append((path, type(module), facts, hooks))
    tensors = [(id(t), t.dtype) for t in chain(model.parameters(), model.buffers())]
    return [repr(model.config), modules, tensors]


def _bridge_of(model: Any) -> nn.Module:
    from transformer_lens.model_bridge.sources import build_bridge_from_module

    copied = same_weights(model).eval()
    complete_token_ids(copied.config)
    complete_biases(copied)
    copied.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
    first = next(model.parameters())
    options = {"hf_config": copied.config, "tokenizer": None, "dtype": first.dtype, "device": first.device}
    try:
        bridge: nn.Module = build_bridge_from_module(copied, type(model).__name__, model_name="local", **options)
    except Exception as error:
        raise ValueError(
            f"TransformerLens has no bridge for {type(model).__name__} ({error}): pass a model with a language-model "
            "head, such as GPT2LMHeadModel"
        ) from error
    return bridge


def _logit_difference(model: Any, bridge: Any) -> float:
    tokens = ordinary_tokens(model.config, device_of(model))
    with torch.no_grad(), evaluating(model), evaluating(bridge):
        own, other = getattr(model(tokens), "logits", None), bridge(tokens, return_type="logits")
    return 0.0 if own is None or not isinstance(other, Tensor) else relative_difference(other, own)


def ordinary_tokens(config: Any, device: torch.device) -> Int[Tensor, "batch pos"]:
    """Return seeded random token ids [1, pos] that fit a Hugging Face config; no mark of a beginning, end or padding,
    which can change the attention mask."""
    windows = (getattr(config, name, None) for name in ("window_size", "sliding_window"))
    window = next((w for w in windows if isinstance(w, int) and 0 < w < _LONGEST_WINDOW), 0)
    length = min(max(_COMPARED, window + 16), context_of_config(config) or _COMPARED)
    named = (getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos"))
    special = {i for ids in named for i in (ids if isinstance(ids, list | tuple) else [ids])}  # Llama 3: several ends
    ordinary = [i for i in range(min(int(config.vocab_size), 50_000)) if i not in special] or [0]
    picks = torch.randint(len(ordinary), (1, length), generator=torch.Generator().manual_seed(0))
    return torch.tensor(ordinary)[picks].to(device)


def relative_difference(values: Float[Tensor, "*shape"], reference: Float[Tensor, "*shape"]) -> float:
    """Return the largest absolute difference over the largest absolute reference; infinite if shapes differ or NaN."""
    if values.shape != reference.shape:
        return math.inf
    difference, scale = float((values - reference).abs().max()), float(reference.abs().max())
    return math.inf if math.isnan(difference) or math.isnan(scale) else difference / (scale or 1.0)


def _first_difference(model: Any, bridge: Any) -> str:
    """Return the path of the first module whose output is another in the bridge."""
    own, others = _outputs(model, model), _outputs(bridge, bridge.original_model)
    for path, value in own.items():
        if path in others and not relative_difference(others[path], value) <= SAME_LOGITS[dtype_of(model)]:
            return path
    return "the embedding"


def _outputs(whole: Any, modules: nn.Module) -> dict[str, Tensor]:
    """Return the first outputs of modules on some tokens, by path; of those that a bridge wraps, the wrapper's."""
    outputs: dict[str, Tensor] = {}

    def keep(path: str, _module: object, _args: object, _kwargs: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) and output else output
        if isinstance(output, Tensor):
            outputs.setdefault(plain_path(path), output)

    named = [(path, module) for path, module in modules.named_modules() if not path.endswith("_original_component")]
    hooks = [(module, partial(keep, path)) for path, module in named if path]
    tokens = ordinary_tokens(modules.config, device_of(modules))
    with torch.no_grad(), evaluating(whole), hooks_on(after=hooks):
        whole(tokens)
    return outputs


def original_module(model: nn.Module, module: nn.Module) -> nn.Module:
    """Return the module of a Hugging Face model of which a module of `wrapped(model)` wraps the copy."""
    copied: Any = _WRAPPED[model][1].original_model
    inner = getattr(module, "original_component", None)
    path = next(path for path, each in copied.named_modules() if each is inner)
    return model.get_submodule(path.replace("._original_component", ""))


# ---------------------------------------------------------------------------------------- small helpers


def whole_number(value: object, what: str, least: int | None = None, error: type[Exception] = ValueError) -> int:
    """Return a whole number of any kind (a tensor's or an array's entry too); a truth value is none.

    Raises:
        ValueError (or `error`): something else, or less than `least`.
    """
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
        if least is not None and number < least:
            raise TypeError
    except (TypeError, RuntimeError):
        allowed = "" if least is None else f", {least} or more"
        raise error(f"{what} must be a whole number{allowed}, got {value!r}") from None
    return number


LINE = 160  # characters of a whole line


class OneLine:
    """A dataclass (made with `repr=False`) that shows its fields in a line: shapes of tensors, sizes of long lists."""

    def __repr__(self) -> str:
        shown = [f.name for f in fields(self) if f.repr and not f.name.startswith("_")]  # type: ignore[arg-type]
        text = f"{type(self).__name__}({', '.join(f'{name}={brief(getattr(self, name))}' for name in shown)})"
        return text if len(text) <= LINE else text[: LINE - 4] + "...)"


def brief(value: Any) -> str:
    """Return a value in a few words."""
    if len(getattr(value, "shape", ())):
        return f"<{str(value.dtype).removeprefix('torch.')} {' x '.join(map(str, value.shape))}>"
    if isinstance(value, Mapping | tuple | list) and len(value) > 4:
        return f"<{len(value)} of them>"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
