"""Is the loaded model the same function as the original? One comparison of logits on a few tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor, nn

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

    from ln_probe.hooks.equivalence import relative_difference

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
