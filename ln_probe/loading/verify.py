"""A Hugging Face model as a TransformerLens model, compared with the original by its logits on a few tokens."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ln_probe.hooks.equivalence import PROCESSING_BOUND, centred, relative_difference
from ln_probe.loading.convert import (
    CLASS_OF_WORLD,
    Processing,
    has_hooked_transformer,
    hooked_obstacle,
    process,
    to_bridge,
    to_hooked,
)
from ln_probe.loading.provenance import UNKNOWN_HEAD, ModelSource, remember, sha256_of_state, transformer_lens_version

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor, nn

    from ln_probe.loading.convert import World
    from ln_probe.loading.pretrained import Pretrained


def into_world(
    pretrained: Pretrained,
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    world: World | None,
    processing: Processing,
    *,
    hub_name: str | None = None,
    reference: torch.Tensor | None = None,
) -> nn.Module:
    """Convert or wrap, compare with the original, process if asked, compare again, and record the source.

    Args:
        pretrained: the Hugging Face model; the bridge takes it over.
        source: what is known so far; world, processing, difference and notes are added here.
        device: where the model is.
        dtype: format of its weights.
        world: the one asked for, or None to take the first that reproduces the original.
        processing: changes of basis to apply.
        hub_name: the repository's name if the model came from the hub.
        reference: the original's logits on `probe_tokens`, where `pretrained` is not the original itself.

    Raises:
        ValueError: the world asked for cannot hold the model; no world reproduces its logits; or processing
            changed its log-probabilities.
    """
    tokens = probe_tokens(pretrained.config, device)
    # Before any wrapping: the bridge changes the very model it wraps.
    original = same_weights(cast(Any, pretrained.model))
    target = _Original(original, tokens, _reference(pretrained, source, tokens) if reference is None else reference)
    _check_finite(target, source)
    candidates, notes = _candidates(pretrained, source, world)
    made: _Made | None = None
    for chosen in candidates:
        made, failure, cause = _tried(pretrained, source, device, dtype, chosen, hub_name, target)
        if made is not None:
            break
        if chosen == candidates[-1]:
            raise ValueError(
                f"{source.name} ({source.architecture}) could not be loaded faithfully as {CLASS_OF_WORLD[chosen]} of "
                f"TransformerLens {source.transformer_lens_version}: {failure}. No results are "
                "better than results about another model."
            ) from cause
        notes.append(f"TransformerBridge, not HookedTransformer: {failure}")
    assert made is not None
    notes += made.notes
    if processing.names():
        notes += _processed(made, source, dtype, processing, tokens)
    if pretrained.tokenizer is not None:
        notes += _settle_tokenizer(made.model, pretrained)
    # Conversion to HookedTransformer drops them; a bridge would hand a plain assignment on to what it wraps.
    kinds = ("eos", "bos", "pad")
    made.model.__dict__["special_token_ids"] = {k: getattr(pretrained.config, f"{k}_token_id", None) for k in kinds}
    made.model.__dict__["missing_head"] = pretrained.missing_head
    remember(
        made.model,
        replace(
            source,
            world=CLASS_OF_WORLD[made.world],
            processing=processing.names(),
            logits_max_difference=made.difference,
            notes=tuple(notes),
        ),
    )
    return made.model


@dataclass(frozen=True, eq=False)
class _Original:
    """What a converted model is compared with: the same weights elsewhere, on `tokens`, and the logits they gave."""

    weights: Any
    tokens: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Made:
    """A model in one of TransformerLens's worlds, and how far its logits are off the original's."""

    model: nn.Module
    world: World
    difference: float
    notes: tuple[str, ...]


def _reference(pretrained: Pretrained, source: ModelSource, tokens: torch.Tensor) -> torch.Tensor:
    hugging_face = cast(Any, pretrained.model)
    try:
        return logits_of(lambda ids: hugging_face(ids).logits, tokens)
    except Exception as error:
        raise ValueError(
            f"{source.name}: transformers itself cannot run this {source.architecture} in {source.dtype} on "
            f"{tokens.device}: {type(error).__name__}: {error}"
        ) from error


def _check_finite(target: _Original, source: ModelSource) -> None:
    if not bool(target.logits.isfinite().all()):
        raise ValueError(
            f"{source.name}: the original's own logits are not finite in {source.dtype} on {target.tokens.numel()} "
            "ordinary tokens. Load it in float32 or bfloat16."
        )


def _candidates(
    pretrained: Pretrained, source: ModelSource, world: World | None
) -> tuple[tuple[World, ...], list[str]]:
    """The worlds to try, in order, and the notes so far."""
    obstacle = hooked_obstacle(pretrained)
    notes = list(source.notes)
    if world == "hooked" and obstacle is not None:
        raise ValueError(f"{source.name} cannot be a HookedTransformer: {obstacle}. Use world='bridge'.")
    if world is not None:
        return (world,), notes
    if obstacle is None:
        return ("hooked", "bridge"), notes
    if has_hooked_transformer():  # where there is none, there is nothing to explain
        notes.append(f"TransformerBridge, not HookedTransformer: {obstacle}")
    return ("bridge",), notes


def _tried(
    pretrained: Pretrained,
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    world: World,
    hub_name: str | None,
    target: _Original,
) -> tuple[_Made | None, str, Exception | None]:
    """The model in this world if it is still the same; else None, what is wrong, and the exception behind it."""
    bound, notes = CONVERSION_BOUND[source.dtype], []
    try:
        if world == "hooked":
            model = to_hooked(pretrained, dtype=dtype, device=device, hub_name=hub_name, revision=source.revision)
        else:
            model = to_bridge(pretrained, dtype=dtype, device=device, hub_name=hub_name)
        difference = relative_difference(logits_of(cast(Any, model), target.tokens), target.logits)
        if bound < difference < SUSPICIOUS[source.dtype]:
            own = own_rounding(target.weights, source.dtype, target.tokens, target.logits)
            bound = max(bound, OWN_ROUNDINGS * own)
            notes.append(
                f"the loaded model's logits are {difference:.1e} of the largest off the original's, which "
                f"rounds its own by {own:.1e} in {source.dtype}: rounding"
            )
    except Exception as error:  # whatever TransformerLens stumbles over, another world may do
        return None, _in_words(error), error
    if difference <= bound:
        return _Made(model, world, difference, tuple(notes)), "", None
    return None, f"its logits are {difference:.1e} of the largest off the original's (bound {bound:.0e})", None


def _in_words(error: Exception) -> str:
    """An exception; one without a text (a bare assert) by where it was raised."""
    text = " ".join(str(error).split())[:300]
    if text:
        return f"{type(error).__name__}: {text}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}, line {last.lineno} ({last.line})"


def _processed(
    made: _Made, source: ModelSource, dtype: torch.dtype, processing: Processing, tokens: torch.Tensor
) -> list[str]:
    """Change the basis, compare the model with what it was, and say what was done."""
    _check_centring(made.model, source, processing)
    raw = logits_of(cast(Any, made.model), tokens)
    with _explained(source, processing):
        process(made.model, made.world, processing)
        processed = logits_of(cast(Any, made.model), tokens)
    change = relative_difference(centred(processed), centred(raw))
    allowed = PROCESSING_BOUND[dtype]
    done = ", ".join(processing.names())
    if not change <= allowed:
        raise ValueError(
            f"{source.name}: after {done} the model is no longer the same: "
            f"its logits (less their mean) changed by {change:.1e} of the largest (bound {allowed:.0e}) "
            f"in TransformerLens {source.transformer_lens_version}. Load it without (a known cause: the "
            "square input matrix of an MLP as wide as the residual stream is folded the wrong way round)."
        )
    nothing = [f"{done} changed nothing: not done for this architecture"] if change == 0 else []
    return [*nothing, f"log-probabilities before and after {done} agree to {change:.1e}"]


def _settle_tokenizer(model: Any, pretrained: Pretrained) -> tuple[str, ...]:
    """Undo what TransformerLens does to a tokenizer without begin, end or padding marks.

    It invents ``<|endoftext|>`` for them, which has no id at all, or the first one beyond the embedding, so
    that every text would begin with a token that the model cannot look up.
    """
    tokenizer = model.tokenizer
    tokenizer.name_or_path = pretrained.tokenizer.name_or_path  # not the temporary copy's
    ids = min(int(pretrained.config.vocab_size), len(pretrained.tokenizer))

    def exists(token_id: int | None) -> bool:
        return token_id is not None and token_id < ids

    if not exists(tokenizer.pad_token_id):
        stand_in = tokenizer.unk_token if exists(tokenizer.unk_token_id) else None
        tokenizer.pad_token = stand_in or tokenizer.convert_ids_to_tokens(ids - 1)
    if exists(tokenizer.bos_token_id):
        return ()
    model.cfg.default_prepend_bos = False
    return ("the tokenizer has no begin or end mark of its own: none is put before a text by default",)


def _check_centring(model: nn.Module, source: ModelSource, processing: Processing) -> None:
    # TransformerLens skips it without a word, and the record would claim what was not done.
    norm = getattr(getattr(model, "cfg", None), "normalization_type", None)
    if processing.center_writing_weights and norm not in ("LN", "LNPre"):
        raise ValueError(
            f"{source.name}: center_writing_weights is for LayerNorm, which does not see the mean; the norm "
            f"of this {source.architecture} is {norm!r}, and centring would change the model. Leave it out."
        )


@contextmanager
def _explained(source: ModelSource, processing: Processing) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{source.name}: TransformerLens {source.transformer_lens_version} cannot do "
            f"{', '.join(processing.names())} on a {source.architecture}: {type(error).__name__}: {error}"
        ) from error


# Largest difference of logits between the Hugging Face model and the loaded one, relative to the largest
# logit. float32: ports of the same arithmetic in another order differ by about 1e-6 (measured: up to 2.1e-6
# over 20 architectures of random weights), a wrong rotary base or mask by 1e-3 and more. float64: the rotary
# tables stay in float32 on both sides (measured: up to 1e-6). Half precision: roundings of the format (2^-8
# and 2^-11) add up on the way through the layers; measured up to 5.0e-2 and 3.6e-3 on random weights,
# 8.3e-3 and 1.0e-3 on a trained model. Only gross errors are seen there.
CONVERSION_BOUND = {"float32": 1e-5, "float64": 5e-6, "bfloat16": 1e-1, "float16": 2e-2}

# Where a difference is beyond that bound it may still be what the original itself rounds: a model with large scores
# (a Pythia-70m shape with its QKV weights times 5: 1.0e-5 in float32, where in float64 it is 1.6e-6). So it is asked
# how far the original is from itself in the next wider format. Both sides round on their own, which makes two such
# distances, and the largest of one sample of tokens can be twice that of another.
OWN_ROUNDINGS = 4.0
# From here on a difference is no rounding, whoever rounds: the wrong rotary base or mask above.
SUSPICIOUS = {"float32": 1e-3, "float64": 5e-6, "bfloat16": 3e-1, "float16": 1e-1}
WIDER = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}

PROBE_TOKENS = 48  # enough positions for a wrong rotary base, mask or position table to show
_LONGEST_PROBE = 320  # local attention with a window up to about this long is exercised beyond its window

Forward = Callable[["Int[Tensor, 'batch pos']"], "Float[Tensor, 'batch pos d_vocab']"]


def probe_tokens(config: Any, device: torch.device) -> Int[Tensor, "batch pos"]:
    """A seeded random sequence [1, pos] of ordinary token ids, no longer than the context.

    Args:
        config: the Hugging Face config, for the vocabulary, the context and the window of local attention.
        device: where the tokens go.
    """
    import torch

    from ln_probe.hooks.model import context_of_config

    vocabulary = int(config.vocab_size)
    window = getattr(config, "window_size", None) or getattr(config, "sliding_window", None) or 0
    length = PROBE_TOKENS
    if isinstance(window, int) and window > 0 and window + 16 <= _LONGEST_PROBE:
        length = max(length, window + 16)
    length = min(length, context_of_config(config) or length)
    # Padding, begin and end marks can change the attention mask; ordinary ids cannot.
    named = (getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos"))
    special = {i for ids in named for i in (ids if isinstance(ids, list | tuple) else [ids])}  # Llama 3: several ends
    ordinary = [i for i in range(min(vocabulary, 50_000)) if i not in special] or [0]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ordinary), (1, length), generator=generator)
    return torch.tensor(ordinary)[picks].to(device)


def same_weights(model: nn.Module) -> Any:
    """A copy of a model's structure around the very same parameters and buffers: it costs next to no memory.

    What is done to the copy's modules (wrapping, hooks, attention kernels) is not done to the model.
    """
    shared = {id(t): t for t in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, dict(shared))


def own_rounding(
    model: Any, dtype: str, tokens: Int[Tensor, "batch pos"], logits: Float[Tensor, "batch pos d_vocab"]
) -> float:
    """How far a model's logits are from its own in the next wider format, relative to the largest.

    0 in float64, and where the model no longer gives those logits: loading has changed its weights, which no rounding
    excuses.

    Args:
        model: the Hugging Face model as it is; a wider copy is made of it, and goes.
        dtype: its format.
        tokens, logits: what `logits_of` gave for it.
    """
    import torch

    if dtype not in WIDER:
        return 0.0
    again = logits_of(lambda ids: model(ids).logits, tokens)
    if not relative_difference(again, logits) <= CONVERSION_BOUND[dtype]:
        return 0.0
    wider = copy.deepcopy(model).to(getattr(torch, WIDER[dtype]))
    exact = logits_of(lambda ids: wider(ids).logits, tokens)
    return relative_difference(logits.to(exact.dtype), exact)


def logits_of(forward: Forward, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits [batch, pos, d_vocab] on the CPU without gradients; half precision widened to float32."""
    import torch

    with torch.no_grad():
        logits = forward(tokens).detach().cpu()
    return logits if logits.dtype == torch.float64 else logits.float()


