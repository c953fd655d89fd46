"""What ln_probe needs of a model.

`HookedTransformer` (TransformerLens 3.9), `TransformerBridge` (3.9 and 4.x) and the laboratory's models all provide it;
no model class is imported here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any, Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ln_probe.hooks.in_memory import is_hugging_face, wrapped


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
    """Raise ValueError if a model's weights cannot be measured: quantized, without values, on several devices or on one
    that has no float64."""
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        name = f"{kind.__module__}.{kind.__name__}"
        if _QUANTIZED.search(name):
            path = next(path for path, module in model.named_modules() if type(module) is kind)
            raise ValueError(_quantized(f"{plain_path(path)} is a {name}"))
    first: dict[torch.device, str] = {}
    for path, parameter in model.named_parameters():
        if parameter.dtype not in _MEASURABLE:
            raise ValueError(_quantized(f"{plain_path(path)} holds {str(parameter.dtype).removeprefix('torch.')}"))
        if parameter.device not in first:
            first[parameter.device] = plain_path(path)
    meta = first.get(torch.device("meta"))
    if meta is not None:
        raise ValueError(
            f"the model has no weights to measure: {meta} is on the meta device (built without loading, or offloaded). "
            "Load it onto a real device, as ln_probe.load_model does"
        )
    for device, name in first.items():
        if obstacle := device_obstacle(device):
            raise ValueError(f"{name} is on {device}: {obstacle}. Move the model first: model.to('cpu')")
    if len(first) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in first.items())
        raise ValueError(
            f"the model's weights are on several devices ({where}): move it to one, model.to('{next(iter(first))}')"
        )


def plain_path(path: str) -> str:
    """Return the path of a module or parameter without the names that a bridge inserts for what it wraps."""
    return path.replace("_original_component.", "")


def device_obstacle(device: torch.device) -> str:
    """Why nothing can be measured on a device; empty if it can."""
    if device.type == "mps":
        return "Apple's MPS computes no float64, in which ln_probe measures keys, queries and norms"
    return ""


def _quantized(what: str) -> str:
    return (
        f"the model's weights are quantized ({what}): norms, keys and margins are measured on floating-point weights. "
        "Load it unquantized (float32, bfloat16, float16; a .gguf file is unpacked by ln_probe.load_model)"
    )


def world(model: object) -> str:
    """`HookedTransformer`, `TransformerBridge`, or the class name of another hooked model."""
    names = [c.__name__ for c in type(model).__mro__]
    return next((n for n in names if n in ("HookedTransformer", "TransformerBridge")), names[0])


def blocks(model: HookedModel | nn.Module) -> Sequence[nn.Module]:
    return list(getattr(model, "blocks", ()))


def attentions(model: HookedModel | nn.Module) -> dict[int, nn.Module]:
    """The attention modules of a model, by layer; blocks without attention are left out."""
    each = ((layer, getattr(block, "attn", None)) for layer, block in enumerate(blocks(model)))
    return {layer: attn for layer, attn in each if isinstance(attn, nn.Module)}


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
    training, modes = module.training, [(m, m.training) for m in module.modules()]
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


def stretches_positions(model: HookedModel | nn.Module) -> bool:
    """Whether rotary angles depend on how long the prompt is (Hugging Face's `longrope` and `dynamic`)."""
    for config in _configs(model):
        for name in ("rope_parameters", "rope_scaling"):
            if any(kind in str(getattr(config, name, "")) for kind in ("longrope", "dynamic")):
                return True
    return False


def active_dropout(model: HookedModel) -> str:
    """Name of a module whose dropout is on (training mode and a rate above 0); empty if there is none."""
    for name, module in model.named_modules():
        if not module.training:
            continue
        rates = [getattr(module, "p", 0.0)] if isinstance(module, nn.modules.dropout._DropoutNd) else []
        rates += [getattr(module, a, 0.0) for a in ("attention_dropout", "dropout")]
        if any(isinstance(r, float) and r > 0 for r in rates):
            return name
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


def whole_number(value: object, what: str, least: int | None = None, error: type[Exception] = ValueError) -> int:
    """Return a whole number of any kind (a tensor's or an array's entry too); a truth value is none.

    Raises:
        ValueError (or `error`): something else, or less than `least`.
    """
    try:
        if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            raise TypeError
        found = operator.index(value)  # type: ignore[arg-type]
        if least is not None and found < least:
            raise TypeError
    except (TypeError, RuntimeError):
        allowed = "" if least is None else f", {least} or more"
        raise error(f"{what} must be a whole number{allowed}, got {value!r}") from None
    return found


LINE = 160  # characters of a whole line
TEXT = 40  # of a text in it
FEW = 4  # entries of a tuple, list or mapping that are written out


class OneLine:
    """A dataclass (made with `repr=False`) that shows its fields in a line: shapes of tensors, sizes of lists."""

    def __repr__(self) -> str:
        shown = [f.name for f in fields(self) if f.repr and not f.name.startswith("_")]  # type: ignore[arg-type]
        text = f"{type(self).__name__}({', '.join(f'{name}={brief(getattr(self, name))}' for name in shown)})"
        return text if len(text) <= LINE else text[: LINE - 2] + "…)"


def brief(value: Any) -> str:
    """A value in a few words."""
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        return f"<{str(value.dtype).removeprefix('torch.')} {' × '.join(map(str, shape))}>"
    if shape is not None:
        return f"{value.item():.4g}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value if len(value) <= TEXT else value[: TEXT - 1] + "…")
    if isinstance(value, Mapping):
        if len(value) > FEW:
            return f"<{len(value)} entries>"
        return "{" + ", ".join(f"{key!r}: {brief(v)}" for key, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        if len(value) > FEW:
            return f"<{len(value)} of them>"
        inside = ", ".join(map(brief, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    return " ".join(repr(value).split())
