"""A Hugging Face model brought into one of TransformerLens's worlds, with proof that it is still the same."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ln_probe.hooks.equivalence import PROCESSING_BOUND, centred, relative_difference
from ln_probe.loading import same_logits
from ln_probe.loading.provenance import ModelSource, remember
from ln_probe.loading.worlds import (
    CLASS_OF_WORLD,
    has_hooked_transformer,
    hooked_obstacle,
    process,
    to_bridge,
    to_hooked,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ln_probe.loading.pretrained import Pretrained
    from ln_probe.loading.worlds import Processing, World


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
        reference: the original's logits on `same_logits.probe_tokens`, where `pretrained` is not the original itself.

    Raises:
        ValueError: the world asked for cannot hold the model; no world reproduces its logits; or processing
            changed its log-probabilities.
    """
    tokens = same_logits.probe_tokens(pretrained.config, device)
    # Before any wrapping: the bridge changes the very model it wraps.
    original = same_logits.same_weights(cast(Any, pretrained.model))
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
        return same_logits.logits_of(lambda ids: hugging_face(ids).logits, tokens)
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
    bound, notes = same_logits.CONVERSION_BOUND[source.dtype], []
    try:
        if world == "hooked":
            model = to_hooked(pretrained, dtype=dtype, device=device, hub_name=hub_name, revision=source.revision)
        else:
            model = to_bridge(pretrained, dtype=dtype, device=device, hub_name=hub_name)
        difference = relative_difference(same_logits.logits_of(cast(Any, model), target.tokens), target.logits)
        if bound < difference < same_logits.SUSPICIOUS[source.dtype]:
            own = same_logits.own_rounding(target.weights, source.dtype, target.tokens, target.logits)
            bound = max(bound, same_logits.OWN_ROUNDINGS * own)
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
    raw = same_logits.logits_of(cast(Any, made.model), tokens)
    with _explained(source, processing):
        process(made.model, made.world, processing)
        processed = same_logits.logits_of(cast(Any, made.model), tokens)
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
