"""Is the loaded model the same function as the original? One comparison of logits on a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float, Int
    from torch import Tensor

# Largest difference of logits between the Hugging Face model and the loaded one, relative to the largest
# logit. float32: ports of the same arithmetic in another order differ by about 1e-6 (measured: up to 2.1e-6
# over 20 architectures of random weights), a wrong rotary base or mask by 1e-3 and more. float64: the rotary
# tables stay in float32 on both sides (measured: up to 1e-6). Half precision: roundings of the format (2^-8
# and 2^-11) add up on the way through the layers; measured up to 5.0e-2 and 3.6e-3 on random weights,
# 8.3e-3 and 1.0e-3 on a trained model. Only gross errors are seen there.
CONVERSION_BOUND = {"float32": 1e-5, "float64": 5e-6, "bfloat16": 1e-1, "float16": 2e-2}

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

    vocabulary = int(config.vocab_size)
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048
    window = getattr(config, "window_size", None) or getattr(config, "sliding_window", None) or 0
    length = PROBE_TOKENS
    if isinstance(window, int) and window > 0 and window + 16 <= _LONGEST_PROBE:
        length = max(length, window + 16)
    length = max(1, min(length, int(context)))
    # Padding, begin and end marks can change the attention mask; ordinary ids cannot.
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos")}
    ordinary = [i for i in range(min(vocabulary, 50_000)) if i not in special] or [0]
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(ordinary), (1, length), generator=generator)
    return torch.tensor(ordinary)[picks].to(device)


def logits_of(forward: Forward, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_vocab"]:
    """The logits [batch, pos, d_vocab] on the CPU without gradients; half precision widened to float32."""
    import torch

    with torch.no_grad():
        logits = forward(tokens).detach().cpu()
    return logits if logits.dtype == torch.float64 else logits.float()
