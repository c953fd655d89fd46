"""A Hugging Face model as a TransformerLens model, compared with the original by its logits on a few tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ln_probe.hooks.model import complete_biases, complete_token_ids, same_weights
from ln_probe.loading.convert import CLASS_OF_WORLD, has_hooked_transformer, hooked_obstacle, to_bridge, to_hooked
from ln_probe.loading.provenance import UNKNOWN_HEAD, ModelSource, remember, sha256_of_state

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor, nn

    from ln_probe.loading.convert import World
    from ln_probe.loading.pretrained import Pretrained

# Largest difference of logits between the Hugging Face model and the loaded one, relative to the largest
# logit. float32: ports of the same arithmetic in another order differ by about 1e-6 (measured: up to 2.1e-6
# over 20 architectures of random weights), a wrong rotary base or mask by 1e-3 and more. float64: the rotary
# tables stay in float32 on both sides (measured: up to 1e-6). Half precision: roundings of the format (2^-8
# and 2^-11) add up on the way through the layers; measured up to 5.0e-2 and 3.6e-3 on random weights,
# 8.3e-3 and 1.0e-3 on a trained model. Only gross errors are seen there.
CONVERSION_BOUND = {"float32": 1e-5, "float64": 5e-6, "bfloat16": 1e-1, "float16": 2e-2}

# Where a difference is beyond that bound it may still be what the original itself rounds: a model with large scores
# (a Pythia-70m shape with its QKV weights times 5: 1.0e-5 in float32, where in float64 it is 1.6e-6). So the original
# is compared with itself in the next wider format. Both sides round on their own, which makes two such distances, and
# the largest of one sample of tokens can be twice that of another.
OWN_ROUNDINGS = 4.0
# A difference from here on is no rounding: the wrong rotary base or mask above.
SUSPICIOUS = {"float32": 1e-3, "float64": 5e-6, "bfloat16": 3e-1, "float16": 1e-1}
WIDER = {"float32": "float64", "bfloat16": "float32", "float16": "float32"}

PROBE_TOKENS = 48  # enough positions for a wrong rotary base, mask or position table to show
_LONGEST_PROBE = 320  # local attention with a window up to about this long is exercised beyond its window


def into_world(
    pretrained: Pretrained,
    source: ModelSource,
    world: World | None,
    *,
    hub_name: str | None = None,
    reference: torch.Tensor | None = None,
) -> nn.Module:
    """Convert or wrap, compare with the original, and record the source.

    Args:
        pretrained: the Hugging Face model; the bridge takes it over.
        world: the one asked for, or None to take the first that reproduces the original.
        hub_name: the repository's name if the model came from the hub.
        reference: the original's logits on `probe_tokens`, where `pretrained` is a copy of it; then a bridge, which
            costs no memory, comes before HookedTransformer.

    Raises:
        ValueError: the world asked for cannot hold the model, or no world reproduces its logits.
    """
    import torch

    hugging_face: Any = pretrained.model
    how: dict[str, Any] = {"dtype": getattr(torch, source.dtype), "device": next(hugging_face.parameters()).device}
    tokens, notes = probe_tokens(pretrained.config, how["device"]), list(source.notes)
    weights = same_weights(hugging_face)  # before any wrapping: the bridge changes the model that it wraps
    obstacle = hooked_obstacle(pretrained)
    if world == "hooked" and obstacle is not None:
        raise ValueError(f"{source.name} cannot be a HookedTransformer: {obstacle}. Use world='bridge'.")
    candidates: list[World] = ["hooked", "bridge"] if reference is None else ["bridge", "hooked"]
    if world is not None:
        candidates = [world]
    elif obstacle is not None:
        candidates = ["bridge"]
        if reference is None and has_hooked_transformer():  # otherwise there is nothing to explain
            notes.append(f"TransformerBridge, not HookedTransformer: {obstacle}")
    if reference is None:
        try:
            reference = logits_of(lambda ids: hugging_face(ids).logits, tokens)
        except Exception as error:
            raise ValueError(
                f"{source.name}: transformers itself cannot run this {source.architecture} in {source.dtype} on "
                f"{how['device']}: {_in_words(error)}"
            ) from error
    if not bool(reference.isfinite().all()):
        raise ValueError(
            f"{source.name}: the original's own logits are not finite in {source.dtype}: try float32 or bfloat16."
        )
    failed: dict[World, str] = {}
    for chosen in candidates:
        try:
            if chosen == "bridge":
                own = pretrained.tokenizer
                model = to_bridge(hugging_face, pretrained.architecture, own, hub_name=hub_name, **how)
            else:
                unchanged = replace(pretrained, model=same_weights(weights)) if failed else pretrained
                model = to_hooked(unchanged, hub_name=hub_name, **how)
            difference, rounding_notes = _difference(model, source.dtype, weights, tokens, reference)
            break
        except Exception as error:  # where TransformerLens fails, its other class may succeed
            failed[chosen] = _in_words(error)
            other = "not a TransformerBridge" if chosen == "bridge" else "TransformerBridge, not HookedTransformer"
            notes.append(f"{other}: {failed[chosen]}")
            if chosen == candidates[-1]:
                shown: World = "bridge" if "bridge" in failed else "hooked"
                raise ValueError(
                    f"{source.name} ({source.architecture}) could not be loaded faithfully as {CLASS_OF_WORLD[shown]} "
                    f"of TransformerLens {source.transformer_lens_version}: {failed[shown]}."
                ) from error
    notes += rounding_notes
    if source.kind == "memory":
        action = "wrapped in a bridge" if chosen == "bridge" else "converted to HookedTransformer"
        notes.insert(0, f"a Hugging Face model in memory, {action} for the measurement; {UNKNOWN_HEAD}")
    if pretrained.tokenizer is not None:
        notes += settle_tokenizer(model, pretrained.tokenizer, int(pretrained.config.vocab_size))
    # Conversion to HookedTransformer drops them; a bridge would pass an ordinary assignment on to what it wraps.
    kinds = ("eos", "bos", "pad")
    model.__dict__["special_token_ids"] = {k: getattr(pretrained.config, f"{k}_token_id", None) for k in kinds}
    model.__dict__["missing_head"] = pretrained.missing_head
    remember(model, source, world=CLASS_OF_WORLD[chosen], logits_max_difference=difference, notes=tuple(notes))
    return model


def bridged(model: Any, tokenizer: Any = None) -> nn.Module:
    """Return a TransformerBridge with the weights of a Hugging Face model, compared once with its own logits.

    Where the bridge's logits differ and TransformerLens has HookedTransformer, return that instead.

    Args:
        model: a `PreTrainedModel` with a language-model head; neither it nor its modules are changed.
        tokenizer: its tokenizer, for prompts that are texts.

    Raises:
        ValueError: quantized weights or none (meta device), an architecture that TransformerLens has no bridge for (one
            without a language-model head, for example), or a bridge whose logits are not the model's.
    """
    from ln_probe.hooks.model import check_weights, evaluating
    from ln_probe.loading.pretrained import Pretrained, isolated, supported_architectures

    check_weights(model)
    architecture, first = type(model).__name__, next(model.parameters())
    if architecture not in supported_architectures():
        raise ValueError(
            f"TransformerLens has no bridge for {architecture}: pass a model with a language-model head, such as "
            "GPT2LMHeadModel (ln_probe.loading.pretrained.supported_architectures() lists them)"
        )
    with isolated():
        copied = same_weights(model)
        complete_token_ids(copied.config)
        copied.config.architectures = [architecture]
        more = complete_biases(copied)
        copied.eval()
        copied.set_attn_implementation("eager")  # the other kernels give no attention pattern to hook
        with evaluating(model):
            reference = logits_of(lambda ids: model(ids).logits, probe_tokens(copied.config, first.device))
        source = ModelSource(
            name=str(getattr(model.config, "_name_or_path", "") or architecture),
            kind="memory",
            weights_sha256=sha256_of_state(model),
            architecture=architecture,
            dtype=str(first.dtype).removeprefix("torch."),
            notes=more,
        )
        own = Pretrained(copied, architecture, tokenizer, more)
        return into_world(own, source, None, reference=reference)


def settle_tokenizer(model: Any, original: Any, d_vocab: int) -> tuple[str, ...]:
    """Undo what TransformerLens does to a tokenizer without begin, end or padding marks.

    It invents ``<|endoftext|>`` for them, which has no id at all, or the first one beyond the embedding, so
    that every text would begin with a token that the model cannot look up.
    """
    tokenizer = model.tokenizer
    tokenizer.name_or_path = original.name_or_path  # not the temporary copy's
    ids = min(d_vocab, len(original))

    def exists(token_id: int | None) -> bool:
        return token_id is not None and token_id < ids

    if not exists(tokenizer.pad_token_id):
        stand_in = tokenizer.unk_token if exists(tokenizer.unk_token_id) else None
        tokenizer.pad_token = stand_in or tokenizer.convert_ids_to_tokens(ids - 1)
    if exists(tokenizer.bos_token_id):
        return ()
    model.cfg.default_prepend_bos = False
    return ("the tokenizer has no begin or end mark: none is put before a text by default",)


def probe_tokens(config: Any, device: torch.device) -> Int[Tensor, "batch pos"]:
    """Return seeded random ordinary token ids [1, pos], no longer than the context of a Hugging Face config."""
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


def logits_of(forward: Callable[..., Tensor], tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
    """Return the logits [batch, pos, d_vocab] on the CPU without gradients; half precision widened to float32."""
    import torch

    with torch.no_grad():
        logits = forward(tokens).detach().cpu()
    return logits if logits.dtype == torch.float64 else logits.float()


def relative_difference(values: Float[Tensor, "*shape"], reference: Float[Tensor, "*shape"]) -> float:
    """Return the largest absolute difference over the largest absolute reference; infinite if shapes differ or NaN."""
    if values.shape != reference.shape:
        return float("inf")
    scale = float(reference.abs().max())
    difference = float((values - reference).abs().max())
    if difference != difference or scale != scale:
        return float("inf")
    return difference / scale if scale > 0 else difference


def own_rounding(
    model: Any, dtype: str, tokens: Int[Tensor, "batch pos"], logits: Float[Tensor, "batch pos d_vocab"]
) -> float:
    """Return how far a model's logits are from its own in the next wider format, relative to the largest.

    Returns 0 in float64, and where the unconverted `model` no longer gives those logits: then loading has changed it.
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


def _difference(
    model: Any, dtype: str, weights: Any, tokens: torch.Tensor, reference: torch.Tensor
) -> tuple[float, list[str]]:
    """Return the difference from the original's logits, and a note if it is within the original's own rounding only;
    ValueError if it is larger."""
    bound, notes = CONVERSION_BOUND[dtype], []
    difference = relative_difference(logits_of(model, tokens), reference)
    if bound < difference < SUSPICIOUS[dtype]:
        own = own_rounding(weights, dtype, tokens, reference)
        bound = max(bound, OWN_ROUNDINGS * own)
        notes.append(
            f"the loaded model's logits are {difference:.1e} of the largest off the original's, which "
            f"rounds its own by {own:.1e} in {dtype}: rounding"
        )
    if not difference <= bound:
        raise ValueError(f"its logits are {difference:.1e} of the largest off the original's (bound {bound:.0e})")
    return difference, notes


def _in_words(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