def is_hugging_face(model: object) -> bool:
    """Whether this is a plain Hugging Face model; imports nothing."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def bridged(model: Any, tokenizer: Any = None) -> nn.Module:
    """A TransformerBridge with the weights of a Hugging Face model, compared once with its own logits; a
    HookedTransformer where the bridge is not the model and TransformerLens has that class.

    Args:
        model: a `PreTrainedModel` with a language-model head; neither it nor its modules are changed.
        tokenizer: its tokenizer, for prompts that are texts.

    Raises:
        ValueError: quantized weights or none (meta device), no language-model head, an architecture that
            TransformerLens has no bridge for, or a bridge whose logits are not the model's.
    """
    import torch

    from ln_probe.hooks.model import check_weights, evaluating
    from ln_probe.loading.pretrained import (
        Pretrained,
        complete_biases,
        complete_token_ids,
        offline,
        own_random_numbers,
        quiet,
        supported_architectures,
    )

    check_weights(model)
    architecture, first = type(model).__name__, next(model.parameters())
    if architecture not in supported_architectures():
        raise ValueError(_unsupported(architecture))
    dtype = str(first.dtype).removeprefix("torch.")

    notes: list[str] = []

    def prepared() -> Any:
        notes.clear()
        copied = same_weights(model)
        complete_token_ids(copied.config)
        copied.config.architectures = [architecture]
        notes.extend(complete_biases(copied))
        copied.eval()
        copied.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
        return copied

    with quiet(), offline(), own_random_numbers():
        own = prepared()
        with evaluating(model):
            tokens = probe_tokens(own.config, first.device)
            with torch.no_grad():
                reference = logits_of(lambda ids: model(ids).logits, tokens)
        source = ModelSource(
            name=str(getattr(model.config, "_name_or_path", "") or architecture),
            kind="memory",
            revision=None,
            commit=None,
            weights_sha256=sha256_of_state(model),
            architecture=architecture,
            world="",
            dtype=dtype,
            transformer_lens_version=transformer_lens_version(),
            notes=(f"a Hugging Face model in memory, wrapped in a bridge for the measurement; {UNKNOWN_HEAD}", *notes),
        )
        how: dict[str, Any] = {
            "device": first.device,
            "dtype": first.dtype,
            "processing": Processing(),
            "reference": reference,
        }
        try:
            return into_world(Pretrained(own, architecture, tokenizer, ()), source, world="bridge", **how)
        except ValueError as error:
            again = Pretrained(prepared(), architecture, tokenizer, ())
            if hooked_obstacle(again) is not None:
                raise
            first_note = source.notes[0].replace("wrapped in a bridge", "converted to HookedTransformer")
            source = replace(source, notes=(first_note, *source.notes[1:], f"not a TransformerBridge: {error}"))
            try:
                return into_world(again, source, world="hooked", **how)
            except ValueError:
                raise error from error.__cause__


def _unsupported(architecture: str) -> str:
    from ln_probe.loading.pretrained import supported_architectures

    stem = architecture.removesuffix("Model")
    headed = [name for name in supported_architectures() if name.startswith(stem) and stem != architecture]
    if headed:
        return (
            f"{architecture} has no language-model head, which TransformerLens asks for: pass the "
            f"{' or '.join(headed)} around it"
        )
    return (
        f"TransformerLens has no bridge for {architecture}: ln_probe.loading.pretrained.supported_architectures() "
        "lists those it has"
    )
